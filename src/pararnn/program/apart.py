"""Calls of functions outside of the modes of the caller's thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import ParamSpec, TypeVar

import torch

from pararnn.base.device import has_gpu
from pararnn.base.private import fake_tensor_mode

P = ParamSpec("P")
R = TypeVar("R")


def call_outside_modes(function: Callable[..., R], *args: object) -> R:
    """Return the result of `function`, called in a new thread.

    The global generator of random numbers is left unchanged. A trace must not see the modes of the
    caller's thread: autocast would add casts to the graphs, a transform its tangents, and a default
    device constants on another device.
    """
    if torch.version.cuda is not None and not has_gpu():
        # PyTorch built for CUDA, on a machine without a GPU: its substitute for GPUs belongs to the
        # first thread that makes fake tensors. Making some after that thread's end would crash.
        with fake_tensor_mode():
            pass
    with torch.random.fork_rng(devices=()), ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args).result()


def outside_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function as `call_outside_modes` calls it."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return call_outside_modes(partial(function, *args, **kwargs))

    return run
