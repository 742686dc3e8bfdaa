"""Steps of vectors with norms and softmaxes, on a GPU: a block runs a head."""

import pytest
import torch
from norm_cells import CELLS, NormGRU, NormLSTM
from table import FUSED, make_case
from test_norms import VARIANTS, assert_same, test_kernels_obey_the_contract  # noqa: F401

import pararnn


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cell_class", CELLS)
def test_kernels_do_what_the_loop_does(cell_class, variant):
    for length in (0, 1, 17, 50):
        sizes = {"channels": 20, "device": "cuda", "batch": 3}
        assert_same(make_case(cell_class, torch.float64, length, variant, **sizes))


def test_the_largest_head_that_fits_and_the_first_that_does_not():
    assert_same(make_case(NormGRU, torch.float32, 20, "initial", channels=128, device="cuda"))
    with pytest.raises(pararnn.EngineError, match=r"shared memory|registers"):
        assert_same(make_case(NormLSTM, torch.float32, 5, channels=1024, device="cuda"))


def test_auto_takes_the_kernels(device):
    layer = pararnn.ParaRNN(NormLSTM, 8, 64, device=device)
    out, _ = layer(torch.randn(4, 30, 8, device=device))
    out.square().mean().backward()
    assert layer.layers[0].choice.pair == FUSED
