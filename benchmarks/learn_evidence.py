"""Tables of learn.py's trainings on programs: bits, equal seconds, probes, fits of compute."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from learn_models import SIZES
from learn_scaling import TRAINING, ends
from markdown_tables import Row, read, source, spread, table

CURVES, PROBES = "learn_programs.csv", "learn_programs_probes.csv"
SPIKE = 1.0
"""Nats by which a step's loss is above the mean since the last validation, for a spike."""
NORM = 1.0
"""Norm of gradients, before it is clipped, above which it is a trouble: ten times the usual."""
WARM = 0.2
"""Of a training, at its beginning, where spikes are not counted."""
TOKENS = 15
"""Tokens a parameter that a size's trainings have at least, to stand in fits of compute."""
CLAIM = ("hybrid-gated-delta", "hybrid-gated-delta-m2rnn", "hybrid-gated-delta-head-lstm")
"""A hybrid, and what it is compared with: one of its layers replaced by a nonlinear one."""
GRID = 400
"""Values that are tried for the bits that no compute saves."""
SHOWN = {
    ("place", "16-63"): "nats after 16-63",
    ("place", "1024-"): "after 1024-",
    ("names", "64-255"): "names 64-255",
    ("names", "1024-"): "1024-",
    ("brackets", "256-1023"): "brackets 256-1023",
    ("copy", "512"): "copies of 512",
    ("recall", "4"): "of 4 by name",
    ("variables", "0"): "assigned once",
}
"""Classes of probes that tables have, and their titles; the file of results has all."""


class Trained(NamedTuple):
    """A mixer's trainings of a size at its best rate: the last rows and the curves of its seeds."""

    mixer: str
    size: str
    ends: list[Row]
    curves: list[list[Row]]

    @property
    def bits(self) -> list[float]:
        """Bits a byte at the end, of every seed."""
        return [float(row["bits_per_byte"]) for row in self.ends]

    @property
    def mean(self) -> float:
        """Their mean."""
        return statistics.mean(self.bits)

    @property
    def perplexities(self) -> dict[str, float]:
        """Perplexities a token at the end, by seed."""
        return {row["seed"]: math.exp(float(row["valid_nats"])) for row in self.ends}

    @property
    def compute(self) -> float:
        """Floating-point operations of a training."""
        return float(self.ends[0]["flops"]) * float(self.ends[0]["tokens"])

    @property
    def seconds(self) -> float:
        """Seconds of a training, the mean; NaN where other programs ran beside it."""
        return statistics.mean(float(row["seconds"]) for row in self.ends)


def lengths(rows: Sequence[Row], size: str) -> list[int]:
    """Return the steps of a size's trainings: those of most mixers first, of equals the most."""
    mixers: dict[int, set[str]] = {}
    for row in ends(rows):
        if row["size"] == size:
            mixers.setdefault(int(row["steps"]), set()).add(row["mixer"])
    return sorted(mixers, key=lambda steps: (-len(mixers[steps]), -steps))


def trainings(rows: Sequence[Row], size: str, steps: int | None = None) -> list[Trained]:
    """Return the trainings of a size at each mixer's best rate, the best mixer first.

    steps: of a training; by default as many as those of most mixers have. The best rate is that of
    the fewest bits with the first seed; other seeds are those at it.
    """
    usual = [steps] if steps is not None else lengths(rows, size)[:1]
    last = [row for row in ends(rows) if row["size"] == size and int(row["steps"]) in usual]
    every = []
    for mixer in dict.fromkeys(row["mixer"] for row in last):
        mine = [row for row in last if row["mixer"] == mixer]
        first = [row for row in mine if row["seed"] == "0"] or mine
        rate = min(first, key=lambda row: float(row["bits_per_byte"]))["rate"]
        chosen = [row for row in mine if row["rate"] == rate]
        curves = [[row for row in rows if row.get("step") and same(row, end)] for end in chosen]
        every.append(Trained(mixer, size, chosen, curves))
    return sorted(every, key=lambda trained: trained.mean)


def longer_trainings(rows: Sequence[Row], size: str) -> list[Trained]:
    """Return what `trainings` does, of all lengths above that of most mixers."""
    every = lengths(rows, size)
    longer = sorted(steps for steps in every if steps > every[0])
    return [trained for steps in longer for trained in trainings(rows, size, steps)]


def long_enough(trained: Trained) -> bool:
    """Return whether a training read as many tokens a parameter as those that fits compare."""
    end = trained.ends[0]
    return float(end["tokens"]) >= TOKENS * float(end["parameters"])


def same(row: Row, end: Row) -> bool:
    """Return whether a row is of the same training as another."""
    return all(row[name] == end[name] for name in TRAINING)


def troubles(rows: Iterable[Row]) -> list[list[str]]:
    """Return a line for what failed or diverged, for a spike after a training's beginning, and for
    a training with large gradients there."""
    lines, norms = [], dict[tuple[str, ...], list[Row]]()

    def add(row: Row, what: str) -> None:
        at = f"{float(row['tokens']) / 1e6:.0f}M" if row.get("tokens") else ""
        rate = f"{float(row['rate']):g}"
        lines.append([row["mixer"], row["size"], rate, row["seed"], at, what])

    for row in rows:
        is_late = bool(row.get("step")) and int(row["step"]) > WARM * int(row["steps"])
        above = float(row["most_nats"]) - float(row["train_nats"]) if is_late else 0.0
        if row.get("failure"):
            add(row, row["failure"])
        elif above > SPIKE:
            add(row, f"a spike of {above:.1f} nats")
        if is_late and float(row["most_norm"]) > NORM:
            norms.setdefault(tuple(row[name] for name in TRAINING), []).append(row)
    for large in norms.values():
        most = max(large, key=lambda row: float(row["most_norm"]))
        add(most, f"gradients of norm {float(most['most_norm']):.1f}")
    return lines


def after(trained: Trained, seconds: float) -> float:
    """Return the bits after some seconds of training, the mean of straight lines through curves;
    NaN before the first validation."""
    values = []
    for curve in trained.curves:
        times = [float(row["seconds"]) for row in curve]
        bits = [float(row["bits_per_byte"]) for row in curve]
        values.append(np.interp(seconds, times, bits, left=math.nan))
    return statistics.mean(map(float, values))


def bits_table(size: str) -> str:
    """Return the bits a byte at equal tokens and at equal seconds of all mixers of a size."""
    rows, probes = read(CURVES), read(PROBES)
    every = trainings(rows, size)
    equal = min(filter(math.isfinite, (trained.seconds for trained in every)))
    kinds = list(dict.fromkeys(row["label"] for row in probes if row["probe"] == "kind"))
    body = [
        [
            trained.mixer,
            f"{int(trained.ends[0]['parameters']) / 1e6:.1f}M",
            f"{float(trained.ends[0]['rate']):g}",
            str(len(trained.ends)),
            spread(trained.bits),
            *(f"{nats(of_probe(probes, trained, 'kind', kind)):.3f}" for kind in kinds),
            in_words(after(trained, equal)),
            in_words(trained.seconds, ".0f"),
            in_words(float(trained.ends[0]["tokens"]) / trained.seconds, ",.0f"),
        ]
        for trained in every
    ]
    first = every[0].ends[0]
    of_kind = [f"{kind}, nats a token" for kind in kinds]
    head = ["mixer", "parameters", "rate", "seeds", "bits a byte", *of_kind]
    head += [f"bits after {equal:.0f} s", "seconds", "tokens/s"]
    text = (
        f"Models of {size}, {int(first['tokens']) / 1e6:.0f}M tokens in steps of {first['B']} x "
        f"{int(first['T']):,} {source([t.ends[0] for t in every], CURVES)}:"
    )
    return f"{text}\n\n{table(head, body)}"


def seconds_table(size: str) -> str:
    """Return the trainings of a size, and longer ones, by their seconds."""
    rows = read(CURVES)
    every = [*trainings(rows, size), *longer_trainings(rows, size)]
    every = [trained for trained in every if math.isfinite(trained.seconds)]
    every.sort(key=lambda trained: trained.seconds)
    fewest = itertools.accumulate((trained.mean for trained in every), min)
    body = [
        [
            f"{trained.seconds:.0f}",
            trained.mixer,
            f"{int(trained.ends[0]['tokens']) / 1e6:.0f}M",
            str(len(trained.ends)),
            spread(trained.bits),
            "yes" if trained.mean == least else "",
        ]
        for trained, least in zip(every, fewest, strict=True)
    ]
    said = f"Trainings of {size} by their seconds {source([t.ends[0] for t in every], CURVES)}:"
    head = ["seconds", "mixer", "tokens", "seeds", "bits a byte", "fewest in that time"]
    return f"{said}\n\n{table(head, body)}"


def claim_table() -> str:
    """Return the trainings of CLAIM: perplexities, and differences of seeds to the first mixer's.

    Models of a seed read the same tokens in the same order, so their differences are by seed.
    """
    rows = read(CURVES)
    mine = [row for row in rows if row["mixer"] in CLAIM]
    every = [(size, steps) for size in SIZES for steps in sorted(lengths(mine, size))]
    lines, last = [], list[Row]()
    for size, steps in every:
        of_mixer = {trained.mixer: trained for trained in trainings(mine, size, steps)}
        first = of_mixer.get(CLAIM[0])
        if first is None or len(of_mixer) < 2:
            continue
        for trained in (of_mixer[mixer] for mixer in CLAIM if mixer in of_mixer):
            apart = [
                f"{value - first.perplexities[seed]:+.3f}"
                for seed, value in sorted(trained.perplexities.items())
                if trained is not first and seed in first.perplexities
            ]
            lines.append(
                [
                    size,
                    f"{int(trained.ends[0]['tokens']) / 1e6:.0f}M",
                    trained.mixer,
                    str(len(trained.ends)),
                    spread(trained.bits),
                    f"{statistics.mean(trained.perplexities.values()):.3f}",
                    ", ".join(apart),
                    in_words(trained.seconds, ".0f"),
                ]
            )
            last += trained.ends
    head = ["size", "tokens", "mixer", "seeds", "bits a byte", "perplexity a token"]
    head += ["less the first's, by seed", "seconds"]
    return f"One layer replaced {source(last, CURVES)}:\n\n{table(head, lines)}"


def in_words(value: float, digits: str = ".4f") -> str:
    """Return a value, or nothing where it is not known."""
    return format(value, digits) if math.isfinite(value) else ""


def of_probe(probes: Iterable[Row], trained: Trained, probe: str, label: str) -> list[Row]:
    """Return the rows of a probe's class for the trainings of all seeds."""
    return [
        row
        for row in probes
        if row["probe"] == probe
        and row["label"] == label
        and any(same(row, e) for e in trained.ends)
    ]


def nats(rows: Sequence[Row]) -> float:
    """Return the mean nats a token of a class's rows."""
    return sum(float(r["nats"]) for r in rows) / max(1, sum(int(r["count"]) for r in rows))


def hits(rows: Sequence[Row]) -> float:
    """Return the share of the tokens of a class's rows that were the likeliest."""
    return sum(int(r["hits"]) for r in rows) / max(1, sum(int(r["count"]) for r in rows))


def probe_table(size: str) -> str:
    """Return what all mixers of a size answer to probes, as far as `SHOWN` has their classes."""
    probes, every = read(PROBES), trainings(read(CURVES), size)

    def value(trained: Trained, probe: str, label: str) -> str:
        rows = of_probe(probes, trained, probe, label)
        if not any(int(row["count"]) for row in rows):
            return ""
        return f"{nats(rows):.3f}" if probe == "place" else f"{100 * hits(rows):.1f}"

    body = [[one.mixer, *(value(one, *key) for key in SHOWN)] for one in every]
    said = (
        f"Probes of models of {size}: nats a token after so many of its document; percent right of "
        "rare names and of closing brackets by the tokens since they stood before, of copied "
        "random tokens, of values by name among several, and of values through assignments "
        f"{source([one.ends[0] for one in every], PROBES)}:"
    )
    return f"{said}\n\n{table(['mixer', *SHOWN.values()], body)}"


Point = tuple[float, float]
"""Floating-point operations of a training, and its bits a byte."""


class Power(NamedTuple):
    """A fit of bits = floor + factor * (compute / unit)^-power; error: the standard error of the
    power."""

    factor: float
    power: float
    error: float
    unit: float
    floor: float = 0.0

    def bits(self, compute: float) -> float:
        """Return the bits of the fit after floating-point operations."""
        return self.floor + self.factor * (compute / self.unit) ** -self.power


def fit(points: Sequence[Point], floor: float = 0.0) -> Power:
    """Return the line through the logarithms of (compute, bits - floor), at least two of them.

    The error is of the residuals, and NaN for two points.
    """
    unit = min(compute for compute, _ in points)
    x, y = np.log(np.array(points) - [0.0, floor]).T
    x = x - math.log(unit)
    slope, intercept = np.polyfit(x, y, 1)
    left, free = y - intercept - slope * x, len(points) - 2
    error = math.sqrt((left @ left) / free / ((x - x.mean()) ** 2).sum()) if free else math.nan
    return Power(math.exp(intercept), -float(slope), error, unit, floor)


def floor_of(groups: Iterable[Sequence[Point]]) -> float:
    """Return the bits that no compute saves, which are the text's and the same for all mixers.

    Of a grid it is the value with which the fits of mixers that have three sizes or more miss their
    points least, by logarithms; 0 where there are none.
    """
    bent = [points for points in groups if len({compute for compute, _ in points}) > 2]
    if not bent:
        return 0.0

    def misses(floor: float) -> float:
        powers = [fit(points, floor) for points in bent]
        return sum(
            math.log(power.bits(compute) / bits) ** 2
            for power, points in zip(powers, bent, strict=True)
            for compute, bits in points
        )

    least = min(bits for points in bent for _, bits in points)
    return min(np.linspace(0, least, GRID, endpoint=False).tolist(), key=misses)


def points_of(every: Iterable[Trained]) -> list[Point]:
    """Return the points of trainings, one of every seed."""
    return [(trained.compute, bits) for trained in every for bits in trained.bits]


def fits(rows: Sequence[Row]) -> dict[str, tuple[list[Trained], Power]]:
    """Return the trainings and the fit of each mixer that has several sizes, every seed a point."""
    by_mixer: dict[str, list[Trained]] = {}
    for size in SIZES:
        for trained in filter(long_enough, trainings(rows, size)):
            by_mixer.setdefault(trained.mixer, []).append(trained)
    groups = {mixer: points_of(every) for mixer, every in by_mixer.items() if len(every) > 1}
    floor = floor_of(groups.values())
    return {mixer: (by_mixer[mixer], fit(points, floor)) for mixer, points in groups.items()}


def scaling_table() -> str:
    """Return the fits of bits against compute."""
    found = fits(read(CURVES))
    lines = []
    for mixer, (every, power) in sorted(found.items(), key=lambda item: -item[1][1].power):
        error = f" ± {power.error:.4f}" if math.isfinite(power.error) else ""
        sizes = ", ".join(f"{each.size}: {each.mean:.4f}" for each in every)
        at = f"{power.bits(power.unit):.4f} at {power.unit:.2g}"
        lines.append([mixer, sizes, at, f"{power.power:.4f}{error}"])
    rows = [each.ends[0] for every, _ in found.values() for each in every]
    floor = next(iter(found.values()))[1].floor
    text = (
        "Fits of bits a byte against floating-point operations of training, "
        f"{floor:.3f} and a power of them {source(rows, CURVES)}:"
    )
    head = ["mixer", "bits a byte by size", "bits of the fit, at operations", "power"]
    return f"{text}\n\n{table(head, lines)}"


def trouble_table() -> str:
    """Return all trainings that failed, diverged or had spikes."""
    rows = read(CURVES)
    head = ["mixer", "size", "rate", "seed", "tokens", "what"]
    return f"Troubles of trainings {source(rows, CURVES)}:\n\n{table(head, troubles(rows))}"


def evidence(sizes: Sequence[str], longer: Sequence[str] = ()) -> Mapping[str, Callable[[], str]]:
    """Return the functions of all tables of some sizes, by the names of markers; fits are of two
    sizes or more.

    longer: sizes of which some mixers were trained for longer than others.
    """
    return {
        **({"evidence_scaling": scaling_table} if len(sizes) > 1 else {}),
        "evidence_troubles": trouble_table,
        **{f"evidence_{size}": partial(bits_table, size) for size in sizes},
        **{f"evidence_seconds_{size}": partial(seconds_table, size) for size in longer},
        **{f"evidence_probes_{size}": partial(probe_table, size) for size in sizes},
    }
