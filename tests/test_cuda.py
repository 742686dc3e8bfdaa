"""CUDA sources, rings and the toolchain, without a GPU."""

import builtins
import functools
import hashlib
import inspect
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from matrix_cells import BY_BLOCKS
from table import DTYPES, ELEMENTWISE, there

import pararnn
from pararnn import zoo
from pararnn.base import cache
from pararnn.base.device import CUDA
from pararnn.codegen import cuda, headers, nvrtc
from pararnn.codegen.cuda import source_of
from pararnn.codegen.elementwise_cuda import KERNELS, SHARED_BYTES, ring_of, usual_variants
from pararnn.codegen.matrix_cuda import matrix_variants
from pararnn.codegen.mixing_cuda import mixing_variants
from pararnn.codegen.source import chunk_of
from pararnn.engines import table
from pararnn.engines.table import choose

ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
MAX_REGISTERS = 168  # three warps a scheduler hide the latency of memory


def _has_nvrtc():
    try:
        nvrtc.identity()
    except pararnn.EngineError as error:
        return there(error)
    return there(None)


needs_nvrtc = pytest.mark.skipif(not _has_nvrtc(), reason="needs NVRTC (the extra cu12 or cu13)")


def _program(name, **config):
    return pararnn.program_of(pararnn.CELLS[name](4, **config))


def _variant(program, direction, dtype=torch.float32, **changes):
    usual = usual_variants(program, dtype, 1024, 1024)
    wanted = [v for v in usual if v.direction == direction]
    return wanted[-1]._replace(**changes)


REPORT = cache.EntryFiles("report.txt", "kernels.cu", Path.read_text)


@functools.cache
def _compiler():
    """Return a text for NVRTC and its call, which a report depends on."""
    pathfinder = pytest.importorskip("cuda.pathfinder")
    library = Path(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path).read_bytes()
    return f"{hashlib.sha256(library).hexdigest()} {nvrtc.identity()} {inspect.getsource(nvrtc)}"


def _resources(program, variant, arch):
    """Return the compiler's report on a variant's kernels, cached across test runs."""

    def build(source, output):
        code = output.with_suffix(".cubin")
        report = nvrtc.compile_cubin(source, headers.folder("cuda"), code, arch)
        assert code.read_bytes()[:4] == b"\x7fELF"
        output.write_text(report)

    source = source_of(program, variant)
    key = "\n".join((source, headers.text("cuda", program.family), _compiler(), arch))
    name = f"report-{program.cell_name}-{arch}"
    return nvrtc.resources(cache.load(REPORT, name, key, source, build))


@needs_nvrtc
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.one_in(11)
def test_kernels_compile_without_spills(name, dtype):
    """For two architectures a cell, in turn: a compilation takes a second."""
    turn = ELEMENTWISE.index(name) + (dtype == torch.bfloat16)
    arch = ARCHITECTURES[turn % len(ARCHITECTURES)]
    program = _program(name)
    for direction, kernels in KERNELS.items():
        report = _resources(program, _variant(program, direction, dtype), arch)
        assert set(report) == set(kernels)
        for kernel, use in report.items():
            assert use["spilled"] == use["stack"] == 0, (kernel, use)
            assert 0 < use["registers"] <= MAX_REGISTERS, (kernel, use)
            assert use["shared"] <= SHARED_BYTES


CHANGES = {
    "events": {"events": True},
    "reverse": {"reverse": True, "events": True},
    "layout": {"adjacent_gates": False, "head_width": 64},
    "element by element": {"chunk": 2, "channels": 101, "head_width": 101},
    "by four bytes": {"chunk": 4, "channels": 102, "head_width": 34},
    "one channel a lane": {"per_lane": 1, "channels": 33, "head_width": 33, "chunk": 2},
    "gradients of all states": {"arriving": (True, True)},
    "gradients of no state": {"arriving": (False, False)},
    "half weights": {"weight_dtype": torch.bfloat16},
}


@needs_nvrtc
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.one_in(9)
def test_variants_compile(change):
    program = _program("lstm")
    for direction in KERNELS:
        variant = _variant(program, direction, torch.bfloat16, **CHANGES[change])
        report = _resources(program, variant, "sm_90")
        assert all(use["spilled"] == 0 for use in report.values()), report


@needs_nvrtc
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
@pytest.mark.thorough
def test_fields_and_other_dtypes_compile(dtype):
    program = _program("lrc")
    for direction in KERNELS:
        for broadcast in (True, False):
            variant = _variant(program, direction, dtype, broadcast=(broadcast,))
            assert _resources(program, variant, "sm_80")


MIXING = [
    ("head-lstm", torch.bfloat16, 12, 64, "sm_90"),
    ("head-gru", torch.float32, 3, 20, "sm_80"),
    ("head-gru-reset-first", torch.float64, 1, 16, "sm_80"),
    ("head-slstm", torch.float16, 1, 256, "sm_90"),  # matrices do not fit into registers
]


@needs_nvrtc
@pytest.mark.parametrize(("name", "dtype", "heads", "width", "arch"), MIXING, ids=str)
@pytest.mark.one_in(4)
def test_kernels_of_steps_that_mix_compile(name, dtype, heads, width, arch):
    """Both passes, and what comes before and after them, in blocks of 4 rows."""
    program = pararnn.program_of(pararnn.CELLS[name](heads * width, num_heads=heads))
    capability = (9, 0) if arch == "sm_90" else (8, 0)
    directions = set()
    for variant in mixing_variants(program, dtype, heads, width, dtype, capability):
        report = _resources(program, variant, arch)
        kernels = cuda.blocks_of(program, variant)
        assert set(report) >= set(kernels)
        # Warps of wide heads have 128 registers a thread, where no cluster slices them.
        assert report["run"]["spilled"] <= (64 if width == 256 else 0), report
        threads = kernels["run"].block[0]
        assert report["run"]["registers"] * threads <= 2**16
        directions.add(variant.direction)
    assert directions >= {"forward", "backward"}


def _in_two_dtypes():
    """Return (matrix cell, dtype): each cell in two dtypes, and each dtype with half of them."""
    cells = enumerate(BY_BLOCKS)
    return [(name, dtype) for n, name in cells for dtype in DTYPES[n % 2 :: 2]]


SPILLED = {"projected-lstm": 2048, "mamba3-mimo": 512}
"""Bytes that registers do not hold in cells whose threads have many matrices, or gates of two axes:
five here, and four with one state more."""


@needs_nvrtc
@pytest.mark.parametrize(("name", "dtype"), _in_two_dtypes(), ids=str)
@pytest.mark.one_in(13)
def test_kernels_of_matrix_cells_compile(name, dtype):
    """Both passes, in turn for each architecture."""
    turn = BY_BLOCKS.index(name) + DTYPES.index(dtype) // 2
    arch = ARCHITECTURES[turn % len(ARCHITECTURES)]
    program = pararnn.program_of(zoo.MATRIX_CELLS[name](32, num_heads=2, K=16))
    for variant in matrix_variants(program, dtype, dtype, (8, 0)):
        report, kernels = _resources(program, variant, arch), cuda.blocks_of(program, variant)
        assert set(report) == set(kernels)
        # Numbers of float64 take two registers each, and matrices of them hardly fit. Others have
        # room: what the compiler stores then, of 72 registers in small backward passes, is its
        # choice, for more blocks at once.
        many = SPILLED.get(name, 0)
        most = max(512, 5 * many) if dtype == torch.float64 else max(32, many)
        assert report["run"]["spilled"] <= most, report


def test_only_bfloat16_uses_coarse_functions():
    program = _program("lstm")
    source = source_of(program, _variant(program, "backward", torch.bfloat16))
    assert "#define PARARNN_APPROXIMATE 1" in source
    assert pararnn.emitted(pararnn.LSTMCell(4), "cuda") in source
    for dtype in (torch.float32, torch.float64, torch.float16):
        assert "PARARNN_APPROXIMATE 0" in source_of(program, _variant(program, "forward", dtype))


def test_chunks_are_the_common_alignment():
    assert chunk_of() == chunk_of(0, 64, 4096) == 16
    assert chunk_of(64, 8) == 8
    assert chunk_of(6, 16) == 2
    assert chunk_of(4 * 7) == 4


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "dtype", "arch"),
    [("gru", torch.bfloat16, "sm_80"), ("elman", torch.float32, "sm_90")],
    ids=str,
)
@pytest.mark.thorough
def test_newton_kernels_compile(name, dtype, arch):
    program, clusters = _program(name), arch != "sm_80"
    variants = usual_variants(program, dtype, 1024, 256, solver="newton", clusters=clusters)
    assert len(variants) == 2 * (1 + clusters)
    for variant in variants:
        report = _resources(program, variant, arch)
        assert set(report) == set(KERNELS[variant.direction])
        assert report["run"]["spilled"] == 0
        assert report["run"]["shared"] <= SHARED_BYTES


def test_rings_fit_in_shared_memory():
    for name in ELEMENTWISE:
        program = _program(name)
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for variant in usual_variants(program, dtype, 1024, 256):
                ring = ring_of(program, variant)
                assert ring.stages >= 2
                assert 32 % ring.steps == 0  # events are read for 32 steps at once
    gru = _program("gru")
    assert ring_of(gru, _variant(gru, "forward")) == (4, 5)
    assert ring_of(gru, _variant(gru, "forward", torch.bfloat16)) == (8, 6)
    assert ring_of(gru, _variant(gru, "backward")) == (4, 3)
    assert ring_of(gru, _variant(gru, "backward", torch.bfloat16)) == (4, 5)


def _wide_cell(count):
    class Wide(pararnn.Cell):
        states = ("h",)
        gates = tuple(f"x{i}" for i in range(count))

        def step(self, state, gate, param):
            return 0.5 * state.h + sum(gate)

    return pararnn.program_of(Wide(4))


def test_cells_that_do_not_fit_say_so():
    program = _wide_cell(80)
    assert ring_of(program, _variant(program, "forward", torch.float64)).steps == 1
    with pytest.raises(pararnn.EngineError, match=r"reads \d+ bytes a step.*Use fewer gates"):
        ring_of(program, _variant(program, "backward", torch.float64))


@needs_nvrtc
def test_code_is_cached(tmp_path, monkeypatch, messages):
    monkeypatch.setenv("PARARNN_CACHE_DIR", str(tmp_path))
    program = _program("elman")
    variant = _variant(program, "forward")
    first = cuda.cubin_of(program, variant, "sm_90")
    assert (
        f"compiling ElmanCell's sequential forward kernel for sm_90 (once; cached in {tmp_path})"
        in messages.getvalue()
    )
    (entry,) = tmp_path.iterdir()
    assert entry.name.startswith("ElmanCell-sequential-forward-float-sm_90-")
    names = {cache.CUDA.library, cache.CUDA.source, cache.MANIFEST}
    assert {path.name for path in entry.iterdir()} == names
    messages.truncate(0)
    assert cuda.cubin_of(program, variant, "sm_90") == first
    assert not messages.getvalue()
    cuda.cubin_of(program, variant._replace(channels=512), "sm_90")
    cuda.cubin_of(program, variant, "sm_80")
    assert len(list(tmp_path.iterdir())) == 3


@needs_nvrtc
def test_compiler_errors_show_the_log_and_the_source(tmp_path, monkeypatch):
    monkeypatch.setenv("PARARNN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda, "source_of", lambda *args: "this is no C++")
    program = _program("elman")
    with pytest.raises(
        nvrtc.ToolchainError, match=r"NVRTC failed(.|\n)*error(.|\n)*source is"
    ) as e:
        cuda.cubin_of(program, _variant(program, "forward"), "sm_90")
    source = Path(str(e.value).rpartition("The source is ")[2])
    assert source.read_text(encoding="utf-8") == "this is no C++"


def test_threads_import_one_by_one(monkeypatch):
    """cuda.core's modules import one another: a second thread would see some half imported."""
    current, counts = [], []

    def import_slowly(name, *args):
        if not name.startswith("cuda"):
            return plain_import(name, *args)
        current.append(name)
        counts.append(len(current))
        time.sleep(0.01)
        current.remove(name)
        return SimpleNamespace(core=None, driver=None)

    plain_import = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", import_slowly)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(nvrtc.toolchain.__wrapped__) for _ in range(8)]
        assert [job.result() for job in jobs] == [(None, None)] * 8
    assert counts == [1] * 16


def test_without_cuda_core(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "cuda"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cuda", None)
    nvrtc.toolchain.cache_clear()
    try:
        with pytest.raises(nvrtc.ToolchainError, match=r"pip install -e '\.\[cu1\d\]'"):
            nvrtc.toolchain()
    finally:
        nvrtc.toolchain.cache_clear()


@pytest.mark.parametrize(("version", "name"), [("12.8", "cu12"), ("13.0", "cu13"), (None, "cu13")])
def test_the_extra_follows_pytorch(version, name, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", version)
    assert nvrtc.extra() == name


@pytest.fixture
def empty_caches():
    """Clear what is cached about devices and builds, before and after."""
    for clear in (nvrtc.capability_of.cache_clear, table._messages.clear):
        clear()
    yield
    for clear in (nvrtc.capability_of.cache_clear, table._messages.clear):
        clear()


@pytest.mark.usefixtures("empty_caches")
def test_unsuitable_gpus_fall_back_or_raise(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(nvrtc.ToolchainError, match="no GPU that PyTorch can use"):
        nvrtc.capability_of(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    old = replace(CUDA, capability=lambda device: (7, 5), name_of=lambda device: "Tesla T4")
    monkeypatch.setattr(nvrtc, "CUDA", old)
    with pytest.raises(nvrtc.ToolchainError, match=r"Tesla T4 has compute capability 7.5.*torch"):
        nvrtc.capability_of(device)
    program = _program("gru")
    request = (program, (1, 9, 4), torch.float32, device)
    with pytest.raises(pararnn.EngineError, match=r"\(auto, fused\) cannot run GRUCell.*Tesla T4"):
        choose(*request, "auto", "fused")
    with pytest.warns(pararnn.BackendWarning, match=r"GRUCell runs by \(sequential, torch\).*7.5"):
        assert choose(*request, "auto", "auto").engine().backend == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose(*request, "auto", "auto")


def test_resources_are_parsed():
    report = """ptxas info    : Compiling entry function 'forward' for 'sm_90'
ptxas info    : Function properties for forward
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 45 registers, used 0 barriers, 18432 bytes smem, 600 bytes cmem[0]
ptxas info    : Compiling entry function 'sum_weights' for 'sm_90'
ptxas info    : Used 20 registers, used 1 barriers
"""
    assert nvrtc.resources(report) == {
        "forward": {"registers": 45, "spilled": 12, "stack": 8, "shared": 18432},
        "sum_weights": {"registers": 20, "spilled": 0, "stack": 0, "shared": 0},
    }


def test_occupancy_counts_blocks_with_the_memory_that_they_are_allowed(monkeypatch):
    """A block without the permission for its shared memory does not fit, so none would count."""
    permissions = set()

    def allow(attribute, shared, kernel, device):
        permissions.add(shared)
        return (0,)

    def occupancy(function, threads, shared):
        return 0, 2 if shared <= nvrtc.DEFAULT_SHARED or shared in permissions else 0

    driver = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_INVALID_CONTEXT=201),
        CUfunction_attribute=SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8),
        CUfunction=int,
        CUkernel=int,
        cuKernelSetAttribute=allow,
        cuOccupancyMaxActiveBlocksPerMultiprocessor=occupancy,
    )
    monkeypatch.setattr(nvrtc, "toolchain", lambda: (None, driver))
    monkeypatch.setattr(nvrtc, "current_gpus", lambda: (0,))
    module = SimpleNamespace(get_kernel=lambda name: SimpleNamespace(handle=1))
    for shared in (1024, 100 * 1024):
        assert nvrtc.Kernel(module, "run", (64, 1), shared).blocks_a_core() == 2
    assert permissions == {100 * 1024}
