"""The emitter: a traced graph in, one function of plain scalar code out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pararnn.cells.base import Cell
from pararnn.codegen.chain import PRODUCTS, Joined, cost, shortened
from pararnn.codegen.headers import LANGUAGES
from pararnn.codegen.interface import interface_of
from pararnn.codegen.spelling import MASK, REAL, SPELLINGS, may_jump, spelled
from pararnn.errors import EngineError
from pararnn.numerics import check_io_dtype, compute_dtype
from pararnn.program.program import MAX_STATES, Program, program_of
from pararnn.program.trace import Graph, ancestors

aten = torch.ops.aten

IO_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
"""What the headers call the dtypes of tensors in memory."""

Named = Sequence[tuple[str, str]]
"""An argument's name in the function's body, and where it is in the function's parameters."""


def emitted(cell: Cell, target: str = "cpp", dtype: torch.dtype = torch.float32) -> str:
    """The generated source of a cell: its step, Jacobian and gradient, the same for all targets.

    What its names mean is in the headers of `target`. `dtype` is the gates'. In it `real` is a
    number in the compute dtype (in C++ a SIMD vector of them, one a channel). Raises EngineError as
    `emit_program` and for an unknown target, TypeError for other dtypes.
    """
    check_io_dtype(dtype, "dtype")
    if target not in LANGUAGES:
        raise EngineError(f"unknown target {target!r}; known: {', '.join(LANGUAGES)}")
    return emit_program(program_of(cell), compute_dtype(dtype))


def why_no_kernels(program: Program) -> str | None:
    """The reason why no kernels can be generated for a cell, whatever the machine, or None."""
    if program.structure is None:
        return f"{program.cell_name} is sequential-only: {program.why_sequential}"
    if program.couples_channels:
        return f"{program.cell_name} mixes channels; kernels are generated for elementwise steps"
    if program.num_states > MAX_STATES:
        return f"{program.cell_name} has {program.num_states} states; kernels take {MAX_STATES}"
    return None


def reads_gates(program: Program, dtype: torch.dtype) -> bool:
    """Whether the gradient of a step depends on its gates' values."""
    nodes = program.graphs[compute_dtype(dtype)].vjp.module.graph.nodes
    inputs = [node for node in nodes if node.op == "placeholder"]
    first = program.num_states
    return any(node.users for node in inputs[first : first + len(program.gates)])


def jumps(program: Program, dtype: torch.dtype) -> bool:
    """Whether the step may jump: a state reaches a comparison, a rounding or the like."""
    nodes = program.graphs[compute_dtype(dtype)].step.module.graph.nodes
    inputs = [node for node in nodes if node.op == "placeholder"]
    reached = set(inputs[: program.num_states])
    for node in nodes:
        if reached.isdisjoint(node.all_input_nodes):
            continue
        reached.add(node)
        if node.op == "call_function" and _jumps(node, reached):
            return True
    return False


def _jumps(node: fx.Node, reached: set[fx.Node]) -> bool:
    """Whether a call may jump where one of its arguments that are `reached` changes a little."""
    name = node.target._schema.name  # type: ignore[union-attr]
    if name == "aten::where":
        return node.args[0] in reached
    if name == "aten::_to_copy":
        return not node.meta["dtype"].is_floating_point
    return may_jump(name, node.kwargs)


def source_file(
    program: Program,
    dtype: torch.dtype,
    target: str,
    solver: str,
    *,
    defines: Mapping[str, int] | None = None,
    constants: Sequence[str] = (),
) -> str:
    """The file that is compiled for gates of `dtype`: emitted code between a target's headers.

    The header of the solver's name runs it, and needs `defines` and `constants` (C++ lines).
    Raises EngineError as `emit_program`.
    """
    compute = compute_dtype(dtype)
    macros = {"IO": IO_TYPES[dtype], "WIDE": int(compute == torch.float64), **(defines or {})}
    lines = [
        f"// {program.cell_name}",
        *(f"#define PARARNN_{name} {value}" for name, value in macros.items()),
        '#include "functions.h"',
        "",
        "namespace pararnn {",
        "",
        f"constexpr bool jumps = {str(jumps(program, dtype)).lower()};",
        *constants,
        emit_program(program, compute),
        interface_of(program, target, solver).declared(),
        "}  // namespace pararnn",
        "",
        f'#include "elementwise/{solver}.h"',
        "",
    ]
    return "\n".join(lines)


def emit_program(program: Program, dtype: torch.dtype) -> str:
    """The functions step, jacobian and vjp of an elementwise program, in one compute dtype.

    Raises EngineError for programs that `why_no_kernels` rules out, and for ops that have no
    spelling.
    """
    reason = why_no_kernels(program)
    if reason is not None:
        raise EngineError(f"no code can be generated: {reason}")
    graphs = program.graphs[dtype]
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
    step = list(graphs.step.module.graph.nodes)
    return "\n".join([sizes, *(_function(program, step, *parts) for parts in functions)])


def _arguments(kind: str, names: Sequence[str]) -> Named:
    return [(f"{kind}_{name}", f"{kind}[{i}]") for i, name in enumerate(names)]


def _function(
    program: Program,
    step: Sequence[fx.Node],
    name: str,
    parameters: Sequence[str],
    graph: Graph,
    inputs: Named,
    outputs: Sequence[str],
) -> str:
    lines = [f"PARARNN_FUNCTION void {name}({', '.join(parameters)}) {{"]
    body = _Body(f"{program.cell_name}'s {name}")
    nodes = list(graph.module.graph.nodes)
    joined = _joined(nodes) | shortened(step, nodes, program.num_states)
    needed = ancestors(nodes, nodes[-1:], lambda node: _reads(node, joined))
    placeholders = [node for node in nodes if node.op == "placeholder"]
    for node, (argument, place) in zip(placeholders, inputs, strict=True):
        body.values[node] = (argument, REAL)
        if node in needed:
            lines.append(f"  const real {argument} = {place};")
    for node in nodes:
        if node not in needed:
            continue
        if node.op == "call_function" and node.target is not aten.scalar_tensor.default:
            kind, expression = body.expression(node, joined.get(node))
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


def _joined(nodes: Iterable[fx.Node]) -> dict[fx.Node, Joined]:
    """By the last of the calls."""
    return _fused_sums(nodes) | {
        node: Joined("softplus_of_minus", [size])
        for node in nodes
        if (size := _softplus_of_minus(node)) is not None
    }


def _reads(node: fx.Node, joined: Mapping[fx.Node, Joined]) -> list[fx.Node]:
    """What a node's expression is made of."""
    if node not in joined:
        return node.all_input_nodes
    return [given for given in joined[node].given if isinstance(given, fx.Node)]


def _fused_sums(nodes: Iterable[fx.Node]) -> dict[fx.Node, Joined]:
    """Sums of two products: the product that is known last is fused with the sum.

    A step takes as long as its longest chain, and compilers would fuse either.
    """
    depth: dict[fx.Node, int] = {}
    fused = {}
    for node in nodes:
        depth[node] = cost(node) + max((depth[n] for n in node.all_input_nodes), default=0)
        if node.target is not aten.add.Tensor or node.kwargs:
            continue
        products = [n for n in node.args if isinstance(n, fx.Node) and n.target in PRODUCTS]
        if len(set(products)) == 2:
            early, late = sorted(products, key=lambda n: depth[n])
            fused[node] = Joined("multiply_add", [*late.args, early])
    return fused


_SOFTPLUS_OF_MINUS = (aten.log1p.default, aten.exp.default, aten.neg.default)


def _softplus_of_minus(node: fx.Node) -> fx.Node | None:
    """The a of log1p(exp(-a)), if it is an absolute value: headers have that as one function."""
    for target in _SOFTPLUS_OF_MINUS:
        if node.target is not target:
            return None
        (node,) = node.all_input_nodes
    return node if node.target is aten.abs.default else None


class _Body:
    """The values of a function so far: node -> (name or number, kind)."""

    def __init__(self, what: str) -> None:
        self.what = what
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

    def expression(self, node: fx.Node, joined: Joined | None) -> tuple[str, str]:
        """The kind and the expression of a call, or of those that are `joined` in it."""
        if joined is not None:
            terms = [spelled(self.converted(term, REAL)) for term in joined.given]
            return REAL, f"{joined.function}({', '.join(terms)})"
        name = node.target._schema.name  # type: ignore[union-attr]
        kind = MASK if node.meta["dtype"] == torch.bool else REAL
        args = node.args
        if name == "aten::where":
            condition = self.converted(args[0], MASK)
            branches = [spelled(self.converted(a, kind)) for a in args[1:]]
            return kind, f"select({condition}, {', '.join(branches)})"
        if name in ("aten::logical_not", "aten::bitwise_not") and kind == MASK:
            return MASK, f"negated({self.converted(args[0], MASK)})"
        if name == "aten::_to_copy":
            whole = kind == REAL and not node.meta["dtype"].is_floating_point
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
