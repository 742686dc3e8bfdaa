"""(sequential, fused) and (newton, fused) on CUDA: one generated kernel a pass, and a small sum."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.codegen.board import LANES
from pararnn.codegen.cuda import (
    INFO_SLOTS,
    Variant,
    check_buildable,
    chunk_of,
    most_per_lane,
    usual_variants,
)
from pararnn.codegen.families import interface_of, why_no_kernels
from pararnn.codegen.interface import Values, Words
from pararnn.codegen.nvrtc import capability_of
from pararnn.codegen.targets import CUDA, Gpu
from pararnn.device import has_gpu
from pararnn.engines.arguments import Arguments, Engine, Gradients, Pays, Solution
from pararnn.engines.fused.launch import (
    Addresses,
    Conversion,
    Template,
    adjoint_values,
    conversions_for,
    first_taken,
    input_values,
    template_of,
    to_kernel_layout,
)
from pararnn.engines.fused.layout import (
    gate_strides,
    gradients_like,
    head_strides,
    heads_of,
    new_grad_initial,
    new_states,
    row_and_time,
    unit_stride,
)
from pararnn.engines.fused.plan import Plan, plan, shared_of
from pararnn.engines.rule import Merit, Size, loop_pays, segments_pay
from pararnn.engines.split import MIN_LENGTH, WARPS_A_CORE, Split, SplitRequest, segments_for
from pararnn.errors import EngineError
from pararnn.program.program import Program

MAX_LENGTH = 2**30
MAX_BLOCKS = 2**31 - 1


def _forward(gpu: Gpu, solver: str, program: Program, args: Arguments) -> Solution:
    weights = _weight_dtype(args)
    tensors = _tensors(args, unit_stride, weights)
    launch = _kept_launch(gpu, solver, program, args, tensors, weights)
    states, final = new_states(program.num_states, args)
    info = args.gates.new_empty((INFO_SLOTS[solver], 2), dtype=torch.int64)
    # Slots that no tile writes, or that several share, are zero at first.
    if not launch.blocks or (solver == "newton" and launch.blocks > len(info)):
        info.zero_()
    launch.run(gpu, [*tensors, *states, *final, info])
    return Solution(states, final, info)


def _backward(
    gpu: Gpu,
    solver: str,
    program: Program,
    args: Arguments,
    states: tuple[Tensor, ...],
    grad_states: tuple[Tensor | None, ...],
    grad_final: tuple[Tensor | None, ...],
    wanted: Sequence[str],
) -> Gradients:
    weights = _weight_dtype(args)
    tensors = _tensors(args, _as_gradient, weights)
    grad_gates = torch.empty_like(args.gates)
    written = unit_stride(grad_gates)
    saved = [s.contiguous() for s in states]
    arriving = [None if g is None else unit_stride(g) for g in grad_states]
    strides = tuple([None if g is None else row_and_time(g) for g in arriving])
    adjoint = _Adjoint(strides, _chunk_of([written, *saved, *arriving]))
    launch = _kept_launch(gpu, solver, program, args, tensors, weights, adjoint)
    form, new, bias = args.form, args.gates.new_empty, args.bias
    sums = new if launch.blocks else args.gates.new_zeros
    grad_fields = [new(f.shape, dtype=form.dtype) for f in args.fields]
    grad_initial = new_grad_initial(args, grad_final)
    grad_bias = None if bias is None else sums(bias.shape, dtype=weights)
    grad_params = [sums(p.shape, dtype=weights) for p in args.params]
    rows = (launch.spans, len(program.gates) + len(grad_params), form.size[2])
    partial = new(rows, dtype=form.dtype)
    tensors += [*saved, *arriving]
    tensors += [None if g is None else g.contiguous() for g in grad_final]
    tensors += (written, *grad_fields, *(grad_initial or (None,) * len(states)), partial)
    launch.run(gpu, tensors)
    if "bias" in wanted or "params" in wanted:
        launch.sum_weights(gpu, [partial, grad_bias, *grad_params])
    grads = (grad_bias, grad_fields, grad_params, grad_initial)
    return gradients_like(args, grad_gates, written, *grads, wanted)


def _tensors(args: Arguments, gates: Conversion, weights: torch.dtype) -> list[Tensor | None]:
    """The tensors of a call as kernels take them."""
    how = gates, weights
    return to_kernel_layout(args, args.form.kept(how, conversions_for, args, *how))


def _as_gradient(gates: Tensor) -> Tensor:
    """Gates in the layout in which their gradient is written."""
    written, gates = unit_stride(torch.empty_like(gates, device="meta")), unit_stride(gates)
    if gates.stride() == written.stride():
        return gates
    return torch.empty_like(written, device=gates.device).copy_(gates)


def _weight_dtype(args: Arguments) -> torch.dtype:
    """That of all weights; the compute dtype where they differ, or there are none."""
    bias = args.bias
    own = {w.dtype for w in (args.params if bias is None else (*args.params, bias))}
    return own.pop() if len(own) == 1 else args.form.dtype


class _Adjoint(NamedTuple):
    """What a backward pass depends on beside a call's form: the strides of gradients that arrive,
    None for none, and `_chunk_of` what it reads and writes more."""

    arriving: tuple[tuple[int, ...] | None, ...]
    chunk: int


def _chunk_of(tensors: Sequence[Tensor | None]) -> int:
    """The bytes that may be copied at once as far as tensors' addresses go."""
    return chunk_of(*[0 if tensor is None else tensor.data_ptr() for tensor in tensors])


class _Launch(NamedTuple):
    """A pass on calls of one form: what is launched, on how many blocks of a segment, with which
    words; the spans that it sums apart; the words that segments share, and those of their counters;
    and the words by which spans are added up."""

    blocks: int
    plan: Plan | None = None
    frame: Template | None = None
    spans: int = 0
    shared: int = 0
    counters: int = 0
    sums: Template | None = None

    def run(self, gpu: Gpu, tensors: list[Tensor | None]) -> None:
        """Launch the kernel on these tensors, if there is anything to do."""
        plan, frame, gates = self.plan, self.frame, tensors[0]
        if plan is None or frame is None or gates is None:
            return
        if self.shared:
            tensors.append(gates.new_empty(self.shared, dtype=torch.int64))
        if self.counters:
            tensors.append(gates.new_zeros(self.counters, dtype=torch.int64))
        segments, cluster = plan.split.segments, plan.cluster
        gpu.call(
            gates.device,
            plan.kernels["run"],
            (self.blocks * segments, 1),
            frame.filled(tensors),
            gpu.stream(gates.device),
            together=not cluster and segments > 1,
            cluster=cluster,
        )

    def sum_weights(self, gpu: Gpu, tensors: Sequence[Tensor | None]) -> None:
        """Add up what the spans of all rows have summed, if there is anything to do."""
        partial = tensors[0]
        if self.plan is None or self.sums is None or partial is None:
            return
        _, weights, channels = partial.shape
        kernel, words = self.plan.kernels["sum_weights"], self.sums.filled(tensors)
        grid = (_tiles(channels, 1), weights)
        gpu.call(partial.device, kernel, grid, words, gpu.stream(partial.device))


def _kept_launch(
    gpu: Gpu,
    solver: str,
    program: Program,
    args: Arguments,
    tensors: Sequence[Tensor | None],
    weights: torch.dtype,
    adjoint: _Adjoint | None = None,
) -> _Launch:
    """The launch of a pass on tensors as `taken` gives them; kept for all calls of the form whose
    tensors are aligned alike. Raises EngineError for sizes that kernels do not take."""
    gates, fields = first_taken(args, tensors)
    whole = [f for f in fields if f.shape[-1] == args.form.size[2]]
    chunks = _chunk_of([gates]), _chunk_of(whole)
    key = (gpu, solver, program, *chunks, adjoint)
    given = (gpu, solver, program, args, gates, fields, weights, *chunks, adjoint)
    return args.form.kept(key, launch_of, *given)


def launch_of(
    gpu: Gpu,
    solver: str,
    program: Program,
    args: Arguments,
    gates: Tensor,
    fields: Sequence[Tensor],
    weight_dtype: torch.dtype,
    chunk: int,
    field_chunk: int,
    adjoint: _Adjoint | None,
) -> _Launch:
    """The launch of a pass; `chunk` and `field_chunk`: see `_chunk_of`."""
    (rows, length, channels), (heads, width) = args.form.size, heads_of(gates.shape)
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
    if not blocks:
        return _Launch(0)
    row, time, gate, head = head_strides(gates.shape, gates.stride())
    if head == width:  # heads side by side are one
        heads, width, head = 1, channels, 0
    size, wide = dtype.itemsize, args.form.dtype.itemsize
    # Strides of dimensions of size 1 are never taken.
    sizes = ((row, rows), (time, length), (gate, count), (head, heads))
    places = [chunk, width * size, *[s * size for s, n in sizes if n > 1]]
    whole = [row_and_time(f) for f in fields if f.shape[-1] == channels]
    field_places = [s * wide for strides in whole for s in (channels, *strides)]
    arriving: tuple[tuple[int, ...] | None, ...] = (None,) * program.num_states
    if adjoint is not None:
        arriving = adjoint.arriving
        places += [adjoint.chunk, channels * size, *[s * size for g in arriving for s in g or ()]]
    variant = Variant(
        "forward" if adjoint is None else "backward",
        dtype,
        weight_dtype,
        channels,
        width,
        per_lane,
        chunk_of(*places),
        chunk_of(field_chunk, *field_places),
        (count == 1 or gate == width) and (length == 1 or time == count * width),
        args.reverse,
        args.seq is not None or args.reset is not None,
        tuple(f.shape[-1] < channels for f in fields),
        tuple(g is not None for g in arriving),
        solver,
    )
    own = plan(program, variant, (blocks, length), device, args.split, gpu)
    interface, place = interface_of(program, "cuda", solver), Addresses()
    counts, spans = interface.counts, rows * own.split.segments
    inputs: Values = {
        "rows": rows,
        "length": length,
        "gate_strides": gate_strides(interface, (row, time, gate, head)),
        **input_values(place, counts, args, fields),
    }
    values: dict[str, Words] = {"in": interface.pack("Inputs", inputs)}
    if adjoint is None:
        values |= {"states": place.row(counts.states), "final": place.row(counts.states)}
        values["info"] = place.one()
    else:
        values |= adjoint_values(place, [g or (0, 0) for g in arriving], counts.fields)
    name = "Forward" if adjoint is None else "Backward"
    parts: dict[str, Words] = {"pass": interface.pack(f"{name}Problem", values)}
    shared = counters = 0
    if solver == "newton":
        shared, counters, board, zeros = shared_of(own, program, dtype, blocks, per_lane, place)
        board["counters"] = interface.pack("Counters", zeros)
        parts["shooting"] = interface.pack("Shooting", {**own.split._asdict(), **board})
    frame, sums = template_of(interface.pack(f"{name}Launch", parts)), None
    if adjoint is not None:
        own_place = Addresses()
        of_sum: Values = {
            "rows": spans,
            "partial": own_place.one(),
            "bias": own_place.one(),
            "params": own_place.row(counts.params),
        }
        sums = template_of(interface.pack("SumProblem", of_sum))
    return _Launch(blocks, own, frame, spans, shared, counters, sums)


def _tiles(channels: int, per_lane: int) -> int:
    """The warps that run a row's channels side by side."""
    return -(-channels // (LANES * per_lane))


def _per_lane(dtype: torch.dtype, rows: int, channels: int, cores: int) -> int:
    """Two channels a lane halve the instructions for addresses, one doubles the warps."""
    most = most_per_lane(dtype)
    warps = rows * _tiles(channels, most)
    return most if warps > WARPS_A_CORE * cores // 2 else 1


def segments_of(size: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> int:
    """Into how many segments (newton, fused) cuts time on a device; size is (B, T, D)."""
    batch, steps, channels = size
    if steps < MIN_LENGTH or not has_gpu():
        return 1
    columns = batch * _tiles(channels, most_per_lane(dtype))
    return segments_for(steps, columns, _cores_as_constant(device))


def _cores_as_constant(device: torch.device) -> int:
    return CUDA.cores(device)


# Compiled regions need not look into it: see pararnn.engines.table.
_cores_as_constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _split(
    gpu: Gpu,
    program: Program,
    size: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    asked: SplitRequest,
) -> Split:
    """How the forward pass on gates of the usual layout cuts time."""
    batch, steps, channels = size
    device = gpu.with_index(device)
    variant = usual_variants(program, dtype, channels, channels, solver="newton")[0]
    columns = batch * _tiles(channels, variant.per_lane)
    return plan(program, variant, (columns, steps), device, asked, gpu).split


def _build(solver: str, program: Program, dtype: torch.dtype) -> None:
    check_buildable(program, dtype, capability_of(torch.device("cuda")), solver)


def _newton_pays(program: Program, size: Size, dtype: torch.dtype, device: torch.device) -> Merit:
    return segments_pay(program, segments_of(size, dtype, device), device)


_PAYS: dict[str, Pays] = {"sequential": loop_pays, "newton": _newton_pays}


def engine(solver: str, gpu: Gpu) -> Engine:
    """What runs a solver's kernels on a kind of GPU."""
    return Engine(
        solver,
        "fused",
        partial(_forward, gpu, solver),
        partial(_backward, gpu, solver),
        why_no_kernels,
        _PAYS[solver],
        partial(_build, solver),
        completes=True,
        info_rows=INFO_SLOTS[solver],
        split=partial(_split, gpu) if solver == "newton" else None,
    )


SEQUENTIAL, NEWTON = engine("sequential", CUDA), engine("newton", CUDA)
