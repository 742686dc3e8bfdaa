"""Inputs of a convolution with SiLU, and its gradients in float64."""

import torch

from pararnn.lm.conv_op import plain_conv_silu

CASES = {
    "one step, continued": (3, 1, 40, 4, True, False),
    "fewer steps than taps": (2, 2, 300, 4, True, True),
    "documents": (2, 70, 40, 4, False, True),
    "documents, continued": (1, 131, 257, 4, True, True),
    "two taps": (1, 65, 20, 2, True, True),
    "three taps": (2, 67, 20, 3, True, False),
    "one tap": (2, 9, 16, 1, False, False),
    "several tiles": (2, 1023, 520, 4, False, True),
}
"""B, T, D, taps, and whether there are inputs before the first and several documents."""


def inputs(case, dtype, parameters, device="cpu"):
    """u, weight, bias, halo and since, and the gradient of the result."""
    batch, steps, channels, taps, has_halo, has_documents = CASES[case]
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        return torch.randn(size, generator=generator)

    u, weight, bias = draw(batch, steps, channels), draw(taps, channels), draw(channels)
    halo = draw(batch, taps - 1, channels).to(device, dtype) if has_halo else None
    since = None
    if has_documents:
        starts = torch.rand(batch, steps, generator=generator) < 0.2
        index = torch.arange(steps)
        since = index - torch.where(starts, index, -(1 << 20)).cummax(1).values
        since = since.to(device)
    # Gradients of a mean loss over many tokens.
    grad = draw(batch, steps, channels) * 1e-9
    grad = grad.to(device, torch.promote_types(dtype, parameters))
    if dtype == torch.float16:
        grad = grad * 1e7  # else they round to zero
    kinds = (dtype, parameters, parameters)
    tensors = [x.to(device, kind) for x, kind in zip((u, weight, bias), kinds, strict=True)]
    return (*tensors, halo, since), grad


def exact(tensors, grad):
    """The result, and the gradients of all but `since`, in float64; None where there is no halo."""
    *floats, since = tensors
    leaves = [x if x is None else x.detach().double().requires_grad_() for x in floats]
    y = plain_conv_silu(*leaves, since)
    present = [leaf for leaf in leaves if leaf is not None]
    grads = torch.autograd.grad(y, present, grad.double())
    return y.detach(), *grads, *[None] * (4 - len(grads))
