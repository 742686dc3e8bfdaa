"""Passes of engines whose whole solve is one generated kernel, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pararnn.base.numerics import compute_dtype
from pararnn.codegen.families import why_no_kernels
from pararnn.engines.arguments import Arguments, Gradients, Solution
from pararnn.engines.engine import Arriving, Engine
from pararnn.engines.fused import heads, matrix, segments
from pararnn.engines.fused.layout import (
    gradients_like,
    new_grad_initial,
    new_states,
    new_sums,
    unit_stride,
)
from pararnn.engines.fused.matrix import MatrixLaunch, Strides
from pararnn.engines.rule import Rank, Size, rank_of_matrix_segments, rank_of_segments
from pararnn.engines.split import Split
from pararnn.program.entries import why_no_tangents
from pararnn.program.program import HEADS, MATRIX, MIXING, Program


class Adjoint(NamedTuple):
    """Tensors of a backward pass on whose layout its launch depends: the gates' gradient, what the
    forward pass has given, and the gradients that arrive."""

    grad_gates: Tensor
    outputs: list[Tensor]
    arriving: list[Tensor | None]


class Launch(Protocol):
    """Pass on calls of one signature: a kernel, the template of its words, and its temporaries."""

    @property
    def spans(self) -> int:
        """Rows times segments: each sums its weights' gradients by itself."""

    def new_info(self, gates: Tensor) -> Tensor:
        """Allocate the counts of a forward pass."""

    def forward(self, tensors: list[Tensor | None], info: Tensor) -> None:
        """Launch a forward pass on inputs, states and final states."""

    def new_weights(self, args: Arguments, gates: int) -> tuple[Tensor | None, list[Tensor]]:
        """Allocate the gradients of bias and params."""

    def backward(
        self, tensors: list[Tensor | None], weights: list[Tensor | None], wanted: Sequence[str]
    ) -> None:
        """Launch a backward pass; the last of the tensors has the sums of spans, which are added up
        into `weights`."""


class FusedEngine(Engine):
    """Engine of generated kernels for one solver; a subclass makes the launches of its device."""

    backend = "fused"
    completes = True
    builds = True

    def __init__(self, solver: str) -> None:
        self.solver = solver
        self.cuts_time = solver == "newton"

    def gives_sums(self, program: Program, dtype: torch.dtype) -> bool:
        """Return True for steps that run on heads, and for cells that mix channels if the sums that
        a forward pass has are those of the states that it returns: these are what it carries."""
        mixes = program.family == MIXING and dtype == compute_dtype(dtype)
        return mixes or program.family == HEADS

    def linearises_returned(self, program: Program) -> bool:
        """Return False for steps that run on heads, whose checkpoints are not rounded."""
        return program.family != HEADS

    def why_not(self, program: Program) -> str | None:
        """Return the reason why there are no kernels for a cell, or None."""
        if program.family == MATRIX and self.cuts_time:
            return why_no_tangents(program)
        return why_no_kernels(program, self.solver)

    def rank(
        self, program: Program, size: Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Rank, str]:
        """Rank the loop above all but enough concurrent segments of time."""
        if not self.cuts_time:
            return Rank.LOOP, "a compiled loop beats every solver in PyTorch"
        if program.family == MATRIX:
            segments_of_call = self.matrix_segments(program, size, device)
            return rank_of_matrix_segments(segments_of_call, size[1], device)
        return rank_of_segments(program, self.segments(size, dtype, device), device)

    def segments(self, size: Size, dtype: torch.dtype, device: torch.device) -> int:
        """Return how many segments of gates of `dtype` run at once on otherwise idle hardware."""
        raise NotImplementedError

    def matrix_segments(self, program: Program, size: Size, device: torch.device) -> int:
        """Return how many segments of a matrix cell's time `auto` would run at once."""
        return 1

    def split_of(self, program: Program, args: Arguments) -> Split:
        """Plan the segments of a call of a matrix cell."""
        size = program.workload_size(args.size)
        return self.plan_split(program, size, args.gates.dtype, args.gates.device, args.split)

    def written_layout(self, args: Arguments, gates: Tensor) -> Tensor:
        """Return gates, or their gradient, in the layout in which kernels write the latter."""
        return unit_stride(gates)

    def launch(
        self,
        program: Program,
        args: Arguments,
        adjoint: Adjoint | None = None,
        starts: Sequence[Tensor] = (),
    ) -> tuple[Any, list[Tensor | None]]:
        """Return the cached `Launch` of a pass, and the call's tensors in kernel layout.

        starts: states of a forward pass that each step starts from in place of its own.
        """
        raise NotImplementedError

    def launch_matrix(
        self, program: Program, args: Arguments, strides: Strides | None = None
    ) -> MatrixLaunch:
        """Return the cached launch of a pass of a matrix cell."""
        raise NotImplementedError

    def forward(self, program: Program, args: Arguments) -> Solution:
        """Solve the recurrence by one kernel."""
        if program.family == MATRIX and self.cuts_time:
            split = self.split_of(program, args)
            solution = segments.solve(program, args, self.launch_matrix, split)
            others = solution.info.new_zeros((self.info_rows - 1, 2))
            return solution._replace(info=torch.cat([solution.info, others]))
        if program.family == MATRIX:
            return matrix.solve(program, args, self.launch_matrix)
        if program.family == HEADS:
            return heads.solve(program, args, self.launch_matrix)
        launch, tensors = self.launch(program, args)
        states, final = new_states(program, args)
        info, sums = launch.new_info(args.gates), new_sums(program, args)
        if program.family == MIXING:
            tensors.append(sums)
        launch.forward([*tensors, *states, *final], info)
        return Solution(states if sums is None else (*states, sums), final, info)

    def _sums_at(self, program: Program, args: Arguments, states: Sequence[Tensor]) -> Tensor:
        """Return the sums of a forward pass whose steps start from given states."""
        starts = [state.contiguous() for state in states]
        launch, tensors = self.launch(program, args, starts=starts)
        sums = new_sums(program, args)
        assert sums is not None
        launch.forward([*tensors, sums, *starts, *(None for _ in starts)], sums)
        return sums

    def backward(
        self,
        program: Program,
        args: Arguments,
        states: tuple[Tensor, ...],
        grad_states: Arriving,
        grad_final: Arriving,
        wanted: Sequence[str],
    ) -> Gradients:
        """Return the gradients by one kernel, on a GPU and a small sum."""
        if program.family == MATRIX:
            call = (program, args, states, grad_states[0], grad_final, wanted, self.launch_matrix)
            if self.cuts_time:
                return segments.differentiate(*call, self.split_of(program, args))
            return matrix.differentiate(*call)
        if program.family == HEADS:
            of_forward = (program, args, states, grad_states, grad_final)
            return heads.differentiate(*of_forward, wanted, self.launch_matrix)
        if program.family == MIXING and not args.options.sums:
            states = (*states, self._sums_at(program, args.with_options(sums=True), states))
        grad_gates = torch.empty_like(args.gates)
        kernel_gates = self.written_layout(args, grad_gates)
        outputs = [s.contiguous() for s in states]
        arriving = [None if g is None else unit_stride(g) for g in grad_states]
        launch, tensors = self.launch(program, args, Adjoint(kernel_gates, outputs, arriving))
        signature, new, num_gates = args.signature, args.gates.new_empty, len(program.gates)
        dtype = signature.dtype
        grad_fields = [new(f.shape, dtype=dtype) for f in args.fields]
        grad_initial = new_grad_initial(args, grad_final)
        grad_bias, grad_params = launch.new_weights(args, num_gates)
        weights = num_gates + len(args.channel_params)
        sums = new((launch.spans, weights, signature.size[2]), dtype=dtype)
        if program.family == MIXING:
            tensors.append(outputs.pop())
        tensors += [*outputs, *arriving]
        tensors += [None if g is None else g.contiguous() for g in grad_final]
        tensors += (kernel_gates, *grad_fields, *(grad_initial or (None,) * len(outputs)), sums)
        launch.backward(tensors, [grad_bias, *grad_params], wanted)
        grads = (grad_bias, grad_fields, grad_params, grad_initial)
        return gradients_like(args, grad_gates, kernel_gates, *grads, wanted)
