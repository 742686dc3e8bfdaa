"""A check, at import, that no other distribution's files are mixed into this package."""

from __future__ import annotations

from glob import glob
from pathlib import Path

SIGNS = (
    "../pararnn_torch-*.dist-info",
    "cells/para_*.py",
    "determinism.py",
    "kernels/*.py",
    "layers/para_*.py",
    "models/causal_lm.py",
    "paged.py",
)
"""Files, seen from this package's folder, that pararnn-torch has and pararnn has not."""


def check_intact(folder: Path) -> None:
    """Check that a folder holds only pararnn's files; ImportError says what to do."""
    for sign in SIGNS:
        for path in glob(str(folder / sign)):
            raise ImportError(
                "two distributions are installed into one folder, pararnn and pararnn-torch, and "
                f"have overwritten each other's files: {Path(path).resolve()} is not pararnn's. "
                "An environment can hold one of them. Remove both (pip uninstall pararnn "
                "pararnn-torch) and install the one that you want again (pip install . in a copy "
                "of pararnn's repository)"
            )


check_intact(Path(__file__).parent.parent)
