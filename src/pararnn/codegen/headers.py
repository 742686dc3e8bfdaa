"""Headers around emitted code: a folder for each target, and one for what targets share.

In each, a folder for each family of recurrences holds what only its kernels include.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

LANGUAGES = ("cpp", "cuda")
"""Languages with headers."""
KERNELS = Path(__file__).parents[1] / "kernels"


def folder(target: str) -> Path:
    """Return the folder of a target's headers, which compilers search."""
    return KERNELS / target


@cache
def text(target: str, family: str | None = None) -> str:
    """Return the text of all headers that a target's code may include, as part of cache keys.

    `family`: None for those of all families.
    """
    parts = [folder(part) for part in (target, "common")]
    pattern = "**/*.h" if family is None else f"{family}/*.h"
    files = {file for part in parts for glob in ("*.h", pattern) for file in part.glob(glob)}
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(files))
