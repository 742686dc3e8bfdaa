"""Engines of generated kernels on a type of GPU."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from pararnn.codegen.elementwise_cuda import INFO_SLOTS
from pararnn.codegen.targets import CUDA, Gpu
from pararnn.engines.fused.clusters import ClusterCuda
from pararnn.engines.fused.elementwise_cuda import ElementwiseCuda
from pararnn.engines.fused.engine import FusedEngine
from pararnn.engines.fused.heads import AsMatrices
from pararnn.engines.fused.matrix_cuda import MatrixCuda
from pararnn.engines.fused.mixing_cuda import MixingCuda
from pararnn.engines.fused.schedule import Schedule
from pararnn.engines.fused.segments import SegmentsOfTime


@cache
def schedules_of(gpu: Gpu) -> Mapping[str, tuple[Schedule, ...]]:
    """Return the schedules of a type of GPU by solver; the first that takes a program runs it."""
    clusters, matrices = ClusterCuda(gpu), MatrixCuda(gpu)
    return {
        "sequential": (
            ElementwiseCuda("sequential", gpu),
            MixingCuda(gpu),
            clusters,
            matrices,
            AsMatrices(clusters, matrices),
        ),
        "newton": (ElementwiseCuda("newton", gpu), SegmentsOfTime(matrices, INFO_SLOTS["newton"])),
    }


class GpuEngine(FusedEngine):
    """Engine of a solver on a type of GPU."""

    def __init__(self, solver: str, gpu: Gpu) -> None:
        super().__init__(solver, schedules_of(gpu)[solver])


ENGINES = {solver: GpuEngine(solver, CUDA) for solver in schedules_of(CUDA)}
"""By solver."""
SEQUENTIAL, NEWTON = ENGINES["sequential"], ENGINES["newton"]
