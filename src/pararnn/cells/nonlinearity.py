"""Named nonlinearities, so that a cell's config can hold them and stay JSON."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pararnn.base.errors import CellError

NONLINEARITIES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "softplus": F.softplus,
    "softsign": F.softsign,
    # F.hardsigmoid's gradient kernel holds 1/6 in float32, also for float64.
    "hardsigmoid": lambda x: torch.clamp(x / 6 + 0.5, 0, 1),
    "hardtanh": F.hardtanh,
    "identity": lambda x: x,
}
"""Nonlinearity by name; add your own pointwise functions under new names."""


def nonlinearity(name: str) -> Callable[[Tensor], Tensor]:
    """Return the function called `name`; CellError if there is none."""
    if name not in NONLINEARITIES:
        raise CellError(f"unknown nonlinearity {name!r}; known: {', '.join(NONLINEARITIES)}")
    return NONLINEARITIES[name]
