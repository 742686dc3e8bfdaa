"""The CUDA kernels, compiled for a CPU: what they compute, how segments meet, and how soon."""

import pytest
import torch
from emulated import Device
from table import FUSED, NEWTON_FUSED, make_case, needs_compiler, with_latches

import pararnn
from pararnn.contract import check_solves

pytestmark = needs_compiler

CHANNELS = 70  # two tiles, the second one with few channels
MEETINGS = {"cluster": Device(cores=32), "grid": Device(cores=4), "old": Device((8, 0), cores=32)}


@pytest.fixture(params=MEETINGS)
def meeting(request, monkeypatch):
    """Where the segments of a tile meet: in shared memory, or in global memory."""
    MEETINGS[request.param].install(monkeypatch)
    return request.param


def _checked(case, pairs=(NEWTON_FUSED,), segments=5, burn_in=16):
    with pararnn.using(segments=segments, burn_in=burn_in):
        results = check_solves(case.cell, case.gates, case.initial, pairs=pairs, **case.options)
    for result in results:
        assert result.passed, [check for check in result.checks if not check.passed]
    return results[-1]


def test_both_solvers(meeting):
    case = make_case(pararnn.GRUCell, torch.float32, 300, "initial", channels=CHANNELS)
    _checked(case, (FUSED, NEWTON_FUSED))


def test_latches(meeting):
    case = make_case(pararnn.GRUCell, torch.float32, 600, "initial", channels=CHANNELS)
    result = _checked(with_latches(case, 0.05), segments=8, burn_in=48)
    assert (result.sweeps, result.mended) == (2, 2)


def test_resets_in_half_precision(monkeypatch):
    MEETINGS["grid"].install(monkeypatch)
    case = make_case(pararnn.LSTMCell, torch.bfloat16, 411, "reverse", channels=33)
    _checked(case, segments=16)
