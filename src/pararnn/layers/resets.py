"""Resets that start from given states: each begins a new sequence, which is exact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pararnn.base.numerics import compute_dtype
from pararnn.base.tensors import States, as_states
from pararnn.sequences import Sequences, latest_step, require


def split_at_resets(
    x: Tensor,
    initial: States | None,
    sequences: Sequences,
    reset_states: States,
    sizes: Mapping[str, tuple[int, ...]],
    reverse: bool,
) -> tuple[States, Sequences]:
    """Split the sequences of x (B, T, input) at resets that start from given states, (K, D) each.

    sizes: of one sequence's states, by name, (D,) or as the cell has them. Returns the initial
    states of all sequences after the split, and these sequences. It is exact for every engine, and
    differentiable. Raises ValueError for sizes that do not fit.
    """
    if sequences.reset is None:
        raise ValueError("reset_states say what resets start from: give reset, too")
    restarts = _of_size("reset_states", "K", None, reset_states, sizes)
    if initial is None:
        dtype = compute_dtype(x.dtype)
        begin = tuple([x.new_zeros((sequences.total, *s), dtype=dtype) for s in sizes.values()])
    else:
        begin = _of_size("initial", "S", sequences.total, initial, sizes)
    sequences = split_sequences(sequences, restarts[0].shape[0], reverse)
    if reverse:
        restarts = tuple([state.flip(0) for state in restarts])
    return tuple([torch.cat(both) for both in zip(begin, restarts, strict=True)]), sequences


def memory_of_pieces(memory: Any, whole: Sequences, pieces: Sequences) -> Any:
    """Return memories of sequences for their pieces, into which `split_sequences` has split them.

    What are no tensors by name stays, for the checks of a solve. Raises ValueError for another
    number of sequences.
    """
    if not isinstance(memory, Mapping) or pieces.seq is None:
        return memory
    old, new = whole.seq, pieces.seq.long()
    if old is None:
        old = torch.arange(whole.total, device=new.device).unsqueeze(1).expand_as(new)
    # A piece without steps reads none; the last one is for padding.
    index = torch.zeros(pieces.total + 1, dtype=torch.int64, device=new.device)
    index = index.scatter(0, new.where(new >= 0, pieces.total).flatten(), old.long().flatten())[:-1]

    def select(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not value.ndim or value.shape[0] != whole.total:
            raise ValueError(
                f"memory {name!r} must have an entry for each of {whole.total} sequences, got "
                f"{tuple(value.shape)}"
            )
        return value.index_select(0, index)

    return {name: select(name, value) for name, value in memory.items()}


def _of_size(
    what: str, rows: str, count: int | None, states: States, sizes: Mapping[str, tuple[int, ...]]
) -> tuple[Tensor, ...]:
    """Return states as a tuple of (count, *size) each; None is any number, the same for all."""
    states = as_states(what, states)
    shapes = [tuple(state.shape) for state in states]
    if count is None and shapes and shapes[0]:
        count = shapes[0][0]
    if shapes != [(count, *size) for size in sizes.values()]:
        raise ValueError(f"{what} must be {_in_words(rows, sizes)}, got {shapes}")
    return states


def _in_words(rows: str, sizes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the sizes of states in words: once, if they are the same for all."""
    texts = [f"({rows}, {', '.join(map(str, size))})" for size in sizes.values()]
    if len({*texts}) == 1:
        return f"{texts[0]} for each of {tuple(sizes)}"
    return ", ".join(f"{text} for {name!r}" for name, text in zip(sizes, texts, strict=True))


def split_sequences(sequences: Sequences, count: int, reverse: bool) -> Sequences:
    """Split sequences at their `count` resets, in the order of processing.

    First come the S sequences that there were, each up to its first reset, then one from each
    reset. Raises ValueError as `of_cu_seqlens` for another number of resets.
    """
    total, reset = sequences.total, sequences.reset
    assert reset is not None
    require_resets(reset, count)
    batch, steps = reset.shape
    if sequences.seq is None:
        seq = torch.arange(batch, device=reset.device).unsqueeze(1).expand_as(reset)
    else:
        seq = sequences.seq.long()
    last = torch.arange(total + 1, device=reset.device)  # the last one is for padding
    if steps:
        number = (reset.flatten().cumsum(0) - 1).view_as(reset)
        if reverse:
            number = count - 1 - number
            nearest = steps - 1 - latest_step(reset.flip(1), -1).flip(1)
        else:
            nearest = latest_step(reset, -1)
        index = nearest.clamp(0, steps - 1)
        after_reset = (index == nearest) & (seq.gather(1, index) == seq) & (seq >= 0)
        # Compiled code does not count resets: with more resets than states, numbers are clamped.
        new = (total + number.gather(1, index)).clamp(max=total + count - 1).where(after_reset, seq)
        index = seq.where(seq >= 0, total).flatten()
        last = last.scatter_reduce(0, index, new.flatten(), "amax")
        seq = new
    return Sequences(seq.to(torch.int32), total + count, last=last[:total], valid=True)


def require_resets(reset: Tensor, count: int) -> None:
    """Raise ValueError, as `require`, unless `reset` is true at `count` steps."""
    if reset.dtype != torch.bool:
        raise ValueError(f"reset must be bool, got {reset.dtype}")
    resets = reset.sum()
    must = "reset must be true at {0} steps, as reset_states hold {0} states, one a step"
    require(resets == count, must, count, resets)
