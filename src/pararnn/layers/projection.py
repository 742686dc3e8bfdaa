"""The input projection: all gates of a sequence by one matrix product, block-diagonal by head."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pararnn.base.function import apply_function, gradients_have_tangents, hides_tangents
from pararnn.base.numerics import autocast_dtype
from pararnn.base.parameters import Draw, draw_parameters
from pararnn.base.private import (
    are_functorch_transforms_active,
    forward_level,
    get_tracing_state,
    is_transformed,
    make_dual,
    needed_inputs,
    unpack_dual,
)
from pararnn.op import is_batched_gradient


class Weights(NamedTuple):
    """Weights of a layer in one direction that its stack holds, such as `pararnn.LSTM`.

    projection: (G*D, input). bias: (G, D) or None. params: the cell's, as a program takes them.
    scale: (G*D,), the weight of a layer norm of the projected input; None for no norm.
    """

    projection: Tensor
    bias: Tensor | None
    params: tuple[Tensor, ...]
    scale: Tensor | None = None


class Projection(NamedTuple):
    """Gates, their version, and the input and the weight whose product they are."""

    gates: Tensor
    version: int
    x: Tensor
    weight: Tensor


_RECORD: ContextVar[list[Projection] | None] = ContextVar("projections", default=None)


@contextmanager
def record_projections() -> Iterator[list[Projection]]:
    """Record all projections within this context, in eager mode."""
    projections: list[Projection] = []
    token = _RECORD.set(projections)
    try:
        yield projections
    finally:
        _RECORD.reset(token)


def headwise_gates(x: Tensor, weight: Tensor, gates: int) -> Tensor:
    """Project x (B, T, input) by a weight (H, G*D/H, input/H) to (B, T, G, H, D/H), or by a dense
    one, (G*D, input) or of one head, to (B, T, G, D).

    On a CPU the gates of a view of (T, B, input) are laid out by time too: the input is not copied,
    and what a step reads is adjacent.
    """
    if weight.ndim == 2 or weight.shape[0] == 1:
        dense = weight if weight.ndim == 2 else weight.squeeze(0)
        by_time = x.is_cpu and not (torch.compiler.is_compiling() or x.is_contiguous())
        by_time = by_time and x.stride(0) < x.stride(1)
        out = _linear(x.transpose(0, 1) if by_time else x, dense)
        # Views: autograd neither fills nor copies memory for them.
        out = out.view(*out.shape[:2], gates, dense.shape[0] // gates)
        return out.transpose(0, 1) if by_time else out
    heads, outputs, inputs = weight.shape
    batch, steps, _ = x.shape
    # One batched product into (H, B*T, G*D/H): the rest changes strides only.
    out = headwise_product(x.reshape(batch * steps, heads, inputs), weight)
    return out.reshape(heads, batch, steps, gates, outputs // gates).permute(1, 2, 3, 0, 4)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return F.linear; in forward mode without products with tangents that are zero, which PyTorch
    computes as others, unless the gradient of the result may have tangents too."""
    if forward_level() < 0 or torch.compiler.is_compiling():
        return F.linear(x, weight)
    if hides_tangents() or gradients_have_tangents((x, weight)):
        return F.linear(x, weight)
    (x, of_x), (weight, of_weight) = unpack_dual(x), unpack_dual(weight)
    out = F.linear(x, weight)
    terms = [] if of_x is None else [F.linear(of_x, weight)]
    terms += [] if of_weight is None else [F.linear(x, of_weight)]
    return make_dual(out, sum(terms[1:], terms[0])) if terms else out


def to_autocast(*tensors: Tensor) -> Sequence[Tensor]:
    """Cast tensors to autocast's dtype where that is on."""
    dtype = autocast_dtype(tensors[0].device)
    return tensors if dtype is None else [tensor.to(dtype) for tensor in tensors]


def headwise_product(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply rows (R, H, I) by a weight (H, O, I) to (H, R, O), in autocast's dtype if on."""
    rows, weight = to_autocast(rows, weight)
    needs_grad = torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)
    transform = torch.compiler.is_compiling() or are_functorch_transforms_active()
    # The Function would take as long as the product; a trace must not differ by gradients.
    if transform or not needs_grad or get_tracing_state():
        return torch.bmm(rows.transpose(0, 1), weight.mT)
    return apply_function(_HeadwiseProduct, rows, weight)


class _HeadwiseProduct(torch.autograd.Function):
    """A batched product whose gradient of the rows has the rows' layout.

    torch.bmm returns it head by head, which would need a copy.
    """

    @staticmethod
    def forward(rows: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(rows.transpose(0, 1), weight.mT)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        of_rows, of_weight = needed_inputs(ctx)
        grad_rows = grad_weight = None
        # Derivatives of it and vmap allow no writes in place.
        plain = torch.is_grad_enabled() or is_batched_gradient(grad) or is_transformed()
        if of_rows and plain:
            grad_rows = torch.bmm(grad, weight).transpose(0, 1)
        elif of_rows:
            grad_rows = rows.new_empty(rows.shape)
            torch.bmm(grad, weight, out=grad_rows.transpose(0, 1))
        if of_weight:
            grad_weight = torch.bmm(grad.mT, rows.transpose(0, 1))
        return grad_rows, grad_weight

    @staticmethod
    def jvp(ctx: Any, rows_tangent: Tensor | None, weight_tangent: Tensor | None) -> Tensor:
        rows, weight = ctx.saved_tensors
        products = []
        if rows_tangent is not None:
            products.append(torch.bmm(rows_tangent.transpose(0, 1), weight.mT))
        if weight_tangent is not None:
            products.append(torch.bmm(rows.transpose(0, 1), weight_tangent.mT))
        return sum(products[1:], products[0])


def check_weight(x: Tensor, weight: Tensor) -> None:
    """Raise ValueError for an input that does not fit the weights, in torch.nn.GRU's words."""
    if x.device != weight.device:
        raise ValueError(
            f"Input and parameter tensors are not at the same device, found input tensor at "
            f"{x.device} and parameter tensor at {weight.device}"
        )
    if not x.is_floating_point():
        cure = "torch.view_as_real(input).flatten(-2) has both of its parts as channels"
        if not x.is_complex():
            cure = f"input.to({weight.dtype}) converts it, torch.nn.Embedding embeds indices"
        raise ValueError(f"RNN input must be a floating-point tensor, got {x.dtype}: {cure}")
    if x.dtype != weight.dtype and autocast_dtype(x.device) is None:
        raise ValueError(
            f"RNN input dtype ({x.dtype}) does not match weight dtype ({weight.dtype}). Convert "
            f"input: input.to({weight.dtype}), or convert model: model.to({x.dtype})"
        )


def project(x: Tensor, weight: Tensor, gates: int) -> Tensor:
    """Return `headwise_gates`, within `record_projections` with a record of it.

    Raises ValueError for an input that does not fit the weight.
    """
    check_weight(x, weight)
    record = None if torch.compiler.is_compiling() else _RECORD.get()
    if record is None:
        return headwise_gates(x, weight, gates)
    x, weight = to_autocast(x, weight)  # as autograd saves them
    result = headwise_gates(x, weight, gates)
    record.append(Projection(result, result._version, x, weight))
    return result


class HeadwiseLinear(nn.Module):
    """The input projection B: one dense map a head, (B, T, input) to gates (B, T, G, H, D/H).

    With one head the result is (B, T, G, D). The weight is (H, G*D/H, input/H); there is no bias.
    """

    def __init__(
        self,
        input_size: int,
        num_gates: int,
        hidden_size: int,
        num_heads: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.num_gates, self.num_heads = num_gates, num_heads
        size = (num_heads, num_gates * hidden_size // num_heads, input_size // num_heads)
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters(gain)

    def draws(self, gain: float = 1.0) -> dict[str, Draw]:
        """Return how the weight is drawn: Kaiming uniform (paper, Appendix C), by head.

        The paper gives no gain. With 1, inputs of unit variance give gates of unit variance;
        Kaiming's own is sqrt(2), for layers before a rectifier.
        """
        return {"weight": Draw("uniform", spread=gain * math.sqrt(3 / self.weight.shape[2]))}

    def reset_parameters(self, gain: float = 1.0) -> None:
        """Draw the weight again, as `draws` says."""
        draw_parameters(self, self.draws(gain))

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.weight, self.num_gates)

    def extra_repr(self) -> str:
        heads, outputs, inputs = self.weight.shape
        return f"{heads * inputs}, {heads * outputs}, heads={heads}"
