"""A trained model as a folder in Hugging Face's format, without transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pararnn.base.atomic import write_text, write_whole
from pararnn.base.errors import CellError, PararnnError
from pararnn.base.extras import installation, require
from pararnn.base.numerics import check_io_dtype
from pararnn.lm.config import LMConfig
from pararnn.lm.mixers import MixerError, layer_types
from pararnn.lm.model import LanguageModel
from pararnn.lm.quantise import is_quantised

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARDS = "model-?????-of-?????.safetensors"
"""Pattern of the files that an index names."""
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)
"""Errors of a file's content whose values are missing or of another type."""
MODEL_TYPE = "pararnn"
MODEL = "model"
"""Folder in a training run's folder with the model that it trained."""
BODY = "model."
"""Prefix of all parameters' names but the head's, in Hugging Face's models."""
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"

CODE = "modeling_pararnn.py"
"""Name of the file that transformers runs by `trust_remote_code=True`."""

CLASSES = {
    "AutoConfig": "ParaRNNConfig",
    "AutoModel": "ParaRNNModel",
    "AutoModelForCausalLM": "ParaRNNForCausalLM",
    "AutoModelForSequenceClassification": "ParaRNNForSequenceClassification",
    "AutoModelForTokenClassification": "ParaRNNForTokenClassification",
}
"""Class that each of transformers' Auto classes makes of a folder."""

AUTO_MAP = {auto: f"{Path(CODE).stem}.{name}" for auto, name in CLASSES.items()}
"""`CLASSES` in the form of config.json."""


Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of weights by name."""


class CheckpointError(PararnnError, ValueError):
    """A model cannot be written as a checkpoint, or a folder does not hold one."""


def check_full_precision(model: nn.Module) -> None:
    """Raise CheckpointError for a model that `quantise_weights` has changed."""
    if any(map(is_quantised, model.parameters())):
        raise CheckpointError(
            "the model's weights are in 8 bits: save a model before quantise_weights, and quantise "
            "what you load"
        )


def save_checkpoint(model: LanguageModel, folder: Path | str) -> None:
    """Write config.json, model.safetensors and `CODE` into a folder; makes the folder.

    `ParaRNNForCausalLM.save_pretrained` writes the same. Raises CheckpointError for mixers that
    transformers has no word for, MissingExtra without safetensors.
    """
    try:
        content = model.config.to_hf(layer_types(model.config.mixers or ()))
    except ValueError as error:
        raise CheckpointError(
            f"{error}: save the model's config and state_dict() yourself"
        ) from error
    check_full_precision(model)
    config = {
        **content,
        "architectures": ["ParaRNNForCausalLM"],
        "auto_map": AUTO_MAP,
        "model_type": MODEL_TYPE,
        "dtype": str(model.embed_tokens.weight.dtype).removeprefix("torch."),
    }
    weights = {
        name if name == HEAD else BODY + name: tensor.detach().contiguous()
        for name, tensor in model.state_dict().items()
        if not (model.config.tie_word_embeddings and name == HEAD)
    }
    folder = Path(folder)
    write_code(folder)
    write_files(folder / CONFIG, config, folder / WEIGHTS, weights)
    for path in [folder / INDEX, *folder.glob(SHARDS)]:  # of an earlier save in several files
        path.unlink(missing_ok=True)


def write_files(
    config: Path, content: Mapping[str, Any], weights: Path, tensors: Mapping[str, Tensor]
) -> None:
    """Write a config as JSON and weights, each whole, and both before either gets its name.

    After an error, such as a full disk, earlier files of these names are as they were.
    """
    save_file = require("safetensors.torch").save_file
    with write_whole(config) as new_config, write_whole(weights) as new_weights:
        text = json.dumps(content, indent=2, sort_keys=True) + "\n"
        new_config.write_text(text, encoding="utf-8")
        save_file(dict(tensors), new_weights, metadata={"format": "pt"})


def remove_older_weights(folder: Path) -> None:
    """Remove a file of weights or an index that an earlier save left beside those of the last one.

    transformers removes neither, and reads the file where both are there.
    """
    if (folder / INDEX).exists() and (folder / WEIGHTS).exists():
        older = WEIGHTS if _weight_files(folder) != [folder / WEIGHTS] else INDEX
        (folder / older).unlink()


def write_code(folder: Path | str) -> None:
    """Write the file that imports pararnn's classes for transformers; makes the folder."""
    names = "".join(f"        {name},\n" for name in CLASSES.values())
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_text(
        Path(folder, CODE),
        # In a try statement, as transformers looks for other imports, and tells users to install a
        # package of pararnn's name, whoever may have published one.
        f'"""The classes of this folder\'s model: pararnn\'s, with its extra hf."""\n\ntry:\n'
        f"    from pararnn.lm.hf import (\n{names}    )\nexcept ImportError as error:\n"
        "    raise ImportError(\n"
        f'        "this model needs pararnn: {installation("hf")}"\n    ) from error\n',
    )


def load_checkpoint(folder: Path | str, device: torch.device | str = "cpu") -> LanguageModel:
    """Load the model of a folder, in evaluation mode on `device`.

    The folder is of `save_checkpoint` or `ParaRNNForCausalLM.save_pretrained`, its weights in one
    file or several, or of a training run: see `model_folder`. Raises CheckpointError where there is
    no model or the files do not fit together, CellError and MixerError for what cannot be imported,
    and MissingExtra without safetensors.
    """
    folder = model_folder(folder)
    content = read_config(folder)
    if content.get("model_type") != MODEL_TYPE:
        raise CheckpointError(
            f"{folder} holds a model of type {content.get('model_type')!r}, not {MODEL_TYPE!r}: "
            "load it by transformers' Auto classes"
        )
    try:
        config = LMConfig.of_hf(content)
        dtype = getattr(torch, content.get("dtype") or "float32")
        check_io_dtype(dtype, "dtype")
        model = LanguageModel(config, device=device, dtype=dtype)
    except (CellError, MixerError):
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{folder / CONFIG} describes no model: {error}") from error
    weights = {name.removeprefix(BODY): tensor for name, tensor in read_weights(folder)}
    if config.tie_word_embeddings and EMBEDDING in weights:
        shared = weights[EMBEDDING]
        if not torch.equal(weights.setdefault(HEAD, shared), shared):
            raise CheckpointError(
                f"{folder / CONFIG} says tie_word_embeddings, and {HEAD} is not the embedding: set "
                "it to false, or remove that weight"
            )
    check_weights(folder, shapes_of(model.state_dict()), shapes_of(weights))
    model.load_state_dict(weights)
    return model.eval()


def model_folder(folder: Path | str) -> Path:
    """Return the folder of a model: the given one, or of a training run's folder its model's.

    Raises CheckpointError where there is none.
    """
    folder = Path(folder)
    content = read_config(folder)
    if "model_type" in content or not isinstance(content.get(MODEL), dict):  # a run's has a record
        return folder
    if (folder / MODEL / CONFIG).exists():
        return folder / MODEL
    exports = sorted(str(path.parent) for path in folder.glob(f"{MODEL}-*/{CONFIG}"))
    raise CheckpointError(
        f"{folder} is a run's folder, and its training has not ended: "
        + (f"name one of {', '.join(exports)}, or " if exports else "")
        + f"write the model of its last checkpoint by `pararnn export {folder}`"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Read a folder's config.json; CheckpointError where there is none."""
    if folder.suffix == ".pt":
        raise CheckpointError(
            f"{folder} is of an older version: a model is now a folder with {CONFIG} and "
            f"{WEIGHTS}; train it again, as the model has changed too"
        )
    try:
        content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"there is no model in {folder}: it has no {CONFIG}. Name the folder of a model, or of "
            "a training run; `pararnn export` writes the model of a run's checkpoint"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{folder / CONFIG} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder / CONFIG} must be a JSON object, got {content!r:.40}")
    return content


def _weight_files(folder: Path) -> list[Path]:
    """Return the files of the weights: one, or those of an index.

    transformers removes the files of an index, and not the index, where it writes one file.
    """
    single = folder / WEIGHTS
    if not (folder / INDEX).exists():
        return [single]
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    except UNREADABLE as error:
        raise CheckpointError(f"{folder / INDEX} names no files of weights: {error!r}") from error
    return files if all(file.exists() for file in files) or not single.exists() else [single]


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in a folder, one at a time; CheckpointError for files that hold none."""
    for file in _weight_files(folder):
        with open_weights(file) as content:
            for name in content.keys():  # noqa: SIM118 (it is no mapping)
                yield name, content.get_tensor(name)


def read_shapes(folder: Path) -> Shapes:
    """Return the shapes of the weights in a folder, without reading them."""
    result: dict[str, tuple[int, ...]] = {}
    for file in _weight_files(folder):
        with open_weights(file) as content:
            for name in content.keys():  # noqa: SIM118 (it is no mapping)
                result[name] = tuple(content.get_slice(name).get_shape())
    return result


@contextmanager
def open_weights(file: Path) -> Iterator[Any]:
    """Open a file of weights; CheckpointError for one that holds none."""
    safetensors = require("safetensors")
    try:
        with safetensors.safe_open(file, "pt") as content:
            yield content
    except FileNotFoundError as error:
        raise CheckpointError(f"there are no weights: {file} is missing") from error
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{file} holds no weights: {error}") from error


def shapes_of(weights: Mapping[str, Tensor]) -> Shapes:
    """Return the shapes of weights by name."""
    return {name: tuple(tensor.shape) for name, tensor in weights.items()}


def check_weights(folder: Path, expected: Shapes, weights: Shapes) -> None:
    """Check names and shapes against the model's; CheckpointError names the first that differ."""
    faults = {
        "misses the weight": [name for name in expected if name not in weights],
        "holds a weight that the model has not": [name for name in weights if name not in expected],
        "holds a weight of another shape": [
            f"{name} {shape}, which must be {expected[name]},"
            for name, shape in weights.items()
            if name in expected and shape != expected[name]
        ],
    }
    for fault, names in faults.items():
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"{folder} {fault}: {names[0]}{more}")
