"""Schedule of steps of vectors that run as matrix cells: the channels of a head are an axis of its
tensors, fields are gates, and all states are outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pararnn.cells.matrix import HeadSizes
from pararnn.engines.arguments import Arguments, Gradients, Solution, TensorSize
from pararnn.engines.engine import BackwardInputs
from pararnn.engines.fused.layout import gradients_like
from pararnn.engines.fused.schedule import Schedule
from pararnn.program.program import HEADS, Program


class AsMatrices(Schedule):
    """Schedule of steps that couple the channels of a head, by that of matrix cells."""

    family = HEADS

    def __init__(self, *schedules: Schedule) -> None:
        self.schedules = schedules

    def of_heads(self, program: Program) -> Schedule:
        """Return the schedule that runs the heads of a program: the last, if no other takes it."""
        taking = (schedule for schedule in self.schedules if schedule.takes(program.of_kernels))
        return next(taking, self.schedules[-1])

    def build(self, program: Program, dtype: torch.dtype, compiles: bool = True) -> None:
        self.of_heads(program).build(program.of_kernels, dtype, compiles)

    def stored(self, program: Program, args: Arguments) -> list[TensorSize]:
        """Return the sizes of checkpoints, and of what the schedule of heads stores."""
        of_heads = self.of_heads(program).stored(program.of_kernels, args)
        return [*super().stored(program, args), *of_heads]

    def linearises_returned(self, program: Program) -> bool:
        """Return False: checkpoints are not rounded."""
        return False

    def can_save_values(self, program: Program, dtype: torch.dtype) -> bool:
        """Return True: a forward pass can give its checkpoints."""
        return True

    def check_backward(self, program: Program, args: Arguments) -> None:
        self.of_heads(program).check_backward(program.of_kernels, args)

    def forward(self, program: Program, args: Arguments) -> Solution:
        """Run the forward pass, and save its checkpoints if `Options.save_values` says so."""
        schedule, of_heads = self.of_heads(program), _arguments(program, args)
        solution = schedule.forward(program.of_kernels, of_heads)
        output, *kept = solution.states
        by_state = output.unflatten(-1, (program.num_states, -1))
        states = [state.flatten(-2).to(args.gates.dtype) for state in by_state.unbind(-2)]
        final = tuple(state.flatten(-2) for state in solution.final)
        states = [state.contiguous() for state in states]
        if args.options.save_values:
            states += kept
        return Solution(tuple(states), final, solution.info)

    def backward(self, program: Program, args: Arguments, inputs: BackwardInputs) -> Gradients:
        """Run the backward pass from checkpoints; without these, after another forward pass."""
        states, grad_states, grad_final, wanted = inputs
        sizes, of_heads = program.of_kernels.step.head, _arguments(program, args)
        grad_output = None
        if any(grad is not None for grad in grad_states):
            pairs = zip(grad_states, states[: program.num_states], strict=True)
            full = [torch.zeros_like(state) if grad is None else grad for grad, state in pairs]
            grad_output = _side_by_side(full, sizes).to(of_heads.gates.dtype)
        final = tuple(None if grad is None else _in_heads(grad, sizes) for grad in grad_final)
        schedule, kept = self.of_heads(program), states[program.num_states :]
        if not args.options.save_values:
            kept = schedule.forward(program.of_kernels, of_heads).states[1:]
        of_kernels = BackwardInputs((states[0], *kept), (grad_output,), final, wanted)
        grads = schedule.backward(program.of_kernels, of_heads, of_kernels)
        params = args.params[: len(grads.params)]  # none where they are not wanted
        count = len(program.gates)
        by_gate = _by_gate(grads.gates[:, :, 0], sizes)
        bias = None
        if grads.bias is not None:
            of_bias = _by_gate(grads.bias.unflatten(-1, (sizes.heads, -1)), sizes)
            bias = of_bias[..., 0, :count, :, :].flatten(-2)
        return gradients_like(
            args,
            torch.empty_like(args.gates),
            by_gate[:, :, :count],
            bias,
            [field.flatten(-2) for field in by_gate[:, :, count:].unbind(2)],
            [g.reshape(*args.samples, *p.shape) for g, p in zip(grads.params, params, strict=True)],
            [grad.flatten(-2) for grad in grads.initial],
            wanted,
        )


def _in_heads(x: Tensor, sizes: HeadSizes) -> Tensor:
    """Return channels (..., D) as (..., H, V)."""
    return x.unflatten(-1, (sizes.heads, -1))


def _side_by_side(tensors: Sequence[Tensor], sizes: HeadSizes) -> Tensor:
    """Return tensors (..., D), those of a head next to each other: (..., H, values)."""
    return torch.stack([_in_heads(x, sizes) for x in tensors], -2).flatten(-2)


def _by_gate(gates: Tensor, sizes: HeadSizes) -> Tensor:
    """Return gates (..., H, W) as (..., G, H, V)."""
    return gates.unflatten(-1, (len(sizes.gates), -1)).transpose(-3, -2)


def _arguments(program: Program, args: Arguments) -> Arguments:
    """Return a call's arguments as the cell of the program's heads takes them."""
    sizes, gates, bias, fields = program.of_kernels.step.head, args.gates, args.bias, args.fields
    by_gate = _in_heads(gates.flatten(3), sizes).transpose(2, 3)
    if fields:  # which are in the compute dtype
        many = [_in_heads(field, sizes).unsqueeze(3) for field in fields]
        by_gate = torch.cat([by_gate.to(args.dtype), *(x.to(args.dtype) for x in many)], 3)
    if bias is not None:
        full = torch.cat([bias, bias.new_zeros(len(fields), bias.shape[1])]) if fields else bias
        bias = _side_by_side(full.unbind(0), sizes).flatten().unsqueeze(0)
    return replace(
        args,
        gates=by_gate.flatten(3).unsqueeze(2),
        bias=bias,
        fields=(),
        params=tuple(
            _in_heads(param, sizes) if param.ndim == 1 else param.unflatten(0, (sizes.heads, -1))
            if param.ndim == 2 else param
            for param in args.params
        ),
        initial=tuple(_in_heads(state, sizes) for state in args.initial),
    )  # fmt: skip
