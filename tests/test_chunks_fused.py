"""Kernels over chunks, compiled for a CPU: against the loop, and the numerics contract."""

import emulated
import pytest
import torch
from chunk_cases import (
    CELLS,
    CHUNKS,
    LOOP,
    VARIANTS,
    Decays,
    VectorDecays,
    assert_alike,
    assert_close,
    error,
    exactly,
    gate_at,
    in_variant,
    make_call,
    obeys,
    queried,
    solved,
    views_of,
)
from matrix_cells import Call
from table import needs_compiler

import pararnn
from pararnn.base.numerics import FORWARD_TOLERANCE
from pararnn.codegen.chunks import why_no_chunks
from pararnn.engines.fused import chunks
from pararnn.program.affine import AffineForm
from pararnn.program.program import program_of
from pararnn.zoo import MATRIX_CELLS, GatedDeltaCell

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
SIZES = ((16, 16), (20, 12), (32, 16))


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """Run CUDA kernels on a CPU."""
    emulated.install(emulated.gpu(), monkeypatch)


@needs_compiler
@pytest.mark.parametrize("name", list(CELLS))
@pytest.mark.one_in(6)
def test_cells_meet_the_contract(name):
    """Each in one dtype; sizes that are no multiples of 16, and odd ones."""
    number = list(CELLS).index(name)
    keys, values = SIZES[number % 3]
    call = make_call(CELLS[name], dtype=DTYPES[number // 3 % 3], keys=keys, values=values)
    assert not obeys(call)


@needs_compiler
@pytest.mark.parametrize("variant", VARIANTS[1:])
@pytest.mark.parametrize("name", ["gated-delta", "rwkv7", "titans", "WithParams"])
@pytest.mark.one_in(6)
def test_variants_meet_the_contract(name, variant):
    dtype = torch.bfloat16 if name == "gated-delta" else torch.float32
    call, options = in_variant(make_call(CELLS[name], steps=50, dtype=dtype), variant)
    assert not obeys(call, **options)
