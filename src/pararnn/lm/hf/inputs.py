"""Arguments of transformers' models: masks, positions and padding."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.lm.hf.cache import NAMES
from pararnn.lm.rows import count_runs


def documents_restart(position_ids: Tensor, attention_mask: Any, has_cache: bool) -> bool:
    """Return whether positions restart at 0 within a row, the sign of packed documents.

    This reads values, and so waits for the device. Compiled code does not: there positions are of
    packed documents unless there is a mask or a cache.
    """
    plain = attention_mask is None or getattr(attention_mask, "ndim", None) == 2
    if position_ids.shape[-1] == 1 or not plain:
        return False
    if torch.compiler.is_compiling():
        return attention_mask is None and not has_cache
    restarts = position_ids[:, 1:] == 0
    if attention_mask is not None:
        real = attention_mask[:, -position_ids.shape[-1] :].bool()
        restarts = restarts & real[:, 1:] & real[:, :-1]
    return bool(restarts.any())


class Mask(NamedTuple):
    """Content of an attention_mask for the last T tokens of rows; None where there is none.

    real: bool (B, T), False at padding. attend: bool or numbers (B, 1, T, S), as `Rows.attend`.
    ends: whether a row ends in padding, so that no cache can continue it.
    """

    real: Tensor | None = None
    attend: Tensor | None = None
    ends: bool = False


def read_mask(
    mask: Any, batch: int, steps: int, *, past: Tensor | int = 0, recurrent: bool
) -> Mask:
    """Read an `attention_mask` of a user or of `generate`.

    It is None; (B, past + T), 1 at tokens and 0 at padding; masks by layer type, as `generate`
    makes them for static caches; or, unless the model is `recurrent`, (B, H, T, S).

    Values are checked, which waits for the device, but not in compiled code. Raises ValueError for
    other types, sizes (unless `past` is on the device) and values, and for padding between the
    tokens of a row.
    """
    if mask is None:
        return Mask()
    if isinstance(mask, dict):
        real = mask.get("linear_attention")
        return Mask(None if real is None else real.bool(), mask.get("full_attention"))
    if not isinstance(mask, Tensor):
        raise ValueError(
            f"attention_mask must be a tensor, {_wanted(batch, steps, past)}, got "
            f"{type(mask).__name__}"
        )
    if mask.ndim == 4:
        return Mask(attend=_of_attention(mask, batch, steps, recurrent))
    size, length = tuple(mask.shape), past + steps if isinstance(past, int) else None
    if len(size) != 2 or size[0] != batch or length not in (None, size[1]):
        raise ValueError(f"attention_mask must be {_wanted(batch, steps, past)}, got {size}")
    tokens = mask.bool()
    real = tokens[:, -steps:]
    if torch.compiler.is_compiling():
        return Mask(real)
    holes = (count_runs(tokens) > 1).any()
    values = (tokens != mask).any()
    ends = (tokens[:, :-1] & ~tokens[:, 1:]).any()
    padding, has_values, split, ends = torch.stack([~real.all(), values, holes, ends]).tolist()
    if has_values:
        raise ValueError("attention_mask must hold 1 at tokens and 0 at padding, got other numbers")
    if split:
        rows = (count_runs(tokens) > 1).nonzero().flatten().tolist()
        raise ValueError(
            "attention_mask has holes: the tokens of a row must be one piece, with padding before "
            f"and behind it alone, got padding between the tokens of the rows {rows}"
        )
    return Mask(real if padding else None, None, ends)


def _wanted(batch: int, steps: int, past: Tensor | int) -> str:
    length = past + steps if isinstance(past, int) else "T"
    return f"{(batch, length)}, one entry for each token in the cache and now"


def _of_attention(mask: Tensor, batch: int, steps: int, recurrent: bool) -> Tensor:
    """Return a mask of keys by query as attention reads it: bool, or numbers to add to scores."""
    size = tuple(mask.shape)
    if recurrent:
        raise ValueError(
            f"an attention_mask of four dimensions, {size}, is for models whose layers are all "
            f"attention: recurrent layers need {(batch, 'T')}, 0 at padding; give the borders of "
            "packed documents by position_ids"
        )
    if size[0] not in (1, batch) or size[2] != steps:
        raise ValueError(
            f"attention_mask must be (B, T) or (B, H, T, S) with B = {batch} and T = {steps}, got "
            f"{size}"
        )
    if mask.dtype == torch.bool or mask.is_floating_point():
        return mask
    raise ValueError(
        "an attention_mask of four dimensions must be bool, or numbers to add to scores, got "
        f"{mask.dtype}"
    )


def require_pieces(attend: Tensor | None) -> None:
    """Check that each query of a mask sees one piece of the keys, the same one in all heads.

    With `batch_invariant` attention reads no other keys. Compiled code leaves the check out.
    """
    if attend is None or attend.dtype != torch.bool or torch.compiler.is_compiling():
        return
    if bool((count_runs(attend.flatten(0, 2)) > 1).any() | (attend != attend[:, :1]).any()):
        raise ValueError(
            "with batch_invariant=True a query sees one piece of the keys, the same in all heads: "
            "the attention_mask of four dimensions has holes, or differs between heads"
        )


def require_left(mask: Mask) -> None:
    """Check that a cache would not continue after padding."""
    if mask.ends:
        raise ValueError(
            "rows are padded on the right, and a cache would continue after the padding: pad on "
            "the left (tokenizer.padding_side = 'left'), or pass use_cache=False"
        )


def left_aligned(
    inputs: Tensor | None, kwargs: dict[str, Any]
) -> tuple[Tensor | None, dict[str, Any]]:
    """Move the padding of `generate`'s prompts to the left, unless they follow a cache."""
    mask = kwargs.get("attention_mask")
    if mask is None or mask.ndim != 2 or any(kwargs.get(name) is not None for name in NAMES):
        return inputs, kwargs
    if bool(mask[:, -1].all()):
        return inputs, kwargs
    order = mask.bool().int().argsort(dim=1, stable=True)

    def move(x: Tensor) -> Tensor:
        return x.gather(1, order if x.ndim == 2 else order.unsqueeze(-1).expand_as(x))

    names = ("input_ids", "inputs_embeds", "position_ids", "attention_mask")
    rows = {name: move(kwargs[name]) for name in names if kwargs.get(name) is not None}
    return None if inputs is None else move(inputs), kwargs | rows
