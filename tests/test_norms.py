"""Steps of vectors with norms and softmaxes: kernels run them on the channels of a head."""

import emulated
import pytest
import torch
from call_results import as_tuple
from mixing_runs import KERNELS, LOOP, check_layouts, run_case
from norm_cells import CELLS, Attentive, NormGRU, NormLSTM
from table import (
    DTYPES,
    FUSED,
    check_case,
    dtype_name,
    make_case,
    needs_compiler,
)

import pararnn
from pararnn import Param
from pararnn.engines.arguments import LEAVES
from pararnn.engines.engine import BackwardInputs
from pararnn.engines.fused.cpu import SEQUENTIAL
from pararnn.program import program as program_module
from pararnn.program.program import HEADS, program_of
from pararnn.solve import prepare

WIDTHS = {"plain": 16, "initial": 20, "resets": 33, "packed": 64, "reverse": 8}
VARIANTS = tuple(WIDTHS)
ROUNDING = {torch.float64: 1e-11, torch.float32: 2e-4}


def assert_same(case, reads=None):
    """Hold kernels against the loop in the same dtype. reads: outputs that get a gradient."""
    dtype = case.gates.dtype
    ours, truth = (run_case(case, dtype, pair, arriving=reads) for pair in (KERNELS, LOOP))
    for value, reference in zip(ours, truth, strict=True):
        assert (value.shape, value.dtype) == (reference.shape, reference.dtype)
        scale = reference.abs().amax().clamp(min=1e-30) if reference.numel() else 1
        assert ((value - reference).abs() / scale <= ROUNDING[dtype]).all()


@needs_compiler
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cell_class", CELLS)
@pytest.mark.one_in(6)
def test_kernels_do_what_the_loop_does(cell_class, variant):
    for length in (0, 1, 16, 17, 50):
        assert_same(make_case(cell_class, torch.float64, length, variant, channels=12))


@needs_compiler
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("cell_class", CELLS)
@pytest.mark.one_in(29)
def test_kernels_obey_the_contract(cell_class, dtype, variant, device):
    """At several lengths, and a width for each variant, as another width is another program."""
    for length in (0, 1, 17, 50):
        sizes = {"channels": WIDTHS[variant], "batch": 3, "device": device}
        check_case(make_case(cell_class, dtype, length, variant, **sizes), **KERNELS)


@needs_compiler
def test_values_that_come_late_and_large():
    """A mean loss, gates that are large at the last step, and a row of which one is rare."""
    case = make_case(NormLSTM, torch.float32, 40, "initial", channels=16, batch=3)
    case.gates[:, -1] *= 1e6
    case.gates[1, 7, 0, 3] = 1e6
    check_case(case, loss_scale=1e-9, **KERNELS)


@needs_compiler
@pytest.mark.parametrize("reads", [[0], [1], [3]])
def test_gradients_of_some_outputs(reads):
    assert_same(make_case(NormLSTM, torch.float64, 35, "initial", channels=12), reads)


@needs_compiler
def test_layouts_of_gates():
    case = make_case(NormLSTM, torch.float64, 7, channels=32)
    check_layouts(case, torch.float64, LOOP, rtol=1e-10, atol=1e-10)


@needs_compiler
def test_a_layer_takes_the_kernels_and_trains():
    torch.manual_seed(0)
    layer = pararnn.ParaRNN(NormLSTM, 6, 16, batch_first=True)
    x = torch.randn(3, 20, 6, requires_grad=True)
    assert "(sequential, fused) runs" in str(pararnn.explain(layer, (3, 20, 6)))
    results = []
    for pair in (LOOP, {}):
        with pararnn.using(**pair):
            out, final = layer(x, lengths=[20, 3, 11])
        loss = out.square().mean() + final[1].mean()
        results.append([out, *torch.autograd.grad(loss, [x, *layer.parameters()])])
    for ours, truth in zip(*results, strict=True):
        torch.testing.assert_close(ours, truth, rtol=2e-4, atol=1e-6)
    assert layer.layers[0].choice.pair == FUSED


@pytest.mark.parametrize("cell_class", CELLS)
@pytest.mark.one_in(4)
def test_kernels_for_gpus_do_what_the_loop_does(cell_class, monkeypatch):
    """By the emulator, in both directions."""
    emulated.install(emulated.gpu(), monkeypatch)
    for variant in ("initial", "packed"):
        assert_same(make_case(cell_class, torch.float32, 19, variant, channels=8))


@needs_compiler
@pytest.mark.parametrize("cell_class", CELLS)
def test_gradients_without_checkpoints_are_the_same(cell_class):
    """As over ranks, which save none: the backward pass runs the forward pass once more."""
    case = make_case(cell_class, torch.float32, 40, "resets", channels=12, batch=3)
    program, call = (
        program_of(case.cell),
        prepare(case.cell, case.gates, case.initial, **case.options),
    )
    results = []
    for save_values in (True, None):
        args = call.with_options(save_values=save_values)
        states = SEQUENTIAL.forward(program, args).states
        grad_states = tuple(map(torch.ones_like, states[: program.num_states]))
        final = (None,) * program.num_states
        inputs = BackwardInputs(states, grad_states, final, [*LEAVES])
        results.append(SEQUENTIAL.backward(program, args, inputs))
    for saved, again in zip(*(grads.leaves(LEAVES) for grads in results), strict=True):
        assert saved.abs().amax() > 0
        assert torch.equal(saved, again)


class NormOfAll(NormLSTM):
    """With two heads the norm is over the channels of both."""


def test_steps_that_couple_heads_run_in_pytorch_and_say_so():
    with pytest.warns(pararnn.CellCostWarning, match="it couples heads"):
        program = program_of(NormOfAll(16, num_heads=2))
    assert program.family is None


def test_one_head_has_kernels_whatever_the_heads_of_parameters():
    assert program_of(NormLSTM(16)).family == HEADS
    assert program_of(Attentive(16, num_heads=4)).family == HEADS
    assert program_of(NormGRU(16, num_heads=4)).family == HEADS


def test_other_sizes_are_other_programs():
    small, large = (program_of(NormLSTM(size)) for size in (8, 16))
    assert small.key != large.key
    assert program_of(NormLSTM(8)) is small


def test_graphs_of_one_size_are_those_of_others(monkeypatch):
    """A second size is traced on the channels of a head alone; its program is the one that would
    be made first. Where a size has no kernels, it is traced as a first one is, and says why."""
    monkeypatch.setattr(program_module, "_BY_CLASS", {})
    first = program_of(NormLSTM(20))
    program_module._BY_CLASS.clear()
    one = program_of(NormLSTM(8))
    with monkeypatch.context() as patch:
        patch.setattr(program_module, "_trace", None)
        second = program_of(NormLSTM(20))
    assert (second.key, second.heads.key) == (first.key, first.heads.key)
    for dtype, statements in first.heads.statements.items():
        for table in ("inputs", "values", "writes", "outers"):
            assert repr(getattr(second.heads.statements[dtype], table)) == repr(
                getattr(statements, table)
            )
    assert second.heads.step.head == first.heads.step.head
    assert one.heads.step.head != first.heads.step.head
    assert second.graphs is one.graphs
    assert program_of(NormOfAll(16)).family == HEADS
    with pytest.warns(pararnn.CellCostWarning, match="it couples heads"):
        assert program_of(NormOfAll(16, num_heads=2)).family is None


@needs_compiler
def test_emitted_and_compiled_ahead():
    cell = NormLSTM(16)
    assert "backward_step" in pararnn.emitted(cell)
    pararnn.precompile(cell)


@needs_compiler
@pytest.mark.parametrize("cell_class", [NormLSTM, NormGRU])
def test_rows_of_a_group_are_independent(cell_class):
    """Of many rows, in packed and padded ones too: bits of states are those of a single row."""
    case = make_case(cell_class, torch.float32, 21, "initial", batch=37, channels=20)
    whole, final = pararnn.solve(case.cell, case.gates, case.initial, **case.options, **KERNELS)
    rows = slice(11, 12)
    fields = {name: x[rows] for name, x in case.options.get("fields", {}).items()}
    options = {"fields": fields} if fields else {}
    initial = tuple(h[rows] for h in case.initial)
    part, last = pararnn.solve(case.cell, case.gates[rows], initial, **options, **KERNELS)
    for many, one in zip(map(as_tuple, (whole, final)), map(as_tuple, (part, last)), strict=True):
        assert all(torch.equal(a[rows], b) for a, b in zip(many, one, strict=True))
    assert_same(make_case(cell_class, torch.float64, 21, "resets", batch=37, channels=20))


@needs_compiler
def test_padding_between_rows_of_a_group_adds_nothing():
    """A norm by hand of a state that is zero would be NaN: rows of padding run no step."""
    torch.manual_seed(0)
    layer = pararnn.ParaRNN(Unguarded, 3, 8, batch_first=True, dtype=torch.float64)
    x = torch.randn(9, 20, 3, dtype=torch.float64)
    results = []
    for pair in (KERNELS, LOOP):
        with pararnn.using(**pair):
            out, _ = layer(x, lengths=[20, 1, 7, 0, 20, 3, 16, 17, 2])
        results.append([out, *torch.autograd.grad(out.square().sum(), [*layer.parameters()])])
    for ours, truth in zip(*results, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-11)


class Unguarded(pararnn.Cell):
    """A product divided by its length, which only steps with inputs can have."""

    states = ("h",)
    gates = ("x",)
    params = {"R": Param("H,K,K")}

    def step(self, state, gate, param):
        x = state.h @ param.R + gate.x
        return x / x.norm(dim=-1, keepdim=True)


def test_a_steps_graph_has_nothing_of_its_gradient():
    """Both are one trace, of which the gradient writes into tensors by operations of its own."""
    graphs = program_of(NormGRU(8)).graphs[torch.float32]
    assert "aten.sub_" in graphs.vjp.text
    assert "aten.sub_" not in graphs.step.text
    assert "aten.add_" in graphs.step.text
    placeholders = [node for node in graphs.step.ops.nodes if node.op == "placeholder"]
    assert len(placeholders) == NormGRU(8).num_gates + 1 + 1 + len(NormGRU.params)
