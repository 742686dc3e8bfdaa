"""A causal language model and its tokenizer, from a folder or by a name on the Hub."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from pararnn.lm.checkpoint import MODEL_TYPE, UNREADABLE, CheckpointError, model_folder

HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""Pattern of names on the Hub."""


def load_folder(folder: Path | str, dtype: str = "auto") -> tuple[Any, Any]:
    """Load the model and the tokenizer of a folder, which may be a training run's.

    Every weight of the model is in the folder, and every weight in a folder of ours is the model's.
    dtype: of the weights; "auto" is the folder's. Raises CheckpointError where the folder holds no
    such model, CellError for a cell that cannot be imported.
    """
    # model_folder raises for a name that is no folder, which would be looked for on the Hub.
    return _load(model_folder(folder), dtype, local_files_only=True)


def load_model(name: str, dtype: str = "auto") -> tuple[Any, Any]:
    """Load as `load_folder`; a name that is no folder is looked for on the Hub."""
    if Path(name).exists() or not HUB.fullmatch(name):
        return load_folder(name, dtype)
    try:
        return _load(name, dtype)
    except CheckpointError as error:
        raise CheckpointError(
            f"there is no folder {name!r}, and no model of that name: {error}"
        ) from error


def _load(name: Path | str, dtype: str, **where: bool) -> tuple[Any, Any]:
    auto_model: Any = AutoModelForCausalLM
    try:
        model, info = auto_model.from_pretrained(
            name, dtype=dtype, output_loading_info=True, **where
        )
        tokenizer = AutoTokenizer.from_pretrained(name, **where)
    except (*UNREADABLE, OSError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{name} cannot be loaded: {reason}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(f"{name} misses the weight {missing[0]}, {len(missing)} in all")
    more = sorted(info["unexpected_keys"])
    if more and model.config.model_type == MODEL_TYPE:  # some other models have such weights
        raise CheckpointError(
            f"{name} holds a weight that the model has not: {more[0]}, {len(more)} in all"
        )
    for weight, value in model.named_parameters():
        if value.numel() and not math.isfinite(sum(map(float, value.detach().aminmax()))):
            raise CheckpointError(f"{name}: {weight} is NaN or infinite, as its training diverged")
    return model, tokenizer
