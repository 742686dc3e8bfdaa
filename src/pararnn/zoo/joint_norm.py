"""Norm of several vectors as of one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def joint_norm(vectors: Sequence[Tensor], eps: float) -> list[Tensor]:
    """Return vectors (..., N) as they are in the layer norm of all next to each other."""

    def mean(values: Sequence[Tensor]) -> Tensor:
        first, *others = [value.mean(-1, keepdim=True) for value in values]
        return sum(others, first) / len(values)

    centre = mean(vectors)
    centred = [vector - centre for vector in vectors]
    scale = torch.rsqrt(mean([vector.square() for vector in centred]) + eps)
    return [vector * scale for vector in centred]
