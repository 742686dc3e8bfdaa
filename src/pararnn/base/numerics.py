"""The numerics contract: which dtype computes, and how far a result may be off.

Three claims hold for every solve. Backward error: each returned step obeys the recurrence to
rounding. Forward error: outputs and gradients lie within the dtype's tolerance of a float64
sequential run. No units: every tolerance is relative to the quantity's own values.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pararnn.base.device import type_of

DEFECT_ULPS = 8
"""Largest defect allowed in a returned step, in roundings of its channel's largest |h| so far."""

FORWARD_TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.bfloat16: 1.5e-2,
    torch.float16: 2e-3,
}
"""Largest max-norm relative error of outputs and gradients, beyond 4 sequential errors."""

SEQUENTIAL_ERRORS = 4
"""Multiple of the same-dtype sequential run's error that is allowed on top of the tolerance."""

CHANNEL_FACTOR = 100
"""Multiple of that allowance for a single channel, relative to its own values."""

MAX_RELATIVE_TOLERANCE = 0.25
"""Cap on every tolerance; at 1.0 a zero result would pass."""

APPROXIMATED = 2.0**-10
"""Error of functions in bfloat16 kernels on a GPU: twice that of the hardware's tanh.

In samples of rounding it counts as rounding does: dynamics that expand errors expand these too."""

NEAR_OVERFLOW = 1e-3
"""Fraction of the largest number above which overflow depends on the order of evaluation."""

REVERSE_TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 2e-4,
    torch.bfloat16: 2e-3,
    torch.float16: 2e-3,
}
"""As FORWARD_TOLERANCE, for gradients compared with those at the returned states, step by step.

Rounding of the states is no excuse there; what 16-bit kernels on a GPU may approximate is."""

REVERSE_QUIET = 1e-3
"""Relative change by rounding above which a gradient is not compared.

Where steps expand errors, samples of rounding differ by large factors."""


def compute_dtype(io_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of carried states for gates of `io_dtype`: float64 for it, else float32."""
    return torch.float64 if io_dtype == torch.float64 else torch.float32


def check_io_dtype(dtype: torch.dtype, what: str) -> None:
    """Raise TypeError unless `dtype` is a floating dtype that the contract covers."""
    if dtype not in FORWARD_TOLERANCE:
        dtypes = ", ".join(str(d) for d in FORWARD_TOLERANCE)
        raise TypeError(f"{what} must have one of the dtypes {dtypes}, got {dtype}")


def underflow(dtype: torch.dtype) -> float:
    """Return the size below which rounding to `dtype` is absolute.

    The smallest normal number, below which kernels may flush to zero; for float16, whose results
    are rounded from float32, the smallest step between two numbers.
    """
    info = torch.finfo(dtype)
    return info.tiny * info.eps if dtype == torch.float16 else info.tiny


def rounding(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the error of rounding such sizes to `dtype`: eps of them, or `underflow`."""
    return (torch.finfo(dtype).eps * sizes).clamp(min=underflow(dtype))


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context with the contract's precision, inside any autocast region of the caller."""
    if not type_of(device).computes:  # PyTorch has no autocast for meta
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of matrix products in the caller's autocast region; None outside of one."""
    if not type_of(device).computes or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
