"""A world model, DreamerV3's, of a room in pixels: what will be where after one to ten moves?

An agent walks through 5 x 5 cells, a ball rolls to and fro: no single picture shows which way.
Predictions from moves alone have both in the right cells in over 90%; the last picture in 3%.
"""

import torch
import torch.nn.functional as F

import pararnn

SIDE, WATCHED = 5, 12
WAYS, CELL = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]]), torch.tensor([SIDE, 1])


def episodes(count):
    """Return pictures (B, T, 2, 25), of agent and ball, and the moves (B, T, 4) before them."""
    moves, place = torch.randint(0, 4, (22, count)), torch.randint(0, SIDE, (count, 2))
    row, phase = torch.randint(0, SIDE, (count,)), torch.randint(0, 8, (count,))
    pictures = []
    for move in moves:
        place, phase = (place + WAYS[move]).clamp(0, SIDE - 1), (phase + 1) % 8
        cells = torch.stack([place @ CELL, row * SIDE + torch.minimum(phase, 8 - phase)], 1)
        pictures.append(F.one_hot(cells, SIDE**2).float())
    return torch.stack(pictures, 1), F.one_hot(moves.T, 4).float()


def main(steps=1000, width=96):
    """Return the fraction of right pictures: of the model's, and of the last one watched."""
    torch.manual_seed(0)
    rssm = pararnn.RSSM(4, width, width, width, num_categoricals=12, num_classes=8, num_blocks=4)
    see = torch.nn.Sequential(torch.nn.Linear(50, width), torch.nn.SiLU())
    layers = torch.nn.Linear(2 * width, width), torch.nn.SiLU(), torch.nn.Linear(width, 50)
    model = torch.nn.ModuleList([rssm, see, draw := torch.nn.Sequential(*layers)])
    optimizer = torch.optim.Adam(model.parameters())
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
    picture = lambda x: draw(torch.cat([x.belief, x.state], -1)).unflatten(-1, (2, 25))  # noqa: E731
    for _ in range(steps):
        pictures, moves = episodes(32)
        output, _ = rssm(moves, see(pictures.flatten(2)))
        (of_prior, of_posterior), drawn = output.divergences(), picture(output).log_softmax(-1)
        optimizer.zero_grad()
        (of_prior + 0.1 * of_posterior - (drawn * pictures).sum((-1, -2))).mean().backward()
        optimizer.step()
        rate.step()
    with torch.no_grad():
        pictures, moves = episodes(500)
        seen, later = pictures[:, :WATCHED], pictures[:, WATCHED:].argmax(-1)
        _, now = rssm(moves[:, :WATCHED], see(seen.flatten(2)))
        coming, calm = iter(moves[:, WATCHED:].unbind(1)), torch.zeros(500, 10, 12, 8)
        dream = rssm.imagine(now, lambda *_: next(coming), 10, noise=calm)  # the likeliest
    guesses = picture(dream).argmax(-1), seen[:, -1:].argmax(-1)
    right, still = ((guess == later).all(-1).float().mean().item() for guess in guesses)
    print(f"right pictures, 1 to 10 moves ahead: {right:.1%}; if the last one stays, {still:.1%}")
    return right, still


if __name__ == "__main__":
    main()
