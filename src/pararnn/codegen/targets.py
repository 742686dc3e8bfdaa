"""One record for each kind of device: how kernels for it are made and run, and its clock.

What asks a device for something asks its record; no other place looks at a device's type for that.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pararnn.cells.base import Cell
from pararnn.codegen import compiler, cpp, cuda, nvrtc
from pararnn.program.program import Program

Jobs = dict[object, Callable[[], object]]
"""What is to be compiled: calls, by what they make."""


@dataclass(frozen=True, eq=False)
class Target:
    """A kind of device.

    title(device): its name, as measurements should quote it. wait(device): until it has done all
    that it was given. numbered(device): with its number. require(right, message, values): see
    `pararnn.sequences.require`. send(tensor): starts a copy to the host, and returns what says it,
    or None while it is on its way. capturing(): whether what runs now is recorded and not done.
    usual(program, cell, dtype, weight_dtype, device): the kernels of a layer's training and
    decoding. approximate: the I/O dtypes whose kernels take the hardware's coarse functions.
    """

    title: Callable[[torch.device], str]
    wait: Callable[[torch.device], None]
    numbered: Callable[[torch.device], torch.device]
    require: Callable[[Tensor, str, Tensor], None]
    send: Callable[[Tensor], Callable[[], Tensor | None]]
    capturing: Callable[[], bool]
    usual: Callable[[Program, Cell, torch.dtype, torch.dtype, torch.device], Jobs]
    approximate: frozenset[torch.dtype]


@dataclass(frozen=True, eq=False)
class Gpu(Target):
    """A kind of device that the CUDA kernels run on.

    kernels(program, variant, capability): those of a pass by name; EngineError where there are
    none. cores(device): its multiprocessors. call(device, function, *args, **options): with the
    device as the current one. stream(device): the address of the current one.
    """

    kernels: Callable[[Program, cuda.Variant, tuple[int, int]], Mapping[str, Any]]
    capability: Callable[[torch.device], tuple[int, int]]
    cores: Callable[[torch.device], int]
    call: Callable[..., Any]
    stream: Callable[[torch.device], int]


def _processor(device: torch.device) -> str:
    named = compiler.cpu_facts().get("model name")
    return named or platform.processor() or platform.machine()


def _raise_unless(right: Tensor, message: str, values: Tensor) -> None:
    if not right:
        raise ValueError(f"{message}, got {values.tolist()}")


def _numbered(device: torch.device) -> torch.device:
    if device.index is None and torch.cuda.is_available():
        return torch.device(device.type, torch.cuda.current_device())
    return device


def _copied_later(tensor: Tensor) -> Callable[[], Tensor | None]:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))
    return lambda: host if event.query() else None


def _on_device(
    device: torch.device, function: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    if device.index == torch.cuda.current_device():
        return function(*args, **options)
    with torch.cuda.device(device):
        return function(*args, **options)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _stream(device: torch.device) -> int:
    # torch.cuda.current_stream makes a Stream object, which takes longer than the launch.
    return torch._C._cuda_getCurrentRawStream(device.index)


CPU = Target(
    title=_processor,
    wait=lambda device: None,
    numbered=lambda device: device,
    require=_raise_unless,
    send=lambda tensor: lambda: tensor,
    capturing=lambda: False,
    usual=cpp.usual,
    approximate=frozenset(),
)
CUDA = Gpu(
    title=torch.cuda.get_device_name,
    wait=torch.cuda.synchronize,
    numbered=_numbered,
    require=lambda right, message, values: torch._assert_async(right, message),  # reads nothing
    send=_copied_later,
    capturing=torch.cuda.is_current_stream_capturing,
    usual=cuda.usual,
    approximate=cuda.APPROXIMATE,
    kernels=cuda.kernels_of,
    capability=nvrtc.capability_of,
    cores=_multiprocessors,
    call=_on_device,
    stream=_stream,
)
META = replace(CPU, require=lambda right, message, values: None)  # there is nothing to look at
TARGETS: Mapping[str, Target] = {"cpu": CPU, "cuda": CUDA, "meta": META}
"""By the device's type."""


def target_of(device: torch.device) -> Target:
    """The record of a device; others are asked as the CPU is, for PyTorch runs on them alone."""
    return TARGETS.get(device.type, CPU)
