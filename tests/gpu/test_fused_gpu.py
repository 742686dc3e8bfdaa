"""(sequential, fused) on a GPU: the property table, layouts, sizes, hard inputs, random cells."""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import HOW, failures, run
from random_cells import random_cell, recipes
from table import (
    DTYPES,
    ELEMENTWISE,
    VARIANTS,
    Sum,
    check_case,
    dtype_name,
    gate_layouts,
    make_case,
)
from test_ops import GROUPS, check_ops

import pararnn

LONGEST = 65536


_check = partial(check_case, **HOW)


@pytest.mark.parametrize("length", [100, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_agrees_with_the_cpu_in_float64(name, dtype, length):
    for variant in VARIANTS:
        assert not failures(make_case(pararnn.CELLS[name], dtype, length, variant)), variant


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_long_sequences_with_ragged_resets(name, dtype):
    case = make_case(pararnn.CELLS[name], dtype, LONGEST, "resets", batch=2, channels=4)
    case.options["reset"] = torch.rand(2, LONGEST) < torch.tensor([[1e-2], [2e-4]])
    assert not failures(case)
    del case.options["reset"]
    assert not failures(case)


@pytest.mark.parametrize("channels", [1, 2, 31, 33, 63, 64, 66, 130, 1100])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_any_number_of_channels(channels, dtype):
    for batch, variant in ((1, "resets"), (1 + min(600, 40000 // channels), "initial")):
        case = make_case(pararnn.LSTMCell, dtype, 37, variant, batch=batch, channels=channels)
        assert not failures(case), batch


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("width", [1, 3, 4, 40, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=dtype_name)
def test_gradients_keep_the_layout_of_the_gates(heads, width, dtype):
    cell = pararnn.LSTMCell(heads * width, num_heads=heads, device="cuda", dtype=dtype)
    by_head = torch.randn(heads, 2, 30, 3, width, device="cuda").to(dtype).permute(1, 2, 3, 0, 4)
    copy = torch.randn(1 + by_head.numel(), device="cuda").to(dtype)[1:]
    layouts = {**gate_layouts(by_head), "unaligned": copy.view(by_head.shape)}
    for name, gates in layouts.items():
        results = {}
        for backend in ("fused", "torch"):
            leaf = gates.detach().requires_grad_()
            (h, _), _ = pararnn.solve(cell, leaf, solver="sequential", backend=backend)
            (grad,) = torch.autograd.grad(h.square().sum(), leaf)
            results[backend] = (h, grad)
        (h, grad), (h_loop, grad_loop) = results["fused"], results["torch"]
        assert grad.stride() == torch.empty_like(gates).stride(), name
        near = {"atol": 5e-2, "rtol": 5e-2} if dtype == torch.bfloat16 else {"atol": 2e-5}
        assert torch.allclose(h, h_loop, **near), name
        assert torch.allclose(grad, grad_loop, **near), name


def test_gradients_may_arrive_in_any_layout():
    case = make_case(pararnn.GRUCell, torch.float32, 50, batch=3, channels=66, device="cuda")
    gates = case.gates.requires_grad_()
    states, _ = pararnn.solve(case.cell, gates, **HOW)
    plain = torch.randn_like(states)
    (reference,) = torch.autograd.grad(states, gates, plain, retain_graph=True)
    shapes = (plain.transpose(0, 1).contiguous().transpose(0, 1), plain.mT.contiguous().mT)
    for grad in (*shapes, torch.stack([plain, plain], -1)[..., 0]):
        assert grad.stride() != plain.stride()
        assert torch.equal(
            torch.autograd.grad(states, gates, grad, retain_graph=True)[0], reference
        )
    (of_sum,) = torch.autograd.grad(states.sum(), gates, retain_graph=True)  # stride 0
    (of_ones,) = torch.autograd.grad(states, gates, torch.ones_like(states))
    assert torch.equal(of_sum, of_ones)


def test_fields_by_step_by_channel_and_constant():
    case = make_case(pararnn.LRCCell, torch.float32, 70, channels=65)
    for value in (torch.rand(2, 70), torch.rand(2, 70, 65), torch.rand(2, 70, 1)):
        case.options["fields"] = {"dt": value}
        assert not failures(case)
    gates = case.gates.cuda()
    constant, _ = pararnn.solve(case.cell.cuda(), gates, fields={"dt": 0.25}, **HOW)
    full, _ = pararnn.solve(
        case.cell, gates, fields={"dt": torch.full((2, 70), 0.25).cuda()}, **HOW
    )
    assert torch.equal(constant, full)


def test_bits_repeat_and_do_not_depend_on_neighbours():
    case = make_case(pararnn.GRUCell, torch.float32, 301, "resets", batch=70, channels=331)
    first, second = (run(case, "cuda", torch.float32) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    # One row alone runs in another variant of the kernel.
    single = make_case(pararnn.GRUCell, torch.float32, 301, "resets", batch=70, channels=331)
    options = {"reset": case.options["reset"][:1]}
    initial = tuple(h[:1] for h in case.initial)
    single = single._replace(gates=case.gates[:1], initial=initial, options=options)
    assert torch.equal(run(single, "cuda", torch.float32)["state 0"], first["state 0"][:1])


def test_sums_over_many_rows_and_steps_stay_exact():
    for rows, length in ((1, 2**24 + 2**20), (4096, 4100)):
        cell = Sum(1, device="cuda")
        states, _ = pararnn.solve(cell, torch.zeros(rows, length, 1, 1, device="cuda"), **HOW)
        states.sum().backward()
        assert cell.a.grad.item() == rows * length


def test_offsets_beyond_32_bits():
    rows, length, channels = 3, 2**19, 1024  # 4.8e9 gate entries
    cell = pararnn.ElmanCell(channels, device="cuda")
    gates = torch.empty(rows, length, 1, channels, dtype=torch.bfloat16, device="cuda")
    gates.normal_()
    assert gates.numel() > 2**30
    assert gates.numel() * gates.element_size() > 2**31
    with torch.no_grad():
        states, _ = pararnn.solve(cell, gates, **HOW)
        last, _ = pararnn.solve(cell, gates[2:], **HOW)
    assert torch.equal(states[2:], last)


def test_sequences_without_steps_keep_their_state():
    cell, start = pararnn.GRUCell(5, device="cuda"), torch.randn(4, 5, device="cuda")
    cuts = torch.tensor([0, 0, 7, 7, 9], device="cuda")
    gates = torch.randn(1, 12, 3, 5, device="cuda", requires_grad=True)
    start.requires_grad_()
    gates.data[:, 9:] = float("nan")  # padding may hold anything
    states, final = pararnn.solve(cell, gates, start, cu_seqlens=cuts, **HOW)
    assert torch.equal(final[[0, 2]], start[[0, 2]])
    assert not states[0, 9:].any()
    grads = torch.autograd.grad(final.sum(), [start, gates, *cell.parameters()])
    assert torch.equal(grads[0][[0, 2]], torch.ones(2, 5, device="cuda"))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("scale", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("name", ["gru", "lstm", "slstm"])
def test_large_recurrent_weights(name, dtype, scale):
    case = make_case(pararnn.CELLS[name], dtype, 300, channels=16, device="cuda")
    with torch.no_grad():
        for parameter in case.cell.recurrent_parameters():
            parameter.copy_(torch.randn_like(parameter) * scale)
        case.gates.mul_(3)
    _check(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_slow_gates(dtype):
    case = make_case(pararnn.GRUCell, dtype, 4000, channels=64)
    for bias in (-2.0, -4.0, -6.0):
        case.gates[:, :, 0] += bias
        assert not failures(case), bias
        case.gates[:, :, 0] -= bias


def test_saturated_gates():
    case = make_case(pararnn.LSTMCell, torch.float32, 60, channels=64)
    case.gates.mul_(200)
    assert not failures(case)
    case.gates.mul_(1e30)
    assert not failures(case)


def test_non_finite_inputs():
    case = make_case(pararnn.LSTMCell, torch.float32, 100, channels=5, device="cuda")
    case.gates[0, 40, 0, 2] = float("nan")
    case.gates[1, 50, 1, 3] = float("inf")
    (kernel, _), _ = pararnn.solve(case.cell, case.gates, **HOW)
    (loop, _), _ = pararnn.solve(case.cell, case.gates, solver="sequential", backend="torch")
    assert torch.equal(kernel.isnan(), loop.isnan())
    assert kernel.isnan().any()
    assert not kernel.isnan().all()


@settings(max_examples=15, derandomize=True, suppress_health_check=list(HealthCheck))
@given(recipes(), st.sampled_from([torch.float64, torch.float32]), st.integers(0, 99))
def test_random_cells_obey_the_contract(recipe, dtype, seed):
    cell = random_cell(*recipe)
    case = make_case(cell, dtype, 12, "resets", channels=5, seed=seed, device="cuda")
    check_case(case._replace(gates=case.gates.clamp(-1, 1)), **HOW)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: f"{names[0]}-to-{names[-1]}")
def test_ops_agree_with_torch(names, dtype):
    check_ops(names, dtype, "cuda")


def test_small_numbers_keep_their_precision():
    class Tanh(pararnn.Cell):
        states = ("h",)
        gates = ("x",)

        def step(self, state, gate, param):
            return torch.tanh(gate.x) + 0.0 * state.h

    x = torch.cat([torch.logspace(-30, 1, 5001), -torch.logspace(-30, 1, 5001)]).cuda()
    states, _ = pararnn.solve(Tanh(len(x), device="cuda"), x[None, None, None], **HOW)
    exact = torch.tanh(x.double())
    assert ((states[0, 0] - exact) / exact).abs().max() < 5e-7
