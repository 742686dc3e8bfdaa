"""Lyapunov exponents of a trained layer: how fast it forgets, direction by direction.

A GRU learns to predict a chaotic series, the Henon map. An exponent is the mean logarithm by which
a small change of the state grows in a step (Benettin et al. 1980): vmap over jvp pushes all
directions through a few steps at once, by kernels, and QR makes them orthogonal again.
"""

import torch
from torch.func import jacrev, jvp, vmap

import pararnn

HIDDEN, STRETCH, STEPS = 8, 4, 512


def henon():
    """Return a series (1, STEPS + 1, 1) of the Henon map."""
    x, y, series = 0.1, 0.3, []
    for _ in range(STEPS + 1):
        x, y = 1 - 1.4 * x * x + y, 0.3 * x
        series.append(x)
    return torch.tensor(series, dtype=torch.float64).view(1, -1, 1)


def exponents(rnn, series):
    """Return the exponents (HIDDEN,) of a layer driven by a series (1, T, 1)."""
    h, basis = torch.zeros(1, 1, HIDDEN), torch.eye(HIDDEN)
    growth = torch.zeros(HIDDEN)
    for x in series.split(STRETCH, 1):
        along = vmap(lambda u, x=x, h=h: jvp(lambda h: rnn(x, h)[1].flatten(), (h,), (u,))[1])
        basis, scale = torch.linalg.qr(along(basis.T.view(HIDDEN, 1, 1, HIDDEN)).T)
        growth, h = growth + scale.diagonal().abs().log(), rnn(x, h)[1]
    return growth / series.shape[1]


def main():
    """Train; return the error of predictions, the exponents, and the mean of log|det J|."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    rnn, head = pararnn.GRU(1, HIDDEN, batch_first=True), torch.nn.Linear(HIDDEN, 1)
    optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=2e-2)
    series = henon()
    for _ in range(200):
        error = (head(rnn(series[:, :-1])[0]) - series[:, 1:]).square().mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    rnn.requires_grad_(False)
    found = exponents(rnn, series[:, :STEPS])
    h, total = torch.zeros(1, 1, HIDDEN), 0.0
    for x in series[:, :STEPS].split(1, 1):
        jacobian = jacrev(lambda h, x=x: rnn(x, h)[1].flatten())(h).view(HIDDEN, HIDDEN)
        total, h = total + jacobian.slogdet()[1].item() / STEPS, rnn(x, h)[1]
    torch.set_default_dtype(torch.float32)
    return error.item(), found, total


if __name__ == "__main__":
    print(main())
