"""Time of a pass that verifies drafted tokens, next to that of a step, of the paper's 1B GRU.

In bfloat16, by CUDA graphs, as `sample` replays them. "fused": by the kernels of
`pararnn.lm.fused_step`; "recorded": by calls of the model. tokens: 1 is a step; of a pass, the last
token and its draft. Kernels are compiled beforehand, by processes. Puts its rows into
results/lm_verify.csv.

    python benchmarks/lm_verify.py [--weights bfloat16 int8 fp8] [--rows 1] [--tokens 1 2 4 8]
        [--ways fused recorded] [--processes 12] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from common import Record, new_parser, provenance
from mamba2 import ready_to_decode
from protocol import call_times, captured_graph
from torch import Tensor

from pararnn.lm import LanguageModel, preset
from pararnn.lm.cache import LMCache, SteadyCache
from pararnn.lm.config import LMConfig
from pararnn.lm.drafts import called_pass
from pararnn.lm.fused_step import fused_logits, fused_pass, takes
from pararnn.lm.quantise import DTYPES, quantise_weights
from pararnn.lm.replay import next_logits

PLAIN = "bfloat16"
WAYS = ("fused", "recorded")
KERNELS = 7
"""Kernels of a step of a model of one layer."""
KEYS = ("device", "model", "weights", "way", "rows", "tokens")
"""Columns that identify a case."""


class Case(NamedTuple):
    """A pass over tokens of rows, or a step for one token."""

    weights: str
    way: str
    rows: int
    tokens: int


def model_of(weights: str, layers: int | None = None) -> LanguageModel:
    """Return a random model, of all its layers or a few."""
    torch.manual_seed(0)
    config = cast(LMConfig, preset("gru", "1B").model)
    if layers is not None:
        config = replace(config, num_hidden_layers=layers, mixers=None)
    model = LanguageModel(config, device="cuda", dtype=torch.bfloat16).eval()
    ready_to_decode(model)
    if weights != PLAIN:
        quantise_weights(model, weights)
    return model


def step_by_kernels(model: LanguageModel, tokens: Tensor, cache: LMCache) -> Tensor:
    """Run a step of tokens (B, 1) by fused kernels."""
    return fused_logits(model, tokens[:, 0], cache)


FUNCTIONS = {
    ("fused", False): step_by_kernels,
    ("recorded", False): next_logits,
    ("fused", True): fused_pass,
    ("recorded", True): called_pass,
}
"""What is timed, by the way and whether there are several tokens."""


def cache_of(model: LanguageModel, rows: int) -> LMCache:
    """Return the cache of rows, of zeros."""
    cache, width, device = LMCache(0), model.config.hidden_size, model.lm_head.weight.device
    inputs = torch.zeros(rows, width, model.config.conv_kernel_size - 1, device=device)
    for _ in model.backbone.blocks:
        states = torch.zeros(rows, 1, width, device=device)
        cache.layers.append(SteadyCache(inputs.to(model.embed_tokens.weight.dtype), states))
    return cache


def call_of(model: LanguageModel, case: Case) -> Callable[[], object]:
    """Return a case's step or pass."""
    tokens = torch.arange(case.tokens, device=model.lm_head.weight.device).repeat(case.rows, 1)
    function = FUNCTIONS[case.way, case.tokens > 1]
    return partial(function, model, tokens, cache_of(model, case.rows))


@torch.no_grad()
def compile_kernels(jobs: list[tuple[int, Case]]) -> None:
    """Compile a kernel of each case into Triton's cache on disk: the i-th of a model of a layer."""
    from triton.runtime.jit import JITFunction

    run, launches = JITFunction.run, itertools.count()

    def run_one(kernel: Any, *args: Any, **options: Any) -> Any:
        if next(launches) % KERNELS == wanted:
            return run(kernel, *args, **options)
        return None

    JITFunction.run = run_one
    models: dict[str, LanguageModel] = {}
    for wanted, case in jobs:  # noqa: B007 (run_one reads it)
        if case.weights not in models:
            models[case.weights] = model_of(case.weights, 1)
        launches = itertools.count()
        call_of(models[case.weights], case)()
    torch.cuda.synchronize()


def compile_by_processes(cases: list[Case], count: int) -> None:
    """Compile the kernels of fused cases, those of most tokens first."""
    fused = [case for case in cases if case.way == "fused"]
    fused.sort(key=lambda case: -case.tokens * case.rows)
    jobs = list(itertools.product(range(KERNELS), fused))
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=compile_kernels, args=(jobs[first::count],))
        for first in range(min(count, len(jobs)))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Return the cases that a command line names."""
    return [
        Case(weights, way, rows, tokens)
        for weights in args.weights
        for way, rows, tokens in itertools.product(args.ways, args.rows, args.tokens)
    ]


@torch.no_grad()
def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--weights", nargs="+", default=[PLAIN, *DTYPES], choices=(PLAIN, *DTYPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    cases, record = cases_of(args), Record(args.out / "lm_verify.csv", provenance("cuda"), KEYS)
    compile_by_processes(cases, args.processes)
    print("compiled", flush=True)
    for weights, group in itertools.groupby(cases, lambda case: case.weights):
        model = model_of(weights)
        for case in group:
            if case.way == "fused" and not takes(model, case.rows, case.tokens):
                continue
            replay = captured_graph([call_of(model, case)]).replay
            times = call_times(replay, model.lm_head.weight.device, 50, args.rounds)
            row = {"model": "gru-1B", **case._asdict()}
            row |= {"median_ms": round(statistics.median(times), 4), "min_ms": round(min(times), 4)}
            record.add(row)
        del model


if __name__ == "__main__":
    main()
