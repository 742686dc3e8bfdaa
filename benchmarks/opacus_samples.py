"""Gradients of single samples by opacus: `pararnn.LSTM` by the sampler of examples/dp_sgd.py, next
to opacus' own DPLSTM of the same weights, and to a forward and backward pass without them.

Each way takes turns, on one thread. Least times of the processor, which users beside it do not
lengthen. Writes results/opacus_cpu.csv.

    pip install opacus
    python benchmarks/opacus_samples.py [--budget 20]
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from common import Record, new_parser, provenance
from opacus.grad_sample import GradSampleModule
from opacus.layers import DPLSTM
from protocol import CPU, keep_memory, wall_times
from torch import Tensor, nn

import pararnn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import dp_sgd

SIZES = [(16, 128, 128), (64, 128, 128), (16, 512, 256)]


def step_of(module: nn.Module, x: Tensor) -> Callable[[], None]:
    """Return the call of a forward and backward pass."""

    def step() -> None:
        module.zero_grad()
        module(x).square().mean().backward()

    return step


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds for a size")
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    about = {**provenance(CPU), "opacus": version("opacus"), "threads": 1}
    record = Record(args.out / "opacus_cpu.csv", about)
    for batch, steps, channels in SIZES:
        torch.manual_seed(0)
        x = torch.randn(batch, steps, channels)
        layers = [of(channels, channels, batch_first=True) for of in (pararnn.LSTM, DPLSTM)]
        layers[1].load_state_dict(layers[0].state_dict())
        plain = step_of(dp_sgd.Net(pararnn.LSTM(channels, channels, batch_first=True)), x)
        ways = [step_of(GradSampleModule(_Output(layer)), x) for layer in layers]
        ours, opacus, both = map(
            min, wall_times([*ways, plain], args.budget, clock=time.process_time)
        )
        row = {"B": batch, "T": steps, "D": channels, "ours_min_ms": round(ours, 1)}
        row |= {"opacus_min_ms": round(opacus, 1), "both_min_ms": round(both, 1)}
        record.add(row | {"speedup": round(opacus / ours, 2)})


class _Output(nn.Module):
    """Output of a layer, by a call that runs the layer's hooks."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


if __name__ == "__main__":
    main()
