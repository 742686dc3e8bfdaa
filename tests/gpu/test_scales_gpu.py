"""Another scale of the loss changes no more than the scale of gradients, on a GPU too."""

import pytest
import torch
from table import NEWTON_FUSED, SCAN
from test_scales import BF16, F32, F64, SLOW, slow_case, solve_case

import pararnn

ROWS = [(name, F32) for name in ("gru", "lstm", "lem", "slstm")]
ROWS += [("gru", BF16), ("gru", F64), ("lstm", BF16), ("slstm", BF16)]


@pytest.mark.parametrize("pair", [NEWTON_FUSED, SCAN], ids="-".join)
@pytest.mark.parametrize(("name", "dtype"), ROWS, ids=str)
def test_the_scale_of_the_loss_scales_gradients(name, dtype, pair):
    case = slow_case(pararnn.CELLS[name], dtype, SLOW.get(name, -4.0), 2048, "cuda")
    usual = solve_case(case, pair, 1.0)[1]
    loop = solve_case(case, ("sequential", "fused"), 1.0)[1]
    for one, plain in zip(usual, loop, strict=True):
        assert (one - plain).abs().max() <= (2e-2 if dtype == BF16 else 2e-5) * plain.abs().max()
    for exponent in (-30, 30):
        grads = solve_case(case, pair, 2.0**exponent)[1]
        for one, other in zip(usual, grads, strict=True):
            assert torch.equal(one.double() * 2.0**exponent, other.double()), exponent
