"""torch.compile with results that are the same bits in every process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pararnn.base.private import inductor_config


def compile_repeatably(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Call `torch.compile(function, **options)`, with sums whose order no timing chooses.

    Inductor times some shapes of a reduction and keeps the fastest. The same program may then sum
    in another order in another process, and a resumed run has other bits. Before PyTorch 2.10 there
    is no setting for that, and the order is what Inductor's cache holds.
    """
    inductor = inductor_config()
    settings: dict[str, Any] | None = None
    if hasattr(inductor, "deterministic"):
        settings = {"deterministic": True}
    return torch.compile(function, options=settings, **options)
