"""LoRA: adapt a trained layer to a shifted task by a few numbers.

Two layers learn to predict the next value of slow waves, and fail on fast ones. A LoRA adapter on
their projections, trained alone, mends that. Merged at the end it costs nothing. Needs peft.
"""

import torch
from peft import LoraConfig, get_peft_model

import pararnn


class Forecaster(torch.nn.Module):
    """The next value at each step, (B, T, 1) to (B, T, 1)."""

    def __init__(self, hidden=32):
        super().__init__()
        self.rnn = pararnn.ParaGRU(1, hidden, num_layers=2)
        self.head = torch.nn.Linear(hidden, 1)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def loss_on(model, low, high, size=32, steps=100):
    """Return the model's squared error on new waves with frequencies from low to high."""
    frequency, phase = low + (high - low) * torch.rand(size, 1), 6.3 * torch.rand(size, 1)
    waves = torch.sin(frequency * torch.arange(steps + 1) + phase).unsqueeze(-1)
    return (model(waves[:, :-1]) - waves[:, 1:]).square().mean()


def train(model, low, high, steps=200):
    """Train the parameters that are trainable."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_on(model, low, high).backward()
        optimizer.step()


def main():
    """Return the losses on the new task before and after, and how merging changes the output."""
    torch.manual_seed(0)
    model, x = Forecaster(), torch.randn(2, 50, 1)
    train(model, 0.1, 0.5)
    before = loss_on(model, 0.8, 1.2, size=500).item()
    adapter = LoraConfig(r=4, target_modules=[], target_parameters=["proj.weight"])
    adapted = get_peft_model(model, adapter)
    trained, total = adapted.get_nb_trainable_parameters()
    train(adapted, 0.8, 1.2)
    after, output = loss_on(adapted, 0.8, 1.2, size=500).item(), adapted(x)
    change = (adapted.merge_and_unload()(x) - output).abs().max().item()
    print(f"{trained} of {total} parameters trained: loss {before:.4f} -> {after:.4f}")
    print(f"merging changes the output by at most {change:.1e}")
    return before, after, change


if __name__ == "__main__":
    main()
