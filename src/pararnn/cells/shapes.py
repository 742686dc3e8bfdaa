"""The shapes of parameters: a table, an entry of which is all that a shape is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from torch import Tensor

from pararnn.base.errors import CellError


@dataclass(frozen=True)
class ParamShape:
    """The size of a parameter for D channels in H heads, and its form in a step.

    size: of D and H. lift: of the parameter, D and H; None where a step takes it as it is. Where
    channels are independent, it must give (D,). by_heads: True if it is a matrix for each head, by
    which a step multiplies states: `state.h @ param.R`. axes: those of one head, by which a cell
    whose states are matrices takes the shape; None where it has none.
    """

    name: str
    size: Callable[[int, int], tuple[int, ...]] = field(repr=False)  # whose address says nothing
    lift: Callable[[Tensor, int, int], Tensor] | None = field(default=None, repr=False)
    by_heads: bool = False
    axes: tuple[str, ...] | None = None

    def lifted(self, value: Tensor, channels: int, heads: int) -> Tensor:
        """Return the parameter as a step takes it."""
        return value if self.lift is None else self.lift(value, channels, heads)

    def fits(self, size: tuple[int, ...], channels: int) -> bool:
        """Return True if a step may get a parameter of this size, in some number of heads.

        A step with coupled channels may get any size from a `lift`.
        """
        if self.lift is not None:
            return True
        heads = (h for h in range(1, channels + 1) if channels % h == 0)
        return any(tuple(self.size(channels, h)) == size for h in heads)


def _of_heads(value: Tensor, channels: int, heads: int) -> Tensor:
    return value.unsqueeze(-1).expand(heads, channels // heads).reshape(channels)


SHAPES = {
    shape.name: shape
    for shape in (
        ParamShape("D", lambda d, h: (d,)),
        ParamShape("H", lambda d, h: (h,), _of_heads, axes=()),
        ParamShape("", lambda d, h: (), lambda value, d, h: value.expand(d)),
        ParamShape("D,D", lambda d, h: (d, d)),
        ParamShape("H,K,K", lambda d, h: (h, d // h, d // h), by_heads=True, axes=("K", "K")),
    )
}


def shape_of_axes(text: str) -> ParamShape | None:
    """Return the shape "H,K,V" of a tensor for each head, by its axes; None for another text."""
    heads, *axes = text.split(",")
    if heads != "H" or not axes or not all(map(str.isidentifier, axes)):
        return None

    def refuse(channels: int, heads: int) -> NoReturn:
        raise CellError(
            f"the shape {text!r} names axes of heads, which only cells have whose states are "
            f'matrices: states = {{"H": ("K", "V")}}. Others take {tuple(SHAPES)}'
        )

    return ParamShape(text, refuse, axes=tuple(axes))
