"""Headers of the C++ library, precompiled: they take a third of a small kernel's compilation."""

import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from pararnn.base import cache
from pararnn.codegen.compiler import compiler_command, compiler_identity, cpu_identity

FILES = cache.EntryFiles("system.h.gch", "system.h", lambda path: path.with_suffix(""))


def system_header(name: str, sources: Iterable[Path], flags: Sequence[str]) -> Path:
    """Return a header for `-include`: all that sources include of the system, compiled with flags.

    `name` makes its entry in the cache readable. Raises CompilerError without a compiler.
    """
    lines = (line for file in sources for line in file.read_text().splitlines())
    names = {line.split("//")[0].strip() for line in lines if line.startswith("#include <")}
    text = "".join(f"{name}\n" for name in sorted(names))
    command = compiler_command()
    key = "\n".join((text, compiler_identity(*command), *flags, cpu_identity()))

    def build(file: Path, out: Path) -> None:
        run = [*command, *flags, "-x", "c++-header", str(file), "-o", str(out)]
        result = subprocess.run(run, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[:4000]

    header = cache.load(FILES, name, key, text, build)
    os.utime(header.parent)  # in use: not the oldest
    return header
