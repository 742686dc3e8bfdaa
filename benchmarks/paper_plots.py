"""The pictures of paper_kernels.py, each from its result file alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import read_rows
from kernels import LINEAR_SCANS
from markdown_tables import PASSES, Row
from paper_ways import KINDS, MAMBA, SCAN_KERNEL, SIMPLIFIED, TORCH_SCAN
from pictures import caption, new_figure, scale_ms

from pararnn.base.extras import require
from pararnn.lab.palette import COLOURS, OTHERS

STYLES = {"call": "--", "graph": "-"}
LABELS = {
    "graph": "solid: as a CUDA graph",
    "call": "broken: called from Python, as it has no graph",
}
WAYS = (SCAN_KERNEL, TORCH_SCAN, MAMBA, *LINEAR_SCANS, *KINDS)
"""The order of rows."""
MODELS = {MAMBA: COLOURS["mamba2"], SIMPLIFIED: COLOURS["mamba2"]}
"""Ways that are a model's: they have its colour."""


def _grid(rows: int, columns: int, **options: Any) -> tuple[Any, Any]:
    figure = new_figure(5.6 * columns, 4.2 * rows)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Sort by cell and way, ours before peers: processes in turns write rows as they come.

    What stands in no list is last: Mamba's cell and torch.nn's layers.
    """
    whats = list(dict.fromkeys(row["what"] for row in rows))

    def place(row: Row) -> tuple[int, int]:
        way = WAYS.index(row["way"]) if row["way"] in WAYS else len(WAYS)
        return whats.index(row["what"]), way

    return sorted(rows, key=place)


def preferred_rows(rows: Sequence[Row]) -> list[Row]:
    """CUDA graphs, and the calls of what has no graph: a device's time where it is known."""

    def way(row: Row) -> tuple[str, ...]:
        return row["what"], row["way"], row["pass"]

    with_graph = {way(row) for row in rows if row["launch"] == "graph"}
    return [row for row in in_order(rows) if row["launch"] == "graph" or way(row) not in with_graph]


def _colours(rows: Sequence[Row]) -> dict[str, Any]:
    """Return a colour for each way; torch.nn's layers, one a cell, share theirs."""
    ways = list(dict.fromkeys(_family(row["way"]) for row in rows))
    own = set(MODELS.values())
    free = (colour for colour in (*COLOURS.values(), *OTHERS) if colour not in own)
    return {way: MODELS.get(way) or next(free) for way in ways}


def _family(way: str) -> str:
    return "torch.nn's layer" if way.startswith("torch.nn.") else way


def _scales(axes: Any, title: str, x: str) -> None:
    """Logarithmic axes, the ms in plain numbers."""
    axes.set_xscale("log", base=2)
    scale_ms(axes)
    axes.set(title=title, xlabel=x, ylabel="ms, minimum")
    axes.grid(alpha=0.3)


def _curves(axes: Any, rows: Sequence[Row], title: str, colours: Mapping[str, Any]) -> None:
    """Draw the least ms by length: a colour a way, broken lines for calls from Python."""
    for way, launch in dict.fromkeys((row["way"], row["launch"]) for row in rows):
        mine = [row for row in rows if (row["way"], row["launch"]) == (way, launch)]
        points = sorted((int(row["T"]), float(row["min_ms"])) for row in mine)
        style, colour = STYLES[launch], colours[_family(way)]
        axes.plot(*zip(*points, strict=True), style, color=colour, marker=".")
    _scales(axes, title, "T")


def _finish(figure: Any, rows: Sequence[Row], colours: Mapping[str, Any], path: Path) -> None:
    """Add one legend below all panels, and save."""
    line = require("matplotlib.lines").Line2D
    handles = [line([], [], color=colour, label=way) for way, colour in colours.items()]
    launches = {row["launch"] for row in rows}
    title = "; ".join(label for launch, label in LABELS.items() if launch in launches)
    figure.legend(handles=handles, title=title, loc="outside lower center", ncols=3)
    caption(figure, rows, f"batch {rows[0]['B']}, {rows[0]['D']} channels, float32")
    figure.savefig(path, dpi=130)


def reduction(results: Path, path: Path) -> None:
    """Draw the linear recurrence against the length, diagonal and 2 x 2 blocks."""
    rows = preferred_rows(read_rows(results))
    kinds, colours = list(dict.fromkeys(row["what"] for row in rows)), _colours(rows)
    figure, grid = _grid(1, len(kinds))
    for axes, kind in zip(grid[0], kinds, strict=True):
        mine = [row for row in rows if row["what"] == kind]
        _curves(axes, mine, f"linear recurrence, {kind}", colours)
    _finish(figure, rows, colours, path)


def solve(results: Path, path: Path) -> None:
    """Draw cells against the length: a row a pass, a column a cell; Mamba in each."""
    rows = preferred_rows(read_rows(results))
    cells = [what for what in dict.fromkeys(row["what"] for row in rows) if what != "mamba"]
    colours = _colours(rows)
    figure, grid = _grid(len(PASSES), len(cells))
    for line, (step, title) in zip(grid, PASSES.items(), strict=True):
        for axes, cell in zip(line, cells, strict=True):
            mine = [row for row in rows if row["what"] in (cell, "mamba") and row["pass"] == step]
            _curves(axes, mine, f"{cell}, {title}", colours)
    _finish(figure, rows, colours, path)


def split(results: Path, path: Path) -> None:
    """(newton, fused) over segments: a column a cell and case, a row a pass, a curve a burn-in.

    Segments and burn-ins are those that were run, by the rule or as requested.
    """
    every = read_rows(results)
    rows = [row for row in every if row["launch"] == launch_of(every)]
    cases = list(dict.fromkeys(row["what"] for row in rows))
    burn_ins = sorted({int(row["burn_in"]) for row in rows if row["asked"]})
    figure, grid = _grid(len(PASSES), len(cases), sharey="row")
    for line, (step, title) in zip(grid, PASSES.items(), strict=True):
        for axes, case in zip(line, cases, strict=True):
            mine = [row for row in rows if (row["what"], row["pass"]) == (case, step)]
            for burn_in in burn_ins:
                least: dict[int, float] = {}
                for row in mine:
                    if row["burn_in"] == str(burn_in):
                        at, ms = int(row["segments"]), float(row["min_ms"])
                        least[at] = min(ms, least.get(at, ms))
                points = sorted(least.items())
                axes.plot(*zip(*points, strict=True), marker=".", label=f"burn-in {burn_in}")
            for row in mine:
                if row["asked"] == row["asked_burn_in"] == "rule":
                    place = int(row["segments"]), float(row["min_ms"])
                    axes.plot(*place, "k*", markersize=10, label="by the rule")
                if row["asked"] == "":
                    axes.axhline(float(row["min_ms"]), color="gray", label="the loop's kernel")
            _scales(axes, f"{case}, {title}", "segments")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    sizes = f"batch {rows[0]['B']}, {int(rows[0]['T']):,} steps, {rows[0]['D']} channels, float32"
    caption(figure, rows, sizes)
    figure.savefig(path, dpi=100)


def launch_of(rows: Sequence[Row]) -> str:
    """Return "graph" if there are any, else "call"."""
    return "graph" if any(row["launch"] == "graph" for row in rows) else "call"


PLOTS: Mapping[str, Callable[[Path, Path], None]] = {
    "reduction": reduction,
    "solve": solve,
    "split": split,
}
