"""The rule for rates, and fits of loss against compute, of learn.py's trainings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from learn_models import SIZES

TRAINING = ("mixer", "size", "rate", "seed", "steps")
"""Columns that tell a training from others."""
Rows = Iterable[Mapping[str, Any]]
POWER = 1.0
"""Power of the width by which rates fall as long as one size alone has several rates: that of
maximal update parametrisation for matrices."""


def ends(rows: Iterable[Any]) -> list[Any]:
    """Return the last rows of trainings that ended with a finite loss."""
    return [
        row
        for row in rows
        if row.get("step")
        and str(row["step"]) == str(row["steps"])
        and math.isfinite(float(row["bits_per_byte"]))
    ]


def best_rate(bits: Mapping[float, float]) -> float | None:
    """Return the rate with the fewest bits by a parabola through three neighbours in the logarithm;
    of rates whose best is the first or last that one, and None for fewer than two."""
    if len(bits) < 2:
        return None
    rates = sorted(bits)
    place = min(range(len(rates)), key=lambda index: bits[rates[index]])
    if place in (0, len(rates) - 1):
        return rates[place]
    near = rates[place - 1 : place + 2]
    a, b, _ = np.polyfit(np.log(near), [bits[rate] for rate in near], 2)
    return float(np.exp(-b / (2 * a)))


def best_rates(rows: Rows) -> dict[tuple[str, str], float]:
    """Return the best rate by mixer and size, of those that trained at two or more with the first
    seed, in their longest trainings."""
    groups: dict[tuple[str, str], dict[int, dict[float, float]]] = {}
    for row in ends(rows):
        if str(row["seed"]) == "0":
            group = groups.setdefault((row["mixer"], row["size"]), {})
            bits = group.setdefault(int(row["steps"]), {})
            bits[float(row["rate"])] = float(row["bits_per_byte"])
    best: dict[tuple[str, str], float] = {}
    for key, by_steps in groups.items():
        several = [steps for steps, bits in by_steps.items() if len(bits) > 1]
        rate = best_rate(by_steps[max(several)]) if several else None
        if rate is not None:
            best[key] = rate
    return best


def power_of(best: Mapping[tuple[str, str], float]) -> float:
    """Return the power of the width by which the best rates fall: a line through the logarithms of
    mixers that have several sizes, with an intercept for each; POWER where there are none."""
    xs, ys = list[float](), list[float]()
    for mixer in {mixer for mixer, _ in best}:
        sizes = [size for name, size in best if name == mixer]
        if len(sizes) > 1:
            logs = [(math.log(SIZES[s].width), math.log(best[mixer, s])) for s in sizes]
            means = [statistics.mean(values) for values in zip(*logs, strict=True)]
            xs += [x - means[0] for x, _ in logs]
            ys += [y - means[1] for _, y in logs]
    return -float(np.dot(xs, ys) / np.dot(xs, xs)) if xs else POWER


def rate_of(rows: Rows, mixer: str, size: str) -> float | None:
    """Return the rate for a mixer of a size, to three digits; None before any has two rates.

    It is the best rate of the smallest size with several rates, times a power of the width that all
    mixers share (`power_of`). A mixer without several rates there has the geometric mean of the
    others.
    """
    best = best_rates(rows)
    if not best:
        return None
    small = min((s for _, s in best), key=lambda s: SIZES[s].parameters)
    there = {name: rate for (name, s), rate in best.items() if s == small}
    base = there.get(mixer) or statistics.geometric_mean(there.values())
    factor = (SIZES[size].width / SIZES[small].width) ** -power_of(best)
    return float(f"{base * factor:.3g}")
