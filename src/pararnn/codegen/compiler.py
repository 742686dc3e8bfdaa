"""The host's C++ compiler: which one, with which flags, and what it builds."""

from __future__ import annotations

import functools
import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

from pararnn.device import cpu_facts
from pararnn.errors import EngineError

CANDIDATES = ("c++", "g++", "clang++")

# No -ffast-math: NaN and infinity keep their meaning, and sums their order. Errno and trapping
# exceptions are what is given up; nobody can see them in vector code.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
    "-Wno-psabi",  # vectors never cross a function boundary that is not inlined
)


class CompilerError(EngineError):
    """There is no C++ compiler, or it does not compile our code. The message has the cure."""


def compiler_command() -> list[str]:
    """The compiler's full path and its first arguments.

    That is $CXX, a path or a command ("g++ -O1", "ccache g++"), else the first of CANDIDATES on the
    PATH. Raises CompilerError saying what to install.
    """
    given = os.environ.get("CXX", "").strip()
    for command in [[given], shlex.split(given)] if given else [[name] for name in CANDIDATES]:
        path = shutil.which(command[0])
        if path is not None:
            return [path, *command[1:]]
    looked = f"CXX={given!r} is not a program" if given else f"looked for {', '.join(CANDIDATES)}"
    raise CompilerError(
        f"no C++ compiler found ({looked}). Install one (Debian and Ubuntu: apt-get install g++; "
        "macOS: xcode-select --install), or set CXX to its path"
    )


def compiler_identity(*command: str) -> str:
    """What changes when the compiler does, without the milliseconds that asking it costs.

    Of every word of the command that is a program: the first may be a launcher of the second.
    """
    said = list(command)
    for path in filter(None, map(shutil.which, command)):
        real = os.path.realpath(path)
        status = os.stat(real)
        said.append(f"{path} {real} {status.st_size} {status.st_mtime_ns}")
    return " ".join(said)


@functools.cache
def cpu_identity() -> str:
    """The processor's model and features: code for one may not run on another."""
    names = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    own = [f"{name}: {value}" for name, value in cpu_facts().items() if name in names]
    return "\n".join([platform.system(), platform.machine(), platform.processor(), *own])


def target_identity() -> str:
    """The processor that code is for: this one, unless $PARARNN_CXXFLAGS names one (-march).

    Kernels for a named one are found on every machine that names it, as in an image built ahead.
    """
    own = shlex.split(os.environ.get("PARARNN_CXXFLAGS", ""))
    named = [flag for flag in own if flag.startswith(("-march=", "-mcpu="))]
    return platform.machine() if named and "native" not in named[-1] else cpu_identity()


def flags() -> tuple[str, ...]:
    """FLAGS, the one that tunes for this processor, and those of $PARARNN_CXXFLAGS, which win."""
    arm = platform.machine().lower() in ("arm64", "aarch64")
    own = shlex.split(os.environ.get("PARARNN_CXXFLAGS", ""))
    return (*FLAGS, "-mcpu=native" if arm else "-march=native", *own)


def compile_library(source: Path, include: Path, output: Path) -> None:
    """Compile one C++ file into a shared library.

    Raises CompilerError with the end of what the compiler said.
    """
    compiler, *arguments = compiler_command()
    command = [compiler, *arguments, *flags(), f"-I{include}", str(source), "-o", str(output)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise CompilerError(f"cannot run {compiler}: {error}; set CXX to a compiler") from error
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[:20])
        raise CompilerError(
            f"{compiler} failed with exit status {done.returncode} on generated code: {said}\n"
            "Set CXX to another compiler (g++ 9 and clang 14 or newer), or use backend='torch'"
        )
