"""CUDA kernels on a CPU: the engines for CUDA, with kernels compiled with emulator/machine.h.

Everything outside of that header is what runs on a GPU: the other headers, the emitted functions,
the words of a launch, the split of time, and the protocol between segments.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from precompiled import system_header

import pararnn
from pararnn.base import cache as disk
from pararnn.base.device import CPU
from pararnn.codegen import headers, targets
from pararnn.codegen.compiler import compiler_command, compiler_identity, cpu_identity
from pararnn.codegen.cuda import Variant, blocks_of, code_name, source_of
from pararnn.codegen.elementwise_cuda import SOLVERS
from pararnn.codegen.nvrtc import MAX_CLUSTER
from pararnn.codegen.targets import Gpu
from pararnn.engines import table
from pararnn.engines.fused import cuda as fused_cuda
from pararnn.engines.fused.chunks import ChunksEngine

EMULATOR = Path(__file__).parent / "emulator"
CORES, BLOCKS_A_CORE = 4, 16
# Hidden: a name that two libraries share would be one shared memory for both.
FLAGS = ["-std=c++17", "-Og", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-w"]
FLAGS += ["-fvisibility=hidden", "-fPIC", "-pthread"]
# A checked longjmp refuses another fiber's stack; some compilers check by default.
FLAGS += ["-U_FORTIFY_SOURCE"]


class Kernel:
    """Stands in for nvrtc.Kernel."""

    def __init__(
        self, library: ctypes.CDLL, name: str, block: tuple[int, int], shared: int = 0
    ) -> None:
        self.run = getattr(library, f"launch_{name}")
        self.run.restype = ctypes.c_char_p
        self.block = block

    def __call__(
        self,
        grid: tuple[int, int],
        words: Sequence[int],
        stream: int,
        together: bool = False,
        cluster: int = 0,
    ) -> None:
        problem = (ctypes.c_int64 * len(words))(*words)
        at_once = cluster or (grid[0] * grid[1] if together else 1)
        failure = self.run(problem, *grid, *self.block, at_once)
        assert failure is None, failure.decode()

    def most_in_cluster(self, device: int) -> int:
        return MAX_CLUSTER

    def blocks_a_core(self) -> int:
        return BLOCKS_A_CORE


def _run(*arguments: str | Path) -> None:
    command = [*compiler_command(), *FLAGS, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[:4000]


def _build(file: Path, out: Path) -> None:
    files = [EMULATOR / "fibers.h", EMULATOR / "machine.h"]
    system = system_header("emulated-system", files, FLAGS)
    with tempfile.TemporaryDirectory() as folder:
        include = Path(folder)
        shutil.copytree(headers.KERNELS, include, dirs_exist_ok=True)
        shutil.copytree(EMULATOR, include / "cuda", dirs_exist_ok=True)
        _run("-shared", "-include", system, f"-I{include / 'cuda'}", file, "-o", out)


def _launcher(name: str) -> str:
    return (
        f'extern "C" __attribute__((visibility("default"))) const char* launch_{name}'
        "(const void* problem, int grid_x, int grid_y, int x, int y, int together) {\n"
        f"  return emulator::launch({name}, problem, {{grid_x, grid_y}}, {{x, y}}, together);\n}}\n"
    )


@cache
def kernels_of(program, variant: Variant, capability: tuple[int, int]) -> dict[str, Kernel]:
    """Stands in for codegen.cuda.kernels_of."""
    blocks = blocks_of(program, variant)
    source = source_of(program, variant) + "".join(_launcher(name) for name in blocks)
    own = "\n".join(file.read_text() for file in sorted(EMULATOR.rglob("*.h")))
    machine = (compiler_identity(*compiler_command()), *FLAGS, cpu_identity())
    family = code_name(program, variant.solver)
    key = "\n".join((source, headers.text("cuda", family), own, *machine))
    library = disk.load(disk.CPP, f"emulated-{program.cell_name}", key, source, _build)
    return {name: Kernel(library, name, *block) for name, block in blocks.items()}


def recorded(device: Gpu) -> tuple[Gpu, list[Variant]]:
    """Return a device that notes the variants of kernels that it loads, and their list."""
    variants: list[Variant] = []

    def load(program, variant: Variant, capability: tuple[int, int]) -> dict[str, Kernel]:
        variants.append(variant)
        return kernels_of(program, variant, capability)

    return replace(device, kernels=load), variants


class _NoNvrtc:
    """Mixin of engines whose kernels need no NVRTC."""

    builds = False

    def build(self, program, dtype, compiles=True):
        super().build(program, dtype, compiles=False)


class Emulated(_NoNvrtc, fused_cuda.GpuEngine):
    """Engine of a loop, or of segments of time."""


class EmulatedChunks(_NoNvrtc, ChunksEngine):
    """Engine of chunks."""


def gpu(capability: tuple[int, int] = (9, 0), cores: int = CORES) -> Gpu:
    """Return an emulated GPU: a CPU that runs a GPU's kernels."""
    own = {
        "kernels": kernels_of,
        "capability": lambda device: capability,
        "cores": lambda device: cores,
        "call": lambda device, function, *args, **options: function(*args, **options),
        "stream": lambda device: 0,
    }
    return Gpu(**{**vars(targets.CUDA), **vars(CPU), **own})


def wrong_headers(tmp_path: Path, place: str, right: str, wrong: str) -> Path:
    """Return a copy of the kernels' headers with a fault in a file, or in those of a folder."""
    folder = shutil.copytree(headers.KERNELS, tmp_path / "kernels")
    path = folder / place
    files = [path] if path.is_file() else path.iterdir()
    files = [file for file in files if right in file.read_text()]
    assert files
    for file in files:
        file.write_text(file.read_text().replace(right, wrong))
    return folder


@contextmanager
def compiled_from(folder: Path) -> Iterator[None]:
    """Compile all kernels from these headers."""

    def clear() -> None:
        headers.text.cache_clear()
        pararnn.clear_caches()
        kernels_of.cache_clear()

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(headers, "KERNELS", folder)
            clear()
            yield
    finally:
        clear()


class Fault(NamedTuple):
    """Replacement in a header of kernels/cuda, for kernels of one direction."""

    direction: str
    file: str
    right: str
    wrong: str


def with_fault(device: Gpu, fault: Fault, tmp_path: Path, monkeypatch) -> Gpu:
    """Return a GPU whose kernels of one direction are compiled from a header with a fault."""
    folder = wrong_headers(tmp_path, f"cuda/{fault.file}", fault.right, fault.wrong)
    build = getattr(kernels_of, "__wrapped__", kernels_of)

    def kernels(program, variant, capability):
        if variant.direction != fault.direction:
            return kernels_of(program, variant, capability)
        with monkeypatch.context() as patch:
            patch.setattr(headers, "KERNELS", folder)
            headers.text.cache_clear()
            try:
                return build(program, variant, capability)
            finally:
                headers.text.cache_clear()

    return replace(device, kernels=kernels)


def install(device: Gpu, monkeypatch) -> None:
    """Run (sequential, fused), (newton, fused) and (chunks, fused) on a CPU as on this device."""
    for solver in SOLVERS:
        own = Emulated(solver, device)
        monkeypatch.setitem(table.TABLE, (solver, "fused", "cpu"), own)
    monkeypatch.setitem(table.TABLE, ("chunks", "fused", "cpu"), EmulatedChunks(device))
