"""Iterations that Newton's method needs, at initialisation and after training.

The paper's Appendix A: convergence around the third iteration. For the inputs that the layers of
a byte-level language model see on held-out text: the solver's own count until the numerics contract
holds, and the residual max |h_l - f(h_{l-1}, x_l)| after updates 0 to 10, in float32, the largest
in a batch of 8. The picture has the first and the last layer.

    python benchmarks/newton_iterations.py [runs/demo ...]

Without checkpoints it trains a GRU and an LSTM for --steps each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import new_parser, provenance, read_rows, write_csv
from pictures import caption, new_figure
from torch import Tensor
from trained import solves_of, train_on_library

from pararnn.engines.arguments import Arguments
from pararnn.engines.forward_time import to_system
from pararnn.lab.tasks import spread_windows, stdlib_corpus
from pararnn.lab.train.demo import demo_config
from pararnn.layers import RecurrentLayer
from pararnn.lm import LanguageModel, load_checkpoint, set_solver
from pararnn.program.program import program_of
from pararnn.solvers.affine_scan import affine_scan
from pararnn.solvers.system import System

LENGTHS = (256, 512, 1024, 2048)
BATCH = 8
UPDATES = 10
CELLS = ("gru", "lstm")


def fresh_model(model: LanguageModel, seed: int = 0) -> LanguageModel:
    """Return the same model at initialisation."""
    torch.manual_seed(seed)
    return LanguageModel(model.config).eval()


def system_of(layer: RecurrentLayer, args: Arguments) -> System:
    """Return the nonlinear system of a layer's solve."""
    program = program_of(layer.cell)
    return to_system(program, args.complete(program))


@torch.no_grad()
def residual_history(system: System, updates: int) -> list[float]:
    """Return max |h_l - f(h_{l-1}, x_l)| of the guess f(0, x_l) and after each Newton update."""
    structure = system.program.structure
    assert structure is not None
    batch, num_states, channels = system.initial.shape
    zeros = system.initial.new_zeros(batch, system.length, num_states, channels)
    states = system.advance(system.previous(zeros))
    history = []
    for _ in range(updates + 1):
        new, jacobian = system.linearise(system.previous(states))
        residual = new - states
        history.append(float(residual.abs().max()))
        states = states + affine_scan(structure, jacobian[:, 1:], residual)
    return history


def measure(model: LanguageModel, stage: str, valid: Tensor) -> Iterator[dict[str, Any]]:
    """Yield a row for each length, layer and update, each with the counts."""
    set_solver(model, "newton", "torch")
    for steps in LENGTHS:
        tokens = spread_windows(valid, BATCH, steps)[:, :-1]
        solves = solves_of(model, tokens)
        for index, (layer, args) in enumerate(zip(model.recurrent_layers(), solves, strict=True)):
            assert layer.last_solve is not None
            counts = {
                "cell": type(layer.cell).__name__,
                "stage": stage,
                "layer": index,
                "T": steps,
                "batch": len(tokens),
                "width": layer.hidden_size,
                "iterations": int(layer.last_solve.sweeps.max()),
                "mended": int(layer.last_solve.mended.sum()),
            }
            for update, residual in enumerate(residual_history(system_of(layer, args), UPDATES)):
                yield {**counts, "update": update, "residual": f"{residual:.3e}"}


def plot(results: Path, path: Path) -> None:
    """Draw the paper's figure from the result file: residuals by updates of two layers.

    A row of panels a cell; a column a stage and layer; a curve a length.
    """
    rows = read_rows(results)
    cells = list(dict.fromkeys(row["cell"] for row in rows))
    ends = {min(int(row["layer"]) for row in rows), max(int(row["layer"]) for row in rows)}
    ends_rows = [row for row in rows if int(row["layer"]) in ends]
    columns = sorted({(row["stage"], row["layer"]) for row in ends_rows})
    figure = new_figure(3.6 * len(columns), 3.2 * len(cells) + 0.4)
    grid = figure.subplots(len(cells), len(columns), sharex=True, sharey=True, squeeze=False)
    for axes, cell in zip(grid, cells, strict=True):
        for ax, (stage, layer) in zip(axes, columns, strict=True):
            key = {"cell": cell, "stage": stage, "layer": layer}
            mine = [row for row in ends_rows if key.items() <= row.items()]
            for steps in dict.fromkeys(row["T"] for row in mine):
                curve = [row for row in mine if row["T"] == steps]
                residuals = [float(row["residual"]) for row in curve]
                label = f"T = {steps}: {curve[0]['iterations']} to the contract"
                ax.semilogy(
                    [int(row["update"]) for row in curve], residuals, marker=".", label=label
                )
            ax.set(title=f"{cell}, layer {int(layer) + 1}, {stage}", xlabel="Newton updates")
            ax.grid(alpha=0.3)
            ax.legend(fontsize="x-small")
        axes[0].set_ylabel("max |h - f(h_prev, x)|")
    text = f"float32, B = {rows[0]['batch']}, D = {rows[0]['width']}, held-out text"
    caption(figure, rows, text)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = new_parser(__doc__, help="folder for csv and png")
    parser.add_argument("checkpoints", nargs="*", type=Path, help="folders of demo runs")
    parser.add_argument("--steps", type=int, default=600, help="training where none is given")
    parser.add_argument("--plot-only", action="store_true", help="the picture of the csv in --out")
    options = parser.parse_args()
    results, picture = options.out / "newton_iterations.csv", options.out / "newton_iterations.png"
    if options.plot_only:
        plot(results, picture)
        return
    models = [load_checkpoint(path) for path in options.checkpoints]
    corpus = stdlib_corpus()
    base = replace(demo_config(), steps=options.steps)
    configs = [replace(base, model=replace(base.model, cell=cell)) for cell in CELLS]
    models = models or [train_on_library(config)[0] for config in configs]
    about = provenance()
    rows = [
        {**about, **row}
        for source in models
        for stage, model in (("at initialisation", fresh_model(source)), ("trained", source))
        for row in measure(model, stage, corpus.valid)
    ]
    for row in rows:
        if row["update"] == 0:
            what = " ".join(
                f"{k} {row[k]}" for k in ("stage", "layer", "T", "iterations", "mended")
            )
            print(f"{row['cell']}: {what}")
    write_csv(results, rows)
    plot(results, picture)


if __name__ == "__main__":
    main()
