"""One run: a task, a mixer, several seeds; its config, and its result as JSON."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pararnn.base.atomic import remove, write_text
from pararnn.base.device import Gpu, type_of
from pararnn.lab import progress
from pararnn.lab.folders import make_folder
from pararnn.lab.locks import lock
from pararnn.lab.provenance import provenance
from pararnn.lab.records import finite, to_json
from pararnn.lab.tasks.base import Task
from pararnn.lab.tasks.folded import accuracies, make_folded
from pararnn.lab.tasks.models import ModelConfig
from pararnn.lab.tasks.results import best, check_same, percent_or_none, summary
from pararnn.lab.tasks.table import task_of
from pararnn.lab.tasks.training import TEST, Report, Steps, TrainConfig, run_steps, train
from pararnn.lm.config import POSITIVE, check_ranges


@dataclass(frozen=True)
class TaskRun:
    """A run: the task and its name in results, the model, and its training.

    test: sequences for the accuracies. lengths: further lengths to test at, on `length_rows`
    sequences each. device: cpu, cuda or cuda:N. sweep: values of a sweep, in the result's name.
    Raises ValueError for impossible values.
    """

    task_name: str
    task: Task
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    test: int = 100_000
    lengths: tuple[int, ...] = ()
    length_rows: int = 1000
    device: str = "cpu"
    sweep: str = ""

    def __post_init__(self) -> None:
        check_ranges(self, {"test": POSITIVE, "length_rows": POSITIVE})
        if any(length <= 0 for length in self.lengths):
            raise ValueError(f"lengths must be positive, got {', '.join(map(str, self.lengths))}")
        for length in self.lengths:
            self.task.at(length)  # raises before the training, not after it
        if self.model.mixer == "transformer" and max(self.lengths, default=0) > self.task.length:
            raise ValueError(
                f"the Transformer's positions are learned up to {self.task.length}, lengths are "
                f"{self.lengths}: mixer attention has rotary ones"
            )

    @property
    def device_name(self) -> str:
        """Name of the GPU, or cpu."""
        device = torch.device(self.device)
        record = type_of(device)
        return record.name_of(device) if record.accelerator else "cpu"

    def record(self) -> dict[str, Any]:
        """Return the config as JSON values, without names, lengths and device."""
        records = {name: asdict(getattr(self, name)) for name in ("task", "model", "train")}
        return {**records, "test": self.test, "length_rows": self.length_rows}

    def file_name(self) -> str:
        """Return the result's file name: task, mixer, layers if there are several, sweep."""
        mixer, layers = self.model.mixer.replace(":", "-"), self.model.layers
        words = [self.task_name, mixer, f"{layers}-layers" if layers > 1 else "", self.sweep]
        return "-".join(filter(None, words)) + ".json"


def paper_run(name: str, mixer: str) -> TaskRun:
    """Return the paper's config of a task and a mixer; ValueError for an unknown task."""
    task = task_of(name)
    paper = {key: getattr(task, key) for key in ("bare", "positions", "clip", "norm_weights")}
    return TaskRun(name, task, ModelConfig(mixer=mixer, **paper))


def run_task(config: TaskRun, report: Report | None = None) -> dict[str, Any]:
    """Train, test, and return the result as JSON values, see `steps_of`."""
    return run_steps(steps_of(config, report))


def steps_of(config: TaskRun, report: Report | None = None, save_path: Path | None = None) -> Steps:
    """Train step by step, test, and return the result as JSON values.

    save_path: see `train`.

    accuracies: of each seed on the test set, None for one that diverged before its first
    validation; best: the largest. capped: training ended before a seed made no error and before the
    paper's last step. diverged: for each seed, the step by which its weights were NaN or infinite,
    or None; its weights of the best validation before are tested. lengths: by length, accuracies.
    """
    task, seeds = config.task, range(config.train.seed, config.train.seed + config.train.seeds)
    model = make_folded(task, config.model, seeds, config.device)
    training = yield from train(model, task, config.train, report, save_path)
    data = config.train.data
    scores = accuracies(model, task, config.test, data, TEST)
    result = {
        "task": config.task_name,
        "mixer": config.model.mixer,
        "accuracies": scores,
        "best": best(finite(scores)),
        "chance": task.chance(),
        "parameters": sum(w[0].numel() for w in model.weights.values()),
        "seeds": list(seeds),
        **training,
        "lengths": {
            str(length): accuracies(model, task.at(length), config.length_rows, data, TEST, length)
            for length in config.lengths
        },
        "config": config.record(),
        "device": config.device_name,
        **provenance(),
    }
    return finite(result)


def run_all(configs: Sequence[TaskRun], out: Path, at_once: int = 1) -> None:
    """Run configs, each result a JSON file in `out`; those that exist stay.

    A training that was killed resumes from its last save, with the same bits. at_once: number of
    trainings that take turns, a step each; on a GPU each has its stream. Raises, before the first
    run, ValueError if a file holds the result of another config, and TrainingError if another
    process is at work on one of the results or `out` cannot be written into.
    """
    if at_once < 1:
        raise ValueError(f"at_once must be positive, got {at_once}")
    make_folder(out)
    paths = {out / config.file_name(): config for config in configs}
    with ExitStack() as locks:
        for path in paths:
            if not path.exists():
                locks.enter_context(_claim(path))
        _run_all(paths, at_once)


@contextmanager
def _claim(path: Path) -> Iterator[None]:
    """Let no other process make a result within a block."""
    file = path.with_name(f".{path.stem}.lock")
    busy = f"another process makes {path}: wait for its end, or name another folder (--out)"
    with lock(file, busy):
        try:
            yield
        finally:
            file.unlink(missing_ok=True)  # while it is locked: a later file is another one


def _run_all(paths: Mapping[Path, TaskRun], at_once: int) -> None:
    """Run the configs of results whose files are not there, see `run_all`."""
    old_paths = [path for path in paths if path.exists()]
    for path in old_paths:
        check_same(path, paths[path].record(), list(paths[path].lengths))
    for path in old_paths:
        print(f"{path} exists: left as it is", flush=True)
    waiting = [(path, config) for path, config in paths.items() if path not in old_paths]
    lanes: list[tuple[Path, Steps, Callable[[], AbstractContextManager[Any]]]] = []
    streams = [_stream_of(config) for _, config in waiting[:at_once]]
    while lanes or waiting:
        while waiting and len(lanes) < at_once:
            path, config = waiting.pop(0)
            lanes.append((path, _with_progress(config, save_path_of(path, config)), streams.pop()))
        for lane in list(lanes):
            path, steps, stream = lane
            try:
                with stream():
                    next(steps)
            except StopIteration as end:
                write_text(path, to_json(end.value))
                remove(save_path_of(path, paths[path]))
                print(summary(end.value), flush=True)
                lanes.remove(lane)
                streams.append(stream)


def _stream_of(config: TaskRun) -> Callable[[], AbstractContextManager[Any]]:
    """Return a context manager to train in next to other trainings: on a GPU a stream."""
    device = torch.device(config.device)
    record = type_of(device)
    return record.new_stream(device) if isinstance(record, Gpu) else nullcontext


def save_path_of(path: Path, config: TaskRun) -> Path:
    """Return the file of a training that has not ended, whose name tells the config."""
    text = to_json({**config.record(), "device": config.device_name})
    return path.with_suffix(f".{hashlib.sha256(text.encode()).hexdigest()[:12]}.part")


def _with_progress(config: TaskRun, save_path: Path) -> Steps:
    """Train as `steps_of`, with a line at the begin and a bar."""
    progress.say(introduction(config))
    title = f"{config.task_name}, {config.model.mixer}"
    with progress.Progress(title, config.train.steps, "steps") as bar:
        return (yield from steps_of(config, partial(_show, bar), save_path))


def introduction(config: TaskRun) -> str:
    """Return a line for a run's begin: data, model, device, and its most steps and seconds."""
    model, train = make_folded(config.task, config.model, (0,), "cpu"), config.train
    size = sum(weight.numel() for weight in model.weights.values())
    limit = "" if train.seconds is None else f" or {progress.duration(train.seconds)}"
    return (
        f"{config.task_name}, {config.model.mixer}: {train.rows:,} sequences of "
        f"{config.task.length:,}, {size:,} parameters, {train.seeds} seeds, on "
        f"{config.device_name}; at most {train.steps:,} steps of {train.batch:,}{limit}"
    )


def _show(
    bar: progress.Progress, step: int, losses: Sequence[float], scores: Sequence[float]
) -> None:
    """Show the least loss and the best accuracy of the seeds that have not diverged."""
    loss = min(filter(math.isfinite, losses), default=None)
    text = "none" if loss is None else f"{loss:.3f}"
    bar.update(step, loss=text, accuracy=percent_or_none(best(finite(scores))))
