"""NVRTC by cuda-core: compile CUDA C++ without a toolkit, and launch the kernels."""

from __future__ import annotations

import functools
import io
import re
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pararnn.base.device import CUDA, current_gpus, has_gpu
from pararnn.base.errors import EngineError
from pararnn.base.extras import installation

OLDEST = (8, 0)
"""Oldest compute capability for the kernels: the first one with asynchronous copies."""
CLUSTERS = (9, 0)
"""Oldest compute capability with clusters of blocks."""
DEFAULT_SHARED = 48 * 1024
"""Shared memory in bytes that a block may have without a request."""
MAX_CLUSTER = 16
"""Largest number of blocks in a cluster on any GPU."""

# Division and square root are within two units in the last place instead of correctly rounded: a
# third of the instructions. NaN, infinity and subnormal numbers keep their meaning.
OPTIONS: dict[str, Any] = {
    "std": "c++17",
    "prec_div": False,
    "prec_sqrt": False,
    "device_as_default_execution_space": True,  # older NVRTC need it for lambdas
}

_IMPORTS = threading.Lock()


class ToolchainError(EngineError):
    """Missing or failing tools for CUDA kernels. The message has the cure."""


def extra() -> str:
    """Return the extra of this package with the compiler for the installed PyTorch."""
    major = (torch.version.cuda or "13").partition(".")[0]
    return f"cu{major}"


def _missing(name: str, error: Exception) -> ToolchainError:
    return ToolchainError(f"CUDA kernels need {name} ({error}): {installation(extra())}")


@functools.cache
def toolchain() -> tuple[Any, Any]:
    """Return cuda.core and cuda.bindings.driver. Raises ToolchainError if they are missing."""
    try:
        # Its modules import one another: a second thread would see some half imported.
        with _IMPORTS:
            import cuda.core
            from cuda.bindings import driver
    except ImportError as error:
        raise _missing("cuda-core", error) from error
    return cuda.core, driver


@functools.cache
def identity() -> str:
    """Return the versions of the compiler. Raises ToolchainError if there is no NVRTC."""
    core, _ = toolchain()
    from cuda.bindings import nvrtc

    try:
        _, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # the loader has its own exceptions, by version
        raise _missing("NVRTC", error) from error
    return f"nvrtc {major}.{minor} cuda-core {core.__version__} {sorted(OPTIONS.items())}"


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the device's compute capability. Raises ToolchainError if it is too old or absent."""
    if not has_gpu():
        raise ToolchainError("there is no GPU that PyTorch can use (torch.cuda.is_available())")
    capability = CUDA.capability(device)
    if capability < OLDEST:
        raise ToolchainError(too_old(CUDA.name_of(device), capability))
    return capability


def too_old(name: str, capability: tuple[int, int]) -> str:
    """Return the message for a GPU older than OLDEST."""
    return (
        f"{name} has compute capability {capability[0]}.{capability[1]}; the kernels need "
        f"{OLDEST[0]}.{OLDEST[1]} or newer (A100, RTX 30): use backend='torch'"
    )


def architecture(capability: tuple[int, int]) -> str:
    """Return NVRTC's name of a compute capability."""
    return f"sm_{capability[0]}{capability[1]}"


def compile_cubin(source: Path, include: Path, output: Path, arch: str) -> str:
    """Compile one file into device code for `arch`, and return the report on resources.

    Raises ToolchainError with NVRTC's log.
    """
    identity()
    core, _ = toolchain()
    options = core.ProgramOptions(
        name=source.name, arch=arch, include_path=str(include), ptxas_options="-v", **OPTIONS
    )
    log = io.StringIO()
    try:
        program = core.Program(source.read_text(encoding="utf-8"), "c++", options)
        code = program.compile("cubin", logs=log)
    except Exception as error:  # cuda-core wraps NVRTC's failures in its own exceptions, by version
        message = "\n".join((log.getvalue() or str(error)).strip("\0 \n").splitlines()[:20])
        raise ToolchainError(
            f"NVRTC failed on generated code for {arch} ({identity()}): {message}\n"
            f"A newer NVRTC may help (pip install --upgrade --upgrade-strategy eager "
            f"'cuda-core[{extra()}]'), and backend='torch' does without one"
        ) from error
    output.write_bytes(code.code)
    return log.getvalue()


def resources(report: str) -> dict[str, dict[str, int]]:
    """Return registers, spilled bytes and shared memory of each kernel in a compiler's report."""
    kernels: dict[str, dict[str, int]] = {}
    for section in report.split("Compiling entry function '")[1:]:
        name = section.partition("'")[0]
        numbers = {}
        for resource, pattern in {
            "registers": r"Used (\d+) registers",
            "spilled": r"(\d+) bytes spill stores",
            "stack": r"(\d+) bytes stack frame",
            "shared": r"(\d+) bytes smem",
        }.items():
            match = re.search(pattern, section)
            numbers[resource] = int(match[1]) if match else 0
        kernels[name] = numbers
    return kernels


class Kernel:
    """Kernel on a GPU."""

    def __init__(self, module: Any, name: str, block: tuple[int, int], shared: int = 0) -> None:
        _, self.driver = toolchain()
        self.name, self.block, self.shared = name, block, shared
        self.module = module  # keeps the code loaded
        self.kernel = module.get_kernel(name)
        self.function = self.driver.CUfunction(int(self.kernel.handle))

    def __call__(
        self,
        grid: tuple[int, int],
        words: Sequence[int],
        stream: int,
        together: bool = False,
        cluster: int = 0,
    ) -> None:
        """Launch on the current device.

        `words`: the one argument, 64 bits each. `together`: all blocks at the same time, so that
        they may wait for each other (a cooperative launch). `cluster`: number of blocks in a
        cluster, which run at the same time. Raises EngineError with the driver's message if the
        launch is refused.
        """
        argument = array("q", words)  # an array of ctypes takes longer to make than the launch
        arguments = array("Q", [argument.buffer_info()[0]])
        address = arguments.buffer_info()[0]
        if self.shared > DEFAULT_SHARED:
            self._allow_shared(*current_gpus())
        if cluster:
            config = self._cluster_config(grid, cluster, stream)
            call = functools.partial(
                self.driver.cuLaunchKernelEx, config, self.function, address, 0
            )
        else:
            launch = (self.function, *grid, 1, *self.block, 1, self.shared, stream, address)
            call = functools.partial(self.driver.cuLaunchCooperativeKernel, *launch)
            if not together:
                call = functools.partial(self.driver.cuLaunchKernel, *launch, 0)
        self._in_context(call, f"launching the {self.name} kernel")

    @functools.lru_cache(maxsize=1024)  # noqa: B019 - kernels live as long as the process
    def _cluster_config(self, grid: tuple[int, int], cluster: int, stream: int) -> Any:
        config, attribute = self.driver.CUlaunchConfig(), self.driver.CUlaunchAttribute()
        attribute.id = self.driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = cluster, 1, 1
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = *self.block, 1
        config.hStream, config.attrs, config.numAttrs = stream, [attribute], 1
        config.sharedMemBytes = self.shared
        return config

    @functools.cache  # noqa: B019 - kernels live as long as the process
    def _allow_shared(self, device: int) -> None:
        """Allow a block more shared memory on a device than it has without a request."""
        attribute = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        kernel = self.driver.CUkernel(int(self.kernel.handle))
        allow = functools.partial(
            self.driver.cuKernelSetAttribute, attribute, self.shared, kernel, device
        )
        self._in_context(allow, f"allowing the {self.name} kernel {self.shared} bytes of memory")

    @functools.cache  # noqa: B019 - kernels live as long as the process
    def most_in_cluster(self, device: int) -> int:
        """Return the largest number of blocks in a cluster on the current device."""
        attribute = self.driver.CUfunction_attribute
        attribute = attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        kernel = self.driver.CUkernel(int(self.kernel.handle))
        allow = functools.partial(self.driver.cuKernelSetAttribute, attribute, 1, kernel, device)
        self._in_context(allow, f"allowing the {self.name} kernel large clusters")
        if self.shared > DEFAULT_SHARED:
            self._allow_shared(*current_gpus())
        config = self._cluster_config((MAX_CLUSTER, 1), 1, 0)
        ask = functools.partial(
            self.driver.cuOccupancyMaxPotentialClusterSize, self.function, config
        )
        return int(self._in_context(ask, f"asking for the {self.name} kernel's clusters")[0])

    @functools.cache  # noqa: B019 - kernels live as long as the process
    def blocks_a_core(self) -> int:
        """Return the number of blocks that a multiprocessor of the current device holds at once."""
        if self.shared > DEFAULT_SHARED:  # without the permission no block would count
            self._allow_shared(*current_gpus())
        threads = self.block[0] * self.block[1]
        occupancy = self.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
        call = functools.partial(occupancy, self.function, threads, self.shared)
        return int(self._in_context(call, f"asking for the {self.name} kernel's occupancy")[0])

    def _in_context(self, call: Any, action: str) -> Any:
        status, *result = call()
        if status == self.driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            # A thread of PyTorch that has not called CUDA yet, such as autograd's.
            self._enter_context()
            status, *result = call()
        self._check(status, action)
        return result

    def _enter_context(self) -> None:
        """Enter the context that PyTorch uses on the current device."""
        (device,) = current_gpus()
        status, context = self.driver.cuDevicePrimaryCtxRetain(device)
        self._check(status, "finding the device's context")
        (status,) = self.driver.cuCtxSetCurrent(context)
        self.driver.cuDevicePrimaryCtxRelease(device)  # PyTorch keeps it alive
        self._check(status, "entering the device's context")

    def _check(self, status: Any, action: str) -> None:
        if status == self.driver.CUresult.CUDA_SUCCESS:
            return
        _, text = self.driver.cuGetErrorString(status)
        raise EngineError(
            f"{action} failed: {text.decode()} ({status.name}). If an earlier kernel is to blame, "
            "CUDA_LAUNCH_BLOCKING=1 shows which"
        )


def load_module(code: bytes) -> Any:
    """Load device code for any device that it was compiled for."""
    core, _ = toolchain()
    return core.ObjectCode.from_cubin(code)
