"""Delta rules on tensors in the argument order of flash-linear-attention, to the bit at any cut.

The recurrence runs step by step, in float32: results of a sequence are the same bits whether it is
computed whole, in chunks from the states that earlier ones returned, packed, or in any batch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from pararnn.base.tensors import ArrayLike
from pararnn.cells.base import Cell
from pararnn.engines.request import LOOP
from pararnn.program.program import program_of
from pararnn.solve import one_gate, prepare, run
from pararnn.zoo.unit import unit


class DeltaRule(Cell):
    """The gated delta rule on decays and rates as they are: state S, keys by values.

    :equation: ``S' = (I - beta k k^T) exp(g) S + beta k v^T``, ``y = scale S'^T q``
    :source: Yang, Kautz and Hatamizadeh 2024, Gated Delta Networks, eq. 10, S transposed

    normed: keys and queries are divided by their lengths.
    """

    states = {"S": ("K", "V")}
    gates = {"q": "K", "k": "K", "v": "V", "g": "", "beta": ""}
    config = {"scale": 1.0, "normed": False, "eps": 1e-6}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        k = self._direction(gate.k)[..., :, None]
        decayed = self._decay(gate.g) * state.S
        memory = (k * decayed).sum(-2, keepdim=True)
        return decayed + gate.beta[..., None, None] * k * (gate.v[..., None, :] - memory)

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        return self.scale * (self._direction(gate.q)[..., :, None] * state.S).sum(-2)

    def _direction(self, x: Tensor) -> Tensor:
        return unit(x, self.eps) if self.normed else x

    def _decay(self, g: Tensor) -> Tensor:
        return torch.exp(g)[..., None, None]


class VectorDeltaRule(DeltaRule):
    """The delta rule with a decay for each key.

    :equation: ``S' = (I - beta k k^T) diag(exp(g)) S + beta k v^T``, ``y = scale S'^T q``
    :source: Kimi Team 2025, Kimi Linear: An Expressive, Efficient Attention Architecture
        (arXiv:2510.26692), eq. 1
    """

    gates = {"q": "K", "k": "K", "v": "V", "g": "K", "beta": ""}

    def _decay(self, g: Tensor) -> Tensor:
        return torch.exp(g)[..., :, None]


RULES = (DeltaRule, VectorDeltaRule)
"""With a decay for each head, and for each key."""


@cache
def _cell(
    by_key: bool, heads: int, keys: int, values: int, scale: float, normed: bool
) -> DeltaRule:
    return RULES[by_key](heads * values, num_heads=heads, K=keys, scale=scale, normed=normed)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: ArrayLike | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule, step by step.

    Args:
        q, k: (B, T, H, K). v: (B, T, H, V).
        g: logarithms of decays, (B, T, H). beta: rates, (B, T, H).
        scale: of queries; None is 1 / sqrt(K).
        initial_state: (B, H, K, V), or (S, H, K, V) with `cu_seqlens`; None is zero.
        output_final_state: whether to return the final states.
        use_qk_l2norm_in_kernel: divide keys and queries by their lengths.
        cu_seqlens: int (S + 1,), the starts of S sequences packed into one row (B = 1), and the end
            of the last.

    Returns the output (B, T, H, V) in v's dtype, and the final states in float32 (float64 for
    float64), or None. Gates have the widest dtype of q, k, v, g and beta. All can be
    differentiated. Raises ValueError for sizes that do not fit, EngineError where kernels cannot be
    built.
    """
    ends = initial_state, output_final_state, cu_seqlens
    return _run(False, (q, k, v, g, beta), scale, use_qk_l2norm_in_kernel, *ends)


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: ArrayLike | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the delta rule with a decay for each key, step by step.

    g: logarithms of decays, (B, T, H, K). All else as in `gated_delta_rule`.
    """
    ends = initial_state, output_final_state, cu_seqlens
    return _run(True, (q, k, v, g, beta), scale, use_qk_l2norm_in_kernel, *ends)


def _run(
    by_key: bool,
    tensors: tuple[Tensor, ...],
    scale: float | None,
    normed: bool,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: ArrayLike | None,
) -> tuple[Tensor, Tensor | None]:
    q, _, v, *_ = tensors
    heads, keys, values = (*q.shape[2:], v.shape[-1]) if q.ndim == 4 else (0, 0, 0)
    axes: dict[Any, tuple[int, ...]] = {"K": (keys,), "V": (values,), "": ()}
    lead, gates = q.shape[:-1], []
    for tensor, (name, axis) in zip(tensors, RULES[by_key].gates.items(), strict=True):
        if q.ndim != 4 or tensor.shape != (*lead, *axes[axis]):
            raise ValueError(
                f"q, k, v, g and beta are (B, T, H, ...) with the same B, T and H: {name} must be "
                f"{(*lead, *axes[axis])}, got {tuple(tensor.shape)}"
            )
        gates.append(tensor if axis else tensor.unsqueeze(-1))
    cell = _cell(by_key, heads, keys, values, keys**-0.5 if scale is None else scale, normed)
    joint = torch.cat(gates, -1)  # in their widest dtype
    args = prepare(cell, one_gate(cell, joint), initial_state, cu_seqlens=cu_seqlens)
    outputs, final, _, _ = run(program_of(cell), args.with_options(one_layout=True), *LOOP)
    return outputs[0].to(v.dtype), final[0] if output_final_state else None
