"""Shared set-up: one thread a process, as parallel test runs fill the cores; caches of our own."""

import gc
import io
import logging
import os
import random
import shlex
import sys
import tempfile
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import kernel_cache
import pytest
import selection
import torch
from fake_newton import FakeNewton
from hypothesis import HealthCheck, settings
from precompiled import system_header

import pararnn
from pararnn import op
from pararnn.codegen import compiler, headers
from pararnn.engines import tuned
from pararnn.engines.signature import SIGNATURES

torch.set_num_threads(1)
# What modules make as they are imported stays: nothing is looked for before all are.
gc.set_threshold(10_000_000)
os.environ["PARARNN_CACHE_DIR"] = str(kernel_cache.folder())
OWN_FLAGS = "PARARNN_CXXFLAGS" in os.environ
_OWN = tempfile.TemporaryDirectory(prefix="pararnn-tests-")
# Of Inductor's, what the C++ compiler made is kept: its key is the source and the command. Its
# graphs are not, as their keys do not tell what the operator returns, which another commit changes.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(kernel_cache.folder() / f"inductor-{torch.__version__}")
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
# A busy machine is slow, and what fails by chance fails in a commit that is not to blame.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")
LONGEST = ("test_onnx", "test_zoo", "test_world_cells")
# What autotune measured before decides nothing here.
tuned.cache_folder = lambda: Path(_OWN.name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves out; begin with what forks a server's process, then with tests
    that take longest, for which others would wait at the end.

    Parallel runs give each of their processes neighbours: then one starts the servers, which
    import for 30 s, and others have work while its tests wait.
    """
    selection.mark(items)
    items.sort(
        key=lambda item: (
            not needs_server(item.module),
            item.module.__name__ not in LONGEST,
        )
    )


@cache
def needs_server(module: ModuleType) -> bool:
    """Return True where a module of tests has functions of `processes` or `fresh`."""
    sources = {getattr(value, "__module__", None) for value in vars(module).values()}
    return not sources.isdisjoint({"processes", "fresh"})


def pytest_collection_finish() -> None:
    """From here on look for what can be freed, seldom: traces make many objects that live for a
    while."""
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """What is left ends with the process: pytest need not look through it."""
    gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Once a run, by the process that starts the others."""
    kernel_cache.folder().mkdir(parents=True, exist_ok=True)
    if not hasattr(session.config, "workerinput"):
        kernel_cache.prune(kernel_cache.folder())
    if not OWN_FLAGS:
        os.environ["PARARNN_CXXFLAGS"] = fast_flags()


def fast_flags() -> str:
    """Flags that compile C++ in a third of the time of -O3, which tests with `as_shipped` have."""
    os.environ["PARARNN_CXXFLAGS"] = "-Og"
    flags = [flag for flag in compiler.flags() if flag != "-shared"]
    files = [file for part in ("cpp", "common") for file in (headers.KERNELS / part).rglob("*.h")]
    try:
        return f"-Og -include {shlex.quote(str(system_header('system', files, flags)))}"
    except compiler.CompilerError:
        return "-Og"  # tests of kernels are left out


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """The collector need not look again at what modules and earlier tests left.

    Of those objects there are half a million, and transformers' Trainer collects after each run.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _afresh(request: pytest.FixtureRequest) -> None:
    """Reset what earlier calls have left: engines that stood in the table, which sizes are
    symbols, how many variants are left before Dynamo's limit, the number of threads, and the random
    numbers that come next. So a test draws the same alone, in any order, and in any of the parallel
    processes."""
    torch.set_num_threads(1)
    seed = zlib.crc32(request.node.nodeid.encode())
    # torch.manual_seed would write down for each kind of device where it was called.
    generator = torch if torch.cuda.is_available() else torch.default_generator
    generator.manual_seed(seed)
    random.seed(seed)
    SIGNATURES.clear()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture
def device() -> str:
    """Device of the tests that run on any; tests/gpu has its own fixture of this name."""
    return "cpu"


@pytest.fixture
def messages() -> Iterator[io.StringIO]:
    """What the library writes to its log. pytest's caplog would look through the loggers of all
    packages, thousands, six times a test."""
    handler = logging.StreamHandler(io.StringIO())
    logger = logging.getLogger("pararnn")
    logger.addHandler(handler)
    yield handler.stream
    logger.removeHandler(handler)


@pytest.fixture
def no_caches() -> Iterator[None]:
    """Clear this process's caches before a test and after it."""
    pararnn.clear_caches()
    yield
    pararnn.clear_caches()


@pytest.fixture
def as_shipped(monkeypatch, no_caches) -> None:
    """Compile C++ kernels with the flags that users have."""
    monkeypatch.delenv("PARARNN_CXXFLAGS", raising=False)


@pytest.fixture
def operators(monkeypatch) -> list[tuple[str, str]]:
    """The pairs whose operators have run, of compiled code too; the plain loop has none."""
    ran, run = [], op.engine_of

    def record(program, solver, backend, args):
        ran.append((solver, backend))
        return run(program, solver, backend, args)

    monkeypatch.setattr(op, "engine_of", record)
    return ran


@pytest.fixture
def newton_fused(monkeypatch) -> FakeNewton:
    """An engine that cuts time, on the CPU."""
    return FakeNewton(monkeypatch)
