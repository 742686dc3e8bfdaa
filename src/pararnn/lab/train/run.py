"""A training run from its config to a model; it resumes where an earlier one ended."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from pararnn.base.errors import DivergenceError, TrainingError
from pararnn.base.extras import require
from pararnn.lab.folders import make_folder
from pararnn.lab.train.checkpoints import (
    checkpoints,
    last_complete,
    last_whole,
    load_weights,
    resume_point,
    whole_weights,
    writing,
)
from pararnn.lab.train.config import RunConfig
from pararnn.lab.train.corpus.tokenizer import ends_of
from pararnn.lab.train.files import replace_written, written_files
from pararnn.lab.train.folder import (
    TOKENIZER,
    add_start,
    check_folder,
    check_same_data,
    claim,
    config_of,
    mark_diverged,
    open_folder,
)
from pararnn.lab.train.log import LOG, forget_after
from pararnn.lm.checkpoint import MODEL

if TYPE_CHECKING:
    from pararnn.lab.train.setup import TrainingData
    from pararnn.lab.train.trainer import RunTrainer
    from pararnn.lm.hf import ParaRNNForCausalLM


def run_training(config: RunConfig, packed: TrainingData | None = None) -> Path:
    """Train, or resume from the last complete checkpoint in `config.out`; return the model's
    folder.

    The run's folder gets config.json, record.json, tokenizer, log.jsonl, checkpoint-N, and at the
    end model/, as `save_pretrained` writes it. packed: the data, in place of `config.data`.

    On SIGTERM, SIGINT and SIGHUP a run finishes its step and writes a checkpoint. Then
    KeyboardInterrupt says from where the same command resumes.

    Raises MissingExtra without transformers; DataError for data that cannot be used;
    TrainingError for a model that cannot be made, for batches that do not divide, for a folder of
    another run or one that another run is at work in, for other data than the run's, for weights
    to start from that do not fit, for a loss that is NaN (DivergenceError), and for files that
    cannot be read or written.
    """
    require("transformers")
    from pararnn.lab.train.corpus.prepare import prepare
    from pararnn.lab.train.initial import check_initial, check_tokenizer
    from pararnn.lab.train.setup import bare_model, check_rows
    from pararnn.lab.train.sharding import local_device, process_count, process_group
    from pararnn.lab.train.telemetry import start_facts
    from pararnn.lab.train.trainer import RunTrainer

    out = Path(config.out)
    first = os.environ.get("RANK", "0") == "0"
    model = bare_model(config)  # before the data are made ready, which may take hours
    source = None
    if first:
        check_folder(config, out)
        written_files(out / MODEL, MODEL)  # now, not after the training
        if config.init_from and last_complete(out) is None:
            source = check_initial(config, model)
    data: TrainingData = packed or prepare(config.data)
    check_rows(config, data, process_count())
    with ExitStack() as stack:
        if first:
            check_same_data(config, data, out)
            if source is not None:
                check_tokenizer(source, data)
            stack.enter_context(claim(out))
            check_folder(config, out)  # another run may have come and gone
        stack.enter_context(quiet())
        stack.enter_context(process_group())
        stack.enter_context(writing(out))
        trainer = RunTrainer(config, data, local_device())
        if first:
            open_folder(config, data, out)
        dist.barrier()
        step, checkpoint = last_whole(out, aside=True) or (0, None)
        if first:
            forget_after(out / LOG, step)
            if checkpoint is not None:
                print(f"resumes from {checkpoint}")
        if step < config.steps:
            if first:
                initial = source.folder if source else config.init_from or "drawn"
                facts = start_facts(trainer.model, process_count(), step)
                add_start(out, {**facts, "weights": str(checkpoint or initial)})
            try:
                signal = trainer.run(checkpoint)
            except DivergenceError as error:
                if first:
                    mark_diverged(config, error.step)
                raise
            if signal:
                name = Signals(signal).name
                raise KeyboardInterrupt(
                    f"stopped by {name}: the same command resumes from {resume_point(out)}"
                )
        elif checkpoint is not None:
            load_weights(checkpoint, trainer.model)
        export(trainer, data, out / MODEL)
        dist.barrier()
    return out / MODEL


def export(trainer: RunTrainer, data: TrainingData, folder: Path) -> None:
    """Write the trained model and its tokenizer, from all processes."""
    state = whole_weights(trainer.model)
    if trainer.rank == 0:
        with replace_written(folder, MODEL) as new:
            data.tokenizer.save(new)
            write_model(trainer.model, state, new)


def export_checkpoint(out: Path, step: int | None = None, folder: Path | None = None) -> Path:
    """Write a checkpoint's model as `save_pretrained` does, with its tokenizer; return the folder.

    Args:
        out: a run's folder, whichever number of processes it ran on; the run need not have ended.
        step: of the checkpoint; None is the last complete one.
        folder: where to; None is out/model-STEP.

    Raises TrainingError if there is no such run or checkpoint, or it cannot be read or written,
    or if `folder` holds anything but a model that was written there before.
    """
    from pararnn.lab.train.setup import bare_model
    from pararnn.lab.train.sharding import process_group

    config = config_of(out)
    with quiet(), process_group():
        found = last_whole(out, step)
        if found is None:
            which = "" if step is None else f" of step {step}"
            steps = ", ".join(str(number) for number, _ in checkpoints(out)) or "none"
            raise TrainingError(f"{out} has no whole checkpoint{which}; its checkpoints: {steps}")
        step, checkpoint = found
        folder = folder or out / f"{MODEL}-{step}"
        written_files(folder, MODEL)
        make_folder(folder if folder.exists() else folder.parent, "name another folder (--to)")
        model = bare_model(config).to_empty(device="cpu")
        load_weights(checkpoint, model)
        with replace_written(folder, MODEL) as new:
            shutil.copytree(out / TOKENIZER, new, dirs_exist_ok=True)
            write_model(model, model.state_dict(), new)
    return folder


def write_model(model: ParaRNNForCausalLM, state: dict[str, Any], folder: Path) -> None:
    """Write weights and config for use, not for training, next to the tokenizer in `folder`.

    `generate` ends texts where the tokenizer says.
    """
    model.config.use_cache = True  # training turns it off
    ends = ends_of(folder)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = ends or (None, None)
    model.save_pretrained(folder, state_dict=state)


@contextmanager
def quiet() -> Iterator[None]:
    """Limit transformers to errors, without bars for files, within a block."""
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
