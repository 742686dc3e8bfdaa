"""The text that benchmarks/learn.py learns, as tokens: books, Python's packages, and programs.

Writes train.bin, valid.bin and meta.json into a folder for each corpus, by the tokenizer of
`pararnn.lab.train` (byte-level BPE, trained on what is learned) and its packing.

English: every book of a folder but moby_dick, which is held out. Code: the .py files of
learn_packages.txt, where a package is installed in that version from there, or else by `pip
download --no-deps`; each content once, in the order of a hash of the path, by which one file in
HELD_OUT is held out.

Programs: C, Python and documents of the projects of learn_sources.txt, some of which are held out
whole, each text once (learn_sources.py), in the order of a hash of the path. They are written as
packs of tokens, small enough to be carried one by one (learn_packs.py).

    python benchmarks/learn_data.py english --books FOLDER [--out runs/learn]
    python benchmarks/learn_data.py code [--out runs/learn]
    python benchmarks/learn_data.py programs [--downloads runs/downloads] [--out runs/learn]
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import learn_packs
import learn_sources
from common import new_parser
from learn_sources import LARGEST, PACKAGES, File

from pararnn.lab.train.config import DataConfig
from pararnn.lab.train.corpus.packing import SAMPLE
from pararnn.lab.train.corpus.prepare import prepare
from pararnn.lab.train.corpus.tokenizer import train_tokenizer

VOCABULARY, LENGTH = 8192, 2048
CODE_TOKENS = 19_500_000
"""As many as 40 MiB hold, in 16 bits each, in addition to the held-out ones."""
HELD_OUT = 100
BOOK = "moby_dick"

Source = tuple[str, bytes]
"""A file's path, the package's name before it, and its content."""


def files_installed(name: str, version: str) -> Iterator[Source] | None:
    """Return the .py files of a package that is installed in that version; None where it is not."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if distribution.version != version:
        return None
    files = [
        file for file in distribution.files or () if file.suffix == ".py" and ".." not in file.parts
    ]
    return ((f"{name}/{file}", Path(str(file.locate())).read_bytes()) for file in files)


def download(name: str, version: str) -> Iterator[Source]:
    """Yield the .py files of a package's wheel, or of its sdist where it has none."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["pip", "download", "--no-deps", "--quiet", "-d", folder, f"{name}=={version}"]
        subprocess.run([sys.executable, "-m", *command], check=True)
        (archive,) = Path(folder).iterdir()
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as whole:
                for path in whole.namelist():
                    if path.endswith(".py"):
                        yield f"{name}/{path}", whole.read(path)
        else:
            with tarfile.open(archive) as tar:
                for member in tar:
                    file = tar.extractfile(member) if member.name.endswith(".py") else None
                    if file is not None:
                        yield f"{name}/{member.name}", file.read()


def sources(packages: Iterable[str]) -> Iterator[Source]:
    """Yield the .py files of packages, given as name==version."""
    for package in packages:
        name, _, version = package.partition("==")
        yield from files_installed(name, version) or download(name, version)


def place(path: str) -> int:
    """Return a number that depends on the path alone; it orders files and chooses held-out ones."""
    return int(hashlib.sha256(path.encode()).hexdigest(), 16)


def split(files: Iterable[Source]) -> tuple[list[str], list[str]]:
    """Return texts to learn and held-out ones: UTF-8, none twice, empty or over LARGEST."""
    contents: dict[bytes, str] = {}
    for path, content in sorted(files, key=lambda each: place(each[0])):
        if 0 < len(content) <= LARGEST:
            contents.setdefault(content, path)
    parts: tuple[list[str], list[str]] = ([], [])
    for content, path in contents.items():
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue  # few, and no tokenizer of UTF-8 reads them
        parts[place(path) % HELD_OUT == 0].append(text)
    return parts


def english(books: Path, folder: Path) -> DataConfig:
    """Return the config of the books; links to those that are learned go into the folder."""
    paths = sorted(books.glob("*.txt*"))
    (held_out,) = (path for path in paths if path.name.startswith(BOOK))
    train = folder / "train"
    train.mkdir()
    for path in paths:
        if path != held_out:
            shutil.copy(path, train)
    return DataConfig(train=str(train), valid=str(held_out))


def code(folder: Path) -> DataConfig:
    """Return the config of the packages' sources; they are written to the folder as JSON lines."""
    names = ("train", "valid")
    for name, texts in zip(names, split(sources(PACKAGES.read_text().split())), strict=True):
        print(f"{name}: {len(texts)} files, {sum(len(t.encode()) for t in texts) / 1e6:.1f} MB")
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    train, valid = (str(folder / f"{name}.jsonl") for name in names)
    return DataConfig(train=train, valid=valid, tokens=CODE_TOKENS)


HELD_OUT_BYTES = 1_500_000
"""Of each kind of text in the held-out projects, at most, and a file's."""
SHARES = {"c": 0.5, "python": 1.0, "documents": 0.5}
"""Of the files of each kind, those that are learned."""


def programs(downloads: Path, out: Path) -> None:
    """Write the packs of the projects' tokens, and their tokenizer."""
    files = itertools.chain.from_iterable(
        learn_sources.read(project, downloads) for project in learn_sources.projects()
    )
    texts: dict[tuple[str, str], list[File]] = {}
    for file in learn_sources.without_copies(files):
        if file.project.use == "held-out" or chance(file.path) < SHARES[file.kind]:
            texts.setdefault((file.project.use, file.kind), []).append(file)
    for key, every in texts.items():
        every.sort(key=lambda file: place(file.path))
        if key[0] == "held-out":
            sizes = itertools.accumulate(len(file.text.encode()) for file in every)
            texts[key] = every[: sum(size <= HELD_OUT_BYTES for size in sizes)]
    rows = [
        {"use": use, "kind": kind, "files": len(every)}
        | {"projects": len({file.project.name for file in every})}
        | {"bytes": sum(len(file.text.encode()) for file in every)}
        for (use, kind), every in texts.items()
    ]
    print(*rows, sep="\n", flush=True)
    held_out, learn = (
        [file for (of, _), every in texts.items() if of == use for file in every]
        for use in ("held-out", "learn")
    )
    learn.sort(key=lambda file: place(file.path))
    sizes = itertools.accumulate(len(file.text) for file in learn)
    sample = [file.text for file, size in zip(learn, sizes, strict=True) if size <= SAMPLE]
    train_tokenizer(sample, VOCABULARY, out)
    learn_packs.write(out, (f.text for f in learn), [f.text for f in held_out], rows, LENGTH)


def chance(path: str) -> float:
    """Return a number in [0, 1) that depends on the path alone, but not as `place` does."""
    return place(f"chance {path}") / 2**256


def write(config: DataConfig, out: Path, vocabulary: int, length: int, work: Path) -> None:
    """Tokenise, and copy what learn.py reads."""
    config = replace(
        config, tokenizer=f"bpe:{vocabulary}", sequence_length=length, cache=str(work / "cache")
    )
    corpus = prepare(config)
    out.mkdir(parents=True, exist_ok=True)
    for name in ("train.bin", "valid.bin", "meta.json"):
        shutil.copy(corpus.folder / name, out)
    for name, rows in (("train", corpus.train), ("valid", corpus.valid)):
        print(f"{name}: {rows.part}, {rows.part.bytes_per_token:.3f} bytes a token", flush=True)


def main() -> None:
    parser = new_parser(__doc__, out=Path("runs/learn"))
    parser.add_argument("corpus", choices=("english", "code", "programs"))
    parser.add_argument("--downloads", type=Path, default=Path("runs/downloads"))
    parser.add_argument("--books", type=Path, help="the folder of books, for english")
    args = parser.parse_args()
    if args.corpus == "english" and args.books is None:
        parser.error("english needs --books FOLDER")
    if args.corpus == "programs":
        programs(args.downloads, args.out / "packs")
        return
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        config = english(args.books, work) if args.corpus == "english" else code(work)
        write(config, args.out / args.corpus, VOCABULARY, LENGTH, work)


if __name__ == "__main__":
    main()
