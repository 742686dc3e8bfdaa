"""Tangents of a cell along states that are known: a cell with the tangents alone for states.

Where a step multiplies nothing but its states by matrices, the states of all steps give these
products by one product for all steps. What is left is a linear recurrence of the tangents, with one
product a step for each of the cell's, and its states, products and matrices are as many as the
cell's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.cells.base import Cell, Param, Step
from pararnn.cells.products import Matrix, Product, product
from pararnn.program.apart import call_outside_modes
from pararnn.program.derive import channels_of, example, flat
from pararnn.program.program import DERIVED, Program, check_unchanged, derived_program
from pararnn.program.record import BranchError, WriteError, record
from pararnn.program.tangent import BIAS, differentiate, mark_of, total
from pararnn.program.trace import erase_dead


class KnownProduct(NamedTuple):
    """Product of a step: indices of the state and of the matrix among states and params, and
    whether its transpose is meant."""

    state: int
    matrix: int
    transpose: bool


class Known(NamedTuple):
    """What a step reads of known states: its products, and the indices of the states that it reads
    elsewhere too."""

    products: tuple[KnownProduct, ...]
    states: tuple[int, ...]


_KNOWN: dict[str, Known | None] = {}


def known_of(program: Program) -> Known | None:
    """Return what a program's step reads of known states, cached; None for one without products,
    with products of anything but its states, or with matrices that are not only factors.

    Raises CellError where what the step reads has changed since the program was traced.
    """
    if program.structure is None or not (
        program.couples_channels and True in program.step.matrices
    ):
        return None
    if program.key not in _KNOWN:
        check_unchanged(program)
        _KNOWN[program.key] = call_outside_modes(_known, program.step)
    return _KNOWN[program.key]


def _known(step: Step) -> Known | None:
    """Find the products by a call in which they are constants: what it reads is read elsewhere."""
    tensors = example(step, (), channels_of(step)[0], torch.float32)
    found: dict[KnownProduct, None] = {}

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        states, params = tensors[: step.num_states], tensors[step.num_rows :]

        def multiply(x: Tensor, matrix: Tensor, transpose: bool) -> Tensor:
            pair = _index(states, x), _index(params, matrix)
            if None in pair:
                raise _OtherProductError
            found[KnownProduct(*pair, transpose)] = None  # type: ignore[arg-type]
            return torch.full(x.shape, 0.5, dtype=x.dtype)

        return flat(step, partial(step.by_ops, multiply=multiply))(*tensors)

    try:
        with torch.no_grad():
            graph = record(run, tensors)
    except (_OtherProductError, BranchError, WriteError):
        return None
    erase_dead(graph)
    read = [bool(node.users) for node in graph.nodes if node.op == "placeholder"]
    pairs = zip(read[step.num_rows :], step.matrices, strict=True)
    if not found or any(is_read and is_matrix for is_read, is_matrix in pairs):
        return None
    return Known(tuple(found), tuple(i for i in range(step.num_states) if read[i]))


class _OtherProductError(Exception):
    """A step multiplies something else than a state by a matrix."""


def _index(tensors: Sequence[Tensor], tensor: Tensor) -> int | None:
    return next((i for i, x in enumerate(tensors) if x is tensor), None)


def along(program: Program, moving: Collection[str]) -> Program:
    """Return the program of the tangents of a program that has `known_of`; cached.

    Its gates are the cell's. Its fields are the cell's, the states before a step that `known_of`
    names, all products, those with the tangents of matrices that are in `moving`, the tangents of
    fields that are, and those of gates if they are. Its params are the cell's, the tangents of
    others than matrices that are in `moving`, and those of biases for BIAS.

    Raises CellError where what the step reads has changed since the program was traced.
    """
    return derived_program(program, "along", moving, _step)


DERIVED["along"] = along


def _step(program: Program, moving: frozenset[str]) -> tuple[Step, tuple[int, int] | None]:
    """Return the step, and the channels and heads that it is traced for."""
    base, known = program.step, known_of(program)
    assert known is not None
    mark = mark_of(program, ("", "b", "p", "q"))
    matrices = dict(zip(program.params, base.matrices, strict=True))
    moves = [program.params[product.matrix] in moving for product in known.products]
    products = [f"p{mark}{i}" for i in range(len(moves))]
    of_matrices = [f"q{mark}{i}" for i, move in enumerate(moves) if move]
    vectors = [name for name in program.params if name in moving and not matrices[name]]
    of_steps, of_bias = not moving.isdisjoint(program.gates), BIAS in moving
    fields = [
        *program.fields,
        *(program.states[i] for i in known.states),
        *products,
        *of_matrices,
        *(f"{mark}{name}" for name in (*program.fields, *program.gates) if name in moving),
    ]
    params = {name: Param(param.kind) for name, param in base.cls.params.items()}
    params |= {f"{mark}{name}": params[name] for name in vectors}
    params |= {f"b{mark}{gate}": Param("D") for gate in program.gates if of_bias}

    def step(self: Any, state: Any, gate: Any, param: Any) -> tuple[Tensor, ...]:
        def tangents(record: Any, names: Sequence[str], among: Collection[str]) -> list[Any]:
            return [getattr(record, f"{mark}{n}") if n in among else None for n in names]

        of_states = tangents(state, program.states, program.states)
        of_gates = [
            total([getattr(record, prefix + name) for record, prefix in terms])
            for terms in [[(gate, mark)] * of_steps + [(param, f"b{mark}")] * of_bias]
            for name in program.gates
        ]
        # A state is two values, the known one, which the step reads, and an operand, of which only
        # the derivative counts: gradients by known products are not gradients by the state here.
        operands = [torch.zeros_like(x) for x in of_states]
        before = [
            getattr(gate, name) if i in known.states else torch.zeros_like(of_states[i])
            for i, name in enumerate(program.states)
        ]
        values = [
            *before,
            *(getattr(gate, name) for name in (*program.gates, *program.fields)),
            *(getattr(param, name) for name in program.params),
            *(getattr(gate, name) for name in products),
            *operands,
        ]
        directions = [
            *(x if i in known.states else None for i, x in enumerate(of_states)),
            *of_gates,
            *tangents(gate, program.fields, moving),
            *tangents(param, program.params, vectors),
            *(getattr(gate, f"q{mark}{i}") if move else None for i, move in enumerate(moves)),
            *of_states,
        ]
        counts = len(before), base.num_rows - len(before), base.num_params, len(moves), len(before)

        def function(values: Sequence[Any]) -> Sequence[Tensor]:
            rest = iter(values)
            states, inputs, params, products, operands = (
                [next(rest) for _ in range(count)] for count in counts
            )

            def given(
                matrix: int, multiply: Product, x: Tensor, tensor: Tensor, transpose: bool
            ) -> Tensor:
                state = _index(states, x)
                assert state is not None
                value = products[known.products.index(KnownProduct(state, matrix, transpose))]
                result: Tensor = _Given.apply(operands[state], value, tensor, multiply, transpose)
                return result

            def factor(matrix: int, value: Any) -> Any:
                if not base.matrices[matrix]:
                    return value
                # A plain call takes matrices 'D,D' as plain tensors.
                plain = not isinstance(value, Matrix)
                tensor, multiply = (value, product) if plain else (value._tensor, value._product)
                return Matrix(tensor, partial(given, matrix, multiply))

            return base.of_matrices(states, inputs, [*map(factor, range(len(params)), params)])

        return tuple(differentiate(function, values, directions)[1])

    members = {
        "__module__": base.cls.__module__,
        "is_derivative": True,
        "states": tuple(f"{mark}{name}" for name in program.states),
        "gates": program.gates,
        "fields": tuple(fields),
        "params": params,
        "step": step,
    }
    cls: type[Cell] = type(f"{program.cell_name}Tangent", (Cell,), members)
    return Step(cls, {}, base.training, base.sizes), program.sizes


class _Given(torch.autograd.Function):
    """A product whose value is known, with the derivative of one by the state, and by the value for
    what the matrix adds."""

    @staticmethod
    def forward(
        x: Tensor, value: Tensor, matrix: Tensor, multiply: Callable[..., Any], transpose: bool
    ) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, _, matrix, ctx.multiply, ctx.transpose = inputs
        ctx.save_for_backward(matrix)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (matrix,) = ctx.saved_tensors
        of_x, of_value, *_ = ctx.needs_input_grad
        product = ctx.multiply(grad, matrix, not ctx.transpose) if of_x else None
        return product, grad if of_value else None, None, None, None
