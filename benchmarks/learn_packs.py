"""Packs: a corpus's tokens in files that are small enough to be carried one by one.

A folder of packs has tokens to learn, `train-000.bin.xz` and so on, and all else in `rest.zip`:
held-out tokens, probes (learn_probes.py) and meta.json. A later pack may come alone. Tokens of 16
bits under xz take four fifths of what their texts do under bzip2, as source code repeats itself,
and are there in seconds.
"""

from __future__ import annotations

import lzma
import os
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import learn_probes
import numpy as np

from pararnn.lab.train.corpus.packing import Part
from pararnn.lab.train.corpus.tokenizer import Tokenizer, load_tokenizer

BYTES = 215_000_000
"""Of the texts of a pack, at most, which take less than 40 MiB there."""
BATCH = 1 << 8
"""Texts that a process makes tokens of at once."""
REST, META = "rest.zip", "meta.json"
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 27, "lc": 3, "lp": 1, "pb": 1}]
"""Of numbers of 16 bits; the window is about a pack."""


def packs_of(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield the texts of each pack, in order."""
    size, pack = 0, list[str]()
    for text in texts:
        length = len(text.encode()) + 1
        if size + length > BYTES:
            yield pack
            size, pack = 0, []
        size += length
        pack.append(text)
    yield pack


def tokens_of(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """Return the tokens of texts, with the end of a document after each. NULs are blanks."""
    texts = [text.replace("\0", " ") for text in texts]
    batches = (texts[start : start + BATCH] for start in range(0, len(texts), BATCH))
    ids = (one for batch in batches for one in tokenizer.encode_all(batch))
    return np.concatenate([np.array([*one, tokenizer.end], np.uint16) for one in ids])


def write_pack(folder: Path, number: int, texts: Sequence[str]) -> np.ndarray | None:
    """Write a pack of texts into a folder that has their tokenizer; return the first one's tokens.

    Probes read these, and others need not come back from the process that made them.
    """
    tokens = tokens_of(load_tokenizer(str(folder)), texts)
    path = folder / f"train-{number:03d}.bin.xz"
    path.write_bytes(lzma.compress(tokens.tobytes(), filters=FILTERS))
    print(f"{path.name}: {len(tokens)} tokens, {path.stat().st_size} bytes", flush=True)
    return tokens if number == 0 else None


def write(
    packs: Path,
    learn: Iterable[str],
    held_out: Sequence[str],
    sources: Sequence[Mapping[str, Any]],
    length: int,
) -> None:
    """Write a folder of packs, which has the tokenizer, by a process a core.

    sources: the kinds of text. length: of the probes' rows.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process works with one thread
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork")) as pool:
        numbered = enumerate(packs_of(learn))
        tasks = [pool.submit(write_pack, packs, n, texts) for n, texts in numbered]
        learned, *_ = [task.result() for task in tasks]
    tokenizer = load_tokenizer(str(packs))
    tokens = tokens_of(tokenizer, held_out)
    valid = Part(len(tokens), len(held_out), sum(len(text.encode()) for text in held_out))
    about = {"dtype": "uint16", "vocabulary": tokenizer.vocabulary, "end": tokenizer.end}
    kinds = [source for source in sources if source["use"] == "held-out"]
    with tempfile.TemporaryDirectory() as name:
        rest = Path(name)
        tokens.tofile(rest / "valid.bin")
        meta = {**about, "valid": asdict(valid)}
        learn_probes.write(rest, tokenizer, meta, learned, kinds, length)
        with zipfile.ZipFile(packs / REST, "w", zipfile.ZIP_LZMA) as file:
            # meta.json last: a folder that has it has all.
            for path in sorted(rest.iterdir(), key=lambda path: (path.name == META, path.name)):
                file.write(path, path.name)


def unpack(packs: Path, folder: Path) -> None:
    """Write what packs hold into a folder, but files that are there.

    Raises SystemExit where a pack before others is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    new = [path for path in packs.glob("train-*.bin.xz") if not (folder / path.stem).exists()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(partial(unpack_one, folder), new))
    check([path.name for path in sorted(folder.glob("train-*.bin"))])
    if not (folder / META).exists():
        with zipfile.ZipFile(packs / REST) as file:
            file.extractall(folder)


def unpack_one(folder: Path, pack: Path) -> None:
    """Write the tokens of a pack into a folder; the file is whole once it has its name."""
    path = folder / pack.stem
    path.with_suffix(".new").write_bytes(lzma.decompress(pack.read_bytes()))
    path.with_suffix(".new").replace(path)


def check(names: Sequence[str]) -> None:
    """Raise SystemExit unless the packs are the first ones."""
    if list(names) != [f"train-{number:03d}.bin" for number in range(len(names))] or not names:
        raise SystemExit(f"packs must be there from the first on, without gaps; got {names}")
