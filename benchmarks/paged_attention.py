"""Time of attention from one token a row to keys in pages, as decoding steps launch it.

Ways: "few", the blocks of few queries that steps take; "by rows", with the bits of
`batch_invariant`; "whole", PyTorch's scaled_dot_product_attention of keys in one piece; "copy", a
copy of as many bytes. Shapes: heads of a size, rows and the tokens of each. Layers follow one
another in a CUDA graph, as many as exceed the cache; times are of one. `share` is that of the
copy's bandwidth. Puts its rows into results/paged_attention.csv.

    python benchmarks/paged_attention.py [--only 16x128] [--out FOLDER] [--smoke]
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from lm_command import chosen, device_of, parser_of, record_of
from protocol import Call, captured_graph, run_times

from pararnn.lm.pages import LinePlaces
from pararnn.lm.rows_op import paged_attention

PER_CHAIN = 400_000_000
"""Least bytes of all layers' keys and values, several times the cache."""
MOST_LAYERS = 32
KEYS = ("device", "heads", "size", "B", "tokens", "way")
"""Columns that identify a case."""


class Case(NamedTuple):
    """Heads, numbers of each, rows and tokens of a row."""

    heads: int
    size: int
    batch: int
    tokens: int

    @property
    def name(self) -> str:
        return "x".join(map(str, self))

    @property
    def bytes(self) -> int:
        """Of a layer's keys and values."""
        return 4 * math.prod(self)


CASES = [
    *(Case(16, 128, 1, tokens) for tokens in (2_048, 32_768, 131_072)),
    Case(16, 128, 16, 8_192),
    Case(6, 64, 1, 2_048),
    Case(6, 64, 64, 2_048),
]
SMOKE = [Case(2, 16, 2, 100)]

Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries (B, H, 1, D), and keys and values, in one piece or in pages."""


def layers_of(case: Case, places: LinePlaces, device: torch.device) -> dict[str, list[Layer]]:
    """Return layers with keys in one piece, and with the same in pages."""
    count = min(MOST_LAYERS, -(-PER_CHAIN // case.bytes))

    def numbers(tokens: int) -> torch.Tensor:
        size = case.batch, case.heads, tokens, case.size
        return torch.randn(size, device=device).bfloat16()

    whole = [(numbers(1), numbers(case.tokens), numbers(case.tokens)) for _ in range(count)]
    paged = [(q, places.paged(k), places.paged(v)) for q, k, v in whole]
    return {"whole": whole, "pages": paged}


def calls_of(case: Case, device: torch.device) -> dict[str, list[Call]]:
    """Return the calls of a step by way, one a layer."""
    places = LinePlaces(case.batch, case.tokens, 0, device)
    last = torch.full((case.batch, 1), case.tokens - 1, device=device)
    layers = layers_of(case, places, device)

    def paged(by_rows: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
        return paged_attention(q, k, v, places.table, last, by_rows)

    def copied(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
        return k.clone()  # reads k and writes as much

    ways: dict[str, tuple[Callable[..., object], str]] = {
        "few": (partial(paged, False), "pages"),
        "by rows": (partial(paged, True), "pages"),
        "whole": (F.scaled_dot_product_attention, "whole"),
        "copy": (copied, "whole"),
    }
    return {way: [partial(f, *layer) for layer in layers[at]] for way, (f, at) in ways.items()}


def measure(case: Case, device: torch.device) -> list[dict[str, Any]]:
    """Return the rows of a case."""
    medians: dict[str, float] = {}
    least: dict[str, float] = {}
    for way, calls in calls_of(case, device).items():

        def run(calls: list[Call] = calls) -> None:
            for call in calls:
                call()

        step = captured_graph(calls).replay if device.type == "cuda" else run
        times = [1e3 * ms / len(calls) for ms in run_times(step, device, 100)]
        medians[way], least[way] = statistics.median(times), min(times)
    about = {"heads": case.heads, "size": case.size, "B": case.batch, "tokens": case.tokens}
    return [
        {
            **about,
            "way": way,
            "median_us": round(median, 2),
            "min_us": round(least[way], 2),
            "share": round(medians["copy"] / median, 3),
        }
        for way, median in medians.items()
    ]


def main() -> None:
    parser = parser_of(__doc__)
    args = parser.parse_args()
    device = device_of(args)
    cases = chosen(parser, args, SMOKE if args.smoke else CASES, lambda case: case.name)
    record = record_of(args, "paged_attention.csv", KEYS)
    for row in itertools.chain.from_iterable(measure(case, device) for case in cases):
        record.add(row)
    record.end()


if __name__ == "__main__":
    with torch.no_grad():
        main()
