"""Steps of vectors with norms and softmaxes, on a GPU: a block runs a head."""

import pytest
import torch
from norm_cells import CELLS, NormGRU, NormLSTM
from table import FUSED, dtype_name, make_case
from test_norms import assert_same

import pararnn


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("cell_class", CELLS)
def test_kernels_do_what_the_loop_does(cell_class, dtype):
    variants = ("plain", "initial", "resets", "packed", "reverse")
    for turn, variant in enumerate(variants):
        channels = (16, 20, 33, 64, 8)[turn]
        for length in (0, 1, 17, 50):
            assert_same(make_case(cell_class, dtype, length, variant, channels=channels,
                                  device="cuda", batch=3))  # fmt: skip


def test_the_largest_head_that_fits_and_the_first_that_does_not():
    assert_same(make_case(NormGRU, torch.float32, 20, "initial", channels=128, device="cuda"))
    with pytest.raises(pararnn.EngineError, match=r"shared memory|registers"):
        assert_same(make_case(NormLSTM, torch.float32, 5, channels=1024, device="cuda"))


def test_auto_takes_the_kernels(device):
    layer = pararnn.ParaRNN(NormLSTM, 8, 64, device=device)
    out, _ = layer(torch.randn(4, 30, 8, device=device))
    out.square().mean().backward()
    assert layer.layers[0].choice.pair == FUSED
