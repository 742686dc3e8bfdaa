"""Source code and documents that package registries serve: archives, and the files in them.

Lines of learn_sources.txt name a project's use (`learn` or `held-out`), the kind of its package
(`deb`: a package of Debian, `src`: a source package of Debian, `pip`: a Python package) and its
name. The packages of learn_packages.txt are learned too.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

SOURCES = Path(__file__).parent / "learn_sources.txt"
PACKAGES = Path(__file__).parent / "learn_packages.txt"
LARGEST = 200_000
"""Bytes of a file; larger ones are tables of data, mostly."""
KINDS = {
    "c": ("c", "h", "cc", "cpp", "cxx", "hpp"),
    "python": ("py",),
    "documents": ("rst", "txt", "texi", "texinfo", "pod", "sgml", "md", *map(str, range(1, 9))),
}
"""Kinds of text, and the suffixes of their files; those of digits are manual pages."""
KIND_OF = {suffix: kind for kind, suffixes in KINDS.items() for suffix in suffixes}
GENERATED = ("/asic_reg/", "/testsuite/", "/test/", "/unittests/", "_pb2.py", "/CMakeFiles/")
"""Parts of paths of files that a program wrote, or that are many variants of one."""
INSIDE = "./usr/src/"
"""Where packages of Debian have archives of sources."""
TAR = re.compile(r"\.tar(\.\w+)?$|\.tgz$")


class Project(NamedTuple):
    """A line of learn_sources.txt."""

    use: str
    registry: str
    name: str


class File(NamedTuple):
    """A file of text: its project, kind (a key of `KINDS`), path there, and content."""

    project: Project
    kind: str
    path: str
    text: str


def projects() -> list[Project]:
    """Return the projects, held-out ones first."""
    lines = [line.split() for line in SOURCES.read_text().splitlines()]
    packages = [["learn", "pip", name] for name in PACKAGES.read_text().split()]
    return sorted(Project(*words) for words in (*lines, *packages))


def apt(folder: Path, where: Path, *command: str) -> None:
    """Run apt-get in a folder, with Debian's sources and its section non-free, and its state in
    `folder`: nothing of the system changes."""
    state = folder / "apt"
    options = {
        "Dir::Etc::sourcelist": state / "sources.list",
        "Dir::Etc::sourceparts": os.devnull,
        "Dir::State::lists": state / "lists",
        "Dir::Cache": state / "cache",
        "APT::Sandbox::User": "root",
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    run = partial(subprocess.run, check=True, cwd=where)
    if not (state / "updated").exists():
        for name in ("lists/partial", "cache/archives/partial"):
            (state / name).mkdir(parents=True, exist_ok=True)
        (state / "sources.list").write_text(apt_sources())
        run(["apt-get", *words, "-q", "update"])
        (state / "updated").touch()
    run(["apt-get", *words, "-q", *command])


def apt_sources() -> str:
    """Return the lines of a list of apt's sources: the system's Debian, with all free sections and
    non-free."""
    stanzas = Path("/etc/apt/sources.list.d/debian.sources").read_text(encoding="utf-8")
    values = []
    for name in ("Signed-By", "URIs", "Suites"):
        found = re.search(rf"^{name}: *(\S+)", stanzas, re.MULTILINE)
        assert found is not None, name
        values.append(found[1])
    signed, *rest = values
    about = " ".join([f"[signed-by={signed}]", *rest, "main contrib non-free"])
    return f"deb {about}\ndeb-src {about}\n"


def fetch(project: Project, folder: Path) -> list[Path]:
    """Return a project's archives, downloaded into the folder unless they are there."""
    name, folder = project.name.partition("==")[0], folder.resolve()
    own = folder / f"{project.registry}-{name}"
    if not own.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as fresh:
            if project.registry == "pip":
                words = ["pip", "download", "--no-deps", "--ignore-requires-python", "--quiet"]
                words += ["-d", fresh, project.name]
                subprocess.run([sys.executable, "-m", *words], check=True)
            else:
                download = {"deb": ["download"], "src": ["source", "--download-only"]}
                apt(folder, Path(fresh), *download[project.registry], name)
            shutil.copytree(fresh, own)
    return sorted(path for path in own.iterdir() if path.is_file())


def members(path: str, file: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield paths and contents of an archive of tar, and of those in it."""
    with tarfile.open(fileobj=file, mode="r|*") as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isfile() else None
            if content is None:
                continue
            if TAR.search(member.name) and member.name.startswith(INSIDE):
                yield from members(member.name, content)
            elif kind_of(member.name) and member.size <= LARGEST:
                yield member.name, content.read()


def contents(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the paths and contents of an archive: a Debian package, a wheel or a tar."""
    if path.suffix == ".deb":
        command = ["dpkg-deb", "--fsys-tarfile", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            yield from members(path.name, process.stdout)
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as whole:
            for info in whole.infolist():
                if kind_of(info.filename) and info.file_size <= LARGEST:
                    yield info.filename, whole.read(info)
    elif TAR.search(path.name) and ".debian." not in path.name:
        with path.open("rb") as file:
            yield from members(path.name, file)


def kind_of(path: str) -> str | None:
    """Return the kind of a file by its path; None for those that are not read."""
    if any(part in f"/{path}" for part in GENERATED):
        return None
    return KIND_OF.get(path.removesuffix(".gz").rpartition(".")[2])


def read(project: Project, folder: Path) -> Iterator[File]:
    """Yield the files of a project: UTF-8, not empty, at most LARGEST bytes."""
    for archive in fetch(project, folder):
        for path, content in contents(archive):
            kind = kind_of(path)
            assert kind is not None
            try:
                text = (gzip.decompress(content) if path.endswith(".gz") else content).decode()
            except (UnicodeDecodeError, gzip.BadGzipFile, lzma.LZMAError):
                continue  # few, and no tokenizer of UTF-8 reads them
            if text.strip() and len(text) <= LARGEST:
                yield File(project, kind, f"{project.name}/{path}", text)


def without_copies(files: Iterable[File]) -> Iterator[File]:
    """Leave out files whose words stand in an earlier file in the same order."""
    known: set[bytes] = set()
    for file in files:
        key = hashlib.sha256("\n".join(file.text.split()).encode()).digest()
        if key not in known:
            known.add(key)
            yield file
