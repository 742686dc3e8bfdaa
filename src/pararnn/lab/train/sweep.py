"""Sweeps of training runs: one for each combination of values, each in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from pararnn.base.errors import DivergenceError, TrainingError
from pararnn.lab.progress import say
from pararnn.lab.sweeps import combinations, name_of
from pararnn.lab.train.config import RunConfig
from pararnn.lab.train.folder import check_folder, ending_of
from pararnn.lab.train.overrides import resolved, texts_of


def sweep_of(config: RunConfig, overrides: Sequence[str], sweep: Iterable[str]) -> list[RunConfig]:
    """Return the config of each combination of a sweep's values.

    Folders are below the config's `out`, by names that do not depend on the order of keys or on
    how numbers are written: more values may be added later. overrides: see `resolved`. sweep: see
    `combinations`. Raises ValueError as those do, and for a sweep over `out`.
    """
    configs: dict[str, RunConfig] = {}
    for point in combinations(sweep, overrides):
        run = resolved(config, [*overrides, *point])
        keys = [text.partition("=")[0] for text in point]
        if "out" in keys:
            raise ValueError("out is the folder of all runs of a sweep, and cannot be swept over")
        texts = texts_of(run)
        name = name_of({key: texts[key] for key in texts if key in keys})
        if name in configs:
            raise ValueError(f"two runs of the sweep have the same values, {name}: name each once")
        configs[name] = replace(run, out=str(Path(run.out) / name))
    return list(configs.values())


def run_sweep(configs: Sequence[RunConfig], train: Callable[[RunConfig], Path]) -> list[Path]:
    """Run one config after the other by `train`, see `run_training`; return the folders of models.

    Runs that have ended stay as they are, and so do those that diverged, which would do so again.
    One that was killed goes on.

    Raises TrainingError, before the first run, if a folder holds a run of another config; and at
    the end, with their names, if some diverged.
    """
    endings = []
    for config in configs:
        check_folder(config, Path(config.out))
        endings.append(ending_of(config, Path(config.out)))
    models, failures = [], []
    for config, ending in zip(configs, endings, strict=True):
        if ending is not None:
            say(f"{config.out} {ending}: left as it is")
        if ending == "has ended":
            continue
        if ending is not None:
            failures.append(config.out)
            continue
        try:
            models.append(train(config))
        except DivergenceError as error:
            say(f"{config.out} diverged in step {error.step}: the other runs of the sweep go on")
            failures.append(config.out)
    if failures:
        raise TrainingError(
            f"{len(failures)} of {len(configs)} runs diverged, the others have ended: "
            f"{', '.join(failures)}"
        )
    return models
