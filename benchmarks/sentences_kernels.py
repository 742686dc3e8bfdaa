"""Sentences on kernels and on splitting time whose figures are read from the result files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from statistics import mean

import segments
from markdown_tables import CELLS, Row, hold, one, prose, read, span
from paper_ways import FIXED, LOOP, MAMBA, SCAN_KERNEL, SIMPLIFIED, TORCH_SCAN, WHOLE
from scan_cpu import FFT, IN_PYTORCH
from scan_cpu import LOOP as PYTHON_LOOP

from pararnn.engines.rule import MATRIX_MIN_LENGTH, MIN_SEGMENTS

SEQUENTIAL, NEWTON = "sequential, fused", "newton, fused"
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


def ratios_at(stage: str, pieces: Iterable[int], *passes: str) -> list[float]:
    """Return the same for fresh or trained layers with these numbers of segments."""
    rows = segments.all_times()
    mine = [
        row
        for row in [*rows, *segments.both_passes(rows)]
        if row["stage"] == stage and segments.segments(row) in pieces
    ]
    return of_loop(mine, passes or ("forward", "backward", "both"))


def limits_says() -> str:
    """Return the layers for which splitting time is slower: README's limit."""
    few, many = MIN_SEGMENTS["cuda"], 8
    at_four, more = ratios_at("trained", [4]), ratios_at("trained", range(few, many + 1))
    return prose(
        "- **Splitting time is fast while channels forget.** Channels that remember need [a second "
        "sweep or more](docs/generated-kernels.md#time-in-segments). With four segments, a pass of "
        f"a trained layer is up to {max(at_four):.1f} times slower than the loop; `auto` uses the "
        f"loop there. With {few} to {many} segments, some trained layers are up to "
        f"{max(more):.1f} times slower and others up to {1 / min(more):.1f} times faster. `auto` "
        "decides by size alone; `pararnn.adapt(model)` measures and switches. On a CPU `auto` "
        "splits time only with four threads or more for each tile of channels."
    ).replace("\n", "\n  ")


def auto_cuda_rule_says() -> str:
    """Return the reason for the number of segments from which `auto` splits time."""
    fresh = [1 / ratio for ratio in ratios_at("fresh", [4], "forward", "backward")]
    rows = [
        row
        for row in segments.both_passes(segments.all_times())
        if row["stage"] == "trained" and segments.segments(row) == MIN_SEGMENTS["cuda"]
    ]
    means = {
        mixer: mean(of_loop(row for row in rows if row["mixer"] == mixer))
        for mixer in ("gru", "lstm", "hybrid")
    }
    hold(max(means.values()) < 1, "the mean of six segments is below 1")
    eight, forward = ratios_at("trained", [8], "both"), ratios_at("trained", [8], "forward")
    return prose(
        f"With 4 segments, layers that forget would run {span(fresh, '.1f')} times as fast. But "
        "[trained layers](generated-kernels.md#time-in-segments) would take up to "
        f"{max(ratios_at('trained', [4], 'both')):.1f} times the loop's time, forward and "
        "backward, and training spends its time on them. With 6 segments, the layers of "
        f"[language models of 60M](learning.md) take {span(of_loop(rows), '.2f')} times it, in "
        f"the mean {means['gru']:.2f} (GRU), {means['lstm']:.2f} (LSTM) and "
        f"{means['hybrid']:.2f} (hybrid). With 8 segments, trained layers take "
        f"{span(eight, '.1f')} times it (forward alone {span(forward, '.2f')}), with 13 at most "
        f"{max(ratios_at('trained', [13], 'both')):.2f}, with 33 at most "
        f"{max(ratios_at('trained', [33], 'both')):.2f}. Six has the smallest worst case (`python "
        "benchmarks/segments.py`). Steps that are linear in their states (`scan`, linear "
        "recurrences as cells) need one correction at most, and are split from 4 segments on. If "
        "your layers forget, and 4 or 5 segments fit, [autotune](#autotune) finds that a split "
        "is faster. On the layers of small language models, before and after a training, `auto` "
        "against the better engine:"
    )


def auto_cuda_says() -> str:
    """Return the worst choice of `auto` on a grid of sizes."""
    rows = read("auto_cuda.csv")
    worst = segments.worst(rows, MIN_SEGMENTS["cuda"])
    return prose(
        f"On a grid of {len(rows)} sizes and dtypes, with layers that forget, forward + backward, "
        f"`auto` takes at worst {worst:.2f} times the better engine's time "
        "([`auto_cuda.csv`](../benchmarks/results/auto_cuda.csv))."
    )


def auto_cpu_says() -> str:
    """Return the gain and the cost of splitting time on two threads of a CPU."""
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
        "`benchmarks/parallel_cpu.py` measures both "
        "([`auto_cpu.csv`](../benchmarks/results/auto_cpu.csv)). With two threads, long sequences "
        f"of cells that forget run up to {gain:.1f} times as fast, and channels that do not forget "
        f"take up to {loss:.1f} times as long. With four and more threads it has not been run: "
        "there the rule follows from the work of a segment."
    )


def parallel_trained_says() -> str:
    """Return the cost of channels that remember, and the time of split trained layers."""
    rows = read("parallel.csv")
    base = [row for row in rows if (row["section"], row["what"]) == ("shapes", "gru")]
    keys = ("pass", "dtype", "B", "T", "D")
    costs = [
        1e3 * (float(row["newton_ms"]) - float(other["newton_ms"]))
        for row in rows
        if row["what"] == "0.2% latches"
        for other in base
        if all(row[key] == other[key] for key in keys)
    ]
    layers = read("parallel_trained.csv")

    def of(layer: str, batch: str) -> str:
        return span(
            of_loop(r for r in layers if r["what"].endswith(layer) and r["B"] == batch), ".2f"
        )

    long = [1 / ratio for ratio in of_loop(row for row in layers if row["T"] == "65536")]
    return prose(
        f"If one channel in 500 remembers, a pass takes {span(costs, '.0f')} us longer, the more "
        "the longer its segments are. A tile of many slow channels needs a whole sweep for each "
        "round, and slow channels need two to four rounds: Newton starts far away from a channel "
        "that remembers, and then converges quadratically. Trained layers have both kinds. With "
        f"many segments this costs little: at T = 65,536 trained layers run {span(long, '.1f')} "
        "times as fast as the loop. With eight segments, (4, 2048, 1024), the first layers take "
        f"{of('layer 1', '4')} times the loop's time, and the second ones, which remember, "
        f"{of('layer 2', '4')}. With four segments, (8, 2048, 1024), it is {of('layer 1', '8')} "
        f"and {of('layer 2', '8')}. `auto` looks at shapes only and splits from "
        f"[{MIN_SEGMENTS['cuda']} segments on](solvers-and-backends.md#what-auto-does); "
        "[`pararnn.adapt`](solvers-and-backends.md#adapting-to-data) finds layers for which the "
        "loop is faster there too.",
        "Where channels switch between states (weights of standard deviation 2 and more), "
        "Newton's starts do not improve, and one warp runs the whole tile. There a split takes up "
        f"to {max(of_loop(r for r in rows if r['what'] == 'weights 2')):.1f} times the loop's "
        "time.",
    )


def kernels_memory_says() -> str:
    """Return the memory of a layer, with and without recomputed gates."""
    rows = read("kernels_memory.csv")
    plain, recompute = (one(rows, recompute_gates=value) for value in (False, True))

    def mib(row: Row, key: str) -> str:
        return f"{int(row[key]) / 2**20:.0f}"

    hold(mib(plain, "peak_bytes") == mib(recompute, "peak_bytes"), "the peak is the same")
    return prose(
        f"At B, T, D = {plain['B']}, {plain['T']}, {plain['D']} a layer's forward pass keeps "
        f"{mib(plain, 'kept_bytes')} MiB for its backward pass. `recompute_gates=True` keeps only "
        f"the layer's input and states, {mib(recompute, 'kept_bytes')} MiB, and repeats the "
        f"projection in the backward pass. The peak is {mib(plain, 'peak_bytes')} MiB in both "
        "cases ([`kernels_memory.csv`](../benchmarks/results/kernels_memory.csv))."
    )


def compile_says() -> str:
    """Return the time to compile and to load a cell's kernels on a CPU."""
    rows = read("compile.csv")
    cold = span((float(row["cold_s"]) for row in rows), ".1f")
    warm = span((float(row["warm_ms"]) for row in rows), ".0f")
    return prose(
        f"The first use of a cell and a dtype compiles for {cold} s; later processes load the "
        f"kernels in {warm} ms (`benchmarks/compile.py`, "
        "[`compile.csv`](../benchmarks/results/compile.csv))."
    )


def scan_cpu_says() -> str:
    """Return the speed-ups of `pararnn.scan` on a CPU, by minima."""
    rows = read("scan_cpu.csv")
    ours = {(r["what"], r["T"]): r for r in rows if r["way"] == "pararnn.scan"}
    steps = ("forward_min_ms", "both_min_ms")

    def speed_up(way: str) -> str:
        return span(
            (
                float(row[step]) / float(ours[row["what"], row["T"]][step])
                for row in rows
                if row["way"] == way
                for step in steps
            ),
            ".0f",
        )

    slower = [
        float(ours["LRU", t]["both_min_ms"]) / float(row["both_min_ms"])
        for (what, t), row in ours.items()
        if what == "minGRU"
    ]
    return prose(
        f"By minima `pararnn.scan` is {speed_up(PYTHON_LOOP)} times as fast as the loop, "
        f"{speed_up(IN_PYTORCH)} times as fast as PyTorch's operations, {speed_up(FFT)} times as "
        "fast as the convolution. The convolution needs decays that are the same at all steps, "
        "and the whole sequence; it has no resets and no lengths. The complex LRU takes "
        f"{span(slower, '.0f')} times as long as the real minGRU, forward and backward: complex "
        "numbers are split into real and imaginary parts, and the gradient of the decays is "
        "written at full size. The machine had other work, so medians are above minima."
    )


def matrix_cpu_says() -> str:
    """Return the speed-ups of matrix cells on a CPU over loops by hand, by minima."""
    rows = read("matrix_cpu.csv")
    key = itemgetter("cell", "K", "V")
    ours = {key(row): row for row in rows if row["way"] == "pararnn.solve"}

    def speed_up(step: str) -> str:
        loops = [row for row in rows if row["way"] == PYTHON_LOOP]
        return span((float(row[step]) / float(ours[key(row)][step]) for row in loops), ".1f")

    return prose(
        f"By minima the kernels are {speed_up('forward_min_ms')} times as fast as the loop "
        f"forward, {speed_up('both_min_ms')} times forward and backward. The machine had other "
        "work, so medians are above minima."
    )


def matrix_gpu_says() -> str:
    """Return how matrix cells on a GPU compare with loops as CUDA graphs, and with chunks."""
    rows = read("matrix_gpu.csv")
    key = itemgetter("cell", "K", "V", "T")
    ours = {key(row): row for row in rows if row["way"] == "pararnn.solve"}

    def ratios(row: Row, step: str) -> float:
        return float(row[f"{step}_ms"]) / float(ours[key(row)][f"{step}_ms"])

    def speed_up(step: str) -> str:
        loops = [row for row in rows if row["way"] == "loop as a CUDA graph"]
        return span((ratios(row, step) for row in loops), ".0f")

    text = (
        f"The kernels are {speed_up('forward')} times as fast as the loop as a CUDA graph forward, "
        f"{speed_up('both')} times forward and backward. "
    )
    chunks = [row for row in rows if row["way"] == "flash-linear-attention, chunks"]
    hold(all(ratios(row, "forward") < 1 for row in chunks), "chunks are faster")
    if chunks:
        text += (
            "Chunks, which a cell that is linear in its state allows, are "
            f"{span((1 / ratios(row, 'forward') for row in chunks), '.1f')} times as fast as our "
            "kernels forward. A nonlinear step has none."
        )
    return prose(text)


def matrix_segments_says() -> str:
    """Return how segments of a matrix cell's time compare with the loop, and where `auto` cuts."""
    rows = read("matrix_segments.csv")
    key = itemgetter("cell", "T")
    loops = {key(row): row for row in rows if row["segments"] == "1"}
    cuts = [row for row in rows if row["segments"] != "1"]

    def gains(step: str, length: str) -> list[float]:
        """Return the speed-ups of the best number of segments, by cell."""
        return [
            max(
                float(loop[f"{step}_ms"]) / float(row[f"{step}_ms"])
                for row in cuts
                if key(row) == (cell, length)
            )
            for (cell, of_loop_length), loop in loops.items()
            if of_loop_length == length
        ]

    short, long = sorted({row["T"] for row in rows}, key=int)
    hold(int(short) < MATRIX_MIN_LENGTH["cuda"] < int(long), "the rule's length was between both")
    hold(min(gains("forward", long)) > 1, "segments of long rows are faster")
    hold(min(gains("both", short)) > 1, "segments train faster")
    hold(min(gains("forward", short)) < 1, "short rows have a cell that loses forward")
    return prose(
        f"At T = {int(long):,} segments are {span(gains('forward', long), '.1f')} times as fast as "
        f"the loop forward, {span(gains('both', long), '.1f')} times forward and backward. At T = "
        f"{int(short):,} that is {span(gains('forward', short), '.1f')} and "
        f"{span(gains('both', short), '.1f')} times: a forward pass alone then waits for the host, "
        f"so `auto` cuts from T = {MATRIX_MIN_LENGTH['cuda']:,} on."
    )


def paper_times(name: str) -> Times:
    """Return a function that looks up a time in a file of the paper's figures: minimum, in ms."""
    rows = read(name)

    def time(what: str, way: str, steps: int, **values: str) -> float:
        case = {"launch": "graph", "pass": "forward", **values}
        key = case.pop("key", "min_ms")
        return float(one(rows, what=what, way=way, T=steps, **case)[key])

    return time


def paper_reduction_says() -> str:
    """Return the comparison of linear recurrences."""
    rows = read("paper_reduction.csv")
    ms = paper_times("paper_reduction.csv")
    triton, warps = "accelerated-scan, Triton", "accelerated-scan, warps"
    kernels = [MAMBA, triton, warps, SCAN_KERNEL]
    small = [row for row in rows if int(row["T"]) in (16, 512, 4096)]

    def of(launch: str, ways: Iterable[str], key: str) -> list[float]:
        return [float(r[key]) for r in small if r["launch"] == launch and r["way"] in ways]

    def ratio(way: str, steps: int, what: str = "diagonal") -> float:
        return ms(what, way, steps) / ms(what, SCAN_KERNEL, steps)

    firsts = {t: min(kernels, key=lambda way: ms("diagonal", way, t)) for t in (512, 4096)}
    hold(firsts == {512: SCAN_KERNEL, 4096: triton}, "who is first at 512 and at 4,096 steps")
    by_pytorch = [
        ratio(TORCH_SCAN, t, what) for t in (512, 4096, 65536) for what in ("diagonal", "2 x 2")
    ]
    blocks = ms("2 x 2", SCAN_KERNEL, 4194304) / ms("diagonal", SCAN_KERNEL, 4194304)
    host, others = (of("call", ways, "median_ms") for ways in ([SCAN_KERNEL], kernels[:3]))
    hold(min(host) > max(others), "scan is the slowest if called")
    return prose(
        "Up to 4,096 steps a scan is little more than one launch: as graphs all kernels take "
        f"{span(of('graph', kernels, 'min_ms'), '.3f')} ms. Ours is the fastest at 512 steps, "
        "accelerated-scan at 4,096. Beyond, ours splits time over the whole GPU. At 65,536 steps "
        f"Mamba's scan takes {ratio(MAMBA, 65536):.1f} times as long, accelerated-scan "
        f"{ratio(triton, 65536):.1f} times in Triton and {ratio(warps, 65536):.1f} times by "
        f"warps, which end there. At 4,194,304 steps Mamba's takes {ratio(MAMBA, 4194304):.1f} "
        f"times as long and Triton's {ratio(triton, 4194304):.1f} times. A 2 x 2 block has four "
        f"numbers where a diagonal has one, and takes {blocks:.1f} times as long once memory is "
        f"the limit. PyTorch, compiled for each length, takes {span(by_pytorch, '.1f')} times as "
        "long from 512 to 65,536 steps.",
        "Called from Python, `pararnn.scan` is the slowest kernel on short sequences: "
        f"{span(host, '.2f')} ms by medians, for checks and a launch by Python, where the peers' "
        f"bindings take {span(others, '.2f')} ms. Minima of calls can be far below medians: the "
        "host was then ahead of the GPU, and the events saw the kernel alone. Graphs have no host "
        "in between; compare those.",
    )


STEPS = (1, 64, 512, 2048, 32768, 131072)
"""Lengths of which sentences speak."""


def paper_solve_says() -> str:
    """Return the comparison of our kernels and loops."""
    ms = paper_times("paper_solve.csv")

    def ratios(way: str, other: str, steps: int) -> list[float]:
        return [ms(c, way, steps) / ms(c, other, steps) for c in CELLS]

    hold(min(ratios(SEQUENTIAL, NEWTON, 512)) > 1, "newton, fused is faster from 512 steps on")
    calls = [
        ms(cell, way, t, launch="call", key="median_ms")
        for cell in CELLS
        for way in (SEQUENTIAL, NEWTON)
        for t in STEPS
        if t <= 2048
    ]
    loops = [ms(cell, LOOP, 512) for cell in CELLS]
    python = [ms(cell, LOOP, 512, launch="call") / ms(cell, LOOP, 512) for cell in CELLS]
    return prose(
        "**Our kernels.** As graphs both take about the same time up to 64 steps, and (newton, "
        "fused) is faster from 512 on; at 131,072 it is "
        f"{span(ratios(SEQUENTIAL, NEWTON, 131072), '.0f')} times as fast forward. Called from "
        f"Python, both take {span(calls, '.2f')} ms forward up to 2,048 steps, by medians: that is "
        "the host's time.",
        "**Loops.** A loop compiled as a whole is as fast as ours at one step, or faster. At 64 "
        f"steps it takes {span(ratios(WHOLE, SEQUENTIAL, 64), '.1f')} times as long as "
        "(sequential, fused) as a graph. A loop over a compiled step, as a graph, takes "
        f"{span(loops, '.1f')} ms for 512 steps: {span(ratios(LOOP, SEQUENTIAL, 512), '.0f')} "
        f"times (sequential, fused) and {span(ratios(LOOP, NEWTON, 512), '.0f')} times (newton, "
        f"fused). Called from Python the loop takes {span(python, '.0f')} times longer still, for "
        "Python and launches.",
    )


def paper_newton_says() -> str:
    """Return the comparison of Newton by operations, with and without checks."""
    ms = paper_times("paper_solve.csv")
    in_torch, scan = f"{FIXED}, torch, compiled", f"{FIXED}, scan"
    ratios = {
        cell: [ms(cell, in_torch, t) / ms(cell, NEWTON, t) for t in (64, 512, 2048, 32768)]
        for cell in CELLS
    }
    adaptive = ("newton, scan", "newton, torch")

    def times(ways: Iterable[str], steps: Iterable[int], launch: str) -> list[float]:
        return [ms(c, way, t, launch=launch) for c in CELLS for way in ways for t in steps]

    short = [t for t in STEPS if t <= 2048]
    return prose(
        "**A fixed number of updates.** In PyTorch, compiled, as a graph, three updates take "
        f"{span(ratios['gru'], '.1f')} times as long as (newton, fused) for the GRU and "
        f"{span(ratios['lstm'], '.1f')} times for the LSTM, forward, from 64 to 32,768 steps. "
        "They check nothing: three suffice at initialisation, which was measured here, but not in "
        "[trained layers](#newtons-residuals).",
        "**Newton by operations.** (newton, scan) and (newton, torch) take "
        f"{span(times(adaptive, short, 'call'), '.0f')} ms forward at any length up to 2,048: "
        "each update launches its operations one by one and asks the GPU if it has converged. "
        f'Three updates with our scan, "{scan}", take '
        f"{span(times([scan], short, 'call'), '.1f')} ms called and "
        f"{span(times([scan], short, 'graph'), '.2f')} ms as a graph: the difference is the host's "
        "time. The library does not capture these pairs in a graph, as their number of updates "
        "depends on the data: [what a graph would "
        "need](negative-results.md#newton-scan-and-newton-torch-in-a-cuda-graph).",
        "Beyond 2,048 steps their time grows with the length, to "
        f"{span(times(adaptive, [131072], 'call'), '.0f')} ms at 131,072, where three updates "
        f"take {span(times([scan], [131072], 'graph'), '.1f')} ms as a graph. The adaptive ways "
        "compare every step with the largest state so far. The running maximum that was measured "
        "ran step by step; it has since become a scan by pairs, which has not been timed on a GPU.",
    )


def paper_peers_says() -> str:
    """Return the comparison with Mamba and cuDNN."""
    ms = paper_times("paper_solve.csv")

    def mamba(steps: Iterable[int]) -> list[float]:
        return [ms("mamba", SIMPLIFIED, t) / ms(c, NEWTON, t) for c in CELLS for t in steps]

    hold(min(mamba(STEPS)) > 1, "Mamba takes longer at every length")

    def cudnn(*steps: int) -> str:
        name = {"gru": "torch.nn.GRU", "lstm": "torch.nn.LSTM"}
        ratios = (
            ms(cell, name[cell], t, launch="call") / ms(cell, NEWTON, t, launch="call")
            for cell in CELLS
            for t in steps
        )
        return span(ratios, ".1f" if max(steps) < 32768 else ".0f")

    called_mamba, called_lstm = (
        ms(what, way, 512, launch="call") for what, way in (("mamba", SIMPLIFIED), ("lstm", NEWTON))
    )
    hold(called_mamba < called_lstm, "called, Mamba is before the LSTM at 512 steps")
    return prose(
        "**Mamba.** As a graph the simplified Mamba takes longer than (newton, fused) at every "
        f"length: {span(mamba((1, 64, 512, 2048)), '.1f')} times up to 2,048 steps and "
        f"{span(mamba((32768, 131072)), '.1f')} times from 32,768 on. It has 16 states a channel "
        "where a GRU has one. Called from Python, both take the host's time, and the order "
        "changes: at T = 512 Mamba is faster than the LSTM.",
        "**cuDNN** computes another thing, a recurrence with a full matrix, in one call. Called "
        f"from Python, forward, it takes {cudnn(1, 64, 512)} times as long as (newton, fused) up "
        f"to 512 steps, {cudnn(2048)} times at 2,048 and {cudnn(32768)} times at 32,768. It "
        "refuses 131,072 steps.",
    )


def paper_split_says() -> str:
    """Return the result of other numbers of segments and burn-ins."""
    rows = [row for row in read("paper_split.csv") if row["launch"] == "graph"]

    def best(what: str, step: str, key: str = "") -> float:
        mine = [r for r in rows if r["asked"] and (r["what"], r["pass"]) == (what, step)]
        mine = [r for r in mine if not key or r["asked"] == r["asked_burn_in"] == key]
        return min(float(row["min_ms"]) for row in mine)

    cases = [
        (f"{cell}, {speed}", step)
        for cell in CELLS
        for speed in ("forgets", "hardly forgets")
        for step in ("forward", "both")
    ]
    loss = max(100 * (best(*case, "rule") / best(*case) - 1) for case in cases)
    longer, loops = [], []
    for cell in CELLS:
        slow, fast = (
            best(f"{cell}, {speed}", "forward", "rule") for speed in ("hardly forgets", "forgets")
        )
        longer.append(slow / fast)
        loop = one(rows, what=f"{cell}, hardly forgets", asked="", **{"pass": "forward"})
        loops.append(float(loop["min_ms"]) / slow)
    return prose(
        "Cells that forget are right after one sweep if the burn-in is long enough: with 0 or 16 "
        "steps a second sweep doubles the time. 32 steps are enough for the GRU up to 512 "
        "segments, but not for the LSTM. Hence the rule's 48 steps, within "
        f"{loss:.0f}% of the best split that was tried. 1,024 segments are too many: each is "
        "hardly longer than its burn-in. For cells that hardly forget no burn-in is long enough, "
        "and short ones are slightly better. Three sweeps at 512 segments take "
        f"{span(longer, '.1f')} times as long as one, forward, and are still "
        f"{span(loops, '.0f')} times as fast as the loop's kernel. For these cells only splits "
        "up to 64 segments and the rule's were measured."
    )
