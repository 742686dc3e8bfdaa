"""The paper's claims beside what this project has measured, from the result files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from common import RESULTS
from markdown_tables import Row, measured, one, read, table
from paper_ways import MAMBA, SCAN_KERNEL, TORCH_SCAN
from tables_learn import CORPORA, results

from pararnn.evaluation.paper import PUBLISHED
from pararnn.tasks.results import percent, read_results
from pararnn.tasks.table import PAPER, TASKS

CELLS = ("gru", "lstm")
NAMES = {"gru": "GRU", "lstm": "LSTM", "mamba2": "Mamba2", "transformer": "Transformer"}
STEADY = 3.0
"""Percent within which rates count as one."""
Claim = tuple[str, str, str, str, str]
"""What the paper says and where, its figure, ours, whether it holds here, the command."""


def verdict(ours: Iterable[float], papers: Iterable[float]) -> str:
    """Whether ratios reach the paper's, which are of other sizes and another GPU."""
    reached = [mine >= other for mine, other in zip(ours, papers, strict=True)]
    words = "exceeded" if all(reached) else "in part" if any(reached) else "not"
    return f"{words}, both as CUDA graphs where they can be: [Kernel figures](kernel-figures.md)"


SOLVED = 0.999
"""An accuracy from which on a task counts as solved."""


def _fastest(rows: Iterable[Row], launch: str, **values: Any) -> float:
    """The least ms of our kernels."""
    return min(
        float(one(rows, way=way, launch=launch, **values)["min_ms"])
        for way in ("sequential, fused", "newton, fused")
    )


def over_the_loop() -> Claim:
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
        "665 (GRU) and 447 (LSTM) times, for its own sizes on an A100",
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
    rows = [row for row in read("paper_reduction.csv") if row["launch"] == "graph"]
    kinds = ("diagonal", "2 x 2")

    def longest(way: str) -> int:
        """The longest length at which both are measured, as ours is at all of them."""
        return max(int(row["T"]) for row in rows if row["way"] == way)

    def over(way: str, length: int) -> list[float]:
        """How many times as fast as PyTorch's scans, or a peer's diagonal one, ours are."""
        own = [kind if way == TORCH_SCAN else "diagonal" for kind in kinds]
        at = [{"what": what, "way": way, "T": length} for what in own]
        theirs = [float(one(rows, **each)["min_ms"]) for each in at]
        mine = [one(rows, what=kind, way=SCAN_KERNEL, T=length)["min_ms"] for kind in kinds]
        return [other / float(ms) for other, ms in zip(theirs, mine, strict=True)]

    def shown(way: str, length: int) -> str:
        return " and ".join(f"{ratio:.2g}" for ratio in over(way, length))

    last, last_torch = longest(MAMBA), longest(TORCH_SCAN)
    return (
        "the reduction in CUDA against the one in PyTorch, to T = 2^22 (Figure 2, left)",
        "curves; 1.1 (diagonal) and 0.84 (2 x 2) times Mamba's scan at T = 512",
        f"diagonal and 2 x 2: {shown(MAMBA, 512)} times as fast as Mamba's diagonal scan at "
        f"T = 512, {shown(MAMBA, last)} at {last:,}; {shown(TORCH_SCAN, last_torch)} times as fast "
        f"as PyTorch's, compiled, at {last_torch:,}, the longest that was compiled",
        verdict(over(MAMBA, 512), (1.1, 0.84)),
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
    rows = read("lm_scale.csv")
    two = {"gpus": 2, "rows_a_gpu": 8, "T": 2048, "way": "plain", "overrides": ""}
    gru, lstm, other = (
        one(rows, recipe=f"{name}-7b", **two) for name in ("gru", "lstm", "transformer")
    )
    ratios = [float(row["median_ms"]) / float(other["median_ms"]) for row in (gru, lstm)]
    return (
        "7B models train in parallel over the sequence (Table 3)",
        "GRU 1.18, LSTM 1.38 times the Transformer's step, 8 GPUs",
        f"GRU {ratios[0]:.2f}, LSTM {ratios[1]:.2f} on 2 H200s; GRU "
        f"{int(gru['tokens_per_s']):,} tokens/s, MFU {gru['mfu_percent']}%",
        "exceeded for the step; no such model has been trained here",
        "`python benchmarks/lm_scale.py --gpus 2 --sections sizes --scales 7b --lengths 2048`",
    )


def context() -> Claim:
    rows = read("lm_context.csv")
    scale = rows[0]["model"].rpartition("-")[2]
    rates = {
        name: {
            int(row["T"]): int(row["tokens_per_s"])
            for row in rows
            if row["model"] == f"{name}-{scale}" and not row["note"]
        }
        for name in NAMES
    }
    apart = {name: 100 * (1 - min(of.values()) / max(of.values())) for name, of in rates.items()}
    lengths = sorted(rates["transformer"])

    def over(length: int) -> str:
        found = (rates[cell][length] / rates["transformer"][length] for cell in CELLS)
        return " and ".join(f"{ratio:.1f}" for ratio in found)

    steady = all(apart[cell] < STEADY for cell in CELLS)
    return (
        "training's tokens/s stay where they are as the context grows, attention's do not",
        "no figures",
        f"slowest below fastest, T = {lengths[0]:,} to {lengths[-1]:,} at {scale}: "
        f"{', '.join(f'{NAMES[name]} {share:.1f}%' for name, share in apart.items())}; GRU and "
        f"LSTM {over(32768)} times the Transformer's at 32,768, {over(lengths[-1])} at "
        f"{lengths[-1]:,}",
        "for GRU and LSTM" if steady else "not",
        "`python benchmarks/lm_context.py`",
    )


def decoding() -> Claim:
    eager = [row for row in read("lm_generate.csv") if row["way"] == "cache"]
    graphs = [row for row in read("lm_decode.csv") if row["way"] == "graph"]
    by_model = {
        name: {
            int(r["tokens"]): float(r["tokens_per_s"]) for r in eager if r["model"] == f"{name}-1B"
        }
        for name in NAMES
    }
    common = sorted(set.intersection(*map(set, by_model.values())))
    most, attention = common[-1], by_model["transformer"]
    rates = {name: found[most] for name, found in by_model.items()}
    ahead = [n for n in common if all(by_model[cell][n] > attention[n] for cell in CELLS)]
    as_graphs = ", ".join(
        f"{NAMES[name]} "
        f"{1000 / float(one(graphs, model=f'{name}-1B', B=1, context=2048)['median_ms']):,.0f}"
        for name in NAMES
        if any(row["model"] == f"{name}-1B" for row in graphs)
    )
    return (
        "tokens/s of generating at 1B, batch 1 (Figure 3)",
        "GRU 37, LSTM 35, Mamba2 27; the Transformer's fall with the length",
        f"{most} tokens: {', '.join(f'{NAMES[name]} {each:.0f}' for name, each in rates.items())} "
        "called with its growing cache, where `sample` records the others' steps; all of them as "
        f"CUDA graphs of compiled blocks, 2,048 before: {as_graphs}",
        f"for GRU and LSTM at {', '.join(map(str, ahead))}; where there are fewer, steps are "
        "called and bound by the host, and the Transformer's are faster"
        if ahead
        else f"not: up to {most} tokens, all that was measured, the Transformer is the fastest",
        "`python benchmarks/lm_generate.py`, `python benchmarks/lm_decode.py`",
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
    rows = read("paper_solve.csv")
    step = {"pass": "forward", "T": "512"}

    def as_fast(cell: str, launch: str) -> float:
        theirs = one(rows, what="mamba", launch=launch, **step)
        return float(theirs["min_ms"]) / _fastest(rows, launch, what=cell, **step)

    each = [
        f"{cell.upper()} {as_fast(cell, 'graph'):.2g} as CUDA graphs, "
        f"{as_fast(cell, 'call'):.2g} called"
        for cell in CELLS
    ]
    return (
        "a fused forward pass against a simplified Mamba, T = 512 (Figure 2, right)",
        "GRU 2.6, LSTM 1.5 times as fast",
        f"{'; '.join(each)}; B = 1, D = {rows[0]['D']}",
        verdict([as_fast(cell, "graph") for cell in CELLS], (2.6, 1.5)),
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

    def listed(bits: Mapping[str, float]) -> str:
        return ", ".join(
            f"{mixer} {bits[mixer]:.3f}" for mixer in sorted(bits, key=bits.__getitem__)
        )

    ends = {c: {each.mixer: each.mean for each in every} for c, every in found.items()}
    least = {c: {each.mixer: each.least[2] for each in every} for c, every in found.items()}
    ours = "; ".join(
        f"{corpus}: {listed(ends[corpus])} at the end, {listed(least[corpus])} at the least on the "
        "way"
        for corpus in found
    )

    def first(bits: Mapping[str, float]) -> str:
        return min(bits, key=bits.__getitem__)

    return (
        "who has the lowest perplexity among equals (Table 5, 400M)",
        ", ".join(f"{row.model} {row.perplexity:.2f}" for row in theirs),
        f"bits per byte at 60M, {ours}" if found else "not measured yet",
        "; ".join(
            f"{corpus}: {first(ends[corpus])} first at the end, {first(least[corpus])} by the least"
            for corpus in found
        )
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
    context,
    decoding,
    tasks,
    learning,
    language,
)


def claims() -> str:
    """A row a claim."""
    head = ["claim", "the paper", "here", "holds here?", "command"]
    return table(head, [claim() for claim in CLAIMS])
