"""Results of learn.py: bits per byte of each mixer, at the end and on the way."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from markdown_tables import Row, read, source, spread, table

CORPORA = ("english", "code")
Point = tuple[int, float, float]
"""Tokens, seconds and bits per byte, means over seeds."""


class Result(NamedTuple):
    """A mixer's final trainings on a corpus: bits of every seed, and the mean curve."""

    mixer: str
    first: Row
    bits: list[float]
    curve: list[Point]

    @property
    def mean(self) -> float:
        """Bits per byte at the end."""
        return statistics.mean(self.bits)

    @property
    def least(self) -> Point:
        """Point of the mean curve with the fewest bits, which need not be the last."""
        return min(self.curve, key=lambda point: point[2])

    @property
    def seconds(self) -> float:
        """Seconds of a training."""
        return self.curve[-1][1]

    @property
    def speed(self) -> float:
        """Tokens/s of a training."""
        return self.curve[-1][0] / self.seconds


def lengths(rows: Iterable[Row]) -> list[int]:
    """Return the numbers of steps that final trainings were given, in order."""
    return sorted({int(row["steps"]) for row in rows if row["stage"] == "final"})


def final_rows(rows: Iterable[Row], steps: int | None = None) -> list[Row]:
    """Return the rows of final trainings of a number of steps, of the fewest by default."""
    finals = [row for row in rows if row["stage"] == "final"]
    steps = min(lengths(finals), default=None) if steps is None else steps
    return [row for row in finals if int(row["steps"]) == steps]


def results(rows: Iterable[Row], steps: int | None = None) -> list[Result]:
    """Return a corpus's mixers, the best first, without those that did not end in every seed.

    Of final trainings of a number of steps, see `final_rows`.
    """
    finals = final_rows(rows, steps)
    mixers = []
    for mixer in dict.fromkeys(row["mixer"] for row in finals):
        mine = [row for row in finals if row["mixer"] == mixer]
        ends = [float(row["bits_per_byte"]) for row in mine if row["step"] == row["steps"]]
        if len(ends) < len({row["seed"] for row in mine}) or not all(map(math.isfinite, ends)):
            continue
        marks = sorted({int(row["step"]) for row in mine})
        curve = [mean_point([row for row in mine if int(row["step"]) == mark]) for mark in marks]
        mixers.append(Result(mixer, mine[0], ends, curve))
    return sorted(mixers, key=lambda result: result.mean)


def speeds(name: str = "learn_speed.csv") -> dict[str, int]:
    """Return the tokens/s of training as one CUDA graph a step, by mixer."""
    return {row["mixer"]: int(row["tokens_per_s"]) for row in read(name)}


def by_graph(every: Iterable[Result], rates: Mapping[str, int]) -> list[Result]:
    """Return results with the seconds that their tokens take at the rates of `speeds`."""
    return [
        result._replace(curve=[(n, n / rates[result.mixer], bits) for n, _, bits in result.curve])
        for result in every
    ]


def code_results(steps: int | None = None) -> list[Result]:
    """Return the results on code, with seconds by graph."""
    return by_graph(results(read("learn_code.csv"), steps), speeds())


def large_results() -> list[Result]:
    """Return the results on code of models of 150M."""
    return by_graph(results(read("learn_150M_code.csv")), speeds("learn_150M_speed.csv"))


def mean_point(rows: Sequence[Row]) -> Point:
    """Return the mean over the seeds at one step."""
    seconds, bits = (
        statistics.mean(float(row[name]) for row in rows) for name in ("seconds", "bits_per_byte")
    )
    return int(rows[0]["tokens"]), seconds, bits


BLOCKS = {
    "matrix-elementwise": "12 of M2RNN with a weight a value in place of its matrix",
    "gated-delta": "12 of the gated delta rule, ten heads of 32 x 64",
    "head-lstm": "12 of the LSTM with ten heads of 64",
    "hybrid-head-lstm": "three of head-lstm's to one of attention",
    "hybrid-m2rnn": "three of M2RNN (ten heads of 32 x 64) to one of attention",
    "mamba2-head-lstm": "21 of Mamba2, one of head-lstm's in the middle",
    "mamba2-m2rnn": "21 of Mamba2, one of M2RNN in the middle",
    "mamba2-attention": "17 of Mamba2, three of attention in between",
    "mamba2-attention-head-lstm": "15 of Mamba2, in between three of attention, one of head-lstm's",
    "gru": "12 of the GRU",
    "lstm": "12 of the LSTM",
    "mamba2": "23 of Mamba2",
    "transformer": "12 of attention",
    "hybrid": "three of the GRU to one of attention",
}
"""Blocks of mixers in words."""


def learn() -> str:
    """Return a table a corpus."""
    names = {corpus: f"learn_{corpus}.csv" for corpus in CORPORA}
    every = {"english": results(read(names["english"])), "code": code_results()}
    return "\n\n".join(
        corpus_table(corpus.capitalize(), every[corpus], name) for corpus, name in names.items()
    )


def learn_large() -> str:
    """Return the table of models of 150M."""
    return corpus_table("Code, models of 150M", large_results(), "learn_150M_code.csv")


def corpus_table(title: str, every: Sequence[Result], name: str) -> str:
    """Return a corpus's table, of the results in a file."""
    rows = read(name)
    finals = final_rows(rows)
    if len(every) < len({row["mixer"] for row in finals}):
        raise ValueError(f"{name} has a mixer that did not end in every seed")
    body = [
        [
            result.mixer,
            BLOCKS[result.mixer],
            f"{int(result.first['parameters']) / 1e6:.1f}M",
            f"{float(result.first['rate']):g}",
            str(len(result.bits)),
            spread(result.bits),
            f"{result.least[2]:.4f}",
            f"{result.least[0] / 1e6:.1f}M",
            f"{result.seconds:.1f}",
            f"{result.speed:,.0f}",
        ]
        for result in every
    ]
    first = every[0].first
    epochs = max(float(row["epochs"]) for row in finals)
    sweep = next(int(row["tokens"]) for row in reversed(rows) if row["stage"] == "sweep")
    text = (
        f"{title}: {every[0].curve[-1][0] / 1e6:.1f}M tokens ({epochs:.1f} epochs) "
        f"in steps of {first['B']} x {int(first['T']):,}. Rates were chosen by {sweep / 1e6:.1f}M "
        f"tokens from {rates_of(every, rows)} {source([r.first for r in every], name)}:"
    )
    head = ["mixer", "blocks", "parameters", "rate", "seeds", "bits per byte at the end"]
    return f"{text}\n\n{table([*head, 'least mean', 'at', 'seconds', 'tokens/s'], body)}"


def rates_of(every: Iterable[Result], rows: Sequence[Row]) -> str:
    """Return the rates that were tried, and by which mixers if not by all."""
    mixers: dict[tuple[float, ...], list[str]] = {}
    for result in every:
        swept = {
            float(row["rate"])
            for row in rows
            if (row["stage"], row["mixer"]) == ("sweep", result.mixer)
        }
        mixers.setdefault(tuple(sorted(swept)), []).append(result.mixer)
    texts = {
        ", ".join(f"{rate:g}" for rate in rates): ", ".join(names)
        for rates, names in sorted(mixers.items(), key=lambda item: -len(item[0]))
    }
    if len(texts) == 1:
        return next(iter(texts))
    return "; ".join(f"{rates} ({names})" for rates, names in texts.items())


def learn_longer() -> str:
    """Return a table of all numbers of tokens that mixers of code were given, and their seconds."""
    rows = read("learn_code.csv")
    steps = lengths(rows)
    mixers = dict.fromkeys(r.mixer for count in steps[1:] or steps for r in code_results(count))
    trainings = {count: {r.mixer: r for r in code_results(count)} for count in steps}
    longest = {mixer: [own for own in trainings.values() if mixer in own][-1] for mixer in mixers}
    order = sorted(mixers, key=lambda mixer: longest[mixer][mixer].mean)
    body = [
        [
            mixer,
            *(
                f"{spread(own[mixer].bits)} in {own[mixer].seconds:.1f} s" if mixer in own else ""
                for own in trainings.values()
            ),
        ]
        for mixer in order
    ]
    last = [row for row in rows if row["stage"] == "final"]
    text = (
        "Code, bits per byte of trainings of several lengths, each with a schedule of its own, and "
        "the seconds of its tokens at the mixer's speed, a step one CUDA graph "
        f"{source(last, 'learn_code.csv')}:"
    )
    tokens = (next(iter(own.values())).curve[-1][0] for own in trainings.values())
    head = ["mixer", *(f"{count / 1e6:.1f}M tokens" for count in tokens)]
    return f"{text}\n\n{table(head, body)}"
