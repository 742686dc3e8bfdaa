"""Tables and pictures of the paper's kernel figures, and README's figures of performance."""

from __future__ import annotations

from collections.abc import Sequence

from markdown_tables import (
    Row,
    figure,
    hold,
    measured,
    not_yet,
    picture,
    prose,
    read,
    size,
    source,
    table,
)
from paper_plots import in_order, launch_of
from tables_learn import CORPORA, results

COMMAND = "benchmarks/paper_kernels.py"
LAUNCHED = {"call": "", "graph": ", CUDA graph"}
CELLS = ("gru", "lstm")
LOOP_LENGTH = "512"
TWO_DIGITS = 9.95
"""Below it two digits are not yet a whole number."""
SOLVE_PICTURE = "benchmarks/results/paper_solve.png"
CONTEXT_PICTURE = "![Tokens/s and memory against the context](benchmarks/results/lm_context.png)"
FUSED = ("sequential, fused", "newton, fused")
LOOPS = ("loop, eager", "loop, compiled step", "loop, compiled as a whole")


def both_times(row: Row) -> str:
    """The minimum, and in brackets the median."""
    return f"{figure(row, 'min_ms')} ({figure(row, 'median_ms')})"


def against_length(rows: Sequence[Row], lengths: Sequence[str]) -> str:
    """A row a way and launch, a column a length."""
    rows = in_order(rows)
    lengths = [length for length in lengths if any(row["T"] == length for row in rows)]
    body = []
    for what, way, launch in dict.fromkeys((r["what"], r["way"], r["launch"]) for r in rows):
        key = {"what": what, "way": way, "launch": launch}
        mine = {row["T"]: row for row in rows if key.items() <= row.items()}
        times = [both_times(mine[length]) if length in mine else "" for length in lengths]
        body.append([what, way + LAUNCHED[launch], *times])
    return table(["", "by", *(f"T = {int(length):,}" for length in lengths)], body)


def protocol(rows: Sequence[Row], name: str) -> str:
    """How a table was timed."""
    return (
        f"Minima in ms of up to 100 runs after 20, medians in brackets, B = 1, D = {rows[0]['D']}, "
        f"float32 {source(rows, name)}"
    )


def reduction() -> str:
    """The linear recurrence, by kernel and by peers."""
    name = "paper_reduction.csv"
    if not measured(name):
        return not_yet(f"{COMMAND} --only reduction")
    rows = read(name)
    lengths = ("16", "512", "4096", "65536", "1048576", "4194304")
    image = picture("paper_reduction", "Linear recurrence against the length")
    return f"{image}{protocol(rows, name)}:\n\n{against_length(rows, lengths)}"


def solve() -> str:
    """Cells applied to sequences: a table a pass."""
    name = "paper_solve.csv"
    if not measured(name):
        return not_yet(f"{COMMAND} --only solve")
    rows = read(name)
    lengths = ("1", "64", "512", "2048", "32768", "131072")
    image = picture("paper_solve", "GRU and LSTM against the length")
    parts = [
        f"{title}:\n\n{against_length([r for r in rows if r['pass'] == step], lengths)}"
        for step, title in (("forward", "Forward"), ("both", "Forward + backward"))
    ]
    return f"{image}{protocol(rows, name)}.\n\n" + "\n\n".join(parts)


def longest_to_512(rows: Sequence[Row], **values: str) -> Row | None:
    """The row of the longest sequence up to LOOP_LENGTH with these values, if any."""
    mine = [r for r in rows if values.items() <= r.items() and int(r["T"]) <= int(LOOP_LENGTH)]
    return max(mine, key=lambda row: int(row["T"]), default=None)


def times_as_fast(value: float) -> str:
    """A ratio: two digits where it is below 10, else whole."""
    return f"{value:#.2g} x" if value < TWO_DIGITS else f"{value:,.0f} x"


def ratio(rows: Sequence[Row], way: str, launch: str, loop: Row | None) -> str:
    """How many times as fast as a loop, called from Python, a way is at the loop's length."""
    if loop is None:
        return ""
    key = {"what": loop["what"], "pass": loop["pass"], "T": loop["T"]}
    mine = longest_to_512(rows, way=way, launch=launch, **key)
    return "" if mine is None else times_as_fast(float(loop["min_ms"]) / float(mine["min_ms"]))


def speedup() -> str:
    """Kernels over loops in Python: eager, by compiled steps, compiled as a whole."""
    name = "paper_solve.csv"
    if not measured(name):
        return not_yet(f"{COMMAND} --only solve")
    rows = read(name)
    cells = [cell for cell in CELLS if any(row["what"] == cell for row in rows)]
    body, heads = [], []
    for cell in cells:
        for step, title in (("forward", "forward"), ("both", "forward + backward")):
            loops = [
                longest_to_512(rows, what=cell, way=loop, launch="call", **{"pass": step})
                for loop in LOOPS
            ]
            heads = [
                f"over {loop}{'' if row is None else ', T = ' + row['T']}"
                for loop, row in zip(LOOPS, loops, strict=True)
            ]
            for way in FUSED:
                for launch, suffix in LAUNCHED.items():
                    times = [ratio(rows, way, launch, loop) for loop in loops]
                    if any(times):
                        body.append([cell, title, way + suffix, *times])
    return f"{protocol(rows, name)}:\n\n{table(['cell', 'pass', 'by', *heads], body)}"


def split() -> str:
    """What the rule's split takes, the best and the worst of those tried, and the loop's kernel."""
    name = "paper_split.csv"
    if not measured(name):
        return not_yet(f"{COMMAND} --only split")
    rows = read(name)
    launch = launch_of(rows)
    body = []
    for what, step in dict.fromkeys((row["what"], row["pass"]) for row in rows):
        mine = [r for r in rows if (r["what"], r["pass"], r["launch"]) == (what, step, launch)]
        loop = next(row for row in mine if row["asked"] == "")
        tried = [row for row in mine if row["asked"] != ""]
        rule = next(r for r in tried if r["asked"] == r["asked_burn_in"] == "rule")
        ranked = sorted(tried, key=lambda row: float(row["min_ms"]))
        body.append([what, step, both_times(loop), *map(_of_split, (rule, ranked[0], ranked[-1]))])
    head = ["cell", "pass", "(sequential, fused)", "by the rule", "best tried", "worst tried"]
    image = picture("paper_split", "Segments and burn-ins of (newton, fused)")
    text = f"{protocol(rows, name)}, T = {int(rows[0]['T']):,}"
    return f"{image}{text}:\n\n{table(head, body)}"


def _of_split(row: Row) -> str:
    return (
        f"{both_times(row)}: {row['segments']} segments, burn-in {row['burn_in']}, "
        f"{row['sweeps']} sweep{'s' * (row['sweeps'] != '1')}"
    )


def residuals() -> str:
    """The picture of Newton's residuals."""
    return picture("newton_iterations", "Newton's residuals by update").strip()


def held(what: str, at: str, ours: float, beside: str, theirs: float) -> list[str]:
    """Return a line of README's table: ours beside another's time."""
    return [what, at, digits(ours), f"{beside}: {digits(theirs)}", f"{digits(theirs / ours)} x"]


def digits(value: float) -> str:
    """Return three digits of a figure, and all before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def row_of(name: str, **values: str) -> Row:
    """Return the first row of a file with these values."""
    return next(row for row in read(name) if values.items() <= row.items())


def times(name: str, key: str, ours: dict[str, str], other: dict[str, str]) -> tuple[float, float]:
    """Return our time and another's in a file."""
    return float(row_of(name, **ours)[key]), float(row_of(name, **other)[key])


def models(name: str, scale: str, **case: str) -> tuple[float, float]:
    """Return the time of a GRU and of the Transformer of its size."""
    gru, other = ({"model": f"{model}-{scale}", **case} for model in ("gru", "transformer"))
    return times(name, "median_ms", gru, other)


LONG_TEXT = {"T": "131072"}
LAYER = {"cell": "gru", "T": "2048"}


def on_long_text() -> tuple[float, float]:
    """Return the steps of the 400M models on one long row."""
    return models("lm_context.csv", "400M", **LONG_TEXT)


def on_a_cpu() -> tuple[float, float]:
    """Return the times of ParaGRU and of torch.nn.GRU, forward and backward."""
    ours, other = (LAYER | {"what": f"layer: {each}"} for each in ("ParaGRU", "torch.nn.GRU"))
    return times("cpu.csv", "both_ms", ours, other)


def first() -> str:
    """Return README's first figures: two speed-ups, a picture, and who learns better."""
    long, layer = on_long_text(), on_a_cpu()
    gpu, cpu = row_of("lm_context.csv", **LONG_TEXT), row_of("cpu.csv", **LAYER)
    corpora = {corpus: results(read(f"learn_{corpus}.csv"))[0].mixer for corpus in CORPORA}
    names = {"transformer": "the Transformer", "mamba2": "Mamba2"}
    hold(set(corpora.values()) <= set(names), "who has the fewest bits at the end")
    epochs = max(float(row["epochs"]) for row in read("learn_english.csv"))
    lines = [
        f"- **{long[1] / long[0]:.1f} times** as fast as a Transformer on long text: a training "
        f"step of a 400M GRU on a row of {int(gpu['T']):,} tokens takes {digits(long[0])} ms, the "
        f"Transformer's {digits(long[1])} ms ({gpu['device']}, without an optimizer).",
        f"- **{layer[1] / layer[0]:.1f} times** as fast as `torch.nn.GRU` on two cores of a CPU: "
        f"forward and backward of `ParaGRU` take {digits(layer[0])} ms, its {digits(layer[1])} ms "
        f"({cpu['B']} rows of {int(cpu['T']):,} steps, {cpu['D']} channels). `ParaGRU` has a "
        "diagonal recurrent matrix, `torch.nn.GRU` a full one.",
        "- [Who learns better](docs/learning.md), with equal parameters and tokens? On English "
        f"that is read {epochs:.1f} times {names[corpora['english']]} has the fewest bits in the "
        f"end; GRU and LSTM lead before that. On code that is read once {names[corpora['code']]} "
        "has.",
    ]
    return "\n".join(prose(line).replace("\n", "\n  ") for line in lines) + f"\n\n{CONTEXT_PICTURE}"


def performance() -> str:
    """Return README's table: a line a question, ours beside what it is held against."""
    big = {"what": "GRUCell", "dtype": "bfloat16", "B": "32", "T": "2048", "D": "1024"}
    copied = {
        step: row_of("kernels.csv", **big, **{"pass": step}) for step in ("forward", "backward")
    }
    long = {"section": "shapes", "what": "gru", "T": "65536", "D": "1024", "dtype": "float32"}
    split_ = row_of("parallel.csv", **long, **{"pass": "forward"})
    trained = {"what": "lstm, layer 2", "dtype": "float32", "B": "8", "T": "2048"}
    slow = row_of("parallel_trained.csv", **trained, **{"pass": "forward"})
    at_512 = {"what": "gru", "T": LOOP_LENGTH, "pass": "forward"}
    graph, step = (at_512 | {"way": "newton, fused"}, at_512 | {"way": LOOPS[1]})
    python = times(
        "paper_solve.csv", "median_ms", graph | {"launch": "graph"}, step | {"launch": "call"}
    )
    unpacked = {"T": "2048", "packed": "False"}
    decoded = {"way": "graph", "B": "1", "context": "2048"}
    cpu, transformer = row_of("cpu.csv", **LAYER), "the Transformer's"

    def ms(row: Row, ours: str, other: str) -> tuple[float, float]:
        return float(row[ours]), float(row[other])

    lines: list[tuple[str, str, tuple[float, float], str]] = [
        (
            "training step of a 400M GRU on long text, no optimizer",
            f"1, {LONG_TEXT['T']}",
            on_long_text(),
            transformer,
        ),
        (
            "training step of a 1B GRU, no optimizer",
            "8, 2048",
            models("lm_step.csv", "1B", **unpacked),
            transformer,
        ),
        (
            "a token of a 1B GRU, CUDA graph",
            "1, after 2048",
            models("lm_decode.csv", "1B", **decoded),
            f"{transformer}, with its cache",
        ),
        (
            "GRU split in time, forward, float32",
            size(split_),
            ms(split_, "newton_ms", "sequential_ms"),
            "the loop's kernel",
        ),
        (
            "trained LSTM's second layer split in time, forward, float32",
            size(slow),
            ms(slow, "newton_ms", "sequential_ms"),
            "the loop's kernel",
        ),
        (
            "GRU with its projection as a CUDA graph, forward, float32",
            size(row_of("paper_solve.csv", **graph)),
            python,
            "a loop in Python over a compiled step",
        ),
        *(
            (
                f"GRU's kernel, {name}, bfloat16",
                size(row),
                ms(row, "graph_ms", "limit_ms"),
                "its bytes copied",
            )
            for name, row in copied.items()
        ),
        (
            "ParaGRU, forward + backward, two cores of a CPU",
            size(cpu),
            on_a_cpu(),
            "torch.nn.GRU",
        ),
    ]
    body = [held(what, at, ours, beside, other) for what, at, (ours, other), beside in lines]
    files = "kernels, parallel, parallel_trained, paper_solve, lm_step, lm_context, lm_decode, cpu"
    text = prose(
        f"Median times in ms on an {row_of('kernels.csv')['device'].removeprefix('NVIDIA ')} "
        "(last row: CPU). Speed-up = other / ours; below 1 ours is slower. Two rows compare with "
        "the time to copy the data, a lower bound. The rows of the files say commit and versions "
        f"(`benchmarks/results/`: {files})."
    )
    solved = row_of("paper_solve.csv")
    what = (
        f"Time of a GRU and an LSTM by sequence length (batch {solved['B']}, {solved['D']} "
        f"channels, float32, {solved['device'].removeprefix('NVIDIA ')}). Solid: CUDA graph; "
        "dashed: called from Python."
    )
    image = f"{prose(what)}\n\n![Time of a GRU and an LSTM by sequence length]({SOLVE_PICTURE})"
    head = ["what", "B, T, D", "ours", "other", "speed-up"]
    return f"{text}\n\n{table(head, body)}\n\n{image}"
