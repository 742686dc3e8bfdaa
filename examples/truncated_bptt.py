"""One very long sequence, trained in chunks: truncated backpropagation through time.

Rare pulses flip a switch, and the model says at every step which way it stands. The states go
from chunk to chunk, so what the model knows has no end. They go without their gradients, so
memory does not grow with the sequence. main() reaches an accuracy of 98% or better, and shows
that chunks give the same output as one run, and that the carried states are needed.
"""

import torch

import pararnn


def switch(steps):
    """Pulses (1, steps, 1), one in 50 steps, and where the switch stands (1, steps)."""
    pulses = torch.randint(0, 2, (1, steps)) * 2.0 - 1
    pulses *= torch.rand(1, steps) < 0.02
    pulses[:, 0] = 1
    last = torch.where(pulses != 0, torch.arange(steps), 0).cummax(1).values
    return pulses.unsqueeze(-1), (pulses.gather(1, last) > 0).float()


def in_chunks(rnn, x, size, carry=True):
    """Yield the output on each chunk of x; the states are carried over without their gradients."""
    state = None
    for chunk in x.split(size, dim=1):
        output, (h, c) = rnn(chunk, state)
        state = (h.detach(), c.detach()) if carry else None
        yield output


def main():
    """Return the accuracy, that without carrying states, and how far chunks are from one run."""
    torch.manual_seed(0)
    rnn, head = pararnn.ParaLSTM(1, 16, num_layers=2), torch.nn.Linear(16, 1)
    optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], lr=1e-2)
    pararnn.clip_after_step(optimizer, rnn)
    x, target = switch(200_000)
    for output, wanted in zip(in_chunks(rnn, x, 200), target.split(200, dim=1), strict=True):
        scores = head(output).squeeze(-1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, target = switch(20_000)
    with torch.no_grad():
        whole, _ = rnn(x)
        carried, fresh = (torch.cat([*in_chunks(rnn, x, 200, carry)], 1) for carry in (True, False))
        gap = (whole - carried).abs().max().item()
        right = [
            ((head(y) > 0).squeeze(-1) == target).float().mean().item() for y in (carried, fresh)
        ]
    print(f"accuracy {right[0]:.1%}, without carrying states {right[1]:.1%}")
    print(f"chunks differ from the whole run by at most {gap:.1e}")
    return *right, gap


if __name__ == "__main__":
    main()
