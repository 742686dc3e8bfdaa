"""Cross-entropy of a language model's head, without the logits of all tokens at once."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pararnn.base.device import type_of
from pararnn.base.private import is_transformed
from pararnn.lm.compiled import compile_repeatably
from pararnn.lm.rows_op import log_prob_gradient, rows_linear, rows_log_prob
from pararnn.messages.group import find
from pararnn.messages.shift import from_neighbour
from pararnn.op import is_batched_gradient

IGNORED = -100
"""Label of a position without loss."""

CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**27}
"""Most logits in a chunk of several rows: 64 MB in float32, 256 MB in bfloat16, and the same again
for their gradient."""


class Head(nn.Linear):
    """Linear layer from hidden states to logits, or with labels to the loss, without all logits.

    The loss is computed in a call too: FSDP2 and offloading load a module's weights when it is
    called. batch_invariant: whether a row's logits may not depend on the other rows, to the bit.
    """

    batch_invariant = False

    def forward(
        self,
        input: Tensor,
        labels: Tensor | None = None,
        *,
        log_probs: bool = False,
        **options: Any,
    ) -> Tensor:
        """Compute logits (..., V) of (..., d); with labels the loss, with `causal_lm_loss`'s
        options, or `token_log_probs`.

        Raises ValueError for a bias, which the losses do not read.
        """
        if self.bias is not None:
            raise ValueError(
                "the head of a LanguageModel has no bias, got one: set lm_head.bias = None, or put "
                "a torch.nn.Linear in its place and compute the loss of its logits"
            )
        invariant = self.batch_invariant
        if labels is None:
            return rows_linear(input, self.weight) if invariant else super().forward(input)
        if log_probs:
            return token_log_probs(input, self.weight, labels, batch_invariant=invariant)
        return causal_lm_loss(input, self.weight, labels, batch_invariant=invariant, **options)

    def log_prob(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Compute log softmax(logits)[token], (N, V) and int (N,) to (N,) in float32, or float64
        for float64; it can be differentiated. 0 where a token is -100."""
        return log_prob_of(logits, tokens, self.batch_invariant)


def logits_loss(
    logits: Tensor, labels: Tensor, *, z_loss: float = 0.0, num_items: Tensor | int | None = None
) -> Tensor:
    """Compute `causal_lm_loss` without a shift, from logits (B, T, V), for heads not ours."""
    target = labels.flatten().long()
    total = _sum_of(logits.flatten(0, 1), target, z_loss)
    return total / ((target != IGNORED).sum() if num_items is None else num_items)


def _sum_of(logits: Tensor, target: Tensor, z_loss: float) -> Tensor:
    """Compute the summed loss of logits (N, V) by PyTorch's operations."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(wide, target, ignore_index=IGNORED, reduction="sum")
    if z_loss:
        squares = wide.logsumexp(1).square()
        total = total + z_loss * squares.where(target != IGNORED, 0.0).sum()
    return total


def causal_lm_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    shift: bool = True,
    z_loss: float = 0.0,
    num_items: Tensor | int | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """Compute the mean cross-entropy of logits `hidden @ weight.T`, plus z_loss * mean(logsumexp²).

    Only one chunk of rows has logits at a time, and its gradients are computed with them, so that
    memory does not grow with tokens times vocabulary. Logits have autocast's dtype, or that of
    hidden and weight, which must then be the same. All sums are float32 (float64 for float64), also
    that of the weight's gradient over chunks. Derivatives beyond one gradient (create_graph=True,
    torch.func, forward mode) keep all logits.

    Args:
        hidden: (B, T, d) or (N, d), the input of the head.
        weight: (V, d), the head's. Where it needs no gradient, none is computed.
        labels: (B, T) or (N,), integers; -100 has no loss.
        shift: True: position t predicts the label at t + 1, and the last one nothing. False: each
            predicts its own. In packed rows the first label of a document must be -100, or the
            position before predicts it.
        z_loss: factor of the squared logsumexp, which keeps logits from drifting.
        num_items: divisor of both sums, for gradients accumulated over batches; None is the number
            of labels with a loss. Where there are none, the loss is NaN, as in PyTorch, and 0 with
            `num_items`.
        batch_invariant: compute a row's logits with the same bits whatever the other rows.

    Returns:
        A scalar in float32, or float64 for float64.

    Raises ValueError for shapes and dtypes that do not fit.
    """
    _check(hidden, weight, labels, num_items)
    if shift:
        labels = labels.roll(-1, -1)
        labels[..., -1:] = IGNORED
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).long()
    dtype = _compute_dtype(hidden, weight)
    if is_transformed():
        logits = _product(rows.to(dtype), weight.to(dtype), batch_invariant)
        total = _sum_of(logits, flat, z_loss)
    else:
        if not torch.is_grad_enabled():  # else gradients would be computed for nothing
            rows, weight = rows.detach(), weight.detach()
        total = _ChunkedSum.apply(rows, weight, flat, z_loss, dtype, batch_invariant)
    return total / ((flat != IGNORED).sum() if num_items is None else num_items)


def next_labels(labels: Tensor, group: str) -> Tensor:
    """Return the label that each position (B, T) predicts, with the next rank's first one at the
    end of a span."""
    return torch.cat([labels[:, 1:], from_neighbour(labels[:, :1], group, True, IGNORED)], 1)


def mean_loss(
    loss: Callable[..., Tensor], targets: Tensor, group: str, num_items: Tensor | int | None = None
) -> Tensor:
    """Compute the mean loss over all ranks' targets, of which each rank differentiates its
    summand; with `num_items` this rank's summand."""
    if num_items is not None or not group:
        return loss(num_items=num_items)
    ranks = find(group)
    summand = loss(num_items=ranks.total((targets != IGNORED).sum()))
    return summand + (ranks.total(summand.detach()) - summand.detach())


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
    """Return the head's dtype: autocast's, which does not apply to float64, or its own."""
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
    """Sum over labels of cross-entropy and z-loss; forward computes the gradients, and backward
    again where they are to be differentiated."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, labels: Tensor, *options: Any) -> Tensor:
        needs = ctx.needs_input_grad
        total, *gradients = _sum_and_gradients(needs, rows, weight, labels, *options)
        ctx.save_for_backward(*gradients, rows, weight, labels)
        ctx.options = options
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        *gradients, rows, weight, labels = ctx.saved_tensors
        if torch.is_grad_enabled():
            needs = ctx.needs_input_grad
            _, *gradients = _sum_and_gradients(needs, rows, weight, labels, *ctx.options)
        pairs = zip(gradients, (rows, weight), strict=True)
        return *(_scale(grad, upstream, x.dtype) for grad, x in pairs), *[None] * 4


def _sum_and_gradients(
    needs: Sequence[bool],
    rows: Tensor,
    weight: Tensor,
    labels: Tensor,
    z_loss: float,
    dtype: torch.dtype,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the summed loss, and what `_gradients` does.

    In a pass that is differentiated, all chunks' logits stay.
    """
    total = rows.new_zeros((), dtype=torch.promote_types(dtype, torch.float32))
    # What is compiled can be differentiated once.
    differentiate = loss_and_gradient if torch.is_grad_enabled() else _differentiation(rows.device)

    def gradient_of(logits: Tensor, span: slice) -> Tensor:
        nonlocal total
        loss, gradient = differentiate(logits, labels[span], z_loss)
        # Not in place: PyTorch 2.11 compiles that without the gradient of the input.
        total = total + loss
        return gradient

    gradients = _gradients(gradient_of, needs, rows, rows, weight, dtype, batch_invariant)
    return total, *gradients


def _gradients(
    gradient_of: Callable[[Tensor, slice], Tensor],
    needs: Sequence[bool],
    like: Tensor,
    rows: Tensor,
    weight: Tensor,
    dtype: torch.dtype,
    batch_invariant: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of rows and weight that are needed, the latter in float32 or wider.

    gradient_of: that of a chunk's logits, by these and the span of its rows. like: a tensor that
    vmap batches if it batches the gradients.
    """
    wide = torch.promote_types(dtype, torch.float32)
    grad_rows = like.new_empty(rows.shape, dtype=rows.dtype) if needs[0] else None
    grad_weight = like.new_zeros(weight.shape, dtype=wide) if needs[1] else None
    head, size = weight.to(dtype), _chunk_size(rows.device.type, len(weight))
    for start in range(0, len(rows), size):
        span = slice(start, start + size)
        chunk = rows[span].to(dtype)
        gradient = gradient_of(_product(chunk, head, batch_invariant), span)
        if grad_rows is not None:
            grad_rows[span] = gradient @ head
        if grad_weight is not None:
            grad_weight = _plus_product(grad_weight, gradient.T, chunk)
        del gradient  # before the next chunk's is made
    return grad_rows, grad_weight


def _product(rows: Tensor, weight: Tensor, batch_invariant: bool) -> Tensor:
    """Return the logits rows @ weight.T."""
    return rows_linear(rows, weight) if batch_invariant else rows @ weight.T


def log_prob_of(logits: Tensor, tokens: Tensor, batch_invariant: bool) -> Tensor:
    """Compute log softmax(logits)[token] of each row, see `Head.log_prob`."""
    if batch_invariant:
        result: Tensor = rows_log_prob(logits, tokens)
        return result
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    has_loss = tokens != IGNORED
    target = tokens.long().where(has_loss, 0).unsqueeze(-1)
    return wide.gather(-1, target).squeeze(-1).where(has_loss, 0.0)


def token_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, batch_invariant: bool = False
) -> Tensor:
    """Compute the log-probabilities of labels by logits `hidden @ weight.T`, a chunk of rows at a
    time, again in the backward pass. They can be differentiated as `causal_lm_loss`.

    hidden (..., d), weight (V, d) and labels (...) as in `causal_lm_loss` without a shift. Returns
    (...) in float32, or float64 for float64: 0 where a label is -100. Raises as `causal_lm_loss`.
    """
    _check(hidden, weight, labels, None)
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).long()
    dtype = _compute_dtype(hidden, weight)
    result: Tensor
    if is_transformed():
        logits = _product(rows.to(dtype), weight.to(dtype), batch_invariant)
        result = log_prob_of(logits, flat, batch_invariant)
    else:
        result = _ChunkedLogProbs.apply(rows, weight, flat, dtype, batch_invariant)
    return result.view(labels.shape)


class _ChunkedLogProbs(torch.autograd.Function):
    """Log-probabilities of labels; backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        weight: Tensor,
        labels: Tensor,
        dtype: torch.dtype,
        batch_invariant: bool,
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, labels)
        ctx.options = dtype, batch_invariant
        head, size = weight.to(dtype), _chunk_size(rows.device.type, len(weight))
        chunks = zip(rows.to(dtype).split(size), labels.split(size), strict=True)
        return torch.cat([
            log_prob_of(_product(chunk, head, batch_invariant), target, batch_invariant)
            for chunk, target in chunks
        ])  # fmt: skip

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, labels = ctx.saved_tensors

        def gradient_of(logits: Tensor, span: slice) -> Tensor:
            return log_prob_gradient(logits, labels[span], upstream[span])

        needs = ctx.needs_input_grad
        grad_rows, grad_weight = _gradients(
            gradient_of, needs, upstream, rows, weight, *ctx.options
        )
        of_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_rows, of_weight, None, None, None


def _chunk_size(device: str, vocabulary: int) -> int:
    """Return the rows of a chunk: whole tiles of a matrix product where they fit."""
    rows = max(1, CHUNK_LOGITS.get(device, CHUNK_LOGITS["cpu"]) // vocabulary)
    return rows - rows % 256 if rows > 256 else rows


def loss_and_gradient(logits: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Compute the summed loss of logits (N, V) and its gradient, in float32 or wider."""
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
    """Return `loss_and_gradient`, compiled to two passes over the logits on a GPU with Triton."""
    if type_of(device).accelerator and importlib.util.find_spec("triton") is not None:
        # A second number of rows is compiled with a dynamic size: one variant for each number would
        # soon exceed Dynamo's limit, and uncompiled it takes three times the memory.
        return compile_repeatably(loss_and_gradient)
    return loss_and_gradient


def _plus_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute total + a @ b, the sum in total's dtype."""
    if torch.is_grad_enabled():  # of a pass that is differentiated
        return total + (a @ b).to(total.dtype)
    if total.dtype == a.dtype:
        return total.addmm_(a, b)
    if type_of(total.device).accelerator:
        return torch.addmm(total, a, b, out_dtype=total.dtype)
    return total.add_(a @ b)


def _scale(grad: Tensor | None, factor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Multiply by a scalar, and round once."""
    if grad is None:
        return None
    # With a dimension, or the factor would be rounded to the gradient's dtype first.
    factor = factor.reshape(1)
    if torch.is_grad_enabled() or is_batched_gradient(factor):
        return (grad * factor).to(dtype)
    return torch.mul(grad, factor, out=torch.empty_like(grad, dtype=dtype))
