"""Zig-zag sharding of attention's queries: each rank's queries see equally many keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pararnn.base.function import guarded
from pararnn.messages.group import BY_BACKWARD, find


def chunk_lengths(counts: Sequence[int]) -> list[int]:
    """Return the steps of both halves of each rank's span; the first may have one more."""
    return [steps for count in counts for steps in (count - count // 2, count // 2)]


def contiguous_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """Return the numbers of the halves of a rank's span."""
    return 2 * rank, 2 * rank + 1


def zigzag_chunks(rank: int, ranks: int) -> tuple[int, int]:
    """Return the numbers of a rank's chunks: one from the front, one from the back.

    A chunk sees its keys and those before, so that the sum is the same for all ranks.
    """
    return rank, 2 * ranks - 1 - rank


Dealing = Callable[[int, int], tuple[int, int]]


@guarded(BY_BACKWARD)
@torch.library.custom_op("pararnn::zigzag", mutates_args=())
def zigzag(value: Tensor, counts: list[int], group: str, back: bool) -> Tensor:
    """Exchange the steps (B, H, T, D) of ranks' spans for those (B, H, T', D) of zig-zag chunks.

    counts: the steps of each rank's span. back: do the inverse.
    """
    ranks = find(group)
    plans: list[Dealing] = [contiguous_chunks, zigzag_chunks]
    source, target = reversed(plans) if back else plans
    lengths = chunk_lengths(counts)
    here, there = source(ranks.rank, ranks.size), target(ranks.rank, ranks.size)
    halves = dict(zip(here, value.split([lengths[chunk] for chunk in here], 2), strict=True))
    batch, heads, _, width = value.shape
    step = batch * heads * width
    outgoing, out_sizes = _by_rank(here, target, ranks.size, lengths, step)
    incoming, in_sizes = _by_rank(there, source, ranks.size, lengths, step)
    sent = torch.cat([halves[chunk].flatten() for chunk in outgoing])
    arrivals = sent.new_empty(sum(in_sizes))
    dist.all_to_all_single(arrivals, sent, in_sizes, out_sizes, group=ranks.group)
    received = arrivals.split([lengths[chunk] * step for chunk in incoming])
    chunks = {
        chunk: steps.reshape(batch, heads, lengths[chunk], width)
        for chunk, steps in zip(incoming, received, strict=True)
    }
    return torch.cat([chunks[chunk] for chunk in there], 2)


def _by_rank(
    chunks: tuple[int, int], plan: Dealing, ranks: int, lengths: list[int], step: int
) -> tuple[list[int], list[int]]:
    """Return chunks in the order of the ranks that a plan gives them, and the numbers of each."""
    holders = {chunk: rank for rank in range(ranks) for chunk in plan(rank, ranks)}
    order = sorted(chunks, key=lambda chunk: (holders[chunk], chunk))
    sizes = [0] * ranks
    for chunk in chunks:
        sizes[holders[chunk]] += lengths[chunk] * step
    return order, sizes


@zigzag.register_fake
def _(value: Tensor, counts: list[int], group: str, back: bool) -> Tensor:
    ranks = find(group)
    plan, lengths = contiguous_chunks if back else zigzag_chunks, chunk_lengths(counts)
    steps = sum(lengths[chunk] for chunk in plan(ranks.rank, ranks.size))
    return value.new_empty((*value.shape[:2], steps, value.shape[3]))


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, ctx.counts, ctx.group, ctx.back = inputs


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return zigzag(grad, ctx.counts, ctx.group, not ctx.back), None, None, None


zigzag.register_autograd(_differentiate, setup_context=_save)
