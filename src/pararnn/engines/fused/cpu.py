"""(sequential, fused) and (newton, fused) on the CPU: the whole solve, compiled."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.base.numerics import compute_dtype
from pararnn.base.private import constant_in_graphs
from pararnn.codegen.cpp import SOLVERS, Kernel, kernels_of
from pararnn.codegen.families import interface_of
from pararnn.codegen.interface import Interface, Values, Words
from pararnn.codegen.source import source_file
from pararnn.engines.arguments import Arguments
from pararnn.engines.fused import matrix
from pararnn.engines.fused.launch import (
    Address,
    Addresses,
    Conversions,
    Template,
    adjoint_values,
    conversions_for,
    input_values,
    template_of,
    to_kernel_layout,
)
from pararnn.engines.fused.layout import (
    gate_strides,
    head_strides,
    heads_of,
    heads_of_matrices,
    in_matrix_heads,
    row_and_time,
    unit_stride,
)
from pararnn.engines.fused.matrix import MatrixLaunch, Strides, pack
from pararnn.engines.fused.passes import Adjoint, FusedEngine
from pararnn.engines.fused.segments import plan_matrix_split, programs_of_passes
from pararnn.engines.rule import Size
from pararnn.engines.split import NO_REQUEST, Split, SplitRequest, plan_split
from pararnn.program.mixing import OuterIndices
from pararnn.program.program import MATRIX, MIXING, Program

MIN_HEAD_CHANNELS = 16
"""Channels of a head below which vector lanes would be idle: gates are then copied without heads"""
TILE_BYTES = 256
"""Channels of a row that are worth a thread: four of the widest vectors."""
CORES = 16
"""Cores for which splits are planned, at WARPS_A_CORE segments each: bits do not depend on threads.
"""
TEMPORARIES = ("starts", "ends", "sizes", "products", "info")
"""Tensors that the segments of a Newton solve share, see elementwise/shooting.h."""
MIN_SIZE = 256
"""Least steps of a segment: below, its burn-in takes more than a fifth of its time."""


class CpuEngine(FusedEngine):
    """Compiled C++ for one solver."""

    def build(self, program: Program, dtype: torch.dtype, compiles: bool = True) -> None:
        """Compile the kernels, or only generate them. Raises EngineError where that fails."""
        programs, solver = [program.of_kernels], self.solver
        if program.family == MATRIX:
            programs, solver = programs_of_passes(program, dtype, self.solver), matrix.SOLVER
        for own in programs:
            if compiles:
                kernels_of(own, dtype, solver)
            else:
                source_file(own, dtype, "cpp", solver)

    def plan_split(
        self,
        program: Program,
        size: Size,
        dtype: torch.dtype,
        device: torch.device,
        request: SplitRequest,
    ) -> Split:
        """Plan the segments of a pass."""
        if program.family == MATRIX:
            return plan_matrix_split(program, size, CORES, MIN_SIZE, request)
        return _plan(size, compute_dtype(dtype), request)

    def segments(self, size: Size, dtype: torch.dtype, device: torch.device) -> int:
        """Return how many segments run at once on threads that would be idle otherwise."""
        wide = compute_dtype(dtype)
        idle = _threads_as_constant() // max(1, _columns(size, wide))
        return min(idle, _plan(size, wide).segments)

    def written_layout(self, args: Arguments, gates: Tensor) -> Tensor:
        """Return gates with adjacent channels, in the heads that kernels have: those of matrices,
        else those given unless they are narrow."""
        return in_matrix_heads(args, _to_layout)(gates)

    def launch_matrix(
        self, program: Program, args: Arguments, strides: Strides | None = None
    ) -> MatrixLaunch:
        """Return the cached launch of a pass of a matrix cell."""
        key = _make_matrix_launch, program, torch.get_num_threads(), _openmp(), strides
        return args.signature.cache(key, *key, args)

    def launch(
        self,
        program: Program,
        args: Arguments,
        adjoint: Adjoint | None = None,
        starts: Sequence[Tensor] = (),
    ) -> tuple[Launch | MixingLaunch, list[Tensor | None]]:
        """Return the cached launch of a pass, and the call's tensors in kernel layout."""
        strides = None
        if adjoint is not None:
            arriving = tuple(map(row_and_time, adjoint.arriving))
            strides = AdjointStrides(adjoint.grad_gates.stride(), arriving)
        key: Any = (self.solver, program, torch.get_num_threads(), _openmp(), strides)
        make: Callable[..., Launch | MixingLaunch] = make_launch
        if program.family == MIXING:
            key, make = (*key, bool(starts)), make_mixing_launch
        launch = args.signature.cache(key, make, *key, args)
        return launch, to_kernel_layout(args, launch.conversions)


class AdjointStrides(NamedTuple):
    """Strides on which the words of a backward pass depend in addition to a call's signature: those
    of the gates' gradient, and (B, T) of the gradients that arrive."""

    gates: tuple[int, ...]
    arriving: tuple[tuple[int, int], ...]


class Launch(NamedTuple):
    """Pass on calls of one signature. The sizes are those of Newton's temporaries, see
    elementwise/shooting.h; empty for the loop."""

    conversions: Conversions
    kernel: Kernel
    template: Template
    spans: int
    starts: tuple[int, ...] = ()
    products: tuple[int, ...] = ()

    def new_info(self, gates: Tensor) -> Tensor:
        """Allocate the counts of a forward pass."""
        return gates.new_zeros((1, 2), dtype=torch.int64)

    def new_weights(self, args: Arguments, gates: int) -> tuple[Tensor, list[Tensor]]:
        """Allocate the gradients of bias and params, which a kernel writes whole."""
        new, dtype, channels = args.gates.new_empty, args.signature.dtype, args.signature.size[2]
        grad_bias = new((gates, channels), dtype=dtype)
        return grad_bias, [new(p.shape, dtype=dtype) for p in args.params]

    def forward(self, tensors: list[Tensor | None], info: Tensor) -> None:
        """Launch a forward pass."""
        self._run(tensors, info)

    def backward(
        self, tensors: list[Tensor | None], weights: list[Tensor | None], wanted: Sequence[str]
    ) -> None:
        """Launch a backward pass."""
        self._run(tensors + weights, None)

    def _run(self, tensors: list[Tensor | None], info: Tensor | None) -> None:
        gates = tensors[0]
        assert gates is not None
        if self.starts:
            new, dtype = gates.new_empty, compute_dtype(gates.dtype)
            tensors += [new(self.starts, dtype=dtype) for _ in range(3)]
            tensors.append(gates.new_zeros(self.products, dtype=dtype))
            tensors.append(new((1, 2), dtype=torch.int64) if info is None else info)
        self.kernel(self.template.fill(tensors))


def make_launch(
    solver: str,
    program: Program,
    threads: int,
    openmp: int,
    adjoint: AdjointStrides | None,
    args: Arguments,
) -> Launch:
    """Pack the words of a pass on calls of a signature."""
    interface, addresses = interface_of(program, "cpp", solver), Addresses()
    signature, counts = args.signature, interface.counts
    batch, _, channels = signature.size
    own = _pass_words(interface, addresses, program, threads, openmp, adjoint, args)
    parts: dict[str, Words] = {"pass": interface.pack(f"{own.direction}Problem", own.values)}
    kernel = getattr(kernels_of(program, args.gates.dtype, solver), own.direction.lower())
    spans = batch
    starts: tuple[int, ...] = ()
    products: tuple[int, ...] = ()
    if solver == "newton":
        split = _plan(signature.size, signature.dtype, args.split)
        shooting = {name: addresses.next() for name in TEMPORARIES}
        parts["shooting"] = interface.pack("ShootingWords", {**split._asdict(), **shooting})
        spans *= split.segments
        starts = (batch, split.segments, counts.states, channels)
        products = (batch, split.segments, counts.states**2, channels)
    template = template_of(interface.pack(f"{own.direction}Launch", parts))
    return Launch(own.conversions, kernel, template, spans, starts, products)


class MixingLaunch(NamedTuple):
    """Pass of a step that mixes channels, on calls of one signature.

    outers, vectors: its outer products, and the sizes of their left and right vectors: see
    mixing/backward.h.
    """

    conversions: Conversions
    kernel: Kernel
    template: Template
    spans: int
    outers: tuple[OuterIndices, ...]
    vectors: tuple[tuple[int, ...], tuple[int, ...]]

    def new_info(self, gates: Tensor) -> Tensor:
        """Allocate the counts of a forward pass."""
        return gates.new_zeros((1, 2), dtype=torch.int64)

    def new_weights(self, args: Arguments, gates: int) -> tuple[Tensor, list[Tensor]]:
        """Allocate the gradients of bias and params: those of matrices are summed later."""
        new, dtype, channels = args.gates.new_empty, args.signature.dtype, args.signature.size[2]
        grads = [new(p.shape, dtype=dtype) for p in args.params]
        for grad in grads:
            if grad.ndim > 1:
                grad.zero_()
        return new((gates, channels), dtype=dtype), grads

    def forward(self, tensors: list[Tensor | None], info: Tensor) -> None:
        """Launch a forward pass."""
        self.kernel(self.template.fill(tensors))

    def backward(
        self, tensors: list[Tensor | None], weights: list[Tensor | None], wanted: Sequence[str]
    ) -> None:
        """Launch a backward pass, and multiply what it leaves into the gradients of matrices."""
        sums = tensors[-1]
        assert sums is not None
        vectors: list[Tensor] = []
        if "params" in wanted and self.outers:
            vectors = [sums.new_empty(size) for size in self.vectors]
        self.kernel(self.template.fill([*tensors, *weights, *(vectors or (None, None))]))
        if not vectors:
            return
        lefts, rights = (own.flatten(2, 3) for own in vectors)
        for outer in self.outers:
            grad = weights[1 + outer.matrix]
            assert grad is not None
            own = grad.view(-1, *grad.shape[-2:])  # of one head: (1, D, D)
            own.baddbmm_(lefts[outer.left_vector].mT, rights[outer.right_vector])


def make_mixing_launch(
    solver: str,
    program: Program,
    threads: int,
    openmp: int,
    adjoint: AdjointStrides | None,
    has_starts: bool,
    args: Arguments,
) -> MixingLaunch:
    """Pack the words of a pass of a step that mixes channels, on calls of a signature."""
    interface, addresses = interface_of(program, "cpp", solver), Addresses()
    (batch, steps, channels), dtype = args.signature.size, args.signature.dtype
    own = _pass_words(interface, addresses, program, threads, openmp, adjoint, args)
    mixing = program.mixing[dtype]
    if adjoint is None:
        own.values["given"] = int(has_starts)
    else:
        gates = len(program.gates)  # biases come first, then params
        sums = [own.weights[gates + i] for i in mixing.channel_params]
        none = [0] * len(mixing.matrices)
        own.values["grad_weights"] = [*own.weights[:gates], *sums, *none]
        own.values.update(left=addresses.next(), right=addresses.next())
    parts = {"pass": interface.pack(f"{own.direction}Problem", own.values)}
    kernel = getattr(kernels_of(program, args.gates.dtype, solver), own.direction.lower())
    template = template_of(interface.pack(f"{own.direction}Launch", parts))
    heads = heads_of_matrices(args.params) or 1
    size = (heads, batch, steps, channels // heads)
    vectors = (mixing.lefts, *size), (mixing.rights, *size)
    return MixingLaunch(own.conversions, kernel, template, batch, mixing.outers, vectors)


def _make_matrix_launch(
    program: Program, threads: int, openmp: int, strides: Strides | None, args: Arguments
) -> MatrixLaunch:
    """Pack the words of a pass of a matrix cell, on calls of a signature."""
    where: dict[str, Words] = {"threads": threads, "openmp": openmp}
    conversions, template = pack(program, args, "cpp", strides, where, lambda addresses: {})
    kernels = kernels_of(program, args.gates.dtype, "sequential")
    return MatrixLaunch(
        conversions, template, kernels.forward if strides is None else kernels.backward
    )


class PassWords(NamedTuple):
    """Words of the problem of a pass, by field; weights: those of the weights' gradients."""

    direction: str
    conversions: Conversions
    values: dict[str, Words]
    weights: list[int]


def _pass_words(
    interface: Interface,
    addresses: Addresses,
    program: Program,
    threads: int,
    openmp: int,
    adjoint: AdjointStrides | None,
    args: Arguments,
) -> PassWords:
    signature, counts = args.signature, interface.counts
    conversions = conversions_for(
        args, in_matrix_heads(args, _to_layout), signature.dtype, signature.dtype
    )
    own = Arguments.unflatten(to_kernel_layout(args, conversions), args.flatten()[1])
    (batch, steps, channels), (heads, width) = signature.size, heads_of(own.gates.shape)
    strides = head_strides(own.gates.shape, own.gates.stride())
    inputs: Values = {
        "rows": batch,
        "length": steps,
        "gate_strides": gate_strides(interface, strides),
        **input_values(addresses, counts, args, own.fields),
        "field_channel": [int(field.shape[-1] > 1) for field in own.fields],
        "heads": heads,
        "channels": width,
        "reverse": int(args.options.reverse),
        "threads": threads,
        "openmp": openmp,
    }
    values: dict[str, Words] = {"in": interface.pack("Inputs", inputs)}
    if program.family == MIXING:
        values["sums"] = addresses.next()
    if adjoint is None:
        values |= {
            "states": addresses.array(counts.states),
            "final": addresses.array(counts.states),
        }
        return PassWords("Forward", conversions, values, [])
    values |= adjoint_values(addresses, adjoint.arriving, counts.fields)
    layout = head_strides(own.gates.shape, adjoint.gates)
    values["grad_gate_strides"] = gate_strides(interface, layout)
    bias, row = addresses.next(), channels * signature.dtype.itemsize
    rows = [Address(bias.tensor, g * row) for g in range(counts.gates)]
    weights = [*rows, *addresses.array(counts.params)]
    values["grad_weights"] = weights
    return PassWords("Backward", conversions, values, weights)


def _plan(size: Size, dtype: torch.dtype, request: SplitRequest = NO_REQUEST) -> Split:
    """Plan the segments for a compute dtype."""
    steps, columns = max(1, size[1]), max(1, _columns(size, dtype))
    return plan_split(steps, columns, dtype, 1, CORES, columns * steps, request, MIN_SIZE)


def _columns(size: Size, dtype: torch.dtype) -> int:
    """Return the threads that a batch keeps busy if time is not cut."""
    batch, _, channels = size
    return batch * -(-channels * dtype.itemsize // TILE_BYTES)


@constant_in_graphs
def _threads_as_constant() -> int:
    return torch.get_num_threads()


def _to_layout(gates: Tensor) -> Tensor:
    if gates.ndim == 5 and gates.shape[-1] < MIN_HEAD_CHANNELS:
        gates = gates.flatten(3)
    return unit_stride(gates)


@cache
def _openmp() -> int:
    """Return the address of PyTorch's OpenMP entry, 0 where it has none that we can call."""
    if not torch.backends.openmp.is_available():
        return 0
    entry = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return 0 if entry is None else ctypes.cast(entry, ctypes.c_void_p).value or 0


SEQUENTIAL, NEWTON = (CpuEngine(solver) for solver in SOLVERS)
