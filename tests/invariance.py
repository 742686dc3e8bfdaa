"""Random ways to compute some texts by a language model, each next to the text by itself."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from lm_kinds import add_noise, borders, pad_rows, positions, tokens
from torch import Tensor

from pararnn.lab.serving.batch import Batch
from pararnn.lm import LanguageModel, LMConfig, Prefixes
from pararnn.lm.prefixes import release
from pararnn.lm.reading import Reader

MATRIX = {"mixers": ("matrix", "matrix")}
KINDS: dict[str, dict[str, Any]] = {
    "gru": {"cell": "gru"},
    "lstm": {"cell": "lstm", "norm": "layer"},
    "head-lstm": {"cell": "head-lstm"},
    "gated-delta": {**MATRIX, "cell": "gated-delta", "cell_config": {"K": 4}},
    "hybrid": {"mixers": ("attention", "rnn"), "num_attention_heads": 2},
    "m2rnn": {**MATRIX, "cell": "m2rnn", "cell_config": {"K": 4}, "conv_kernel_size": 1},
}
DTYPES = (torch.float32, torch.bfloat16)
CASES = [(kind, dtype) for kind in KINDS for dtype in DTYPES]
SERVED = 3
"""Rows of the server's batch."""


@cache
def model_of(
    kind: str,
    dtype: torch.dtype,
    invariant: bool = True,
    device: str = "cpu",
    width: int = 24,
    heads: int = 2,
    hidden: int | None = None,
    norm: str | None = None,
) -> LanguageModel:
    """Build a small model, with noise on every parameter. hidden: width of the SwiGLU."""
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "num_hidden_layers": 2}
    sizes["intermediate_size"] = 2 * width - 8 if hidden is None else hidden
    sizes |= {"vocab_size": 48, "num_heads": heads}
    kinds = KINDS[kind] | ({} if norm is None else {"norm": norm})
    config = LMConfig(**sizes, **kinds, batch_invariant=invariant)
    wide = add_noise(LanguageModel(config))
    model = LanguageModel(config, dtype=dtype)
    model.load_state_dict(wide.state_dict())
    return model.to(device).eval()


@cache
@torch.no_grad()
def alone(model: LanguageModel, text: int, longest: int) -> Tensor:
    """Return the logits (T, V) of a whole text by itself."""
    return model(text_of(model, text, longest)[None])[0]


@cache
def text_of(model: LanguageModel, text: int, longest: int) -> Tensor:
    """Return a text, (T,)."""
    return tokens(longest, seed=20 + text).to(model.lm_head.weight.device)


class Schedule:
    """Ways in which some texts are computed; yields of each its logits and where they stand."""

    def __init__(
        self, model: LanguageModel, lengths: list[int], cuts: list[int], longest: int
    ) -> None:
        self.model, self.lengths, self.cuts = model, lengths, cuts
        self.device = model.lm_head.weight.device
        self.rows = [text_of(model, i, longest)[:length] for i, length in enumerate(lengths)]

    def pad(self, side: str) -> tuple[Tensor, Tensor]:
        batch, mask = pad_rows([row.cpu() for row in self.rows], side)
        return batch.to(self.device), mask.to(self.device)

    def padded(self) -> Iterator[tuple[int, int, Tensor]]:
        for side in ("left", "right"):
            batch, mask = self.pad(side)
            logits = self.model(batch, padding_mask=mask)
            for text, of_text in enumerate(logits):
                yield text, 0, of_text[mask[text].bool()]

    def packed(self) -> Iterator[tuple[int, int, Tensor]]:
        row = torch.cat(self.rows)[None]
        of_lengths = {"cu_seq_lens": borders, "position_ids": positions}
        for name, values_of in of_lengths.items():
            given = {name: values_of(self.lengths).to(self.device)}
            for text, logits in enumerate(self.model(row, **given)[0].split(self.lengths)):
                yield text, 0, logits

    def chunks(self) -> Iterator[tuple[int, int, Tensor]]:
        """The texts are rows of one batch, padded on the left, and read by chunks."""
        batch, mask = self.pad("left")
        memory, start = self.model.new_cache(), 0
        for end in (*sorted({cut for cut in self.cuts if cut < batch.shape[1]}), batch.shape[1]):
            chunk = batch[:, start:end]
            logits = self.model(chunk, memory, padding_mask=mask[:, :end])
            for text, of_text in enumerate(logits):
                is_token = mask[text, start:end].bool()
                yield text, int(mask[text, :start].sum()), of_text[is_token]
            start = end

    def served(self) -> Iterator[tuple[int, int, Tensor]]:
        """Texts join a running batch, after their prompts, and leave it when they end."""
        pool = Prefixes(self.model, budget=1 << 24, grain=3).pool
        batch, reader = Batch(self.model, SERVED, pool), Reader(self.model)
        waiting, running = list(range(len(self.rows))), {}
        clock = 0
        while waiting or running:
            free = next((row for row in range(SERVED) if row not in running), None)
            # A text arrives at its own time, or where nothing else runs.
            arrives = waiting and (self.cuts[waiting[0] % len(self.cuts)] <= clock or not running)
            if free is not None and arrives:
                text = waiting.pop(0)
                memory, prompt = batch.new_cache(), 1 + self.lengths[text] // 2
                half = prompt // 2
                for part in ([0, half], [half, prompt]):
                    if part[0] < part[1]:
                        some = self.rows[text][slice(*part)].tolist()
                        yield text, part[1] - 1, batch.head(reader.read(some, memory)[0][:, -1])
                batch.join(free, memory)
                release(memory)
                running[free] = text, prompt
                continue
            clock += 1
            column = [0] * SERVED
            for row, (text, at) in list(running.items()):
                if at >= self.lengths[text]:
                    del running[row]
                    batch.leave(row)
                else:
                    column[row] = int(self.rows[text][at])
            logits = batch.step(column)
            for row, (text, at) in list(running.items()):
                yield text, at, logits[row : row + 1]
                running[row] = text, at + 1

    def kept(self) -> Iterator[tuple[int, int, Tensor]]:
        """Texts continue from kept states of their beginnings, and of others'."""
        # Pages of a whole text must fit.
        is_large = "attention" in self.model.config.mixers and self.model.config.hidden_size > 24
        prefixes = Prefixes(self.model, budget=1 << (20 if is_large else 16), grain=3)
        for text, row in enumerate(self.rows):
            for end in sorted({*(cut for cut in self.cuts if cut < len(row)), len(row)}):
                _, hidden = prefixes.read_rows(self.model, row[None, :end])
                yield text, end - 1, self.model.lm_head(hidden)

    WAYS = (padded, packed, chunks, served, kept)


def schedules(longest: int) -> st.SearchStrategy:
    """Return the strategy of lengths of texts, cuts or times of arrival, and a way."""
    numbers = st.lists(st.integers(1, longest), min_size=1, max_size=4)
    return st.tuples(numbers, numbers, st.sampled_from(Schedule.WAYS))


@torch.no_grad()
def differs(model: LanguageModel, schedule: tuple, longest: int) -> bool:
    """Return whether a bit of a logit differs from that of the text by itself."""
    lengths, cuts, way = schedule
    count = 0
    for text, start, logits in way(Schedule(model, lengths, cuts, longest)):
        count += len(logits)
        if not torch.equal(logits, alone(model, text, longest)[start : start + len(logits)]):
            return True
    assert count
    return False
