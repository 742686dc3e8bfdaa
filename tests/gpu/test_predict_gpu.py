"""`explain(layer, x, predict=True)` on a GPU."""

import copy

import pytest
import torch

import pararnn
from pararnn import zoo

FUSED = {("sequential", "fused"), ("newton", "fused")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cell", [pararnn.GRUCell, pararnn.LEMCell], ids=lambda c: c.__name__)
def test_a_layer_is_predicted_as_on_a_cpu(cell, dtype, device):
    torch.manual_seed(0)
    layer = pararnn.ParaRNN(cell, 8, 64)
    x = torch.randn(2, 4096, 8)
    expected = pararnn.explain(layer, x, predict=True, backend="torch").prediction
    layer, x = copy.deepcopy(layer).to(device, dtype), x.to(device, dtype)
    found = pararnn.explain(layer, x, predict=True).prediction
    assert found.exponent == pytest.approx(expected.exponent, abs=0.02)
    assert abs(found.sweeps - expected.sweeps) <= 1
    assert found.converges
    assert set(found.times) == FUSED
    assert all(0 < ms < 1e4 for ms in found.times.values())


def test_a_drop_in_and_a_matrix_cell(device):
    torch.manual_seed(0)
    layer = pararnn.LSTM(8, 32, batch_first=True, device=device)
    found = pararnn.explain(layer, torch.randn(2, 1024, 8, device=device), predict=True).prediction
    assert found.pair == ("sequential", "fused")
    assert found.exponent < 0
    cell = zoo.M2RNNCell(32, num_heads=2, K=16, device=device)
    gates = torch.randn(2, 512, 2, cell.head_sizes.width, device=device)
    with torch.no_grad():
        found = pararnn.explain(cell, gates, predict=True).prediction
    assert found.sweeps >= 1
    assert not found.backward
