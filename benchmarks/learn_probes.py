"""Probes of trained models: rows of tokens, some of which count, in classes.

Of held-out text the classes are the kind of text, the place in the document, how far back the last
of an equal pair of tokens stands that is rare in what is learned ("names"), and how far back a
closing bracket's opening one is. Made-up rows ask for copies of random tokens, for one of several
values by its name, and for a value through a chain of variables. `write` makes them, once, and
`probe_rows` has a model answer them, without any training for it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from learn_run import Row, Trainee

Array = Any
PLACES = (16, 64, 256, 1024)
DISTANCES = (16, 64, 256, 1024)
"""Limits of classes, in tokens; the last class has no limit."""
RARE = 1e-6
"""Share of the pairs of what is learned, up to which a pair is rare."""
COPIES, VALUES, HOPS = (32, 128, 512), (4, 16, 64), (0, 1, 2, 4)
ROWS = 64
"""Made-up rows of a class."""
CLOSING = {")": "(", "]": "[", "}": "{"}
HEAD_ROWS = 1 << 14
"""Tokens whose logits are there at once."""


class Probe(NamedTuple):
    """tokens (R, T); classes (R, T): 0 for tokens that do not count, else the class's number in
    `labels`, from 1 on. A row's first token does not count."""

    tokens: Array
    classes: Array
    labels: Sequence[str]


def rows_of(tokens: Array, length: int, fill: int) -> Array:
    """Return rows (R, T) that overlap by a token, so that each but the first is predicted once."""
    count = -(-(len(tokens) - 1) // (length - 1))
    whole = np.full(count * (length - 1) + 1, fill, tokens.dtype)
    whole[: len(tokens)] = tokens
    return np.lib.stride_tricks.sliding_window_view(whole, length)[:: length - 1].copy()


def class_of(distance: Array, limits: Sequence[int]) -> Array:
    """Return the number of a distance's class, from 1 on."""
    return np.searchsorted(limits, distance, side="right") + 1


def limits_in_words(limits: Sequence[int]) -> list[str]:
    """Return the labels of the classes of `class_of`."""
    pairs = zip((0, *limits), limits, strict=False)
    return [*(f"{low}-{high - 1}" for low, high in pairs), f"{limits[-1]}-"]


def starts(row: Array, end: int) -> Array:
    """Return for each token of a row where its document begins there."""
    first = np.zeros(len(row), np.int64)
    first[1:] = np.where(row[:-1] == end, np.arange(1, len(row)), 0)
    return np.maximum.accumulate(first)


def places(rows: Array, end: int) -> Probe:
    """Return the place of tokens in their documents, as far as the row has these."""
    before = np.stack([np.arange(len(row)) - starts(row, end) for row in rows])
    classes = class_of(before, PLACES)
    classes[:, 0] = 0
    return Probe(rows, classes, limits_in_words(PLACES))


def names(rows: Array, end: int, counts: Array, texts: Sequence[str]) -> Probe:
    """Return tokens with letters that end a rare pair which stands in the row's document before."""
    vocabulary = len(texts)
    letters = np.array([any(c.isalpha() for c in text) for text in texts])
    classes = np.zeros(rows.shape, np.int64)
    limit = RARE * counts.sum()
    for row, own in zip(rows, classes, strict=True):
        pairs = row[:-1].astype(np.int64) * vocabulary + row[1:]
        first, last = starts(row, end), dict[int, int]()
        rare = (counts[pairs] <= limit) & letters[row[1:]]
        for place, pair in enumerate(pairs.tolist(), 1):
            if rare[place - 1] and row[place] != end:
                known = last.get(pair, -1)
                if known > first[place]:
                    own[place] = class_of(place - known, DISTANCES)
                last[pair] = place
    return Probe(rows, classes, limits_in_words(DISTANCES))


def brackets(rows: Array, end: int, texts: Sequence[str]) -> Probe:
    """Return tokens that begin with a closing bracket whose opening one is in the row."""
    classes = np.zeros(rows.shape, np.int64)
    marks = [[c for c in text if c in "()[]{}"] for text in texts]
    begins = [text.lstrip()[:1] for text in texts]
    for row, own in zip(rows.tolist(), classes, strict=True):
        stack: list[tuple[str, int]] = []
        for place, token in enumerate(row):
            if token == end:
                stack = []
            for number, mark in enumerate(marks[token]):
                if mark in "([{":
                    stack.append((mark, place))
                elif stack and stack[-1][0] == CLOSING[mark]:
                    opening = stack.pop()[1]
                    if number == 0 and begins[token] == mark and 0 < place != opening:
                        own[place] = class_of(place - opening, DISTANCES)
    return Probe(rows, classes, limits_in_words(DISTANCES))


Piece = tuple[list[int], bool]
"""Tokens, and whether they count."""


def fill(make: Callable[[], Sequence[Piece]], end: int, length: int, label: int) -> Array:
    """Return rows (ROWS, 2, length) of tokens and classes: whole problems, one after the other."""
    rows = np.full((ROWS, 2, length), 0)
    rows[:, 0] = end
    for row in rows:
        place = 1
        while True:
            pieces = make()
            tokens = [token for piece, _ in pieces for token in piece]
            if place + len(tokens) + 1 > length:
                break
            counts = [counted for piece, counted in pieces for _ in piece]
            row[0, place : place + len(tokens)] = tokens
            row[1, place : place + len(tokens)] = np.array(counts) * label
            place += len(tokens) + 1
    return rows


def made_up(makers: Mapping[str, Callable[[], Sequence[Piece]]], end: int, length: int) -> Probe:
    """Return the probe of a maker of problems for each class."""
    parts = [fill(make, end, length, n) for n, make in enumerate(makers.values(), 1)]
    whole = np.concatenate(parts)
    return Probe(whole[:, 0], whole[:, 1], list(makers))


def problems(encode: Callable[[str], list[int]], texts: Sequence[str], end: int) -> dict[str, Any]:
    """Return makers of problems by probe and class."""
    draw = random.Random(0)
    words = [n for n, t in enumerate(texts) if t.isascii() and t.isalpha() and len(t) > 3]
    plain = [number for number in range(len(texts)) if number != end]
    equals, close, check, same = (encode(t) for t in (' = "', '"\n', "assert ", ' == "'))
    assign, line = encode(" = "), encode("\n")

    def copy(length: int) -> list[Piece]:
        tokens = draw.choices(plain, k=length)
        return [(tokens, False), (tokens[:1], False), (tokens[1:], True)]

    def recall(count: int) -> list[Piece]:
        chosen = draw.sample(words, 2 * count)
        pairs = list(zip(chosen[:count], chosen[count:], strict=True))
        given = [([name, *equals, value, *close], False) for name, value in pairs]
        asked: list[Piece] = []
        for name, value in draw.sample(pairs, min(count, 4)):
            asked += [([*check, name, *same], False), ([value], True), (close, False)]
        return [*given, *asked]

    def chain(hops: int) -> list[Piece]:
        chosen = draw.sample(words, 2 * (hops + 1) + 2)
        lines: list[Piece] = []
        ends = []
        for start in range(2):  # another chain beside it, of which nothing is asked
            value, *variables = chosen[start::2]
            lines.append(([variables[0], *equals, value, *close], False))
            steps = zip(variables[1:], variables, strict=False)
            lines += [([new, *assign, old, *line], False) for new, old in steps]
            ends.append((variables[-1], value))
        name, value = draw.choice(ends)
        return [*lines, ([*check, name, *same], False), ([value], True), (close, False)]

    cases = {"copy": (copy, COPIES), "recall": (recall, VALUES), "variables": (chain, HOPS)}
    return {
        probe: {str(number): (lambda make=make, n=number: make(n)) for number in numbers}
        for probe, (make, numbers) in cases.items()
    }


def write(
    folder: Path,
    tokenizer: Any,
    meta: dict[str, Any],
    learned: Array,
    kinds: Sequence[Mapping[str, Any]],
    length: int,
) -> None:
    """Write the probes of a corpus next to its held-out tokens, and meta.json.

    meta: its content without the probes. learned: tokens whose pairs are counted. kinds: name,
    files and bytes of the kinds of held-out text, in their order there. length: of rows.
    """
    end, vocabulary = meta["end"], meta["vocabulary"]
    valid = np.fromfile(folder / "valid.bin", meta["dtype"])
    pairs = learned[:-1].astype(np.int64) * vocabulary + learned[1:]
    counts = np.bincount(pairs, minlength=vocabulary**2)
    tokenizer = tokenizer.tokenizer
    texts = [tokenizer.decode([number]) for number in range(vocabulary)]
    tokens = np.concatenate([np.array([end], valid.dtype), valid])
    rows = rows_of(tokens, length, end)
    predicted = rows_of(np.arange(len(tokens)), length, -1)
    ends = np.cumsum([kind["files"] for kind in kinds])
    border = np.searchsorted(np.cumsum(tokens == end), ends + 1)  # one end stands in front
    of_kind: Array = np.searchsorted(border, predicted) + 1
    of_kind[:, 0] = 0
    probes = {
        "kind": Probe(rows, of_kind, [kind["kind"] for kind in kinds]),
        "place": places(rows, end),
        "names": names(rows, end, counts, texts),
        "brackets": brackets(rows, end, texts),
    }
    for probe in probes.values():
        probe.classes[predicted < 0] = 0

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    made = problems(encode, texts, end)
    probes |= {name: made_up(makers, end, length) for name, makers in made.items()}
    meta["kinds"] = list(kinds)
    meta["probes"] = {}
    for name, probe in probes.items():
        probe.tokens.astype(np.uint16).tofile(folder / f"probe-{name}.bin")
        probe.classes.astype(np.uint8).tofile(folder / f"classes-{name}.bin")
        meta["probes"][name] = {"length": length, "labels": list(probe.labels)}
        counts = np.bincount(probe.classes.ravel(), minlength=len(probe.labels) + 1)[1:].tolist()
        print(name, dict(zip(probe.labels, counts, strict=True)), flush=True)
    (folder / "meta.json").write_text(json.dumps(meta, indent=2), encoding="utf-8")


def read(folder: Path) -> dict[str, Probe]:
    """Return the probes of a corpus, by name; those of other files than `write` made: none."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    probes = {}
    for name, about in meta.get("probes", {}).items():
        tokens = np.fromfile(folder / f"probe-{name}.bin", np.uint16).astype(np.int64)
        classes = np.fromfile(folder / f"classes-{name}.bin", np.uint8).astype(np.int64)
        shape = (-1, about["length"])
        probes[name] = Probe(tokens.reshape(shape), classes.reshape(shape), about["labels"])
    return probes


@torch.no_grad()
def probe_rows(trainee: Trainee, folder: Path) -> Iterator[Row]:
    """Yield a row for each class of each probe: its tokens, their nats, and how many of them were
    the likeliest of all."""
    size, device = trainee.shape.rows, trainee.device
    for name, probe in read(folder).items():
        sums = torch.zeros(3, len(probe.labels) + 1, dtype=torch.float64, device=device)
        for start in range(0, len(probe.tokens), size):
            tokens = np.zeros((size, probe.tokens.shape[1]), np.int64)
            classes = np.zeros_like(tokens)
            own = slice(start, start + size)
            tokens[: len(probe.tokens[own])] = probe.tokens[own]
            classes[: len(probe.tokens[own])] = probe.classes[own]
            batch, kinds = (torch.from_numpy(each).to(device) for each in (tokens, classes))
            hidden = trainee.model.hidden(batch)[:, :-1].flatten(0, 1)
            parts = (x[:, 1:].flatten().split(HEAD_ROWS) for x in (batch, kinds))
            weight = trainee.model.lm_head.weight
            for rows, labels, of in zip(hidden.split(HEAD_ROWS), *parts, strict=True):
                logits = F.linear(rows, weight).float()
                nats = F.cross_entropy(logits, labels, reduction="none").double()
                hits = (logits.argmax(-1) == labels).double()
                sums.index_add_(1, of, torch.stack([torch.ones_like(nats), nats, hits]))
        count, nats, hits = sums.tolist()
        for number, label in enumerate(probe.labels, 1):
            yield {
                "probe": name,
                "label": label,
                "count": round(count[number]),
                "nats": round(nats[number], 2),
                "hits": round(hits[number]),
            }
