"""Plan of a pass on a GPU: its kernels, its segments of time, and the memory that these share."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from pararnn.codegen.board import board_of, found_words
from pararnn.codegen.cuda import Variant, ring_of
from pararnn.codegen.interface import WORD, Words
from pararnn.codegen.nvrtc import CLUSTERS, MAX_CLUSTER
from pararnn.codegen.targets import Gpu
from pararnn.engines.fused.launch import Address, Addresses
from pararnn.engines.split import Split, SplitRequest, plan_split
from pararnn.program.program import Program


class Plan(NamedTuple):
    """The kernels of a pass by name, its split, and the blocks of a cluster (0: no clusters)."""

    kernels: Mapping[str, Any]
    split: Split
    cluster: int


def plan_pass(
    gpu: Gpu,
    program: Program,
    variant: Variant,
    size: tuple[int, int],
    device: torch.device,
    request: SplitRequest,
) -> Plan:
    """Plan a pass; `size`: tiles of channels, and T. Raises EngineError as `gpu.kernels`."""
    columns, length = size
    capability = gpu.capability(device)
    without_clusters = partial(gpu.kernels, program, variant, capability)
    if variant.solver == "sequential":
        return Plan(without_clusters(), Split(1, length, 0), 0)
    steps, cores = ring_of(program, variant).steps, gpu.cores(device)

    def split(capacity: int) -> Split:
        return plan_split(length, columns, variant.dtype, steps, cores, capacity, request)

    any_size = split(max(columns, 1) * max(length, 1))
    # Clusters fill multiprocessors unevenly, which few blocks do anyway.
    few = 1 < any_size.segments <= MAX_CLUSTER and columns * any_size.segments <= 2 * cores
    if few and capability >= CLUSTERS:
        kernels = gpu.kernels(program, variant._replace(cluster=True), capability)
        if any_size.segments <= gpu.call(device, kernels["run"].most_in_cluster, device.index):
            return Plan(kernels, any_size, any_size.segments)
    kernels = without_clusters()
    capacity = gpu.call(device, kernels["run"].blocks_a_core) * cores
    return Plan(kernels, split(capacity), 0)


class Shared(NamedTuple):
    """Memory that segments share: its words, the words of counters that are zero at first, and the
    addresses by the fields of Shooting and of Counters (0 where a cluster needs none)."""

    memory: int
    zeros: int
    board: dict[str, Words]
    counters: dict[str, Words]


def shared_of(
    plan: Plan,
    program: Program,
    dtype: torch.dtype,
    columns: int,
    per_lane: int,
    addresses: Addresses,
) -> Shared:
    """Lay out the memory that a Newton solve's segments share: one tensor, and one of zeros."""
    own, spans = board_of(program, dtype, per_lane), columns * plan.split.segments
    sizes = {"board": spans * own.board_words, "found": spans * found_words(own, dtype)}
    counters = {"arrived": columns, "ends": spans * own.ends_words, "furthest": columns}
    memory, board = sum(sizes.values()), _consecutive(addresses, sizes)
    if plan.cluster:
        none: dict[str, Words] = dict.fromkeys(counters, 0)
        return Shared(memory, 0, board, none)
    return Shared(memory, sum(counters.values()), board, _consecutive(addresses, counters))


def _consecutive(addresses: Addresses, sizes: dict[str, int]) -> dict[str, Words]:
    """Return the addresses of consecutive arrays, sizes in words, in the next tensor."""
    tensor, starts = addresses.next().tensor, accumulate([0, *sizes.values()])
    return {name: Address(tensor, start * WORD) for name, start in zip(sizes, starts, strict=False)}
