"""Check one solve against the numerics contract, as `verify` and the tests do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pararnn.cells.base import Cell
from pararnn.check.claims import Check, SolveChecks
from pararnn.check.matrix import check_matrix
from pararnn.check.oracle import Oracle
from pararnn.check.reference import differentiation
from pararnn.solve import one_gate, prepare

__all__ = ["Check", "SolveChecks", "check_solve", "check_solves"]


def check_solve(
    cell: Cell,
    gates: Tensor,
    initial_state: Tensor | Sequence[Tensor] | None = None,
    *,
    solver: str = "auto",
    backend: str = "auto",
    **options: Any,
) -> SolveChecks:
    """Solve forward and backward and hold the result against the contract.

    Arguments are those of `pararnn.solve` and of `check_solves`, which does it for several pairs.
    """
    return check_solves(cell, gates, initial_state, pairs=[(solver, backend)], **options)[0]


def check_solves(
    cell: Cell,
    gates: Tensor,
    initial_state: Tensor | Sequence[Tensor] | None = None,
    *,
    pairs: Sequence[tuple[str, str]],
    **options: Any,
) -> list[SolveChecks]:
    """Solve by each (solver, backend) and hold the results against the contract, pair by pair.

    Other arguments are those of `pararnn.solve` and of `Oracle.of`. The oracle is a loop over the
    Python step in float64 on the same inputs. Checked: the defect of every returned step, the
    forward error of states, final states and all gradients, the gradients at the returned states,
    and that nothing is non-finite where the sequential run in the same dtype is finite, or the
    other way round. Of matrix cells, whose states no solver keeps: see `check_matrix`.
    """
    if not cell.keeps_states:
        seed, scale = options.pop("seed", 0), options.pop("loss_scale", 1.0)
        call = prepare(cell, one_gate(cell, gates), initial_state, **options)
        with differentiation():
            return [check_matrix(cell, call, pair, seed, scale) for pair in pairs]
    with differentiation():
        oracle = Oracle.of(cell, gates, initial_state, **options)
        return [oracle.judge(oracle.run(*pair)) for pair in pairs]
