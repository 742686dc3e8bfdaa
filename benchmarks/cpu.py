"""The CPU: generated kernels against the Python loop, Newton in PyTorch, the memory, torch.nn.

Gates given first, then whole layers, forward and forward + backward, float32. Every row is timed
in this run on inputs that take turns and together exceed the caches. Writes results/cpu.csv.

    python benchmarks/cpu.py [--budget 1.0] [--lengths 512 2048] [--quick]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from common import Record, new_parser, provenance
from protocol import calls_of, columns_of, wall_times
from torch import Tensor, nn

import pararnn
from pararnn.program.program import program_of

BATCH, CHANNELS = 8, 256
CELLS = ("gru", "lstm")
LAYERS = {"gru": (pararnn.ParaGRU, nn.GRU), "lstm": (pararnn.ParaLSTM, nn.LSTM)}
INPUTS = 4

Call = Callable[[Tensor], Tensor]


def python_loop(cell: pararnn.Cell) -> Call:
    """Return the loop that a user would write: gates unbound once, one step after the other."""
    program = program_of(cell)

    def run(gates: Tensor) -> Tensor:
        params = cell.lifted_params(gates.dtype)
        zero = gates.new_zeros(len(gates), cell.hidden_size)
        states, out = (zero,) * program.num_states, []
        for inputs in zip(*(g.unbind(1) for g in gates.unbind(2)), strict=True):
            states = program.step(states, inputs, params)
            out.append(states[0])
        return torch.stack(out, 1)

    return run


def pair(cell: pararnn.Cell, solver: str, backend: str) -> Call:
    """Return a solve by a pair of the engine table: the first state's sequence."""

    def run(gates: Tensor) -> Tensor:
        states, _ = pararnn.solve(cell, gates, solver=solver, backend=backend)
        return states[0] if isinstance(states, tuple) else states

    return run


def output_of(layer: nn.Module) -> Call:
    """Return a layer's output sequence."""
    return lambda x: layer(x)[0]


def inputs_of(*size: int) -> list[tuple[Tensor, ...]]:
    """Return a few random inputs of a size, with gradients."""
    return [(torch.randn(size, requires_grad=True),) for _ in range(INPUTS)]


def measure(
    call: Callable[..., Tensor],
    inputs: Sequence[tuple[Tensor, ...]],
    weights: Sequence[Tensor],
    budget: float,
) -> dict[str, float]:
    """Return the median and minimum ms of both passes, on inputs in turn."""
    (columns,) = columns_of([calls_of(call, weights, inputs)], budget)
    del columns["runs"]
    return columns


def memory_limit(cell: pararnn.Cell, length: int, rate: float) -> dict[str, float]:
    """Return the ms in which the bytes that must move would be copied at `rate` bytes/s."""
    element = BATCH * length * CHANNELS * 4
    gates, states = len(cell.gates) * element, len(cell.states) * element
    forward = (gates + states) / rate * 1e3
    backward = (2 * gates + states + element) / rate * 1e3  # one state's cotangent
    result = {"forward_ms": forward, "both_ms": forward + backward}
    result |= {key.replace("_ms", "_min_ms"): value for key, value in result.items()}
    return {key: round(value, 3) for key, value in result.items()}


def copy_rate(budget: float) -> float:
    """Return the most bytes read and written a second by copies of large tensors."""
    sources = itertools.cycle([torch.randn(2**24) for _ in range(INPUTS)])
    target = torch.empty(2**24)
    [times] = wall_times([lambda: target.copy_(next(sources))], budget)
    return 2 * 4 * 2**24 / min(times) * 1e3


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for one timing")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--quick", action="store_true", help="without Newton, which is slow here")
    args = parser.parse_args()
    rate = copy_rate(args.budget)
    print(f"copy: {rate / 1e9:.1f} GB/s, read and written")
    about = {**provenance(), "threads": torch.get_num_threads()}
    record = Record(args.out / "cpu.csv", about | {"copy_GB_per_s": round(rate / 1e9, 1)})
    for name, length in itertools.product(CELLS, args.lengths):
        torch.manual_seed(0)
        cell = pararnn.CELLS[name](CHANNELS)
        gates = inputs_of(BATCH, length, len(cell.gates), CHANNELS)
        ways = {"Python loop": python_loop(cell)}
        for solver, backend in (("newton", "torch"), ("sequential", "fused")):
            if not (args.quick and solver == "newton"):
                ways[f"{solver}, {backend}"] = pair(cell, solver, backend)
        results = {
            f"gates: {name}": measure(way, gates, [*cell.parameters()], args.budget)
            for name, way in ways.items()
        }
        results["gates: bytes at the copy rate"] = memory_limit(cell, length, rate)
        ours, theirs = LAYERS[name]
        peer_layer = f"layer: torch.nn.{theirs.__name__}"
        x = inputs_of(BATCH, length, CHANNELS)
        for label, module in (
            (peer_layer, theirs(CHANNELS, CHANNELS, batch_first=True)),
            (f"layer: {ours.__name__}", ours(CHANNELS, CHANNELS)),
        ):
            results[label] = measure(output_of(module), x, [*module.parameters()], args.budget)
        for label, figures in results.items():
            peer = results["gates: Python loop" if label[0] == "g" else peer_layer]
            speedups = {
                f"{what}_speedup": round(peer[f"{what}_ms"] / figures[f"{what}_ms"], 2)
                for what in ("forward", "both")
            }
            row = {"cell": name, "B": BATCH, "T": length, "D": CHANNELS, "what": label}
            record.add(row | figures | speedups)


if __name__ == "__main__":
    main()
