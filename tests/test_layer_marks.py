"""A layer's run with marks: its output and states, and states after steps, to the bit."""

import pytest
import torch

from pararnn import RecurrentLayer
from pararnn.layers import marks
from pararnn.layers.marks import pieces, run_with_marks
from pararnn.lm.invariant import RowsRecurrentLayer
from pararnn.zoo import CELLS, MATRIX_CELLS

STEPS = (1, 4, 5, 9)


def _tuple(states):
    return (states,) if torch.is_tensor(states) else states


def _check(cell, dtype, initial, **config):
    torch.manual_seed(0)
    layer = RecurrentLayer(cell, 12, 16, num_heads=2, dtype=dtype, **config)
    layer.cell.float()
    layer.bias.data = layer.bias.data.float()
    x = torch.randn(3, 11, 12, dtype=dtype)
    fields = dict.fromkeys(type(layer.cell).fields, 0.5)
    state = None
    if initial:
        sizes = layer.state_sizes_in(None)
        state = tuple(torch.randn(3, *size) * 0.3 for size in sizes)
        state = state[0] if len(sizes) == 1 else state
    with torch.no_grad():
        output, final = layer(x, state, fields=fields)
        marked_output, marked_final, marked = run_with_marks(layer, x, state, STEPS, fields)
        torch.testing.assert_close(
            marked_output, output, rtol=0, atol=2e-2 if dtype.itemsize < 4 else 1e-5
        )
        for one, other in zip(marked_final, _tuple(final), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        for index, step in enumerate(STEPS):
            _, reference = layer(x[:, :step], state, fields=fields)
            for one, other in zip(marked, _tuple(reference), strict=True):
                assert one.dtype == torch.float32  # as they are carried, not as outputs are
                torch.testing.assert_close(one[:, index], other, rtol=1e-5, atol=1e-5)
        _, _, none = run_with_marks(layer, x, state, (), fields)
        assert [each.shape[:2] for each in none] == [(3, 0)] * len(marked)


@pytest.mark.parametrize("cell", ["gru", "lstm", "head-gru", "slstm", "gru-d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_after_steps_are_those_of_shorter_calls(cell, dtype):
    _check(CELLS[cell], dtype, dtype == torch.bfloat16)


@pytest.mark.parametrize("cell", ["m2rnn", "gated-delta", "mlstm"])
def test_matrix_states_after_steps(cell):
    _check(MATRIX_CELLS[cell], torch.float32, False)


def test_where_no_kernel_takes_wide_gates_pieces_run(monkeypatch):
    monkeypatch.setattr(marks, "why_not", lambda *pair: "it has kernels for 16 bits alone")
    calls, forward = [], RecurrentLayer.forward

    def record(self, x, *rest, **options):
        calls.append(x.shape[1])
        return forward(self, x, *rest, **options)

    monkeypatch.setattr(RecurrentLayer, "forward", record)
    _check(CELLS["gru"], torch.bfloat16, True)
    assert calls[1:6] == [1, 3, 1, 4, 2]  # after the whole call that is compared with


def test_pieces_end_at_the_steps_and_at_the_last():
    assert pieces((), 3) == [(0, 3)]
    assert pieces((1, 3), 3) == [(0, 1), (1, 3)]
    assert pieces((2,), 3) == [(0, 2), (2, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_invariant_layers_of_16_bits_run_by_pieces(monkeypatch, dtype):
    """On a GPU kernels on wider gates have other bits than a call without marks."""
    calls, run = [], marks._run_pieces
    monkeypatch.setattr(marks, "_run_pieces", lambda *call: calls.append(1) or run(*call))
    layer = RowsRecurrentLayer(CELLS["gru"], 12, 16, dtype=dtype)
    run_with_marks(layer, torch.randn(2, 11, 12, dtype=dtype), None, STEPS)
    assert bool(calls) == (dtype == torch.bfloat16)
