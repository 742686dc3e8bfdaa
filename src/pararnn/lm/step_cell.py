"""The kernel of a recurrent layer's decoding step, generated in Triton from the cell's step.

A program computes all gates of some channels of a head, the cell's step, and the output times its
gate. The emitter's expressions are valid in Triton, where `HEADER` defines the names in them.
"""

from __future__ import annotations

import hashlib
import linecache
import re
from functools import lru_cache
from typing import Any

import torch

from pararnn.base.errors import EngineError
from pararnn.codegen.emit import Body
from pararnn.codegen.spelling import MASK, REAL, spell
from pararnn.program.program import Program
from pararnn.program.trace import ancestors

HEADER = """
import triton
import triton.language as tl
from pararnn.lm.step_kernels import fetch, first_columns, line_sums, of_lines, row_blocks
from pararnn.lm.step_kernels import rows_numbers, start, wait, write_scaled

INFINITY = tl.constexpr(float("inf"))
NAN = tl.constexpr(float("nan"))
exp, exp2, log, log2, sqrt, abs = tl.exp, tl.exp2, tl.log, tl.log2, tl.sqrt, tl.abs
sigmoid, erf, sin, cos, floor, ceil = tl.sigmoid, tl.erf, tl.sin, tl.cos, tl.floor, tl.ceil
maximum, minimum, select = tl.maximum, tl.minimum, tl.where


@triton.jit
def constant(x):
    return x


@triton.jit
def tanh(x):
    t = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - t) / (1.0 + t)
    s = x * x  # near 0 the difference above has few digits
    near = x * (1.0 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835)))))
    return tl.where(s < 0.0625, near, tl.where(x < 0, -size, size))


@triton.jit
def relu(x):
    return tl.maximum(x, 0.0)


@triton.jit
def log1p(x):
    y = 1.0 + x  # what x loses here, the quotient gives back
    change = y - 1.0
    near = tl.where(change == 0.0, x, tl.log(y) * (x / change))
    return tl.where(tl.abs(x) < 0.5, near, tl.log(y))


@triton.jit
def at_least(x, low):
    return tl.maximum(x, low)


@triton.jit
def at_most(x, high):
    return tl.minimum(x, high)


@triton.jit
def lerp(a, b, t):
    return a + t * (b - a)


@triton.jit
def truth(x):
    return x != 0.0


@triton.jit
def number(x):
    return x.to(tl.float32)


@triton.jit
def negated(x):
    return x == 0
"""

NAMES = {
    *re.findall(r"^def (\w+)", HEADER, re.MULTILINE),
    *re.findall(r"\w+", "exp exp2 log log2 sqrt abs sigmoid erf sin cos floor ceil"),
    *("maximum", "minimum", "select"),
}
"""Functions that expressions may call."""

KERNEL = """

@triton.jit
def recurrent_step(
    x, z, matrix, gate_bias, states, gain, times_gain, squares, {params}
    rows, channels, head_channels, head_inputs,
    LINES: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, BLOCKS: tl.constexpr,
    STAGES: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):
    start(PDL)
    blocks = tl.cdiv(head_channels, LINES)
    program = tl.program_id(0)
    head = program // blocks
    first = (program % blocks) * LINES
    inner = first + tl.arange(0, LINES)
    valid = inner < head_channels
    channel = head * head_channels + inner
    row = tl.arange(0, ROWS)
    mask = valid[:, None] & (row < rows)[None, :]
    x += head * head_inputs
    near = tl.minimum(inner, head_channels - 1)
    near_channel = head * head_channels + near
    {lines}
    if ROWS == 1:
        {fetch}
    if BIAS:
        {biases}
    {params_of_lines}
    lines_gain = of_lines(gain, near_channel)
    wait(PDL)
    if ROWS == 1:
        values = row_blocks(x, head_inputs, DEPTH, BLOCKS)
    {states}
    output_gate = tl.load(z + row[None, :] * channels + channel[:, None], valid[:, None], other=0.0)
    if ROWS == 1:
        {sums}
    else:
        k = tl.arange(0, DEPTH)
        {zero_gates}
        for column in tl.range(0, head_inputs, DEPTH, num_stages=STAGES):
            value = rows_numbers(x, row, column + k, head_inputs, channels, EVEN)
            {products}
    if BIAS:
        {add_biases}
    {values}
    {step}
    tl.debug_barrier()  # several threads load a number, and one stores it
    {writes}
    h = state_0.to(x.dtype.element_ty).to(tl.float32) * output_gate.to(tl.float32)
    write_scaled(h, channel, row, valid, lines_gain, times_gain, squares, program, channels, ROWS)
"""


def source_of(program: Program) -> str:
    """Return the kernel's source. Raises EngineError for steps with functions beyond `HEADER`."""
    gates, states = range(len(program.gates)), range(program.num_states)
    address = f"states + (row[None, :] * {len(states)} + {{}}) * channels + channel[:, None]"
    line = f"(head * {len(gates)} + {{}}) * head_channels + "
    tile = "fetch(matrix, line_{g}, column + k, head_inputs, EVEN)"
    first = "first_columns(matrix, line_{g}, head_inputs, DEPTH, STAGES, EVEN)"
    rest = "matrix, line_{g}, head_inputs, LINES, DEPTH, BLOCKS, STAGES, EVEN"
    lines_by_name = {
        "lines": [f"line_{g} = {line.format(g)}near" for g in gates],
        "fetch": [f"ahead_{g} = {first.format(g=g)}" for g in gates],
        "biases": [f"bias_{g} = of_lines(gate_bias + {g} * channels, near_channel)" for g in gates],
        "params_of_lines": [
            f"line_{name} = of_lines(param_{name}, near_channel)" for name in program.params
        ],
        "sums": [f"gate_{g} = line_sums(ahead_{g}, values, {rest.format(g=g)})" for g in gates],
        "zero_gates": [f"gate_{g} = tl.zeros((LINES, ROWS), tl.float32)" for g in gates],
        "products": [f"gate_{g} = tl.dot({tile.format(g=g)}, value, gate_{g})" for g in gates],
        "states": [f"state_{n} = tl.load({address.format(n)}, mask, other=0.0)" for n in states],
        "add_biases": [f"gate_{g} += bias_{g}" for g in gates],
        "values": [
            *(f"p_{name} = line_{name} + tl.zeros_like(gate_0)" for name in program.params),
            *(f"f_{name} = tl.zeros_like(gate_0) + 1.0" for name in program.fields),
        ],
        "step": step_lines(program),
        "writes": [
            *(f"state_{n} = new_{n} + tl.zeros_like(gate_0)" for n in states),
            *(f"tl.store({address.format(n)}, state_{n}, mask)" for n in states),
        ],
    }
    text = KERNEL.replace("{params}", "".join(f"param_{name}, " for name in program.params))
    for name, lines in lines_by_name.items():
        (indent,) = re.findall(rf"^( *){{{name}}}$", text, re.MULTILINE)
        text = text.replace(f"{indent}{{{name}}}", "\n".join(indent + line for line in lines))
    return HEADER + text


def step_lines(program: Program) -> list[str]:
    """Return the cell's step as assignments to new_0, new_1, ..."""
    graph = program.graphs[torch.float32].step.module.graph
    nodes = list(graph.nodes)
    live = ancestors(nodes, nodes[-1:], lambda node: node.all_input_nodes)
    names = [f"state_{n}" for n in range(program.num_states)]
    names += [f"gate_{g}" for g in range(len(program.gates))]
    names += [f"f_{name}" for name in program.fields]
    names += [f"p_{name}" for name in program.params]
    body = Body(f"{program.cell_name}'s step")
    lines: list[str] = []
    placeholders = [node for node in nodes if node.op == "placeholder"]
    for node, name in zip(placeholders, names, strict=True):
        body.values[node] = (name, REAL)
    for node in nodes:
        if node.op != "call_function" or node not in live:
            continue
        if node.target is torch.ops.aten.scalar_tensor.default:
            body.values[node] = (node.args[0], REAL)
            continue
        kind, expression = body.expression(node, None)
        unknown = set(re.findall(r"([A-Za-z_]\w*)\(", expression)) - NAMES
        if unknown:
            raise EngineError(f"{body.function} uses {', '.join(unknown)}, which have no Triton")
        name = f"{'m' if kind == MASK else 't'}{len(lines)}"
        lines.append(f"{name} = {expression}")
        body.values[node] = (name, kind)
    (results,) = (node.args[0] for node in nodes if node.op == "output")
    for n, result in enumerate(results):
        lines.append(f"new_{n} = {spell(body.as_kind(result, REAL))}")
    return lines


@lru_cache(maxsize=64)
def kernel_of(program: Program) -> Any:
    """Return the kernel of a program, as Triton launches it."""
    source = source_of(program)
    name = f"<pararnn {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    namespace: dict[str, Any] = {"__name__": "pararnn.lm.step_cell"}
    exec(compile(source, name, "exec"), namespace)
    return namespace["recurrent_step"]
