"""(sequential, fused) and (newton, fused) on CUDA: one generated kernel a pass, and a small sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.base.device import has_gpu
from pararnn.base.errors import EngineError
from pararnn.base.private import constant_in_graphs
from pararnn.codegen.board import LANES
from pararnn.codegen.cuda import (
    INFO_SLOTS,
    Make,
    Variant,
    check_buildable,
    kernels_of,
    most_per_lane,
    source_of,
    usual_variants,
)
from pararnn.codegen.families import interface_of
from pararnn.codegen.interface import Interface, Values, Words
from pararnn.codegen.mixing_cuda import gives_sums
from pararnn.codegen.nvrtc import capability_of
from pararnn.codegen.source import chunk_of
from pararnn.codegen.targets import CUDA, Gpu
from pararnn.engines.arguments import Arguments
from pararnn.engines.fused import matrix
from pararnn.engines.fused.launch import (
    Addresses,
    Template,
    adjoint_values,
    conversions_for,
    input_values,
    template_of,
    to_kernel_layout,
)
from pararnn.engines.fused.layout import (
    common_chunk,
    gate_strides,
    head_strides,
    heads_of,
    in_matrix_heads,
    row_and_time,
    unit_stride,
)
from pararnn.engines.fused.matrix import MatrixLaunch, Strides
from pararnn.engines.fused.matrix_cuda import check_backward as check_matrix_backward
from pararnn.engines.fused.matrix_cuda import make_launch as make_matrix_launch
from pararnn.engines.fused.mixing_cuda import MixingLaunch, make_mixing_launch, mixing_layouts
from pararnn.engines.fused.passes import Adjoint, FusedEngine
from pararnn.engines.fused.plan import Plan, plan_pass, shared_of
from pararnn.engines.fused.segments import plan_matrix_split, programs_of_passes
from pararnn.engines.rule import Size
from pararnn.engines.split import (
    MIN_LENGTH,
    NO_REQUEST,
    WARPS_A_CORE,
    Split,
    SplitRequest,
    useful_segments,
)
from pararnn.program.program import HEADS, MATRIX, MIXING, Program

MAX_LENGTH = 2**30
MAX_BLOCKS = 2**31 - 1
MATRIX_MIN_SIZE = 128
"""Least steps of a segment of a matrix cell."""


class GpuEngine(FusedEngine):
    """Generated CUDA kernels for one solver, on a type of GPU."""

    def __init__(self, solver: str, gpu: Gpu) -> None:
        super().__init__(solver)
        self.gpu, self.info_rows = gpu, INFO_SLOTS[solver]

    def build(self, program: Program, dtype: torch.dtype, compiles: bool = True) -> None:
        """Compile small kernels, or only generate them. Raises EngineError where that fails."""
        capability = self.capability()
        make: Make = kernels_of if compiles else lambda own, variant, _: source_of(own, variant)
        programs, solver = [program.of_kernels], self.solver
        if program.family == MATRIX:
            programs, solver = programs_of_passes(program, dtype, self.solver), matrix.SOLVER
        for own in programs:
            check_buildable(own, dtype, capability, solver, make)

    def capability(self) -> tuple[int, int]:
        """Return the compute capability to build for."""
        return capability_of(torch.device("cuda"))

    def plan_split(
        self,
        program: Program,
        size: Size,
        dtype: torch.dtype,
        device: torch.device,
        request: SplitRequest,
    ) -> Split:
        """Plan the segments of a forward pass on gates of the usual layout."""
        batch, steps, channels = size
        device = self.gpu.with_index(device)
        if program.family == MATRIX:
            cores = self.gpu.cores(device)
            return plan_matrix_split(program, size, cores, MATRIX_MIN_SIZE, request)
        variant = usual_variants(program, dtype, channels, channels, solver="newton")[0]
        columns = batch * _tiles(channels, variant.per_lane)
        return plan_pass(self.gpu, program, variant, (columns, steps), device, request).split

    def segments(self, size: Size, dtype: torch.dtype, device: torch.device) -> int:
        """Return how many segments keep all cores busy."""
        batch, steps, channels = size
        if steps < MIN_LENGTH or not has_gpu():
            return 1
        columns = batch * _tiles(channels, most_per_lane(dtype))
        return useful_segments(steps, columns, _cores_as_constant(device))

    def matrix_segments(self, program: Program, size: Size, device: torch.device) -> int:
        """Return how many segments keep all cores busy with the heads of all rows."""
        if not has_gpu():
            return 1
        cores = _cores_as_constant(device)
        return plan_matrix_split(program, size, cores, MATRIX_MIN_SIZE, NO_REQUEST).segments

    def written_layout(self, args: Arguments, gates: Tensor) -> Tensor:
        """Return gates with adjacent channels, in the heads of a call's matrices if it has any."""
        return in_matrix_heads(args)(gates)

    def launch(
        self,
        program: Program,
        args: Arguments,
        adjoint: Adjoint | None = None,
        starts: Sequence[Tensor] = (),
    ) -> tuple[Launch | MixingLaunch, list[Tensor | None]]:
        """Return the launch of a pass, and the call's tensors in kernel layout.

        It is cached for calls with this signature whose tensors are aligned alike. Raises
        EngineError for sizes that kernels do not support.
        """
        if program.family == MIXING:
            return self._launch_mixing(program, args, adjoint, starts)
        weights, signature = _weight_dtype(args), args.signature
        layout = unit_stride if adjoint is None else _as_gradient
        key = layout, weights
        tensors = to_kernel_layout(args, signature.cache(key, conversions_for, args, *key))
        gates, fields = args.gates_and_fields(tensors)
        full_fields = [f for f in fields if f.shape[-1] == signature.size[2]]
        layouts = Layouts(common_chunk([gates]), common_chunk(full_fields))
        if adjoint is not None:
            arriving = tuple([None if g is None else row_and_time(g) for g in adjoint.arriving])
            chunk = common_chunk([adjoint.grad_gates, *adjoint.outputs, *adjoint.arriving])
            layouts = layouts._replace(arriving=arriving, adjoint_chunk=chunk)
        parts = (self.gpu, self.solver, program, weights, layouts)
        return signature.cache(parts, make_launch, *parts, args, tensors), tensors

    def gives_sums(self, program: Program, dtype: torch.dtype) -> bool:
        """Return True for cells that mix channels, if sums can be those of returned states, and for
        steps that run on heads."""
        mixes = program.family == MIXING and gives_sums(program, dtype)
        return mixes or program.family == HEADS

    def check_backward(self, program: Program, args: Arguments) -> None:
        """Raise EngineError where a head of the backward pass does not fit this GPU."""
        program = program.of_kernels
        check = {MIXING: _plan_mixing, MATRIX: check_matrix_backward}.get(program.family or "")
        if check is not None:
            key = (self.gpu, program)
            args.signature.cache((check, *key), check, *key, args)

    def launch_matrix(
        self, program: Program, args: Arguments, strides: Strides | None = None
    ) -> MatrixLaunch:
        """Return the cached launch of a pass of a matrix cell."""
        key = make_matrix_launch, self.gpu, program, strides
        return args.signature.cache(key, *key, args)

    def _launch_mixing(
        self, program: Program, args: Arguments, adjoint: Adjoint | None, starts: Sequence[Tensor]
    ) -> tuple[MixingLaunch, list[Tensor | None]]:
        weights, tensors = _mixing_inputs(args)
        layouts = mixing_layouts(tensors, states=starts)
        if adjoint is not None:
            layouts = mixing_layouts(tensors, adjoint.grad_gates, adjoint.outputs, adjoint.arriving)
        parts = (self.gpu, program, weights, layouts)
        return args.signature.cache(parts, make_mixing_launch, *parts, args, tensors), tensors


def _mixing_inputs(args: Arguments) -> tuple[torch.dtype, list[Tensor | None]]:
    """Return the dtype of the weights' gradients, and a call's tensors in kernel layout."""
    weights, signature = _weight_dtype(args), args.signature
    matrices = {param.dtype for param in args.params if param.ndim > 1}
    key = in_matrix_heads, weights, matrices.pop() if len(matrices) == 1 else signature.dtype
    conversions = signature.cache(key, conversions_for, args, in_matrix_heads(args), *key[1:])
    return weights, to_kernel_layout(args, conversions)


def _plan_mixing(gpu: Gpu, program: Program, args: Arguments) -> list[MixingLaunch]:
    """Plan both passes of a call, without kernels. Raises EngineError for the first that fails."""
    weights, tensors = _mixing_inputs(args)
    _, steps, channels = args.size
    gates = tensors[0]
    assert gates is not None
    arriving = ((steps * channels, channels),) * program.num_states
    forward = mixing_layouts(tensors)
    args = args.with_options(sums=True)
    backward = forward._replace(gates=gates.stride(), arriving=arriving)
    own = (replace(gpu, kernels=lambda *_: {}), program, weights)
    return [make_mixing_launch(*own, way, args, tensors) for way in (forward, backward)]


class Layouts(NamedTuple):
    """Layouts on which a pass depends in addition to a call's signature.

    chunk, field_chunk, adjoint_chunk: bytes that may be copied at once by the addresses of gates,
    of fields, and of all that the backward pass reads and writes in addition (None in the forward
    pass). arriving: strides (B, T) of the gradients that arrive, None for an absent one.
    """

    chunk: int
    field_chunk: int
    adjoint_chunk: int | None = None
    arriving: tuple[tuple[int, int] | None, ...] = ()


class Launch(NamedTuple):
    """Pass on calls of one signature. Without blocks there is nothing to launch.

    weights: dtype of the weights' gradients. blocks: of one segment. shared, counters: lengths of
    the memory that segments share, and of their counters, in words. sums: template of the kernel
    that adds up the weights' gradients of all spans.
    """

    gpu: Gpu
    weights: torch.dtype
    info_rows: int
    blocks: int = 0
    plan: Plan | None = None
    template: Template | None = None
    spans: int = 0
    shared: int = 0
    counters: int = 0
    sums: Template | None = None

    def new_info(self, gates: Tensor) -> Tensor:
        """Allocate the counts of a forward pass."""
        info = gates.new_empty((self.info_rows, 2), dtype=torch.int64)
        # Rows that no tile writes, or to which several add, are zero at first.
        if not self.blocks or 1 < len(info) < self.blocks:
            info.zero_()
        return info

    def new_weights(self, args: Arguments, gates: int) -> tuple[Tensor | None, list[Tensor]]:
        """Allocate the gradients of bias and params; zero where nothing is launched."""
        new = args.gates.new_empty if self.blocks else args.gates.new_zeros
        grad_bias = None if args.bias is None else new(args.bias.shape, dtype=self.weights)
        return grad_bias, [new(p.shape, dtype=self.weights) for p in args.params]

    def forward(self, tensors: list[Tensor | None], info: Tensor) -> None:
        """Launch a forward pass."""
        self._run([*tensors, info])

    def backward(
        self, tensors: list[Tensor | None], weights: list[Tensor | None], wanted: Sequence[str]
    ) -> None:
        """Launch a backward pass, and add up the weights' gradients of all spans if wanted."""
        partial = tensors[-1]
        self._run(tensors)
        if "bias" in wanted or "params" in wanted:
            self.sum_weights([partial, *weights])

    def _run(self, tensors: list[Tensor | None]) -> None:
        plan, template, gates = self.plan, self.template, tensors[0]
        if plan is None or template is None or gates is None:
            return
        if self.shared:
            tensors.append(gates.new_empty(self.shared, dtype=torch.int64))
        if self.counters:
            tensors.append(gates.new_zeros(self.counters, dtype=torch.int64))
        segments, cluster = plan.split.segments, plan.cluster
        self.gpu.call(
            gates.device,
            plan.kernels["run"],
            (self.blocks * segments, 1),
            template.fill(tensors),
            self.gpu.stream(gates.device),
            together=not cluster and segments > 1,
            cluster=cluster,
        )

    def sum_weights(self, tensors: Sequence[Tensor | None]) -> None:
        """Add up the sums of spans, the first tensor, into the others."""
        partial = tensors[0]
        if self.plan is None or self.sums is None or partial is None:
            return
        _, weights, channels = partial.shape
        kernel, words = self.plan.kernels["sum_weights"], self.sums.fill(tensors)
        grid = (_tiles(channels, 1), weights)
        self.gpu.call(partial.device, kernel, grid, words, self.gpu.stream(partial.device))


def make_launch(
    gpu: Gpu,
    solver: str,
    program: Program,
    weight_dtype: torch.dtype,
    layouts: Layouts,
    args: Arguments,
    tensors: Sequence[Tensor | None],
) -> Launch:
    """Plan a pass on calls of a signature, and pack its words; `tensors` are in kernel layout."""
    args = Arguments.unflatten(tensors, args.flatten()[1])
    gates, backward = args.gates, layouts.adjoint_chunk is not None
    (rows, length, channels), (heads, width) = args.size, heads_of(gates.shape)
    count, dtype, device = gates.shape[2], gates.dtype, gates.device
    per_lane = most_per_lane(dtype)
    if solver == "sequential":
        per_lane = _per_lane(dtype, rows, channels, gpu.cores(device))
    blocks = rows * _tiles(channels, per_lane) if length else 0
    if length >= MAX_LENGTH or blocks > MAX_BLOCKS:
        raise EngineError(
            f"kernels take fewer than {MAX_LENGTH} steps and {MAX_BLOCKS} tiles of channels, "
            f"got T = {length} and B = {rows}; split the sequence, or the batch"
        )
    empty = Launch(gpu, weight_dtype, INFO_SLOTS[solver])
    if not blocks:
        return empty
    row, time, gate, head = head_strides(gates.shape, gates.stride())
    if head == width:  # contiguous heads are one
        heads, width, head = 1, channels, 0
    size, wide = dtype.itemsize, args.dtype.itemsize
    # Kernels never use strides of dimensions of size 1.
    sizes = ((row, rows), (time, length), (gate, count), (head, heads))
    strides_in_bytes = [layouts.chunk, width * size, *[s * size for s, n in sizes if n > 1]]
    field_strides = [row_and_time(f) for f in args.fields if f.shape[-1] == channels]
    aligned_fields = [s * wide for strides in field_strides for s in (channels, *strides)]
    arriving: tuple[tuple[int, int] | None, ...] = (None,) * program.num_states
    if layouts.adjoint_chunk is not None:
        arriving = layouts.arriving
        strides_in_bytes += [layouts.adjoint_chunk, channels * size]
        strides_in_bytes += [s * size for strides in arriving for s in strides or ()]
    variant = Variant(
        direction="backward" if backward else "forward",
        dtype=dtype,
        weight_dtype=weight_dtype,
        channels=channels,
        head_width=width,
        per_lane=per_lane,
        chunk=chunk_of(*strides_in_bytes),
        field_chunk=chunk_of(layouts.field_chunk, *aligned_fields),
        adjacent_gates=(count == 1 or gate == width) and (length == 1 or time == count * width),
        reverse=args.options.reverse,
        events=args.seq is not None or args.reset is not None,
        broadcast=tuple(f.shape[-1] < channels for f in args.fields),
        arriving=tuple(strides is not None for strides in arriving),
        solver=solver,
    )
    own = plan_pass(gpu, program, variant, (blocks, length), device, args.split)
    interface, addresses = interface_of(program, "cuda", solver), Addresses()
    counts, spans = interface.counts, rows * own.split.segments
    inputs: Values = {
        "rows": rows,
        "length": length,
        "gate_strides": gate_strides(interface, (row, time, gate, head)),
        **input_values(addresses, counts, args, args.fields),
    }
    values: dict[str, Words] = {"in": interface.pack("Inputs", inputs)}
    if backward:
        values |= adjoint_values(addresses, [s or (0, 0) for s in arriving], counts.fields)
    else:
        values |= {
            "states": addresses.array(counts.states),
            "final": addresses.array(counts.states),
            "info": addresses.next(),
        }
    name = "Backward" if backward else "Forward"
    parts: dict[str, Words] = {"pass": interface.pack(f"{name}Problem", values)}
    shared = counters = 0
    if solver == "newton":
        shared, counters, board, zeros = shared_of(own, program, dtype, blocks, per_lane, addresses)
        board["counters"] = interface.pack("Counters", zeros)
        parts["shooting"] = interface.pack("Shooting", {**own.split._asdict(), **board})
    return empty._replace(
        blocks=blocks,
        plan=own,
        template=template_of(interface.pack(f"{name}Launch", parts)),
        spans=spans,
        shared=shared,
        counters=counters,
        sums=_sums_of(interface, spans) if backward else None,
    )


def _sums_of(interface: Interface, spans: int) -> Template:
    """Pack the words of the kernel that adds up the weights' gradients of all spans."""
    addresses = Addresses()
    values: Values = {
        "rows": spans,
        "partial": addresses.next(),
        "bias": addresses.next(),
        "params": addresses.array(interface.counts.params),
    }
    return template_of(interface.pack("SumProblem", values))


def _as_gradient(gates: Tensor) -> Tensor:
    """Return gates in the layout in which their gradient is written."""
    layout, gates = unit_stride(torch.empty_like(gates, device="meta")), unit_stride(gates)
    if gates.stride() == layout.stride():
        return gates
    return torch.empty_like(layout, device=gates.device).copy_(gates)


def _weight_dtype(args: Arguments) -> torch.dtype:
    """Return the dtype of bias and params (D,); the compute dtype if they differ or are absent."""
    bias = [] if args.bias is None else [args.bias]
    dtypes = {w.dtype for w in (*args.channel_params, *bias)}
    return dtypes.pop() if len(dtypes) == 1 else args.signature.dtype


def _tiles(channels: int, per_lane: int) -> int:
    """Return the warps that run a row's channels."""
    return -(-channels // (LANES * per_lane))


def _per_lane(dtype: torch.dtype, rows: int, channels: int, cores: int) -> int:
    """Return the channels of a lane: two halve the instructions for addresses, one doubles the
    warps."""
    most = most_per_lane(dtype)
    warps = rows * _tiles(channels, most)
    return most if warps > WARPS_A_CORE * cores // 2 else 1


@constant_in_graphs
def _cores_as_constant(device: torch.device) -> int:
    return CUDA.cores(device)


SEQUENTIAL, NEWTON = GpuEngine("sequential", CUDA), GpuEngine("newton", CUDA)
