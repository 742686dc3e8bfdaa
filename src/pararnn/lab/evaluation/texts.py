"""Perplexity and bits per byte of whole documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pararnn.base.errors import EvaluationError
from pararnn.lm.hf import ParaRNNForCausalLM
from pararnn.lm.hf.cache import NAME
from pararnn.lm.loss import CHUNK_LOGITS, IGNORED

LENGTH = 2048
"""Default number of tokens that a model reads at once."""
SORTED = 16
"""Batches of documents that are sorted by length together, so that rows have little padding."""


@dataclass(frozen=True)
class TextScore:
    """Score of a model on a text. nats: cross-entropy, summed over all tokens."""

    documents: int
    tokens: int
    bytes: int
    nats: float

    @property
    def nats_per_token(self) -> float:
        """Mean cross-entropy of a token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Perplexity of a token; infinite if it is more than a float holds."""
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits for a byte of the text as UTF-8; it does not depend on the tokenizer."""
        return self.nats / math.log(2) / self.bytes

    def to_dict(self) -> dict[str, float]:
        """Return the fields and the means."""
        means = ("nats_per_token", "perplexity", "bits_per_byte")
        return asdict(self) | {name: getattr(self, name) for name in means}


def score_texts(
    model: Any, tokenizer: Any, texts: Iterable[str], *, batch: int = 8, length: int | None = None
) -> TextScore:
    """Score a causal language model of transformers on whole documents.

    A document's first token is predicted from the token that begins or ends documents, as between
    packed ones; a tokenizer that has neither leaves it log(vocabulary) nats. A model without
    attention (see `carries_states`) reads on with its states, so nothing before a token is lost.
    Others read windows of `length` tokens, each beginning in the middle of the one before, so that
    a token has at least length / 2 tokens before it, as far as its document has them.

    Args:
        texts: documents; those without text count as documents only.
        batch: documents that are read at once; it does not change the result.
        length: tokens that are read at once; None is `length_of`. It changes the result of models
            with attention only.

    Raises EvaluationError where there is no text at all, and for logits that are NaN.
    """
    length = length or length_of(model)
    first = first_token(tokenizer)
    documents = tokens = size = 0
    nats = 0.0
    texts = iter(texts)
    while group := list(islice(texts, batch * SORTED)):
        size += sum(len(text.encode("utf-8")) for text in group)
        rows = sorted((_encode(tokenizer, text) for text in group), key=len)
        documents, tokens = documents + len(rows), tokens + sum(map(len, rows))
        rows = [row for row in rows if len(row)]
        for start in range(0, len(rows), batch):
            nats += _summed_nats(model, rows[start : start + batch], first, length)
    if not tokens:
        raise EvaluationError(f"there is no text in {documents} documents")
    check_number(nats)
    return TextScore(documents, tokens, size, nats)


def check_number(log_likelihood: float) -> None:
    """Raise EvaluationError if a log-likelihood is NaN."""
    if math.isnan(log_likelihood):
        raise EvaluationError(
            "the model's logits are NaN: it cannot be evaluated. Try --dtype float32; if they "
            "are NaN there too, its training diverged"
        )


def carries_states(model: Any) -> bool:
    """Return True if a model can read any length in parts: ours, without attention."""
    return isinstance(model, ParaRNNForCausalLM) and not model.model.backbone.needs_positions


def length_of(model: Any) -> int:
    """Return the number of tokens that a model reads at once, by its config."""
    return getattr(model.config, "max_position_embeddings", None) or LENGTH


def first_token(tokenizer: Any) -> int | None:
    """Return the token before a document: the one that begins documents, or that ends them."""
    begin: int | None = tokenizer.bos_token_id
    return tokenizer.eos_token_id if begin is None else begin


def windows(count: int, length: int, overlap: int) -> Iterator[tuple[int, int, int]]:
    """Yield where each window begins, where its new tokens begin, and where it ends."""
    end = 0
    while end < count:
        new, begin = end, max(end - overlap, 0)
        end = min(begin + length, count)
        yield begin, new, end


def _encode(tokenizer: Any, text: str) -> Tensor:
    """Return the ids of a text, without special tokens even if the text spells one."""
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
    return torch.tensor(ids["input_ids"], dtype=torch.int64)


@torch.no_grad()
def _summed_nats(model: Any, rows: list[Tensor], first: int | None, length: int) -> float:
    total = 0.0
    if first is None:
        total += len(rows) * math.log(model.config.vocab_size)
        rows, inputs = [row[1:] for row in rows], [row[:-1] for row in rows]
    else:
        inputs = [torch.cat([row.new_tensor([first]), row[:-1]]) for row in rows]
    # Padding is after all tokens that count: a causal model does not look ahead.
    ids = pad_sequence(inputs, batch_first=True).to(model.device)
    targets = pad_sequence(rows, batch_first=True, padding_value=IGNORED).to(model.device)
    carries, cache = carries_states(model), None
    limit = CHUNK_LOGITS.get(ids.device.type, CHUNK_LOGITS["cpu"])
    chunk = max(1, limit // model.config.vocab_size)
    for begin, new, end in windows(ids.shape[1], length, 0 if carries else length // 2):
        hidden, head, cache = _read(model, ids[:, begin:end], cache, carries)
        real = targets[:, new:end] != IGNORED
        states, labels = hidden[:, new - begin :][real], targets[:, new:end][real]
        for some, ids_of_some in zip(states.split(chunk), labels.split(chunk), strict=True):
            total += _cross_entropy(head(some), ids_of_some)
    return total


def _read(
    model: Any, ids: Tensor, cache: Any, carries: bool
) -> tuple[Tensor, Callable[[Tensor], Tensor], Any]:
    """Return hidden states, the function from them to logits, and the cache after these tokens."""
    if not isinstance(model, ParaRNNForCausalLM):  # its head may be more than a product
        return model(ids, use_cache=False).logits, lambda logits: logits, None
    out = model.model(ids, cache=cache, use_cache=carries)
    return out.last_hidden_state, model.lm_head, getattr(out, NAME)


def _cross_entropy(logits: Tensor, targets: Tensor) -> float:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return float(F.cross_entropy(wide, targets, reduction="none").double().sum())
