"""Products of the decays of a chunk's steps between any two of them, and their gradients.

Pairs of steps are split at the middles of blocks of 2, 4, ... C steps: a product is one up to a
middle times one from there on. So nothing is divided, and decays that are zero are no case.

Shapes: L chunks of C steps, a power of 2; n states; r rows or R columns a step, of n vectors (K).
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

READS, QUERIES = 0, 1
"""Steps of a row's own whose decays a product has: reads look at the state before their step."""


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
    """Return the sums over r of outer products of vectors (..., r, n, K), as `like` is: n x n
    matrices, or with their sums over K."""
    if like.shape[-2] == 1:
        products = left * right
        products = products.sum(-3) if left.shape[-3] != 1 else products.squeeze(-3)
        products = products.unsqueeze(-2)
    else:
        products = (left.unsqueeze(-2) * right.unsqueeze(-3)).sum(-4)
    return products if like.shape[-1] > 1 else products.sum(-1, keepdim=True)


class NumberDecays:
    """Decays (L, C, n, n, 1), n x n matrices of numbers: all products as one matrix a chunk.

    between: (L, C + 1, n, C + 1, n), from the time after s steps to that after t, 0 for t < s.
    """

    def __init__(self, decays: Tensor) -> None:
        count, self.steps, n = decays.shape[:3]
        between = decays.new_zeros(count, self.steps + 1, n, self.steps + 1, n)
        ones = torch.eye(n, dtype=decays.dtype, device=decays.device)
        between.diagonal(0, 1, 3).copy_(ones.unsqueeze(-1))
        between[:, 1:, :, :-1].diagonal(0, 1, 3).copy_(decays.squeeze(-1).movedim(1, -1))
        self.between = between
        half = 1
        while half < self.steps:
            self._join(half)
            half *= 2

    @cached_property
    def grad(self) -> Tensor:
        """The gradient of `between`."""
        return torch.zeros_like(self.between)

    def _join(self, half: int) -> None:
        """Fill in the products across the middles of blocks of 2 `half` steps."""
        count, _, n = self.between.shape[:3]
        batch, row, i, column, j = self.between.stride()
        blocks = self.steps // (2 * half)

        def view(rows: int, first_row: int, columns: int, first_column: int) -> Tensor:
            return self.between.as_strided(
                (count, blocks, rows, n, columns, n),
                (batch, 2 * half * (row + column), row, i, column, j),
                first_row * row + first_column * column,
            )

        later, earlier = view(half, half + 1, 1, half), view(1, half, half, 0)
        target = view(half, half + 1, half, 0)
        if n == 1:
            target.copy_(later * earlier)
        else:
            target.copy_((later.flatten(2, 4) @ earlier.flatten(4).flatten(2, 3)).view_as(target))

    def _of(self, rows_or_grad: Tensor, at: int) -> Tensor:
        """Return the entries of rows by columns, (L, C, 1, n, C, 1, n)."""
        return rows_or_grad[:, at : at + self.steps, :, 1:].unsqueeze(2).unsqueeze(5)

    def since_start(self, at: int) -> Tensor:
        """Return the products from the chunk's start to each step's rows, (L, C, n, n, 1)."""
        return self.between[:, at : at + self.steps, :, 0].unsqueeze(-1)

    def until_end(self) -> Tensor:
        """Return the products from each step's columns to the chunk's end, (L, C, n, n, 1)."""
        return self.between[:, -1, :, 1:].transpose(1, 2).unsqueeze(-1)

    def total(self) -> Tensor:
        """Return the products over whole chunks, (L, n, n, 1)."""
        return self.between[:, -1, :, 0].unsqueeze(-1)

    def pairs(self, rows: Tensor, columns: Tensor, at: int) -> tuple[Tensor, Tensor]:
        """Return rows times decays times columns, (L, C r, C R), and what `pairs_back` reads."""
        plain = rows.flatten(1, 3) @ columns.flatten(1, 3).mT
        plain = plain.view(*rows.shape[:4], *columns.shape[1:4])
        products = plain * self._of(self.between, at)
        return _sum_states(products).flatten(3).flatten(1, 2), plain

    def reach(self, weights: Tensor, columns: Tensor) -> Tensor:
        """Return the sums of columns, with decays to queries and weights (L, C e, C R) of pairs:
        (L, C, e, n, K)."""
        count, steps, columns_each, n, _ = columns.shape
        each = weights.shape[1] // steps
        weights = weights.view(count, steps, each, 1, steps, columns_each, 1)
        with_decays = (weights * self._of(self.between, QUERIES)).flatten(4).flatten(1, 3)
        return (with_decays @ columns.flatten(1, 3)).view(count, steps, each, n, columns.shape[-1])

    def pairs_back(
        self, rows: Tensor, columns: Tensor, at: int, plain: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of rows and columns, of that of `pairs`."""
        count, steps, rows_each = rows.shape[:3]
        grad = grad.view(count, steps, rows_each, 1, steps, columns.shape[2], 1)
        with_decays = (grad * self._of(self.between, at)).flatten(4).flatten(1, 3)
        products = grad * plain
        summed = [d for d in (2, 5) if products.shape[d] != 1]
        target = self._of(self.grad, at)
        target += products.sum(summed, keepdim=True) if summed else products
        grad_rows = with_decays @ columns.flatten(1, 3)
        grad_columns = with_decays.mT @ rows.flatten(1, 3)
        return grad_rows.view_as(rows), grad_columns.view_as(columns)

    def since_start_back(self, grad: Tensor, at: int) -> None:
        """Add the gradient of `since_start`."""
        self.grad[:, at : at + self.steps, :, 0] += grad.squeeze(-1)

    def until_end_back(self, grad: Tensor) -> None:
        """Add the gradient of `until_end`."""
        self.grad[:, -1, :, 1:] += grad.squeeze(-1).transpose(1, 2)

    def total_back(self, grad: Tensor) -> None:
        """Add the gradient of `total`."""
        self.grad[:, -1, :, 0] += grad.squeeze(-1)

    def gradient(self) -> Tensor:
        """Return the gradient of the decays, (L, C, n, n, 1).

        That of step u is the sum over products from s < u to t >= u of the product after u, their
        gradient and the product before u. The products' zeros leave out all others.
        """
        count, points, n = self.between.shape[:3]
        square = (count, points * n, points * n)
        after = self.between.view(square).mT @ self.grad.view(square)
        after = after.view(count, points, n, -1)[:, 1:]
        before = self.between.view(count, points, n, -1)[:, :-1]
        if n == 1:
            return (after * before).sum(-1)[..., None, None]
        return (after @ before.mT).unsqueeze(-1)


class VectorDecays:
    """Decays (L, C, n, n, K), n x n matrices for each key: products of blocks' steps.

    levels: for blocks of 1, 2, 4, ... C steps the products from the block's start to after each
    step, and from after each step to the block's end.
    """

    def __init__(self, decays: Tensor) -> None:
        self.count, self.steps, self.states = decays.shape[:3]
        one = torch.eye(self.states, dtype=decays.dtype, device=decays.device).unsqueeze(-1)
        self.one = one.expand_as(decays[0, 0])
        self.levels = [(decays, self.one.expand_as(decays))]
        while 2 ** (len(self.levels) - 1) < self.steps:
            halves = [self._halves(x, len(self.levels) - 1) for x in self.levels[-1]]
            (first, second), (until_first, until_second) = halves
            since = torch.stack([first, compose(second, first[:, :, -1:])], 2)
            until = torch.stack([compose(second[:, :, -1:], until_first), until_second], 2)
            self.levels.append((since.view_as(decays), until.view_as(decays)))

    @cached_property
    def grads(self) -> list[tuple[Tensor, Tensor]]:
        """The gradients of `levels`."""
        return [(torch.zeros_like(a), torch.zeros_like(a)) for a, _ in self.levels]

    def _halves(self, x: Tensor, level: int) -> tuple[Tensor, Tensor]:
        """Return the first and the second of two blocks of a level, (L, blocks, 2^level, ...)."""
        first, second = x.unflatten(1, (-1, 2, 2**level)).unbind(2)
        return first, second

    def _to_rows(self, since: Tensor, at: int) -> Tensor:
        """Return products (L, blocks, steps, ...) from blocks' starts to after steps, to rows."""
        if at == QUERIES:
            return since
        ones = self.one.expand_as(since[:, :, :1])
        return torch.cat([ones, since[:, :, :-1]], 2)

    def _add_to_rows(self, grad: Tensor, change: Tensor, at: int) -> None:
        """Add the gradient of `_to_rows`."""
        if at == QUERIES:
            grad += change
        else:
            grad[:, :, :-1] += change[:, :, 1:]

    def since_start(self, at: int) -> Tensor:
        """Return the products from the chunk's start to each step's rows, (L, C, n, n, K)."""
        return self._to_rows(self.levels[-1][0].unsqueeze(1), at).squeeze(1)

    def until_end(self) -> Tensor:
        """Return the products from each step's columns to the chunk's end, (L, C, n, n, K)."""
        return self.levels[-1][1]

    def total(self) -> Tensor:
        """Return the products over whole chunks, (L, n, n, K)."""
        return self.levels[-1][0][:, -1]

    def _across(self, rows: Tensor, columns: Tensor, at: int, level: int) -> tuple[Tensor, Tensor]:
        """Return rows of second blocks and columns of first ones, (L, blocks, steps, r, n, K), with
        the decays to the middle between them."""
        since, until = self.levels[level]
        rows, columns = self._halves(rows, level)[1], self._halves(columns, level)[0]
        to_rows = self._to_rows(self._halves(since, level)[1], at)
        to_middle = self._halves(until, level)[0]
        return mix(transposed(to_rows), rows), mix(to_middle, columns)

    def _corners(self, pairs: Tensor, level: int) -> Tensor:
        """Return a view of pairs (L, C, r, C, R) across the middles of a level's blocks,
        (L, blocks, steps, r, steps, R)."""
        size = (-1, 2, 2**level)
        corners = pairs.unflatten(3, size).unflatten(1, size)[:, :, 1, :, :, :, 0]
        return corners.diagonal(0, 1, 4).movedim(-1, 1)

    def pairs(self, rows: Tensor, columns: Tensor, at: int) -> tuple[Tensor, Tensor]:
        """Return rows times decays times columns, (L, C r, C R), and what `pairs_back` reads."""
        out = rows.new_zeros(*rows.shape[:3], *columns.shape[1:3])
        if at == QUERIES:
            same = rows.flatten(3) @ columns.flatten(3).mT
            out.diagonal(0, 1, 3).copy_(same.movedim(1, -1))
        for level in range(len(self.levels) - 1):
            rows_there, columns_there = self._across(rows, columns, at, level)
            corners = self._corners(out, level)
            block = rows_there.flatten(4).flatten(2, 3) @ columns_there.flatten(4).flatten(2, 3).mT
            corners.copy_(block.view_as(corners))
        return out.flatten(3).flatten(1, 2), out

    def reach(self, weights: Tensor, columns: Tensor) -> Tensor:
        """Return the sums of columns, with decays to queries and weights (L, C e, C R) of pairs:
        (L, C, e, n, K)."""
        each = weights.shape[1] // self.steps
        weights = weights.view(self.count, self.steps, each, self.steps, columns.shape[2])
        rows = columns.new_zeros(*weights.shape[:3], *columns.shape[3:])
        return self.pairs_back(rows, columns, QUERIES, weights, weights)[0]

    def pairs_back(
        self, rows: Tensor, columns: Tensor, at: int, kept: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of rows and columns, of that of `pairs`."""
        grad = grad.view_as(kept)
        grad_rows, grad_columns = torch.zeros_like(rows), torch.zeros_like(columns)
        if at == QUERIES:
            same = grad.diagonal(0, 1, 3).movedim(-1, 1)
            grad_rows += (same @ columns.flatten(3)).view_as(rows)
            grad_columns += (same.mT @ rows.flatten(3)).view_as(columns)
        for level in range(len(self.levels) - 1):
            there = self._across(rows, columns, at, level)
            corners = self._corners(grad, level).flatten(4).flatten(2, 3)
            flat_rows, flat_columns = (x.flatten(4).flatten(2, 3) for x in there)
            of_rows = (corners @ flat_columns).view_as(there[0])
            of_columns = (corners.mT @ flat_rows).view_as(there[1])
            since, until = self.levels[level]
            to_rows = self._to_rows(self._halves(since, level)[1], at)
            to_middle = self._halves(until, level)[0]
            second, first = self._halves(rows, level)[1], self._halves(columns, level)[0]
            self._halves(grad_rows, level)[1].add_(mix(to_rows, of_rows))
            self._halves(grad_columns, level)[0].add_(mix(transposed(to_middle), of_columns))
            grad_since, grad_until = self.grads[level]
            self._add_to_rows(
                self._halves(grad_since, level)[1], outer(second, of_rows, self.one), at
            )
            self._halves(grad_until, level)[0].add_(outer(of_columns, first, self.one))
        return grad_rows, grad_columns

    def since_start_back(self, grad: Tensor, at: int) -> None:
        """Add the gradient of `since_start`."""
        self._add_to_rows(self.grads[-1][0].unsqueeze(1), grad.unsqueeze(1), at)

    def until_end_back(self, grad: Tensor) -> None:
        """Add the gradient of `until_end`."""
        self.grads[-1][1].add_(grad)

    def total_back(self, grad: Tensor) -> None:
        """Add the gradient of `total`."""
        self.grads[-1][0][:, -1] += grad

    def gradient(self) -> Tensor:
        """Return the gradient of the decays, (L, C, n, n, K): that of `levels`, the last first."""
        for level in reversed(range(len(self.levels) - 1)):
            since, until = self.levels[level]
            first, second = self._halves(since, level)
            until_first, _ = self._halves(until, level)
            grad_first, grad_second = self._halves(self.grads[level][0], level)
            grad_until_first, grad_until_second = self._halves(self.grads[level][1], level)
            (next_first, next_second), (next_until_first, next_until_second) = (
                self._halves(x, level) for x in self.grads[level + 1]
            )
            total, second_total = first[:, :, -1:], second[:, :, -1:]
            grad_first += next_first
            grad_second += compose(next_second, transposed(total))
            grad_first[:, :, -1] += compose(transposed(second), next_second).sum(2)
            grad_until_second += next_until_second
            grad_until_first += compose(transposed(second_total), next_until_first)
            grad_second[:, :, -1] += compose(next_until_first, transposed(until_first)).sum(2)
        return self.grads[0][0]


Decays = NumberDecays | VectorDecays


def decays_of(decays: Tensor) -> Decays:
    """Return the products of decays (L, C, n, n, 1 or K)."""
    return (NumberDecays if decays.shape[-1] == 1 else VectorDecays)(decays)


def _sum_states(products: Tensor) -> Tensor:
    """Return products (L, C, r, n, C, R, n) summed over both axes of states."""
    return products.sum((3, 6)) if products.shape[3] > 1 else products.squeeze(6).squeeze(3)
