"""Tables of kernels over chunks: next to other libraries and our loop, and in a language model."""

from __future__ import annotations

from chunk_ways import LIFTED
from markdown_tables import Row, Table, Text, digits

CALLS = "by calls"
WAYS = {"chunks": "(chunks, fused)", "loop": "(sequential, fused)"}


def way(row: Row) -> str:
    """Return our pair, or a library and its version."""
    return WAYS.get(row["way"]) or f"{row['way']} {row['version']}".strip()


def size(row: Row) -> str:
    """Return a case's K x V; B, T; heads."""
    return f"{row['K']} x {row['V']}; {row['B']}, {int(row['T']):,}; {row['H']}"


def times(step: str) -> Text:
    """Return a column of medians, with minima and how often our chunks' time they are."""

    def text(row: Row) -> str:
        ms, ratio = row[f"{step}_ms"], row[f"{step}_over_chunks"]
        if not ms:
            return ""
        facts = [digits(row[f"{step}_min_ms"])]
        facts += [f"{digits(ratio)} x"] if ratio and row["way"] != "chunks" else []
        facts += [CALLS] if row[f"{step}_launch"] == "call" else []
        return f"{digits(ms)} ({', '.join(facts)})"

    return text


def note(row: Row) -> str:
    """Return what is said about a row; errors are in the file."""
    known = [part for part in row["note"].split("; ") if ":" not in part or part == LIFTED]
    missing = [] if row["both_ms"] else ["an error, see the file"]
    return "; ".join([*known, *missing])


CHUNKS = Table(
    "chunks_cuda.csv",
    "Medians in ms of replays of CUDA graphs, in brackets minima and the ratio to (chunks, fused); "
    "bfloat16, {copy_GB_per_s} GB/s copied",
    {
        "rule": "cell",
        "K x V; B, T; heads": size,
        "by": way,
        "forward": times("forward"),
        "forward + backward": times("both"),
        "remarks": note,
    },
)


def both_ms(pair: str) -> Text:
    """Return a column of the times of a pair, forward / forward + backward."""
    return lambda row: " / ".join(digits(row[f"{pair}_{step}_ms"]) for step in ("forward", "both"))


def ratio(row: Row) -> str:
    """Return how many times our loop's time is ours by chunks, forward / forward + backward."""
    return " / ".join(
        digits(float(row[f"sequential_fused_{step}_ms"]) / float(row[f"chunks_fused_{step}_ms"]))
        for step in ("forward", "both")
    )


LOOPS = Table(
    "chunks_loops_cuda.csv",
    "Medians in ms of replays of CUDA graphs, forward / forward + backward, bfloat16",
    {
        "rule": "cell",
        "K = V; B, T; heads": lambda row: (
            f"{row['K']}; {row['B']}, {int(row['T']):,}; {row['heads']}"
        ),
        "(chunks, fused)": both_ms("chunks_fused"),
        "(sequential, fused)": both_ms("sequential_fused"),
        "loop / chunks": ratio,
    },
)
MODEL = Table(
    "learn_chunks.csv",
    "Tokens/s of training, {B} rows of {T} tokens, medians of {turns} turns of {steps} steps",
    {
        "model": lambda row: f"{row['size']}, {row['mixer']}",
        "by": lambda row: f"({row['solver']}, {row['backend']})",
        "tokens/s": lambda row: f"{int(row['tokens_per_s']):,}",
    },
)
