"""One frozen Program a cell class and config: the step's graphs, its Jacobian and its VJP.

The Program holds no sizes and no parameters. Elementwise steps become graphs of pointwise ops that
broadcast over (..., D); steps that mix channels become graphs over rows (R, D) with symbolic sizes.
A step that branches on a tensor's value has no graphs and runs by the sequential solver only.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from pararnn.cells.base import Cell, Step, resolve_config
from pararnn.derive import Graphs, check_structure, derive, mixing_op
from pararnn.errors import CellCostWarning, CellError, StructureError, warn_user
from pararnn.structure import STRUCTURES, Structure, make_structure
from pararnn.trace import BranchError

COMPUTE_DTYPES = (torch.float32, torch.float64)


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
_TRACING = threading.RLock()  # PyTorch traces for one thread at a time


def program_of(cell: Cell) -> Program:
    """The cell's Program, traced at the first call for its class and config.

    Raises CellError and StructureError where the step breaks the contract; warns once with
    CellCostWarning where an undeclared structure rules out the fast paths.
    """
    key = cell.__dict__.get("_program_key")
    if key not in _BY_KEY:
        if torch.compiler.is_compiling():
            raise CellError(
                f"{type(cell).__name__} is used for the first time inside a compiled region; make "
                "its layer, or call pararnn.program_of(cell), before compiling"
            )
        key = make_program(type(cell), cell.config_values()).key
        cell.__dict__["_program_key"] = key
    return _BY_KEY[key]


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
    declared = STRUCTURES.get(cls.structure or "")
    cache_key = (cls, cls.step, getattr(cls, "jacobian", None), declared, text)
    if cache_key not in _BY_CLASS:
        with _TRACING:
            if cache_key not in _BY_CLASS:
                program = _build(cls, resolved, text)
                _BY_CLASS[cache_key] = _BY_KEY[program.key] = program
    return _BY_CLASS[cache_key]


def _build(cls: type[Cell], config: Mapping[str, Any], config_text: str) -> Program:
    step = Step(cls, config)
    # The trace must not see what the caller's thread is in: autocast would put casts into the
    # graphs, a transform its tangents, a default device constants that are elsewhere.
    with ThreadPoolExecutor(1) as thread:
        structure, why, warning, graphs = thread.submit(_traced, step).result()
    if warning is not None:
        warn_user(warning, CellCostWarning)
    digest = hashlib.sha256(config_text.encode())
    for dtype in COMPUTE_DTYPES if graphs else ():
        traced = graphs[dtype]
        for graph in (traced.step, traced.jacobian, traced.vjp, traced.by_hand):
            digest.update(graph.text.encode() if graph is not None else b"")
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


def _traced(
    step: Step,
) -> tuple[Structure | None, str | None, str | None, dict[torch.dtype, Graphs]]:
    """What `_infer` says, and the graphs."""
    with torch.no_grad():
        structure, why, warning = _infer(step)
        graphs = {d: derive(step, structure, d) for d in COMPUTE_DTYPES} if structure else {}
        if structure is not None and (structure.couples_channels or step.has_jacobian):
            check_structure(step, structure, graphs[torch.float64])
    return structure, why, warning, graphs


def _infer(step: Step) -> tuple[Structure | None, str | None, str | None]:
    """The step's structure, or None and why it is sequential-only; and what to warn of."""
    cls = step.cls
    name, declared, states = cls.__name__, cls.structure, len(cls.states)
    if declared == "sequential":
        return None, "it declares structure = 'sequential'", None
    try:
        mixing = mixing_op(step)
    except BranchError:
        if declared is not None:
            raise StructureError(
                f"{name} declares structure = {declared!r}, but its step reads a tensor's value in "
                "Python (a branch or .item()); use torch.where, or declare 'sequential'"
            ) from None
        why = "its step reads a tensor's value in Python (a branch or .item())"
        branches = (
            f"{name} runs by the sequential solver on the torch backend only: {why}. "
            "Use torch.where to make it parallel, or declare structure = 'sequential'"
        )
        return None, why, branches
    elementwise = "diagonal" if states == 1 else "block_diagonal"
    warning: str | None = None
    if declared is None and mixing is not None:
        warning = (
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
    return structure, None, warning
