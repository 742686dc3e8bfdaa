"""Cross-entropy of a language model's head, without the logits of all tokens at once."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pararnn.extras import require

IGNORED = -100
"""The label of a position that has none."""

CHUNK_LOGITS = 2**26
"""Logits that a chunk of rows has at most, where one row has no more: 256 MB in float32."""

BACKENDS = ("auto", "liger", "chunked")


def causal_lm_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    shift: bool = True,
    z_loss: float = 0.0,
    num_items: Tensor | int | None = None,
    backend: str = "auto",
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
        backend: "liger" (the package liger-kernel; CUDA, not float64), "chunked" (PyTorch, any
            device), or "auto": liger where it can run and is installed.

    Returns:
        A scalar in float32, or float64 for float64.

    Raises ValueError for shapes, dtypes or a backend that do not fit, MissingExtra for "liger"
    without liger-kernel.
    """
    _check(hidden, weight, labels, num_items)
    if shift:
        labels = labels.roll(-1, -1)
        labels[..., -1:] = IGNORED
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).long()
    if not torch.is_grad_enabled():  # or gradients would be computed, and dropped
        rows, weight = rows.detach(), weight.detach()
    dtype = _compute_dtype(hidden, weight)
    summed = {"liger": _liger_sum, "chunked": _ChunkedSum.apply}[_chosen(backend, hidden, dtype)]
    total = summed(rows, weight, flat, z_loss, dtype)
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


def _chosen(backend: str, hidden: Tensor, dtype: torch.dtype) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    can_run = hidden.device.type == "cuda" and dtype != torch.float64
    if backend == "liger" and not can_run:
        raise ValueError(
            f"backend 'liger' takes CUDA tensors other than float64, got {dtype} on "
            f"{hidden.device}; take 'chunked'"
        )
    if backend == "auto":
        installed = importlib.util.find_spec("liger_kernel") is not None
        return "liger" if can_run and installed else "chunked"
    return backend


def _liger_sum(
    rows: Tensor, weight: Tensor, labels: Tensor, z_loss: float, dtype: torch.dtype
) -> Tensor:
    functional = require("liger_kernel.transformers.functional")
    with torch.autocast(rows.device.type, enabled=False):  # it would round its float32 sums
        total = functional.liger_fused_linear_cross_entropy(
            rows.to(dtype),
            weight.to(dtype),
            labels,
            ignore_index=IGNORED,
            lse_square_scale=z_loss,
            reduction="sum",
            accum_dtype=torch.float32,
        )
    return total.float()


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
        size = max(1, CHUNK_LOGITS // len(weight))
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            chunk = rows[part].to(dtype)
            logits = (chunk @ head.T).to(wide)
            total += _loss_into_gradient(logits, labels[part], z_loss)
            gradient = logits.to(dtype)
            if grad_rows is not None:
                grad_rows[part] = gradient @ head
            if grad_weight is not None:
                grad_weight += gradient.T @ chunk
            del logits, gradient  # or the next chunk's would be beside them
        ctx.save_for_backward(grad_rows, grad_weight)
        ctx.dtypes = rows.dtype, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(_scaled(grad, upstream, dtype) for grad, dtype in pairs), None, None, None


def _loss_into_gradient(logits: Tensor, labels: Tensor, z_loss: float) -> Tensor:
    """The summed loss of logits (N, V), which become its gradient: no second tensor of the size."""
    has_loss = labels != IGNORED
    targets = labels.where(has_loss, 0)[:, None]
    largest = logits.amax(1, keepdim=True)
    logits -= largest
    of_targets = logits.gather(1, targets)
    sums = logits.exp_().sum(1, keepdim=True)
    lse = largest + sums.log()
    loss = (sums.log() - of_targets + z_loss * lse.square()).squeeze(1).where(has_loss, 0.0).sum()
    logits *= (1 + 2 * z_loss * lse) / sums
    logits.scatter_add_(1, targets, logits.new_full((), -1.0).expand_as(targets))
    logits.masked_fill_(~has_loss[:, None], 0.0)
    return loss


def _scaled(grad: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """`grad` times a scalar, rounded once: a factor without dimensions is rounded to its dtype."""
    if grad is None:
        return None
    return torch.mul(grad, factor.reshape(1), out=torch.empty_like(grad, dtype=dtype))
