"""Put the benchmarks' results into README and docs, tables and sentences, between markers.

python benchmarks/tables.py          # rewrite them
python benchmarks/tables.py --check  # fail where a page does not have what the results say
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import sentences_kernels
import sentences_learn
import sentences_lm
import sentences_training
from learn_results import learn, learn_large, learn_longer, learn_speed
from markdown_tables import Row, Table, digits, number, single, size
from tables_choosing import choosing
from tables_claims import claims
from tables_context import (
    context_hop,
    context_hybrids,
    context_parts,
    context_ranks,
    context_says,
    context_steps,
)
from tables_lm import lm_ratios
from tables_mixing import CPU, mixing
from tables_readme import performance
from tables_tasks import STATE_TRACKING, tasks

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "docs/choosing.md",
    "docs/context-parallel.md",
    "docs/generated-kernels.md",
    "docs/kernel-figures.md",
    "docs/matrix-cells.md",
    "docs/how-it-works.md",
    "docs/language-models.md",
    "docs/learning.md",
    "docs/paper.md",
    "docs/scan.md",
    "docs/serving.md",
    "docs/solvers-and-backends.md",
    "docs/tasks.md",
    "docs/training.md",
)
MARKED = re.compile(r"(<!-- figures:(\w+) -->\n).*?(<!-- end figures -->)", re.DOTALL)
PASSES = {"forward": "forward", "forward + backward": "both"}


def length(row: Row) -> str:
    """Return the title of a row's column of a length."""
    return f"T = {int(row['T']):,}"


def speed_up(step: str) -> Callable[[list[Row]], str]:
    """Return a cell of cpu.csv: ms, and in brackets the speed-up over the loop or layer."""

    def text(row: Row) -> str:
        ratio = float(row[f"{step}_speedup"])
        return digits(row[f"{step}_ms"]) + ("" if ratio == 1 else f" ({ratio:.1f} x)")

    return single(text)


def minimum(step: str) -> Callable[[list[Row]], str]:
    """Return a cell of scan_cpu.csv: the median, and in brackets the minimum, if there is one."""

    def text(row: Row) -> str:
        least = row[f"{step}_min_ms"]
        return f"{digits(row[f'{step}_ms'])} ({digits(least)})" if least else ""

    return single(text)


def of_best(step: str) -> Callable[[list[Row]], str]:
    """Return a cell of auto_layers.csv: the worst time of `auto` over the better engine's.

    Of both passes, a layer's times are added up.
    """

    def cell(rows: list[Row]) -> str:
        ratios = []
        for layer in dict.fromkeys(row["what"] for row in rows):
            own = [row for row in rows if row["what"] == layer and step in (row["pass"], "both")]
            times = {s: sum(float(row[f"{s}_ms"]) for row in own) for s in ("newton", "sequential")}
            ratios.append(times[own[0]["auto"]] / min(times.values()))
        return f"{max(ratios):.2f}"

    return cell


def updates(rows: list[Row]) -> str:
    """Return a cell of newton_iterations.csv: the range over the layers."""
    counts = {int(row["iterations"]) for row in rows}
    return "-".join(map(str, sorted({min(counts), max(counts)})))


def residual(rows: list[Row]) -> str:
    """Return the largest residual after three updates."""
    return f"{max(float(row['residual']) for row in rows if row['update'] == '3'):.1e}"


def rate_and_memory(row: Row) -> str:
    """Return a cell of lm_context.csv."""
    memory = f" ({digits(row['peak_GiB'])})" if row["peak_GiB"] else ""
    return row["note"] or f"{int(row['tokens_per_s']):,}{memory}"


TABLES: dict[str, Table] = {
    "demo": Table(
        "demo.csv",
        "Bits per byte after {training_seconds} s of training",
        {
            "cell": "cell",
            "steps": "steps",
            "unigram": "bits_unigram",
            "bigram": "bits_bigram",
            "train": "bits_train",
            "validation": lambda row: f"**{row['bits_validation']}**",
            "all engines within contract": lambda row: {"True": "yes"}.get(row["verified"], "no"),
        },
    ),
    "cpu": Table(
        "cpu.csv",
        "Times in ms, and in brackets the speed-up over the loop or over the layer of torch.nn",
        {"cell": "cell", "": "what"},
        {title: speed_up(step) for title, step in PASSES.items()},
        length,
    ),
    **{
        name: Table(
            f"{name}.csv",
            "Requests of {clients} clients to {rows} rows; memory is that of the server's process",
            {
                "answered": lambda row: f"{int(row['answered']):,}",
                "clients that left": number("left"),
                "refused, status 400": lambda row: f"{int(row['refused_400']):,}",
                "queue full, status 429": lambda row: f"{int(row['refused_429']):,}",
                "MB after a tenth": number("early_MB"),
                "MB after all": number("end_MB"),
            },
            where=lambda row: row["part"] == "mixture",
        )
        for name in ("serve", "serve_cuda")
    },
    "kernels": Table(
        "kernels.csv",
        "Medians in ms; the limit is the time to copy the bytes, at {copy_GB_per_s} GB/s",
        {
            "cell": "what",
            "pass": "pass",
            "dtype": "dtype",
            "B, T, D": size,
            "ms": number("graph_ms"),
            "limit": number("limit_ms"),
            "over limit": number("of_limit"),
        },
        where=lambda row: row["section"] == "kernels",
    ),
    "kernels_layers": Table(
        "kernels.csv",
        "Medians in ms, B, T, D = {B}, {T}, {D}, {dtype}, as CUDA graphs, cuDNN's layers by calls",
        {"": "what"},
        {"": single(lambda row: digits(row["graph_ms"] or row["do_bench_ms"]))},
        lambda row: {step: title for title, step in PASSES.items()}[row["pass"]],
        where=lambda row: row["section"] in ("layers", "peers"),
    ),
    "parallel": Table(
        "parallel.csv",
        "Medians in ms",
        {
            "cell": "what",
            "pass": "pass",
            "dtype": "dtype",
            "B, T, D": size,
            "(newton, fused)": number("newton_ms"),
            "sweeps": "sweeps",
            "(sequential, fused)": number("sequential_ms"),
            "speed-up": lambda row: f"{digits(row['speedup'])} x",
            "over limit": number("of_limit"),
        },
        where=lambda row: row["section"] == "shapes",
    ),
    "auto_layers": Table(
        "auto_layers.csv",
        "Worst time over both layers of both models, over that of the better engine",
        {"dtype": "dtype", "B, T, D": size, "`auto`": "auto"},
        {step: of_best(step) for step in ("forward", "backward", "both")},
        lambda row: row["stage"],
    ),
    "scan_cpu": Table(
        "scan_cpu.csv",
        "Medians in ms, minima in brackets, B = {B}, D = {D}",
        {"recurrence": "what", "by": "way"},
        {title: minimum(step) for title, step in PASSES.items()},
        length,
    ),
    "matrix_cpu": Table(
        "matrix_cpu.csv",
        "Medians in ms, minima in brackets, B = {B}, T = {T}, {H} heads, float32",
        {"cell": "cell", "K x V": lambda row: f"{row['K']} x {row['V']}"},
        {title: minimum(step) for title, step in PASSES.items()},
        lambda row: row["way"],
    ),
    "matrix_gpu": Table(
        "matrix_gpu.csv",
        "Medians in ms of replays of CUDA graphs, minima in brackets, B = {B}, {H} heads, bfloat16",
        {
            "cell": "cell",
            "K x V": lambda row: f"{row['K']} x {row['V']}",
            "T": lambda row: f"{int(row['T']):,}",
            "by": "way",
        },
        {title: minimum(step) for title, step in PASSES.items()},
        lambda row: "",
    ),
    "matrix_segments": Table(
        "matrix_segments.csv",
        "Medians in ms of calls from Python, minima in brackets, B = {B}, {H} heads of "
        "{K} x {V}, bfloat16",
        {"cell": "cell", "T": lambda row: f"{int(row['T']):,}", "segments": "segments"},
        {title: minimum(step) for title, step in PASSES.items()},
        lambda row: "",
    ),
    "newton_iterations": Table(
        "newton_iterations.csv",
        "Updates until the contract holds",
        {"cell": "cell", "weights": "stage"},
        {"": updates},
        lambda row: f"T = {row['T']}",
        {"residual after 3": residual},
    ),
    "lm_context": Table(
        "lm_context.csv",
        "Tokens/s (GiB)",
        {"model": "model"},
        {"": single(rate_and_memory)},
        length,
    ),
    "lm_decode": Table(
        "lm_decode.csv",
        "Medians in ms",
        {
            "model": "model",
            "context": lambda row: f"{int(row['context']):,}",
            "B": "B",
            "weights": "weights",
            "weights read": number("weights_ms"),
        },
        {"": single(number("median_ms"))},
        lambda row: row["way"],
        {"cache, MB": lambda rows: digits(max(float(row["cache_MB"] or 0) for row in rows))},
    ),
}
"""Tables that a file gives line by line."""

FIGURES: dict[str, Callable[[], str]] = {
    **TABLES,
    "mixing": mixing,
    "mixing_cpu": CPU,
    "performance": performance,
    "choosing": choosing,
    "claims": claims,
    "context_hop": context_hop,
    "context_hybrids": context_hybrids,
    "context_parts": context_parts,
    "context_ranks": context_ranks,
    "context_says": context_says,
    "context_steps": context_steps,
    "learn": learn,
    "learn_large": learn_large,
    "learn_longer": learn_longer,
    "learn_speed": learn_speed,
    "lm_ratios": lm_ratios,
    "tasks": tasks,
    "state_tracking": STATE_TRACKING,
    **{
        name: sentence
        for module in (sentences_kernels, sentences_learn, sentences_lm, sentences_training)
        for name, sentence in vars(module).items()
        if name.endswith("_says")
    },
}
"""Functions by the names of markers; sentences are the functions whose names end in `_says`."""


def with_figures(text: str) -> str:
    """Return a page's text with all marked blocks as the results have them."""
    return MARKED.sub(lambda m: f"{m[1]}\n{FIGURES[m[2]]()}\n\n{m[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = []
    for page in PAGES:
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        new = with_figures(text)
        if new == text:
            continue
        stale.append(page)
        if not args.check:
            path.write_text(new, encoding="utf-8")
    if args.check and stale:
        sys.exit(f"pages differ from the results: {', '.join(stale)}; run benchmarks/tables.py")


if __name__ == "__main__":
    main()
