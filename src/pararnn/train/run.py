"""A training run from its config to a model, which goes on where an earlier one ended."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pararnn.errors import TrainingError
from pararnn.extras import require
from pararnn.train.checkpoints import (
    checkpoints,
    is_complete,
    last_complete,
    load_state,
    remove_unmarked,
    whole_weights,
    writing,
)
from pararnn.train.config import DataConfig, RunConfig, read_config
from pararnn.train.corpus.tokenizer import ends_of
from pararnn.train.files import beside, write_beside
from pararnn.train.log import forget_after, read_rows
from pararnn.train.plot import plot_rows

if TYPE_CHECKING:
    from pararnn.lm.hf import ParaRNNForCausalLM
    from pararnn.train.setup import TrainingData
    from pararnn.train.trainer import RunTrainer

FIXED = ("model", "data", "optimiser", "batch", "seed")
"""What may not change in a run: weights, data, the place in it, and AdamW's groups go on."""

FREE = ("data.cache",)
"""What may change of it."""

TOKENIZER = "tokenizer"
"""The folder in a run's folder with its tokenizer."""


def run_training(config: RunConfig, packed: TrainingData | None = None) -> Path:
    """Train, or go on from the last complete checkpoint in `config.out`; the model's folder.

    The run's folder gets config.json, tokenizer, log.csv, checkpoint-N, and at the end curves.png
    (where matplotlib is installed) and model/, as `save_pretrained` writes it. packed: the data,
    instead of what `config.data` says.

    Raises MissingExtra without transformers and accelerate; DataError for data that cannot be used;
    TrainingError for a model that cannot be made, for batches that do not divide, for a folder of
    another run, for a loss that is NaN, and for files that cannot be read or written.
    """
    for module in ("transformers", "accelerate"):
        require(module)
    from pararnn.train.setup import bare_model
    from pararnn.train.sharding import process_group
    from pararnn.train.trainer import RunTrainer

    out = Path(config.out)
    check_same_run(config, out / "config.json")
    bare_model(config)  # before the data are made ready, which may take hours
    from pararnn.train.corpus.prepare import prepare

    data: TrainingData = packed or prepare(config.data)
    with quiet(), process_group():
        trainer = RunTrainer(config, data)
        first = trainer.is_world_process_zero()
        if first:
            with writing(out / "config.json", out):
                open_folder(config, data, out)
        trainer.accelerator.wait_for_everyone()
        found = last_complete(out)
        step, checkpoint = found if found else (0, None)
        if first:
            with writing(out / "log.csv", out):
                forget_after(out / "log.csv", step)
            if checkpoint is not None:
                print(f"goes on from {checkpoint}")
        if step < config.steps:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        elif checkpoint is not None:
            load_state(checkpoint, trainer.own_model)
        with writing(out / "model", out):
            export(trainer, data, out / "model")
        if first and importlib.util.find_spec("matplotlib") is not None:
            with writing(out / "curves.png", out):
                plot_rows(read_rows(out / "log.csv"), config.name, out / "curves.png")
        trainer.accelerator.wait_for_everyone()
    return out / "model"


def open_folder(config: RunConfig, packed: TrainingData, out: Path) -> None:
    """Make a run's folder, or make one ready to go on from."""
    out.mkdir(parents=True, exist_ok=True)
    with beside(out / TOKENIZER) as new:
        packed.tokenizer.save(new)
    write_beside(out / "config.json", json.dumps(asdict(config), indent=1) + "\n")
    for path in remove_unmarked(out):
        print(f"{path} was not written to its end: removed")


def check_same_run(config: RunConfig, path: Path) -> None:
    """TrainingError where a folder's config.json is of a run that this one cannot go on with."""
    if not path.exists():
        return
    # Keys that an earlier version did not have are as they are by default.
    theirs = flat({"data": asdict(DataConfig())}) | flat(json.loads(path.read_text("utf-8")))
    own = flat(json.loads(json.dumps(asdict(config))))
    for key in [*own, *(key for key in theirs if key not in own)]:
        matters = key.partition(".")[0] in FIXED and key not in FREE
        if matters and own.get(key) != theirs.get(key):
            raise TrainingError(
                f"{path} has {key} = {theirs.get(key)!r}, and this run {own.get(key)!r}: give it a "
                "folder of its own (out=...), or remove that one"
            )


def flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dots in its keys."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        nested = isinstance(value, Mapping) and value
        found |= flat(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return found


def export(trainer: RunTrainer, packed: TrainingData, folder: Path) -> None:
    """Write the trained model and its tokenizer, from all processes."""
    state = whole_weights(trainer.own_model)
    if trainer.is_world_process_zero():
        with beside(folder) as new:
            packed.tokenizer.save(new)
            write_model(trainer.own_model, state, new)


def export_checkpoint(out: Path, step: int | None = None, folder: Path | None = None) -> Path:
    """Write the model of a checkpoint as `save_pretrained` does, with its tokenizer; the folder.

    Args:
        out: a run's folder, whichever number of processes it ran on; the run need not have ended.
        step: of the checkpoint; None is the last complete one.
        folder: where to; None is out/model-STEP.

    Raises TrainingError where there is no such run or checkpoint, or it cannot be read or written.
    """
    from pararnn.train.setup import bare_model
    from pararnn.train.sharding import process_group

    path = out / "config.json"
    if not path.is_file():
        raise TrainingError(f"{out} is no run's folder: it has no config.json")
    complete = {at: where for at, where in checkpoints(out) if is_complete(where)}
    if step is None:
        step = max(complete, default=None)
    if step not in complete:
        steps = ", ".join(map(str, complete)) or "none"
        raise TrainingError(f"{out} has no complete checkpoint of step {step}; it has {steps}")
    config = read_config(json.loads(path.read_text(encoding="utf-8")))
    folder = folder or out / f"model-{step}"
    with quiet(), process_group():
        model = bare_model(config).to_empty(device="cpu")
        load_state(complete[step], model)
        with writing(folder, out), beside(folder) as new:
            shutil.copytree(out / TOKENIZER, new, dirs_exist_ok=True)
            write_model(model, model.state_dict(), new)
    return folder


def write_model(model: ParaRNNForCausalLM, state: dict[str, Any], folder: Path) -> None:
    """Write weights and config for use, not for training, beside the tokenizer in `folder`.

    Texts end where the tokenizer says, for `generate` and all that is built on it.
    """
    model.config.use_cache = True  # which Trainer turns off
    ends = ends_of(folder)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = ends or (None, None)
    model.save_pretrained(folder, state_dict=state)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers to errors, without bars for files; and put back how it was."""
    logging = require("transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
