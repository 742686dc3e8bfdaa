"""Cells with norms over their channels: by kernels, and by the library's loop in PyTorch.

A layer-norm LSTM (each product and the memory are normalised) and a GRU of RMS norms. Forward, and
forward + backward of gates and parameters, float32. Ways take turns, so that other work on the
machine does not meet one alone. Adds rows to results/norms.csv, for each device.

    OMP_NUM_THREADS=1 python benchmarks/norms.py [--budget 5.0]
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import Record, new_parser, provenance
from cpu import pair
from protocol import calls_of, columns_of
from torch import Tensor

from pararnn import Cell, Param
from pararnn.base.device import default_device

SHAPES = ((8, 256, 64), (64, 256, 64), (64, 256, 96))
"""B, T, D; one head, whose matrices fit a GPU's shared memory."""
WAYS = {"loop in PyTorch": "torch", "kernels": "fused"}
KEYS = ("device", "cell", "B", "T", "D", "way")
"""Columns that identify a case."""


class NormLSTM(Cell):
    """A layer-norm LSTM: each product and the memory are normalised over the channels."""

    states = ("h", "c")
    gates = ("i", "f", "z", "o")
    params = {f"R_{gate}": Param("H,K,K") for gate in gates} | {
        f"w_{name}": Param("D", mean=1.0, std=0.1) for name in (*gates, "c")
    }

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        def normed(matrix: Tensor, weight: Tensor) -> Tensor:
            x = state.h @ matrix
            return F.layer_norm(x, x.shape[-1:]) * weight

        i = torch.sigmoid(gate.i + normed(param.R_i, param.w_i))
        f = torch.sigmoid(gate.f + normed(param.R_f, param.w_f))
        z = torch.tanh(gate.z + normed(param.R_z, param.w_z))
        o = torch.sigmoid(gate.o + normed(param.R_o, param.w_o))
        c = f * state.c + i * z
        return o * torch.tanh(F.layer_norm(c, c.shape[-1:]) * param.w_c), c


class NormGRU(Cell):
    """A GRU with the reset after the product, whose products are normalised."""

    states = ("h",)
    gates = ("z", "r", "n")
    params = {f"R_{gate}": Param("H,K,K") for gate in gates}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        def normed(matrix: Tensor) -> Tensor:
            x = state.h @ matrix
            return F.rms_norm(x, x.shape[-1:], eps=1e-6)

        z = torch.sigmoid(gate.z + normed(param.R_z))
        r = torch.sigmoid(gate.r + normed(param.R_r))
        return torch.lerp(torch.tanh(gate.n + r * normed(param.R_n)), state.h, z)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--budget", type=float, default=5.0, help="seconds for a pass of a cell")
    args = parser.parse_args()
    device = torch.device(default_device())
    about = {**provenance(device), "threads": torch.get_num_threads()}
    record = Record(args.out / "norms.csv", about, KEYS)
    for cell_class in (NormLSTM, NormGRU):
        for batch, steps, channels in SHAPES:
            torch.manual_seed(0)
            cell = cell_class(channels, device=device)
            size = (batch, steps, cell.num_gates, channels)
            gates = torch.randn(size, device=device, requires_grad=True)
            leaves = [gates, *cell.parameters()]
            solves = [pair(cell, "sequential", backend) for backend in WAYS.values()]
            runs = [partial(solve, gates) for solve in solves]
            times = columns_of([calls_of(run, leaves) for run in runs], args.budget, device)
            for way, columns in zip(WAYS, times, strict=True):
                row = {"cell": cell_class.__name__, "B": batch, "T": steps, "D": channels}
                record.add(row | {"way": way, **columns})


if __name__ == "__main__":
    main()
