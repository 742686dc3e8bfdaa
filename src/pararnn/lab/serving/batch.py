"""A running batch with a fixed number of rows; texts join and leave it between tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pararnn.base.errors import PararnnError
from pararnn.lm.cache import LMCache, SteadyCache
from pararnn.lm.loss import IGNORED
from pararnn.lm.model import LanguageModel
from pararnn.lm.replay import WORTH, Steps, next_logits, replayable


class ServingError(PararnnError, ValueError):
    """A model cannot be served, or a server cannot be set up as requested."""


class Batch:
    """Rows of a model, each with the memory of one text: one call computes a token of every row.

    The number of rows never changes, and so neither do the kernels and the order of their sums: a
    row's logits depend only on its tokens, to the bit. Free rows are computed and ignored.
    On a GPU the step is recorded and replayed.

    Args:
        model: on its device, with only recurrent mixers: their memory has a fixed size.
        rows: how many texts run at once.

    Raises ServingError for a model with another mixer.
    """

    def __init__(self, model: LanguageModel, rows: int) -> None:
        steady = [block.mixer.steady for block in model.backbone.blocks]
        if not all(steady):
            layer = steady.index(False)
            mixer = type(model.backbone.blocks[layer].mixer).__name__
            raise ServingError(
                f"layer {layer} of the model ({mixer}) has a memory that grows with the text, or a "
                "step that branches on values: models whose layers are all recurrent are served. "
                "Serve others by transformers serve"
            )
        self.model, self.rows = model, rows
        self.device = model.lm_head.weight.device
        self.cache, one = model.new_cache(), model.new_cache()
        self.read([0], one)  # any token, for the sizes of what is remembered
        self.cache.layers = [
            SteadyCache(*(None if x is None else _zeros(x, rows) for x in layer.read()))
            for layer in one.layers
        ]
        self.steps = Steps(model, self.cache) if replayable(model, WORTH) else None

    @torch.no_grad()
    def read(self, tokens: Sequence[int], memory: LMCache) -> Tensor:
        """Read tokens of one text after those of its memory; return logits (1, V) of the next."""
        row = torch.tensor([list(tokens)], device=self.device)
        return next_logits(self.model, row, memory)

    @torch.no_grad()
    def join(self, row: int, memory: LMCache) -> None:
        """Give a row the memory of a text."""
        for layer, layer_memory in zip(self.cache.layers, memory.layers, strict=True):
            for rows, new in zip(layer.read(), layer_memory.read(), strict=True):
                if rows is not None and new is not None:
                    rows[row] = new[0]

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> Tensor:
        """Read one token of every row; return logits (rows, V), which the next call overwrites."""
        column = torch.tensor(tokens, device=self.device)
        if self.steps is not None:
            return self.steps(column)
        return next_logits(self.model, column.unsqueeze(1), self.cache)

    @torch.no_grad()
    def log_probs(self, logits: Tensor, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each row's token; 0 where there is none (-1)."""
        targets = torch.tensor(tokens, device=self.device)
        head = self.model.lm_head
        return head.log_prob(logits, targets.masked_fill(targets < 0, IGNORED)).tolist()

    def is_repeatable(self) -> bool:
        """Return whether equal rows have equal bits here, wherever they are in the batch.

        Products of some numbers of rows sum the last ones in another order. It writes to all rows.
        """
        memory = self.model.new_cache()
        self.read(range(min(8, self.model.config.vocab_size)), memory)
        for row in range(self.rows):
            self.join(row, memory)
        for _ in range(3):  # on a GPU the first is called, the others are replayed
            logits = self.step([0] * self.rows)
        return bool((logits == logits[:1]).all())


def _zeros(tensor: Tensor, rows: int) -> Tensor:
    """Return zeros for all rows of the batch."""
    return tensor.new_zeros(rows, *tensor.shape[1:])
