"""Tokens drawn from logits, all rows at once or as one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.base.device import default_generator
from pararnn.base.private import foreach_copy
from pararnn.lm.loss import Head

WARMEST = 2.0**126
"""Largest temperature that is distinct from infinity: its reciprocal is a normal float32."""
KEPT_NUMBERS = 2**26
"""Most random numbers that `Noise` keeps: 256 MB in float32."""


class Draws(NamedTuple):
    """Tokens (R,) drawn from rows of logits, the rows' largest logits, and the tokens'
    log-probabilities if they are asked for."""

    tokens: Tensor
    largest: Tensor
    log_probs: Tensor | None


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
        return self.draws(logits, self.noise(logits))

    def noise(self, logits: Tensor) -> Tensor | None:
        """Return the random numbers (R, V) that decide the next draws; None at temperature 0."""
        if self.temperature == 0:
            return None
        return torch.empty_like(logits, dtype=_wide(logits)).exponential_(generator=self.generator)

    def draws(self, logits: Tensor, noise: Tensor | None) -> Draws:
        """Return the draws that these random numbers decide."""
        largest, tokens = self.choose(logits, noise)
        log_probs = self.head.log_prob(logits, tokens) if self.log_probs else None
        return Draws(tokens, largest, log_probs)

    def choose(self, logits: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the largest logits, and the tokens that these random numbers decide.

        Of chances p and exponential draws q the index of the largest p / q has the chances p.
        """
        if noise is None:
            return torch.max(logits, -1)
        # A row of NaN, which raises in the end, is one of equal chances until then.
        chances = scaled(logits, self.temperature).softmax(-1).nan_to_num_(1.0)
        return logits.amax(-1), chances.div_(noise).argmax(-1)


class Noise:
    """Random numbers of draws by `Drawer`, from any step on, as draws step by step take them.

    A step's numbers (B, V) are made again from the generator's state before it where they are not
    kept: rows of a batch come to a step at different times.

    logits: (B, V), of the first step.
    """

    def __init__(self, draw: Drawer, logits: Tensor) -> None:
        self.draw, self.logits = draw, logits
        self.generator = draw.generator or default_generator(logits.device)
        self.states = [self.generator.get_state()]
        self.kept: dict[int, Tensor] = {}
        self.most = max(1, KEPT_NUMBERS // logits.numel())

    def windows(self, starts: Sequence[int], width: int) -> Tensor | None:
        """Return the numbers (B width, V) of the steps from each row's start on; None at
        temperature 0."""
        if self.draw.temperature == 0:
            return None
        result = torch.empty(
            len(starts), width, self.logits.shape[1],
            dtype=_wide(self.logits), device=self.logits.device,
        )  # fmt: skip
        for step in sorted({step for start in starts for step in range(start, start + width)}):
            numbers = self._numbers(step)
            rows = [row for row, start in enumerate(starts) if start <= step < start + width]
            copies = [result[row, step - starts[row]] for row in rows]
            foreach_copy(copies, [numbers[row] for row in rows])
        return result.flatten(0, 1)

    def leave(self, step: int) -> None:
        """Set the generator as draws before this step leave it."""
        if self.draw.temperature:
            self.generator.set_state(self.states[step])

    def _numbers(self, step: int) -> Tensor:
        if step not in self.kept:
            if step >= len(self.states):
                self._numbers(step - 1)
            self.generator.set_state(self.states[step])
            numbers = self.draw.noise(self.logits)
            assert numbers is not None
            if step + 1 == len(self.states):
                self.states.append(self.generator.get_state())
            if len(self.kept) == self.most:
                del self.kept[next(iter(self.kept))]
            self.kept[step] = numbers
        return self.kept[step]


def scaled(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Return (logits - the largest of their row) / temperature, in float32 or wider.

    The largest have 0 at any temperature. So the likeliest token is certain where the others'
    quotients overflow, and where the dtype has no such temperature but 0.
    """
    logits = logits.to(_wide(logits))
    gaps = logits - logits.amax(-1, keepdim=True)
    warm = torch.as_tensor(temperature).clamp_max(WARMEST).to(gaps.dtype)
    return torch.where(gaps == 0, gaps, gaps / warm)


def _wide(logits: Tensor) -> torch.dtype:
    """Return the dtype of chances: float32 or wider."""
    return torch.promote_types(logits.dtype, torch.float32)
