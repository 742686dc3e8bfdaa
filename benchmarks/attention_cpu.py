"""Attention inside the step on a CPU: a layer of `AttentionLSTMCell`, and a loop of nn.LSTMCell.

The loop is what a user would write: one step after the other of torch.nn.LSTMCell on the input and
the context, then additive attention. Both have the same weights. Forward, and forward + backward of
weights, input and memory, float32. Ways take turns, so that other work on the machine does not meet
one alone. Writes results/attention_cpu.csv.

    OMP_NUM_THREADS=1 python benchmarks/attention_cpu.py [--budget 5.0]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from common import Record, new_parser, provenance
from protocol import calls_of, columns_of
from torch import Tensor, nn

import pararnn
from pararnn.layers import RecurrentLayer
from pararnn.zoo import AttentionLSTMCell

SIZES = (
    (1, 200, 256, 128, 100),
    (8, 200, 64, 32, 30),
    (8, 100, 128, 64, 50),
    (16, 100, 256, 128, 100),
    (16, 100, 256, 128, 300),
)
"""B, T, D (of states, input and values), K of keys and S."""
KERNELS, LOOP = "pararnn.ParaRNN", "loop of nn.LSTMCell"
Memory = Mapping[str, Tensor]
Way = Callable[[Tensor, Memory], Tensor]


class LoopOfCells(nn.Module):
    """An attention LSTM by torch.nn."""

    def __init__(self, size: int, keys: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(2 * size, size)
        self.query, self.score = nn.Linear(size, keys, bias=False), nn.Linear(keys, 1, bias=False)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """Return the states h of all steps."""
        h = c = context = x.new_zeros(x.shape[0], x.shape[2])
        outputs = []
        for x_t in x.unbind(1):
            h, c = self.cell(torch.cat([x_t, context], -1), (h, c))
            matches = torch.tanh(memory["keys"] + self.query(h).unsqueeze(1))
            energies = self.score(matches).squeeze(-1) + memory["mask"]
            weights = torch.softmax(energies, -1)
            context = (weights.unsqueeze(1) @ memory["values"]).squeeze(1)
            outputs.append(h)
        return torch.stack(outputs, 1)


@torch.no_grad()
def layer_of(loop: LoopOfCells) -> pararnn.ParaRNN:
    """Return the layer with the weights of a loop. Its readout is h."""
    cell, size = loop.cell, loop.cell.hidden_size
    keys = loop.query.out_features
    layer = pararnn.ParaRNN(AttentionLSTMCell, size, size, K=keys, E=size)
    of_input, of_context = cell.weight_ih.split(size, 1)
    recurrent = layer.layers[0]
    assert isinstance(recurrent, RecurrentLayer)
    assert recurrent.bias is not None
    recurrent.proj.weight.copy_(of_input.unsqueeze(0))
    recurrent.bias.copy_((cell.bias_ih + cell.bias_hh).unsqueeze(0))
    for kind, weight in (("R", cell.weight_hh), ("C", of_context)):
        for name, rows in zip("ifgo", weight.chunk(4), strict=True):
            getattr(layer.cell, f"{kind}_{name}").copy_(rows.t().unsqueeze(0))
    layer.cell.Q.copy_(loop.query.weight.unsqueeze(0))
    layer.cell.w.copy_(loop.score.weight)
    layer.cell.P.zero_()
    return layer


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--budget", type=float, default=5.0, help="seconds for a pass of a size")
    args = parser.parse_args()
    about = {**provenance(), "threads": torch.get_num_threads()}
    record = Record(args.out / "attention_cpu.csv", about)
    for batch, steps, size, keys, length in SIZES:
        torch.manual_seed(0)
        loop = LoopOfCells(size, keys)
        layer = layer_of(loop)
        x = torch.randn(batch, steps, size, requires_grad=True)
        memory = {
            "keys": torch.randn(batch, length, keys, requires_grad=True),
            "values": torch.randn(batch, length, size, requires_grad=True),
            "mask": torch.zeros(batch, length),
        }

        def kernels(x: Tensor, memory: Memory, layer: pararnn.ParaRNN = layer) -> Tensor:
            output: Tensor = layer(x, memory=memory)[0]
            return output

        ways: dict[str, tuple[nn.Module, Way]] = {LOOP: (loop, loop), KERNELS: (layer, kernels)}
        torch.testing.assert_close(kernels(x, memory), loop(x, memory), rtol=1e-4, atol=1e-4)
        shared = [x, memory["keys"], memory["values"]]
        calls = []
        for module, way in ways.values():
            leaves = [*shared, *(p for name, p in module.named_parameters() if name[-1] != "P")]
            calls.append(calls_of(partial(way, x, memory), leaves))
        for name, columns in zip(ways, columns_of(calls, args.budget), strict=True):
            row = {"B": batch, "T": steps, "D": size, "K": keys, "S": length, "way": name}
            record.add(row | columns)


if __name__ == "__main__":
    main()
