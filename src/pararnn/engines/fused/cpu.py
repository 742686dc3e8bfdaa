"""(sequential, fused) and (newton, fused) on the CPU: the whole solve, compiled."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.codegen.cpp import SOLVERS, Kernel, kernels_of
from pararnn.codegen.families import interface_of, why_no_kernels
from pararnn.codegen.interface import Values, Words
from pararnn.engines.arguments import Arguments, Engine, Gradients, Pays, Solution
from pararnn.engines.fused.launch import (
    Addresses,
    Conversions,
    Place,
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
from pararnn.engines.rule import Merit, Size, loop_pays, segments_pay
from pararnn.engines.split import BY_RULE, Split, SplitRequest, plan_split
from pararnn.numerics import compute_dtype
from pararnn.program.program import Program

MIN_HEAD_CHANNELS = 16  # narrower heads waste vector lanes: their gates are copied side by side
TILE_BYTES = 256
"""Channels of a row that are worth a thread of their own: four of the widest vectors."""
CORES = 16
"""What a split is made for, at WARPS_A_CORE tasks each: so many segments of a tile at most."""
MIN_SIZE = 256
"""Steps of a segment, at least: below, its guess takes more than a fifth of its time."""


def _forward(solver: str, program: Program, args: Arguments) -> Solution:
    launch = _kept_launch(solver, program, args)
    tensors = to_kernel_layout(args, launch.takings)
    states, final = new_states(program.num_states, args)
    info = args.gates.new_zeros((1, 2), dtype=torch.int64)
    tensors += (*states, *final, *launch.shared(args.gates, info))
    launch.kernel(launch.frame.filled(tensors))
    return Solution(states, final, info)


def _backward(
    solver: str,
    program: Program,
    args: Arguments,
    states: tuple[Tensor, ...],
    grad_states: tuple[Tensor | None, ...],
    grad_final: tuple[Tensor | None, ...],
    wanted: Sequence[str],
) -> Gradients:
    form, new = args.form, args.gates.new_empty
    dtype, channels = form.dtype, form.size[2]
    grad_gates = torch.empty_like(args.gates)
    written = _taken(grad_gates)
    arriving = [None if g is None else unit_stride(g) for g in grad_states]
    adjoint = _Adjoint(written.stride(), tuple(map(row_and_time, arriving)))
    launch = _kept_launch(solver, program, args, adjoint)
    tensors = to_kernel_layout(args, launch.takings)
    num_gates, num_params = len(program.gates), len(args.params)
    grad_fields = [new(f.shape, dtype=dtype) for f in args.fields]
    grad_initial = new_grad_initial(args, grad_final)
    sums = new((launch.spans, num_gates + num_params, channels), dtype=dtype)
    grad_bias = new((num_gates, channels), dtype=dtype)
    grad_params = [new(channels, dtype=dtype) for _ in args.params]
    tensors += [s.contiguous() for s in states]
    tensors += arriving
    tensors += [None if g is None else g.contiguous() for g in grad_final]
    tensors += (written, *grad_fields, *(grad_initial or (None,) * len(states)), sums)
    tensors += (grad_bias, *grad_params, *launch.shared(args.gates, None))
    launch.kernel(launch.frame.filled(tensors))
    grads = (grad_bias, grad_fields, grad_params, grad_initial)
    return gradients_like(args, grad_gates, written, *grads, wanted)


class _Adjoint(NamedTuple):
    """What the words of a backward pass depend on beside a call's form: the strides of the gates'
    gradient, and of those that arrive."""

    strides: tuple[int, ...]
    arriving: tuple[tuple[int, int], ...]


class _Launch(NamedTuple):
    """A pass on calls of one form: its conversions, kernel and words, the spans that
    it sums apart, and the sizes of what a solver takes for cutting time: nothing for the loop."""

    takings: Conversions
    kernel: Kernel
    frame: Template
    spans: int
    starts: tuple[int, ...] = ()
    products: tuple[int, ...] = ()

    def shared(self, gates: Tensor, info: Tensor | None) -> list[Tensor]:
        """What segments share, see elementwise/shooting.h. `info`: int64 (1, 2), if anyone reads
        it."""
        if not self.starts:
            return []
        dtype = compute_dtype(gates.dtype)
        if info is None:
            info = gates.new_empty((1, 2), dtype=torch.int64)
        own = [gates.new_empty(self.starts, dtype=dtype) for _ in range(3)]
        return [*own, gates.new_zeros(self.products, dtype=dtype), info]


def _kept_launch(
    solver: str,
    program: Program,
    args: Arguments,
    adjoint: _Adjoint | None = None,
) -> _Launch:
    """The launch of a pass, kept for all calls of the form."""
    depends = solver, program, torch.get_num_threads(), _openmp(), adjoint
    return args.form.kept(depends, _launch, *depends, args)


def _launch(
    solver: str,
    program: Program,
    threads: int,
    openmp: int,
    adjoint: _Adjoint | None,
    args: Arguments,
) -> _Launch:
    interface, place, form = interface_of(program, "cpp", solver), Addresses(), args.form
    takings = conversions_for(args, _taken, form.dtype)
    gates, fields = first_taken(args, to_kernel_layout(args, takings))
    (batch, steps, channels), (heads, width) = form.size, heads_of(gates.shape)
    counts = interface.counts
    inputs: Values = {
        "rows": batch,
        "length": steps,
        "gate_strides": gate_strides(interface, head_strides(gates.shape, gates.stride())),
        **input_values(place, counts, args, fields),
        "field_channel": [int(field.shape[-1] > 1) for field in fields],
        "heads": heads,
        "channels": width,
        "reverse": int(args.reverse),
        "threads": threads,
        "openmp": openmp,
    }
    values: dict[str, Words] = {"in": interface.pack("Inputs", inputs)}
    kernels = kernels_of(program, gates.dtype, solver)
    if adjoint is None:
        direction, kernel = "Forward", kernels.forward
        values |= {"states": place.row(counts.states), "final": place.row(counts.states)}
    else:
        direction, kernel = "Backward", kernels.backward
        values |= adjoint_values(place, adjoint.arriving, counts.fields)
        values["grad_gate_strides"] = gate_strides(
            interface, head_strides(gates.shape, adjoint.strides)
        )
        bias, row = place.one(), channels * form.dtype.itemsize
        rows = [Place(bias.tensor, g * row) for g in range(counts.gates)]
        values["grad_weights"] = [*rows, *place.row(counts.params)]
    parts: dict[str, Words] = {"pass": interface.pack(f"{direction}Problem", values)}
    spans = batch
    starts: tuple[int, ...] = ()
    products: tuple[int, ...] = ()
    if solver == "newton":
        split = split_for(form.size, form.dtype, args.split)
        shooting = {name: place.one() for name in ("starts", "ends", "sizes", "products", "info")}
        parts["shooting"] = interface.pack("ShootingWords", {**split._asdict(), **shooting})
        spans *= split.segments
        starts = (batch, split.segments, counts.states, channels)
        products = (batch, split.segments, counts.states**2, channels)
    frame = template_of(interface.pack(f"{direction}Launch", parts))
    return _Launch(takings, kernel, frame, spans, starts, products)


def split_for(
    size: tuple[int, int, int], dtype: torch.dtype, asked: SplitRequest = BY_RULE
) -> Split:
    """How (newton, fused) cuts time on a CPU; size is (B, T, D), dtype the compute dtype.

    It does not depend on threads, so that bits do not.
    """
    steps, columns = max(1, size[1]), max(1, _columns(size, dtype))
    return plan_split(steps, columns, dtype, 1, CORES, columns * steps, asked, MIN_SIZE)


def _split(
    program: Program,
    size: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    asked: SplitRequest,
) -> Split:
    return split_for(size, compute_dtype(dtype), asked)


def segments_of(size: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> int:
    """The segments that (newton, fused) runs side by side, on threads that would idle otherwise.

    size is (B, T, D), dtype the gates'.
    """
    wide = compute_dtype(dtype)
    idle = _threads_as_constant() // max(1, _columns(size, wide))
    return min(idle, split_for(size, wide).segments)


def _columns(size: tuple[int, int, int], dtype: torch.dtype) -> int:
    """The threads that a batch keeps busy if time is not cut."""
    batch, _, channels = size
    return batch * -(-channels * dtype.itemsize // TILE_BYTES)


def _threads_as_constant() -> int:
    return torch.get_num_threads()


# Compiled regions need not look into it: see pararnn.engines.table.
_threads_as_constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _taken(gates: Tensor) -> Tensor:
    """Gates as kernels take them: adjacent channels, narrow heads side by side."""
    if gates.ndim == 5 and gates.shape[-1] < MIN_HEAD_CHANNELS:
        gates = gates.flatten(3)
    return unit_stride(gates)


@cache
def _openmp() -> int:
    """The address of PyTorch's OpenMP entry, 0 where it has none that we can call."""
    if not torch.backends.openmp.is_available():
        return 0
    entry = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return 0 if entry is None else ctypes.cast(entry, ctypes.c_void_p).value or 0


def _newton_pays(program: Program, size: Size, dtype: torch.dtype, device: torch.device) -> Merit:
    return segments_pay(program, segments_of(size, dtype, device), device)


_PAYS: dict[str, Pays] = {"sequential": loop_pays, "newton": _newton_pays}


def _engine(solver: str) -> Engine:
    forward, backward, pays = partial(_forward, solver), partial(_backward, solver), _PAYS[solver]
    build, cut = partial(kernels_of, solver=solver), _split if solver == "newton" else None
    return Engine(solver, "fused", forward, backward, why_no_kernels, pays, build, True, split=cut)


SEQUENTIAL, NEWTON = (_engine(solver) for solver in SOLVERS)
