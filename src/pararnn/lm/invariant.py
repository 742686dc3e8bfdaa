"""Layers of a model: PyTorch's, or with `batch_invariant` those whose rows do not depend on others.

`layers_of(config)` returns a table of either; state dicts are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from pararnn.base.private import OpOverload
from pararnn.layers import RecurrentLayer
from pararnn.layers.projection import HeadwiseLinear, check_weight, to_autocast
from pararnn.lm.config import LMConfig
from pararnn.lm.conv_op import conv_silu, plain_conv_silu, takes
from pararnn.lm.rows_op import (
    rotate,
    rows_conv,
    rows_gated,
    rows_linear,
    rows_norm,
    rows_product,
    rows_rotate,
    rows_scaled_sum,
)

PRODUCTS: tuple[OpOverload, ...] = (rows_product._opoverload,)
"""Operations that are slow to repeat, see `pararnn.lm.recompute`."""


def with_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return x (..., d) plus a bias (d), if there is one: a sum of two has the same bits always."""
    return x if bias is None else x + bias


class RowsLinear(nn.Linear):
    """A linear layer by `rows_linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return with_bias(rows_linear(input, self.weight), self.bias)


class RowsRMSNorm(nn.RMSNorm):
    """An RMSNorm over the channels by `rows_norm`."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalise x (..., d), times silu(gate)."""
        assert self.eps is not None
        return rows_norm(x, gate, self.weight, self.eps, False)


class RowsLayerNorm(nn.LayerNorm):
    """A LayerNorm over the channels by `rows_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        return with_bias(rows_norm(input, None, self.weight, self.eps, True), self.bias)


class RowsHeadwiseLinear(HeadwiseLinear):
    """The input projection by `rows_product`."""

    def forward(self, x: Tensor) -> Tensor:
        check_weight(x, self.weight)
        x, weight = to_autocast(x, self.weight)
        heads, _, inputs = weight.shape
        rows = x.reshape(-1, heads, inputs)
        gates = rows_product(rows, weight).view(heads, *x.shape[:2], self.num_gates, -1)
        return gates[0] if heads == 1 else gates.permute(1, 2, 3, 0, 4)


class RowsRecurrentLayer(RecurrentLayer):
    """A recurrent layer whose rows do not depend on each other."""

    batch_invariant = True
    projection = RowsHeadwiseLinear


def gated(a: Tensor, b: Tensor | None) -> Tensor:
    """Return silu(a) * b, or silu(a)."""
    return F.silu(a) if b is None else F.silu(a) * b


def gated_norm(norm: nn.Module, h: Tensor, gate: Tensor) -> Tensor:
    """Return norm(h * silu(gate))."""
    result: Tensor = norm(h * F.silu(gate))
    return result


def rows_gated_norm(norm: nn.Module, h: Tensor, gate: Tensor) -> Tensor:
    """Return norm(h * silu(gate)) of a `RowsRMSNorm`."""
    result: Tensor = norm(h, gate)
    return result


def scaled_sum(out: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """Return out + x * scale."""
    return out + x * scale


def convolve(
    u: Tensor, weight: Tensor, bias: Tensor, halo: Tensor | None, since: Tensor | None
) -> Tensor:
    """Compute `plain_conv_silu`, by a kernel where there is one."""
    compute = conv_silu if takes(u, weight) else plain_conv_silu
    result: Tensor = compute(u, weight, bias, halo, since)
    return result


# Functions, as modules that hold operators cannot be copied or pickled.


def gated_by_rows(a: Tensor, b: Tensor | None) -> Tensor:
    """Return silu(a) * b, or silu(a), by `rows_gated`."""
    return rows_gated(a, b)


def scaled_sum_by_rows(out: Tensor, x: Tensor, scale: Tensor) -> Tensor:
    """Return out + x * scale by `rows_scaled_sum`."""
    return rows_scaled_sum(out, x, scale)


def convolve_by_rows(
    u: Tensor, weight: Tensor, bias: Tensor, halo: Tensor | None, since: Tensor | None
) -> Tensor:
    """Compute `plain_conv_silu` by `rows_conv`."""
    return rows_conv(u, weight, bias, halo, since)


def rotate_by_rows(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `rotate` by `rows_rotate`."""
    return rows_rotate(x, cos, sin)


class Layers(NamedTuple):
    """Classes of layers and functions between them; see those of PLAIN."""

    linear: type[nn.Linear]
    rms_norm: type[nn.RMSNorm]
    layer_norm: type[nn.LayerNorm]
    recurrent: type[RecurrentLayer]
    gated: Callable[[Tensor, Tensor | None], Tensor]
    gated_norm: Callable[[nn.Module, Tensor, Tensor], Tensor]
    scaled_sum: Callable[[Tensor, Tensor, Tensor], Tensor]
    convolve: Callable[..., Tensor]
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]


PLAIN = Layers(
    nn.Linear,
    nn.RMSNorm,
    nn.LayerNorm,
    RecurrentLayer,
    gated,
    gated_norm,
    scaled_sum,
    convolve,
    rotate,
)
BY_ROWS = Layers(
    RowsLinear,
    RowsRMSNorm,
    RowsLayerNorm,
    RowsRecurrentLayer,
    gated_by_rows,
    rows_gated_norm,
    scaled_sum_by_rows,
    convolve_by_rows,
    rotate_by_rows,
)


def layers_of(config: LMConfig) -> Layers:
    """Return the layers of a config's model."""
    return BY_ROWS if config.batch_invariant else PLAIN
