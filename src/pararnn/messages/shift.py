"""Tensors of the neighbour in time: halos of convolutions, labels, and boundary masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.messages.group import find


@torch.library.custom_op("pararnn::shift", mutates_args=())
def shift(value: Tensor, group: str, back: bool) -> Tensor:
    """Return the value of the rank before, or with `back` of the next one; zeros at the end."""
    ranks = find(group)
    ranks.send(value, back)
    return ranks.receive(value, back)


@shift.register_fake
def _(value: Tensor, group: str, back: bool) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, ctx.group, ctx.back = inputs


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return shift(grad, ctx.group, not ctx.back), None, None


def from_neighbour(value: Tensor, group: str, back: bool, fill: int) -> Tensor:
    """Return integers or flags as `shift` does; `fill` at the end, and where no rank shares the
    sequence."""
    if not group:
        return torch.full_like(value, fill)
    return (shift(value.long() - fill, group, back) + fill).to(value.dtype)


shift.register_autograd(_differentiate, setup_context=_save)
