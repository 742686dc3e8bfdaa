"""Runs of `pararnn train` by torchrun, as children that may fail, hang or be killed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

PROGRAM = Path(__file__).with_name("lm_scale_run.py")
TOO_LARGE, TRACE, PARAMETERS = "out-of-memory", "trace.json", "parameters"
"""Files that it writes to a run's folder."""
TAIL = 4_000
"""Characters of a failed run's output that are shown."""
NEVER = 10**9
WORDS = 2_000


class RunEnd(NamedTuple):
    """End of a run: its launcher's exit code, or None for one that took too long."""

    code: int | None
    seconds: float
    output: str


def write_corpus(path: Path, size: int) -> None:
    """Write a text of at least `size` bytes: lines of random words, the commonest most often."""
    draws = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    words = ["".join(draws.choices(letters, k=draws.randint(2, 9))) for _ in range(WORDS)]
    weights = [1 / rank for rank in range(1, WORDS + 1)]
    with path.open("w", encoding="utf-8") as file:
        count = 0
        while count < size:
            count += file.write(" ".join(draws.choices(words, weights, k=12)) + "\n")


def launch(
    arguments: Sequence[str],
    gpus: int,
    output: Path,
    seconds: float,
    steps: int | None = None,
    profile: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
) -> RunEnd:
    """Run `pararnn` with these arguments on some GPUs; `meanwhile` is called while it runs.

    steps, profile: see `lm_scale_run.py`. Where the time is over, torchrun ends its processes.
    """
    options = json.dumps({"steps": steps, "profile": profile})
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={gpus}", str(PROGRAM), options, *arguments]
    begin = time.monotonic()
    code: int | None = None
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            while code is None and time.monotonic() - begin < seconds:
                meanwhile()
                time.sleep(0.05)
                code = process.poll()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    text = output.read_text(encoding="utf-8", errors="replace")
    return RunEnd(code, time.monotonic() - begin, text)


def message_of(end: RunEnd) -> str:
    """Why a run is without a result, with the end of what it printed."""
    why = "took too long" if end.code is None else f"exit code {end.code}"
    return f"{why} after {end.seconds:.0f} s:\n{end.output[-TAIL:]}"
