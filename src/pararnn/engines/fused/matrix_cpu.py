"""Schedule of matrix cells on the CPU: a task runs one head of one row, or of some rows."""

from __future__ import annotations

import math

import torch

from pararnn.codegen.families import interface_of
from pararnn.codegen.matrix import row_block
from pararnn.engines.arguments import Arguments
from pararnn.engines.fused import host
from pararnn.engines.fused.launch import Launch
from pararnn.engines.fused.matrix import MatrixSchedule, template_for
from pararnn.engines.fused.schedule import Layouts, Pass
from pararnn.program.program import Program

CACHED_NUMBERS = 8192
"""Values of parameters whose gradients stay in the cache."""


class MatrixCpu(host.OnCpu, MatrixSchedule):
    """Schedule of matrix cells on the CPU."""

    min_size = host.MIN_SIZE

    def cores(self, device: torch.device) -> int:
        return host.CORES

    def plan(self, program: Program, layouts: Layouts, args: Arguments) -> Pass:
        groups, (threads, openmp) = _groups(program, args), layouts.facts
        others = {"threads": threads, "openmp": openmp, "groups": groups}
        interface = interface_of(program, "cpp", self.solver)
        template = template_for(program, args, layouts, interface, others)
        return Pass(Launch(self.kernel(program, layouts, args), template), groups)


def _groups(program: Program, args: Arguments) -> int:
    """Return the groups of rows that a head's sums of gradients have in a backward pass, whatever
    the threads, as bits depend on them: as many of each sample.

    Sums of the gradients of large matrices leave the cache, which fewer groups write less often.
    """
    rows, heads = args.gates.shape[0], program.step.head.heads
    wanted = host.CORES // (1 + sum(program.param_numbers) // CACHED_NUMBERS)
    least = -(-rows // row_block(program, args.dtype))
    samples = math.prod(args.samples)
    return min(rows, samples * -(-max(least, -(-wanted // heads)) // samples))
