"""Meta-learning: weights from which one gradient step on a sequence fits the next one.

MAML (Finn et al. 2017) differentiates through the step: the gradient of a gradient. `vmap` adapts
to all tasks at once, by kernels that run weights of their own as heads. A task is a sine of random
amplitude, frequency and phase, whose next value is to be predicted.
"""

import torch
from torch.func import functional_call, grad, vmap
from torch.nn.functional import mse_loss

import pararnn

STEPS, TASKS, RATE = 40, 32, 0.2


class Net(torch.nn.Module):
    """A recurrent layer and a linear readout of each output."""

    def __init__(self):
        super().__init__()
        self.rnn, self.out = pararnn.GRU(1, 24, batch_first=True), torch.nn.Linear(24, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


def tasks(count):
    """Two stretches (count, STEPS + 1, 1) of each of `count` sines."""
    size, speed, phase = torch.rand(3, count, 1, 1)
    angle = (0.2 + 0.6 * speed) * torch.arange(2 * STEPS + 2.0).view(1, -1, 1) + 6.3 * phase
    return ((0.5 + 2 * size) * torch.sin(angle)).split(STEPS + 1, 1)


def main(steps=150):
    """Train; return the errors of new tasks before and after a step of adaptation."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def loss(weights, x):
        return mse_loss(functional_call(net, weights, (x[None, :-1],)), x[None, 1:])

    def adapted(weights, support, query):
        slopes = grad(loss)(weights, support)
        return loss({name: w - RATE * slopes[name] for name, w in weights.items()}, query)

    weights = dict(net.named_parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        vmap(adapted, (None, 0, 0))(weights, *tasks(TASKS)).mean().backward()
        optimizer.step()
    support, query = tasks(500)
    before = vmap(loss, (None, 0))(weights, query)
    return before.mean().item(), vmap(adapted, (None, 0, 0))(weights, support, query).mean().item()


if __name__ == "__main__":
    print(main())
