"""Emission of a step that mixes channels: its elementwise stages, and tables of its products."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from pararnn.codegen.emit import arguments, emit_function
from pararnn.program.mixing import Mixing, Pass
from pararnn.program.program import Program

GRADIENTS = ("state", "gate", "field", "param", "left", "right")
"""Kinds of a gradient's results that kernels write."""


def emit_mixing(program: Program, dtype: torch.dtype) -> str:
    """Emit the stages of a step that mixes channels in a compute dtype, and their tables.

    A stage is a function `forward_0`, ..., `backward_0`, ...; `forward_stage<0>` calls it. Raises
    EngineError for ops that have no spelling.
    """
    mixing = program.mixing[dtype]
    sizes = {
        "states": program.num_states,
        "gates": len(program.gates),
        "fields": len(program.fields),
        "params": len(mixing.channel_params),
        "lefts": mixing.lefts,
        "rights": mixing.rights,
        "sums": mixing.num_preactivations,
    }
    step_results = [("new_state", program.num_states), ("sum", mixing.num_preactivations)]
    gradients = list(zip(GRADIENTS, [*sizes.values()][:-1], strict=True))
    reads = {kind: mixing.backward.reads(kind) for kind in ("state", "gate")}
    return "\n".join(
        [
            f"constexpr int {', '.join(f'num_{name} = {n}' for name, n in sizes.items())};",
            f"constexpr int channel_params[] = {_array(mixing.channel_params or [-1])};",
            *[
                f"constexpr int num_read_{kind}s = {len(indices)}, read_{kind}s[] = "
                f"{_array(indices or [-1])};  // by the gradient"
                for kind, indices in reads.items()
            ],
            "",
            *_pass(program, mixing, mixing.forward, "forward", step_results, ""),
            *_pass(program, mixing, mixing.backward, "backward", gradients, "grad_"),
        ]
    )


def _pass(
    program: Program,
    mixing: Mixing,
    pass_: Pass,
    name: str,
    results: Sequence[tuple[str, int]],
    prefix: str,
) -> list[str]:
    """Return a pass's tables, stages and dispatcher."""
    operands = [stage.count("operand") for stage in pass_.stages]
    products = [len(stage.products) for stage in pass_.stages]
    lines = [
        f"constexpr int {name}_stages = {len(products)}, {name}_carried = {pass_.num_carried};",
        f"constexpr int {name}_first_operand[] = {_array(_starts(operands))};",
        f"constexpr int {name}_first_product[] = {_array(_starts(products))};",
        f"constexpr Product {name}_products[] = "
        + _array([_array([*map(int, product)]) for product in pass_.products] or ["{0, 0, 0}"])
        + ";",
    ]
    if "cotangent" in pass_.inputs:
        sums = _array(pass_.accumulators or [0])
        lines.append(f"constexpr int {name}_sum_of_product[] = {sums};")
    else:
        lines.append(f"constexpr int {name}_sum_with[] = {_array(pass_.preactivation_of or [-1])};")
    for kind, count in results:
        stages = {r.number: s for s, stage in enumerate(pass_.stages) for r in stage.results
                  if r.kind == kind}  # fmt: skip
        table = _array([stages[i] for i in range(count)] or [-1])
        lines.append(f"constexpr int {name}_stage_of_{kind}[] = {table};")
    params = [program.params[i] for i in mixing.channel_params]
    inputs = [
        *arguments("state", program.states),
        *arguments("gate", program.gates),
        *arguments("field", program.fields),
        *arguments("param", params),
    ]
    read = [f"const real* {kind}" for kind in ("state", "gate", "field", "param", "product")]
    if "cotangent" in pass_.inputs:
        inputs += arguments("cotangent", program.states)
        inputs += [(f"sum_{i}", f"sum[{i}]") for i in range(mixing.num_preactivations)]
        read += ["const real* cotangent", "const real* sum"]
    inputs += [(f"product_{i}", f"product[{i}]") for i in range(len(pass_.products))]
    inputs += [(f"carried_{i}", f"carried[{i}]") for i in range(pass_.num_carried)]
    kinds = ["operand", *(f"{_prefix(kind, prefix)}{kind}" for kind, _ in results)]
    parameters = [*read, "real* carried", *(f"real* {kind}" for kind in kinds)]
    for s, stage in enumerate(pass_.stages):
        outputs = [f"{_prefix(r.kind, prefix)}{r.kind}[{r.number}]" for r in stage.results]
        function = f"{name}_{s}"
        lines += [
            "",
            emit_function(program, [], function, parameters, stage.graph, inputs, outputs).rstrip(),
        ]
    names = ", ".join(parameter.split()[-1] for parameter in parameters)
    indices = range(len(pass_.stages))
    calls = [f"  if constexpr (stage == {s}) {name}_{s}({names});" for s in indices]
    head = f"PARARNN_FUNCTION void {name}_stage({', '.join(parameters)}) {{"
    return [*lines, "", "template <int stage>", head, *calls, "}", ""]


def _prefix(kind: str, prefix: str) -> str:
    """Return the prefix of an array of results: gradients of inputs have one."""
    return prefix if kind in GRADIENTS[:4] else ""


def _starts(counts: Iterable[int]) -> list[int]:
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return starts


def _array(items: Sequence[object]) -> str:
    return "{" + ", ".join(map(str, items)) + "}"
