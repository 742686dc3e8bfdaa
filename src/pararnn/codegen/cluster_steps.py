"""Emitted CUDA of steps that clusters run: a struct with the registers of a thread, and stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from pararnn.base.errors import EngineError
from pararnn.cells.matrix import Axes
from pararnn.codegen.cluster_layout import (
    ROWS,
    TILE,
    ClusterVariant,
    Layout,
    arrays_of,
    has_lines,
    lengths_in,
    line_sums_of,
    local_results,
    operand_bytes,
    saved_offsets,
    share_of,
    state_axes,
    steps_of,
    stream_offsets,
    sums_stride,
    tiles_of_result,
)
from pararnn.codegen.emit import Body, NestText
from pararnn.codegen.spelling import MASK, REAL
from pararnn.program.links import IN_ARRAYS, KEPT, Lengths, Link, Sink, Steps
from pararnn.program.matrix import axes_by_kind
from pararnn.program.program import Program
from pararnn.program.statements import (
    Index,
    Reduce,
    Rename,
    Select,
    Slide,
    Value,
    axis_of_alias,
    distinct,
)

POINTERS = {
    "gate": "gates",
    "state": "saved",
    KEPT: "saved",
    "grad_output": "grad_output",
}
"""Pointers to the inputs of a step."""
WRITTEN = {
    "forward": ("gates", "output"),
    "saving": ("gates", "output", "saved"),
    "backward": ("gates", "grad_gates", "streams", "saved", "grad_output"),
}
"""Pointers to what a pass reads and writes in a step."""
IDENTITY = {"sum": "0", "max": "-INFINITY", "min": "INFINITY"}
"""Initial value of a reduction."""


def emit_matrix_entry(program: Program, layout: Layout) -> str:
    """Return the function of a matrix's number, by its tile among those of a block."""
    lines = [
        "PARARNN_FUNCTION real matrix_entry(const PackProblem& p, int64 head, int slice,",
        "                                   int number, int row, int column) {",
    ]
    sizes, kinds = program.step.head, [*program.step.cls.params.values()]
    for matrix in layout.matrices.values():
        size = sizes.param(kinds[matrix.param].kind)[1:]
        strides = [math.prod(size[axis + 1 :]) for axis in matrix.order]
        lengths = [size[axis] for axis in matrix.order]
        first, second = matrix.groups, matrix.groups + matrix.results
        shared, result, source = slice(0, first), slice(first, second), slice(second, None)
        count, blocks = f"(number - {matrix.first})", matrix.block_tiles
        if matrix.scatters:
            place = [
                f"const int group = 0, to = {count} / {blocks};",
                f"const int from = slice * {blocks} + {count} % {blocks};",
            ]
        else:
            own = f"(slice * {blocks} + {count} / {matrix.in_tiles})"
            place = [
                f"const int group = {own} / {matrix.out_tiles}, to = {own} % {matrix.out_tiles};",
                f"const int from = {count} % {matrix.in_tiles};",
            ]
        groups = math.prod(lengths[shared])
        rows, columns = (share_of(lengths[axes], 1).text for axes in (result, source))
        offset = " + ".join([
            f"head * {math.prod(size)}",
            *_offsets("group", lengths[shared], strides[shared]),
            *_offsets("x", lengths[result], strides[result]),
            *_offsets("y", lengths[source], strides[source]),
        ])  # fmt: skip
        lines += [
            f"  if (number < {matrix.first + matrix.tiles}) {{",
            *(f"    {line}" for line in place),
            f"    const int x = {rows}::flat(to * tile + row);",
            f"    const int y = {columns}::flat(from * tile + column);",
            f"    if (group >= {groups} || x < 0 || y < 0) return constant(0);",
            f"    return widen(p.params[{matrix.param}][{offset}]);",
            "  }",
        ]
    return "\n".join([*lines, "  return constant(0);", "}", ""])


def _offsets(index: str, lengths: Sequence[int], strides: Sequence[int]) -> list[str]:
    """Return the terms of the place of an entry, whose index runs over some axes."""
    terms = []
    for i, (length, stride) in enumerate(zip(lengths, strides, strict=True)):
        inner = math.prod(lengths[i + 1 :])
        terms.append(f"{index} / {inner} % {length} * {stride}")
    return terms


def emit_steps(program: Program, variant: ClusterVariant, layout: Layout) -> str:
    """Emit the struct of a pass. Raises EngineError for ops without a spelling."""
    return _Emission(program, variant, layout).text()


@dataclass
class _Emission:
    """The C++ of a pass: a struct with the registers of a thread, and functions of a step.

    begins: the warp with which the next product of a stage and kind begins.
    """

    program: Program
    variant: ClusterVariant
    layout: Layout
    lines: list[str] = field(default_factory=list)
    begins: dict[tuple[int, str], int] = field(default_factory=dict)

    @cached_property
    def steps(self) -> Steps:
        """The pass."""
        return steps_of(self.program, self.variant)

    @property
    def is_backward(self) -> bool:
        """True for a backward pass."""
        return self.variant.direction == "backward"

    @cached_property
    def names(self) -> dict[Axes, str]:
        """Names of the types of shares."""
        return {axes: f"Share{i}" for i, axes in enumerate(self.layout.shares)}

    @cached_property
    def kinds(self) -> dict[Value, tuple[str, int]]:
        """Kinds and numbers of inputs."""
        return {value: key for key, value in self.steps.statements.inputs.items()}

    @cached_property
    def leaves(self) -> dict[Value, Link]:
        """Links by their results."""
        kinds = ("spread", "array")
        return {link.value: link for link in self.steps.links if link.kind not in kinds}

    @cached_property
    def arrays(self) -> dict[object, int]:
        """Where values begin in memory that all blocks read."""
        return arrays_of(self.program, self.variant)

    @cached_property
    def array_names(self) -> dict[object, str]:
        """Names of the pointers to values in memory."""
        names = {}
        for i, key in enumerate(key for key in self.arrays if key != ""):
            names[key] = f"{key[0]}_{key[1]}" if isinstance(key, tuple) else f"array_{i}"
        return names

    def _array(self, value: Value) -> str:
        """Return the pointer to a value in memory."""
        kind, number = self.kinds.get(value, ("", 0))
        is_state = kind == self.state_kind and self._has_lines(value.axes)
        return self.array_names[("state", number) if is_state else value]

    def _in_array(self, value: Value, flat: str) -> str:
        """Return a number in memory: rows of lines lie next to each other, others behind."""
        if self._has_lines(value.axes):
            return f"{self._array(value)}[{flat} * cluster_rows + e.row]"
        numbers = math.prod(self.lengths[axis] for axis in value.axes)
        return f"{self._array(value)}[e.row * {numbers} + {flat}]"

    @cached_property
    def state_kind(self) -> str:
        """Kind of the inputs that steps hand on."""
        return "grad_new_state" if self.is_backward else "state"

    @cached_property
    def fed(self) -> dict[Axes, list[tuple[str, int]]]:
        """Inputs that are loaded a step ahead, by their axes."""
        kinds = ("gate", "state", KEPT, "grad_output") if self.is_backward else ("gate",)
        fed: dict[Axes, list[tuple[str, int]]] = {}
        for (kind, number), value in self.steps.statements.inputs.items():
            local = value.axes in self.names and not self._has_lines(value.axes)
            if kind in kinds and local and self._reads(value, value.axes):
                fed.setdefault(value.axes, []).append((kind, number))
        return fed

    @cached_property
    def constants(self) -> dict[Axes, list[int]]:
        """Parameters whose numbers threads hold, by their axes."""
        params: dict[Axes, list[int]] = {}
        for number, value in self.steps.statements.inputs_of("param").items():
            if self._reads(value, value.axes):
                params.setdefault(value.axes, []).append(number)
        return params

    def _has_lines(self, axes: Axes) -> bool:
        return has_lines(self.program, axes)

    def _reads(self, value: Value, axes: Axes) -> bool:
        return axes in self.steps.readers.get(value, ())

    @cached_property
    def states(self) -> list[Axes]:
        """Axes of the states."""
        return state_axes(self.program)

    @cached_property
    def of_callers(self) -> dict[str, list[Axes]]:
        """Axes of tensors in the order of the caller's memory, by kind."""
        by_kind = axes_by_kind(self.program.step)
        return {kind: [*map(distinct, tensors)] for kind, tensors in by_kind.items()}

    def _length(self, axis: str) -> str:
        """Return the length of an axis in a call."""
        of_calls, base = self.program.step.axes.of_calls, axis_of_alias(axis)
        if base in of_calls:
            return f"place.lines({of_calls.index(base)})"
        return str(self.lengths[base])

    def _entry_at(self, axes: Axes, index: Callable[[str], str]) -> str:
        """Return the place of an entry in a caller's tensor, of which `index` has the indices."""
        terms = []
        for i, axis in enumerate(axes):
            terms.append(" * ".join([f"({index(axis)})", *self._factors(axes[i + 1 :])]))
        return f"({' + '.join(terms) or '0'})"

    def _flat(self, kind: str, number: int, loop: Axes, flat: str = "e.flat") -> str:
        """Return the place of a loop's entry in a caller's tensor that has the same axes."""
        axes = self.of_callers[kind][number]
        if axes == loop and {*map(axis_of_alias, axes[1:])}.isdisjoint(
            self.program.step.axes.of_calls
        ):
            return flat
        place = self._entry_at(axes, lambda axis: self.index(loop, axis))
        return place if flat == "e.flat" else f"(e.fills ? 0 : {place})"

    def index(self, loop: Axes, axis: str) -> str:
        """Return the index of an entry along an axis of a loop."""
        place = loop.index(axis)
        if place == len(loop) - 1:
            return "e.inner"
        inner = math.prod(self.lengths[a] for a in loop[place + 1 : -1])
        text = "e.outer" if inner == 1 else f"e.outer / {inner}"
        return text if place == 0 else f"({text}) % {self.lengths[axis]}"

    def share(self, axes: Axes) -> str:
        """Return the type of a share."""
        return self.names[axes]

    def text(self) -> str:
        """Return the struct, and the types of shares."""
        for axes, share in self.layout.shares.items():
            name = self.names[axes]
            if not share.line:
                self.lines.append(f"using {name} = {share.text};  // {', '.join(axes)}")
                continue
            self.lines += [
                f"struct {name} : {share.text} {{  // {', '.join(axes)}",
                "  PARARNN_FUNCTION static bool inside(const Place& place, int flat) {",
                f"    return {self._inside(axes)};",
                "  }",
                "};",
            ]
        self.lines += ["", "struct Steps {"]
        self._registers()
        self._constructor()
        self._load()
        self._start()
        self._run()
        self._finish()
        self.lines += ["};", ""]
        return "\n".join(self.lines)

    def _inside(self, axes: Axes) -> str:
        """Return whether a call has an entry of what has lines."""
        checks = []
        for i, axis in enumerate(axes):
            stride, end = math.prod(self.lengths[a] for a in axes[i + 1 :]), self._length(axis)
            if i == 0:
                checks.append(f"flat < {end} * {stride}")
            elif not end.isdigit():
                checks.append(f"flat / {stride} % {self.lengths[axis]} < {end}")
        return " && ".join(checks)

    def _loop(self, axes: Axes, body: Iterable[str], indent: str = "    ") -> None:
        share = self.share(axes)
        each = "each_entry_of_lines" if self._has_lines(axes) else "each_entry"
        self.lines.append(f"{indent}{each}<{share}>(place, [&](int k, const Entry<{share}>& e) {{")
        self.lines += [f"{indent}  {line}" for line in body]
        self.lines.append(f"{indent}}});")

    def _registers(self) -> None:
        fields = [
            f"    {{}} {kind}_{number}[{self.share(axes)}::count];"
            for axes, keys in self.fed.items()
            for kind, number in keys
        ]
        in_memory = [text.format("io" if " gate_" in text or "grad_output" in text else "scalar")
                     for text in fields]  # fmt: skip
        self.lines += ["  struct Ahead {", *in_memory, "  };", "  struct Inputs {",
                       *(text.format("real") for text in fields), "  };", "  const Problem& p;",
                       "  const Place& place;", "  char* const memory;",
                       "  Boxes boxes;", "  const unsigned *matrices, *held;",
                       "  Ahead ahead;", "  Inputs now;"]  # fmt: skip
        for i, axes in enumerate(self.states):
            count = f"[{self.share(axes)}::count]"
            if not self._has_lines(axes):
                self.lines.append(f"  real state_{i}{count}, next_{i}{count};")
        self.lines += [f"  scalar* {name};" for name in self.array_names.values()]
        for axes, numbers in self.constants.items():
            for number in numbers:
                self.lines.append(f"  real param_{number}[{self.share(axes)}::count];")
        for axes, keys in self.fed.items():
            for kind, number in keys:
                if kind == "gate":
                    self.lines.append(f"  real bias_{number}[{self.share(axes)}::count];")
        for name, axes, _ in self.sums:
            self.lines.append(f"  real {name}[{self.share(axes)}::count];")
        for i, link in enumerate(self.steps.links):
            if self._in_registers(link):
                axes = link.sources[0].axes if link.whole else link.value.axes
                self.lines.append(f"  real leaf_{i}[{self.share(axes)}::count];")

    @cached_property
    def sums(self) -> list[tuple[str, Axes, str]]:
        """Sums over steps: names, axes, and where an entry is among a row's."""
        sizes, sums = self.program.step.head, []
        for sink in self.steps.sinks:
            kind, number = (sink.target.kind, sink.target.number) if sink.target else ("", 0)
            if kind == "grad_gate":
                start = f"{sizes.gate_offsets[number]} + {self._flat('gate', number, sink.axes)}"
                sums.append((f"sum_gate_{number}", sink.axes, start))
            if kind == "grad_param":
                first = sizes.width + sum(self.program.param_numbers[:number])
                start = f"{first} + {self._flat('param', number, sink.axes)}"
                sums.append((f"sum_param_{number}", sink.axes, start))
        return [*dict.fromkeys(sums)]

    def _in_registers(self, link: Link) -> bool:
        if self._in_row(link):
            return True
        is_read = self._reads(link.value, link.value.axes)
        others = ("lines", *IN_ARRAYS)
        if link.kind == "fold":
            return not self._has_lines(link.value.axes)
        return not link.whole and (is_read or link.kind != "gather") and link.kind not in others

    def _in_row(self, link: Link) -> bool:
        return link in self.layout.in_rows

    def _constructor(self) -> None:
        self.lines += [
            "",
            "  PARARNN_FUNCTION Steps(const Problem& p, const Place& place, char* memory)",
            "      : p(p), place(place), memory(memory), boxes(memory + boxes_at),",
            "        matrices(matrices_of(p.packed, place)),",
            "        held(hold_matrices(matrices, memory)) {",
        ]
        for key, name in self.array_names.items():
            at = f"place.unit * array_numbers + {self.arrays[key]}"
            self.lines.append(f"    {name} = p.arrays + {at};")
        sizes = self.program.step.head
        for axes, numbers in self.constants.items():
            body = [
                f"param_{n}[k] = e.there ? widen(p.in.params[{n}][{self._param_at(n)} + "
                f"{self._flat('param', n, axes)}]) : constant(0);"
                for n in numbers
            ]
            self._loop(axes, body)
        for axes, keys in self.fed.items():
            offsets = [(n, sizes.gate_offsets[n]) for kind, n in keys if kind == "gate"]
            body = [
                f"bias_{n}[k] = e.there && p.in.bias != nullptr ? "
                f"widen(p.in.bias[place.head * {sizes.width} + {at} + "
                f"{self._flat('gate', n, axes)}]) : constant(-0.0);"
                for n, at in offsets
            ]
            if body:
                self._loop(axes, body)
        self.lines.append("  }")

    def _param_at(self, number: int) -> str:
        """Return where a parameter of the head begins."""
        kind = [*self.program.step.cls.params.values()][number].kind
        size = self.program.param_numbers[number]
        return "0" if kind.axes is None else f"place.head * {size}"

    def _pointers(self, row: str) -> dict[str, tuple[str, str]]:
        """Return the types of pointers to the numbers of a row, step l and a head, and where these
        begin."""
        step, numbers = f"place.step_of({row}, l)", self.program.step.head.output[1]

        def strided(name: str) -> str:
            terms = (row, "row"), ("place.time(l)", "time"), ("place.head", "head")
            return " + ".join(f"{index} * p.{name}_{of}" for index, of in terms)

        return {
            "gates": ("const io*", f"p.in.gates + {strided('in.gate')}"),
            "saved": (
                "const scalar*" if self.is_backward else "scalar*",
                f"p.saved + {step} * saved_numbers",
            ),
            "output": ("io*", f"p.output + {step} * {numbers}"),
            "streams": ("stream_io*", f"p.streams + {step} * stream_parts * stream_numbers"),
            "grad_gates": ("io*", f"p.grad_gates + {strided('grad')}"),
            "grad_output": ("const io*", f"p.grad_output + {strided('output')}"),
        }

    def _point(self, names: Iterable[str]) -> None:
        """Add pointers for the thread's row and step l: without branches they are computed once."""
        pointers = self._pointers("place.input_row")
        for name in names:
            kind, at = pointers[name]
            self.lines.append(f"    {kind} const {name} = {at};")

    def _pointer(self, name: str, axes: Axes) -> str:
        """Return the pointer to the numbers of a step, in a loop over axes."""
        if not self._has_lines(axes):
            return name
        return f"({self._pointers('(place.first_row + e.row)')[name][1]})"

    def _load(self) -> None:
        self.lines += ["", "  PARARNN_FUNCTION void load(int l) {"]
        kinds = {kind for keys in self.fed.values() for kind, _ in keys}
        self._point(dict.fromkeys(POINTERS[kind] for kind in POINTERS if kind in kinds))
        for axes, keys in self.fed.items():
            body = []
            for kind, n in keys:
                exists = "if (p.grad_output != nullptr) " if kind == "grad_output" else ""
                body += [f"ahead.{kind}_{n}[k] = {{}};"] if exists else []
                index = "e.index"  # of what passes keep, in the order of values
                if kind in ("gate", "grad_output"):
                    index = self._flat(kind.removeprefix("grad_"), n, axes, index)
                body.append(f"{exists}ahead.{kind}_{n}[k] = {self._at(kind, n, axes, index)};")
            self._loop(axes, body)
        self.lines.append("  }")

    def _at(self, kind: str, number: int, axes: Axes, index: str) -> str:
        """Return an input's number in memory, at step l, in a loop over axes."""
        sizes = self.program.step.head
        if kind == "param":
            return f"p.in.params[{number}][{self._param_at(number)} + {index}]"
        if kind == "memory":
            return f"p.in.memories[{number}][{self._memory_at(number, 'e.row')} + {index}]"
        if kind == "gate":
            offset = sizes.gate_offsets[number]
        elif kind == "grad_output":
            offset = sum(map(math.prod, sizes.outputs[:number]))
        else:
            offset = self.saved[kind, number]
        return f"{self._pointer(POINTERS[kind], axes)}[{offset} + {index}]"

    def _memory_at(self, number: int, row: str) -> str:
        """Return where a memory of a row's sequence and this head begins."""
        size = self._size(self.of_callers["memory"][number])
        return f"place.at_sequence(place.sequence({row}, l), {size})"

    @cached_property
    def lengths(self) -> Lengths:
        """Lengths of axes."""
        return lengths_in(self.program, self.variant.lines)

    @cached_property
    def saved(self) -> dict[tuple[str, int], int]:
        """Where states and kept values begin among those of a step and head."""
        return saved_offsets(self.program, self.variant.dtype, self.variant.lines)

    def _start(self) -> None:
        final = "grad_final" if self.is_backward else "in.initial"
        self.lines += ["", "  PARARNN_FUNCTION void start(int l) {"]
        for name, axes, _ in self.sums:
            self._loop(axes, [f"{name}[k] = constant(0);"])
        for i, axes in enumerate(self.states):
            size, name = self._size(axes), self._state(i)
            source = f"p.{final}[{i}]"
            self._loop(axes, [
                f"{name} = constant(0);",
                f"if (!events && e.there && {source} != nullptr)",
                f"  {name} = {source}[place.at_sequence(place.first_row + e.row, {size}) + "
                f"{self._flat('state', i, axes)}];",
            ])  # fmt: skip
        self.lines += ["    load(l);", "    __syncthreads();", "    meet_slices();", "  }"]

    def _size(self, axes: Axes) -> str:
        """Return how many numbers a tensor of a head has."""
        return " * ".join(self._factors(axes)) or "1"

    def _factors(self, axes: Axes) -> list[str]:
        """Return what the lengths of axes in a call are a product of, known ones as one number."""
        lengths = [self._length(axis) for axis in axes]
        fixed = math.prod(int(n) for n in lengths if n.isdigit())
        return [n for n in lengths if not n.isdigit()] + ([str(fixed)] if fixed > 1 else [])

    def _state(self, number: int, name: str = "state") -> str:
        """Return the number of a state, in a loop over its axes."""
        has_lines = self._has_lines(self.states[number])
        return f"{name}_{number}[{'e.flat * cluster_rows + e.row' if has_lines else 'k'}]"

    def _begin(self) -> list[tuple[Axes, list[str]]]:
        """Return loops that begin a step: the state that it starts from, which a forward pass
        saves, or the adjoint after it."""
        loops: list[tuple[Axes, list[str]]] = []
        offsets = self.saved
        for i, axes in enumerate(self.states):
            size, name = self._size(axes), self._state(i)
            source = f"p.{'grad_final' if self.is_backward else 'in.initial'}[{i}]"
            if self.is_backward:
                conditions = [f"if (place.ends(e.row, l)) {name} = {{}};"]
            else:
                conditions = [
                    f"if (place.is_reset(e.row, l)) {name} = constant(0);",
                    f"else if (place.begins(e.row, l)) {name} = {{}};",
                ]
            at = f"place.at_sequence(place.sequence(e.row, l), {size}) + "
            at += self._flat("state", i, axes)
            value = f"{source} == nullptr ? constant(0) : {source}[{at}]"
            lines = [
                "if (events && e.there) {",
                f"  if (place.is_padding(e.row, l)) {name} = constant(0);",
                *(
                    f"  else {line}".replace("else else", "else").format(value)
                    for line in conditions
                ),
                "}",
            ]
            if self.variant.direction == "saving":
                lines.append(
                    f"if (e.there) {self._pointer('saved', axes)}[{offsets['state', i]} + e.flat]"
                    f" = {name};"
                )
            loops.append((axes, lines))
        return loops

    def _run(self) -> None:
        self.lines += [
            "",
            "  PARARNN_FUNCTION void run(int l, int l_ahead) {",
        ]
        self._point(WRITTEN[self.variant.direction])
        for axes, keys in self.fed.items():
            body = [
                f"now.{kind}_{n}[k] = widen(ahead.{kind}_{n}[k])"
                f"{f' + bias_{n}[k]' if kind == 'gate' else ''};"
                for kind, n in keys
            ]
            self._loop(axes, body)
        for axes, lines in self._begin():
            self._loop(axes, lines)
        if self.array_names:  # others read states, and no longer the arrays of the step before
            self.lines.append("    meet_slices();")
        for stage in range(self.steps.stages + 1):
            self.lines.append(f"    // stage {stage}")
            links = [link for link in self.steps.links if link.stage == stage]
            if stage > 0:
                self._arrive(stage, links)
            sinks = [sink for sink in self.steps.sinks if sink.stage == stage]
            self._open_rows(stage + 1)
            for axes in dict.fromkeys(sink.axes for sink in sinks):
                self._sinks(axes, [sink for sink in sinks if sink.axes == axes])
            leaving = [link for link in self.steps.links if link.stage == stage + 1]
            self._leave(stage + 1, leaving)
            if stage == 0:
                self.lines.append("    load(l_ahead);")
        self._add_lines()
        self._end()
        self.lines.append("  }")

    def _add_lines(self) -> None:
        """Add the sums over lines for gradients of parameters."""
        offsets = line_sums_of(self.program, self.variant)
        for (_, lhs, rhs), offset in zip(self.steps.line_outers, offsets, strict=False):
            axis = lhs.axes[0]
            sizes = [self.lengths[axis] // self.variant.slices]
            sizes += [self.lengths[value.axes[1]] for value in (lhs, rhs)]
            sums = "p.line_sums + (place.unit * slices + place.slice) * line_sum_numbers"
            self.lines.append(
                f"    add_lines<{', '.join(map(str, sizes))}>(place, {self._length(axis)}, "
                f"{self._array(lhs)}, {self._array(rhs)}, {sums} + {offset});"
            )

    def _multiply_lines(self, link: Link) -> None:
        """Add the products inside lines of a link."""
        params = axes_by_kind(self.program.step)["param"]
        for i, product in enumerate(link.products):
            shape, number = params[product.param], product.param
            strides = [self.lengths[shape[1]], 1]
            if (shape[0] == product.axis) == (bool(product.to) or not product.transposes):
                strides.reverse()
            terms = self.lengths[product.axis]
            result, term = strides
            entry = f"{self._param_at(number)} + result * {result} + term * {term}"
            self.lines += [
                f"    multiply_lines<{self.share(link.value.axes)}, {terms}, "
                f"{str(i > 0).lower()}>(place, {self._array(product.source)}, "
                "[&](int result, int term) {",
                f"      return widen(p.in.params[{number}][{entry}]);",
                f"    }}, {self._array(link.value)});",
            ]

    def _open_rows(self, stage: int) -> None:
        """Add the numbers of reductions by warps."""
        for i, link in enumerate(self.steps.links):
            if link.stage == stage and self._in_row(link):
                count = f"{self.share(link.sources[0].axes)}::count"
                self.lines += [
                    f"    real number_{i}[{count}];",
                    f"    each<{count}>([&](int k) {{ number_{i}[k] = "
                    f"constant({IDENTITY[link.op]}); }});",
                ]

    def _in_shared(self, key: object, kind: str = "real") -> str:
        place = f"memory + {self.layout.at[key]}"
        return f"reinterpret_cast<{kind}*>({place})" if kind != "char" else f"({place})"

    def _arrive(self, stage: int, links: Sequence[Link]) -> None:
        """Add what a stage begins with: what other blocks have sent."""
        shares, sent = self.layout.shares, self.layout.sent
        box = f"box_{stage}"
        received = self.layout.received.get(stage, 0)
        if received:
            self.lines.append(f"    const char* const {box} = boxes.receive({received});")
        gathers = [link for link in links if link.kind == "gather"]
        if stage in self.steps.meets:
            self.lines.append("    meet_slices();")
        for link in links:
            if link.kind == "rows":
                self._multiply_lines(link)
        for link in (link for link in links if link.kind not in ("fold", *IN_ARRAYS)):
            share, at = shares[link.value.axes], sent.get((stage, link), 0)
            if link.kind == "spread":
                at = sent[stage, (link.value, True)]
                self.lines += [
                    f"    for (int i = threadIdx.x; i < {ROWS * share.padded}; i += threads)",
                    f"      {self._in_shared(link)}[i % {ROWS} * {share.padded} + i / {ROWS}] = "
                    f"reinterpret_cast<const real*>({box} + {at})[i];",
                ]
            elif self._in_row(link) or link.kind == "gather":
                continue
            elif link.whole and not local_results(self.steps, link, shares):
                count = ROWS * share.numbers
                self.lines += [
                    f"    for (int i = threadIdx.x; i < {count}; i += threads)",
                    f"      {self._in_shared(link)}[i] = collect<{link.op.capitalize()}>"
                    f"({box} + {at}, i, {count});",
                ]
            elif self._in_registers(link):
                index = f"e.row * {share.block} + e.at"
                if link.kind == "scatter":
                    index = f"e.at * {ROWS} + e.row"
                op = (link.op or "sum").capitalize()
                i = self.steps.links.index(link)
                self._loop(link.value.axes, [
                    f"leaf_{i}[k] = collect<{op}>({box} + {at}, {index}, {ROWS * share.block});"
                ])  # fmt: skip
        for same in self._alike(gathers):
            self._multiply(same, box)
        if not all(map(self._in_row, links)):
            self.lines.append("    __syncthreads();")
        for link in gathers:
            share, splits = shares[link.value.axes], self.layout.splits[link]
            if not self._in_registers(link):
                continue
            row, distance = f"e.row * {sums_stride(share)} + e.at", ROWS * sums_stride(share)
            terms = [f"{self._in_shared(link)}[{i * distance} + {row}]" for i in range(splits)]
            name = f"leaf_{self.steps.links.index(link)}[k]"
            self._loop(link.value.axes, [f"{name} = {' + '.join(terms)};"])
        folds = [link for link in links if link.kind == "fold"]
        for link in folds:
            self._fold(link)
        if any(self._has_lines(link.value.axes) for link in folds):
            self.lines.append("    __syncthreads();")

    def _fold(self, link: Link) -> None:
        """Add a reduction of which a thread computes its entries, from what all blocks read."""
        reduction, axes = link.value.definition, link.value.axes
        assert isinstance(reduction, Reduce)
        text, axis, op = _FoldText(self, link.value), reduction.axis, link.op.capitalize()
        term = text.real(reduction.source)
        is_padding = " && !place.is_padding(e.row, l)" if self.variant.events else ""
        result = f"leaf_{self.steps.links.index(link)}[k]"
        if self._has_lines(axes):
            result = self._in_array(link.value, "e.flat")
        self._loop(axes, [
            f"real x = constant({IDENTITY[link.op]});",
            f"if (e.there{is_padding}) {{",
            *(f"  const int i_{a} = {self.index(axes, a)};" for a in axes),
            "#pragma unroll 4",
            f"  for (int i_{axis} = 0; i_{axis} < {self._length(axis)}; ++i_{axis}) {{",
            *(f"    {line}" for line in text.lines),
            f"    x = {op}()(x, {term});",
            "  }",
            "} else {",
            "  x = constant(0);",
            "}",
            f"{result} = x;",
        ])  # fmt: skip

    def _alike(self, links: Sequence[Link]) -> list[list[Link]]:
        """Return products in groups of the same values with matrices that follow each other."""
        groups: list[list[Link]] = []
        for link in links:
            last = groups[-1] if groups else None
            if last and self._follows(last[0], last[-1], link):
                last.append(link)
            else:
                groups.append([link])
        return groups

    def _follows(self, first: Link, last: Link, link: Link) -> bool:
        layout = self.layout
        if link.sources != first.sources or len(link.sources) != 1:
            return False
        one, other, new = (layout.matrices[x, 0] for x in (first, last, link))
        is_same = new._replace(param=one.param, order=one.order, first=one.first) == one
        return (
            is_same
            and new.first == other.first + other.tiles
            and link.value.axes == first.value.axes
            and layout.splits[link] == layout.splits[first]
            and layout.at[link] == layout.at[last] + self._area(last)
            and (new.first + new.tiles <= layout.held_tiles)
            == (one.first + one.tiles <= layout.held_tiles)
        )

    def _area(self, link: Link) -> int:
        """Return the bytes of the sums of a product."""
        number = 8 if self.variant.is_wide else 4
        share = self.layout.shares[link.value.axes]
        return -(-self.layout.splits[link] * ROWS * sums_stride(share) * number // 16) * 16

    def _multiply(self, links: Sequence[Link], box: str) -> None:
        """Add the products of links that read a box."""
        link = links[0]
        share, operands = self.layout.shares[link.value.axes], []
        for i, source in enumerate(link.sources):
            matrix, all_tiles = self.layout.matrices[link, i], self._box_tiles(source)
            key = link.stage, (source, False)
            place = f"{box} + {self.layout.sent[key]}" if key in self.layout.sent else (
                self._in_shared(key, "char"))  # fmt: skip
            group = f"result_tile / {matrix.out_tiles}"
            start = f"{group} * {matrix.in_tiles} * Operand<{all_tiles}>::step"
            operands.append((f"{place}{f' + {start}' if matrix.groups else ''}", all_tiles))
        link_at = f"link * {self._area(link) // (8 if self.variant.is_wide else 4)} + "
        self._sums(links, operands, [
            f"real* const target = {self._in_shared(link)} + {link_at if len(links) > 1 else ''}"
            f"(split * cluster_rows + row) * {sums_stride(share)} + number * tile + unit;",
            "target[0] = a;",
            f"target[{sums_stride(share)}] = b;",
        ])  # fmt: skip

    def _sums(
        self, links: Sequence[Link], operands: Sequence[tuple[str, int]], put: Sequence[str]
    ) -> None:
        """Add sums of products by warps; operands: where each is, and its tiles. put: what is done
        with sums a, b of a tile `number` of a `link`, a `unit` of it, and two rows."""
        link, count = links[0], len(links)
        share, is_gather = self.layout.shares[link.value.axes], link.kind == "gather"
        splits = self.layout.splits.get(link, 1)
        tiles = share.block_tiles if is_gather else share.padded // TILE
        tile_of_all = f"place.slice * {share.block_tiles} + number" if is_gather else "number"
        is_full = (share.padded // TILE if is_gather else tiles) == share.tiles
        reads_tile = not is_full or any("result_tile" in operand for operand, _ in operands)
        lines = [f"const int result_tile = {tile_of_all};"] if reads_tile else []
        lines += [] if is_full else [f"if (result_tile >= {share.tiles}) return;"]
        for i, (operand, operand_tiles) in enumerate(operands):
            matrix = self.layout.matrices[link, i]
            terms = matrix.in_tiles if is_gather else operand_tiles
            is_held = matrix.first + matrix.tiles <= self.layout.held_tiles
            of_link = f" + link * {matrix.tiles}" if count > 1 else ""
            lines.append(
                f"sums.add<{operand_tiles}, {terms}, {splits}>({operand}, split, "
                f"{'held' if is_held else 'matrices'} + "
                f"({matrix.first}{of_link} + number * {terms}) * matrix_words);"
            )
        begin = self.begins.get((link.stage, link.kind), 0)
        self.begins[link.stage, link.kind] = begin + count * tiles * splits
        item = ["const int number = item;"]
        if count > 1:
            item = [f"const int number = item % {tiles}, link = item / {tiles};"]
        self.lines += [
            f"    each_tile<{count * tiles}, {splits}>({begin}, "
            "[&](Sums& sums, int item, int split) {",
            *(f"      {line}" for line in [*item, *lines]),
            "    }, [&](const Sums& sums, int item, int split) {",
            f"      {item[0]}",
            "      sums.each_pair([&](int row, int unit, real a, real b) {",
            *(f"        {line}" for line in put),
            "      });",
            "    });",
        ]

    def _box_tiles(self, source: Value) -> int:
        """Return the tiles of a source in a box, filled up."""
        return self.layout.shares[source.axes].padded // TILE

    def _leave(self, stage: int, links: Sequence[Link]) -> None:
        """Add what the stage before ends with: what this block sends."""
        if not links:
            return
        if not all(map(self._in_row, links)):
            self.lines.append("    __syncthreads();")
        shares, sent, reductions = self.layout.shares, self.layout.sent, 0
        for link in (link for link in links if link.kind not in IN_ARRAYS):
            share, at = shares[link.value.axes], sent.get((stage, link), 0)
            if self._in_row(link):
                i, axes = self.steps.links.index(link), link.sources[0].axes
                length = TILE * tiles_of_result(link, shares)
                types = f"{self.share(axes)}, {link.op.capitalize()}, {length}"
                self.lines.append(f"    reduce_row<{types}>(number_{i}, leaf_{i});")
            elif link.kind in ("reduce", "lines"):
                self._reduce(link, at, reductions)
                reductions += 1
            if link.kind != "scatter":
                continue
            operands = [
                (self._in_shared((stage, (link, i)), "char"), shares[source.axes].block_tiles)
                for i, source in enumerate(link.sources)
            ]
            self._sums([link], operands, [
                f"const int place_of = (place.slice * {share.block} + number % {share.block_tiles} "
                "* tile + unit) * cluster_rows + row;",
                f"send_pair(boxes.box() + {at} + place_of * (int)sizeof(real), a, b, "
                f"number / {share.block_tiles}, boxes.barrier());",
            ])  # fmt: skip
        number = 8 if self.variant.is_wide else 4
        for source, is_number in dict.fromkeys(
            (source, link.kind == "spread")
            for link in links
            if link.kind in ("gather", "spread")
            for source in link.sources
            if (stage, (source, link.kind == "spread")) in sent
        ):
            tiles, at = shares[source.axes].block_tiles, sent[stage, (source, is_number)]
            parts = 1 if is_number else self.variant.operand_parts
            size = tiles * (
                ROWS * TILE * number if is_number else operand_bytes(self.variant, 1) // parts
            )
            self.lines.append(
                f"    send_to_all<{parts}, {size}, {size * self.variant.slices}>(place, boxes, "
                f"{self._in_shared((stage, (source, is_number)), 'char')}, {at});"
            )

    def _reduce(self, link: Link, at: int, begin: int) -> None:
        source = link.sources[0]
        if self._has_lines(source.axes):
            self._reduce_lines(link, at)
            return
        identity = f"constant({IDENTITY[link.op]})"
        numbers = self._in_shared((link.stage, (link, 0)))
        op, length = link.op.capitalize(), TILE * tiles_of_result(link, self.layout.shares)
        if local_results(self.steps, link, self.layout.shares):
            self.lines.append(
                f"    reduce_here<{self.share(source.axes)}, {op}, {length}>({numbers}, "
                f"{identity}, {self._in_shared(link)}, {begin});"
            )
            return
        types = f"{self.share(source.axes)}, {self.share(link.value.axes)}, {op}"
        call = f"reduce_last<{types}, {str(link.whole).lower()}, {length}>"
        if not length:
            reduced = [axis for axis in source.axes if axis not in link.value.axes]
            lengths, first = self.lengths, source.axes.index(reduced[0])
            stride = math.prod(lengths[axis] for axis in source.axes[first + len(reduced) :])
            count = math.prod(lengths[axis] for axis in reduced)
            call = f"reduce_middle<{types}, {str(link.whole).lower()}, {count}, {stride}>"
        self.lines.append(f"    {call}(place, boxes, {numbers}, {identity}, {at});")

    def _reduce_lines(self, link: Link, at: int) -> None:
        """Add a reduction of what has lines, whose numbers are computed as it reads them."""
        axes, op = link.sources[0].axes, link.op.capitalize()
        body, share = _LoopText(self, axes), self.share(axes)
        total = " + ".join(body.real(source) for source in link.sources)
        identity = f"constant({IDENTITY[link.op]})"
        skips = f"if (place.is_padding(e.row, l)) return {identity};"
        self.lines += [
            "    {",
            f"      const auto number_of = [&](const Entry<{share}>& e) -> real {{",
            *(f"        {line}" for line in [skips] * self.variant.events),
            *(f"        {line}" for line in body.lines),
            f"        return {total};",
            "      };",
        ]
        if link.kind == "lines":
            target = self._in_shared(link)
            call = f"reduce_lines<{share}, {op}>(place, number_of, {identity}, {target})"
        else:
            types = f"{share}, {self.share(link.value.axes)}, {op}, {str(link.whole).lower()}"
            call = f"reduce_all_lines<{types}>(place, boxes, number_of, {identity}, {at})"
        self.lines += [f"      {call};", "    }"]

    def _sinks(self, axes: Axes, sinks: Sequence[Sink]) -> None:
        """Add a loop over the block's entries."""
        if self._has_lines(axes):
            sinks = [s for s in sinks if s.link is None or s.link.kind == "array"]
        if not sinks:
            return
        body = _LoopText(self, axes)
        values = [body.real(sink.source) for sink in sinks]
        pairs = [*zip(sinks, values, strict=True)]
        # Without branches the threads' entries are computed side by side.
        if not self.variant.events and not self._has_lines(axes):
            puts = dict.fromkeys(self._put_if_there(*pair) for pair in pairs)
            self._loop(axes, [*body.lines, *puts])
            return
        padding = [self._put(sink, "constant(0)", filling=True) for sink in sinks]
        padding = [line for line in dict.fromkeys(padding) if line]
        skipped = [self._put(sink, "constant(0)", skips=True) for sink in sinks]
        skipped = [line for line in dict.fromkeys(skipped) if line]
        puts = dict.fromkeys(self._put(*pair) for pair in pairs)
        lines = ["if (!e.there) {", *(f"  {line}" for line in padding), "  return;", "}"]
        if self.variant.events:
            lines += ["if (place.is_padding(e.row, l)) {", *(f"  {line}" for line in skipped),
                      "  return;", "}"]  # fmt: skip
        self._loop(axes, [*lines, *body.lines, *puts])

    def _put_if_there(self, sink: Sink, value: str) -> str:
        """Return the statement that puts a number, or a filling."""
        if sink.link is None:
            put = self._put(sink, value)
            return put if _hands_on(sink) else f"if (e.there) {{ {put} }}"
        if sink.link.kind == "array":
            return self._put(sink, f"(e.there ? {value} : constant(0))")
        filling = IDENTITY[sink.link.op] if sink.link.kind == "reduce" else "0"
        return self._put(sink, f"(e.there ? {value} : constant({filling}))")

    def _put(self, sink: Sink, value: str, filling: bool = False, skips: bool = False) -> str:
        """Return the statement that puts a number where a sink says. filling: for entries that
        there are not. skips: for padding."""
        target, link = sink.target, sink.link
        share = self.layout.shares[sink.axes]
        if link is not None:
            if link.kind == "reduce":
                number = f"constant({IDENTITY[link.op]})" if filling or skips else value
                if sink.term and (filling or skips):
                    return ""
                if self._in_row(link):
                    name = f"number_{self.steps.links.index(link)}[k]"
                    return f"{name} {'+' if sink.term else ''}= {number};"
                at = f"e.row * {share.block} + e.at"
                place = self._in_shared((link.stage, (link, 0)))
                return f"{place}[{at}] {'+' if sink.term else ''}= {number};"
            assert isinstance(sink.source, Value)
            if link.kind == "array":
                exists = "" if self._has_lines(sink.axes) else "if (!e.fills) "
                return f"{exists}{self._in_array(sink.source, 'e.flat')} = {value};"
            if link.kind == "spread":
                place = self._in_shared((link.stage, (sink.source, True)))
                return f"{place}[e.at * {ROWS} + e.row] = {value};"
            key = (sink.source, False) if link.kind == "gather" else (link, sink.term)
            place = self._in_shared((link.stage, key), "char")
            return f"Operand<{share.block_tiles}>::write({place}, e.row, e.at, {value});"
        if filling:
            is_state = target is not None and _hands_on(sink)
            return f"{self._state(target.number, 'next')} = constant(0);" if is_state else ""  # type: ignore[union-attr]
        if sink.stream is not None:
            offset = stream_offsets(self.program, self.variant.dtype)[sink.stream]
            at = f"{self._pointer('streams', sink.axes)} + {offset} + e.flat"
            return f"store_parts<stream_parts>({at}, stream_numbers, {value});"
        assert target is not None
        return self._result(target.kind, target.number, value, skips, sink.axes)

    def _result(self, kind: str, number: int, value: str, skips: bool, axes: Axes) -> str:
        sizes = self.program.step.head
        if kind in ("new_state", "grad_state"):
            return f"{self._state(number, 'next')} = {value};"
        if kind == "output":
            offset = sum(map(math.prod, sizes.outputs[:number]))
            flat = self._flat("output", number, axes)
            at = f"{self._pointer('output', axes)}[{offset} + {flat}]"
            return f"{at} = narrow<io>({value});"
        if kind == "grad_gate":
            flat = self._flat("gate", number, axes)
            at = f"{self._pointer('grad_gates', axes)}[{sizes.gate_offsets[number]} + {flat}]"
            bias = "" if skips else f" sum_gate_{number}[k] += {value};"
            return f"{at} = narrow<io>({value});{bias}"
        if skips:
            return ""
        if kind == KEPT:
            offset = self.saved[KEPT, number]
            return f"{self._pointer('saved', axes)}[{offset} + e.flat] = {value};"
        if kind == "grad_memory":
            at = f"{self._memory_at(number, 'e.row')} + {self._flat('memory', number, axes)}"
            return f"p.grad_memories[{number}][{at}] += {value};"
        if kind != "grad_param":
            raise EngineError(f"kernels of clusters have no {kind} among their results")
        return f"sum_param_{number}[k] += {value};"

    def _end(self) -> None:
        """Add the end of a step: the states that the next one starts from."""
        for i, axes in enumerate(self.states):
            at = f"place.at_sequence(place.sequence(e.row, l), {self._size(axes)}) + "
            at += self._flat("state", i, axes)
            is_array = self._has_lines(axes)
            name = self._state(i, "next" if is_array else "state")
            if self.is_backward:
                target, last = f"p.grad_initial[{i}]", "place.begins(e.row, l)"
                zero = [f"if (place.is_reset(e.row, l)) {name} = constant(0);"]
            else:
                target, last, zero = f"p.final[{i}]", "place.ends(e.row, l)", []
            self._loop(axes, [
                *([] if is_array else [f"{name} = next_{i}[k];"]),
                "if (events && e.there && !place.is_padding(e.row, l)) {",
                *(f"  {line}" for line in zero),
                f"  if ({last} && {target} != nullptr) {target}[{at}] = {name};",
                "}",
            ])  # fmt: skip
            if is_array:
                swap = f"state_{i} = next_{i}, next_{i} = before;"
                self.lines.append(f"    {{ scalar* const before = state_{i}; {swap} }}")

    def _finish(self) -> None:
        target = "grad_initial" if self.is_backward else "final"
        self.lines += ["", "  PARARNN_FUNCTION void finish() {"]
        for name, axes, start in self.sums:
            self._loop(axes, [
                "if (e.there) p.partial[place.at_sequence(place.first_row + e.row, "
                f"partial_numbers) + {start}] = {name}[k];"
            ])  # fmt: skip
        self.lines.append("    if (events) return;")
        for i, axes in enumerate(self.states):
            at = f"place.at_sequence(place.first_row + e.row, {self._size(axes)}) + "
            at += self._flat("state", i, axes)
            self._loop(axes, [f"if (e.there && p.{target}[{i}] != nullptr) "
                              f"p.{target}[{i}][{at}] = {self._state(i)};"])  # fmt: skip
        self.lines.append("  }")


def _hands_on(sink: Sink) -> bool:
    return sink.target is not None and sink.target.kind in ("new_state", "grad_state")


class _LoopText(NestText):
    """The code of a loop over the entries that a block has of values with some axes."""

    there: Sequence[str] = ("e.there",)
    """What must hold where the caller's memory is read."""

    def __init__(self, emission: _Emission, axes: Axes) -> None:
        self.emission, self.axes, self.result = emission, axes, axes
        self.body = Body(f"{emission.program.cell_name}'s {emission.variant.direction} pass")
        self.lines: list[str] = []

    def load(self, value: Value) -> None:
        """Add what computes a value, once."""
        if value.node in self.body.values:
            return
        if not self.is_leaf(value):
            self.lines.append(self.point(value))
            return
        text, name = self._leaf(value), f"x{len(self.body.values)}"
        is_mask = value.node.meta["dtype"] == torch.bool
        kind = MASK if is_mask else REAL
        self.lines.append(f"const {kind} {name} = {f'truth({text})' if is_mask else text};")
        self.body.values[value.node] = (name, kind)

    def is_leaf(self, value: Value) -> bool:
        """Check whether the loop reads a value rather than computes it."""
        return self.emission.steps.is_leaf(value)

    def _leaf(self, value: Value) -> str:
        emission, steps = self.emission, self.emission.steps
        local = value.axes == self.axes and not emission._has_lines(value.axes)
        if value in emission.kinds:
            kind, number = emission.kinds[value]
            if local and kind == emission.state_kind:
                return f"state_{number}[k]"
            if local and kind == "param":
                return f"param_{number}[k]"
            if local and kind != "memory":
                return f"now.{kind}_{number}[k]"
            return self._elsewhere(value)
        link = emission.leaves[value]
        if link.kind == "lines" and self.axes[0] == value.axes[0]:
            share = emission.layout.shares[self.axes]
            lines = share.block // share.line
            return f"{emission._in_shared(link)}[e.row * {lines} + e.at / {share.line}]"
        if emission._in_row(link) or (local and link.kind != "view" and not link.whole):
            return f"leaf_{steps.links.index(link)}[k]"
        return self._elsewhere(value)

    def _elsewhere(self, value: Value, indices: Mapping[str, str] | None = None) -> str:
        """Return the number of a value that blocks read at any index: at those of the loop, or at
        others of its axes."""
        emission, steps = self.emission, self.emission.steps
        kind, number = emission.kinds.get(value, (emission.state_kind, 0))
        if kind != emission.state_kind:
            return self._from_memory(kind, number, value, indices)
        link = emission.leaves.get(value)
        if link is not None and link.kind == "view" and not indices:
            return self._view(value)
        if link is not None and link.whole:
            return self._whole(link, indices)
        if value in steps.spreads:
            return self._whole(steps.spreads[value], indices)
        text = emission._in_array(value, self._flat(value.axes, indices))
        return self._if_there(text, value)

    def _if_there(self, text: str, value: Value) -> str:
        """Return a number in memory, 0 where a loop has no such entry."""
        has_all = self.emission._has_lines(self.axes)
        return text if has_all else f"(e.there ? {text} : constant(0))"

    def _view(self, value: Value) -> str:
        """Return the number of a value at other indices, 0 outside."""
        view, emission = value.definition, self.emission
        if isinstance(view, Index):
            return f"(real)({self._index(view.axis)})"
        assert isinstance(view, (Rename, Slide, Select))
        source = view.source
        if isinstance(view, Rename):
            names = zip(source.axes, view.names, strict=True)
            return self._elsewhere(source, {axis: self._index(name) for axis, name in names})
        indices = {axis: self._index(axis) for axis in source.axes if axis != view.axis}
        length = emission._length(view.axis)
        if isinstance(view, Select):
            index = f"{length} - {-view.index}" if view.index < 0 else str(view.index)
            return self._elsewhere(source, {**indices, view.axis: index})
        index = f"{self._index(view.axis)} + ({view.by})"
        if view.taps:
            middle = (emission.lengths[view.taps] - 1) // 2
            index += f" {'+' if view.sign > 0 else '-'} ({self._index(view.taps)} - {middle})"
        entry = self._elsewhere(source, {**indices, view.axis: index})
        return f"({index} >= 0 && {index} < {length} ? {entry} : constant(0))"

    def _from_memory(
        self, kind: str, number: int, value: Value, indices: Mapping[str, str] | None
    ) -> str:
        emission, sizes = self.emission, self.emission.program.step.head
        place = self._flat(value.axes, indices)
        name = kind.removeprefix("grad_")
        if name in emission.of_callers and kind != "state":
            index = (indices or {}).get
            axes = emission.of_callers[name][number]
            place = emission._entry_at(axes, lambda axis: index(axis) or self._index(axis))
        text = f"widen({emission._at(kind, number, self.result, place)})"
        there = self.there
        if kind == "grad_output":
            there = [*there, "p.grad_output != nullptr"]
        if kind == "gate":
            at = f"place.head * {sizes.width} + {sizes.gate_offsets[number]}"
            bias = f"p.in.bias[{at} + {place}]"
            text += f" + (p.in.bias == nullptr ? constant(-0.0) : widen({bias}))"
        return f"({' && '.join(there)} ? {text} : constant(0))" if there else text

    def _whole(self, link: Link, indices: Mapping[str, str] | None = None) -> str:
        share, axes = self.emission.layout.shares[link.value.axes], link.value.axes
        place, flat = self.emission._in_shared(link), self._flat(axes, indices)
        if link.kind == "reduce":
            shares = self.emission.layout.shares
            if count := local_results(self.emission.steps, link, shares):
                return f"{place}[e.row * {count} + e.at / {TILE * tiles_of_result(link, shares)}]"
            return f"{place}[e.row * {share.numbers} + {flat}]"
        position = f"{self.emission.share(axes)}::position({flat})"
        return f"{place}[e.row * {share.padded} + {position}]"

    def _index(self, axis: str) -> str:
        """Return the index of an entry along an axis of the loop."""
        return self.emission.index(self.axes, axis)

    def _flat(self, axes: Axes, indices: Mapping[str, str] | None = None) -> str:
        """Return the index of an entry in a value with some of the loop's axes, or others of which
        there are indices."""
        lengths, terms = self.emission.lengths, []
        for i, axis in enumerate(axes):
            stride = math.prod(lengths[a] for a in axes[i + 1 :])
            index = f"({(indices or {}).get(axis) or self._index(axis)})"
            terms.append(index if stride == 1 else f"{index} * {stride}")
        return f"({' + '.join(terms) or '0'})"


class _FoldText(_LoopText):
    """The code of the terms of a fold, for a result of an entry that there is."""

    there = ()

    def __init__(self, emission: _Emission, fold: Value) -> None:
        assert isinstance(fold.definition, Reduce)
        super().__init__(emission, fold.definition.source.axes)
        self.result, self.ends = fold.axes, emission.steps.ends_of(fold)

    def is_leaf(self, value: Value) -> bool:
        """Check whether a term is made of a value that is computed once for others too."""
        return value in self.ends

    def _leaf(self, value: Value) -> str:
        return self._elsewhere(value)

    def _if_there(self, text: str, value: Value) -> str:
        return text

    def _index(self, axis: str) -> str:
        return f"i_{axis}"
