"""Matrix cells whose entries do not meet, on a GPU: step after step, and time in segments.

One row of long text, bfloat16: the loop has a block for each head, and most of the GPU is idle.
Calls from Python, as the host sees whether segments agree. Writes results/matrix_segments.csv.

    python benchmarks/matrix_segments.py [--budget 300]
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from common import Record, new_parser, provenance
from matrix_cpu import calls_of_cell
from protocol import Row, protocol_columns
from torch import Tensor

import pararnn
from pararnn import Param
from pararnn.cells import Cell
from pararnn.zoo import MLSTMCell

LENGTHS, HEADS, KEYS, VALUES = (8_192, 65_536), 12, 64, 16
SEGMENTS = (16, 32, 64)
DEVICE = torch.device("cuda")


class Entrywise(Cell):
    """A gated memory whose entries are nonlinear, each in itself."""

    states = {"H": ("K", "V")}
    gates = {"k": "K", "q": "K", "v": "V", "f": ""}
    params = {"a": Param("H,K,V")}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        new = torch.tanh(param.a * state.H + gate.k[..., :, None] * gate.v[..., None, :])
        f = torch.sigmoid(gate.f)[..., None, None]
        return f * state.H + (1 - f) * new

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        return (gate.q[..., None, :] @ state.H).squeeze(-2)


def run(cell: Cell, gates: Tensor, segments: int | None) -> Tensor:
    """Return the outputs; without segments step after step."""
    solver = "sequential" if segments is None else "newton"
    with pararnn.using(segments=segments):
        output: Tensor = pararnn.solve(cell, gates, solver=solver, backend="fused")[0]
    return output


def rows_of(cell: Cell, length: int, budget: float) -> Iterator[Row]:
    """Yield the times of a cell on one row of a length."""
    assert cell.head_sizes is not None
    size = (1, length, HEADS, cell.head_sizes.width)
    gates = torch.randn(size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    name = type(cell).__name__.removesuffix("Cell").lower()
    for segments in (None, *SEGMENTS):
        row: Row = {"cell": name, "B": 1, "T": length, "H": HEADS}
        row |= {"K": KEYS, "V": VALUES, "segments": segments or 1}
        calls = calls_of_cell(partial(run, segments=segments), cell, gates)
        yield row | protocol_columns(calls, DEVICE, budget)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--budget", type=float, default=300, help="ms for the runs of a pass")
    args = parser.parse_args()
    record = Record(args.out / "matrix_segments.csv", provenance(DEVICE))
    for cls in (Entrywise, MLSTMCell):
        torch.manual_seed(0)
        cell = cls(HEADS * VALUES, num_heads=HEADS, K=KEYS, device=DEVICE, dtype=torch.bfloat16)
        for length in LENGTHS:
            for row in rows_of(cell, length, args.budget):
                record.add(row)


if __name__ == "__main__":
    main()
