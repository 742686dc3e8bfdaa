"""Triton kernels of a decoding step: products of few rows, with all that stands around them.

A norm before a product is two things: its gain multiplies the inputs as they are read, and the
factor of a row, which sums over these inputs give, multiplies the result. So every program has what
it needs, and no kernel writes a normed row. Kernels start while the one before ends, fetch their
first weights, and wait then (`PDL`, programmatic dependent launch).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def silu(x):
    """Return x sigmoid(x)."""
    return x * tl.sigmoid(x)


@triton.jit
def fetch(matrix, line, own, k, length):
    """Load lines of a matrix (N, K) at columns k, (lines, columns), past the cache of others."""
    mask = own[:, None] & (k < length)[None, :]
    at = line.to(tl.int64)[:, None] * length + k[None, :]
    return tl.load(matrix + at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def add_product(total, x, matrix, line, own, k, length):
    """Return a sum (R, N) and the product of rows x (R, K) with lines of a matrix."""
    mask = own[None, :] & (k < length)[:, None]
    at = line.to(tl.int64)[None, :] * length + k[:, None]
    return tl.dot(x, tl.load(matrix + at, mask=mask, other=0.0), total, input_precision="ieee")


@triton.jit
def _one_row(
    x, gain, w1, w2, line, own, length,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, NORM: tl.constexpr, TWO: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Return the products of one row with lines of one or two matrices, and its sum of squares."""
    k = tl.arange(0, DEPTH)
    next1 = fetch(w1, line, own, k, length)
    next2 = next1
    if TWO:
        next2 = fetch(w2, line, own, k, length)
    if PDL:
        gdc_wait()
    sum1 = tl.zeros((BLOCK, DEPTH), tl.float32)
    sum2 = tl.zeros((BLOCK, DEPTH), tl.float32)
    squares = tl.zeros((DEPTH,), tl.float32)
    for start in range(0, length, DEPTH):
        now1, now2 = next1, next2
        next1 = fetch(w1, line, own, start + DEPTH + k, length)
        if TWO:
            next2 = fetch(w2, line, own, start + DEPTH + k, length)
        inside = start + k < length
        value = tl.load(x + start + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value *= tl.load(gain + start + k, mask=inside, other=0.0).to(tl.float32)
        sum1 += now1.to(tl.float32) * value[None, :]
        if TWO:
            sum2 += now2.to(tl.float32) * value[None, :]
    return tl.sum(sum1, 1)[None, :], tl.sum(sum2, 1)[None, :], tl.sum(squares, 0)


@triton.jit
def _rows(
    x, gain, w1, w2, line, own, length, row, is_row,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, NORM: tl.constexpr,
    TWO: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Return the products of several rows, and the sum of squares of each, (ROWS, 1)."""
    k = tl.arange(0, DEPTH)
    at_x = row[:, None] * length + k[None, :]
    if PDL:
        gdc_wait()
    sum1 = tl.zeros((ROWS, BLOCK), tl.float32)
    sum2 = tl.zeros((ROWS, BLOCK), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    for start in range(0, length, DEPTH):
        inside = start + k < length
        value = tl.load(x + at_x + start, mask=is_row[:, None] & inside[None, :], other=0.0)
        if NORM:
            wide = value.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            wide *= tl.load(gain + start + k, mask=inside, other=0.0).to(tl.float32)[None, :]
            value = wide.to(value.dtype)
        sum1 = add_product(sum1, value, w1, line, own, start + k, length)
        if TWO:
            sum2 = add_product(sum2, value, w2, line, own, start + k, length)
    return sum1, sum2, squares[:, None]


@triton.jit
def product(
    x, gain, w1, w2, out1, out2, residual, factor, u, inputs,
    rows, length, lines, channels, i_b, i_d, i_t, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, NORM: tl.constexpr,
    KIND: tl.constexpr, FACTOR: tl.constexpr, TAPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply rows x (R, K) by lines of matrices (N, K).

    KIND: "one" and "pair" write products with one and two matrices, "swiglu" silu(w1 x) * (w2 x),
    "add" w1 x + factor * residual. TAPS: also move the inputs of a convolution on by u.
    """
    if PDL:
        gdc_launch_dependents()
    block = tl.program_id(0)
    if KIND == "pair":
        count = tl.cdiv(lines, BLOCK)
        if block >= count:
            block -= count
            w1, out1 = w2, out2
    line = block * BLOCK + tl.arange(0, BLOCK)
    own = line < lines
    row = tl.arange(0, ROWS)
    is_row = row < rows
    TWO: tl.constexpr = KIND == "swiglu"
    if ROWS == 1:
        a, b, squares = _one_row(x, gain, w1, w2, line, own, length, BLOCK, DEPTH, NORM, TWO, PDL)
    else:
        a, b, squares = _rows(x, gain, w1, w2, line, own, length, row, is_row,
                              ROWS, BLOCK, DEPTH, NORM, TWO, PDL)  # fmt: skip
    if NORM:
        rms = tl.rsqrt(squares / length + eps)
        a *= rms
        b *= rms
    at = row[:, None] * lines + line[None, :]
    mask = is_row[:, None] & own[None, :]
    if TWO:
        a = silu(a) * b
    if KIND == "add":
        before = tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        if FACTOR:
            before *= tl.load(factor + line, mask=own, other=0.0).to(tl.float32)[None, :]
        a += before
    tl.store(out1 + at, a.to(out1.dtype.element_ty), mask=mask)
    if TAPS > 1:
        REACH: tl.constexpr = TAPS - 1
        mask = is_row[:, None] & (line < channels)[None, :]
        place = row[:, None] * channels + line[None, :]
        to = inputs + row[:, None] * i_b + line[None, :] * i_d
        for step in tl.static_range(REACH - 1):
            tl.store(to + step * i_t, tl.load(to + (step + 1) * i_t, mask=mask), mask=mask)
        tl.store(to + (REACH - 1) * i_t, tl.load(u + place, mask=mask), mask=mask)


@triton.jit
def activated(
    u, inputs, weight, bias, row, channel, mask, channels, i_b, i_d, i_t, TAPS: tl.constexpr
):
    """Return silu(conv(u)) (R, C) of rows and channels, by the inputs before."""
    place = row[:, None] * channels + channel[None, :]
    own = channel < channels
    y = tl.load(u + place, mask=mask, other=0.0).to(tl.float32)
    if TAPS > 1:
        y *= tl.load(weight + channel, mask=own, other=0.0).to(tl.float32)[None, :]
        y += tl.load(bias + channel, mask=own, other=0.0).to(tl.float32)[None, :]
        at = inputs + row[:, None] * i_b + channel[None, :] * i_d
        for lag in tl.static_range(1, TAPS):
            before = tl.load(at + (TAPS - 1 - lag) * i_t, mask=mask, other=0.0)
            tap = tl.load(weight + lag * channels + channel, mask=own, other=0.0).to(tl.float32)
            y += before.to(tl.float32) * tap[None, :]
    return silu(y)
