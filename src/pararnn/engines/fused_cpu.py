"""(sequential, fused) and (newton, fused) on the CPU: the whole solve, compiled."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.codegen.cpp import SOLVERS, kernels_of
from pararnn.codegen.emit import why_no_kernels
from pararnn.codegen.interface import Values, Words, interface_of
from pararnn.engines.base import Arguments, Engine, Gradients, Pays, Solution
from pararnn.engines.rule import Merit, Size, loop_pays, segments_pay
from pararnn.engines.split import BY_RULE, Pin, Split, split_of
from pararnn.engines.strides import (
    address,
    addresses,
    adjoint_values,
    by_head,
    copied,
    gate_strides,
    gradients_like,
    narrow,
    unit_stride,
)
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
    prepared = _Prepared(solver, program, args, _by_head(args.gates))
    size = args.size
    states = tuple([args.gates.new_empty(size) for _ in prepared.initial])
    if prepared.all_written:
        final = tuple([torch.empty_like(h) for h in prepared.initial])
    else:  # sequences without a step keep their initial state
        final = tuple(h.clone() for h in prepared.initial)
    info = torch.zeros((1, 2), dtype=torch.int64)
    shooting = _shooting(solver, program, args, info)
    values = {"in": prepared.words, "states": addresses(states), "final": addresses(final)}
    words = prepared.launch("Forward", values, shooting)
    kernels_of(program, args.gates.dtype, solver).forward(words)
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
    gates = _by_head(args.gates)
    prepared = _Prepared(solver, program, args, gates)
    channels = args.channels
    num_gates, weights = gates.shape[2], gates.shape[2] + len(args.params)
    saved = [s.contiguous() for s in states]
    arriving = [None if g is None else unit_stride(g) for g in grad_states]
    arriving_final = [None if g is None else g.contiguous() for g in grad_final]
    grad_gates = torch.empty_like(args.gates)
    written = _by_head(grad_gates)
    grad_fields = [gates.new_empty(f.shape, dtype=args.dtype) for f in args.fields]
    if prepared.all_written:
        grad_initial = [torch.empty_like(h) for h in prepared.initial]
    else:
        grad_initial = [
            torch.zeros_like(h) if g is None else copied(g, args.dtype)
            for h, g in zip(prepared.initial, grad_final, strict=True)
        ]
    shooting = _shooting(solver, program, args)
    spans = gates.shape[0] * shooting.split.segments
    sums = gates.new_empty((spans, weights, channels), dtype=args.dtype)
    grad_bias = gates.new_empty((num_gates, channels), dtype=args.dtype)
    grad_params = [gates.new_empty(channels, dtype=args.dtype) for _ in args.params]
    row, bias = channels * grad_bias.element_size(), grad_bias.data_ptr()
    values: Values = {
        "in": prepared.words,
        **adjoint_values(saved, arriving, arriving_final, written, grad_fields, sums),
        "grad_initial": addresses(grad_initial),
        "grad_gate_strides": gate_strides(prepared.interface, written.stride()),
        "grad_weights": [*(bias + g * row for g in range(num_gates)), *addresses(grad_params)],
    }
    words = prepared.launch("Backward", values, shooting)
    kernels_of(program, args.gates.dtype, solver).backward(words)
    grads = (grad_bias, grad_fields, grad_params, grad_initial if args.initial else ())
    return gradients_like(args, grad_gates, written, *grads, wanted)


class _Prepared:
    """What both kernels begin with: tensors in the layouts that they take, and the words for that.

    `all_written`: whether every sequence has a step, so that kernels write all that ends at one.
    """

    def __init__(self, solver: str, program: Program, args: Arguments, gates: Tensor) -> None:
        batch, steps, _, heads, channels = gates.shape
        dtype = args.dtype
        fields = [narrow(f, dtype) for f in args.fields]
        bias = None if args.bias is None else _plain(args.bias, dtype)
        seq = None if args.seq is None else args.seq.contiguous()
        reset = None if args.reset is None else args.reset.contiguous()
        params = [_plain(p, dtype) for p in args.params]
        self.initial = [_plain(h, dtype) for h in args.start(program.num_states)]
        self.all_written = seq is None and steps > 0
        self.tensors = [gates, bias, seq, reset, *fields, *params, *self.initial]  # keeps copies
        self.interface = interface_of(program, "cpp", solver)
        inputs: Values = {
            "rows": batch,
            "length": steps,
            "gate_strides": gate_strides(self.interface, gates.stride()),
            "field_row": [f.stride(0) for f in fields],
            "field_time": [f.stride(1) for f in fields],
            "gates": gates.data_ptr(),
            "bias": address(bias),
            "seq": address(seq),
            "reset": address(reset),
            "fields": addresses(fields),
            "params": addresses(params),
            "initial": addresses(self.initial),
            "field_channel": [int(f.shape[-1] > 1) for f in fields],
            "heads": heads,
            "channels": channels,
            "reverse": int(args.reverse),
            "threads": torch.get_num_threads(),
            "openmp": _openmp(),
        }
        self.words = self.interface.packed("Inputs", inputs)

    def launch(self, direction: str, values: Values, shooting: _Shooting) -> list[int]:
        """The words of a pass: of its problem, and of what a solver takes for cutting time."""
        parts: dict[str, Words] = {"pass": self.interface.packed(f"{direction}Problem", values)}
        if shooting.values:
            parts["shooting"] = self.interface.packed("ShootingWords", shooting.values)
        return self.interface.packed(f"{direction}Launch", parts)


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype, contiguous: itself where it is."""
    return (tensor if tensor.dtype == dtype else tensor.to(dtype)).contiguous()


class _Shooting(NamedTuple):
    """How a solver cuts time, what it takes for that, none for the loop, and the memory for it."""

    split: Split
    values: Values
    memory: tuple[Tensor, ...]


def _shooting(
    solver: str, program: Program, args: Arguments, info: Tensor | None = None
) -> _Shooting:
    """See kernels/cpp/shooting.h. `info`: int64 (1, 2), which Newton writes, if anyone reads it."""
    batch, steps = args.gates.shape[:2]
    if solver == "sequential":
        return _Shooting(Split(1, steps, 0), {}, ())
    if info is None:
        info = torch.empty((1, 2), dtype=torch.int64)
    split = split_for((batch, steps, args.channels), args.dtype, args.split)
    new, zeros, states = args.gates.new_empty, args.gates.new_zeros, program.num_states
    size = (batch, split.segments, states, args.channels)
    starts, ends, sizes = (new(size, dtype=args.dtype) for _ in range(3))
    products = zeros((batch, split.segments, states**2, args.channels), dtype=args.dtype)
    values = {
        "segments": split.segments,
        "size": split.size,
        "burn_in": split.burn_in,
        "starts": starts.data_ptr(),
        "ends": ends.data_ptr(),
        "sizes": sizes.data_ptr(),
        "products": products.data_ptr(),
        "info": info.data_ptr(),
    }
    return _Shooting(split, values, (starts, ends, sizes, products, info))


def split_for(size: tuple[int, int, int], dtype: torch.dtype, asked: Pin = BY_RULE) -> Split:
    """How (newton, fused) cuts time on a CPU; size is (B, T, D), dtype the compute dtype.

    It does not depend on threads, so that bits do not.
    """
    steps, columns = max(1, size[1]), max(1, _columns(size, dtype))
    return split_of(steps, columns, dtype, 1, CORES, columns * steps, asked, MIN_SIZE)


def _split(
    program: Program,
    size: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    asked: Pin,
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


def _by_head(gates: Tensor) -> Tensor:
    """Gates as kernels take them; narrow heads side by side."""
    if gates.ndim == 5 and gates.shape[-1] < MIN_HEAD_CHANNELS:
        gates = gates.flatten(3)
    return by_head(gates)


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
