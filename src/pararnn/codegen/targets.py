"""Targets: one record for each device type that kernels are generated for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pararnn.base import device as devices
from pararnn.base.errors import EngineError
from pararnn.cells.base import Cell
from pararnn.codegen import cpp, cuda
from pararnn.codegen.nvrtc import capability_of
from pararnn.codegen.source import APPROXIMATE
from pararnn.program.program import Program

Jobs = dict[object, Callable[[], object]]
"""Compilations by the key of their result."""


@dataclass(frozen=True, eq=False)
class DeviceKernels:
    """Kernels of a device type.

    usual(program, cell, dtype, weight_dtype, device): jobs for the kernels of a layer's training
    and decoding. approximate: I/O dtypes whose kernels use the hardware's coarse functions.
    """

    usual: Callable[[Program, Cell, torch.dtype, torch.dtype, torch.device], Jobs]
    approximate: frozenset[torch.dtype] = frozenset()


@dataclass(frozen=True, eq=False, kw_only=True)
class Gpu(devices.Gpu):
    """A type of GPU, and its kernels.

    kernels(program, variant, capability): the kernels of a pass by name; EngineError if there are
    none.
    """

    kernels: Callable[[Program, cuda.Variant, tuple[int, int]], Mapping[str, Any]]


_FACTS = vars(devices.CUDA) | {"capability": capability_of}
CUDA = Gpu(**_FACTS, kernels=cuda.kernels_of)
TARGETS: Mapping[str, DeviceKernels] = {
    "cpu": DeviceKernels(cpp.usual),
    "cuda": DeviceKernels(cuda.usual, APPROXIMATE),
}
"""By the device's type."""


def target_of(device: torch.device) -> DeviceKernels:
    """Return the target of a device. Raises EngineError for types without kernels."""
    if device.type not in TARGETS:
        raise EngineError(
            f"kernels are generated for {' and '.join(TARGETS)} devices, got {device.type}: "
            "move the module, or use backend='torch'"
        )
    return TARGETS[device.type]


def approximate_dtypes(device: torch.device) -> frozenset[torch.dtype]:
    """Return the I/O dtypes whose kernels on a device use the hardware's coarse functions."""
    target = TARGETS.get(device.type)
    return frozenset() if target is None else target.approximate
