"""The compiler and the disk cache: hits, damage, races, and machines that lack something."""

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from fresh import run_fresh
from processes import start
from table import needs_compiler
from user_cells import Cumulative

import pararnn
from pararnn.base import cache
from pararnn.codegen import compiler, cpp
from pararnn.engines import signature, table, tuned

RUN = """
import torch, pararnn
from pararnn.codegen import cpp
cpp.compile_library = None  # a compilation would fail
torch.manual_seed(0)
cell = pararnn.ElmanCell(5)
states, _ = pararnn.solve(cell, torch.randn(2, 9, 1, 5), backend="fused")
print(f"{states.double().sum().item():.12f}")
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    return tmp_path_factory.mktemp("libraries")


@pytest.fixture
def compile_once(libraries, monkeypatch):
    """Compile a source once for all tests; others copy the library."""

    def compile_library(source, include, output):
        command = repr((os.environ.get("CXX"), os.environ["PATH"], compiler.flags())).encode()
        library = libraries / hashlib.sha256(command + source.read_bytes()).hexdigest()
        if not library.exists():
            compiler.compile_library(source, include, library)
        shutil.copy(library, output)

    monkeypatch.setattr(cpp, "compile_library", compile_library)


@pytest.fixture
def folder(tmp_path, monkeypatch, no_caches, compile_once):
    """Set an empty cache on disk; this process has none."""
    monkeypatch.setenv("PARARNN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _inputs():
    torch.manual_seed(0)
    return pararnn.ElmanCell(5), torch.randn(2, 9, 1, 5)


def _solve(inputs=None):
    return pararnn.solve(*(inputs or _inputs()), backend="fused")[0]


def _again(monkeypatch):
    """Solve as a new process would, counting compilations."""
    calls = []

    def compiling(*args):
        calls.append(args)
        return compiler.compile_library(*args)

    monkeypatch.setattr(cpp, "compile_library", compiling)
    pararnn.clear_caches()
    return _solve(), len(calls)


def _entry(folder):
    (entry,) = _kernels_in(folder)
    return entry


def _kernels_in(folder):
    """Return the entries, without those that are being made."""
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


@needs_compiler
def test_a_second_use_compiles_nothing(folder, monkeypatch):
    first = _solve()
    entry = _entry(folder)
    assert entry.name.startswith("ElmanCell-float-")
    assert {path.name for path in entry.iterdir()} == {
        cache.CPP.library,
        cache.CPP.source,
        cache.MANIFEST,
    }
    again, compilations = _again(monkeypatch)
    assert compilations == 0
    assert torch.equal(first, again)
    assert not list(folder.glob(".*"))  # nothing half-made is left


def _tiny_library(source, output):
    subprocess.run(
        [*compiler.compiler_command(), "-shared", "-fPIC", str(source), "-o", str(output)],
        check=True,
    )


def _answer(builds=True):
    """Load a tiny library, as a process does that builds, or has no compiler."""

    def builder():
        if builds:
            return "a compiler"
        raise pararnn.EngineError("nothing builds here")

    source = "int answer() { return 42; }"
    return cache.load(cache.CPP, "tiny", "key", source, _tiny_library, builder)


def _rewrite(path, change):
    """Change a file's content, as a new file: this process may have the old one mapped."""
    content = change(path.read_bytes())
    path.unlink()
    path.write_bytes(content)


def _to_a_file(entry):
    _to_an_empty_folder(entry)
    entry.rmdir()
    entry.write_text("not a folder")


def _to_an_empty_folder(entry):
    for path in entry.iterdir():
        path.unlink()


def _not_a_library(entry):
    _rewrite(entry / cache.CPP.library, lambda _: b"no ELF")
    checksum = hashlib.sha256(b"no ELF").hexdigest()
    manifest = json.loads((entry / cache.MANIFEST).read_text())
    (entry / cache.MANIFEST).write_text(json.dumps({**manifest, "checksum": checksum}))


DAMAGE = {
    "truncated": lambda e: _rewrite(e / cache.CPP.library, lambda old: old[:1000]),
    "one bit": lambda e: _rewrite(e / cache.CPP.library, lambda old: old[:99] + b"?" + old[100:]),
    "no library": lambda e: (e / cache.CPP.library).unlink(),
    "no manifest": lambda e: (e / cache.MANIFEST).unlink(),
    "not JSON": lambda e: _rewrite(e / cache.MANIFEST, lambda old: old[:-1]),
    "other key": lambda e: _rewrite(e / cache.MANIFEST, lambda old: old.replace(b": ", b": 1", 1)),
    "a file": _to_a_file,
    "empty": _to_an_empty_folder,
    "not a library": _not_a_library,
}


@needs_compiler
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_and_foreign_entries_are_built_again(folder, damage, tmp_path, monkeypatch):
    built = []

    def answer():
        def build(source, output):
            built.append(source)
            _tiny_library(source, output)

        return cache.load(cache.CPP, "tiny", "key", "int answer() { return 42; }", build)

    answer()
    # Elsewhere: the loader does not look at a file again whose path it knows.
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder, elsewhere)
    monkeypatch.setenv("PARARNN_CACHE_DIR", str(elsewhere))
    DAMAGE[damage](_entry(elsewhere))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            answer()
            assert len(built) == 2
    message = r"tiny-\w+ cannot be loaded here and is removed: .*(header|too short)"
    assert [bool(re.search(message, str(each.message))) for each in caught] == (
        [True] if damage == "not a library" else []
    )
    shutil.copytree(elsewhere, tmp_path / "mended")
    monkeypatch.setenv("PARARNN_CACHE_DIR", str(tmp_path / "mended"))
    answer()
    assert len(built) == 2


@needs_compiler
@pytest.mark.parametrize("builds", [True, False])
def test_an_entry_that_cannot_be_read_now_stays(folder, builds, monkeypatch):
    """Neither a missing permission nor too many open files say that it is damaged."""
    _answer()

    def refuses(path, f=Path.read_bytes):
        if path.is_relative_to(folder):
            raise PermissionError(13, "Permission denied", str(path))
        return f(path)

    monkeypatch.setattr(cache, "_UNUSABLE", set())
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuses)
        context = contextlib.nullcontext() if builds else pytest.raises(pararnn.EngineError)
        with pytest.warns(pararnn.BackendWarning, match="in .*cache .*Permission denied"), context:
            _answer(builds)
    assert (_entry(folder) / cache.CPP.library).exists()


def test_clear_caches_leaves_nothing_of_this_process():
    layer, x = pararnn.ParaGRU(4, 6), torch.randn(1, 9, 4)
    workload = tuned.Workload("key", (1, 9, 6), torch.float32, torch.device("cpu"))
    tuned.remember(workload, [tuned.Measured("sequential", "torch", (None, None), 1.0)])
    with torch.no_grad():
        reference = layer(x)[0]
    pararnn.clear_caches()
    for store in (cpp._KERNELS, signature.SIGNATURES, tuned._RECORDS):
        assert not store
    with torch.no_grad():
        assert torch.allclose(layer(x)[0], reference, atol=1e-6)


def _solves_there(out, folder, rank):
    os.environ["PARARNN_CACHE_DIR"] = str(folder)
    torch.save(_solve(), out / f"{rank}")


@needs_compiler
@pytest.mark.thorough
def test_processes_and_threads_share_one_entry(folder, tmp_path, monkeypatch):
    # A compiler takes time, in which the others come.
    monkeypatch.setattr(cpp, "compile_library", compiler.compile_library)
    inputs = _inputs()  # all threads draw from one generator
    running = start(partial(_solves_there, tmp_path, folder), world=3)
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(_solve, [inputs] * 3))
    while not running.join():  # one of them has ended
        pass
    outputs = [torch.load(tmp_path / f"{rank}") for rank in range(3)]
    assert all(torch.equal(result, results[0]) for result in (*results, *outputs))
    _entry(folder)


@needs_compiler
def test_a_new_process_compiles_nothing(folder):
    states = _solve()
    warm = run_fresh(RUN)
    assert warm.returncode == 0, warm.stderr
    assert warm.stdout == f"{states.double().sum().item():.12f}\n"


@needs_compiler
@pytest.mark.usefixtures("compile_once")
def test_another_folder_stands_in_for_one_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PARARNN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    pararnn.clear_caches()
    monkeypatch.setattr(cache, "_UNUSABLE", set())
    with pytest.warns(pararnn.BackendWarning, match="cannot be cached in .*set PARARNN_CACHE_DIR"):
        states = _solve()
    again, compilations = _again(monkeypatch)
    assert compilations == 0  # the stand-in serves the rest of the process
    assert torch.equal(states, again)


@needs_compiler
def test_one_warning_for_a_folder_that_cannot_be_written(folder, monkeypatch):
    """Errors name files of each entry's own; they are no reasons for more warnings."""
    errors = (OSError(f"no space for entry {n}") for n in range(9))

    def mkdir(*args, f=cache.Path.mkdir, **options):
        if args[0] == folder:
            raise next(errors)
        return f(*args, **options)

    monkeypatch.setattr(cache.Path, "mkdir", mkdir)
    monkeypatch.setattr(cache, "_UNUSABLE", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer = pararnn.ParaRNN(pararnn.ElmanCell, 4, 6)
        for dtype in (torch.float32, torch.float64):
            layer.to(dtype)(torch.randn(1, 3, 4, dtype=dtype))
    (warning,) = caught
    assert re.match(
        rf"compiled kernels cannot be cached in {folder} \(no space for entry 0\)"
        ", so every process makes its own; set PARARNN_CACHE_DIR to a folder",
        str(warning.message),
    )


def test_the_default_folder_depends_on_the_system(monkeypatch):
    monkeypatch.delenv("PARARNN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache.cache_folder() == Path("/somewhere/pararnn")
    monkeypatch.setenv("PARARNN_CACHE_DIR", "~/of mine")
    assert cache.cache_folder() == Path.home() / "of mine"
    monkeypatch.delenv("PARARNN_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_folder() == Path.home() / ".cache" / "pararnn"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache.cache_folder() == Path.home() / "Library" / "Caches" / "pararnn"


@needs_compiler
def test_keys_follow_source_compiler_flags_and_processor(folder, monkeypatch):
    built = folder.parent / "built.so"
    _solve()
    shutil.copy(_entry(folder) / cache.CPP.library, built)
    monkeypatch.setattr(cpp, "compile_library", lambda *args: shutil.copy(built, args[-1]))
    changes = [
        ("source_file", lambda *args, f=cpp.source_file: f(*args) + "// new\n"),
        ("compiler_identity", lambda *command: "another compiler"),
        ("flags", lambda f=cpp.flags: (*f(), "-DANOTHER")),
        ("target_identity", lambda: "another processor"),
        ("headers.text", lambda target: "other headers"),
    ]
    for count, (what, change) in enumerate(changes, 2):
        with monkeypatch.context() as patch:
            patch.setattr(f"pararnn.codegen.cpp.{what}", change)
            pararnn.clear_caches()
            _solve()
        assert len(_kernels_in(folder)) == count, what


def test_flags_of_the_environment_come_last(monkeypatch):
    monkeypatch.delenv("PARARNN_CXXFLAGS", raising=False)
    ours = compiler.flags()
    monkeypatch.setenv("PARARNN_CXXFLAGS", "-O1 '-DNAME=two words'")
    assert compiler.flags() == (*ours, "-O1", "-DNAME=two words")


def test_auto_falls_back_to_the_loop_without_a_compiler(folder, monkeypatch):
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(folder))
    table._messages.clear()
    cell, gates = pararnn.GRUCell(4), torch.randn(1, 5, 3, 4)
    with pytest.raises(
        pararnn.EngineError, match=r"no C\+\+ compiler found.*apt-get install g\+\+"
    ):
        pararnn.solve(cell, gates, solver="sequential", backend="fused")
    with pytest.raises(pararnn.EngineError, match=r"no C\+\+ compiler found"):
        pararnn.precompile(cell)
    with pytest.warns(pararnn.BackendWarning, match="by .sequential, torch.: no C.. compiler"):
        states, _ = pararnn.solve(cell, gates)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pararnn.solve(cell, gates)
    reference, _ = pararnn.solve(cell, gates, solver="sequential", backend="torch")
    assert torch.equal(states, reference)


@needs_compiler
def test_a_warm_cache_serves_without_a_compiler(folder, monkeypatch):
    states = _solve()
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, compilations = _again(monkeypatch)
    assert compilations == 0
    assert torch.equal(states, again)
    pararnn.clear_caches()
    monkeypatch.setattr("pararnn.codegen.cpp.target_identity", lambda: "another processor")
    with pytest.raises(pararnn.EngineError, match=r"no C\+\+ compiler found"):
        _solve()


@needs_compiler
@pytest.mark.parametrize("damage", [name for name in DAMAGE if name != "not a library"])
def test_a_damaged_entry_does_not_serve_without_a_compiler(folder, damage, monkeypatch):
    _answer()
    _answer(builds=False)
    if damage == "other key":
        entry = _entry(folder)
        entry.rename(entry.with_name(f"{entry.name[:-1]}{'1' if entry.name[-1] == '0' else '0'}"))
    else:
        DAMAGE[damage](_entry(folder))
    with pytest.raises(pararnn.EngineError, match="nothing builds here"):
        _answer(builds=False)


@needs_compiler
def test_cxx_may_have_arguments(folder, monkeypatch):
    plain, calls = compiler.compiler_command()[0], []

    def run(command, f=subprocess.run, **options):
        calls.append(command)
        return f(command, **options)

    monkeypatch.setattr(compiler.subprocess, "run", run)
    monkeypatch.setenv("CXX", f"{plain} -O1")
    _solve()
    assert calls[0][:3] == [plain, "-O1", compiler.FLAGS[0]]
    identity = compiler.compiler_identity(shutil.which("env"), plain)
    assert identity.endswith(compiler.compiler_identity(plain).removeprefix(plain))


def test_march_sets_the_processor_in_the_key(monkeypatch):
    for flags, is_named in {"": False, "-O1": False, "-march=x86-64-v3": True}.items():
        monkeypatch.setenv("PARARNN_CXXFLAGS", flags)
        assert (compiler.target_identity() == platform.machine()) is is_named
    monkeypatch.setenv("PARARNN_CXXFLAGS", "-march=x86-64-v3 -march=native")
    assert compiler.target_identity() == compiler.cpu_identity()


def test_the_output_of_a_compiler_that_fails_is_shown(folder, monkeypatch, tmp_path):
    broken = tmp_path / "broken-compiler"
    broken.write_text("#!/bin/sh\necho 'something is wrong' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(
        pararnn.EngineError, match=r"exit status 3 .*something is wrong(.|\n)*Set CXX"
    ):
        _solve()
    monkeypatch.setenv("CXX", "no-such-compiler")
    pararnn.clear_caches()
    with pytest.raises(pararnn.EngineError, match="CXX='no-such-compiler' is not a program"):
        _solve()


def _agrees_with_the_loop():
    cell, gates = pararnn.LSTMCell(37), torch.randn(2, 50, 3, 37)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        (h, _), _ = pararnn.solve(cell, gates.to(dtype), backend="fused")
        (loop, _), _ = pararnn.solve(cell, gates.to(dtype), solver="sequential", backend="torch")
        assert torch.allclose(h, loop, atol=4 * torch.finfo(dtype).eps)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("name", ["g++", "clang++"])
def test_kernels_of_known_compilers_agree_with_the_loop(name, monkeypatch):
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    if os.path.realpath(shutil.which(name)) == os.path.realpath(compiler.compiler_command()[0]):
        pytest.skip(f"{name} compiles all tests' kernels")
    monkeypatch.setenv("CXX", name)
    _agrees_with_the_loop()


@needs_compiler
@pytest.mark.usefixtures("as_shipped")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
@pytest.mark.parametrize("target", ["x86-64", "x86-64-v3"])
@pytest.mark.thorough
def test_kernels_with_narrower_vectors_agree_with_the_loop(target, monkeypatch):
    """16 and 32 bytes, with and without fused multiply-add."""
    if target == "x86-64-v3" and "avx2" not in compiler.cpu_identity():
        pytest.skip("this processor has no AVX2")
    flags = (*compiler.FLAGS, f"-march={target}")
    monkeypatch.setattr(compiler, "flags", lambda: flags)
    monkeypatch.setattr(cpp, "flags", lambda: flags)
    _agrees_with_the_loop()


@needs_compiler
def test_precompile_builds_the_kernels_of_a_layer(folder, tmp_path, monkeypatch):
    (tmp_path / "empty.cpp").write_text('extern "C" { void forward() {} void backward() {} }')
    _tiny_library(tmp_path / "empty.cpp", tmp_path / "empty.so")
    copy = lambda *args: shutil.copy(tmp_path / "empty.so", args[-1])  # noqa: E731
    monkeypatch.setattr(cpp, "compile_library", copy)
    layer = pararnn.ParaRNN(pararnn.ElmanCell, 4, 6, num_layers=2)
    pararnn.precompile(layer)
    assert {path.name.split("-")[1] for path in _kernels_in(folder)} == {"float"}
    pararnn.precompile(layer, [torch.bfloat16, torch.float32])
    assert {path.name.split("-")[1] for path in _kernels_in(folder)} == {"float", "bfloat16"}
    monkeypatch.setattr(cpp, "compile_library", None)  # a compilation would fail
    layer(torch.randn(1, 3, 4))
    with pytest.raises(pararnn.EngineError, match="Linear holds no Cell"):
        pararnn.precompile(torch.nn.Linear(2, 2))
    with pytest.raises(pararnn.EngineError, match="Cumulative mixes channels"):
        pararnn.precompile(pararnn.ParaRNN(Cumulative, 4, 6))
    with pytest.raises(TypeError, match="dtypes must have one of"):
        pararnn.precompile(layer, [torch.int8])


def test_nothing_is_compiled_before_the_first_use(folder):
    pararnn.ParaGRU(4, 6)
    assert not folder.exists() or not _kernels_in(folder)
