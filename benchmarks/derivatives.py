"""Derivatives beyond the gradient, of an LSTM by kernels, next to PyTorch's loop over its steps.

A training step of a gradient penalty (the gradient by the input, with a graph, and the gradient of
its norm), derivatives along a direction of the input, and of all weights (jvp), a product with the
Hessian of the weights (the gradient of a jvp), and gradients of single samples (vmap over grad).
Layers without matrices too; of the last the row says in how many samples a backward pass keeps the
gradients apart. Each next to the forward pass, or to forward and backward pass, of the
same layer. Ways take turns; the loop runs some steps only, and its times are scaled to T, which its
work is proportional to. Multiples and speed-ups are those of least times: on a shared machine
medians of few runs vary.

On a GPU times are those of replays of a CUDA graph of one call, and of calls where PyTorch records
none: the column `launch` of a way says which, and `graph_error` why. Wall times of calls from
Python, with the host's work, are in the columns `call_ms` and so on. On a CPU the time of one
thread is the processor's, which users beside it do not lengthen; memory of freed tensors is kept
for the next ones. Puts a row at a time into results/derivatives_cpu.csv, or derivatives_gpu.csv.

    python benchmarks/derivatives.py [--device cuda] [--budget 20] [--threads 1]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from common import Record, new_parser, provenance
from gpu import replay_times
from protocol import CPU, Call, Row, keep_memory, wall_times
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap

import pararnn
from pararnn import op
from pararnn.engines.arguments import Arguments
from pararnn.engines.engine import Engine
from pararnn.program.program import Program

BATCH, STEPS, CHANNELS = 16, 1024, 512
LOOP_STEPS = 64
"""Steps that the loop runs."""
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "LSTM": pararnn.LSTM,
    "ParaLSTM": pararnn.ParaLSTM,
    "ParaGRU": pararnn.ParaGRU,
}
PEERS: dict[str, Callable[..., nn.Module]] = {"LSTM": nn.LSTM}
"""PyTorch's layers of the same weights."""
NOT_RUN = {("cuda", "gradients of samples"): "vmap falls back to a call for each sample and step"}
"""Why PyTorch's layers are not timed on a type of device: minutes."""
KEYS = ("device", "threads", "layer", "dtype", "B", "T", "D", "what")
"""Columns that identify a case."""
BASES = {
    "forward": None,
    "both": "forward",
    "gradient penalty": "forward",
    "jvp, input": "forward",
    "jvp, weights": "forward",
    "Hessian-vector product": "forward",
    "gradients of samples": "both",
}
"""What is measured, and what it is a multiple of."""


def calls_of(layer: nn.Module, x: Tensor) -> dict[str, Call]:
    """Return a layer's passes by name; "both" is the forward and the backward pass, by weights."""
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}
    directions = {name: torch.randn_like(weight) for name, weight in weights.items()}
    along = torch.randn_like(x)

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, weights, (x,))[0].square().mean()

    @torch.no_grad()
    def forward() -> None:
        loss(weights, x)

    def both() -> None:
        torch.autograd.grad(loss(dict(layer.named_parameters()), x), list(layer.parameters()))

    def penalty() -> None:
        leaf = x.detach().requires_grad_()
        value = loss(dict(layer.named_parameters()), leaf)
        (by_input,) = torch.autograd.grad(value, leaf, create_graph=True)
        torch.autograd.grad(value + by_input.norm(), list(layer.parameters()))

    def product() -> None:
        def slope(weights: dict[str, Tensor]) -> Tensor:
            return jvp(lambda w: loss(w, x), (weights,), (directions,))[1]

        grad(slope)(weights)

    def samples() -> None:
        vmap(grad(lambda weights, row: loss(weights, row[None])), (None, 0))(weights, x)

    return {
        "forward": forward,
        "both": both,
        "gradient penalty": penalty,
        "jvp, input": lambda: jvp(lambda x: loss(weights, x), (x,), (along,)),
        "jvp, weights": lambda: jvp(lambda w: loss(w, x), (weights,), (directions,)),
        "Hessian-vector product": product,
        "gradients of samples": samples,
    }


class Times(NamedTuple):
    """Times of a call in ms, and how it was launched."""

    launch: str
    ms: Sequence[float]


Least = dict[tuple[str, str, str], float]
"""Least times in ms by way, what, and launch."""


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--device", type=torch.device, default=CPU)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for a layer and pass")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--size", type=int, nargs=3, default=[BATCH, STEPS, CHANNELS])
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--rows", nargs="+", default=list(BASES), choices=list(BASES))
    parser.add_argument("--loop-steps", type=int, default=LOOP_STEPS, help="0: no loop")
    parser.add_argument("--no-peers", action="store_true", help="without PyTorch's layers")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    kind = "cpu" if args.device.type == "cpu" else "gpu"
    alone = kind == "cpu" and args.threads == 1
    clock = time.process_time if alone else time.perf_counter
    about = {**provenance(args.device), "threads": args.threads, "clock": clock.__name__}
    record = Record(args.out / f"derivatives_{kind}.csv", about, KEYS)
    for name in args.layers:
        ways, least = ways_of(name, args), Least()
        of_layer = {"layer": name, "dtype": args.dtype} | dict(zip("BTD", args.size, strict=True))
        for what in with_bases(args.rows):
            base = BASES[what]
            row: Row = of_layer | {"what": what, "base": base or ""}
            row["samples_a_pass"] = samples_a_pass(ways["kernels"][what])
            calls, errors = able(ways, what, args.device)
            if errors.get("kernels"):
                raise RuntimeError(f"{name}, {what}: {errors['kernels']}")
            row["torch_nn_error"] = errors.get("torch_nn", "")
            by_call = wall_times([*calls.values()], args.budget, args.device, clock=clock)
            for (way, call), ms in zip(calls.items(), by_call, strict=True):
                scale = args.size[1] / args.loop_steps if way == "loop" else 1
                times = [Times("call", [x * scale for x in ms])]
                if args.device.type == "cuda":
                    found, row[f"{way}_graph_error"] = replayed(call, args.budget)
                    times += [Times("graph", [x * scale for x in found])] if found else []
                row |= columns_of(way, what, times, least)
            for way, column in (("loop", "speedup"), ("torch_nn", "torch_nn_speedup")):
                if way in calls:
                    ratio = row[f"{way}_min_ms"] / row["kernels_min_ms"]
                    row[column] = round(ratio, 2)
            record.add(row)


def with_bases(rows: Collection[str]) -> list[str]:
    """Return what is measured for rows, in order: these, and what they are multiples of."""
    found = {*rows}
    for what in reversed(BASES):
        base = BASES[what]
        if what in found and base is not None:
            found.add(base)
    return [what for what in BASES if what in found]


def ways_of(name: str, args: argparse.Namespace) -> dict[str, dict[str, Call]]:
    """Return the passes of a layer by each way: kernels, the loop over fewer steps, and PyTorch's
    layer."""
    batch, steps, channels = args.size
    torch.manual_seed(0)
    options: dict[str, Any] = {"batch_first": True} if name == "LSTM" else {}
    options |= {"device": args.device, "dtype": getattr(torch, args.dtype)}
    layer = LAYERS[name](channels, channels, **options)
    x = torch.randn(batch, steps, channels, device=args.device, dtype=options["dtype"])
    ways = {"kernels": calls_of(layer, x)}
    if args.loop_steps:
        of_loop = calls_of(layer, x[:, : args.loop_steps])
        by_loop = pararnn.using(solver="sequential", backend="torch")
        ways["loop"] = {what: by_loop(call) for what, call in of_loop.items()}
    if name in PEERS and not args.no_peers:
        peer = calls_of(PEERS[name](channels, channels, **options), x)
        own = torch.backends.cudnn.flags(enabled=False)  # PyTorch's operations in its place
        ways["torch_nn"] = {what: own(call) for what, call in peer.items()}
    return ways


def able(
    ways: dict[str, dict[str, Call]], what: str, device: torch.device
) -> tuple[dict[str, Call], dict[str, str]]:
    """Return the calls of the ways that run a pass, and why others do not."""
    known = {"torch_nn": NOT_RUN.get((device.type, what))}
    errors = {way: known.get(way) or error_of(of_way[what]) for way, of_way in ways.items()}
    return {way: ways[way][what] for way in ways if not errors[way]}, errors


def replayed(call: Call, budget: float) -> tuple[list[float], str]:
    """Return the ms of replays of a CUDA graph of a call, or none and why there is no graph.

    budget: seconds for a pass by all ways.
    """
    try:
        return replay_times([call], budget / 10 * 1e3), ""
    except (RuntimeError, NotImplementedError) as error:
        torch.cuda.synchronize()  # raises where the device is lost
        return [], str(error).strip().splitlines()[0]
    finally:
        torch.cuda.empty_cache()


def columns_of(way: str, what: str, times: Sequence[Times], least: Least) -> Row:
    """Return the columns of a way, and note its least times: those of the last launch, and in front
    of them those of calls where there is a graph. Multiples are of the same launch."""
    row: Row = {f"{way}_launch": times[-1].launch}
    for of_launch in times:
        launch, ms = of_launch
        least[way, what, launch] = min(ms)
        name = way if of_launch is times[-1] else f"{way}_{launch}"
        base = least.get((way, BASES[what] or what, launch))
        row |= {f"{name}_ms": round(statistics.median(ms), 3), f"{name}_min_ms": round(min(ms), 3)}
        row |= {f"{name}_runs": len(ms), f"{name}_multiple": base and round(min(ms) / base, 2)}
    return row


def error_of(call: Call) -> str:
    """Return the first line of what a call raises; "" for one that runs."""
    try:
        call()
    except (RuntimeError, NotImplementedError) as error:
        return str(error).strip().splitlines()[0]
    return ""


def samples_a_pass(call: Call) -> str:
    """Return the samples of which each backward pass of a call keeps the gradients apart, such as
    "16"; "0" for passes that sum over all rows, "" if there is none."""
    found: set[int] = set()
    backward = op._backward

    def noted(program: Program, engine: Engine, args: Arguments, *others: Any) -> list[Tensor]:
        found.add(args.options.samples)
        return backward(program, engine, args, *others)

    with mock.patch.object(op, "_backward", noted):
        call()
    return " ".join(map(str, sorted(found)))


if __name__ == "__main__":
    main()
