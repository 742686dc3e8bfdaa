"""Optional packages, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from pararnn.errors import PararnnError


class MissingExtra(PararnnError, ImportError):
    """A package of the optional extra `demo` cannot be imported."""


def require(module: str) -> Any:
    """Import and return a module of the extra `demo`; MissingExtra says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{module.partition('.')[0]} is needed here: pip install 'pararnn[demo]' ({error})"
        ) from error
