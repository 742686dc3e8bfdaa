"""Engines whose whole solve is one generated kernel: a solver, and its schedules for a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pararnn.codegen.families import why_no_kernels
from pararnn.engines.arguments import Arguments, Gradients, Solution, TensorSize
from pararnn.engines.engine import Engine
from pararnn.engines.fused.schedule import Schedule
from pararnn.engines.rule import Rank
from pararnn.engines.split import Split, SplitRequest
from pararnn.engines.tuned import Workload
from pararnn.program.program import Program


class FusedEngine(Engine):
    """Engine of one solver, which runs a program by the first schedule that takes it."""

    backend = "fused"
    completes = True
    builds = True

    def __init__(self, solver: str, schedules: Sequence[Schedule]) -> None:
        self.solver, self.schedules = solver, tuple(schedules)
        self.cuts_time = any(schedule.cuts_time for schedule in schedules)
        self.info_rows = max(schedule.info_rows for schedule in schedules)

    def find(self, program: Program) -> Schedule | None:
        """Return the schedule that runs a program, or None."""
        for schedule in self.schedules:
            if schedule.takes(program):
                return schedule
        return None

    def schedule(self, program: Program) -> Schedule:
        """Return the schedule that runs a program, which has one."""
        schedule = self.find(program)
        assert schedule is not None
        return schedule

    def _cached(self, program: Program, args: Arguments) -> Schedule:
        return args.signature.cache((self, program), self.schedule, program)

    def why_not(self, program: Program) -> str | None:
        schedule = self.find(program)
        if schedule is None:
            return why_no_kernels(program, self.solver)
        return schedule.why_not(program)

    def rank(self, program: Program, workload: Workload) -> tuple[Rank, str]:
        schedule = self.find(program)
        if schedule is None:
            return Rank.FEW_SEGMENTS, "it was requested"
        return schedule.rank(program, workload)

    def sums_samples(self, program: Program) -> bool:
        return self.schedule(program).sums_samples(program)

    def can_save_values(self, program: Program, dtype: torch.dtype) -> bool:
        return self.schedule(program).can_save_values(program, dtype)

    def stored(self, program: Program, args: Arguments) -> list[TensorSize]:
        return self.schedule(program).stored(program, args)

    def linearises_returned(self, program: Program) -> bool:
        return self.schedule(program).linearises_returned(program)

    def build(self, program: Program, dtype: torch.dtype, compiles: bool = True) -> None:
        self.schedule(program).build(program, dtype, compiles)

    def plan_split(self, program: Program, workload: Workload, request: SplitRequest) -> Split:
        return self.schedule(program).plan_split(program, workload, request)

    def check_backward(self, program: Program, args: Arguments) -> None:
        schedule = self._cached(program, args)
        key = (schedule, program, "backward")
        args.signature.cache(key, schedule.check_backward, program, args)

    def forward(self, program: Program, args: Arguments) -> Solution:
        return self._cached(program, args).forward(program, args)

    def backward(self, program: Program, args: Arguments, *of_forward: Any) -> Gradients:
        return self._cached(program, args).backward(program, args, *of_forward)
