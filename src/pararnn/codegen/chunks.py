"""Kernels over chunks of steps: the emitted forms of a step that is affine in its states.

A warp holds 16 steps of a tensor: `Row` for one number a step, `Tile` for a vector. The emitted
functions compute the tensors of `AffineForm.gates`, and the gradients of what these read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch

from pararnn.base.errors import EngineError
from pararnn.cells.matrix import Axes
from pararnn.codegen.emit import Body
from pararnn.codegen.interface import Counts, Field, Interface, Structs
from pararnn.codegen.mixing_cuda import Launchable
from pararnn.codegen.shares import LANES
from pararnn.codegen.source import IO_TYPES, constant_line
from pararnn.codegen.spelling import MASK, REAL, literal, spell
from pararnn.program.affine import AffineForm, Component, Entry, EntryStates, Slot
from pararnn.program.program import Program
from pararnn.program.statements import Point, Reduce, Statements, Target, Value

CHUNKS = "chunks"
"""Name of the solver and of its headers."""
CHUNK = 16
"""Steps of a chunk: `chunk` of cuda/chunks/fragments.h."""
FORMS = ("keys", "queries", "numbers", "values")
"""Groups of forms: reads, columns and decays for each key, queries, gains and decays that are
numbers, and values."""
PASSES = ("forward", "reverse", "gradients")
"""Kernels: the forward pass, the adjoint of the states, and the gradients of gates."""
MAX_CORRECTED = 2
"""Most columns with reads, whose system a warp inverts."""
MAX_AXIS = 128
"""Longest axis of a state."""
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

    component: index in `AffineForm.components`. events: several sequences a row, or resets. pairs:
    gates of 16 bits have even strides and offsets. plain: the answer is the output. terms: bfloat16
    terms that operands are split into. splits: blocks that divide the values of a head.
    """

    direction: str
    dtype: torch.dtype
    component: int
    events: bool
    pairs: bool
    plain: bool
    has_bias: bool
    shared: int
    terms: int = 2
    splits: int = 1
    solver: str = CHUNKS


def components_of(form: AffineForm) -> list[Component]:
    """Return the components that chunks solve."""
    return [c for c in form.components if isinstance(c, Component)]


def why_no_chunks(program: Program, form: AffineForm) -> str | None:
    """Return the reason why there are no kernels over chunks for a form, or None."""
    sizes = program.head_sizes
    assert sizes is not None
    name = program.cell_name
    if any(isinstance(component, EntryStates) for component in form.components):
        return f"{name} has states that are solved by entries before others"
    if len(form.components) > 1:
        groups = ("/".join(form.names[i] for i in c.states) for c in form.components)
        return f"{name} has states that are solved apart, {' and '.join(groups)}"
    for component in components_of(form):
        vectors = any(isinstance(d, Slot) and d.axes for row in component.decay for d in row)
        if vectors and len(component.states) > 1:
            return f"{name} has decays for each {component.side} of several states"
        if not component.column:
            return f"{name} writes nothing into its states"
        if component.look:
            return f"{name}'s readout sums a state over {component.other}"
        if not component.query:
            return f"{name}'s readout sums no state over {component.side}"
        if len(_corrected(component)) > MAX_CORRECTED:
            return (
                f"{name} corrects {len(_corrected(component))} columns a step; kernels over chunks "
                f"take {MAX_CORRECTED}"
            )
        for axis in component.axes:
            if sizes.lengths[axis] > MAX_AXIS:
                length = sizes.lengths[axis]
                return f"{name} has {axis} = {length}; kernels over chunks take {MAX_AXIS}"
    values = [v for s in (form.gates, form.gates_backward) for v in s.values]
    for value in values:
        if len(value.axes) > 1:
            return f"{name} computes a tensor with axes {', '.join(value.axes)} of gates alone"
        if not isinstance(value.definition, (Point, Reduce)):
            return f"{name} multiplies gates by a matrix"
    return None


def is_plain(form: AffineForm) -> bool:
    """Return True if the readout is one answer as it is."""
    if len(form.answers) != 1:
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
    """A component as kernels see it: its columns with corrected ones first, and sizes."""

    component: Component
    columns: tuple[int, ...]
    corrected: int
    size_keys: int
    size_values: int
    width: int
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
    """Return the plan of a component."""
    form, sizes = program.affine_form(), program.head_sizes
    assert isinstance(form, AffineForm)
    assert sizes is not None
    component = form.components[number]
    assert isinstance(component, Component)
    corrected = _corrected(component)
    others = [c for c in range(len(component.column)) if c not in corrected]
    decays = [entry for row in component.decay for entry in row if isinstance(entry, Slot)]
    return Plan(
        component,
        (*corrected, *others),
        len(corrected),
        sizes.lengths[component.side],
        1 if component.other is None else sizes.lengths[component.other],
        sizes.width,
        any(slot.axes for slot in decays),
    )


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
    is_short = variant.plain and variant.dtype == torch.bfloat16
    answers = queries * _operand(plan.values, 1 if is_short else terms)
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
    plan = plan_of(program, variant.component)
    block = _block(plan, variant)
    readers = 0 if variant.direction == "gradients" else plan.blocks // variant.splits
    return Launchable(((block.producers + readers) * LANES, 1), block.memory)


def source_of_chunks(program: Program, variant: ChunkVariant) -> str:
    """Return the CUDA file of a variant. Raises EngineError for ops without a spelling."""
    form, plan = program.affine_form(), plan_of(program, variant.component)
    assert isinstance(form, AffineForm)
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
        "param_numbers": sum(param_numbers(program)),
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
    answer = IO_TYPES[variant.dtype] if variant.plain else "scalar"
    lines = [
        f"// {program.cell_name}",
        f"#define PARARNN_IO {IO_TYPES[variant.dtype]}",
        "#define PARARNN_WIDE 0",
        f"#define PARARNN_TERMS {variant.terms}",
        f"#define PARARNN_PASS {PASSES.index(variant.direction)}",
        f"#define PARARNN_VECTOR_DECAY {int(plan.has_vector_decay)}",
        f"#define PARARNN_APPROXIMATE {int(variant.dtype == torch.bfloat16)}",
        "#define PARARNN_REFINED 0",
        '#include "functions.h"',
        '#include "chunks/fragments.h"',
        "",
        "namespace pararnn {",
        "",
        f"using answer_io = {answer};",
        *(constant_line(name, value) for name, value in constants.items()),
        "",
        *(_Emission(program, plan, form.gates).forms(group) for group in FORMS),
        *(
            _Emission(program, plan, form.gates_backward).gradients(turn, writes)
            for turn, writes in enumerate(_turns(form.gates_backward, block.producers))
            if gradients
        ),
        interface_of_chunks(program, variant.component).declaration(),
        "}  // namespace pararnn",
        "",
        '#include "chunks/chunks.h"',
        "",
    ]
    return "\n".join(lines)


def _sizes(*names: str) -> tuple[Field, ...]:
    return tuple(Field("int64", name) for name in names)


_STRUCTS: Structs = {
    "Inputs": (
        *_sizes("length", "heads", "width", "reverse", "gate_row", "gate_time", "gate_head"),
        Field("const io*", "gates"),
        Field("const scalar*", "bias", "(head, number), or null: none"),
        Field("const scalar*", "params", "(head, ...), or of all heads", length="params"),
        Field(
            "const int*", "spans", "(sequence, 4): row, first step, steps, first chunk; null: rows"
        ),
        Field("const bool*", "reset", "(row, time), or null: none"),
        Field("const scalar*", "initial", "(sequence, head, ...), or null: zero", length="states"),
    ),
    "ForwardLaunch": (
        Field("Inputs", "in"),
        Field("answer_io*", "answers", "(query, row, time, head, value)"),
        *_sizes("answer_stride"),
        Field("char*", "memory", "(chunk, head, state, block): operands before chunks, or null"),
        Field("scalar*", "final", "(sequence, head, ...)", length="states"),
        Field("int*", "flags", "(sequence, head): 1 where a number is not finite"),
    ),
    "ReverseLaunch": (
        Field("Inputs", "in"),
        Field("const answer_io*", "grad_answers", "(query, row, time, head, value)"),
        *_sizes("answer_stride", "answer_row", "answer_time", "answer_head"),
        Field("char*", "memory", "(chunk, head, state, block): operands of adjoints after chunks"),
        Field("const scalar*", "grad_final", "(sequence, head, ...), or null", length="states"),
        Field("scalar*", "grad_initial", "(sequence, head, ...), or null", length="states"),
        Field("int*", "flags"),
    ),
    "GradientLaunch": (
        Field("Inputs", "in"),
        Field("const answer_io*", "grad_answers"),
        *_sizes("answer_stride", "answer_row", "answer_time", "answer_head", "chunks"),
        Field("const char*", "states", "before chunks, as operands"),
        Field("const char*", "adjoints", "after chunks"),
        *_sizes("grad_row", "grad_time", "grad_head"),
        Field("io*", "grad_gates"),
        Field("scalar*", "partial", "(chunk, head, number): of parameters, sums over a chunk"),
        Field("int*", "flags"),
    ),
}


@lru_cache(maxsize=1024)
def interface_of_chunks(program: Program, number: int) -> Interface:
    """Return the arguments of the kernels of a component."""
    states = len(plan_of(program, number).component.states)
    counts = Counts(states, len(program.gates), 0, len(program.params))
    return Interface(_STRUCTS, counts)


def param_numbers(program: Program) -> list[int]:
    """Return the number of values of a head of each parameter."""
    sizes = program.head_sizes
    assert sizes is not None
    kinds = [param.kind.axes or () for param in program.step.cls.params.values()]
    return [math.prod(sizes.lengths[axis] for axis in axes) for axes in kinds]


def gate_offsets(program: Program) -> list[int]:
    """Return where each gate begins among the numbers of a head."""
    sizes = program.head_sizes
    assert sizes is not None
    counts = [math.prod(size) for size in sizes.gates]
    return [sum(counts[:number]) for number in range(len(counts))]


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
            (place, axes, written[entry.number] if isinstance(entry, Slot) else entry)
            for of, place, axes, entry in self._places()
            if of == group
        ]
        self._compute(f"forms of {group}", [source for _, _, source in places])
        for place, axes, source in places:
            self._assign(place, axes, source)
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
        if kind == "gate":
            offset = gate_offsets(self.program)[number]
            if value.axes:
                width = self._width(value.axes)
                text = f"steps.template vector<{width}, size_{width}>({offset})"
            else:
                text = f"steps.number({offset})"
        elif kind == "param":
            kinds = [param.kind for param in self.program.step.cls.params.values()]
            shared = str(kinds[number].axes is None).lower()
            if value.axes:
                width = self._width(value.axes)
                text = f"steps.template param_vector<{width}, size_{width}>({number}, {shared})"
            else:
                text = f"steps.param_number({number}, {shared})"
        elif kind == "grad_form":
            self._cotangent(name, number, value.axes)
            return
        else:
            raise EngineError(f"kernels over chunks have no {kind} among their inputs")
        self.lines.append(f"  const {self._type(value.axes)} {name} = {text};")

    def _cotangent(self, name: str, number: int, axes: Axes) -> None:
        """Add the gradient of a slot: the sum over the places that it fills."""
        places = [
            (p, a) for _, p, a, e in self._places() if isinstance(e, Slot) and e.number == number
        ]
        same = [place for place, place_axes in places if place_axes == axes]
        self.lines.append(f"  {self._type(axes)} {name};")
        if same:
            at = "[j][e]" if axes else "[i]"
            self._loop(axes, f"{name}{at} = {' + '.join(place + at for place in same)};")
        else:
            self.lines.append(f"  {name}.fill(constant(0));")
        self.lines += [f"  add_sum({place}, {name});" for place, a in places if a != axes]

    def _places(self) -> Iterable[tuple[str, str, Axes, Entry]]:
        """Yield the group of a field of `Forms`, the field, its axes, and the entry that fills
        it."""
        plan, component = self.plan, self.plan.component
        side = (component.side,)
        other = () if component.other is None else (component.other,)
        decay = side if plan.has_vector_decay else ()
        group = "keys" if plan.has_vector_decay else "numbers"
        for i, row in enumerate(component.decay):
            for j, entry in enumerate(row):
                yield group, f"f.decay[{i}][{j}]", decay, entry
        for c, number in enumerate(plan.columns):
            for i, entry in enumerate(component.column[number]):
                yield "keys", f"f.column[{c}][{i}]", side, entry
            if c < plan.corrected:
                for r, entry in enumerate(component.gain[number]):
                    yield "numbers", f"f.gain[{c}][{r}]", (), entry
            yield "values", f"f.value[{c}]", other or ("",), component.value[number]
        for group, name, table in (
            ("keys", "read", component.read),
            ("queries", "query", component.query),
        ):
            for r, row in enumerate(table):
                for i, entry in enumerate(row):
                    yield group, f"f.{name}[{r}][{i}]", side, entry

    def _point(self, value: Value) -> None:
        assert isinstance(value.definition, Point)
        for source in value.definition.values:
            is_mask = source.node.meta["dtype"] == torch.bool
            text = self._element(source, value.axes)
            self.body.values[source.node] = (f"truth({text})" if is_mask else text,
                                             MASK if is_mask else REAL)  # fmt: skip
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
        size = f"size_{self._width(source.axes)}"
        self.lines.append(f"  reduce_{reduction.op}<{size}>({self.names[source]}, {name});")

    def _text(self, entry: Value | float, axes: Axes) -> str:
        """Return an element of a value or a constant in a loop over `axes`."""
        if not isinstance(entry, Value):
            return literal(float(entry))
        return spell(self._element(entry, axes))

    def _assign(self, place: str, axes: Axes, source: Value | float) -> None:
        if not axes:
            self._loop((), f"{place}[i] = {self._text(source, ())};")
            return
        of_keys = axes == (self.plan.component.side,)
        width, size = ("keys", "size_keys") if of_keys else ("values", "size_values")
        text = self._text(source, axes)
        inside = f"8 * j + lane_column() + e % 2 < {size}"
        line = f"{place}[j][e] = {width} == {size} || {inside} ? {text} : constant(0);"
        self.lines.append(f"  all_of<{width}>([&](int j, int e) {{ {line} }});")

    def _gradient(self, target: Target, source: Value | float) -> None:
        name = f"g{len(self.lines)}"
        self.lines.append(f"  {self._type(target.axes)} {name};")
        self._loop(
            target.axes,
            f"{name}{'[j][e]' if target.axes else '[i]'} = {self._text(source, target.axes)};",
        )
        if target.kind == "grad_gate":
            place = gate_offsets(self.program)[target.number]
        elif target.kind == "grad_param":
            place = sum(param_numbers(self.program)[: target.number])
        else:
            raise EngineError(f"kernels over chunks have no {target.kind} among their results")
        size = f"size_{self._width(target.axes)}" if target.axes else "1"
        self.lines.append(f"  gradients.template {target.kind}<{size}>({name}, {place});")


def splits_of(program: Program, number: int, heads: int, multiprocessors: int) -> int:
    """Return how many blocks divide the values of a head: as many as there is room for beside all
    heads of all sequences."""
    blocks = plan_of(program, number).blocks
    dividing = [n for n in range(1, blocks + 1) if blocks % n == 0]
    return max(n for n in dividing if n == 1 or n * heads <= multiprocessors)


def state_bytes(program: Program, number: int, terms: int) -> int:
    """Return the bytes of a head's states as operands."""
    plan = plan_of(program, number)
    return len(plan.component.states) * plan.blocks * _operand(plan.keys, terms)


def terms_of(dtype: torch.dtype) -> int:
    """Return the terms of operands for gates of a dtype: two keep 16 bits of a number, by which
    errors are about half of the tolerance of float32, or above it where reads nearly cancel."""
    return 3 if dtype == torch.float32 else 2


def component_of(form: AffineForm) -> int:
    """Return the index of the component that chunks solve."""
    (number,) = [i for i, c in enumerate(form.components) if isinstance(c, Component)]
    return number


def chunk_variants(
    program: Program, dtype: torch.dtype, has_bias: bool, shared: int
) -> list[ChunkVariant]:
    """Return the variants of a layer's training without resets, for all sizes."""
    form = program.affine_form()
    assert isinstance(form, AffineForm)
    common = (component_of(form), False, True, is_plain(form), has_bias, shared, terms_of(dtype))
    return [ChunkVariant(direction, dtype, *common) for direction in PASSES]
