"""Results of runs: their files, and an accuracy or a whole result in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pararnn.lab.records import read_json

Result = Mapping[str, Any]
SEEDS = ("seed", "seeds")
"""Keys of a config that number its seeds."""


def read_result(path: Path) -> Result:
    """Read a result's JSON; ValueError for a file that holds none."""
    try:
        result = read_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no result: {error}; move or remove it") from error
    if not (isinstance(result, dict) and {"task", "mixer", "config"} <= {*result}):
        raise ValueError(f"{path} is no result of `pararnn tasks run`: move or remove it")
    return result


def read_results(folder: Path) -> list[Result]:
    """Read the results of a folder, in the order of their names; ValueError for none."""
    results = [read_result(path) for path in sorted(folder.glob("*.json"))]
    if not results:
        raise ValueError(f"{folder} holds no results: pararnn tasks run NAME --out {folder}")
    return results


def check_same(path: Path, config: Mapping[str, Any], lengths: list[int]) -> None:
    """Check a file's result against a config; ValueError names the first difference."""
    result = read_result(path)
    theirs = {**flat(result["config"]), "lengths": list(map(int, result["lengths"]))}
    ours = {**flat(config), "lengths": lengths}
    for key in {**ours, **theirs}:
        if ours.get(key) != theirs.get(key):
            raise ValueError(
                f"{path} has {key} = {theirs.get(key)!r}, and this run {ours.get(key)!r}: give it "
                "another folder (--out), or remove that result"
            )


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config and of the mappings in it, by their own names."""
    values: dict[str, Any] = {}
    for key, value in config.items():
        values |= value if isinstance(value, Mapping) else {key: value}
    return values


def best(accuracies: Iterable[float | None]) -> float | None:
    """Return the largest accuracy; None if no seed has one."""
    return max((accuracy for accuracy in accuracies if accuracy is not None), default=None)


def row_of(result: Result) -> str:
    """Return the name of a result's row: the mixer, and its layers if there are several."""
    layers = result["config"]["model"]["layers"]
    return result["mixer"] + (f", {layers} layers" if layers > 1 else "")


def rows_of(results: Sequence[Result]) -> list[Result]:
    """Return the results with the names of their rows, "row"; those of one config are one.

    Results of one task and mixer may differ in what trained them, such as the rate: their rows name
    it. Results that differ by `SEEDS` only are one, of all their seeds.
    """
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((row_of(result), result["task"]), []).append(result)
    keys: dict[str, list[str]] = {}
    for (row, _), group in groups.items():
        keys.setdefault(row, []).extend(_differences(group))
    by_row: dict[tuple[str, str], list[Result]] = {}
    for (row, task), group in groups.items():
        for result in group:
            values = flat(result["config"])
            settings = [f"{key} {values.get(key)}" for key in dict.fromkeys(keys[row])]
            by_row.setdefault((", ".join([row, *settings]), task), []).append(result)
    return [{**_union(group), "row": row} for (row, _), group in by_row.items()]


def _differences(results: Sequence[Result]) -> list[str]:
    """Return the keys in which configs differ, without those that number the seeds."""
    configs = [flat(result["config"]) for result in results]
    keys = dict.fromkeys(key for c in configs for key in c if key not in SEEDS)
    return [key for key in keys if any(c.get(key) != configs[0].get(key) for c in configs)]


def _union(results: Sequence[Result]) -> Result:
    """Return results of one config, each of other seeds, as one."""
    if len(results) == 1:
        return results[0]
    first = max(results, key=lambda result: -1.0 if result["best"] is None else result["best"])
    owners = {
        seed: (result, index) for result in results for index, seed in enumerate(result["seeds"])
    }
    order = [owners[seed] for seed in sorted(owners)]
    lengths = [
        length for length in first["lengths"] if all(length in r["lengths"] for r in results)
    ]
    return {
        **first,  # with the best seed, and whether that one was capped
        "seeds": sorted(owners),
        "accuracies": [result["accuracies"][index] for result, index in order],
        "diverged": [result["diverged"][index] for result, index in order],
        "lengths": {
            length: [result["lengths"][length][index] for result, index in order]
            for length in lengths
        },
    }


def percent(accuracy: float | None) -> str:
    """Round down to a tenth, so that 100 has no error; None is "diverged"."""
    if accuracy is None:
        return "diverged"
    return "100" if accuracy == 1 else f"{int(accuracy * 1000) / 10:g}"


def percent_or_none(accuracy: float | None) -> str:
    """Round to a hundredth of a percent; None is "none"."""
    return "none" if accuracy is None else f"{accuracy:.2%}"


def summary(result: Result) -> str:
    """Return a result in one line."""
    seeds = ", ".join(
        percent_or_none(accuracy) + ("" if step is None else f" (diverged by step {step})")
        for accuracy, step in zip(result["accuracies"], result["diverged"], strict=True)
    )
    lengths = "".join(
        f"; at {length} {percent_or_none(best(found))}"
        for length, found in result["lengths"].items()
    )
    return (
        f"{result['task']}, {result['mixer']}: {seeds} (chance {result['chance']:.2%}) after "
        f"{result['steps']} steps, {result['seconds']:.1f} s"
        f"{', capped' * result['capped']}{lengths}"
    )
