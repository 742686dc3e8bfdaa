"""One run: a task, a mixer, several seeds; its config by key=value, its result as JSON."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import torch

from pararnn import progress
from pararnn.atomic import write_text
from pararnn.records import finite, read_json, to_json
from pararnn.tasks.base import Task, need
from pararnn.tasks.folded import FoldedModel, accuracies, make_folded
from pararnn.tasks.models import ModelConfig
from pararnn.tasks.table import task_of
from pararnn.tasks.training import TEST, Report, TrainConfig, train
from pararnn.version import __version__

COMMIT = "PARARNN_COMMIT"
"""The environment variable whose value results name as their commit."""


@dataclass(frozen=True)
class TaskRun:
    """A run: task_name, as results are called by, and the task; the model; its training.

    test: sequences that accuracies are taken on. lengths: further ones to test at, on
    `length_rows` sequences each. device: cpu, cuda or cuda:N.
    """

    task_name: str
    task: Task
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    test: int = 100_000
    lengths: tuple[int, ...] = ()
    length_rows: int = 1000
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("test", "length_rows"):
            need(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        need(
            all(length > 0 for length in self.lengths),
            f"lengths must be positive, got {', '.join(map(str, self.lengths))}",
        )
        for length in self.lengths:
            self.task.at(length)  # which would say only after the training what it cannot be
        need(
            self.model.mixer != "transformer" or max(self.lengths, default=0) <= self.task.length,
            f"the Transformer's positions are learned up to {self.task.length}, lengths are "
            f"{self.lengths}: mixer attention has rotary ones",
        )


def configured(
    name: str,
    mixer: str,
    overrides: Iterable[str] = (),
    *,
    lengths: Sequence[int] = (),
    **options: Any,
) -> TaskRun:
    """The paper's config of a task and a mixer, with other values by `overrides`.

    These are texts "key=value" for fields of the task, the model, its training and the run, such as
    "n=3", "clip=none", "steps=1000", "test=100". Raises ValueError for unknown keys and impossible
    values.
    """
    task = task_of(name)
    how = {key: getattr(task, key) for key in ("bare", "positions", "clip", "norm_weights")}
    model = ModelConfig(mixer=mixer, **how)
    records: dict[str, Any] = {"task": task, "model": model, "train": TrainConfig()}
    kinds = {part: _kinds(record) for part, record in records.items()}
    kinds["run"] = dict.fromkeys(("test", "length_rows"), int)
    owners = {key: part for part, known in kinds.items() for key in known}
    changes: dict[str, dict[str, Any]] = {part: {} for part in kinds}
    for override in overrides:
        key, equals, text = (piece.strip() for piece in override.partition("="))
        need(bool(equals), f"{override!r} is no key=value, such as steps=1000")
        need(key in owners, f"there is no key {key!r}; keys are {', '.join(owners)}")
        changes[owners[key]][key] = _read(key, text, kinds[owners[key]][key])
    made = {part: replace(record, **changes[part]) for part, record in records.items()}
    return TaskRun(name, **made, **changes["run"], lengths=tuple(lengths), **options)


def _kinds(record: Any) -> dict[str, Any]:
    hints = get_type_hints(type(record))
    return {each.name: hints[each.name] for each in fields(record) if each.name != "mixer"}


def _read(key: str, text: str, kind: Any) -> Any:
    if kind is bool:
        need(text in ("true", "false"), f"{key} must be true or false, got {text!r}")
        return text == "true"
    if kind == float | None and text == "none":
        return None
    kind = float if kind == float | None else kind
    try:
        value = kind(text)
    except ValueError:
        raise ValueError(f"{key} must be of type {kind.__name__}, got {text!r}") from None
    need(kind is not float or math.isfinite(value), f"{key} must be finite, got {value}")
    return value


def run_task(config: TaskRun, report: Report | None = None) -> dict[str, Any]:
    """Train, test, and say what came out, as JSON values.

    accuracies: on the test set, of each seed, None for one that has none, as it diverged before its
    first validation; best: the largest. capped: training ended before a seed was right throughout
    and before the paper's last step. diverged: of each seed, the step by which its weights were
    NaN or infinite, or None; what is tested are the weights of its best validation before.
    lengths: by length, accuracies.
    """
    task, seeds = config.task, range(config.train.seed, config.train.seed + config.train.seeds)
    model = make_folded(task, config.model, seeds, config.device)
    trained = train(model, task, config.train, report)
    data = config.train.data
    found = accuracies(model, task, config.test, data, TEST)
    result = {
        "task": config.task_name,
        "mixer": config.model.mixer,
        "accuracies": found,
        "best": best(finite(found)),
        "chance": task.chance(),
        "parameters": sum(w[0].numel() for w in model.weights.values()),
        "seeds": list(seeds),
        "steps": trained.steps,
        "seconds": round(trained.seconds, 3),
        "capped": trained.capped,
        "diverged": trained.diverged,
        "lengths": _by_length(model, config),
        "config": _recorded(config),
        "history": [list(each) for each in trained.history],
        "device": _device_name(config.device),
        "versions": {"pararnn": __version__, "torch": torch.__version__},
        "commit": os.environ.get(COMMIT),
    }
    return finite(result)


def best(shares: Iterable[float | None]) -> float | None:
    """The largest of the accuracies that there are."""
    return max((share for share in shares if share is not None), default=None)


def _recorded(config: TaskRun) -> dict[str, Any]:
    """What a result says of its config, beside names and lengths."""
    parts = {name: asdict(getattr(config, name)) for name in ("task", "model", "train")}
    return {**parts, "test": config.test, "length_rows": config.length_rows}


def _by_length(model: FoldedModel, config: TaskRun) -> dict[str, list[float]]:
    rows, seed = config.length_rows, config.train.data
    return {
        str(length): accuracies(model, config.task.at(length), rows, seed, TEST, length)
        for length in config.lengths
    }


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"


def result_name(config: TaskRun) -> str:
    """A file name without its ending: task, mixer, and layers if there are several."""
    mixer = config.model.mixer.replace(":", "-")
    layers = config.model.layers
    return f"{config.task_name}-{mixer}" + (f"-{layers}-layers" if layers > 1 else "")


def at_once(line: str) -> None:
    """Print a line without waiting for more: runs take long."""
    print(line, flush=True)


def run_all(
    configs: Sequence[TaskRun], out: Path, say: Callable[[str], None] = at_once
) -> list[Path]:
    """Run one config after the other, each result a JSON file in `out`; those that exist stay.

    Raises ValueError, before the first run, for a result that is there of another config.
    """
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{result_name(config)}.json" for config in configs]
    there = [path.exists() for path in paths]
    for config, path in itertools.compress(zip(configs, paths, strict=True), there):
        _check_same(config, path)
    for config, path, exists in zip(configs, paths, there, strict=True):
        if exists:
            say(f"{path} exists: left as it is")
            continue
        progress.say(begun(config))
        title = f"{config.task_name}, {config.model.mixer}"
        with progress.Progress(title, config.train.steps, "steps") as shown:
            result = run_task(config, partial(_show, shown))
        write_text(path, to_json(result))
        say(said(result))
    return paths


def _check_same(config: TaskRun, path: Path) -> None:
    """ValueError unless the result in a file is of this config."""
    result = read_json(path.read_text(encoding="utf-8"))
    found = {**result["config"], "lengths": list(map(int, result["lengths"]))}
    own = {**_recorded(config), "lengths": list(config.lengths)}
    theirs, ours = (dict(_flat(each)) for each in (found, own))
    for key in {**ours, **theirs}:
        need(
            ours.get(key) == theirs.get(key),
            f"{path} has {key} = {theirs.get(key)!r}, and this run {ours.get(key)!r}: give it a "
            "folder of its own (--out), or remove that result",
        )


def _flat(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The values of a mapping, and of those in it."""
    for key, value in record.items():
        yield from _flat(value) if isinstance(value, Mapping) else [(key, value)]


def said(result: Mapping[str, Any]) -> str:
    """A result in one line."""
    each = ", ".join(map(_said_of_seed, result["accuracies"], result["diverged"]))
    lengths = "".join(
        f"; at {length} {share(best(found))}" for length, found in result["lengths"].items()
    )
    return (
        f"{result['task']}, {result['mixer']}: {each} (chance {result['chance']:.2%}) after "
        f"{result['steps']} steps, {result['seconds']:.1f} s"
        f"{', capped' * result['capped']}{lengths}"
    )


def share(accuracy: float | None) -> str:
    """An accuracy in percent, "none" where there is none."""
    return "none" if accuracy is None else f"{accuracy:.2%}"


def begun(config: TaskRun) -> str:
    """What is said before a run: data, model, device, and how long it is to be."""
    model = make_folded(config.task, config.model, (config.train.seed,), "cpu")
    size, train = sum(weight.numel() for weight in model.weights.values()), config.train
    limit = "" if train.seconds is None else f" or {progress.duration(train.seconds)}"
    return (
        f"{config.task_name}, {config.model.mixer}: {train.rows:,} sequences of "
        f"{config.task.length:,}, {size:,} parameters, {train.seeds} seeds, on "
        f"{_device_name(config.device)}; at most {train.steps:,} steps of {train.batch:,}{limit}"
    )


def _show(
    shown: progress.Progress, step: int, losses: Sequence[float], found: Sequence[float]
) -> None:
    """Show the least loss and the best accuracy of the seeds that have not diverged."""
    known = [loss for loss in losses if math.isfinite(loss)]
    loss = f"{min(known):.3f}" if known else "none"
    shown.update(step, loss=loss, accuracy=share(best(finite(found))))


def _said_of_seed(accuracy: float | None, diverged: int | None) -> str:
    return share(accuracy) + ("" if diverged is None else f" (diverged by step {diverged})")
