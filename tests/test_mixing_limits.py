"""Limits of kernels for steps that mix channels inside heads are known at the forward pass."""

import pytest
import torch
from emulated import gpu, install
from mixing_cells import HeadLSTM
from table import make_case, needs_compiler

import pararnn

pytestmark = needs_compiler
KERNELS = {"solver": "sequential", "backend": "fused"}


def test_a_backward_pass_that_does_not_fit_raises_at_the_forward_pass(monkeypatch):
    """Its operands are those of four gates; the forward pass has one."""
    install(gpu((8, 6)), monkeypatch)
    case = make_case(HeadLSTM, torch.float64, 1, channels=512, batch=1)
    with torch.no_grad():
        pararnn.solve(case.cell, case.gates, **KERNELS)
    message = "HeadLSTM with heads of 512 channels needs .* in its backward pass"
    with pytest.raises(pararnn.EngineError, match=message):
        pararnn.solve(case.cell, case.gates, **KERNELS)
