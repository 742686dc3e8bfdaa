"""A Wasserstein GAN of sine waves, whose critic is kept smooth by a penalty on its gradient.

The penalty (WGAN-GP, Gulrajani et al. 2017) takes second derivatives of a layer, by kernels.
"""

import torch

import pararnn

STEPS = 24


class Net(torch.nn.Module):
    """A recurrent layer and a linear readout of every step."""

    def __init__(self, inputs):
        super().__init__()
        self.rnn = pararnn.GRU(inputs, 32, batch_first=True)
        self.out = torch.nn.Linear(32, 1)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


def waves(size):
    """Sine waves (size, STEPS, 1) of random phase."""
    return torch.sin(6.283 * torch.rand(size, 1, 1) + 0.5 * torch.arange(STEPS)[:, None])


def slopes(critic, real, fake):
    """Norms (size,) of the critic's gradient between real and fake sequences."""
    share = torch.rand(len(real), 1, 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (grad,) = torch.autograd.grad(critic(between).mean(1).sum(), between, create_graph=True)
    return STEPS**0.5 * grad.flatten(1).norm(dim=1)


def main(steps=900):
    """Train; return correlations half a wave apart before and after, and the critic's slope."""
    torch.manual_seed(0)
    critic, maker = Net(1), Net(4)
    optimizers = [torch.optim.Adam(net.parameters(), 3e-3, (0.5, 0.9)) for net in (maker, critic)]
    correlations = []
    for step in range(steps):
        fake, real, of_critic = maker(torch.randn(64, STEPS, 4)), waves(64), step % 3 > 0
        pair = torch.stack([fake[:, :-6].flatten(), fake[:, 6:].flatten()])
        correlations.append(torch.corrcoef(pair)[0, 1].item())
        norms = slopes(critic, real, fake.detach())
        gap = critic(fake).mean() - critic(real).mean()
        loss = gap + 10 * (norms - 1).square().mean() if of_critic else -gap
        optimizers[of_critic].zero_grad()
        loss.backward()
        optimizers[of_critic].step()
    return correlations[0], correlations[-1], norms.mean().item()


if __name__ == "__main__":
    print(main())
