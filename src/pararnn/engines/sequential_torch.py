"""(sequential, torch): the loop over time in plain PyTorch; any step, every transform."""

from __future__ import annotations

import torch

from pararnn.engines.base import Arguments, Engine, Solution
from pararnn.engines.boundaries import final_states, output_states, to_system
from pararnn.program import Program
from pararnn.solvers.sequential import unroll


def _forward(program: Program, args: Arguments, on_failure: str) -> Solution:
    system, bounds = to_system(program, args)
    states = unroll(system)
    info = args.gates.new_zeros((1, 2), dtype=torch.int64)
    return Solution(output_states(args, states), final_states(args, bounds, states), info)


ENGINE = Engine("sequential", "torch", _forward, None, lambda program: None)
