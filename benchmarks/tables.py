"""Put the benchmarks' results into README and docs, tables and sentences, between markers.

python benchmarks/tables.py          # rewrite them
python benchmarks/tables.py --check  # fail where a page does not have what the results say
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import sentences_kernels
import sentences_learn
import sentences_lm
import sentences_training
import tables_paper
from markdown_tables import Row, read, size, source, table
from tables_claims import claims
from tables_cuda import (
    auto_cuda,
    auto_layers,
    kernels,
    kernels_layers,
    kernels_memory,
    resources,
    split_times,
    trained,
)
from tables_learn import learn, learn_layers
from tables_lm import lm_context, lm_decode, lm_first_text, lm_generate, lm_ratios, lm_step
from tables_scale import lm_lost, lm_scale, lm_scale_memory, lm_scale_profile, lm_scaling
from tables_scan import scan_cpu
from tables_training import lengths, recall, remarks, tasks, train_step, words

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "docs/generated-kernels.md",
    "docs/kernel-figures.md",
    "docs/how-it-works.md",
    "docs/language-models.md",
    "docs/learning.md",
    "docs/paper.md",
    "docs/scan.md",
    "docs/solvers-and-backends.md",
    "docs/tasks.md",
    "docs/training.md",
)
MARKED = re.compile(r"(<!-- figures:(\w+) -->\n).*?(<!-- end figures -->)", re.DOTALL)


PASSES = {"forward": "forward", "both": "forward + backward"}


def pair(row: Row, what: str) -> str:
    """The loop's and Newton's time of a row, three digits each."""
    times = (float(row[f"{solver}_{what}_ms"]) for solver in ("sequential", "newton"))
    return " / ".join(f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}" for ms in times)


def demo() -> str:
    """Bits per byte of the demo's runs."""
    rows = read("demo.csv")
    head = [
        "cell",
        "steps",
        "unigram",
        "bigram",
        "train",
        "validation",
        "all engines within contract",
    ]
    body = [
        [
            row["cell"],
            row["steps"],
            row["bits_unigram"],
            row["bits_bigram"],
            row["bits_train"],
            f"**{row['bits_validation']}**",
            "yes" if row["verified"] == "True" else "no",
        ]
        for row in rows
    ]
    seconds = rows[0]["training_seconds"]
    return f"Bits per byte after {seconds} s of training {source(rows, 'demo.csv')}:\n\n" + table(
        head, body
    )


def times(row: Row, what: str) -> str:
    """A row's time and how many times as fast as its peer it is."""
    ms, speedup = float(row[f"{what}_ms"]), float(row[f"{what}_speedup"])
    return f"{ms:.3g}" if speedup == 1 else f"{ms:.3g} ({speedup:.1f} x)"


def cpu() -> str:
    """Generated kernels against loops and layers."""
    rows = read("cpu.csv")
    lengths = list(dict.fromkeys(row["T"] for row in rows))
    body = []
    for cell, what in dict.fromkeys((row["cell"], row["what"]) for row in rows):
        mine = {row["T"]: row for row in rows if (row["cell"], row["what"]) == (cell, what)}
        figures = [times(mine[t], kind) for t in lengths for kind in ("forward", "both")]
        body.append([cell, what, *figures])
    kinds = [f"T = {t}, {kind}" for t in lengths for kind in ("forward", "forward + backward")]
    return (
        f"ms, and in brackets how many times as fast as the loop or the layer of torch.nn "
        f"{source(rows, 'cpu.csv')}:\n\n{table(['cell', '', *kinds], body)}"
    )


def compile_times() -> str:
    """Seconds to compile and milliseconds to load, by cell."""
    rows = read("compile.csv")
    cells = dict.fromkeys(row["cell"] for row in rows)
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    body = []
    for cell in cells:
        mine = {row["dtype"]: row for row in rows if row["cell"] == cell}
        body.append([cell, *(f"{mine[d]['cold_s']} s / {mine[d]['warm_ms']} ms" for d in dtypes)])
    text = f"First use / later ones, {rows[0]['compiler']} {source(rows, 'compile.csv')}:"
    return f"{text}\n\n{table(['cell', *dtypes], body)}"


def start() -> str:
    """Milliseconds from the start of a process to the first result."""
    rows = read("start.csv")
    parts = ("import", "layer", "forward", "backward", "sum")
    body = [
        [row["cell"], row["commit"], row["cache"], *(f"{float(row[f'{p}_ms']):.3g}" for p in parts)]
        for row in rows
    ]
    text = f"Medians in ms over {rows[0]['processes']} processes each {source(rows, 'start.csv')}:"
    head = [
        "cell",
        "commit",
        "cache",
        "import pararnn",
        "first layer",
        "forward",
        "backward",
        "sum",
    ]
    return f"{text}\n\n{table(head, body)}"


def auto_torch() -> str:
    """Loop and Newton on the torch backend, CPU and GPU."""
    shown = [("1", "512", "64"), ("1", "2048", "64"), ("8", "512", "256"), ("8", "2048", "256")]
    parts = []
    for device in ("cpu", "cuda"):
        name = f"auto_torch_{device}.csv"
        rows = read(name)
        body = [
            [
                row["cell"],
                f"{row['B']}, {row['T']}, {row['D']}",
                pair(row, "forward"),
                pair(row, "both"),
                row["auto"],
            ]
            for row in rows
            if row["cell"] in ("gru", "lstm") and (row["B"], row["T"], row["D"]) in shown
        ]
        head = ["cell", "B, T, D", "forward, loop / Newton", "forward + backward", "`auto`"]
        parts.append(f"Times in ms {source(rows, name)}:\n\n{table(head, body)}")
    return "\n\n".join(parts)


def newton_iterations() -> str:
    """Newton's updates until the contract holds, both layers, by length."""
    rows = read("newton_iterations.csv")
    lengths = sorted({int(row["T"]) for row in rows})
    groups = list(dict.fromkeys((row["cell"], row["stage"]) for row in rows))
    body = []
    for cell, stage in groups:
        cells = []
        for length in lengths:
            found = {
                int(row["iterations"])
                for row in rows
                if (row["cell"], row["stage"], row["T"]) == (cell, stage, str(length))
            }
            low, high = min(found), max(found)
            cells.append(str(low) if low == high else f"{low}-{high}")
        after_three = max(
            float(row["residual"])
            for row in rows
            if (row["cell"], row["stage"], row["update"]) == (cell, stage, "3")
        )
        body.append([cell, stage, *cells, f"{after_three:.1e}"])
    head = ["cell", "weights", *(f"T = {length}" for length in lengths), "residual after 3"]
    text = f"Updates until the contract holds {source(rows, 'newton_iterations.csv')}:"
    return f"{text}\n\n{table(head, body)}"


def auto_cpu() -> str:
    """Both solvers' kernels on a CPU, by threads."""
    rows = read("auto_cpu.csv")
    threads = list(dict.fromkeys(row["threads"] for row in rows))
    by_case: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        by_case.setdefault((row["cell"], row["what"], size(row)), []).append(row)
    body = [
        [f"{cell}, {what}" if what else cell, shape, *(pair(r, s) for r in own for s in PASSES)]
        for (cell, what, shape), own in by_case.items()
    ]
    columns = [
        f"{label}, {n} thread{'s' * (n != '1')}" for n in threads for label in PASSES.values()
    ]
    about = f"{rows[0]['device']}, PyTorch {rows[0]['torch']}, commit {rows[0]['commit']}"
    text = f"Loop / Newton, ms ({about}; `benchmarks/results/auto_cpu.csv`):"
    return f"{text}\n\n{table(['cell', 'B, T, D', *columns], body)}"


FIGURES: dict[str, Callable[[], str]] = {
    "demo": demo,
    "auto_torch": auto_torch,
    "auto_cpu": auto_cpu,
    "auto_cuda": auto_cuda,
    "auto_layers": auto_layers,
    "parallel": lambda: split_times("shapes", "cell"),
    "parallel_hard": lambda: split_times("hard", "GRU with", with_pass=False),
    "parallel_trained": trained,
    "scan": lambda: split_times("scan", "decay"),
    "compile": compile_times,
    "start": start,
    "cpu": cpu,
    "newton_iterations": newton_iterations,
    "newton_residuals": tables_paper.residuals,
    "paper_reduction": tables_paper.reduction,
    "paper_solve": tables_paper.solve,
    "paper_speedup": tables_paper.speedup,
    "paper_split": tables_paper.split,
    "performance": tables_paper.performance,
    "kernels": kernels,
    "kernels_layers": kernels_layers,
    "kernels_memory": kernels_memory,
    "resources": resources,
    "lm_step": lm_step,
    "lm_ratios": lm_ratios,
    "lm_context": lm_context,
    "lm_generate": lm_generate,
    "lm_first_text": lm_first_text,
    "lm_decode": lm_decode,
    "train_step": train_step,
    "lm_scale": lm_scale,
    "lm_scaling": lm_scaling,
    "lm_scale_memory": lm_scale_memory,
    "lm_scale_profile": lm_scale_profile,
    "lm_lost": lm_lost,
    "learn": learn,
    "learn_layers": learn_layers,
    "claims": claims,
    "tasks": tasks,
    "tasks_remarks": remarks,
    "tasks_words": words,
    "tasks_lengths": partial(lengths, "lengths"),
    "tasks_s3": partial(lengths, "s3"),
    "tasks_recall": recall,
    "first": tables_paper.first,
    "scan_cpu": scan_cpu,
    "limits_says": sentences_kernels.limits,
    "auto_cpu_says": sentences_kernels.threads,
    "auto_cuda_rule_says": sentences_kernels.rule,
    "parallel_trained_says": sentences_kernels.latches,
    "paper_reduction_says": sentences_kernels.reductions,
    "paper_solve_says": sentences_kernels.our_kernels,
    "paper_newton_says": sentences_kernels.by_operations,
    "paper_peers_says": sentences_kernels.peers,
    "paper_speedup_says": sentences_kernels.over_python,
    "paper_split_says": sentences_kernels.splits,
    "learn_english_says": sentences_learn.english,
    "learn_code_says": sentences_learn.code,
    "learn_mamba_says": sentences_learn.mamba,
    "learn_layers_says": sentences_learn.layers,
    "lm_sample_says": sentences_lm.sampling,
    "lm_step_says": sentences_lm.packing,
    "lm_context_says": sentences_lm.context,
    "lm_decode_says": sentences_lm.decoding,
    "lm_generate_says": sentences_lm.figure_3,
    "lm_first_text_says": sentences_lm.first_text,
    "training_says": sentences_training.training,
    "train_step_says": sentences_training.steps,
    "lm_scale_says": sentences_training.products,
    "lm_scale_memory_says": sentences_training.memory,
    "lm_scale_profile_says": sentences_training.profile,
    "tasks_says": sentences_training.tasks_steps,
    "tasks_order_says": sentences_training.tasks_order,
    "tasks_recall_says": sentences_training.tasks_recall,
    "tasks_s3_says": sentences_training.tasks_s3,
}
"""By the names of markers; names that end in `says` are of sentences."""


def rendered(text: str) -> str:
    """A page's text with all that is marked as the results have it."""
    return MARKED.sub(lambda m: f"{m[1]}\n{FIGURES[m[2]]()}\n\n{m[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    stale = []
    for page in PAGES:
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        new = rendered(text)
        if new == text:
            continue
        stale.append(page)
        if not args.check:
            path.write_text(new, encoding="utf-8")
    if args.check and stale:
        sys.exit(f"pages differ from the results: {', '.join(stale)}; run benchmarks/tables.py")


if __name__ == "__main__":
    main()
