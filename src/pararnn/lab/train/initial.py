"""Weights that a run starts from: of a checkpoint of another run, or of a model's folder."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from pararnn.base.errors import PararnnError, TrainingError
from pararnn.lab.records import read_json
from pararnn.lab.train.checkpoints import KIND, damage_of, last_complete, load_weights, tensors_in
from pararnn.lab.train.config import RunConfig
from pararnn.lab.train.files import read_mark
from pararnn.lab.train.folder import CONFIG, TOKENIZER, config_of
from pararnn.lab.train.setup import TrainingData
from pararnn.lab.train.sharding import set_whole
from pararnn.lm.checkpoint import (
    HEAD,
    MODEL_TYPE,
    Shapes,
    check_weights,
    read_shapes,
    read_weights,
    shapes_of,
)
from pararnn.lm.config import LMConfig

FREE = (
    *("solver", "backend", "recompute_gates", "recurrent_clip", "batch_invariant"),
    *("projection_gain", "recurrent_std", "rope_theta", "norm_eps"),
)
"""Fields of a model that may differ from those of the model its weights come from: how it is
computed and drawn, and numbers without weights that users change on purpose."""
VOCABULARY = "tokenizer.json"


class Source(NamedTuple):
    """Folder of weights. model: their model. tokenizer: its folder. kind: "checkpoint", "model"."""

    folder: Path
    model: LMConfig
    tokenizer: Path
    kind: str


def source_of(name: str) -> Source:
    """Return the weights in a folder: of a run, of one of its checkpoints, or of a model.

    A run's are those of its last complete checkpoint. Raises TrainingError if there are none.
    """
    folder = Path(name)
    if read_mark(folder, KIND) is not None:
        return Source(folder, config_of(folder.parent).model, folder.parent / TOKENIZER, KIND)
    try:
        content = read_json((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"init_from={name} has no weights to start from ({error}): name the folder of a run, "
            "of one of its checkpoints, or of a model as save_pretrained writes it"
        ) from error
    if isinstance(content, dict) and "model_type" in content:
        if content["model_type"] != MODEL_TYPE:
            raise TrainingError(
                f"init_from={name} is a model of type {content['model_type']!r}: runs start from "
                f"those of type {MODEL_TYPE!r}"
            )
        try:
            model = LMConfig.of_hf(content)
        except (ValueError, TypeError, KeyError) as error:
            raise TrainingError(
                f"init_from={name}: {folder / CONFIG} describes no model: {error!r}"
            ) from error
        return Source(folder, model, folder, "model")
    last = last_complete(folder)
    if last is None:
        raise TrainingError(f"init_from={name} has no complete checkpoint to start from")
    return source_of(str(last[1]))


def check_initial(config: RunConfig, model: nn.Module) -> Source:
    """Check that a run can start from the weights of its `init_from`, and return them.

    model: the run's. Raises TrainingError for the first value of the models, or else the first
    weight, that does not fit.
    """
    source = source_of(config.init_from)
    stored, current = (json.loads(json.dumps(asdict(m))) for m in (source.model, config.model))
    for name in stored:
        if name not in FREE and stored[name] != current[name]:
            raise TrainingError(
                f"init_from={config.init_from} has model.{name} = {stored[name]!r}, and this run "
                f"{current[name]!r}: train a model of those sizes and parts, or start from other "
                "weights"
            )
    try:
        check_weights(source.folder, *_shapes(source, model))
    except PararnnError as error:
        raise TrainingError(f"init_from={config.init_from}: {error}") from error
    return source


def check_tokenizer(source: Source, data: TrainingData) -> None:
    """Raise TrainingError if weights were trained on the tokens of another vocabulary."""
    stored = _vocabulary(source.tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        data.tokenizer.save(Path(scratch))
        current = _vocabulary(Path(scratch))
    if stored is not None and current is not None and stored != current:
        raise TrainingError(
            f"the weights of {source.folder} know the tokens of another tokenizer than this run's: "
            f"set data.tokenizer={source.tokenizer}, or start from other weights"
        )


def load_initial(config: RunConfig, model: nn.Module) -> None:
    """Read the weights of a run's `init_from` into its model, on any number of processes."""
    source = check_initial(config, model)
    if source.kind == KIND:
        damage = damage_of(source.folder)
        if damage is not None:
            raise TrainingError(
                f"init_from={config.init_from}: {source.folder} is damaged, {damage}"
            )
        load_weights(source.folder, model)
        return
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in read_weights(source.folder):
            if name in parameters:  # but the head that is the embedding
                set_whole(parameters[name], weight)


def _shapes(source: Source, model: nn.Module) -> tuple[Shapes, Shapes]:
    """Return the shapes of a model's weights, and of a source's; of tied weights one counts."""
    if source.kind == KIND:
        stored = shapes_of(tensors_in(source.folder, "model", torch.device("meta")))
    else:
        stored = read_shapes(source.folder)
    skip = {HEAD} if source.model.tie_word_embeddings else set()
    current, stored = (
        {name: shape for name, shape in shapes.items() if name not in skip}
        for shapes in (shapes_of(model.state_dict()), stored)
    )
    return current, stored


def _vocabulary(folder: Path) -> Any:
    """Return a tokenizer's tokens with their ids; None without a `VOCABULARY`."""
    if not (folder / VOCABULARY).exists():
        return None
    content = json.loads((folder / VOCABULARY).read_text(encoding="utf-8"))
    return (content.get("model") or {}).get("vocab")
