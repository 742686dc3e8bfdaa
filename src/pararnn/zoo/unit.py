"""Vectors of length 1."""

from __future__ import annotations

import torch
from torch import Tensor


def unit(x: Tensor, eps: float) -> Tensor:
    """Return vectors (..., N) of the last axis at length 1; `eps` is added to their squares."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
