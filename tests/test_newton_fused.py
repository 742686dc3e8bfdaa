"""(newton, fused) on a CPU: time in segments, and still the loop's result, whatever the weights."""

import math
from functools import partial

import pytest
import torch
from oracle import failures
from table import NEWTON_FUSED, check_case, dtype_name, make_case, needs_compiler, with_latches

import pararnn
from pararnn.engines.fused.elementwise_cpu import plan_segments

pytestmark = needs_compiler

HOW = {"solver": NEWTON_FUSED[0], "backend": NEWTON_FUSED[1]}
LOOP = {"solver": "sequential", "backend": "fused"}


def cut(segments, burn_in=16):
    """Time in so many segments."""
    return pararnn.using(segments=segments, burn_in=burn_in)


_check = partial(check_case, **HOW)


@pytest.mark.parametrize("segments", [2, 7, 64, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.thorough
def test_any_number_of_segments(segments, dtype):
    for channels, variant in ((1, "packed"), (33, "resets"), (130, "reverse")):
        with cut(segments):
            case = make_case(pararnn.LSTMCell, dtype, 4111, variant, channels=channels)
            assert not failures(case, "cpu", **HOW), (channels, variant)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.one_in(2)
def test_slow_gates(dtype):
    for bias in (-2.0, -4.0, -6.0):
        case = make_case(pararnn.GRUCell, dtype, 2000, channels=40)
        case.gates[:, :, 0] += bias
        for segments in (4, 32):
            with cut(segments):
                assert not failures(case, "cpu", **HOW), (bias, segments)


def test_latches_are_mended_and_counted():
    case = make_case(pararnn.GRUCell, torch.float32, 600, "initial", channels=320)
    with cut(8, 48):
        result = _check(with_latches(case, 0.05, 30))
    # A guess, from its ends, for the Jacobians, and one update that is exact.
    assert result.sweeps == 4
    assert 0 < result.mended < 2 * 320 / 4


def test_cells_that_forget_take_one_sweep():
    case = make_case(pararnn.GRUCell, torch.float32, 600, channels=64)
    with cut(8, 64):
        result = _check(case)
    assert (result.sweeps, result.mended) == (1, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_non_finite_inputs(value):
    case = make_case(pararnn.LSTMCell, torch.float32, 300, "resets", channels=5)
    case.gates[0, 140, 0, 2] = value
    case.gates[1, 250, 1, 3] = value
    runs = []
    for options in (HOW, LOOP):
        gates = case.gates.clone().requires_grad_()
        with cut(6):
            (h, c), final = pararnn.solve(case.cell, gates, case.initial, **case.options, **options)
        (grad,) = torch.autograd.grad(h.sum() + c.sum(), gates)
        runs.append((h, c, *final, grad))
    for mine, loop in zip(*runs, strict=True):
        assert torch.equal(mine.isnan(), loop.isnan())
        assert torch.equal(mine.isinf(), loop.isinf())
        finite = loop.isfinite()
        assert torch.allclose(mine[finite], loop[finite], atol=2e-5, rtol=2e-5)


def test_products_that_overflow():
    class Gain(pararnn.Cell):
        states = ("h",)
        gates = ("gain", "x")

        def step(self, state, gate, param):
            return gate.gain * state.h + gate.x

    cell = Gain(3)
    gates = torch.randn(2, 400, 2, 3)
    gates[:, 100:180, 0] *= 1e4
    gates[:, 150, 0] = 0.0
    gates[:, 180:, 0].clamp_(-0.9, 0.9)
    runs = []
    for options in (HOW, LOOP):
        leaf = gates.clone().requires_grad_()
        with cut(5, 0):
            states, _ = pararnn.solve(cell, leaf, **options)
        runs.append((states, *torch.autograd.grad(states[:, 181:].sum(), leaf)))
    for mine, loop in zip(*runs, strict=True):
        assert torch.equal(mine.isfinite(), loop.isfinite())
        finite = loop.isfinite()
        assert torch.allclose(mine[finite], loop[finite], rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_long_sequences_with_ragged_resets():
    case = make_case(pararnn.GRUCell, torch.float32, 65533, "initial", channels=4)
    case.options["reset"] = torch.rand(2, 65533) < torch.tensor([[1e-2], [2e-4]])
    assert not failures(case, "cpu", **HOW)


def test_time_is_cut_by_sizes_only():
    cuts = []
    for count in (1, 2, 64):
        torch.set_num_threads(count)
        sizes = [(1, 65536, 8), (1, 2048, 64), (4, 300, 70), (0, 5, 3), (2, 0, 3)]
        cuts.append([plan_segments(size, torch.float32) for size in sizes])
    assert cuts[0] == cuts[1] == cuts[2]
    assert [split.segments for split in cuts[0]] == [64, 8, 1, 1, 1]
    for split, (_, steps, _) in zip(cuts[0], sizes, strict=True):
        assert split.segments * split.size >= steps


def test_auto_splits_time_where_threads_would_idle():
    for count, size, solver in (
        (1, (1, 2048, 64), "sequential"),
        (3, (1, 2048, 64), "sequential"),
        (4, (1, 2048, 64), "newton"),
        (4, (1, 1023, 64), "sequential"),
        (4, (2, 2048, 64), "sequential"),
        (8, (2, 2048, 64), "newton"),
        (8, (1, 2048, 256), "sequential"),
    ):
        torch.set_num_threads(count)
        why = pararnn.explain(pararnn.GRUCell(size[2]), size)
        assert (why.solver, why.backend) == (solver, "fused"), (count, size)
