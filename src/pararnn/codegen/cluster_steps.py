"""Emitted CUDA of steps that clusters run: a struct with the registers of a thread, and stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pararnn.base.errors import EngineError
from pararnn.cells.matrix import Axes
from pararnn.codegen.cluster_layout import (
    LANES,
    TILE,
    ClusterVariant,
    Layout,
    Matrix,
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
from pararnn.codegen.emit import Body, NestText, kind_of
from pararnn.codegen.spelling import IDENTITY
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
    sources_of,
)
from pararnn.program.sums import distances_from_mean

FRAGMENTS = 64
"""Most fragments of matrices that the warps of a block hold in registers, of all products of a
pass; with 0 all are read from memory at each step, as where there are more."""
POINTERS = {
    "gate": "gates",
    "state": "saved",
    KEPT: "saved",
    "grad_output": "grad_output",
    "output": "output",
    "grad_gate": "grad_gates",
}
"""Pointers to the inputs and the results of a step."""
WRITTEN = {
    "forward": ("gates", "output"),
    "saving": ("gates", "output", "saved"),
    "backward": ("gates", "grad_gates", "streams", "saved", "grad_output"),
}
"""Pointers to what a pass reads and writes in a step."""


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

    begins: the warp with which the next product of a stage and kind begins. of_inputs: for
    `_is_early`. line_values: numbers of lines that are in shared memory so far.
    """

    program: Program
    variant: ClusterVariant
    layout: Layout
    lines: list[str] = field(default_factory=list)
    begins: dict[tuple[int, str], int] = field(default_factory=dict)
    of_inputs: dict[tuple[Axes, Value], bool] = field(default_factory=dict)
    line_values: set[Value] = field(default_factory=set)

    @cached_property
    def steps(self) -> Steps:
        """The pass."""
        return steps_of(self.program, self.variant)

    @property
    def is_backward(self) -> bool:
        """True for a backward pass."""
        return self.variant.direction == "backward"

    @property
    def given(self) -> str:
        """The caller's states, or gradients, that a pass starts from."""
        return "grad_final" if self.is_backward else "in.initial"

    @property
    def results(self) -> str:
        """The caller's tensors of what a pass ends with."""
        return "grad_initial" if self.is_backward else "final"

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
        return f"{self._array(value)}[e.row * {self.lengths.numbers(value.axes)} + {flat}]"

    @cached_property
    def state_kind(self) -> str:
        """Kind of the inputs that steps hand on."""
        return "grad_new_state" if self.is_backward else "state"

    @cached_property
    def fed(self) -> dict[Axes, list[tuple[str, int]]]:
        """Inputs that are loaded a step ahead, by the axes of the loops that read them."""
        kinds = ("gate", "state", KEPT, "grad_output") if self.is_backward else ("gate",)
        fed: dict[Axes, list[tuple[str, int]]] = {}
        for (kind, number), value in self.steps.statements.inputs.items():
            for axes in self.names if kind in kinds else ():
                if self._reads(value, axes) and self._is_fed(value, axes):
                    fed.setdefault(axes, []).append((kind, number))
        return fed

    def _is_fed(self, value: Value, axes: Axes) -> bool:
        """Check whether threads load an input from memory for a loop over axes: neither has
        lines."""
        if self._has_lines(value.axes) or self._has_lines(axes):
            return False
        kind, number = self.kinds[value]
        of_caller = self.of_callers.get(kind.removeprefix("grad_"), [])
        is_moved = kind in ("gate", "grad_output") and of_caller[number] != value.axes
        return value.axes == axes or ({*value.axes} <= {*axes} and not is_moved)

    def _name(self, kind: str, number: int, axes: Axes, name: str = "") -> str:
        """Return the name of an input's numbers, or its bias, that a loop over axes reads."""
        is_local = self.steps.statements.inputs[kind, number].axes == axes
        return f"{name or kind}_{number}" + ("" if is_local else f"_{self.share(axes)}")

    def _index(self, kind: str, number: int, axes: Axes) -> str:
        """Return the index of an input's number in a loop over axes; of filling that of another."""
        value = self.steps.statements.inputs[kind, number]
        if value.axes != axes:
            index = _LoopText(self, axes)._flat(value.axes)
            return f"(e.fills ? 0 : {index})" if value.axes else "0"
        if kind in ("state", KEPT):  # what passes keep, in the order of values
            return "e.index"
        return self._flat(kind.removeprefix("grad_"), number, axes, "e.index")

    @cached_property
    def constants(self) -> dict[Axes, list[int]]:
        """Parameters whose numbers threads hold, by their axes."""
        params: dict[Axes, list[int]] = {}
        for number, value in self.steps.statements.inputs_of("param").items():
            if self._reads(value, value.axes):
                params.setdefault(value.axes, []).append(number)
        return params

    @cached_property
    def early(self) -> dict[Axes, dict[Value, str]]:
        """Names of the values, by the axes of loops, that a backward pass computes a step ahead,
        while it waits for others: of inputs in registers, where other values or results need
        them."""
        early: dict[Axes, dict[Value, str]] = {}
        seen = set[tuple[Axes, Value]]()

        def add(value: Value, axes: Axes) -> None:
            if (axes, value) in seen:
                return
            seen.add((axes, value))
            if self._is_early(value, axes):
                if not self.steps.is_leaf(value):
                    names = early.setdefault(axes, {})
                    names[value] = f"early_{self.share(axes)}_{len(names)}"
                return
            for source in () if self.steps.is_leaf(value) else sources_of(value):
                add(source, axes)

        for sink in self.steps.sinks:
            is_before = sink.stage < self._waits and not self._has_lines(sink.axes)
            if is_before and isinstance(sink.source, Value):
                add(sink.source, sink.axes)
        return early

    def _is_early(self, value: Value, axes: Axes) -> bool:
        """Check whether a loop over axes computes a value of inputs that threads have loaded."""
        if (axes, value) not in self.of_inputs:
            if value in self.kinds:
                kind, number = self.kinds[value]
                is_param = kind == "param" and value.axes == axes
                is_early = is_param or (kind, number) in self.fed.get(axes, ())
            else:
                sources = () if self.steps.is_leaf(value) else sources_of(value)
                is_early = bool(sources) and all(self._is_early(x, axes) for x in sources)
            self.of_inputs[axes, value] = is_early
        return self.of_inputs[axes, value]

    @cached_property
    def _waits(self) -> int:
        """The last stage of a backward pass that begins when other warps have sent something; 0 if
        what a step loads ahead is not there before."""
        links = [link for link in self.steps.links if not self._in_row(link)]
        last = max((link.stage for link in links if link.kind not in IN_ARRAYS), default=0)
        return last if self.is_backward and last > 1 else 0

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
        inner = self.lengths.numbers(loop[place + 1 : -1])
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
        self._prepare()
        self._start()
        self._run()
        self._finish()
        self.lines += ["};", ""]
        return "\n".join(self.lines)

    def _inside(self, axes: Axes) -> str:
        """Return whether a call has an entry of what has lines."""
        checks = []
        for i, axis in enumerate(axes):
            stride, end = self.lengths.numbers(axes[i + 1 :]), self._length(axis)
            if i == 0:
                checks.append(f"flat < {end} * {stride}")
            elif not end.isdigit():
                checks.append(f"flat / {stride} % {self.lengths[axis]} < {end}")
        return " && ".join(checks)

    def _loop(self, axes: Axes, body: Iterable[str]) -> None:
        share = self.share(axes)
        each = "each_entry_of_lines" if self._has_lines(axes) else "each_entry"
        self.lines += [
            f"    {each}<{share}>(place, [&](int k, const Entry<{share}>& e) {{",
            *(f"      {line}" for line in body),
            "    });",
        ]

    def _registers(self) -> None:
        fields = [
            f"    {{}} {self._name(kind, number, axes)}[{self.share(axes)}::count];"
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
                    name = self._name(kind, number, axes, "bias")
                    self.lines.append(f"  real {name}[{self.share(axes)}::count];")
        for axes, names in self.early.items():
            for value, name in names.items():
                self.lines.append(f"  {kind_of(value)} {name}[{self.share(axes)}::count];")
        for links in self._products():
            if held := self._fragments(links):
                turns = self._items(links) // self.layout.warps
                name = f"fragments_{self.steps.links.index(links[0])}"
                self.lines.append(f"  Fragment {name}[{turns}][{held // turns}];")
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
        for links in self._products():
            if self._fragments(links):
                self._load_fragments(links)
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
            body = [
                f"{self._name(kind, n, axes, 'bias')}[k] = e.there && p.in.bias != nullptr ? "
                f"widen(p.in.bias[place.head * {sizes.width} + {sizes.gate_offsets[n]} + "
                f"{self._index(kind, n, axes)}]) : constant(-0.0);"
                for kind, n in keys
                if kind == "gate"
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
                name, index = f"ahead.{self._name(kind, n, axes)}", self._index(kind, n, axes)
                if exists:
                    self._loop(axes, [f"{name}[k] = {{}};"])
                if index == "e.index":
                    pointer, offset = self._source(kind, n, axes)
                    runs = kind in ("state", KEPT) and self._in_runs(offset)
                    call = f"load_entries<{self.share(axes)}, {str(runs).lower()}>"
                    self.lines.append(f"    {exists}{call}(place, {pointer} + {offset}, {name});")
                else:
                    body.append(f"{exists}{name}[k] = {self._at(kind, n, axes, index)};")
            if body:
                self._loop(axes, body)
        self.lines.append("  }")

    def _prepare(self) -> None:
        """Add the function that computes values of what has been loaded ahead."""
        if not self.early:
            return
        self.lines += ["", "  PARARNN_FUNCTION void prepare() {"]
        for axes, names in self.early.items():
            body = _LoopText(self, axes, ahead=True)
            texts = [body.text(value) for value in names]
            puts = [
                f"{name}[k] = {text};" for name, text in zip(names.values(), texts, strict=True)
            ]
            self._loop(axes, [*body.lines, *puts])
        self.lines.append("  }")

    def _at(self, kind: str, number: int, axes: Axes, index: str) -> str:
        """Return an input's number in memory, at step l, in a loop over axes."""
        if kind == "param":
            return f"p.in.params[{number}][{self._param_at(number)} + {index}]"
        if kind == "memory":
            return f"p.in.memories[{number}][{self._memory_at(number)} + {index}]"
        pointer, offset = self._source(kind, number, axes)
        return f"{pointer}[{offset} + {index}]"

    def _source(self, kind: str, number: int, axes: Axes) -> tuple[str, int]:
        """Return the pointer to numbers of step l that have an input's or a result's, and where
        these begin."""
        sizes, name = self.program.step.head, kind.removeprefix("grad_")
        if name == "gate":
            offset = sizes.gate_offsets[number]
        elif name == "output":
            offset = sum(map(math.prod, sizes.outputs[:number]))
        else:
            offset = self.saved[kind, number]
        return self._pointer(POINTERS[kind], axes), offset

    @staticmethod
    def _in_runs(*numbers: int) -> bool:
        """Check whether numbers, of which rows of a tensor of ours have some from an offset on, lie
        where pairs of them may."""
        return all(number % 2 == 0 for number in numbers)

    def _memory_at(self, number: int) -> str:
        """Return where a memory of an entry's sequence and this head begins."""
        size = self._size(self.of_callers["memory"][number])
        return f"place.at_sequence(place.sequence(e.row, l), {size})"

    @cached_property
    def lengths(self) -> Lengths:
        """Lengths of axes."""
        return lengths_in(self.program, self.variant.lines)

    @cached_property
    def saved(self) -> dict[tuple[str, int], int]:
        """Where states and kept values begin among those of a step and head."""
        return saved_offsets(self.program, self.variant.dtype, self.variant.lines)

    def _of_caller(self, name: str, number: int, sequence: str) -> tuple[str, str]:
        """Return the pointer to a sequence's state among the caller's tensors, and its number in a
        loop over the axes of the state."""
        axes, pointer = self.states[number], f"p.{name}[{number}]"
        at = f"place.at_sequence({sequence}, {self._size(axes)}) + "
        return pointer, f"{pointer}[{at}{self._flat('state', number, axes)}]"

    def _start(self) -> None:
        self.lines += ["", "  PARARNN_FUNCTION void start(int l) {"]
        for name, axes, _ in self.sums:
            self._loop(axes, [f"{name}[k] = constant(0);"])
        for i, axes in enumerate(self.states):
            name = self._state(i)
            source, entry = self._of_caller(self.given, i, "place.first_row + e.row")
            self._loop(axes, [
                f"{name} = constant(0);",
                f"if (!events && e.there && {source} != nullptr)",
                f"  {name} = {entry};",
            ])  # fmt: skip
        self.lines += [
            "    load(l);",
            *["    prepare();"] * bool(self.early),
            "    __syncthreads();",
            "    meet_slices();",
            "  }",
        ]

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
        for i, axes in enumerate(self.states):
            name, is_first = self._state(i), "ends" if self.is_backward else "begins"
            source, entry = self._of_caller(self.given, i, "place.sequence(e.row, l)")
            lines = [
                "if (events && e.there) {",
                f"  if (place.is_padding(e.row, l)) {name} = constant(0);",
                *[f"  else if (place.is_reset(e.row, l)) {name} = constant(0);"]
                * (not self.is_backward),
                f"  else if (place.{is_first}(e.row, l)) {name} = {source} == nullptr ? "
                f"constant(0) : {entry};",
                "}",
            ]
            if self.variant.direction == "saving" and self._has_lines(axes):
                lines.append(f"if (e.there) {self._at('state', i, axes, 'e.flat')} = {name};")
            loops.append((axes, lines))
        return loops

    def widened(self, kind: str, number: int, axes: Axes) -> str:
        """Return the number of an input that has been loaded ahead for a loop over axes."""
        text = f"widen(ahead.{self._name(kind, number, axes)}[k])"
        return f"{text} + {self._name(kind, number, axes, 'bias')}[k]" if kind == "gate" else text

    def _run(self) -> None:
        self.lines += [
            "",
            "  PARARNN_FUNCTION void run(int l, int l_ahead) {",
        ]
        self._point(WRITTEN[self.variant.direction])
        for axes, keys in self.fed.items():
            body = [
                f"now.{self._name(kind, n, axes)}[k] = {self.widened(kind, n, axes)};"
                for kind, n in keys
            ]
            self._loop(axes, body)
        for axes, lines in self._begin():
            self._loop(axes, lines)
        for i, axes in enumerate(self.states):
            if self.variant.direction == "saving" and not self._has_lines(axes):
                self._store(axes, *self._source("state", i, axes), f"state_{i}")
        if self.array_names:  # others read states, and no longer the arrays of the step before
            self.lines.append("    meet_slices();")
        for stage in range(self.steps.stages + 1):
            self.lines.append(f"    // stage {stage}")
            links = [link for link in self.steps.links if link.stage == stage]
            if stage > 0:
                if stage == self._waits and self.early:
                    self.lines.append("    prepare();")
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

    @cached_property
    def squares(self) -> dict[Link, Link]:
        """Sums of values, by those of the squares of their distances from the mean: a warp gets
        both at once."""
        rows = [link for link in self.steps.links if self._in_row(link) and link.op == "sum"]
        shares, pairs = self.layout.shares, {}
        for squares in rows:
            share = shares[squares.sources[0].axes]
            if share.numbers != share.padded or share.block % LANES:
                continue
            count = share.numbers // shares[squares.value.axes].numbers
            for sums in rows:
                if distances_from_mean(squares.sources, sums.sources, sums.value, count):
                    pairs[squares] = sums
        return pairs

    def _open_rows(self, stage: int) -> None:
        """Add the numbers of reductions by warps."""
        for i, link in enumerate(self.steps.links):
            if link.stage == stage and self._in_row(link) and link not in self.squares:
                count = f"{self.share(link.sources[0].axes)}::count"
                if link in self.squares.values():
                    self.lines.append(f"    real number_{i}[{len(link.sources)}][{count}];")
                    continue
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
                rows, place = self.variant.rows, self._in_shared(link)
                self.lines += [
                    f"    for (int i = threadIdx.x; i < {rows * share.padded}; i += threads)",
                    f"      {place}[i % {rows} * {share.padded} + i / {rows}] = "
                    f"reinterpret_cast<const real*>({box} + {at})[i];",
                ]
            elif self._in_row(link) or link.kind == "gather":
                continue
            elif link.whole and not local_results(self.steps, link, shares):
                count = self.variant.rows * share.numbers
                self.lines += [
                    f"    for (int i = threadIdx.x; i < {count}; i += threads)",
                    f"      {self._in_shared(link)}[i] = collect<{link.op.capitalize()}>"
                    f"({box} + {at}, i, {count});",
                ]
            elif self._in_registers(link):
                index = f"e.row * {share.block} + e.at"
                if link.kind == "scatter":
                    index = f"e.at * {self.variant.rows} + e.row"
                op = (link.op or "sum").capitalize()
                i = self.steps.links.index(link)
                self._loop(link.value.axes, [
                    f"leaf_{i}[k] = collect<{op}>({box} + {at}, {index}, "
                    f"{self.variant.rows * share.block});"
                ])  # fmt: skip
        for same in self._alike(gathers):
            self._multiply(same, box)
        if not all(map(self._in_row, links)):
            self._wait()
        for link in gathers:
            share, splits = shares[link.value.axes], self.layout.splits[link]
            if not self._in_registers(link):
                continue
            row, distance = (
                f"e.row * {sums_stride(share)} + e.at",
                self.variant.rows * sums_stride(share),
            )
            terms = [f"{self._in_shared(link)}[{i * distance} + {row}]" for i in range(splits)]
            name = f"leaf_{self.steps.links.index(link)}[k]"
            self._loop(link.value.axes, [f"{name} = {' + '.join(terms)};"])
        folds = [link for link in links if link.kind == "fold"]
        for link in folds:
            self._fold(link)
        if any(self._has_lines(link.value.axes) for link in folds):
            self._wait()

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
            f"    x = {op}::of(x, {term});",
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
        stride = sums_stride(self.layout.shares[link.value.axes])
        rows = self.layout.splits[link] * self.variant.rows
        return -(-rows * stride * self.variant.number // 16) * 16

    def _multiply(self, links: Sequence[Link], box: str) -> None:
        """Add the products of links that read a box."""
        link = links[0]
        share, operands = self.layout.shares[link.value.axes], []
        for i, source in enumerate(link.sources):
            matrix = self.layout.matrices[link, i]
            all_tiles = self.layout.shares[source.axes].padded // TILE
            key = link.stage, (source, False)
            place = f"{box} + {self.layout.sent[key]}" if key in self.layout.sent else (
                self._in_shared(key, "char"))  # fmt: skip
            group = f"result_tile / {matrix.out_tiles}"
            start = f"{group} * {matrix.in_tiles} * Operand<{all_tiles}>::step"
            operands.append((f"{place}{f' + {start}' if matrix.groups else ''}", all_tiles))
        link_at = f"link * {self._area(link) // self.variant.number} + "
        self._sums(links, operands, [
            f"real* const target = {self._in_shared(link)} + {link_at if len(links) > 1 else ''}"
            f"(split * cluster_rows + row) * {sums_stride(share)} + number * tile + unit;",
            "target[0] = a;",
            f"target[Sums::other_row * {sums_stride(share)} + Sums::other_unit] = b;",
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
        fragments = self._fragments(links)
        for i, (operand, operand_tiles) in enumerate(operands):
            matrix = self.layout.matrices[link, i]
            terms = matrix.in_tiles if is_gather else operand_tiles
            if fragments:
                name = f"fragments_{self.steps.links.index(link)}"
                first = sum(m.in_tiles for m in self._matrices(link)[:i]) // splits
                types = f"{operand_tiles}, {terms}, {splits}, {terms}"
                lines += [
                    f"sums.add_fragments<{types}>({operand}, split, [&](int j, int part) {{",
                    f"  return {name}[i][({first} + j) * matrix_parts + part];",
                    "});",
                ]
                continue
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
            "[&](Sums& sums, int item, int split, int i) {",
            *(f"      {line}" for line in [*item, *lines]),
            "    }, [&](const Sums& sums, int item, int split) {",
            f"      {item[0]}",
            "      sums.each_pair([&](int row, int unit, real a, real b) {",
            *(f"        {line}" for line in put),
            "      });",
            "    });",
        ]

    def _items(self, links: Sequence[Link]) -> int:
        """Return how many sums of warps gathered products are."""
        tiles = self.layout.shares[links[0].value.axes].block_tiles
        return len(links) * tiles * self.layout.splits.get(links[0], 1)

    def _products(self) -> list[list[Link]]:
        """Return products that warps compute together, stage by stage."""
        gathers = [link for link in self.steps.links if link.kind == "gather"]
        stages = dict.fromkeys(link.stage for link in gathers)
        return [
            same
            for stage in stages
            for same in self._alike([link for link in gathers if link.stage == stage])
        ]

    def _load_fragments(self, links: Sequence[Link]) -> None:
        """Add the loads of what a thread holds of matrices."""
        link, warps = links[0], self.layout.warps
        splits, tiles = self.layout.splits[link], self.layout.shares[link.value.axes].block_tiles
        name, first = f"fragments_{self.steps.links.index(link)}", 0
        all_tiles = len(links) * tiles
        self.lines += [
            f"    each<{self._items(links) // warps}>([&](int i) {{",
            f"      const int item = warp() + i * warps, split = item / {all_tiles};",
            f"      const int tile = item % {all_tiles}, link = tile / {tiles};",
        ]
        for matrix in self._matrices(link):
            count = matrix.in_tiles // splits
            at = f"{matrix.first} + link * {matrix.tiles} + tile % {tiles} * {matrix.in_tiles}"
            self.lines += [
                f"      each<{count} * matrix_parts>([&](int j) {{",
                f"        const int number = {at} + split * {count} + j / matrix_parts;",
                f"        {name}[i][{first} * matrix_parts + j] =",
                "            fragment_at(matrices + number * matrix_words, j % matrix_parts);",
                "      });",
            ]
            first += count
        self.lines.append("    });")

    def _matrices(self, link: Link) -> list[Matrix]:
        return [self.layout.matrices[link, i] for i in range(len(link.products))]

    def _fragments(self, links: Sequence[Link]) -> int:
        """Return how many fragments of matrices each thread holds for products; 0 where it reads
        them from memory at every step."""
        count = sum(map(self._count_fragments, self._products()))
        return self._count_fragments(links) if count * self.layout.warps <= FRAGMENTS else 0

    def _count_fragments(self, links: Sequence[Link]) -> int:
        """Return how many fragments of matrices products need in each thread; 0 for those that
        threads do not divide evenly."""
        link, warps = links[0], self.layout.warps
        splits = self.layout.splits.get(link, 1)
        items = self._items(links)
        if (
            link.kind != "gather"
            or self.variant.is_wide
            or items not in (warps, 2 * warps, 4 * warps)
        ):
            return 0
        tiles = [matrix.in_tiles for matrix in self._matrices(link)]
        if any(n % splits for n in tiles):
            return 0
        return items // warps * sum(tiles) // splits * self.variant.matrix_parts

    def _leave(self, stage: int, links: Sequence[Link]) -> None:
        """Add what the stage before ends with: what this block sends."""
        if not links:
            return
        if not all(map(self._in_row, links)):
            self._wait()
        shares, sent, reductions = self.layout.shares, self.layout.sent, 0
        for link in (link for link in links if link.kind not in IN_ARRAYS):
            share, at = shares[link.value.axes], sent.get((stage, link), 0)
            if link in self.squares:
                continue
            if self._in_row(link):
                i, axes = self.steps.links.index(link), link.sources[0].axes
                length = TILE * tiles_of_result(link, shares)
                squares = [square for square, sums in self.squares.items() if sums is link]
                if squares:
                    types = f"{self.share(axes)}, {len(link.sources)}, {length}"
                    j = self.steps.links.index(squares[0])
                    self.lines.append(f"    sum_moments<{types}>(number_{i}, leaf_{i}, leaf_{j});")
                    continue
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
                f"send_sums(boxes.box() + {at} + place_of * (int)sizeof(real), a, b, "
                f"number / {share.block_tiles}, boxes.barrier());",
            ])  # fmt: skip
        for source, is_number in dict.fromkeys(
            (source, link.kind == "spread")
            for link in links
            if link.kind in ("gather", "spread")
            for source in link.sources
            if (stage, (source, link.kind == "spread")) in sent
        ):
            tiles, at = shares[source.axes].block_tiles, sent[stage, (source, is_number)]
            parts = 1 if is_number else self.variant.layers
            size = tiles * (
                self.variant.rows * TILE * self.variant.number
                if is_number
                else operand_bytes(self.variant, 1) // parts
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
            behind = source.axes[source.axes.index(reduced[0]) + len(reduced) :]
            stride, count = map(self.lengths.numbers, (behind, reduced))
            call = f"reduce_middle<{types}, {str(link.whole).lower()}, {count}, {stride}>"
        self.lines.append(f"    {call}(place, boxes, {numbers}, {identity}, {at});")

    def _reduce_lines(self, link: Link, at: int) -> None:
        """Add a reduction of what has lines, whose numbers are computed as it reads them."""
        axes, op = link.sources[0].axes, link.op.capitalize()
        self._share_lines(axes, link.sources)
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

    def _wait(self) -> None:
        """Add that the threads wait for each other, unless they just did."""
        wait = "    __syncthreads();"
        if self.lines[-1] != wait:
            self.lines.append(wait)

    def _share_lines(self, axes: Axes, sources: Iterable[Value | float]) -> None:
        """Add what computes the numbers that entries of a line share, once for each line."""
        line = axes[:1]
        new = [
            value
            for value in self.steps.of_lines(axes, sources)
            if value not in self.line_values and ("line", value) in self.layout.at
        ]
        if not new:
            return
        body, block = _LoopText(self, line), self.layout.shares[line].block
        names = [body.real(value) for value in new]
        skips = "!e.there" + " || place.is_padding(e.row, l)" * self.variant.events
        self._loop(line, [
            f"if ({skips}) return;",
            *body.lines,
            *(f"{self._in_shared(('line', value))}[e.row * {block} + e.at] = {name};"
              for value, name in zip(new, names, strict=True)),
        ])  # fmt: skip
        self._wait()
        self.line_values.update(new)

    def _sinks(self, axes: Axes, sinks: Sequence[Sink]) -> None:
        """Add a loop over the block's entries."""
        if self._has_lines(axes):
            sinks = [s for s in sinks if s.link is None or s.link.kind == "array"]
        sinks = [sink for sink in sinks if sink.link not in self.squares]
        if not sinks:
            return
        if self._has_lines(axes):
            self._share_lines(axes, [sink.source for sink in sinks])
        is_before = sinks[0].stage < self._waits
        body = _LoopText(self, axes, self.early.get(axes) if is_before else None)
        values = [body.real(sink.source) for sink in sinks]
        pairs = [*zip(sinks, values, strict=True)]
        if not self._has_lines(axes):
            for name in dict.fromkeys(filter(None, map(self._put_name, sinks))):
                self.lines.append(f"    real {name}[{self.share(axes)}::count];")
        # Without branches the threads' entries are computed side by side.
        if not self.variant.events and not self._has_lines(axes):
            puts = dict.fromkeys(self._put_if_there(*pair) for pair in pairs)
            self._loop(axes, [*body.lines, *puts])
            self._store_puts(axes, sinks)
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
        if not self._has_lines(axes):
            self._store_puts(axes, sinks)

    def _put_name(self, sink: Sink) -> str:
        """Return the name of the numbers that a thread stores, after a loop, where a sink says; ""
        where it stores them otherwise."""
        target, link = sink.target, sink.link
        if link is not None and link.kind in ("gather", "scatter"):
            key = link.stage, self._operand_of(sink)
            return f"operand_{[*self.layout.at].index(key)}"
        if sink.stream is not None:
            return f"stream_{sink.stream}"
        if target is not None and self._in_order(target.kind, target.number, sink.axes):
            return f"{target.kind}_{target.number}"
        return ""

    def _in_order(self, kind: str, number: int, axes: Axes) -> bool:
        """Check whether a tensor has the numbers of a result in the order of a loop over axes."""
        if self._has_lines(axes) or kind not in ("output", "grad_gate", KEPT):
            return False
        return kind == KEPT or self._flat(kind.removeprefix("grad_"), number, axes) == "e.flat"

    @staticmethod
    def _operand_of(sink: Sink) -> tuple[object, object]:
        """Return the key of what a sink's products multiply, among those of a stage."""
        gathers = sink.link is not None and sink.link.kind == "gather"
        return (sink.source, False) if gathers else (sink.link, sink.term)

    def _store_puts(self, axes: Axes, sinks: Sequence[Sink]) -> None:
        """Add the stores of numbers after a loop."""
        named = {self._put_name(sink): sink for sink in sinks}
        for name, sink in named.items():
            target, link = sink.target, sink.link
            if not name:
                continue
            if link is not None:
                place = self._in_shared((link.stage, self._operand_of(sink)), "char")
                self.lines.append(f"    write_operand<{self.share(axes)}>(place, {place}, {name});")
            elif sink.stream is not None:
                offset = stream_offsets(self.program, self.variant.dtype)[sink.stream]
                self._store(axes, "streams", offset, name)
            elif target is not None:
                self._store(axes, *self._source(target.kind, target.number, axes), name)

    def _store(self, axes: Axes, pointer: str, offset: int, name: str) -> None:
        """Add a store of a thread's numbers to those of step l from an offset on."""
        program, numbers = self.program, 1  # of a row's step; unknown for gradients of gates
        if pointer == "saved":
            numbers = self.saved["", 0]
        elif pointer == "streams":
            numbers = stream_offsets(program, self.variant.dtype)[-1]
        elif pointer == "output":
            numbers = program.step.head.output[1]
        types = f"{self.share(axes)}, {str(self._in_runs(offset, numbers)).lower()}"
        gap = ""
        if pointer == "streams":
            types, gap = f"{types}, stream_parts", ", stream_numbers"
        self.lines.append(f"    store_entries<{types}>(place, {pointer} + {offset}, {name}{gap});")

    def _put_if_there(self, sink: Sink, value: str) -> str:
        """Return the statement that puts a number, or a filling."""
        if sink.link is None:
            put = self._put(sink, value)
            is_stored = sink.target is None or _hands_on(sink) or self._put_name(sink) != ""
            is_sum = sink.target is not None and sink.target.kind == "grad_param"
            return put if is_stored or is_sum else f"if (e.there) {{ {put} }}"
        if sink.link.kind == "array":
            return self._put(sink, f"(e.there ? {value} : constant(0))")
        filling = IDENTITY[sink.link.op] if sink.link.kind == "reduce" else "0"
        return self._put(sink, f"(e.fills ? constant({filling}) : {value})")

    def _put(self, sink: Sink, value: str, filling: bool = False, skips: bool = False) -> str:
        """Return the statement that puts a number where a sink says. filling: for entries that
        there are not. skips: for padding."""
        target, link = sink.target, sink.link
        share = self.layout.shares[sink.axes]
        if link is not None:
            if link.kind == "reduce":
                number = f"constant({IDENTITY[link.op]})" if filling or skips else value
                if link in self.squares.values():
                    return f"number_{self.steps.links.index(link)}[{sink.term}][k] = {value};"
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
                return f"{place}[e.at * {self.variant.rows} + e.row] = {value};"
            return f"{self._put_name(sink)}[k] = {value};"
        if filling:
            is_state = target is not None and _hands_on(sink)
            return f"{self._state(target.number, 'next')} = constant(0);" if is_state else ""  # type: ignore[union-attr]
        if sink.stream is not None:
            return f"{self._put_name(sink)}[k] = {value};"
        assert target is not None
        return self._result(target.kind, target.number, value, skips, sink.axes)

    def _result(self, kind: str, number: int, value: str, skips: bool, axes: Axes) -> str:
        if kind in ("new_state", "grad_state"):
            return f"{self._state(number, 'next')} = {value};"
        adds = kind == "grad_gate" and not skips
        bias = f" sum_gate_{number}[k] += {value};" if adds else ""
        if self._in_order(kind, number, axes):
            return f"{kind}_{number}[k] = {value};{bias}"
        if kind in ("output", "grad_gate"):
            flat = self._flat(kind.removeprefix("grad_"), number, axes)
            return f"{self._at(kind, number, axes, flat)} = narrow<io>({value});{bias}"
        if skips:
            return ""
        if kind == KEPT:
            return f"{self._at(KEPT, number, axes, 'e.flat')} = {value};"
        if kind == "grad_memory":
            at = f"{self._memory_at(number)} + {self._flat('memory', number, axes)}"
            return f"p.grad_memories[{number}][{at}] += {value};"
        if kind != "grad_param":
            raise EngineError(f"kernels of clusters have no {kind} among their results")
        return f"sum_param_{number}[k] += {value};"

    def _end(self) -> None:
        """Add the end of a step: the states that the next one starts from."""
        for i, axes in enumerate(self.states):
            target, entry = self._of_caller(self.results, i, "place.sequence(e.row, l)")
            is_array, is_last = self._has_lines(axes), "begins" if self.is_backward else "ends"
            name = self._state(i, "next" if is_array else "state")
            zero = f"  if (place.is_reset(e.row, l)) {name} = constant(0);"
            self._loop(axes, [
                *([] if is_array else [f"{name} = next_{i}[k];"]),
                "if (events && e.there && !place.is_padding(e.row, l)) {",
                *[zero] * self.is_backward,
                f"  if (place.{is_last}(e.row, l) && {target} != nullptr) {entry} = {name};",
                "}",
            ])  # fmt: skip
            if is_array:
                swap = f"state_{i} = next_{i}, next_{i} = before;"
                self.lines.append(f"    {{ scalar* const before = state_{i}; {swap} }}")

    def _finish(self) -> None:
        self.lines += ["", "  PARARNN_FUNCTION void finish() {"]
        for name, axes, start in self.sums:
            self._loop(axes, [
                "if (e.there) p.partial[place.at_sequence(place.first_row + e.row, "
                f"partial_numbers) + {start}] = {name}[k];"
            ])  # fmt: skip
        self.lines.append("    if (events) return;")
        for i, axes in enumerate(self.states):
            target, entry = self._of_caller(self.results, i, "place.first_row + e.row")
            line = f"if (e.there && {target} != nullptr) {entry} = {self._state(i)};"
            self._loop(axes, [line])
        self.lines.append("  }")


def _hands_on(sink: Sink) -> bool:
    return sink.target is not None and sink.target.kind in ("new_state", "grad_state")


class _LoopText(NestText):
    """The code of a loop over the entries that a block has of values with some axes."""

    there: Sequence[str] = ("e.there",)
    """What must hold where the caller's memory is read."""

    def __init__(
        self,
        emission: _Emission,
        axes: Axes,
        early: Mapping[Value, str] | None = None,
        ahead: bool = False,
    ) -> None:
        self.emission, self.axes, self.result, self.ahead = emission, axes, axes, ahead
        self.early = early or {}
        self.body = Body(f"{emission.program.cell_name}'s {emission.variant.direction} pass")
        self.lines: list[str] = []

    def load(self, value: Value) -> None:
        if value.node in self.body.values:
            return
        if value in self.early:
            self.body.values[value.node] = (f"{self.early[value]}[k]", kind_of(value))
        elif self.is_leaf(value):
            self.lines.append(self.variable(value, self._leaf(value)))
        else:
            self.lines.append(self.point(value))

    def text(self, value: Value) -> str:
        """Return a value's name, of its own kind."""
        self.load(value)
        return str(self.body.values[value.node][0])

    def is_leaf(self, value: Value) -> bool:
        """Check whether the loop reads a value rather than computes it."""
        return self._is_shared(value) or self.emission.steps.is_leaf(value)

    def _is_shared(self, value: Value) -> bool:
        is_inside = value.axes == self.axes[:1] != self.axes
        return is_inside and value in self.emission.line_values

    def _of_line(self, key: object) -> str:
        """Return a number that is in shared memory, of the line of an entry."""
        share = self.emission.layout.shares[self.axes]
        lines = share.block // share.line
        return f"{self.emission._in_shared(key)}[e.row * {lines} + e.at / {share.line}]"

    def _leaf(self, value: Value) -> str:
        emission, steps = self.emission, self.emission.steps
        if self._is_shared(value):
            return self._of_line(("line", value))
        local = value.axes == self.axes and not emission._has_lines(value.axes)
        if value in emission.kinds:
            kind, number = emission.kinds[value]
            if local and kind == emission.state_kind:
                return f"state_{number}[k]"
            if local and kind == "param":
                return f"param_{number}[k]"
            if (kind, number) in emission.fed.get(self.axes, ()):
                name = emission._name(kind, number, self.axes)
                return emission.widened(kind, number, self.axes) if self.ahead else f"now.{name}[k]"
            return self._elsewhere(value)
        link = emission.leaves[value]
        if link.kind == "lines" and self.axes[0] == value.axes[0]:
            return self._of_line(link)
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
        terms = []
        for i, axis in enumerate(axes):
            stride = self.emission.lengths.numbers(axes[i + 1 :])
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
