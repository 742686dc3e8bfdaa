"""The headers that emitted code is put into: one folder a target, and what targets share."""

from __future__ import annotations

from functools import cache
from pathlib import Path

LANGUAGES = ("cpp", "cuda")
"""What there are headers for."""
KERNELS = Path(__file__).parents[1] / "kernels"


def folder(target: str) -> Path:
    """Where a target's headers are."""
    return KERNELS / target


@cache
def text(target: str) -> str:
    """All that a target's headers say: compiled code depends on it."""
    files = [*sorted(folder(target).glob("*.h")), *sorted(folder("common").glob("*.h"))]
    return "\n".join(file.read_text(encoding="utf-8") for file in files)
