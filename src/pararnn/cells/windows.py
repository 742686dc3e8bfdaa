"""Windows of a tensor along its last axis, by ops that stay single nodes where a step is traced."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pararnn.base.private import exporting_to_onnx


def windows(x: Tensor, size: int) -> Tensor:
    """Return the entries around each entry along the last axis, zeros outside, for convolutions.

    x: (..., S). Returns (..., S, J) for a size J, entry [s, j] being x[s + j - (J - 1) // 2], in
    x's dtype. With a parameter (J, C) the product ``windows(x, J) @ param.F`` is a convolution with
    C filters. In a matrix cell J is a length of an axis, as self.J, and kernels of a CPU run it.
    Raises ValueError for a size below 1, or for a number.

    :source: the convolution of Chorowski et al. 2015, Attention-Based Models for Speech Recognition
    """
    if size < 1 or not x.ndim:
        raise ValueError(
            f"windows takes a tensor with an axis and a size of at least 1, got {tuple(x.shape)} "
            f"and {size}"
        )
    if exporting_to_onnx():
        return _windows(x, size)
    result: Tensor = _Windows.apply(x, size)
    return result


def _windows(x: Tensor, size: int) -> Tensor:
    if not x.shape[-1]:  # the padding is shorter than a window
        return x.new_empty((*x.shape, size))
    before = (size - 1) // 2
    views = F.pad(x, (before, size - 1 - before)).unfold(-1, size, 1)
    return views.clone(memory_format=torch.contiguous_format)


def _overlap(x: Tensor) -> Tensor:
    """Return the sums over j of x[..., s - j + (J - 1) // 2, j], zeros outside; x: (..., S, J)."""
    length, size = x.shape[-2:]
    before = (size - 1) // 2
    rows = F.pad(x, (0, 0, size - 1 - before, before)).contiguous()
    # The diagonal of s and j counts j from the last one on.
    strides = (*rows.stride()[:-2], size, size - 1)
    return rows.as_strided((*x.shape[:-2], length, size), strides, size - 1).sum(-1)


_LIBRARY = torch.library.Library("pararnn", "FRAGMENT")
_LIBRARY.define("windows(Tensor x, int size) -> Tensor")
_LIBRARY.define("overlap(Tensor x) -> Tensor")
_LIBRARY.impl("windows", _windows, "CompositeExplicitAutograd")
_LIBRARY.impl("overlap", _overlap, "CompositeExplicitAutograd")
torch.library.register_fake(
    "pararnn::windows", lambda x, size: x.new_empty((*x.shape, size)), lib=_LIBRARY
)
torch.library.register_fake("pararnn::overlap", lambda x: x.new_empty(x.shape[:-1]), lib=_LIBRARY)

WINDOWS = torch.ops.pararnn.windows.default
OVERLAP = torch.ops.pararnn.overlap.default


class _Windows(torch.autograd.Function):
    """The op `windows` with its derivatives."""

    @staticmethod
    def forward(x: Tensor, size: int) -> Tensor:
        return torch.ops.pararnn.windows(x, size)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.size = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Overlap.apply(grad), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> Tensor:
        return _Windows.apply(tangent, ctx.size)

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, size: int) -> Any:
        return _Windows.apply(x.movedim(dims[0], 0), size), 0


class _Overlap(torch.autograd.Function):
    """The op `overlap` with its derivatives."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.ops.pararnn.overlap(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.size = inputs[0].shape[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Windows.apply(grad, ctx.size)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return _Overlap.apply(tangent)

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor) -> Any:
        return _Overlap.apply(x.movedim(dims[0], 0)), 0
