"""Cells with matrices inside heads are the published recurrences, and work in layers and models."""

import pytest
import torch
from table import CELLS, DTYPES, FUSED, make_case, needs_compiler
from torch import nn

import pararnn
from pararnn.check.contract import check_solve
from pararnn.lm import LanguageModel, LMConfig
from pararnn.tasks import TASKS
from pararnn.tasks.models import ModelConfig, TaskModel

pytestmark = needs_compiler

HEADS, WIDTH, STEPS = 2, 6, 20
NAMES = [name for name in pararnn.CELLS if name not in CELLS]


def _recurrence(name, n_0=0.0):
    """A cell, and (outputs, its own states) of its steps by kernels, by head and in float64."""
    torch.manual_seed(0)
    cell = pararnn.CELLS[name](HEADS * WIDTH, num_heads=HEADS, dtype=torch.float64)
    gates = torch.randn(3, STEPS, len(cell.gates), HEADS * WIDTH, dtype=torch.float64)
    initial = [torch.zeros(3, HEADS * WIDTH, dtype=torch.float64) for _ in cell.states]
    if name == "head-slstm":
        initial[2] += n_0
    with torch.no_grad():
        states, _ = pararnn.solve(cell, gates, initial, backend="fused")
    rows = gates.unflatten(-1, (HEADS, WIDTH)).permute(1, 2, 3, 0, 4)  # (T, G, H, B, K)
    return cell, states, rows


def _products(cell, h):
    """R h of each matrix, heads (H, B, K)."""
    matrices = [p for p in cell.parameters() if p.ndim == 3]
    return [torch.einsum("hij,hbj->hbi", matrix, h) for matrix in matrices]


def _by_channel(outputs):
    return torch.stack(outputs).permute(2, 0, 1, 3).flatten(2)


@torch.no_grad()
@pytest.mark.parametrize("n_0", [0.0, -torch.inf])
def test_slstm_is_the_papers_recurrence(n_0):
    """Cell, normaliser and stabiliser as in eqs. 8 to 17; a normaliser of 0 as its code starts."""
    cell, states, rows = _recurrence("head-slstm", n_0)
    h = c = torch.zeros_like(rows[0, 0])
    n = torch.full_like(h, float(n_0 == 0))
    m, outputs = torch.zeros_like(h), []
    for i, f, z, o in rows:
        r_i, r_f, r_z, r_o = _products(cell, h)
        i, keep = i + r_i, nn.functional.logsigmoid(f + r_f) + m
        m = i if not outputs and n_0 else torch.maximum(keep, i)
        i, f = torch.exp(i - m), torch.exp(keep - m)
        c, n = f * c + i * torch.tanh(z + r_z), f * n + i
        h = torch.sigmoid(o + r_o) * c / n
        outputs.append(h)
    torch.testing.assert_close(states[0], _by_channel(outputs), rtol=1e-12, atol=1e-13)


@torch.no_grad()
def test_block_gru_is_dreamers():
    cell, states, rows = _recurrence("block-gru")
    h, outputs = torch.zeros_like(rows[0, 0]), []
    for inputs in rows:
        reset, candidate, update = (x + r for x, r in zip(inputs, _products(cell, h), strict=True))
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        update = torch.sigmoid(update - 1)
        h = update * candidate + (1 - update) * h
        outputs.append(h)
    torch.testing.assert_close(states, _by_channel(outputs), rtol=1e-12, atol=1e-13)


@torch.no_grad()
def test_a_gru_may_reset_before_the_product():
    cell, states, rows = _recurrence("head-gru-reset-first")
    h, outputs = torch.zeros_like(rows[0, 0]), []
    for z, r, n in rows:
        r_z, r_r, _ = _products(cell, h)
        z, r = torch.sigmoid(z + r_z), torch.sigmoid(r + r_r)
        n = torch.tanh(n + _products(cell, r * h)[2])
        h = (1 - z) * n + z * h
        outputs.append(h)
    torch.testing.assert_close(states, _by_channel(outputs), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
def test_cells_obey_the_contract(name):
    """In float64, and in another dtype in turn."""
    others = DTYPES[1:]
    for dtype, variant in (
        (torch.float64, "resets"),
        (others[NAMES.index(name) % 3], "packed"),
        (others[NAMES.index(name) % 3], "reverse"),
    ):
        case = make_case(pararnn.CELLS[name], dtype, 37, variant, channels=24, num_heads=3)
        pair = dict(zip(("solver", "backend"), FUSED, strict=True))
        result = check_solve(case.cell, case.gates, case.initial, **pair, **case.options)
        assert result.passed, result


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


@pytest.mark.parametrize("name", NAMES)
def test_tasks_take_them(name):
    task = TASKS["keep-nth"].at(12)
    model = TaskModel(task, ModelConfig(mixer=name, width=8, heads=2)).double()
    out = model(task.draw(2, torch.Generator().manual_seed(0)).inputs)
    assert out.shape == (2, 12, task.classes)
