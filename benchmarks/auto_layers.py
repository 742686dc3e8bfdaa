"""Choices of `auto` on layers of language models, fresh and trained, against the better engine.

For each cell a model is made, its layers' solves of held-out text are timed by both engines, it is
trained, and they are timed again: forward and backward, float32 and bfloat16. Writes
results/auto_layers.csv, and prints the worst ratio of each size.

    python benchmarks/auto_layers.py [--only gru] [--quick] [--train-steps 300] [--out FOLDER]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from gpu import Run, Sections, run_sections
from parallel import BF16, ENGINES, F32, TRAINED, about_of, measure, sets_of
from protocol import Row
from torch import Tensor
from trained import part_of, solves_of, train_on_library

import pararnn
from pararnn.base.device import default_device
from pararnn.engines.arguments import Arguments
from pararnn.engines.table import choose
from pararnn.lab.tasks import random_windows
from pararnn.lab.train.config import RunConfig
from pararnn.lm import LanguageModel
from pararnn.program.program import program_of

FILE = "auto_layers.csv"
DTYPES = (F32, BF16)
SIZES = ((8, 2048, 1024), (4, 2048, 1024), (2, 8192, 1024), (1, 32768, 1024))
"""(B, T, D), of few segments and of many."""


def model_rows(run: Run, config: RunConfig) -> Iterator[Row]:
    """Yield the layers of a model, before and after its training."""
    torch.set_float32_matmul_precision("high")  # more training in the same time
    torch.manual_seed(config.seed)
    fresh = LanguageModel(config.model, device=default_device()).eval()
    pararnn.precompile(fresh, DTYPES)
    model, corpus, about = train_on_library(config)
    none = {"train_seconds": 0.0, "train_steps": 0, "bits_validation": ""}
    cell = config.model.cell
    yield from layer_rows(run, fresh, cell, corpus.valid, "fresh", none)
    yield from layer_rows(run, model, cell, corpus.valid, "trained", about)


def layer_rows(
    run: Run, model: LanguageModel, name: str, text: Tensor, stage: str, about: Mapping[str, Any]
) -> Iterator[Row]:
    """Yield both engines' times of a pass, and `auto`'s choice, of every layer at every size."""
    cells = [layer.cell for layer in model.recurrent_layers()]
    for size in SIZES:
        layers = solves(model, text, size, sets_of(cells[0], size, BF16))
        for (index, cell), dtype in itertools.product(enumerate(cells), DTYPES):
            program = program_of(cell)
            inputs = [part_of(args[index], slice(None), dtype) for args in layers]
            device = inputs[0].gates.device
            auto = choose(program, size, dtype, device, "auto", "auto").solver
            for step in ("forward", "backward"):
                times = measure(program, inputs, step, run.graph_budget)
                best = min(times[f"{solver}_ms"] for solver in ENGINES)
                row = about_of("auto", f"{name}, layer {index + 1}", size, dtype, step)
                row |= {"stage": stage, **times, "auto": auto}
                yield row | {"auto_of_best": round(times[f"{auto}_ms"] / best, 3), **about}


def solves(
    model: LanguageModel, text: Tensor, size: tuple[int, int, int], count: int
) -> list[list[Arguments]]:
    """Return the arguments of every layer's solve, for some inputs of a size."""
    generator = torch.Generator().manual_seed(0)
    windows = random_windows(text, count * size[0], size[1], generator)[:, :-1]
    device = model.lm_head.weight.device
    return [solves_of(model, tokens.to(device)) for tokens in windows.split(size[0])]


def section(run: Run, cell: str) -> Iterator[Row]:
    """Return a cell's rows, at the run's training budget."""
    model = replace(TRAINED.model, cell=cell)
    return model_rows(run, replace(TRAINED, model=model, steps=run.train_steps))


SECTIONS: Sections = {cell: (partial(section, cell=cell), FILE) for cell in ("gru", "lstm")}


def main() -> None:
    rows = run_sections(__doc__, SECTIONS, graph_budget=100.0, train_steps=300)[FILE]
    worst: dict[tuple[int, ...], float] = {}
    for row in rows:
        size = tuple(row[letter] for letter in "BTD")
        worst[size] = max(worst.get(size, 0.0), row["auto_of_best"])
    for size, ratio in worst.items():
        print(f"B, T, D = {size}: at most {ratio} x the better engine")


if __name__ == "__main__":
    main()
