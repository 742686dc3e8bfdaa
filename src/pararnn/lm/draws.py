"""Tokens drawn from logits, all rows at once or as one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.base.device import default_generator
from pararnn.lm.loss import Head

WARMEST = 2.0**126
"""Largest temperature that is distinct from infinity: its reciprocal is a normal float32."""


class Draws(NamedTuple):
    """Tokens (R,) drawn from rows of logits, the rows' largest logits, and the tokens'
    log-probabilities if they are asked for."""

    tokens: Tensor
    largest: Tensor
    log_probs: Tensor | None

    def first(self, count: int) -> Draws:
        """Return those of the first rows."""
        log_probs = None if self.log_probs is None else self.log_probs[:count]
        return Draws(self.tokens[:count], self.largest[:count], log_probs)


def join(draws: Sequence[Draws], combine: Callable[[Sequence[Tensor]], Tensor]) -> Draws:
    """Return several draws as one, their tensors combined by a function."""
    tokens, largest, log_probs = zip(*draws, strict=True)
    return Draws(
        combine(tokens), combine(largest), None if log_probs[0] is None else combine(log_probs)
    )


class Drawer(NamedTuple):
    """Draws tokens from logits (R, V) of a model's head.

    Temperature 0 takes the likeliest. log_probs: compute log-probabilities too, at temperature 1.
    """

    head: Head
    temperature: float
    generator: torch.Generator | None
    log_probs: bool

    def __call__(self, logits: Tensor) -> Draws:
        """Draw from all rows at once."""
        if self.temperature == 0:
            largest, tokens = logits.max(-1)
        else:
            largest, tokens = logits.amax(-1), self._drawn(self._chances(logits))
        return Draws(tokens, largest, self._log_probs(logits, tokens))

    def in_order(self, logits: Tensor) -> tuple[Draws, list[Tensor]]:
        """Draw as calls for one row after the other do.

        Returns the generator's states after each row too, for `rewind`; none at temperature 0.
        """
        if self.temperature == 0:
            return self(logits), []
        tokens, states = [], []
        for chances in self._chances(logits).split(1):
            tokens.append(self._drawn(chances))
            states.append((self.generator or default_generator(logits.device)).get_state())
        drawn = torch.cat(tokens)
        return Draws(drawn, logits.amax(-1), self._log_probs(logits, drawn)), states

    def rewind(self, states: list[Tensor], count: int, device: torch.device) -> None:
        """Set the generator as it was after `count` rows of `in_order`, on their device."""
        if states:
            (self.generator or default_generator(device)).set_state(states[count - 1])

    def _chances(self, logits: Tensor) -> Tensor:
        # Rows of NaN, which raise in the end: multinomial would end the process's use of a GPU.
        return scaled(logits, self.temperature).softmax(-1).nan_to_num_(1.0)

    def _drawn(self, chances: Tensor) -> Tensor:
        return torch.multinomial(chances, 1, generator=self.generator).squeeze(-1)

    def _log_probs(self, logits: Tensor, tokens: Tensor) -> Tensor | None:
        return self.head.log_prob(logits, tokens) if self.log_probs else None


def scaled(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Return (logits - the largest of their row) / temperature, in float32 or wider.

    The largest have 0 at any temperature. So the likeliest token is certain where the others'
    quotients overflow, and where the dtype has no such temperature but 0.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    gaps = logits - logits.amax(-1, keepdim=True)
    warm = torch.as_tensor(temperature).clamp_max(WARMEST).to(gaps.dtype)
    return torch.where(gaps == 0, gaps, gaps / warm)
