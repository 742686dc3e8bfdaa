"""Matrix cells on a CPU: `pararnn.solve` by kernels, and a loop by hand in PyTorch.

The loops are what a user would write, one step after the other on (B, H, K, V). Forward, and
forward + backward of gates and parameters, float32. Ways take turns, so that other work on the
machine does not meet one alone. Writes results/matrix_cpu.csv.

    OMP_NUM_THREADS=1 python benchmarks/matrix_cpu.py [--budget 5.0]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from common import Record, new_parser, provenance
from protocol import Calls, calls_of, columns_of
from torch import Tensor

import pararnn
from pararnn.cells import Cell
from pararnn.zoo import MATRIX_CELLS

BATCH, STEPS, HEADS = 8, 256, 4
SIZES = ((64, 16), (32, 32), (64, 64))
"""K and V of a head."""
KERNELS, LOOP = "pararnn.solve", "loop in Python"
Way = Callable[[Cell, Tensor], Tensor]


def m2rnn(cell: Cell, gates: Tensor) -> Tensor:
    sizes = cell.head_sizes
    assert sizes is not None
    weight: Tensor = cell.W
    state = gates.new_zeros(gates.shape[0], *sizes.state_sizes[0])
    outputs = []
    for gate in gates.unbind(1):
        k, q, v, f = sizes.split(gate)
        f = torch.sigmoid(f)[..., None, None]
        new = torch.tanh(state @ weight + k.unsqueeze(-1) * v.unsqueeze(-2))
        state = torch.lerp(new, state, f)
        outputs.append((q.unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, 1)


def gated_delta(cell: Cell, gates: Tensor) -> Tensor:
    sizes = cell.head_sizes
    assert sizes is not None
    state = gates.new_zeros(gates.shape[0], *sizes.state_sizes[0])
    outputs = []
    for gate in gates.unbind(1):
        q, k, v, a, b = sizes.split(gate)
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        state = torch.sigmoid(a)[..., None, None] * state
        write = torch.sigmoid(b)[..., None] * (v - (k.unsqueeze(-2) @ state).squeeze(-2))
        state = state + k.unsqueeze(-1) * write.unsqueeze(-2)
        outputs.append((q.unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, 1)


LOOPS: dict[str, Way] = {"m2rnn": m2rnn, "gated-delta": gated_delta}


def kernels(cell: Cell, gates: Tensor) -> Tensor:
    """Return the outputs by the library."""
    output: Tensor = pararnn.solve(cell, gates, solver="sequential", backend="fused")[0]
    return output


def calls_of_cell(way: Way, cell: Cell, gates: Tensor) -> Calls:
    """Return the passes of a way to run a cell, by gates and parameters."""
    return calls_of(partial(way, cell, gates), [gates, *cell.parameters()])


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--budget", type=float, default=5.0, help="seconds for a pass of a cell")
    args = parser.parse_args()
    about = {**provenance(), "threads": torch.get_num_threads()}
    record = Record(args.out / "matrix_cpu.csv", about)
    for name, loop in LOOPS.items():
        for keys, values in SIZES:
            torch.manual_seed(0)
            cell = MATRIX_CELLS[name](HEADS * values, num_heads=HEADS, K=keys)
            assert cell.head_sizes is not None
            size = (BATCH, STEPS, HEADS, cell.head_sizes.width)
            gates = torch.randn(size, requires_grad=True)
            ways: dict[str, Way] = {LOOP: loop, KERNELS: kernels}
            calls = [calls_of_cell(run, cell, gates) for run in ways.values()]
            for way, columns in zip(ways, columns_of(calls, args.budget), strict=True):
                row = {"cell": name, "B": BATCH, "T": STEPS, "H": HEADS, "K": keys, "V": values}
                record.add(row | {"way": way, **columns})


if __name__ == "__main__":
    main()
