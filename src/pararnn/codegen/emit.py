"""The emitter: a traced graph in, one function of plain scalar code out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from pararnn.cells.base import Cell
from pararnn.codegen.spelling import DIALECTS, MASK, REAL, SPELLINGS, Dialect, spelled
from pararnn.errors import EngineError
from pararnn.numerics import check_io_dtype, compute_dtype
from pararnn.program import Program, program_of
from pararnn.trace import Graph

aten = torch.ops.aten

Named = Sequence[tuple[str, str]]
"""An argument's name in the function's body, and where it is in the function's parameters."""


def emitted(cell: Cell, target: str = "cpp", dtype: torch.dtype = torch.float32) -> str:
    """The generated source of a cell: its step, Jacobian and gradient, as compiled for `target`.

    `dtype` is the gates'. In it `real` is a number in the compute dtype (in C++ a SIMD vector of
    them, one a channel). Raises EngineError as `emit_program`, TypeError for other dtypes.
    """
    check_io_dtype(dtype, "dtype")
    return emit_program(program_of(cell), compute_dtype(dtype), target)


def emit_program(program: Program, dtype: torch.dtype, target: str = "cpp") -> str:
    """The functions step, jacobian and vjp of an elementwise program, in one compute dtype.

    Raises EngineError for an unknown target, for programs that are not elementwise, and for ops
    that have no spelling.
    """
    if target not in DIALECTS:
        raise EngineError(f"unknown target {target!r}; known: {', '.join(DIALECTS)}")
    if program.structure is None or program.couples_channels:
        raise EngineError(
            f"{program.cell_name} is not elementwise: no code is generated for steps that mix "
            "channels or branch on values"
        )
    dialect, graphs = DIALECTS[target], program.graphs[dtype]
    state = _arguments("state", program.states)
    gate = _arguments("gate", program.gates)
    field = _arguments("field", program.fields)
    param = _arguments("param", program.params)
    cotangent = _arguments("cotangent", program.states)
    given = [*state, *gate, *field, *param]
    new = [f"new_state[{n}]" for n in range(program.num_states)]
    entries = [f"jacobian[{n}]" for n in range(program.num_states**2)]
    grads = [f"grad_{place}" for _, place in given]
    read = [f"const real* {kind}" for kind in ("state", "gate", "field", "param")]
    write = [f"real* grad_{kind}" for kind in ("state", "gate", "field", "param")]
    functions = (
        ("step", [*read, "real* new_state"], graphs.step, given, new),
        ("jacobian", [*read, "real* new_state", "real* jacobian"],
         graphs.jacobian, given, [*new, *entries]),
        ("vjp", [*read, "const real* cotangent", *write],
         graphs.vjp, [*given, *cotangent], grads),
    )  # fmt: skip
    sizes = (
        f"constexpr int num_states = {program.num_states}, num_gates = {len(gate)}, "
        f"num_fields = {len(field)}, num_params = {len(param)};\n"
    )
    return "\n".join([sizes, *(_function(dialect, program, *parts) for parts in functions)])


def _arguments(kind: str, names: Sequence[str]) -> Named:
    return [(f"{kind}_{name}", f"{kind}[{i}]") for i, name in enumerate(names)]


def _function(
    dialect: Dialect,
    program: Program,
    name: str,
    parameters: Sequence[str],
    graph: Graph,
    inputs: Named,
    outputs: Sequence[str],
) -> str:
    lines = [f"{dialect.function} {name}({', '.join(parameters)}) {{"]
    body = _Body(dialect, f"{program.cell_name}'s {name}")
    nodes = graph.module.graph.nodes
    placeholders = [node for node in nodes if node.op == "placeholder"]
    for node, (argument, place) in zip(placeholders, inputs, strict=True):
        body.values[node] = (argument, REAL)
        if node.users:
            lines.append(f"  const real {argument} = {place};")
    for node in nodes:
        if node.op == "call_function" and node.target is not aten.scalar_tensor.default:
            kind, expression = body.expression(node)
            body.values[node] = (f"t{len(lines) - 1}", kind)
            lines.append(f"  const {kind} {body.values[node][0]} = {expression};")
        elif node.op == "call_function":
            body.values[node] = (node.args[0], REAL)
    (result,) = (node.args[0] for node in nodes if node.op == "output")
    lines += [
        f"  {place} = {spelled(body.converted(value, REAL))};"
        for place, value in zip(outputs, result, strict=True)
    ]
    return "\n".join([*lines, "}", ""])


class _Body:
    """The values of a function so far: node -> (name or number, kind)."""

    def __init__(self, dialect: Dialect, what: str) -> None:
        self.dialect, self.what = dialect, what
        self.values: dict[fx.Node, tuple[Any, str]] = {}

    def converted(self, argument: Any, kind: str) -> Any:
        """An argument as `kind`: tensors and bools spelled, numbers and the rest raw."""
        if isinstance(argument, bool):
            argument, have = float(argument), REAL
        elif isinstance(argument, fx.Node):
            argument, have = self.values[argument]
        else:
            have = REAL
        if argument is None or have == kind or (kind == REAL and not isinstance(argument, str)):
            return argument
        return f"truth({spelled(argument)})" if kind == MASK else f"number({argument})"

    def expression(self, node: fx.Node) -> tuple[str, str]:
        """The kind and the expression of a call."""
        name = node.target._schema.name  # type: ignore[union-attr]
        kind = MASK if node.meta["val"].dtype == torch.bool else REAL
        args = node.args
        if name == "aten::where":
            condition = self.converted(args[0], MASK)
            branches = [spelled(self.converted(a, kind)) for a in args[1:]]
            return kind, f"select({condition}, {', '.join(branches)})"
        if name in ("aten::logical_not", "aten::bitwise_not") and kind == MASK:
            return MASK, self.dialect.negation.format(self.converted(args[0], MASK))
        if name == "aten::_to_copy":
            whole = kind == REAL and not node.meta["val"].is_floating_point()
            value = spelled(self.converted(args[0], kind))
            return kind, f"trunc({value})" if whole else value
        bits_of_integers = name.startswith("aten::bitwise") and kind != MASK
        if name not in SPELLINGS or bits_of_integers:
            raise EngineError(
                f"{self.what} uses {node.target}, which generated code cannot spell. Write the "
                f"step with other ops, or teach the emitter: pararnn.register_spelling({name!r}, "
                '"an expression of {0}, {1}, ...")'
            )
        spelling = SPELLINGS[name]
        given = [self.converted(a, spelling.takes) for a in args]
        if isinstance(spelling.text, str):
            text = spelling.text.format(*map(spelled, given))
        else:
            names = {k: self.converted(v, spelling.takes) for k, v in node.kwargs.items()}
            text = spelling.text(*given, **names)
        if spelling.gives == kind:
            return kind, text
        return kind, f"truth({text})" if kind == MASK else f"number({text})"
