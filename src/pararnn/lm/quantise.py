"""Weights of language models in 8 bits, by torchao: half the bytes that decoding reads."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from pararnn.engines.signature import PLAIN_TYPES


class Weight(NamedTuple):
    """A matrix (N, K), and the factors (N, 1) of its lines if its numbers have 8 bits."""

    numbers: Tensor
    scale: Tensor | None = None


def weight_of(linear: nn.Linear) -> Weight:
    """Return the numbers of a layer's matrix, as they are stored."""
    weight = linear.weight
    if type(weight) in PLAIN_TYPES:
        return Weight(weight)
    quantised = cast(Any, weight)
    return Weight(quantised.qdata, quantised.scale)
