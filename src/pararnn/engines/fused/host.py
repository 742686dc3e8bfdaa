"""The CPU as a target of schedules: its kernels, and the threads that they run on."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from pararnn.base.private import constant_in_graphs
from pararnn.codegen.cpp import kernels_of
from pararnn.codegen.source import source_file
from pararnn.engines.arguments import Arguments
from pararnn.engines.fused.schedule import KernelSchedule, Layouts
from pararnn.program.program import Program

CORES = 16
"""Cores for which splits are planned, at WARPS_A_CORE segments each: bits do not depend on threads.
"""
MIN_SIZE = 256
"""Least steps of a segment: below, its burn-in takes more than a fifth of its time."""


class OnCpu(KernelSchedule):
    """Schedule for the CPU."""

    def build(self, program: Program, dtype: torch.dtype, compiles: bool = True) -> None:
        if compiles:
            kernels_of(program, dtype, self.solver)
        else:
            source_file(program, dtype, "cpp", self.solver)

    def facts(self, *call: Any) -> tuple[int, int]:
        """Return PyTorch's number of threads, and the address of its OpenMP entry."""
        return torch.get_num_threads(), openmp()

    def kernel(self, program: Program, layouts: Layouts, args: Arguments) -> Callable[..., None]:
        """Return the kernel of a pass."""
        kernels = kernels_of(program, args.gates.dtype, self.solver)
        return kernels.forward if layouts.gates is None else kernels.backward


@constant_in_graphs
def threads_as_constant() -> int:
    """Return PyTorch's number of threads, also in compiled regions."""
    return torch.get_num_threads()


@cache
def openmp() -> int:
    """Return the address of PyTorch's OpenMP entry, 0 where it has none that we can call."""
    if not torch.backends.openmp.is_available():
        return 0
    entry = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return 0 if entry is None else ctypes.cast(entry, ctypes.c_void_p).value or 0
