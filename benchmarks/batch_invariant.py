"""What `LMConfig(batch_invariant=True)` costs, next to the same without it, in bfloat16.

"train": a step of the paper's models as in `lm_step.py`, every block compiled by itself. "decode":
a token, the step recorded as a CUDA graph of calls, as in `lm_decode.py`. "product": PyTorch's
product of N rows and `rows_product`'s, by CUDA graphs; "tile", on request: the same by candidates
for the tiles of `pararnn.lm.rows_kernels`. ratio: the option's median over that without it,
measured in turns on the same machine. equal: the part of a product's results that have the bits of
PyTorch's. Puts its rows into results/batch_invariant.csv; those of other cases stay.

    python benchmarks/batch_invariant.py [--what train decode product tile] [--only gru-400M]
        [--length 2048] [--repeats 10] [--out FOLDER] [--smoke]
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import lm_decode
import lm_step
import torch
from lm_command import chosen, device_of, parser_of, record_of
from protocol import call_times, captured_graph

from pararnn.lm import LanguageModel, LMConfig, preset
from pararnn.lm.rows_op import rows_product

KEYS = ("device", "what", "case", "B", "size")
"""Columns that identify a case."""
SIZES = ((1024, 1024), (1024, 2816), (2048, 2048), (2048, 5632), (5632, 2048), (2048, 50_432))
ROWS = (1, 16, 64, 256, 1024, 4096, 16_384)
CANDIDATES = {
    1: [(64, 16, 4, 4), (64, 16, 4, 6), (64, 16, 4, 8), (64, 32, 4, 6)],
    256: [(64, 32, 4, 6), (64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 4), (128, 64, 8, 4)],
    1024: [(128, 64, 8, 4), (128, 128, 4, 4), (128, 128, 8, 4), (64, 256, 4, 4)],
    16_384: [(128, 128, 8, 4), (128, 256, 8, 3), (128, 256, 8, 4), (256, 128, 8, 3)],
}
"""Tiles by a number of rows: rows, lines, warps and stages."""


class Case(NamedTuple):
    """What is measured, its name, a model's config, the rows of a batch, and a size: tokens of a
    row, or inputs and outputs of a product. tile: rows, lines, warps and stages of a program."""

    what: str
    name: str
    config: LMConfig | None
    batch: int
    size: tuple[int, ...]
    tile: tuple[int, int, int, int] | None = None


def cases(length: int) -> list[Case]:
    every = []
    for scale, tokens in lm_step.TOKENS.items():
        config = preset("gru", scale).model
        assert isinstance(config, LMConfig)
        every.append(Case("train", f"gru-{scale}", config, max(1, tokens // length), (length,)))
        every += [Case("decode", f"gru-{scale}", config, batch, (2048,)) for batch in (1, 16, 64)]
    every += [Case("product", "product", None, rows, size) for size in SIZES for rows in ROWS]
    return every + [
        Case("tile", f"tile {'x'.join(map(str, tile))}", None, rows, size, tile)
        for rows, tiles in CANDIDATES.items()
        for size, tile in itertools.product(SIZES[2:4], tiles)
    ]


def smoke_cases() -> list[Case]:
    config = LMConfig(16, 2, vocab_size=50)
    tiny = [Case(what, "gru-tiny", config, 2, (32,)) for what in ("train", "decode")]
    return [*tiny, Case("product", "product", None, 3, (16, 24))]


Times = Callable[[bool], list[float]]
"""Function that measures, with the option or without: ms of each repetition."""


def train(case: Case, device: torch.device, repeats: int) -> Times:
    """Return the function that times a training step."""

    def times(invariant: bool) -> list[float]:
        assert case.config is not None
        config = dataclasses.replace(case.config, batch_invariant=invariant)
        of_step = lm_step.Case(case.name, config, case.batch, case.size[0])
        model = lm_step.fresh(of_step, device)
        if device.type == "cuda":
            lm_step.compile_blocks(model)
        return lm_step.step_times(model, of_step, device, 5, repeats)

    return times


def decode(case: Case, device: torch.device, repeats: int) -> Times:
    """Return the function that times a token."""

    def times(invariant: bool) -> list[float]:
        assert case.config is not None
        config = dataclasses.replace(case.config, batch_invariant=invariant)
        torch.manual_seed(0)
        model = LanguageModel(config, device=device, dtype=torch.bfloat16).eval()
        of_token = lm_decode.Case(case.name, config, lm_decode.RECORDED, case.batch, case.size[0])
        step = lm_decode.step_of(model, of_token, lm_decode.cache_of(model, of_token))
        if device.type == "cuda":
            step = captured_graph([step]).replay
        return call_times(step, device, 100 if device.type == "cuda" else 2, repeats)

    return times


def multiply(case: Case, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return our product of rows (N, I) and a weight (O, I), by a case's tile if it has one."""
    if case.tile is None:
        return rows_product(x.unsqueeze(1), weight.unsqueeze(0))[0]
    from pararnn.lm.rows_kernels import Tile, product

    return product(x.unsqueeze(1), weight.unsqueeze(0), tile=Tile(*case.tile))[0]


def product(case: Case, device: torch.device, repeats: int) -> Times:
    """Return the function that times a product."""
    inputs, outputs = case.size
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    x, weight = torch.randn(case.batch, inputs, **options), torch.randn(outputs, inputs, **options)

    def times(invariant: bool) -> list[float]:
        def call() -> None:
            if invariant:
                multiply(case, x, weight)
            else:
                torch.nn.functional.linear(x, weight)

        run = captured_graph([call]).replay if device.type == "cuda" else call
        return call_times(run, device, 50 if device.type == "cuda" else 2, repeats)

    return times


WHAT: dict[str, Callable[[Case, torch.device, int], Times]] = {
    "train": train,
    "decode": decode,
    "product": product,
    "tile": product,
}


def measure(case: Case, device: torch.device, repeats: int) -> dict[str, Any]:
    """Return a case's row: both ways twice, in turns."""
    times = WHAT[case.what](case, device, repeats)
    measured: dict[bool, list[float]] = {False: [], True: []}
    for invariant in (False, True, True, False):
        with torch.set_grad_enabled(case.what == "train"):
            measured[invariant] += times(invariant)
        gc.collect()
    plain, ours = (statistics.median(measured[flag]) for flag in (False, True))
    row = {
        "what": case.what,
        "case": case.name,
        "B": case.batch,
        "size": "x".join(map(str, case.size)),
        "repeats": 2 * repeats,
        "plain_ms": round(plain, 4),
        "invariant_ms": round(ours, 4),
        "ratio": round(ours / plain, 3),
        "tflops": "",
        "equal": "",
    }
    if case.what in ("product", "tile"):
        inputs, outputs = case.size
        row["tflops"] = round(2 * case.batch * inputs * outputs / ours / 1e9, 1)
        row["equal"] = share_of_equal(case, device)
    return row


def share_of_equal(case: Case, device: torch.device) -> float:
    """Return how many of a product's results have the bits of PyTorch's."""
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    x, weight = (torch.randn(n, case.size[0], **options) for n in (case.batch, case.size[1]))
    ours = multiply(case, x, weight)
    return round((ours == torch.nn.functional.linear(x, weight)).double().mean().item(), 6)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--what", nargs="+", choices=list(WHAT), default=[*WHAT][:3])
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row in training")
    parser.add_argument("--repeats", type=int, default=10, help="of each of two turns")
    args = parser.parse_args()
    every = smoke_cases() if args.smoke else cases(args.length)
    selection = chosen(
        parser, args, every, lambda case: case.name, lambda case: case.what in args.what
    )
    record = record_of(args, "batch_invariant.csv", KEYS)
    for case in selection:
        record.add(measure(case, device_of(args), args.repeats))
    record.end()


if __name__ == "__main__":
    main()
