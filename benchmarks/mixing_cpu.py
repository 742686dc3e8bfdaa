"""The CPU: layers that mix channels inside heads, one dense head and several, beside torch.nn's.

Whole layers, forward and forward + backward, float32; torch.nn's have the dense layer's weights.
The input projection is dense, of a ParaRNN by heads as the recurrence is. Layers take turns, on
inputs that take turns too. Writes results/mixing_cpu.csv. With --shapes other sizes than that, one
dense head, one thread, and results/mixing_cpu_shapes.csv.

    python benchmarks/mixing_cpu.py [--budget 20] [--threads 1 2] [--heads 1 8] [--shapes]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from common import Record, new_parser, provenance
from cpu import inputs_of, output_of
from protocol import Calls, Row, calls_of, columns_of, wall_times
from torch import Tensor, nn

import pararnn

BATCH, STEPS, CHANNELS = 16, 256, 512
SHAPES = (
    *((1, 256, 64), (1, 256, 256), (1, 1000, 512)),
    *((8, 256, 128), (32, 100, 256), (32, 512, 64), (64, 128, 128)),
)
"""B, T and D with --shapes."""
LAYERS = {
    "lstm": (pararnn.LSTM, nn.LSTM, pararnn.HeadLSTMCell),
    "gru": (pararnn.GRU, nn.GRU, pararnn.HeadGRUCell),
}


def passes_of(layer: nn.Module, inputs: Sequence[tuple[Tensor, ...]]) -> Calls:
    """Return a layer's forward pass without gradients, and its forward and backward pass."""
    return calls_of(output_of(layer), list(layer.parameters()), inputs)


def times_by_shape(budget: float) -> Iterator[Row]:
    """Yield the least ms of our layers and torch.nn's, and the speed-up, at each of SHAPES."""
    torch.set_num_threads(1)
    for (name, (ours, theirs, _)), size in itertools.product(LAYERS.items(), SHAPES):
        torch.manual_seed(0)
        own, peer = (cls(size[2], size[2], batch_first=True) for cls in (ours, theirs))
        own.load_state_dict(peer.state_dict())
        inputs = inputs_of(*size)
        row: Row = {"threads": 1, "cell": name, **dict(zip("BTD", size, strict=True))}
        calls = zip(passes_of(own, inputs), passes_of(peer, inputs), strict=True)
        for step, of_pass in zip(("forward", "both"), calls, strict=True):
            times = wall_times(of_pass, budget)
            own_ms, peer_ms = map(min, times)
            row |= {"runs": len(times[0])} if step == "forward" else {}
            row |= {f"{step}_min_ms": round(own_ms, 3), f"{step}_torch_min_ms": round(peer_ms, 3)}
            row[f"{step}_speedup"] = round(peer_ms / own_ms, 2)
        yield row


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--shapes", action="store_true", help="other sizes instead")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for a cell and pass")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--heads", type=int, nargs="+", default=[1, 8])
    args = parser.parse_args()
    file = "mixing_cpu_shapes.csv" if args.shapes else "mixing_cpu.csv"
    record = Record(args.out / file, provenance())
    if args.shapes:
        for row in times_by_shape(args.budget):
            record.add(row)
        return
    for threads, (name, (ours, theirs, cell)) in itertools.product(args.threads, LAYERS.items()):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        peer = theirs(CHANNELS, CHANNELS, batch_first=True)
        layers = {f"torch.nn.{theirs.__name__}": peer}
        for heads in args.heads:
            own = ours(CHANNELS, CHANNELS, batch_first=True, num_heads=heads)
            if heads == 1:
                own.load_state_dict(peer.state_dict())
            layers[f"pararnn.{ours.__name__}, heads {heads}"] = own
            if heads > 1:
                by_heads = pararnn.ParaRNN(cell, CHANNELS, CHANNELS, num_heads=heads)
                layers[f"ParaRNN({cell.__name__}), heads {heads}"] = by_heads
        inputs = inputs_of(BATCH, STEPS, CHANNELS)
        every = columns_of([passes_of(layer, inputs) for layer in layers.values()], args.budget)
        for label, columns in zip(layers, every, strict=True):
            row = {"threads": threads, "cell": name, "B": BATCH, "T": STEPS, "D": CHANNELS}
            row |= {"what": label, **columns}
            for step in ("forward", "both"):
                row[f"{step}_speedup"] = round(every[0][f"{step}_ms"] / columns[f"{step}_ms"], 2)
            record.add(row)


if __name__ == "__main__":
    main()
