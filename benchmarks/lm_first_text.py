"""Cost of a first text: ms of each token while a cache meets every length for the first time.

The paper's 1B Transformer, called eagerly in bfloat16, a row of one sequence, the likeliest token
each time; the GPU ends a token before the next one begins. Two texts of each choice of attention's
kernels: "any length", as the library chooses with a cache, and "PyTorch's", its own choice, which
on Hopper is cuDNN's. Puts its rows into results/lm_first_text.csv.

    python benchmarks/lm_first_text.py [--tokens 700] [--out FOLDER]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from lm_command import chosen, device_of, parser_of, record_of
from lm_step import smoke_cases
from mamba2 import language_model
from protocol import wall_ms

from pararnn.lm import LanguageModel, preset

FILE = "lm_first_text.csv"
KEYS = ("device", "model", "kernels", "text", "tokens")
"""Columns that identify a case."""
CHOICES = ("any length", "PyTorch's")


def choice(name: str) -> AbstractContextManager[Any]:
    """Return the library as it is, or without its choice of kernels."""
    own = patch("pararnn.lm.backbone.without_plans", nullcontext)
    return nullcontext() if name == CHOICES[0] else own


@torch.no_grad()
def token_times(model: LanguageModel, count: int) -> Iterator[float]:
    """Yield the ms of each token."""
    device = model.lm_head.weight.device
    tokens, cache = torch.zeros(1, 1, dtype=torch.long, device=device), model.new_cache()

    def step() -> None:
        logits = model.lm_head(model.hidden(tokens, cache)[:, -1])
        tokens.copy_(logits.argmax(-1, keepdim=True))

    for _ in range(count):
        yield wall_ms(step, device)


def rows(model: LanguageModel, count: int) -> Iterator[dict[str, Any]]:
    """Yield two texts of each choice; a few untimed tokens come first, as kernels load."""
    for name in CHOICES:
        with choice(name):
            list(token_times(model, 4))
            for text in (1, 2):
                times = list(token_times(model, count))
                yield {
                    "kernels": name,
                    "text": text,
                    "tokens": count,
                    "seconds": round(sum(times) / 1e3, 2),
                    "median_ms": round(median(times), 2),
                    "max_ms": round(max(times), 2),
                }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=700, help="of each text")
    args = parser.parse_args()
    paper = preset("transformer", "1B")
    every = [(paper.name, paper.model)]
    tiny = [(c.name, c.config) for c in smoke_cases() if c.name.startswith("transformer")]
    record = record_of(args, FILE, KEYS)
    for name, config in chosen(parser, args, tiny[:1] if args.smoke else every, lambda c: c[0]):
        torch.manual_seed(0)
        model = language_model(config, device=device_of(args), dtype=torch.bfloat16).eval()
        for row in rows(model, args.tokens):
            record.add({"model": name, **row})
    record.end()


if __name__ == "__main__":
    main()
