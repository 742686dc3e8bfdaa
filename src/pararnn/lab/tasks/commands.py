"""`pararnn tasks`: list, run and table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pararnn.base.device import default_device
from pararnn.base.errors import PararnnError
from pararnn.lab.sweeps import FLAG, split_sweep
from pararnn.lab.tasks.models import OWN_MIXERS
from pararnn.lab.tasks.report import write_report
from pararnn.lab.tasks.run import run_all, sweep_of
from pararnn.lab.tasks.table import TASKS
from pararnn.zoo import CELLS


def tasks(action: str, **options: Any) -> int:
    """Run an action of `pararnn tasks`, whose options are those of the action's function."""
    try:
        ACTIONS[action](**options)
    except ValueError as error:
        raise PararnnError(str(error)) from error
    return 0


def list_tasks() -> None:
    """Print the tasks, by the first lines of their docstrings, and the mixers."""
    width = max(map(len, TASKS))
    for name, task in TASKS.items():
        print(f"{name:{width}}  {(type(task).__doc__ or '').splitlines()[0]}")
    mixers = ", ".join([*CELLS, "attention", *OWN_MIXERS])
    print(f"\nmixers: {mixers}, or the import path of a cell or a Mixer, package.module:Class")


def run_tasks(
    names: Sequence[str],
    mixer: Sequence[str],
    overrides: Sequence[str],
    out: str,
    device: str,
    lengths: Sequence[int],
    sweep: Sequence[str],
    at_once: int,
) -> None:
    """Run every task with every mixer, and all combinations of a sweep's values."""
    configs = [
        config
        for name in names
        for each in mixer
        for config in sweep_of(name, each, overrides, sweep, lengths=lengths, device=device)
    ]
    run_all(configs, Path(out), at_once)


def print_report(folder: str) -> None:
    """Print the table and write it with its pictures."""
    print(write_report(Path(folder)))


ACTIONS: dict[str, Callable[..., None]] = {
    "list": list_tasks,
    "run": run_tasks,
    "table": print_report,
}


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _lengths(text: str) -> list[int]:
    try:
        return [int(length) for length in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be integers with commas between them, got {text!r}"
        ) from None


def keys_first(arguments: Sequence[str]) -> list[str]:
    """Move the key=value of `run` behind the task's name: argparse reads them only there.

    Those of a sweep move to the end.
    """
    if not arguments or arguments[0].startswith("-"):
        return list(arguments)
    arguments, sweep = split_sweep(arguments)
    keys = [text for text in arguments if "=" in text and not text.startswith("-")]
    name, *others = (text for text in arguments if text not in keys)
    return [name, *keys, *others, *sweep]


def add_sweep(command: argparse.ArgumentParser, example: str) -> None:
    """Add the option of a sweep to a command, whose values `split_sweep` has moved to the end."""
    command.add_argument(
        FLAG,
        metavar="key=value,value",
        nargs="+",
        default=[],
        help=f"run all combinations of these values, such as {example}; those that have ended stay",
    )


def add_actions(command: argparse.ArgumentParser, device: Callable[[str], str]) -> None:
    """Add the actions and their options; `device` reads and checks a device's name."""
    actions = command.add_subparsers(required=True, metavar="action", dest="action")
    actions.add_parser("list", help="print the tasks and the mixers")
    run = actions.add_parser("run", help="train models on tasks and test them")
    run.add_argument("names", type=_names, metavar="NAME", help="of a task, or several: a,b")
    run.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="other values than the paper's, such as steps=1000 n=3 clip=none layers=2",
    )
    run.add_argument("--mixer", type=_names, required=True, help="a mixer, or several: gru,lstm")
    run.add_argument("--out", metavar="DIR", default="runs/tasks", help="folder for the results")
    run.add_argument("--device", type=device, default=default_device(), help="cpu, cuda or cuda:N")
    run.add_argument(
        "--lengths", type=_lengths, default=[], help="also test at these lengths: 100,1000,10000"
    )
    run.add_argument(
        "--at-once", type=int, default=1, metavar="N", help="trainings side by side on a device"
    )
    add_sweep(run, "lr=1e-3,2e-3 seed=0,3")
    table = actions.add_parser("table", help="a table and pictures of a folder's results")
    table.add_argument("folder", metavar="DIR", help="that `run` wrote to")
