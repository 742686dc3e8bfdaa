"""Engines that `autotune` measures and `explain` predicts: the plausible ones for a workload."""

from __future__ import annotations

from pararnn.engines.engine import Engine
from pararnn.engines.rule import Size
from pararnn.engines.table import PAIRS, choose, find, why_not
from pararnn.engines.tuned import Workload
from pararnn.program.program import Program, program_by_key

MOST_JACOBIANS = 2**28
"""Entries of dense Jacobians over a whole sequence, above which Newton is not tried."""


def engines_for(workload: Workload, solver: str = "auto", backend: str = "auto") -> list[Engine]:
    """Return the engines that a request allows, the rule's choice first.

    Each solver has its engine of fused kernels, or its others if there is none.
    """
    program = program_by_key(workload.key)
    size, dtype, device = workload.size, workload.dtype, workload.device
    rule = choose(program, size, dtype, device, solver, backend, follow_tuned=False).engine()
    asked = [p for p in PAIRS if solver in ("auto", p[0]) and backend in ("auto", p[1])]
    allowed = [pair for pair in asked if why_not(program, pair, dtype, device) is None]
    engines = {(rule.solver, rule.backend): rule}
    for pair in allowed:
        engine = find(*pair, device)
        assert engine is not None  # by why_not
        if pair[1] == "fused" or (pair[0], "fused") not in allowed:
            if pair[0] == "newton" and jacobian_entries(program, size) > MOST_JACOBIANS:
                continue
            engines[pair] = engine
    return list(engines.values())


def jacobian_entries(program: Program, size: Size) -> int:
    """Return the number of entries of all Jacobians' dense blocks."""
    batch, steps, channels = size
    return batch * steps * program.num_states**2 * channels * program.coupling.reach(channels)
