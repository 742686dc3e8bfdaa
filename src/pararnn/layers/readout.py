"""The output of layers whose cell has a readout: computed from states by plain PyTorch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pararnn.base.errors import CellError
from pararnn.base.numerics import without_autocast
from pararnn.base.private import TorchDispatchMode, local_scalar
from pararnn.cells.base import Cell, Step
from pararnn.engines.arguments import Arguments
from pararnn.engines.forward_time import fill_padding, step_inputs
from pararnn.program.apart import call_outside_modes
from pararnn.program.derive import LEADING, ROW, check_independent, example
from pararnn.program.guard import from_the_users_line, line_of, missing_derivative
from pararnn.program.program import COMPUTE_DTYPES, Program, program_of
from pararnn.solve import SolvePlan
from pararnn.solvers.onnx_math import call_precisely

Results = tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], Tensor]
"""A layer's output, all states, the final ones, and the counts of a solve."""


def solve_and_read(program: Program, plan: SolvePlan, args: Arguments) -> Results:
    """Run a solve, and return it with the layer's output."""
    states, final, counts = plan.run(program, args)
    if not program.keeps_states:  # engines of matrix cells read out themselves
        return states[0].flatten(2), (), final, counts
    output = read_out(program, args, states) if program.step.has_readout else states[0]
    return output, states, final, counts


def read_out(program: Program, args: Arguments, states: Sequence[Tensor]) -> Tensor:
    """Return the readout (B, T, D) of the states of a solve of `args`; 0 at padding.

    It is computed in the compute dtype and rounded once, to the states' dtype. Raises CellError
    where it is no tensor of a state's shape and dtype.
    """
    # In the order of the arguments: a step's readout depends on no other step.
    args = args.with_options(reverse=False)
    with without_autocast(args.gates.device):
        rows = (*(state.to(args.dtype) for state in states), *step_inputs(args))
        params = [param.to(args.dtype) for param in args.params]
        padding = None if args.seq is None else args.seq < 0
        if padding is not None:
            rows = fill_padding(rows, padding)
        count = program.num_states
        arguments = rows[:count], rows[count:], params
        output = call_precisely(program.step.call, "readout", *arguments)
    _check_output(program.step, output, rows[0])
    output = output.to(args.gates.dtype)
    return output if padding is None else output.masked_fill(padding.unsqueeze(-1), 0)


def check_readout(cell: Cell) -> None:
    """Run a cell's readout, if it has one, on its channels; CellError for forbidden operations.

    It may draw no random numbers, read no tensor's value in Python, write into no argument, and
    must treat leading dimensions as independent.
    """
    if cell.has_readout and cell.keeps_states:
        _check_once(program_of(cell), cell.hidden_size, cell.num_heads)


@functools.lru_cache(maxsize=256)
def _check_once(program: Program, channels: int, heads: int) -> None:
    """Check a readout once for all layers of a stack."""
    call_outside_modes(_check, program.step, channels, heads)


def _check(step: Step, channels: int, heads: int) -> None:
    what, method = f"{step.cls.__name__}.readout", step.cls.readout  # type: ignore[attr-defined]
    try:
        inspect.signature(method).bind("self", "state", "gate", "param")
    except TypeError as error:
        raise CellError(
            f"{what} must take (self, state, gate, param), as the step does: {error}"
        ) from None
    for dtype in COMPUTE_DTYPES:
        tensors = example(step, LEADING, channels, dtype, heads=heads)
        states, rows = step.num_states, step.num_rows

        def run(tensors: Sequence[Tensor], states: int = states, rows: int = rows) -> Any:
            with _Restrictions(what):
                return step.call("readout", tensors[:states], tensors[states:rows], tensors[rows:])

        # Clones, as leaves could not be written into at all.
        clones = [tensor.requires_grad_().clone() for tensor in tensors]
        try:
            whole = run(clones)
            _check_output(step, whole, tensors[0])
            if any(tensor._version for tensor in clones):
                raise CellError(_WRITES.format(what=what, line=""))
            single = run([*(tensor[ROW] for tensor in clones[:rows]), *clones[rows:]])
            if whole.requires_grad:
                whole.sum().backward()
        except CellError:
            raise
        except Exception as error:  # the user's code may raise anything
            cause, missing = from_the_users_line(error), missing_derivative(error)
            if "inplace operation" in str(error):
                raise CellError(_WRITES.format(what=what, line=line_of(error))) from cause
            failure = f"fails: {error}{line_of(error)}" if missing is None else missing
            raise CellError(f"{what} {failure}") from cause
        check_independent(what, whole, single, (channels,))


_WRITES = (
    "{what} writes in place{line}, into an argument or what its gradient needs: make a new "
    "tensor, by torch.where for a mask"
)


def _check_output(step: Step, output: Any, like: Tensor) -> None:
    if isinstance(output, Tensor) and (output.shape, output.dtype) == (like.shape, like.dtype):
        return
    got = type(output).__name__
    if isinstance(output, Tensor):
        got = f"{tuple(output.shape)} {output.dtype}"
    raise CellError(
        f"{step.cls.__name__}.readout must return one tensor of a state's shape and dtype, "
        f"{tuple(like.shape)} {like.dtype}, got {got}"
    )


class _Restrictions(TorchDispatchMode):
    """Mode that raises CellError for operations that a readout may not repeat."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op, or raise."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CellError(
                f"{self.what} draws random numbers ({func}): draw them outside of the layer, or "
                "pass them as a field"
            )
        if func is local_scalar:
            raise CellError(
                f"{self.what} reads a tensor's value in Python (a branch or .item()), but is run "
                "on all steps at once: use torch.where"
            )
        return func(*args, **(kwargs or {}))
