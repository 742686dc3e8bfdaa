"""Kernels for GPUs of steps with large matrices: a cluster of blocks runs some rows of a head.

The blocks of a cluster divide the entries of values, and with them the matrices that multiply them,
which all rows share: see `program/links.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from pararnn.base.errors import EngineError
from pararnn.base.numerics import compute_dtype
from pararnn.cells.matrix import Axes
from pararnn.codegen.emit import Body, NestText
from pararnn.codegen.families import matrix_inputs
from pararnn.codegen.interface import Counts, Field, Interface, Structs
from pararnn.codegen.mixing_cuda import (
    SPLIT_TERMS,
    Launchable,
    cluster_of,
    shared_bytes_of,
    vector_dtype,
)
from pararnn.codegen.source import IO_TYPES, constant_line
from pararnn.codegen.spelling import MASK, REAL, literal
from pararnn.program.links import (
    KEPT,
    Link,
    Passes,
    Sink,
    Steps,
    multiplied_numbers,
    passes_of,
    shared_axes,
    why_not,
)
from pararnn.program.matrix import axes_by_kind
from pararnn.program.program import MATRIX, Program
from pararnn.program.statements import Point, Product, Value

CLUSTERS = "clusters"
"""Name of the kernels and of their headers."""
ROWS, TILE, LANES = 8, 16, 32
"""Rows of a batch that a cluster runs, entries of a tile, lanes of a warp."""
MAX_WARPS = 16
PACK_THREADS = 256
BARRIER_BYTES = 32
"""Bytes of the barriers of two boxes."""
LEAST_NUMBERS = 2**14
"""Fewest numbers of matrices of a head for which a cluster is better than a block for each row."""
BLOCK_NUMBERS = 2**14
"""Numbers of matrices for each block of a cluster, where there are blocks for it."""
IDENTITY = {"sum": "0", "max": "-INFINITY", "min": "INFINITY"}
"""Initial value of a reduction."""
PASSES = ("forward", "saving", "backward")
"""Passes: forward, forward for a backward pass, and backward."""


class ClusterVariant(NamedTuple):
    """Specialisation of a kernel, in addition to the cell: see cuda/clusters/shares.h.

    direction: one of `PASSES`. matrix_parts: bfloat16 terms that an entry of a matrix is split
    into. events: `seq` or `reset` is passed. slices: blocks of a cluster. shared: bytes of shared
    memory that a block may have.
    """

    direction: str
    dtype: torch.dtype
    matrix_dtype: torch.dtype
    events: bool
    slices: int
    shared: int
    solver: str = CLUSTERS

    @property
    def operand_parts(self) -> int:
        """bfloat16 terms of a value that is multiplied."""
        return 1 if self.is_wide else max(2, SPLIT_TERMS[self.dtype])

    @property
    def matrix_parts(self) -> int:
        """bfloat16 terms of a number of a matrix."""
        return 1 if self.is_wide else min(SPLIT_TERMS[self.matrix_dtype], self.operand_parts)

    @property
    def is_wide(self) -> bool:
        """True in double precision."""
        return compute_dtype(self.dtype) == torch.float64

    @property
    def stream_dtype(self) -> torch.dtype:
        """Dtype of the vectors of outer products."""
        return vector_dtype(self.dtype, self.matrix_dtype)


class Share(NamedTuple):
    """The entries of values with some axes, in tiles of the last one, filled up: of lengths, with
    `tiles`, of which a block has `block_tiles`."""

    lengths: tuple[int, ...]
    tiles: int
    block_tiles: int
    slices: int

    @property
    def row_tiles(self) -> int:
        """Tiles of a vector along the last axis."""
        return -(-(self.lengths[-1] if self.lengths else 1) // TILE)

    @property
    def block(self) -> int:
        """Entries of a row that a block has."""
        return self.block_tiles * TILE

    @property
    def padded(self) -> int:
        """Entries of a row."""
        return self.block * self.slices

    @property
    def numbers(self) -> int:
        """Entries of a row without filling."""
        return math.prod(self.lengths)

    @property
    def text(self) -> str:
        """The type in C++."""
        last = self.lengths[-1] if self.lengths else 1
        return f"ShareOf<{self.tiles}, {self.block_tiles}, {self.row_tiles}, {last}>"


class Matrix(NamedTuple):
    """A parameter as a block multiplies by it: of a link's product, in tiles from `first` on.

    order: axes of the parameter (0: the first behind the heads) in the order of those that source
    and result share, of the others of the result, of the others of the source; `groups`, `results`,
    `terms`: how many of each. scatters: as in `Link.kind`. out_tiles, in_tiles: of a group.
    """

    param: int
    order: tuple[int, ...]
    groups: int
    results: int
    terms: int
    scatters: bool
    out_tiles: int
    in_tiles: int
    block_tiles: int
    first: int

    @property
    def tiles(self) -> int:
        """Tiles of 16 by 16 of a block."""
        return self.block_tiles * (self.out_tiles if self.scatters else self.in_tiles)


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the values of a pass are in shared memory, in bytes: what `at` has, two boxes of
    `box_bytes` from `boxes_at` on, the matrices from `matrices_at` on if `holds_matrices`, and all
    `bytes`. sent: where a link's sources, or results, are in a box, and `received`: the bytes that
    a stage gets. splits: warps' sums that a product is divided into."""

    shares: dict[Axes, Share]
    matrices: dict[tuple[Link, int], Matrix]
    splits: dict[Link, int]
    at: dict[object, int]
    sent: dict[tuple[int, object], int]
    received: dict[int, int]
    boxes_at: int
    box_bytes: int
    matrices_at: int
    matrix_tiles: int
    holds_matrices: bool
    bytes: int
    warps: int


def steps_of(program: Program, variant: ClusterVariant) -> Steps:
    """Return the pass of a variant."""
    passes = passes_of(program, compute_dtype(variant.dtype))
    return getattr(passes, variant.direction)  # type: ignore[no-any-return]


def passes_in(program: Program, dtype: torch.dtype) -> Passes:
    """Return the passes of a program for gates of a dtype."""
    return passes_of(program, compute_dtype(dtype))


def saved_offsets(program: Program, dtype: torch.dtype) -> dict[tuple[str, int], int]:
    """Return where states and kept values begin among the numbers of a step and head that a forward
    pass leaves, and under ("", 0) how many these are."""
    lengths, offsets, end = program.step.head.lengths, dict[tuple[str, int], int](), 0
    tensors = {("state", i): axes for i, axes in enumerate(program.step.axes.states.values())}
    kept = passes_in(program, dtype).kept
    tensors |= {(KEPT, i): value.axes for i, value in enumerate(kept)}
    for key, axes in tensors.items():
        offsets[key] = end
        end += math.prod(lengths[axis] for axis in axes)
    offsets["", 0] = end
    return offsets


def stream_offsets(program: Program, dtype: torch.dtype) -> list[int]:
    """Return where the vectors of outer products begin among the numbers of a step and head, and
    how many these are."""
    lengths, offsets = program.step.head.lengths, [0]
    for value in passes_in(program, dtype).backward.streams:
        offsets.append(offsets[-1] + math.prod(lengths[axis] for axis in value.axes))
    return offsets


@lru_cache(maxsize=1024)
def layout_of(program: Program, variant: ClusterVariant) -> Layout:
    """Plan the memory of a block. Raises EngineError for cells that do not fit."""
    steps, lengths, slices = steps_of(program, variant), program.step.head.lengths, variant.slices
    shares = {axes: _share([lengths[axis] for axis in axes], slices) for axes in steps.axes}
    params = axes_by_kind(program.step)["param"]
    matrices, tiles = dict[tuple[Link, int], Matrix](), 0
    for link in steps.links:
        for i, product in enumerate(link.products):
            matrix = _matrix(product, link, params, shares, lengths, tiles)
            matrices[link, i] = matrix
            tiles += matrix.tiles
    entries = max(ROWS * share.block for share in shares.values())
    most = [link for link in steps.links if link.multiplies]
    items = max((_items(shares, link) for link in most), default=1)
    warps = min(MAX_WARPS, max(2, -(-entries // LANES), items))
    number = 8 if variant.is_wide else 4
    at, sent, end = dict[object, int](), dict[tuple[int, object], int](), 0
    splits, received = dict[Link, int](), dict[int, int]()

    def place(key: object, size: int) -> None:
        nonlocal end
        if key not in at:
            at[key] = end
            end += -(-size // 16) * 16

    def send(stage: int, key: object, size: int) -> None:
        if (stage, key) not in sent:
            sent[stage, key] = received.get(stage, 0)
            received[stage] = sent[stage, key] + size

    for link in steps.links:
        result, stage = shares[link.value.axes], link.stage
        if link.kind == "gather":
            others = [x for x in steps.links if x.stage == stage and x.kind == "gather"]
            count = sum(shares[x.value.axes].block_tiles for x in others)
            splits[link] = _splits(count, link, matrices, warps)
            place(link, splits[link] * ROWS * result.block * number)
        if link.kind == "scatter":
            send(stage, link, slices * ROWS * result.block * number)
        if link.kind == "reduce":
            kept = result.numbers if link.whole else result.block
            send(stage, link, slices * ROWS * kept * number)
        if link.whole:
            place(link, ROWS * (result.padded if link.kind == "spread" else result.numbers) * number)
        for i, source in enumerate(link.sources):
            share = shares[source.axes]
            if link.kind in ("gather", "spread"):
                is_number = link.kind == "spread"
                size = ROWS * TILE * number if is_number else _operand_bytes(variant, 1)
                place((source, is_number), share.block_tiles * size)
                send(stage, (source, is_number), slices * share.block_tiles * size)
            if link.kind == "scatter":
                place((link, i), _operand_bytes(variant, share.block_tiles))
            if link.kind == "reduce":
                place((link, i), ROWS * share.block * number)
    boxes_at, box_bytes = end, max(received.values(), default=0)
    end += 2 * box_bytes + BARRIER_BYTES
    if end > variant.shared:
        raise EngineError(
            f"{program.cell_name} needs {end:,} bytes of shared memory for the values of its "
            f"{variant.direction} pass; this GPU has {variant.shared:,}. Use more heads, shorter "
            "axes, or backend='torch'"
        )
    size = tiles * _tile_bytes(variant)
    holds = end + size <= variant.shared
    return Layout(
        shares, matrices, splits, at, sent, received, boxes_at, box_bytes, end, tiles, holds,
        end + size * holds, warps,
    )  # fmt: skip


def _share(lengths: Sequence[int], slices: int) -> Share:
    tiles = math.prod(lengths[:-1]) * -(-(lengths[-1] if lengths else 1) // TILE)
    return Share(tuple(lengths), tiles, -(-tiles // slices), slices)


def _tile_bytes(variant: ClusterVariant) -> int:
    return TILE * TILE * (8 if variant.is_wide else 2 * variant.matrix_parts)


def _operand_bytes(variant: ClusterVariant, tiles: int) -> int:
    return tiles * TILE * ROWS * (8 if variant.is_wide else 2 * variant.operand_parts)


def _items(shares: dict[Axes, Share], link: Link) -> int:
    """Return how many warps a link's products keep busy without dividing sums."""
    share = shares[link.value.axes]
    return share.tiles if link.kind == "scatter" else share.block_tiles


def _matrix(
    product: Product,
    link: Link,
    params: Sequence[Axes],
    shares: dict[Axes, Share],
    lengths: dict[str, int],
    first: int,
) -> Matrix:
    source, result, axes = product.source.axes, link.value.axes, params[product.param]
    shared = shared_axes(source, result) if product.to else ()
    inner, outer = source[len(shared) :], result[len(shared) :]
    order = tuple(axes.index(axis) for axis in (*shared, *outer, *inner))
    if not product.to:
        order = (0, 1) if product.transposes else (1, 0)
    groups = math.prod(lengths[axis] for axis in shared)
    scatters = link.kind == "scatter"
    out_tiles, in_tiles = shares[result].tiles // groups, shares[source].tiles // groups
    block_tiles = shares[source if scatters else result].block_tiles
    counts = len(shared), len(outer), len(inner)
    return Matrix(product.param, order, *counts, scatters, out_tiles, in_tiles, block_tiles, first)


def _splits(tiles: int, link: Link, matrices: dict[tuple[Link, int], Matrix], warps: int) -> int:
    """Return into how many warps' sums a product is divided, beside others with which a stage has a
    number of tiles."""
    terms = min(matrices[link, i].in_tiles for i in range(len(link.products)))
    splits = 1
    while 2 * splits * tiles <= warps and 4 * splits <= terms:
        splits *= 2
    return splits


@lru_cache(maxsize=1024)
def runs_in_clusters(program: Program) -> bool:
    """Return True for steps that clusters run faster than a block for each row does."""
    if program.family != MATRIX or why_not(program) is not None:
        return False
    return multiplied_numbers(program) >= LEAST_NUMBERS


def cluster_variants(
    program: Program, dtype: torch.dtype, weight_dtype: torch.dtype, capability: tuple[int, int]
) -> list[ClusterVariant]:
    """Return the variants of a layer's training and decoding without resets, for all sizes."""
    slices, shared = slices_of(program, cluster_of(capability)), shared_bytes_of(capability)
    return [ClusterVariant(way, dtype, weight_dtype, False, slices, shared) for way in PASSES]


def slices_of(program: Program, cluster: int) -> int:
    """Return the blocks of a cluster for a program, where a cluster has at most `cluster`."""
    numbers, slices = multiplied_numbers(program), 1
    while slices < cluster and slices * BLOCK_NUMBERS < numbers:
        slices *= 2
    return slices


_STRUCTS: Structs = {
    "Inputs": tuple(
        field._replace(type="const weight_io*") if field.name in ("bias", "params") else field
        for field in matrix_inputs()
    ),
    "PackProblem": (
        Field("int64", "heads"),
        Field("const weight_io*", "params", length="params"),
        Field("unsigned*", "packed", "(head, slice, tile), see links.h"),
    ),
    "ForwardLaunch": (
        Field("Inputs", "in"),
        Field("io*", "output", "(row, time, head, value)"),
        Field("scalar*", "saved", "(row, time, head, saved_numbers)"),
        Field("scalar*", "final", "(sequence, head, ...)", length="states"),
        Field("const unsigned*", "packed", "(head, slice, tile), see links.h"),
    ),
    "BackwardLaunch": (
        Field("Inputs", "in"),
        Field("const scalar*", "saved", "as the forward pass wrote it"),
        *(Field("int64", f"output_{name}") for name in ("row", "time", "head")),
        Field("const io*", "grad_output", "incoming, or null: none"),
        Field("const scalar*", "grad_final", "incoming, or null: none", length="states"),
        *(Field("int64", f"grad_{name}") for name in ("row", "time", "head")),
        Field("io*", "grad_gates"),
        Field("scalar*", "grad_initial", "(sequence, head, ...), or null", length="states"),
        Field("scalar*", "partial", "(row, head, numbers of gates, then of params): zero at first"),
        Field("stream_io*", "streams", "(row, time, head, stream_numbers)"),
        Field("const unsigned*", "packed"),
    ),
}


@lru_cache(maxsize=1024)
def interface_of_clusters(program: Program) -> Interface:
    """Return the arguments of kernels."""
    counts = map(len, (program.states, program.gates, program.fields, program.params))
    return Interface(_STRUCTS, Counts(*counts))


def cluster_kernels_in(program: Program, variant: ClusterVariant) -> dict[str, Launchable]:
    """Return the kernels of a pass, by name."""
    layout = layout_of(program, variant)
    kernels = {"run": Launchable((layout.warps * LANES, 1), layout.bytes)}
    if layout.matrices:
        kernels["pack"] = Launchable((PACK_THREADS, 1))
    return kernels


def source_of_clusters(program: Program, variant: ClusterVariant) -> str:
    """Return the CUDA file of a variant. Raises EngineError as `layout_of`, and for ops without a
    spelling."""
    layout = layout_of(program, variant)
    is_backward = variant.direction == "backward"
    constants: dict[str, int | tuple[bool, ...]] = {
        "slices": variant.slices,
        "warps": layout.warps,
        "events": variant.events,
        "operand_parts": variant.operand_parts,
        "matrix_parts": variant.matrix_parts,
        "block_matrix_tiles": layout.matrix_tiles,
        "holds_matrices": layout.holds_matrices,
        "matrices_at": layout.matrices_at,
        "boxes_at": layout.boxes_at,
        "box_bytes": layout.box_bytes,
        "saved_numbers": saved_offsets(program, variant.dtype)["", 0],
        "stream_numbers": stream_offsets(program, variant.dtype)[-1],
        "partial_numbers": program.step.head.width + sum(program.param_numbers),
    }
    lines = [
        f"// {program.cell_name}",
        f"#define PARARNN_IO {IO_TYPES[variant.dtype]}",
        f"#define PARARNN_WIDE {int(variant.is_wide)}",
        f"#define PARARNN_BACKWARD {int(is_backward)}",
        f"#define PARARNN_CLUSTER {int(variant.slices > 1)}",
        f"#define PARARNN_APPROXIMATE {int(variant.dtype == torch.bfloat16)}",
        f"#define PARARNN_REFINED {int(variant.dtype == torch.float32 and is_backward)}",
        '#include "functions.h"',
        "",
        "namespace pararnn {",
        "",
        f"using stream_io = {IO_TYPES[variant.stream_dtype]};",
        f"using weight_io = {IO_TYPES[variant.matrix_dtype]};",
        *(constant_line(name, value) for name, value in constants.items()),
        "",
        interface_of_clusters(program).declaration(),
        f"using Problem = {'Backward' if is_backward else 'Forward'}Launch;",
        "",
        "}  // namespace pararnn",
        "",
        '#include "clusters/shares.h"',
        "",
        "namespace pararnn {",
        "",
        _matrix_entry(program, layout),
        "}  // namespace pararnn",
        "",
        '#include "clusters/links.h"',
        "",
        "namespace pararnn {",
        "",
        _Emission(program, variant, layout).text(),
        "}  // namespace pararnn",
        "",
        '#include "clusters/sequential.h"',
        "",
    ]
    return "\n".join(lines)


def packed_words(program: Program, variant: ClusterVariant) -> int:
    """Return the words of 32 bits of a head's packed matrices."""
    tiles = layout_of(program, variant).matrix_tiles * variant.slices
    return tiles * _tile_bytes(variant) // 4


def _matrix_entry(program: Program, layout: Layout) -> str:
    """Return the function of a matrix's number, by its tile among those of a block."""
    lines = [
        "PARARNN_FUNCTION real matrix_entry(const PackProblem& p, int64 head, int slice, int number,",
        "                                   int row, int column) {",
    ]
    sizes, kinds = program.step.head, [*program.step.cls.params.values()]
    for (link, i), matrix in layout.matrices.items():
        size = sizes.param(kinds[matrix.param].kind)[1:]
        strides = [math.prod(size[axis + 1 :]) for axis in matrix.order]
        lengths = [size[axis] for axis in matrix.order]
        first, second = matrix.groups, matrix.groups + matrix.results
        shared, result, source = (slice(0, first), slice(first, second), slice(second, None))
        count = f"number - {matrix.first}"
        if matrix.scatters:
            place = [f"const int group = 0, to = ({count}) / {matrix.block_tiles};",
                     f"const int from = slice * {matrix.block_tiles} + ({count}) % {matrix.block_tiles};"]  # fmt: skip
        else:
            own = f"(slice * {matrix.block_tiles} + ({count}) / {matrix.in_tiles})"
            place = [
                f"const int group = {own} / {matrix.out_tiles}, to = {own} % {matrix.out_tiles};",
                f"const int from = ({count}) % {matrix.in_tiles};",
            ]
        groups = math.prod(lengths[shared])
        rows, columns = ("ShareOf<{0}, 1, {1}, {2}>".format(
            math.prod(lengths[part][:-1]) * -(-lengths[part][-1] // TILE), -(-lengths[part][-1] // TILE), lengths[part][-1],
        ) for part in (result, source))  # fmt: skip
        offset = " + ".join([
            f"head * {math.prod(size)}",
            *_offsets("group", lengths[shared], strides[shared]),
            *_offsets("x", lengths[result], strides[result]),
            *_offsets("y", lengths[source], strides[source]),
        ])  # fmt: skip
        lines += [
            f"  if (number < {matrix.first + matrix.tiles}) {{",
            *(f"    {line}" for line in place),
            f"    const int x = {rows}::flat(to * tile + row), y = {columns}::flat(from * tile + column);",
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
        return {link.value: link for link in self.steps.links if link.kind != "spread"}

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
            if kind in kinds and value.axes in self.names and self._reads(value, value.axes):
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

    @cached_property
    def _readers(self) -> set[tuple[Value, Axes]]:
        readers = set[tuple[Value, Axes]]()
        for sink in self.steps.sinks:
            left = [sink.source] if isinstance(sink.source, Value) else []
            seen = set[Value]()
            while left:
                value = left.pop()
                if value in seen:
                    continue
                seen.add(value)
                if self._is_leaf(value):
                    readers.add((value, sink.axes))
                else:
                    left += value.definition.values  # type: ignore[union-attr]
        return readers

    def _reads(self, value: Value, axes: Axes) -> bool:
        return (value, axes) in self._readers

    def _is_leaf(self, value: Value) -> bool:
        return (
            value in self.kinds or value in self.leaves or not isinstance(value.definition, Point)
        )

    @cached_property
    def states(self) -> list[Axes]:
        """Axes of the states."""
        return [*self.program.step.axes.states.values()]

    def share(self, axes: Axes) -> str:
        """Return the type of a share."""
        return self.names[axes]

    def text(self) -> str:
        """Return the struct, and the types of shares."""
        for axes, share in self.layout.shares.items():
            self.lines.append(f"using {self.names[axes]} = {share.text};  // {', '.join(axes)}")
        self.lines += ["", "struct Steps {"]
        self._registers()
        self._constructor()
        self._load()
        self._start()
        self._run()
        self._finish()
        self.lines += ["};", ""]
        return "\n".join(self.lines)

    def _loop(self, axes: Axes, body: Iterable[str], indent: str = "    ") -> None:
        share = self.share(axes)
        self.lines.append(
            f"{indent}each_entry<{share}>(place, [&](int k, const Entry<{share}>& e) {{"
        )
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
                       "  Boxes boxes;", "  const unsigned* matrices;",
                       "  Ahead ahead;", "  Inputs now;"]  # fmt: skip
        for i, axes in enumerate(self.states):
            count = f"[{self.share(axes)}::count]"
            self.lines.append(f"  real state_{i}{count}, next_{i}{count};")
        for axes, numbers in self.constants.items():
            for number in numbers:
                self.lines.append(f"  real param_{number}[{self.share(axes)}::count];")
        for axes, keys in self.fed.items():
            for kind, number in keys:
                if kind == "gate":
                    self.lines.append(f"  real bias_{number}[{self.share(axes)}::count];")
        for i, link in enumerate(self.steps.links):
            if self._in_registers(link):
                self.lines.append(f"  real leaf_{i}[{self.share(link.value.axes)}::count];")

    def _in_registers(self, link: Link) -> bool:
        return not link.whole and link.kind in ("scatter", "reduce")

    def _constructor(self) -> None:
        self.lines += [
            "",
            "  PARARNN_FUNCTION Steps(const Problem& p, const Place& place, char* memory)",
            "      : p(p), place(place), memory(memory), boxes(memory + boxes_at),",
            "        matrices(place_matrices(p.packed, place, memory)) {",
        ]
        sizes = self.program.step.head
        for axes, numbers in self.constants.items():
            body = [
                f"param_{n}[k] = e.there ? widen(p.in.params[{n}][{self._param_at(n)} + e.flat]) : "
                "constant(0);"
                for n in numbers
            ]
            self._loop(axes, body)
        for axes, keys in self.fed.items():
            offsets = [(n, sizes.gate_offsets[n]) for kind, n in keys if kind == "gate"]
            body = [
                f"bias_{n}[k] = e.there && p.in.bias != nullptr ? "
                f"widen(p.in.bias[place.head * {sizes.width} + {at} + e.flat]) : constant(-0.0);"
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

    def _load(self) -> None:
        self.lines += ["", "  PARARNN_FUNCTION void load(int l) {"]
        for axes, keys in self.fed.items():
            body = [
                line for kind, n in keys
                for line in (
                    f"ahead.{kind}_{n}[k] = {{}};",
                    f"if ({self._exists(kind)}) "
                    f"ahead.{kind}_{n}[k] = {self._at(kind, n, 'e.row', 'e.flat')};",
                )
            ]  # fmt: skip
            self._loop(axes, body)
        self.lines.append("  }")

    def _exists(self, kind: str) -> str:
        """Return whether an entry of an input is in memory."""
        return "e.there && p.grad_output != nullptr" if kind == "grad_output" else "e.there"

    def _at(self, kind: str, number: int, row: str, index: str) -> str:
        """Return an input's number in memory, at step l."""
        sizes = self.program.step.head
        if kind == "gate":
            at = f"place.at_gates({row}, l) + {sizes.gate_offsets[number]} + {index}"
            return f"p.in.gates[{at}]"
        if kind == "grad_output":
            offset = sum(map(math.prod, sizes.outputs[:number]))
            at = (
                f"(place.first_row + {row}) * p.output_row + place.time(l) * p.output_time + "
                f"place.head * p.output_head + {offset} + {index}"
            )
            return f"p.grad_output[{at}]"
        if kind == "param":
            return f"p.in.params[{number}][{self._param_at(number)} + {index}]"
        offset = saved_offsets(self.program, self.variant.dtype)[kind, number]
        return f"p.saved[place.at_step({row}, l, saved_numbers) + {offset} + {index}]"

    def _start(self) -> None:
        final = "grad_final" if self.is_backward else "in.initial"
        self.lines += ["", "  PARARNN_FUNCTION void start(int l) {"]
        for i, axes in enumerate(self.states):
            size = self.layout.shares[axes].numbers
            source = f"p.{final}[{i}]"
            self._loop(axes, [
                f"state_{i}[k] = constant(0);",
                f"if (!events && e.there && {source} != nullptr)",
                f"  state_{i}[k] = {source}[place.at_sequence(place.first_row + e.row, {size}) + "
                "e.flat];",
            ])  # fmt: skip
        self.lines += ["    load(l);", "    __syncthreads();", "    meet_slices();", "  }"]

    def _begin(self) -> list[tuple[Axes, list[str]]]:
        """Return loops that begin a step: the state that it starts from, which a forward pass
        saves, or the adjoint after it."""
        loops: list[tuple[Axes, list[str]]] = []
        offsets = saved_offsets(self.program, self.variant.dtype)
        for i, axes in enumerate(self.states):
            size, name = self.layout.shares[axes].numbers, f"state_{i}[k]"
            source = f"p.{'grad_final' if self.is_backward else 'in.initial'}[{i}]"
            if self.is_backward:
                conditions = [f"if (place.ends(e.row, l)) {name} = {{}};"]
            else:
                conditions = [
                    f"if (place.is_reset(e.row, l)) {name} = constant(0);",
                    f"else if (place.begins(e.row, l)) {name} = {{}};",
                ]
            at = f"place.at_sequence(place.sequence(e.row, l), {size}) + e.flat"
            value = f"{source} == nullptr ? constant(0) : {source}[{at}]"
            lines = [
                "if (events && e.there) {",
                f"  if (place.is_padding(e.row, l)) {name} = constant(0);",
                *(f"  else {line}".replace("else else", "else").format(value) for line in conditions),
                "}",
            ]
            if self.variant.direction == "saving":
                lines.append(
                    f"if (e.there) p.saved[place.at_step(e.row, l, saved_numbers) + "
                    f"{offsets['state', i]} + e.flat] = {name};"
                )
            loops.append((axes, lines))
        return loops

    def _run(self) -> None:
        self.lines += [
            "",
            "  PARARNN_FUNCTION void run(int l, int l_ahead) {",
        ]
        for axes, keys in self.fed.items():
            body = [
                f"now.{kind}_{n}[k] = widen(ahead.{kind}_{n}[k]){f' + bias_{n}[k]' * (kind == 'gate')};"
                for kind, n in keys
            ]
            self._loop(axes, body)
        self.lines.append("    load(l_ahead);")
        for axes, lines in self._begin():
            self._loop(axes, lines)
        for stage in range(self.steps.stages + 1):
            self.lines.append(f"    // stage {stage}")
            links = [link for link in self.steps.links if link.stage == stage]
            if stage > 0:
                self._arrive(stage, links)
            sinks = [sink for sink in self.steps.sinks if sink.stage == stage]
            for axes in dict.fromkeys(sink.axes for sink in sinks):
                self._sinks(axes, [sink for sink in sinks if sink.axes == axes])
            leaving = [link for link in self.steps.links if link.stage == stage + 1]
            self._leave(stage + 1, leaving)
        self._end()
        self.lines.append("  }")

    def _in_shared(self, key: object, kind: str = "real") -> str:
        place = f"memory + {self.layout.at[key]}"
        return f"reinterpret_cast<{kind}*>({place})" if kind != "char" else f"({place})"

    def _arrive(self, stage: int, links: Sequence[Link]) -> None:
        """Add what a stage begins with: what other blocks have sent."""
        shares, sent = self.layout.shares, self.layout.sent
        box = f"box_{stage}"
        received = self.layout.received[stage]
        self.lines.append(f"    const char* const {box} = boxes.receive({received});")
        gathers = [link for link in links if link.kind == "gather"]
        for link in links:
            share, at = shares[link.value.axes], sent.get((stage, link), 0)
            if link.kind == "spread":
                at = sent[stage, (link.value, True)]
                self.lines += [
                    f"    for (int i = threadIdx.x; i < {ROWS * share.padded}; i += threads)",
                    f"      {self._in_shared(link)}[i % {ROWS} * {share.padded} + i / {ROWS}] = "
                    f"reinterpret_cast<const real*>({box} + {at})[i];",
                ]
            elif link.kind == "reduce" and link.whole:
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
        for link in gathers:
            self._multiply(link, box)
        if gathers or any(link.whole for link in links):
            self.lines.append("    __syncthreads();")

    def _multiply(self, link: Link, box: str) -> None:
        """Add the products of a link that reads a box."""
        share, splits = self.layout.shares[link.value.axes], self.layout.splits[link]
        operands = []
        for i, source in enumerate(link.sources):
            matrix, all_tiles = self.layout.matrices[link, i], self._box_tiles(source)
            at = self.layout.sent[link.stage, (source, False)]
            start = f"own / {matrix.out_tiles} * {matrix.in_tiles} * Operand<{all_tiles}>::step"
            operands.append((f"{box} + {at}{f' + {start}' if matrix.groups else ''}", all_tiles))
        self._sums(link, operands, [
            f"real* const target = {self._in_shared(link)} + (split * cluster_rows + row) * "
            f"{share.block} + number * tile + unit;",
            "target[0] = a;",
            f"target[{share.block}] = b;",
        ])  # fmt: skip

    def _sums(self, link: Link, operands: Sequence[tuple[str, int]], put: Sequence[str]) -> None:
        """Add sums of products by warps; operands: where each is, and its tiles. put: what is done
        with sums a, b of a tile `number`, a `unit` of it, and two rows."""
        share, is_gather = self.layout.shares[link.value.axes], link.kind == "gather"
        splits = self.layout.splits.get(link, 1)
        tiles = share.block_tiles if is_gather else share.padded // TILE
        lines = [f"  if (number < {share.tiles}) {{"]
        if is_gather:
            lines = [f"  const int own = place.slice * {share.block_tiles} + number;",
                     f"  if (own < {share.tiles}) {{"]  # fmt: skip
        for i, (operand, operand_tiles) in enumerate(operands):
            matrix = self.layout.matrices[link, i]
            terms = matrix.in_tiles if is_gather else operand_tiles
            lines.append(
                f"    sums.add<{operand_tiles}>({operand}, split * {terms} / {splits}, "
                f"(split + 1) * {terms} / {splits}, "
                f"matrices + ({matrix.first} + number * {terms}) * matrix_words);"
            )
        begin = self.begins.get((link.stage, link.kind), 0)
        self.begins[link.stage, link.kind] = begin + tiles * splits
        self.lines += [
            f"    each_tile<{tiles}, {splits}>({begin}, [&](int number, int split) {{",
            "      Sums sums;",
            *(f"    {line}" for line in [*lines, "  }"]),
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
        self.lines.append("    __syncthreads();")
        shares, sent = self.layout.shares, self.layout.sent
        for link in links:
            share, at = shares[link.value.axes], sent.get((stage, link), 0)
            if link.kind == "reduce":
                self._reduce(link, at)
            if link.kind != "scatter":
                continue
            operands = [
                (self._in_shared((link, i), "char"), shares[source.axes].block_tiles)
                for i, source in enumerate(link.sources)
            ]
            self._sums(link, operands, [
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
        ):
            tiles, at = shares[source.axes].block_tiles, sent[stage, (source, is_number)]
            parts = 1 if is_number else self.variant.operand_parts
            size = tiles * (ROWS * TILE * number if is_number else _operand_bytes(self.variant, 1) // parts)
            self.lines.append(
                f"    send_to_all<{parts}, {size}, {size * self.variant.slices}>(place, boxes, "
                f"{self._in_shared((source, is_number), 'char')}, {at});"
            )

    def _reduce(self, link: Link, at: int) -> None:
        (source,) = link.sources
        share = self.layout.shares[source.axes]
        reduced = [axis for axis in source.axes if axis not in link.value.axes]
        lengths = self.program.step.head.lengths
        types = (self.share(source.axes), self.share(link.value.axes), link.op.capitalize())
        call = f"{', '.join(types)}, {str(link.whole).lower()}"
        if source.axes[len(source.axes) - len(reduced) :] == tuple(reduced):
            length = share.tiles * TILE // math.prod(lengths[axis] for axis in link.value.axes)
            call = f"reduce_last<{call}, {length}>"
        else:
            first = source.axes.index(reduced[0])
            if list(source.axes[first : first + len(reduced)]) != reduced:
                raise EngineError(
                    f"{self.program.cell_name} reduces axes {tuple(reduced)} of {source.axes} at "
                    "once, between which others lie; use backend='torch'"
                )
            stride = math.prod(lengths[axis] for axis in source.axes[first + len(reduced) :])
            length = math.prod(lengths[axis] for axis in reduced)
            call = f"reduce_middle<{call}, {length}, {stride}>"
        self.lines.append(
            f"    {call}(place, boxes, {self._in_shared((link, 0))}, "
            f"constant({IDENTITY[link.op]}), {at});"
        )

    def _sinks(self, axes: Axes, sinks: Sequence[Sink]) -> None:
        """Add a loop over the block's entries."""
        body = _LoopText(self, axes)
        values = [body.real(sink.source) for sink in sinks]
        padding = [self._put(sink, "constant(0)", filling=True) for sink in sinks]
        padding = [line for line in dict.fromkeys(padding) if line]
        skipped = [self._put(sink, "constant(0)", skips=True) for sink in sinks]
        skipped = [line for line in dict.fromkeys(skipped) if line]
        puts = dict.fromkeys(
            self._put(sink, value) for sink, value in zip(sinks, values, strict=True)
        )
        lines = ["if (!e.there) {", *(f"  {line}" for line in padding), "  return;", "}"]
        if self.variant.events:
            lines += ["if (place.is_padding(e.row, l)) {", *(f"  {line}" for line in skipped),
                      "  return;", "}"]  # fmt: skip
        self._loop(axes, [*lines, *body.lines, *puts])

    def _put(self, sink: Sink, value: str, filling: bool = False, skips: bool = False) -> str:
        """Return the statement that puts a number where a sink says. filling: for entries that
        there are not. skips: for padding."""
        target, link = sink.target, sink.link
        share = self.layout.shares[sink.axes]
        if link is not None:
            if link.kind == "reduce":
                number = f"constant({IDENTITY[link.op]})" if filling or skips else value
                at = f"e.row * {share.block} + e.at"
                return f"{self._in_shared((link, sink.term))}[{at}] = {number};"
            assert isinstance(sink.source, Value)
            if link.kind == "spread":
                place = self._in_shared((sink.source, True))
                return f"{place}[e.at * {ROWS} + e.row] = {value};"
            key = (sink.source, False) if link.kind == "gather" else (link, sink.term)
            place = self._in_shared(key, "char")
            return f"Operand<{share.block_tiles}>::write({place}, e.row, e.at, {value});"
        if filling:
            return f"next_{target.number}[k] = constant(0);" if _hands_on(sink) else ""  # type: ignore[union-attr]
        if sink.stream is not None:
            offset = stream_offsets(self.program, self.variant.dtype)[sink.stream]
            at = f"place.at_step(e.row, l, stream_numbers) + {offset} + e.flat"
            return f"p.streams[{at}] = narrow<stream_io>({value});"
        assert target is not None
        return self._result(target.kind, target.number, value, skips)

    def _result(self, kind: str, number: int, value: str, skips: bool) -> str:
        sizes = self.program.step.head
        if kind in ("new_state", "grad_state"):
            return f"next_{number}[k] = {value};"
        if kind == "output":
            offset = sum(map(math.prod, sizes.outputs[:number]))
            at = f"place.at_step(e.row, l, {sizes.output[1]}) + {offset} + e.flat"
            return f"p.output[{at}] = narrow<io>({value});"
        if kind == "grad_gate":
            at = f"{sizes.gate_offsets[number]} + e.flat"
            bias = "" if skips else f" add_partial(e.row, {at}, {value});"
            return f"grad_gates(e.row, l)[{at}] = narrow<io>({value});{bias}"
        if skips:
            return ""
        if kind == KEPT:
            offset = saved_offsets(self.program, self.variant.dtype)[KEPT, number]
            return f"p.saved[place.at_step(e.row, l, saved_numbers) + {offset} + e.flat] = {value};"
        if kind != "grad_param":
            raise EngineError(f"kernels of clusters have no {kind} among their results")
        offset = sizes.width + sum(self.program.param_numbers[:number])
        return f"add_partial(e.row, {offset} + e.flat, {value});"

    def _end(self) -> None:
        """Add the end of a step: the states that the next one starts from."""
        for i, axes in enumerate(self.states):
            size = self.layout.shares[axes].numbers
            at = f"place.at_sequence(place.sequence(e.row, l), {size}) + e.flat"
            if self.is_backward:
                target, last = f"p.grad_initial[{i}]", "place.begins(e.row, l)"
                zero = [f"if (place.is_reset(e.row, l)) state_{i}[k] = constant(0);"]
            else:
                target, last, zero = f"p.final[{i}]", "place.ends(e.row, l)", []
            self._loop(axes, [
                f"state_{i}[k] = next_{i}[k];",
                "if (events && e.there && !place.is_padding(e.row, l)) {",
                *(f"  {line}" for line in zero),
                f"  if ({last} && {target} != nullptr) {target}[{at}] = state_{i}[k];",
                "}",
            ])  # fmt: skip

    def _finish(self) -> None:
        target = "grad_initial" if self.is_backward else "final"
        self.lines += ["", "  PARARNN_FUNCTION void finish() {", "    if (events) return;"]
        for i, axes in enumerate(self.states):
            size = self.layout.shares[axes].numbers
            at = f"place.at_sequence(place.first_row + e.row, {size}) + e.flat"
            self._loop(axes, [f"if (e.there && p.{target}[{i}] != nullptr) "
                              f"p.{target}[{i}][{at}] = state_{i}[k];"])  # fmt: skip
        self.lines.append("  }")
        if not self.is_backward:
            return
        self.lines += [
            "  PARARNN_FUNCTION io* grad_gates(int row, int l) const {",
            "    return p.grad_gates + (place.first_row + row) * p.grad_row + place.time(l) * "
            "p.grad_time + place.head * p.grad_head;",
            "  }",
            "  PARARNN_FUNCTION void add_partial(int row, int number, real x) const {",
            "    p.partial[place.at_sequence(place.first_row + row, partial_numbers) + number] += x;",
            "  }",
        ]


def _hands_on(sink: Sink) -> bool:
    return sink.target is not None and sink.target.kind in ("new_state", "grad_state")


class _LoopText(NestText):
    """The code of a loop over the entries that a block has of values with some axes."""

    def __init__(self, emission: _Emission, axes: Axes) -> None:
        self.emission, self.axes = emission, axes
        self.body = Body(f"{emission.program.cell_name}'s {emission.variant.direction} pass")
        self.lines: list[str] = []
        self.indices: dict[str, str] = {}

    def load(self, value: Value) -> None:
        """Add what computes a value, once."""
        if value.node in self.body.values:
            return
        if not self.emission._is_leaf(value):
            self.lines.append(self.point(value))
            return
        text, name = self._leaf(value), f"x{len(self.body.values)}"
        is_mask = value.node.meta["dtype"] == torch.bool
        kind = MASK if is_mask else REAL
        self.lines.append(f"const {kind} {name} = {f'truth({text})' if is_mask else text};")
        self.body.values[value.node] = (name, kind)

    def _leaf(self, value: Value) -> str:
        emission, steps = self.emission, self.emission.steps
        local = value.axes == self.axes
        if value in emission.kinds:
            kind, number = emission.kinds[value]
            if kind == emission.state_kind and local:
                return f"state_{number}[k]"
            if kind != emission.state_kind:
                if kind == "param" and local:
                    return f"param_{number}[k]"
                if local:
                    return f"now.{kind}_{number}[k]"
                return self._from_memory(kind, number, value)
            return self._whole(steps.spreads[value])
        link = emission.leaves[value]
        if link.whole:
            return self._whole(link)
        if not local:
            return self._whole(steps.spreads[value])
        if emission._in_registers(link):
            return f"leaf_{steps.links.index(link)}[k]"
        share, splits = emission.layout.shares[value.axes], emission.layout.splits[link]
        at = f"{emission._in_shared(link)}[{{}}e.row * {share.block} + e.at]"
        terms = [at.format(f"{i * ROWS * share.block} + " if i else "") for i in range(splits)]
        return terms[0] if splits == 1 else f"({' + '.join(terms)})"

    def _from_memory(self, kind: str, number: int, value: Value) -> str:
        text = f"widen({self.emission._at(kind, number, 'e.row', self._flat(value.axes))})"
        if kind == "grad_output":
            return f"(p.grad_output == nullptr ? constant(0) : {text})"
        if kind != "gate":
            return text
        sizes = self.emission.program.step.head
        at = f"place.head * {sizes.width} + {sizes.gate_offsets[number]} + {self._flat(value.axes)}"
        return f"({text} + (p.in.bias == nullptr ? constant(-0.0) : widen(p.in.bias[{at}])))"

    def _whole(self, link: Link) -> str:
        share, axes = self.emission.layout.shares[link.value.axes], link.value.axes
        place, flat = self.emission._in_shared(link), self._flat(axes)
        if link.kind == "reduce":
            return f"{place}[e.row * {share.numbers} + {flat}]"
        position = f"{self.emission.share(axes)}::position({flat})"
        return f"{place}[e.row * {share.padded} + {position}]"

    def _index(self, axis: str) -> str:
        """Return the index of an entry along an axis of the loop."""
        place, lengths = self.axes.index(axis), self.emission.program.step.head.lengths
        if place == len(self.axes) - 1:
            return "e.inner"
        inner = math.prod(lengths[a] for a in self.axes[place + 1 : -1])
        text = "e.outer" if inner == 1 else f"e.outer / {inner}"
        return text if place == 0 else f"({text}) % {lengths[axis]}"

    def _flat(self, axes: Axes) -> str:
        """Return the index of an entry in a value with some of the loop's axes."""
        lengths, terms = self.emission.program.step.head.lengths, []
        for i, axis in enumerate(axes):
            stride = math.prod(lengths[a] for a in axes[i + 1 :])
            index = f"({self._index(axis)})"
            terms.append(index if stride == 1 else f"{index} * {stride}")
        return f"({' + '.join(terms) or '0'})"
