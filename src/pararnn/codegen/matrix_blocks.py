"""Emitted CUDA of matrix cells: a step of one head by the threads of a block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from pararnn.base.errors import EngineError
from pararnn.base.numerics import compute_dtype
from pararnn.cells.matrix import Axes
from pararnn.codegen.emit import Body, NestText
from pararnn.codegen.shares import LANES, ThreadLayout, lanes_only, layout_of, main_axes
from pararnn.codegen.spelling import IDENTITY, REAL
from pararnn.program.late import LINK, SplitPass, partial_reductions, prepare, split
from pararnn.program.matrix import Passes, axes_by_kind, passes_of
from pararnn.program.program import Program
from pararnn.program.schedule import LoopPlan, Nest, Operation, schedule
from pararnn.program.statements import (
    RENAMED,
    Outer,
    Product,
    Reduce,
    Statements,
    Target,
    Value,
    sources_of,
)

SQUARE = 2
"""Number of axes of a parameter that multiplies; both are the same axis."""
TILE_ALIGNMENT = 32
"""Alignment of tiles in shared memory, in values."""
REGISTER_SIZE = 32
"""Largest matrix whose fragments a warp has in registers."""
FUNCTIONS = {"forward": ("advance", "readout"), "backward": ("advance", "backward")}
"""Functions of a kernel, by direction."""
READY_TYPES = {"advance": "AdvanceReady", "readout": "AdvanceReady", "backward": "BackwardReady"}
"""Structs that functions read instead of gates, see `pararnn.program.late.prepare`."""
PARAMETERS = {
    "advance": "const States& state, const AdvanceReady& ready, const WideGates& gate, "
    "States& new_state",
    "readout": "const States& new_state, const AdvanceReady& ready, const WideGates& gate, "
    "WideOutput& output, real* slot",
    "backward": "const States& state, const BackwardReady& ready, const WideGates& gate, "
    "const States& grad_new_state, const Output& grad_output, States& grad_state, "
    "WideGates& grad_gate, WideParams& grad_param, Outers& grad_matrix, real* slot",
}
"""Parameters of the functions, after those that all have."""
STRUCTS = {"States": "state", "Gates": "gate", "Params": "param", "Output": "output"}
"""Structs of a thread's entries of all tensors of a kind."""
LATE = {"readout": ["output"], "backward": ["grad_gate", "grad_param"]}
"""Results by function, whose numbers and vectors wait for the end of a window of steps."""
FINISH_PARAMETERS = {
    "readout": "const Links& link, const AdvanceReady& ready, Output& output",
    "backward": "const Links& link, const BackwardReady& ready, Gates& grad_gate, "
    "Params& grad_param",
}
"""Parameters of the functions that compute late results."""


@dataclass
class Emitted:
    """CUDA of a pass of a matrix cell, and the sizes that its kernel needs.

    exchange: values of shared memory by which threads exchange in one round of a step. slot: values
    of shared memory that a step writes for the end of its window. ready: values that a step reads
    there, computed at the start of its window. in_memory: sizes of the matrices in shared memory.
    fragments: words of shared memory for fragments of matrices.
    """

    text: str
    layout: ThreadLayout
    exchange: int
    slot: int
    ready: int
    in_memory: list[int]
    fragments: int


def emit_block(
    program: Program, dtype: torch.dtype, direction: str, matrix_parts: int = 1
) -> Emitted:
    """Emit the functions of a pass for gates of a dtype. Raises EngineError for ops without a
    spelling, and for steps that only clusters of blocks run.

    matrix_parts: bfloat16 terms that an entry of a matrix is split into.
    """
    whole = program.statements[compute_dtype(dtype)]
    if program.memory or whole.renames:
        has = "a memory" if program.memory else RENAMED
        raise EngineError(
            f"{program.cell_name} has {has}: clusters of blocks run it on a GPU, and no functions "
            "of a block for each row"
        )
    passes = passes_of(whole)
    return _Emitter(program, passes, dtype, direction, matrix_parts).emission()


@dataclass
class _Emitter:
    program: Program
    passes: Passes
    dtype: torch.dtype
    direction: str
    matrix_parts: int
    layout: ThreadLayout = field(init=False)
    functions: list[_Function] = field(init=False)
    tile_matrices: list[tuple[int, bool]] = field(init=False)
    """(parameter, transposed) of products by tiles."""

    def __post_init__(self) -> None:
        sizes = self.program.step.head
        names = FUNCTIONS[self.direction]
        passes = {name: _split_pass(getattr(self.passes, name), name) for name in names}
        self.preludes = self._take_preludes(passes)
        statements = {name: pass_.now for name, pass_ in passes.items()}
        plans = {name: schedule(pass_) for name, pass_ in statements.items()}
        self.kinds = axes_by_kind(self.program.step)
        lengths = {axis: sizes.lengths[axis] for axis in self.passes.forward.order}
        main = main_axes(self.kinds["state"], lengths)
        products = [v for pass_ in statements.values() for v in pass_.values]
        by_columns = any(
            isinstance(v.definition, Product) and self._fits_tiles(v.definition, v.axes, main)
            for v in products
        )
        with_tiles = self.dtype == torch.bfloat16 and by_columns
        self.last = passes[names[-1]]
        links = self.last.partial_links()
        self.layout = layout_of(lengths, main, [*plans.values()], links, with_tiles)
        products_by_tiles = [
            (v.definition.param, v.definition.transposes)
            for v in products
            if isinstance(v.definition, Product) and self.is_tiled(v.definition.axis, v.axes)
        ]
        self.tile_matrices = [*dict.fromkeys(products_by_tiles)]
        self.functions = [
            _Function(self, self.layout, name, statements[name], plans[name], passes[name])
            for name in names
        ]

    def _take_preludes(self, passes: dict[str, SplitPass]) -> dict[str, Statements]:
        """Move values that a window computes ahead out of passes; return them by their struct."""
        preludes = {}
        for struct in dict.fromkeys(READY_TYPES[name] for name in passes):
            names = [name for name in passes if READY_TYPES[name] == struct]
            phases = [half for name in names for half in (passes[name].now, passes[name].later)]
            preludes[struct], remaining = prepare(phases)
            for name, now, later in zip(names, remaining[::2], remaining[1::2], strict=True):
                passes[name] = passes[name]._replace(now=now, later=later)
        return preludes

    def _ready_structs(self, layout: ThreadLayout) -> list[str]:
        """Return the structs of values that a window computes ahead."""
        lines = []
        for struct, prelude in self.preludes.items():
            lines += _struct(struct, [target.axes for target, _ in prelude.writes], layout)
        return lines

    def function_texts(self) -> list[str]:
        """Return the functions, each with separate shared memory."""
        texts, exchange = [], 0
        for function in self.functions:
            function.exchange = exchange
            texts.append(function.text())
            exchange = function.exchange
        return texts

    @staticmethod
    def _fits_tiles(product: Product, axes: Axes, main: tuple[str | None, str]) -> bool:
        return axes == main and product.axis == main[1]

    def is_tiled(self, axis: str, axes: Axes) -> bool:
        """Return True for products that the matrix units compute."""
        main = (self.layout.rows, self.layout.columns)
        return self.layout.tiles and axes == main and axis == self.layout.columns

    def width(self, number: int) -> int:
        """Return the size of the axis that a parameter has twice, 0 for other parameters."""
        axes = self.kinds["param"][number]
        is_square = len(axes) == SQUARE and axes[0] == axes[1]
        return self.layout.axes[axes[0]].size if is_square else 0

    def emission(self) -> Emitted:
        bodies = self.function_texts()
        exchange = -(-self.functions[-1].exchange // TILE_ALIGNMENT) * TILE_ALIGNMENT
        fragments = 0
        for number, _ in self.tile_matrices:
            size = self.width(number)
            if size > REGISTER_SIZE:
                fragments += size * size // 2 * self.matrix_parts
        staged_matrices = {p for function in self.functions for p in function.by_memory}
        in_memory = [self.width(number) for number in sorted(staged_matrices)]
        slot, ready = self.functions[-1].slot, max(map(self._numbers, self.preludes.values()))
        lines = [
            *self._axes(exchange),
            f"constexpr int slot_numbers = {slot}, ready_numbers = {ready};",
            *self._tensors(),
            *self._matrices(staged_matrices),
            *bodies,
            *self._finish(),
        ]
        return Emitted("\n".join(lines), self.layout, exchange, slot, ready, in_memory, fragments)

    def _finish(self) -> list[str]:
        """Return the code that a warp runs for a step at the start and the end of its window."""
        last, layout = self.functions[-1], lanes_only(self.layout)
        plan = schedule(self.last.later)
        finish = _Function(self, layout, last.name, self.last.later, plan)
        lines = ["namespace finish {", *_axis_types(layout)]
        for name in ("Gates", "Params" if last.name == "backward" else "Output"):
            tensors = self.kinds[STRUCTS[name]]
            lines += _struct(name, tensors, layout, lambda axes: len(axes) <= 1)
        lines += self._ready_structs(layout)
        for struct, prelude in self.preludes.items():
            prepare_step = _Function(self, layout, "prepare", prelude, schedule(prelude))
            lines.append(prepare_step.text(f"const Gates& gate, {struct}& ready", "prepare"))
        lines.append("struct Links {")
        for number, value in enumerate(self.last.links):
            lines.append(f"  real x{number}[{share_type(value.axes)}::count];")
        lines.append("  PARARNN_FUNCTION void load(const real* slot) {")
        for number, value in enumerate(self.last.links):
            offset, count, combine = last.partials[value]
            lines.append(
                f"    combine_pieces<{share_type(value.axes)}, {count}, {combine}>"
                f"(slot + {offset}, x{number});"
            )
        return [*lines, "  }", "};", finish.text(FINISH_PARAMETERS[last.name], "finish"), "}"]

    def _numbers(self, prelude: Statements) -> int:
        return sum(self.layout.numbers(target.axes) for target, _ in prelude.writes)

    def _axes(self, exchange: int) -> list[str]:
        lines = [
            f"constexpr int warps = {self.layout.warps}, exchange_numbers = {exchange};",
            "using Block = Exchange<warps, exchange_numbers>;",
            *(f"constexpr int size_{name} = {a.size};" for name, a in self.layout.axes.items()),
            *_axis_types(self.layout),
        ]
        rows = "Single" if self.layout.rows is None else f"Axis_{self.layout.rows}"
        lines.append(f"using Rows = {rows};")
        lines.append(f"using Columns = Axis_{self.layout.columns};")
        return lines

    def _tensors(self) -> list[str]:
        """Return the structs of a thread's entries of all tensors, by kind."""
        lines: list[str] = []
        for name, kind in STRUCTS.items():
            tensors = self.kinds[kind]
            lines += _struct(name, tensors, self.layout)
            if name != "States":
                lines += _struct(f"Wide{name}", tensors, self.layout, lambda axes: len(axes) > 1)
        lines += self._ready_structs(self.layout)
        shared = [int(param.kind.axes is None) for param in self.program.step.cls.params.values()]
        lines.append(
            f"constexpr int num_states = {len(self.kinds['state'])}, num_params = {len(shared)};"
        )
        lines.append(f"constexpr bool of_all_heads[] = {{{', '.join(map(str, shared or [0]))}}};")
        return lines

    def _matrices(self, staged_matrices: Iterable[int]) -> list[str]:
        """Return the structs of the matrices, and in the backward pass of their gradients."""
        lines = ["struct Matrices {"]
        loads, offset = [], 0
        for i, (number, transposes) in enumerate(self.tile_matrices):
            size = self.width(number)
            flags = f"{str(transposes).lower()}, {str(size <= REGISTER_SIZE).lower()}"
            lines.append(f"  TileMatrix<{size}, {flags}, {self.matrix_parts}> tiles{i};")
            loads.append(
                f"    tiles{i}.load(params[{number}] + head * {size * size}, fragments + {offset});"
            )
            if size > REGISTER_SIZE:
                offset += size * size // 2 * self.matrix_parts
        offset = 0
        for number in sorted(staged_matrices):
            size = self.width(number)
            lines.append(f"  const real* matrix{number};")
            loads.append(
                f"    matrix{number} = stage_matrix<{size}>(params[{number}] + head * "
                f"{size * size}, memory + {offset}, {self.layout.warps * LANES});"
            )
            offset += size * (size + 1)
        lines.append("  PARARNN_FUNCTION void load(const scalar* const* params, int64 head, "
                     "real* memory, unsigned* fragments) {")  # fmt: skip
        lines += [*loads, "  }", "};"]
        return lines if self.direction == "forward" else [*lines, *self._outers()]

    def _outers(self) -> list[str]:
        """Return the struct of a thread's accumulated gradients of matrices."""
        lines = ["struct Outers {"]
        total, stores, zeros = 0, [], []
        for number, axes in enumerate(self.kinds["param"]):
            if self.width(number):
                lines.append(f"  {self.outer_type(number)} w{number};")
                zeros.append(f"    w{number}.clear();")
                stores.append(f"    w{number}.add_to(target + {total}, copy_numbers);")
            total += self.layout.numbers(axes)
        lines += [
            "  PARARNN_FUNCTION void clear() {",
            *zeros,
            "  }",
            "  PARARNN_FUNCTION void add_to(real* target, int64 copy_numbers) const {",
            *stores,
            "  }",
            "};",
        ]
        return lines

    def outer_type(self, number: int) -> str:
        """Return the type of a thread's accumulated gradient of a matrix."""
        size = self.width(number)
        outers = [o for function in self.functions for o in function.statements.outers]
        outers = [o for o in outers if o.param == number]
        if outers and all(self.is_tiled(o.axis, o.lhs.axes) for o in outers):
            if size > REGISTER_SIZE:
                rows = self.layout.axes[self.layout.rows or ""].size
                return f"SplitTileSums<{size}, {self.matrix_parts}, {rows}, {self.layout.warps}>"
            return f"TileSums<{size}, {self.matrix_parts}>"
        return f"SquareSums<{size}, {self.layout.warps}>"

    def outer_by_tiles(self, outer: Outer) -> bool:
        """Return True for outer products that the matrix units compute."""
        return self.outer_type(outer.param).startswith("Tile")


def _split_pass(whole: Statements, name: str) -> SplitPass:
    """Return a function's pass, split where results may wait."""
    nothing = Statements(whole.graph)
    return split(whole, LATE[name]) if name in LATE else SplitPass(whole, nothing, [])


def share_type(axes: Axes) -> str:
    """Return the type of a thread's entries of a tensor."""
    return f"Share<{', '.join(f'Axis_{axis}' for axis in axes)}>"


def _axis_types(layout: ThreadLayout) -> list[str]:
    lines = []
    for axis, axis_layout in layout.axes.items():
        numbers = ", ".join(str(int(number)) for number in axis_layout[:-1])
        lines.append(f"using Axis_{axis} = Axis<{numbers}, {str(axis_layout.pairs).lower()}>;")
    return lines


def _struct(
    name: str,
    tensors: Sequence[Axes],
    layout: ThreadLayout,
    has: Callable[[Axes], bool] = lambda axes: True,
) -> list[str]:
    """Return the struct of a thread's entries of tensors whose axes `has` accepts; matrices that
    multiply have none."""
    total = sum(map(layout.numbers, tensors))
    members = {i: a for i, a in enumerate(tensors) if len({*a}) == len(a) and has(a)}
    entries = sum(map(layout.count, members.values()))
    lines = [f"struct {name} {{", f"  static constexpr int numbers = {total}, entries = {entries};"]
    lines += [f"  real x{i}[{share_type(axes)}::count];" for i, axes in members.items()]
    lines.append("  // Calls f(share, own numbers, index, numbers before it).")
    lines.append("  template <class Own, class F> PARARNN_FUNCTION static void each("
                 "Own& own, const F& f) {")  # fmt: skip
    first = 0
    for i, axes in enumerate(tensors):
        if i in members:
            lines.append(f"    f({share_type(axes)}(), own.x{i}, {i}, {first});")
        first += layout.numbers(axes)
    lines += ["  }", f"  PARARNN_FUNCTION void operator+=(const {name}& other) {{"]
    for i, axes in members.items():
        loop = f"for (int n = 0; n < {share_type(axes)}::count; ++n)"
        lines += ["    PARARNN_UNROLL", f"    {loop} x{i}[n] += other.x{i}[n];"]
    return [*lines, "  }", "};"]


@dataclass
class _Function:
    """One pass as a CUDA function."""

    emitter: _Emitter
    layout: ThreadLayout
    name: str
    statements: Statements
    plan: LoopPlan
    phases: SplitPass | None = None
    partials: dict[Value, tuple[int, int, str]] = field(default_factory=dict)
    """By link: offset in the step's slot, number of partial results, and how they combine."""
    slot: int = 0
    names: dict[Value, str] = field(init=False)
    kinds: dict[Value, str] = field(init=False)
    exchange: int = 0
    by_memory: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.names = {
            value: f"{kind}.x{number}" for (kind, number), value in self.statements.inputs.items()
        }
        self.names |= {value: f"a{i}" for i, value in enumerate(self.plan.arrays)}
        self.kinds = {}
        self.partial = partial_reductions(self.statements)
        self.links = self.phases.links if self.phases is not None else []
        self.partial_links = self.phases.partial_links() if self.phases is not None else set()
        self.pending: dict[Value, str] = {}
        self.outers: list[str] = []
        self.operands: dict[Value, str] = {}
        self.lines: list[str] = []

    def text(self, parameters: str = "", name: str = "") -> str:
        """Return the function."""
        common = "Block& block, const Matrices& matrices, const Params& param"
        parameters = parameters or f"{common}, {PARAMETERS[self.name]}"
        head = f"PARARNN_FUNCTION void {name or self.name}_step({parameters}) {{"
        first = self.exchange
        for target, _ in self.statements.writes:
            if target.kind == LINK:
                count = self.layout.count(target.axes)
                self.lines.append(f"  real c{target.number}[{count}];")
        later = [item for operation in self.plan.operations for item in _split_nest(operation)]
        while later:
            # Operations that need no other thread come before the barrier.
            ready = next((item for item in later if self._is_ready(item, later)), None)
            if ready is None:
                self._synchronise()
                continue
            later.remove(ready)
            if isinstance(ready, Nest):
                _UnrolledNest(self, ready).emit()
            elif isinstance(ready, Outer):
                self._outer(ready)
            else:
                self._product(ready)
        self._synchronise()
        for number, value in enumerate(self.links):
            if value not in self.partials:
                self._link(value, f"c{number}", [], "Sum")
        turn = ["  block.turn();"] if self.exchange > first else []
        return "\n".join([head, *turn, *self.lines, "}", ""])

    def declare(self, value: Value, kind: str = REAL) -> str:
        """Declare the array of a value, and return its name."""
        self.kinds[value] = kind
        self.lines.append(f"  {kind} {self.names[value]}[{self.layout.count(value.axes)}];")
        return self.names[value]

    def kind(self, value: Value) -> str:
        """Return the kind of a value's array."""
        return self.kinds.get(value, REAL)

    def region(self, numbers: int) -> str:
        """Reserve shared memory for an exchange, and return its address."""
        first, self.exchange = self.exchange, self.exchange + numbers
        return f"block.region({first})"

    def _is_ready(self, operation: Operation, later: list[Operation]) -> bool:
        """Return True for operations that read no later value, and none that threads exchange."""
        results = {*_results(operation)}
        missing = {v for unready in later if unready is not operation for v in _results(unready)}
        missing |= {*self.pending}
        return all(value in results or value not in missing for value in _sources(operation))

    def _synchronise(self) -> None:
        """Synchronise the threads of the block, then complete what waits for it."""
        if self.pending or self.outers:
            self.lines += ["  block.meet();", *self.pending.values(), *self.outers]
        self.pending, self.outers = {}, []

    def reduce(self, value: Value) -> None:
        """Combine the partial results of a reduction in lanes and warps."""
        reduction = value.definition
        assert isinstance(reduction, Reduce)
        if value in self.partial:
            return
        name, share = self.names[value], share_type(value.axes)
        combine, layout = reduction.op.capitalize(), self.layout
        axes = [reduction.axis]
        while reduction.source in self.partial:
            reduction = reduction.source.definition
            assert isinstance(reduction, Reduce)
            axes.append(reduction.axis)
        if value in self.partial_links:
            self._link(value, name, axes, combine)
            return
        for axis in axes:
            self.lines.append(f"  combine_lanes<Axis_{axis}, {combine}>({name});")
        far = [axis for axis in axes if layout.axes[axis].warps > 1]
        if far:
            size = layout.numbers(value.axes)
            count = math.prod(layout.axes[a].warps for a in far)
            region, grid = self.region(size * count), f"Grid<{', '.join(f'Axis_{a}' for a in far)}>"
            self.lines.append(f"  put_part<{grid}, {share}>({name}, {region});")
            self.pending[value] = f"  combine_parts<{grid}, {share}, {combine}>({region}, {name});"

    def _link(self, value: Value, name: str, axes: list[str], combine: str) -> None:
        """Write a value to the step's slot, or a reduction's partial results in lanes and warps."""
        layout = self.layout
        lanes = [layout.axes[axis].lanes for axis in axes]
        levels = spread_levels(lanes[0] if lanes else 1, layout.count(value.axes))
        warps = math.prod(layout.axes[axis].warps for axis in axes)
        count = math.prod(lanes) * warps >> levels
        size = layout.numbers(value.axes)
        self.partials[value] = (self.slot, count, combine)
        along = f"{share_type(value.axes)}, {levels}, {combine}, Rows, Columns"
        grid = "".join(f", Axis_{axis}" for axis in axes)
        self.lines.append(f"  put_pieces<{along}{grid}>({name}, slot + {self.slot});")
        self.slot += size * count

    def _operand(self, value: Value) -> str:
        """Put a value into shared memory, and return its address."""
        if value not in self.operands:
            sizes = [self.layout.axes[axis].size for axis in value.axes]
            self.operands[value] = self.region(_padded_count(sizes))
            share = share_type(value.axes)
            name = self.names[value]
            self.lines.append(f"  put<{share}>({name}, {self.operands[value]});")
        return self.operands[value]

    def _tiles(self, value: Value, sums: str) -> str:
        """Put the tiles of a value into shared memory, and return their address."""
        numbers = self.layout.numbers(value.axes) // 2 * self.emitter.matrix_parts
        first = -(-self.exchange // TILE_ALIGNMENT) * TILE_ALIGNMENT
        self.exchange = first
        region = self.region(numbers)
        self.lines.append(f"  {sums}::put({self.names[value]}, {region});")
        return region

    def _product(self, value: Value) -> None:
        product = value.definition
        assert isinstance(product, Product)
        result = self.declare(value)
        emitter = self.emitter
        if emitter.is_tiled(product.axis, value.axes):
            number = emitter.tile_matrices.index((product.param, product.transposes))
            source = self.names[product.source]
            if product.source.axes != value.axes:
                raise AssertionError("a product has its source's axes")
            self.lines.append(f"  multiply_tiles({source}, matrices.tiles{number}, {result});")
            return
        self.by_memory.add(product.param)
        along = value.axes.index(product.axis)
        operand = self._operand(product.source)
        self.pending[value] = (
            f"  multiply<{share_type(value.axes)}, {along}, {str(product.transposes).lower()}>"
            f"({operand}, matrices.matrix{product.param}, {result});"
        )

    def _outer(self, outer: Outer) -> None:
        emitter, target = self.emitter, f"grad_matrix.w{outer.param}"
        if emitter.outer_by_tiles(outer):
            lhs, rhs = self.names[outer.lhs], self.names[outer.rhs]
            self.lines.append(f"  {target}.add({lhs}, {rhs});")
            return
        sums = emitter.outer_type(outer.param)
        if sums.startswith("Split"):
            lhs, rhs = self._tiles(outer.lhs, sums), self._tiles(outer.rhs, sums)
            self.outers.append(f"  {target}.add({lhs}, {rhs});")
            return
        lhs, rhs = self._operand(outer.lhs), self._operand(outer.rhs)
        along = outer.lhs.axes.index(outer.axis)
        share = share_type(outer.lhs.axes)
        self.outers.append(f"  {target}.add<{share}, {along}>({lhs}, {rhs});")


def spread_levels(lanes: int, count: int) -> int:
    """Return how often lanes halve their entries before they write partial results."""
    levels = 0
    while lanes > 1 and count % 2 == 0:
        lanes, count, levels = lanes // 2, count // 2, levels + 1
    return levels


def _padded_count(sizes: list[int]) -> int:
    """Return the padded size of a tensor in shared memory: see Share::place."""
    total = 1
    for i, size in enumerate(reversed(sizes)):
        total = size * (total + (i > 0))
    return total


def _split_nest(operation: Operation) -> list[Operation]:
    """Return a nest, and separate ones for its writes of other nests' values, which may be late."""
    if not isinstance(operation, Nest) or not (operation.points or operation.reductions):
        return [operation]
    late = [w for w in operation.writes if isinstance(w[1], Value) and w[1] not in operation.points]
    early_writes = [w for w in operation.writes if w not in late]
    nests = [Nest(operation.axes, operation.points, operation.reductions, early_writes)]
    return [*nests, *(Nest(operation.axes, writes=[write]) for write in late)]


def _results(operation: Operation) -> list[Value]:
    if isinstance(operation, Nest):
        return [*operation.points, *operation.reductions]
    return [operation] if isinstance(operation, Value) else []


def _sources(operation: Operation) -> list[Value]:
    """Return the values that an operation reads, its results included."""
    if isinstance(operation, Outer):
        return [operation.lhs, operation.rhs]
    if isinstance(operation, Value):
        return [*sources_of(operation)]
    values = [source for value in _results(operation) for source in sources_of(value)]
    return [*values, *(source for _, source in operation.writes if isinstance(source, Value))]


@dataclass
class _UnrolledNest(NestText):
    """The CUDA of a nest of loops, all unrolled."""

    function: _Function
    nest: Nest
    body: Body = field(init=False)
    inner: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        name = f"{self.function.emitter.program.cell_name}'s {self.function.name}"
        self.body = Body(name)

    def emit(self) -> None:
        """Add the arrays that the loops fill to the function, then the loops."""
        function, axes = self.function, self.nest.axes
        for value in self.nest.points:
            self._point(value)
        starts: list[str] = []
        for value in self.nest.reductions:
            starts += self._reduction(value)
        for target, source in self.nest.writes:
            self._write(target, source)
        lines = starts
        for depth, axis in enumerate(axes):
            head = f"for (int i_{axis} = 0; i_{axis} < Axis_{axis}::count; ++i_{axis}) {{"
            lines += ["  " * (depth + 1) + "PARARNN_UNROLL", "  " * (depth + 1) + head]
        if not axes:
            lines.append("  {")
        depth = max(1, len(axes))
        lines += ["  " * (depth + 1) + line for line in self.inner]
        lines += ["  " * (d + 1) + "}" for d in reversed(range(depth))]
        function.lines += lines
        for value in self.nest.reductions:
            function.reduce(value)

    def _index(self, axes: Axes) -> str:
        """Return the index of an entry among a thread's entries."""
        text = ""
        for axis in axes:
            text = f"({text}) * Axis_{axis}::count + i_{axis}" if text else f"i_{axis}"
        return text or "0"

    def load(self, value: Value) -> None:
        if value.node in self.body.values:
            return
        name = f"x{len(self.body.values)}"
        kind = self.function.kind(value)
        array = self.function.names[value]
        self.inner.append(f"const {kind} {name} = {array}[{self._index(value.axes)}];")
        self.body.values[value.node] = (name, kind)

    def _point(self, value: Value) -> None:
        self.inner.append(self.point(value))
        if value in self.function.plan.arrays:
            name, kind = self.body.values[value.node]
            array = self.function.declare(value, kind)
            self.inner.append(f"{array}[{self._index(value.axes)}] = {name};")

    def _write(self, target: Target, source: Value | float) -> None:
        if target.kind == LINK:
            self.inner.append(
                f"c{target.number}[{self._index(target.axes)}] = {self.real(source)};"
            )
            return
        sign = "+=" if target.adds else "="
        element = f"{target.kind}.x{target.number}[{self._index(target.axes)}]"
        self.inner.append(f"{element} {sign} {self.real(source)};")

    def _reduction(self, value: Value) -> list[str]:
        reduction = value.definition
        assert isinstance(reduction, Reduce)
        array, text = self.function.declare(value), self.real(reduction.source)
        op, start = reduction.op, f"constant({IDENTITY[reduction.op]})"
        text = f"existing<Axis_{reduction.axis}>({text}, i_{reduction.axis}, {start})"
        element = f"{array}[{self._index(value.axes)}]"
        result = f"{element} + {text}" if op == "sum" else f"{op}imum({element}, {text})"
        self.inner.append(f"{element} = {result};")
        return ["  PARARNN_UNROLL", f"  for (real& x : {array}) x = {start};"]
