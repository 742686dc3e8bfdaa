"""Configs with other values, which texts key=value name, as options of a command line."""

import re
from collections.abc import Iterable
from dataclasses import replace

from pararnn.lab.commands import task_runs
from pararnn.lab.options import configured
from pararnn.lab.tasks.run import TaskRun
from pararnn.lab.train.config import RunConfig

WORDS = {"true": "True", "false": "False", "none": "None"}


def flags(texts: Iterable[str]) -> list[str]:
    """Options of texts key=value."""
    pairs = (text.split("=", 1) for text in texts)
    return [part for key, value in pairs for part in (f"--{key}", WORDS.get(value, value))]


def resolved(config: RunConfig, texts: Iterable[str]) -> RunConfig:
    """A run with other values."""
    return configured(config, flags(texts), "test")


def task_run(name: str, mixer: str, texts: Iterable[str] = (), **changes: object) -> TaskRun:
    """The paper's run of a task with other values, on a CPU."""
    (run,) = task_runs([name], [mixer], flags(texts))
    return replace(run, **{"device": "cpu", **changes})


def plain(text: str) -> str:
    """A message without the box around it and its line breaks."""
    return re.sub(r"[│╭╮╰╯─\s]+", " ", text)
