"""Table of cells: what they learned, and what they cost, from other benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from common import RESULTS
from learn_results import code_results, speeds
from markdown_tables import NAMES, digits, one, read, table
from tables_tasks import MIXERS, best_rate

from pararnn.lab.tasks.results import best, percent, read_results

HEAD = (
    "cell",
    "S5 at 100, %",
    "S5 at 10,000, %",
    "code, bits per byte",
    "forward + backward, ns a token",
    "training at 60M, tokens/s",
)
OTHERS = ("gru", "lstm", "mamba2", "transformer")
KERNELS = {"gru": "GRUCell", "lstm": "LSTMCell"}
HEADS = ("16", "32", "64", "128")
TRACKERS = {"m2rnn": "m2rnn", "gated-delta": "deltanet"}
"""Names among the word problems of models of code."""
STACKS = {
    "matrix-elementwise": "matrix state, independent entries",
    "gated-delta": "gated delta rule",
    "m2rnn": "M2RNN",
    "hybrid": "GRU and attention, 3 to 1",
    "hybrid-head-lstm": "LSTM, heads of 64, and attention, 3 to 1",
    "mamba2-head-lstm": "Mamba2, one LSTM of heads of 64 inside",
    "mamba2-attention": "Mamba2, three blocks of attention inside",
    "mamba2-attention-head-lstm": "Mamba2, three of attention and one LSTM of heads of 64 inside",
}
"""Models of code besides those of one cell in each block that have a line of their own."""


class HeadCell(NamedTuple):
    """A cell with heads of a size: accuracies on S5 at 100 and 10,000, and ns of a token."""

    mixer: str
    head: int
    accuracy: float
    long_accuracy: float
    ns: float


def choosing() -> str:
    """Return a line for each cell: accuracies, bits and time."""
    return table(HEAD, [*_elementwise_and_others(), *_stacks(), *_heads()])


def _bits() -> dict[str, str]:
    return {each.mixer: f"{each.mean:.3f}" for each in code_results()}


def _speed(mixer: str) -> str:
    return f"{round(speeds()[mixer], -3):,}" if mixer in speeds() else ""


def _s5_scores(mixer: str) -> tuple[str, str]:
    """Return the accuracies of S5 at 100 and 10,000; empty for a mixer that has not tried."""
    rows = [r for r in read("state_tracking.csv") if (r["task"], r["mixer"]) == ("s5", mixer)]
    if not rows:
        return "", ""
    row = best_rate(rows)
    return percent(float(row["100"])), percent(float(row["10000"])) if row["10000"] else ""


def _elementwise_and_others() -> Iterable[list[str]]:
    words = [r for r in read_results(RESULTS / "tasks" / "words") if r["task"] == "s5"]
    code = _bits()
    for mixer in OTHERS:
        old = percent(best(r["best"] for r in words if r["mixer"] == mixer))
        score, far = _s5_scores(mixer)
        cell = KERNELS.get(mixer)
        name = NAMES[mixer] + ", one weight a channel" * (cell is not None)
        time = "" if cell is None else digits(_elementwise_ns(cell))
        yield [name, score or old, far, code[mixer], time, _speed(mixer)]


def _stacks() -> Iterable[list[str]]:
    code = _bits()
    for mixer, name in STACKS.items():
        scores = _s5_scores(TRACKERS.get(mixer, ""))
        if mixer in code or any(scores):
            yield [name, *scores, code.get(mixer, ""), "", _speed(mixer)]


def _elementwise_ns(cell: str) -> float:
    """Return ns a token of both passes at (32, 2048, 1024), bfloat16."""
    shape = {"B": 32, "T": 2048, "D": 1024, "dtype": "bfloat16"}
    rows = [row for row in read("kernels.csv") if row["section"] == "kernels"]
    passes = (one(rows, what=cell, **shape, **{"pass": name}) for name in ("forward", "backward"))
    return sum(float(row["graph_ms"]) for row in passes) * 1e6 / (32 * 2048)


def head_cells() -> list[HeadCell]:
    """Return the cells that mix channels inside heads: what they learned of S5, and their time."""
    tracking = [
        row
        for row in read("state_tracking.csv")
        if row["task"] == "s5" and row["layers"] == "1" and row["mixer"].startswith("head-")
    ]
    times = [row for row in read("mixing.csv") if row["way"] == "kernels" and row["pass"] == "both"]
    shape = {"B": 16, "T": 1024, "D": 768, "dtype": "bfloat16"}
    cells = []
    for mixer, head in itertools.product(dict.fromkeys(row["mixer"] for row in tracking), HEADS):
        row = best_rate([r for r in tracking if (r["mixer"], r["head"]) == (mixer, head)])
        kernel = one(times, cell=mixer.removeprefix("head-"), head=head, **shape)
        time = float(kernel["median_ms"]) * 1e6 / (16 * 1024)
        cells.append(HeadCell(mixer, int(head), float(row["100"]), float(row["10000"]), time))
    return cells


def _heads() -> Iterable[list[str]]:
    code = _bits()
    for mixer, head, accuracy, long_accuracy, time in head_cells():
        name = f"{MIXERS[mixer]}, heads of {head}"
        model = mixer if head == 64 else ""
        scores = percent(accuracy), percent(long_accuracy)
        yield [name, *scores, code.get(model, ""), digits(time), _speed(model)]
