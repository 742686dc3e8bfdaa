"""Operators whose every row has the same bits whatever the rows next to it, for `batch_invariant`.

PyTorch's products and norms choose the order of their sums by the number of rows, and on a CPU its
elementwise functions differ in the last bit between the middle and the end of a tensor. These do
not: each result is one function of its row (and the weights), with one order of sums. They are C++
on a CPU and Triton on a GPU. Gradients are PyTorch's operations: repeatable from run to run.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pararnn.base.device import type_of
from pararnn.base.errors import EngineError
from pararnn.base.function import guarded
from pararnn.base.numerics import autocast_dtype
from pararnn.lm.conv_op import DTYPES, HAS_TRITON, conv_like, differentiate_conv, save
from pararnn.lm.quantise import matrix_of

BY_BACKWARD = (
    "a model with batch_invariant=True: its operators have backward passes only. Call "
    "loss.backward() or torch.autograd.grad, for single samples in a loop or by is_grads_batched, "
    "or load the weights into a model with batch_invariant=False"
)
"""What transforms of torch.func are refused with."""


def _kernels(x: Tensor) -> ModuleType:
    """Return the module of a device's kernels. Raises EngineError where there are none."""
    if not type_of(x.device).accelerator:
        from pararnn.lm import rows_cpu

        return rows_cpu
    if not HAS_TRITON or x.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise EngineError(
            f"batch_invariant=True and keys in pages need Triton on a GPU, and one of {names}, got "
            f"{x.dtype} {'with' if HAS_TRITON else 'without'} Triton: install triton, or convert "
            "the model"
        )
    from pararnn.lm import rows_kernels

    return rows_kernels


def takes_pages(keys: Tensor) -> bool:
    """Return whether `paged_attention` has a kernel for keys (..., D) on their device."""
    if not type_of(keys.device).accelerator:
        return True
    try:
        _kernels(keys).attention_options(keys)
    except EngineError:
        return False
    return True


def _run(function: str, x: Tensor, *others: Any) -> Tensor:
    """Call a function of the kernels of x's device."""
    result: Tensor = getattr(_kernels(x), function)(x, *others)
    return result


@guarded(BY_BACKWARD)
@torch.library.custom_op("pararnn::rows_product", mutates_args=())
def rows_product(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """Multiply rows x (R, H, I) by weights (H, O, I) to (H, R, O), as `headwise_product`.

    scale: the factors (H, O), in float32, of the lines of weights in 8 bits, which have no
    gradients. Sums are multiplied by them before they are rounded.
    """
    return _run("product", x, weight, scale)


@rows_product.register_fake
def _(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    dtype = torch.promote_types(x.dtype, weight.dtype) if scale is None else x.dtype
    return x.new_empty((x.shape[1], x.shape[0], weight.shape[1]), dtype=dtype)


def _differentiate_product(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, scale = ctx.saved_tensors
    of_x = of_weight = None
    if scale is not None:
        weight = (weight.float() * scale.unsqueeze(-1)).to(x.dtype)
    if len(weight) == 1:  # a plain product is faster than a batch of one
        if ctx.needs_input_grad[0]:
            of_x = (grad[0] @ weight[0]).unsqueeze(1)
        if ctx.needs_input_grad[1]:
            of_weight = (grad[0].mT @ x[:, 0]).unsqueeze(0)
        return of_x, of_weight, None
    if ctx.needs_input_grad[0]:
        of_x = torch.bmm(grad, weight).transpose(0, 1)
    if ctx.needs_input_grad[1]:
        of_weight = torch.bmm(grad.mT, x.transpose(0, 1))
    return of_x, of_weight, None


rows_product.register_autograd(_differentiate_product, setup_context=save)


@guarded(BY_BACKWARD)
@torch.library.custom_op("pararnn::rows_norm", mutates_args=())
def rows_norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, centred: bool) -> Tensor:
    """Compute weight * n(x silu(gate)) over the last dimension, n an RMSNorm, or centred a
    LayerNorm; None for no gate. Rounds once."""
    return _run("norm", x, gate, weight, eps, centred)


@rows_norm.register_fake
def _(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, centred: bool) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))


def _save_norm(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, gate, weight, ctx.eps, ctx.centred = inputs
    ctx.save_for_backward(x, gate, weight)


def _differentiate_norm(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, gate, weight = ctx.saved_tensors
    wide = torch.promote_types(x.dtype, torch.float32)
    value, of_y = x.to(wide), grad.to(wide)
    if gate is not None:
        logits = gate.to(wide)
        chance = logits.sigmoid()
        value = value * logits * chance
    if ctx.centred:
        value = value - value.mean(-1, keepdim=True)
    scale = (value.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
    normed, d = value * scale, of_y * weight.to(wide)
    of_value = d - normed * (d * normed).mean(-1, keepdim=True)
    if ctx.centred:
        of_value = of_value - d.mean(-1, keepdim=True)
    of_value = of_value * scale
    of_weight = (of_y * normed).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    if gate is None:
        return of_value.to(x.dtype), None, of_weight, None, None
    of_gate = of_value * x.to(wide) * chance * (1 + logits * (1 - chance))
    return (of_value * logits * chance).to(x.dtype), of_gate.to(gate.dtype), of_weight, None, None


rows_norm.register_autograd(_differentiate_norm, setup_context=_save_norm)


@guarded(BY_BACKWARD)
@torch.library.custom_op("pararnn::rows_gated", mutates_args=())
def rows_gated(a: Tensor, b: Tensor | None) -> Tensor:
    """Compute silu(a) * b, or silu(a), and round once."""
    return _run("gated", a, b)


def _differentiate_gated(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    a, b = ctx.saved_tensors
    wide = torch.promote_types(a.dtype, torch.float32)
    logits, of_y = a.to(wide), grad.to(wide)
    chance = logits.sigmoid()
    slope = chance * (1 + logits * (1 - chance))
    if b is None:
        return (of_y * slope).to(a.dtype), None
    return (of_y * b.to(wide) * slope).to(a.dtype), (of_y * logits * chance).to(b.dtype)


rows_gated.register_fake(lambda a, b: a.new_empty(a.shape))
rows_gated.register_autograd(_differentiate_gated, setup_context=save)


@guarded(BY_BACKWARD)
@torch.library.custom_op("pararnn::rows_scaled_sum", mutates_args=())
def rows_scaled_sum(out: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """Compute out + x * scale as eager code does: compilers round it otherwise."""
    return (out + x * scale).contiguous()


@rows_scaled_sum.register_fake
def _(out: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    return out.new_empty(out.shape, dtype=torch.result_type(out, x))


def _differentiate_sum(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out, x, scale = ctx.saved_tensors
    wide = torch.promote_types(x.dtype, torch.float32)
    # No flatten, which batches of gradients (is_grads_batched) do not take.
    of_scale = (grad * x).reshape(-1, x.shape[-1]).sum(0, dtype=wide)
    return grad.to(out.dtype), (grad * scale).to(x.dtype), of_scale.to(scale.dtype)


rows_scaled_sum.register_autograd(_differentiate_sum, setup_context=save)


@guarded(BY_BACKWARD)
@torch.library.custom_op("pararnn::rows_conv", mutates_args=())
def rows_conv(
    u: Tensor, weight: Tensor, bias: Tensor, halo: Tensor | None, since: Tensor | None
) -> Tensor:
    """Compute `plain_conv_silu`."""
    return _run("conv", u, weight, bias, halo, since)


rows_conv.register_fake(conv_like)
rows_conv.register_autograd(differentiate_conv, setup_context=save)


@guarded(BY_BACKWARD)
@torch.library.custom_op("pararnn::rows_log_prob", mutates_args=())
def rows_log_prob(logits: Tensor, target: Tensor) -> Tensor:
    """Compute log softmax(logits)[target] of each row, (N, V) and int (N,) to (N,) in float32
    (float64 for float64); 0 where a target is negative."""
    return _run("log_prob", logits, target)


@rows_log_prob.register_fake
def _(logits: Tensor, target: Tensor) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty(logits.shape[:1], dtype=dtype)


def log_prob_gradient(logits: Tensor, target: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of logits (N, V) by that of their log-probabilities (N,)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    index = torch.arange(wide.shape[1], device=wide.device)
    is_target = (index == target.unsqueeze(1)).to(wide.dtype)
    factor = grad.where(target >= 0, 0.0).unsqueeze(1)
    return ((is_target - wide.softmax(1)) * factor).to(logits.dtype)


def _differentiate_log_prob(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    logits, target = ctx.saved_tensors
    return log_prob_gradient(logits, target, grad), None


rows_log_prob.register_autograd(_differentiate_log_prob, setup_context=save)


@guarded(BY_BACKWARD)
@torch.library.custom_op("pararnn::rows_rotate", mutates_args=())
def rows_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute `rotate` as eager code does: compilers round it otherwise."""
    return rotate(x, cos, sin).clone(memory_format=torch.contiguous_format)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x (B, H, T, D/H) by its positions; channel i pairs with i + D/2H."""
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)


def _differentiate_rotation(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    x, cos, sin = ctx.saved_tensors
    first, second = (grad * sin).chunk(2, -1)
    return (grad * cos + torch.cat([second, -first], -1)).to(x.dtype), None, None


rows_rotate.register_fake(lambda x, cos, sin: x.new_empty(x.shape))
rows_rotate.register_autograd(_differentiate_rotation, setup_context=save)


@guarded(BY_BACKWARD)
@torch.library.custom_op("pararnn::rows_attention", mutates_args=())
def rows_attention(q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Attend from q (B, H, T, D) to k, v (B, H, S, D): a query to the keys `first` to `last`, int
    (B, T), which are counted from its first. Returns (B, T, H, D)."""
    return _run("attention", q, k, v, first, last)


QUERIES = 256
"""Queries whose scores for all keys a backward pass holds at once."""


def _differentiate_attention(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, first, last = ctx.saved_tensors
    wide, scale = torch.promote_types(q.dtype, torch.float32), q.shape[-1] ** -0.5
    index = torch.arange(k.shape[2], device=q.device)
    of_k, of_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    of_q = []
    for begin in range(0, q.shape[2], QUERIES):
        span = slice(begin, begin + QUERIES)
        part = q[:, :, span]
        # No index, which batches of gradients do not take.
        of_y = grad.narrow(1, begin, part.shape[2]).transpose(1, 2)
        low, high = (x[:, None, span, None] for x in (first, last))
        scores = (part @ k.mT).to(wide) * scale
        chances = scores.masked_fill((index < low) | (index > high), -torch.inf).softmax(-1)
        of_chances = (of_y @ v.mT).to(wide)
        of_scores = chances * (of_chances - (of_chances * chances).sum(-1, keepdim=True)) * scale
        of_scores = of_scores.to(q.dtype)
        of_q.append(of_scores @ k)
        of_k = of_k + of_scores.mT @ part
        of_v = of_v + chances.to(q.dtype).mT @ of_y
    return torch.cat(of_q, 2), of_k.to(k.dtype), of_v.to(v.dtype), None, None


rows_attention.register_fake(lambda q, k, v, first, last: q.new_empty(q.transpose(1, 2).shape))
rows_attention.register_autograd(_differentiate_attention, setup_context=save)


@torch.library.custom_op("pararnn::paged_attention", mutates_args=())
def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, last: Tensor, by_rows: bool = True
) -> Tensor:
    """Attend from q (B, H, T, D) to k, v (P, H, N, D) in pages of N tokens, without gradients.

    table: int32 (B, n), each row's pages in order. A query sees the keys up to `last`, int (B, T).
    by_rows: whether with the bits of `rows_attention` on the same keys; else few queries (16) in 16
    bits are faster, with other bits, also than a query by itself. Returns (B, T, H, D).
    """
    return _run("attention", q, k, v, None, last, table, by_rows)


@paged_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, table: Tensor, last: Tensor, by_rows: bool = True) -> Tensor:
    return q.new_empty(q.transpose(1, 2).shape)


@torch.library.custom_op("pararnn::put_in_pages", mutates_args=("key_pages", "value_pages"))
def put_in_pages(
    k: Tensor, v: Tensor, key_pages: Tensor, value_pages: Tensor, table: Tensor, last: Tensor
) -> None:
    """Write keys and values (B, H, T, D) of positions `last`, int (B, T), into pages (P, H, N, D).

    table: as in `paged_attention`.
    """
    _kernels(k).put(k, v, key_pages, value_pages, table, last)


put_in_pages.register_fake(lambda k, v, key_pages, value_pages, table, last: None)


def rows_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x (..., I) by a weight (O, I) as F.linear, in autocast's dtype where that is on.

    The weight may be one of `quantise_weights`.
    """
    dtype = autocast_dtype(x.device)
    numbers, scale = matrix_of(weight)
    if dtype is not None:
        x, numbers = x.to(dtype), numbers if scale is not None else numbers.to(dtype)
    rows, factors = x.reshape(-1, 1, x.shape[-1]), None if scale is None else scale.view(1, -1)
    return rows_product(rows, numbers.unsqueeze(0), factors).view(*x.shape[:-1], len(numbers))
