"""The convolution of language models: its operator, in PyTorch where there is no GPU."""

import conv_cases
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from triton_compiler import NEEDS_TRITON

from pararnn.lm.conv import CausalConv
from pararnn.lm.conv_op import conv_silu, takes
from pararnn.lm.rows import rows_of


def leaves_of(tensors, dtype=torch.float64):
    *floats, since = tensors
    return [x if x is None else x.to(dtype).requires_grad_() for x in floats], since


@pytest.mark.parametrize("case", conv_cases.CASES)
def test_the_operator_is_the_plain_convolution(case):
    tensors, grad = conv_cases.inputs(case, torch.float64, torch.float64)
    y, *grads = conv_cases.exact(tensors, grad)
    leaves, since = leaves_of(tensors)
    result = conv_silu(*leaves, since)
    present = [leaf for leaf in leaves if leaf is not None]
    results = torch.autograd.grad(result, present, grad)
    assert torch.equal(result, y)
    for one, other in zip(results, grads, strict=False):
        bound = 1e-12 * float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=bound)


def test_it_is_a_convolution():
    conv = CausalConv(6, 4, dtype=torch.float64)
    torch.nn.init.normal_(conv.weight)
    torch.nn.init.normal_(conv.bias)
    u = torch.randn(2, 9, 6, dtype=torch.float64)
    rows = rows_of(2, 9, u.device)
    y, tail = conv(u, rows)
    kernel = conv.weight.flip(0).T.unsqueeze(1)
    reference = F.silu(F.conv1d(F.pad(u.mT, (3, 0)), kernel, conv.bias, groups=6)).mT
    torch.testing.assert_close(y, reference, rtol=1e-12, atol=1e-12)
    parts, tail_so_far = [], None
    for piece in u.split([1, 2, 5, 1], 1):
        part, tail_so_far = conv(piece, rows_of(2, piece.shape[1], u.device), tail_so_far)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), y, rtol=1e-12, atol=1e-12)
    assert torch.equal(tail_so_far, tail)


def test_the_operator_can_be_differentiated_twice_and_compiled():
    tensors, _ = conv_cases.inputs("fewer steps than taps", torch.float64, torch.float64)
    small = [x if x is None else x[..., :2].contiguous() for x in tensors[:4]]
    leaves = [x if x is None else x.requires_grad_() for x in small]
    # The fast mode compares along one random direction, which a wrong formula changes too.
    assert torch.autograd.gradgradcheck(conv_silu, (*leaves, tensors[4]), fast_mode=True)
    torch.library.opcheck(conv_silu, (*leaves, tensors[4]))


def test_gradients_under_activation_checkpointing():
    """Checkpointing unpacks the tensors that were saved, and only once."""
    tensors, grad = conv_cases.inputs("fewer steps than taps", torch.float64, torch.float64)
    leaves, since = leaves_of(tensors)
    present = [leaf for leaf in leaves if leaf is not None]
    results = [
        torch.autograd.grad(y, present, grad)
        for y in (
            conv_silu(*leaves, since),
            checkpoint(conv_silu, *leaves, since, use_reentrant=False),
        )
    ]
    assert all(map(torch.equal, *results))


def test_what_is_not_finite_stays_in_its_document(device):
    u = torch.randn(1, 8, 2, device=device)
    u[0, 3, 0] = torch.nan
    since = torch.arange(8, device=device) % 4
    u.requires_grad_()
    weight, bias = torch.randn(4, 2, device=device), torch.zeros(2, device=device)
    y = conv_silu(u, weight, bias, None, since.unsqueeze(0))
    assert y.isnan().nonzero().tolist() == [[0, 3, 0]]
    (grad,) = torch.autograd.grad(y[:, 4:].sum(), u)
    assert grad[:, 4:].isfinite().all()


def test_the_kernels_take_no_cpu_and_no_float64():
    weight = torch.zeros(4, 8)
    assert not takes(torch.zeros(1, 2, 8), weight)
    meta = torch.zeros(1, 2, 8, device="meta")
    assert not takes(meta, weight)


@NEEDS_TRITON
def test_no_steps_have_zero_gradients():
    """Nothing is launched: what kernels would have written is zero, the halo's gradient too."""
    from pararnn.lm import conv_kernels

    empty, halo = torch.zeros(2, 0, 6), torch.ones(2, 3, 6)
    grads = conv_kernels.backward(empty, empty, torch.ones(4, 6), torch.ones(6), halo, None)
    assert [grad.shape for grad in grads] == [empty.shape, (4, 6), (6,), halo.shape]
    assert not any(grad.any() for grad in grads)
    grads = conv_kernels.backward(empty, empty, torch.ones(4, 6), torch.ones(6), None, None)
    assert grads[3].shape == (0,)
