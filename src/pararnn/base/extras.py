"""Optional packages, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from pararnn.base.errors import MissingExtra

EXTRAS = {
    "datasets": "train",
    "lm_eval": "eval",
    "matplotlib": "demo",
    "pyarrow": "train",
    "safetensors": "demo",
    "starlette": "serve",
    "tensorboard": "train",
    "tokenizers": "train",
    "tqdm": "demo",
    "torchao": "quantise",
    "transformers": "hf",
    "uvicorn": "serve",
}
"""By package: the extra of pararnn that installs it."""


def require(module: str) -> Any:
    """Import and return a module of a package in EXTRAS; MissingExtra says how to install it."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{package} is needed here: pip install 'pararnn[{EXTRAS[package]}]' ({error})"
        ) from error
