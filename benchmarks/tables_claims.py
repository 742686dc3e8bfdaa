"""The paper's claims next to what this project has measured, from the result files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from common import RESULTS
from learn_results import CORPORA, results
from markdown_tables import CELLS, NAMES, one, read, table
from paper_results import PUBLISHED
from paper_ways import EAGER, LOOP, MAMBA, SCAN_KERNEL, SIMPLIFIED, TORCH_SCAN

from pararnn.lab.tasks.results import percent, read_results
from pararnn.lab.tasks.table import PAPER, TASKS

STEADY = 3.0
"""Percent within which rates count as one."""
Claim = tuple[str, str, str, str, str]
"""Claim of the paper and its source, its figure, ours, if it holds here, and the command."""
SOLVED = 0.999
"""Least accuracy of a task that counts as solved."""
KERNELS = "`python benchmarks/paper_kernels.py --only {}`"
SEQUENTIAL, NEWTON = "sequential, fused", "newton, fused"
Times = Callable[..., float]


def paper_times(name: str) -> Times:
    """Return a function that looks up a time in a file of the paper's figures: minimum, in ms."""
    rows = read(name)

    def time(what: str, way: str, steps: int, launch: str = "graph") -> float:
        row = one(rows, what=what, way=way, T=steps, launch=launch, **{"pass": "forward"})
        return float(row["min_ms"])

    return time


def verdict(ours: Iterable[float], papers: Iterable[float]) -> str:
    """Return if ratios reach the paper's, which are of other sizes and another GPU."""
    reaches = [mine >= other for mine, other in zip(ours, papers, strict=True)]
    words = "exceeded" if all(reaches) else "in part" if any(reaches) else "not"
    return f"{words}, both as CUDA graphs where they can be"


def speed_ups(launch: str, other: Callable[[Times, str], float]) -> list[float]:
    """Return another way's minimum over our fastest kernel's, forward at T = 512, by cell."""
    ms = paper_times("paper_solve.csv")
    return [
        other(ms, cell) / min(ms(cell, way, 512, launch=launch) for way in (SEQUENTIAL, NEWTON))
        for cell in CELLS
    ]


def over_the_loop() -> Claim:
    def speed_up(loop: str, launch: str) -> list[float]:
        return speed_ups(launch, lambda ms, cell: ms(cell, loop, 512, launch="call"))

    def text(loop: str) -> str:
        graph, call = (
            " and ".join(f"{ratio:,.0f}" for ratio in speed_up(loop, launch))
            for launch in ("graph", "call")
        )
        return f"{graph} as a CUDA graph, {call} called eagerly"

    return (
        "a fused forward pass against the loop in Python, at T = 512 (Figure 1)",
        "665 (GRU) and 447 (LSTM) times, for its own sizes on an A100",
        f"over an eager loop {text(EAGER)}; over a compiled step {text(LOOP)}; B = 1, "
        f"D = {read('paper_solve.csv')[0]['D']}",
        verdict(speed_up(LOOP, "graph"), (665, 447)),
        KERNELS.format("solve"),
    )


def kernels() -> Claim:
    def speed_up(launch: str) -> list[float]:
        return speed_ups(launch, lambda ms, _: ms("mamba", SIMPLIFIED, 512, launch=launch))

    graph, call = speed_up("graph"), speed_up("call")
    each = [
        f"{cell.upper()} {ratio:.2g} as CUDA graphs, {eager:.2g} called"
        for cell, ratio, eager in zip(CELLS, graph, call, strict=True)
    ]
    return (
        "a fused forward pass against a simplified Mamba, T = 512 (Figure 2, right)",
        "GRU 2.6, LSTM 1.5 times as fast",
        f"{'; '.join(each)}; B = 1, D = {read('paper_solve.csv')[0]['D']}",
        verdict(graph, (2.6, 1.5)),
        KERNELS.format("solve"),
    )


def reduction() -> Claim:
    ms, kinds = paper_times("paper_reduction.csv"), ("diagonal", "2 x 2")
    rows = [row for row in read("paper_reduction.csv") if row["launch"] == "graph"]

    def speed_up(way: str, length: int) -> list[float]:
        """Return the speed-ups over PyTorch's scans, or over a peer's diagonal one."""
        return [
            ms(kind if way == TORCH_SCAN else "diagonal", way, length)
            / ms(kind, SCAN_KERNEL, length)
            for kind in kinds
        ]

    def text(way: str, length: int) -> str:
        return " and ".join(f"{ratio:.2g}" for ratio in speed_up(way, length))

    last, last_torch = (
        max(int(row["T"]) for row in rows if row["way"] == way) for way in (MAMBA, TORCH_SCAN)
    )
    return (
        "the reduction in CUDA against the one in PyTorch, to T = 2^22 (Figure 2, left)",
        "curves; 1.1 (diagonal) and 0.84 (2 x 2) times Mamba's scan at T = 512",
        f"diagonal and 2 x 2: {text(MAMBA, 512)} times as fast as Mamba's diagonal scan at "
        f"T = 512, {text(MAMBA, last)} at {last:,}; {text(TORCH_SCAN, last_torch)} times as fast "
        f"as PyTorch's, compiled, at {last_torch:,}, the longest that was compiled",
        verdict(speed_up(MAMBA, 512), (1.1, 0.84)),
        KERNELS.format("reduction"),
    )


def iterations() -> Claim:
    rows = read("newton_iterations.csv")

    def text(cell: str, stage: str) -> str:
        counts = {int(r["iterations"]) for r in rows if (r["cell"], r["stage"]) == (cell, stage)}
        return "-".join(str(n) for n in sorted({min(counts), max(counts)})) + f" {stage}"

    each = [
        f"{cell[:-4]} {text(cell, 'at initialisation')} and {text(cell, 'trained')}"
        for cell in ("GRUCell", "LSTMCell")
    ]
    return (
        "Newton's iterations, at initialisation and trained (Appendix A)",
        "3, whatever the stage and the length",
        f"until the numerics contract holds: {'; '.join(each)}",
        "at initialisation; trained cells need more",
        "`python benchmarks/newton_iterations.py`",
    )


def step_time() -> Claim:
    rows = [row for row in read("lm_step.csv") if (row["T"], row["packed"]) == ("2048", "False")]

    def ratio(name: str, scale: str) -> str:
        mine, other = (
            float(one(rows, model=f"{model}-{scale}")["median_ms"])
            for model in (name, "transformer")
        )
        return f"{mine / other:.2f}"

    ours = ", ".join(
        f"{NAMES[name]} {ratio(name, '400M')} and {ratio(name, '1B')}"
        for name in (*CELLS, "mamba2")
    )
    return (
        "a training step against the Transformer's, T = 2,048 (Table 3)",
        "GRU 1.18 to 1.22, LSTM 1.38 to 1.50, Mamba2 1.41 to 1.47",
        f"{ours} at 400M and 1B, without an optimizer, one H200",
        "exceeded",
        "`python benchmarks/lm_step.py`",
    )


def step_time_7b() -> Claim:
    two = {"gpus": 2, "rows_a_gpu": 8, "T": 2048, "way": "plain", "overrides": ""}
    gru, lstm, other = (
        one(read("lm_scale.csv"), recipe=f"{name}-7b", **two) for name in (*CELLS, "transformer")
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


def context_rates() -> dict[str, dict[int, int]]:
    """Return the tokens/s of training by model and context."""
    rows = [row for row in read("lm_context.csv") if not row["note"]]
    return {
        name: {int(r["T"]): int(r["tokens_per_s"]) for r in rows if r["model"].startswith(name)}
        for name in NAMES
    }


def slowdown(rates: Mapping[int, int]) -> float:
    """Return the percents by which the lowest rate is below the highest."""
    return 100 * (1 - min(rates.values()) / max(rates.values()))


def context() -> Claim:
    rates = context_rates()
    scale = read("lm_context.csv")[0]["model"].rpartition("-")[2]
    loss = {name: slowdown(of) for name, of in rates.items()}
    lengths = sorted(rates["transformer"])

    def ratios(length: int) -> str:
        each = (rates[cell][length] / rates["transformer"][length] for cell in CELLS)
        return " and ".join(f"{ratio:.1f}" for ratio in each)

    return (
        "training's tokens/s do not depend on the context; attention's fall with it",
        "no figures",
        f"slowest below fastest, T = {lengths[0]:,} to {lengths[-1]:,} at {scale}: "
        f"{', '.join(f'{NAMES[name]} {percents:.1f}%' for name, percents in loss.items())}; GRU "
        f"and LSTM {ratios(32768)} times the Transformer's at 32,768, {ratios(lengths[-1])} at "
        f"{lengths[-1]:,}",
        "for GRU and LSTM" if all(loss[cell] < STEADY for cell in CELLS) else "not",
        "`python benchmarks/lm_context.py`",
    )


def decoding() -> Claim:
    graphs = [row for row in read("lm_decode.csv") if row["way"] == "graph"]
    rates_rows = [row for row in read("lm_generate.csv") if row["way"] == "cache"]
    by_model = {
        name: {
            int(row["tokens"]): float(row["tokens_per_s"])
            for row in rates_rows
            if row["model"] == f"{name}-1B"
        }
        for name in NAMES
    }
    common = sorted(set.intersection(*map(set, by_model.values())))
    most, attention = common[-1], by_model["transformer"]
    ahead = [n for n in common if all(by_model[cell][n] > attention[n] for cell in CELLS)]
    as_graphs = ", ".join(
        f"{NAMES[name]} "
        f"{1000 / float(one(graphs, model=f'{name}-1B', B=1, context=2048)['median_ms']):,.0f}"
        for name in NAMES
    )
    return (
        "tokens/s of generating at 1B, batch 1 (Figure 3)",
        "GRU 37, LSTM 35, Mamba2 27; the Transformer's fall with the length",
        f"{most} tokens: "
        f"{', '.join(f'{NAMES[name]} {rates[most]:.0f}' for name, rates in by_model.items())} "
        "by `sample`, which records steps, fused where there are kernels; as CUDA graphs of "
        f"compiled blocks, 2,048 before: {as_graphs}",
        f"for GRU and LSTM at {', '.join(map(str, ahead))}; with fewer, steps are called and "
        "bound by the host, and the Transformer's are faster"
        if ahead
        else f"not: up to {most} tokens, all that was measured, the Transformer is the fastest",
        "`python benchmarks/lm_generate.py`, `python benchmarks/lm_decode.py`",
    )


def tasks() -> Claim:
    results = {(r["task"], r["mixer"]): r for r in read_results(RESULTS / "tasks" / "table6")}
    names = list(TASKS)[:5]

    def accuracies(mixer: str) -> str:
        own = [results[task, mixer] for task in names]
        return "/".join(f"{percent(r['best'])}{'+' * r['capped']}" for r in own)

    low = [task for task in names if min(results[task, c]["best"] for c in CELLS) < SOLVED]
    return (
        "Keep-n-th, Parity, MQAR, 1-hop, 2-hop, in percent (Tables 1 and 6)",
        "; ".join(f"{name} {'/'.join(map(str, PAPER[name]))}" for name in NAMES),
        "; ".join(f"{name} {accuracies(name)}" for name in NAMES) + " (+: capped)",
        f"for GRU and LSTM, but for {', '.join(low)}" if low else "for GRU and LSTM",
        "`pararnn tasks run`, see [Synthetic tasks](#synthetic-tasks)",
    )


def learning() -> Claim:
    order = sorted((row for row in PUBLISHED if row.size == "400M"), key=lambda r: r.perplexity)
    every = {corpus: results(read(f"learn_{corpus}.csv")) for corpus in CORPORA}
    shared = set.intersection(*({each.mixer for each in own} for own in every.values()))
    every = {c: [each for each in own if each.mixer in shared] for c, own in every.items()}
    ends = {c: [(each.mean, each.mixer) for each in own] for c, own in every.items()}
    least = {c: [(each.least[2], each.mixer) for each in own] for c, own in every.items()}

    def text(bits: Iterable[tuple[float, str]]) -> str:
        return ", ".join(f"{mixer} {value:.3f}" for value, mixer in sorted(bits))

    return (
        "who has the lowest perplexity among equals (Table 5, 400M)",
        ", ".join(f"{row.model} {row.perplexity:.2f}" for row in order),
        "bits per byte at 60M, "
        + "; ".join(
            f"{c}: {text(ends[c])} at the end, {text(least[c])} at the least on the way"
            for c in CORPORA
        ),
        "; ".join(
            f"{c}: {min(ends[c])[1]} first at the end, {min(least[c])[1]} by the least"
            for c in CORPORA
        ),
        "`python benchmarks/learn.py --corpus code --jobs benchmarks/learn_60M.txt --rows 16`",
    )


def language() -> Claim:
    return (
        "perplexity and downstream tasks to 7B (Tables 2 and 5)",
        "GRU 9.19, LSTM 9.16, Mamba2 8.62, Transformer 9.55 at 7B",
        "no run of that size",
        "not tried; `pararnn eval` writes ours next to the paper's",
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
    """Return a row a claim."""
    head = ["claim", "the paper", "here", "holds here?", "command"]
    return table(head, [claim() for claim in CLAIMS])
