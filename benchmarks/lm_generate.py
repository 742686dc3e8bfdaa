"""The paper's Figure 3: tokens/s of its 1B models by the number of generated tokens, not compiled.

Its protocol: `timeit`, the least of 5 repetitions, a row of one sequence. Generation begins with a
single token and takes the likeliest one each time, in bfloat16. "cache": `pararnn.lm.sample`; each
token is read once, and recurrent states, or keys and values, are kept. Steps are recorded and
replayed, anew in every repetition. "no cache": the Transformer reads all tokens again for each new
one. Where the seconds of a curve do not reach 5 repetitions of all lengths, the longer ones have
fewer, or none, which `repeats` says: one of each length comes first. A whole curve of 1 to 2,048
takes some minutes a model: `--seconds 600`.
Puts its rows into results/lm_generate.csv; `--plot` draws lm_generate.png from that and from the
graphs in lm_decode.csv, where there is that file.

    python benchmarks/lm_generate.py [--only gru] [--ways cache] [--seconds 10] [--out FOLDER]
    python benchmarks/lm_generate.py --plot
"""

from __future__ import annotations

import gc
import itertools
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import RESULTS, read_rows
from lm_command import chosen, device_of, parser_of, record_of
from lm_step import ARCHITECTURES, smoke_cases
from mamba2 import Sizes, language_model, ready_to_decode
from pictures import Curves, caption, draw, new_figure
from protocol import wait

from pararnn.lab.palette import looks
from pararnn.lm import LanguageModel, preset, sample
from pararnn.lm.config import LMConfig
from pararnn.lm.replay import WORTH

SCALE = "1B"
LENGTHS = tuple(2**power for power in range(12))
REPEATS = 5
FILE = "lm_generate.csv"
KEYS = ("device", "model", "way", "tokens")
"""Columns that identify a case."""
STYLES = {"cache": "-", "no cache": ":"}
"""Line styles of the ways."""


class Case(NamedTuple):
    """Model that generates."""

    name: str
    config: LMConfig | Sizes


def cases() -> list[Case]:
    presets = [preset(architecture, SCALE) for architecture in ARCHITECTURES]
    return [Case(each.name, each.model) for each in presets]


def with_cache(model: LanguageModel, length: int) -> torch.Tensor:
    """Return the likeliest tokens after the first one."""
    first = torch.zeros(1, 1, dtype=torch.long, device=model.lm_head.weight.device)
    return sample(model, first, length, temperature=0)


@torch.no_grad()
def without_cache(model: LanguageModel, length: int) -> torch.Tensor:
    """Return the same, by reading all tokens anew for each."""
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
    """Yield rows by length, as far as the seconds reach."""
    device = model.lm_head.weight.device

    def generate(length: int) -> None:
        WAYS[way](model, length)
        wait(device)

    for length in (1, 2):  # not timed: first calls make kernels
        generate(length)
    least = timeit.timeit(partial(generate, 1), number=1)
    length_before, remaining = 1, seconds
    for place, length in enumerate(lengths):
        costs = [least * each / length_before for each in lengths[place:]]
        once = max(
            (total for total in itertools.accumulate(costs) if total <= remaining), default=0.0
        )
        repeats = min(REPEATS, 1 + int((remaining - once) / costs[0]))
        if not once:
            missing = ", ".join(str(each) for each in lengths if each >= length)
            print(f"{way}: {seconds:g} s do not reach lengths {missing}", flush=True)
            return
        times = timeit.repeat(partial(generate, length), number=1, repeat=repeats)
        least, length_before, remaining = min(times), length, remaining - sum(times)
        yield {
            "way": way,
            "tokens": length,
            "repeats": repeats,
            "least_s": round(least, 5),
            "tokens_per_s": round(length / least, 2),
        }


def ways_of(case: Case, ways: Sequence[str]) -> list[str]:
    """Return the requested ways; a recurrent model has no reason to read again."""
    both = case.name.startswith("transformer")
    return [way for way in ways if both or way == "cache"]


def plot(path: Path) -> None:
    """Draw a result file, next to it; with lm_decode.csv, steps as CUDA graphs too."""
    rows = read_rows(path)
    curves, styles = Curves(), dict[str, str]()
    for row in rows:
        name = row["model"] if row["way"] == "cache" else f"{row['model']}, {row['way']}"
        curves.setdefault(name, []).append((int(row["tokens"]), float(row["tokens_per_s"])))
        styles[name] = STYLES[row["way"]]
    decode_file = path.with_name("lm_decode.csv")
    graphs = in_graphs(read_rows(decode_file)) if decode_file.exists() else {}
    figure = new_figure(11 if graphs else 6.5, 4.6)
    every = figure.subplots(1, 1 + bool(graphs), squeeze=False)[0]
    draw(every[0], curves, "generated tokens", "tokens/s", styles)
    title = f"solid: steps recorded as CUDA graphs from {WORTH} tokens on, nothing compiled\n"
    title += "dotted: all tokens read anew for each, called from Python"
    every[0].set_title(title, fontsize="small")
    if graphs:
        draw(every[1], graphs, "tokens before", "tokens/s")
        title = "a CUDA graph on both sides: a step of compiled blocks, a cache of one size\n"
        title += "dotted: the state keeps its size; measured at the point"
        every[1].set_title(title, fontsize="small")
        last = max(x for curve in graphs.values() for x, _ in curve)
        for name, (colour, _) in looks(graphs).items():
            if len(graphs[name]) == 1:
                ((x, y),) = graphs[name]
                every[1].plot([x, last], [y, y], ":", color=colour)
    caption(figure, rows, "tokens/s of one row, bfloat16, the paper's 1B models")
    figure.savefig(path.with_suffix(".png"), dpi=150)


def in_graphs(rows: Sequence[Mapping[str, str]]) -> Curves:
    """Return the tokens/s of one row's steps as CUDA graphs, by the tokens before."""
    curves = Curves()
    for row in rows:
        if row["way"] == "graph" and row["B"] == "1":
            point = int(row["context"]), 1e3 / float(row["median_ms"])
            curves.setdefault(row["model"], []).append(point)
    return curves


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
    selection = chosen(parser, args, tiny if args.smoke else cases(), lambda case: case.name)
    record = record_of(args, FILE, KEYS)
    for case in selection:
        gc.collect()
        torch.manual_seed(0)
        model = language_model(case.config, device=device_of(args), dtype=torch.bfloat16).eval()
        ready_to_decode(model)
        for way in ways_of(case, args.ways):
            for row in curve(model, way, tuple(sorted(args.lengths)), args.seconds):
                record.add({"model": case.name, **row})
    record.end()


if __name__ == "__main__":
    main()
