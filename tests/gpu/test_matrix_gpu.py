"""Matrix cells on a GPU, where PyTorch runs them."""

import copy

import pytest
import torch
from matrix_cells import LOOPS, Call, loop, make_call

import pararnn
from pararnn.zoo import M2RNNCell


@pytest.mark.parametrize("name", LOOPS)
def test_a_gpu_gives_the_loops_results(name, device):
    """Outputs, final states and gradients, with resets, in float64."""
    call = make_call(name, 3, 12)
    reset = torch.rand(3, 12) < 0.2
    there = Call(
        copy.deepcopy(call.cell).to(device),
        call.gates.detach().to(device).requires_grad_(),
        tuple(h.detach().to(device).requires_grad_() for h in call.initial),
    )
    results = []
    for own, (output, final) in (
        (there, pararnn.solve(there.cell, there.gates, there.initial, reset=reset.to(device))),
        (call, loop(name, call, reset=reset)),
    ):
        ends = final if isinstance(final, tuple) else (final,)
        loss = output.square().sum() + sum(h.square().sum() for h in ends)
        results.append([output, *ends, *torch.autograd.grad(loss, own.leaves())])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), reference.detach(), rtol=1e-9, atol=1e-9)


def test_explain_says_that_there_are_no_kernels(device):
    layer = pararnn.ParaRNN(M2RNNCell, 8, 8, num_heads=2, K=4, device=device)
    text = str(pararnn.explain(layer, (2, 5, 8)))
    assert "(sequential, torch) runs" in text
    assert "there are no kernels on GPUs" in text
