"""Engines of generated kernels on the CPU: compiled C++."""

from __future__ import annotations

from collections.abc import Mapping

from pararnn.engines.fused.elementwise_cpu import ElementwiseCpu
from pararnn.engines.fused.engine import FusedEngine
from pararnn.engines.fused.heads import AsMatrices
from pararnn.engines.fused.matrix_cpu import MatrixCpu
from pararnn.engines.fused.mixing_cpu import MixingCpu
from pararnn.engines.fused.schedule import Schedule
from pararnn.engines.fused.segments import SegmentsOfTime

_MATRICES = MatrixCpu()
SCHEDULES: Mapping[str, tuple[Schedule, ...]] = {
    "sequential": (ElementwiseCpu("sequential"), MixingCpu(), _MATRICES, AsMatrices(_MATRICES)),
    "newton": (ElementwiseCpu("newton"), SegmentsOfTime(_MATRICES)),
}
"""By solver. The first one that takes a program runs it."""
ENGINES = {solver: FusedEngine(solver, schedules) for solver, schedules in SCHEDULES.items()}
"""By solver."""
SEQUENTIAL, NEWTON = ENGINES["sequential"], ENGINES["newton"]
