"""The pictures of paper_kernels.py, each from its result file alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import read_rows

from pararnn.extras import require

Row = dict[str, str]
STYLES = {"call": "--", "graph": "-"}
PASSES = {"forward": "forward", "both": "forward + backward"}


def _grid(rows: int, columns: int) -> tuple[Any, Any]:
    figure = require("matplotlib.figure").Figure(
        figsize=(5.6 * columns, 4.2 * rows), layout="constrained"
    )
    return figure, figure.subplots(rows, columns, squeeze=False)


def _colours(rows: Sequence[Row]) -> dict[str, Any]:
    """A colour for each way; torch.nn's layers, one a cell, share theirs."""
    ways = list(dict.fromkeys(_family(row["way"]) for row in rows))
    palette = require("matplotlib").colormaps["tab20"].colors
    order = [*range(0, 20, 2), *range(1, 20, 2)]
    return {way: palette[order[index % 20]] for index, way in enumerate(ways)}


def _family(way: str) -> str:
    return "torch.nn's layer" if way.startswith("torch.nn.") else way


def _curves(axes: Any, rows: Sequence[Row], title: str, colours: Mapping[str, Any]) -> None:
    """The least ms against the length: a colour a way, broken lines for calls from Python."""
    for way in dict.fromkeys(row["way"] for row in rows):
        for launch, style in STYLES.items():
            mine = [row for row in rows if (row["way"], row["launch"]) == (way, launch)]
            points = sorted((int(row["T"]), float(row["min_ms"])) for row in mine)
            if points:
                axes.plot(
                    *zip(*points, strict=True), style, color=colours[_family(way)], marker="."
                )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(title=title, xlabel="T", ylabel="ms, minimum")
    axes.grid(alpha=0.3)


def _finish(figure: Any, colours: Mapping[str, Any], path: Path) -> None:
    """One legend for all panels, below them."""
    line = require("matplotlib.lines").Line2D
    handles = [line([], [], color=colour, label=way) for way, colour in colours.items()]
    handles += [
        line([], [], color="black", linestyle=STYLES[launch], label=label)
        for launch, label in (("graph", "as a CUDA graph"), ("call", "called from Python"))
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=130)


def reduction(results: Path, path: Path) -> None:
    """The linear recurrence against the length, diagonal and 2 x 2 blocks."""
    rows = read_rows(results)
    kinds, colours = list(dict.fromkeys(row["what"] for row in rows)), _colours(rows)
    figure, grid = _grid(1, len(kinds))
    for axes, kind in zip(grid[0], kinds, strict=True):
        mine = [row for row in rows if row["what"] == kind]
        _curves(axes, mine, f"linear recurrence, {kind}", colours)
    _finish(figure, colours, path)


def solve(results: Path, path: Path) -> None:
    """Cells against the length: a row of panels a pass, a column a cell; Mamba in each."""
    rows = read_rows(results)
    cells = [what for what in dict.fromkeys(row["what"] for row in rows) if what != "mamba"]
    colours = _colours(rows)
    figure, grid = _grid(len(PASSES), len(cells))
    for line, (step, title) in zip(grid, PASSES.items(), strict=True):
        for axes, cell in zip(line, cells, strict=True):
            mine = [row for row in rows if row["what"] in (cell, "mamba") and row["pass"] == step]
            _curves(axes, mine, f"{cell}, {title}", colours)
    _finish(figure, colours, path)


def split(results: Path, path: Path) -> None:
    """(newton, fused) over segments: a column a cell and case, a row a pass, a curve a burn-in."""
    every = read_rows(results)
    rows = [row for row in every if row["launch"] == launch_of(every)]
    cases = list(dict.fromkeys(row["what"] for row in rows))
    figure, grid = _grid(len(PASSES), len(cases))
    for line, (step, title) in zip(grid, PASSES.items(), strict=True):
        for axes, case in zip(line, cases, strict=True):
            mine = [row for row in rows if (row["what"], row["pass"]) == (case, step)]
            pinned = [row for row in mine if row["asked"] not in ("", "rule")]
            for burn_in in dict.fromkeys(row["asked_burn_in"] for row in pinned):
                points = sorted(
                    (int(row["segments"]), float(row["min_ms"]))
                    for row in pinned
                    if row["asked_burn_in"] == burn_in
                )
                axes.plot(*zip(*points, strict=True), marker=".", label=f"burn-in {burn_in}")
            for row in mine:
                if row["asked"] == row["asked_burn_in"] == "rule":
                    place = int(row["segments"]), float(row["min_ms"])
                    axes.plot(*place, "k*", markersize=10, label="by the rule")
                if row["asked"] == "":
                    axes.axhline(float(row["min_ms"]), color="gray", label="the loop's kernel")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set(title=f"{case}, {title}", xlabel="segments", ylabel="ms, minimum")
            axes.grid(alpha=0.3)
            axes.legend(fontsize="x-small")
    figure.savefig(path, dpi=130)


def launch_of(rows: Sequence[Row]) -> str:
    """Graphs where there are any, else calls."""
    return "graph" if any(row["launch"] == "graph" for row in rows) else "call"


PLOTS: Mapping[str, Callable[[Path, Path], None]] = {
    "reduction": reduction,
    "solve": solve,
    "split": split,
}
