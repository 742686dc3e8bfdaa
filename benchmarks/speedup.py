"""How many times as fast as a loop in Python: every engine, against the length.

Gates given, float32, forward without gradients and forward + backward of everything. The loops: the
one of PyTorch operations, and the paper's baseline, a Python loop over a compiled step. Times are
medians of eager calls; on CUDA the generated kernels are also replayed from a CUDA graph, where the
host's part is gone. Writes results/speedup_<device>.csv and .png.

    python benchmarks/speedup.py [--device cpu] [--sizes 8 256] [--lengths 64 512] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from common import RESULTS, provenance, write_csv
from cpu import pair
from gpu import Call, Row, captured
from torch import Tensor

import pararnn
from pararnn.engines.table import pairs_for
from pararnn.extras import require
from pararnn.program.program import program_of

CELLS = ("gru", "lstm")
SIZES = (8, 256)  # B, D
LENGTHS = (64, 128, 256, 512, 1024)
SHOWN = 512
"""The length whose speed-ups are printed."""
PAPER = "The paper's 665 (GRU) and 447 times (LSTM) are of its own sizes and its A100, forward."

EAGER, COMPILED = "loop, eager", "loop, compiled step"
KINDS = ("forward", "both")

Solve = Callable[[Tensor], Tensor]


def by_clock(call: Call) -> float:
    """A call's wall time in ms."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def by_events(call: Call) -> float:
    """The ms that the current stream takes for a call, waits for the host included."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


TIMERS: Mapping[str, Callable[[Call], float]] = {"cpu": by_clock, "cuda": by_events}


def median_ms(call: Call, device: torch.device, budget: float) -> tuple[float, int]:
    """The median of 3 to 100 calls within about `budget` ms, after two, and how many they were."""
    timer = TIMERS[device.type]
    timer(call), timer(call)
    times: list[float] = []
    while len(times) < 3 or (len(times) < 100 and sum(times) < budget):
        times.append(timer(call))
    return statistics.median(times), len(times)


def compiled_loop(cell: pararnn.Cell) -> Solve:
    """The paper's baseline: one step compiled on tensors (B, D), called in a Python loop."""
    program = program_of(cell)

    def step(
        states: tuple[Tensor, ...], inputs: tuple[Tensor, ...], params: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        return program.step(states, inputs, params)

    torch.compiler.reset()  # or this cell's calls would first try the code of the one before it
    compiled = torch.compile(step, fullgraph=True)

    def run(gates: Tensor) -> Tensor:
        params = cell.lifted_params(gates.dtype)
        zeros = gates.new_zeros(program.num_states, len(gates), cell.hidden_size)
        states, out = zeros.unbind(0), []
        # Steps in one piece each: their strides, which code is compiled for, do not hold T then.
        for inputs in gates.permute(1, 2, 0, 3).contiguous().unbind(0):
            states = compiled(states, inputs.unbind(0), params)
            out.append(states[0])
        return torch.stack(out, 1)

    return run


def ways_of(cell: pararnn.Cell, device: torch.device) -> dict[str, Solve]:
    """The loops and every other pair that runs the cell here, by what a row calls them."""
    ways = {EAGER: pair(cell, "sequential", "torch"), COMPILED: compiled_loop(cell)}
    for names in pairs_for(program_of(cell), torch.float32, device):
        if names != ("sequential", "torch"):
            ways[", ".join(names)] = pair(cell, *names)
    return ways


def passes(solve: Solve, cell: pararnn.Cell, gates: Tensor) -> dict[str, Call]:
    """Forward without gradients, and forward + backward with those of gates and parameters."""
    cotangent = torch.randn_like(gates[:, :, 0])

    @torch.no_grad()
    def forward() -> Tensor:
        return solve(gates)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(solve(gates), [gates, *cell.parameters()], cotangent)

    return dict(zip(KINDS, (forward, both), strict=True))


def measure(calls: Mapping[str, Call], device: torch.device, budget: float) -> Row:
    """Medians in ms by pass, and the repeats of each."""
    row: Row = {}
    for kind, call in calls.items():
        ms, count = median_ms(call, device, budget)
        row |= {f"{kind}_ms": round(ms, 4), f"{kind}_repeats": count}
    return row


def measured_ways(
    cell: pararnn.Cell, gates: Tensor, ways: Mapping[str, Solve], budget: float
) -> dict[str, Row]:
    """The times of all ways on the same gates; each must agree with the eager loop."""
    with torch.no_grad():
        expected = ways[EAGER](gates)
    found = {}
    for name, solve in ways.items():
        calls = passes(solve, cell, gates)
        torch.testing.assert_close(calls["forward"](), expected, rtol=1e-3, atol=1e-4, msg=name)
        found[name] = measure(calls, gates.device, budget)
        if gates.is_cuda and name == "sequential, fused":
            replays = {kind: captured([call]).replay for kind, call in calls.items()}
            found[f"{name}, CUDA graph"] = measure(replays, gates.device, budget)
    return found


def with_speedups(found: Mapping[str, Row]) -> dict[str, Row]:
    """The times, and how many times as fast as each of the loops they are."""
    loops = {"eager": found[EAGER], "compiled": found[COMPILED]}
    return {
        name: row
        | {
            f"{kind}_over_{loop}": round(times[f"{kind}_ms"] / row[f"{kind}_ms"], 2)
            for kind, (loop, times) in itertools.product(KINDS, loops.items())
        }
        for name, row in found.items()
    }


def plot(rows: Sequence[Row], path: Path) -> None:
    """Time against the length, a line for each way, by cell and pass."""
    figure = require("matplotlib.figure").Figure(figsize=(9, 7), layout="constrained")
    cells = list(dict.fromkeys(row["cell"] for row in rows))
    grid = figure.subplots(len(cells), len(KINDS), sharex=True, sharey=True, squeeze=False)
    titles = {"forward": "forward", "both": "forward + backward"}
    for axes, cell in zip(grid, cells, strict=True):
        for ax, kind in zip(axes, KINDS, strict=True):
            for way in dict.fromkeys(row["way"] for row in rows):
                mine = [row for row in rows if (row["cell"], row["way"]) == (cell, way)]
                times = [row[f"{kind}_ms"] for row in mine]
                ax.loglog([row["T"] for row in mine], times, marker=".", label=way, base=2)
            ax.set_yscale("log", base=10)
            ax.set(title=f"{cell}, {titles[kind]}", xlabel="T")
            ax.grid(alpha=0.3)
        axes[0].set_ylabel("ms")
    grid[0][0].legend(fontsize="small")
    figure.savefig(path, dpi=150)


def show(rows: Sequence[Row]) -> None:
    """Print the speed-ups at the length that the paper's stand beside."""
    heads = [f"{kind} over {loop}" for kind in KINDS for loop in ("eager", "compiled")]
    print(f"\n{'':6}{'':32}" + "".join(f"{head:>23}" for head in heads))
    for row in rows:
        values = [row[head.replace(" ", "_")] for head in heads]
        text = "".join(f"{value:21.1f} x" for value in values)
        print(f"{row['cell']:6}{row['way']:32}{text}")
    print(PAPER)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", type=int, nargs=2, default=SIZES, metavar=("B", "D"))
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--budget", type=float, default=300.0, help="ms for one timing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    device, (batch, channels) = torch.device(args.device), args.sizes
    about = provenance(device)
    rows: list[Row] = []
    for name in CELLS:
        torch.manual_seed(0)
        cell = pararnn.CELLS[name](channels, device=device)
        ways = ways_of(cell, device)
        for length in args.lengths:
            size = (batch, length, len(cell.gates), channels)
            gates = torch.randn(size, device=device, requires_grad=True)
            found = with_speedups(measured_ways(cell, gates, ways, args.budget))
            for way, row in found.items():
                place = {"cell": name, "B": batch, "T": length, "D": channels, "way": way}
                rows.append({**about, **place, **row})
                print(
                    f"{name:5} T {length:5} {way:32} forward {row['forward_ms']:10.4f} ms, "
                    f"forward + backward {row['both_ms']:10.4f} ms",
                    flush=True,
                )
    write_csv(args.out / f"speedup_{device.type}.csv", rows)
    plot(rows, args.out / f"speedup_{device.type}.png")
    show([row for row in rows if row["T"] == SHOWN] or rows)


if __name__ == "__main__":
    main()
