"""Cost of a lost rank: killed after a checkpoint, and resumed by other numbers of GPUs.

A part of `lm_scale.py`. A recipe is trained to its end on the most GPUs; again, and its last rank
is killed (SIGKILL) once a checkpoint is marked as complete; then the same command on other numbers
of GPUs goes on from copies of what that left. The batch is the same on all. A row has how long the
launcher took to end the run after the kill, the step that runs resume from, and the largest
difference of a logged loss from the run that was not interrupted.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from signal import SIGKILL
from typing import Any

from lm_launch import RunEnd, launch, message_of

from pararnn.lab.train.checkpoints import last_complete
from pararnn.lab.train.log import LOG, read_rows

FILE = "lm_lost.csv"
KEYS = ("device", "recipe", "gpus", "goes_on_with", "overrides")
RECIPE = "gru-30m"
STEPS, SAVE_EVERY = 120, 40
ROWS = 2
"""Of a GPU, where all are used."""


class Killer:
    """Kills a rank of a run in `out` once it has logged a step after its first checkpoint."""

    def __init__(self, out: Path, rank: int) -> None:
        self.out, self.rank = out, rank
        self.at: float | None = None

    def __call__(self) -> None:
        if self.at is not None:
            return
        checkpoint = last_complete(self.out)
        if checkpoint is not None and max(losses(self.out), default=0) > checkpoint[0]:
            os.kill(int((self.out / f"pid-{self.rank}").read_text()), SIGKILL)
            self.at = time.monotonic()


def losses(out: Path) -> dict[int, float]:
    """Return a run's logged losses by step."""
    return {row["step"]: row["loss"] for row in read_rows(out / LOG) if "loss" in row}


def others_of(gpus: int) -> list[int]:
    """Return the numbers of GPUs on which a run resumes: the same, half of them, one."""
    return sorted({gpus, max(gpus // 2, 1), 1}, reverse=True)


def rows(
    recipe: str, gpus: Sequence[int], folder: Path, end: float, overrides: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of GPUs that goes on; RuntimeError for an unexpected end.

    gpus: the numbers to choose from; with one GPU alone nothing is lost, and there are none.
    """
    most = max(gpus)
    if most < 2:
        print("lost: needs two GPUs, left out")
        return
    about = {"recipe": recipe, "gpus": most, "overrides": " ".join(overrides)}

    def train(out: Path, world: int, **more: Any) -> RunEnd:
        command = arguments(recipe, most * ROWS, folder, overrides)
        command += [f"--device_batch={ROWS}", f"--out={out}"]
        out.mkdir(exist_ok=True)
        return launch(command, world, folder / f"{out.name}.txt", end - time.monotonic(), **more)

    whole, lost = folder / "whole", folder / "lost"
    check(train(whole, most))
    killer = Killer(lost, most - 1)
    run_end = train(lost, most, meanwhile=killer)
    end_time = time.monotonic()
    if killer.at is None or run_end.code in (0, None):
        raise RuntimeError(f"the run was not ended by the kill: {message_of(run_end)}")
    checkpoint = last_complete(lost)
    if checkpoint is None:
        raise RuntimeError(f"the killed run left no checkpoint: {message_of(run_end)}")
    for world in others_of(most):
        out = folder / f"on-{world}"
        shutil.copytree(lost, out)
        check(train(out, world))
        want, got = losses(whole), losses(out)
        if want.keys() != got.keys():
            raise RuntimeError(f"{world} GPUs went on to steps {sorted(got)}, not {sorted(want)}")
        yield {
            **about,
            "goes_on_with": world,
            "ended_after_s": round(end_time - killer.at, 2),
            "goes_on_from": checkpoint[0],
            "steps": max(want),
            "loss": want[max(want)],
            "largest_difference": max(abs(want[step] - got[step]) for step in want),
        }
        shutil.rmtree(out)


def arguments(recipe: str, batch: int, folder: Path, overrides: Sequence[str]) -> list[str]:
    """Return the command of all runs, but for where they are and what a GPU takes at once."""
    return [
        "train",
        recipe,
        f"--data.train={folder / 'corpus.txt'}",
        "--data.holdout=0.1",
        f"--data.cache={folder / 'tokens'}",
        f"--batch={batch}",
        f"--steps={STEPS}",
        f"--save_every={SAVE_EVERY}",
        "--valid_every=1000000000",
        "--verify_every=0",
        "--log_every=1",
        "--report_to=none",
        *(f"--{text}" for text in overrides),
    ]


def check(end: RunEnd) -> None:
    """Raise RuntimeError unless a run ended well."""
    if end.code != 0:
        raise RuntimeError(message_of(end))
