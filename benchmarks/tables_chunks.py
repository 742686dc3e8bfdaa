"""Table of kernels over chunks next to other libraries."""

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
