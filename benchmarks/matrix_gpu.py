"""Matrix cells on a GPU: `pararnn.solve` by kernels, a loop by hand, and a chunked kernel.

Replays of CUDA graphs: forward, and forward + backward of gates and parameters, bfloat16. The loop
is that of matrix_cpu.py, on fewer steps, as a graph has a node for each of its operations. With
flash-linear-attention (fla-core) installed, its chunked kernels of the gated delta rule, of the
mLSTM's memory (without normaliser, stabiliser and output gate) and of RWKV-7 run forward, on rates
and decays that are computed before: version 0.6.0 refuses the gated delta rule's backward pass on
Hopper with the Triton of PyTorch 2.11. Writes results/matrix_gpu.csv.

    python benchmarks/matrix_gpu.py [--budget 500] [--without-peer]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from chunk_ways import PEERS, split
from common import Record, new_parser, provenance
from matrix_cpu import KERNELS, LOOPS, calls_of_cell, kernels
from protocol import Row, protocol_columns
from torch import Tensor

from pararnn.cells import Cell
from pararnn.zoo import MATRIX_CELLS

BATCH, STEPS, HEADS, LOOP_STEPS = 16, 2048, 12, 512
CELLS = ("m2rnn", "gated-delta", "rwkv7", "mlstm")
SIZES = ((64, 16), (32, 32), (64, 64))
"""K and V of a head."""
LOOP, CHUNKS = "loop as a CUDA graph", "flash-linear-attention, chunks"
CHUNKED = ("gated-delta", "mlstm", "rwkv7")
"""Cells whose chunked kernels run too."""
PASSES = ("forward", "both")
DEVICE = torch.device("cuda")
Calls = tuple[Callable[[], object], ...]


def case(name: str, keys: int, values: int, steps: int) -> tuple[Cell, Tensor]:
    """Return a cell and its gates, larger than the GPU's L2 cache at STEPS steps."""
    torch.manual_seed(0)
    cell = MATRIX_CELLS[name](
        HEADS * values, num_heads=HEADS, K=keys, device=DEVICE, dtype=torch.bfloat16
    )
    assert cell.head_sizes is not None
    size = (BATCH, steps, HEADS, cell.head_sizes.width)
    return cell, torch.randn(size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)


def chunked_calls(name: str, cell: Cell, gates: Tensor) -> Calls:
    """Return the forward pass of a cell's chunked kernel."""
    peer = PEERS[name, "fla"](split(cell, gates.detach()))
    return (torch.no_grad()(lambda: peer.function(*peer.inputs)),)


def row_of(name: str, keys: int, values: int, steps: int, way: str, calls: Calls, ms: float) -> Row:
    """Return the times of both passes, or of the forward one alone."""
    row: Row = {"cell": name, "B": BATCH, "T": steps, "H": HEADS}
    row |= {"K": keys, "V": values, "way": way}
    row |= {f"{step}_{what}": "" for step in PASSES for what in ("ms", "min_ms", "runs")}
    return row | protocol_columns(calls, DEVICE, ms, "graph")


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--budget", type=float, default=500, help="ms for the runs of a pass")
    parser.add_argument("--without-peer", action="store_true")
    args = parser.parse_args()
    record = Record(args.out / "matrix_gpu.csv", provenance(DEVICE))
    for name in CELLS:
        for keys, values in SIZES:
            cell, gates = case(name, keys, values, STEPS)
            calls: Calls = calls_of_cell(kernels, cell, gates)
            record.add(row_of(name, keys, values, STEPS, KERNELS, calls, args.budget))
    keys, values = SIZES[0]
    for name, loop in LOOPS.items():
        cell, gates = case(name, keys, values, LOOP_STEPS)
        for way, function in ((KERNELS, kernels), (LOOP, loop)):
            calls = calls_of_cell(function, cell, gates)
            record.add(row_of(name, keys, values, LOOP_STEPS, way, calls, args.budget))
    if args.without_peer:
        return
    keys, values = SIZES[-1]
    for name in CHUNKED:
        calls = chunked_calls(name, *case(name, keys, values, STEPS))
        record.add(row_of(name, keys, values, STEPS, CHUNKS, calls, args.budget))


if __name__ == "__main__":
    main()
