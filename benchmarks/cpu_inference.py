"""The CPU: inference with torch.nn's layers and ours in their place, as a user calls them.

One thread, float32, `torch.inference_mode`, the layers' defaults and torch.nn's weights. Both take
turns, on inputs that take turns too. Writes results/cpu_inference.csv.

    python benchmarks/cpu_inference.py [--budget 4] [--cells lstm gru] [--only 0 3]
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from common import Record, new_parser, provenance
from cpu import inputs_of
from mixing_cpu import LAYERS
from protocol import wall_times
from torch import nn


class Shape(NamedTuple):
    """Sizes of a call, (T, B, input) to D channels, and of the stack."""

    B: int
    T: int
    input: int
    D: int
    layers: int = 1
    bidirectional: bool = False


SHAPES = (
    Shape(32, 60, 64, 64, 2, True),
    Shape(8, 200, 128, 256),
    Shape(64, 30, 300, 150, 1, True),
    Shape(1, 500, 40, 512),
    Shape(16, 100, 64, 64),
    Shape(1, 1, 64, 64),
    Shape(32, 1, 64, 64),
    Shape(8, 1, 128, 256),
)


def turn_of(layer: nn.Module, shape: Shape, repeats: int) -> Callable[[], object]:
    """Return a turn of calls of a layer, on inputs that take turns."""
    inputs = itertools.cycle([x.detach() for (x,) in inputs_of(shape.T, shape.B, shape.input)])

    @torch.inference_mode()
    def turn() -> None:
        for _ in range(repeats):
            layer(next(inputs))

    return turn


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--budget", type=float, default=4.0, help="seconds for a cell and shape")
    parser.add_argument("--cells", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--only", type=int, nargs="+", help="indices of shapes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shapes = SHAPES if args.only is None else [SHAPES[i] for i in args.only]
    record = Record(args.out / "cpu_inference.csv", {**provenance(), "threads": 1})
    for name, shape in itertools.product(args.cells, shapes):
        our_class, torch_class, _ = LAYERS[name]
        torch.manual_seed(0)
        options = {"num_layers": shape.layers, "bidirectional": shape.bidirectional}
        torch_layer = torch_class(shape.input, shape.D, **options).eval()
        our_layer = our_class(shape.input, shape.D, **options).eval()
        our_layer.load_state_dict(torch_layer.state_dict())
        repeats = 50 if shape.T == 1 else 1  # a clock tells no microseconds
        turns = [turn_of(layer, shape, repeats) for layer in (our_layer, torch_layer)]
        ours, theirs = wall_times(turns, args.budget)
        row: dict[str, Any] = {"cell": name, **shape._asdict(), "runs": len(ours) * repeats}
        for kind, figure in (("", statistics.median), ("min_", min)):
            our_ms, torch_ms = figure(ours) / repeats, figure(theirs) / repeats
            row |= {f"{kind}ms": round(our_ms, 4), f"torch_{kind}ms": round(torch_ms, 4)}
            row[f"{kind}speedup"] = round(torch_ms / our_ms, 2)
        record.add(row)


if __name__ == "__main__":
    main()
