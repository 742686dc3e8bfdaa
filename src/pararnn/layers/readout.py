"""What a layer puts out where its cell has a readout: made of states by plain PyTorch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pararnn.cells.base import Cell, Step
from pararnn.engines.arguments import Arguments, Engine
from pararnn.engines.forward_time import step_inputs, without_padding
from pararnn.errors import CellError
from pararnn.numerics import without_autocast
from pararnn.program.apart import apart
from pararnn.program.derive import example
from pararnn.program.guard import from_the_users_line, line_of
from pararnn.program.program import COMPUTE_DTYPES, Program, program_of
from pararnn.solve import run_engine

Results = tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], Tensor]
"""A layer's output, all states, the final ones, and the counts of a solve."""


def solve_and_read(program: Program, engine: Engine, args: Arguments) -> Results:
    """Run a solve by an engine, and return what the layer puts out with it."""
    states, final, counts = run_engine(program, engine, args)
    output = read_out(program, args, states) if program.step.has_readout else states[0]
    return output, states, final, counts


def read_out(program: Program, args: Arguments, states: Sequence[Tensor]) -> Tensor:
    """The readout (B, T, D) of states as a solve of `args` returns them; 0 at padding.

    It is computed in the compute dtype and rounded once, to that of the states. Raises CellError
    where it is no tensor of a state's shape and dtype.
    """
    # In the order of the arguments: what a step puts out depends on no other step.
    args = replace(args, reverse=False)
    with without_autocast(args.gates.device):
        given = (*(state.to(args.dtype) for state in states), *step_inputs(args))
        params = [param.to(args.dtype) for param in args.params]
        padding = None if args.seq is None else args.seq < 0
        if padding is not None:
            given = without_padding(given, padding)
        count = program.num_states
        output = program.step.call("readout", given[:count], given[count:], params)
    _check_output(program.step, output, given[0])
    output = output.to(args.gates.dtype)
    return output if padding is None else output.masked_fill(padding.unsqueeze(-1), 0)


def check_readout(cell: Cell) -> None:
    """Run a cell's readout, if it has one, on as many channels; CellError for what it may not do.

    It may draw no random numbers, read no tensor's value in Python, write into no argument, and
    must treat leading dimensions as independent.
    """
    if cell.has_readout:
        _checked(program_of(cell), cell.hidden_size, cell.num_heads)


@functools.lru_cache(maxsize=256)
def _checked(program: Program, channels: int, heads: int) -> None:
    """Once for all layers of a stack."""
    apart(_check, program.step, channels, heads)


def _check(step: Step, channels: int, heads: int) -> None:
    what, method = f"{step.cls.__name__}.readout", step.cls.readout  # type: ignore[attr-defined]
    try:
        inspect.signature(method).bind("self", "state", "gate", "param")
    except TypeError as error:
        raise CellError(
            f"{what} must take (self, state, gate, param), as the step does: {error}"
        ) from None
    for dtype in COMPUTE_DTYPES:
        tensors = example(step, (2, 3), channels, dtype, heads=heads)
        states, rows = step.num_states, step.num_rows

        def run(given: Sequence[Tensor], states: int = states, rows: int = rows) -> Any:
            with _Watched(what):
                return step.call("readout", given[:states], given[states:rows], given[rows:])

        # Clones, as leaves could not be written into at all.
        given = [tensor.requires_grad_().clone() for tensor in tensors]
        try:
            whole = run(given)
            _check_output(step, whole, tensors[0])
            if any(tensor._version for tensor in given):
                raise CellError(_WRITES.format(what=what, line=""))
            single = run([*(tensor[1, 2] for tensor in given[:rows]), *given[rows:]])
            if whole.requires_grad:
                whole.sum().backward()
        except CellError:
            raise
        except Exception as error:  # the user's code may raise anything
            written = "inplace operation" in str(error) or "can't set attribute" in str(error)
            cause = from_the_users_line(error)
            if written:
                raise CellError(_WRITES.format(what=what, line=line_of(error))) from cause
            raise CellError(f"{what} fails: {error}{line_of(error)}") from cause
        if single.shape != (channels,) or not torch.allclose(whole[1, 2], single, 1e-4, 1e-4):
            raise CellError(
                f"{what} must treat leading dimensions (B, T) as independent rows: given (2, 3, "
                f"{channels}) it mixes them, or is another for a single step"
            )


_WRITES = (
    "{what} writes in place{line}, into what it was given or what its gradient needs: make a new "
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


class _Watched(TorchDispatchMode):
    """Raises CellError for what a readout may not do: verify and recomputation run it again."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an op that is allowed."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CellError(
                f"{self.what} draws random numbers ({func}): draw them outside of the layer, or "
                "pass them as a field"
            )
        if func is torch.ops.aten._local_scalar_dense.default:
            raise CellError(
                f"{self.what} reads a tensor's value in Python (a branch or .item()), but is run "
                "on all steps at once: use torch.where"
            )
        return func(*args, **(kwargs or {}))
