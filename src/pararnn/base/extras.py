"""Optional packages, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from pararnn.base.errors import MissingExtra

EXTRAS = {
    "datasets": "train",
    "lm_eval": "eval",
    "matplotlib": "train",
    "pyarrow": "train",
    "pydantic": "serve",
    "safetensors": "demo",
    "starlette": "serve",
    "tensorboard": "train",
    "tokenizers": "train",
    "tqdm": "demo",
    "tyro": "demo",
    "pandas": "train",
    "torchao": "quantise",
    "transformers": "hf",
    "uvicorn": "serve",
}
"""By package: the extra of pararnn that installs it."""


def installation(extra: str) -> str:
    """Return how to install this package with an extra. It is in no package index yet."""
    copy, wheel = f"pip install -e '.[{extra}]'", f"pip install 'WHEEL[{extra}]'"
    return f"{copy} in a copy of pararnn's repository, or {wheel}"


def require(module: str) -> Any:
    """Import and return a module of a package in EXTRAS; MissingExtra says how to install it."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{package} is needed here ({error}): {installation(EXTRAS[package])}"
        ) from error
