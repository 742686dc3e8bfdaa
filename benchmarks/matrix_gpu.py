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

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from common import new_parser, provenance, write_csv
from matrix_cpu import KERNELS, LOOPS, calls_of_cell, kernels
from protocol import Row, captured_graph, protocol_times
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

from pararnn.cells import Cell
from pararnn.zoo import MATRIX_CELLS

BATCH, STEPS, HEADS, LOOP_STEPS = 16, 2048, 12, 512
CELLS = ("m2rnn", "gated-delta", "rwkv7", "mlstm")
SIZES = ((64, 16), (32, 32), (64, 64))
"""K and V of a head."""
LOOP, CHUNKS = "loop as a CUDA graph", "flash-linear-attention, chunks"
PASSES = ("forward", "both")
DEVICE = torch.device("cuda")
Calls = tuple[Callable[[], object], ...]
Peer = Callable[..., Any]


def case(name: str, keys: int, values: int, steps: int) -> tuple[Cell, Tensor]:
    """Return a cell and its gates, larger than the GPU's L2 cache at STEPS steps."""
    torch.manual_seed(0)
    cell = MATRIX_CELLS[name](
        HEADS * values, num_heads=HEADS, K=keys, device=DEVICE, dtype=torch.bfloat16
    )
    assert cell.head_sizes is not None
    size = (BATCH, steps, HEADS, cell.head_sizes.width)
    return cell, torch.randn(size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)


def gated_delta_chunks(cell: Cell, gates: Tensor) -> tuple[Peer, list[Tensor]]:
    """Return flash-linear-attention's gated delta rule and its arguments."""
    function = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    q, k, v, a, b = parts_of(cell, gates)
    options = {"scale": 1.0, "use_qk_l2norm_in_kernel": True}
    return partial(function, **options), [q, k, v, logsigmoid(a.float()), torch.sigmoid(b)]


def rwkv7_chunks(cell: Cell, gates: Tensor) -> tuple[Peer, list[Tensor]]:
    """Return flash-linear-attention's RWKV-7 and its arguments."""
    function = import_module("fla.ops.rwkv7").chunk_rwkv7
    r, w, k, v, c, a = parts_of(cell, gates)
    c = normalize(c, dim=-1)
    decay = -math.exp(-0.5) * torch.sigmoid(w.float())
    return partial(function, scale=1.0), [r, decay, k, v, -c, torch.sigmoid(a) * c]


def mlstm_chunks(cell: Cell, gates: Tensor) -> tuple[Peer, list[Tensor]]:
    """Return flash-linear-attention's decaying memory of k v^T and its arguments."""
    function = import_module("fla.ops.simple_gla").chunk_simple_gla
    q, k, v, i, f, _ = parts_of(cell, gates)
    keys = torch.exp(i).unsqueeze(-1) * k
    return partial(function, scale=k.shape[-1] ** -0.5), [q, keys, v, logsigmoid(f.float())]


PEERS = {"gated-delta": gated_delta_chunks, "mlstm": mlstm_chunks, "rwkv7": rwkv7_chunks}


def parts_of(cell: Cell, gates: Tensor) -> list[Tensor]:
    """Return the gates of a cell apart, without gradients."""
    assert cell.head_sizes is not None
    return [part.detach().contiguous() for part in cell.head_sizes.split(gates)]


def chunked_calls(name: str, cell: Cell, gates: Tensor) -> Calls:
    """Return the forward pass of a cell's chunked kernel."""
    function, values = PEERS[name](cell, gates)

    @torch.no_grad()
    def forward() -> None:
        function(*values)

    return (forward,)


def row_of(name: str, keys: int, values: int, steps: int, way: str, calls: Calls, ms: float) -> Row:
    """Return the times of both passes, or of the forward one alone."""
    row = {**provenance(DEVICE), "cell": name, "B": BATCH, "T": steps, "H": HEADS}
    row |= {"K": keys, "V": values, "way": way}
    row |= {f"{step}_{what}": "" for step in PASSES for what in ("ms", "min_ms", "runs")}
    for step, call in zip(PASSES, calls, strict=False):
        graph = captured_graph([call])
        times = protocol_times(graph.replay, DEVICE, ms)
        row |= {f"{step}_ms": times["median_ms"], f"{step}_min_ms": times["min_ms"]}
        row[f"{step}_runs"] = times["runs"]
        del graph
    print(row, flush=True)
    return row


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--budget", type=float, default=500, help="ms for the runs of a pass")
    parser.add_argument("--without-peer", action="store_true")
    args = parser.parse_args()
    rows = []
    for name in CELLS:
        for keys, values in SIZES:
            cell, gates = case(name, keys, values, STEPS)
            calls: Calls = calls_of_cell(kernels, cell, gates)
            rows.append(row_of(name, keys, values, STEPS, KERNELS, calls, args.budget))
    keys, values = SIZES[0]
    for name, loop in LOOPS.items():
        cell, gates = case(name, keys, values, LOOP_STEPS)
        for way, function in ((KERNELS, kernels), (LOOP, loop)):
            calls = calls_of_cell(function, cell, gates)
            rows.append(row_of(name, keys, values, LOOP_STEPS, way, calls, args.budget))
    write_csv(args.out / "matrix_gpu.csv", rows)
    if args.without_peer:
        return
    keys, values = SIZES[-1]
    for name in PEERS:
        calls = chunked_calls(name, *case(name, keys, values, STEPS))
        rows.append(row_of(name, keys, values, STEPS, CHUNKS, calls, args.budget))
        write_csv(args.out / "matrix_gpu.csv", rows)


if __name__ == "__main__":
    main()
