"""A language model in plain PyTorch: embedding, backbone and head."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pararnn.base.parameters import Draw, draw_parameters
from pararnn.layers import RecurrentLayer
from pararnn.lm.backbone import Backbone
from pararnn.lm.cache import LMCache
from pararnn.lm.config import LMConfig
from pararnn.lm.loss import IGNORED, Head, mean_loss, next_labels
from pararnn.lm.mixers import input_draw
from pararnn.lm.rows import DocumentBorders, Rows, rows_of
from pararnn.messages.group import OnRanks
from pararnn.messages.shift import from_neighbour


class LanguageModel(OnRanks, nn.Module):
    """A language model (paper, section 5.2 and Appendix C) with any cell, attention, or both.

    Args:
        config: its sizes and parts.
        device, dtype: of the parameters; cells' parameters and biases are float32 in 16-bit models.

    Raises ValueError and CellError for unknown mixers and cells and for sizes that do not divide.
    """

    def __init__(
        self,
        config: LMConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, **factory)
        self.backbone = Backbone(config, **factory)
        self.lm_head = Head(config.hidden_size, config.vocab_size, bias=False, **factory)
        self.lm_head.batch_invariant = config.batch_invariant
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise again, see `draws`."""
        for module, name, draw in draws(self.embed_tokens, self.backbone, self.lm_head):
            draw_parameters(module, {name: draw})

    def forward(
        self,
        tokens: Tensor,
        cache: LMCache | None = None,
        *,
        padding_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens: Tensor | None = None,
    ) -> Tensor:
        """Compute logits of the next token after every token.

        Args:
            tokens: (B, T), any integer dtype.
            cache: of `new_cache`: continue after the tokens that it holds, and add these.
            padding_mask: (B, T), or (B, length + T) with a cache: 0 at padding, which may stand
                before and after the tokens of a row, with a cache only before them.
            position_ids: int (B, T); documents packed into one row begin where they are 0.
            cu_seq_lens: int (S + 1,), the starts of S documents packed into one row (B = 1) and the
                end of the last.

        Returns (B, T, vocab_size). Raises ValueError for packed documents with a cache, for borders
        that are not those of T tokens and padding between tokens (on CUDA the device asserts
        these), and for sizes and dtypes that do not fit.
        """
        args = {"padding_mask": padding_mask, "position_ids": position_ids}
        return self.lm_head(self.hidden(tokens, cache, **args, cu_seq_lens=cu_seq_lens))

    def hidden(self, tokens: Tensor, cache: LMCache | None = None, **rows: Tensor | None) -> Tensor:
        """Compute the head's input, (B, T, hidden_size); arguments as in `forward`."""
        return self._run(tokens, self.as_rows(tokens, cache, **rows), cache)

    def _run(self, tokens: Tensor, cut: Rows, cache: LMCache | None) -> Tensor:
        x = self.embed_tokens(tokens.long())
        out = self.backbone(x, cut, None if cache is None else cache.layers)
        if cache is not None:
            cache.length += tokens.shape[1]
        return out

    def as_rows(self, tokens: Tensor, cache: LMCache | None, **rows: Any) -> Rows:
        """Return the rows of tokens (B, T) as mixers read them; arguments as in `forward`."""
        borders = [name for name in ("position_ids", "cu_seq_lens") if rows.get(name) is not None]
        if cache is not None and borders:
            raise ValueError(
                f"packed documents ({borders[0]}) cannot be kept in a cache: give each its own "
                "row, padded on the left, or no cache"
            )
        if cache is not None and self.group:
            raise ValueError("a cache continues whole rows, and ranks share these: give no cache")
        if tokens.ndim != 2 or tokens.is_floating_point():
            raise ValueError(
                f"tokens must be integers (B, T), got {tokens.dtype} {tuple(tokens.shape)}"
            )
        if cache is not None and cache.places is not None:
            if rows.get("padding_mask") is not None:
                raise ValueError("rows with pages have no padding: give no padding_mask")
            return Rows(cache.places.positions(cache.length, tokens.shape[1]))
        past = 0 if cache is None else cache.length
        attention, has_mask = self.backbone.needs_positions, rows.get("padding_mask") is not None
        if cache is not None and attention:
            if cache.masked and not has_mask:
                raise ValueError(
                    "the cache's rows had a padding_mask, and attention would read their padding "
                    f"as tokens: give one for all tokens so far, {(len(tokens), past)}, and the "
                    "new ones"
                )
            cache.masked = has_mask
        batch, steps = tokens.shape
        options: dict[str, Any] = {"past": past, "has_cache": cache is not None}
        options |= {"attention": attention, "group": self.group}
        return rows_of(batch, steps, tokens.device, DocumentBorders(**rows), **options)

    def loss(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        cache: LMCache | None = None,
        *,
        z_loss: float = 0.0,
        **rows: Any,
    ) -> Tensor:
        """Compute the mean cross-entropy in nats of every next token, without making all logits.

        labels (B, T) are the tokens themselves, -100 at those without loss. None is `tokens`
        without padding and without the first tokens of documents, which no token predicts. Other
        arguments as in `forward`, z_loss and derivatives as in `causal_lm_loss`. On several ranks
        it is the mean over all of them, of which each differentiates its part.
        """
        cut = self.as_rows(tokens, cache, **rows)
        labels = _labels(tokens, cut) if labels is None else labels
        hidden = self._run(tokens, cut, cache)
        targets = next_labels(labels, self.group)
        head = partial(self.lm_head, hidden, targets, shift=False, z_loss=z_loss)
        return mean_loss(head, targets, self.group)

    def log_probs(self, tokens: Tensor, **rows: Any) -> Tensor:
        """Compute the log-probability of every token (B, T), given those before it in its document.

        Returns (B, T) in float32 (float64 for float64), which can be differentiated as the loss: 0
        at padding and at the first token of a document, which no token predicts. Not all logits
        are made at once. With `batch_invariant` they are those that `sample` returns, to the bit.
        Arguments and errors as in `forward`, without a cache.
        """
        cut = self.as_rows(tokens, None, **rows)
        targets = next_labels(_labels(tokens, cut), self.group)
        chances: Tensor = self.lm_head(self._run(tokens, cut, None), targets, log_probs=True)
        return torch.cat(
            [from_neighbour(chances[:, -1:], self.group, False, 0), chances[:, :-1]], 1
        )

    def new_cache(self) -> LMCache:
        """Make an empty cache for `forward`."""
        return LMCache(len(self.backbone.layers))

    def recurrent_layers(self) -> list[RecurrentLayer]:
        """Return the recurrent layers, from the first block on."""
        return [layer for layer in self.modules() if isinstance(layer, RecurrentLayer)]


def _labels(tokens: Tensor, cut: Rows) -> Tensor:
    """Return the tokens as labels, -100 at padding and at the first tokens of documents."""
    labels = tokens.long()
    for mask in (cut.start, None if cut.real is None else ~cut.real):
        labels = labels if mask is None else labels.masked_fill(mask, IGNORED)
    return labels


def draws(
    embedding: nn.Embedding, backbone: Backbone, head: nn.Linear
) -> Iterator[tuple[nn.Module, str, Draw]]:
    """Yield for every parameter of a language model its module, its name there, and its draw.

    Outside the cells they are DCLM's Gaussians, cut at three standard deviations: 1/sqrt(d) for the
    embedding, the head and input projections; 1/sqrt(h) for the last matrix of an MLP; that matrix
    and output projections smaller by sqrt(2 (layer + 1)), layers counted from 0. Cells: see
    `pararnn.RecurrentLayer`.
    """
    yield embedding, "weight", input_draw(embedding.embedding_dim)
    if head.weight is not embedding.weight:
        yield head, "weight", input_draw(head.in_features)
    yield from backbone.draws()


def bits_per_byte(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean cross-entropy in bits of logits (..., 256) and integer targets (...)."""
    nats = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten().long())
    return nats / math.log(2)


def set_solver(model: nn.Module, solver: str, backend: str = "auto") -> None:
    """Set the pair of every recurrent layer in `model`; names as in `pararnn.solve`."""
    for layer in model.modules():
        if isinstance(layer, RecurrentLayer):
            layer.solver, layer.backend = solver, backend
