"""What the oracle's errors are relative to, against a loop over the steps."""

import pytest
import torch

from pararnn.check.reference import running


def _by_steps(values, cut):
    out = values.clone()
    for t in reversed(range(values.shape[1] - 1)):
        mask = cut[:, t + 1].reshape(len(cut), *[1] * (values.ndim - 3), -1)
        out[:, t] = torch.maximum(out[:, t], out[:, t + 1].masked_fill(mask, 0))
    return out


@pytest.mark.parametrize("length", [0, 1, 2, 3, 8, 13])
@pytest.mark.parametrize("channels", [1, 4], ids=["all channels", "each channel"])
@pytest.mark.parametrize("inner", [(), (3,)], ids=["(B, T, D)", "(B, T, N, D)"])
@pytest.mark.parametrize("part", [0.0, 0.3, 1.0])
def test_running_ends_with_a_sequence(part, inner, channels, length):
    torch.manual_seed(0)
    values, cut = torch.rand(2, length, *inner, 4), torch.rand(2, length, channels) < part
    assert torch.equal(running(values, cut), _by_steps(values, cut))
    if not part:
        assert torch.equal(running(values, None), _by_steps(values, cut))
