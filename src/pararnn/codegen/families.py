"""Table of the families of kernels, and the structs of their arguments.

Another family needs a line in `FAMILIES`, and headers in a folder of its name (see `headers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, lru_cache

import torch

from pararnn.base.errors import EngineError
from pararnn.base.numerics import compute_dtype
from pararnn.codegen.emit import emit_elementwise, jumps
from pararnn.codegen.family import Family
from pararnn.codegen.interface import Counts, Field, Interface, Structs, integers
from pararnn.codegen.matrix import emit_matrix, memory_tables
from pararnn.codegen.matrix_blocks import emit_block
from pararnn.codegen.stages import emit_mixing
from pararnn.program.program import ELEMENTWISE, MATRIX, MAX_STATES, MIXING, Program

_GATE_STRIDES = integers("row", "time", "gate", "head")
_INPUTS = (
    *integers("rows", "length"),
    Field("GateStrides", "gate_strides"),
    Field("int64", "field_row", "a stride", length="fields"),
    Field("int64", "field_time", "a stride", length="fields"),
    Field("const io*", "gates"),
    Field("const weight_io*", "bias", "(gate, channel), or null: none"),
    Field("const int*", "seq", "(row, time), or null: row b is sequence b"),
    Field("const bool*", "reset", "(row, time), or null: none"),
    Field("const scalar*", "fields", length="fields"),
    Field("const weight_io*", "params", "(channel)", length="params"),
    Field("const scalar*", "initial", "(sequence, channel), or null: zero", length="states"),
)
_FORWARD = (
    Field("Inputs", "in"),
    Field("io*", "states", "(row, time, channel)", length="states"),
    Field("scalar*", "final", "(sequence, channel)", length="states"),
)
_BACKWARD = (
    Field("Inputs", "in"),
    Field("int64", "grad_row", "a stride", length="states"),
    Field("int64", "grad_time", "a stride", length="states"),
    Field("const io*", "states", "(row, time, channel)", length="states"),
    Field("const io*", "grad_states", "incoming, or null: none", length="states"),
    Field("const scalar*", "grad_final", "incoming, or null: none", length="states"),
    Field("io*", "grad_gates"),
    Field("scalar*", "grad_fields", "(row, time, channel), or null: not wanted", length="fields"),
    Field("scalar*", "grad_initial", "(sequence, channel), or null: not wanted", length="states"),
    Field("scalar*", "partial", "(row and span, weight, channel): sums over time"),
)
_SPLIT = (
    Field("int64", "segments", "how many"),
    Field("int64", "size", "steps of one"),
    Field("int64", "burn_in", "steps of the guess"),
)
_PASSES: Mapping[str, Structs] = {
    "cpp": {
        "GateStrides": _GATE_STRIDES,
        "Inputs": (
            *_INPUTS,
            Field("int64", "field_channel", "0: one value for all channels", length="fields"),
            *integers("heads", "channels", "reverse", "threads"),
            Field("void*", "openmp", "see parallel.h"),
        ),
        "ForwardProblem": _FORWARD,
        "BackwardProblem": (
            *_BACKWARD,
            Field("GateStrides", "grad_gate_strides"),
            Field("scalar*", "grad_weights", "(channel)", length="weights"),
        ),
    },
    "cuda": {
        "GateStrides": _GATE_STRIDES,
        "Inputs": _INPUTS,
        "ForwardProblem": (*_FORWARD, Field("int64*", "info", "(slot, 2): sweeps, unfit tiles")),
        "BackwardProblem": _BACKWARD,  # grad_gates: in the strides of the gates
        "SumProblem": (
            Field("int64", "rows", "times segments"),
            Field("const scalar*", "partial", "(row and segment, weight, channel)"),
            Field("weight_io*", "bias", "(gate, channel), or null"),
            Field("weight_io*", "params", length="params"),
        ),
    },
}
_SEGMENTS: Mapping[str, Structs] = {
    "cpp": {
        "ShootingWords": (
            *_SPLIT,
            Field("scalar*", "starts", "(row, segment, state, channel)"),
            Field("scalar*", "ends", "(row, segment, state, channel)"),
            Field("scalar*", "sizes", "(row, segment, state, channel)"),
            Field("scalar*", "products", "(row, segment, entry, channel); zero at first"),
            Field("int64*", "info", "sweeps, unfit tiles"),
        )
    },
    "cuda": {
        "Counters": (  # zero at first; clusters need none
            Field("Word*", "arrived", "(row, tile): arrivals; times 2^32, of unfit segments"),
            Field("Word*", "ends", "(row, tile, segment, ends_words): flagged numbers"),
            Field("unsigned*", "furthest", "(row, tile, round % 2): bits of a distance"),
        ),
        "Shooting": (
            *_SPLIT,
            Field("Word*", "board", "(row, tile, segment, board_words): flagged numbers"),
            Field("scalar*", "found", "(row, tile, segment, found_numbers, lane): segment results"),
            Field("Counters", "counters", "see sync_grid.h"),
        ),
    },
}


@cache
def _elementwise_structs(target: str, solver: str) -> Structs:
    segments = _SEGMENTS[target] if solver == "newton" else {}
    shooting = tuple(Field(name, "shooting") for name in list(segments)[-1:])
    launches = {
        f"{direction}Launch": (Field(f"{direction}Problem", "pass"), *shooting)
        for direction in ("Forward", "Backward")
    }
    return {**_PASSES[target], **segments, **launches}


def _elementwise_constants(program: Program, dtype: torch.dtype, target: str) -> list[str]:
    return [f"constexpr bool jumps = {str(jumps(program, dtype)).lower()};"]


def _why_too_many_states(program: Program) -> str | None:
    if program.num_states > MAX_STATES:
        return f"{program.cell_name} has {program.num_states} states; kernels take {MAX_STATES}"
    return None


_ELEMENTWISE = Family(
    ELEMENTWISE,
    "elementwise steps",
    ("sequential", "newton"),
    _why_too_many_states,
    lambda program, dtype, target: emit_elementwise(program, compute_dtype(dtype)),
    _elementwise_constants,
    _elementwise_structs,
)


_SUMS = Field("const scalar*", "sums", "(row, time, sum, channel)")
_NEW_SUMS = Field("scalar*", "sums", "(row, time, sum, channel), or null: not wanted")
_PACKED = Field("const unsigned*", "packed", "see products.h")


def _vectors(kind: str, axes: str) -> tuple[Field, ...]:
    return tuple(Field(kind, side, f"{axes}, or null: not wanted") for side in ("left", "right"))


_MIXING_STRUCTS: Mapping[str, Structs] = {
    "cpp": {
        **_PASSES["cpp"],
        "ForwardProblem": (
            *_FORWARD,
            _NEW_SUMS,
            Field("int64", "given", "1: states are read, not written"),
            Field("int64", "inputs", "of a head; 0: gates are given"),
            *integers("x_row", "x_time", "x_head", "weight_gate", "weight_head"),
            Field("const scalar*", "x", "inputs"),
            Field("const scalar*", "weight", "rows of inputs, adjacent for the channels of a head"),
        ),
        "BackwardProblem": (
            *_PASSES["cpp"]["BackwardProblem"],
            _SUMS,
            *_vectors("scalar*", "(vector, head, row, time, channel of the head)"),
        ),
        **{f"{name}Launch": (Field(f"{name}Problem", "pass"),) for name in ("Forward", "Backward")},
    },
    "cuda": {
        "GateStrides": _GATE_STRIDES,
        "Inputs": _INPUTS,
        "ForwardProblem": (*_FORWARD, _NEW_SUMS, _PACKED),
        "BackwardProblem": (
            *_BACKWARD,
            _SUMS,
            Field("GateStrides", "grad_gate_strides"),
            _PACKED,
            *_vectors("vector_io*", "(head, row, time, vector, channel of the head)"),
        ),
        "PackProblem": (
            Field("const weight_io*", "params", length="params"),
            Field("unsigned*", "packed"),
        ),
        "SumProblem": _PASSES["cuda"]["SumProblem"],
    },
}
_MIXING = Family(
    MIXING,
    "steps that mix channels inside heads",
    ("sequential",),
    _why_too_many_states,
    lambda program, dtype, target: emit_mixing(program, compute_dtype(dtype)),
    lambda program, dtype, target: ["struct Product { int operand, matrix, transposed; };"],
    lambda target, solver: _MIXING_STRUCTS[target],
)
MATRIX_INPUTS = (
    *integers("rows", "length", "heads", "reverse"),
    *integers("gate_row", "gate_time", "gate_head"),
    Field("const io*", "gates"),
    Field("const scalar*", "bias", "(head, number), or null: none"),
    Field("const int*", "seq", "(row, time), or null: row b is sequence b"),
    Field("const bool*", "reset", "(row, time), or null: none"),
    Field("const scalar*", "params", "(head, ...), or of all heads", length="params"),
    Field("const scalar*", "initial", "(sequence, head, ...), or null: zero", length="states"),
)
"""Fields of what all passes of matrix cells read, apart from memories."""
MATRIX_GRADIENTS = (
    *integers("output_row", "output_time", "output_head"),
    Field("const io*", "grad_output", "incoming, or null: none"),
    Field("const scalar*", "grad_final", "incoming, or null: none", length="states"),
    *integers("grad_row", "grad_time", "grad_head"),
    Field("io*", "grad_gates"),
    Field("scalar*", "grad_initial", "(sequence, head, ...), or null", length="states"),
)
"""Fields of incoming gradients and of the results of all their backward passes."""
_MATRIX_STRUCTS: Structs = {
    "ForwardLaunch": (
        Field("Inputs", "in"),
        Field("io*", "output", "(row, time, head, value)"),
        Field("scalar*", "memory", "(row, chunk, head, numbers of all states)"),
        Field("scalar*", "final", "(sequence, head, ...)", length="states"),
    ),
    "BackwardLaunch": (
        Field("Inputs", "in"),
        Field("const scalar*", "memory", "as the forward pass wrote it"),
        *MATRIX_GRADIENTS,
        Field(
            "scalar*",
            "partial",
            "(group of rows or row and copy, head, numbers of gates, then of params): sums over "
            "time, zero at first",
        ),
    ),
}
_MATRIX_STRUCTS_OF: Mapping[str, Structs] = {
    "cpp": {
        "Inputs": (
            *MATRIX_INPUTS,
            Field("const scalar*", "memories", "(sequence, head, ...)", length="memories"),
            Field("int64", "memory_lengths", "of axes that only they have", length="lengths"),
            *integers("threads"),
            Field("void*", "openmp", "see parallel.h"),
        ),
        **_MATRIX_STRUCTS,
        "BackwardLaunch": (
            *_MATRIX_STRUCTS["BackwardLaunch"],
            *integers("groups"),
            Field("scalar*", "grad_memories", "(sequence, head, ...)", length="memories"),
        ),
    },
    "cuda": {
        "Inputs": (
            *MATRIX_INPUTS,
            Field("const int*", "flags", "(row, head): those to run are not 0; null: all"),
        ),
        **_MATRIX_STRUCTS,
        "BackwardLaunch": (
            *_MATRIX_STRUCTS["BackwardLaunch"],
            Field("scalar*", "trajectory", "(block, step, word, thread): states of a chunk"),
            Field("int64", "copies", "of a row's sums: one for each warp"),
        ),
    },
}


def _emit_matrix(program: Program, dtype: torch.dtype, target: str) -> str:
    if target == "cpp":
        return emit_matrix(program, compute_dtype(dtype))
    return "\n".join(emit_block(program, dtype, way).text for way in ("forward", "backward"))


_MATRIX = Family(
    MATRIX,
    "steps whose entries couple inside heads",
    ("sequential",),
    lambda program: None,
    _emit_matrix,
    lambda program, dtype, target: memory_tables(program) if target == "cpp" else [],
    lambda target, solver: _MATRIX_STRUCTS_OF[target],
    header="matrix/loops.h",
)
FAMILIES: Mapping[str | None, Family] = {
    family.name: family for family in (_ELEMENTWISE, _MIXING, _MATRIX)
}
"""Families by name."""


def family_of(program: Program, solver: str | None = None) -> Family:
    """Return the family whose kernels run the step of a program by a solver (None: by any). Raises
    EngineError if `why_no_kernels` has a reason."""
    reason = why_no_kernels(program, solver)
    if reason is not None:
        raise EngineError(f"no code can be generated: {reason}")
    return FAMILIES[program.of_kernels.family]


def why_no_kernels(program: Program, solver: str | None = None) -> str | None:
    """Return the reason why no kernels can be generated for a cell, or None. `solver`: None for
    any."""
    program = program.of_kernels
    family = FAMILIES.get(program.family)
    if family is None:
        if program.why_no_family is not None:
            return program.why_no_family
        return f"{program.cell_name} is sequential-only: {program.why_sequential}"
    reason = family.why_not(program)
    if reason is None and solver not in (None, *family.solvers):
        return f"{program.cell_name}: the solver {solver!r} has no kernels for {family.steps}"
    return reason


@lru_cache(maxsize=4096)
def interface_of(program: Program, target: str, solver: str) -> Interface:
    """Return the interface of a program's kernels."""
    kinds = (program.states, program.gates, program.fields, program.params, program.memory)
    lengths = program.step.axes.of_calls if program.memory else ()
    structs = family_of(program, solver).structs(target, solver)
    return Interface(structs, Counts(*map(len, (*kinds, lengths))))
