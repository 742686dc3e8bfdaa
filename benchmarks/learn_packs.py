"""Packs: texts in files that are small enough to be carried one by one, and their tokens.

A folder of packs has texts to learn, `learn-000.zip` and so on, those that are held out,
`held-out.zip`, a tokenizer, and `sources.json` with the kinds of text. Texts are UTF-8 with a NUL
after each, in members that bzip2 packs. This takes less than half of what tokens of 13 bits do, as
source code repeats itself, and many cores soon make the tokens: `unpack` does, of all packs whose
tokens are not there yet, with a process a core. A later pack may come alone.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import learn_probes
import numpy as np

from pararnn.lab.train.corpus.packing import Part
from pararnn.lab.train.corpus.tokenizer import Tokenizer, load_tokenizer

BYTES, PIECE = 215_000_000, 2_700_000
"""Of the texts of a pack, at most, which take less than 46 MiB there, and of a member's, about: a
few blocks of bzip2."""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
SOURCES = "sources.json"
END = b"\0"


def write_pack(path: Path, texts: Iterable[str]) -> None:
    """Write texts as a pack."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2, compresslevel=9) as file:
        piece, number = bytearray(), 0
        for text in [*texts, None]:
            if piece and (text is None or len(piece) >= PIECE):
                file.writestr(f"{number:04d}", bytes(piece))
                piece, number = bytearray(), number + 1
            if text is not None:
                piece += text.replace("\0", " ").encode() + END


def packs_of(texts: Iterable[str]) -> Iterable[list[str]]:
    """Yield the texts of each pack, in order."""
    size, pack = 0, list[str]()
    for text in texts:
        length = len(text.encode()) + len(END)
        if size + length > BYTES:
            yield pack
            size, pack = 0, []
        size += length
        pack.append(text)
    yield pack


@cache
def tokenizer_of(folder: str) -> Tokenizer:
    """Return a folder's tokenizer, loaded once in a process."""
    return load_tokenizer(folder)


def tokens_of(folder: str, pack: Path, member: str) -> tuple[bytes, int, int]:
    """Return the tokens of a member's texts, with the end of a document after each, and the number
    of texts and of their bytes."""
    tokenizer = tokenizer_of(folder)
    with zipfile.ZipFile(pack) as file:
        content = file.read(member)
    texts = content.decode().split("\0")[:-1]
    ids = [np.array([*own, tokenizer.end], np.uint16) for own in tokenizer.encode_all(texts)]
    return np.concatenate(ids).tobytes(), len(texts), len(content) - len(texts)


def tokenise(pack: Path, folder: Path, name: str, processes: int) -> Part:
    """Write the tokens of a pack's texts to a file of the folder, which has the tokenizer."""
    with zipfile.ZipFile(pack) as file:
        members = file.namelist()
    path = folder / name
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process works with one thread
    tokenizer_of(str(folder))  # forks have it, and need not import what it takes
    with ProcessPoolExecutor(processes, mp_context=get_context("fork")) as pool:
        parts = list(pool.map(partial(tokens_of, str(folder), pack), members))
    path.with_suffix(".new").write_bytes(b"".join(tokens for tokens, _, _ in parts))
    path.with_suffix(".new").replace(path)
    count, size = sum(part[1] for part in parts), sum(part[2] for part in parts)
    return Part(path.stat().st_size // 2, count, size)


def unpack(packs: Path, folder: Path, length: int, processes: int | None = None) -> None:
    """Make the tokens of all packs in the folder that are not there, and the probes.

    length: of the probes' rows. Raises SystemExit where a pack before them is missing.
    """
    begin, processes = time.time(), processes or os.cpu_count() or 1
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER:
        shutil.copy(packs / name, folder)
    for pack in sorted(packs.glob("learn-*.zip")):
        name = f"train-{pack.stem.removeprefix('learn-')}.bin"
        if not (folder / name).exists():
            part = tokenise(pack, folder, name, processes)
            print(f"{name}: {part}, {time.time() - begin:.0f} s", flush=True)
    check([path.name for path in sorted(folder.glob("train-*.bin"))])
    if not (folder / "meta.json").exists():
        valid = tokenise(packs / "held-out.zip", folder, "valid.bin", processes)
        tokenizer = tokenizer_of(str(folder))
        about = {"dtype": "uint16", "vocabulary": tokenizer.vocabulary, "end": tokenizer.end}
        sources = json.loads((packs / SOURCES).read_text(encoding="utf-8"))
        kinds = [source for source in sources if source["use"] == "held-out"]
        learn_probes.write(folder, tokenizer, {**about, "valid": asdict(valid)}, kinds, length)
        print(f"held out: {valid}, {time.time() - begin:.0f} s", flush=True)


def check(names: Sequence[str]) -> None:
    """Raise SystemExit unless the packs are the first ones."""
    if list(names) != [f"train-{number:03d}.bin" for number in range(len(names))] or not names:
        raise SystemExit(f"packs must be there from the first on, without gaps; got {names}")


def write(
    packs: Path, learn: Iterable[str], held_out: Iterable[str], sources: Sequence[Mapping[str, Any]]
) -> None:
    """Write a folder of packs; the tokenizer is there."""
    (packs / SOURCES).write_text(json.dumps(list(sources), indent=1), encoding="utf-8")
    write_pack(packs / "held-out.zip", held_out)
    for number, texts in enumerate(packs_of(learn)):
        write_pack(packs / f"learn-{number:03d}.zip", texts)
