"""Rules that decompose ops into simpler ones: PyTorch's, and some that it lacks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor

from pararnn.base.private import core_aten_decompositions, is_composite

aten = torch.ops.aten

# Not decomposed: ops without a trace, and ops whose rule is longer and rounds differently.
WHOLE = {aten.detach.default, aten.empty_like.default, aten.lerp.Tensor, aten.lerp.Scalar}


@functools.cache
def rule_of(op: Any) -> Callable[..., Any] | None:
    """Return the function that decomposes an op, None for one that stays.

    Rules come without the wrappers that promote dtypes, as recorded ops have promoted dtypes: the
    wrappers import SymPy and torch._dynamo, which takes a second.
    """
    if op in WHOLE:
        return None
    rule = _rules().get(op)
    if rule is None:
        return op.decompose if is_composite(op) else None
    return unwrap(rule)


def _axes(x: Tensor, dim: Sequence[int] | int | None) -> list[int]:
    """Return the dimensions of a reduction, all of them for None and for an empty list."""
    if isinstance(dim, int):
        return [dim]
    return [*dim] if dim else [*range(x.ndim)]


def vector_norm(
    x: Tensor,
    ord: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the norm of x over `dim`; its gradient at zero is PyTorch's, 0."""
    x, axes = x if dtype is None else x.to(dtype), _axes(x, dim)
    if math.isinf(ord):
        return x.abs().amax(axes, keepdim) if ord > 0 else x.abs().amin(axes, keepdim)
    if ord == 0:
        return (x != 0).to(x.dtype).sum(axes, keepdim)
    if ord == 1:
        return x.abs().sum(axes, keepdim)
    if ord == 2:
        return (x * x).sum(axes, keepdim).sqrt()
    return x.abs().pow(ord).sum(axes, keepdim).pow(1 / ord)


def variance_and_mean(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the variance and the mean of x over `dim`."""
    axes = _axes(x, dim)
    mean, count = x.mean(axes, True), math.prod(x.shape[axis] for axis in axes)
    difference = x - mean
    squares = (difference * difference).sum(axes, keepdim)
    variance = squares / max(0.0, count - (1 if correction is None else correction))
    return variance, mean if keepdim else x.mean(axes)


def variance(x: Tensor, dim: Sequence[int] | None = None, **options: Any) -> Tensor:
    """Return the variance of x over `dim`."""
    return variance_and_mean(x, dim, **options)[0]


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised x, its mean, and the reciprocal of its deviation."""
    axes = [*range(-len(shape), 0)]
    variance, mean = variance_and_mean(x, axes, correction=0, keepdim=True)
    scale = (variance + eps).rsqrt()
    y = (x - mean) * scale
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, mean, scale


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight and bias of `layer_norm` that a mask asks for."""
    axes, outer = [*range(-len(shape), 0)], [*range(x.ndim - len(shape))]
    normed = (x - mean) * scale
    inner = grad if weight is None else grad * weight
    along = normed * (inner * normed).mean(axes, True)
    of_x = scale * (inner - inner.mean(axes, True) - along) if mask[0] else None
    sums = [
        (y.sum(outer) if outer else y) if wanted else None
        for y, wanted in zip((grad * normed, grad), mask[1:], strict=True)
    ]
    return of_x, sums[0], sums[1]


def any_of(x: Tensor, dim: Sequence[int] | int | None = None, keepdim: bool = False) -> Tensor:
    """Return whether any entry along `dim` is not 0."""
    return (x != 0).amax(_axes(x, dim), keepdim)


def select_backward(grad: Tensor, size: Sequence[int], dim: int, index: int) -> Tensor:
    """Return the gradient of the tensor that an entry along `dim` was selected from."""
    if size[dim] == 1:
        return grad.unsqueeze(dim)
    whole: Tensor = grad.new_zeros(size).select_scatter(grad, dim, index)
    return whole


def zeros(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **_: Any,
) -> Tensor:
    """Return zeros, as in the gradient of select_scatter; PyTorch's rule imports SymPy."""
    return torch.full(tuple(size), 0.0, dtype=dtype, device=device)


def shrink_backward(grad: Tensor, x: Tensor, limit: float) -> Tensor:
    """Return the gradient of softshrink and hardshrink."""
    return torch.where(x.abs() > limit, grad, 0.0)


def hardsigmoid_backward(slope: float, grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of hardsigmoid."""
    return torch.where((x > -3.0) & (x < 3.0), grad * slope, 0.0)


@functools.cache
def _rules() -> dict[Any, Callable[..., Any]]:
    """Return rules by op: PyTorch's, rules that it lacks, and replacements of rules whose results
    differ from its kernels'."""
    one = torch.ones((), dtype=torch.float64, device="cpu")
    sixth = aten.hardsigmoid_backward(one, 0 * one).item()  # a float32's, in float64 too
    return core_aten_decompositions() | {
        aten.linalg_vector_norm.default: vector_norm,
        aten.var.correction: variance,
        aten.var_mean.correction: variance_and_mean,
        aten.native_layer_norm.default: layer_norm,
        aten.native_layer_norm_backward.default: layer_norm_backward,
        aten.any.default: any_of,
        aten.any.dim: any_of,
        aten.any.dims: any_of,
        aten.select_backward.default: select_backward,
        aten.zeros.default: zeros,
        aten.softshrink_backward.default: shrink_backward,
        aten.hardshrink_backward.default: shrink_backward,
        aten.hardsigmoid_backward.default: functools.partial(hardsigmoid_backward, sixth),
    }
