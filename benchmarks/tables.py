"""Put tables of the benchmarks' results into README and docs, between markers.

python benchmarks/tables.py          # rewrite them
python benchmarks/tables.py --check  # fail where a page does not have what the results say
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import segments
from learn_evidence import claim_table, evidence
from learn_results import learn, learn_large, learn_longer
from markdown_tables import PASSES, Cell, Row, Table, Text, digits, number, single, size
from tables_choosing import choosing
from tables_chunks import CHUNKS, LOOPS, MODEL
from tables_claims import claims
from tables_context import context_steps
from tables_lm import lm_ratios
from tables_mixing import CPU, CPU_INFERENCE, NORMS, WORLD_MODELS, XLSTM, mixing
from tables_paper import paper_reduction, paper_solve
from tables_predict import PREDICT, PREDICT_M2RNN
from tables_readme import performance
from tables_serving import (
    FIRST_TOKENS,
    INVARIANT,
    INVARIANT_PRODUCTS,
    LONG,
    LOOKUP_CODE,
    LOOKUP_SPEED,
    LOOKUP_SPEED_1B,
    PEERS,
    READING,
    VERIFY,
    on_both_devices,
)
from tables_step_peers import step_peers
from tables_tasks import STATE_TRACKING, more_tasks, tasks

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/benchmarks.md")
MARKED = re.compile(r"(<!-- figures:(\w+) -->\n).*?(<!-- end figures -->)", re.DOTALL)


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


def of_section(section: str) -> Callable[[Row], bool]:
    """Return whether a row of parallel.csv is of a section.

    Of the hard cases in float32 and with 1,024 channels only.
    """
    shown = {"dtype": "float32", "D": "1024"} if section == "hard" else {}
    return lambda row: row["section"] == section and shown.items() <= row.items()


STEP: dict[str, str | Text] = {
    "median, ms": number("median_ms"),
    "tokens/s": lambda row: f"{int(row['tokens_per_s']):,}",
    "MFU": lambda row: f"{float(row['mfu_percent']):.0f}%",
    "GiB a GPU": number("peak_GiB"),
}
"""Columns of a training step."""
STEP_DEVICE = "NVIDIA H100 80GB HBM3"
"""Card of the published training steps, all by the loop in `train/trainer.py`."""


def derivatives(file: str, times: str, more: dict[str, Cell] | None = None) -> Table:
    """Return the table of a file of derivatives.py; times: what its times are; more: columns."""
    return Table(
        file,
        f"{times}, and in brackets multiples of the forward pass, or for gradients of samples of "
        "forward and backward pass (both), B, T, D = {B}, {T}, {D}; float32 unless said",
        {"layer": layer_and_dtype, "": "what"},
        {
            "kernels": single(least("kernels")),
            "loop": single(least("loop")),
            "speed-up": single(lambda row: row["speedup"]),
            "torch.nn without cuDNN": single(without_cudnn),
            **(more or {}),
        },
    )


def least(way: str) -> Text:
    """Return the function of a row's least time of a way, and its multiple where it is known."""

    def text(row: Row) -> str:
        time, multiple = row.get(f"{way}_min_ms"), row.get(f"{way}_multiple")
        return " ".join(
            [*([digits(time)] if time else []), *([f"({multiple})"] if multiple else [])]
        )

    return text


def layer_and_dtype(row: Row) -> str:
    """Return a row's layer, with its dtype unless this is float32."""
    kind = row.get("dtype") or "float32"
    return row["layer"] if kind == "float32" else f"{row['layer']}, {kind}"


def without_cudnn(row: Row) -> str:
    """Return the least time of PyTorch's own layer with its multiple; "none" for what it lacks."""
    return least("torch_nn")(row) or ("none" if row.get("torch_nn_error") else "")


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
        {title: speed_up(step) for step, title in PASSES.items()},
        length,
    ),
    "derivatives": derivatives(
        "derivatives_cpu.csv",
        "Least times of the processor in ms, with memory of freed tensors kept",
    ),
    "derivatives_gpu": derivatives(
        "derivatives_gpu.csv",
        "Least times in ms, of replays of CUDA graphs where the last column has the wall time of "
        "calls, else of calls",
        {"kernels by calls": single(least("kernels_call"))},
    ),
    "opacus": Table(
        "opacus_cpu.csv",
        "Least times of the processor in ms of a training step with gradients of samples by opacus "
        "{opacus}, float32",
        {"B, T, D": size},
        {
            "`pararnn.LSTM`": single(number("ours_min_ms")),
            "opacus' `DPLSTM`": single(number("opacus_min_ms")),
            "speed-up": single(lambda row: row["speedup"]),
            "`pararnn.LSTM` without them": single(number("both_min_ms")),
        },
    ),
    "kernels": Table(
        "kernels.csv",
        "Medians in ms; the limit is the time to copy the bytes, at {copy_GB_per_s} GB/s",
        {"cell": "what", "dtype": "dtype", "B, T, D": size},
        {
            "ms": single(number("graph_ms")),
            "limit": single(number("limit_ms")),
            "over limit": single(number("of_limit")),
        },
        lambda row: row["pass"],
        where=lambda row: row["section"] == "kernels",
    ),
    "kernels_layers": Table(
        "kernels.csv",
        "Medians in ms, B, T, D = {B}, {T}, {D}, {dtype}, as CUDA graphs, cuDNN's layers by calls",
        {"": "what"},
        {"": single(lambda row: digits(row["graph_ms"] or row["do_bench_ms"]))},
        lambda row: PASSES[row["pass"]],
        where=lambda row: row["section"] in ("layers", "peers"),
    ),
    **{
        f"parallel_{section}": Table(
            "parallel.csv",
            f"Medians in ms, {what}",
            {"case": "what", "dtype": "dtype", "B, T, D": size},
            {
                "(newton, fused)": single(number("newton_ms")),
                "speed-up": single(lambda row: f"{digits(row['speedup'])} x"),
                "over limit": single(number("of_limit")),
            },
            lambda row: row["pass"],
            {"sweeps": lambda rows: rows[0]["sweeps"]},
            where=of_section(section),
        )
        for section, what in {
            "shapes": "cells that forget",
            "hard": "a GRU whose channels forget slowly or never, or that expand",
        }.items()
    },
    "parallel_trained": Table(
        "parallel_trained.csv",
        "Medians in ms of (newton, fused), and in brackets the speed-up over the loop's kernel; "
        "trained layers, {D} channels, on held-out text",
        {"layer": "what", "B, T": lambda row: f"{row['B']}, {row['T']}"},
        {"": single(lambda row: f"{digits(row['newton_ms'])} ({digits(row['speedup'])} x)")},
        lambda row: f"{row['pass']}, {row['dtype']}",
        where=lambda row: row["D"] == "1024",
    ),
    "scan_cpu": Table(
        "scan_cpu.csv",
        "Medians in ms, minima in brackets, B = {B}, D = {D}",
        {"recurrence": "what", "by": "way"},
        {title: minimum(step) for step, title in PASSES.items()},
        length,
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
        {title: minimum(step) for step, title in PASSES.items()},
        where=lambda row: row["K"] == "64",
    ),
    "newton_iterations": Table(
        "newton_iterations.csv",
        "Updates until the contract holds",
        {"cell": "cell", "weights": "stage"},
        {"": updates},
        lambda row: f"T = {row['T']}",
        {"residual after 3": residual},
    ),
    "lm_generate": Table(
        "lm_generate.csv",
        "Tokens/s of generating, by the number of tokens",
        {"model": "model", "way": "way"},
        {"": single(number("tokens_per_s"))},
        lambda row: f"{int(row['tokens']):,}",
        order=lambda row: int(row["tokens"]),
    ),
    "train_step": Table(
        "train_step.csv",
        "Steps of `pararnn train` (trainer) and of a bare loop over the same model",
        {
            "recipe": "recipe",
            "GPUs": "gpus",
            "loop": "path",
            "rows a GPU": "rows_a_gpu",
            "mean, ms": number("mean_ms"),
            **STEP,
        },
        where=lambda row: row["device"] == STEP_DEVICE,
    ),
    "lm_scale": Table(
        "lm_scale.csv",
        "Steps of `pararnn train`",
        {
            "recipe": "recipe",
            "GPUs": "gpus",
            "rows a GPU x T": lambda row: f"{row['rows_a_gpu']} x {int(row['T']):,}",
            "way": "way",
            **STEP,
        },
        where=lambda row: row["T"] != "2048" or row["way"] != "plain" or "1b" in row["recipe"],
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
        },
        {"": single(number("median_ms"))},
        lambda row: row["way"],
        {
            "weights read": lambda rows: digits(min(float(row["weights_ms"]) for row in rows)),
            "cache, MB": lambda rows: digits(max(float(row["cache_MB"] or 0) for row in rows)),
        },
    ),
    "learn_decode": Table(
        "learn_decode.csv",
        "Decoding by models of 15M: medians of a step's ms, after 2,048 tokens",
        {"mixer": lambda row: row["model"].rpartition("-")[0]},
        {"": single(number("median_ms"))},
        lambda row: f"{row['way']}, B {row['B']}",
        {"cache of 64 rows, MB": lambda rows: digits(max(float(r["cache_MB"]) for r in rows))},
    ),
}
"""Tables that a file gives line by line."""

FIGURES: dict[str, Callable[[], str]] = {
    **TABLES,
    **evidence(["4M", "15M", "30M"], longer=["15M"]),
    "evidence_claim": claim_table,
    "mixing": mixing,
    "mixing_cpu": CPU,
    "cpu_inference": CPU_INFERENCE,
    "norms": NORMS,
    "xlstm_layer": XLSTM,
    "performance": performance,
    "prefixes_first": on_both_devices(FIRST_TOKENS),
    "prefixes_reading": on_both_devices(READING),
    "serve_long": on_both_devices(LONG),
    "serve_peers": on_both_devices(PEERS),
    "batch_invariant": INVARIANT,
    "batch_invariant_products": INVARIANT_PRODUCTS,
    "lookup_speed": LOOKUP_SPEED,
    "lookup_speed_1B": LOOKUP_SPEED_1B,
    "lm_verify": VERIFY,
    "lookup_code": LOOKUP_CODE,
    "choosing": choosing,
    "chunks": CHUNKS,
    "chunks_loops": LOOPS,
    "learn_chunks": MODEL,
    "claims": claims,
    "context_steps": context_steps,
    "learn": learn,
    "learn_large": learn_large,
    "learn_longer": learn_longer,
    "lm_ratios": lm_ratios,
    "paper_reduction": paper_reduction,
    "paper_solve": paper_solve,
    "predict": PREDICT,
    "predict_m2rnn": PREDICT_M2RNN,
    "segments": segments.ratios,
    "step_peers": step_peers,
    "tasks": tasks,
    "more_tasks": more_tasks,
    "state_tracking": STATE_TRACKING,
    "world_models": WORLD_MODELS,
}
"""Functions by the names of markers."""


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
