"""Final states and outputs are results of their own, as torch.nn.GRU has them: no views."""

import pytest
import torch
from call_results import as_tuple
from table import PAIRS

import pararnn

CELLS = {"gru": (pararnn.GRUCell, torch.nn.GRU), "lstm": (pararnn.LSTMCell, torch.nn.LSTM)}
LAYOUTS = {
    "batch": (torch.randn(3, 5, 4), {}),
    "unbatched": (torch.randn(5, 4), {}),
    "lengths": (torch.randn(3, 5, 4), {"lengths": [5, 2, 0]}),
    "packed": (torch.randn(1, 5, 4), {"cu_seqlens": torch.tensor([0, 2, 4])}),
    "no step": (torch.randn(3, 0, 4), {}),
    "one step": (torch.randn(3, 1, 4), {}),
}
SIZES = {"one": {}, "deep": {"num_layers": 2}, "both ways": {"bidirectional": True}}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("cell", list(CELLS))
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.one_in(5)
def test_states_can_be_written_and_detached(pair, cell, grad):
    for layout, (x, layout_options) in LAYOUTS.items():
        for size, options in SIZES.items():
            layer = pararnn.ParaRNN(CELLS[cell][0], 4, 6, **options)
            layer.solver, layer.backend = pair
            with torch.set_grad_enabled(grad):
                output, final = layer(x, **layout_options)
            states = as_tuple(final)
            results = [output, *states]
            memory = [t.untyped_storage().data_ptr() for t in results if t.numel()]
            assert len(set(memory)) == len(memory), (layout, size)
            for state in states:
                is_done = torch.zeros(state.shape[-2], dtype=torch.bool)
                is_done[0] = True
                state[..., is_done, :] = 0
                state.detach_()
                assert not state.requires_grad


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_gradients_of_states_that_were_written(pair, recompute):
    is_done, grads = torch.tensor([True, False, False]), []
    torch.manual_seed(0)
    layer = pararnn.ParaLSTM(4, 6, dtype=torch.float64, recompute_gates=recompute)
    layer.solver, layer.backend = pair
    x = torch.randn(3, 10, 4, dtype=torch.float64)
    for in_place in (False, True):
        output, (h, c) = layer(x)
        if in_place:
            h[:, is_done] = 0
            c[:, is_done] = 0
        else:
            h, c = (state.masked_fill(is_done[:, None], 0) for state in (h, c))
        output, (h, c) = layer(x, (h, c))
        grads.append(torch.autograd.grad(output.sum() + h.sum() + c.sum(), layer.parameters()))
    assert all(map(torch.allclose, *grads))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_outputs_can_be_written_and_detached(pair):
    """Before a backward pass that needs them autograd raises; without one nothing does."""
    for cell in CELLS:
        layer = pararnn.ParaRNN(CELLS[cell][0], 4, 6)
        layer.solver, layer.backend = pair
        output, final = layer(torch.randn(3, 5, 4))
        old = [state.clone() for state in as_tuple(final)]
        output[:, 0] = 0
        output.detach_()
        with torch.no_grad():
            again, _ = layer(torch.randn(3, 5, 4))
        again[:, 0] = 0
        again.detach_()
        assert all(map(torch.equal, as_tuple(final), old))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_states_of_a_bare_layer(pair):
    layer = pararnn.RecurrentLayer(pararnn.LSTMCell, 4, 6, solver=pair[0], backend=pair[1])
    x = torch.randn(3, 5, 4)
    for results in (layer(x), layer.step(x[:, 0]), layer(x, all_states=True)[:2]):
        output, (h, c) = results
        assert len({t.untyped_storage().data_ptr() for t in (output, h, c)}) == 3
        for state in (h, c):
            state[0] = 0
            state.detach_()
