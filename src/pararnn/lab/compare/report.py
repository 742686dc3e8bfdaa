"""A comparison as a folder: report.md, curves.png and comparison.json."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pararnn.base.atomic import write_text
from pararnn.base.errors import TrainingError
from pararnn.base.extras import require
from pararnn.lab.compare.curves import plot_sets
from pararnn.lab.compare.groups import Group, Set, Spread, differences_of, sets_of
from pararnn.lab.compare.runs import Run, find_runs
from pararnn.lab.evaluation.report import NONE, table
from pararnn.lab.progress import amount, duration
from pararnn.lab.provenance import provenance
from pararnn.lab.records import to_json
from pararnn.lab.train.files import check_own

REPORT, CURVES, DATA = "report.md", "curves.png", "comparison.json"
BITS = (
    "Bits per byte are of held-out text: the mean over the seeds, in brackets the least and the "
    "largest."
)
SECONDS = (
    "Seconds are those of training steps, without validations, checkpoints and what the first "
    "steps do once, such as compilation."
)
SCHEDULES = (
    "Their schedules of rates differ with their lengths: where a shorter run has ended, a longer "
    "one still has a higher rate. Equal tokens favour the shorter one."
)
OTHER_TEXT = (
    "Bits per byte of one set say nothing about those of another. `pararnn eval MODEL --text FILE` "
    "measures models of all of them on the same text, whatever their tokenizers."
)


def compare_runs(folders: Iterable[Path], out: Path) -> str:
    """Write a comparison of runs into a folder, and return the report.

    folders: of runs, or of sweeps. Others are left out, and the report says so. Runs that differ by
    their seed only are a group. Groups whose held-out bits were not measured alike, by other data,
    another tokenizer or other rows, are in sets of their own.

    Raises TrainingError where there is no run to compare, and for a folder in which others have
    written; MissingExtra without matplotlib.
    """
    require("matplotlib.figure")
    runs, left_out = find_runs(folders)
    if not runs:
        raise TrainingError(
            f"there is no run to compare: {'; '.join(left_out) or 'no folder was named'}"
        )
    sets = sets_of(runs)
    out.mkdir(parents=True, exist_ok=True)
    check_own(out, (REPORT, CURVES, DATA), DATA, "versions")
    text = markdown(sets, left_out)
    write_text(out / DATA, to_json({**provenance(), **record(sets, left_out)}))
    plot_sets(sets, out / CURVES)
    write_text(out / REPORT, text)
    return text


def record(sets: Sequence[Set], left_out: Sequence[str]) -> dict[str, Any]:
    """Return a comparison as JSON values."""
    return {
        "sets": [
            {
                "measure": each.measure,
                "differences": each.differences,
                "equal_tokens": each.equal_tokens,
                "equal_seconds": each.equal_seconds if _seconds_are_alike(each) else None,
                "groups": [_group_record(each, group) for group in each.groups],
            }
            for each in sets
        ],
        "left_out": list(left_out),
    }


def _group_record(each: Set, group: Group) -> dict[str, Any]:
    spreads = {
        "end": group.end,
        "at_equal_tokens": at_tokens(each, group),
        "at_equal_seconds": at_seconds(each, group),
    }
    return {
        "label": group.label,
        **{name: None if spread is None else spread._asdict() for name, spread in spreads.items()},
        "runs": [
            {
                "folder": str(run.folder),
                "seed": run.config.seed,
                "state": run.state,
                "counts": run in group.runs,
                "parameters": run.parameters,
                "devices": run.devices,
                "points": [point._asdict() for point in run.points],
            }
            for run in (*group.runs, *group.others)
        ],
    }


def at_tokens(each: Set, group: Group) -> Spread | None:
    """Return a group's bits at the set's equal tokens."""
    return group.spread(lambda run: run.at("tokens", each.equal_tokens))


def at_seconds(each: Set, group: Group) -> Spread | None:
    """Return a group's bits at the set's equal seconds; None where seconds may not be compared."""
    if not _seconds_are_alike(each):
        return None
    return group.spread(lambda run: run.at("seconds", each.equal_seconds))


def _seconds_are_alike(each: Set) -> bool:
    """Return whether all runs are known to have run on one kind of device."""
    return len(each.devices) == 1 and "unknown" not in each.devices


def markdown(sets: Sequence[Set], left_out: Sequence[str]) -> str:
    """Return the report."""
    runs = sum(len(each.runs) for each in sets)
    groups = sum(len(each.groups) for each in sets)
    parts = [
        "# Comparison",
        f"{_count(runs, 'run')} in {_count(groups, 'group')}. {BITS} {SECONDS}",
    ]
    if len(sets) > 1:
        keys = differences_of([each.measure for each in sets], ("content",))
        what = ", ".join(f"`{key}`" for key in keys) or "the content of the data"
        parts.append(
            f"**Not all can be compared**: there are {len(sets)} sets, which differ in {what}. "
            f"{OTHER_TEXT}"
        )
    for index, each in enumerate(sets, 1):
        parts += _set_parts(each, f"Set {index}" if len(sets) > 1 else "Results")
    parts += [f"![Bits per byte against tokens and against seconds]({CURVES})"]
    parts += ["## Runs", _runs_table(sets)]
    if left_out:
        parts += ["## Left out", "\n".join(f"- {line}" for line in left_out)]
    return "\n\n".join(parts) + "\n"


def _set_parts(each: Set, title: str) -> list[str]:
    """Return a set's part of the report."""
    data = each.measure
    what = f"`{data['data.train']}`" if data["data.train"] not in ("", '""') else "data of its own"
    groups = ranking(each)
    parts = [
        f"## {title}",
        f"Data: {what}, tokenizer {data['data.tokenizer']}; held out are {data['valid_rows']} rows "
        f"(or all there are) of {data['data.sequence_length']} tokens.",
        _results_table(each, groups),
        *_notes(each),
        *verdict(each, groups),
    ]
    if each.differences:
        head = ["what differs", *(group.label for group in each.groups)]
        parts.append(table(head, [[key, *values] for key, values in each.differences.items()]))
    return parts


def ranking(each: Set) -> list[Group]:
    """Return the groups, those with the fewest bits first, and last those without a figure."""

    def key(group: Group) -> tuple[bool, float]:
        spread = _decisive(each, group)
        return spread is None, 0.0 if spread is None else spread.mean

    return sorted(each.groups, key=key)


def _decisive(each: Set, group: Group) -> Spread | None:
    """Return the bits that rank a group: at the end where lengths are equal, or at equal tokens."""
    return group.end if len(each.lengths) == 1 else at_tokens(each, group)


def _results_table(each: Set, groups: Sequence[Group]) -> str:
    columns: dict[str, Any] = {
        "parameters": lambda group: _parameters(group.runs[0]),
        "seeds": lambda group: str(len(group.runs)),
        "tokens": lambda group: f"{amount(group.tokens)}".strip(),
        "bits per byte at the end": lambda group: _spread(group.end),
    }
    if len(each.lengths) > 1 or not any(group.is_finished for group in groups):
        name = f"at {amount(each.equal_tokens).strip()} tokens"
        columns[name] = lambda group: _spread(at_tokens(each, group))
    if _seconds_are_alike(each):
        name = f"at {duration(each.equal_seconds)}"
        columns[name] = lambda group: _spread(at_seconds(each, group))
    columns |= {
        "seconds": lambda group: f"{group.mean_seconds:,.1f}",
        "tokens/s": lambda group: f"{group.speed:,.0f}",
    }
    body = [[_name(group), *(cell(group) for cell in columns.values())] for group in groups]
    return table(["group", *columns], body)


def _name(group: Group) -> str:
    return group.label + ("" if group.is_finished else " (not finished)")


def _parameters(run: Run) -> str:
    return NONE if run.parameters is None else amount(run.parameters).strip()


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return NONE
    text = f"{spread.mean:.4f}"
    return text if spread.seeds == 1 else f"{text} ({spread.least:.4f} to {spread.largest:.4f})"


def _notes(each: Set) -> list[str]:
    """Return what a reader must know before comparing the groups of a set."""
    notes = []
    open_runs = [run for run in each.runs if not run.is_finished]
    if open_runs:
        about = "Means are over those of a group that have ended, if any has."
        notes.append(
            f"**{_count(len(open_runs), 'run')} of {len(each.runs)} not finished** (see Runs). "
            f"{about}"
        )
    if len(each.lengths) > 1:
        lengths = ", ".join(amount(length).strip() for length in sorted(each.lengths))
        notes.append(
            f"**Runs of different lengths** ({lengths} tokens): their ends are not compared, and "
            f"the order is that at equal tokens. {SCHEDULES}"
        )
    if not _seconds_are_alike(each):
        devices = ", ".join(sorted(each.devices))
        notes.append(f"**Seconds are not compared**: the runs' devices are {devices}.")
    sizes = {run.parameters for run in each.runs if run.parameters is not None}
    if len(sizes) > 1 and max(sizes) > 1.05 * min(sizes):
        notes.append(
            f"**Models of different sizes**: from {min(sizes):,} to {max(sizes):,} parameters."
        )
    versions = {
        str(start["versions"]) for run in each.runs for start in run.record.get("starts", [])
    }
    if len(versions) > 1:
        notes.append(f"Runs of different versions: {'; '.join(sorted(versions))}.")
    repeats = [
        run
        for group in each.groups
        for run in group.others
        if run.config.seed in {other.config.seed for other in group.runs}
    ]
    if repeats:
        names = ", ".join(str(run.folder) for run in repeats)
        notes.append(f"Seeds that another run of the same config has too, and in no mean: {names}.")
    return notes


def verdict(each: Set, groups: Sequence[Group]) -> list[str]:
    """Return a sentence on the first two groups, and whether their seeds tell them apart."""
    best = [(group, spread) for group in groups if (spread := _decisive(each, group)) is not None]
    if len(best) < 2:
        return []
    (first, own), (second, other) = best[:2]
    share = 100 * (1 - own.mean / other.mean)
    if own.seeds == 1 or other.seeds == 1:
        sure = "With one seed it is not known by how much seeds differ."
    elif own.largest < other.least:
        sure = "Each of its seeds is below each of theirs."
    else:
        sure = "Their seeds overlap: these runs do not tell the two apart."
    return [f"Fewest bits: {first.label}, {share:.2g}% below {second.label}. {sure}"]


def _runs_table(sets: Sequence[Set]) -> str:
    head = ["run", "set", "group", "seed", "state", "last bits per byte", "tokens", "seconds"]
    rows = [
        [
            str(run.folder),
            str(index),
            group.label + ("" if run in group.runs else " (in no mean)"),
            str(run.config.seed),
            run.state,
            f"{run.points[-1].bits:.4f}",
            f"{run.points[-1].tokens:,}",
            f"{run.points[-1].seconds:,.1f}",
            ", ".join(run.devices) or "unknown",
        ]
        for index, each in enumerate(sets, 1)
        for group in each.groups
        for run in (*group.runs, *group.others)
    ]
    return table([*head, "device"], rows)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
