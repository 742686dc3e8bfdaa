"""The affine scan: x_l = J_l x_{l-1} + r_l for all l at once, in O(log T) steps.

Paper, Algorithm 1b (with the index misprint corrected), in its work-efficient form: neighbours are
merged in pairs, the half-length recurrence is solved, and the other half follows. That is
2 log2(T) steps, about T compositions and 2 T applications, instead of T log2(T) of each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pararnn.program.structure import Structure

Scan = Callable[[Structure, Tensor, Tensor], Tensor]
"""A function with the arguments and the result of `affine_scan`."""


def affine_scan(structure: Structure, jacobian: Tensor, rhs: Tensor) -> Tensor:
    """Solve x_0 = r_0, x_l = J_l x_{l-1} + r_l in parallel over l.

    `jacobian` holds J_1 .. J_{T-1}, (B, T-1, ...); `rhs` is (B, T, N, D), which is also the shape
    of the result.
    """
    length = rhs.shape[1]
    if length <= 1:
        return rhs
    pairs = length // 2
    to_odd, to_even = jacobian[:, 0::2], jacobian[:, 1::2]
    odd = rhs[:, 1::2] + structure.apply(to_odd, rhs[:, 0 : 2 * pairs : 2])
    if pairs > 1:
        pairwise = structure.compose(to_odd[:, 1:], to_even[:, : pairs - 1])
        odd = affine_scan(structure, pairwise, odd)
    out = torch.empty_like(rhs)
    out[:, 0] = rhs[:, 0]
    out[:, 1::2] = odd
    if length > 2:
        out[:, 2::2] = rhs[:, 2::2] + structure.apply(to_even, odd[:, : (length - 1) // 2])
    return out
