"""Products of the decays of a chunk's steps between any two of them, and their gradients.

Pairs of steps are split at the middles of blocks of 2, 4, ... C steps: a product is one up to a
middle times one from there on. So nothing is divided, and decays that are zero are no case.

Shapes: L chunks of C steps, a power of 2; n states; r rows or R columns a step, of n vectors (K).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

READS, QUERIES = 0, 1
"""Rows that look at the state before their step, or after it: how many of its decays they have."""


class Decays(ABC):
    """Products of decays (L, C, n, n, 1 or K) with columns (L, C, R, n, K) and with rows (L, C, r,
    n, K), which are reads or queries, by `at`. Methods `..._back` add to the gradients."""

    def __init__(self, decays: Tensor, columns: Tensor) -> None:
        self.decays, self.columns = decays, columns
        self.count, self.steps, self.width, self.states, self.keys = columns.shape
        self.one = torch.eye(self.states, dtype=decays.dtype, device=decays.device)

    @cached_property
    def grad_columns(self) -> Tensor:
        """The gradient of the columns."""
        return torch.zeros_like(self.columns, memory_format=torch.contiguous_format)

    def since_start(self, rows: Tensor, at: int) -> Tensor:
        """Return rows with the decays since the chunk's start, as rows (L, C r, n K) of states."""
        return _flat(mix(transposed(self._since(at)), rows))

    def since_start_back(self, rows: Tensor, at: int, grad: Tensor) -> Tensor:
        """Return the gradient of rows, of that of `since_start`."""
        self._since_back(outer(rows, grad.view_as(rows), self.decays), at)
        return self.from_start(grad, rows.shape[2], at)

    def from_start(self, rows: Tensor, each: int, at: int) -> Tensor:
        """Return products with states (L, C r, n K) with the decays since the chunk's start, (L, C,
        r, n, K)."""
        size = (self.count, self.steps, each, self.states, self.keys)
        return mix(self._since(at), rows.view(size))

    def until_end(self) -> Tensor:
        """Return the columns with the decays until the chunk's end, (L, C R, n K)."""
        return _flat(mix(self._until(), self.columns))

    def until_end_back(self, grad: Tensor) -> None:
        """Take the gradient of `until_end`."""
        grad = grad.view_as(self.columns)
        self._until_back(outer(grad, self.columns, self.decays))
        self.grad_columns.add_(mix(transposed(self._until()), grad))

    @abstractmethod
    def _since(self, at: int) -> Tensor:
        """Return the products from the chunk's start to each step's rows, (L, C, n, n, 1 or K)."""

    @abstractmethod
    def _since_back(self, grad: Tensor, at: int) -> None:
        """Add the gradient of `_since`."""

    @abstractmethod
    def _until(self) -> Tensor:
        """Return the products from each step's columns to the chunk's end."""

    @abstractmethod
    def _until_back(self, grad: Tensor) -> None:
        """Add the gradient of `_until`."""

    @abstractmethod
    def total(self) -> Tensor:
        """Return the products over whole chunks, (L, n, n, 1 or K)."""

    @abstractmethod
    def total_back(self, grad: Tensor) -> None:
        """Add the gradient of `total`."""

    @abstractmethod
    def pairs(self, rows: Tensor, at: int) -> tuple[Tensor, Any]:
        """Return rows times decays times columns, (L, C r, C R), and what `pairs_back` reads."""

    @abstractmethod
    def pairs_back(self, rows: Tensor, at: int, kept: Any, grad: Tensor) -> Tensor:
        """Return the gradient of rows, of that of `pairs`."""

    @abstractmethod
    def reach(self, weights: Tensor) -> Tensor:
        """Return the sums of columns with decays to queries and weights (L, C e, C R) of pairs, (L,
        C, e, n, K)."""

    @abstractmethod
    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of decays and columns."""


def decays_of(decays: Tensor, columns: Tensor) -> Decays:
    """Return the products of decays (L, C, n, n, 1 or K) and columns."""
    return (NumberDecays if decays.shape[-1] == 1 else VectorDecays)(decays, columns)


class NumberDecays(Decays):
    """Decays that are matrices of numbers: all products as one matrix a chunk.

    between: (L, C + 1, n, C + 1, n), from the time after s steps to that after t, 0 for t < s.
    """

    def __init__(self, decays: Tensor, columns: Tensor) -> None:
        super().__init__(decays, columns)
        points, n = self.steps + 1, self.states
        between = decays.new_zeros(self.count, points, n, points, n)
        between.diagonal(0, 1, 3).copy_(self.one.unsqueeze(-1))
        between[:, 1:, :, :-1].diagonal(0, 1, 3).copy_(decays.squeeze(-1).movedim(1, -1))
        self.between = between
        half = 1
        while half < self.steps:
            self._join(half)
            half *= 2

    def _join(self, half: int) -> None:
        """Fill in the products across the middles of blocks of 2 `half` steps."""
        n, blocks = self.states, self.steps // (2 * half)
        batch, row, i, column, j = self.between.stride()

        def view(rows: int, first_row: int, columns: int, first_column: int) -> Tensor:
            return self.between.as_strided(
                (self.count, blocks, rows, n, columns, n),
                (batch, 2 * half * (row + column), row, i, column, j),
                first_row * row + first_column * column,
            )

        later, earlier = view(half, half + 1, 1, half), view(1, half, half, 0)
        target = view(half, half + 1, half, 0)
        if n == 1:
            target.copy_(later * earlier)
        else:
            target.copy_((later.flatten(2, 4) @ earlier.flatten(4).flatten(2, 3)).view_as(target))

    @cached_property
    def grad(self) -> Tensor:
        """The gradient of `between`."""
        return torch.zeros_like(self.between)

    def _of_rows(self, between: Tensor, at: int) -> Tensor:
        """Return the entries of rows by columns, (L, C, 1, n, C, 1, n)."""
        return between[:, at : at + self.steps, :, 1:].unsqueeze(2).unsqueeze(5)

    def _since(self, at: int) -> Tensor:
        return self.between[:, at : at + self.steps, :, 0].unsqueeze(-1)

    def _since_back(self, grad: Tensor, at: int) -> None:
        self.grad[:, at : at + self.steps, :, 0] += grad.squeeze(-1)

    def _until(self) -> Tensor:
        return self.between[:, -1, :, 1:].transpose(1, 2).unsqueeze(-1)

    def _until_back(self, grad: Tensor) -> None:
        self.grad[:, -1, :, 1:] += grad.squeeze(-1).transpose(1, 2)

    def total(self) -> Tensor:
        return self.between[:, -1, :, 0].unsqueeze(-1)

    def total_back(self, grad: Tensor) -> None:
        self.grad[:, -1, :, 0] += grad.squeeze(-1)

    def pairs(self, rows: Tensor, at: int) -> tuple[Tensor, Any]:
        plain = rows.flatten(1, 3) @ self.columns.flatten(1, 3).mT
        plain = plain.view(*rows.shape[:4], *self.columns.shape[1:4])
        products = plain * self._of_rows(self.between, at)
        products = products.sum((3, 6)) if self.states > 1 else products.squeeze(6).squeeze(3)
        return products.flatten(3).flatten(1, 2), plain

    def pairs_back(self, rows: Tensor, at: int, kept: Any, grad: Tensor) -> Tensor:
        products = self._by_pair(grad, rows.shape[2]) * kept
        several = [d for d in (2, 5) if products.shape[d] != 1]
        self._of_rows(self.grad, at).add_(products.sum(several, True) if several else products)
        weights = self._with_decays(grad, rows.shape[2], at)
        self.grad_columns.flatten(1, 3).baddbmm_(weights.mT, rows.flatten(1, 3))
        return (weights @ self.columns.flatten(1, 3)).view_as(rows)

    def reach(self, weights: Tensor) -> Tensor:
        each = weights.shape[1] // self.steps
        sums = self._with_decays(weights, each, QUERIES) @ self.columns.flatten(1, 3)
        return sums.view(self.count, self.steps, each, self.states, self.keys)

    def _by_pair(self, weights: Tensor, each: int) -> Tensor:
        return weights.view(self.count, self.steps, each, 1, self.steps, self.width, 1)

    def _with_decays(self, weights: Tensor, each: int, at: int) -> Tensor:
        """Return weights (L, C r, C R) times the decays of pairs, (L, C r n, C R n)."""
        products = self._by_pair(weights, each) * self._of_rows(self.between, at)
        return products.flatten(4).flatten(1, 3)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of decays and columns.

        That of step u is the sum over products from s < u to t >= u of the product after u, their
        gradient and the product before u. The products' zeros leave out all others.
        """
        points, n = self.steps + 1, self.states
        square = (self.count, points * n, points * n)
        after = self.between.view(square).mT @ self.grad.view(square)
        after = after.view(self.count, points, n, -1)[:, 1:]
        before = self.between.view(self.count, points, n, -1)[:, :-1]
        grad = (after * before).sum(-1, True) if n == 1 else after @ before.mT
        return grad.unsqueeze(-1), self.grad_columns


class VectorDecays(Decays):
    """Decays that are matrices for each key: products of blocks' steps.

    levels: for blocks of 1, 2, 4, ... C steps the products from the block's start to after each
    step, and from after each step to the block's end.
    """

    def __init__(self, decays: Tensor, columns: Tensor) -> None:
        super().__init__(decays, columns)
        self.one = self.one.unsqueeze(-1).expand_as(decays[0, 0])
        self.levels = [(decays, self.one.expand_as(decays))]
        self.crossings = range(self.steps.bit_length() - 1)
        for level in self.crossings:
            halves = [self._halves(x, level) for x in self.levels[-1]]
            (first, second), (until_first, until_second) = halves
            since = torch.stack([first, compose(second, first[:, :, -1:])], 2)
            until = torch.stack([compose(second[:, :, -1:], until_first), until_second], 2)
            self.levels.append((since.view_as(decays), until.view_as(decays)))

    @cached_property
    def grads(self) -> list[tuple[Tensor, Tensor]]:
        """The gradients of `levels`."""
        return [(torch.zeros_like(a), torch.zeros_like(a)) for a, _ in self.levels]

    @cached_property
    def columns_across(self) -> list[Tensor]:
        """By level, the columns of first blocks with the decays to the middle, as a matrix."""
        return [self._to_middle(level) for level in self.crossings]

    @cached_property
    def grad_across(self) -> list[Tensor]:
        """The gradients of `columns_across`."""
        return [torch.zeros_like(x) for x in self.columns_across]

    def _to_middle(self, level: int) -> Tensor:
        until, columns = (self._halves(x, level)[0] for x in (self.levels[level][1], self.columns))
        return _as_matrix(mix(until, columns))

    def _halves(self, x: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Return the first and the second of two blocks of a level, (L, blocks, 2^level, ...)."""
        first, second = x.unflatten(1, (-1, 2, 2**level)).unbind(2)
        return first, second

    def _to_rows(self, since: Tensor, at: int) -> Tensor:
        """Return products (L, blocks, steps, ...) from blocks' starts to after steps, to rows."""
        if at == QUERIES:
            return since
        return torch.cat([self.one.expand_as(since[:, :, :1]), since[:, :, :-1]], 2)

    def _to_rows_back(self, grad: Tensor, change: Tensor, at: int) -> None:
        """Add the gradient of `_to_rows`."""
        if at == QUERIES:
            grad.add_(change)
        else:
            grad[:, :, :-1].add_(change[:, :, 1:])

    def _since(self, at: int) -> Tensor:
        return self._to_rows(self.levels[-1][0].unsqueeze(1), at).squeeze(1)

    def _since_back(self, grad: Tensor, at: int) -> None:
        self._to_rows_back(self.grads[-1][0].unsqueeze(1), grad.unsqueeze(1), at)

    def _until(self) -> Tensor:
        return self.levels[-1][1]

    def _until_back(self, grad: Tensor) -> None:
        self.grads[-1][1].add_(grad)

    def total(self) -> Tensor:
        return self.levels[-1][0][:, -1]

    def total_back(self, grad: Tensor) -> None:
        self.grads[-1][0][:, -1].add_(grad)

    def _corners(self, pairs: Tensor, level: int) -> Tensor:
        """Return a view of pairs (L, C, r, C, R) across the middles of a level's blocks,
        (L, blocks, steps, r, steps, R)."""
        size = (-1, 2, 2**level)
        corners = pairs.unflatten(3, size).unflatten(1, size)[:, :, 1, :, :, :, 0]
        return corners.diagonal(0, 1, 4).movedim(-1, 1)

    def pairs(self, rows: Tensor, at: int) -> tuple[Tensor, Any]:
        out = rows.new_zeros(*rows.shape[:3], self.steps, self.width)
        if at == QUERIES:
            same = rows.flatten(3) @ self.columns.flatten(3).mT
            out.diagonal(0, 1, 3).copy_(same.movedim(1, -1))
        kept = []
        for level in self.crossings:
            to_rows = self._to_rows(self._halves(self.levels[level][0], level)[1], at)
            across = _as_matrix(mix(transposed(to_rows), self._halves(rows, level)[1]))
            corners = self._corners(out, level)
            corners.copy_((across @ self.columns_across[level].mT).view_as(corners))
            kept.append((to_rows, across))
        return out.flatten(3).flatten(1, 2), kept

    def pairs_back(self, rows: Tensor, at: int, kept: Any, grad: Tensor) -> Tensor:
        grad, grad_rows = grad.view(*rows.shape[:3], self.steps, self.width), torch.zeros_like(rows)
        if at == QUERIES:
            grad_rows.add_(self._same_step(grad))
            same = grad.diagonal(0, 1, 3).movedim(-1, 1)
            self.grad_columns.add_((same.mT @ rows.flatten(3)).view_as(self.columns))
        for level in self.crossings:
            to_rows, across = kept[level]
            corners = _as_matrix(self._corners(grad, level))
            self.grad_across[level].baddbmm_(corners.mT, across)
            of_rows = self._of_rows(grad, level)
            self._halves(grad_rows, level)[1].add_(mix(to_rows, of_rows))
            change = outer(self._halves(rows, level)[1], of_rows, self.decays)
            self._to_rows_back(self._halves(self.grads[level][0], level)[1], change, at)
        return grad_rows

    def reach(self, weights: Tensor) -> Tensor:
        each = weights.shape[1] // self.steps
        weights = weights.view(self.count, self.steps, each, self.steps, self.width)
        sums = self._same_step(weights)
        for level in self.crossings:
            since = self._halves(self.levels[level][0], level)[1]
            self._halves(sums, level)[1].add_(mix(since, self._of_rows(weights, level)))
        return sums

    def _same_step(self, weights: Tensor) -> Tensor:
        """Return the sums of columns with weights (L, C, r, C, R) of the same step, (L, C, r, n,
        K)."""
        same = weights.diagonal(0, 1, 3).movedim(-1, 1)
        return (same @ self.columns.flatten(3)).unflatten(3, (self.states, self.keys))

    def _of_rows(self, weights: Tensor, level: int) -> Tensor:
        """Return the sums of columns across middles with weights, (L, blocks, steps, r, n, K)."""
        corners = self._corners(weights, level)
        sums = _as_matrix(corners) @ self.columns_across[level]
        return sums.view(*corners.shape[:4], self.states, self.keys)

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Return the gradients of decays and columns: those of `levels`, the last one first."""
        for level in reversed(self.crossings):
            (first, second), (until, _) = (self._halves(x, level) for x in self.levels[level])
            grads = [self._halves(x, level) for x in self.grads[level]]
            (grad_first, grad_second), (grad_until, grad_until_second) = grads
            grads = [self._halves(x, level) for x in self.grads[level + 1]]
            (next_first, next_second), (next_until, next_until_second) = grads
            grad_first.add_(next_first)
            grad_second.add_(compose(next_second, transposed(first[:, :, -1:])))
            grad_first[:, :, -1].add_(compose(transposed(second), next_second).sum(2))
            grad_until_second.add_(next_until_second)
            grad_until.add_(compose(transposed(second[:, :, -1:]), next_until))
            grad_second[:, :, -1].add_(compose(next_until, transposed(until)).sum(2))
            columns, grad_columns = (
                self._halves(x, level)[0] for x in (self.columns, self.grad_columns)
            )
            grad = self.grad_across[level].view_as(columns)
            grad_columns.add_(mix(transposed(until), grad))
            grad_until.add_(outer(grad, columns, self.decays))
        return self.grads[0][0], self.grad_columns


def mix(matrix: Tensor, vectors: Tensor) -> Tensor:
    """Return n x n matrices (..., n, n, K or 1) times vectors (..., r, n, K)."""
    if matrix.shape[-2] == 1:
        return matrix * vectors
    return (matrix.unsqueeze(-4) * vectors.unsqueeze(-3)).sum(-2)


def transposed(matrix: Tensor) -> Tensor:
    """Return n x n matrices (..., n, n, K or 1) transposed."""
    return matrix.transpose(-3, -2)


def compose(second: Tensor, first: Tensor) -> Tensor:
    """Return the products of n x n matrices (..., n, n, K)."""
    if first.shape[-2] == 1:
        return second * first
    return (second.unsqueeze(-2) * first.unsqueeze(-4)).sum(-3)


def outer(left: Tensor, right: Tensor, like: Tensor) -> Tensor:
    """Return the sums over r of outer products of vectors (..., r, n, K): n x n matrices, with sums
    over K where those of `like`, (..., n, n, 1 or K), have one."""
    if like.shape[-2] == 1:
        products = left * right
        products = products.sum(-3) if left.shape[-3] != 1 else products.squeeze(-3)
        products = products.unsqueeze(-2)
    else:
        products = (left.unsqueeze(-2) * right.unsqueeze(-3)).sum(-4)
    return products if like.shape[-1] > 1 else products.sum(-1, keepdim=True)


def _flat(vectors: Tensor) -> Tensor:
    """Return vectors (L, C, r, n, K) as rows of a product with states, (L, C r, n K)."""
    return vectors.flatten(3).flatten(1, 2)


def _as_matrix(x: Tensor) -> Tensor:
    """Return (L, blocks, a, b, c, d) as matrices (L blocks, a b, c d)."""
    return x.flatten(4).flatten(2, 3).flatten(0, 1)
