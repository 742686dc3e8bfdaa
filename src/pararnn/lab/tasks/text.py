"""Bytes to model: a corpus with held-out text, windows of it, and count-based baselines."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pararnn.base.errors import PararnnError

BYTES = 256
CONTINUATION = frozenset(bytes([value]) for value in range(0x80, 0xC0))
"""Bytes of a character of UTF-8 after its first, of which there are at most three."""
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
    """Read the source of Python's standard library, in the order of the paths.

    `root` is the library's folder; None is Python's own. Whole files are held out: those whose
    path's hash is in the lowest `valid_share` of all hashes. Raises TextError where no source is
    installed.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    splits: tuple[list[bytes], list[bytes]] = ([], [])
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        if EXCLUDED.isdisjoint(Path(name).parts):
            number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
            splits[number < valid_share].append((root / name).read_bytes())
    if not all(any(files) for files in splits):
        raise TextError(f"no Python source to train on in {root}; give a file with --text")
    train, valid = (_tensor(b"\n".join(files)) for files in splits)
    return Corpus("the Python standard library", train, valid)


def file_corpus(path: Path, valid_share: float = 0.1, min_bytes: int = 1024) -> Corpus:
    """Read a file's bytes, and hold out the last `valid_share` of them, whole characters of UTF-8.

    Raises TextError when the file cannot be read, is empty, or leaves fewer than `min_bytes` for
    training or for validation.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TextError(f"cannot read the text file {path}: {error.strerror}") from error
    if not data:
        raise TextError(f"the text file {path} is empty")
    cut = len(data) - int(len(data) * valid_share)
    cut -= next((n for n in range(4) if data[cut - n : cut - n + 1] not in CONTINUATION), 0)
    if min(cut, len(data) - cut) < min_bytes:
        raise TextError(
            f"the text file {path} has {len(data)} bytes, too few: both the training part and "
            f"the held-out {valid_share:.0%} need {min_bytes}"
        )
    return Corpus(path.name, _tensor(data[:cut]), _tensor(data[cut:]))


def random_windows(data: Tensor, batch: int, steps: int, generator: torch.Generator) -> Tensor:
    """Return `batch` windows of steps + 1 bytes from random starts: uint8 (B, T + 1) on the CPU.

    Inputs are all but the last byte and targets all but the first. Raises TextError when `data`
    is shorter than a window.
    """
    windows = _windows(data, steps)
    return windows[torch.randint(len(windows), (batch,), generator=generator)]


def spread_windows(data: Tensor, count: int, steps: int) -> Tensor:
    """Return at most `count` windows of steps + 1 bytes, spread evenly: uint8 (B, T + 1).

    Their targets do not overlap, so short data gives fewer. Raises TextError when `data` is
    shorter than a window.
    """
    windows = _windows(data, steps)
    last = len(windows) - 1
    count = min(count, last // steps + 1)
    return windows[torch.linspace(0, last, count, dtype=torch.float64).long()]


def _windows(data: Tensor, steps: int) -> Tensor:
    """Return a view of all windows of steps + 1 bytes."""
    if len(data) <= steps:
        raise TextError(f"{len(data)} bytes are too few for a window of {steps} + 1")
    return data.unfold(0, steps + 1, 1)


def unigram_bits(train: Tensor, valid: Tensor) -> float:
    """Return bits per byte of `valid` (all but its first byte) under the frequencies in `train`.

    Add-one smoothing: p(b) = (n_b + 1) / (n + 256).
    """
    return -_unigram(train).log2()[valid[1:].long()].mean().item()


def bigram_bits(train: Tensor, valid: Tensor) -> float:
    """Return bits per byte of `valid` (all but its first byte) given the byte before.

    Smoothed by one count spread like the unigram: p(b | a) = (n_ab + p(b)) / (n_a + 1).
    """
    pairs = _pairs(train).bincount(minlength=BYTES * BYTES).view(BYTES, BYTES)
    chances = (pairs + _unigram(train)) / (pairs.sum(1, keepdim=True) + 1)
    return -chances.flatten()[_pairs(valid)].log2().mean().item()


def _unigram(data: Tensor) -> Tensor:
    return (data.bincount(minlength=BYTES) + 1).double() / (len(data) + BYTES)


def _pairs(data: Tensor) -> Tensor:
    return data[:-1].long() * BYTES + data[1:]


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
