"""Sweeps of training runs: one run and folder for each combination of values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from pararnn.base.errors import DivergenceError, TrainingError
from pararnn.lab.progress import say
from pararnn.lab.train.config import RunConfig
from pararnn.lab.train.folder import check_folder, ending_of


def sweep_of(
    points: Iterable[Mapping[str, str]],
    configured: Callable[[Mapping[str, str]], RunConfig],
    name: Callable[[Mapping[str, object]], str],
) -> list[RunConfig]:
    """Return the config of each point of a sweep, with a folder below the config's `out`.

    Names of folders depend neither on the order of keys nor on how numbers are written: more
    values may be added later. Raises ValueError as `configured`, for a sweep over `out`, and for
    two points that are the same.
    """
    configs: dict[str, RunConfig] = {}
    for point in points:
        if "out" in point:
            raise ValueError("out is the folder of all runs of a sweep, and cannot be swept over")
        run = configured(point)
        record: Any = asdict(run)
        keys = [key.replace("-", "_") for key in point]
        folder = name({key: reduce(getitem, key.split("."), record) for key in keys})
        if folder in configs:
            raise ValueError(f"two runs of the sweep have the same values, {folder}")
        configs[folder] = replace(run, out=str(Path(run.out) / folder))
    return list(configs.values())


def run_sweep(configs: Sequence[RunConfig], train: Callable[[RunConfig], Path]) -> list[Path]:
    """Run one config after the other by `train`, see `run_training`; return the folders of models.

    Runs that have ended stay as they are, and so do those that diverged, which would do so again.
    One that was killed continues.

    Raises TrainingError, before the first run, if a folder holds a run of another config; and at
    the end, with their names, if some diverged.
    """
    for config in configs:
        check_folder(config, Path(config.out))
    models, failures = [], []
    for config in configs:
        ending = ending_of(config, Path(config.out))
        if ending is not None:
            say(f"{config.out} {ending}: left as it is")
            if ending != "has ended":
                failures.append(config.out)
            continue
        try:
            models.append(train(config))
        except DivergenceError as error:
            say(f"{config.out} diverged in step {error.step}: the other runs of the sweep continue")
            failures.append(config.out)
    if failures:
        raise TrainingError(
            f"{len(failures)} of {len(configs)} runs diverged, the others have ended: "
            f"{', '.join(failures)}"
        )
    return models
