"""Kernels on a CPU: layouts, tiles, threads, and random cells against the loop, by both solvers."""

from functools import cache

import pytest
import torch
from call_results import with_gradients
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_cells import random_cell, recipes
from table import (
    DTYPES,
    ELEMENTWISE,
    FUSED,
    NEWTON_FUSED,
    PLAIN,
    Sum,
    check_case,
    dtype_name,
    gate_layouts,
    make_case,
    needs_compiler,
)
from torch.utils._pytree import tree_leaves

import pararnn
from pararnn.check.contract import check_solve
from pararnn.codegen import compiler
from pararnn.engines.fused import host

pytestmark = needs_compiler

HOW = {"solver": FUSED[0], "backend": FUSED[1]}
LOOP = {"solver": PLAIN[0], "backend": PLAIN[1]}


@pytest.fixture(params=[FUSED, NEWTON_FUSED], ids="-".join)
def pair_options(request):
    """Both solvers; Newton's in three segments."""
    with pararnn.using(segments=3, burn_in=2):
        yield dict(zip(("solver", "backend"), request.param, strict=True))


def _outputs(case, gates, pair_options):
    return tree_leaves(
        pararnn.solve(case.cell, gates, case.initial, **case.options, **pair_options)
    )


def _run(case, pair_options):
    """Outputs and gradients of gates, initial states and parameters."""
    gates = case.gates.detach().clone().requires_grad_()
    leaves = [gates, *case.cell.parameters()]
    return with_gradients(_outputs(case, gates, pair_options), leaves)


@pytest.mark.parametrize("channels", [1, 15, 16, 17, 63, 130, 300, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=dtype_name)
@pytest.mark.one_in(5)
def test_any_number_of_channels(pair_options, channels, dtype):
    case = make_case(pararnn.LSTMCell, dtype, 9, "resets", batch=3, channels=channels)
    check_case(case, **pair_options)


@pytest.mark.parametrize("variant", ["plain", "packed", "reverse"])
@pytest.mark.parametrize("openmp", [True, False], ids=["openmp", "own threads"])
@pytest.mark.one_in(5)
def test_bits_do_not_depend_on_threads(pair_options, variant, openmp, monkeypatch):
    if not openmp:
        monkeypatch.setattr(host, "openmp", lambda: 0)
    case = make_case(pararnn.GRUCell, torch.float32, 301, variant, batch=7, channels=331)
    results = []
    for count in (1, 2, 5, 2):
        torch.set_num_threads(count)
        results.append(_run(case, pair_options))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_long_sums_stay_exact():
    cell, length = Sum(1), 2**24 + 2**20
    states, _ = pararnn.solve(cell, torch.zeros(1, length, 1, 1), **HOW)
    states.sum().backward()
    assert cell.a.grad.item() == length


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("width", [2, 16, 40])
@pytest.mark.one_in(5)
def test_gradients_keep_the_layout_of_the_gates(pair_options, heads, width):
    cell = pararnn.LSTMCell(heads * width, num_heads=heads, dtype=torch.float64)
    by_head = torch.randn(heads, 2, 30, 3, width, dtype=torch.float64).permute(1, 2, 3, 0, 4)
    for name, gates in gate_layouts(by_head).items():
        leaf = gates.detach().requires_grad_()
        (h, _), _ = pararnn.solve(cell, leaf, **pair_options)
        (grad,) = torch.autograd.grad(h.square().sum(), leaf)
        (loop, _), _ = pararnn.solve(cell, leaf, **LOOP)
        (reference,) = torch.autograd.grad(loop.square().sum(), leaf)
        assert torch.allclose(h, loop, atol=1e-13), name
        assert torch.allclose(grad, reference, atol=1e-12), name
        if name != "expanded":
            assert grad.stride() == gates.stride(), name


@pytest.mark.parametrize("ends", [[0, 2, 9, 10, 30], [0, 2, 2, 10, 30]], ids=["steps", "no step"])
def test_initial_states_may_have_any_strides(pair_options, ends):
    """Also where a sequence may have no step, so that its gradients precede the kernel."""
    cell = pararnn.LSTMCell(8, dtype=torch.float64)
    gates = torch.randn(1, 30, 3, 8, dtype=torch.float64)
    grads = []
    for options, by_channel in ((LOOP, False), (pair_options, True)):
        torch.manual_seed(1)
        initial = [torch.randn(4, 8, dtype=torch.float64) for _ in cell.states]
        if by_channel:
            initial = [h.mT.contiguous().mT for h in initial]
        leaves = [h.requires_grad_() for h in initial]
        (h, c), _ = pararnn.solve(cell, gates, tuple(leaves), cu_seqlens=ends, **options)
        grads.append(torch.autograd.grad((h * c).cos().sum(), leaves))
    for own, reference in zip(*grads, strict=True):
        assert torch.allclose(own, reference, atol=1e-12)


@pytest.mark.thorough
def test_all_half_width_numbers_pass_through():
    class Copy(pararnn.Cell):
        states = ("h",)
        gates = ("x",)

        def step(self, state, gate, param):
            return gate.x + 0.0 * state.h.clamp(-1, 1)

    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        gates = bits.view(dtype)
        states, _ = pararnn.solve(Copy(len(bits)), gates[None, None, None], **HOW)
        assert torch.equal(states[0, 0].isnan(), gates.isnan())
        assert torch.equal(states[0, 0][~gates.isnan()], gates[~gates.isnan()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
def test_rounding_to_half_width_is_pytorchs(dtype):
    class FromField(pararnn.Cell):
        states = ("h",)
        gates = ("x",)
        fields = ("wide",)

        def step(self, state, gate, param):
            return gate.wide + 0.0 * gate.x

    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    wide = torch.cat(
        [random.view(torch.float32), halves, halves * (1 + 2**-9), halves * (1 + 2**-12)]
    )
    # Ties, and their neighbours.
    middle = torch.cat([(halves[:-1] + halves[1:]) / 2, torch.tensor([65519.9, 65520.0, 1e-8])])
    wide = torch.cat([wide, middle, middle.nextafter(torch.tensor(float("inf")))])
    gates = torch.zeros(1, 1, 1, len(wide), dtype=dtype)
    states, _ = pararnn.solve(FromField(len(wide)), gates, fields={"wide": wide[None, None]}, **HOW)
    reference, got = wide.to(dtype), states[0, 0]
    assert torch.equal(got.isnan(), reference.isnan())
    assert torch.equal(got[~got.isnan()], reference[~got.isnan()])


def test_fields_by_step_by_channel_and_constant(pair_options):
    case = make_case(pararnn.LRCCell, torch.float64, 20, channels=5)
    for value in (0.25, torch.rand(2, 20), torch.rand(2, 20, 5).double(), torch.rand(2, 20, 1)):
        states, _ = pararnn.solve(case.cell, case.gates, fields={"dt": value}, **pair_options)
        loop, _ = pararnn.solve(case.cell, case.gates, fields={"dt": value}, **LOOP)
        assert torch.allclose(states, loop, atol=1e-13)


@cache
def _chain(count):
    """A class of its own: traced once, for both solvers."""

    class Chain(pararnn.Cell):
        states = tuple(f"h{i}" for i in range(count))
        gates = ("x",)

        def step(self, state, gate, param):
            return tuple(torch.tanh(gate.x + 0.5 * h) for h in (state[-1], *state[:-1]))

    return Chain


@pytest.mark.filterwarnings("ignore::pararnn.CellCostWarning")
@pytest.mark.one_in(3)
def test_eight_states_and_no_more(pair_options):
    eight, nine = (_chain(count)(3, dtype=torch.float64) for count in (8, 9))
    gates = torch.randn(2, 12, 1, 3, dtype=torch.float64)
    assert check_solve(eight, gates, **pair_options).passed
    with pytest.raises(pararnn.EngineError, match="has 9 states; kernels take 8"):
        pararnn.solve(nine, gates, **pair_options)
    pararnn.solve(nine, gates)  # auto has the other backend


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.one_in(13)
def test_kernels_as_shipped(name, pair_options):
    """Other tests run kernels that the compiler optimised less."""
    dtype = DTYPES[ELEMENTWISE.index(name) % len(DTYPES)]
    case = make_case(pararnn.CELLS[name], dtype, 100, "reverse", channels=37)
    check_case(case, **pair_options)
    assert not [flag for flag in compiler.flags() if flag.startswith("-O") and flag != "-O3"]


@pytest.mark.parametrize("pair", [FUSED, NEWTON_FUSED], ids=str)
@settings(max_examples=6, derandomize=True, suppress_health_check=list(HealthCheck))
@given(recipes(), st.sampled_from([torch.float64, torch.float32]), st.integers(0, 99))
@pytest.mark.thorough
def test_random_cells_obey_the_contract(pair, recipe, dtype, seed):
    counts, trees = recipe
    case = make_case(random_cell(counts, trees), dtype, 12, "resets", channels=5, seed=seed)
    case = case._replace(gates=case.gates.clamp(-1, 1))
    with pararnn.using(segments=3, burn_in=2):
        check_case(case, solver=pair[0], backend=pair[1])
