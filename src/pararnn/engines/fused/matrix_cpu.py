"""Schedule of matrix cells on the CPU: a task runs one head of one row, or of some rows."""

from __future__ import annotations

import torch

from pararnn.engines.arguments import Arguments
from pararnn.engines.fused import host
from pararnn.engines.fused.launch import Launch
from pararnn.engines.fused.matrix import MatrixSchedule, template_for
from pararnn.engines.fused.schedule import Layouts, Pass
from pararnn.program.program import Program


class MatrixCpu(host.OnCpu, MatrixSchedule):
    """Schedule of matrix cells on the CPU."""

    min_size = host.MIN_SIZE

    def cores(self, device: torch.device) -> int:
        return host.CORES

    def plan(self, program: Program, layouts: Layouts, args: Arguments) -> Pass:
        inputs = dict(zip(("threads", "openmp"), layouts.facts, strict=True))
        template = template_for(program, args, layouts, "cpp", inputs, {})
        return Pass(Launch(self.kernel(program, layouts, args), template), args.gates.shape[0])
