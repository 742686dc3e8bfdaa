"""Schedule of elementwise steps on a GPU: lanes run channels, segments of time run side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.codegen.board import LANES, board_of, found_words
from pararnn.codegen.elementwise_cuda import (
    INFO_SLOTS,
    ElementwiseVariant,
    most_per_lane,
    ring_of,
    usual_variants,
)
from pararnn.codegen.families import interface_of
from pararnn.codegen.interface import WORD, Interface, Values, Words
from pararnn.codegen.nvrtc import CLUSTERS, MAX_CLUSTER
from pararnn.codegen.source import chunk_of
from pararnn.codegen.targets import Gpu
from pararnn.engines.arguments import Arguments
from pararnn.engines.fused import gpu as gpus
from pararnn.engines.fused.launch import (
    Address,
    Addresses,
    Conversions,
    Launch,
    Temporary,
    pack_known,
    template_of,
)
from pararnn.engines.fused.layout import head_strides, heads_of, row_and_time, unit_stride
from pararnn.engines.fused.schedule import Layouts
from pararnn.engines.fused.vectors import VectorPass, VectorSchedule, problem_values
from pararnn.engines.rule import Size
from pararnn.engines.split import (
    MIN_LENGTH,
    WARPS_A_CORE,
    Split,
    SplitRequest,
    plan_split,
    useful_segments,
)
from pararnn.engines.tuned import Workload
from pararnn.program.program import Program


@dataclass(frozen=True)
class ElementwisePass(VectorPass):
    """Pass of an elementwise step on a GPU; tiles: rows times tiles of channels."""

    info_rows: int = 1
    tiles: int = 0
    split: Split | None = None

    def new_info(self, gates: Tensor) -> Tensor:
        info = gates.new_empty((self.info_rows, 2), dtype=torch.int64)
        # Rows that no tile writes, or to which several add, are zero at first.
        if not self.tiles or 1 < len(info) < self.tiles:
            info.zero_()
        return info


class ElementwiseCuda(gpus.OnGpu, VectorSchedule):
    """Schedule of elementwise steps by one solver on a type of GPU."""

    def __init__(self, solver: str, gpu: Gpu) -> None:
        super().__init__(gpu)
        self.solver, self.cuts_time = solver, solver == "newton"
        self.info_rows = INFO_SLOTS[solver]

    def segments(self, size: Size, dtype: torch.dtype, device: torch.device) -> int:
        batch, steps, channels = size
        cores = 0 if steps < MIN_LENGTH else gpus.cores_of_rank(device)
        columns = batch * _tiles(channels, most_per_lane(dtype))
        return useful_segments(steps, columns, cores) if cores else 1

    def plan_split(self, program: Program, workload: Workload, request: SplitRequest) -> Split:
        _, (batch, steps, channels), dtype, device, _ = workload
        variant = usual_variants(program, dtype, channels, channels, solver="newton")[0]
        columns = batch * _tiles(channels, variant.per_lane)
        device = self.gpu.with_index(device)
        return plan_pass(self.gpu, program, variant, (columns, steps), device, request).split

    def conversions(self, args: Arguments, backward: bool) -> Conversions:
        return gpus.conversions_of(args, _as_gradient if backward else unit_stride)

    def plan(self, program: Program, layouts: Layouts, args: Arguments) -> ElementwisePass:
        gpu, solver, weights = self.gpu, self.solver, gpus.weight_dtype(args)
        (rows, length, channels), device = args.size, args.gates.device
        per_lane = most_per_lane(args.gates.dtype)
        if solver == "sequential" and not args.options.one_layout:
            per_lane = _per_lane(args.gates.dtype, rows, channels, gpu.cores(device))
        tiles = rows * _tiles(channels, per_lane) if length else 0
        gpus.check_limits(length, tiles, "tiles of channels", f"B = {rows}")
        if not tiles:
            return ElementwisePass(None, 0, weights, args.samples, info_rows=self.info_rows)
        strides, variant = _variant(solver, layouts, args, per_lane)
        plan = plan_pass(gpu, program, variant, (tiles, length), device, args.split)
        interface, addresses = interface_of(program, "cuda", solver), Addresses()
        values = problem_values(interface, addresses, layouts, args, strides)
        problem: dict[str, Words] = {
            "pass": pack_known(interface, layouts.struct("Problem"), values)
        }
        memory: tuple[Temporary, ...] = ()
        if solver == "newton":
            memory, problem["shooting"] = pack_shared(
                plan, program, args.gates.dtype, tiles, per_lane, interface, addresses
            )
        segments, struct = plan.split.segments, layouts.struct("Launch")
        grid, together = (tiles * segments, 1), not plan.cluster and segments > 1
        kernel = gpus.GpuKernel(gpu, device, plan.kernels["run"], grid, together, plan.cluster)
        launch = Launch(kernel, template_of(interface.pack(struct, problem)), memory)
        spans, counts, sums = rows * segments, interface.counts, None
        if layouts.gates is not None and not args.samples:
            grid = (_tiles(channels, 1), counts.weights)
            kernel = gpus.GpuKernel(gpu, device, plan.kernels["sum_weights"], grid)
            sums = Launch(kernel, gpus.sum_template(interface, spans, range(counts.params)))
        of_sums = weights, args.samples, sums
        return ElementwisePass(launch, spans, *of_sums, self.info_rows, tiles, plan.split)


def _variant(
    solver: str, layouts: Layouts, args: Arguments, per_lane: int
) -> tuple[Sequence[int], ElementwiseVariant]:
    """Return the strides (B, T, G, H) of gates in kernel layout, and the variant of a pass."""
    gates, (rows, length, channels) = args.gates, args.size
    count, (heads, width) = gates.shape[2], heads_of(gates.shape)
    row, time, gate, head = head_strides(gates.shape, gates.stride())
    if head == width:  # contiguous heads are one
        heads, width, head = 1, channels, 0
    size, wide = gates.dtype.itemsize, args.dtype.itemsize
    chunk, field_chunk, other_chunk = layouts.facts
    # Kernels never use strides of dimensions of size 1.
    sizes = ((row, rows), (time, length), (gate, count), (head, heads))
    strides_in_bytes = [chunk, width * size, *[s * size for s, n in sizes if n > 1]]
    field_strides = [row_and_time(f) for f in args.fields if f.shape[-1] == channels]
    aligned_fields = [s * wide for strides in field_strides for s in (channels, *strides)]
    if layouts.gates is not None:
        strides_in_bytes += [other_chunk, channels * size]
        grads = [strides[:2] for strides in layouts.incoming if strides is not None]
        strides_in_bytes += [s * size for strides in grads for s in strides]
    return (row, time, gate, head), ElementwiseVariant(
        channels=channels,
        head_width=width,
        per_lane=per_lane,
        chunk=chunk_of(*strides_in_bytes),
        field_chunk=chunk_of(field_chunk, *aligned_fields),
        adjacent_gates=(count == 1 or gate == width) and (length == 1 or time == count * width),
        solver=solver,
        **gpus.variant_fields(layouts, args),
    )


def _as_gradient(gates: Tensor) -> Tensor:
    """Return gates in the layout in which their gradient is written."""
    layout, gates = unit_stride(torch.empty_like(gates, device="meta")), unit_stride(gates)
    if gates.stride() == layout.stride():
        return gates
    return torch.empty_like(layout, device=gates.device).copy_(gates)


def _tiles(channels: int, per_lane: int) -> int:
    """Return the warps that run a row's channels."""
    return -(-channels // (LANES * per_lane))


def _per_lane(dtype: torch.dtype, rows: int, channels: int, cores: int) -> int:
    """Return the channels of a lane: two halve the instructions for addresses, one doubles the
    warps."""
    most = most_per_lane(dtype)
    warps = rows * _tiles(channels, most)
    return most if warps > WARPS_A_CORE * cores // 2 else 1


class PassPlan(NamedTuple):
    """The kernels of a pass by name, its split, and the blocks of a cluster (0: no clusters)."""

    kernels: Mapping[str, Any]
    split: Split
    cluster: int


def plan_pass(
    gpu: Gpu,
    program: Program,
    variant: ElementwiseVariant,
    size: tuple[int, int],
    device: torch.device,
    request: SplitRequest,
) -> PassPlan:
    """Plan a pass; `size`: tiles of channels, and T. Raises EngineError as `gpu.kernels`."""
    columns, length = size
    capability = gpu.capability(device)
    without_clusters = partial(gpu.kernels, program, variant, capability)
    if variant.solver == "sequential":
        return PassPlan(without_clusters(), Split(1, length, 0), 0)
    steps, cores = ring_of(program, variant).steps, gpu.cores(device)

    def split(capacity: int) -> Split:
        return plan_split(length, columns, variant.dtype, steps, cores, capacity, request)

    any_size = split(max(columns, 1) * max(length, 1))
    # Clusters fill multiprocessors unevenly, which few blocks do anyway.
    few = 1 < any_size.segments <= MAX_CLUSTER and columns * any_size.segments <= 2 * cores
    if few and capability >= CLUSTERS:
        kernels = gpu.kernels(program, variant._replace(cluster=True), capability)
        if any_size.segments <= gpu.call(device, kernels["run"].most_in_cluster, device.index):
            return PassPlan(kernels, any_size, any_size.segments)
    kernels = without_clusters()
    capacity = gpu.call(device, kernels["run"].blocks_a_core) * cores
    return PassPlan(kernels, split(capacity), 0)


def pack_shared(
    plan: PassPlan,
    program: Program,
    dtype: torch.dtype,
    columns: int,
    per_lane: int,
    interface: Interface,
    addresses: Addresses,
) -> tuple[tuple[Temporary, ...], list[int]]:
    """Pack `Shooting`, and return the memory that a Newton solve's segments share with it: one
    tensor of 64-bit words, and one of zeros where no cluster does without."""
    lengths, spans = board_of(program, dtype, per_lane), columns * plan.split.segments
    sizes = {"board": spans * lengths.board_words, "found": spans * found_words(lengths, dtype)}
    zeros = {"arrived": columns, "ends": spans * lengths.ends_words, "furthest": columns}
    values = {**plan.split._asdict(), **_consecutive(addresses, sizes)}
    memory = [Temporary((sum(sizes.values()),), torch.int64)]
    counters: Values = dict.fromkeys(zeros, 0)
    if not plan.cluster:
        counters = _consecutive(addresses, zeros)
        memory.append(Temporary((sum(zeros.values()),), torch.int64, zeros=True))
    values["counters"] = interface.pack("Counters", counters)
    return (*memory,), interface.pack("Shooting", values)


def _consecutive(addresses: Addresses, sizes: dict[str, int]) -> dict[str, Words]:
    """Return the addresses of consecutive arrays, sizes in words, in the next tensor."""
    tensor, starts = addresses.next().tensor, accumulate([0, *sizes.values()])
    return {name: Address(tensor, start * WORD) for name, start in zip(sizes, starts, strict=False)}
