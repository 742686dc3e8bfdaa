"""`solve`: checks the arguments, chooses an engine and runs it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pararnn.base import private
from pararnn.base.errors import EngineError
from pararnn.base.function import Source
from pararnn.base.numerics import check_io_dtype, compute_dtype, without_autocast
from pararnn.base.tensors import ArrayLike, as_states, check_tensor
from pararnn.cells.base import Cell, call_cell
from pararnn.engines import tuned
from pararnn.engines.arguments import Arguments, Options, Solution, checked_options
from pararnn.engines.engine import Engine
from pararnn.engines.fit import check_fit
from pararnn.engines.fused.layout import heads_of_matrices
from pararnn.engines.request import pair_of_call, split_of_context
from pararnn.engines.split import NO_REQUEST, SplitRequest
from pararnn.engines.table import Choice, choose
from pararnn.op import apply_engine
from pararnn.program.program import Program, program_of
from pararnn.ranks.engine import engine_of
from pararnn.sequences import Sequences, sequences_of

Fields = Mapping[str, Any]
"""A cell's fields by name: tensors or numbers."""

Memory = Mapping[str, Tensor]
"""A cell's memories by name."""

NUMBERS = (int, float, np.number, torch.SymInt, torch.SymFloat)
"""Types of a field that is the same at all steps."""


def solve(
    cell: Cell,
    gates: Tensor,
    initial_state: Tensor | Sequence[Tensor] | None = None,
    *,
    fields: Mapping[str, Tensor | float] | None = None,
    memory: Memory | None = None,
    reset: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    reverse: bool = False,
    solver: str = "auto",
    backend: str = "auto",
    on_failure: str = "warn",
) -> tuple[Any, Any]:
    """Run a cell over whole sequences: all states and the final ones.

    Args:
        cell: the recurrence, D channels and N states.
        gates: pre-activations B x + b, (B, T, G, D) or with heads (B, T, G, H, D/H), of dtype
            float32, float64, bfloat16 or float16. Of a matrix cell (B, T, H, W), the gates of each
            head one after the other.
        initial_state: (B, D) a state (a tuple of N for several), any float dtype; None is zero.
            With `cu_seqlens`, (S, D). Of a matrix cell (B, H, K, V), or as its state's axes are.
        fields: the cell's fields by name, each (B, T), (B, T, D) or a number.
        memory: the cell's memories by name, such as (B, H, K, V), or (B, K, V) shared by the heads;
            with `cu_seqlens`, one for each sequence in place of B. Those that are no floating-point
            tensors, such as masks, become numbers of the compute dtype.
        reset: bool (B, T); such a step starts from the zero state. A tensor, list or NumPy array,
            as cu_seqlens may be.
        cu_seqlens: int (S + 1,), the starts of S sequences packed into one row (B = 1) and the end
            of the last; steps beyond it are padding: state and gradient 0.
        reverse: run from the last step to the first.
        solver, backend: a pair of the engine table; "auto" defers to `using`, then to the rule.
        on_failure: "warn" finishes an unconverged parallel solve sequentially, with a warning;
            "raise" raises ConvergenceError.

    Returns:
        (states, final): states (B, T, D) in the gates' dtype, final (B, D) or (S, D) in float32
        (float64 for float64); for several states, tuples of them. Layers apply the
        cell's readout, `solve` does not. Of a matrix cell (output, final), with the readout
        (B, T, H, V) and final states like initial ones.

    Raises:
        TypeError, ValueError: wrong dtypes, ranks, sizes or devices, named.
        EngineError: the pair cannot run this cell here. CellError, StructureError: the step.
    """
    program = program_of(cell)
    args = prepare(
        cell,
        one_gate(cell, gates),
        initial_state,
        fields=fields,
        memory=memory,
        reset=reset,
        cu_seqlens=cu_seqlens,
        reverse=reverse,
        on_failure=on_failure,
    )
    states, final, _, _ = run(program, args, *pair_of_call(solver, backend))
    if not cell.keeps_states:
        states = states[:1]
    return tuple([some[0] if len(some) == 1 else some for some in (states, final)])  # type: ignore[return-value]


def one_gate(cell: Cell, gates: Tensor) -> Tensor:
    """Return gates (B, T, H, W) of a matrix cell as one gate, (B, T, 1, H, W); others as they are.

    Raises ValueError for gates of a matrix cell of another size.
    """
    sizes = cell.head_sizes
    if not sizes:
        return gates
    check_tensor("gates", gates)
    if tuple(gates.shape[2:]) != (sizes.heads, sizes.width) or gates.ndim != 4:
        parts = zip(type(cell).gates, sizes.gates, strict=True)
        order = ", ".join(f"{name} {math.prod(size)}" for name, size in parts)
        raise ValueError(
            f"gates of {type(cell).__name__} must be (B, T, {sizes.heads}, {sizes.width}), for "
            f"each head one after the other {order}, got {tuple(gates.shape)}"
        )
    return gates.unsqueeze(2)


class Solved(NamedTuple):
    """States (B, T, D) and final states (S, D), one of each a state; the counts (see
    `pararnn.engines.arguments.totals`); and the choice of the engine."""

    states: tuple[Tensor, ...]
    final: tuple[Tensor, ...]
    info: Tensor
    choice: Choice


def run(program: Program, args: Arguments, solver: str, backend: str) -> Solved:
    """Run a call by the engine for a request, with the split that the context requests."""
    plan = plan_solve(program, args, solver, backend)
    return Solved(*plan.run(program, args), plan.choice)


class SolvePlan(NamedTuple):
    """The engine of a call, and its choice, with the split that the context requests."""

    choice: Choice
    engine: Engine

    def run(self, program: Program, args: Arguments, source: Source | None = None) -> Solution:
        """Run the call, see `run_engine`."""
        if self.choice.split_request != NO_REQUEST:
            segments, burn_in = self.choice.split_request
            args = args.with_options(segments=segments, burn_in=burn_in)
        return run_engine(program, self.engine, args, source)


def plan_solve(program: Program, args: Arguments, solver: str, backend: str) -> SolvePlan:
    """Check that a call's tensors fit each other, and return its plan.

    Checks and choice are cached for calls with the same signature.
    """
    request = (program, solver, backend, split_of_context())
    if torch.compiler.is_compiling():
        return _choose(args, *request)
    # A choice depends on these in addition to the call's signature and the request.
    key = (*request, torch.get_num_threads(), tuned.records(program.key))
    return args.signature.cache(key, _choose, args, *request)


def _choose(
    args: Arguments, program: Program, solver: str, backend: str, split: SplitRequest
) -> SolvePlan:
    """Choose the engine of a call, if its tensors fit each other.

    An export to ONNX gets the loop, the only engine for which ONNX has an operator.
    """
    check_fit(program, args)
    if exports_to_onnx():
        solver, backend = "sequential", "torch"
    workload = (program.workload_size(args.size), args.gates.dtype, args.gates.device)
    heads = heads_of_matrices(args.params) or 1
    choice = choose(program, *workload, solver, backend, heads).with_split(split)
    # No property: the compiler of PyTorch 2.9 does not look into those of a NamedTuple.
    engine = engine_of(program, choice.solver, choice.backend, args)
    assert engine is not None
    return SolvePlan(choice, engine)


def exports_to_onnx() -> bool:
    """Return True where torch.onnx.export captures a program.

    Raises EngineError for its ways that cannot hold a loop of any length.
    """
    if private.exporting_to_onnx():
        if torch.compiler.is_dynamo_compiling():
            raise EngineError(
                "torch.onnx.export holds a loop by torch.export(strict=False) only, which has "
                "failed before: call that to see why"
            )
        return True
    if torch.compiler.is_compiling() or not private.get_tracing_state():
        return False
    if torch.onnx.is_in_onnx_export():
        raise EngineError(
            "torch.onnx.export(dynamo=False) would write out a loop of the example's length: call "
            "it with dynamo=True"
        )
    return False


def run_engine(
    program: Program, engine: Engine, args: Arguments, source: Source | None = None
) -> Solution:
    """Run a call by an engine, differentiably. An engine with a backward saves a `source` of the
    gates in their place."""
    if engine.has_backward:
        return apply_engine(program, engine, args, source)
    # The solver's precision is the contract's, whatever the caller's autocast region says.
    with without_autocast(args.gates.device):
        return engine.forward(program, args.complete(program))


def prepare(
    cell: Cell,
    gates: Tensor,
    initial_state: Tensor | Sequence[Tensor] | None = None,
    *,
    bias: Tensor | None = None,
    fields: Fields | None = None,
    memory: Memory | None = None,
    reset: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    **options: Any,
) -> Arguments:
    """Return the record of a call of `solve`, or with a bias (G, D) of a layer; see `Options`."""
    check_gates(cell, gates)
    sequences = sequences_of(gates, reset, cu_seqlens)
    inputs = SolveInputs(initial_state, sequences, checked_options(**options), fields, memory)
    return arguments_of(cell, gates, inputs, bias)


class SolveInputs(NamedTuple):
    """Inputs of a call in addition to its gates, and its options."""

    initial: Tensor | Sequence[Tensor] | None
    sequences: Sequences
    options: Options
    fields: Fields | None = None
    memory: Memory | None = None


def arguments_of(
    cell: Cell,
    gates: Tensor,
    inputs: SolveInputs,
    bias: Tensor | None = None,
    params: tuple[Tensor, ...] | None = None,
) -> Arguments:
    """Return the record of a call; gates have passed `check_gates`.

    params: the cell's as a program takes them, None for its own. Errors as `solve`, except for the
    checks of `run`: that parameters and initial states fit the gates.
    """
    initial, sequences, options, fields, memory = inputs
    params = call_cell(cell) if params is None else params
    return Arguments(
        gates=gates,
        bias=bias,
        fields=_fields(cell, gates, by_name(fields)),
        params=params + memory_of(cell, gates, {} if memory is None else memory),
        initial=() if initial is None else initial_of(cell, initial),
        sequences=sequences.total,
        seq=sequences.seq,
        reset=sequences.reset,
        options=options,
    )


def by_name(fields: Fields | None) -> Fields:
    """Return a call's fields, {} for None. Raises TypeError for what is no mapping."""
    if fields is None or isinstance(fields, Mapping):
        return fields or {}
    raise TypeError(
        "fields must be given by name, such as {'dt': gaps}, got " + type(fields).__name__
    )


def check_gates(cell: Cell, gates: Tensor) -> None:
    """Raise TypeError for gates of another dtype than a solve has, ValueError for another size."""
    check_tensor("gates", gates)
    check_io_dtype(gates.dtype, "gates")
    count, channels = cell.num_gates, cell.gate_channels
    size = tuple(gates.shape)
    if size[2:] == (count, channels):
        return
    if len(size) != 5 or size[2] != count or size[3] * size[4] != channels:
        wanted = f"(B, T, {count}, {channels}) or (B, T, {count}, H, {channels}/H)"
        raise ValueError(f"gates of {type(cell).__name__} must be {wanted}, got {size}")


def _fields(cell: Cell, gates: Tensor, fields: Fields) -> tuple[Tensor, ...]:
    if not fields and not cell.fields:
        return ()
    if set(fields) != set(cell.fields):
        raise ValueError(
            f"{type(cell).__name__} takes the fields {list(cell.fields)}, got {sorted(fields)}"
        )
    size = (*gates.shape[:2], cell.hidden_size)
    return tuple(_field(name, fields[name], gates, size) for name in cell.fields)


def memory_of(cell: Cell, gates: Tensor, memory: Memory) -> tuple[Tensor, ...]:
    """Return a cell's memories in order, (S, H, ...) each for S sequences, of those by name, which
    heads may share: (S, ...). Errors as `solve`, except for sizes: see `check_fit`."""
    name, heads, is_mapping = type(cell).__name__, cell.head_sizes, isinstance(memory, Mapping)
    if is_mapping and not memory and not type(cell).memory:
        return ()
    if not is_mapping or {*memory} != {*cell.memory}:
        got = sorted(memory) if is_mapping else type(memory).__name__
        raise ValueError(f"{name} takes the memory {list(cell.memory)}, by name, got {got}")
    assert heads is not None
    memories = []
    for key, axes in zip(cell.memory, heads.memory, strict=True):
        value = memory[key]
        check_tensor(f"memory {key!r}", value)
        if not value.is_floating_point():
            value = value.to(compute_dtype(gates.dtype))
        if value.ndim == len(axes) + 1:
            value = value.unsqueeze(1)
            value = value.expand(-1, heads.heads, *value.shape[2:])
        memories.append(value)
    return tuple(memories)


def _field(name: str, value: Tensor | float, gates: Tensor, size: tuple[int, ...]) -> Tensor:
    # Numbers and integers become the compute dtype, unrounded, as a float32 tensor would.
    wide = compute_dtype(gates.dtype)
    if isinstance(value, NUMBERS):
        return gates.new_full((), float(value), dtype=wide).expand(size)
    check_tensor(f"field {name!r}", value)
    if value.device != gates.device:
        raise ValueError(f"field {name!r} is on {value.device}, gates on {gates.device}")
    if not value.is_floating_point():
        value = value.to(wide)
    full = value.unsqueeze(-1) if value.ndim == 2 else value
    if value.ndim == 0:
        return value.expand(size)
    if tuple(full.shape) not in (size, (*size[:2], 1)):
        raise ValueError(
            f"field {name!r} must be {size[:2]} or {size} (or a number), got {tuple(value.shape)}"
        )
    return full.expand(size)


def initial_of(cell: Cell, initial: Tensor | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return a cell's initial states as a tuple. ValueError for another number of them, TypeError
    for what are no tensors."""
    names = cell.states
    states = tuple(initial) if isinstance(initial, (tuple, list)) else (initial,)
    if len(states) != len(names):
        raise ValueError(
            f"initial_state of {type(cell).__name__} must hold {len(names)} tensor(s), one for "
            f"each of {tuple(names)}, got {len(states)}"
        )
    for name, state in zip(names, states, strict=True):
        if not isinstance(state, Tensor):  # the message takes a microsecond
            as_states(f"initial state {name!r}", initial)
    return states
