"""A cell of your own, from one step to a trained and checked model.

The adding problem: of 100 random numbers two are marked, and at the end the model says their
sum. Always saying 1 has a mean squared error of 0.167; this model gets below 0.01.
"""

import torch

import pararnn
from pararnn import Param


class Notebook(pararnn.Cell):
    """A slow state `m` that things are written to, and a fast state `y` that reads it."""

    states = ("y", "m")  # the first is the layer's output
    gates = ("write", "value", "out")  # one matrix product gives these from the input
    params = {
        "keep": Param(mean=4.0, std=1.0, recurrent=False),  # sigmoid(4) = 0.98: slow to forget
        "w_y": Param(),
        "w_m": Param(mean=0.3),
    }

    def step(self, state, gate, param):
        new = torch.sigmoid(gate.write) * torch.tanh(gate.value + param.w_y * state.y)
        m = torch.sigmoid(param.keep) * state.m + new
        return torch.tanh(gate.out + param.w_m * m), m


def batch(size, steps=100):
    """Numbers and marks (size, steps, 2), and the sums (size, 1) of what is marked."""
    numbers, marks = torch.rand(size, steps), torch.zeros(size, steps)
    half = steps // 2
    for start in (0, half):  # one mark in each half
        marks[torch.arange(size), torch.randint(start, start + half, (size,))] = 1
    return torch.stack([numbers, marks], -1), (numbers * marks).sum(1, keepdim=True)


def main():
    """Train; return the error on new sequences and what `verify` says."""
    torch.manual_seed(0)
    rnn, head = pararnn.ParaRNN(Notebook, 2, 32), torch.nn.Linear(32, 1)
    optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=1e-2)
    pararnn.clip_after_step(optimizer, rnn)
    for _ in range(800):
        x, target = batch(64)
        loss = (head(rnn(x)[0][:, -1]) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, target = batch(500)
    error = (head(rnn(x)[0][:, -1]) - target).square().mean().item()
    report = pararnn.verify(rnn, x[:4])
    print(f"mean squared error {error:.4f}\n{report}")
    return error, report


if __name__ == "__main__":
    main()
