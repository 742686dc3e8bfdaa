"""(sequential, fused) and (newton, fused) on CUDA: one generated kernel a pass, and a small sum."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

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
from pararnn.codegen.emit import why_no_kernels
from pararnn.codegen.interface import Values, Words, interface_of
from pararnn.codegen.nvrtc import capability_of
from pararnn.codegen.targets import CUDA, Gpu
from pararnn.engines.base import Arguments, Engine, Gradients, Pays, Solution
from pararnn.engines.plan_cuda import plan, shared_of
from pararnn.engines.rule import Merit, Size, loop_pays, segments_pay
from pararnn.engines.split import MIN_LENGTH, WARPS_A_CORE, Pin, Split, segments_for
from pararnn.engines.strides import (
    address,
    addresses,
    adjoint_values,
    by_head,
    copied,
    gate_strides,
    gradients_like,
    narrow,
    row_and_time,
    unit_stride,
)
from pararnn.errors import EngineError
from pararnn.program.program import Program

MAX_LENGTH = 2**30
MAX_BLOCKS = 2**31 - 1


def _forward(gpu: Gpu, solver: str, program: Program, args: Arguments) -> Solution:
    inputs = _Inputs(gpu, solver, program, args, by_head(args.gates))
    new, dtype, count = args.gates.new_empty, args.dtype, range(program.num_states)
    size = (inputs.rows, inputs.length, inputs.channels)
    states = tuple(new(size) for _ in count)
    if inputs.all_written:
        final = tuple(new((args.sequences, inputs.channels), dtype=dtype) for _ in count)
    else:  # sequences without a step keep their initial state
        final = tuple(copied(h, dtype) for h in args.start(program.num_states))
    info = new((INFO_SLOTS[solver], 2), dtype=torch.int64)
    # Slots that no tile writes, or that several share, are zero at first.
    if not inputs.blocks or (solver == "newton" and inputs.blocks > len(info)):
        info.zero_()
    if inputs.blocks:
        run = inputs.prepared("forward", chunk_of(*inputs.places))
        values: Values = {
            "in": inputs.words,
            "states": addresses(states),
            "final": addresses(final),
            "info": info.data_ptr(),
        }
        run("Forward", values)
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
    grad_gates = torch.empty_like(args.gates)
    written, gates = by_head(grad_gates), by_head(args.gates)
    if gates.stride() != written.stride():
        gates = torch.empty_like(written).copy_(gates)
    inputs = _Inputs(gpu, solver, program, args, gates)
    saved = [s.contiguous() for s in states]
    arriving = [None if g is None else unit_stride(g) for g in grad_states]
    arriving_final = [None if g is None else g.contiguous() for g in grad_final]
    new, zeros, dtype = gates.new_empty, gates.new_zeros, args.dtype
    grad_fields = [new(f.shape, dtype=dtype) for f in args.fields]
    if inputs.all_written:
        grad_initial = [new(h.shape, dtype=dtype) for h in args.initial]
    else:
        ends = grad_final[: len(args.initial)]
        like = zip(args.initial, ends, strict=True)
        grad_initial = [
            zeros(h.shape, dtype=dtype) if g is None else copied(g, dtype) for h, g in like
        ]
    sums = new if inputs.blocks else zeros
    bias = args.bias
    grad_bias = None if bias is None else sums(bias.shape, dtype=inputs.weight_dtype)
    grad_params = [sums(p.shape, dtype=inputs.weight_dtype) for p in args.params]
    if inputs.blocks:
        places = [*inputs.places, written.data_ptr(), *addresses(saved)]
        places.append(inputs.channels * gates.element_size())
        places += [s * gates.element_size() for grad in arriving for s in row_and_time(grad)]
        places += addresses(arriving)
        run = inputs.prepared("backward", chunk_of(*places), tuple(g is not None for g in arriving))
        weights, spans = gates.shape[2] + len(args.params), inputs.rows * run.split.segments
        sums_of = new((spans, weights, inputs.channels), dtype=dtype)
        values: Values = {
            "in": inputs.words,
            **adjoint_values(saved, arriving, arriving_final, written, grad_fields, sums_of),
            "grad_initial": addresses(grad_initial) or [0] * program.num_states,
        }
        run("Backward", values)
        if "bias" in wanted or "params" in wanted:
            values = {
                "rows": spans,
                "partial": sums_of.data_ptr(),
                "bias": address(grad_bias),
                "params": addresses(grad_params),
            }
            run.sum_weights(values, weights)
    grads = (grad_bias, grad_fields, grad_params, grad_initial)
    return gradients_like(args, grad_gates, written, *grads, wanted)


class _Inputs:
    """What both passes begin with: tensors as the kernels take them, and the words that say so."""

    def __init__(
        self, gpu: Gpu, solver: str, program: Program, args: Arguments, gates: Tensor
    ) -> None:
        self.gpu, self.solver, self.program, self.reverse = gpu, solver, program, args.reverse
        self.split = args.split
        self.rows, self.length, count, heads, width = gates.shape
        row, time, gate, head, _ = gates.stride()
        if head == width:  # heads side by side are one
            heads, width, head = 1, heads * width, 0
        self.channels, self.width, self.gates = heads * width, width, gates
        # Strides of dimensions of size 1 are never taken.
        self.adjacent = count == 1 or gate == width
        self.adjacent &= self.length == 1 or time == count * width
        fields = [narrow(f, args.dtype) for f in args.fields]
        self.broadcast = tuple(f.shape[-1] < self.channels for f in fields)
        whole = [f for f, one in zip(fields, self.broadcast, strict=True) if not one]
        steps = [s * f.element_size() for f in whole for s in (self.channels, *f.stride()[:2])]
        self.field_chunk = chunk_of(*(f.data_ptr() for f in whole), *steps)
        weights = [*args.params, *([] if args.bias is None else [args.bias])]
        own = {w.dtype for w in weights}
        self.weight_dtype = own.pop() if len(own) == 1 else args.dtype
        bias = None if args.bias is None else args.bias.to(self.weight_dtype).contiguous()
        seq = None if args.seq is None else args.seq.contiguous()
        reset = None if args.reset is None else args.reset.contiguous()
        self.events = seq is not None or reset is not None
        params = [p.to(self.weight_dtype).contiguous() for p in args.params]
        initial = [h.to(args.dtype).contiguous() for h in args.initial]
        self.tensors = (bias, seq, reset, *fields, *params, *initial)  # keeps copies alive
        self.all_written = seq is None and self.length > 0
        self.device = gates.device
        self.per_lane = most_per_lane(gates.dtype)
        if solver == "sequential":
            cores = gpu.cores(gates.device)
            self.per_lane = _per_lane(gates.dtype, self.rows, self.channels, cores)
        self.blocks = self.rows * _tiles(self.channels, self.per_lane) if self.length else 0
        if self.length >= MAX_LENGTH or self.blocks > MAX_BLOCKS:
            raise EngineError(
                f"kernels take fewer than {MAX_LENGTH} steps and {MAX_BLOCKS} tiles of channels, "
                f"got T = {self.length} and B = {self.rows}; split the sequence, or the batch"
            )
        size = gates.element_size()
        strides = [s for s, n in zip((row, time, gate, head), gates.shape, strict=False) if n > 1]
        self.places = [gates.data_ptr(), width * size, *(s * size for s in strides)]
        self.interface = interface_of(program, "cuda", solver)
        values: Values = {
            "rows": self.rows,
            "length": self.length,
            "gate_strides": gate_strides(self.interface, (row, time, gate, head)),
            "field_row": [f.stride(0) for f in fields],
            "field_time": [f.stride(1) for f in fields],
            "gates": gates.data_ptr(),
            "bias": address(bias),
            "seq": address(seq),
            "reset": address(reset),
            "fields": addresses(fields),
            "params": addresses(params),
            "initial": addresses(initial) or [0] * program.num_states,
        }
        self.words = self.interface.packed("Inputs", values)

    def prepared(self, direction: str, chunk: int, arriving: tuple[bool, ...] = ()) -> _Run:
        """The kernels of a pass, and how they cut time."""
        variant = Variant(
            direction,
            self.gates.dtype,
            self.weight_dtype,
            self.channels,
            self.width,
            self.per_lane,
            chunk,
            self.field_chunk,
            self.adjacent,
            self.reverse,
            self.events,
            self.broadcast,
            arriving or (False,) * self.program.num_states,
            self.solver,
        )
        return _Run(self, variant)


class _Run:
    """One pass: called with what its problem holds, it launches the kernel."""

    def __init__(self, inputs: _Inputs, variant: Variant) -> None:
        size = (inputs.blocks, inputs.length)
        self.inputs = inputs
        split, gpu = inputs.split, inputs.gpu
        self.plan = plan(inputs.program, variant, size, inputs.device, split, gpu)
        self.split = self.plan.split

    def __call__(self, direction: str, values: Values) -> None:
        own, split, packed = self.inputs, self.split, self.inputs.interface.packed
        problem: Words = packed(f"{direction}Problem", values)
        grid, launch = (own.blocks * split.segments, 1), self.plan.kernels["run"]
        if own.solver == "sequential":
            words = packed(f"{direction}Launch", {"pass": problem})
            own.gpu.call(own.device, launch, grid, words, own.gpu.stream(own.device))
            return
        shared = shared_of(self.plan, own.gates, own.program, own.blocks, own.per_lane)
        counters = packed("Counters", shared.counters)
        shooting = {**split._asdict(), **shared.places, "counters": counters}
        parts = {"pass": problem, "shooting": packed("Shooting", shooting)}
        own.gpu.call(
            own.device,
            launch,
            grid,
            packed(f"{direction}Launch", parts),
            own.gpu.stream(own.device),
            together=not self.plan.cluster and split.segments > 1,
            cluster=self.plan.cluster,
        )

    def sum_weights(self, values: Values, weights: int) -> None:
        """Add up what the spans of all rows have summed."""
        own, launch = self.inputs, self.plan.kernels["sum_weights"]
        grid, words = (_tiles(own.channels, 1), weights), own.interface.packed("SumProblem", values)
        own.gpu.call(own.device, launch, grid, words, own.gpu.stream(own.device))


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
    if steps < MIN_LENGTH or not torch.cuda.is_available():
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
    asked: Pin,
) -> Split:
    """How the forward pass on gates of the usual layout cuts time."""
    batch, steps, channels = size
    device = gpu.numbered(device)
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
