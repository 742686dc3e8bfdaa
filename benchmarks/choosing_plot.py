"""Pictures of what cells learn against what they cost, from other benchmarks: choosing.png.

Left: S5 at a hundred times the trained length against the time of a token, by sizes of heads.
Right: bits for a byte of code against the tokens that a model of 60M learns in a second.

python benchmarks/choosing_plot.py [--out FOLDER]
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common import new_parser
from learn_results import Result, code_results
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


def draw_states(axes: Any) -> None:
    """Draw a line for each cell over sizes of heads, which stand next to its points."""
    cells = head_cells()
    for mixer in dict.fromkeys(cell.mixer for cell in cells):
        own = [cell for cell in cells if cell.mixer == mixer]
        colour = COLOURS[mixer.removeprefix("head-")]
        points = [(cell.ns, 100 * cell.long_accuracy) for cell in own]
        axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=MIXERS[mixer])
        for cell, point in zip(own, points, strict=True):
            axes.annotate(str(cell.head), point, (4, 4), textcoords="offset points", fontsize=8)
    row = read("state_tracking.csv")[0]
    axes.set(
        xlabel="ns a token of the recurrence, forward + backward",
        ylabel="right answers, %",
    )
    axes.set_title(f"S5 at 10,000; sizes of heads ({row['device']})", fontsize="medium")
    axes.legend(fontsize="small")


def draw_code(axes: Any) -> None:
    """Draw a point for each mixer."""
    every = code_results()
    styles = looks(result.mixer for result in every)
    for result in every:
        axes.plot(result.speed, result.mean, "o", color=styles[result.mixer][0])
    tokens = every[0].curve[-1][0] / 1e6
    axes.set(
        xlabel="tokens/s of training",
        ylabel="bits per byte, held out (lower is better)",
    )
    devices = ", ".join(dict.fromkeys(result.first["device"] for result in every))
    axes.set_title(f"code, 60M, {tokens:.1f}M tokens ({devices})", fontsize="medium")
    axes.margins(0.15)


def name_points(axes: Any, results: Iterable[Result]) -> None:
    """Write the mixers' names beside their points, each where it hides no other name or point."""
    results = sorted(results, key=lambda each: -each.speed)
    points = [axes.transData.transform((each.speed, each.mean)) for each in results]
    others = list[Any]()
    for result in results:
        for (across, up), side in PLACES:
            name = axes.annotate(
                result.mixer,
                (result.speed, result.mean),
                (across, up),
                textcoords="offset points",
                fontsize=9,
                horizontalalignment=side,
            )
            box = name.get_window_extent()
            is_free = not any(box.overlaps(other) for other in others)
            if is_free and not any(box.padded(MARKER).contains(*point) for point in points):
                break
            name.remove()
        else:
            raise RuntimeError(f"no place for the name of {result.mixer}")
        others.append(box)


def plot(path: Path) -> None:
    """Draw both panels."""
    figure = new_figure(12, 4.6)
    states, code = figure.subplots(1, 2)
    draw_states(states)
    draw_code(code)
    for axes in (states, code):
        axes.xaxis.set_major_formatter(require("matplotlib.ticker").FuncFormatter(thousands))
        axes.set_xlim(0, 1.12 * axes.get_xlim()[1])  # names stand to the right of points
        axes.grid(alpha=0.3)
    figure.canvas.draw()  # gives axes their places
    name_points(code, code_results())
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = new_parser(__doc__)
    plot(parser.parse_args().out / "choosing.png")


if __name__ == "__main__":
    main()
