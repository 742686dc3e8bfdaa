"""The host's C++ compiler: its command, its flags, and compiling with it."""

from __future__ import annotations

import functools
import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

from pararnn.base.device import cpu_facts
from pararnn.base.errors import EngineError

CANDIDATES = ("c++", "g++", "clang++")

# No -ffast-math: NaN and infinity keep their meaning, and sums their order. Only errno and trapping
# exceptions are lost, which vector code does not show anyway.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    # GCC's tuning for some processors splits them again in sums, by the number of sums in a loop:
    # a row's bits would depend on the rows beside it. Clang ignores it.
    "--param=avoid-fma-max-bits=0",
    "-fvisibility=hidden",
    "-Wno-psabi",  # vectors never cross a function boundary that is not inlined
)


class CompilerError(EngineError):
    """No C++ compiler, or one that fails on generated code. The message has the cure."""


def compiler_command() -> list[str]:
    """Return the compiler's full path and its first arguments.

    It is $CXX, a path or a command ("g++ -O1", "ccache g++"), or the first of CANDIDATES on the
    PATH. Raises CompilerError, which names what to install.
    """
    cxx = os.environ.get("CXX", "").strip()
    for command in [[cxx], shlex.split(cxx)] if cxx else [[name] for name in CANDIDATES]:
        path = shutil.which(command[0])
        if path is not None:
            return [path, *command[1:]]
    search = f"CXX={cxx!r} is not a program" if cxx else f"looked for {', '.join(CANDIDATES)}"
    raise CompilerError(
        f"no C++ compiler found ({search}). Install one (Debian and Ubuntu: apt-get install g++; "
        "macOS: xcode-select --install), or set CXX to its path"
    )


def compiler_identity(*command: str) -> str:
    """Return a text that changes with the compiler, without running it, which takes milliseconds.

    It covers every program in the command: the first may launch the second.
    """
    facts = list(command)
    for path in filter(None, map(shutil.which, command)):
        real = os.path.realpath(path)
        status = os.stat(real)
        facts.append(f"{path} {real} {status.st_size} {status.st_mtime_ns}")
    return " ".join(facts)


@functools.cache
def cpu_identity() -> str:
    """Return the processor's model and features: code for one may not run on another."""
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    features = [f"{name}: {value}" for name, value in cpu_facts().items() if name in names]
    return "\n".join([platform.system(), platform.machine(), platform.processor(), *features])


def target_identity() -> str:
    """Return the processor that code is compiled for, as part of cache keys.

    It is this one, unless $PARARNN_CXXFLAGS names one by -march or -mcpu: then every machine with
    these flags finds the same kernels, as for an image built ahead.
    """
    user_flags = shlex.split(os.environ.get("PARARNN_CXXFLAGS", ""))
    machines = [flag for flag in user_flags if flag.startswith(("-march=", "-mcpu="))]
    return platform.machine() if machines and "native" not in machines[-1] else cpu_identity()


def flags() -> tuple[str, ...]:
    """Return FLAGS, the flag for this processor, and $PARARNN_CXXFLAGS, which take precedence."""
    arm = platform.machine().lower() in ("arm64", "aarch64")
    user_flags = shlex.split(os.environ.get("PARARNN_CXXFLAGS", ""))
    return (*FLAGS, "-mcpu=native" if arm else "-march=native", *user_flags)


def compile_library(source: Path, include: Path, output: Path) -> None:
    """Compile one C++ file into a shared library.

    Raises CompilerError with the first lines of the compiler's message.
    """
    compiler, *arguments = compiler_command()
    command = [compiler, *arguments, *flags(), f"-I{include}", str(source), "-o", str(output)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise CompilerError(f"cannot run {compiler}: {error}; set CXX to a compiler") from error
    if result.returncode:
        message = "\n".join((result.stderr or result.stdout).strip().splitlines()[:20])
        raise CompilerError(
            f"{compiler} failed with exit status {result.returncode} on generated code: {message}\n"
            "Set CXX to another compiler (g++ 9 and clang 14 or newer), or use backend='torch'"
        )
