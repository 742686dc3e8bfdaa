"""Triton kernels of a decoding step of one row: products, with all that stands around them.

A norm before a product is two things: its gain multiplies the inputs as they are read, and its
factor, which sums over these inputs give, multiplies the result. So every program has what it
needs, and no kernel writes a normed row. Kernels start while the one before ends, fetch their first
weights, and wait then (programmatic dependent launch).
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
    """Load lines of a matrix (N, K) at columns k, (lines, columns)."""
    mask = own[:, None] & (k < length)[None, :]
    at = line.to(tl.int64)[:, None] * length + k[None, :]
    return tl.load(matrix + at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def product(
    x, gain, w1, w2, out1, out2, residual, factor, u, inputs,
    length, lines, i_d, i_t, eps,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, NORM: tl.constexpr, KIND: tl.constexpr,
    FACTOR: tl.constexpr, TAPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a row x (K) by lines of matrices (N, K).

    KIND: "one" and "pair" write products with one and two matrices, "swiglu" silu(w1 x) * (w2 x),
    "add" w1 x + factor * residual. TAPS: also move the inputs of a convolution on by u (N).
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
    k = tl.arange(0, DEPTH)
    next1 = fetch(w1, line, own, k, length)
    next2 = next1
    if KIND == "swiglu":
        next2 = fetch(w2, line, own, k, length)
    if PDL:
        gdc_wait()
    sum1 = tl.zeros((BLOCK, DEPTH), tl.float32)
    sum2 = tl.zeros((BLOCK, DEPTH), tl.float32)
    squares = tl.zeros((DEPTH,), tl.float32)
    for start in range(0, length, DEPTH):
        now1, now2 = next1, next2
        next1 = fetch(w1, line, own, start + DEPTH + k, length)
        if KIND == "swiglu":
            next2 = fetch(w2, line, own, start + DEPTH + k, length)
        inside = start + k < length
        value = tl.load(x + start + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value *= tl.load(gain + start + k, mask=inside, other=0.0).to(tl.float32)
        sum1 += now1.to(tl.float32) * value[None, :]
        if KIND == "swiglu":
            sum2 += now2.to(tl.float32) * value[None, :]
    a = tl.sum(sum1, 1)
    rms = 1.0
    if NORM:
        rms = tl.rsqrt(tl.sum(squares, 0) / length + eps)
        a *= rms
    if KIND == "swiglu":
        a = silu(a) * (tl.sum(sum2, 1) * rms)
    if KIND == "add":
        old = tl.load(residual + line, mask=own, other=0.0).to(tl.float32)
        if FACTOR:
            old *= tl.load(factor + line, mask=own, other=0.0).to(tl.float32)
        a += old
    tl.store(out1 + line, a.to(out1.dtype.element_ty), mask=own)
    if TAPS > 1:
        to = inputs + line * i_d
        for step in tl.static_range(TAPS - 2):
            tl.store(to + step * i_t, tl.load(to + (step + 1) * i_t, mask=own), mask=own)
        tl.store(to + (TAPS - 2) * i_t, tl.load(u + line, mask=own), mask=own)


@triton.jit
def convolve_one(u, inputs, weight, bias, channel, mask, channels, i_d, i_t, TAPS: tl.constexpr):
    """Return silu(conv(u)) of channels, by the inputs before."""
    y = tl.load(u + channel, mask=mask, other=0.0).to(tl.float32)
    if TAPS > 1:
        y *= tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
        y += tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)
        for lag in tl.static_range(1, TAPS):
            at = inputs + channel * i_d + (TAPS - 1 - lag) * i_t
            old = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            y += old * tl.load(weight + lag * channels + channel, mask=mask, other=0.0)
    return silu(y)
