"""Small models whose cells remember from the start, next to cells as they are, on one core.

A forget gate without a bias is near 0.5 at first, and what it forgets in two steps has no gradient
to tell that it is worth keeping. Small models of bytes learn Python's standard library with cells
as they are, and with forget gates whose biases are drawn around 3, so that heads remember 2 to 500
steps. A file in ten is held out. Writes learn_forgetting.csv, a row for each validation; trainings
that are there are not run again.

    python benchmarks/learn_forgetting.py [--mixers m2rnn m2rnn-long] [--rates 2e-3 4e-3]
"""

from __future__ import annotations

import hashlib
import itertools
import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import Record, new_parser, provenance, read_rows
from learn_models import body_size
from torch import Tensor

from pararnn.lab.train.config import OptimiserConfig
from pararnn.lab.train.optimiser import make_adamw, set_rate
from pararnn.lab.train.sharding import clip_gradients
from pararnn.lm import LanguageModel, LMConfig

WIDTH, BLOCKS, HEADS, KEYS = 128, 2, 4, 16
ROWS, LENGTH, STEPS, VALIDATIONS, VALID_ROWS = 4, 256, 400, 4, 64
HELD_OUT = 10
KEY = ("mixer", "rate", "seed", "step")


def matrix(cell: str) -> dict[str, Any]:
    """Return the options of a matrix cell."""
    return {"mixers": ("matrix",) * BLOCKS, "cell": cell, "cell_config": {"K": KEYS}}


MIXERS: dict[str, dict[str, Any]] = {
    "gru": {"cell": "gru"},
    "head-lstm": {"cell": "head-lstm"},
    "head-lstm-long": {"cell": "learn_mixers:LongHeadLSTM"},
    "m2rnn": matrix("m2rnn"),
    "m2rnn-long": matrix("learn_mixers:LongM2RNN"),
    "gated-delta": matrix("gated-delta"),
    "gated-delta-long": matrix("learn_mixers:LongGatedDelta"),
}
"""Options of `LMConfig`, by name."""


def text() -> tuple[Tensor, Tensor]:
    """Return the bytes of the standard library's modules, those to learn and those held out."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        place = int(hashlib.sha256(path.name.encode()).hexdigest(), 16)
        parts[place % HELD_OUT == 0].append(path.read_bytes())
    learn_text, valid_text = (
        torch.frombuffer(bytearray(b"".join(p)), dtype=torch.uint8) for p in parts
    )
    return learn_text, valid_text


def batches(data: Tensor, seed: int) -> Iterator[Tensor]:
    """Yield rows that begin anywhere, (ROWS, LENGTH), the same for all mixers."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(data) - LENGTH, (ROWS,), generator=generator)
        yield torch.stack([data[start : start + LENGTH] for start in starts.tolist()]).long()


@torch.no_grad()
def bits(model: LanguageModel, data: Tensor) -> float:
    """Return the mean bits for a byte of rows held out."""
    step = (len(data) - LENGTH) // VALID_ROWS
    rows = torch.stack([data[n * step : n * step + LENGTH] for n in range(VALID_ROWS)]).long()
    losses = [float(model.loss(part)) for part in rows.split(ROWS)]
    return sum(losses) / len(losses) / math.log(2)


def train(
    mixer: str, rate: float, seed: int, learn_text: Tensor, valid_text: Tensor
) -> Iterator[Any]:
    """Train, and yield a row for each validation."""
    torch.manual_seed(seed)
    config = LMConfig(WIDTH, BLOCKS, 256, num_heads=HEADS, **MIXERS[mixer])
    model = LanguageModel(config)
    optimiser = OptimiserConfig(learning_rate=rate)
    optimizer = make_adamw(model, optimiser)
    source, seconds = batches(learn_text, seed), 0.0
    for step in range(1, STEPS + 1):
        begin = time.perf_counter()
        set_rate(optimizer, optimiser, step - 1, STEPS)
        model.loss(next(source), z_loss=optimiser.z_loss).backward()
        clip_gradients(list(model.parameters()), optimiser.grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.perf_counter() - begin
        if step % (STEPS // VALIDATIONS) == 0:
            yield {
                "mixer": mixer,
                "parameters": body_size(model),
                "rate": rate,
                "seed": seed,
                "B": ROWS,
                "T": LENGTH,
                "steps": STEPS,
                "step": step,
                "bytes": step * ROWS * LENGTH,
                "bits_per_byte": round(bits(model, valid_text), 5),
                "seconds": round(seconds, 2),
            }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--mixers", nargs="+", default=list(MIXERS), choices=list(MIXERS))
    parser.add_argument("--rates", nargs="+", type=float, default=[4e-3])
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    path = args.out / "learn_forgetting.csv"
    old = read_rows(path) if path.exists() else []
    whole = {(r["mixer"], float(r["rate"]), int(r["seed"])) for r in old if r["step"] == r["steps"]}
    parts, record = text(), Record(path, provenance(), KEY)
    for case in itertools.product(args.mixers, args.rates, range(args.seeds)):
        if case not in whole:
            for row in train(*case, *parts):
                record.add(row)


if __name__ == "__main__":
    main()
