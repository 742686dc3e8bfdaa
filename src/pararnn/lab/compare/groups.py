"""Groups of runs that differ by their seed only, and sets of groups that may be compared."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pararnn.lab.compare.runs import Run
from pararnn.lab.palette import architecture
from pararnn.lab.train.folder import BY_CONTENT
from pararnn.lm.config import LMConfig

SAME_RUN = (
    *("seed", "name", "out", "data.cache", "report_to"),
    *("save_every", "keep", "valid_every", "log_every", "verify_every"),
)
"""Keys that do not make another group: a run's number, its names, and what it writes when."""
MEASURED_BY = ("data.sequence_length", "data.resets", "data.stateful", "valid_rows")
"""Keys, besides those of the data, on which it depends which held-out tokens are predicted, and
from how many before them."""


class Spread(NamedTuple):
    """Mean of some runs' values, with the least and the largest."""

    mean: float
    least: float
    largest: float
    seeds: int


def spread_of(values: Sequence[float | None]) -> Spread | None:
    """Return the spread of values; None if there are none, or if one is missing."""
    present = [value for value in values if value is not None]
    if not present or len(present) < len(values):
        return None
    return Spread(statistics.mean(present), min(present), max(present), len(present))


@dataclass(frozen=True)
class Group:
    """Runs of one config, each of another seed.

    label: a name, with what differs from the set's other groups. runs: those that have ended or, if
    none has, all. others: further runs, which are in no mean.
    """

    label: str
    runs: Sequence[Run]
    others: Sequence[Run]

    @property
    def is_finished(self) -> bool:
        """True if its runs have ended."""
        return self.runs[0].is_finished

    def spread(self, value: Callable[[Run], float | None]) -> Spread | None:
        """Return the spread of a value over its runs."""
        return spread_of([value(run) for run in self.runs])

    @property
    def end(self) -> Spread | None:
        """Bits at the end; None if no run has ended."""
        return self.spread(lambda run: run.points[-1].bits) if self.is_finished else None

    @property
    def tokens(self) -> int:
        """Tokens that all its runs have learned."""
        return min(run.points[-1].tokens for run in self.runs)

    @property
    def seconds(self) -> float:
        """Seconds that all its runs have trained."""
        return min(run.points[-1].seconds for run in self.runs)

    @property
    def mean_seconds(self) -> float:
        """Mean of the seconds that its runs have trained."""
        return statistics.mean(run.points[-1].seconds for run in self.runs)

    @property
    def speed(self) -> float:
        """Mean of its runs' tokens/s."""
        points = [run.points[-1] for run in self.runs]
        return statistics.mean(point.tokens / max(point.seconds, 1e-9) for point in points)


@dataclass(frozen=True)
class Set:
    """Groups whose bits were measured alike, and so may be compared.

    measure: the values that say what was measured, by key. differences: values of the keys in which
    the groups' configs differ, one a group.
    """

    measure: Mapping[str, str]
    groups: Sequence[Group]
    differences: Mapping[str, Sequence[str]]

    @property
    def runs(self) -> list[Run]:
        """All runs, those in no mean too."""
        return [run for group in self.groups for run in (*group.runs, *group.others)]

    @property
    def equal_tokens(self) -> int:
        """Most tokens that all groups have learned, of those that have ended if there are any."""
        return min(group.tokens for group in self._whole)

    @property
    def equal_seconds(self) -> float:
        """Most seconds that all groups have trained, of those that have ended if there are any."""
        return min(group.seconds for group in self._whole)

    @property
    def _whole(self) -> Sequence[Group]:
        return [group for group in self.groups if group.is_finished] or self.groups

    @property
    def devices(self) -> set[str]:
        """Devices of all runs; "unknown" where a run's record has none."""
        return {device for run in self.runs for device in run.devices or ("unknown",)}

    @property
    def lengths(self) -> set[int]:
        """Tokens of a whole run, of all groups."""
        return {
            run.config.steps * run.config.batch * run.config.data.sequence_length
            for run in self.runs
        }


def sets_of(runs: Sequence[Run]) -> list[Set]:
    """Return the runs in sets of groups."""
    by_measure: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        by_measure.setdefault(_measure_of(run), []).append(run)
    return [_set_of(similar) for similar in by_measure.values()]


def _measure_of(run: Run) -> tuple[Any, ...]:
    """Return what the bits of a run were measured on: hashable."""
    data = run.content or tuple(run.values[key] for key in BY_CONTENT)
    return data, *(run.values[key] for key in MEASURED_BY)


def _set_of(runs: Sequence[Run]) -> Set:
    others = {*SAME_RUN, *(BY_CONTENT if runs[0].content else ())}
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        key = tuple(value for name, value in run.values.items() if name not in others)
        groups.setdefault(key, []).append(run)
    firsts = [group[0] for group in groups.values()]
    differences = differences_of([run.values for run in firsts], others)
    labels = labels_of(firsts, differences)
    first = runs[0]
    measure = {key: first.values[key] for key in (*BY_CONTENT, *MEASURED_BY)}
    ready = [_group_of(*pair) for pair in zip(labels, groups.values(), strict=True)]
    return Set(measure | {"content": first.content}, ready, differences)


def _group_of(label: str, runs: Sequence[Run]) -> Group:
    """Return a group; of runs with one seed only the first that has ended counts."""
    runs = sorted(runs, key=lambda run: (run.config.seed, not run.is_finished))
    by_seed: dict[int, Run] = {}
    for run in runs:
        by_seed.setdefault(run.config.seed, run)
    complete = [run for run in by_seed.values() if run.is_finished]
    members = complete or list(by_seed.values())
    return Group(label, members, [run for run in runs if run not in members])


def differences_of(
    records: Sequence[Mapping[str, str]], others: Iterable[str] = ()
) -> dict[str, list[str]]:
    """Return the values of the keys in which records differ, one a record."""
    skip = set(others)
    keys = dict.fromkeys(key for record in records for key in record if key not in skip)
    columns = {key: [record[key] for record in records] for key in keys}
    return {key: values for key, values in columns.items() if len(set(values)) > 1}


def kind_of(model: LMConfig) -> str:
    """Return a model's architecture, by the words of the palette where it has them."""
    mixers = {model.cell if each == "rnn" else each for each in model.mixers or ()}
    if len(mixers) > 1:
        return "hybrid" if "attention" in mixers else "-".join(sorted(mixers))
    name = next(iter(mixers), "").rpartition(":")[2]
    return "transformer" if name == "attention" else name


def labels_of(runs: Sequence[Run], differences: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a label for each run: its recipe's name, and what its name does not tell.

    A name begins with the architecture, by which a picture has its colour.
    """
    bases = []
    for run in runs:
        name, kind = run.config.name, kind_of(run.config.model)
        bases.append(name if architecture(name) == kind else f"{kind} {name}")
    labels = []
    for index, base in enumerate(bases):
        similar = [at for at, other in enumerate(bases) if other == base]
        parts = [
            f"{key.rpartition('.')[2]} {values[index]}"
            for key, values in differences.items()
            if len({values[at] for at in similar}) > 1
        ]
        labels.append(", ".join([base, *parts]))
    return labels
