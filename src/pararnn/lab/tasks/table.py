"""The tasks by name."""

from __future__ import annotations

from pararnn.lab.tasks.base import Task
from pararnn.lab.tasks.recall import MQAR, Adding, Copying, KeepNth, KHop, SelectiveCopying
from pararnn.lab.tasks.state import Dyck, ModularAddition, Parity, WordProblem

TASKS: dict[str, Task] = {
    "keep-nth": KeepNth(),
    "parity": Parity(),
    "mqar": MQAR(),
    "1-hop": KHop(hops=1, vocab=10),
    "2-hop": KHop(hops=2, vocab=5),
    "modular-addition": ModularAddition(),
    "s3": WordProblem(group="s3"),
    "a5": WordProblem(group="a5"),
    "s5": WordProblem(group="s5"),
    "dyck": Dyck(),
    "copying": Copying(),
    "selective-copying": SelectiveCopying(),
    "adding": Adding(),
}
"""Tasks by name; add yours under new names. The first five are the paper's."""

PAPER = {
    "transformer": (100, 53, 100, 82, 78),
    "mamba2": (1, 52, 100, 100, 98),
    "gru": (100, 100, 100, 100, 100),
    "lstm": (100, 100, 100, 100, 100),
}
"""The paper's accuracies in percent (Table 6), by mixer, on the first five tasks."""


def task_of(name: str) -> Task:
    """Return the task of a name; ValueError for one that is not in the table."""
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}: name one of {', '.join(TASKS)}")
    return TASKS[name]
