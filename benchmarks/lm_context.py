"""Steps of the paper's 400M models against the context: tokens/s and memory, T to 131,072.

Forward and backward in bfloat16 without an optimizer, as in `lm_step.py`, on 32,768 tokens a step
at every T; above that on one row. Every T has code of its own. A case is timed for some seconds, at
least one step after the one that compiles. What does not fit into the GPU's memory has a row that
says so. Puts its rows into results/lm_context.csv; `--plot` draws lm_context.png from that alone.

    python benchmarks/lm_context.py [--only gru] [--lengths 2048 8192] [--out FOLDER] [--smoke]
    python benchmarks/lm_context.py --plot
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from common import RESULTS, read_rows
from lm_command import chosen, device_of, parser_of, record_of
from lm_step import (
    ARCHITECTURES,
    TOKENS,
    Case,
    compile_blocks,
    figures,
    fresh,
    peak_memory,
    smoke_cases,
    step_times,
)
from pictures import Curves, caption, draw, new_figure, thousands

from pararnn.lm import preset

SCALE = "400M"
LENGTHS = (2_048, 8_192, 32_768, 65_536, 131_072)
FILE = "lm_context.csv"
KEYS = ("device", "model", "B", "T")
"""Columns that identify a case."""
MOST = 10
"""Timed steps of a case."""
TOO_LARGE = "out of memory"


def cases(lengths: list[int]) -> list[Case]:
    return [
        Case(paper.name, paper.model, max(TOKENS[SCALE] // length, 1), length, paper.z_loss)
        for paper in (preset(architecture, SCALE) for architecture in ARCHITECTURES)
        for length in lengths
    ]


def figures_of(
    case: Case, device: torch.device, use_compiler: bool, seconds: float
) -> dict[str, Any]:
    """Return a case's figures; torch.OutOfMemoryError where it does not fit."""
    model = fresh(case, device)
    if use_compiler:
        compile_blocks(model)
    times = step_times(model, case, device, warmup=1, repeats=1)
    more = min(int(seconds * 1e3 / times[0]), MOST)
    if more > 1:
        times = step_times(model, case, device, warmup=0, repeats=more)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rates = figures(times, parameters, case.batch * case.length)
    return {"repeats": len(times), **rates, "peak_GiB": peak_memory(device)}


def measure(case: Case, device: torch.device, use_compiler: bool, seconds: float) -> dict[str, Any]:
    about = {"model": case.name, "B": case.batch, "T": case.length}
    try:
        return {**about, **figures_of(case, device, use_compiler, seconds), "note": ""}
    except torch.OutOfMemoryError:
        names = ("repeats", *figures([1.0], 1, 1), "peak_GiB")
        return {**about, **dict.fromkeys(names, ""), "note": TOO_LARGE}


def plot(path: Path) -> None:
    """Draw a result file, next to it: tokens/s by the context, memory by a step's tokens."""
    rows = [row for row in read_rows(path) if not row["note"]]
    figure = new_figure(10, 4.4)
    rates, memory = Curves(), Curves()
    for row in rows:
        length = int(row["T"])
        rates.setdefault(row["model"], []).append((length, float(row["tokens_per_s"])))
        if row["peak_GiB"]:
            point = int(row["B"]) * length, float(row["peak_GiB"])
            memory.setdefault(row["model"], []).append(point)
    rate_axes, memory_axes = figure.subplots(1, 2)
    draw(rate_axes, rates, "context: T, tokens of a row", "tokens/s")
    if memory:
        draw(memory_axes, memory, "B x T, tokens of a step", "memory, GiB")
        memory_axes.set_xscale("linear")
        memory_axes.set_xlim(left=0)
        ticks = sorted({tokens for curve in memory.values() for tokens, _ in curve})
        memory_axes.set_xticks(ticks, [thousands(tick) for tick in ticks])
    tokens = f"{TOKENS[SCALE]:,} tokens a step up to that T, then one row"
    caption(figure, rows, f"forward and backward, bfloat16; {tokens}")
    figure.savefig(path.with_suffix(".png"), dpi=150)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--seconds", type=float, default=2.0, help="of timed steps, a case")
    parser.add_argument("--plot", action="store_true", help="draw what was measured")
    args = parser.parse_args()
    if args.plot:
        plot((args.out or RESULTS) / FILE)
        return
    plain = [case for case in smoke_cases() if not case.packed]
    every = plain if args.smoke else cases(args.lengths)
    selection = chosen(parser, args, every, lambda case: case.name)
    record = record_of(args, FILE, KEYS)
    for case in selection:
        record.add(measure(case, device_of(args), not args.smoke, args.seconds))
    record.end()


if __name__ == "__main__":
    main()
