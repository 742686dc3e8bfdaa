"""States of matrix cells that are solved by entries before others, as channels of elementwise steps
on a GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from pararnn.codegen.targets import Gpu
from pararnn.engines.arguments import Arguments, Options
from pararnn.engines.engine import BackwardInputs
from pararnn.engines.fused.elementwise_cuda import ElementwiseCuda
from pararnn.engines.fused.series import Pulled, Series, as_series, inputs_of, pull
from pararnn.engines.tuned import Workload
from pararnn.program.affine import AffineForm, EntryStates
from pararnn.program.entry_cells import program_of_entries, states_before
from pararnn.program.program import Program
from pararnn.program.pullback import evaluate


class Entries:
    """Solver of one of a form's EntryStates: by the schedule of elementwise steps that `auto` would
    take, so that long rows of few heads are cut into segments of time."""

    def __init__(self, gpu: Gpu, program: Program, number: int) -> None:
        self.program = program
        self.schedules = tuple(ElementwiseCuda(solver, gpu) for solver in ("sequential", "newton"))
        self.of_entries = program_of_entries(program, number)
        form, sizes = program.affine_form(), program.step.head
        assert isinstance(form, AffineForm)
        component = form.components[number]
        assert isinstance(component, EntryStates)
        self.component, before = component, states_before(form, component)
        self.keys = [("new_state", i) for i in component.states] + [("state", i) for i in before]
        self.size = (sizes.heads, *(sizes.lengths[axis] for axis in component.axes))

    @property
    def channels(self) -> int:
        """Entries of a state, of all heads."""
        return math.prod(self.size)

    def build(self, compiles: bool) -> None:
        """Compile the loop's kernels, or only generate them. Raises EngineError."""
        self.schedules[0].build(self.of_entries, torch.float32, compiles)

    def _schedule(self, arguments: Arguments) -> ElementwiseCuda:
        """Return the schedule that runs these arguments."""
        gates, program = arguments.gates, self.of_entries
        workload = Workload(program.key, arguments.size, gates.dtype, gates.device)
        return max(self.schedules, key=lambda s: s.rank(program, workload)[0])

    def forward(
        self, args: Arguments, final: Sequence[Tensor], flags: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the states after each step, and before each where others read them, (B, T,
        entries). Write final states, and the flags of heads in which one is not finite."""
        arguments = self._arguments(args)
        solution = self._schedule(arguments).forward(self.of_entries, arguments)
        for index, i in enumerate(self.component.states):
            final[i].copy_(solution.final[index].view(final[i].shape))
        for (kind, _), x in self.series(solution.states).items():
            if kind == "new_state":
                self._flag(args, x, flags)
        return solution.states

    def series(self, states: Sequence[Tensor]) -> Series:
        """Return the states of all steps by kind and number, (B, T, H, ...)."""
        return {key: x.unflatten(-1, self.size) for key, x in zip(self.keys, states, strict=True)}

    def backward(
        self,
        args: Arguments,
        states: Sequence[Tensor],
        grads: Mapping[tuple[str, int], Tensor],
        grad_final: Sequence[Tensor | None],
        grad_initial: Sequence[Tensor],
        flags: Tensor,
    ) -> Pulled:
        """Return the gradients of gates and parameters; write those of initial states, and flags.

        grads: of `series`, where there are any.
        """
        arguments, numbers = self._arguments(args), self.component.states
        arriving = [grads.get(key) for key in self.keys]
        final: list[Tensor | None] = [None] * len(self.keys)
        for index, i in enumerate(numbers):
            grad = grad_final[i]
            final[index] = None if grad is None else grad.flatten(1)
        flat = tuple(None if x is None else x.reshape(states[0].shape) for x in arriving)
        inputs = BackwardInputs(tuple(states), flat, tuple(final), ("initial",))
        result = self._schedule(arguments).backward(self.of_entries, arguments, inputs)
        for i, grad in enumerate(result.initial[: len(numbers)]):
            of_state = grad_initial[numbers[i]]
            of_state.copy_(grad.view(of_state.shape))
        by_entry = [x.unflatten(-1, self.size) for x in result.gates.unbind(2)]
        for x in by_entry:
            self._flag(args, x, flags)
        statements = self.component.gates_backward
        cotangents = {("grad_entry", number): x for number, x in enumerate(by_entry)}
        return pull(
            self.program, args, statements, inputs_of(self.program, args, statements, cotangents)
        )

    def _arguments(self, args: Arguments) -> Arguments:
        """Return the arguments of the elementwise steps: "entry" tensors are gates."""
        gates = self.component.gates
        size = (*args.gates.shape[:2], *self.size)
        written = evaluate(gates, inputs_of(self.program, args, gates, {})) if gates.inputs else []
        entries = [as_series(x, args).expand(size).flatten(2) for _, x in written]
        if not entries:
            entries = [args.gates.new_zeros((*size[:2], self.channels), dtype=args.dtype)]
        initial: list[Tensor] = []
        if args.initial:
            initial = [args.initial[i].flatten(1) for i in self.component.states]
            initial += [torch.zeros_like(initial[0])] * (len(self.keys) - len(initial))
        return Arguments(
            torch.stack(entries, 2),
            None,
            (),
            (),
            tuple(initial),
            args.sequences,
            args.seq,
            args.reset,
            Options(reverse=args.options.reverse, save_values=False),
        )

    def _flag(self, args: Arguments, x: Tensor, flags: Tensor) -> None:
        """Flag heads of (B, T, H, ...) in which a number of a sequence is not finite."""
        is_bad = ~x.isfinite()
        if args.seq is not None:
            is_bad &= (args.seq >= 0).reshape(*args.seq.shape, *[1] * (x.ndim - 2))
        flags.logical_or_(is_bad.flatten(3).any(-1).any(1) if x.ndim > 3 else is_bad.any(1))


@lru_cache(maxsize=1024)
def entries_of(gpu: Gpu, program: Program) -> tuple[Entries, ...]:
    """Return the solvers of a program's EntryStates, in order."""
    form = program.affine_form()
    assert isinstance(form, AffineForm)
    pairs = enumerate(form.components)
    return tuple(Entries(gpu, program, i) for i, c in pairs if isinstance(c, EntryStates))
