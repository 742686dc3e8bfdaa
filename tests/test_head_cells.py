"""Cells with matrices inside heads obey the contract, and work in layers and models."""

import pytest
import torch
from table import BY_HEADS, DTYPES, FUSED, check_case, make_case, needs_compiler
from torch import nn

import pararnn
from pararnn.lab.tasks import TASKS
from pararnn.lab.tasks.models import ModelConfig, TaskModel
from pararnn.lm import LanguageModel, LMConfig

pytestmark = needs_compiler

HEADS, WIDTH, STEPS = 2, 6, 20


@torch.no_grad()
def test_slstm_may_begin_with_a_normaliser_of_zero():
    """As its published code does: cell, normaliser and stabiliser of eqs. 8 to 17, from zeros."""
    torch.manual_seed(0)
    cell = pararnn.HeadSLSTMCell(HEADS * WIDTH, num_heads=HEADS, dtype=torch.float64)
    gates = torch.randn(3, STEPS, 4, HEADS * WIDTH, dtype=torch.float64)
    initial = [torch.zeros(3, HEADS * WIDTH, dtype=torch.float64) for _ in cell.states]
    initial[2] -= torch.inf
    (outputs, _, _), _ = pararnn.solve(cell, gates, initial, backend="fused")
    matrices = [torch.block_diag(*matrix) for matrix in cell.parameters()]
    h = c = n = m = torch.zeros_like(initial[0])
    for t in range(STEPS):
        i, f, z, o = (x + h @ r.mT for x, r in zip(gates[:, t].unbind(1), matrices, strict=True))
        keep = nn.functional.logsigmoid(f) + m
        m = torch.maximum(keep, i) if t else i
        i, f = torch.exp(i - m), torch.exp(keep - m)
        c, n = f * c + i * torch.tanh(z), f * n + i
        h = torch.sigmoid(o) * c / n
        assert torch.allclose(outputs[:, t], h, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", BY_HEADS)
@pytest.mark.one_in(5)
def test_cells_obey_the_contract(name):
    """In float64, and in another dtype in turn."""
    others = DTYPES[1:]
    for dtype, variant in (
        (torch.float64, "resets"),
        (others[BY_HEADS.index(name) % 3], "packed"),
        (others[BY_HEADS.index(name) % 3], "reverse"),
    ):
        case = make_case(pararnn.CELLS[name], dtype, 37, variant, channels=24, num_heads=3)
        pair = dict(zip(("solver", "backend"), FUSED, strict=True))
        check_case(case, **pair)


@pytest.mark.parametrize(("layer", "count"), [(pararnn.SLSTM, 3), (pararnn.BlockGRU, 1)])
def test_layers_of_their_own(layer, count):
    torch.manual_seed(0)
    rnn = layer(8, 12, 2, bidirectional=True, num_heads=2, dtype=torch.float64)
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    out, final = rnn(x)
    assert out.shape == (2, 9, 24)
    assert len(final) == count or final.shape == (4, 2, 12)
    assert pararnn.verify(rnn, x).passed
    assert pararnn.explain(rnn, (2, 9, 8)).backend == "fused"


@pytest.mark.parametrize("name", ["head-lstm", "head-slstm", "block-gru"])
def test_language_models_decode_with_them(name):
    """Token by token through the cache, as all at once; a step may be recorded and replayed."""
    torch.manual_seed(0)
    config = LMConfig(16, 2, vocab_size=20, cell=name, num_heads=2)
    model = LanguageModel(config).double().eval()
    assert all(block.mixer.steady for block in model.backbone.blocks)
    tokens = torch.randint(0, 20, (2, 9))
    cache, outputs = model.new_cache(), []
    with torch.no_grad():
        whole = model(tokens)
        for t in range(9):
            outputs.append(model(tokens[:, t : t + 1], cache))
    torch.testing.assert_close(torch.cat(outputs, 1), whole)


@pytest.mark.parametrize("name", BY_HEADS)
@pytest.mark.one_in(5)
def test_tasks_take_them(name):
    task = TASKS["keep-nth"].at(12)
    model = TaskModel(task, ModelConfig(mixer=name, width=8, heads=2)).double()
    out = model(task.draw(2, torch.Generator().manual_seed(0)).inputs)
    assert out.shape == (2, 12, task.classes)
