"""Host time of an eager call: a small layer without its kernels, against PyTorch's own.

Usage: python benchmarks/host_call.py [--device cuda] [--out FOLDER]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import new_parser, provenance, write_csv
from protocol import wait, wall_ms
from torch import Tensor, nn

import pararnn

BATCH, STEPS, CHANNELS = 2, 16, 64
ROUNDS, WARM_UP = 1500, 50

HEADS = 4
BY_HEADS = f"RecurrentLayer of {HEADS} heads"
"""As language models have it."""

BARE = "nn.Linear and an autograd Function"
"""Cost of autograd for a layer's projection and for as many tensors as a solve has."""

Calls = dict[str, Callable[[], object]]


class Opaque(torch.autograd.Function):
    """An op of a solve's tensors that computes nothing: what autograd takes for one."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, bias: Tensor, *params: Tensor) -> tuple[Tensor, ...]:
        batch, steps, _, channels = gates.shape
        states, final = gates.new_empty(batch, steps, channels), gates.new_empty(batch, channels)
        ctx.save_for_backward(gates, bias, *params, states)
        return states, final

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:-1])


def training(device: str) -> Calls:
    """Return forward and backward passes by name; the others are compared with the last."""
    x = torch.randn(BATCH, STEPS, CHANNELS, device=device)
    grad = torch.randn(BATCH, STEPS, CHANNELS, device=device)
    modules = _modules(device)
    linear = nn.Linear(CHANNELS, 3 * CHANNELS, bias=False, device=device)
    loose = [torch.randn(3, CHANNELS, device=device, requires_grad=True)]
    loose += [torch.randn(CHANNELS, device=device, requires_grad=True) for _ in range(3)]

    def gradients_of(module: nn.Module) -> Callable[[], object]:
        leaves = list(module.parameters())
        return lambda: torch.autograd.grad(module(x)[0], leaves, grad)

    def opaque() -> object:
        output, _ = Opaque.apply(linear(x).unflatten(-1, (3, -1)), *loose)
        return torch.autograd.grad(output, [linear.weight, *loose], grad)

    by_name: Calls = {name: gradients_of(module) for name, module in modules.items()}
    return by_name | {BARE: opaque}


def _modules(device: str) -> dict[str, Any]:
    """Return the modules to time, by name."""
    make = partial(pararnn.RecurrentLayer, pararnn.GRUCell, CHANNELS, CHANNELS, device=device)
    return {
        "ParaGRU": pararnn.ParaGRU(CHANNELS, CHANNELS, device=device),
        "RecurrentLayer": make(),
        BY_HEADS: make(num_heads=HEADS),
    }


def decoding(device: str) -> Calls:
    """Return steps without gradients by name; the others are compared with the last."""
    x, state = (torch.randn(BATCH, CHANNELS, device=device) for _ in range(2))
    modules = _modules(device)
    cell = nn.GRUCell(CHANNELS, CHANNELS, device=device)

    def quietly(call: Callable[[], object]) -> Callable[[], object]:
        return torch.no_grad()(call)

    def step_of(module: Any) -> Callable[[], object]:
        own_state = state.unsqueeze(0) if isinstance(module, pararnn.ParaRNN) else state
        return quietly(lambda: module.step(x, own_state))

    return {
        **{name: step_of(module) for name, module in modules.items()},
        "nn.GRUCell": quietly(lambda: cell(x, state)),
    }


CASES = {"forward and backward": training, "step": decoding}


def least(calls: Calls, device: str, rounds: int = ROUNDS) -> dict[str, float]:
    """Return the least microseconds of each call, in turns: other load on a machine only adds.

    Calls are timed one by one: a block of them would be long enough to be interrupted.
    """
    minima = dict.fromkeys(calls, float("inf"))
    for turn in range(-WARM_UP, rounds):
        for name, call in calls.items():
            us = wall_ms(call) * 1e3
            if turn >= 0:
                minima[name] = min(minima[name], us)
            wait(torch.device(device))
    return minima


def rows(device: str, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Return a row for each figure; `ratio` is to the case's last one."""
    torch.set_num_threads(1)
    out = []
    for case, calls_on in CASES.items():
        times = least(calls_on(device), device, rounds)
        base = list(times.values())[-1]
        for name, us in times.items():
            figure = {"case": case, "call": name, "us": f"{us:.1f}"}
            out.append(figure | {"ratio": f"{us / base:.2f}", "rounds": rounds})
    return [row | provenance(device) for row in out]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    table = rows(args.device)
    for row in table:
        print(f"{row['case']:<22} {row['call']:<36} {row['us']:>8} us  {row['ratio']:>6}")
    write_csv(args.out / f"host_call{'' if args.device == 'cpu' else '_cuda'}.csv", table)


if __name__ == "__main__":
    main()
