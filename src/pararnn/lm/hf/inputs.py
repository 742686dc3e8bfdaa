"""What users hand to transformers' models, as rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.lm.hf.cache import NAMES


def documents_restart(position_ids: Tensor, attention_mask: Any, cached: bool) -> bool:
    """Whether positions go back to 0 within a row, which is how packed documents are said.

    Looks at the values, and so waits for the device; compiled code takes them as not packed where
    there is padding or a cache, as packed otherwise.
    """
    if position_ids.shape[-1] == 1 or isinstance(attention_mask, dict):
        return False
    again = position_ids[:, 1:] == 0
    if attention_mask is not None:
        real = attention_mask[:, -position_ids.shape[-1] :].bool()
        again = again & real[:, 1:] & real[:, :-1]
    if torch.compiler.is_compiling():
        return attention_mask is None and not cached
    return bool(again.any())


def padding(attention_mask: Tensor | None, batch: int, steps: int) -> Tensor | None:
    """The mask of rows that nothing came before; None where nothing is padding.

    Raises ValueError for a mask of another size than (batch, steps).
    """
    if attention_mask is None:
        return None
    _check_size(attention_mask, batch, steps)
    return _unless_all(attention_mask)


def local_padding(
    attention_mask: Tensor | None, batch: int, steps: int, past: Tensor | int
) -> Tensor | None:
    """The mask of the last `steps` tokens; None where nothing is padding.

    Raises ValueError for a mask of another size than (batch, past + steps), which is not looked at
    where `past` is on the device; and for padding behind real tokens: a cache would go on from it.
    """
    if attention_mask is None:
        return None
    _check_size(attention_mask, batch, past + steps if isinstance(past, int) else None)
    known = attention_mask.bool()
    real = _unless_all(known[:, -steps:])
    if real is None or torch.compiler.is_compiling():
        return real
    if bool((known[:, :-1] & ~known[:, 1:]).any()):
        raise ValueError(
            "rows are padded on the right, and a cache would go on from the padding: pad on the "
            "left (tokenizer.padding_side = 'left'), or pass use_cache=False"
        )
    return real


def _check_size(mask: Tensor, batch: int, length: int | None) -> None:
    size = tuple(mask.shape)
    if len(size) != 2 or size[0] != batch or length not in (None, size[1]):
        raise ValueError(
            f"attention_mask must be {(batch, length or 'T')}, one entry for each token in the "
            f"cache and now, got {size}"
        )


def _unless_all(real: Tensor) -> Tensor | None:
    """None where all are real; compiled code does not look."""
    return real if torch.compiler.is_compiling() or not bool(real.all()) else None


def left_aligned(
    inputs: Tensor | None, kwargs: dict[str, Any]
) -> tuple[Tensor | None, dict[str, Any]]:
    """`generate`'s prompts with their padding on the left; those after a cache as they are."""
    mask = kwargs.get("attention_mask")
    if mask is None or mask.ndim != 2 or any(kwargs.get(name) is not None for name in NAMES):
        return inputs, kwargs
    if bool(mask[:, -1].all()):
        return inputs, kwargs
    order = mask.bool().int().argsort(dim=1, stable=True)

    def moved(part: Tensor) -> Tensor:
        return part.gather(1, order if part.ndim == 2 else order.unsqueeze(-1).expand_as(part))

    names = ("input_ids", "inputs_embeds", "position_ids", "attention_mask")
    rows = {name: moved(kwargs[name]) for name in names if kwargs.get(name) is not None}
    return None if inputs is None else moved(inputs), kwargs | rows
