"""DreamerV3's block GRU and RSSM: `pararnn.DreamerGRU` and `RSSM`, and loops by hand in PyTorch.

The loops are DreamerV3's code: one layer after the other at each step, what depends on no state
too but for the prior, which runs on all steps at once. Forward, and forward + backward of inputs
and parameters, float32. Ways take turns, so that other work on the machine does not meet one alone.
Adds rows to results/world_models.csv, for each device.

    OMP_NUM_THREADS=1 python benchmarks/world_models.py [--budget 10.0]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from common import Record, new_parser, provenance
from protocol import calls_of, columns_of
from torch import Tensor, nn

import pararnn
from pararnn.base.device import default_device
from pararnn.layers.dreamer import NormedLinear

BATCH, STEPS, ACTIONS, BLOCKS, EPS = 16, 64, 6, 8, 1e-4
SIZES = ((256, 16), (512, 32))
"""Channels of beliefs, layers and embeddings; variables, each of as many classes."""
LAYER, LOOP = "pararnn", "loop in Python"
KEYS = ("device", "cell", "B", "T", "D", "way")
"""Columns that identify a case."""


class Core(nn.Module):
    """One step of the block GRU, of whose inputs each has a layer with a norm."""

    def __init__(self, inputs: Sequence[int], size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NormedLinear(n, size, EPS) for n in (size, *inputs))
        block, width = size // BLOCKS, size * len(self.layers)
        self.hidden = nn.Parameter(torch.randn(BLOCKS, block + width, block) / width**0.5)
        self.gates = nn.Parameter(torch.randn(BLOCKS, block, 3 * block) / block**0.5)
        self.bias, self.weight = nn.Parameter(torch.zeros(size)), nn.Parameter(torch.ones(size))
        self.gate_bias = nn.Parameter(torch.zeros(BLOCKS, 1, 3 * block))

    def forward(self, h: Tensor, *inputs: Tensor) -> Tensor:
        hidden = [layer(x) for layer, x in zip(self.layers, (h, *inputs), strict=True)]
        every = torch.cat(hidden, -1).expand(BLOCKS, -1, -1)
        blocks = h.unflatten(1, (BLOCKS, -1)).transpose(0, 1)
        x = torch.bmm(torch.cat([blocks, every], -1), self.hidden)
        x = F.silu(
            F.rms_norm(x.transpose(0, 1).flatten(1) + self.bias, h.shape[1:], self.weight, EPS)
        )
        x = x.unflatten(1, (BLOCKS, -1)).transpose(0, 1)
        r, c, u = torch.baddbmm(self.gate_bias, x, self.gates).chunk(3, -1)
        u = torch.sigmoid(u - 1)
        new = u * torch.tanh(torch.sigmoid(r) * c) + (1 - u) * blocks
        return new.transpose(0, 1).flatten(1)


class LoopRSSM(nn.Module):
    """The RSSM as a loop."""

    def __init__(self, size: int, variables: int) -> None:
        super().__init__()
        self.classes, numbers = (variables, variables), variables**2
        self.core = Core([numbers, ACTIONS], size)
        self.posterior = nn.Sequential(NormedLinear(2 * size, size, EPS), nn.Linear(size, numbers))
        layers = NormedLinear(size, size, EPS), NormedLinear(size, size, EPS)
        self.prior = nn.Sequential(*layers, nn.Linear(size, numbers))

    def probabilities(self, logits: Tensor) -> Tensor:
        p = logits.unflatten(-1, self.classes).softmax(-1)
        return 0.99 * p + 0.01 / self.classes[1]

    def step(self, h: Tensor, z: Tensor, action: Tensor, embedding: Tensor) -> tuple[Tensor, ...]:
        """Return the next belief, the sample and the logarithms of its probabilities."""
        h = self.core(h, z, action / action.detach().abs().clamp_min(1))
        p = self.probabilities(self.posterior(torch.cat([h, embedding], -1)))
        noise = -torch.log(torch.empty_like(p).exponential_())
        hard = F.one_hot((p.log() + noise).argmax(-1), p.shape[-1])
        return h, (hard + (p - p.detach())).flatten(1), p.log()

    def forward(self, actions: Tensor, embeddings: Tensor) -> tuple[Tensor, ...]:
        h = embeddings.new_zeros(len(actions), embeddings.shape[-1])
        z, steps = h.new_zeros(len(actions), self.classes[0] * self.classes[1]), []
        for row in zip(actions.unbind(1), embeddings.unbind(1), strict=True):
            steps.append(self.step(h, z, *row))
            h, z, _ = steps[-1]
        h, z, logits = (torch.stack(series, 1) for series in zip(*steps, strict=True))
        return h, z, logits, self.probabilities(self.prior(h)).log()


class LoopGRU(nn.Module):
    """The block GRU as a loop, for inputs of these channels."""

    def __init__(self, size: int, inputs: Sequence[int]) -> None:
        super().__init__()
        self.core = Core(inputs, size)

    def forward(self, *inputs: Tensor) -> tuple[Tensor]:
        h, steps = inputs[0].new_zeros(len(inputs[0]), self.core.bias.numel()), []
        for row in zip(*(x.unbind(1) for x in inputs), strict=True):
            h = self.core(h, *row)
            steps.append(h)
        return (torch.stack(steps, 1),)


Way = tuple[nn.Module, Callable[[Sequence[Tensor]], Sequence[Tensor]]]


def ways_of(model: str, size: int, variables: int) -> tuple[dict[str, Way], list[int]]:
    """Return the ways to run a model, and the channels of its inputs."""
    loop: nn.Module
    ways: dict[str, Way]
    if model == "RSSM":
        rssm = pararnn.RSSM(ACTIONS, size, size, size, variables, variables, BLOCKS)
        loop = LoopRSSM(size, variables)
        ways = {LAYER: (rssm, lambda x: rssm(*x)[0]), LOOP: (loop, lambda x: loop(*x))}
        return ways, [ACTIONS, size]
    channels = [variables**2, ACTIONS]
    gru, loop = pararnn.DreamerGRU(channels, size, BLOCKS), LoopGRU(size, channels)
    ways = {LAYER: (gru, lambda x: gru(x)[:1]), LOOP: (loop, lambda x: loop(*x))}
    return ways, channels


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds for a pass of a model")
    args = parser.parse_args()
    device = torch.device(default_device())
    about = {**provenance(device), "threads": torch.get_num_threads()}
    record = Record(args.out / "world_models.csv", about, KEYS)
    for model in ("DreamerGRU", "RSSM"):
        for size, variables in SIZES:
            torch.manual_seed(0)
            ways, channels = ways_of(model, size, variables)
            draw = [torch.randn(BATCH, STEPS, n, device=device) for n in channels]
            inputs = [x.requires_grad_() for x in draw]
            calls = []
            for module, run in ways.values():
                leaves = [*inputs, *module.to(device).parameters()]
                calls.append(calls_of(partial(run, inputs), leaves))
            for way, columns in zip(ways, columns_of(calls, args.budget, device), strict=True):
                row = {"cell": model, "B": BATCH, "T": STEPS, "D": size, "classes": variables}
                record.add(row | {"way": way, **columns})


if __name__ == "__main__":
    main()
