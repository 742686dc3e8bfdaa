"""The sLSTM layer of the xlstm package (PyPI) and ours with its weights, on the CPU.

float32, forward without gradients and forward + backward: the package's backend "vanilla" by calls
and by torch.compile, and `pararnn.SLSTMLayer`. Layers take turns, on inputs that take turns too.
Writes results/xlstm_layer.csv.

    python benchmarks/xlstm_layer.py [--budget 6] [--threads 1]
"""

from __future__ import annotations

import importlib
import itertools
import statistics
from collections.abc import Callable
from importlib.metadata import version

import torch
from common import Record, new_parser, provenance
from protocol import wall_times
from torch import Tensor, nn

import pararnn

SIZES = ((8, 256, 512, 4), (1, 512, 512, 4), (32, 64, 128, 4))
"""B, T, D and heads."""


def calls_of(layer: nn.Module, inputs: list[Tensor]) -> list[Callable[[], object]]:
    """Return a layer's forward pass without gradients, and its forward and backward pass."""
    turns = itertools.cycle(inputs)

    def both() -> None:
        layer.zero_grad(set_to_none=True)
        layer(next(turns)).sum().backward()

    return [torch.no_grad()(lambda: layer(next(turns))), both]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--budget", type=float, default=6.0, help="seconds for a timing")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    package = importlib.import_module("xlstm.blocks.slstm.layer")
    about = {**provenance(), "xlstm": version("xlstm"), "threads": args.threads}
    record = Record(args.out / "xlstm_layer.csv", about)
    for batch, steps, channels, heads in SIZES:
        torch.manual_seed(0)
        theirs = package.sLSTMLayer(
            package.sLSTMLayerConfig(
                embedding_dim=channels, num_heads=heads, conv1d_kernel_size=4, backend="vanilla"
            )
        )
        ours = pararnn.SLSTMLayer.from_xlstm(theirs)
        inputs = [torch.randn(batch, steps, channels) for _ in range(4)]
        difference = (ours(inputs[0]) - theirs(inputs[0])).abs().max().item()
        layers = {"pararnn": ours, "xlstm": theirs, "xlstm, compiled": torch.compile(theirs)}
        calls = {name: calls_of(layer, inputs) for name, layer in layers.items()}
        for step, index in (("forward", 0), ("both", 1)):
            turns = [of_layer[index] for of_layer in calls.values()]
            for call in turns * 2:  # torch.compile takes some seconds
                call()
            for name, times in zip(calls, wall_times(turns, args.budget), strict=True):
                row = {"B": batch, "T": steps, "D": channels, "heads": heads, "step": step}
                row |= {"layer": name, "runs": len(times), "difference": f"{difference:.1e}"}
                row["ms"] = round(statistics.median(times), 3)
                record.add(row | {"min_ms": round(min(times), 3)})


if __name__ == "__main__":
    main()
