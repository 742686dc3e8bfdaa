"""Calls of functions outside of the modes that the caller's thread is in."""

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
    """Return what `function` returns, called in a thread of its own.

    The global generator of random numbers is afterwards what it was. A trace must not see what the
    caller's thread is in: autocast would put casts into the graphs, a transform its tangents, a
    default device constants that are elsewhere.
    """
    if torch.version.cuda is not None and not has_gpu():
        # PyTorch built for CUDA, on a machine without a GPU: its stand-in for GPUs belongs to the
        # first thread that makes fake tensors, and whoever makes some once that has ended crashes.
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
