"""Cells of the zoo that no other table has, by all pairs that take them on a GPU."""

import pytest
import torch
from table import (
    ALL_PAIRS,
    CELLS,
    DTYPES,
    FUSED,
    NEWTON_FUSED,
    PLAIN,
    broken,
    dtype_name,
    make_case,
    with_checks,
)

import pararnn
from pararnn import zoo
from pararnn.engines.table import why_never

F64, F32, BF16, F16 = DTYPES
TURNS = {
    F64: ((3, "initial"), (60, "reverse")),
    F32: ((40, "packed"),),
    BF16: ((60, "reverse"),),
    F16: ((40, "packed"),),
}
"""Lengths and variants by dtype: each pair of the two compiles kernels of its own."""


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", [name for name in zoo.CELLS if name not in CELLS])
def test_cells_obey_the_contract(name, dtype):
    for length, variant in TURNS[dtype]:
        case = make_case(
            zoo.CELLS[name], dtype, length, variant, channels=32, num_heads=2, device="cuda"
        )
        program, device = pararnn.program_of(case.cell), torch.device("cuda")
        pairs = [pair for pair in ALL_PAIRS if why_never(program, pair, device) is None]
        if name == "lif":  # whose jumps Newton in PyTorch may leave to the loop, with a warning
            pairs = [pair for pair in pairs if pair in (PLAIN, FUSED, NEWTON_FUSED)]
        assert not broken(with_checks(case, pairs, segments=5, burn_in=8)), variant
