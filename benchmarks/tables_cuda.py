"""Tables of what was measured on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markdown_tables import Row, figure, measured, not_yet, read, size, source, table
from segments import taken, worst

from pararnn.engines.rule import MIN_SEGMENTS


def resources() -> str:
    """Registers of the CUDA kernels, by cell and architecture, and what they spill."""
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


def over_loop(row: Row) -> list[str]:
    """Newton's time, sweeps, the loop's time and the speed-up, the limit's ratio and the aim."""
    keys = ("newton_ms", "sequential_ms", "speedup", "of_limit", "aim_ms")
    newton, loop, speedup, of_limit, aim = (figure(row, key) for key in keys)
    return [newton, row["sweeps"], loop, f"{speedup} x", of_limit, aim]


OVER_LOOP = ["(newton, fused)", "sweeps", "(sequential, fused)", "speed-up", "over limit", "aim"]


def split_times(
    section: str, first: str, with_pass: bool = True, name: str = "parallel.csv"
) -> str:
    """A section of the kernels that split time."""
    rows = [row for row in read(name) if row["section"] == section]
    body = []
    for row in rows:
        passes = [row["pass"]] if with_pass else []
        body.append([row["what"], *passes, row["dtype"], size(row), *over_loop(row)])
    head = [first, *(["pass"] if with_pass else []), "dtype", "B, T, D", *OVER_LOOP]
    keep = [i for i, _ in enumerate(head) if any(line[i] for line in body)]
    lines = [[line[i] for i in keep] for line in body]
    text = f"Medians in ms {source(rows, name)}:"
    return f"{text}\n\n{table([head[i] for i in keep], lines)}"


def trained() -> str:
    """How the channels of trained models forget, and the kernels that split time on them."""
    name = "parallel_trained.csv"
    if not measured(name):
        return not_yet("benchmarks/parallel.py --only trained")
    rows = read(name)
    keys = ["what", "width", "latches", "merge_median", "merge_p99"]
    keys += ["train_steps", "bits_validation"]
    body = dict.fromkeys(tuple(row[key] for key in keys) for row in rows)
    head = ["layer", "channels", "latches", "steps to merge, median", "99%", "training steps"]
    head.append("bits per byte, validation")
    return f"{table(head, body)}\n\n{split_times('trained', 'layer', name=name)}"


def of_best(rows: Sequence[Row]) -> str:
    """The worst of what `auto` takes over the better engine's time, by size, stage and pass."""
    passes, stages = ("forward", "backward", "both"), ("trained", "fresh")
    body = []
    for dtype, shape in dict.fromkeys((row["dtype"], size(row)) for row in rows):
        mine = [row for row in rows if (row["dtype"], size(row)) == (dtype, shape)]
        autos = "/".join(dict.fromkeys(row["auto"] for row in mine))
        ratios = [worst_of_best(mine, stage, step) for stage in stages for step in passes]
        body.append([dtype, shape, autos, *ratios])
    head = ["dtype", "B, T, D", "`auto`", *(f"{s}, {p}" for s in stages for p in passes)]
    return table(head, body)


def worst_of_best(rows: Iterable[Row], stage: str, step: str) -> str:
    """The worst ratio over the layers of a stage; of both passes, their times are added up."""
    layers: dict[str, list[Row]] = {}
    for row in rows:
        if row["stage"] == stage and step in (row["pass"], "both"):
            layers.setdefault(row["what"], []).append(row)
    found = []
    for own in layers.values():
        times = {s: sum(float(row[f"{s}_ms"]) for row in own) for s in ("newton", "sequential")}
        found.append(times[own[0]["auto"]] / min(times.values()))
    return f"{max(found):.2f}" if found else ""


def auto_layers() -> str:
    """What auto takes on fresh and trained layers, against the better engine."""
    name = "auto_layers.csv"
    if not measured(name):
        return not_yet("benchmarks/auto_layers.py")
    rows = read(name)
    text = "At worst over both layers of both models, times that of the better engine"
    return f"{text} {source(rows, name)}:\n\n{of_best(rows)}"


def auto_cuda() -> str:
    """Both solvers' kernels and what auto takes."""
    rows = read("auto_cuda.csv")
    least = MIN_SEGMENTS["cuda"]
    shown = [row for row in rows if row["dtype"] == "float32" and row["T"] in ("512", "2048")]
    body = [
        [
            row["what"],
            size(row),
            figure(row, "sequential_ms"),
            figure(row, "newton_ms"),
            taken(row, least),
        ]
        for row in shown
    ]
    text = (
        f"ms {source(rows, 'auto_cuda.csv')}. At worst `auto` takes {worst(rows, least):.2f} times "
        f"the better one's time, over {len(rows)} sizes and dtypes; float32, two lengths of four:"
    )
    head = ["cell", "B, T, D", "(sequential, fused)", "(newton, fused)", "`auto`"]
    return f"{text}\n\n{table(head, body)}"
