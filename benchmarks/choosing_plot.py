"""Pictures of what cells learn against what they cost, from other benchmarks: choosing.png.

Left: S5 at a hundred times the trained length against the time of a token, by sizes of heads.
Right: bits for a byte of code against the tokens that a model of 60M learns in a second.

python benchmarks/choosing_plot.py [--out FOLDER]
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from common import new_parser
from learn_results import code_results
from markdown_tables import read
from pictures import new_figure, thousands
from tables_choosing import head_cells
from tables_tasks import MIXERS

from pararnn.base.extras import require
from pararnn.lab.palette import COLOURS, looks

MARKER = 5
"""Pixels from a point's middle to its edge."""
PLACES = tuple(
    ((across, up), side)
    for up in (4, -11, 15, -22)
    for across, side in ((5, "left"), (-5, "right"))
)
"""Offsets of a name from its point, and the side at which it begins, the best first."""


class Name(NamedTuple):
    """Name of a point, and the point."""

    text: str
    x: float
    y: float
    colour: str


def draw_states(axes: Any) -> list[Name]:
    """Draw a line for each cell over sizes of heads; return the sizes as names of its points."""
    cells, names = head_cells(), list[Name]()
    for mixer in dict.fromkeys(cell.mixer for cell in cells):
        own = [cell for cell in cells if cell.mixer == mixer]
        colour = COLOURS[mixer.removeprefix("head-")]
        points = [(cell.ns, 100 * cell.long_accuracy) for cell in own]
        axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=MIXERS[mixer])
        names += [
            Name(str(cell.head), *point, colour) for cell, point in zip(own, points, strict=True)
        ]
    row = read("state_tracking.csv")[0]
    axes.set(xlabel="ns a token of the recurrence, forward + backward", ylabel="right answers, %")
    axes.set_title(f"S5 at 10,000; sizes of heads ({row['device']})", fontsize="medium")
    axes.legend(fontsize="small", loc="center right")
    return names


def draw_code(axes: Any) -> list[Name]:
    """Draw a point for each mixer; return their names."""
    every = code_results()
    styles = looks(result.mixer for result in every)
    for result in every:
        axes.plot(result.speed, result.mean, "o", color=styles[result.mixer][0])
    tokens = every[0].curve[-1][0] / 1e6
    axes.set(xlabel="tokens/s of training", ylabel="bits per byte, held out (lower is better)")
    devices = ", ".join(dict.fromkeys(result.first["device"] for result in every))
    axes.set_title(f"code, 60M, {tokens:.1f}M tokens ({devices})", fontsize="medium")
    axes.margins(0.15)
    return [Name(result.mixer, result.speed, result.mean, "black") for result in every]


def name_points(axes: Any, names: Iterable[Name]) -> None:
    """Write names next to their points, each where it hides no other name, point or line."""
    axes.figure.draw_without_rendering()  # gives axes their places
    axes.figure.set_layout_engine("none")  # and names do not move them
    names = sorted(names, key=lambda name: -name.x)
    points = [axes.transData.transform((name.x, name.y)) for name in names]
    paths = [axes.transData.transform_path(line.get_path()) for line in axes.lines]
    paths = [path for path in paths if len(path) > 1]
    others = list[Any]()
    for name in names:
        for (across, up), side in PLACES:
            text = axes.annotate(
                name.text,
                (name.x, name.y),
                (across, up),
                textcoords="offset points",
                fontsize=9,
                color=name.colour,
                horizontalalignment=side,
            )
            box = text.get_window_extent()
            is_free = not any(box.overlaps(other) for other in others)
            is_free &= not any(box.padded(MARKER).contains(*point) for point in points)
            if is_free and not any(path.intersects_bbox(box, filled=False) for path in paths):
                break
            text.remove()
        else:
            raise RuntimeError(f"no place for the name of {name.text}")
        others.append(box)


def plot(path: Path) -> None:
    figure = new_figure(12, 4.6)
    states, code = figure.subplots(1, 2)
    names = {states: draw_states(states), code: draw_code(code)}
    for axes in (states, code):
        axes.xaxis.set_major_formatter(require("matplotlib.ticker").FuncFormatter(thousands))
        axes.set_xlim(0, 1.12 * axes.get_xlim()[1])  # names stand to the right of points
        axes.grid(alpha=0.3)
    for axes in names:
        name_points(axes, names[axes])
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = new_parser(__doc__)
    plot(parser.parse_args().out / "choosing.png")


if __name__ == "__main__":
    main()
