"""Composition of segments' maps, whose derivatives are entry by entry of the states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, cat, zeros_like

from pararnn.program.entries import Entries, Pair, sum_to

LEADING_DIMENSIONS = 3
"""Dimensions (B, S, H) in front of a state's axes."""
Jacobian = Mapping[Pair, Tensor]
"""Derivatives (B, S, H, ...) of S maps, each with the axes of its state."""


EntryScan = Callable[[Tensor, Tensor], Tensor]
"""Function of factors a and terms r, (B, S, ...) both: x_s = a_s x_{s-1} + r_s, x_{-1} = 0."""


def compose(
    entries: Entries, jacobian: Jacobian, rhs: Sequence[Tensor], scan: EntryScan | None = None
) -> list[Tensor]:
    """Return x_s = J_s x_{s-1} + r_s for all S maps, x_{-1} = 0; rhs: (B, S, H, ...) a state.

    scan: solves one state after the other; `order_of` must have all states. Without it maps are
    composed in rounds, twice as many in each.
    """
    if scan is None:
        return _scan(entries, jacobian, rhs, pulls_back=False)
    total = list(rhs)
    for i in order_of(entries):
        for (row, j), derivative in jacobian.items():
            if row == i != j:
                past = cat([zeros_like(total[j][:, :1]), total[j][:, :-1]], 1)
                total[i] = total[i] + derivative * _spread(entries, past, j, i)
        total[i] = scan(jacobian[i, i], total[i])
    return total


def pull_back(
    entries: Entries, jacobian: Jacobian, rhs: Sequence[Tensor], scan: EntryScan | None = None
) -> list[Tensor]:
    """Return g_s = J_s^T g_{s+1} + r_s for all S maps, g_S = 0. scan: as in `compose`."""
    backwards = {pair: x.flip(1) for pair, x in jacobian.items()}
    total = [r.flip(1) for r in rhs]
    if scan is None:
        total = _scan(entries, backwards, total, pulls_back=True)
        return [x.flip(1) for x in total]
    for j in reversed(order_of(entries)):
        for (i, column), derivative in backwards.items():
            if column == j != i:
                past = cat([zeros_like(total[i][:, :1]), total[i][:, :-1]], 1)
                total[j] = total[j] + sum_to(derivative * past, entries.axes[i], entries.axes[j])
        total[j] = scan(backwards[j, j], total[j])
    return [x.flip(1) for x in total]


def order_of(entries: Entries) -> list[int]:
    """Return the states in order of dependence, without states that depend on each other."""
    order: list[int] = []
    while True:
        ready = [
            i
            for i in range(len(entries.axes))
            if i not in order and all(j in (*order, i) for m, j in entries.pairs if m == i)
        ]
        if not ready:
            return order
        order += ready


def apply(entries: Entries, jacobian: Jacobian, x: Sequence[Tensor]) -> list[Tensor | None]:
    """Return J x, None where it is zero."""
    total: list[Tensor | None] = [None] * len(x)
    for (i, j), derivative in jacobian.items():
        total[i] = _plus(total[i], derivative * _spread(entries, x[j], j, i))
    return total


def apply_transposed(
    entries: Entries, jacobian: Jacobian, x: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return J^T x, None where it is zero."""
    total: list[Tensor | None] = [None] * len(x)
    for (i, j), derivative in jacobian.items():
        total[j] = _plus(total[j], sum_to(derivative * x[i], entries.axes[i], entries.axes[j]))
    return total


def _scan(
    entries: Entries, jacobian: Jacobian, rhs: Sequence[Tensor], *, pulls_back: bool
) -> list[Tensor]:
    """Compose each map with those before it, twice as many in each round."""
    maps, total = dict(jacobian), list(rhs)
    count, shift = total[0].shape[1], 1
    while shift < count:
        first, later = ({p: x[:, half] for p, x in maps.items()} for half in _halves(shift))
        past = [x[:, : count - shift] for x in total]
        apply_maps = apply_transposed if pulls_back else apply
        changes = apply_maps(entries, later, past)
        total = [
            x if y is None else cat([x[:, :shift], x[:, shift:] + y], 1)
            for x, y in zip(total, changes, strict=True)
        ]
        order = (first, later) if pulls_back else (later, first)
        if 2 * shift < count:
            products = _product(entries, *order)
            maps = {p: cat([x[:, :shift], products[p]], 1) for p, x in maps.items()}
        shift *= 2
    return total


def _halves(shift: int) -> tuple[slice, slice]:
    return slice(None, -shift), slice(shift, None)


def _product(entries: Entries, last: Jacobian, first: Jacobian) -> dict[Pair, Tensor]:
    """Return the derivatives of maps `last` after maps `first`."""
    total: dict[Pair, Tensor | None] = dict.fromkeys(last)
    for (i, m), outer in last.items():
        for (n, j), inner in first.items():
            if n == m:
                total[i, j] = _plus(total[i, j], outer * _spread(entries, inner, m, i))
    return {pair: x for pair, x in total.items() if x is not None}


def _plus(x: Tensor | None, y: Tensor) -> Tensor:
    return y if x is None else x + y


def _spread(entries: Entries, x: Tensor, source: int, target: int) -> Tensor:
    """Return a tensor of state `source` with dimensions for the axes of state `target`."""
    for position, axis in enumerate(entries.axes[target]):
        if axis not in entries.axes[source]:
            x = x.unsqueeze(LEADING_DIMENSIONS + position)
    return x
