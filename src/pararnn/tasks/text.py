"""Bytes to model: a corpus with held-out text, windows of it, and count-based baselines."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pararnn.errors import PararnnError

BYTES = 256
EXCLUDED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})
"""Folders of the standard library that are no part of the corpus."""


class TextError(PararnnError, ValueError):
    """A text cannot serve as a corpus: missing, empty or too short."""


@dataclass(frozen=True)
class Corpus:
    """Text as bytes, uint8 (n,) each: `train`, and `valid`, which is never trained on."""

    name: str
    train: Tensor
    valid: Tensor


def stdlib_corpus(root: Path | None = None, valid_share: float = 0.1) -> Corpus:
    """The source of Python's standard library, in the order of the paths.

    `root` is the library's folder; None asks sysconfig. Whole files are held out: those whose
    path's hash is in the lowest `valid_share` of all hashes. Raises TextError where no source is
    installed.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    names = sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if EXCLUDED.isdisjoint(path.relative_to(root).parts)
    )
    held_out = {name for name in names if _share(name) < valid_share}
    train = _join(root / name for name in names if name not in held_out)
    valid = _join(root / name for name in names if name in held_out)
    if not len(train) or not len(valid):
        raise TextError(f"no Python source to train on in {root}; give a file with --text")
    return Corpus("the Python standard library", train, valid)


def file_corpus(path: Path, valid_share: float = 0.1, min_bytes: int = 1024) -> Corpus:
    """A file's bytes, the last `valid_share` of them held out.

    Raises TextError when the file cannot be read, is empty, or leaves fewer than `min_bytes` for
    either part.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TextError(f"cannot read the text file {path}: {error.strerror}") from error
    if not data:
        raise TextError(f"the text file {path} is empty")
    cut = len(data) - int(len(data) * valid_share)
    if min(cut, len(data) - cut) < min_bytes:
        raise TextError(
            f"the text file {path} has {len(data)} bytes, too few: both the training part and "
            f"the held-out {valid_share:.0%} need {min_bytes}"
        )
    return Corpus(path.name, _tensor(data[:cut]), _tensor(data[cut:]))


def random_windows(data: Tensor, batch: int, steps: int, generator: torch.Generator) -> Tensor:
    """`batch` windows of steps + 1 bytes at random places: uint8 (B, T + 1) on the CPU.

    Inputs are all but the last byte and targets all but the first. Raises TextError when `data`
    is shorter than a window.
    """
    last = _last_start(data, steps)
    starts = torch.randint(last + 1, (batch,), generator=generator)
    return data[starts.unsqueeze(1) + torch.arange(steps + 1)]


def spread_windows(data: Tensor, count: int, steps: int) -> Tensor:
    """At most `count` windows of steps + 1 bytes, spread evenly: uint8 (B, T + 1).

    Their targets do not overlap, so short data gives fewer. Raises TextError when `data` is
    shorter than a window.
    """
    last = _last_start(data, steps)
    count = min(count, last // steps + 1)
    starts = torch.linspace(0, last, count, dtype=torch.float64).long()
    return data[starts.unsqueeze(1) + torch.arange(steps + 1)]


def unigram_bits(train: Tensor, valid: Tensor) -> float:
    """Bits per byte of `valid` (all but its first byte) under the byte frequencies of `train`.

    Add-one smoothing: p(b) = (n_b + 1) / (n + 256).
    """
    bits = -np.log2(_unigram(train.numpy()))
    return float(bits[valid.numpy()[1:]].mean())


def bigram_bits(train: Tensor, valid: Tensor) -> float:
    """Bits per byte of `valid` (all but its first byte) given the byte before.

    Smoothed by one count spread like the unigram: p(b | a) = (n_ab + p(b)) / (n_a + 1).
    """
    data, held_out = train.numpy(), valid.numpy()
    pairs = np.bincount(_pairs(data), minlength=BYTES * BYTES).reshape(BYTES, BYTES)
    chances = (pairs + _unigram(data)) / (pairs.sum(1, keepdims=True) + 1)
    return float(-np.log2(chances.ravel()[_pairs(held_out)]).mean())


def _unigram(data: np.ndarray) -> np.ndarray:
    return (np.bincount(data, minlength=BYTES) + 1) / (len(data) + BYTES)


def _pairs(data: np.ndarray) -> np.ndarray:
    return data[:-1].astype(np.int64) * BYTES + data[1:]


def _last_start(data: Tensor, steps: int) -> int:
    if len(data) <= steps:
        raise TextError(f"{len(data)} bytes are too few for a window of {steps} + 1")
    return len(data) - steps - 1


def _share(name: str) -> float:
    """A number in [0, 1) that depends on the name only."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def _join(paths: Iterable[Path]) -> Tensor:
    return _tensor(b"\n".join(path.read_bytes() for path in paths))


def _tensor(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
