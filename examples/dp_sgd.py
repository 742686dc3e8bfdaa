"""Training with differential privacy: each sample's gradient is clipped before they are summed.

DP-SGD (Abadi et al. 2016) needs the gradient of every sample; `vmap` over `grad` gives all of them
in one pass of kernels. The task: in which half of a noisy sequence is the pulse?
"""

import torch
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

import pararnn

BOUND, NOISE, STEPS, BATCH = 1.0, 0.6, 40, 256


class Net(torch.nn.Module):
    """A recurrent layer and a linear readout of its last output."""

    def __init__(self):
        super().__init__()
        self.rnn, self.out = pararnn.LSTM(1, 32, batch_first=True), torch.nn.Linear(32, 2)

    def forward(self, x):
        return self.out(self.rnn(x)[0][:, -1])


def batch(size):
    """Sequences (size, STEPS, 1) and the half, 0 or 1, that holds the pulse."""
    at = torch.randint(STEPS, (size,))
    x = 0.1 * torch.randn(size, STEPS)
    x[torch.arange(size), at] += 2
    return x.unsqueeze(-1), (at >= STEPS // 2).long()


def main(steps=150):
    """Train; return the share of right answers on new sequences."""
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)

    def loss(weights, x, label):
        return cross_entropy(functional_call(net, weights, (x[None],)), label[None])

    for _ in range(steps):
        weights = {name: weight.detach() for name, weight in net.named_parameters()}
        samples = vmap(grad(loss), (None, 0, 0))(weights, *batch(BATCH))
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in samples.values()]).norm(dim=0)
        shares = (BOUND / norms).clamp(max=1)
        for name, weight in net.named_parameters():
            clipped = torch.tensordot(shares, samples[name], 1)
            weight.grad = (clipped + NOISE * BOUND * torch.randn_like(weight)) / BATCH
        optimizer.step()
    x, target = batch(1000)
    return (net(x).argmax(1) == target).float().mean().item()


if __name__ == "__main__":
    print(main())
