"""Put the benchmarks' results into README and docs, between `figures:` markers.

python benchmarks/tables.py          # rewrite the tables
python benchmarks/tables.py --check  # fail where a table is not what the results say
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from common import RESULTS

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "docs/generated-kernels.md",
    "docs/how-it-works.md",
    "docs/scan.md",
    "docs/solvers-and-backends.md",
)
MARKED = re.compile(r"(<!-- figures:(\w+) -->\n).*?(<!-- end figures -->)", re.DOTALL)

Row = dict[str, str]


def read(name: str) -> list[Row]:
    """The rows of a result file."""
    with (RESULTS / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(rows: Sequence[Row], name: str) -> str:
    """A line that says where figures come from."""
    first = rows[0]
    threads = f", {first['threads']} threads" if "threads" in first else ""
    return (
        f"({first['device']}{threads}, PyTorch {first['torch']}, commit {first['commit']}; "
        f"`benchmarks/results/{name}`)"
    )


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


def resources() -> str:
    """Registers of the CUDA kernels, by cell and architecture; and that nothing spills."""
    rows = [row for row in read("resources.csv") if row["kernel"] != "sum_weights"]
    keys = list(dict.fromkeys((row["dtype"], row["kernel"]) for row in rows))
    body = []
    for cell, arch in dict.fromkeys((row["cell"], row["arch"]) for row in rows):
        mine = {
            (row["dtype"], row["kernel"]): row["registers"]
            for row in rows
            if (row["cell"], row["arch"]) == (cell, arch)
        }
        body.append([cell, arch, *(mine[key] for key in keys)])
    spilled = sum(int(row["spilled"]) for row in rows)
    text = (
        f"Registers of a thread, two channels each; {spilled} bytes spilled "
        f"({rows[0]['compiler']}, commit {rows[0]['commit']}; `benchmarks/results/resources.csv`):"
    )
    head = ["cell", "architecture", *(f"{kernel}, {dtype}" for dtype, kernel in keys)]
    return f"{text}\n\n{table(head, body)}"


def size(row: Row) -> str:
    """A row's B, T, D."""
    return ", ".join(row[letter] for letter in "BTD")


def figure(row: Row, key: str, digits: int = 3) -> str:
    """A figure of a row with some digits; empty where the row has none."""
    return f"{float(row[key]):.{digits}g}" if row[key] else ""


def kernels() -> str:
    """Generated CUDA kernels against the bytes that they must move."""
    rows = read("kernels.csv")
    head = ["cell", "pass", "dtype", "B, T, D", "ms", "do_bench", "limit", "over limit", "aim"]
    head += ["ns a step", "of the LSTM's"]
    body = [
        [
            *(row["what"], row["pass"], row["dtype"], size(row)),
            *(figure(row, key) for key in ("graph_ms", "do_bench_ms", "limit_ms", "of_limit")),
            *(figure(row, key) for key in ("aim_ms", "ns_per_step", "of_lstm")),
        ]
        for row in rows
        if row["section"] == "kernels"
    ]
    floors = [
        f" A kernel of one element takes {float(row['graph_ms']) * 1e3:.2g} us, by do_bench "
        f"{float(row['do_bench_ms']) * 1e3:.2g}."
        for row in rows
        if row["section"] == "empty"
    ]
    return (
        f"Medians in ms {source(rows, 'kernels.csv')}. Copies run at {rows[0]['copy_GB_per_s']} "
        f"GB/s, read and written.{''.join(floors)}\n\n{table(head, body)}"
    )


def kernels_layers() -> str:
    """Whole layers and what others do at their size."""
    rows = [row for row in read("kernels.csv") if row["section"] in ("layers", "peers")]
    passes = ("forward", "both")
    body = []
    for what in dict.fromkeys(row["what"] for row in rows):
        mine = {row["pass"]: row for row in rows if row["what"] == what}
        keys = ("graph_ms", "do_bench_ms", "aim_ms")
        body.append(
            [what, *(figure(mine[p], key) if p in mine else "" for p in passes for key in keys)]
        )
    titles = ("forward", "forward + backward")
    head = ["", *(f"{title}{kind}" for title in titles for kind in ("", ", do_bench", ", aim"))]
    about = f"B, T, D = {size(rows[0])}, {rows[0]['dtype']}"
    return f"Medians in ms, {about} {source(rows, 'kernels.csv')}:\n\n{table(head, body)}"


def kernels_memory() -> str:
    """Memory of a layer's passes, with and without recomputing the gates."""
    rows = read("kernels_memory.csv")
    keys = ("kept_bytes", "kept_explained", "peak_bytes", "peak_explained")
    body = [
        ["yes" if row["recompute_gates"] == "True" else "no"]
        + [f"{int(row[key]) / 2**20:.1f}" for key in keys]
        for row in rows
    ]
    head = ["gates recomputed", "kept for the backward pass", "explained", "peak", "explained"]
    text = f"MiB, B, T, D = {size(rows[0])} {source(rows, 'kernels_memory.csv')}:"
    return f"{text}\n\n{table(head, body)}"


def speedup_cuda() -> str:
    """Engines against loops in Python, at the length that the paper's figures stand beside."""
    rows = [row for row in read("speedup_cuda.csv") if row["paper_forward"]]
    loops, kinds = ("eager", "compiled"), ("forward", "both")
    body = [
        [
            *(row["cell"], row["way"]),
            *(figure(row, f"{kind}_ms") for kind in kinds),
            *(f"{float(row[f'{kind}_over_{loop}']):.1f} x" for kind in kinds for loop in loops),
            f"{row['paper_forward']} x",
        ]
        for row in rows
    ]
    titles = {"forward": "forward", "both": "forward + backward"}
    head = ["cell", "", *(f"{titles[kind]}, ms" for kind in kinds)]
    head += [f"{titles[kind]}, over {loop}" for kind in kinds for loop in loops]
    head += ["paper, forward (A100)"]
    text = f"B, T, D = {size(rows[0])}, float32 {source(rows, 'speedup_cuda.csv')}:"
    return f"{text}\n\n{table(head, body)}"


def over_loop(row: Row) -> list[str]:
    """Newton's time, sweeps, the loop's time and the speed-up, the limit's ratio and the aim."""
    keys = ("newton_ms", "sequential_ms", "speedup", "of_limit", "aim_ms")
    newton, loop, speedup, of_limit, aim = (figure(row, key) for key in keys)
    return [newton, row["sweeps"], loop, f"{speedup} x", of_limit, aim]


OVER_LOOP = ["(newton, fused)", "sweeps", "(sequential, fused)", "speed-up", "over limit", "aim"]


def split_times(section: str, first: str, with_pass: bool = True) -> str:
    """A section of the kernels that split time."""
    rows = [row for row in read("parallel.csv") if row["section"] == section]
    body = []
    for row in rows:
        passes = [row["pass"]] if with_pass else []
        body.append([row["what"], *passes, row["dtype"], size(row), *over_loop(row)])
    head = [first, *(["pass"] if with_pass else []), "dtype", "B, T, D", *OVER_LOOP]
    keep = [i for i, _ in enumerate(head) if any(line[i] for line in body)]
    lines = [[line[i] for i in keep] for line in body]
    text = f"Medians in ms {source(rows, 'parallel.csv')}:"
    return f"{text}\n\n{table([head[i] for i in keep], lines)}"


def auto_cuda() -> str:
    """Both solvers' kernels and what auto takes."""
    rows = read("auto_cuda.csv")
    worst = max(float(row["auto_of_best"]) for row in rows)
    shown = [row for row in rows if row["dtype"] == "float32" and row["T"] in ("512", "2048")]
    body = [
        [
            row["what"],
            size(row),
            figure(row, "sequential_ms"),
            figure(row, "newton_ms"),
            row["auto"],
        ]
        for row in shown
    ]
    text = (
        f"ms {source(rows, 'auto_cuda.csv')}. At worst `auto` takes {worst:.2f} times the better "
        f"one's time, over {len(rows)} sizes and dtypes; float32, two lengths of four:"
    )
    head = ["cell", "B, T, D", "(sequential, fused)", "(newton, fused)", "`auto`"]
    return f"{text}\n\n{table(head, body)}"


def scaling() -> str:
    """The scan, and forward + backward of whole solves, at some lengths, by every pair."""
    rows = [
        row for row in read("scaling.csv") if row["section"] == "reduction" or row["pass"] == "both"
    ]
    lengths = ("64", "512", "4096", "65536", "131072", "1048576", "4194304")
    body = []
    for key in dict.fromkeys((row["section"], row["what"], row["way"]) for row in rows):
        mine = {
            row["T"]: figure(row, "ms")
            for row in rows
            if (row["section"], row["what"], row["way"]) == key
        }
        what = f"scan, {key[1]}" if key[0] == "reduction" else key[1]
        body.append([what, key[2], *(mine.get(length, "") for length in lengths)])
    head = ["", "by", *(f"T = {int(length):,}" for length in lengths)]
    text = f"ms, B = 1, D = {rows[0]['D']}, float32 {source(rows, 'scaling.csv')}:"
    return f"{text}\n\n{table(head, body)}"


FIGURES: dict[str, Callable[[], str]] = {
    "demo": demo,
    "auto_torch": auto_torch,
    "auto_cuda": auto_cuda,
    "parallel": lambda: split_times("shapes", "cell"),
    "parallel_hard": lambda: split_times("hard", "GRU with", with_pass=False),
    "scaling": scaling,
    "scan": lambda: split_times("scan", "decay"),
    "compile": compile_times,
    "cpu": cpu,
    "newton_iterations": newton_iterations,
    "kernels": kernels,
    "kernels_layers": kernels_layers,
    "kernels_memory": kernels_memory,
    "speedup_cuda": speedup_cuda,
    "resources": resources,
}


def rendered(text: str) -> str:
    """A page's text with every marked table as the results have it."""
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
        sys.exit(f"tables differ from the results: {', '.join(stale)}; run benchmarks/tables.py")


if __name__ == "__main__":
    main()
