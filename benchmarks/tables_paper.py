"""Tables and pictures of the paper's kernel figures, and README's one table of performance."""

from __future__ import annotations

from collections.abc import Sequence

from markdown_tables import Row, figure, measured, not_yet, picture, read, size, source, table
from paper_plots import in_order, launch_of

COMMAND = "benchmarks/paper_kernels.py"
LAUNCHED = {"call": "", "graph": ", CUDA graph"}
CELLS = ("gru", "lstm")
LOOP_LENGTH = "512"
TWO_DIGITS = 9.95
"""Below it two digits are not yet a whole number."""
SOLVE_PICTURE = "benchmarks/results/paper_solve.png"
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


def one(name: str, **values: str) -> Row:
    """The first row of a file with these values."""
    return next(row for row in read(name) if values.items() <= row.items())


def performance() -> str:
    """README's table: a line a question, ours beside what it is held against."""
    big = {"what": "GRUCell", "dtype": "bfloat16", "B": "32", "T": "2048", "D": "1024"}
    loop = {step: one("kernels.csv", **big, **{"pass": step}) for step in ("forward", "backward")}
    long = {"section": "shapes", "what": "gru", "T": "65536", "D": "1024", "dtype": "float32"}
    split_ = one("parallel.csv", **long, **{"pass": "forward"})
    slow = one(
        "parallel_trained.csv",
        what="lstm, layer 2",
        dtype="float32",
        B="8",
        T="2048",
        **{"pass": "forward"},
    )
    at_512 = {"what": "gru", "T": LOOP_LENGTH, "pass": "forward"}
    graph = one("paper_solve.csv", **at_512, way="newton, fused", launch="graph")
    step = one("paper_solve.csv", **at_512, way=LOOPS[1], launch="call")
    layer = {
        w: one("cpu.csv", cell="gru", T="2048", what=f"layer: {w}")
        for w in ("ParaGRU", "torch.nn.GRU")
    }

    def digits(value: float) -> str:
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"

    def line(what: str, at: str, ours: float, beside: str, theirs: float) -> list[str]:
        return [what, at, digits(ours), f"{beside}: {digits(theirs)}", f"{digits(theirs / ours)} x"]

    def ms(row: Row, key: str) -> float:
        return float(row[key])

    def against_transformer(
        what: str, beside: str, name: str, scale: str, **case: str
    ) -> list[str]:
        gru, other = (one(name, model=f"{m}-{scale}", **case) for m in ("gru", "transformer"))
        at = f"{gru['B']}, {gru['T']}" if "T" in gru else f"{gru['B']}, after {gru['context']}"
        return line(what, at, ms(gru, "median_ms"), beside, ms(other, "median_ms"))

    body = [
        *(
            line(
                f"GRU's kernel, {name}, bfloat16",
                size(row),
                ms(row, "graph_ms"),
                "its bytes copied",
                ms(row, "limit_ms"),
            )
            for name, row in loop.items()
        ),
        line(
            "GRU split in time, forward, float32",
            size(split_),
            ms(split_, "newton_ms"),
            "the loop's kernel",
            ms(split_, "sequential_ms"),
        ),
        line(
            "trained LSTM's second layer split in time, forward, float32",
            size(slow),
            ms(slow, "newton_ms"),
            "the loop's kernel",
            ms(slow, "sequential_ms"),
        ),
        line(
            "GRU with its projection as a CUDA graph, forward, float32",
            size(graph),
            ms(graph, "median_ms"),
            "a loop in Python over a compiled step",
            ms(step, "median_ms"),
        ),
        against_transformer(
            "training step of a 1B GRU, no optimizer",
            "the Transformer's",
            "lm_step.csv",
            "1B",
            T="2048",
            packed="False",
        ),
        against_transformer(
            "training step of a 400M GRU on long text, no optimizer",
            "the Transformer's",
            "lm_context.csv",
            "400M",
            T="131072",
        ),
        against_transformer(
            "a token of a 1B GRU, CUDA graph",
            "the Transformer's, with its cache",
            "lm_decode.csv",
            "1B",
            way="graph",
            B="1",
            context="2048",
        ),
        line(
            "ParaGRU, forward + backward, two cores of a CPU",
            size(layer["ParaGRU"]),
            ms(layer["ParaGRU"], "both_ms"),
            "torch.nn.GRU",
            ms(layer["torch.nn.GRU"], "both_ms"),
        ),
    ]
    files = "kernels, parallel, parallel_trained, paper_solve, lm_step, lm_context, lm_decode, cpu"
    about = f"on an {one('kernels.csv')['device']} but for the last line"
    text = (
        f"Medians in ms, {about}; below 1 x ours takes longer (`benchmarks/results/`: {files}, "
        "whose rows say commit and versions):"
    )
    what = "GRU and LSTM against the length, forward, and with the backward pass"
    drawn = "CUDA graphs, and calls from Python where there is no graph"
    image = f"{what}, {drawn}; B = 1, D = 64, float32:\n\n![{what}]({SOLVE_PICTURE})"
    head = ["what", "B, T, D", "ours", "beside", "as fast"]
    return f"{text}\n\n{table(head, body)}\n\n{image}"
