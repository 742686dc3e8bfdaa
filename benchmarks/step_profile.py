"""Profile of a step on a GPU: kernels by class, the hidden fraction of each, and idle time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Span = tuple[float, float]


class Kernel(NamedTuple):
    """GPU kernel: name, start and duration in microseconds, and stream."""

    name: str
    start: float
    duration: float
    stream: int


OTHERS = "elementwise"
"""All that is in no other class: what the compiler fused, sums, the loss."""
CLASSES = {
    OTHERS: "^triton_(poi|red|per)_",  # whose names have those of all that was fused
    "NCCL": "nccl",
    "attention": "flash|fmha|attention|sdpa",
    "recurrence": "^(run|sum_weights)$|_chunk_|_state_passing",
    "products": "gemm|gemv|cublas|cutlass|nvjet|xmma|wgmma",
    "convolution": "conv_silu",
    "optimizer": "multi_tensor|adam",
    "FSDP's copies": "split_with_sizes_copy|chunk_cat",
    "memory": "^mem(cpy|set)",
}
"""By the class's name: what its kernels' names have, ours and Mamba2's in "recurrence"."""
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
"""The categories of torch.profiler's trace."""


def class_of(name: str) -> str:
    """Return the first class whose pattern a kernel's name has."""
    kinds = (kind for kind, words in CLASSES.items() if re.search(words, name, re.IGNORECASE))
    return next(kinds, OTHERS)


def merge(spans: Iterable[Span]) -> list[Span]:
    """Return the fewest spans (begin, end) that cover the same."""
    result: list[Span] = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], end)
        else:
            result.append((begin, end))
    return result


def total_length(spans: Iterable[Span]) -> float:
    """Return the time that spans cover, overlaps once."""
    return sum(end - begin for begin, end in merge(spans))


def breakdown(kernels: Sequence[Kernel]) -> list[dict[str, Any]]:
    """Return a row a class, the longest first, then "idle", in ms.

    busy_ms: while a kernel of the class ran. alone_ms: of that, while none of another class did:
    for NCCL what is not hidden behind work. `streams`: on how many streams. Of kernels at the same
    time on several streams neither is alone, so that the sum over alone_ms may be less than all.
    """
    spans: dict[str, list[Span]] = {}
    streams: dict[str, set[int]] = {}
    for each in kernels:
        kind = class_of(each.name)
        spans.setdefault(kind, []).append((each.start, each.start + each.duration))
        streams.setdefault(kind, set()).add(each.stream)
    every = [span for mine in spans.values() for span in mine]
    if not every:
        return []
    busy = total_length(every)
    rows: list[dict[str, Any]] = [
        {
            "class": kind,
            "kernels": len(mine),
            "streams": len(streams[kind]),
            "busy_ms": round(total_length(mine) / 1e3, 3),
            "alone_ms": round((busy - total_length(others_than(kind, spans))) / 1e3, 3),
        }
        for kind, mine in spans.items()
    ]
    rows.sort(key=lambda row: -row["busy_ms"])
    whole = max(end for _, end in every) - min(begin for begin, _ in every)
    idle = round((whole - busy) / 1e3, 3)
    none = {"kernels": 0, "streams": 0, "busy_ms": idle, "alone_ms": idle}
    return [*rows, {"class": "idle", **none}]


def others_than(kind: str, spans: dict[str, list[Span]]) -> list[Span]:
    """Return the spans of all classes but one."""
    return [span for other, mine in spans.items() if other != kind for span in mine]


def kernels_of(trace: Path) -> list[Kernel]:
    """Return the GPU's kernels in a trace that torch.profiler has exported."""
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return [
        Kernel(event["name"], event["ts"], event["dur"], int(event["args"]["stream"]))
        for event in events
        if event.get("cat") in ON_GPU
    ]
