"""Steps of all ranks on each of them: keys and values of attention, and masks of rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pararnn.base.function import guarded
from pararnn.messages.group import BY_BACKWARD, find


@guarded(BY_BACKWARD)
@torch.library.custom_op("pararnn::whole_time", mutates_args=())
def whole_time(value: Tensor, counts: list[int], group: str) -> Tensor:
    """Gather the steps (B, H, S, D) of all ranks from each rank's (B, H, T, D).

    counts: the steps of each rank. Its gradient is summed over ranks in the compute dtype, and
    rounded once.
    """
    spans = find(group).gather(_pad(value, max(counts)))
    return torch.cat([s[:, :, :count] for s, count in zip(spans, counts, strict=True)], dim=2)


@whole_time.register_fake
def _(value: Tensor, counts: list[int], group: str) -> Tensor:
    return value.new_empty((*value.shape[:2], sum(counts), value.shape[3]))


@torch.library.custom_op("pararnn::scatter_time", mutates_args=())
def scatter_time(value: Tensor, counts: list[int], steps: int, group: str) -> Tensor:
    """Return the sum (B, H, T, D) of all ranks' values (B, H, S, D) for this one's steps."""
    ranks = find(group)
    spans = torch.stack([_pad(span, max(counts)) for span in value.split(counts, dim=2)])
    arrivals = torch.empty_like(spans)
    dist.all_to_all_single(arrivals, spans, group=ranks.group)
    wide = torch.promote_types(value.dtype, torch.float32)
    return arrivals.sum(0, dtype=wide)[:, :, :steps].to(value.dtype)


@scatter_time.register_fake
def _(value: Tensor, counts: list[int], steps: int, group: str) -> Tensor:
    return value.new_empty((*value.shape[:2], steps, value.shape[3]))


def _pad(value: Tensor, steps: int) -> Tensor:
    return torch.nn.functional.pad(value, (0, 0, 0, steps - value.shape[2])).contiguous()


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    value, ctx.counts, ctx.group = inputs
    ctx.steps = value.shape[2]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return scatter_time(grad, ctx.counts, ctx.steps, ctx.group), None, None


whole_time.register_autograd(_differentiate, setup_context=_save)
