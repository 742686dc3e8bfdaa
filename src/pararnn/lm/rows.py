"""Structure of a batch's rows: padding, documents and earlier tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.messages.group import find, require_step, start_and_total, step_counts
from pararnn.messages.shift import from_neighbour
from pararnn.messages.whole import whole_time
from pararnn.sequences import Sequences, latest_step, of_mask, one_a_row, require


class Rows(NamedTuple):
    """The rows of a batch (B, T), as mixers read them; a field is None where it has no effect.

    positions: int (B or 1, T), of each token in its document. start: bool (B, T), the first tokens
    of documents, where states start from zero. since: int (B, T), steps since the last such token,
    larger than any convolution where there was none. real: bool (B, T), False at padding. attend:
    bool (B, 1, T, S), which of S keys each token sees, or numbers to add to its scores; None is the
    causal order. rotary: cosines and sines, made once for all layers. weights: called with the
    weights of each layer of attention, (B, H, T, S), which is then computed operation by operation.
    share: if ranks share rows, this rank's number and each rank's steps. Then attention's keys end
    with this rank's span.
    """

    positions: Tensor
    start: Tensor | None = None
    since: Tensor | None = None
    real: Tensor | None = None
    attend: Tensor | None = None
    rotary: tuple[Tensor, Tensor] | None = None
    weights: Callable[[Tensor], None] | None = None
    share: tuple[int, tuple[int, ...]] | None = None

    # No property: the compiler of PyTorch 2.9 does not look into those of a NamedTuple.
    def sequences(self) -> Sequences | None:
        """Return padding and starts as a solve reads them: a row is one sequence, with resets."""
        start = self.start
        if self.real is not None:
            return of_mask(self.real)._replace(reset=start)
        return None if start is None else one_a_row(start)._replace(reset=start)


class DocumentBorders(NamedTuple):
    """Padding and borders of documents, as callers of models give them.

    padding_mask: (B, past + T), 0 at padding, which is before and after a row's tokens.
    position_ids: int (B, T) or (1, T); documents begin where they are 0. cu_seq_lens: int (S + 1,),
    the starts of S documents packed into one row and the end of the last. document: int (B, T),
    another number for every document of a row.
    """

    padding_mask: Tensor | None = None
    position_ids: Tensor | None = None
    cu_seq_lens: Tensor | None = None
    document: Tensor | None = None


NO_BORDERS = DocumentBorders()


def rows_of(
    batch: int,
    steps: int,
    device: torch.device,
    borders: DocumentBorders = NO_BORDERS,
    *,
    past: int = 0,
    has_cache: bool = False,
    attention: bool = True,
    group: str = "",
) -> Rows:
    """Build the rows of a batch.

    Args:
        past: tokens of each row that are in a cache.
        has_cache: whether a cache will continue the rows, so that they may not end in padding.
        attention: whether to make what attention needs: `attend`.
        group: the ranks that share the rows, of whose steps together cu_seq_lens are; the other
            arguments are of this rank's steps.

    Raises ValueError for sizes that do not fit, for a rank without a token, for packed documents
    with padding, for borders that are not those of T tokens, and for padding between tokens (holes)
    or, in front of a cache, behind them: on CUDA the device asserts the latter two.
    """
    padding_mask, position_ids, cu_seq_lens, document = borders
    if group:
        require_step(steps)
    first, total = 0, steps
    if cu_seq_lens is not None:
        first, total = start_and_total(group, steps, device)
    _check(batch, steps, past, total, borders)
    mask = None if padding_mask is None else padding_mask.to(device).bool()
    if mask is not None:
        _check_sides(mask, has_cache)
    real = None if mask is None else mask[:, past:]
    boundaries: list[Tensor] = []
    if cu_seq_lens is not None:
        border = torch.zeros(total + 1, dtype=torch.bool, device=device)
        border = border.index_fill(0, cu_seq_lens.to(device).long(), True)
        boundaries.append(border[first : first + steps].unsqueeze(0))
    if document is not None:
        boundaries.append(document != _earlier(document, -1, group))
    if position_ids is not None and not boundaries:
        boundaries.append((position_ids == 0).expand(batch, steps))
    start, since = starts_of(real, *boundaries, group=group)
    share, begins, token = None, start, since  # begins, mask: of all tokens that attention sees
    if attention and group:
        rank, counts = share = find(group).rank, step_counts(group, steps, device)
        past = sum(counts[:rank])
        begins, mask = (_whole(flags, counts, past + steps, group) for flags in (start, mask))
        token = None if begins is None else starts_of(None, begins)[1]
    if position_ids is None and boundaries and token is not None:
        position_ids = token[:, -steps:]
    elif position_ids is None and mask is not None:
        position_ids = positions_of(mask)[:, past:]
    elif position_ids is None:
        position_ids = (torch.arange(steps, device=device) + past).unsqueeze(0)
    attend = None
    if attention and (begins is not None or (past and steps > 1 and share is None)):
        document = None
        if boundaries and begins is not None:
            document = begins.long().cumsum(1)
            document = torch.nn.functional.pad(document, (past + steps - document.shape[1], 0))
        attend = _attend(steps, past, document, mask, device)
    return Rows(position_ids, start, since, real, attend, share=share)


def _whole(flags: Tensor | None, counts: Sequence[int], end: int, group: str) -> Tensor | None:
    """Return the flags (B, end) of this rank's tokens and of all before them."""
    if flags is None:
        return None
    flags_by_head = flags[:, None, :, None].to(torch.uint8)
    return whole_time(flags_by_head, counts, group)[:, 0, :end, 0].bool()


def _earlier(values: Tensor, first: int, group: str) -> Tensor:
    """Return the value (B, T) of each token's predecessor; `first` for a row's first token."""
    border = from_neighbour(values[:, -1:], group, False, first)
    return torch.cat([border, values[:, :-1]], 1)


def starts_of(
    real: Tensor | None, *boundaries: Tensor, group: str = ""
) -> tuple[Tensor | None, Tensor | None]:
    """Compute `Rows.start` and `Rows.since` of padding and of boundary masks, bool (B, T).

    A boundary mask is True at first tokens. A row's first real token starts a document, unless it
    is the row's first token: a cache may hold tokens before that one.
    """
    begins = list(boundaries)
    if real is not None:
        begins.append(real & ~_earlier(real, 1, group))
    if not begins:
        return None, None
    start = torch.stack(torch.broadcast_tensors(*begins)).any(0)
    start = start if real is None else start & real
    index = torch.arange(start.shape[1], device=start.device)
    return start, index - latest_step(start, NEVER)


NEVER = -(1 << 20)
"""Start of a document that began before the rows: further back than any convolution reaches."""


def _attend(
    steps: int, past: int, document: Tensor | None, mask: Tensor | None, device: torch.device
) -> Tensor:
    """Build the causal mask over S = past + T keys, within documents and without padding.

    document: int (B, S), a number for each key's document.
    """
    keys = torch.arange(past + steps, device=device)
    query_keys = keys[past:].unsqueeze(1)
    visible = (keys <= query_keys).unsqueeze(0)
    if document is not None:
        visible = visible & (document.unsqueeze(1) == document[:, past:].unsqueeze(2))
    if mask is not None:
        # Padding sees itself: a row of scores without any key is NaN.
        visible = visible & (mask.unsqueeze(1) | (keys == query_keys))
    return visible.unsqueeze(1)


def positions_of(mask: Tensor) -> Tensor:
    """Return the positions of tokens in rows that begin with padding, (B, T), where mask is 0."""
    return (mask.long().cumsum(1) - 1).clamp_min(0)


def count_runs(mask: Tensor) -> Tensor:
    """Count the runs of True in each row of `mask`, bool (B, T)."""
    return mask[:, :1].sum(1) + (mask[:, 1:] & ~mask[:, :-1]).sum(1)


def _check_sides(mask: Tensor, has_cache: bool) -> None:
    """Check that a row's tokens are contiguous, and for a cache without padding after them."""
    counts, length = count_runs(mask), mask.shape[1]
    holes = (
        "the padding mask has holes: a row's tokens must be one piece of its {} places, with "
        "padding before and behind it alone; pieces of each row are"
    )
    require((counts <= 1).all(), holes, length, counts)
    if has_cache:
        message = "rows of {} tokens that a cache goes on from: pad on the left; ends of tokens are"
        ends = (mask[:, :-1] & ~mask[:, 1:]).sum(1)
        require((ends == 0).all(), message, length, ends)


def _check(batch: int, steps: int, past: int, total: int, borders: DocumentBorders) -> None:
    padding_mask, position_ids, cu_seq_lens, document = borders
    if padding_mask is not None and tuple(padding_mask.shape) != (batch, past + steps):
        raise ValueError(
            f"the padding mask must be {(batch, past + steps)}, one entry for each token that was "
            f"seen before and now, got {tuple(padding_mask.shape)}"
        )
    if position_ids is not None and tuple(position_ids.shape) not in ((batch, steps), (1, steps)):
        raise ValueError(
            f"position_ids must be {(batch, steps)} or {(1, steps)}, got "
            f"{tuple(position_ids.shape)}"
        )
    if document is not None and tuple(document.shape) != (batch, steps):
        raise ValueError(
            f"the numbers of documents (seq_idx) must be {(batch, steps)}, got "
            f"{tuple(document.shape)}"
        )
    if cu_seq_lens is None:
        return
    if padding_mask is not None:
        raise ValueError("packed documents (cu_seq_lens) have no padding: give one of the two")
    if batch != 1 or cu_seq_lens.ndim != 1 or not cu_seq_lens.shape[0]:
        raise ValueError(
            "cu_seq_lens is (S + 1,) and packs all documents into one row, got "
            f"{tuple(cu_seq_lens.shape)} and a batch of {batch}"
        )
    inside = (cu_seq_lens[0] == 0) & (cu_seq_lens[-1] == total)
    order = (
        "cu_seq_lens must start at 0, not fall, and end at {}, as what is behind would be learned"
    )
    require(inside & (cu_seq_lens.diff() >= 0).all(), order, total, cu_seq_lens)
