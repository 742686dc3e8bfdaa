"""The operator of a causal depthwise convolution with SiLU: one kernel forward, one backward."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from pararnn.base.device import type_of
from pararnn.base.private import exporting, is_transformed

MOST_TAPS = 4
"""Largest number of taps that the kernels take; longer convolutions run in PyTorch."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of inputs and parameters that the kernels take."""


def plain_conv_silu(
    u: Tensor, weight: Tensor, bias: Tensor, halo: Tensor | None, since: Tensor | None
) -> Tensor:
    """Compute silu(y), y_t = sum_k weight_k * u_(t - k) + bias, of u (B, T, D) in PyTorch.

    weight (K, D), the newest token's first. halo (B, K - 1, D) are the inputs before the first;
    None is zeros. since int (B, T) are the steps since a document's first token; None is one
    document that began before the rows.
    """
    return nn.functional.silu(_convolve(u, weight, bias, halo, since))


def _convolve(
    u: Tensor, weight: Tensor, bias: Tensor, halo: Tensor | None, since: Tensor | None
) -> Tensor:
    newest, *earlier = weight.unbind()
    y = torch.addcmul(bias, u, newest)
    for lag, factor in enumerate(earlier, 1):
        y = torch.addcmul(y, _window(u, halo, since, lag), factor)
    return y


def _window(u: Tensor, halo: Tensor | None, since: Tensor | None, lag: int) -> Tensor:
    """Return the inputs `lag` steps before, 0 where there is none in the document."""
    # Each lag is padded by itself: compilers then read u itself, and store no padded copy.
    steps = u.shape[1]
    window = nn.functional.pad(u[:, : max(steps - lag, 0)], (0, 0, min(lag, steps), 0))
    if halo is not None:
        rows = halo[:, halo.shape[1] - lag :][:, :steps]
        window = window + nn.functional.pad(rows, (0, 0, 0, steps - rows.shape[1]))
    return _in_document(window, since, lag)


def _in_document(rows: Tensor, since: Tensor | None, lag: int) -> Tensor:
    return rows if since is None else rows.masked_fill((since < lag).unsqueeze(-1), 0)


@torch.library.custom_op("pararnn::conv_silu", mutates_args=())
def conv_silu(
    u: Tensor, weight: Tensor, bias: Tensor, halo: Tensor | None, since: Tensor | None
) -> Tensor:
    """Compute `plain_conv_silu` by one kernel on a GPU, rounded once."""
    if not type_of(u.device).accelerator:
        return plain_conv_silu(u, weight, bias, halo, since)
    from pararnn.lm import conv_kernels

    return conv_kernels.forward(u, weight, bias, halo, since)


@conv_silu.register_fake
def conv_like(u: Tensor, weight: Tensor, bias: Tensor, halo: Any, since: Any) -> Tensor:
    """Return an empty tensor like the result."""
    return u.new_empty(u.shape, dtype=torch.promote_types(u.dtype, weight.dtype))


@torch.library.custom_op("pararnn::conv_silu_backward", mutates_args=())
def conv_silu_backward(
    grad: Tensor, u: Tensor, weight: Tensor, bias: Tensor, halo: Tensor | None, since: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of u, the weight, the bias and the halo (empty without one)."""
    if not type_of(u.device).accelerator:
        return _plain_backward(grad, u, weight, bias, halo, since)
    from pararnn.lm import conv_kernels

    return conv_kernels.backward(grad, u, weight, bias, halo, since)


@conv_silu_backward.register_fake
def _(
    grad: Tensor, u: Tensor, weight: Tensor, bias: Tensor, halo: Any, since: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    empty = u.new_empty(0 if halo is None else halo.shape)
    return u.new_empty(u.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape), empty


def _plain_backward(
    grad: Tensor, u: Tensor, weight: Tensor, bias: Tensor, halo: Tensor | None, since: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = _convolve(u, weight, bias, halo, since)
    gate = y.sigmoid()
    d, steps, reach = grad * gate * (1 + y * (1 - gate)), u.shape[1], len(weight) - 1
    inputs, weights = nn.functional.pad(d * weight[0], (0, 0, reach, 0)), [(d * u).sum((0, 1))]
    for lag in range(1, reach + 1):
        d_in_document = _in_document(d, since, lag)
        weights.append((d_in_document * _window(u, halo, since, lag)).sum((0, 1)))
        inputs = inputs + nn.functional.pad(d_in_document * weight[lag], (0, 0, reach - lag, lag))
    first, of_u = inputs.split([reach, steps], 1)
    of_halo = u.new_empty(0) if halo is None else _copy(first, halo)
    of_weight = torch.stack(weights).to(weight.dtype)
    return _copy(of_u, u), of_weight, d.sum((0, 1)).to(bias.dtype), of_halo


def _copy(x: Tensor, like: Tensor) -> Tensor:
    """Return a copy, as the results of an operator may not share memory."""
    return x.to(like.dtype).clone(memory_format=torch.contiguous_format)


def save(ctx: Any, inputs: Any, output: Tensor) -> None:
    """Save an operator's inputs, all of them tensors."""
    ctx.save_for_backward(*inputs)


def differentiate_conv(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Differentiate an operator that computes `plain_conv_silu`."""
    tensors = ctx.saved_tensors  # activation checkpointing unpacks them once
    du, dw, db, dh = conv_silu_backward(grad, *tensors)
    return du, dw, db, None if tensors[3] is None else dh, None


conv_silu.register_autograd(differentiate_conv, setup_context=save)


def _differentiate_again(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    """Differentiate the gradients, in PyTorch: second derivatives are rare."""
    *tensors, since = ctx.saved_tensors
    with torch.enable_grad():
        leaves: Any = [x if x is None else x.detach().requires_grad_() for x in tensors]
        grad, u, weight, bias, halo = leaves
        first = _plain_backward(grad, u, weight, bias, halo, since)
        count = 3 if tensors[4] is None else 4
        present = [leaf for leaf in leaves if leaf is not None]
        second = torch.autograd.grad(first[:count], present, grads[:count], allow_unused=True)
    return (*second, *[None] * (6 - len(second)))


conv_silu_backward.register_autograd(_differentiate_again, setup_context=save)


HAS_TRITON = importlib.util.find_spec("triton") is not None


def takes(u: Tensor, weight: Tensor) -> bool:
    """Return whether the operator computes a convolution: on a GPU with Triton, in these dtypes.

    Transforms of torch.func, forward-mode derivatives and exported programs have PyTorch's
    operations.
    """
    if not (type_of(u.device).accelerator and HAS_TRITON and len(weight) <= MOST_TAPS):
        return False
    if exporting() or is_transformed():
        return False
    return u.dtype in DTYPES and weight.dtype in DTYPES
