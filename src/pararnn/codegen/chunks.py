"""Kernels over chunks of steps: the emitted forms of a step that is affine in its states.

A warp holds 16 steps of a tensor: `Row` for one number a step, `Tile` for a vector. The emitted
functions compute the tensors of `AffineForm.gates`, and the gradients of what these read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch

from pararnn.base.errors import EngineError
from pararnn.cells.matrix import Axes
from pararnn.codegen.emit import Body, kind_of
from pararnn.codegen.families import why_no_kernels
from pararnn.codegen.interface import Counts, Field, Interface, Structs, integers
from pararnn.codegen.mixing_cuda import Launchable, shared_bytes_of
from pararnn.codegen.shares import LANES
from pararnn.codegen.source import APPROXIMATE, IO_TYPES, constant_line, file_text
from pararnn.codegen.spelling import MASK, literal, spell
from pararnn.program.affine import AffineForm, Component, Entry, EntryStates, Slot
from pararnn.program.apart import outside_modes
from pararnn.program.entry_cells import program_of_entries
from pararnn.program.program import Program
from pararnn.program.pullback import pull_back
from pararnn.program.statements import Point, Reduce, Statements, Target, Value

CHUNKS = "chunks"
"""Name of the solver and of its headers."""
CHUNK = 16
"""Steps of a chunk: `chunk` of cuda/chunks/fragments.h."""
FORMS = ("keys", "queries", "numbers", "values")
"""Groups of forms: reads, columns and decays for each key, queries, gains and decays that are
numbers, and values."""
PASSES = {"forward": "ForwardLaunch", "reverse": "ReverseLaunch", "gradients": "GradientLaunch"}
"""Kernels: the forward pass, the adjoint of the states, and the gradients of gates; by name, with
the struct of their arguments."""
MAX_CORRECTED = 2
"""Most columns with reads, whose system a warp inverts."""
MAX_AXIS = 128
"""Longest axis of a state."""
MAX_VALUES = MAX_AXIS + CHUNK
"""Most values of states that are solved together."""
PRODUCERS = (
    ((4, 5, 2, 1), (4, 4, 2, 1), (4, 6, 1, 1), (4, 4, 1, 1), (3, 3, 1, 0), (2, 2, 1, 0)),
    ((4, 6, 1, 1), (4, 4, 1, 1), (3, 3, 1, 0), (2, 2, 1, 0)),
)
"""Warps that prepare chunks, chunks in shared memory, blocks at once on a multiprocessor, and
whether gates are copied there first; the first that fits is taken. Of blocks with a head, and of
blocks with some of its values."""
MOST_WARPS = 20
"""Warps of a multiprocessor whose threads have registers enough."""
RESERVED = 1024
"""Bytes of shared memory that a block takes in addition."""
GRADIENT_WARPS = 12
"""Warps of a multiprocessor that compute gradients, by registers."""
COPIED_STATES = 1.5
"""What a warp is worth whose block copies states to shared memory."""


class ChunkVariant(NamedTuple):
    """Specialisation of a kernel: see cuda/chunks/inputs.h.

    group: index in `groups_of`. events: several sequences a row, or resets. pairs: gates of 16 bits
    have even strides and offsets. splits: blocks that divide the values of a head.
    """

    direction: str
    dtype: torch.dtype
    group: int
    events: bool
    pairs: bool
    has_bias: bool
    shared: int
    splits: int = 1
    solver: str = CHUNKS

    @property
    def terms(self) -> int:
        """Number of bfloat16 terms that operands are split into."""
        return terms_of(self.dtype)


@lru_cache(maxsize=1024)
def groups_of(program: Program) -> tuple[tuple[int, ...], ...]:
    """Return the components, by their indices in `AffineForm.components`, that kernels solve
    together: those that differ in values alone are one with more values. A matrix comes first."""
    form, sizes = form_of(program), program.step.head
    groups: list[list[int]] = []

    def joins(group: list[int], vector: Component) -> bool:
        first = form.components[group[0]]
        assert isinstance(first, Component)
        tables = ("side", "decay", "column", "gain", "read")
        width = (sizes.lengths[first.other] if first.other else 1) + len(group)
        return width <= MAX_VALUES and all(
            getattr(first, name) == getattr(vector, name) for name in tables
        )

    components = [(i, c) for i, c in enumerate(form.components) if isinstance(c, Component)]
    for i, component in sorted(components, key=lambda pair: pair[1].other is None):
        group = next((g for g in groups if not component.other and joins(g, component)), None)
        if group is None:
            groups.append([i])
        else:
            group.append(i)
    return tuple(map(tuple, groups))


def form_of(program: Program) -> AffineForm:
    """Return the form of a program that has one."""
    form = program.affine_form()
    assert isinstance(form, AffineForm)
    return form


@lru_cache(maxsize=1024)
def why_no_chunks(program: Program) -> str | None:
    """Return the reason why there are no kernels over chunks for a program, or None."""
    form = program.affine_form()
    if isinstance(form, str):
        return f"its step is not affine in its states: {form}"
    for number, component in enumerate(form.components):
        if isinstance(component, EntryStates):
            why = why_no_kernels(program_of_entries(program, number), "sequential")
            if why is not None:
                return why
    reasons = (_why_no_group(program, number) for number in range(len(groups_of(program))))
    return next((why for why in reasons if why is not None), None)


def _why_no_group(program: Program, number: int) -> str | None:
    """Return the reason why there are no kernels for a group, or None."""
    form, sizes, plan = form_of(program), program.step.head, plan_of(program, number)
    component, name = plan.component, program.cell_name
    states = "/".join(form.names[i] for i in component.states)
    if plan.has_vector_decay and len(component.states) > 1:
        return f"{name} has decays for each {component.side} of several states"
    if not component.column:
        return f"{name} writes nothing into its states ({states})"
    if any(piece.look for piece in plan.pieces):
        return f"{name}'s readout sums a state over {component.other}"
    if not component.query:
        return f"{name}'s readout sums no state over {component.side} ({states})"
    if plan.corrected > MAX_CORRECTED:
        return (
            f"{name} corrects {plan.corrected} columns a step; kernels over chunks take "
            f"{MAX_CORRECTED}"
        )
    for axis in component.axes:
        if sizes.lengths[axis] > MAX_AXIS:
            return f"{name} has {axis} = {sizes.lengths[axis]}; kernels over chunks take {MAX_AXIS}"
    allowed = {(), (component.side,), (component.other,)}
    for statements in gates_of(program, number):
        for value in (*statements.inputs.values(), *statements.values):
            if len(value.axes) > 1:
                return f"{name} computes a tensor with axes {', '.join(value.axes)} of gates alone"
            if value.axes not in allowed:
                return f"{name} computes over {value.axes[0]} what {states} reads"
            if not isinstance(value.definition, (Point, Reduce, type(None))):
                return f"{name} multiplies gates by a matrix"
    return None


def is_plain(program: Program) -> bool:
    """Return True if the readout is one answer as it is."""
    form, groups = form_of(program), groups_of(program)
    if len(form.answers) != 1 or len(groups) > 1 or len(groups[0]) > 1:
        return False
    (_, source), *others = form.readout.writes
    return not others and source is form.readout.inputs.get(("answer", 0))


def _corrected(component: Component) -> list[int]:
    """Return the columns that reads correct."""
    return [c for c, gains in enumerate(component.gain) if any(g != 0.0 for g in gains)]


def _padded(length: int) -> int:
    return -(-length // CHUNK) * CHUNK


@dataclass(frozen=True)
class Plan:
    """A group as kernels see it: its columns with corrected ones first, and sizes.

    component: its first one, with the queries of all. pieces: all of them; each after the first has
    one value.
    """

    component: Component
    pieces: tuple[Component, ...]
    columns: tuple[int, ...]
    corrected: int
    size_keys: int
    size_values: int
    width: int
    is_plain: bool
    has_vector_decay: bool

    @property
    def pure(self) -> int:
        """Number of columns without corrections."""
        return len(self.columns) - self.corrected

    @property
    def keys(self) -> int:
        """Keys, filled up to whole tiles."""
        return _padded(self.size_keys)

    @property
    def values(self) -> int:
        """Values, filled up to whole tiles."""
        return _padded(self.size_values)

    @property
    def blocks(self) -> int:
        """Blocks of 16 values."""
        return self.values // CHUNK


@lru_cache(maxsize=1024)
def plan_of(program: Program, number: int) -> Plan:
    """Return the plan of a group."""
    form, lengths = form_of(program), program.step.head.lengths
    pieces = [form.components[i] for i in groups_of(program)[number]]
    first = pieces[0]
    assert isinstance(first, Component)
    queries = dict.fromkeys(query for piece in pieces for query in piece.query)  # type: ignore[union-attr]
    component = replace(first, query=tuple(queries))
    corrected = _corrected(component)
    others = [c for c in range(len(component.column)) if c not in corrected]
    decays = [entry for row in component.decay for entry in row if isinstance(entry, Slot)]
    return Plan(
        component,
        tuple(pieces),  # type: ignore[arg-type]
        (*corrected, *others),
        len(corrected),
        lengths[component.side],
        (lengths[component.other] if component.other else 1) + len(pieces) - 1,
        program.step.head.width,
        is_plain(program),
        any(slot.axes for slot in decays),
    )


@lru_cache(maxsize=1024)
def gates_of(program: Program, number: int) -> tuple[Statements, Statements]:
    """Return the statements of the slots that a group has, and those of their gradients."""
    form = form_of(program)
    if len(groups_of(program)) == 1:
        return form.gates, form.gates_backward
    plan = plan_of(program, number)
    slots = {entry.number for *_, entry in places_of(plan) if isinstance(entry, Slot)}
    gates = replace(form.gates, writes=[w for w in form.gates.writes if w[0].number in slots])
    gates = gates.only(["form"])
    live = gates.ancestors(gates.results())
    gates.inputs = {key: value for key, value in gates.inputs.items() if value in live}
    return gates, _pulled(program, gates, form.gates_backward.order)


@outside_modes
@torch.no_grad()
def _pulled(program: Program, gates: Statements, order: Axes) -> Statements:
    return pull_back(gates, program.step, order, torch.float32)


@lru_cache(maxsize=1024)
def fields_of(program: Program) -> list[tuple[str, int]]:
    """Return the kinds and numbers of what kernels have float32 tensors of in addition to gates.

    They read states that are solved before others; and they write the gradients of gates to which
    other statements contribute: these may cancel, so that sums are rounded once.
    """
    form, groups = form_of(program), range(len(groups_of(program)))
    backward = [form.readout_backward, *(gates_of(program, group)[1] for group in groups)]
    backward += [c.gates_backward for c in form.components if isinstance(c, EntryStates)]
    written = Counter(
        target.number
        for statements in backward
        for target, _ in statements.writes
        if target.kind == "grad_gate"
    )
    states = [key for key in form.gates.inputs if key[0] in ("state", "new_state")]
    return states + [("gate", number) for number in sorted(written) if written[number] > 1]


def _operand(width: int, terms: int) -> int:
    """Return the bytes of an operand of a width, as in cuda/chunks/words.h."""
    return width // CHUNK * terms * LANES * 16


def _decay_bytes(plan: Plan) -> int:
    """Return the bytes of the decays of a chunk's steps where they differ by key."""
    return len(plan.component.states) ** 2 * CHUNK * plan.keys * 4 * plan.has_vector_decay


def _stage_bytes(plan: Plan, variant: ChunkVariant) -> int:
    """Return the bytes of a chunk in shared memory, as in cuda/chunks/forward.h and reverse.h."""
    component = plan.component
    n, queries, terms = len(component.states), len(component.query), variant.terms
    scales = 2 * CHUNK * 4 * (n == 1 and not plan.has_vector_decay)
    full = n * n * plan.keys * 4 + scales + _decay_bytes(plan)
    vectors = max(len(component.read), plan.corrected) + queries + len(plan.columns)
    width = plan.values // variant.splits
    if variant.direction == "forward":
        couplings = queries * len(plan.columns) * _operand(CHUNK, terms)
        corrected = max(CHUNK * width * 4, _operand(width, terms))
        values = plan.pure * _operand(width, terms) + plan.corrected * corrected
    else:
        couplings = queries * plan.corrected * _operand(CHUNK, terms)
        values = queries * _operand(width, terms)
    return vectors * n * _operand(plan.keys, terms) + couplings + values + full


def _scratch_bytes(plan: Plan, variant: ChunkVariant) -> int:
    """Return the bytes of a warp next to a chunk, as in cuda/chunks/chunk.h."""
    size = CHUNK * plan.corrected
    reads, queries = len(plan.component.read), len(plan.component.query)
    rows = reads + queries if variant.direction == "gradients" else max(reads, queries)
    squares = rows * len(plan.columns) * plan.has_vector_decay
    return max(size * (size + 4) * 4, squares * CHUNK * CHUNK * 4)


def _gate_words(plan: Plan, variant: ChunkVariant) -> int:
    """Return the 4-byte words of a step's gates, or 0 where steps do not begin at words."""
    size = plan.width * variant.dtype.itemsize
    return size // 4 if size % 4 == 0 and (variant.pairs or variant.dtype.itemsize == 4) else 0


def _gate_row_bytes(words: int, variant: ChunkVariant) -> int:
    """Return the bytes of a step's gates in shared memory: cuda/chunks/inputs.h says why."""
    apart = 2 * variant.dtype.itemsize
    return 4 * (words + (apart - words) % LANES) if words else 0


def _chunk_bytes(
    plan: Plan, variant: ChunkVariant, warps: int, copies: bool, gate_words: int
) -> int:
    """Return the bytes of shared memory of a block that computes gradients: chunks/contract.h."""
    component, columns, corrected = plan.component, len(plan.columns), plan.corrected
    n, reads, queries = len(component.states), len(component.read), len(component.query)
    terms, square, row = variant.terms, CHUNK * CHUNK * 4, CHUNK * 4
    operands = (reads + columns + queries) * n * _operand(plan.keys, terms) + _decay_bytes(plan)
    sums = (columns + reads) * _operand(plan.values, terms) + columns * CHUNK * plan.values * 4
    couplings, factors = (reads + queries) * columns, n * n * (not plan.has_vector_decay)
    kept = factors * (2 * square + 4 * row) + couplings * factors * square
    pairs = (corrected * len(plan.columns) + couplings) * _operand(CHUNK, terms)
    squares = max(couplings, (reads + queries + columns) * plan.has_vector_decay)
    shares = warps * (squares * square + (corrected * reads + 4 * factors) * row)
    scratch = _scratch_bytes(plan, variant)
    if scratch <= shares and not plan.has_vector_decay:
        scratch = 0
    answer_terms = 1 if plan.is_plain and variant.dtype == torch.bfloat16 else terms
    answers = queries * _operand(plan.values, answer_terms)
    states = 2 * n * plan.blocks * _operand(plan.keys, terms) * copies
    gates = CHUNK * _gate_row_bytes(gate_words, variant)
    return operands + sums + kept + pairs + shares + scratch + answers + states + gates


class _Block(NamedTuple):
    """Warps of a block that prepare chunks, or all of those that compute gradients; chunks whose
    operands, or states, are in shared memory; its bytes; how many blocks a multiprocessor holds;
    4-byte words of a step's gates, if these are copied there."""

    producers: int
    stages: int
    memory: int
    at_once: int
    gate_words: int


def _gradient_block(plan: Plan, variant: ChunkVariant) -> _Block:
    """Plan a block whose warps share a chunk: many warps a multiprocessor, and few reads of states
    from other memory."""
    blocks, best, most = max(plan.keys, plan.values) // CHUNK, None, 0.0
    all_words = _gate_words(plan, variant)
    for copies, words, warps in product((True, False), (all_words, 0), (8, 4, 2, 1)):
        memory = _chunk_bytes(plan, variant, warps, copies, words)
        at_once = min((variant.shared + RESERVED) // (memory + RESERVED), GRADIENT_WARPS // warps)
        value = at_once * warps * (COPIED_STATES if copies else 1)
        if warps <= blocks and value > most:
            best, most = _Block(warps, int(copies), memory, at_once, words), value
    if best is None:
        raise EngineError(
            f"a chunk's gradients take {memory:,} bytes of shared memory; this GPU has "
            f"{variant.shared:,}. Use shorter axes, or solver='sequential'"
        )
    return best


def _block(plan: Plan, variant: ChunkVariant) -> _Block:
    """Plan a block. Raises EngineError for cells that do not fit."""
    if variant.direction == "gradients":
        return _gradient_block(plan, variant)
    stage = _stage_bytes(plan, variant)
    for producers, stages, at_once, copies in PRODUCERS[variant.splits > 1]:
        words = _gate_words(plan, variant) if copies else 0
        of_producer = _scratch_bytes(plan, variant) + CHUNK * _gate_row_bytes(words, variant)
        memory = stages * (stage + 16) + producers * of_producer + 16
        fits = producers + plan.blocks // variant.splits <= MOST_WARPS // at_once
        if fits and at_once * (memory + RESERVED) <= variant.shared + RESERVED:
            return _Block(producers, stages, memory, at_once, words)
    raise EngineError(
        f"a chunk takes {stage:,} bytes of shared memory; this GPU has {variant.shared:,} for two. "
        "Use shorter axes, or solver='sequential'"
    )


def launchable(program: Program, variant: ChunkVariant) -> Launchable:
    """Return the block and the shared memory of a kernel. Raises EngineError if it does not fit."""
    plan = plan_of(program, variant.group)
    block = _block(plan, variant)
    readers = 0 if variant.direction == "gradients" else plan.blocks // variant.splits
    return Launchable(((block.producers + readers) * LANES, 1), block.memory)


def source_of_chunks(program: Program, variant: ChunkVariant) -> str:
    """Return the CUDA file of a variant. Raises EngineError for ops without a spelling."""
    plan, gates = plan_of(program, variant.group), gates_of(program, variant.group)
    block = _block(plan, variant)
    component, gradients = plan.component, variant.direction == "gradients"
    keys_first = component.axes[0] == component.side
    constants: dict[str, int | tuple[bool, ...]] = {
        "keys": plan.keys,
        "values": plan.values,
        "size_keys": plan.size_keys,
        "size_values": plan.size_values,
        "key_stride": plan.size_values if keys_first else 1,
        "value_stride": 1 if keys_first else plan.size_keys,
        "num_states": len(component.states),
        "num_columns": len(plan.columns),
        "num_corrected": plan.corrected,
        "num_reads": len(component.read),
        "num_queries": len(component.query),
        "vector_decay": plan.has_vector_decay,
        "param_numbers": sum(program.param_numbers),
        "events": variant.events,
        "pairs": variant.pairs,
        "has_bias": variant.has_bias,
        "producers": block.producers,
        "splits": variant.splits,
        "gate_words": block.gate_words,
        "gate_row_bytes": _gate_row_bytes(block.gate_words, variant),
        "stages": block.stages,
        "copies_states": gradients and block.stages > 0,
        "least_blocks": block.at_once,
        "stage_bytes": 0 if gradients else _stage_bytes(plan, variant),
        "block_bytes": block.memory if gradients else 0,
        "threads": launchable(program, variant).block[0],
    }
    answer = IO_TYPES[variant.dtype] if is_plain(program) else "scalar"
    defines = {
        "TERMS": variant.terms,
        "PASS": [*PASSES].index(variant.direction),
        "VECTOR_DECAY": int(plan.has_vector_decay),
        "APPROXIMATE": int(variant.dtype in APPROXIMATE),
        "REFINED": 0,
    }
    lines = [
        f"using answer_io = {answer};",
        *(constant_line(name, value) for name, value in constants.items()),
        "",
        *(_Emission(program, plan, gates[0]).forms(group) for group in FORMS),
        *(
            _Emission(program, plan, gates[1]).gradients(turn, writes)
            for turn, writes in enumerate(_turns(gates[1], block.producers))
            if gradients
        ),
        interface_of_chunks(program, variant.group).declaration(),
    ]
    blocks = [(["functions.h", "chunks/fragments.h"], lines)]
    return file_text(program, variant.dtype, defines, blocks, "chunks/chunks.h")


_STRUCTS: Structs = {
    "Inputs": (
        *integers("length", "heads", "width", "reverse", "gate_row", "gate_time", "gate_head"),
        Field("const io*", "gates"),
        Field("const scalar*", "bias", "(head, number), or null: none"),
        Field("const scalar*", "params", "(head, ...), or of all heads", length="params"),
        Field(
            "const int*", "spans", "(sequence, 4): row, first step, steps, first chunk; null: rows"
        ),
        Field("const bool*", "reset", "(row, time), or null: none"),
        Field("const scalar*", "initial", "(sequence, head, ...), or null: zero", length="states"),
        Field("const scalar*", "fields", "(row, time, head, ...), or null", length="fields"),
    ),
    "ForwardLaunch": (
        Field("Inputs", "in"),
        Field("answer_io*", "answers", "(row, query, time, head, value)"),
        *integers("answer_stride"),
        Field("char*", "memory", "(chunk, head, state, block): operands before chunks, or null"),
        Field("scalar*", "final", "(sequence, head, ...)", length="states"),
        Field("int*", "flags", "(sequence, head): 1 where a number is not finite"),
    ),
    "ReverseLaunch": (
        Field("Inputs", "in"),
        Field("const answer_io*", "grad_answers", "(row, query, time, head, value)"),
        *integers("answer_stride", "answer_row", "answer_time", "answer_head"),
        Field("char*", "memory", "(chunk, head, state, block): operands of adjoints after chunks"),
        Field("const scalar*", "grad_final", "(sequence, head, ...), or null", length="states"),
        Field("scalar*", "grad_initial", "(sequence, head, ...), or null", length="states"),
        Field("int*", "flags"),
    ),
    "GradientLaunch": (
        Field("Inputs", "in"),
        Field("const answer_io*", "grad_answers"),
        *integers("answer_stride", "answer_row", "answer_time", "answer_head", "chunks"),
        Field("const char*", "states", "before chunks, as operands"),
        Field("const char*", "adjoints", "after chunks"),
        *integers("grad_row", "grad_time", "grad_head"),
        Field("io*", "grad_gates"),
        Field("scalar*", "grad_fields", "(row, time, head, ...)", length="fields"),
        Field("scalar*", "partial", "(chunk, head, number): of parameters, sums over a chunk"),
        Field("int*", "flags"),
    ),
}


@lru_cache(maxsize=1024)
def interface_of_chunks(program: Program, number: int) -> Interface:
    """Return the arguments of the kernels of a group."""
    states, fields = len(plan_of(program, number).component.states), len(fields_of(program))
    return Interface(_STRUCTS, Counts(states, len(program.gates), fields, len(program.params)))


Place = tuple[str, str, Axes, tuple[int, int] | None, Entry]
"""Group of forms, field of `Forms`, its axes, its first channel and how many (None: all), and what
fills them."""


def places_of(plan: Plan) -> Iterable[Place]:
    """Yield the places of a group's entries."""
    component, first = plan.component, plan.size_values - len(plan.pieces) + 1
    side = (component.side,)
    other = (component.other or "",)
    decay, group = (side, "keys") if plan.has_vector_decay else ((), "numbers")
    for i, row in enumerate(component.decay):
        for j, entry in enumerate(row):
            yield group, f"f.decay[{i}][{j}]", decay, None, entry
    for c, number in enumerate(plan.columns):
        for i, entry in enumerate(component.column[number]):
            yield "keys", f"f.column[{c}][{i}]", side, None, entry
        if c < plan.corrected:
            for r, entry in enumerate(component.gain[number]):
                yield "numbers", f"f.gain[{c}][{r}]", (), None, entry
        for i, piece in enumerate(plan.pieces):
            channels = (first + i - 1, 1) if i else (0, first)
            yield "values", f"f.value[{c}]", other, channels, piece.value[number]
    for group, name, table in (
        ("keys", "read", component.read),
        ("queries", "query", component.query),
    ):
        for r, row in enumerate(table):
            for i, entry in enumerate(row):
                yield group, f"f.{name}[{r}][{i}]", side, None, entry


Writes = list[tuple[Target, Value | float]]


def _turns(statements: Statements, warps: int) -> list[Writes]:
    """Return the gradients that each warp computes: those that read the same vectors together."""
    groups: list[tuple[set[Value], Writes]] = []
    for target, source in statements.writes:
        live = statements.ancestors([source] if isinstance(source, Value) else [])
        vectors = {value for value in live if value.axes}
        writes: Writes = [(target, source)]
        for other in [group for group in groups if group[0] & vectors]:
            groups.remove(other)
            vectors, writes = vectors | other[0], [*other[1], *writes]
        groups.append((vectors, writes))
    turns: list[Writes] = [[] for _ in range(warps)]
    load = [0] * warps
    for vectors, writes in sorted(groups, key=lambda group: -len(group[0])):
        warp = load.index(min(load))
        load[warp] += len(vectors)
        turns[warp] += writes
    return turns


@dataclass
class _Emission:
    """The C++ of statements of gates: a group of forms, or gradients that are pulled back to gates.
    A function computes what its results need, since compilers keep exchanges between lanes."""

    program: Program
    plan: Plan
    statements: Statements
    body: Body = field(init=False)
    names: dict[Value, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def forms(self, group: str) -> str:
        """Return the function that computes a group of forms."""
        written = {target.number: source for target, source in self.statements.writes}
        places = [
            (place, axes, channels, written[entry.number] if isinstance(entry, Slot) else entry)
            for of, place, axes, channels, entry in places_of(self.plan)
            if of == group
        ]
        self._compute(f"forms of {group}", [source for *_, source in places])
        for place in places:
            self._assign(*place)
        return self._function("class S, class F", f"forms_of_{group}(const S& steps, F& f)")

    def gradients(self, turn: int, writes: Writes) -> str:
        """Return the function that computes a warp's gradients."""
        self._compute("gradients", [source for _, source in writes])
        for target, source in writes:
            self._gradient(target, source)
        head = f"gradients_of(Turn<{turn}>, const S& steps, F& f, G& gradients)"
        return self._function("class S, class F, class G", head)

    def _function(self, types: str, head: str) -> str:
        return "\n".join(
            [f"template <{types}> PARARNN_FUNCTION void {head} {{", *self.lines, "}", ""]
        )

    def _compute(self, name: str, results: Iterable[Value | float]) -> None:
        """Add the statements that results need."""
        self.body = Body(f"{self.program.cell_name}'s {name}")
        live = self.statements.ancestors(x for x in results if isinstance(x, Value))
        for (kind, number), value in self.statements.inputs.items():
            if value in live:
                self._input(kind, number, value)
        for value in self.statements.values:
            if value not in live:
                continue
            if isinstance(value.definition, Reduce):
                self._reduction(value)
            else:
                self._point(value)

    def _type(self, axes: Axes) -> str:
        return f"Tile<{self._width(axes)}>" if axes else "Row"

    def _width(self, axes: Axes) -> str:
        return "keys" if axes == (self.plan.component.side,) else "values"

    def _size(self, axes: Axes) -> int:
        """Return the length of a vector, 1 for a number."""
        return math.prod(self.program.step.head.lengths[axis] for axis in axes)

    def _element(self, value: Value, axes: Axes) -> str:
        """Return a value's element in a loop over a tensor with `axes`."""
        name = self.names[value]
        if not axes:
            return f"{name}[i]"
        return f"{name}[j][e]" if value.axes else f"{name}[e / 2]"

    def _loop(self, axes: Axes, line: str) -> None:
        """Add a line for all elements of a tensor."""
        if not axes:
            self.lines += ["  PARARNN_UNROLL", f"  for (int i = 0; i < 2; ++i) {line}"]
            return
        self.lines.append(f"  all_of<{self._width(axes)}>([&](int j, int e) {{ {line} }});")

    def _input(self, kind: str, number: int, value: Value) -> None:
        name = self.names[value] = f"{kind}_{number}"
        vector = f"vector<{self._width(value.axes)}, {self._size(value.axes)}>"
        if kind == "gate":
            offset = self.program.step.head.gate_offsets[number]
            prefix, place = "", str(offset)
        elif kind == "param":
            kinds = [param.kind for param in self.program.step.cls.params.values()]
            prefix, place = "param_", f"{number}, {str(kinds[number].axes is None).lower()}"
        elif kind in ("state", "new_state"):
            prefix, place = "field_", str(fields_of(self.program).index((kind, number)))
        elif kind == "grad_form":
            self._cotangent(name, number, value.axes)
            return
        else:
            raise EngineError(f"kernels over chunks have no {kind} among their inputs")
        text = f"template {prefix}{vector}" if value.axes else f"{prefix}number"
        self.lines.append(f"  const {self._type(value.axes)} {name} = steps.{text}({place});")

    def _cotangent(self, name: str, number: int, axes: Axes) -> None:
        """Add the gradient of a slot: the sum over the places that it fills."""
        places = [
            (place, place_axes, channels)
            for _, place, place_axes, channels, entry in places_of(self.plan)
            if isinstance(entry, Slot) and entry.number == number
        ]
        same = [place for place, place_axes, _ in places if place_axes == axes]
        self.lines.append(f"  {self._type(axes)} {name};")
        if same:
            at = "[j][e]" if axes else "[i]"
            self._loop(axes, f"{name}{at} = {' + '.join(place + at for place in same)};")
        else:
            self.lines.append(f"  {name}.fill(constant(0));")
        for place, place_axes, channels in places:
            if place_axes == axes:
                continue
            if channels is None or len(self.plan.pieces) == 1:
                self.lines.append(f"  add_sum({place}, {name});")
                continue
            first, last = channels[0], sum(channels)
            channel, piece = "8 * j + lane_column() + e % 2", f"p{len(self.lines)}"
            inside = f"{channel} >= {first} && {channel} < {last}"
            self.lines.append(f"  {self._type(place_axes)} {piece};")
            self._loop(place_axes, f"{piece}[j][e] = {inside} ? {place}[j][e] : constant(0);")
            self.lines.append(f"  add_sum({piece}, {name});")

    def _point(self, value: Value) -> None:
        assert isinstance(value.definition, Point)
        for source in value.definition.values:
            kind, text = kind_of(source), self._element(source, value.axes)
            text = f"truth({text})" if kind == MASK else text
            self.body.values[source.node] = text, kind
        kind, text = self.body.expression(value.node, None)
        name = self.names[value] = f"t{len(self.names)}"
        self.lines.append(f"  {self._type(value.axes)} {name};")
        text = f"number({text})" if kind == MASK else text
        self._loop(value.axes, f"{self._element(value, value.axes)} = {text};")

    def _reduction(self, value: Value) -> None:
        reduction = value.definition
        assert isinstance(reduction, Reduce)
        name = self.names[value] = f"t{len(self.names)}"
        source = reduction.source
        self.lines.append(f"  Row {name};")
        size = self._size(source.axes)
        self.lines.append(f"  reduce_{reduction.op}<{size}>({self.names[source]}, {name});")

    def _text(self, entry: Value | float, axes: Axes) -> str:
        """Return an element of a value or a constant in a loop over `axes`."""
        if not isinstance(entry, Value):
            return literal(float(entry))
        return spell(self._element(entry, axes))

    def _assign(
        self, place: str, axes: Axes, channels: tuple[int, int] | None, source: Value | float
    ) -> None:
        text = self._text(source, axes)
        if not axes:
            self._loop((), f"{place}[i] = {text};")
            return
        first, count = channels or (0, self.plan.size_keys)
        channel = "8 * j + lane_column() + e % 2"
        at, inside = f"{place}[j][e]", f"{self._width(axes)} == {count} || {channel} < {count}"
        line = f"{at} = {inside} ? {text} : constant(0);"
        self._loop(axes, f"if ({channel} == {first}) {at} = {text};" if first else line)

    def _gradient(self, target: Target, source: Value | float) -> None:
        name = f"g{len(self.lines)}"
        self.lines.append(f"  {self._type(target.axes)} {name};")
        self._loop(
            target.axes,
            f"{name}{'[j][e]' if target.axes else '[i]'} = {self._text(source, target.axes)};",
        )
        kind, number = target.kind, target.number
        fields, key = fields_of(self.program), (kind.removeprefix("grad_"), number)
        if key in fields:
            kind, place = "grad_field", fields.index(key)
        elif kind == "grad_gate":
            place = self.program.step.head.gate_offsets[number]
        elif kind == "grad_param":
            place = sum(self.program.param_numbers[:number])
        else:
            raise EngineError(f"kernels over chunks have no {kind} among their results")
        size = self._size(target.axes)
        self.lines.append(f"  gradients.template {kind}<{size}>({name}, {place});")


def splits_of(program: Program, number: int, heads: int, multiprocessors: int) -> int:
    """Return how many blocks divide the values of a head: as many as there is room for beside all
    heads of all sequences."""
    blocks = plan_of(program, number).blocks
    dividing = [n for n in range(1, blocks + 1) if blocks % n == 0]
    return max(n for n in dividing if n == 1 or n * heads <= multiprocessors)


def state_bytes(program: Program, number: int, dtype: torch.dtype) -> int:
    """Return the bytes of a head's states of a group as operands, for gates of a dtype."""
    plan = plan_of(program, number)
    return len(plan.component.states) * plan.blocks * _operand(plan.keys, terms_of(dtype))


def terms_of(dtype: torch.dtype) -> int:
    """Return the terms of operands for gates of a dtype: two keep 16 bits of a number, by which
    errors are about half of the tolerance of float32, or above it where reads nearly cancel."""
    return 3 if dtype == torch.float32 else 2


def chunk_variants(
    program: Program, dtype: torch.dtype, weight_dtype: torch.dtype, capability: tuple[int, int]
) -> list[ChunkVariant]:
    """Return the variants of a layer's training without resets and biases, for all sizes."""
    shared = shared_bytes_of(capability)
    return [
        ChunkVariant(direction, dtype, group, False, True, False, shared)
        for group in range(len(groups_of(program)))
        for direction in PASSES
    ]
