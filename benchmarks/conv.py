"""The convolution with SiLU of recurrent blocks on a GPU: our kernels and PyTorch's, compiled.

Times of one convolution forward, and forward and backward, as CUDA graphs over inputs beyond the
cache, next to the time of its traffic at the bandwidth of a copy measured here (forward 2 passes
over the inputs, backward 3): results/conv.csv. A step of the paper's 400M GRU with each of the two
(`lm_step.py` says how), and its kernels by class (`step_profile.py`): results/lm_step_profile.csv.

    python benchmarks/conv.py [--out FOLDER] [--smoke]
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lm_step
import torch
from lm_command import device_of, parser_of, record_of
from lm_decode import copy_bandwidth
from protocol import captured_graph, run_times, wait
from step_profile import breakdown, kernels_of
from torch.profiler import ProfilerActivity, profile

from pararnn.lm import invariant
from pararnn.lm.conv_op import conv_silu, plain_conv_silu, takes

WAYS: dict[str, Callable[..., Any]] = {"kernels": conv_silu, "PyTorch": plain_conv_silu}
SIZES = ((16, 2048, 1024), (1, 32768, 1024), (8, 2048, 2048))
"""B, T, D, of a step of 400M and of 1B."""
COPIES = 6
"""Inputs in turn, together beyond the GPU's cache."""


def calls(way: str, size: tuple[int, int, int], device: torch.device, backward: bool) -> list[Any]:
    """Return calls on fresh inputs, of a way compiled where it is PyTorch's."""
    compute = WAYS[way]
    if way == "PyTorch" and device.type == "cuda":
        torch.compiler.reset()  # code of another size would be compiled for any size
        compute = torch.compile(compute, fullgraph=True, dynamic=False)
    kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    weight, bias = torch.randn(4, size[2], **kind), torch.randn(size[2], **kind)
    leaves = [weight.requires_grad_(), bias.requires_grad_()]

    def call(u: torch.Tensor, grad: torch.Tensor) -> Any:
        if not backward:
            with torch.no_grad():
                return compute(u, *leaves, None, None)
        y = compute(u, *leaves, None, None)
        return torch.autograd.grad(y, [u, *leaves], grad)

    def draw() -> torch.Tensor:
        return torch.randn(size, **kind)

    return [partial(call, draw().requires_grad_(), draw()) for _ in range(COPIES)]


def time_of(way: str, size: tuple[int, int, int], device: torch.device, backward: bool) -> Any:
    """Return the median and minimum ms of a call."""
    every = calls(way, size, device, backward)
    for call in every:
        call()
    wait(device)
    once = captured_graph(every).replay if device.type == "cuda" else every[0]
    count = len(every) if device.type == "cuda" else 1
    run_times(once, device, 5)
    times = [time / count for time in run_times(once, device, 50)]
    return round(statistics.median(times), 4), round(min(times), 4)


@contextmanager
def only(way: str) -> Iterator[None]:
    """Let models take the way."""
    with patch.object(invariant, "takes", takes if way == "kernels" else lambda u, weight: False):
        yield


def step_rows(way: str, case: lm_step.Case, device: torch.device, smoke: bool) -> Iterator[Any]:
    """Yield a row a class of a step's kernels, and one of the step."""
    model = lm_step.fresh(case, device)
    if not smoke:
        lm_step.compile_blocks(model)
    with only(way):
        times = lm_step.step_times(model, case, device, 4, 3 if smoke else 20)
        kinds = {ProfilerActivity.CPU if smoke else ProfilerActivity.CUDA}
        with profile(activities=kinds) as record:
            lm_step.step_times(model, case, device, 0, 1)
            wait(device)
    about = {"model": case.name, "B": case.batch, "T": case.length, "packed": case.packed}
    about |= {"convolution": way}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        record.export_chrome_trace(str(trace))
        for row in breakdown(kernels_of(trace)):
            yield {**about, **row, "median_ms": "", "min_ms": ""}
    none = dict.fromkeys(("kernels", "streams", "busy_ms", "alone_ms"), "")
    median = round(statistics.median(times), 3)
    yield {**about, "class": "step", **none, "median_ms": median, "min_ms": round(min(times), 3)}


def main() -> None:
    parser = parser_of(__doc__)
    args = parser.parse_args()
    device = device_of(args)
    sizes = ((2, 33, 16),) if args.smoke else SIZES
    record = record_of(args, "conv.csv", ("device", "B", "T", "D", "pass", "way"))
    bandwidth = copy_bandwidth(device)
    for size in sizes:
        for name, backward, passes in (("forward", False, 2), ("both", True, 5)):
            floor = passes * size[0] * size[1] * size[2] * 2 / bandwidth * 1e3
            for way in WAYS:
                median, least = time_of(way, size, device, backward)
                row: dict[str, Any] = dict(zip("BTD", size, strict=True))
                row |= {"pass": name, "way": way, "median_ms": median, "min_ms": least}
                record.add({**row, "traffic_ms": round(floor, 4)})
    keys = ("device", "model", "B", "T", "packed", "convolution", "class")
    steps = record_of(args, "lm_step_profile.csv", keys)
    every = lm_step.smoke_cases() if args.smoke else lm_step.cases()
    gru = [case for case in every if case.name in ("gru-400M", "gru-tiny")]
    for case in gru if args.smoke else [gru[0], gru[-1]]:
        for way in reversed(WAYS):
            for row in step_rows(way, case, device, args.smoke):
                steps.add(row)
    record.end()


if __name__ == "__main__":
    main()
