"""A stand-in for an engine that cuts time, on a CPU: Newton in PyTorch, and splits as asked."""

import copy

import torch

from pararnn.engines import newton_torch, table, tuned
from pararnn.engines.split import NO_REQUEST, plan_split
from pararnn.engines.tuned import Measured, Workload
from pararnn.program.program import program_of

CORES, STEPS, TILE = 16, 4, 32
CPU = torch.device("cpu")


def patch_engine(engine, **methods):
    """Return a copy of an engine with other methods."""
    own = copy.copy(engine)
    vars(own).update(methods)
    return own


class FakeNewton:
    """Takes the place of (newton, fused) on the CPU; `sweeps` is what its solves report."""

    def __init__(self, monkeypatch):
        self.requests, self.sweeps = [], 1
        real, engine = newton_torch.ENGINE, table.TABLE["newton", "fused", "cpu"]

        def forward(program, args):
            self.requests.append(("forward", *args.split))
            solution = real.forward(program, args)
            return solution._replace(info=torch.tensor([[self.sweeps, 0]]))

        def backward(program, args, *others):
            self.requests.append(("backward", *args.split))
            return real.backward(program, args, *others)

        def split(program, workload, request):
            _, (batch, steps, channels), dtype, *_ = workload
            columns = batch * -(-channels // TILE)
            return plan_split(steps, columns, dtype, STEPS, CORES, 1024, request)

        own = patch_engine(
            real, backend="fused", forward=forward, backward=backward, rank=engine.rank
        )
        vars(own).update(plan_split=split, cuts_time=True)
        monkeypatch.setitem(table.TABLE, ("newton", "fused", "cpu"), own)
        monkeypatch.setattr(tuned, "_RECORDS", {})

    def taken_by_auto(self, cell, size, split=NO_REQUEST, dtype=torch.float32):
        """Have `auto` take it for a size (B, T, D)."""
        workload = Workload(program_of(cell).key, size, dtype, CPU)
        tuned.remember(workload, [Measured("newton", "fused", split, 1.0)])
