"""Transformers' Auto classes learn of the language models as soon as both are there.

To import transformers takes longer than all else here, and most of what uses `pararnn.lm` does
without: so the adapter is imported when transformers is, by whomever.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = "transformers"
"""The whole of it: its parts import one another, and a hook in one would meet half of others."""


def register_once_there() -> None:
    """Register the models with the Auto classes: now, or right after transformers is imported."""
    if PACKAGE in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _Transformers())


def register() -> None:
    """Import the adapter, which registers itself; warns where transformers is too old for it."""
    try:
        importlib.import_module("pararnn.lm.hf")
    except ImportError as error:  # plain models do not need it
        warnings.warn(
            f"transformers is too old for pararnn's models ({error}): pip install 'pararnn[hf]'",
            stacklevel=2,
        )


class _Transformers(MetaPathFinder):
    """Finds transformers as others do, to be followed by `register`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != PACKAGE:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                register()

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
