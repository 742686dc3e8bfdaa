"""transformers' Auto classes know our models as soon as both packages are imported."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

OTHER = "transformers"


def register_auto_classes() -> None:
    """Import pararnn.lm.hf now if transformers is imported already, or else when it will be.

    Not always now, as that takes seconds: the demo and plain PyTorch models do without.
    """
    if sys.modules.get(OTHER) is not None:
        _register()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _register() -> None:
    try:
        importlib.import_module("pararnn.lm.hf")
    except ImportError as error:  # of a version that is too old: no reason to break it for others
        warnings.warn(
            f"pararnn's models are unknown to transformers' Auto classes ({error}): "
            "pip install 'pararnn[hf]'",
            stacklevel=2,
        )


class _Watch(MetaPathFinder):
    """Finds transformers as the other finders do, and lets `_register` follow its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != OTHER:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            loader = spec.loader
            execute = loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register()

            loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
