"""One frozen Program a cell class, config and what the step reads: its graphs, Jacobian and VJP.

The Program holds no sizes and no parameters. Elementwise steps become graphs of pointwise ops that
broadcast over (..., D); steps that mix channels become graphs over rows (R, D) with symbolic sizes.
A step that branches on a tensor's value, or whose graphs hold for one size alone, has none and runs
by the sequential solver only.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from pararnn.base.errors import CellCostWarning, CellError, PararnnError, StructureError, warn_user
from pararnn.cells.base import Cell, Step, resolve_config
from pararnn.cells.matrix import ChannelSizes, HeadSizes, Sizes
from pararnn.cells.shapes import SHAPES
from pararnn.program.affine import AffineForm, affine_form
from pararnn.program.apart import call_outside_modes
from pararnn.program.coupling import TOGETHER, Coupling
from pararnn.program.derive import (
    Graphs,
    channels_of,
    check_linear,
    check_structure,
    derive,
    graphs_of_rows,
    holds_for,
    is_affine,
    mixing_op,
)
from pararnn.program.guard import SizeError
from pararnn.program.heads import trace_as_heads
from pararnn.program.matrix import trace_matrix, why_a_loop
from pararnn.program.mixing import Mixing, mixing_of, trace_mixing
from pararnn.program.reads import Reads, change_of, reads_mode, reads_of
from pararnn.program.record import BranchError
from pararnn.program.statements import Statements, Traces
from pararnn.program.structure import STRUCTURES, Structure, make_structure
from pararnn.program.trace import Graph

COMPUTE_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Program:
    """A cell's step as solvers and kernels use it.

    `structure` is None for sequential-only steps, and `why_sequential` then says why.
    `affine`: True if it is elementwise, with a Jacobian that depends on no state. By compute dtype:
    `graphs` for solvers in PyTorch, where the step has a structure, and `statements` for kernels,
    where channels couple. `why_no_family`: why kernels cannot take the step.
    `heads`: for kernels, the step on the channels of a head as a matrix cell's program, or None.
    `step` is the Python step on flat tensors, differentiable by autograd. `reads`: what it read in
    addition to its arguments when it was traced. `training`, `sizes`, `default_dtype`: the cell's
    mode, channels and heads, and PyTorch's dtype in the trace; None if it holds for all. A copy is
    the Program itself. A pickle is its key, and loads as None in a process that has not traced it.
    """

    key: str
    cell_name: str
    states: tuple[str, ...]
    gates: tuple[str, ...]
    fields: tuple[str, ...]
    params: tuple[str, ...]
    step: Step
    structure: Structure | None
    affine: bool
    why_sequential: str | None
    graphs: Mapping[torch.dtype, Graphs]
    statements: Mapping[torch.dtype, Statements]
    why_no_family: str | None
    heads: Program | None
    reads: Reads
    training: bool | None = None
    sizes: tuple[int, int] | None = None
    default_dtype: torch.dtype | None = None

    def change(self) -> str | None:
        """Return what has changed of what the step reads, in words; None if nothing has."""
        if self.default_dtype is not None and self.default_dtype != torch.get_default_dtype():
            return change_of("the default dtype", self.default_dtype, torch.get_default_dtype())
        return self.reads.change()

    def serves(self, training: bool, sizes: tuple[int, int] | None) -> bool:
        """Check whether it was traced for cells of this mode, channels and heads."""
        return self.training in (None, training) and self.sizes in (None, sizes)

    def __deepcopy__(self, memo: Any) -> Program:
        return self

    def __reduce__(self) -> Any:
        return _program_or_none, (self.key,)

    @cached_property
    def mixing(self) -> Mapping[torch.dtype, Mixing]:
        """Stages between products by compute dtype, of a step that multiplies by matrices."""
        return {dtype: mixing_of(self.step, whole) for dtype, whole in self.statements.items()}

    @property
    def num_states(self) -> int:
        """N, the number of states."""
        return len(self.states)

    @property
    def num_outputs(self) -> int:
        """The number of tensors that an engine with a backward returns: N states, or for a matrix
        cell 2, the output and the checkpoints of the backward pass."""
        return self.num_states if self.keeps_states else 2

    @property
    def keeps_states(self) -> bool:
        """True if solvers return the states of all steps; those of matrix cells are too large."""
        return self.head_sizes is None

    @property
    def may_branch(self) -> bool:
        """True if the step may read a tensor's value in Python."""
        return self.structure is None and self.keeps_states

    @property
    def widens(self) -> bool:
        """True if copies of the step with other weights are more channels, or heads, of one."""
        return not self.couples_channels or (self.keeps_states and bool(self.statements))

    @property
    def head_sizes(self) -> HeadSizes | None:
        """Sizes of a matrix cell's heads, None for other cells."""
        return self.step.head_sizes

    @property
    def memory(self) -> tuple[str, ...]:
        """Names of the memories, the last ones of a call's params."""
        return tuple(self.step.cls.memory)

    @property
    def why_one_sequence(self) -> str | None:
        """The reason why its steps need all of a sequence on one rank, and no split of time."""
        return f"steps of {self.cell_name} read a memory of their sequence" if self.memory else None

    @property
    def param_numbers(self) -> list[int]:
        """How many numbers of each parameter of a matrix cell a head has."""
        return [self.step.head.numbers(param.kind) for param in self.step.cls.params.values()]

    def tensor_sizes(self, channels: int) -> Sizes:
        """Return the sizes of a cell's tensors, for gates of `channels` channels."""
        return self.head_sizes or ChannelSizes(channels, 1, self.num_states, len(self.gates))

    def workload_size(self, size: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return (B, T, D) for the size (B, T, channels of a gate) of a call."""
        batch, steps, channels = size
        return batch, steps, math.prod(self.tensor_sizes(channels).output)

    @property
    def coupling(self) -> Coupling:
        """Coupling of channels, which decides what solves independently."""
        return TOGETHER if self.structure is None else self.structure.coupling

    @property
    def couples_channels(self) -> bool:
        """True if a channel's next state may depend on other channels."""
        return self.structure is None or self.structure.couples_channels

    def check_param(self, name: str, param: torch.Tensor, channels: int) -> None:
        """Check the size of a parameter: (D,) where no channels couple, else the cell's shape. A
        matrix may be (H, K, K) too, as copies by vmap are. Raises ValueError."""
        shape, size = self.step.cls.params[name].kind, tuple(param.shape)
        if not (self.keeps_states and self.couples_channels):
            wanted = (channels,) if self.keeps_states else self.step.head.param(shape)
            fits, size_text = size == wanted, str(wanted)
        else:
            fits, size_text = shape.fits(size, channels), f"{shape.name!r} for D = {channels}"
            if self.statements and self.step.matrices[self.params.index(name)]:
                fits = fits or SHAPES["H,K,K"].fits(size, channels)
        if not fits:
            raise ValueError(f"{name} of {self.cell_name} must be {size_text}, got {size}")

    @property
    def family(self) -> str | None:
        """Name of the family of kernels that fits its recurrence, None if none does."""
        if not self.couples_channels:
            return ELEMENTWISE
        if self.heads is not None:
            return HEADS
        if not self.statements:
            return None
        return MIXING if self.keeps_states else MATRIX

    @property
    def has_kernels(self) -> bool:
        """True if a family of kernels fits its recurrence."""
        return self.family is not None

    def affine_form(self, dtype: torch.dtype = torch.float32) -> AffineForm | str:
        """Return the normal form of a matrix cell's step in a compute dtype, or by which operation
        it is not affine in its states."""
        if self.keeps_states:
            return "a step without matrix states"
        return "a memory" if self.memory else _affine_form(self, dtype)

    @property
    def of_kernels(self) -> Program:
        """The program that kernels are generated for: `heads`, else itself."""
        return self if self.heads is None else self.heads


@lru_cache(maxsize=1024)
def _affine_form(program: Program, dtype: torch.dtype) -> AffineForm | str:
    if program.why_no_family is not None:
        return program.why_no_family
    return affine_form(program.step, program.statements[dtype], dtype)


_BY_CLASS: dict[tuple[type[Cell], str], list[Program]] = {}
_BY_KEY: dict[str, Program] = {}
_TRACING = threading.RLock()  # PyTorch traces for one thread at a time
ELEMENTWISE = "elementwise"
"""The family of recurrences in which no channels couple."""
MIXING = "mixing"
"""The family of recurrences in which channels couple by products with matrices inside heads."""
HEADS = "heads"
"""The family of recurrences of vectors whose channels couple inside heads by more than products."""
MATRIX = "matrix"
"""The family of recurrences whose states are matrices, vectors and numbers of each head."""
MAX_STATES = 8
"""Largest number of states that generated kernels take."""
MANY_TRACES = 8
"""Traces of a class and config after which a warning names what changes; each takes a second."""


def program_of(cell: Cell) -> Program:
    """Return the cell's Program, traced at the first call for its class, config and what it reads.

    A change of what the step reads (code, globals, closures, class attributes, `self.training`)
    leads to another Program. In a compiled region the cell keeps the one that it has for its mode,
    and the operators raise where its step has changed. Raises CellError and StructureError where
    the step breaks the contract; warns once with CellCostWarning where an undeclared structure
    rules out the fast paths.
    """
    attribute = _PROGRAM_ATTRIBUTES[cell.training]
    program: Program | None = cell.__dict__.get(attribute)
    if torch.compiler.is_compiling():
        if program is None:
            raise CellError(
                f"{type(cell).__name__} is used for the first time inside a compiled region; make "
                "its layer, or call pararnn.program_of(cell), before compiling"
            )
        return program
    # Wrappers (parametrisations, FSDP) make a subclass for each module: the step is the same.
    cls = program.step.cls if program and isinstance(cell, program.step.cls) else type(cell)
    if program is None or cls is not program.step.cls or program.change():
        config, sizes = cell.config_values(), (cell.hidden_size, cell.num_heads)
        # A step that does not read its mode has one Program.
        for mode, name in _PROGRAM_ATTRIBUTES.items():
            cell.__dict__[name] = make_program(cls, config, mode, sizes)
        program = cell.__dict__[attribute]
    return program


_PROGRAM_ATTRIBUTES = {True: "_program", False: "_program_of_evaluation"}
"""Attributes of a cell that hold its Programs, by mode."""


def program_by_key(key: str) -> Program:
    """Return the Program that `key` names; a new process imports and traces its class.

    Raises CellError where the class cannot be imported or its step has changed.
    """
    of_cell = key.removesuffix(f".{HEADS}")
    if of_cell != key:
        return program_by_key(of_cell).of_kernels
    derivation, _, rest = key.partition(":")
    if key not in _BY_KEY and derivation in DERIVED:
        names, _, of = rest.rpartition("||")[0].partition(":")
        DERIVED[derivation](program_by_key(of), [name for name in names.split(",") if name])
    if key not in _BY_KEY:
        path, config, training, sizes = _parse_key(key)
        module, _, qualname = path.partition(":")
        try:
            target: Any = importlib.import_module(module)
            for name in qualname.split("."):
                target = getattr(target, name)
        except (ImportError, AttributeError) as error:
            raise CellError(
                f"cannot import the cell {path}: define it at a module's top level to use it in "
                "another process"
            ) from error
        program = make_program(target, config, training, sizes)
        if program.key != key:
            raise CellError(f"the step of {path} has changed since this was exported; export again")
    return _BY_KEY[key]


def program_in_use(key: str) -> Program:
    """Return the Program that `key` names, for a forward pass; its step must be unchanged.

    Compiled and exported code holds only the key. Raises CellError where what the step reads has
    changed, and names it.
    """
    program = program_by_key(key)
    change = program.change()
    if change is None:
        return program
    path, config, training, sizes = _parse_key(key)
    # The key stays the same if the change makes no difference.
    make_program(program.step.cls, config, training, sizes)
    for traced in [p for programs in _BY_CLASS.values() for p in programs if p.key == key]:
        if traced.change() is None:
            _BY_KEY[key] = traced
            return traced
    raise CellError(
        f"the step of {path} reads {change}, since this was compiled or exported: call "
        "pararnn.program_of(cell), which compiled code takes notice of, or export again"
    )


def make_program(
    cls: type[Cell],
    config: Mapping[str, Any],
    training: bool = True,
    sizes: tuple[int, int] | None = None,
) -> Program:
    """Trace a cell class under a config; cached by class, config and what the step reads.

    `training` is the mode of the cell. `sizes` are its channels and heads, on which a step is
    traced that runs on no others.
    """
    values = resolve_config(cls, config)
    if cls.head_axes is not None and sizes is None:
        raise CellError(f"{cls.__name__} is traced for its channels and heads: give sizes")
    text = json.dumps(values, sort_keys=True)
    programs = _BY_CLASS.setdefault((cls, text), [])

    def current() -> Program | None:
        fit = (p for p in reversed(programs) if p.serves(training, sizes))
        return next((p for p in fit if p.change() is None and _holds_for(p, sizes)), None)

    program = current()
    if program is None:
        with _TRACING:
            program = current()
            if program is None:
                try:
                    program = _build(cls, values, text, training, sizes)
                except PararnnError as error:
                    # Message and cause say what is wrong; the tracer's frames would hide it.
                    raise error.with_traceback(None) from error.__cause__
                stale = [p for p in programs if p.serves(training, sizes)]
                if len(stale) == MANY_TRACES:
                    warn_user(
                        f"{cls.__name__} is traced again, in about a second, when what its step "
                        f"reads changes, last {stale[-1].change()}. Pass it in as a field or a "
                        "Param, or make it config",
                        CellCostWarning,
                    )
                programs.append(program)
                _HOLDS[program] = {sizes: True}  # it was checked as it was built
                _BY_KEY[program.key] = program
    return program


def _program_or_none(key: str) -> Program | None:
    return _BY_KEY.get(key)


def _parse_key(key: str) -> tuple[str, dict[str, Any], bool, tuple[int, int] | None]:
    """Return the path of a key's class, the config, the mode, and channels and heads if any."""
    path, _, tail = key.partition("|")
    text, _, end = tail.rpartition("|")
    config: dict[str, Any] = json.loads(text)
    *suffixes, _ = end.split(".")
    sizes = [tuple(map(int, suffix.split("x"))) for suffix in suffixes if "x" in suffix]
    return path, config, _EVALUATION not in suffixes, sizes[0] if sizes else None  # type: ignore[return-value]


_EVALUATION = "evaluation"
"""Suffix of the keys of steps that read `self.training` and are not in training."""


def _build(
    cls: type[Cell],
    config: Mapping[str, Any],
    config_text: str,
    training: bool,
    sizes: tuple[int, int] | None,
) -> Program:
    reads = reads_of(cls, STRUCTURES, cls.structure or "")
    mode = training if reads_mode(cls, reads) else None
    program = None if sizes is None else _of_other_sizes(_BY_CLASS[cls, config_text], mode, sizes)
    if program is not None:
        return program
    step = Step(cls, config, mode, None if cls.head_axes is None else sizes)
    try:
        trace = call_outside_modes(_trace, step, sizes)
        _check_sizes(step, trace, sizes)
    except SizeError:
        if sizes is None:
            raise
        step = Step(cls, config, mode, sizes)
        trace = call_outside_modes(_trace, step, sizes)
    if trace.warning is not None:
        warn_user(trace.warning, CellCostWarning)
    reads = reads_of(cls, STRUCTURES, cls.structure or "")
    return _assemble(step, trace, sizes, f"{cls.__module__}:{cls.__qualname__}", config_text, reads)


def _check_sizes(step: Step, trace: _Trace, sizes: tuple[int, int] | None) -> None:
    """Check that a trace holds for a layer's channels and heads. Raises SizeError where one of
    these may, CellError for an elementwise step, which none may change."""
    if _holds(step, trace.structure, trace.graphs, trace.statements, sizes):
        return
    assert sizes is not None
    message = (
        f"{step.cls.__name__}.step depends on the number of channels (it reads a shape): it does "
        f"something else on {sizes[0]} than on {channels_of(step)[0]}"
    )
    if _couples(trace.structure):
        raise SizeError(message)
    raise CellError(f"{message}; make that number a config value or a scalar Param")


def _holds(
    step: Step,
    structure: Structure | None,
    graphs: Mapping[torch.dtype, Graphs],
    statements: Mapping[torch.dtype, Statements],
    sizes: tuple[int, int] | None,
) -> bool:
    """Check that graphs hold for a layer's channels and heads; those of its own sizes do, and those
    of the library's cells, which tests compare at many sizes, hold for all."""
    is_ours = step.cls.__module__.startswith("pararnn.") and not step.cls.is_derivative
    if sizes is None or step.sizes is not None or not graphs or is_ours:
        return True
    # Steps with statements have derivatives by pointwise ops and products, without sizes.
    gradients = _couples(structure) and not statements
    return call_outside_modes(holds_for, step, graphs[torch.float64], *sizes, gradients)


def _couples(structure: Structure | None) -> bool:
    return structure is not None and structure.couples_channels


def _holds_for(program: Program, sizes: tuple[int, int] | None) -> bool:
    """Check that a program holds for a layer's channels and heads; cached."""
    known = _HOLDS.setdefault(program, {})
    if sizes not in known:
        traced = program.step, program.structure, program.graphs, program.statements
        known[sizes] = _holds(*traced, sizes)
    return known[sizes]


_HOLDS: WeakKeyDictionary[Program, dict[tuple[int, int] | None, bool]] = WeakKeyDictionary()
"""By the program and not by its key, which steps share that differ on other sizes alone."""


def _of_other_sizes(
    programs: Sequence[Program], mode: bool | None, sizes: tuple[int, int]
) -> Program | None:
    """Return the program for some channels and heads by one for others, of which only what is made
    for kernels depends on these; None where there is none, or no kernels can take the step."""
    fit = (p for p in programs if p.heads is not None and p.step.sizes is None)
    fit = (p for p in fit if _holds_for(p, sizes))
    program = next((p for p in fit if p.training == mode and p.change() is None), None)
    if program is None:
        return None
    heads = call_outside_modes(torch.no_grad()(trace_as_heads), program.step, sizes, COMPUTE_DTYPES)
    if isinstance(heads, str):
        return None
    path, _, end = program.key.rpartition("|")
    key = f"{path}|" + _key_end(mode, sizes, end.rpartition(".")[2])
    return _of_heads(replace(program, key=key, sizes=sizes, heads=None), *heads)


def _key_end(mode: bool | None, sizes: tuple[int, int] | None, digest: str) -> str:
    """Return what a key has behind the config."""
    suffixes = [_EVALUATION] if mode is False else []
    suffixes += [] if sizes is None else ["x".join(map(str, sizes))]
    return ".".join([*suffixes, digest])


DERIVED: dict[str, Callable[[Program, Collection[str]], Program]] = {}
"""Functions that make a program of another one and names, by how its key begins."""
_DERIVED: dict[tuple[str, str, frozenset[str]], Program] = {}


def derived_program(
    program: Program,
    kind: str,
    names: Collection[str],
    make: Callable[[Program, frozenset[str]], tuple[Step, tuple[int, int] | None]],
) -> Program:
    """Return the program of the step that `make` makes of a program's and names, for channels and
    heads; cached. kind: an entry of DERIVED. Raises CellError where what the step reads has
    changed since the program was traced."""
    names = frozenset(names)
    key = kind, program.key, names
    if key not in _DERIVED:
        check_unchanged(program)
        step, sizes = make(program, names)
        path = f"{kind}:{','.join(sorted(names))}:{program.key}"
        with _TRACING:
            trace = call_outside_modes(_trace, step, sizes)
            derived = _assemble(step, trace, sizes, path, "", Reads((), (), (), "", frozenset()))
            derived = replace(derived, default_dtype=None)
            _DERIVED[key] = _BY_KEY.setdefault(derived.key, derived)
    return _DERIVED[key]


def check_unchanged(program: Program) -> None:
    """Raise CellError where what the step reads has changed since the program was traced."""
    if (change := program.change()) is not None:
        raise CellError(f"the step of {program.cell_name} reads {change}: run the layer again")


def _assemble(
    step: Step,
    trace: _Trace,
    sizes: tuple[int, int] | None,
    path: str,
    config_text: str,
    reads: Reads,
) -> Program:
    """Return the program of a traced step, whose key begins with a path and its config."""
    cls, mode = step.cls, step.training
    structure, graphs = trace.structure, trace.graphs
    affine = structure is not None and not structure.couples_channels
    affine = affine and is_affine(graphs[torch.float32], len(cls.states))
    names: tuple[Any, ...] = (cls.states, cls.gates, cls.fields, tuple(cls.params))
    names += (cls.memory,) if cls.memory else ()
    digest = hashlib.sha256(f"{config_text} {names}".encode())
    tables = [graph for table in graphs.values() for graph in vars(table).values() if graph]
    traced_graphs = [*tables, *trace.graphs_of_heads]
    for graph in traced_graphs:
        digest.update(graph.text.encode())
    if not traced_graphs:
        digest.update(reads.text.encode())
    traced_sizes = step.sizes if trace.heads is None else sizes
    program = Program(
        key=f"{path}|{config_text}|" + _key_end(mode, traced_sizes, digest.hexdigest()[:16]),
        cell_name=cls.__name__,
        states=tuple(cls.states),
        gates=tuple(cls.gates),
        fields=tuple(cls.fields),
        params=tuple(cls.params),
        step=step,
        structure=structure,
        affine=affine,
        why_sequential=trace.why_sequential,
        graphs=graphs,
        statements=trace.statements,
        why_no_family=trace.why_no_family,
        heads=None,
        reads=reads,
        training=mode,
        sizes=traced_sizes,
        default_dtype=torch.get_default_dtype() if any(g.defaults for g in traced_graphs) else None,
    )
    return program if trace.heads is None else _of_heads(program, *trace.heads)


def _of_heads(program: Program, step: Step, traces: Traces) -> Program:
    """Return a program with that of its step on the channels of a head."""
    heads = replace(
        program,
        key=f"{program.key}.{HEADS}",
        gates=(*program.gates, *program.fields),
        fields=(),
        step=step,
        structure=None,
        why_sequential=why_a_loop(step),
        graphs={},
        statements=traces.statements,
    )
    return replace(program, heads=heads)


class _Trace(NamedTuple):
    """Result of tracing: the structure, or why there is none; a warning; graphs and statements by
    compute dtype, or why none; the graphs of a matrix cell; a head's step and trace."""

    structure: Structure | None
    why_sequential: str | None
    warning: str | None
    graphs: dict[torch.dtype, Graphs]
    statements: dict[torch.dtype, Statements]
    why_no_family: str | None
    graphs_of_heads: Sequence[Graph] = ()
    heads: tuple[Step, Traces] | None = None


def _trace(step: Step, sizes: tuple[int, int] | None) -> _Trace:
    if step.head_sizes is not None:
        return _trace_matrix(step)
    with torch.no_grad():
        structure, why, mixing_op = _infer(step)
        mixing, heads = Traces({}, []), None
        if structure is not None and structure.couples_channels:
            mixing = trace_mixing(step, COMPUTE_DTYPES)
        why_no_family = mixing.reason
        if why_no_family is not None and sizes is not None:
            as_heads = trace_as_heads(step, sizes, COMPUTE_DTYPES)
            if isinstance(as_heads, str):
                why_no_family = f"{why_no_family}; as a head, {as_heads}"
            else:
                heads, why_no_family = as_heads, None
        graphs: dict[torch.dtype, Graphs] = {}
        if mixing.graphs and not step.has_jacobian:
            pairs = zip(COMPUTE_DTYPES, mixing.graphs, strict=True)
            graphs = {dtype: graphs_of_rows(step, graph) for dtype, graph in pairs}
        elif structure is not None:
            graphs = _derive_all(step, structure)
            if structure.couples_channels and not _holds_for_any(step, graphs[torch.float64]):
                structure, graphs, why = None, {}, FIXED_SIZES
        if structure is not None:
            check_linear(step, graphs[torch.float64])
            if structure.couples_channels or step.has_jacobian:
                check_structure(step, structure, graphs[torch.float64])
        warning = _warning(step, structure, why, mixing_op, why_no_family)
    return _Trace(structure, why, warning, graphs, mixing.statements, why_no_family, (), heads)


FIXED_SIZES = "PyTorch computes something of its step, or of its gradient, for one size alone"
"""Why the graphs of a step hold for no number of rows, or channels, but those of its trace."""


def _holds_for_any(step: Step, graphs: Graphs) -> bool:
    """Check that graphs of a step that couples channels hold for other rows; and, of a derivative,
    which no layer has traced on its own channels, for other channels."""
    channels = channels_of(step) if step.cls.is_derivative else channels_of(step)[:1]
    return all(holds_for(step, graphs, number) for number in channels)


def _trace_matrix(step: Step) -> _Trace:
    why = why_a_loop(step)
    try:
        with torch.no_grad():
            traces = trace_matrix(step, COMPUTE_DTYPES)
    except BranchError as error:
        raise CellError(
            f"{step.cls.__name__}'s step or readout reads a tensor's value in Python (a branch or "
            f".item()): use torch.where ({error})"
        ) from error
    warning = None
    if traces.reason is not None:
        warning = (
            f"{step.cls.__name__} runs in PyTorch, a step at a time, several times slower than by "
            f"generated kernels, which cannot take it: {traces.reason}. Write it without that, or "
            "filter pararnn.CellCostWarning to accept the cost"
        )
    return _Trace(None, why, warning, {}, traces.statements, traces.reason, traces.graphs)


def _derive_all(step: Step, structure: Structure) -> dict[torch.dtype, Graphs]:
    try:
        return derive(step, structure, COMPUTE_DTYPES)
    except BranchError as error:  # the step itself has been traced: it reads none
        raise CellError(
            f"{step.cls.__name__}.step calls a torch.autograd.Function whose backward reads a "
            "tensor's value in Python (a branch or .item()); use torch.where, or declare structure "
            "= 'sequential'"
        ) from error


def _infer(step: Step) -> tuple[Structure | None, str | None, str | None]:
    """Return the structure, or None and why it is sequential-only; and the op that mixes."""
    cls = step.cls
    name, declaration, states = cls.__name__, cls.structure, len(cls.states)
    if declaration == "sequential":
        return None, "it declares structure = 'sequential'", None
    try:
        mixing = mixing_op(step)
    except BranchError:
        if declaration is not None:
            raise StructureError(
                f"{name} declares structure = {declaration!r}, but its step reads a tensor's value "
                "in Python (a branch or .item()); use torch.where, or declare 'sequential'"
            ) from None
        return None, "its step reads a tensor's value in Python (a branch or .item())", None
    elementwise = "diagonal" if states == 1 else "block_diagonal"
    structure = make_structure(declaration or (elementwise if mixing is None else "dense"), states)
    if mixing is not None and not structure.couples_channels:
        raise StructureError(
            f"{name} declares structure = {declaration!r}, but {mixing} mixes channels; "
            "declare 'dense' or make the step elementwise"
        )
    return structure, None, mixing


def _warning(
    step: Step,
    structure: Structure | None,
    why_sequential: str | None,
    mixing: str | None,
    why_no_family: str | None,
) -> str | None:
    """Return a warning that an undeclared structure rules out the fast paths, or None."""
    name, states = step.cls.__name__, step.num_states
    if step.cls.structure is not None:
        return None
    if structure is None:
        fixed = why_sequential == FIXED_SIZES
        cure = (
            "Use torch.where to make it parallel" if not fixed else "Write it by other operations"
        )
        return (
            f"{name} runs by the sequential solver on the torch backend only: {why_sequential}. "
            f"{cure}, or declare structure = 'sequential'"
        )
    if why_no_family is not None:
        return (
            f"{name} mixes channels ({mixing}), so its Jacobian is dense: Newton costs D^3 a step "
            f"and (N D)^2 memory, and generated kernels cannot take it: {why_no_family}. Make the "
            "step elementwise over channels, or declare structure = 'dense'"
        )
    if mixing is None and states > MAX_STATES:
        return (
            f"{name} has {states} states, and generated kernels take {MAX_STATES}: PyTorch runs "
            "it, some 50 times slower. Do with fewer, or declare structure = 'block_diagonal' to "
            "accept the cost"
        )
    return None
