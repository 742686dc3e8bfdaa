r"""A training step on one row of tokens over one or several GPUs, and what its parts cost.

The model is a recipe's; blocks are compiled, FSDP2 shards weights, gradients are clipped, AdamW:
what `pararnn train context_parallel=N` does with N processes. Tokens are random. Times by CUDA
events, memory the most that was allocated on a GPU. `hybrid-400m` is gru-400m with attention in
every sixth block. Parts are those of a layer of the model on one rank's span: the
solve alone, in turn and by all ranks at once, a span's map, the message with states, the halo of
the convolution, and the keys and values of attention; the layer's gates are N(0, 1), and its
channels forget. Solves in turn are repeated by themselves: the first rank does not wait forward.

Rows go into context.csv and context_parts.csv in a folder; those of other cases stay.

    python benchmarks/context.py 65536 262144+                     # one GPU; + for checkpointing
    torchrun --standalone --nproc-per-node=2 benchmarks/context.py 131072 524288+ 1048576+ \
        hybrid-400m:131072 --parts 65536
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import Record, new_parser, provenance
from protocol import Clock, run_times
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import pararnn
from pararnn.engines.arguments import Arguments
from pararnn.lab.train.config import RunConfig
from pararnn.lab.train.feed import local_span
from pararnn.lab.train.optimiser import make_adamw, set_rate
from pararnn.lab.train.recipes import recipe
from pararnn.lab.train.setup import bare_model, prepare_model
from pararnn.lab.train.sharding import clip_gradients, local_device, process_count, process_group
from pararnn.messages.group import find
from pararnn.messages.shift import shift
from pararnn.messages.whole import whole_time
from pararnn.program.program import program_of
from pararnn.ranks import solve
from pararnn.ranks.span import RankSpan
from pararnn.ranks.subcall import RankBorder
from pararnn.solve import plan_solve, prepare, run

EVERY = 6
"""Blocks of a hybrid of which one has attention."""
KEYS = ("recipe", "gpus", "T", "checkpointing", "device")
PART_KEYS = ("part", "gpus", "span", "device")


class Case(NamedTuple):
    """A recipe, tokens of a row, and whether blocks are computed again in the backward pass."""

    name: str
    tokens: int
    checkpointing: bool

    @classmethod
    def read(cls, text: str) -> Case:
        """Read "524288+" or "hybrid-400m:524288+"; the plus stands for checkpointing."""
        name, _, size = text.rpartition(":")
        return cls(name or "gru-400m", int(size.rstrip("+")), size.endswith("+"))

    def steps(self, most: int) -> int:
        """Return the steps to time: fewer of long rows."""
        return max(2, min(most, 2**20 // self.tokens))


def recipe_of(name: str) -> RunConfig:
    """Return a recipe, or the hybrid of one."""
    if not name.startswith("hybrid-"):
        return recipe(name)
    config = recipe(f"gru-{name.removeprefix('hybrid-')}")
    blocks = range(1, config.model.num_hidden_layers + 1)
    mixers = tuple(["rnn" if block % EVERY else "attention" for block in blocks])
    return replace(config, name=name, model=replace(config.model, mixers=mixers))


def config_of(case: Case) -> RunConfig:
    """Return a recipe for one row over all processes."""
    config = recipe_of(case.name)
    data = replace(config.data, sequence_length=case.tokens)
    return replace(
        config,
        data=data,
        checkpointing=case.checkpointing,
        batch=1,
        device_batch=1,
        context_parallel=process_count(),
        steps=10_000,
    )


def train(config: RunConfig, clock: Clock, steps: int) -> int:
    """Make steps, with a mark of the clock after each; return the number of parameters."""
    device, ranks = local_device(), config.context_parallel
    model = prepare_model(bare_model(config), config, device)
    model.config.use_cache = False
    optimizer = make_adamw(model, config.optimiser, fused=device.type == "cuda")
    parameters = list(model.parameters())
    model.train()
    length, vocabulary = config.data.sequence_length, config.model.vocab_size
    count = torch.tensor(length - 1, device=device)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        row = torch.randint(vocabulary, (1, length), generator=generator)
        span = local_span({"input_ids": row, "labels": row}, dist.get_rank(), ranks)
        inputs = {name: value.to(device) for name, value in span.items()}
        loss = model(**inputs, num_items_in_batch=count).loss * ranks
        loss.backward()
        clip_gradients(parameters, config.optimiser.grad_norm)
        set_rate(optimizer, config.optimiser, step, config.steps)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()
    return sum(each.numel() for each in parameters)


def measure(config: RunConfig, warmup: int, steps: int) -> dict[str, Any]:
    gc.collect()  # the model before
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(local_device())
    parameters = train(config, clock, warmup + steps)
    times, tokens = clock.times()[warmup - 1 :], config.data.sequence_length
    median = statistics.median(times)
    return {
        "recipe": config.name,
        "gpus": process_count(),
        "T": tokens,
        "parameters": parameters,
        "checkpointing": config.checkpointing,
        "steps": len(times),
        "median_ms": round(median, 2),
        "min_ms": round(min(times), 2),
        "tokens_per_s": round(tokens / median * 1e3),
        "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else "",
    }


def parts_of(config: RunConfig, span: int) -> dict[str, Callable[[], object]]:
    """Return the parts of a layer's solve on a rank's span, as calls."""
    device, width = local_device(), config.model.hidden_size
    mesh = init_device_mesh(device.type, (process_count(),))
    layer = pararnn.RecurrentLayer(pararnn.GRUCell, width, width, device=device)
    pararnn.context_parallel(layer, mesh)
    name, cell = layer.group, layer.cell
    ranks = find(name)
    gates = torch.randn(1, span, 3, width, device=device, dtype=torch.bfloat16)
    program, arriving = program_of(cell), torch.randn_like(gates[:, :, 0])
    inputs = prepare(cell, gates.requires_grad_())

    def forward(group: str, no_final: bool = False) -> Tensor:
        local = inputs.with_options(context=group, no_final=no_final)
        return run(program, local, "auto", "auto").states[0]

    def both(group: str, no_final: bool = False) -> object:
        return torch.autograd.grad(forward(group, no_final), gates, arriving)

    with torch.no_grad():
        engine, args = plan_solve(program, inputs, "auto", "auto").engine, inputs.complete(program)
        solution = engine.forward(program, args)
    states = tuple(state.detach() for state in solution.states)
    alone = Arguments(gates.detach(), None, (), args.params, args.initial, 1)
    middle = RankBorder(None, 1, 3)  # a rank that has neighbours on both sides, whose map is needed
    span_of_middle = RankSpan(program, engine, alone, alone, ranks, middle)
    state = torch.zeros(width, device=device)
    keys = torch.zeros(1, 2 * 8, span, width // 8, device=device, dtype=torch.bfloat16)
    counts = [span] * ranks.size
    halo = torch.zeros(1, width, config.model.conv_kernel_size - 1, device=device).bfloat16()
    return {
        "solve": lambda: both(""),
        "solve in turn": lambda: both(name, True),
        "solve at once": lambda: both(name),
        "forward": lambda: _without_grad(forward, ""),
        "forward in turn": lambda: _without_grad(forward, name, True),
        "forward at once": lambda: _without_grad(forward, name),
        "map": lambda: solve._map(span_of_middle, args.initial, states),
        "states": lambda: shift(state, name, False),
        "halo": lambda: shift(halo, name, False),
        "keys and values": lambda: whole_time(keys, counts, name),
    }


def _without_grad(call: Callable[..., object], *args: object) -> object:
    with torch.no_grad():
        return call(*args)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("cases", nargs="*", type=Case.read, metavar="[RECIPE:]TOKENS[+]")
    parser.add_argument("--recipe", default="gru-400m", help="of the parts")
    parser.add_argument("--warmup", type=int, default=3, help="steps that are not timed, 1 or more")
    parser.add_argument("--steps", type=int, default=8, help="steps that are timed, at most")
    parser.add_argument("--parts", type=int, help="span of the parts, in tokens")
    parser.add_argument("--runs", type=int, default=100, help="runs of each part")
    args = parser.parse_args()
    with process_group():
        first = dist.get_rank() == 0
        shared = provenance("cuda" if torch.cuda.is_available() else "cpu")
        record = Record(args.out / "context.csv", shared, KEYS)
        for case in args.cases:
            row = measure(config_of(case), args.warmup, case.steps(args.steps))
            if first:
                record.add(row)
        if args.parts is None:
            return
        parts = Record(args.out / "context_parts.csv", shared, PART_KEYS)
        config = config_of(Case(args.recipe, args.parts, False))
        for name, call in parts_of(config, args.parts).items():
            for _ in range(3):
                call()
            dist.barrier()
            times = run_times(call, local_device(), args.runs)
            facts = {"part": name, "gpus": process_count(), "span": args.parts, "runs": args.runs}
            median = round(statistics.median(times), 4)
            if first:
                parts.add(facts | {"median_ms": median, "min_ms": round(min(times), 4)})


if __name__ == "__main__":
    main()
