"""The emitter: a traced graph in, one function of plain scalar code out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from pararnn.base.errors import EngineError
from pararnn.base.numerics import compute_dtype
from pararnn.codegen.chain import PRODUCTS, FusedCall, calls_to_fuse, cost
from pararnn.codegen.spelling import MASK, REAL, ROUNDING, SPELLINGS, literal, may_jump, spell
from pararnn.program.program import Program
from pararnn.program.statements import Value
from pararnn.program.trace import ancestors

aten = torch.ops.aten

Arguments = Sequence[tuple[str, str]]
"""Name of each argument in a function's body, and its expression in the function's parameters."""


def reads_gates(program: Program, dtype: torch.dtype) -> bool:
    """Return True if the gradient of a step depends on its gates' values."""
    nodes = program.graphs[compute_dtype(dtype)].vjp.ops.nodes
    inputs = [node for node in nodes if node.op == "placeholder"]
    first = program.num_states
    return any(node.users for node in inputs[first : first + len(program.gates)])


def jumps(program: Program, dtype: torch.dtype) -> bool:
    """Return True if the step may jump: a state reaches a comparison, a rounding or the like.

    Takes elementwise steps, and steps of matrix cells with independent entries.
    """
    wide = compute_dtype(dtype)
    if program.statements:
        advance = program.statements[wide].only(["new_state"])
        nodes = [value.node for value in advance.values]
        dependent = {value.node for value in advance.inputs_of("state").values()}
    else:
        nodes = [*program.graphs[wide].step.ops.nodes]
        inputs = [node for node in nodes if node.op == "placeholder"]
        dependent = set(inputs[: program.num_states])
    for node in nodes:
        if dependent.isdisjoint(node.all_input_nodes):
            continue
        dependent.add(node)
        if node.op == "call_function" and _jumps(node, dependent):
            return True
    return False


def _jumps(node: fx.Node, dependent: set[fx.Node]) -> bool:
    """Return True if a call may jump when one of its `dependent` arguments changes a little."""
    name = node.target._schema.name  # type: ignore[union-attr]
    if name == "aten::where":
        return node.args[0] in dependent
    if name == "aten::_to_copy":
        return not node.meta["dtype"].is_floating_point
    return may_jump(name, node.kwargs)


def emit_elementwise(program: Program, dtype: torch.dtype) -> str:
    """Emit the functions step, jacobian and vjp of an elementwise program in a compute dtype.

    Raises EngineError for ops that have no spelling.
    """
    graphs = program.graphs[dtype]
    state = arguments("state", program.states)
    gate = arguments("gate", program.gates)
    field = arguments("field", program.fields)
    param = arguments("param", program.params)
    cotangent = arguments("cotangent", program.states)
    inputs = [*state, *gate, *field, *param]
    new = [f"new_state[{n}]" for n in range(program.num_states)]
    entries = [f"jacobian[{n}]" for n in range(program.num_states**2)]
    grads = [f"grad_{source}" for _, source in inputs]
    read = [f"const real* {kind}" for kind in ("state", "gate", "field", "param")]
    write = [f"real* grad_{kind}" for kind in ("state", "gate", "field", "param")]
    functions = (
        ("step", [*read, "real* new_state"], graphs.step.ops, inputs, new),
        ("jacobian", [*read, "real* new_state", "real* jacobian"],
         graphs.jacobian.ops, inputs, [*new, *entries]),
        ("vjp", [*read, "const real* cotangent", *write],
         graphs.vjp.ops, [*inputs, *cotangent], grads),
    )  # fmt: skip
    sizes = (
        f"constexpr int num_states = {program.num_states}, num_gates = {len(gate)}, "
        f"num_fields = {len(field)}, num_params = {len(param)};\n"
    )
    step = list(graphs.step.ops.nodes)
    return "\n".join([sizes, *(emit_function(program, step, *function) for function in functions)])


def arguments(kind: str, names: Sequence[object]) -> list[tuple[str, str]]:
    """Return the arguments that are an array's entries, by their names."""
    return [(f"{kind}_{name}", f"{kind}[{i}]") for i, name in enumerate(names)]


def emit_function(
    program: Program,
    step: Sequence[fx.Node],
    name: str,
    parameters: Sequence[str],
    graph: fx.Graph,
    inputs: Arguments,
    outputs: Sequence[str],
) -> str:
    """Emit one graph as a function. `step`: nodes of the step's own graph, by which calls are fused
    (see chain.py); empty for none."""
    lines = [f"PARARNN_FUNCTION void {name}({', '.join(parameters)}) {{"]
    body = Body(f"{program.cell_name}'s {name}")
    nodes = list(graph.nodes)
    softplus = {node: call for node in nodes if (call := _softplus_of_minus(node)) is not None}
    calls = _fused_sums(nodes) | softplus | calls_to_fuse(step, nodes, program.num_states)
    live = ancestors(nodes, nodes[-1:], lambda node: _operands(node, calls))
    placeholders = [node for node in nodes if node.op == "placeholder"]
    for node, (argument, source) in zip(placeholders, inputs, strict=True):
        body.values[node] = (argument, REAL)
        if node in live:
            lines.append(f"  const real {argument} = {source};")
    for node in nodes:
        if node not in live:
            continue
        if node.op == "call_function" and node.target is not aten.scalar_tensor.default:
            kind, expression = body.expression(node, calls.get(node))
            body.values[node] = (f"t{len(lines) - 1}", kind)
            lines.append(f"  const {kind} {body.values[node][0]} = {expression};")
        elif node.op == "call_function":
            body.values[node] = (node.args[0], REAL)
    (result,) = (node.args[0] for node in nodes if node.op == "output")
    lines += [
        f"  {target} = {spell(body.as_kind(value, REAL))};"
        for target, value in zip(outputs, result, strict=True)
    ]
    return "\n".join([*lines, "}", ""])


def _operands(node: fx.Node, calls: Mapping[fx.Node, FusedCall]) -> list[fx.Node]:
    """Return the nodes that a node's expression reads."""
    if node not in calls:
        return node.all_input_nodes
    return [arg for arg in calls[node].args if isinstance(arg, fx.Node)]


def _fused_sums(nodes: Iterable[fx.Node]) -> dict[fx.Node, FusedCall]:
    """Return sums of two products as multiply_add, with the later product fused into the sum.

    The choice decides the critical path, and compilers would fuse either product.
    """
    depth: dict[fx.Node, int] = {}
    sums = {}
    for node in nodes:
        depth[node] = cost(node) + max((depth[n] for n in node.all_input_nodes), default=0)
        if node.target is not aten.add.Tensor or node.kwargs:
            continue
        products = [n for n in node.args if isinstance(n, fx.Node) and n.target in PRODUCTS]
        if len(set(products)) == 2:
            early, late = sorted(products, key=lambda n: depth[n])
            sums[node] = FusedCall("multiply_add", [*late.args, early])
    return sums


def _softplus_of_minus(node: fx.Node) -> FusedCall | None:
    """Return log1p(exp(-a)) as one function of the headers if a is an absolute value."""
    for target in (aten.log1p.default, aten.exp.default, aten.neg.default):
        if node.target is not target:
            return None
        (node,) = node.all_input_nodes
    return FusedCall("softplus_of_minus", [node]) if node.target is aten.abs.default else None


MAX_WHOLE = 2.0**24
"""Bound below which every whole number is a float32, the type of generated code."""


_KEEP_SIZE = ("_to_copy", "neg", "abs", "relu", *ROUNDING)
_BOUNDS: dict[str, Callable[..., float]] = {
    **dict.fromkeys(_KEEP_SIZE, lambda x: max(x, 1.0)),
    **dict.fromkeys(("maximum", "minimum"), max),
    **dict.fromkeys(("add", "sub"), lambda x, y, alpha=1.0: x + alpha * y),
    **dict.fromkeys(("remainder", "fmod"), lambda x, y: y),
    "mul": lambda x, y: x * y,
    "where": lambda condition, x, y: max(x, y),
    "clamp": lambda x, low=math.inf, high=math.inf: max(low, high),
}
"""Bound of a result's size, given bounds of the arguments' sizes."""


class Body:
    """Values of a function so far: (name or number, kind) by node."""

    def __init__(self, function: str) -> None:
        self.function = function
        self.values: dict[fx.Node, tuple[Any, str]] = {}
        self.bounds: dict[fx.Node, float] = {}

    def bound(self, argument: Any) -> float:
        """Return a bound of the size of a number, or of a node's value."""
        if isinstance(argument, fx.Node):
            if argument.meta.get("dtype") == torch.bool:
                return 1.0
            argument = self.bounds.get(argument, self.values[argument][0])
        return abs(argument) if isinstance(argument, (int, float)) else math.inf

    def as_kind(self, argument: Any, kind: str) -> Any:
        """Convert an argument to `kind`: tensors and bools spelled, everything else raw."""
        present = REAL
        if isinstance(argument, bool):
            argument = float(argument)
        elif isinstance(argument, fx.Node):
            argument, present = self.values[argument]
        if argument is None or present == kind or (kind == REAL and not isinstance(argument, str)):
            return argument
        return f"truth({spell(argument)})" if kind == MASK else f"number({argument})"

    def expression(self, node: fx.Node, call: FusedCall | None) -> tuple[str, str]:
        """Return the kind and the expression of a call, or of a fused call in its place."""
        if call is not None:
            terms = [spell(self.as_kind(term, REAL)) for term in call.args]
            return REAL, f"{call.function}({', '.join(terms)})"
        name = node.target._schema.name  # type: ignore[union-attr]
        kind = MASK if node.meta["dtype"] == torch.bool else REAL
        args = node.args
        is_whole = kind == REAL and not node.meta["dtype"].is_floating_point
        short = name.removeprefix("aten::")
        if short in _BOUNDS and node.meta["dtype"] != torch.bool:
            options = {k: self.bound(v) for k, v in node.kwargs.items() if k == "alpha"}
            self.bounds[node] = _BOUNDS[short](*map(self.bound, args), **options)
        inexact = is_whole and short not in _KEEP_SIZE
        if inexact and self.bounds.get(node, math.inf) > MAX_WHOLE:
            raise EngineError(
                f"{self.function} computes whole numbers by {node.target} that may exceed 2^24, "
                "which generated code cannot hold. Bound them before, x.clamp(-99, 99).long(), or "
                "compute in the dtype of the states: torch.floor(x)"
            )
        if name == "aten::where":
            condition = self.as_kind(args[0], MASK)
            branches = [spell(self.as_kind(a, kind)) for a in args[1:]]
            return kind, f"select({condition}, {', '.join(branches)})"
        if name in ("aten::logical_not", "aten::bitwise_not") and kind == MASK:
            return MASK, f"negated({self.as_kind(args[0], MASK)})"
        if name == "aten::_to_copy":
            value = spell(self.as_kind(args[0], kind))
            return kind, f"trunc({value})" if is_whole else value
        bits_of_integers = name.startswith("aten::bitwise") and kind != MASK
        if name not in SPELLINGS or bits_of_integers:
            raise EngineError(
                f"{self.function} uses {node.target}, which generated code cannot spell. Write the "
                f"step with other ops, or teach the emitter: pararnn.register_spelling({name!r}, "
                '"an expression of {0}, {1}, ...")'
            )
        spelling = SPELLINGS[name]
        operands = [self.as_kind(a, spelling.takes) for a in args]
        if isinstance(spelling.text, str):
            if node.kwargs:
                raise EngineError(
                    f"{self.function} uses {node.target} with {dict(node.kwargs)}, of which "
                    "generated code knows nothing: write the step with other ops"
                )
            text = spelling.text.format(*map(spell, operands))
        else:
            options = {k: self.as_kind(v, spelling.takes) for k, v in node.kwargs.items()}
            text = spelling.text(*operands, **options)
        if spelling.gives == kind:
            return kind, text
        return kind, f"truth({text})" if kind == MASK else f"number({text})"


def kind_of(value: Value) -> str:
    """Return the type of a value's numbers."""
    return MASK if value.node.meta["dtype"] == torch.bool else REAL


class NestText:
    """The code of a nest of loops; subclasses load the values of other loops that it reads."""

    body: Body

    def load(self, value: Value) -> None:
        """Load a value of other loops into a variable, unless there is one."""
        raise NotImplementedError

    def variable(self, value: Value, text: str) -> str:
        """Return the declaration of a value's variable, given its number, which a mask has too."""
        name, kind = f"x{len(self.body.values)}", kind_of(value)
        self.body.values[value.node] = (name, kind)
        return f"const {kind} {name} = {f'truth({text})' if kind == MASK else text};"

    def real(self, value: Value | float) -> str:
        """Return a value, or a number, as the text of a `real`."""
        if not isinstance(value, Value):
            return literal(value)
        self.load(value)
        return spell(self.body.as_kind(value.node, REAL))

    def point(self, value: Value) -> str:
        """Return the declaration of a pointwise value."""
        for source in value.definition.values:  # type: ignore[union-attr]
            self.load(source)
        kind, text = self.body.expression(value.node, None)
        name = f"t{len(self.body.values)}"
        self.body.values[value.node] = (name, kind)
        return f"const {kind} {name} = {text};"
