"""Emitted C++ of matrix cells: the loops of each pass over one step of one head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch

from pararnn.cells.matrix import Axes
from pararnn.codegen.emit import Body, NestText
from pararnn.codegen.spelling import REAL
from pararnn.program.matrix import Passes, axes_by_kind, passes_of
from pararnn.program.program import Program
from pararnn.program.rectangles import with_rectangles
from pararnn.program.schedule import LoopPlan, Nest, schedule
from pararnn.program.statements import (
    Index,
    Outer,
    Product,
    Reduce,
    Rename,
    Select,
    Slide,
    Statements,
    Target,
    Value,
    axis_of_alias,
    is_copy,
)

ARRAYS = """// Arrays of one head of one row, whose last axis is filled up to whole vectors.
struct Arrays {
  const scalar *state[num_states], *gate[num_gates], *param[num_params + 1];
  const scalar *packed[num_products + 1];
  scalar *new_state[num_states], *output[num_outputs];
  const scalar *grad_new_state[num_states], *grad_output[num_outputs];
  scalar *grad_state[num_states], *grad_gate[num_gates], *grad_param[num_params + 1];
};
"""
ROW_BLOCK = 16
"""Rows of a batch that a task runs side by side, where products read a matrix for each row."""
ROW_STRIDES = {
    "gate": "gate_array",
    "grad_gate": "gate_array",
    "output": "output_array",
    "grad_output": "output_array",
    "memory": "at.memory_array",
    "grad_memory": "at.memory_array",
}
"""Distances of a row's arrays from those of the row before, by kind; those of states are
`StateSizes::array`, and parameters have no rows."""
STATES = ("state", "new_state", "grad_state", "grad_new_state")
"""Kinds of the arrays of states."""
NO_MEMORIES = """constexpr int num_memories = 0;
inline void sizes_of_memories(const int64*, int64*, int64*) {}
inline int64 scratch_of_memories(const int64*) { return 0; }"""
"""The tables of cells without memories."""
MEMORY_ARRAYS = """// Memories of a row, and the numbers of them, of its states and its scratch.
struct MemoryArrays {
  const scalar* memory[num_memories];
  scalar* grad_memory[num_memories];
  const int64* lengths;
  int64 memory_array, state_array, scratch_row;
};
"""
FIXED_STATES = """// Sizes of the states of a head, as rows of one vector each, and the numbers of
// all arrays and of all tensors.
struct StateSizes {{
  static constexpr int64 rows[] = {{{rows}}}, count[] = {{{count}}};
  static constexpr int64 array = array_numbers(rows, count, num_states);
  static constexpr int64 numbers = pararnn::numbers(rows, count, num_states);
  explicit StateSizes(const int64*) {{}}
}};"""
"""The sizes of states of fixed lengths."""
STATES_OF_CALLS = """// Sizes of the states of a head in a call, as rows of one vector each, and the
// numbers of all arrays and of all tensors.
struct StateSizes {{
  int64 rows[num_states], count[num_states], array, numbers;
  explicit StateSizes(const int64* lengths) : rows{{{rows}}}, count{{{count}}} {{
    array = array_numbers(rows, count, num_states);
    numbers = pararnn::numbers(rows, count, num_states);
  }}
}};"""
"""The sizes of states of which a call decides some."""
IDENTITY = {"sum": "0", "max": "-infinity", "min": "infinity"}
"""Initial value of a reduction."""


def emit_matrix(program: Program, dtype: torch.dtype) -> str:
    """Emit sizes, and the functions forward_step, advance_step and backward_step, in a compute
    dtype. Raises EngineError for ops that have no spelling."""
    passes = Passes(*map(with_rectangles, passes_of(program.statements[dtype])))
    sizes, of_calls = program.step.head, program.step.axes.of_calls
    order = tuple(axis for axis in passes.forward.order if axis not in of_calls)
    lengths = {axis: sizes.lengths[axis_of_alias(axis)] for axis in order}
    matrices = _matrices(passes)
    tables = [_packed_matrix(*matrix) for matrix in matrices] or ["{0, 0}"]
    by_rows = _multiplies_rows(passes)
    functions = [
        _Function(program, name, statements, matrices, by_rows)
        for name, statements in _statements(passes).items()
    ]
    return "\n".join(
        [
            *(f"constexpr int64 size_{axis} = {length};" for axis, length in lengths.items()),
            *(f"constexpr int64 padded_{axis} = (size_{axis} + lanes - 1) / lanes * lanes;"
              for axis in order),
            *_tables(program, order),
            f"constexpr int num_products = {len(matrices)};",
            "constexpr PackedMatrix products[] = "
            + "{" + ", ".join(tables) + "};",
            f"constexpr int64 row_block = {_block(by_rows)};",
            "constexpr int64 scratch_numbers = "
            + f"std::max<int64>({{{', '.join(function.scratch for function in functions)}}});",
            "",
            *_memory_arrays(program, functions),
            *(function.text() for function in functions),
        ]
    )  # fmt: skip


@lru_cache(maxsize=1024)
def row_block(program: Program, dtype: torch.dtype) -> int:
    """Return the most rows that a task runs, in a compute dtype."""
    passes = Passes(*map(with_rectangles, passes_of(program.statements[dtype])))
    return _block(_multiplies_rows(passes))


def _block(by_rows: bool) -> int:
    return ROW_BLOCK if by_rows else 1


def memory_tables(program: Program) -> list[str]:
    """Return how many memories a cell has, and a function of their sizes: of all tensors, as rows
    of one vector each."""
    memory = program.step.axes.memory
    if not memory:
        return [NO_MEMORIES]
    lines = [f"constexpr int num_memories = {len(memory)};"]
    lines.append("inline void sizes_of_memories(const int64* lengths, int64* rows, int64* count) {")
    sizes = _sizes_in_calls(program, memory.values())
    lines += [f"  rows[{i}] = {r}, count[{i}] = {c};" for i, (r, c) in enumerate(sizes)]
    return [*lines, "}"]


def _sizes_in_calls(program: Program, tensors: Iterable[Axes]) -> list[tuple[str, str]]:
    """Return the rows and the count of tensors as C++, which may read `lengths` of a call."""
    axes, lengths = program.step.axes, program.step.head.lengths

    def length(axis: str) -> str:
        if axis in axes.of_calls:
            return f"lengths[{axes.of_calls.index(axis)}]"
        return str(lengths[axis])

    rows = [" * ".join(map(length, names[:-1])) or "1" for names in tensors]
    counts = [length(names[-1]) if names else "1" for names in tensors]
    return [*zip(rows, counts, strict=True)]


def _memory_arrays(program: Program, functions: Sequence[_Function]) -> list[str]:
    """Return the structs of a step's arrays, and the scratch memory of those whose size a call
    decides."""
    if not program.memory:
        return [ARRAYS]
    sizes = ", ".join(function.scratch_of_calls for function in functions)
    return [
        MEMORY_ARRAYS + ARRAYS.replace("struct Arrays", "struct Arrays : MemoryArrays"),
        "inline int64 scratch_of_memories(const int64* lengths) {",
        *_lengths(program, "lengths"),
        f"  return std::max<int64>({{{sizes}}});",
        "}",
        "",
    ]


def _lengths(program: Program, array: str) -> list[str]:
    """Return declarations of the sizes of axes that a call decides."""
    return [
        f"  const int64 size_{axis} = {array}[{i}], padded_{axis} = padded(size_{axis});"
        for i, axis in enumerate(program.step.axes.of_calls)
    ]


def _statements(passes: Passes) -> dict[str, Statements]:
    """Return the passes that become functions, by name."""
    return {name: getattr(passes, name) for name in ("forward", "advance", "backward")}


def _multiplies_rows(passes: Passes) -> bool:
    """Check whether a product or an outer product is of vectors: rows then share its matrix."""
    of_passes = [*_statements(passes).values()]
    values = [value for statements in of_passes for value in statements.values]
    products: list[Product | Outer] = [
        v.definition for v in values if isinstance(v.definition, Product)
    ]
    products += [outer for statements in of_passes for outer in statements.outers]
    return any(_reads_rows(product) for product in products)


def _reads_rows(product: Product | Outer) -> bool:
    """Check whether a product is of what `multiply` and `add_outer` take: a vector of each row."""
    source = product.source if isinstance(product, Product) else product.lhs
    return bool(product.to) or len(source.axes) == 1


Matrix = tuple[int, bool, Axes, str, str]
"""A matrix that passes multiply by: parameter, transposed, and of a parameter of more axes these,
the axis that is summed and that of the result."""


def _matrix_of(product: Product) -> Matrix:
    inner = (product.axis, product.to) if product.axes else ("", "")
    return product.param, product.transposes, product.axes, *inner


def _matrices(passes: Passes) -> list[Matrix]:
    values = [value for whole in _statements(passes).values() for value in whole.values]
    definitions = [v.definition for v in values if isinstance(v.definition, Product)]
    shared = [product for product in definitions if product.kind == "param"]
    return [*dict.fromkeys(map(_matrix_of, shared))]


def _packed_matrix(param: int, transposes: bool, axes: Axes, axis: str, to: str) -> str:
    """Return the entry of a matrix in the table `products`, as C++."""
    words = [str(param), str(int(transposes))]
    if axes:

        def stride(name: str) -> str:
            return _numbers(axes[axes.index(name) + 1 :])

        others = [a for a in axes if a not in (axis, to)]
        counts, strides = [f"size_{a}" for a in others], [stride(a) for a in others]
        if len(others) == 1:
            counts, strides = [*counts, "1"], [*strides, "0"]
        words += [f"size_{axis}", f"size_{to}", stride(to if transposes else axis)]
        words += [f"{{{', '.join(entries)}}}" for entries in (counts, strides)]
    return f"{{{', '.join(words)}}}"


def _tables(program: Program, order: Axes) -> list[str]:
    """Return arrays of the sizes of all tensors by kind, as rows of one vector each, for copies
    between memory and padded arrays."""
    kinds = axes_by_kind(program.step)
    shared = [int(param.kind.axes is None) for param in program.step.cls.params.values()]
    del kinds["memory"]  # see `memory_tables`
    of_states, counts_of_states = zip(*_sizes_in_calls(program, kinds["state"]), strict=True)
    state_axes = {axis for axes in kinds.pop("state") for axis in axes}
    is_fixed = state_axes.isdisjoint(program.step.axes.of_calls)
    states = FIXED_STATES if is_fixed else STATES_OF_CALLS
    lines = [
        f"constexpr int num_states = {len(of_states)}, num_gates = {len(kinds['gate'])}, "
        f"num_params = {len(kinds['param'])}, num_outputs = {len(kinds['output'])};",
        f"constexpr bool param_of_all_heads[] = {{{', '.join(map(str, shared or [0]))}}};",
        states.format(rows=", ".join(of_states), count=", ".join(counts_of_states)),
    ]
    for kind, tensors in kinds.items():
        rows = [_numbers(axes[:-1]) for axes in tensors]
        counts = [f"size_{axes[-1]}" if axes else "1" for axes in tensors]
        for name, entries in (("rows", rows), ("count", counts)):
            lines.append(f"constexpr int64 {kind}_{name}[] = {{{', '.join(entries or ['0'])}}};")
        tables = f"{kind}_rows, {kind}_count, num_{kind}s"
        lines.append(f"constexpr int64 {kind}_array = array_numbers({tables});")
    return lines


def _numbers(axes: Iterable[str]) -> str:
    """Return the product of the sizes of axes."""
    return " * ".join(f"size_{axis}" for axis in axes) or "1"


def _size(axes: Axes) -> str:
    """Return the size of an array, whose last axis is padded to whole vectors."""
    if not axes:
        return "lanes"
    return " * ".join([*(f"size_{axis}" for axis in axes[:-1]), f"padded_{axes[-1]}"])


def _index(axes: Axes, last: str, names: Axes = ()) -> str:
    """Return the index of an array's entry; `last` along its last axis. names: of the indices along
    its axes, by default these."""
    pairs = zip(axes[:-1], names or axes, strict=False)
    return " + ".join([*(f"i_{name} * {_stride(axes, axis)}" for axis, name in pairs), last])


def _moved(definition: Slide | Select) -> str:
    """Return the index of a source along the axis of a slide, or of a selection."""
    axis = definition.axis
    if isinstance(definition, Select):
        return (
            f"size_{axis} - {-definition.index}" if definition.index < 0 else f"{definition.index}"
        )
    moved = f"i_{axis} + ({definition.by})"
    if definition.taps:
        sign, taps = "+" if definition.sign > 0 else "-", definition.taps
        moved += f" {sign} (i_{taps} - (size_{taps} - 1) / 2)"
    return moved


def _loops(axes: Sequence[str]) -> str:
    """Return the heads of loops over axes."""
    heads = [f"for (int64 i_{a} = 0; i_{a} < size_{a}; ++i_{a})" for a in axes]
    return "".join(f"  {head}\n" for head in heads)


def _offset(axes: Sequence[str], size: str) -> str:
    """Return what is added to a pointer for the indices of axes, of arrays of a size."""
    terms = [" * ".join([f"i_{a}", *(f"size_{b}" for b in axes[i + 1 :]), size])
             for i, a in enumerate(axes)]  # fmt: skip
    return "".join(f" + {term}" for term in terms)


def _stride(axes: Axes, axis: str) -> str:
    """Return the distance of an array's entries along an axis, which is not the last."""
    inner = [*(f"size_{a}" for a in axes[axes.index(axis) + 1 : -1]), f"padded_{axes[-1]}"]
    return " * ".join(inner)


def _position(axes: Axes, indices: Sequence[str]) -> str:
    """Return what is added to an array for indices along some of its axes."""
    return "".join(f" + i_{a} * {_stride(axes, a)}" for a in indices)


def _entry(array: str, axes: Axes) -> str:
    """Return the array of a vector among those of an array, for indices of its other axes."""
    return array + _position(axes, axes[:-1])


@dataclass
class _Function:
    """One pass as a C++ function, and the scratch memory of its arrays.

    by_rows: it runs several rows, whose arrays have distances; else one.
    """

    program: Program
    name: str
    statements: Statements
    matrices: list[Matrix]
    by_rows: bool
    plan: LoopPlan = field(init=False)
    names: dict[Value, str] = field(init=False)

    def __post_init__(self) -> None:
        self.plan = schedule(self.statements)
        self.names = {value: f"{kind}[{n}]" for (kind, n), value in self.statements.inputs.items()}
        self.names |= {value: f"a{i}" for i, value in enumerate(self.plan.arrays)}
        for value in self.statements.values:
            if isinstance(value.definition, Rename) and not is_copy(value):
                self.names[value] = self.names[value.definition.source]

    @property
    def of_calls(self) -> Axes:
        """The axes whose sizes a call decides."""
        return self.program.step.axes.of_calls

    @property
    def scratch(self) -> str:
        """Size of all arrays of fixed size, as C++."""
        return self._scratch(of_calls=False)

    @property
    def scratch_of_calls(self) -> str:
        """Size of all arrays whose size a call decides, as C++."""
        return self._scratch(of_calls=True)

    def _scratch(self, of_calls: bool) -> str:
        arrays = [value.axes for value in self.plan.arrays]
        axes = [a for a in arrays if {*a}.isdisjoint(self.of_calls) != of_calls]
        return " + ".join(map(_size, axes)) or "0"

    def text(self) -> str:
        """Return the function."""
        rows = "int64 rows" if self.by_rows else "int64"
        lines = [f"inline void {self.name}_step(const Arrays& at, {rows}, scalar* scratch) {{"]
        lines += _lengths(self.program, "at.lengths")
        for i, value in enumerate(self.plan.arrays):
            lines.append(f"  scalar* const a{i} = scratch;")
            lines.append(f"  scratch += {_size(value.axes)};")
        for operation in self.plan.operations:
            if isinstance(operation, Nest):
                lines += _NestOfVectors(self, operation).lines()
            elif isinstance(operation, Outer):
                lines.append(self._outer(operation))
            elif is_copy(operation):
                lines.append(self._copy(operation))
            else:
                lines.append(self._product(operation))
        return "\n".join([*lines, "}", ""])

    def array(self, value: Value) -> str:
        """Return the name of the array of a value that is not in a register."""
        name = self.names[value]
        return f"at.{name}" if "[" in name else name

    def stride(self, array: str) -> str:
        """Return the distance of a row's array from that of the row before."""
        kind = array.removeprefix("at.").split("[")[0]
        scratch = "at.scratch_row" if self.program.memory else "scratch_numbers"
        if kind in STATES:
            return "at.state_array" if self.program.memory else "StateSizes::array"
        return ROW_STRIDES.get(kind, "0" if array.startswith("at.") else scratch)

    def of_row(self, array: str) -> str:
        """Return the array of the row r."""
        stride = self.stride(array)
        return f"({array} + r * {stride})" if self.by_rows and stride != "0" else array

    def in_rows(self, call: str) -> str:
        """Return a call for the row r, for all rows."""
        return f"  for (int64 r = 0; r < rows; ++r)\n  {call}" if self.by_rows else call

    def _copy(self, value: Value) -> str:
        """Return loops that write an array by entries of another at other indices, or an index."""
        definition = value.definition
        inside, moved, entry = ["true"], "", ""
        if isinstance(definition, Index):
            entry = f"scalar(i_{definition.axis})"
        elif isinstance(definition, (Rename, Slide, Select)):
            source = definition.source
            names = source.axes
            if isinstance(definition, Rename):
                names = definition.names
            else:
                names = tuple("moved" if a == definition.axis else a for a in names)
                moved = f"const int64 i_moved = {_moved(definition)}; "
                inside = [f"i_moved >= 0 && i_moved < size_{definition.axis}"]
            index = _index(source.axes, f"i_{names[-1]}", names)
            entry = f"{self.of_row(self.array(source))}[{index}]"
        result, loops = f"{self.of_row(self.array(value))}[0]", ""
        if value.axes:
            last = value.axes[-1]
            inside.append(f"i_{last} < size_{last}")
            result = f"{self.of_row(self.array(value))}[{_index(value.axes, f'i_{last}')}]"
            filled = f"for (int64 i_{last} = 0; i_{last} < padded_{last}; ++i_{last})"
            loops = f"{_loops(value.axes[:-1])}  {filled}\n"
        body = f"{{ {moved}{result} = {' && '.join(inside)} ? {entry} : scalar(0); }}"
        return self.in_rows(f"{loops}  {body}")

    def _product(self, value: Value) -> str:
        product = value.definition
        assert isinstance(product, Product)
        axes, axis = product.source.axes, product.axis
        to = product.to or axis
        source, result = self.array(product.source), self.array(value)
        if product.kind == "memory":
            matrix = self.of_row(f"at.memory[{product.param}]")
            rows = _numbers(axes[:-1])
            return self.in_rows(
                f"  multiply_by_row<{str(product.transposes).lower()}>(size_{axis}, {rows}, "
                f"{self.of_row(source)}, {matrix}, {self.of_row(result)});"
            )
        number = self.matrices.index(_matrix_of(product))
        if _reads_rows(product):
            matrix, loops, adds = f"at.packed[{number}]", "", ""
            if len(value.axes) > 1 or len(axes) > 1:
                others = [a for a in product.axes if a not in (axis, to)]
                summed = [a for a in others if a not in value.axes]
                outer = [*value.axes[:-1], *summed]
                loops = _loops(outer)
                matrix += _offset(others, f"size_{axis} * padded_{to}")
                adds = f", {' + '.join(f'i_{a}' for a in summed)} > 0" if summed else ""
            return (
                f"{loops}  multiply(rows, {_entry(source, axes)}, {self.stride(source)}, {matrix}, "
                f"size_{axis}, padded_{to} / lanes, {_entry(result, value.axes)}, "
                f"{self.stride(result)}{adds});"
            )
        source, result = self.of_row(source), self.of_row(result)
        if axes[-1] == axis:
            rows = _numbers(axes[:-1])
            return self.in_rows(
                f"  multiply({rows}, {source}, padded_{axis}, at.packed[{number}], size_{axis}, "
                f"padded_{axis} / lanes, {result}, padded_{axis});"
            )
        rows = _numbers(axes[: axes.index(axis)])
        return self.in_rows(
            f"  multiply_columns({rows}, {source}, {_stride(axes, axis)}, at.packed[{number}], "
            f"size_{axis}, {result});"
        )

    def _outer(self, outer: Outer) -> str:
        lhs, rhs, axis = outer.lhs, outer.rhs, outer.axis
        left, right = self.array(lhs), self.array(rhs)
        target = self.of_row(f"at.grad_{outer.kind}[{outer.param}]")
        if outer.kind == "param" and _reads_rows(outer):
            sizes, loops = f"size_{axis}, padded_{outer.to or axis}", ""
            if outer.axes:
                others = [a for a in outer.axes if a not in (axis, outer.to)]
                loops = _loops(others)
                target += _position(outer.axes, others)
                sizes += f", {_stride(outer.axes, axis)}"
            return (
                f"{loops}  add_outer<{sizes}>(rows, {_entry(left, lhs.axes)}, "
                f"{self.stride(left)}, {_entry(right, rhs.axes)}, {self.stride(right)}, {target});"
            )
        left, right = self.of_row(left), self.of_row(right)
        free_axes = [a for a in lhs.axes if a != axis]
        if lhs.axes[-1] == axis:
            rows = _numbers(free_axes)
            if axis in self.of_calls:
                return self.in_rows(f"  add_outer(size_{axis}, {rows}, {left}, {right}, {target});")
            arguments = f"{left}, padded_{axis}, {right}, padded_{axis}"
            return self.in_rows(
                f"  add_outer<size_{axis}, padded_{axis}>({rows}, {arguments}, {target});"
            )
        count = f"size_{free_axes[-1]}"
        return self.in_rows(
            f"  add_inner<size_{axis}, padded_{axis}>({count}, {left}, {right}, {target});"
        )


@dataclass
class _NestOfVectors(NestText):
    """The C++ of a nest of loops, the innermost over vectors."""

    function: _Function
    nest: Nest
    body: Body = field(init=False)
    loads: dict[int, list[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.body = Body(f"{self.function.program.cell_name}'s {self.function.name}")
        self.loads = {depth: [] for depth in range(len(self.nest.axes) + 1)}

    def lines(self) -> list[str]:
        """Return the loops."""
        axes, inner = self.nest.axes, self.loads[len(self.nest.axes)]
        for value in self.nest.points:
            self._point(value)
        starts: dict[int, list[str]] = {depth: [] for depth in self.loads}
        ends: dict[int, list[str]] = {depth: [] for depth in self.loads}
        for value in self.nest.reductions:
            self._reduction(value, starts, ends)
        for target, source in self.nest.writes:
            self._write(target, source)
        head = "for (int64 r = 0; r < rows; ++r) {" if self.function.by_rows else "{"
        lines: list[str] = [f"  {head}"]
        for depth, axis in enumerate(axes):
            indent = "  " * (depth + 2)
            lines += [indent + line for line in (*starts[depth], *self.loads[depth])]
            head = f"for (int64 i_{axis} = 0; i_{axis} < size_{axis}; ++i_{axis}) {{"
            if depth + 1 == len(axes):
                head = f"for (int64 v = 0; v < padded_{axis}; v += lanes) {{"
            lines.append(indent + head)
        indent = "  " * (len(axes) + 2)
        lines += [indent + line for line in (*starts[len(axes)], *inner)]
        for depth in reversed(range(len(axes))):
            lines.append("  " * (depth + 2) + "}")
            lines += ["  " * (depth + 2) + line for line in ends[depth]]
        return [*lines, "  }"]

    def load(self, value: Value) -> None:
        """Load a value of other loops, in the outermost loop that has its axes."""
        if value.node in self.body.values:
            return
        axes, array = self.nest.axes, self.function.of_row(self.function.array(value))
        if value.axes and value.axes[-1] == axes[-1]:
            depth, text = len(axes), f"load_as({array} + {_index(value.axes, 'v')})"
        else:
            depth = max((axes.index(axis) + 1 for axis in value.axes), default=0)
            last = f"i_{value.axes[-1]}" if value.axes else "0"
            text = f"broadcast({array}[{_index(value.axes, last)}])"
        self.loads[depth].append(self.variable(value, text))

    def _point(self, value: Value) -> None:
        self.loads[len(self.nest.axes)].append(self.point(value))
        if value in self.function.plan.arrays:
            array = self.function.of_row(self.function.array(value))
            self._store(array, value.axes, self.real(value))

    def _store(self, array: str, axes: Axes, text: str) -> None:
        pointer = f"{array} + {_index(axes, 'v')}" if axes else array
        self.loads[len(self.nest.axes)].append(f"store_as({pointer}, {text});")

    def _write(self, target: Target, source: Value | float) -> None:
        array = self.function.of_row(f"at.{target.kind}[{target.number}]")
        text = self.real(source)
        if target.adds:
            pointer = f"{array} + {_index(target.axes, 'v')}" if target.axes else array
            text = f"load_as({pointer}) + {text}"
        self._store(array, target.axes, text)

    def _reduction(
        self, value: Value, starts: dict[int, list[str]], ends: dict[int, list[str]]
    ) -> None:
        reduction = value.definition
        assert isinstance(reduction, Reduce)
        axes, array = self.nest.axes, self.function.of_row(self.function.array(value))
        op, name, text = reduction.op, f"r{len(self.body.values)}", self.real(reduction.source)
        self.body.values[value.node] = (name, REAL)  # nothing else reads it here
        inner, last = self.loads[len(axes)], axes[-1]
        start, of_calls = f"constant({IDENTITY[op]})", self.function.of_calls
        if reduction.axis == last:
            depth = len(axes) - 1
            starts[depth].append(f"real {name} = {start};")
            inside = f"({text}, v, size_{last}, {start})"
            if last not in of_calls:
                inside = f"<size_{last}>({text}, v, {start})"
            text = f"inside{inside}"
            inner.append(f"{name} = {_combine(op, name, text)};")
            combine = op.capitalize()
            if not value.axes:
                ends[depth].append(f"{array}[0] = combine_lanes({name}, {combine}());")
                return
            row = value.axes[-1]
            first = f"{array} + {_index(value.axes, '0')}"
            rows = f"RowsOfLanes<{combine}, size_{row}> rows_{name}({first});"
            if row in of_calls:
                rows = f"RowsOfLanes<{combine}> rows_{name}({first}, size_{row});"
            starts[depth - 1].append(rows)
            ends[depth].append(f"rows_{name}.put(i_{row}, {name});")
            return
        depth = axes.index(reduction.axis)
        width = _size(axes[depth + 1 :])
        if depth + 2 == len(axes) and last not in of_calls:  # stays in registers
            starts[depth] += [f"real {name}[{width} / lanes];",
                              f"for (real& x : {name}) x = {start};"]  # fmt: skip
            element, base = f"{name}[v / lanes]", _index(value.axes, "v")
            inner.append(f"{element} = {_combine(op, element, text)};")
            ends[depth].append(
                f"for (int64 v = 0; v < padded_{last}; v += lanes) "
                f"store_as({array} + {base}, {element});"
            )
            return
        size = _size(value.axes)
        starts[0].append(
            f"for (int64 n = 0; n < {size}; n += lanes) store_as({array} + n, {start});"
        )
        pointer = f"{array} + {_index(value.axes, 'v')}"
        inner.append(f"store_as({pointer}, {_combine(op, f'load_as({pointer})', text)});")


def _combine(op: str, a: str, b: str) -> str:
    return f"{a} + {b}" if op == "sum" else f"{op}imum({a}, {b})"
