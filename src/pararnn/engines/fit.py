"""Checks of sizes, dtypes and devices, on which kernels rely; once for each signature."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pararnn.cells.base import SHARDED
from pararnn.cells.matrix import VALUES, Axes
from pararnn.engines.arguments import Arguments, TensorSize
from pararnn.program.matrix import CHECKPOINT
from pararnn.program.program import Program
from pararnn.sequences import require


def check_fit(program: Program, args: Arguments) -> None:
    """Check that the tensors of a record fit its gates. Raises TypeError or ValueError."""
    gates, bias = args.gates, args.bias
    rows, channels = tuple(gates.shape[:2]), args.channels
    if args.seq is None and args.sequences != rows[0]:
        raise ValueError(
            f"a call made for a batch of {args.sequences} got one of {rows[0]}: torch.jit.trace "
            "keeps the batch of its example. Export by torch.export, which takes any, or trace "
            "again with this batch"
        )
    heads = program.head_sizes
    num_gates = len(program.gates) if heads is None else 1
    if gates.shape[2] != num_gates or (heads and channels != heads.heads * heads.width):
        wanted = f"{num_gates}, ..." if heads is None else f"1, {heads.heads}, {heads.width}"
        raise ValueError(
            f"gates of {program.cell_name} must be (B, T, {wanted}), got {tuple(gates.shape)}"
        )
    if any(hasattr(param, "full_tensor") for param in args.params):
        raise TypeError(SHARDED.format(program.cell_name))
    for param in args.params:
        if param.device != gates.device:
            raise ValueError(
                f"the cell is on {param.device} and gates on {gates.device}; move one of them"
            )
    if bias is not None:
        _check(f"bias of {program.cell_name}", bias, (num_gates, channels), gates)
    check_memory(program, args)
    params = args.params[: len(program.params)]
    for name, param in zip(program.params, params, strict=True):
        _check(f"{name} of {program.cell_name}", param, tuple(param.shape), gates)
        program.check_param(name, param, channels)
    for name, field in zip(program.fields, args.fields, strict=True):
        _check(f"field {name!r}", field, (*rows, channels), gates)
    states = [*zip(program.states, args.state_sizes(program), strict=True)]
    for (name, size), state in zip(states[: len(args.initial)], args.initial, strict=True):
        _check(f"initial state {name!r}", state, (args.sequences, *size), gates)
    for name, marks, dtype in (("seq", args.seq, torch.int32), ("reset", args.reset, torch.bool)):
        if marks is not None:
            _check(name, marks, rows, gates, dtype)


def check_memory(program: Program, args: Arguments) -> None:
    """Check that a call has a parameter for each that the cell names, and the sizes of its
    memories. Raises ValueError."""
    count = len(program.params)
    if len(args.params) != count + len(program.memory):
        raise ValueError(
            f"{program.cell_name} takes {count} parameters and the memory {program.memory}, got "
            f"{len(args.params)} tensors"
        )
    if not program.memory:
        return
    heads, lengths = args.head_sizes(program), args.lengths_of_calls(program)
    assert heads is not None
    for name, memory, axes, size in zip(
        program.memory, args.params[count:], heads.memory, heads.memory_sizes, strict=True
    ):
        full = (args.sequences, heads.heads, *size)
        if tuple(memory.shape) != full or 0 in size:
            words = [axis if axis in lengths else str(heads.lengths[axis]) for axis in axes]
            shared = ", ".join([str(args.sequences), *words])
            by_head = ", ".join([str(args.sequences), str(heads.heads), *words])
            of_call = "".join(f", {axis} = {lengths[axis]}" for axis in axes if axis in lengths)
            of_call += " (as the first memory has it, 1 or more)" if of_call else ""
            raise ValueError(
                f"memory {name!r} of {program.cell_name} must be ({by_head}), or ({shared}) for "
                f"all heads, one for each of {args.sequences} sequences{of_call}; got "
                f"{tuple(memory.shape)}{_of_states(program, axes)}"
            )
        _check(f"memory {name!r}", memory, full, args.gates)


def _of_states(program: Program, axes: Axes) -> str:
    """Return what to do about axes of a memory that a state has too, as the end of a message."""
    states = program.step.axes.states.items()
    fixed = {axis: name for name, of_state in states for axis in of_state if axis in axes}
    fixed = {a: name for a, name in fixed.items() if a not in program.step.axes.of_calls}
    return "".join(
        f". {axis} is the cell's, as its state {name!r} has it: give the cell {axis}=..., and pad "
        "and mask what is shorter"
        for axis, name in fixed.items()
        if axis != VALUES
    )


def check_numbers(args: Arguments) -> None:
    """Check that every step is of one of the call's sequences: kernels look up their states by it.

    Raises ValueError; on CUDA the device asserts.
    """
    if args.seq is not None and args.seq.numel():
        largest = args.seq.max()
        inside = "numbers of sequences must be below {}"
        require(largest < args.sequences, inside, args.sequences, largest)


def saved_size(program: Program, args: Arguments) -> tuple[int, ...]:
    """Return the size of what a forward pass saves behind its states, in the compute dtype:
    pre-activations (B, T, count, D), or the checkpoints of a step that runs on heads."""
    if program.heads is not None:
        return output_sizes(program.heads, args)[1][0]
    batch, steps, channels = args.size
    return batch, steps, program.mixing[args.dtype].num_preactivations, channels


def output_sizes(program: Program, args: Arguments) -> list[TensorSize]:
    """Return sizes and dtypes of what an engine with a backward gives in place of all states.

    Of a matrix cell the output (B, T, H, V), and the states before each step whose number, in the
    order of processing, is a multiple of CHECKPOINT: (B, T/CHECKPOINT, H, values of a head).
    """
    io, heads = args.gates.dtype, args.head_sizes(program)
    if heads is None:
        return [(args.size, io)] * program.num_states
    batch, steps, _ = args.size
    values = sum(map(math.prod, heads.states))
    memory = (batch, (steps + CHECKPOINT - 1) // CHECKPOINT, heads.heads, values)
    return [((batch, steps, *heads.output), io), (memory, args.dtype)]


def check_saved(
    program: Program, args: Arguments, states: Sequence[Tensor], stored: Sequence[TensorSize]
) -> None:
    """Check that the states of a backward pass, and what is stored behind them, are those of a
    forward pass on such gates."""
    sizes = [*output_sizes(program, args), *stored]
    for state, (size, dtype) in zip(states, sizes, strict=True):
        facts = size, dtype, args.gates.device
        if (actual := (state.shape, state.dtype, state.device)) != facts:
            were, are = ("{} {} on {}".format(tuple(s), *o) for s, *o in (facts, actual))
            raise ValueError(
                f"a state saved for the backward pass was {were}, and is {are}: "
                "saved_tensors_hooks must give back what they were given"
            )


def _check(
    what: str,
    tensor: Tensor,
    size: tuple[int, ...],
    gates: Tensor,
    dtype: torch.dtype | None = None,
) -> None:
    """Check a tensor's dtype (a floating-point one where none is named), size and device."""
    fits = tensor.is_floating_point() if dtype is None else tensor.dtype == dtype
    if not fits:
        wanted = "a floating-point tensor" if dtype is None else dtype
        raise TypeError(f"{what} must be {wanted}, got {tensor.dtype}")
    if tuple(tensor.shape) != size:
        raise ValueError(f"{what} must be {size}, got {tuple(tensor.shape)}")
    if tensor.device != gates.device:
        raise ValueError(f"{what} is on {tensor.device}, gates on {gates.device}")
