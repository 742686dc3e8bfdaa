"""The CUDA kernels, compiled for a CPU: results, the protocol between segments, and sweeps."""

import pytest
import torch
from emulated import gpu, install
from oracle import beyond, run
from table import FUSED, NEWTON_FUSED, make_case, needs_compiler, passed, with_checks, with_latches
from test_hard_cases import assert_no_jump_is_missed, threshold_case
from test_scales import SLOW, slow_case, solve_case
from test_scan import _inputs, check_scan

import pararnn
from pararnn.engines.arguments import totals
from pararnn.program.program import program_of
from pararnn.solve import prepare
from pararnn.solve import run as run_call

pytestmark = needs_compiler

CHANNELS = 70  # two tiles, the second one with few channels
MEETINGS = {"cluster": gpu(cores=32), "grid": gpu(cores=4), "old": gpu((8, 0), cores=32)}


@pytest.fixture(params=MEETINGS)
def meeting(request, monkeypatch):
    """Install a GPU whose segments meet in shared memory, or in global memory."""
    install(MEETINGS[request.param], monkeypatch)
    return request.param


def _check(case, pairs=(NEWTON_FUSED,), segments=5, burn_in=16):
    return [*map(passed, with_checks(case, pairs, segments, burn_in))][-1]


@pytest.mark.one_in(5)
def test_both_solvers(meeting):
    case = make_case(pararnn.GRUCell, torch.float32, 300, "initial", channels=CHANNELS)
    _check(case, (FUSED, NEWTON_FUSED))


@pytest.mark.one_in(3)
def test_latches(meeting):
    case = make_case(pararnn.GRUCell, torch.float32, 600, "initial", channels=CHANNELS)
    result = _check(with_latches(case, 0.05), segments=8, burn_in=48)
    assert (result.sweeps, result.mended) == (2, 2)


@pytest.mark.thorough
def test_resets_in_half_precision(monkeypatch):
    install(MEETINGS["grid"], monkeypatch)
    case = make_case(pararnn.LSTMCell, torch.bfloat16, 411, "reverse", channels=33)
    _check(case, segments=16)


def _slow(length, bias, width=CHANNELS, **options):
    """Return a case with channels that forget slowly: each rerun's rounding moves their ends."""
    case = make_case(pararnn.GRUCell, torch.float32, length, "initial", channels=width, **options)
    case.gates[:, :, 0, :6] += bias
    return case


@pytest.mark.parametrize("bias", [-6.0, -8.0, -10.0])
@pytest.mark.thorough
def test_slow_channels_meet_soon(bias, meeting):
    result = _check(_slow(1024, bias, batch=1), segments=8, burn_in=48)
    assert result.sweeps <= 4


@pytest.mark.parametrize("bias", [-8.0, -12.0])
@pytest.mark.thorough
def test_gaps_of_slow_channels_do_not_accumulate(bias, monkeypatch):
    case = _slow(16384, bias, width=16, batch=1)
    exact, loop = (run(case, "cpu", dtype) for dtype in (torch.float64, torch.float32))
    install(MEETINGS["grid"], monkeypatch)
    solver, backend = NEWTON_FUSED
    with pararnn.using(segments=32):
        got = run(case, "cpu", torch.float32, solver=solver, backend=backend)
    assert not beyond(got, exact, loop, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gru", "lstm"])
@pytest.mark.thorough
def test_channels_that_forget_at_times_meet_soon(name, dtype, monkeypatch):
    """As in trained models: segments differ in their gain."""
    install(MEETINGS["grid"], monkeypatch)
    segments, channels = 64, 64
    case = make_case(pararnn.CELLS[name], dtype, 64 * segments, channels=channels, batch=1, seed=2)
    shift = torch.rand(segments, channels).repeat_interleave(64, 0) * torch.linspace(
        4, 14, channels
    )
    case.gates.mul_(2)[:, :, 0] += (-shift if name == "gru" else shift).to(dtype)
    with pararnn.using(segments=segments), torch.no_grad():
        args = prepare(case.cell, case.gates)
        info = run_call(program_of(case.cell), args, "newton", "fused").info
    assert totals(info)[0] <= 4


@pytest.mark.thorough
def test_slow_segments_pass_small_shifts_to_segments_that_expand(monkeypatch):
    install(MEETINGS["grid"], monkeypatch)
    case = make_case(pararnn.GRUCell, torch.bfloat16, 600, channels=16, seed=2)
    with torch.no_grad():
        for parameter in case.cell.recurrent_parameters():
            parameter.copy_(torch.randn_like(parameter) * 4)
        case.gates.mul_(3)
    _check(case, segments=8)


@pytest.mark.parametrize("scale", [2, 4, 8])
@pytest.mark.one_in(3)
def test_large_weights(scale, monkeypatch):
    install(MEETINGS["grid"], monkeypatch)
    case = make_case(pararnn.GRUCell, torch.float32, 1024, channels=CHANNELS, batch=1)
    with torch.no_grad():
        for parameter in case.cell.recurrent_parameters():
            parameter.copy_(torch.randn_like(parameter) * scale)
    _check(case, segments=8)


@pytest.mark.thorough
def test_steps_that_jump_start_from_the_returned_states(monkeypatch):
    install(MEETINGS["grid"], monkeypatch)
    cell, gates = threshold_case(4096, CHANNELS, -10.0)
    with pararnn.using("newton", "fused", segments=16):
        (h, y), _ = pararnn.solve(cell, gates)
    assert_no_jump_is_missed(h, y)


def test_a_nan_before_a_reset_hides_no_error(monkeypatch):
    install(MEETINGS["grid"], monkeypatch)
    case = make_case(pararnn.GRUCell, torch.float64, 48, channels=1, batch=1)
    options = {"cu_seqlens": torch.tensor([0, 28, 48]), "reset": torch.arange(48)[None] == 35}
    loop, _ = pararnn.solve(case.cell, case.gates, solver="sequential", backend="torch", **options)
    gates = case.gates.clone()
    gates[:, 30] = float("nan")
    with pararnn.using("newton", "fused", segments=4, burn_in=2):
        got, _ = pararnn.solve(case.cell, gates, **options)
    assert torch.allclose(got[:, :28], loop[:, :28], atol=1e-12)


@pytest.mark.parametrize("name", ["gru", "lstm"])
@pytest.mark.thorough
def test_the_scale_of_the_loss_scales_gradients(name, monkeypatch):
    install(MEETINGS["grid"], monkeypatch)
    case = slow_case(pararnn.CELLS[name], torch.bfloat16, SLOW.get(name, -4.0))
    plain, small = (solve_case(case, NEWTON_FUSED, scale)[1] for scale in (1.0, 2.0**-30))
    for one, other in zip(plain, small, strict=True):
        assert torch.equal(one.double() * 2.0**-30, other.double())


@pytest.mark.parametrize(("kind", "pair"), [("real", FUSED), (1, NEWTON_FUSED)], ids=str)
@pytest.mark.thorough
def test_scans_of_a_decay_of_one_row(kind, pair, monkeypatch):
    """`a` of (D,), the same row at every step for kernels, and of (T, 1)."""
    install(MEETINGS["grid"], monkeypatch)
    _, b, h = _inputs(kind, channels=CHANNELS, dtype=torch.float32)
    for size in ((CHANNELS,), (40, 1)):
        decay = torch.rand(size, requires_grad=True)
        check_scan((decay, b, h), solver=pair[0], backend=pair[1])


class _Sums(pararnn.Cell):
    """A term of log-sum-exp, and its factors."""

    states = ("exp", "log1p", "softplus")
    gates = ("x",)

    def step(self, state, gate, param):
        power = torch.exp(-gate.x.abs())
        return torch.exp(gate.x), torch.log1p(gate.x), torch.log1p(power)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_functions_written_out_in_the_cuda_headers(dtype, monkeypatch):
    """Accurate to some units in the last place of float32; bfloat16's rounding hides more."""
    install(MEETINGS["grid"], monkeypatch)
    special = torch.tensor([0.0, float("inf"), -float("inf"), float("nan"), -1.0, -2.0])
    small = torch.logspace(-30, 0, 2001)
    x = torch.cat([special, torch.linspace(-110, 89, 8001), small, -0.9 * small]).to(dtype)
    states, _ = pararnn.solve(
        _Sums(len(x), dtype=dtype), x[None, None, None], solver="sequential", backend="fused"
    )
    wide = x.double()
    softplus = torch.log1p(torch.exp(-wide.abs()))
    for got, exact in zip(states, (wide.exp(), wide.log1p(), softplus), strict=True):
        got = got[0, 0]
        assert torch.equal(got.isnan(), exact.isnan())
        large = exact.abs() > torch.finfo(dtype).max
        small = exact.abs() < 2.0**-120  # flushed
        error = ((got.double() - exact) / exact.abs())[~large & ~small & exact.isfinite()]
        assert error.abs().max() < (4 if dtype == torch.float32 else 0.52) * torch.finfo(dtype).eps
        assert got[small].abs().lt(2.0**-119).all()
        assert got[large].isinf().all()
