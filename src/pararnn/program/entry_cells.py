"""States that are solved by entries before others, as an elementwise cell of their own."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Step
from pararnn.program.affine import AffineForm, EntryStates
from pararnn.program.apart import outside_modes
from pararnn.program.derive import derive, is_affine
from pararnn.program.program import COMPUTE_DTYPES, Program
from pararnn.program.pullback import evaluate
from pararnn.program.reads import Reads
from pararnn.program.structure import make_structure


def states_before(form: AffineForm, component: EntryStates) -> list[int]:
    """Return the states that others read as they are before a step, too."""
    read = {*form.gates.inputs, *form.readout.inputs}
    return [i for i in component.states if ("state", i) in read]


@lru_cache(maxsize=1024)
@outside_modes
@torch.no_grad()
def program_of_entries(program: Program, number: int) -> Program:
    """Return the program of a component of EntryStates: its gates are what `advance` reads of gates
    and parameters, its states the component's, then `states_before`, as they are before a step."""
    form = program.affine_form()
    assert isinstance(form, AffineForm)
    component = form.components[number]
    assert isinstance(component, EntryStates)
    before = states_before(form, component)
    entries = [i for kind, i in component.advance.inputs if kind == "entry"]

    def step(self: Any, state: Any, gate: Any, param: Any) -> tuple[Tensor, ...]:
        old = dict(zip(component.states, state, strict=False))
        inputs = {("state", i): x for i, x in old.items()}
        inputs |= {("entry", i): x for i, x in enumerate(gate)}
        written = {target.number: x for target, x in evaluate(component.advance, inputs)}
        new = [torch.as_tensor(written[i], dtype=x.dtype).expand_as(x) for i, x in old.items()]
        return *new, *(old[i].clone() for i in before)

    names = [form.names[i] for i in component.states] + [f"{form.names[i]}_before" for i in before]
    members = {
        "states": tuple(names),
        "gates": tuple(f"entry{i}" for i in range(1 + max(entries, default=0))),
        "structure": "diagonal" if len(names) == 1 else "block_diagonal",
        "step": step,
    }
    cls: type[Cell] = type(f"{program.cell_name}Entries", (Cell,), members)
    of_entries, structure = Step(cls, {}), make_structure(str(cls.structure), len(names))
    graphs = derive(of_entries, structure, COMPUTE_DTYPES)
    return Program(
        key=f"{program.key}.entries{number}",
        cell_name=cls.__name__,
        states=tuple(names),
        gates=tuple(cls.gates),
        fields=(),
        params=(),
        step=of_entries,
        structure=structure,
        affine=is_affine(graphs[torch.float32], len(names)),
        why_sequential=None,
        graphs=graphs,
        statements={},
        why_no_family=None,
        heads=None,
        reads=Reads((), (), (), "", frozenset()),
    )
