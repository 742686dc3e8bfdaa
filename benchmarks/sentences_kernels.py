"""Sentences on kernels and on splitting time whose figures are read from the result files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import mean

import segments
from markdown_tables import Row, hold, one, prose, read, span
from paper_ways import FIXED, LOOP, MAMBA, SCAN_KERNEL, SIMPLIFIED, TORCH_SCAN, WHOLE
from tables_paper import FUSED

from pararnn.engines.rule import MIN_SEGMENTS

CELLS = ("gru", "lstm")
SEQUENTIAL, NEWTON = FUSED
Times = Callable[..., float]


def of_loop(
    rows: Iterable[Row], passes: tuple[str, ...] = ("forward", "backward", "both")
) -> list[float]:
    """Return (newton, fused)'s time over the loop's."""
    return [
        float(row["newton_ms"]) / float(row["sequential_ms"])
        for row in rows
        if row["pass"] in passes
    ]


def cut(stage: str, pieces: Iterable[int], passes: tuple[str, ...]) -> list[float]:
    """Return the same of fresh or trained layers where time is cut into so many segments."""
    rows = segments.recorded()
    mine = [
        row
        for row in [*rows, *segments.both_passes(rows)]
        if row["stage"] == stage and segments.segments(row) in pieces
    ]
    return of_loop(mine, passes)


def limits() -> str:
    """Return when splitting time does not pay: README's limit."""
    few = MIN_SEGMENTS["cuda"]
    fits = range(few, 9)
    at_four = cut("trained", [4], ("forward", "backward", "both"))
    above = cut("trained", fits, ("forward", "backward", "both"))
    return prose(
        "- **Splitting time pays while channels forget.** Channels that remember cost their tile "
        "a second sweep and more: [what that takes](docs/generated-kernels.md#time-in-segments). "
        "Where a GPU has room for four segments only, a pass of a trained layer is up to "
        f"{max(at_four):.1f} times slower than the loop, and `auto` takes the loop. With {few} to "
        f"{fits[-1]} segments, some trained layers are up to {max(above):.1f} times slower and "
        f"others up to {1 / min(above):.1f} times faster. `auto` decides by size alone; "
        "`pararnn.adapt(model)` measures and switches. On a CPU the first such channel costs "
        "more than on a GPU, as no other work hides it; `auto` splits time from four threads a "
        "tile of channels on."
    ).replace("\n", "\n  ")


def rule() -> str:
    """Return why `auto` splits time from so many segments on."""
    both = ("both",)
    fresh = [1 / ratio for ratio in cut("fresh", [4], ("forward", "backward"))]
    rows = [
        row
        for row in segments.both_passes(segments.recorded())
        if row["stage"] == "trained" and segments.segments(row) == MIN_SEGMENTS["cuda"]
    ]
    means = {
        mixer: mean(of_loop(row for row in rows if row["mixer"] == mixer))
        for mixer in ("gru", "lstm", "hybrid")
    }
    hold(max(means.values()) < 1, "the mean of six segments is below 1")
    eight, forward = cut("trained", [8], both), cut("trained", [8], ("forward",))
    return prose(
        f"With 4 segments, layers that forget would run {span(fresh, '.1f')} times as fast. But "
        "[trained ones](generated-kernels.md#time-in-segments), which training spends its time "
        f"on, take up to {max(cut('trained', [4], both)):.1f} times the loop's time, forward and "
        "backward. With 6, the layers of [language models of 60M](learning.md) take "
        f"{span(of_loop(rows), '.2f')} times it: in the mean {means['gru']:.2f} (GRU), "
        f"{means['lstm']:.2f} (LSTM) and {means['hybrid']:.2f} (hybrid). With 8 trained layers "
        f"take {span(eight, '.1f')} times it (forward alone {span(forward, '.2f')}), with 13 at "
        f"most {max(cut('trained', [13], both)):.2f}, with 33 at most "
        f"{max(cut('trained', [33], both)):.2f}. Six is where the worst of them is least (`python "
        "benchmarks/segments.py`), and the passes do not call for engines of their own. Steps "
        "that are linear in their states (`scan`, linear recurrences as cells) are mended once "
        "at most, and split from 4 segments on. Where your layers forget, and 4 or 5 segments "
        "fit, [autotune](#autotune) finds that a split is faster. On the layers of small "
        "language models, before and after a training, `auto` against the better engine:"
    )


def threads() -> str:
    """Return what splitting time gives and costs on two threads of a CPU."""
    rows = [row for row in read("auto_cpu.csv") if row["threads"] == "2" and row["T"] == "65536"]

    def ratios(rows: Iterable[Row], mine: str, other: str) -> list[float]:
        return [
            float(row[f"{mine}_{step}_ms"]) / float(row[f"{other}_{step}_ms"])
            for row in rows
            for step in ("forward", "both")
        ]

    gain = max(ratios((row for row in rows if not row["what"]), "sequential", "newton"))
    loss = max(ratios((row for row in rows if row["what"]), "newton", "sequential"))
    return prose(
        "`benchmarks/parallel_cpu.py` measures both. With two threads, long sequences of cells "
        f"that forget run up to {gain:.1f} times as fast, and those of channels that do not take "
        f"up to {loss:.1f} times as long. With four and more it has not been run: there the rule "
        "follows from what a segment costs."
    )


def latches() -> str:
    """Return what channels that remember cost, and what trained layers make of a split."""
    rows = read("parallel.csv")
    base = [row for row in rows if (row["section"], row["what"]) == ("shapes", "gru")]
    costs = []
    for row in rows:
        if row["what"] == "0.2% latches":
            keys = ("pass", "dtype", "B", "T", "D")
            same = [other for other in base if all(row[key] == other[key] for key in keys)]
            costs += [1e3 * (float(row["newton_ms"]) - float(o["newton_ms"])) for o in same]
    trained = read("parallel_trained.csv")

    def of(layer: str, batch: str) -> list[float]:
        return of_loop(r for r in trained if r["what"].endswith(layer) and r["B"] == batch)

    long = [1 / ratio for ratio in of_loop(row for row in trained if row["T"] == "65536")]
    return prose(
        "Channels that latch cost a pass two meetings, an update and their mending: "
        f"{span(costs, '.0f')} us where one in 500 does, the more the longer its segments are. A "
        "tile of many slow channels costs a whole sweep for each round, of which slow channels "
        "take two to four: Newton starts far away from a channel that remembers, and gets near "
        "by squares. Trained layers hold both. With many segments that is cheap: at T = 65,536 "
        f"the layers of trained language models run {span(long, '.1f')} times as fast as the "
        "loop. With eight segments, (4, 2048, 1024), the first layers take "
        f"{span(of('layer 1', '4'), '.2f')} times the loop's time, and the second ones, with "
        f"their latches, {span(of('layer 2', '4'), '.2f')}. With four, (8, 2048, 1024), it is "
        f"{span(of('layer 1', '8'), '.2f')} and {span(of('layer 2', '8'), '.2f')}. `auto` looks "
        f"at shapes only and splits from [{MIN_SEGMENTS['cuda']} segments "
        "on](solvers-and-backends.md#what-auto-does); "
        "[`pararnn.adapt`](solvers-and-backends.md#adapting-to-data) finds layers for which the "
        "loop is faster there too.",
        "Where channels switch between states (weights of standard deviation 2 and more), "
        "Newton's starts do not come nearer, and one warp runs the rest of the tile: there a "
        f"split takes up to {max(of_loop(r for r in rows if r['what'] == 'weights 2')):.1f} times "
        "the loop's time.",
    )


def paper_times(name: str) -> Times:
    """Return what finds a time in a file of the paper's kernel figures: the minimum, in ms."""
    rows = read(name)

    def found(what: str, way: str, steps: int, **values: str) -> float:
        case = {"launch": "graph", "pass": "forward", **values}
        key = case.pop("key", "min_ms")
        return float(one(rows, what=what, way=way, T=steps, **case)[key])

    return found


def reductions() -> str:
    """Return what the table of linear recurrences says."""
    rows = read("paper_reduction.csv")
    ms = paper_times("paper_reduction.csv")
    triton, warps = "accelerated-scan, Triton", "accelerated-scan, warps"
    kernels = [MAMBA, triton, warps, SCAN_KERNEL]
    short = [
        float(row["min_ms"])
        for row in rows
        if row["launch"] == "graph" and int(row["T"]) in (16, 512, 4096) and row["way"] in kernels
    ]

    def over(way: str, steps: int, what: str = "diagonal") -> float:
        return ms(what, way, steps) / ms(what, SCAN_KERNEL, steps)

    firsts = {t: min(kernels, key=lambda way: ms("diagonal", way, t)) for t in (512, 4096)}
    hold(firsts == {512: SCAN_KERNEL, 4096: triton}, "who is first at 512 and at 4,096 steps")
    compiled = [
        over(TORCH_SCAN, t, what) for t in (512, 4096, 65536) for what in ("diagonal", "2 x 2")
    ]
    blocks = ms("2 x 2", SCAN_KERNEL, 4194304) / ms("diagonal", SCAN_KERNEL, 4194304)

    def called(ways: Iterable[str]) -> list[float]:
        return [
            float(row["median_ms"])
            for row in rows
            if row["launch"] == "call" and row["way"] in ways and int(row["T"]) in (16, 512, 4096)
        ]

    host = called([SCAN_KERNEL])
    hold(min(host) > max(called([MAMBA, triton, warps])), "scan is the slowest if called")
    least, median = (
        ms("diagonal", SCAN_KERNEL, 4096, launch="call", key=key) for key in ("min_ms", "median_ms")
    )
    return prose(
        "Up to 4,096 steps a kernel's scan is little more than a launch: as graphs they take "
        f"{span(short, '.3f')} ms. Which is first changes from length to length: ours at 512 "
        "steps, accelerated-scan at 4,096. Beyond, ours splits time over the whole GPU. At "
        f"65,536 steps Mamba's scan takes {over(MAMBA, 65536):.1f} times as long, "
        f"accelerated-scan in Triton {over(triton, 65536):.1f} times, and by warps, which end "
        f"there, {over(warps, 65536):.1f} times. At 4,194,304 Mamba's takes "
        f"{over(MAMBA, 4194304):.1f} and Triton's {over(triton, 4194304):.1f} times as long. A 2 "
        f"x 2 block holds four numbers for a diagonal's one, and takes {blocks:.1f} times as long "
        f"once memory is what limits. PyTorch, compiled, takes {span(compiled, '.1f')} times as "
        "long from 512 steps on. It is compiled for each length anew, and was to 65,536.",
        "Called from Python `pararnn.scan` is the slowest kernel at short lengths, by medians: "
        f"{span(host, '.2f')} ms of checks and of a launch by Python, where the peers' bindings "
        f"take {span(called([MAMBA, triton, warps]), '.2f')}. Here and below a minimum of calls "
        f"sometimes lies far below its median, as {least:.3f} beside {median:.2f}: in that run "
        "the host was ahead of the GPU, and the events saw the kernel alone. Graphs have no host "
        "in between, and are what to compare.",
    )


STEPS = (1, 64, 512, 2048, 32768, 131072)
"""The lengths in the tables."""


def our_kernels() -> str:
    """Return what the tables of cells say of our kernels and of loops."""
    ms = paper_times("paper_solve.csv")

    def ratios(way: str, other: str, steps: int, **values: str) -> list[float]:
        return [ms(c, way, steps, **values) / ms(c, other, steps, **values) for c in CELLS]

    hold(min(ratios(SEQUENTIAL, NEWTON, 512)) > 1, "newton, fused is faster from 512 steps on")
    called = [
        ms(cell, way, t, launch="call", key="median_ms")
        for cell in CELLS
        for way in FUSED
        for t in STEPS
        if t <= 2048
    ]
    whole = [ms(cell, WHOLE, 64) / ms(cell, SEQUENTIAL, 64) for cell in CELLS]
    loops = [ms(cell, LOOP, 512) for cell in CELLS]
    return prose(
        "**Our kernels.** As graphs both pairs are about level up to 64 steps, and (newton, "
        "fused) is the faster from 512 on; at 131,072 it is "
        f"{span(ratios(SEQUENTIAL, NEWTON, 131072), '.0f')} times as fast forward. Called, both "
        f"are the host's time up to 2,048 steps and more, {span(called, '.2f')} ms forward, by "
        "medians.",
        "**Loops.** A loop compiled as a whole is as fast as ours at one step, or faster. At 64 "
        f"steps it takes {span(whole, '.1f')} times as long as (sequential, fused) as a graph. A "
        f"compiled step as a graph takes {span(loops, '.1f')} ms for 512 steps, "
        f"{span(ratios(LOOP, SEQUENTIAL, 512), '.0f')} times (sequential, fused) and "
        f"{span(ratios(LOOP, NEWTON, 512), '.0f')} times (newton, fused): launches cost that much "
        "even without Python.",
    )


def by_operations() -> str:
    """Return what the tables of cells say of Newton by operations, with and without checks."""
    ms = paper_times("paper_solve.csv")
    compiled = f"{FIXED}, torch, compiled"
    fixed = {
        cell: [ms(cell, compiled, t) / ms(cell, NEWTON, t) for t in (64, 512, 2048, 32768)]
        for cell in CELLS
    }
    adaptive, scans = ("newton, scan", "newton, torch"), f"{FIXED}, scan"

    def times(ways: Iterable[str], steps: Iterable[int], launch: str) -> list[float]:
        return [ms(c, way, t, launch=launch) for c in CELLS for way in ways for t in steps]

    short = [t for t in STEPS if t <= 2048]
    return prose(
        "**A fixed number of updates.** In PyTorch, compiled, as a graph, three updates take "
        f"{span(fixed['gru'], '.1f')} times as long as (newton, fused) for the GRU and "
        f"{span(fixed['lstm'], '.1f')} times for the LSTM, forward, from 64 steps to 32,768, "
        "where they end. They check nothing: at these weights, which are those of "
        "initialisation, three suffice, in [trained layers](#newtons-residuals) they do not.",
        "**Newton by operations.** (newton, scan) and (newton, torch) take "
        f"{span(times(adaptive, short, 'call'), '.0f')} ms forward at any length up to 2,048, as "
        "each update is launched operation by operation and asks the GPU whether it has "
        f'converged. Three updates with our scan, "{scans}", take '
        f"{span(times([scans], short, 'call'), '.1f')} ms called, where nothing asks, and "
        f"{span(times([scans], short, 'graph'), '.2f')} ms as a graph: the rest is the host. The "
        "library does not capture these pairs in a graph, since how many updates they make "
        "depends on what they find: [what a graph would "
        "need](negative-results.md#newton-scan-and-newton-torch-in-a-cuda-graph).",
        "Beyond 2,048 steps they grow with the length, to "
        f"{span(times(adaptive, [131072], 'call'), '.0f')} ms at 131,072, where three updates "
        f"take {span(times([scans], [131072], 'graph'), '.1f')} ms as a graph: the adaptive ways "
        "hold every step to the largest state so far, and the running maximum of PyTorch that "
        "these figures were taken with goes from one step to the next, a thread each channel. It "
        "has since become a scan by pairs; on a GPU that has not been timed yet.",
    )


def peers() -> str:
    """Return what the tables of cells say of Mamba and of cuDNN."""
    ms = paper_times("paper_solve.csv")

    def mamba(steps: Iterable[int]) -> list[float]:
        return [ms("mamba", SIMPLIFIED, t) / ms(c, NEWTON, t) for c in CELLS for t in steps]

    hold(min(mamba(STEPS)) > 1, "Mamba takes longer at every length")

    def cudnn(steps: Iterable[int]) -> list[float]:
        name = {"gru": "torch.nn.GRU", "lstm": "torch.nn.LSTM"}
        return [
            ms(cell, name[cell], t, launch="call") / ms(cell, NEWTON, t, launch="call")
            for cell in CELLS
            for t in steps
        ]

    called = {what: ms(what, way, 512, launch="call") for what, way in
              (("mamba", SIMPLIFIED), ("lstm", NEWTON))}  # fmt: skip
    hold(called["mamba"] < called["lstm"], "called, Mamba is before the LSTM at 512 steps")
    return prose(
        "**Mamba.** As a graph the simplified Mamba takes longer than (newton, fused) at every "
        f"length: {span(mamba((1, 64, 512, 2048)), '.1f')} times up to 2,048 steps and "
        f"{span(mamba((32768, 131072)), '.1f')} times from 32,768 on. It has 16 states a channel "
        "where a GRU has one. Called, both are the host's time, and the order changes: at T = "
        "512 Mamba is before the LSTM.",
        "**cuDNN** computes another thing, a recurrence by a full matrix, in one call. Called, "
        f"it takes {span(cudnn((1, 64, 512)), '.1f')} times as long as (newton, fused) up to 512 "
        f"steps, {span(cudnn((2048,)), '.1f')} times at 2,048 and {span(cudnn((32768,)), '.0f')} "
        "times at 32,768, forward, and refuses 131,072.",
    )


def over_python() -> str:
    """Return how much of the ratios over a loop is Python."""
    ms = paper_times("paper_solve.csv")

    def over(way: str) -> list[float]:
        return [ms(cell, LOOP, 512) / ms(cell, way, 512) for cell in CELLS]

    python = [ms(cell, LOOP, 512, launch="call") / ms(cell, LOOP, 512) for cell in CELLS]
    least, median = (ms("gru", WHOLE, 64, launch="call", key=k) for k in ("min_ms", "median_ms"))
    return prose(
        "Half of these ratios compare a graph with calls. From graph to graph the loop over a "
        f"compiled step takes {span(over(SEQUENTIAL), '.0f')} times as long as (sequential, "
        f"fused) and {span(over(NEWTON), '.0f')} times as long as (newton, fused) at T = 512, as "
        f"the tables above have it. The rest, a factor of {span(python, '.0f')}, is Python and "
        "launches. Below 1 are calls against the loop that is compiled as a whole, at 64 steps "
        "forward: it needs less of the host than our checks do, and its minimum for the GRU is "
        f"of a run in which the host was ahead, {least:.3f} ms beside a median of {median:.2f}."
    )


def splits() -> str:
    """Return what the ablation of segments and burn-ins says."""
    rows = [row for row in read("paper_split.csv") if row["launch"] == "graph"]
    tried = [row for row in rows if row["asked"]]

    def best(what: str, step: str, key: str = "") -> float:
        mine = [r for r in tried if (r["what"], r["pass"]) == (what, step)]
        mine = [r for r in mine if not key or r["asked"] == r["asked_burn_in"] == key]
        return min(float(row["min_ms"]) for row in mine)

    cases = [(f"{c}, {how}", p) for c in CELLS for how in ("forgets", "hardly forgets")
             for p in ("forward", "both")]  # fmt: skip
    behind = max(100 * (best(*case, "rule") / best(*case) - 1) for case in cases)
    longer, loops = [], []
    for cell in CELLS:
        slow, fast = (
            best(f"{cell}, {how}", "forward", "rule") for how in ("hardly forgets", "forgets")
        )
        longer.append(slow / fast)
        loop = one(rows, what=f"{cell}, hardly forgets", asked="", **{"pass": "forward"})
        loops.append(float(loop["min_ms"]) / slow)
    return prose(
        "Cells that forget are right after one sweep, if the burn-in is long enough: with 0 or "
        "16 steps a second sweep doubles the time. 32 steps suffice for the GRU up to 512 "
        "segments, and do not for the LSTM there; hence the rule's 48, which is within "
        f"{behind:.0f}% of the best tried. 1,024 segments are too many: each is hardly longer "
        "than its burn-in. For cells that hardly forget no burn-in is long enough, and short "
        f"ones are the best by a little; three sweeps at 512 segments take {span(longer, '.1f')} "
        f"times as long as one, forward, and are still {span(loops, '.0f')} times as fast as the "
        "loop's kernel. Of these two cases segments up to 64 and the rule's have been measured, "
        "where the time of the run ended: their best and worst are of these."
    )
