"""Headers around emitted code: a folder for each target, and one for what targets share.

Each has a folder for each family of recurrences, whose headers only its kernels include.
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
    folders = [folder(name) for name in (target, "common")]
    pattern = "**/*.h" if family is None else f"{family}/*.h"
    files = {file for name in folders for glob in ("*.h", pattern) for file in name.glob(glob)}
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted(files))
