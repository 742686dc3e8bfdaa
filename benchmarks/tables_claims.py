"""The paper's claims beside what this project has measured, from the result files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from common import RESULTS
from markdown_tables import Row, figure, measured, read, table
from tables_learn import CORPORA, results

from pararnn.evaluation.paper import PUBLISHED
from pararnn.tasks.report import percent, read_results
from pararnn.tasks.table import PAPER, TASKS

CELLS = ("gru", "lstm")
SPEEDUP_PAPER = "665 (GRU) and 447 (LSTM) times, for its own sizes on an A100"
REDUCTION = "the reduction in CUDA against the one in PyTorch, to T = 2^22 (Figure 2, left)"
REDUCTION_PAPER = "curves; 1.1 (diagonal) and 0.84 (2 x 2) times Mamba's scan at T = 512"
Claim = tuple[str, str, str, str, str]
"""What the paper says and where, its figure, ours, whether it holds here, the command."""


def one(rows: Iterable[Row], **values: Any) -> Row:
    """The one row with these values."""
    wanted = {key: str(value) for key, value in values.items()}
    (row,) = (row for row in rows if wanted.items() <= row.items())
    return row


def verdict(ours: Iterable[float], papers: Iterable[float]) -> str:
    """Whether ratios reach the paper's, which are of other sizes and another GPU."""
    reached = [mine >= other for mine, other in zip(ours, papers, strict=True)]
    if not reached:
        return "not compared yet"
    words = "exceeded" if all(reached) else "in part" if any(reached) else "not"
    return f"{words}, both as CUDA graphs where they can be: [Kernel figures](kernel-figures.md)"


def over_the_loop() -> Claim:
    if measured("paper_solve.csv"):
        return _over_the_loop()
    rows = [row for row in read("speedup_cuda.csv") if row["T"] == "512"]

    def ratios(way: str, loop: str) -> str:
        found = (float(one(rows, cell=c, way=way)[f"forward_over_{loop}"]) for c in CELLS)
        return " and ".join(f"{ratio:,.0f}" for ratio in found)

    graph = "sequential, fused, CUDA graph"
    ours = (
        f"over an eager loop {ratios(graph, 'eager')} as a CUDA graph, "
        f"{ratios('sequential, fused', 'eager')} called eagerly; over a compiled step "
        f"{ratios(graph, 'compiled')} and {ratios('sequential, fused', 'compiled')}"
    )
    return (
        "a fused forward pass against the loop in Python, at T = 512 (Figure 1)",
        SPEEDUP_PAPER,
        ours,
        "exceeded as a graph; called eagerly, the host's time is the larger part",
        "`python benchmarks/speedup.py`",
    )


SOLVED = 0.999
"""An accuracy from which on a task counts as solved."""


def _fastest(rows: Iterable[Row], launch: str, **values: Any) -> float:
    """The least ms of our kernels."""
    return min(
        float(one(rows, way=way, launch=launch, **values)["min_ms"])
        for way in ("sequential, fused", "newton, fused")
    )


def _over_the_loop() -> Claim:
    rows = read("paper_solve.csv")
    step = {"pass": "forward", "T": 512}

    def ratios(loop: str, launch: str) -> list[float]:
        return [
            float(one(rows, what=cell, way=loop, launch="call", **step)["min_ms"])
            / _fastest(rows, launch, what=cell, **step)
            for cell in CELLS
        ]

    def shown(loop: str) -> str:
        return ", ".join(
            f"{' and '.join(f'{ratio:,.0f}' for ratio in ratios(loop, launch))} {how}"
            for launch, how in (("graph", "as a CUDA graph"), ("call", "called eagerly"))
        )

    return (
        "a fused forward pass against the loop in Python, at T = 512 (Figure 1)",
        SPEEDUP_PAPER,
        f"over an eager loop {shown('loop, eager')}; over a compiled step "
        f"{shown('loop, compiled step')}; B = 1, D = {rows[0]['D']}",
        verdict(ratios("loop, compiled step", "graph"), (665, 447)),
        "`python benchmarks/paper_kernels.py --only solve`",
    )


def iterations() -> Claim:
    rows = read("newton_iterations.csv")

    def spread(cell: str, stage: str) -> str:
        found = {int(r["iterations"]) for r in rows if (r["cell"], r["stage"]) == (cell, stage)}
        return "-".join(str(n) for n in sorted({min(found), max(found)}))

    stages = ("at initialisation", "trained")
    each = [
        f"{cell[:-4]} {spread(cell, stages[0])} at initialisation and {spread(cell, stages[1])} "
        "trained"
        for cell in ("GRUCell", "LSTMCell")
    ]
    return (
        "Newton's iterations, at initialisation and trained (Appendix A)",
        "3, whatever the stage and the length",
        f"until the numerics contract holds: {'; '.join(each)}",
        "at initialisation; trained cells take more",
        "`python benchmarks/newton_iterations.py`",
    )


def reduction() -> Claim:
    if measured("paper_reduction.csv"):
        return _reduction()
    rows = [row for row in read("scaling.csv") if row["section"] == "reduction"]

    def ratio(what: str) -> float:
        kernel, torch = (
            float(one(rows, what=what, way=way, T=2**22)["ms"])
            for way in ("scan kernel", "PyTorch")
        )
        return torch / kernel

    return (
        REDUCTION,
        REDUCTION_PAPER,
        f"{ratio('diagonal'):.1f} and {ratio('2 x 2'):.1f} times PyTorch's at T = 2^22; "
        "Mamba's scan not measured",
        "in part",
        "`python benchmarks/scaling.py`",
    )


def _reduction() -> Claim:
    rows = read("paper_reduction.csv")

    def over(way: str, what: str, length: int) -> list[float]:
        """How many times as fast as a peer's diagonal scan, or PyTorch's own, ours is."""
        ours = one(rows, what=what, way="scan kernel", launch="graph", T=length)
        kind = what if way.startswith("PyTorch") else "diagonal"
        key = {"what": kind, "way": way, "launch": "graph", "T": str(length)}
        theirs = [float(row["min_ms"]) for row in rows if key.items() <= row.items()]
        return [ms / float(ours["min_ms"]) for ms in theirs]

    def shown(way: str, length: int) -> str:
        found = [over(way, what, length) for what in ("diagonal", "2 x 2")]
        return " and ".join(f"{ratio[0]:.2g}" if ratio else "-" for ratio in found)

    mamba = "Mamba's selective scan"
    at_512 = [ratio for what in ("diagonal", "2 x 2") for ratio in over(mamba, what, 512)]
    return (
        REDUCTION,
        REDUCTION_PAPER,
        f"diagonal and 2 x 2: {shown(mamba, 512)} times as fast as Mamba's scan at T = 512, "
        f"{shown(mamba, 2**22)} at 2^22; {shown('PyTorch, compiled', 2**22)} times as fast as "
        "PyTorch's, compiled, at 2^22",
        verdict(at_512, (1.1, 0.84) if at_512 else ()),
        "`python benchmarks/paper_kernels.py --only reduction`",
    )


def step_time() -> Claim:
    rows = read("lm_step.csv")
    names = {row["model"].split("-")[0] for row in rows}

    def ratio(cell: str, scale: str) -> float:
        mine, other = (
            float(one(rows, model=f"{name}-{scale}", T=2048, packed=False)["median_ms"])
            for name in (cell, "transformer")
        )
        return mine / other

    ours = ", ".join(
        f"{label} {' and '.join(f'{ratio(name, scale):.2f}' for scale in ('400M', '1B'))}"
        for name, label in {"gru": "GRU", "lstm": "LSTM", "mamba2": "Mamba2"}.items()
        if name in names
    )
    return (
        "a training step against the Transformer's, T = 2,048 (Table 3)",
        "GRU 1.18 to 1.22, LSTM 1.38 to 1.50, Mamba2 1.41 to 1.47",
        f"{ours} at 400M and 1B, without an optimizer, one H200",
        "exceeded",
        "`python benchmarks/lm_step.py`",
    )


def step_time_7b() -> Claim:
    rows = read("train_step.csv")
    mine, other = (
        one(rows, recipe=f"{name}-7b", path="trainer", gpus=2) for name in ("gru", "transformer")
    )
    ratio = float(mine["mean_ms"]) / float(other["mean_ms"])
    return (
        "7B models train in parallel over the sequence (Table 3)",
        "GRU 1.18, LSTM 1.38 times the Transformer's step, 8 GPUs",
        f"GRU {ratio:.2f} on 2 H200s, {int(mine['tokens_per_s']):,} tokens/s, MFU "
        f"{mine['mfu_percent']}%",
        "exceeded for the step; no such model has been trained here",
        "`torchrun --nproc-per-node=2 benchmarks/train_step.py gru-7b --rows 4`",
    )


def decoding() -> Claim:
    rows = read("lm_decode.csv")

    def rate(model: str, way: str) -> str:
        row = one(rows, model=f"{model}-1B", way=way, B=1, context=2048)
        return f"{1000 / float(row['median_ms']):,.0f}"

    labels = {"gru": "GRU", "lstm": "LSTM", "mamba2": "Mamba2", "transformer": "Transformer"}
    measured = {row["model"].split("-")[0] for row in rows}
    names = [name for name in labels if name in measured]
    eager, graph = (", ".join(rate(name, way) for name in names) for way in ("eager", "graph"))
    return (
        "tokens/s at 1B, batch 1 (Figure 3)",
        "GRU 37, LSTM 35, Mamba2 27; the Transformer's fall with the length",
        f"{', '.join(labels[name] for name in names)} with its cache, 2,048 before: {eager} "
        f"eagerly, {graph} as graphs",
        "exceeded as graphs; called eagerly not by the LSTM, and the Transformer is faster",
        "`python benchmarks/lm_decode.py`",
    )


def tasks() -> Claim:
    results = {(r["task"], r["mixer"]): r for r in read_results(RESULTS / "tasks" / "table6")}

    def shares(mixer: str) -> str:
        found = [results[task, mixer] for task in list(TASKS)[:5]]
        return "/".join(f"{percent(r['best'])}{'+' * r['capped']}" for r in found)

    def published(mixer: str) -> str:
        return "/".join(map(str, PAPER[mixer]))

    mixers = ("gru", "lstm", "mamba2", "transformer")
    low = [
        task
        for task in list(TASKS)[:5]
        if any(results[task, ours]["best"] < SOLVED for ours in ("gru", "lstm"))
    ]
    return (
        "Keep-n-th, Parity, MQAR, 1-hop, 2-hop, in percent (Tables 1 and 6)",
        "; ".join(f"{name} {published(name)}" for name in mixers),
        "; ".join(f"{name} {shares(name)}" for name in mixers) + " (+: capped)",
        f"for GRU and LSTM, but for {', '.join(low)}, capped" if low else "for GRU and LSTM",
        "`pararnn tasks run`, see [Synthetic tasks](tasks.md)",
    )


def kernels() -> Claim:
    if measured("paper_solve.csv"):
        return _kernels()
    rows = [row for row in read("scaling.csv") if row["section"] == "solve"]

    def ms(cell: str) -> str:
        row = one(rows, what=cell, way="auto", T=512, **{"pass": "forward"})
        return figure(row, "ms")

    return (
        "a fused forward pass against a simplified Mamba, T = 512 (Figure 2, right)",
        "GRU 2.6, LSTM 1.5 times as fast",
        f"GRU {ms('gru')} ms, LSTM {ms('lstm')} ms at batch 1, width 64; Mamba not measured",
        "not compared yet",
        "`python benchmarks/scaling.py`",
    )


def _kernels() -> Claim:
    rows = read("paper_solve.csv")
    step = {"pass": "forward", "T": "512"}

    def as_fast(cell: str, launch: str) -> list[float]:
        key = {"what": "mamba", "launch": launch, **step}
        theirs = [float(row["min_ms"]) for row in rows if key.items() <= row.items()]
        return [ms / _fastest(rows, launch, what=cell, **step) for ms in theirs]

    def shown(cell: str, launch: str) -> str:
        return "-" if not (found := as_fast(cell, launch)) else f"{found[0]:.2g}"

    each = [
        f"{cell.upper()} {shown(cell, 'graph')} as CUDA graphs, {shown(cell, 'call')} called"
        for cell in CELLS
    ]
    found = [ratio for cell in CELLS for ratio in as_fast(cell, "graph")]
    return (
        "a fused forward pass against a simplified Mamba, T = 512 (Figure 2, right)",
        "GRU 2.6, LSTM 1.5 times as fast",
        f"{'; '.join(each)}; B = 1, D = {rows[0]['D']}",
        verdict(found, (2.6, 1.5) if found else ()),
        "`python benchmarks/paper_kernels.py --only solve`",
    )


def learning() -> Claim:
    order = [row for row in PUBLISHED if row.size == "400M"]
    theirs = sorted(order, key=lambda row: row.perplexity)
    found = {
        corpus: results(read(f"learn_{corpus}.csv"))
        for corpus in CORPORA
        if measured(f"learn_{corpus}.csv")
    }
    ours = "; ".join(
        f"{corpus}: {', '.join(f'{each.mixer} {each.mean:.3f}' for each in every)}"
        for corpus, every in found.items()
    )
    return (
        "who has the lowest perplexity among equals (Table 5, 400M)",
        ", ".join(f"{row.model} {row.perplexity:.2f}" for row in theirs),
        f"bits per byte at 60M, {ours}" if found else "not measured yet",
        "; ".join(f"{corpus}: {every[0].mixer} first" for corpus, every in found.items())
        or "not compared yet",
        "`python benchmarks/learn.py english code`",
    )


def language() -> Claim:
    return (
        "perplexity and downstream tasks to 7B (Tables 2 and 5)",
        "GRU 9.19, LSTM 9.16, Mamba2 8.62, Transformer 9.55 at 7B",
        "no run of that size",
        "not tried; `pararnn eval` writes ours beside the paper's",
        "`pararnn eval MODEL --preset paper`",
    )


CLAIMS: tuple[Callable[[], Claim], ...] = (
    over_the_loop,
    kernels,
    reduction,
    iterations,
    step_time,
    step_time_7b,
    decoding,
    tasks,
    learning,
    language,
)


def claims() -> str:
    """A row a claim."""
    head = ["claim", "the paper", "here", "holds here?", "command"]
    return table(head, [claim() for claim in CLAIMS])
