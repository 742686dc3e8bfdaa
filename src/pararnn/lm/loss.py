"""Cross-entropy of a language model's head, without the logits of all tokens at once."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pararnn.device import type_of
from pararnn.lm.compiled import compiled

IGNORED = -100
"""The label of a position that has none."""

CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**27}
"""Logits that a chunk of rows has at most, where one row has no more: 64 MB in float32, 256 MB in
bfloat16, and as much again for their gradient."""


class Head(nn.Linear):
    """Hidden states to logits; with labels, to the loss, without ever making all logits.

    The loss is a call too: FSDP2 and offloading bring a module's weights when it is called.
    """

    def forward(self, input: Tensor, labels: Tensor | None = None, **how: Any) -> Tensor:
        """Logits (..., V) of (..., d); or a scalar, arguments as in `causal_lm_loss`."""
        if labels is None:
            return super().forward(input)
        return causal_lm_loss(input, self.weight, labels, **how)


def logits_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    shift: bool = True,
    z_loss: float = 0.0,
    num_items: Tensor | int | None = None,
) -> Tensor:
    """`causal_lm_loss` of logits (B, T, V) that there are, for heads that others have changed."""
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
    target = labels.flatten().long()
    total = F.cross_entropy(wide, target, ignore_index=IGNORED, reduction="sum")
    if z_loss:
        squares = wide.logsumexp(1).square()
        total = total + z_loss * squares.where(target != IGNORED, 0.0).sum()
    return total / ((target != IGNORED).sum() if num_items is None else num_items)


def causal_lm_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    shift: bool = True,
    z_loss: float = 0.0,
    num_items: Tensor | int | None = None,
) -> Tensor:
    """Mean cross-entropy of the logits `hidden @ weight.T`, plus z_loss * mean(logsumexp²).

    Only a chunk of rows has its logits at a time, and gradients are computed along with them, so
    that memory does not grow with tokens times vocabulary. Logits have the dtype of hidden and
    weight, which must be the same, or autocast's; the rest is float32 (float64 for float64), also
    the sum of the weight's gradient over chunks. It can be differentiated once.

    Args:
        hidden: (B, T, d) or (N, d), what goes into the head.
        weight: (V, d), the head's. Where it needs no gradient, none is computed.
        labels: (B, T) or (N,), integers; -100 has no loss.
        shift: whether position t predicts the label at t + 1 (the last one nothing), or its own. In
            packed rows the first label of a document must be -100, or the one before predicts it.
        z_loss: factor of the squared logsumexp, which keeps logits from drifting.
        num_items: what both sums are divided by, as a gradient accumulated over batches needs it;
            None is the number of labels with a loss. Without any of these the loss is NaN, as it is
            in PyTorch; with `num_items` it is 0.

    Returns:
        A scalar in float32, or float64 for float64.

    Raises ValueError for shapes and dtypes that do not fit.
    """
    _check(hidden, weight, labels, num_items)
    if shift:
        labels = labels.roll(-1, -1)
        labels[..., -1:] = IGNORED
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).long()
    if not torch.is_grad_enabled():  # or gradients would be computed, and dropped
        rows, weight = rows.detach(), weight.detach()
    dtype = _compute_dtype(hidden, weight)
    total = _ChunkedSum.apply(rows, weight, flat, z_loss, dtype)
    return total / ((flat != IGNORED).sum() if num_items is None else num_items)


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, num_items: Tensor | int | None) -> None:
    if hidden.ndim not in (2, 3) or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be (B, T, d) or (N, d) and weight (V, d), got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(
            f"labels must be {tuple(hidden.shape[:-1])} as hidden, got {tuple(labels.shape)}"
        )
    if isinstance(num_items, int) and num_items < 1:
        raise ValueError(f"num_items must be positive, or None to count labels, got {num_items}")


def _compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """What the head would compute in: autocast's dtype, which leaves float64 alone, or its own."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden and weight must have one dtype outside of autocast, got {hidden.dtype} and "
            f"{weight.dtype}"
        )
    return hidden.dtype


class _ChunkedSum(torch.autograd.Function):
    """The sum over labels of cross-entropy and z-loss; forward has the gradients already."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        labels: Tensor,
        z_loss: float,
        dtype: torch.dtype,
    ) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        of_rows, of_weight, *_ = ctx.needs_input_grad
        grad_rows = torch.empty_like(rows) if of_rows else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if of_weight else None
        total = rows.new_zeros((), dtype=wide)
        head = weight.to(dtype)
        differentiate = _differentiation(rows.device)
        size = _chunk_size(rows.device.type, len(weight))
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            chunk = rows[part].to(dtype)
            loss, gradient = differentiate(chunk @ head.T, labels[part], z_loss)
            # Not in place: PyTorch 2.11 compiles that without the gradient of what came in.
            total = total + loss
            if grad_rows is not None:
                grad_rows[part] = gradient @ head
            if grad_weight is not None:
                grad_weight = _plus_product(grad_weight, gradient.T, chunk)
            del gradient  # or the next chunk's would be beside it
        ctx.save_for_backward(grad_rows, grad_weight)
        ctx.dtypes = rows.dtype, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(_scaled(grad, upstream, dtype) for grad, dtype in pairs), None, None, None


def _chunk_size(device: str, vocabulary: int) -> int:
    """Rows of a chunk: whole tiles of a matrix product where there is room for some."""
    rows = max(1, CHUNK_LOGITS.get(device, CHUNK_LOGITS["cpu"]) // vocabulary)
    return rows - rows % 256 if rows > 256 else rows


def loss_and_gradient(logits: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """The summed loss of logits (N, V) and its gradient, computed in float32 or wider."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    has_loss = (labels != IGNORED).unsqueeze(1)
    target = labels.unsqueeze(1).where(has_loss, 0)
    lse = wide.logsumexp(1, keepdim=True)
    loss = (lse - wide.gather(1, target) + z_loss * lse.square()).where(has_loss, 0.0).sum()
    is_target = torch.arange(wide.shape[1], device=wide.device) == target
    gradient = (wide - lse).exp() * (1 + 2 * z_loss * lse) - is_target.to(wide.dtype)
    return loss, gradient.where(has_loss, 0.0).to(logits.dtype)


@cache
def _differentiation(
    device: torch.device,
) -> Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]:
    """`loss_and_gradient`, on a GPU as two passes over the logits where Triton can make them."""
    if type_of(device).accelerator and importlib.util.find_spec("triton") is not None:
        # A second number of rows is compiled for all others: one variant each would soon exceed
        # Dynamo's limit, and what is beyond it runs uncompiled, in three times the memory.
        return compiled(loss_and_gradient)
    return loss_and_gradient


def _plus_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b, the sum in total's dtype."""
    if total.dtype == a.dtype:
        return total.addmm_(a, b)
    if type_of(total.device).accelerator:
        return torch.addmm(total, a, b, out_dtype=total.dtype)
    return total.add_(a @ b)


def _scaled(grad: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """`grad` times a scalar, rounded once: a factor without dimensions is rounded to its dtype."""
    if grad is None:
        return None
    return torch.mul(grad, factor.reshape(1), out=torch.empty_like(grad, dtype=dtype))
