"""Graphs of CUDA work, as a user records them."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

T = TypeVar("T")


def capture(run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Return a graph of `run` and the results that replays fill, after a run on another stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    return graph, results


def check_replays(run: Callable[[torch.Tensor], Iterable[torch.Tensor]], x: torch.Tensor) -> None:
    """Replays on fresh inputs have the bits of calls. run: from x, which requires gradients."""
    static = x.detach().clone().requires_grad_()
    graph, results = capture(lambda: run(static))
    for _ in range(3):
        fresh = torch.randn_like(x).requires_grad_()
        static.data.copy_(fresh)
        graph.replay()
        for pair in zip(results, run(fresh), strict=True):
            assert torch.equal(*pair)
