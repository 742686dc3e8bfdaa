"""(sequential, torch): the loop over time in plain PyTorch; any step, every transform."""

from __future__ import annotations

from functools import partial

import torch

from pararnn.engines.arguments import Arguments, Engine, Solution
from pararnn.engines.forward_time import final_states, output_states, to_system
from pararnn.engines.rule import pays_in_torch
from pararnn.program.program import Program
from pararnn.solvers.sequential import unroll_states


def _forward(program: Program, args: Arguments) -> Solution:
    system, edges = to_system(program, args)
    states = unroll_states(system)
    info = args.gates.new_zeros((1, 2), dtype=torch.int64)
    return Solution(output_states(args, states), final_states(args, edges, states), info)


_PAYS = partial(pays_in_torch, "sequential")
ENGINE = Engine("sequential", "torch", _forward, None, lambda program: None, _PAYS)
