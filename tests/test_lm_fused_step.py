"""Decoding in fused kernels: the code generated of a cell's step, and what has none."""

import ast
import copy
from types import SimpleNamespace

import pytest
import torch
from lm_kinds import plain

import pararnn
from pararnn.base.errors import EngineError
from pararnn.cells.find import find_cell
from pararnn.lm import LanguageModel, LMConfig, fused_step
from pararnn.lm.fused_step import has_kernel
from pararnn.lm.step_cell import HEADER, NAMES, source_of, step_lines
from pararnn.program.program import program_of
from pararnn.zoo import CELLS

FUNCTIONS = {
    name: getattr(torch, name) for name in NAMES if hasattr(torch, name) and name != "select"
}
FUNCTIONS |= {
    "constant": lambda x: x,
    "select": torch.where,
    "maximum": lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
    "minimum": lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
    "at_least": lambda x, low: x.clamp_min(low),
    "at_most": lambda x, high: x.clamp_max(high),
    "number": lambda x: x.float(),
    "truth": lambda x: x != 0,
    "negated": lambda x: ~x,
}
WITH_KERNELS = {"gru", "lstm", "min-gru", "min-lstm", "lem", "indrnn", "cfc"}


def _cell(name):
    for heads in (2, 1):
        try:
            return find_cell(name, CELLS)(8, num_heads=heads)
        except ValueError:
            continue
    raise AssertionError(name)


@pytest.mark.parametrize("name", CELLS)
def test_generated_lines_are_the_cells_step(name):
    torch.manual_seed(0)
    cell = _cell(name)
    program = program_of(cell)
    if not has_kernel(program):
        assert name not in WITH_KERNELS
        return
    for parameter in cell.parameters():
        torch.nn.init.normal_(parameter)
    states = torch.randn(program.num_states, 8)
    gates = torch.randn(len(program.gates), 8)
    fields = [torch.ones(8) for _ in program.fields]
    params = [getattr(cell, each).detach() for each in program.params]
    values = {f"state_{n}": state for n, state in enumerate(states)}
    values |= {f"gate_{g}": gate for g, gate in enumerate(gates)}
    values |= {f"f_{each}": field for each, field in zip(program.fields, fields, strict=True)}
    values |= {f"p_{each}": param for each, param in zip(program.params, params, strict=True)}
    exec("\n".join(step_lines(program)), FUNCTIONS, values)
    reference = program.graphs[torch.float32].step.module(*states, *gates, *fields, *params)
    for n, new in enumerate(reference):
        torch.testing.assert_close(values[f"new_{n}"], new, rtol=1e-5, atol=1e-6)
    functions = {
        each.name
        for each in ast.walk(ast.parse(source_of(program)))
        if hasattr(each, "decorator_list")
    }
    assert "recurrent_step" in functions
    assert "{" not in source_of(program)


@pytest.mark.parametrize("name", ["tanh", "log1p", "sigmoid"])
def test_functions_have_the_digits_of_small_numbers(name):
    """What `HEADER` defines or names, with PyTorch's functions in place of Triton's."""
    code = [line for line in HEADER.splitlines() if "import" not in line and "jit" not in line]
    shared = {"exp", "exp2", "log", "log2", "sqrt", "abs", "sigmoid", "erf", "sin", "cos"}
    own = {each: getattr(torch, each) for each in shared | {"floor", "ceil", "where"}}
    own |= {"maximum": torch.maximum, "minimum": torch.minimum, "constexpr": float}
    functions = {"tl": SimpleNamespace(**own)}
    exec("\n".join(code), functions)
    sizes = torch.logspace(-30, 1.5, 4000)
    x = torch.cat([sizes, -sizes[sizes < 0.9], torch.tensor([0.0, torch.inf, torch.nan])])
    reference = getattr(torch, name)(x.double()).float()
    torch.testing.assert_close(functions[name](x), reference, rtol=1e-6, atol=0, equal_nan=True)


def test_a_cpu_has_no_fused_step():
    assert not fused_step.takes(plain("gru"), 1)


def test_rows_and_tokens_that_have_tiles():
    limits = fused_step.LANE_ROWS, fused_step.LEAST_ROWS, fused_step.MOST_ROWS
    lanes, least, most = limits
    wide = LanguageModel(LMConfig(32, 1, 48, num_heads=2))
    narrow = copy.deepcopy(wide).bfloat16()
    for model, rows, tokens, has_tiles in (
        (wide, 1, 1, True), (wide, lanes, 1, True), (wide, lanes + 1, 1, False),
        (wide, 1, lanes, True), (wide, 2, lanes // 2, True), (wide, 2, lanes, False),
        (narrow, lanes, 1, True), (narrow, least, 1, False), (narrow, least + 1, 1, True),
        (narrow, most, 1, True), (narrow, most + 1, 1, False), (narrow, 1, lanes, True),
        (narrow, least, 2, False), (plain("gru"), 1, 1, True), (plain("gru"), 2, 1, False),
    ):  # fmt: skip
        assert fused_step._takes_rows(model, rows, tokens) == has_tiles, (rows, tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_norms_have_the_same_sums_for_up_to_some_rows(dtype):
    """Lines of a tile decide the order; of products before a norm, and of the cell."""
    for lines, length in ((2048, 2048), (4096, 11264), (768, 768), (64, 192)):
        tiles = {
            fused_step.product_tile(lines, length, 1, rows, dtype, True).lines
            for rows in range(1, fused_step.LANE_ROWS + 1)
        }
        cells = {
            fused_step.cell_tile(lines // 4, lines, 3, rows, dtype.itemsize)
            for rows in range(1, fused_step.LANE_ROWS + 1)
        }
        assert (len(tiles), len(cells)) == (1, 1)


class Asinh(pararnn.Cell):
    """A cell with a function that `HEADER` has not."""

    states, gates, params = ("h",), ("x",), {"a": pararnn.Param("D")}

    def step(self, state, gate, param):
        return torch.asinh(gate.x + param.a * state.h)


def test_functions_without_triton_have_no_kernel():
    program = program_of(Asinh(8))
    with pytest.raises(EngineError, match="asinh"):
        step_lines(program)
    assert not has_kernel(program)
