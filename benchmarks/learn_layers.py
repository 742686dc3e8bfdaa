"""The recurrent layers of a trained model, by its pairs: what `auto` takes against the best.

Each layer solves for its inputs of held-out text, gates in bfloat16. Generated kernels are timed
as replays of CUDA graphs over inputs that exceed the cache, other pairs as calls of the operator
with autograd, without a graph. A pair that took TOO_SLOW times the best in a model's first layer is
not timed in the others; the loop in Python, seconds long at these lengths, in none. Writes
learn_layers_CORPUS.csv.

    python benchmarks/learn_layers.py code [--data runs/learn] [--mixers gru hybrid-gru]
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import Record, new_parser, provenance
from gpu import cache_bytes, replay_times, sets_for
from kernels import calls_of
from learn_models import SIZES as MODEL_SIZES
from learn_models import models
from learn_run import Corpus, Job, Shape, Trainee, read_corpus
from torch import Tensor
from trained import solves_of

from pararnn import Cell
from pararnn.engines.arguments import Arguments
from pararnn.engines.table import choose, find, pairs_for
from pararnn.lm import LanguageModel
from pararnn.program.program import Program, program_of
from pararnn.solve import run
from pararnn.tune.timing import settled_seconds

SIZES = ((8, 2048), (4, 2048), (2, 8192), (1, 32768))
GATES = 3
"""Of both cells that are compared."""
TOO_SLOW = 5.0
BUDGET_MS = 30.0
"""Of a pass by a pair, over replays or calls."""

Pair = tuple[str, str]
LOOP: Pair = ("sequential", "torch")
Row = dict[str, Any]


def layer_rows(mixer: str, model: LanguageModel, corpus: Corpus, until: float) -> Iterator[Row]:
    """Yield a row for each layer, size and pair, until that time; print where it stops."""
    device, width = corpus.valid.device, model.config.hidden_size
    layers = model.recurrent_layers()
    for size in SIZES:
        if len(corpus.valid) < size[0] * size[1]:
            print(f"{mixer}, {corpus.name}: too little text for {size}", flush=True)
            continue
        slow: set[Pair] = set()
        solves_of_text = solves(model, corpus.valid, size, inputs_for(size, width, device))
        for index, layer in enumerate(layers):
            if time.time() > until:
                print(f"{mixer}, {corpus.name}: no time left at {size}, layer {index + 1}")
                return
            inputs = [each[index] for each in solves_of_text]
            by_pair = times_by_pair(layer.cell, inputs, slow)
            best = min(sum(times) for times in by_pair.values())
            if index == 0:
                slow = {pair for pair, times in by_pair.items() if sum(times) > TOO_SLOW * best}
            whole, dtype = inputs[0].size, inputs[0].gates.dtype
            auto = choose(program_of(layer.cell), whole, dtype, device, "auto", "auto").pair
            for pair, (forward, backward) in by_pair.items():
                yield {
                    "corpus": corpus.name,
                    "mixer": mixer,
                    "layer": index + 1,
                    "dtype": str(dtype).split(".")[1],
                    **dict(zip("BTD", whole, strict=True)),
                    "solver": pair[0],
                    "backend": pair[1],
                    "forward_ms": round(forward, 5),
                    "backward_ms": round(backward, 5),
                    "of_best": round((forward + backward) / best, 4),
                    "auto": pair == auto,
                }


def inputs_for(size: tuple[int, int], width: int, device: torch.device) -> int:
    """Return the number of inputs of a layer that together exceed the cache."""
    if device.type != "cuda":
        return 1
    return sets_for(size[0] * size[1] * width * GATES * torch.bfloat16.itemsize, cache_bytes())


@torch.no_grad()
def solves(
    model: LanguageModel, text: Tensor, size: tuple[int, int], count: int
) -> list[list[Arguments]]:
    """Return the arguments of all layers' solves for `count` readings of parts of a text."""
    batch, length = size
    last = len(text) - batch * length
    starts = [last * index // max(count - 1, 1) for index in range(count)]
    readings = (
        solves_of(model, text[at : at + batch * length].view(batch, length)) for at in starts
    )
    return [[detach(args) for args in layers] for layers in readings]


def detach(args: Arguments) -> Arguments:
    """Return a solve that no parameter wants a gradient of."""
    assert args.bias is not None
    params = tuple(param.detach() for param in args.params)
    return replace(args, bias=args.bias.detach(), params=params)


def times_by_pair(
    cell: Cell, inputs: Sequence[Arguments], slow: set[Pair]
) -> dict[Pair, tuple[float, float]]:
    """Return the ms of both passes by each pair that can, but the slow ones."""
    gates, program = inputs[0].gates, program_of(cell)
    able = pairs_for(program, gates.dtype, gates.device)
    pairs = [pair for pair in able if pair not in slow and pair != LOOP]
    return {pair: pass_times(program, inputs, pair) for pair in pairs}


@torch.no_grad()
def pass_times(program: Program, inputs: Sequence[Arguments], pair: Pair) -> tuple[float, float]:
    """Return the ms of a pair's two passes, see the module."""
    gates = inputs[0].gates
    engine = find(*pair, gates.device)
    assert engine is not None
    if pair[1] == "fused" and gates.is_cuda:
        forward, backward = (
            statistics.median(replay_times(calls_of(engine, program, inputs, what), BUDGET_MS))
            for what in ("forward", "backward")
        )
        return forward, backward
    return by_operator(program, inputs, pair)


def by_operator(program: Program, inputs: Sequence[Arguments], pair: Pair) -> tuple[float, float]:
    """Return the ms of the operator without gradients, and those that gradients add."""
    device = inputs[0].gates.device
    turns = itertools.cycle(inputs)

    def forward() -> None:
        run(program, next(turns), *pair)

    @torch.enable_grad()
    def both() -> None:
        args = next(turns)
        gates = args.gates.detach().requires_grad_()
        states = run(program, replace(args, gates=gates), *pair)[0][0]
        states.backward(torch.ones_like(states))

    forward_s, both_s = (settled_seconds(each, device, BUDGET_MS / 1e3) for each in (forward, both))
    return forward_s * 1e3, max(both_s - forward_s, 0.0) * 1e3


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("corpus", help="a folder in --data")
    parser.add_argument("--data", type=Path, default=Path("runs/learn"))
    parser.add_argument("--mixers", nargs="+", default=["gru", "hybrid-gru"])
    parser.add_argument("--size", default="60M", choices=list(MODEL_SIZES))
    parser.add_argument("--steps", type=int, default=382, help="of a training")
    parser.add_argument("--seconds", type=float, default=540.0, help="that all may take")
    args = parser.parse_args()
    device, until = torch.device("cuda"), time.time() + args.seconds
    record = Record(args.out / f"learn_layers_{args.corpus}.csv", provenance(device))
    corpus = read_corpus(args.data / args.corpus, device)
    for mixer in args.mixers:
        trainee = Trainee(models(MODEL_SIZES[args.size])[mixer], device, Shape(16, 2048))
        list(trainee.train(Job(mixer, args.size, 1e-3, 0, args.steps, 1), corpus))
        trainee.end()
        for row in layer_rows(mixer, trainee.model, corpus, until):
            record.add(row)


if __name__ == "__main__":
    main()
