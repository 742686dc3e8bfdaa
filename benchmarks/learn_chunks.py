"""Training of the 60M model of the gated delta rule, its layers by chunks and by our loop.

The model, the step and its graph are those of learn.py, whose tokens/s are in learn_speed.csv;
tokens are random. Each way trains the given steps, and both take turns. Writes
results/learn_chunks.csv.

    python benchmarks/learn_chunks.py [--mixer NAME] [--size 60M] [--steps 8] [--turns 5]
"""

from __future__ import annotations

import argparse
import statistics

import torch
from common import Record, new_parser, provenance
from learn_models import MIXERS, SIZES, TINY, VOCABULARY, models
from learn_run import Corpus, Row, Shape, Trainee

from pararnn.lm import set_solver

PAIRS = {
    "cuda": [("chunks", "fused"), ("sequential", "fused")],
    "cpu": [("chunks", "torch"), ("sequential", "torch")],
}
"""By the device's type."""


def random_corpus(shape: Shape, device: torch.device) -> Corpus:
    """Return random tokens: a hundred steps, and one to hold out."""
    torch.manual_seed(0)
    low, counts = (50 if device.type == "cpu" else VOCABULARY), (100 * shape.tokens, shape.tokens)
    train, valid = (torch.randint(low, (n,), dtype=torch.int32, device=device) for n in counts)
    return Corpus("random", train, valid, 1)


def new_trainee(
    args: argparse.Namespace, pair: tuple[str, str], device: torch.device, corpus: Corpus
) -> Trainee:
    """Return the model by a pair, compiled."""
    size = TINY if device.type == "cpu" else SIZES[args.size]
    make = models(size, device.type)[args.mixer]
    trainee = Trainee(make, device, args.shape)
    set_solver(trainee.model, *pair)
    trainee.compile(corpus)
    return trainee


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--mixer", default="gated-delta", choices=MIXERS)
    parser.add_argument("--size", default="60M", choices=list(SIZES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--device", default="cuda", help="cpu: to try it out with a tiny model")
    args = parser.parse_args()
    device = torch.device(args.device)
    args.shape = Shape(16, 2048) if device.type == "cuda" else Shape(2, 16)
    corpus = random_corpus(args.shape, device)
    rates: dict[tuple[str, str], list[float]] = {}
    trainees = {pair: new_trainee(args, pair, device, corpus) for pair in PAIRS[device.type]}
    for _ in range(args.turns):
        for pair, trainee in trainees.items():
            rates.setdefault(pair, []).append(trainee.speed(corpus, args.steps)[0])
            print(f"{'/'.join(pair)}: {rates[pair][-1]:,.0f} tokens/s", flush=True)
    file = f"learn_chunks{'' if device.type == 'cuda' else '_cpu'}.csv"
    record = Record(args.out / file, provenance(device))
    for (solver, backend), speeds in rates.items():
        row: Row = {"mixer": args.mixer, "size": args.size, "solver": solver, "backend": backend}
        row |= {"B": args.shape.rows, "T": args.shape.length, "steps": args.steps}
        row |= {"turns": args.turns, "tokens_per_s": round(statistics.median(speeds))}
        record.add(row | {"most_tokens_per_s": round(max(speeds))})


if __name__ == "__main__":
    main()
