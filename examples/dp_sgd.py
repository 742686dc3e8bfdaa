"""Training with differential privacy by opacus (`pip install opacus`), which clips the gradient of
each sample (Abadi et al. 2016). It finds them layer by layer: by `vmap` over `grad` for ours. The
task: in which half of a noisy sequence is the pulse?"""

import torch
from opacus.grad_sample import GradSampleModule, register_grad_sampler
from opacus.optimizers import DPOptimizer
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

import pararnn

STEPS, BATCH = 40, 256
PRIVATELY = {"noise_multiplier": 0.6, "max_grad_norm": 1.0, "expected_batch_size": BATCH}


class Net(torch.nn.Module):
    """A layer, and a linear readout of its last output; without one, the output."""

    def __init__(self, rnn, out=None):
        super().__init__()
        self.rnn, self.out = rnn, out

    def forward(self, x):
        # `forward` itself: no hooks of opacus inside of its hooks.
        return self.out(self.rnn(x)[0][:, -1]) if self.out else self.rnn.forward(x)[0]


@register_grad_sampler([pararnn.LSTM, pararnn.GRU, pararnn.RNN])
def gradients_of_samples(layer, inputs, grad_output):
    """Return the gradients of samples by weights; for batch_first=True, and final states unread."""
    weights = {f"rnn.{name}": weight.detach() for name, weight in layer.named_parameters()}

    def product(weights, x, grad_output):
        return (functional_call(Net(layer), weights, (x[None],)) * grad_output).sum()

    samples = vmap(grad(product), (None, 0, 0))(weights, inputs[0], grad_output)
    return dict(zip(layer.parameters(), samples.values(), strict=True))


def main(steps=150):
    """Train; return the share of right answers in the last ten batches, before they are learnt."""
    torch.manual_seed(0)
    net = Net(pararnn.LSTM(1, 32, batch_first=True), torch.nn.Linear(32, 2))
    net, right = GradSampleModule(net), []
    optimizer = DPOptimizer(torch.optim.Adam(net.parameters(), lr=1e-2), **PRIVATELY)
    for _ in range(steps):
        x, at = 0.1 * torch.randn(BATCH, STEPS, 1), torch.randint(STEPS, (BATCH,))
        x[torch.arange(BATCH), at] += 2
        scores, half = net(x), (at >= STEPS // 2).long()
        cross_entropy(scores, half).backward()
        optimizer.step()
        optimizer.zero_grad()
        right.append((scores.argmax(1) == half).float().mean().item())
    return sum(right[-10:]) / 10


if __name__ == "__main__":
    print(main())
