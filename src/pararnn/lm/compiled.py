"""torch.compile for what must give the same bits again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def compiled(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """`torch.compile(function, **how)` whose sums have an order that no timing chooses.

    Inductor times some shapes of a reduction and keeps the fastest, so that the same program may
    sum in another order in another process: a run that goes on would have other bits. Before
    PyTorch 2.10 it has no setting for that, and the order is what its cache remembers.
    """
    from torch._inductor import config as inductor  # only who compiles pays for it

    options: dict[str, Any] | None = None
    if hasattr(inductor, "deterministic"):
        options = {"deterministic": True}
    return torch.compile(function, options=options, **how)
