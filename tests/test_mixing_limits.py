"""Limits of kernels for steps that mix channels inside heads are known at the forward pass."""

import pytest
import torch
from emulated import gpu, install
from mixing_cells import HeadLSTM, HeadSLSTM
from table import make_case, needs_compiler

import pararnn
from pararnn.codegen import mixing_cuda

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


def _wide_steps(cell_class, width):
    """Return the program and the backward pass of 8 columns on a GPU whose blocks have 99 KiB."""
    program = pararnn.program_of(cell_class(width, num_heads=1))
    variants = mixing_cuda.mixing_variants(program, torch.bfloat16, 1, width, None, (8, 6), sides=2)
    return program, variants[-1]


@pytest.mark.parametrize(("cell_class", "width"), [(HeadSLSTM, 72), (HeadSLSTM, 80)])
def test_blocks_without_room_for_helpers_are_planned_without_them(cell_class, width, monkeypatch):
    """Two slots of a whole block's step do not fit; those of single warps may."""
    program, variant = _wide_steps(cell_class, width)
    tiles = mixing_cuda.tiles_of(program, variant)
    roomy = mixing_cuda.tiles_of(program, variant._replace(shared=227 * 1024))
    monkeypatch.setattr(mixing_cuda, "_wants_helpers", lambda *_: False)
    assert tiles == mixing_cuda.tiles_of(program, variant)
    assert (tiles.helpers, tiles.slots > 0) == (0, True)
    assert roomy.helpers > 0
