"""The table of `pararnn.scan` on a CPU, and what it says."""

from __future__ import annotations

from markdown_tables import Row, measured, not_yet, one, prose, read, source, span, table
from scan_cpu import FFT, IN_PYTORCH, LOOP, WAYS

FILE = "scan_cpu.csv"
OURS = "pararnn.scan"


def both(row: Row, step: str) -> str:
    """Return the median, and in brackets the minimum."""
    median, least = (float(row[f"{step}_{kind}"]) for kind in ("ms", "min_ms"))
    return f"{three_digits(median)} ({three_digits(least)})"


def three_digits(ms: float) -> str:
    """Return a time with three digits, or all before the point."""
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def scan_cpu() -> str:
    """Return a row a recurrence and way, a column a length and pass, and the ratios."""
    if not measured(FILE):
        return not_yet("python benchmarks/scan_cpu.py")
    rows = read(FILE)
    lengths = sorted({int(row["T"]) for row in rows})
    body = []
    for what, way in dict.fromkeys((row["what"], row["way"]) for row in rows):
        mine = {int(r["T"]): r for r in rows if (r["what"], r["way"]) == (what, way)}
        times = [
            both(mine[t], step) if t in mine else ""
            for t in lengths
            for step in ("forward", "both")
        ]
        body.append([what, way, *times])
    kinds = [f"T = {t:,}, {how}" for t in lengths for how in ("forward", "forward + backward")]
    size = f"B = {rows[0]['B']}, D = {rows[0]['D']}"
    text = f"Medians in ms, minima in brackets, {size} {source(rows, FILE)}:"
    return f"{text}\n\n{table(['recurrence', 'by', *kinds], body)}\n\n{compared(rows)}"


def compared(rows: list[Row]) -> str:
    """Return how many times as fast as the others `pararnn.scan` is, by minima."""

    def over(way: str) -> str:
        ratios = []
        for row in rows:
            if row["way"] == way:
                ours = one(rows, what=row["what"], T=row["T"], way=OURS)
                ratios += [
                    float(row[f"{step}_min_ms"]) / float(ours[f"{step}_min_ms"])
                    for step in ("forward", "both")
                ]
        return span(ratios, ".0f")

    names = {LOOP: "the loop", FFT: "the convolution", IN_PYTORCH: "PyTorch's operations"}
    parts = ", ".join(f"{over(way)} times as fast as {names[way]}" for way in WAYS if way != OURS)
    ours = {
        (row["what"], row["T"]): float(row["both_min_ms"]) for row in rows if row["way"] == OURS
    }
    slower = [ours["LRU", t] / ms for (what, t), ms in ours.items() if what == "minGRU"]
    return prose(
        f"By minima `pararnn.scan` is {parts}. The convolution takes decays that are the same at "
        "all steps, no resets and no lengths, and needs the whole sequence. The complex LRU "
        f"takes {span(slower, '.0f')} times as long as the real minGRU, forward and backward: "
        "complex numbers are split into parts, and the gradient of the decays is written at full "
        "size. The machine had other work at the time, so that medians lie above minima."
    )
