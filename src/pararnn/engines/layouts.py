"""The layouts that kernels take: adjacent channels, heads by stride."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def by_head(gates: Tensor) -> Tensor:
    """Gates as (B, T, G, H, D/H) with adjacent channels; a copy only where strides demand it."""
    return unit_stride(gates.unsqueeze(3) if gates.ndim == 4 else gates)


def unit_stride(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it, with adjacent elements in its last dimension."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def narrow(field: Tensor, dtype: torch.dtype) -> Tensor:
    """A field in the compute dtype; one value a step stays (B, T, 1)."""
    if field.stride(-1) == 0:
        return field[..., :1].to(dtype)
    return unit_stride(field.to(dtype))


def copied(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy."""
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)


def addresses(tensors: Iterable[Tensor | None]) -> list[int]:
    """Addresses for a kernel; 0 for None."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
