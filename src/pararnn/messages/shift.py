"""Tensors of the neighbour in time: halos of convolutions, labels, and boundary masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.base.function import guarded
from pararnn.messages.group import BY_BACKWARD, find


@guarded(BY_BACKWARD)
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


@guarded(BY_BACKWARD)
@torch.library.custom_op("pararnn::relay", mutates_args=())
def relay(value: Tensor, keep: Tensor, group: str, back: bool) -> Tensor:
    """Return as `shift` the value (..., N) of the rank before, of a rank that has less to send.

    value: the last K < N entries of what the next rank gets. The first ones are what this rank
    gets last, 0 where `keep`, bool (..., N - K), does not hold.
    """
    ranks, size = find(group), keep.shape[-1] + value.shape[-1]
    arrival = ranks.receive(value.new_empty((*value.shape[:-1], size)), back)
    passed = arrival[..., value.shape[-1] :].masked_fill(~keep, 0)
    ranks.send(torch.cat([passed, value], -1), back)
    return arrival


@relay.register_fake
def _(value: Tensor, keep: Tensor, group: str, back: bool) -> Tensor:
    return value.new_empty((*value.shape[:-1], keep.shape[-1] + value.shape[-1]))


@torch.library.custom_op("pararnn::relay_backward", mutates_args=())
def relay_backward(grad: Tensor, keep: Tensor, group: str, back: bool) -> Tensor:
    """Return the gradient of a `relay`'s value: it comes from the next rank, which sends those of
    the other entries too; these go on to the rank before, with `grad` (..., N) of what it sent."""
    ranks, count = find(group), grad.shape[-1] - keep.shape[-1]
    passed, own = ranks.receive(grad, not back).split([keep.shape[-1], count], -1)
    arriving = torch.nn.functional.pad(passed.masked_fill(~keep, 0), (count, 0))
    ranks.send(grad + arriving, not back)
    return own.contiguous()


@relay_backward.register_fake
def _(grad: Tensor, keep: Tensor, group: str, back: bool) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], grad.shape[-1] - keep.shape[-1]))


def _save_relay(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, keep, ctx.group, ctx.back = inputs
    ctx.save_for_backward(keep)


def _differentiate_relay(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (keep,) = ctx.saved_tensors
    return relay_backward(grad, keep, ctx.group, ctx.back), None, None, None


relay.register_autograd(_differentiate_relay, setup_context=_save_relay)


def from_neighbour(value: Tensor, group: str, back: bool, fill: int) -> Tensor:
    """Return integers or flags as `shift` does; `fill` at the end, and where no rank shares the
    sequence."""
    if not group:
        return torch.full_like(value, fill)
    return (shift(value.long() - fill, group, back) + fill).to(value.dtype)


shift.register_autograd(_differentiate, setup_context=_save)
