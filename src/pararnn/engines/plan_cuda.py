"""How a pass runs on a GPU: its kernels, how they cut time, and what the segments share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.codegen.cuda import LANES, Variant, kernels_of, ring_of
from pararnn.codegen.nvrtc import CLUSTERS, MAX_CLUSTER, Kernel, capability_of
from pararnn.engines.split import Pin, Split, split_of
from pararnn.numerics import compute_dtype
from pararnn.program import Program


class Plan(NamedTuple):
    """The kernels of a pass by name, its split, and the blocks of a cluster (0: no clusters)."""

    kernels: dict[str, Kernel]
    split: Split
    cluster: int


@lru_cache(maxsize=4096)
def plan(
    program: Program, variant: Variant, size: tuple[int, int], device: torch.device, asked: Pin
) -> Plan:
    """The plan of a pass; `size`: tiles of channels, and T. Raises EngineError as `kernels_of`."""
    columns, length = size
    capability = capability_of(device)
    plain = partial(kernels_of, program, variant, capability)
    if variant.solver == "sequential":
        return Plan(plain(), Split(1, length, 0), 0)
    steps, cores = ring_of(program, variant).steps, cores_of(device)

    def split(capacity: int) -> Split:
        return split_of(length, columns, variant.dtype, steps, cores, capacity, asked)

    free = split(max(columns, 1) * max(length, 1))
    # Clusters fill multiprocessors unevenly, which few blocks do anyway.
    few = 1 < free.segments <= MAX_CLUSTER and columns * free.segments <= 2 * cores
    if few and capability >= CLUSTERS:
        kernels = kernels_of(program, variant._replace(cluster=True), capability)
        if free.segments <= on_device(device, kernels["run"].most_in_cluster, device.index):
            return Plan(kernels, free, free.segments)
    kernels = plain()
    return Plan(kernels, split(on_device(device, kernels["run"].blocks_a_core) * cores), 0)


def on_device(device: torch.device, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call with a device as the current one."""
    if device.index == torch.cuda.current_device():
        return call(*args, **options)
    with torch.cuda.device(device):
        return call(*args, **options)


@cache
def cores_of(device: torch.device) -> int:
    """The device's multiprocessors."""
    return torch.cuda.get_device_properties(device).multi_processor_count


class Shared(NamedTuple):
    """What segments share: its words, and the memory, which lives as long as this."""

    words: list[int]
    memory: tuple[Tensor, ...]


def shared_of(plan: Plan, gates: Tensor, program: Program, columns: int, per_lane: int) -> Shared:
    """What the segments of a Newton solve share: see kernels/cuda/boundaries.h, sync_grid.h.

    Counted in words of 64 bits: one number of 32 bits that is posted, or two that are not.
    """
    states, words = program.num_states, compute_dtype(gates.dtype).itemsize // 4
    lanes, spans, map_size = per_lane * LANES, columns * plan.split.segments, states**2 + 2 * states
    board = spans * lanes * (2 * map_size + states + 1) * words
    found = spans * lanes * (3 * states + 2 * states**2 + 1) * words // 2
    shared = gates.new_empty(board + found, dtype=torch.int64)
    places = _places(shared, [board, found])
    if plan.cluster:
        return Shared([*places, 0], (shared,))  # an empty struct has a size
    ends = spans * lanes * 2 * states * words
    zeros = gates.new_zeros(columns + ends + columns, dtype=torch.int64)
    return Shared([*places, *_places(zeros, [columns, ends, columns])], (shared, zeros))


def _places(tensor: Tensor, sizes: Sequence[int]) -> list[int]:
    """The addresses of neighbours of so many elements in a tensor."""
    starts = accumulate([0, *sizes[:-1]])
    return [tensor.data_ptr() + start * tensor.element_size() for start in starts]
