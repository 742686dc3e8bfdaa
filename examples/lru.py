"""A linear recurrent unit (LRU) by `pararnn.scan`: complex decays, and no loop over time.

Random bits go in, and at every step the model says which bit came 30 steps before. Half of its
guesses would be right by chance; 99% or more are. Then a row is read again in two chunks, the
second from the final states of the first: main() returns how far that is from one scan.
"""

import torch
from torch import nn

import pararnn

DELAY = 30


class LRU(nn.Module):
    """h_t = decay h_(t-1) + scale B x_t, and then y_t = x_t + GLU(C h_t), C of both parts."""

    def __init__(self, width, states):
        super().__init__()
        self.log_rate = nn.Parameter(torch.full((states,), -3.5))  # |decay| is exp(-exp(-3.5))
        self.angle = nn.Parameter(torch.linspace(0, torch.pi, states))
        self.into = nn.Linear(width, 2 * states, bias=False)
        self.out = nn.Linear(2 * states, 2 * width)

    def forward(self, x, state=None):
        size = torch.exp(-self.log_rate.exp())
        entering = torch.complex(*self.into(x).chunk(2, -1)) * (1 - size**2).sqrt()
        decay = torch.polar(size, self.angle)  # (states,): the same for all rows and steps
        h, state = pararnn.scan(decay, entering, state, return_final=True)
        return x + nn.functional.glu(self.out(torch.view_as_real(h).flatten(-2))), state


def main():
    """Train; return the accuracy on new bits, and how far chunks are from one scan."""
    torch.manual_seed(0)
    before, lru, head = nn.Linear(1, 16), LRU(16, 64), nn.Linear(16, 1)
    model = nn.ModuleList([before, lru, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(90):
        bits = torch.randint(2, (8, 150, 1)).float()
        scores = head(lru(before(2 * bits - 1))[0])[:, DELAY:]
        loss = nn.functional.binary_cross_entropy_with_logits(scores, bits[:, :-DELAY])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        bits = torch.randint(2, (8, 1000, 1)).float()
        y, _ = lru(x := before(2 * bits - 1))
        right = ((head(y)[:, DELAY:] > 0) == (bits[:, :-DELAY] > 0)).float().mean().item()
        first, state = lru(x[:, :300])
        gap = (torch.cat([first, lru(x[:, 300:], state)[0]], 1) - y).abs().max().item()
    print(f"accuracy {right:.2%}; two chunks differ from one scan by at most {gap:.1e}")
    return right, gap


if __name__ == "__main__":
    main()
