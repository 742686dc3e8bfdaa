"""The input of GRU-D: by the paper's equations, one variable of one row after the other."""

import pytest
import torch

import pararnn


def _loop(layer, x, observed, times):
    """Che et al. 2018: gaps by their recursion, and the last observation decays to the mean."""
    batch, steps, count = x.shape
    filled, gaps = torch.empty_like(x), torch.empty_like(x)
    for row in range(batch):
        for n in range(count):
            last, delta = layer.mean[n], torch.zeros((), dtype=x.dtype)
            for t in range(steps):
                if t:
                    since = 0 if observed[row, t - 1, n] else delta
                    delta = times[row, t] - times[row, t - 1] + since
                rate = torch.exp(-torch.clamp(layer.weight[n] * delta + layer.bias[n], min=0))
                guess = rate * last + (1 - rate) * layer.mean[n]
                filled[row, t, n] = x[row, t, n] if observed[row, t, n] else guess
                gaps[row, t, n] = delta
                last = x[row, t, n] if observed[row, t, n] else last
    return torch.cat([filled, observed.to(x.dtype), gaps], -1)


def _inputs(steps=9, count=4):
    torch.manual_seed(0)
    layer = pararnn.DecayedInputs(count, torch.randn(count), dtype=torch.float64)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    observed = torch.rand(3, steps, count) < 0.4
    observed[..., 0] = False
    times = torch.rand(3, steps, dtype=torch.float64).cumsum(1) + 5
    return layer, torch.randn(3, steps, count, dtype=torch.float64), observed, times


@pytest.mark.parametrize("steps", [1, 9])
def test_inputs_are_the_papers(steps):
    layer, x, observed, times = _inputs(steps)
    leaves = [x.requires_grad_(), times.requires_grad_(), *layer.parameters()]
    results = []
    for run in (layer, lambda *inputs: _loop(layer, *inputs)):
        output = run(x, observed, times)
        loss = (output * output.detach().cos()).sum()
        grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
        results.append([output, *grads])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)


def test_rows_may_have_no_steps():
    layer, *inputs = _inputs(0)
    assert layer(*inputs).shape == (3, 0, 12)


def test_what_is_missing_is_not_read():
    layer, x, observed, times = _inputs()
    reference = layer(x, observed, times)
    x[~observed] = torch.nan
    output = layer(x.requires_grad_(), observed, times)
    assert torch.equal(output, reference)
    grads = torch.autograd.grad(output.sum(), [x, *layer.parameters()])
    assert all(grad.isfinite().all() for grad in grads)


def test_other_sizes_raise():
    layer, x, observed, times = _inputs()
    for inputs in ((x[..., :3], observed, times), (x, observed[0], times), (x, observed, times[0])):
        with pytest.raises(ValueError, match=r"must be \(B, T, 4\)"):
            layer(*inputs)


def test_masks_are_bool_and_inputs_tensors():
    layer, x, observed, times = _inputs()
    with pytest.raises(
        ValueError, match=r"observed must be bool, got torch\.float64: observed != 0"
    ):
        layer(x, observed.double(), times)
    assert torch.equal(layer(x, observed.double() != 0, times), layer(x, observed, times))
    with pytest.raises(TypeError, match="times of DecayedInputs must be a tensor, got list"):
        layer(x, observed, times.tolist())
    with pytest.raises(ValueError, match=r"a number or one for each of 4 variables, got \(3,\)"):
        pararnn.DecayedInputs(4, torch.zeros(3))
