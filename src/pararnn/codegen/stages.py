"""Emission of a step that mixes channels: its elementwise stages, and tables of its products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from pararnn.codegen.emit import Arguments, arguments, emit_function
from pararnn.program.mixing import Mixing, StagedPass
from pararnn.program.program import Program
from pararnn.program.schedule import Stage
from pararnn.program.statements import OF_VECTORS, Product, Value, sources_of

BACKWARD_ARRAYS = {"grad_new_state": "cotangent", "sum": "sum"}
"""Names of arrays that only a gradient reads, by kinds of inputs."""


def emit_mixing(program: Program, dtype: torch.dtype) -> str:
    """Emit the stages of a step that mixes channels in a compute dtype, and their tables.

    A stage is a function `forward_0`, ..., `backward_0`, ...; `forward_stage<0>` calls it. Raises
    EngineError for ops that have no spelling.
    """
    mixing = program.mixing[dtype]
    gradients = {
        "grad_state": program.num_states,
        "grad_gate": len(program.gates),
        "grad_field": len(program.fields),
        "grad_param": len(mixing.channel_params),
        "left": mixing.lefts,
        "right": mixing.rights,
    }
    new = {"new_state": program.num_states, "sum": mixing.num_preactivations}
    sizes = {**gradients, "sum": mixing.num_preactivations}
    reads = {kind: mixing.backward.reads(kind) for kind in ("state", "gate")}
    return "\n".join(
        [
            "constexpr int "
            + ", ".join(f"num_{_name(kind)}s = {count}" for kind, count in sizes.items())
            + ";",
            f"constexpr int channel_params[] = {_array(mixing.channel_params or [-1])};",
            f"constexpr int gate_of_right[] = {_array(mixing.gate_of_right or [-1])};",
            *[
                f"constexpr int num_read_{kind}s = {len(indices)}, read_{kind}s[] = "
                f"{_array(indices or [-1])};  // by the gradient"
                for kind, indices in reads.items()
            ],
            "",
            *_pass(program, mixing, mixing.forward, "forward", new),
            *_pass(program, mixing, mixing.backward, "backward", gradients),
        ]
    )


def _pass(
    program: Program, mixing: Mixing, pass_: StagedPass, name: str, results: Mapping[str, int]
) -> list[str]:
    """Return a pass's tables, stages and dispatcher."""
    operands = [stage.count("operand") for stage in pass_.stages]
    products = [len(stage.products) for stage in pass_.stages]
    rows = [_array(_product(pass_, product)) for product in pass_.products]
    lines = [
        f"constexpr int {name}_stages = {len(products)}, {name}_carried = {len(pass_.carried)};",
        f"constexpr int {name}_first_operand[] = {_array([*accumulate(operands, initial=0)])};",
        f"constexpr int {name}_first_product[] = {_array([*accumulate(products, initial=0)])};",
        f"constexpr Product {name}_products[] = {_array(rows or ['{0, 0, 0}'])};",
    ]
    read = [*OF_VECTORS, "product"]
    if pass_ is mixing.backward:
        read += BACKWARD_ARRAYS.values()
        sums = _array(mixing.accumulators or [0])
        lines.append(f"constexpr int {name}_sum_of_product[] = {sums};")
    else:
        sums = _array(mixing.preactivation_of or [-1])
        lines.append(f"constexpr int {name}_sum_with[] = {sums};")
    params = {("grad_param", param): i for i, param in enumerate(mixing.channel_params)}
    targets = [
        [(target.kind, params.get(target[:2], target.number)) for target, _ in stage.writes]
        for stage in pass_.stages
    ]
    stage_of = {target: s for s, in_stage in enumerate(targets) for target in in_stage}
    for kind, count in results.items():
        table = _array([stage_of[kind, number] for number in range(count)] or [-1])
        lines.append(f"constexpr int {name}_stage_of_{_name(kind)}[] = {table};")
    writes = ("carried", "operand", *results)
    parameters = [*(f"const real* {kind}" for kind in read), *(f"real* {kind}" for kind in writes)]
    names = _names(program, mixing, pass_)
    for s, stage in enumerate(pass_.stages):
        graph, inputs = _graph(stage, names, pass_.carried if s else {})
        outputs = [f"{kind}[{number}]" for kind, number in targets[s]]
        function = emit_function(program, [], f"{name}_{s}", parameters, graph, inputs, outputs)
        lines += ["", function.rstrip()]
    call = ", ".join([*read, *writes])
    indices = range(len(pass_.stages))
    calls = [f"  if constexpr (stage == {s}) {name}_{s}({call});" for s in indices]
    head = f"PARARNN_FUNCTION void {name}_stage({', '.join(parameters)}) {{"
    return [*lines, "", "template <int stage>", head, *calls, "}", ""]


def _product(pass_: StagedPass, value: Value) -> tuple[int, int, int]:
    """Return the operand, the matrix and whether it is transposed."""
    product = value.definition
    assert isinstance(product, Product)
    return pass_.operands[product.source], product.param, int(product.transposes)


def _names(program: Program, mixing: Mixing, pass_: StagedPass) -> dict[Value, tuple[str, str]]:
    """Return the names and the array entries of a pass's inputs and products."""
    params = arguments("param", [program.params[i] for i in mixing.channel_params])
    names: dict[str, Any] = {
        "state": arguments("state", program.states),
        "gate": arguments("gate", program.gates),
        "field": arguments("field", program.fields),
        "param": dict(zip(mixing.channel_params, params, strict=True)),
        "grad_new_state": arguments("cotangent", program.states),
        "sum": arguments("sum", range(mixing.num_preactivations)),
    }
    inputs = pass_.statements.inputs.items()
    products = arguments("product", range(len(pass_.products)))
    named_products = dict(zip(pass_.products, products, strict=True))
    return {value: names[kind][number] for (kind, number), value in inputs} | named_products


def _graph(
    stage: Stage, names: Mapping[Value, tuple[str, str]], carried: Mapping[Value, int]
) -> tuple[fx.Graph, Arguments]:
    """Return a stage as a graph, and its arguments: what it does not compute itself."""
    entries = {value: pair for value, pair in names.items() if value not in carried}
    entries |= {v: (f"carried_{i}", f"carried[{i}]") for v, i in carried.items()}
    points, results = stage.points, [value for _, value in stage.writes]
    reads = {source for value in points for source in sources_of(value)} | {*results}
    leaves = [value for value in entries if value in reads and value not in points]
    graph = fx.Graph()
    nodes = {value.node: graph.placeholder(f"input_{i}") for i, value in enumerate(leaves)}
    for value in points:
        nodes[value.node] = graph.node_copy(value.node, nodes.__getitem__)
    graph.output(tuple(nodes[v.node] if isinstance(v, Value) else v for v in results))
    return graph, [entries[value] for value in leaves]


def _name(kind: str) -> str:
    """Return the kind of a gradient in the names of tables."""
    return kind.removeprefix("grad_")


def _array(items: Sequence[object]) -> str:
    return "{" + ", ".join(map(str, items)) + "}"
