"""Emitted CUDA of matrix cells: a step of one head by the threads of a block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from pararnn.base.numerics import compute_dtype
from pararnn.cells.matrix import Axes
from pararnn.codegen.emit import Body
from pararnn.codegen.shares import LANES, Shares, lanes_only, main_axes, shares_of
from pararnn.codegen.spelling import REAL, literal, spell
from pararnn.program.late import LINK, Parts, partial_reductions, prepare, split
from pararnn.program.matrix import Passes, axes_by_kind, passes_of
from pararnn.program.program import Program
from pararnn.program.statements import (
    Nest,
    Outer,
    Point,
    Product,
    Reduce,
    Schedule,
    Statements,
    Target,
    Value,
    schedule,
    sources_of,
)

IDENTITY = {"sum": "0", "max": "-INFINITY", "min": "INFINITY"}
"""The value that a reduction begins with."""
SQUARE = 2
"""Axes of a parameter that multiplies, both the same."""
TILE_NUMBERS = 32
"""Numbers of shared memory in a tile, at whose multiples tiles begin."""
REGISTER_SIZE = 32
"""Largest matrix whose fragments a warp has in registers."""
FUNCTIONS = {"forward": ("advance", "readout"), "backward": ("advance", "backward")}
"""Functions of a kernel, by direction."""
READY_TYPES = {"advance": "AdvanceReady", "readout": "AdvanceReady", "backward": "BackwardReady"}
"""Structs of what the functions read instead of gates, see `pararnn.program.late.prepare`."""
PARAMETERS = {
    "advance": "const States& state, const AdvanceReady& ready, const WideGates& gate, "
    "States& new_state",
    "readout": "const States& new_state, const AdvanceReady& ready, const WideGates& gate, "
    "WideOutput& output, real* slot",
    "backward": "const States& state, const BackwardReady& ready, const WideGates& gate, "
    "const States& grad_new_state, const Output& grad_output, States& grad_state, "
    "WideGates& grad_gate, WideParams& grad_param, Outers& grad_matrix, real* slot",
}
"""Own parameters of each function."""
LATE = {"readout": ["output"], "backward": ["grad_gate", "grad_param"]}
"""Results of each function of which numbers and vectors wait until a window of steps is over."""
FINISH_PARAMETERS = {
    "readout": "const Links& link, const AdvanceReady& ready, Output& output",
    "backward": "const Links& link, const BackwardReady& ready, Gates& grad_gate, "
    "Params& grad_param",
}
"""Parameters of what computes them then."""


@dataclass
class Emitted:
    """CUDA of a pass of a matrix cell, and what its kernel needs to know.

    exchange: numbers of shared memory by which threads exchange values in a step, of one round.
    slot: numbers of shared memory that a step leaves for the end of its window. ready: those that
    it finds there, computed at the window's begin.
    in_memory: sizes of the matrices that shared memory has. fragments: words of shared memory with
    fragments of matrices.
    """

    text: str
    shares: Shares
    exchange: int
    slot: int
    ready: int
    in_memory: list[int]
    fragments: int


def emit_block(
    program: Program, dtype: torch.dtype, direction: str, matrix_parts: int = 1
) -> Emitted:
    """Emit the functions of a pass for gates of a dtype. Raises EngineError for ops without a
    spelling.

    matrix_parts: numbers in bfloat16 that add up to an entry of a matrix.
    """
    passes = passes_of(program.step, program.matrix[compute_dtype(dtype)])
    return _Emitter(program, passes, dtype, direction, matrix_parts).emission()


@dataclass
class _Emitter:
    program: Program
    passes: Passes
    dtype: torch.dtype
    direction: str
    matrix_parts: int
    shares: Shares = field(init=False)
    functions: list[_Function] = field(init=False)
    tile_matrices: list[tuple[int, bool]] = field(init=False)
    """(parameter, transposed) of products by tiles."""

    def __post_init__(self) -> None:
        sizes = self.program.head_sizes
        assert sizes is not None
        names = FUNCTIONS[self.direction]
        parts = {name: _parts(getattr(self.passes, name), name) for name in names}
        self.first = self._prepare(parts)
        statements = {name: own.now for name, own in parts.items()}
        plans = {name: schedule(own) for name, own in statements.items()}
        self.kinds = axes_by_kind(self.program.step)
        lengths = {axis: sizes.lengths[axis] for axis in self.passes.order}
        main = main_axes(self.kinds["state"], lengths)
        products = [v for own in statements.values() for v in own.values]
        by_columns = any(
            isinstance(v.definition, Product) and self._fits_tiles(v.definition, v.axes, main)
            for v in products
        )
        with_tiles = self.dtype == torch.bfloat16 and by_columns
        self.last = parts[names[-1]]
        links = self.last.pieces()
        self.shares = shares_of(lengths, main, [*plans.values()], links, with_tiles)
        products_by_tiles = [
            (v.definition.param, v.definition.transposes)
            for v in products
            if isinstance(v.definition, Product) and self.is_tiled(v.definition.axis, v.axes)
        ]
        self.tile_matrices = [*dict.fromkeys(products_by_tiles)]
        self.functions = [
            _Function(self, self.shares, name, statements[name], plans[name], parts[name])
            for name in names
        ]

    def _prepare(self, parts: dict[str, Parts]) -> dict[str, Statements]:
        """Take out of parts what a window computes ahead; return it by the struct that has it."""
        first = {}
        for struct in dict.fromkeys(READY_TYPES[name] for name in parts):
            names = [name for name in parts if READY_TYPES[name] == struct]
            own = [half for name in names for half in (parts[name].now, parts[name].later)]
            first[struct], others = prepare(own)
            for name, now, later in zip(names, others[::2], others[1::2], strict=True):
                parts[name] = parts[name]._replace(now=now, later=later)
        return first

    def _ready(self, shares: Shares) -> list[str]:
        """Return the structs of what a window computes ahead."""
        lines = []
        for struct, own in self.first.items():
            tensors = [(target.number, target.axes) for target, _ in own.writes]
            lines += _struct(struct, tensors, shares)
        return lines

    def function_texts(self) -> list[str]:
        """Return the functions; each has numbers of its own in shared memory."""
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
        main = (self.shares.rows, self.shares.columns)
        return self.shares.tiles and axes == main and axis == self.shares.columns

    def square(self, number: int) -> str | None:
        """Return the axis that a parameter has twice, None for other parameters."""
        axes = self.kinds["param"][number]
        return axes[0] if len(axes) == SQUARE and axes[0] == axes[1] else None

    def emission(self) -> Emitted:
        bodies = self.function_texts()
        exchange = -(-self.functions[-1].exchange // TILE_NUMBERS) * TILE_NUMBERS
        count = len(self.kinds["param"])
        fragments = 0
        for number, _ in self.tile_matrices:
            axis = self.square(number)
            assert axis is not None
            size = self.shares.axes[axis].size
            if size > REGISTER_SIZE:
                fragments += size * size // 2 * self.matrix_parts
        staged_matrices = {p for function in self.functions for p in function.by_memory}
        in_memory = [
            self.shares.axes[axis].size
            for i in range(count)
            if (axis := self.square(i)) is not None and i in staged_matrices
        ]
        slot, ready = self.functions[-1].slot, max(map(self._numbers, self.first.values()))
        parts = [
            *self._axes(exchange),
            f"constexpr int slot_numbers = {slot}, ready_numbers = {ready};",
            *self._tensors(),
            *self._matrices(staged_matrices),
            *bodies,
            *self._finish(),
        ]
        return Emitted("\n".join(parts), self.shares, exchange, slot, ready, in_memory, fragments)

    def _finish(self) -> list[str]:
        """Return what a warp computes of a step at the begin and the end of its window."""
        last, shares = self.functions[-1], lanes_only(self.shares)
        plan = schedule(self.last.later)
        own = _Function(self, shares, last.name, self.last.later, plan)
        kinds = {"Gates": "gate"}
        if last.name == "backward":
            kinds["Params"] = "param"
        tensors = {name: [*enumerate(self.kinds[kind])] for name, kind in kinds.items()}
        if last.name != "backward":
            tensors["Output"] = [*enumerate(self.kinds["output"])]
        lines = ["namespace finish {", *_axis_types(shares)]
        for name, own_tensors in tensors.items():
            lines += _struct(name, own_tensors, shares, lambda axes: len(axes) <= 1)
        lines += self._ready(shares)
        for struct, first in self.first.items():
            prelude = _Function(self, shares, "prepare", first, schedule(first))
            lines.append(prelude.text(f"const Gates& gate, {struct}& ready", "prepare"))
        lines.append("struct Links {")
        for number, value in enumerate(self.last.links):
            lines.append(f"  real x{number}[{share_type(value.axes)}::count];")
        lines.append("  PARARNN_FUNCTION void load(const real* slot) {")
        for number, value in enumerate(self.last.links):
            at, count, combine = last.pieces[value]
            lines.append(
                f"    combine_pieces<{share_type(value.axes)}, {count}, {combine}>"
                f"(slot + {at}, x{number});"
            )
        return [*lines, "  }", "};", own.text(FINISH_PARAMETERS[last.name], "finish"), "}"]

    def _numbers(self, first: Statements) -> int:
        sizes = self.shares.axes
        tensors = [target.axes for target, _ in first.writes]
        return sum(math.prod(sizes[axis].size for axis in axes) for axes in tensors)

    def _axes(self, exchange: int) -> list[str]:
        lines = [
            f"constexpr int warps = {self.shares.warps}, exchange_numbers = {exchange};",
            "using Block = Exchange<warps, exchange_numbers>;",
            *(f"constexpr int size_{axis} = {own.size};" for axis, own in self.shares.axes.items()),
            *_axis_types(self.shares),
        ]
        rows = "Single" if self.shares.rows is None else f"Axis_{self.shares.rows}"
        lines.append(f"using Rows = {rows};")
        lines.append(f"using Columns = Axis_{self.shares.columns};")
        return lines

    def _tensors(self) -> list[str]:
        """Return the structs of a thread's shares of all tensors of a kind."""
        kinds: dict[str, list[tuple[int, Axes]]] = {
            "States": [*enumerate(self.kinds["state"])],
            "Gates": [*enumerate(self.kinds["gate"])],
            "Params": [*enumerate(self.kinds["param"])],
            "Output": [*enumerate(self.kinds["output"])],
        }
        lines: list[str] = []
        for name, tensors in kinds.items():
            lines += _struct(name, tensors, self.shares)
            if name != "States":
                lines += _struct(f"Wide{name}", tensors, self.shares, lambda axes: len(axes) > 1)
        lines += self._ready(self.shares)
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
            axis = self.square(number)
            assert axis is not None
            size = self.shares.axes[axis].size
            flags = f"{str(transposes).lower()}, {str(size <= REGISTER_SIZE).lower()}"
            lines.append(f"  TileMatrix<{size}, {flags}, {self.matrix_parts}> tiles{i};")
            loads.append(
                f"    tiles{i}.load(params[{number}] + head * {size * size}, fragments + {offset});"
            )
            if size > REGISTER_SIZE:
                offset += size * size // 2 * self.matrix_parts
        offset = 0
        for number in sorted(staged_matrices):
            axis = self.square(number)
            assert axis is not None
            size = self.shares.axes[axis].size
            lines.append(f"  const real* matrix{number};")
            loads.append(
                f"    matrix{number} = stage_matrix<{size}>(params[{number}] + head * "
                f"{size * size}, memory + {offset}, {self.shares.warps * LANES});"
            )
            offset += size * (size + 1)
        lines.append("  PARARNN_FUNCTION void load(const scalar* const* params, int64 head, "
                     "real* memory, unsigned* fragments) {")  # fmt: skip
        lines += [*loads, "  }", "};"]
        return lines if self.direction == "forward" else [*lines, *self._outers()]

    def _outers(self) -> list[str]:
        """Return the struct of a thread's sums of the gradients of matrices."""
        lines = ["struct Outers {"]
        total, stores, zeros = 0, [], []
        for number in range(len(self.kinds["param"])):
            axes = self.kinds["param"][number]
            if self.square(number) is not None:
                lines.append(f"  {self.outer_type(number)} w{number};")
                zeros.append(f"    w{number}.clear();")
                stores.append(f"    w{number}.add_to(target + {total}, copy_numbers);")
            total += math.prod(self.shares.axes[axis].size for axis in axes)
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
        """Return the type of a thread's sums of a matrix's gradient."""
        axis = self.square(number)
        assert axis is not None
        size = self.shares.axes[axis].size
        outers = [o for function in self.functions for o in function.own.outers]
        own = [o for o in outers if o.param == number]
        if own and all(self.is_tiled(o.axis, o.lhs.axes) for o in own):
            if size > REGISTER_SIZE:
                others = self.shares.axes[self.shares.rows or ""].size
                return f"SplitTileSums<{size}, {self.matrix_parts}, {others}, {self.shares.warps}>"
            return f"TileSums<{size}, {self.matrix_parts}>"
        return f"SquareSums<{size}, {self.shares.warps}>"

    def outer_by_tiles(self, outer: Outer) -> bool:
        """Return True for outer products that the matrix units compute."""
        return self.outer_type(outer.param).startswith("Tile")


def _parts(own: Statements, name: str) -> Parts:
    """Return the parts of a function; all of it comes now where nothing may wait."""
    return split(own, LATE[name]) if name in LATE else Parts(own, Statements(own.graph), [])


def share_type(axes: Axes) -> str:
    """Return the type of the share of a tensor."""
    return f"Share<{', '.join(f'Axis_{axis}' for axis in axes)}>"


def _axis_types(shares: Shares) -> list[str]:
    lines = []
    for axis, own in shares.axes.items():
        numbers = ", ".join(str(int(number)) for number in own[:-1])
        lines.append(f"using Axis_{axis} = Axis<{numbers}, {str(own.pairs).lower()}>;")
    return lines


def _struct(
    name: str,
    tensors: list[tuple[int, Axes]],
    shares: Shares,
    has: Callable[[Axes], bool] = lambda axes: True,
) -> list[str]:
    """Return the struct of a thread's shares of tensors, of those of a kind of axes; matrices that
    multiply have none."""
    sizes = shares.axes
    total = sum(math.prod(sizes[axis].size for axis in axes) for _, axes in tensors)
    own = [(i, axes) for i, axes in tensors if len({*axes}) == len(axes) and has(axes)]
    entries = sum(shares.count(axes) for _, axes in own)
    lines = [
        f"struct {name} {{",
        f"  static constexpr int numbers = {total}, entries = {entries};",
    ]
    lines += [f"  real x{i}[{share_type(axes)}::count];" for i, axes in own]
    lines.append("  // Calls f(share, own numbers, index, numbers before it).")
    lines.append("  template <class Own, class F> PARARNN_FUNCTION static void each("
                 "Own& own, const F& f) {")  # fmt: skip
    first = 0
    for i, axes in tensors:
        if (i, axes) in own:
            lines.append(f"    f({share_type(axes)}(), own.x{i}, {i}, {first});")
        first += math.prod(sizes[axis].size for axis in axes)
    lines += ["  }", f"  PARARNN_FUNCTION void operator+=(const {name}& other) {{"]
    for i, axes in own:
        loop = f"for (int n = 0; n < {share_type(axes)}::count; ++n)"
        lines += ["    PARARNN_UNROLL", f"    {loop} x{i}[n] += other.x{i}[n];"]
    return [*lines, "  }", "};"]


@dataclass
class _Function:
    """One pass as a CUDA function."""

    emitter: _Emitter
    shares: Shares
    name: str
    own: Statements
    plan: Schedule
    parts: Parts | None = None
    pieces: dict[Value, tuple[int, int, str]] = field(default_factory=dict)
    """Of links values: the first number in the step's slot, how many pieces add up, and how."""
    slot: int = 0
    names: dict[Value, str] = field(init=False)
    kinds: dict[Value, str] = field(init=False)
    exchange: int = 0
    by_memory: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.names = {
            value: f"{kind}.x{number}" for (kind, number), value in self.own.inputs.items()
        }
        self.names |= {value: f"a{i}" for i, value in enumerate(self.plan.arrays)}
        self.kinds = {}
        self.partial = partial_reductions(self.own)
        self.links = self.parts.links if self.parts is not None else []
        self.in_pieces = self.parts.pieces() if self.parts is not None else set()
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
        for target, _ in self.own.writes:
            if target.kind == LINK:
                count = self.shares.count(target.axes)
                self.lines.append(f"  real c{target.number}[{count}];")
        later = [part for own in self.plan.parts for part in _split(own)]
        while later:
            # Whatever needs no other thread comes before threads meet.
            ready = next((part for part in later if self._is_ready(part, later)), None)
            if ready is None:
                self._meet()
                continue
            later.remove(ready)
            if isinstance(ready, Nest):
                _NestText(self, ready).emit()
            elif isinstance(ready, Outer):
                self._outer(ready)
            else:
                self._product(ready)
        self._meet()
        for number, value in enumerate(self.links):
            if value not in self.pieces:
                self._link(value, f"c{number}", [], "Sum")
        turn = ["  block.turn();"] if self.exchange > first else []
        return "\n".join([head, *turn, *self.lines, "}", ""])

    def declare(self, value: Value, kind: str = REAL) -> str:
        """Declare the array of a value, and return its name."""
        self.kinds[value] = kind
        self.lines.append(f"  {kind} {self.names[value]}[{self.shares.count(value.axes)}];")
        return self.names[value]

    def kind(self, value: Value) -> str:
        """Return the kind of a value's array."""
        return self.kinds.get(value, REAL)

    def region(self, numbers: int) -> str:
        """Return numbers of shared memory for an exchange."""
        first, self.exchange = self.exchange, self.exchange + numbers
        return f"block.region({first})"

    def _is_ready(self, part: Part, later: list[Part]) -> bool:
        """Return True for a part that reads no value of a later one, or that threads exchange."""
        own = {*_results(part)}
        missing = {value for other in later if other is not part for value in _results(other)}
        missing |= {*self.pending}
        return all(value in own or value not in missing for value in _sources(part))

    def _meet(self) -> None:
        """Let the threads of the block meet, and complete what waits for that."""
        if self.pending or self.outers:
            self.lines += ["  block.meet();", *self.pending.values(), *self.outers]
        self.pending, self.outers = {}, []

    def reduce(self, value: Value) -> None:
        """Combine the parts of a reduction that lanes and warps have."""
        own = value.definition
        assert isinstance(own, Reduce)
        if value in self.partial:
            return
        name, share = self.names[value], share_type(value.axes)
        combine, shares = own.kind.capitalize(), self.shares
        axes = [own.axis]
        while own.source in self.partial:
            own = own.source.definition
            assert isinstance(own, Reduce)
            axes.append(own.axis)
        if value in self.in_pieces:
            self._link(value, name, axes, combine)
            return
        for axis in axes:
            self.lines.append(f"  combine_lanes<Axis_{axis}, {combine}>({name});")
        far = [axis for axis in axes if shares.axes[axis].warps > 1]
        if far:
            size = math.prod(shares.axes[a].size for a in value.axes)
            count = math.prod(shares.axes[a].warps for a in far)
            region, grid = self.region(size * count), f"Grid<{', '.join(f'Axis_{a}' for a in far)}>"
            self.lines.append(f"  put_part<{grid}, {share}>({name}, {region});")
            self.pending[value] = f"  combine_parts<{grid}, {share}, {combine}>({region}, {name});"

    def _link(self, value: Value, name: str, axes: list[str], combine: str) -> None:
        """Leave a value in the step's slot, of a reduction over axes the pieces that lanes and
        warps have."""
        shares = self.shares
        lanes = [shares.axes[axis].lanes for axis in axes]
        levels = spread_levels(lanes[0] if lanes else 1, shares.count(value.axes))
        warps = math.prod(shares.axes[axis].warps for axis in axes)
        count = math.prod(lanes) * warps >> levels
        size = math.prod(shares.axes[axis].size for axis in value.axes)
        self.pieces[value] = (self.slot, count, combine)
        along = f"{share_type(value.axes)}, {levels}, {combine}, Rows, Columns"
        grid = "".join(f", Axis_{axis}" for axis in axes)
        self.lines.append(f"  put_pieces<{along}{grid}>({name}, slot + {self.slot});")
        self.slot += size * count

    def _operand(self, value: Value) -> str:
        """Return where shared memory has a value."""
        if value not in self.operands:
            sizes = [self.shares.axes[axis].size for axis in value.axes]
            self.operands[value] = self.region(_numbers_in_memory(sizes))
            share = share_type(value.axes)
            name = self.names[value]
            self.lines.append(f"  put<{share}>({name}, {self.operands[value]});")
        return self.operands[value]

    def _tiles(self, value: Value, sums: str) -> str:
        """Return where shared memory has the tiles of a value."""
        sizes = [self.shares.axes[axis].size for axis in value.axes]
        numbers = math.prod(sizes) // 2 * self.emitter.matrix_parts
        first = -(-self.exchange // TILE_NUMBERS) * TILE_NUMBERS
        self.exchange = first
        region = self.region(numbers)
        self.lines.append(f"  {sums}::put({self.names[value]}, {region});")
        return region

    def _product(self, value: Value) -> None:
        own = value.definition
        assert isinstance(own, Product)
        result = self.declare(value)
        emitter = self.emitter
        if emitter.is_tiled(own.axis, value.axes):
            number = emitter.tile_matrices.index((own.param, own.transposes))
            source = self.names[own.source]
            if own.source.axes != value.axes:
                raise AssertionError("a product has its source's axes")
            self.lines.append(f"  multiply_tiles({source}, matrices.tiles{number}, {result});")
            return
        self.by_memory.add(own.param)
        along = value.axes.index(own.axis)
        operand = self._operand(own.source)
        self.pending[value] = (
            f"  multiply<{share_type(value.axes)}, {along}, {str(own.transposes).lower()}>"
            f"({operand}, matrices.matrix{own.param}, {result});"
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
    """Return how often lanes halve their entries before they leave pieces of them."""
    levels = 0
    while lanes > 1 and count % 2 == 0:
        lanes, count, levels = lanes // 2, count // 2, levels + 1
    return levels


def _numbers_in_memory(sizes: list[int]) -> int:
    """Return the numbers of a tensor in shared memory: see Share::place."""
    total = 1
    for i, size in enumerate(reversed(sizes)):
        total = size * (total + (i > 0))
    return total


Part = Nest | Value | Outer
"""Part of a schedule."""


def _split(part: Part) -> list[Part]:
    """Return a nest, and apart from it what it writes that others compute, which may be late."""
    if not isinstance(part, Nest) or not (part.points or part.reductions):
        return [part]
    late = [w for w in part.writes if isinstance(w[1], Value) and w[1] not in part.points]
    own = [w for w in part.writes if w not in late]
    nests = [Nest(part.axes, part.points, part.reductions, own)]
    return [*nests, *(Nest(part.axes, writes=[write]) for write in late)]


def _results(part: Part) -> list[Value]:
    """Return the values that a part computes."""
    if isinstance(part, Nest):
        return [*part.points, *part.reductions]
    return [part] if isinstance(part, Value) else []


def _sources(part: Part) -> list[Value]:
    """Return the values that a part reads, its own included."""
    if isinstance(part, Outer):
        return [part.lhs, part.rhs]
    return [*sources_of(part)] if isinstance(part, Value) else _sources_of_nest(part)


def _sources_of_nest(nest: Nest) -> list[Value]:
    values: list[Value] = []
    for value in nest.points:
        assert isinstance(value.definition, Point)
        values += value.definition.values
    for value in nest.reductions:
        assert isinstance(value.definition, Reduce)
        values.append(value.definition.source)
    return [*values, *(source for _, source in nest.writes if isinstance(source, Value))]


@dataclass
class _NestText:
    """The CUDA of a nest of loops, which are unrolled."""

    function: _Function
    nest: Nest
    body: Body = field(init=False)
    inner: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        name = f"{self.function.emitter.program.cell_name}'s {self.function.name}"
        self.body = Body(name)

    def emit(self) -> None:
        """Add the loops to the function, and the arrays that they fill before them."""
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
        """Return the index of an entry in a thread's share."""
        text = ""
        for axis in axes:
            text = f"({text}) * Axis_{axis}::count + i_{axis}" if text else f"i_{axis}"
        return text or "0"

    def _load(self, value: Value) -> None:
        """Name a value that other loops have computed."""
        if value.node in self.body.values:
            return
        name = f"x{len(self.body.values)}"
        kind = self.function.kind(value)
        array = self.function.names[value]
        self.inner.append(f"const {kind} {name} = {array}[{self._index(value.axes)}];")
        self.body.values[value.node] = (name, kind)

    def _point(self, value: Value) -> None:
        for source in value.definition.values:  # type: ignore[union-attr]
            self._load(source)
        kind, text = self.body.expression(value.node, None)
        name = f"t{len(self.body.values)}"
        self.inner.append(f"const {kind} {name} = {text};")
        self.body.values[value.node] = (name, kind)
        if value in self.function.plan.arrays:
            array = self.function.declare(value, kind)
            self.inner.append(f"{array}[{self._index(value.axes)}] = {name};")

    def _real(self, value: Value | float) -> str:
        """Return a value, or a number, as the text of a `real`."""
        if not isinstance(value, Value):
            return literal(value)
        self._load(value)
        return spell(self.body.as_kind(value.node, REAL))

    def _write(self, target: Target, source: Value | float) -> None:
        if target.kind == LINK:
            self.inner.append(
                f"c{target.number}[{self._index(target.axes)}] = {self._real(source)};"
            )
            return
        sign = "+=" if target.adds else "="
        place = f"{target.kind}.x{target.number}[{self._index(target.axes)}]"
        self.inner.append(f"{place} {sign} {self._real(source)};")

    def _reduction(self, value: Value) -> list[str]:
        own = value.definition
        assert isinstance(own, Reduce)
        array, text = self.function.declare(value), self._real(own.source)
        start = f"constant({IDENTITY[own.kind]})"
        text = f"existing<Axis_{own.axis}>({text}, i_{own.axis}, {start})"
        place = f"{array}[{self._index(value.axes)}]"
        result = f"{place} + {text}" if own.kind == "sum" else f"{own.kind}imum({place}, {text})"
        self.inner.append(f"{place} = {result};")
        return ["  PARARNN_UNROLL", f"  for (real& x : {array}) x = {start};"]
