"""(sequential, torch): the loop over time in plain PyTorch; any step, every transform."""

from __future__ import annotations

import torch

from pararnn.engines.arguments import Arguments, Solution
from pararnn.engines.engine import Engine
from pararnn.engines.forward_time import output_states, solve_heads, to_system
from pararnn.engines.rule import Rank, rank_in_torch
from pararnn.engines.tuned import Workload
from pararnn.program.program import Program
from pararnn.solvers.boundaries import final_states
from pararnn.solvers.sequential import unroll_states


class SequentialTorch(Engine):
    """Loop that autograd differentiates."""

    solver, backend, has_backward = "sequential", "torch", False

    def forward(self, program: Program, args: Arguments) -> Solution:
        if not program.keeps_states:
            output, last = solve_heads(program, args)
            return Solution((output,), last, args.gates.new_zeros((1, 2), dtype=torch.int64))
        system = to_system(program, args)
        states = unroll_states(system)
        info = args.gates.new_zeros((1, 2), dtype=torch.int64)
        final = final_states(args.initial, system.boundaries, states)
        return Solution(output_states(args, states), final, info)

    def rank(self, program: Program, workload: Workload) -> tuple[Rank, str]:
        return rank_in_torch(self.solver, program, workload.size, workload.device)


ENGINE = SequentialTorch()
