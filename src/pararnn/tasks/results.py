"""Results of runs: their files, and an accuracy or a whole result in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pararnn.records import read_json

Result = Mapping[str, Any]


def read_result(path: Path) -> Result:
    """Read a result's JSON."""
    return read_json(path.read_text(encoding="utf-8"))


def read_results(folder: Path) -> list[Result]:
    """Read the results of a folder, in the order of their names; ValueError for none."""
    results = [read_result(path) for path in sorted(folder.glob("*.json"))]
    if not results:
        raise ValueError(f"{folder} holds no results: pararnn tasks run NAME --out {folder}")
    return results


def check_same(path: Path, config: Mapping[str, Any], lengths: list[int]) -> None:
    """Check a file's result against a config; ValueError names the first difference."""
    result = read_result(path)
    theirs = _flat(result["config"], list(map(int, result["lengths"])))
    ours = _flat(config, lengths)
    for key in {**ours, **theirs}:
        if ours.get(key) != theirs.get(key):
            raise ValueError(
                f"{path} has {key} = {theirs.get(key)!r}, and this run {ours.get(key)!r}: give it "
                "a folder of its own (--out), or remove that result"
            )


def _flat(config: Mapping[str, Any], lengths: list[int]) -> dict[str, Any]:
    """Return the values of a config and of the mappings in it, by their own names."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= value if isinstance(value, Mapping) else {key: value}
    return {**flat, "lengths": lengths}


def best(accuracies: Iterable[float | None]) -> float | None:
    """Return the largest accuracy; None if no seed has one."""
    return max((each for each in accuracies if each is not None), default=None)


def row_of(result: Result) -> str:
    """Return the name of a result's row: the mixer, and its layers if there are several."""
    layers = result["config"]["model"]["layers"]
    return result["mixer"] + (f", {layers} layers" if layers > 1 else "")


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
        f"; at {length} {percent_or_none(best(each))}" for length, each in result["lengths"].items()
    )
    return (
        f"{result['task']}, {result['mixer']}: {seeds} (chance {result['chance']:.2%}) after "
        f"{result['steps']} steps, {result['seconds']:.1f} s"
        f"{', capped' * result['capped']}{lengths}"
    )
