"""How a pass runs on a GPU: its kernels, how they cut time, and what the segments share."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from pararnn.cache import on_clear
from pararnn.codegen.board import board_of, found_words
from pararnn.codegen.cuda import Variant, ring_of
from pararnn.codegen.interface import WORD, Words
from pararnn.codegen.nvrtc import CLUSTERS, MAX_CLUSTER
from pararnn.codegen.targets import Gpu
from pararnn.engines.fused.launch import Addresses, Place
from pararnn.engines.split import Split, SplitRequest, plan_split
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
    asked: SplitRequest,
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
        return plan_split(length, columns, variant.dtype, steps, cores, capacity, asked)

    free = split(max(columns, 1) * max(length, 1))
    # Clusters fill multiprocessors unevenly, which few blocks do anyway.
    few = 1 < free.segments <= MAX_CLUSTER and columns * free.segments <= 2 * cores
    if few and capability >= CLUSTERS:
        kernels = gpu.kernels(program, variant._replace(cluster=True), capability)
        if free.segments <= gpu.call(device, kernels["run"].most_in_cluster, device.index):
            return Plan(kernels, free, free.segments)
    kernels = plain()
    return Plan(kernels, split(gpu.call(device, kernels["run"].blocks_a_core) * cores), 0)


on_clear(plan.cache_clear)


class Shared(NamedTuple):
    """What segments share: the words of it, and of counters that are zero at first; and addresses
    by the fields of Shooting and of Counters, 0 where a cluster needs none."""

    memory: int
    zeros: int
    places: dict[str, Words]
    counters: dict[str, Words]


def shared_of(
    plan: Plan, program: Program, dtype: torch.dtype, columns: int, per_lane: int, place: Addresses
) -> Shared:
    """What the segments of a Newton solve share, in one tensor and one of zeros."""
    own, spans = board_of(program, dtype, per_lane), columns * plan.split.segments
    sizes = {"board": spans * own.board_words, "found": spans * found_words(own, dtype)}
    counters = {"arrived": columns, "ends": spans * own.ends_words, "furthest": columns}
    memory, places = sum(sizes.values()), _places(place, sizes)
    if plan.cluster:
        none: dict[str, Words] = dict.fromkeys(counters, 0)
        return Shared(memory, 0, places, none)
    return Shared(memory, sum(counters.values()), places, _places(place, counters))


def _places(place: Addresses, sizes: dict[str, int]) -> dict[str, Words]:
    """The addresses of neighbours of so many words in the next tensor."""
    tensor, starts = place.one().tensor, accumulate([0, *sizes.values()])
    return {name: Place(tensor, start * WORD) for name, start in zip(sizes, starts, strict=False)}
