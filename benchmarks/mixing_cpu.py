"""The CPU: layers that mix channels inside heads, one dense head and several, beside torch.nn's.

Whole layers, forward and forward + backward, float32; torch.nn's have the dense layer's weights.
The input projection is dense, of a ParaRNN by heads as the recurrence is. Layers take turns, on
inputs that take turns too. Writes results/mixing_cpu.csv.

    python benchmarks/mixing_cpu.py [--budget 20] [--threads 1 2] [--heads 1 8]
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence

import torch
from common import new_parser, provenance, write_csv
from cpu import INPUTS, inputs_of
from protocol import wall_times
from torch import Tensor, nn

import pararnn

BATCH, STEPS, CHANNELS = 16, 256, 512
LAYERS = {
    "lstm": (pararnn.LSTM, nn.LSTM, pararnn.HeadLSTMCell),
    "gru": (pararnn.GRU, nn.GRU, pararnn.HeadGRUCell),
}


def calls_of(layer: nn.Module, inputs: Sequence[tuple[Tensor, ...]]) -> list[Callable[[], object]]:
    """Return a layer's forward pass without gradients, and its forward and backward pass."""
    turns = itertools.cycle(inputs)
    weights = list(layer.parameters())
    cotangent = torch.randn_like(layer(*inputs[0])[0])

    @torch.no_grad()
    def forward() -> None:
        layer(*next(turns))

    def both() -> None:
        leaves = next(turns)
        torch.autograd.grad(layer(*leaves)[0], [*leaves, *weights], cotangent)

    return [forward, both]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for a cell and pass")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--heads", type=int, nargs="+", default=[1, 8])
    args = parser.parse_args()
    rows = []
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
        assert len(inputs) == INPUTS
        calls = [calls_of(layer, inputs) for layer in layers.values()]
        times = [wall_times(of_pass, args.budget) for of_pass in zip(*calls, strict=True)]
        medians = [[statistics.median(each) for each in of_pass] for of_pass in times]
        for i, label in enumerate(layers):
            row = {**provenance(), "threads": threads, "cell": name, "B": BATCH, "T": STEPS}
            row |= {"D": CHANNELS, "what": label, "runs": len(times[0][i])}
            for step, of_pass, median in zip(("forward", "both"), times, medians, strict=True):
                row[f"{step}_ms"] = round(median[i], 3)
                row[f"{step}_min_ms"] = round(min(of_pass[i]), 3)
                row[f"{step}_speedup"] = round(median[0] / median[i], 2)
            rows.append(row)
            print(
                f"{threads} threads {label:32} forward {row['forward_ms']:8.2f} ms "
                f"({row['forward_speedup']:5.2f} x), forward + backward {row['both_ms']:8.2f} ms "
                f"({row['both_speedup']:5.2f} x)",
                flush=True,
            )
    write_csv(args.out / "mixing_cpu.csv", rows)


if __name__ == "__main__":
    main()
