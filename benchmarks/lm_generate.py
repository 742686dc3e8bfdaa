"""The paper's Figure 3: tokens/s of generating so many tokens, by its 1B models, not compiled.

Its protocol: `timeit`, the least of 5 repetitions, a row of one sequence. Generation begins with a
single token and takes the likeliest one each time, in bfloat16. "cache": `pararnn.lm.sample`; each
token is read once, and recurrent states, or keys and values, are kept. Steps of models without
attention are recorded and replayed, anew in every repetition; those of others are called. "no
cache": the Transformer reads all tokens again for each new one. Where the seconds of a curve do not
reach 5 repetitions of all lengths, the longer ones have fewer, or none, which `repeats` says: one
of each length comes first. A whole curve of 1 to 2,048 takes some minutes a model: `--seconds 600`.
Puts its rows into results/lm_generate.csv; `--plot` draws lm_generate.png from that alone.

    python benchmarks/lm_generate.py [--only gru] [--ways cache] [--seconds 10] [--out FOLDER]
    python benchmarks/lm_generate.py --plot
"""

from __future__ import annotations

import gc
import itertools
import timeit
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import RESULTS, read_rows
from lm_command import Record, chosen, device_of, draw, parser_of
from lm_step import ARCHITECTURES, smoke_cases
from mamba2 import Sizes, language_model, ready_to_decode

from pararnn.extras import require
from pararnn.lm import LanguageModel, preset, sample
from pararnn.lm.config import LMConfig

SCALE = "1B"
LENGTHS = tuple(2**power for power in range(12))
REPEATS = 5
FILE = "lm_generate.csv"
KEYS = ("device", "model", "way", "tokens")
"""What tells cases apart."""


class Case(NamedTuple):
    """What generates."""

    name: str
    config: LMConfig | Sizes


def cases() -> list[Case]:
    """The paper's models."""
    found = [preset(architecture, SCALE) for architecture in ARCHITECTURES]
    return [Case(each.name, each.model) for each in found]


def with_cache(model: LanguageModel, length: int) -> torch.Tensor:
    """The likeliest tokens after the first one."""
    first = torch.zeros(1, 1, dtype=torch.long, device=model.lm_head.weight.device)
    return sample(model, first, length, temperature=0)


@torch.no_grad()
def without_cache(model: LanguageModel, length: int) -> torch.Tensor:
    """The same, by reading all tokens anew for each."""
    tokens = torch.zeros(1, 1, dtype=torch.long, device=model.lm_head.weight.device)
    for _ in range(length):
        logits = model.lm_head(model.hidden(tokens)[:, -1])
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
    return tokens[:, 1:]


WAYS: dict[str, Callable[[LanguageModel, int], torch.Tensor]] = {
    "cache": with_cache,
    "no cache": without_cache,
}


def curve(
    model: LanguageModel, way: str, lengths: tuple[int, ...], seconds: float
) -> Iterator[dict[str, Any]]:
    """Rows by length, as far as the seconds reach."""
    device = model.lm_head.weight.device

    def generate(length: int) -> None:
        WAYS[way](model, length)
        if device.type == "cuda":
            torch.cuda.synchronize()

    for length in (1, 2):  # not timed: first calls make kernels
        generate(length)
    least = timeit.timeit(partial(generate, 1), number=1)
    known, left = 1, seconds
    for place, length in enumerate(lengths):
        costs = [least * each / known for each in lengths[place:]]
        once = max((total for total in itertools.accumulate(costs) if total <= left), default=0.0)
        repeats = min(REPEATS, 1 + int((left - once) / costs[0]))
        if not once:
            skipped = ", ".join(str(each) for each in lengths if each >= length)
            print(f"{way}: {seconds:g} s do not reach lengths {skipped}", flush=True)
            return
        times = timeit.repeat(partial(generate, length), number=1, repeat=repeats)
        least, known, left = min(times), length, left - sum(times)
        yield {
            "way": way,
            "tokens": length,
            "repeats": repeats,
            "least_s": round(least, 5),
            "tokens_per_s": round(length / least, 2),
        }


def ways_of(case: Case, asked: Sequence[str]) -> list[str]:
    """All that are asked for; but a recurrent model has no reason to read again."""
    both = case.name.startswith("transformer")
    return [way for way in asked if both or way == "cache"]


def plot(path: Path) -> None:
    """A picture of a result file, beside it."""
    figure = require("matplotlib.figure").Figure(figsize=(6, 4), layout="constrained")
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in read_rows(path):
        several = row["model"].startswith("transformer")
        name = f"{row['model']}, {row['way']}" if several else row["model"]
        curves.setdefault(name, []).append((int(row["tokens"]), float(row["tokens_per_s"])))
    draw(figure.subplots(), curves, "generated tokens", "tokens/s")
    figure.savefig(path.with_suffix(".png"), dpi=150)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seconds", type=float, default=10.0, help="of a model and a way")
    parser.add_argument("--plot", action="store_true", help="draw what was measured")
    args = parser.parse_args()
    if args.plot:
        plot((args.out or RESULTS) / FILE)
        return
    tiny = [Case(case.name, case.config) for case in smoke_cases() if not case.packed]
    asked = chosen(parser, args, tiny if args.smoke else cases(), lambda case: case.name)
    record = Record(args, FILE, KEYS)
    for case in asked:
        gc.collect()
        torch.manual_seed(0)
        model = language_model(case.config, device=device_of(args), dtype=torch.bfloat16).eval()
        ready_to_decode(model)
        for way in ways_of(case, args.ways):
            for found in curve(model, way, tuple(sorted(args.lengths)), args.seconds):
                record.put({"model": case.name, **found})
    record.end()


if __name__ == "__main__":
    main()
