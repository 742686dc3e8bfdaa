"""States of texts in files, which only the model that made them reads."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

from pararnn.base.atomic import write_whole
from pararnn.base.errors import PararnnError
from pararnn.base.extras import require
from pararnn.lm.cache import TENSORS, LMCache, PlainCache
from pararnn.lm.model import LanguageModel

FORMAT = "pararnn-state-1"
FREE = ("solver", "backend", "recompute_gates")
"""Fields of a config that change no state but by rounding."""
SAMPLED = 64
"""Numbers of each weight that a fingerprint reads, at least where there are so many."""


class StateError(PararnnError, ValueError):
    """A file holds no state, or that of another model, or a state cannot be saved."""


def fingerprints(model: LanguageModel) -> dict[str, str]:
    """Return digests of a model's config, and of numbers from all over each of its weights."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in FREE}
    text = json.dumps(config, sort_keys=True, default=str)
    weights = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        numbers: Tensor = getattr(parameter, "qdata", parameter).detach().flatten()
        some = numbers[:: max(1, len(numbers) // SAMPLED)].contiguous()
        weights.update(f"{name} {tuple(parameter.shape)} {numbers.dtype}".encode())
        weights.update(some.view(torch.uint8).cpu().numpy().tobytes())
    config_digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return {"config": config_digest, "weights": weights.hexdigest()}


def save_state(state: LMCache, model: LanguageModel, file: Path | str) -> None:
    """Write what a model remembers of texts into a file (safetensors), with its fingerprint.

    The file is whole or absent. Raises StateError for a cache of padded rows with keys, whose mask
    is not part of it, and for a file that cannot be written; MissingExtra without safetensors.
    """
    if state.masked:
        raise StateError(
            "the state has keys of padding, and a file holds no mask: save rows one by one"
        )
    state = state if state.places is None else state.fork(1)  # out of the pages
    tensors = {
        f"{layer}.{name}": tensor.detach().contiguous()
        for layer, memory in enumerate(state.layers)
        for name in TENSORS
        if (tensor := getattr(memory, name, None)) is not None
    }
    metadata = {"format": FORMAT, "length": str(state.length), **fingerprints(model)}
    save_file = require("safetensors.torch").save_file
    try:
        with write_whole(Path(file)) as new:
            save_file(tensors, new, metadata=metadata)
    except (require("safetensors").SafetensorError, OSError) as error:
        raise StateError(
            f"{file} cannot be written: {error}; name a file in a folder that is there, with room"
        ) from error


def load_state(model: LanguageModel, file: Path | str) -> LMCache:
    """Read a state that `save_state` wrote, onto the model's device.

    Raises StateError for a file that holds none, and for the state of a model with another config
    or other weights; MissingExtra without safetensors.
    """
    safetensors, device = require("safetensors"), model.lm_head.weight.device
    try:
        with safetensors.safe_open(file, "pt") as content:
            metadata = content.metadata() or {}
            names = list(content.keys())
            tensors = {name: content.get_tensor(name).to(device) for name in names}
    except FileNotFoundError as error:
        raise StateError(f"there is no state: {file} is missing") from error
    except (safetensors.SafetensorError, OSError) as error:
        raise StateError(f"{file} holds no state: {error}") from error
    if metadata.get("format") != FORMAT:
        raise StateError(f"{file} holds no state: its format is not {FORMAT}")
    for what, digest in fingerprints(model).items():
        if metadata.get(what) != digest:
            raise StateError(
                f"{file} holds the state of a model with another {what}: load it with the model "
                "that made it, or read the text again"
            )
    state = LMCache(len(model.backbone.layers))
    state.length = int(metadata["length"])
    for name, tensor in tensors.items():
        layer, _, kind = name.partition(".")
        memory = state.layers[int(layer)]
        assert isinstance(memory, PlainCache)
        setattr(memory, kind, tensor)
    return state
