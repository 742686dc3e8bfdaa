"""The scan over chunks of an affine matrix recurrence, in batched products: forward and backward.

The states of an entry, n matrices (K, V), obey S'_i = sum over j of D_ij S_j + sum over c of
X_ci (Vals_c + U_c), where a column c < r reads before the step, U_c = sum over j of S_j^T B_cj, and
other columns do not. In a chunk of C steps that begins at S, with P the products of decays,

    W = T (Vals + (P B) S),  Y = (P Q) S + A W,  S' = P S + (P X)^T W,

A, L: the products of queries and reads with columns, decays between them; T = (I - L)^-1. No
quotient or logarithm of a decay is taken, so one that is zero, negative or above 1 is no case.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.solvers.decays import QUERIES, READS, Decays, decays_of, transposed

BASE = 16
"""Rows of the largest block that `inverse` halves no more."""


class Terms(NamedTuple):
    """Terms of L chunks of C steps, (L, C, ...) each; those of one position in time are adjacent.

    decays (n, n, 1) or (n, n, K); columns (R, n, K); reads (r, n, K), r <= R; values (R, V);
    queries (p, n, K), which read Y_p = S'^T Q_p; looks (e, V), which read Z_e = S' E_e.
    """

    decays: Tensor
    columns: Tensor
    reads: Tensor
    values: Tensor
    queries: Tensor
    looks: Tensor


class Saved(NamedTuple):
    """Tensors of a forward pass that the backward pass reads, (L, rows, ...) each.

    sizes: as `solve_chunks` takes them. columns: with the decays to the chunk's end; reads,
    queries: with those since its start. kept: what `pairs_back` takes of reads and of queries.
    between: queries times columns; without: reads times columns that read nothing. weights,
    begins: W and the states at chunks' starts, by position.
    """

    sizes: Sequence[int]
    decays: Decays
    columns: Tensor
    reads: Tensor
    queries: Tensor
    kept: tuple[Tensor, Tensor]
    between: Tensor
    without: Tensor
    inverse: Tensor
    weights: list[Tensor]
    begins: list[Tensor]


def inverse(strict: Tensor) -> Tensor:
    """Return (I - L)^-1 of strictly lower matrices (L, N, N), by exact inverses of their blocks.

    Powers of L would be fewer products, but lose all digits where keys are alike.
    """
    size = strict.shape[-1]
    if size > BASE and size % 2 == 0:
        half = size // 2
        count = len(strict)
        blocks = torch.cat([strict[:, :half, :half], strict[:, half:, half:]])
        first, second = inverse(blocks).split(count)
        out = torch.zeros_like(strict)
        out[:, :half, :half], out[:, half:, half:] = first, second
        out[:, half:, :half] = second @ (strict[:, half:, :half] @ first)
        return out
    index = torch.arange(size, device=strict.device)
    out = torch.eye(size, dtype=strict.dtype, device=strict.device).expand_as(strict)
    half = 1
    while half < size:
        block = index // half
        corner = (block[:, None] == block + 1) & (block % 2 == 0)
        out = torch.baddbmm(out, out, (strict * corner.to(strict.dtype)) @ out)
        half *= 2
    return out


def solve_chunks(
    terms: Terms, state: Tensor, sizes: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Saved]:
    """Return Y (L, C, p, V), Z (L, C, e, n, K), the states (G, n, K, V) after the last chunks, and
    what the backward pass reads.

    sizes: how many chunks each position in time has; they continue the first states of `state`.
    """
    (count, steps, width, n, keys), reading = terms.columns.shape, terms.reads.shape[2]
    decays = decays_of(terms.decays, terms.columns)
    columns, total = decays.until_end(), decays.total()
    reads = decays.since_start(terms.reads, READS)
    queries = decays.since_start(terms.queries, QUERIES)
    between_reads, kept_reads = decays.pairs(terms.reads, READS)
    between, kept_queries = decays.pairs(terms.queries, QUERIES)
    by_column = between_reads.view(count, steps * reading, steps, width)
    solved = inverse(by_column[..., :reading].flatten(2))
    without = by_column[..., reading:].flatten(2)
    values, known = _split(terms.values, reading)
    if width > reading:
        values = torch.baddbmm(values, without, known)
    outputs = values.new_empty(*queries.shape[:2], values.shape[-1])
    flat, weights, begins = state.flatten(1, 2), [], []
    for at in slices_of(sizes):
        s = flat[: at.stop - at.start]
        w = solved[at] @ torch.baddbmm(values[at], reads[at], s)
        w = _join(w, known[at], steps)
        torch.bmm(queries[at], s, out=outputs[at])
        outputs[at].baddbmm_(between[at], w)
        weights.append(w)
        begins.append(s)
        s = _carry(total[at], s).baddbmm_(columns[at].mT, w)
        flat = with_first(flat, s)
    seen = values.new_empty(count, steps, 0, n, keys)
    if terms.looks.shape[2]:
        looks = terms.looks.flatten(1, 2)
        far, near = looks @ torch.cat(begins).mT, looks @ torch.cat(weights).mT
        seen = decays.reach(near) + decays.from_start(far, terms.looks.shape[2], QUERIES)
    saved = Saved(
        sizes,
        decays,
        columns,
        reads,
        queries,
        (kept_reads, kept_queries),
        between,
        without,
        solved,
        weights,
        begins,
    )
    shape = (count, steps, terms.queries.shape[2], values.shape[-1])
    return outputs.view(shape), seen, flat.view_as(state), saved


def differentiate_chunks(
    terms: Terms, saved: Saved, grad_outputs: Tensor, grad_seen: Tensor, grad_state: Tensor
) -> tuple[Terms, Tensor]:
    """Return the gradients of the terms and of the states before the first chunks.

    In reverse the gradient of the states obeys a recurrence of the same class, with
    dW = (I - L)^-T (A^T dY + (P X) dS'); products of dW, dY and dS' with W and S give those of L, A
    and of what decays.
    """
    (count, steps, width, n, keys), reading = terms.columns.shape, terms.reads.shape[2]
    decays, of_outputs = saved.decays, grad_outputs.flatten(1, 2)
    grad_weights, grad_looks = saved.between.mT @ of_outputs, torch.zeros_like(terms.looks)
    rows, values = saved.queries, of_outputs
    if terms.looks.shape[2]:
        looks = terms.looks.flatten(1, 2)
        weights, begins = torch.cat(saved.weights), torch.cat(saved.begins)
        near, kept = decays.pairs(grad_seen, QUERIES)
        decays.pairs_back(grad_seen, QUERIES, kept, looks @ weights.mT)
        far = decays.since_start(grad_seen, QUERIES)
        decays.since_start_back(grad_seen, QUERIES, looks @ begins.mT)
        grad_looks = (near @ weights + far @ begins).view_as(terms.looks)
        grad_weights += near.mT @ looks
        rows, values = torch.cat([rows, far], 1), torch.cat([values, looks], 1)
    of_columns, of_reads, of_queries = map(
        torch.empty_like, (saved.columns, saved.reads, saved.queries)
    )
    of_between = torch.empty_like(saved.between)
    of_between_reads = values.new_empty(count, steps * reading, steps * width)
    of_total = torch.empty_like(decays.total())
    grad_values = torch.empty_like(terms.values)
    flat, total = grad_state.flatten(1, 2), decays.total()
    positions = [*zip(slices_of(saved.sizes), saved.weights, saved.begins, strict=True)]
    for at, w, s in reversed(positions):
        ds = flat[: len(s)]
        dw = torch.baddbmm(grad_weights[at], saved.columns[at], ds)
        dw, known = _split(dw.unflatten(1, (steps, width)), reading)
        dw = saved.inverse[at].mT @ dw
        if width > reading:
            known = torch.baddbmm(known, saved.without[at].mT, dw)
        grad_values[at] = _join(dw, known, steps).unflatten(1, (steps, width))
        torch.bmm(w, ds.mT, out=of_columns[at])
        torch.bmm(dw, s.mT, out=of_reads[at])
        torch.bmm(of_outputs[at], s.mT, out=of_queries[at])
        torch.bmm(dw, w.mT, out=of_between_reads[at])
        torch.bmm(of_outputs[at], w.mT, out=of_between[at])
        shape = (len(s), n, keys, -1)
        products = (ds.view(shape).unsqueeze(2) * s.view(shape).unsqueeze(1)).sum(-1)
        of_total[at] = products if of_total.shape[-1] > 1 else products.sum(-1, keepdim=True)
        ds = _carry(transposed(total[at]), ds).baddbmm_(rows[at].mT, values[at])
        flat = with_first(flat, ds.baddbmm_(saved.reads[at].mT, dw))
    grad_reads = decays.pairs_back(terms.reads, READS, saved.kept[0], of_between_reads)
    grad_reads += decays.since_start_back(terms.reads, READS, of_reads)
    grad_queries = decays.pairs_back(terms.queries, QUERIES, saved.kept[1], of_between)
    grad_queries += decays.since_start_back(terms.queries, QUERIES, of_queries)
    decays.until_end_back(of_columns)
    decays.total_back(of_total)
    grad_decays, grad_columns = decays.gradients()
    grads = Terms(grad_decays, grad_columns, grad_reads, grad_values, grad_queries, grad_looks)
    return grads, flat.view_as(grad_state)


def slices_of(sizes: Sequence[int]) -> list[slice]:
    """Return the chunks of each position in time, of their numbers."""
    return [slice(start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]


def _split(values: Tensor, reading: int) -> tuple[Tensor, Tensor]:
    """Return the rows (L, C r, V) of columns that read, and those of others, of (L, C, R, V)."""
    return values[:, :, :reading].flatten(1, 2), values[:, :, reading:].flatten(1, 2)


def _join(read: Tensor, others: Tensor, steps: int) -> Tensor:
    """Return the rows (L, C R, V) that `_split` took apart."""
    if not others.shape[1]:
        return read
    if not read.shape[1]:
        return others
    return torch.cat([read.unflatten(1, (steps, -1)), others.unflatten(1, (steps, -1))], 2).flatten(
        1, 2
    )


def _carry(total: Tensor, state: Tensor) -> Tensor:
    """Return n x n matrices (L, n, n, K or 1) times states (L, n K, V)."""
    n = total.shape[1]
    if n == 1:
        return state * total.flatten(1).unsqueeze(-1)
    return (total.unsqueeze(-1) * state.unflatten(1, (1, n, -1))).sum(2).flatten(1, 2)


def with_first(states: Tensor, first: Tensor) -> Tensor:
    """Return states (G, ...) with the first ones replaced."""
    return first if len(first) == len(states) else torch.cat([first, states[len(first) :]])


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sizes: Sequence[int], state: Tensor, *terms: Tensor) -> Any:
        ctx.terms = Terms(*terms)
        *results, ctx.saved = solve_chunks(ctx.terms, state, sizes)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        of_terms, of_state = differentiate_chunks(ctx.terms, ctx.saved, *grads)
        return None, of_state, *of_terms


def scan_chunks(terms: Terms, state: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `solve_chunks` does, differentiable once."""
    results: tuple[Tensor, Tensor, Tensor] = _Scan.apply(sizes, state, *terms)
    return results
