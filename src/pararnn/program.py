"""One frozen Program a cell class and config: the step's graphs, its Jacobian and its VJP.

The Program holds no sizes and no parameters. Elementwise steps become graphs of pointwise ops that
broadcast over (..., D); steps that mix channels become graphs over rows (R, D) with symbolic sizes.
A step that branches on a tensor's value has no graphs and runs by the sequential solver only.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Step, resolve_config
from pararnn.errors import CellCostWarning, CellError, StructureError
from pararnn.structure import Dense, Structure, make_structure
from pararnn.trace import BranchError, Graph, trace_pointwise, trace_rows

COMPUTE_DTYPES = (torch.float32, torch.float64)
TRACE_CHANNELS = (8, 24)  # two sizes with many divisors: graphs must not depend on the size
PROBES = 3
JACOBIAN_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Graphs:
    """The graphs of one compute dtype.

    step: states, inputs, params -> new states. jacobian: the same -> new states and the
    structure's entries. vjp: the same and a cotangent a state -> gradients of all of them.
    """

    step: Graph
    jacobian: Graph
    vjp: Graph


@dataclass(frozen=True, eq=False)
class Program:
    """What solvers and kernels know of a cell.

    `structure` is None for sequential-only steps, and `why_sequential` then says why.
    `step` is the Python step on flat tensors, differentiable by autograd.
    """

    key: str
    cell_name: str
    states: tuple[str, ...]
    gates: tuple[str, ...]
    fields: tuple[str, ...]
    params: tuple[str, ...]
    step: Step
    structure: Structure | None
    why_sequential: str | None
    graphs: Mapping[torch.dtype, Graphs]

    @property
    def num_states(self) -> int:
        """N, the number of states."""
        return len(self.states)

    @property
    def couples_channels(self) -> bool:
        """Whether a channel's next state may depend on other channels."""
        return self.structure is None or self.structure.couples_channels


_BY_CLASS: dict[Any, Program] = {}
_BY_KEY: dict[str, Program] = {}


def program_of(cell: Cell) -> Program:
    """The cell's Program, traced at the first call for its class and config.

    Raises CellError and StructureError where the step breaks the contract; warns once with
    CellCostWarning where an undeclared structure rules out the fast paths.
    """
    return make_program(type(cell), cell.config_values())


def program_by_key(key: str) -> Program:
    """The Program that `key` names, importing and tracing its class anew in a new process.

    Raises CellError where the class cannot be imported or its step has changed.
    """
    if key not in _BY_KEY:
        path, _, rest = key.partition("|")
        config = rest.rpartition("|")[0]
        module, _, qualname = path.partition(":")
        try:
            target: Any = importlib.import_module(module)
            for part in qualname.split("."):
                target = getattr(target, part)
        except (ImportError, AttributeError) as error:
            raise CellError(
                f"cannot import the cell {path}: define it at a module's top level to use it in "
                "another process"
            ) from error
        found = make_program(target, json.loads(config))
        if found.key != key:
            raise CellError(f"the step of {path} has changed since this was exported; export again")
    return _BY_KEY[key]


def make_program(cls: type[Cell], config: Mapping[str, Any]) -> Program:
    """Trace a cell class under a config; cached by class, methods and config."""
    resolved = resolve_config(cls, config)
    text = json.dumps(resolved, sort_keys=True)
    cache_key = (cls, cls.step, getattr(cls, "jacobian", None), text)
    if cache_key not in _BY_CLASS:
        if torch.compiler.is_compiling():
            raise CellError(
                f"{cls.__name__} is used for the first time inside a compiled region; make its "
                "layer, or call pararnn.program_of(cell), before compiling"
            )
        program = _build(cls, resolved, text)
        _BY_CLASS[cache_key] = _BY_KEY[program.key] = program
    return _BY_CLASS[cache_key]


def _build(cls: type[Cell], config: Mapping[str, Any], config_text: str) -> Program:
    step = Step(cls, config)
    # The trace must not see the caller's modes: autocast would put casts into the graphs.
    with torch.autocast("cpu", enabled=False), torch.inference_mode(False), torch.no_grad():
        structure, why, graphs = _analyse(cls, step)
        if structure is not None and hasattr(cls, "jacobian"):
            _check_override(cls, step, structure, graphs[torch.float64])
    digest = hashlib.sha256(config_text.encode())
    for dtype in COMPUTE_DTYPES if graphs else ():
        for graph in (graphs[dtype].step, graphs[dtype].jacobian, graphs[dtype].vjp):
            digest.update(graph.text.encode())
    return Program(
        key=f"{cls.__module__}:{cls.__qualname__}|{config_text}|{digest.hexdigest()[:16]}",
        cell_name=cls.__name__,
        states=tuple(cls.states),
        gates=tuple(cls.gates),
        fields=tuple(cls.fields),
        params=tuple(cls.params),
        step=step,
        structure=structure,
        why_sequential=why,
        graphs=graphs,
    )


def _analyse(
    cls: type[Cell], step: Step
) -> tuple[Structure | None, str | None, dict[torch.dtype, Graphs]]:
    name, declared, states = cls.__name__, cls.structure, len(cls.states)
    if declared == "sequential":
        return None, "it declares structure = 'sequential'", {}
    try:
        mixing = _mixing_op(cls, step)
    except BranchError:
        if declared is not None:
            raise StructureError(
                f"{name} declares structure = {declared!r}, but its step reads a tensor's value in "
                "Python (a branch or .item()); use torch.where, or declare 'sequential'"
            ) from None
        why = "its step reads a tensor's value in Python (a branch or .item())"
        _warn_cost(
            f"{name} runs by the sequential solver on the torch backend only: {why}. "
            "Use torch.where to make it parallel, or declare structure = 'sequential'"
        )
        return None, why, {}
    elementwise = "diagonal" if states == 1 else "block_diagonal"
    if declared is None and mixing is not None:
        _warn_cost(
            f"{name} mixes channels ({mixing}), so its Jacobian is dense: Newton costs D^3 a step "
            "and (N D)^2 memory, and generated kernels cannot take it. Make the step elementwise "
            "over channels, or declare structure = 'dense'"
        )
    structure = make_structure(declared or (elementwise if mixing is None else "dense"), states)
    if mixing is not None and not structure.couples_channels:
        raise StructureError(
            f"{name} declares structure = {declared!r}, but {mixing} mixes channels; "
            "declare 'dense' or make the step elementwise"
        )
    tracer = _pointwise_graphs if not structure.couples_channels else _row_graphs
    return structure, None, {dtype: tracer(cls, step, structure, dtype) for dtype in COMPUTE_DTYPES}


def _warn_cost(message: str) -> None:
    warnings.warn(message, CellCostWarning, stacklevel=7)


def _example(
    cls: type[Cell], lead: tuple[int, ...], channels: int, dtype: torch.dtype, seed: int = 0
) -> list[Tensor]:
    """Random states, inputs and params of a cell, as flat tensors with leading sizes `lead`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64).add(0.25).to(dtype)

    rows = len(cls.states) + len(cls.gates) + len(cls.fields)
    params = [
        draw(channels, channels) if param.shape == "D,D" else draw(channels)
        for param in cls.params.values()
    ]
    return [*(draw(*lead, channels) for _ in range(rows)), *params]


def _flat(cls: type[Cell], call: Callable[..., Any]) -> Callable[..., Any]:
    """`call(states, inputs, params)` as a function of one flat list of tensors."""
    states = len(cls.states)
    inputs = states + len(cls.gates) + len(cls.fields)
    return lambda *t: call(t[:states], t[states:inputs], t[inputs : inputs + len(cls.params)])


def _mixing_op(cls: type[Cell], step: Step) -> str | None:
    """The op that mixes channels, None for an elementwise step; also checks what it returns."""
    what = f"{cls.__name__}.step"
    texts = set()
    for channels in TRACE_CHANNELS:
        example = _example(cls, (), channels, torch.float32)
        graph = trace_pointwise(_flat(cls, step), example, what)
        if graph.mixing_op is not None:
            _check_rows(cls, step)
            return graph.mixing_op
        for new in _flat(cls, step)(*example):
            if new.shape != (channels,) or new.dtype != torch.float32:
                raise CellError(
                    f"{what} must return states of the shape and dtype of its input states, got "
                    f"{tuple(new.shape)} {new.dtype} for {(channels,)} torch.float32"
                )
        texts.add(graph.text)
    if len(texts) > 1:
        raise CellError(
            f"{what} depends on the number of channels (it reads a shape); "
            "make that number a config value or a scalar Param"
        )
    return None


def _check_rows(cls: type[Cell], step: Step) -> None:
    """A step that mixes channels must still treat leading dimensions as independent rows."""
    channels, states = TRACE_CHANNELS[0], len(cls.states)
    example = _example(cls, (2, 3), channels, torch.float64)
    rows = states + len(cls.gates) + len(cls.fields)
    try:
        whole = _flat(cls, step)(*example)
        single = _flat(cls, step)(*(t[1, 2] for t in example[:rows]), *example[rows:])
    except (RuntimeError, IndexError) as error:
        raise CellError(
            f"{cls.__name__}.step must broadcast over leading dimensions (..., D); "
            f"with shape (2, 3, {channels}) it fails: {error}"
        ) from error
    for many, one in zip(whole, single, strict=True):
        if many.shape != (2, 3, channels) or not torch.allclose(many[1, 2], one):
            raise CellError(
                f"{cls.__name__}.step must treat leading dimensions as independent rows: "
                f"given (2, 3, {channels}) it returns {tuple(many.shape)} or mixes rows"
            )


def _pointwise_graphs(
    cls: type[Cell], step: Step, structure: Structure, dtype: torch.dtype
) -> Graphs:
    states = len(cls.states)
    call = _flat(cls, step)
    example = _example(cls, (), TRACE_CHANNELS[0], dtype)
    cotangents = _example(cls, (), TRACE_CHANNELS[0], dtype, seed=1)[:states]

    def rows(*t: Tensor) -> list[Tensor]:
        """New states, then the Jacobian row by row, each the pull-back of one state."""
        out = list(call(*t))
        for i in range(states):
            primal, pull = torch.func.vjp(lambda *s, i=i: call(*s, *t[states:])[i], *t[:states])
            out += pull(torch.ones_like(primal))
        return out

    def vjp(*t: Tensor) -> tuple[Tensor, ...]:
        return torch.func.vjp(call, *t[:-states])[1](tuple(t[-states:]))

    def override(*t: Tensor) -> list[Tensor]:
        entries = _flat(cls, lambda s, x, p: step.call("jacobian", s, x, p))(*t)
        if isinstance(entries, Tensor):
            entries = ((entries,),)
        return [*call(*t), *(entry for row in entries for entry in row)]

    name = cls.__name__
    overridden = hasattr(cls, "jacobian")
    graphs = Graphs(
        trace_pointwise(call, example, f"{name}.step"),
        trace_pointwise(override if overridden else rows, example, f"{name}'s Jacobian"),
        trace_pointwise(vjp, [*example, *cotangents], f"{name}'s gradient"),
    )
    for graph, what in ((graphs.jacobian, "Jacobian"), (graphs.vjp, "gradient")):
        if graph.mixing_op is not None:
            raise StructureError(
                f"{name}'s {what} is not elementwise ({graph.mixing_op}) although its step is; "
                "declare structure = 'dense'"
            )
    return graphs


def _row_graphs(cls: type[Cell], step: Step, structure: Structure, dtype: torch.dtype) -> Graphs:
    states, rows, channels = len(cls.states), 6, 10
    call = _flat(cls, step)
    example = _example(cls, (rows,), channels, dtype)
    cotangents = _example(cls, (rows,), channels, dtype, seed=1)[:states]
    split = states + len(cls.gates) + len(cls.fields)

    def dense(*t: Tensor) -> list[Tensor]:
        def row(*r: Tensor) -> tuple[tuple[Tensor, ...], ...]:
            def of_states(*s: Tensor) -> tuple[Tensor, ...]:
                return call(*s, *r[states:], *t[split:])

            return torch.func.jacrev(of_states, argnums=tuple(range(states)))(*r[:states])

        blocks = torch.func.vmap(row)(*t[:split])
        return [*call(*t), torch.cat([torch.cat(line, -1) for line in blocks], -2)]

    def override(*t: Tensor) -> list[Tensor]:
        return [*call(*t), _flat(cls, lambda s, x, p: step.call("jacobian", s, x, p))(*t)]

    def vjp(*t: Tensor) -> tuple[Tensor, ...]:
        return torch.func.vjp(call, *t[:-states])[1](tuple(t[-states:]))

    name = cls.__name__
    graphs = Graphs(
        trace_rows(call, example, f"{name}.step"),
        trace_rows(override if hasattr(cls, "jacobian") else dense, example, f"{name}'s Jacobian"),
        trace_rows(vjp, [*example, *cotangents], f"{name}'s gradient"),
    )
    if not isinstance(structure, Dense) and not hasattr(cls, "jacobian"):
        matrix = graphs.jacobian(*example)[-1]
        if not torch.allclose(structure.to_dense(structure.from_dense(matrix)), matrix):
            raise StructureError(
                f"{name} declares structure = {structure.name!r}, but the traced step's Jacobian "
                "does not have it; declare 'dense' or mend the step"
            )
    return graphs


def assemble_jacobian(
    step: Step, structure: Structure, out: Sequence[Any], size: tuple[int, ...]
) -> Tensor:
    """A jacobian graph's outputs as the structure's representation, for states of `size` (..., D)."""
    states = len(step.cls.states)
    new, entries = out[:states], out[states:]
    if structure.couples_channels:
        by_hand = hasattr(step.cls, "jacobian")
        jacobian = entries[0] if by_hand else structure.from_dense(entries[0])
        return jacobian.reshape(*size[:-1], *jacobian.shape[1:])
    like = next(item for item in new if isinstance(item, Tensor))
    stacked = torch.stack([expand_entry(entry, like, size) for entry in entries], -2)
    return stacked if states == 1 else stacked.unflatten(-2, (states, states))


def expand_entry(entry: Any, like: Tensor, size: tuple[int, ...]) -> Tensor:
    """A graph's output (a tensor that may need broadcasting, or a number) at full size."""
    if not isinstance(entry, Tensor):
        return like.new_full((), float(entry)).expand(size)
    return entry.expand(size)


def _check_override(cls: type[Cell], step: Step, structure: Structure, graphs: Graphs) -> None:
    """Compare a hand-written Jacobian with the derived one at random points, in float64."""
    states, channels = len(cls.states), TRACE_CHANNELS[0]
    split = states + len(cls.gates) + len(cls.fields)
    for seed in range(PROBES):
        t = [x * 3 - 2 for x in _example(cls, (1,), channels, torch.float64, seed)]

        def stacked(flat: Tensor, t: list[Tensor] = t) -> Tensor:
            rest = (*(x[0] for x in t[states:split]), *t[split:])
            return torch.cat(_flat(cls, step)(*flat.reshape(states, -1).unbind(), *rest))

        with torch.enable_grad():
            derived = torch.func.jacrev(stacked)(torch.cat([x[0] for x in t[:states]]))
        jacobian = assemble_jacobian(step, structure, graphs.jacobian(*t), (1, channels))
        given = structure.to_dense(jacobian)[0]
        error = (given - derived).abs()
        if given.shape != derived.shape or not float(error.max()) <= JACOBIAN_TOLERANCE:
            i, j = divmod(int(error.argmax()), derived.shape[1])
            row, column = cls.states[i // channels], cls.states[j // channels]
            raise StructureError(
                f"{cls.__name__}.jacobian is wrong: d {row} / d {column} is {given[i, j]:.9g} by "
                f"hand and {derived[i, j]:.9g} by autograd at a random point"
            )
