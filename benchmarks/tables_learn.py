"""Tables of who learns better, and of the recurrent layers of what has been trained so."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from markdown_tables import Row, measured, not_yet, picture, read, source, table

CORPORA = ("english", "code")
COMMAND = "benchmarks/learn.py"
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
        """Where the mean curve has its fewest bits, which need not be its end."""
        return min(self.curve, key=lambda point: point[2])

    @property
    def seconds(self) -> float:
        """Of a training."""
        return self.curve[-1][1]


def results(rows: Iterable[Row]) -> list[Result]:
    """The mixers of a corpus, the best first; those whose every seed ended with finite bits."""
    finals = [row for row in rows if row["stage"] == "final"]
    found = []
    for mixer in dict.fromkeys(row["mixer"] for row in finals):
        mine = [row for row in finals if row["mixer"] == mixer]
        ends = [float(row["bits_per_byte"]) for row in mine if row["step"] == row["steps"]]
        if len(ends) < len({row["seed"] for row in mine}) or not all(map(math.isfinite, ends)):
            continue
        steps = sorted({int(row["step"]) for row in mine})
        curve = [mean_point([row for row in mine if int(row["step"]) == step]) for step in steps]
        found.append(Result(mixer, mine[0], ends, curve))
    return sorted(found, key=lambda result: result.mean)


def without_result(rows: Sequence[Row], found: Sequence[Result]) -> str:
    """A sentence on the mixers that have rows and no result."""
    missing = {row["mixer"] for row in rows} - {result.mixer for result in found}
    names = ", ".join(sorted(missing))
    return f" Without a result, as not all trainings came to an end: {names}." if missing else ""


def mean_point(rows: Sequence[Row]) -> Point:
    """What the seeds have at a step, in the mean."""
    seconds, bits = (
        statistics.mean(float(row[name]) for row in rows) for name in ("seconds", "bits_per_byte")
    )
    return int(rows[0]["tokens"]), seconds, bits


def seconds_to(curve: Sequence[Point], bits: float) -> float | None:
    """When a curve reaches so few bits, straight between its points; None if it never does."""
    last = None
    for _, seconds, value in curve:
        if value <= bits:
            if last is None:
                return seconds
            share = (last[1] - bits) / (last[1] - value)
            return last[0] + share * (seconds - last[0])
        last = seconds, value
    return None


def spread(bits: Sequence[float]) -> str:
    """The mean, and the least and the largest."""
    return f"{statistics.mean(bits):.4f} ({min(bits):.4f} to {max(bits):.4f})"


def winner(found: Sequence[Result]) -> str:
    """Who has the fewest bits, and whether all its seeds are below all of the next one's."""
    best, *others = found
    if not others:
        return f"Only {best.mixer} has been measured."
    second = others[0]
    apart = max(best.bits) < min(second.bits)
    ahead = 100 * (1 - best.mean / second.mean)
    return (
        f"**{best.mixer}** has the fewest bits at the end, {ahead:.1f}% below {second.mixer}; "
        + ("every seed of it is below all of that one's" if apart else "their seeds overlap")
        + "."
    )


def winner_on_the_way(found: Sequence[Result]) -> str:
    """Who is first where each has its least mean, and who leads up to how many tokens."""
    best, *others = sorted(found, key=lambda result: result.least[2])
    if not others:
        return ""
    ahead = 100 * (1 - best.least[2] / others[0].least[2])
    lead = ", ".join(f"{name} to {tokens / 1e6:.1f}M" for name, tokens in leaders(found))
    return (
        f" By the least mean on the way **{best.mixer}** is first, {ahead:.1f}% below "
        f"{others[0].mixer}. First by tokens: {lead}."
    )


def leaders(found: Sequence[Result]) -> list[tuple[str, int]]:
    """Who has the fewest bits in the mean, and up to which number of tokens it goes on so."""
    ends: list[tuple[str, int]] = []
    for points in zip(*(result.curve for result in found), strict=True):
        bits = [point[2] for point in points]
        first = found[bits.index(min(bits))].mixer
        if ends and ends[-1][0] == first:
            ends.pop()
        ends.append((first, points[0][0]))
    return ends


def learn() -> str:
    """A table a corpus, and who wins there."""
    image = picture("learn", "Bits per byte against tokens and against seconds")
    parts = [
        one_corpus(corpus, read(name), name)
        if measured(name := f"learn_{corpus}.csv")
        else not_yet(f"{COMMAND} {corpus}")
        for corpus in CORPORA
    ]
    return image + "\n\n".join(parts)


def one_corpus(corpus: str, rows: Sequence[Row], name: str) -> str:
    """A corpus's table."""
    found = results(rows)
    slowest = max(result.least[2] for result in found)
    body = []
    for result in found:
        reached = seconds_to(result.curve, slowest)
        body.append(
            [
                result.mixer,
                f"{int(result.first['parameters']) / 1e6:.1f}M",
                f"{float(result.first['rate']):g}",
                spread(result.bits),
                f"{result.least[2]:.4f}",
                f"{result.least[0] / 1e6:.1f}M",
                f"{result.seconds:.1f}",
                f"{result.curve[-1][0] / result.seconds:,.0f}",
                "" if reached is None else f"{reached:.1f}",
            ]
        )
    first = found[0].first
    seeds, last = len(found[0].bits), found[0].curve[-1][0]
    epochs = max(float(r["epochs"]) for r in rows if r["stage"] == "final")
    sweep = next(int(row["tokens"]) for row in reversed(rows) if row["stage"] == "sweep")
    rates = sorted({float(row["rate"]) for row in rows if row["stage"] == "sweep"})
    text = (
        f"{corpus.capitalize()}, {last / 1e6:.1f}M tokens ({epochs:.1f} epochs) in steps of "
        f"{first['B']} x {int(first['T']):,}, {seeds} seeds; rates chosen of "
        f"{', '.join(f'{rate:g}' for rate in rates)} by {sweep / 1e6:.1f}M tokens "
        f"{source([first], name)}. {winner(found)}"
        f"{winner_on_the_way(found)}{without_result(rows, found)}"
    )
    head = [
        "mixer",
        "parameters",
        "rate",
        "bits per byte at the end (seeds)",
        "least mean",
        "had at",
        "seconds",
        "tokens/s",
        f"seconds to {slowest:.4f}",
    ]
    return f"{text}\n\n{table(head, body)}"


def learn_layers() -> str:
    """Of the layers of trained models: the worst ratio of `auto` to the best pair."""
    parts = []
    for corpus in CORPORA:
        name = f"learn_layers_{corpus}.csv"
        if measured(name):
            rows = read(name)
            parts.append(f"Layers trained on {corpus} {source(rows, name)}:\n\n{worst_of(rows)}")
        else:
            parts.append(not_yet(f"{COMMAND} {corpus}"))
    return "\n\n".join(parts)


def worst_of(rows: Sequence[Row]) -> str:
    """A line for each mixer and size."""
    body = []
    mixers = list(dict.fromkeys(row["mixer"] for row in rows))
    cases = dict.fromkeys((row["mixer"], row["B"], row["T"]) for row in rows)
    for mixer, *size in sorted(cases, key=lambda case: mixers.index(case[0])):
        mine = [r for r in rows if [r["mixer"], r["B"], r["T"]] == [mixer, *size]]
        taken = [row for row in mine if row["auto"] == "True"]
        if not taken:
            continue
        worst = max(taken, key=lambda row: float(row["of_best"]))
        best = next(
            row for row in mine if row["layer"] == worst["layer"] and float(row["of_best"]) == 1
        )
        body.append(
            [
                mixer,
                f"{size[0]} x {int(size[1]):,}",
                str(len(taken)),
                f"{float(worst['of_best']):.2f}",
                worst["layer"],
                f"({worst['solver']}, {worst['backend']})",
                f"({best['solver']}, {best['backend']})",
            ]
        )
    head = ["model", "B x T", "layers", "worst ratio", "in layer", "`auto`", "the best there"]
    return table(head, body)
