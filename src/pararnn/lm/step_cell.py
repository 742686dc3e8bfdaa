"""The kernel of a recurrent layer's decoding step, generated in Triton from the cell's step.

A program computes all gates of some channels of a head for all rows, then the cell's step of one
after the other, and the output times its gate. The emitter's expressions are valid in Triton, where
`HEADER` defines the names in them.
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
from pararnn.lm.step_kernels import fetch, first_blocks_of_rows, first_columns, in_groups
from pararnn.lm.step_kernels import line_sums, of_lines, part_of, rows_numbers, rows_of, start
from pararnn.lm.step_kernels import tiles_of_rows, wait, write_scaled

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
    x, z, matrix, gate_bias, states, new_states, gain, times_gain, squares, {params}
    rows, channels, head_channels, head_inputs, gain_scale,
    LINES: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, DEPTH: tl.constexpr, VECTOR: tl.constexpr, BLOCKS: tl.constexpr,
    STAGES: tl.constexpr, WARPS: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    start(PDL)
    ROWS: tl.constexpr = GROUPS * WIDTH
    MATRICES: tl.constexpr = {count}
    blocks = tl.cdiv(head_channels, LINES)
    program = tl.program_id(0)
    head = program // blocks
    first = (program % blocks) * LINES
    inner = first + tl.arange(0, LINES)
    valid = inner < head_channels
    channel = head * head_channels + inner
    x += head * head_inputs
    near = tl.minimum(inner, head_channels - 1)
    near_channel = head * head_channels + near
    {lines}
    matrices = ({matrices})
    lines = ({all_lines})
    if LANES > 0:
        ahead = first_columns(
            matrices, lines, head_inputs, MATRICES, DEPTH, STAGES, EVEN
        )
    if BIAS:
        {biases}
    {params_of_lines}
    lines_gain = of_lines(gain, near_channel) * gain_scale
    # Steps of groups of rows, or of one token after the other.
    STEPS: tl.constexpr = GROUPS if TOKENS == 1 else LANES
    STEP_WIDTH: tl.constexpr = WIDTH if TOKENS == 1 else 1
    wait(PDL)
    if LANES > 0:
        values = first_blocks_of_rows(
            x, head_inputs, channels, LINES, DEPTH, VECTOR, BLOCKS, LANES, WARPS, EVEN
        )
    {no_states}
    for text in tl.static_range(STEPS // TOKENS):
        row = rows_of(text, STEP_WIDTH)
        mask = valid[:, None] & (row < rows)[None, :]
        {states}
    output_gates = tiles_of_rows(z, channel, valid, channels, GROUPS, WIDTH)
    if LANES > 0:
        sums = line_sums(
            ahead, values, x, matrices, lines, head_inputs, channels, MATRICES,
            LINES, DEPTH, VECTOR, BLOCKS, STAGES, LANES, WARPS, EVEN,
        )
        {gates_by_lanes}
    else:
        row = rows_of(0, WIDTH)
        k = tl.arange(0, DEPTH)
        {zero_sums}
        for column in tl.range(0, head_inputs, DEPTH, num_stages=STAGES):
            value = rows_numbers(x, row, column + k, head_inputs, channels, EVEN)
            {products}
        {gates_by_tensor_cores}
    hidden = ()  # type: tuple
    tl.debug_barrier()  # several threads load a number, and one stores it
    for group in tl.static_range(STEPS):
        row = rows_of(group, STEP_WIDTH)
        mask = valid[:, None] & (row < rows)[None, :]
        if group % TOKENS == 0:
            {first_states}
        {gates}
        if BIAS:
            {add_biases}
        {values}
        {step}
        {writes}
        hidden = hidden + (state_0.to(x.dtype.element_ty).to(tl.float32),)
    if STEP_WIDTH == 1:
        hidden = in_groups(hidden, LANES, WIDTH)
    for group in tl.static_range(GROUPS):
        h = hidden[group] * output_gates[group].to(tl.float32)
        write_scaled(
            h, channel, rows_of(group, WIDTH), valid, lines_gain, times_gain, squares, program,
            channels, ROWS,
        )
"""


def source_of(program: Program) -> str:
    """Return the kernel's source. Raises EngineError for steps with functions beyond `HEADER`."""
    gates, states = range(len(program.gates)), range(program.num_states)
    address = f"(row[None, :] * {len(states)} + {{}}) * channels + channel[:, None]"
    line = f"(head * {len(gates)} + {{}}) * head_channels + "
    tile = "fetch(matrix, line_{g}, column + k, head_inputs, EVEN)"
    load = "tl.load(states + {}, mask, other=0.0)"
    lines_by_name = {
        "lines": [f"line_{g} = {line.format(g)}near" for g in gates],
        "biases": [f"bias_{g} = of_lines(gate_bias + {g} * channels, near_channel)" for g in gates],
        "params_of_lines": [
            f"line_{name} = of_lines(param_{name}, near_channel)" for name in program.params
        ],
        "no_states": [f"states_{n} = ()  # type: tuple" for n in states],
        "states": [
            f"states_{n} = states_{n} + ({load.format(address.format(n))},)" for n in states
        ],
        "zero_sums": [f"sum_{g} = tl.zeros((LINES, ROWS), tl.float32)" for g in gates],
        "products": [f"sum_{g} = tl.dot({tile.format(g=g)}, value, sum_{g})" for g in gates],
        "first_states": [f"state_{n} = states_{n}[group // TOKENS]" for n in states],
        "gates_by_lanes": [
            f"gates_{g} = in_groups(part_of(sums, {g} * LANES, LANES), LANES, STEP_WIDTH)"
            for g in gates
        ],
        "gates_by_tensor_cores": [f"gates_{g} = (sum_{g},)" for g in gates],
        "gates": [f"gate_{g} = gates_{g}[group]" for g in gates],
        "add_biases": [f"gate_{g} += bias_{g}" for g in gates],
        "values": [
            *(f"p_{name} = line_{name} + tl.zeros_like(gate_0)" for name in program.params),
            *(f"f_{name} = tl.zeros_like(gate_0) + 1.0" for name in program.fields),
        ],
        "step": step_lines(program),
        "writes": [
            *(f"state_{n} = new_{n} + tl.zeros_like(gate_0)" for n in states),
            *(f"tl.store(new_states + {address.format(n)}, state_{n}, mask)" for n in states),
        ],
    }
    words = {
        "params": "".join(f"param_{name}, " for name in program.params),
        "matrices": "matrix, " * len(gates),
        "all_lines": "".join(f"line_{g}, " for g in gates),
        "count": str(len(gates)),
    }
    text = KERNEL
    for name, word in words.items():
        text = text.replace(f"{{{name}}}", word)
    for name, lines in lines_by_name.items():
        (indent,) = re.findall(rf"^( *){{{name}}}$", text, re.MULTILINE)
        text = text.replace(f"{indent}{{{name}}}", "\n".join(indent + line for line in lines))
    return HEADER + text


def step_lines(program: Program) -> list[str]:
    """Return the cell's step as assignments to new_0, new_1, ..."""
    graph = program.graphs[torch.float32].step.ops
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
