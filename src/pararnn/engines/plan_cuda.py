"""How a pass runs on a GPU: its kernels, how they cut time, and what the segments share."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.codegen.board import board_of, found_words
from pararnn.codegen.cuda import Variant, ring_of
from pararnn.codegen.nvrtc import CLUSTERS, MAX_CLUSTER
from pararnn.codegen.targets import Gpu
from pararnn.engines.split import Pin, Split, split_of
from pararnn.program.program import Program


class Plan(NamedTuple):
    """The kernels of a pass by name, its split, and the blocks of a cluster (0: no clusters)."""

    kernels: Mapping[str, Any]
    split: Split
    cluster: int


@lru_cache(maxsize=4096)
def plan(
    program: Program,
    variant: Variant,
    size: tuple[int, int],
    device: torch.device,
    asked: Pin,
    gpu: Gpu,
) -> Plan:
    """The plan of a pass; `size`: tiles of channels, and T. Raises EngineError as `gpu.kernels`."""
    columns, length = size
    capability = gpu.capability(device)
    plain = partial(gpu.kernels, program, variant, capability)
    if variant.solver == "sequential":
        return Plan(plain(), Split(1, length, 0), 0)
    steps, cores = ring_of(program, variant).steps, gpu.cores(device)

    def split(capacity: int) -> Split:
        return split_of(length, columns, variant.dtype, steps, cores, capacity, asked)

    free = split(max(columns, 1) * max(length, 1))
    # Clusters fill multiprocessors unevenly, which few blocks do anyway.
    few = 1 < free.segments <= MAX_CLUSTER and columns * free.segments <= 2 * cores
    if few and capability >= CLUSTERS:
        kernels = gpu.kernels(program, variant._replace(cluster=True), capability)
        if free.segments <= gpu.call(device, kernels["run"].most_in_cluster, device.index):
            return Plan(kernels, free, free.segments)
    kernels = plain()
    return Plan(kernels, split(gpu.call(device, kernels["run"].blocks_a_core) * cores), 0)


class Shared(NamedTuple):
    """What segments share: addresses by the fields of Shooting and of Counters, and the memory,
    which lives as long as this."""

    places: dict[str, int]
    counters: dict[str, int]
    memory: tuple[Tensor, ...]


def shared_of(plan: Plan, gates: Tensor, program: Program, columns: int, per_lane: int) -> Shared:
    """What the segments of a Newton solve share; clusters need no counters."""
    own, spans = board_of(program, gates.dtype, per_lane), columns * plan.split.segments
    board, found = spans * own.board_words, spans * found_words(own, gates.dtype)
    shared = gates.new_empty(board + found, dtype=torch.int64)
    places = _places(shared, {"board": board, "found": found})
    if plan.cluster:
        return Shared(places, {"arrived": 0, "ends": 0, "furthest": 0}, (shared,))
    sizes = {"arrived": columns, "ends": spans * own.ends_words, "furthest": columns}
    zeros = gates.new_zeros(sum(sizes.values()), dtype=torch.int64)
    return Shared(places, _places(zeros, sizes), (shared, zeros))


def _places(tensor: Tensor, sizes: dict[str, int]) -> dict[str, int]:
    """The addresses of neighbours of so many elements in a tensor."""
    starts = accumulate([0, *sizes.values()])
    size = tensor.element_size()
    return {
        name: tensor.data_ptr() + start * size for name, start in zip(sizes, starts, strict=False)
    }
