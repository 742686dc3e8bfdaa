"""Devices: the facts and operations of each device type, in one record.

No other module compares a device's type or calls `torch.cuda`.
"""

from __future__ import annotations

import functools
import gc
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pararnn.base.private import assert_async, raw_stream

_CAPTURE = Lock()
"""One capture at a time: a capture may begin by waiting for the whole GPU, which breaks another."""
LEAST_FREE = 2**30
"""Bytes that a GPU's driver has left for a recording, beside as many as are cached."""


class Copy(Protocol):
    """A copy to the host that is under way: a call returns it, or None before it has arrived."""

    def __call__(self, wait: bool = False) -> Tensor | None:
        """wait: until it has arrived."""


@dataclass(frozen=True, eq=False, kw_only=True)
class DeviceType:
    """A type of device.

    name_of(device): its name, for measurements. wait(device): until it has done all its work.
    with_index(device): the same device with its index. require(condition, message, values): see
    `pararnn.sequences.require`. send(tensor): start a `Copy` to the host. capturing(): True if the
    current work is recorded into a graph. threads(): CPU threads of PyTorch where they matter, or
    None. memory(device): its bytes, None where they are not known.
    """

    name_of: Callable[[torch.device], str]
    wait: Callable[[torch.device], None]
    with_index: Callable[[torch.device], torch.device]
    require: Callable[[Tensor, str, Tensor], None]
    send: Callable[[Tensor], Copy]
    capturing: Callable[[], bool]
    threads: Callable[[], int | None]
    memory: Callable[[torch.device], int | None] = lambda device: None
    computes: bool = True
    """False for the meta device, whose tensors have no values."""
    accelerator: bool = False
    """True for devices with separate memory, fused optimisers and graphs."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Gpu(DeviceType):
    """A type of GPU.

    capability(device): its compute capability. cores(device): its multiprocessors. call(device,
    function, *args, **options): call with the device as the current one. stream(device): address of
    the current stream. capture(device, memory): record a graph, see `_cuda_capture`.
    graph_memory(): a name of memory that graphs share. side_stream(device): run on another stream,
    with waits before and after. new_stream(device): a reusable context manager that runs on a new
    stream. peak_memory(): largest number of bytes allocated on the current device.
    """

    capability: Callable[[torch.device], tuple[int, int]]
    cores: Callable[[torch.device], int]
    call: Callable[..., Any]
    stream: Callable[[torch.device], int]
    capture: Callable[..., AbstractContextManager[Callable[[], None]]]
    graph_memory: Callable[[], Any]
    side_stream: Callable[[torch.device], AbstractContextManager[None]]
    new_stream: Callable[[torch.device], Callable[[], AbstractContextManager[Any]]]
    peak_memory: Callable[[], int]


def cpu_facts() -> dict[str, str]:
    """Return Linux's facts about the first core, by name; other cores are alike."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _cpu_name(device: torch.device) -> str:
    return cpu_facts().get("model name") or platform.processor() or platform.machine()


def _cpu_memory(device: torch.device) -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        return None


def _raise_unless(condition: Tensor, message: str, values: Tensor) -> None:
    if not condition:
        raise ValueError(f"{message}, got {values.tolist()}")


def _cuda_with_index(device: torch.device) -> torch.device:
    if device.index is None and has_gpu():
        return torch.device(device.type, torch.cuda.current_device())
    return device


def _cuda_send(tensor: Tensor) -> Copy:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))

    def copy(wait: bool = False) -> Tensor | None:
        if wait:
            event.synchronize()
        return host if wait or event.query() else None

    return copy


def _cuda_call(
    device: torch.device, function: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    if device.index == torch.cuda.current_device():
        return function(*args, **options)
    with torch.cuda.device(device):
        return function(*args, **options)


@functools.cache
def _cuda_cores(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _cuda_stream(device: torch.device) -> int:
    # torch.cuda.current_stream makes a Stream object, which takes longer than the launch.
    return raw_stream(device.index)


@functools.cache
def _capture_stream(device: torch.device, replay_stream: int) -> torch.cuda.Stream:
    """Return the stream that captures for a stream of the device.

    cuBLAS keeps a workspace of 32 MiB for each stream that it has ever run on, and recorded
    products hold its address. So only captures whose replays wait for one another share a stream.
    PyTorch's default capture stream may be another GPU's.
    """
    return torch.cuda.Stream(device)


@contextmanager
def _cuda_capture(device: torch.device, memory: Any = None) -> Iterator[Callable[[], None]]:
    """Record the block as a graph, without running it, and yield its replay.

    memory: of `graph_memory`, shared by graphs whose replays wait for one another; a tensor that is
    referred to has its own bytes of it. None is the graph's own. Other threads, such as loaders of
    data, may use the GPU meanwhile.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), _CAPTURE:
        _make_room()
        stream = _capture_stream(device, torch.cuda.current_stream().cuda_stream)
        try:
            with _record_into(graph, stream, memory):
                yield graph.replay
        except BaseException:
            # PyTorch's generator stays in the middle of a recording that failed, and every later
            # random number of the process would raise; another recording brings it to the end.
            with _record_into(torch.cuda.CUDAGraph(), stream):
                torch.empty(1, device=device).zero_()
            raise


@contextmanager
def _record_into(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, memory: Any = None
) -> Iterator[None]:
    """Enter a stream, and record its work into a graph.

    Python collects no garbage meanwhile: what frees an older graph of a reference cycle may call
    what a recording does not permit.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=memory, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
    finally:
        if collects:
            gc.enable()


def _make_room() -> None:
    """Give cached memory back to the driver where a recording, which cannot do so, may need it.

    `torch.cuda.graph` always does, and what runs next allocates all of it anew.
    """
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if torch.cuda.mem_get_info()[0] < cached + LEAST_FREE:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@contextmanager
def _cuda_side_stream(device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)


def _cuda_new_stream(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    return functools.partial(torch.cuda.stream, torch.cuda.Stream(device))


CPU = DeviceType(
    name_of=_cpu_name,
    wait=lambda device: None,
    with_index=lambda device: device,
    require=_raise_unless,
    send=lambda tensor: lambda wait=False: tensor,
    capturing=lambda: False,
    threads=torch.get_num_threads,
    memory=_cpu_memory,
)
CUDA = Gpu(
    name_of=torch.cuda.get_device_name,
    wait=torch.cuda.synchronize,
    with_index=_cuda_with_index,
    require=lambda condition, message, values: assert_async(condition, message),  # no read
    send=_cuda_send,
    capturing=torch.cuda.is_current_stream_capturing,
    threads=lambda: None,
    memory=lambda device: torch.cuda.get_device_properties(device).total_memory,
    accelerator=True,
    capability=torch.cuda.get_device_capability,
    cores=_cuda_cores,
    call=_cuda_call,
    stream=_cuda_stream,
    capture=_cuda_capture,
    graph_memory=torch.cuda.graph_pool_handle,
    side_stream=_cuda_side_stream,
    new_stream=_cuda_new_stream,
    peak_memory=torch.cuda.max_memory_allocated,
)
META = replace(CPU, require=lambda condition, message, values: None, computes=False)
OTHER = replace(
    CPU,
    name_of=str,
    wait=torch.accelerator.synchronize,
    threads=lambda: None,
    memory=lambda device: None,
)
"""Devices that only PyTorch's own operations run on, such as mps and xpu."""
TYPES: Mapping[str, DeviceType] = {"cpu": CPU, "cuda": CUDA, "meta": META}
"""By the device's type."""


def type_of(device: torch.device) -> DeviceType:
    """Return the record of a device."""
    return TYPES.get(device.type, OTHER)


def upload(
    values: Sequence[Any] | np.ndarray[Any, Any],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return numbers as a tensor on a device; the host waits for nothing that runs there."""
    host = torch.tensor(values, dtype=dtype)  # a copy of arrays, which may be written at once
    if type_of(device).accelerator:
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def why_no_memory(nbytes: int, device: torch.device) -> str | None:
    """Return why a device cannot hold so many bytes, None if its memory is as large."""
    memory = type_of(device).memory(device)
    if memory is None or nbytes <= memory:
        return None
    return f"{nbytes} bytes on {device}, whose memory is {memory}"


def has_gpu() -> bool:
    """Return True if PyTorch can use a GPU, without initialising it."""
    return torch.cuda.is_available()


def current_gpus() -> list[int]:
    """Return the index of the current GPU in a list, which is empty without a GPU."""
    return [torch.cuda.current_device()] if has_gpu() else []


def process_device(index: int) -> torch.device:
    """Make a GPU the current one, and return it; the CPU without a GPU."""
    if not has_gpu():
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def default_device() -> str:
    """Return the device type that commands use by default: cuda with a GPU, otherwise cpu."""
    return "cuda" if has_gpu() else "cpu"


def parse_device(text: str) -> torch.device:
    """Return the device that a command names. Raises ValueError for others than cpu and cuda, and
    for a GPU that is absent."""
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ValueError(f"{text!r} is not a device; use cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{text!r} is not supported; use cpu or cuda")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"{text!r} is not here: PyTorch sees {count} CUDA devices")
    return device


def collectives() -> str:
    """Return the backends of process groups, as `torch.distributed` takes them."""
    return "cpu:gloo,cuda:nccl" if has_gpu() else "gloo"


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that draws on a device take where none is given."""
    if device.type == "cpu":
        return torch.default_generator
    default: torch.Generator = torch.get_device_module(device).default_generators[device.index]
    return default
