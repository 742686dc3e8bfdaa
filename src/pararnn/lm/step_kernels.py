"""Triton kernels of a decoding step: products of few rows, with all that stands around them.

A product reads its weights once, in 16 or 8 bits, and computes a tile of lines and rows. One row is
multiplied by lanes, several by tensor cores. A norm before a product is two things: the kernel that
writes a row multiplies it by the gain and sums its squares, and the one that reads it multiplies
its result by the factor. So no kernel reads a row to norm it. Kernels start while the one before
ends, fetch weights and all else that no kernel writes, and wait then (programmatic dependent
launch).
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
def start(PDL: tl.constexpr):
    """Let the next kernel start."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the kernels before."""
    if PDL:
        gdc_wait()


@triton.jit
def fetch(matrix, line, k, length, EVEN: tl.constexpr):
    """Load lines of a matrix (N, K) at columns k, (lines, columns)."""
    at = matrix + line.to(tl.int64)[:, None] * length + k[None, :]
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    return tl.load(at, mask=(k < length)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def warm(matrix, line, length, LINES: tl.constexpr):
    """Let the second-level cache fetch lines of a matrix (N, K)."""
    EACH: tl.constexpr = 1024 // matrix.dtype.element_ty.primitive_bitwidth
    k = tl.arange(0, 16) * EACH
    for at in range(0, length, 16 * EACH):
        column = tl.minimum(at + k, length - 1)
        source = matrix + line.to(tl.int64)[:, None] * length + column[None, :]
        tl.inline_asm_elementwise(
            "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l", [source.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def numbers(tile):
    """Convert a tile to float32.

    Whole numbers go through the float 2^23 + 128 + x: a GPU converts a sixteenth of the numbers in
    a cycle that it moves or adds.
    """
    if tile.dtype == tl.int8:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            xor.b32 t, $4, 0x80808080;
            prmt.b32 $0, t, 0x4B000000, 0x7440;
            prmt.b32 $1, t, 0x4B000000, 0x7441;
            prmt.b32 $2, t, 0x4B000000, 0x7442;
            prmt.b32 $3, t, 0x4B000000, 0x7443;
            sub.f32 $0, $0, 0f4B000080;
            sub.f32 $1, $1, 0f4B000080;
            sub.f32 $2, $2, 0f4B000080;
            sub.f32 $3, $3, 0f4B000080;
            }""",
            "=r,=r,=r,=r,r", [tile], dtype=tl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    return tile.to(tl.float32)


@triton.jit
def products(tile, value, LINES: tl.constexpr, DEPTH: tl.constexpr, EACH: tl.constexpr):
    """Multiply lines of a tile by numbers (columns), and add EACH neighbours."""
    result = numbers(tile) * value[None, :]
    if EACH == 1:
        return result
    return tl.sum(tl.reshape(result, (LINES, DEPTH // EACH, EACH)), 2)


@triton.jit
def as_kind(tile, kind):
    """Convert a tile to the dtype in which tensor cores multiply it."""
    return numbers(tile).to(kind) if tile.dtype == tl.int8 else tile.to(kind)


@triton.jit
def row_numbers(x, k, length):
    """Load columns k of a row, those from `length` on as 0."""
    return tl.load(x + k, mask=k < length, other=0.0).to(tl.float32)


@triton.jit
def rows_numbers(x, row, k, length, width, EVEN: tl.constexpr):
    """Load columns k of rows of a width, (columns, rows); those from `length` on are 0."""
    at = x + row[None, :] * width + k[:, None]
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(k < length)[:, None], other=0.0)


@triton.jit
def factor_of(squares, row, length, eps, parts, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Return 1 / sqrt(mean square) of rows, of sums (parts, rows) of their squares, (1, rows)."""
    part = tl.arange(0, PARTS)
    at = squares + part[:, None] * ROWS + row[None, :]
    sums = tl.load(at, mask=(part < parts)[:, None], other=0.0)
    return tl.rsqrt(tl.sum(sums, 0) / length + eps)[None, :]


@triton.jit
def numbers_of(vector, line, own):
    """Load a vector's numbers of lines, (lines, 1)."""
    return tl.load(vector + line, mask=own, other=0.0).to(tl.float32)[:, None]


@triton.jit
def write_scaled(
    value, line, row, own, gain, times_gain, squares, part, lines, ROWS: tl.constexpr
):  # fmt: skip
    """Write numbers (lines, rows) times the next norm's gain, and the sums of their squares."""
    kind = times_gain.dtype.element_ty
    value = tl.where(own[:, None], value.to(kind).to(tl.float32), 0.0)
    tl.store(
        times_gain + row[None, :] * lines + line[:, None], (value * gain).to(kind), own[:, None]
    )
    tl.store(squares + part * ROWS + row, tl.sum(value * value, 0))


@triton.jit
def begin(
    token, table, gain, x, times_gain, squares, rows, width,
    LINES: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the tokens' vectors of a table, as a norm before a product needs them."""
    start(PDL)
    part = tl.program_id(0)
    line, row = part * LINES + tl.arange(0, LINES), tl.arange(0, ROWS)
    wait(PDL)
    word = tl.load(token + row, mask=row < rows, other=0)
    at = table + word[None, :] * width + line[:, None]
    own = line < width
    value = tl.load(at, mask=own[:, None] & (row < rows)[None, :], other=0.0)
    gain = numbers_of(gain, line, own)
    tl.store(x + row[None, :] * width + line[:, None], value, own[:, None])
    write_scaled(value, line, row, own, gain, times_gain, squares, part, width, ROWS)


@triton.jit
def product(
    x, squares, w1, w2, scale1, scale2, out1, out2, residual, factor, gain, new_squares,
    inputs, taps, bias,
    rows, length, lines, parts, i_b, i_d, i_t, eps,
    KIND: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    EACH: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
    WARM: tl.constexpr, FACTOR: tl.constexpr, SCALES: tl.constexpr, TAPS: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply rows x (R, K) by lines of matrices (N, K), and write (R, N).

    KIND: "one" writes products; "pair" those with two matrices, silu(conv(w1 x)) and silu(w2 x);
    "swiglu" silu(w1 x) * (w2 x); "add" w1 x + factor * residual into `out1`, and the same times
    `gain` into `out2`. PARTS: of `squares`, 0 without a norm. EACH: neighbours that a lane adds at
    once. AHEAD: tiles that one row loads ahead, one or two. STAGES: of loads for several rows.
    WARM: whether the second-level cache fetches the lines meanwhile.
    """
    start(PDL)
    tile = tl.program_id(0)
    count = tl.cdiv(lines, LINES)
    is_second = False
    if KIND == "pair":
        is_second = tile >= count
        if is_second:
            tile -= count
            w1, out1, scale1 = w2, out2, scale2
    line = tile * LINES + tl.arange(0, LINES)
    own = line < lines
    near = tl.minimum(line, lines - 1)
    row = tl.arange(0, ROWS)
    mask = own[:, None] & (row < rows)[None, :]
    k = tl.arange(0, DEPTH)
    # What no kernel of this step writes is loaded before the wait: weights, scales and gains.
    times1, times2, times_old, next_gain, now_tap, now_bias = 1.0, 1.0, 1.0, 1.0, 1.0, 0.0
    if SCALES:
        times1 = numbers_of(scale1, line, own)
        if KIND == "swiglu":
            times2 = numbers_of(scale2, line, own)
    if KIND == "add":
        next_gain = numbers_of(gain, line, own)
        if FACTOR:
            times_old = numbers_of(factor, line, own)
    if KIND == "pair" and TAPS > 1:
        now_tap, now_bias = numbers_of(taps, line, own), numbers_of(bias, line, own)
    next1 = fetch(w1, near, k, length, False) if ROWS == 1 else 0
    next2 = fetch(w2, near, k, length, False) if ROWS == 1 and KIND == "swiglu" else 0
    after1 = fetch(w1, near, DEPTH + k, length, False) if ROWS == 1 and AHEAD == 2 else 0
    after2 = 0
    if ROWS == 1 and AHEAD == 2 and KIND == "swiglu":
        after2 = fetch(w2, near, DEPTH + k, length, False)
    if WARM:
        warm(w1, near, length, LINES)
        if KIND == "swiglu":
            warm(w2, near, length, LINES)
    wait(PDL)
    old = 0.0
    if KIND == "add":
        old_at = residual + row[None, :] * lines + line[:, None]
        old = tl.load(old_at, own[:, None], other=0.0).to(tl.float32)
    sum_before = tl.zeros((LINES, ROWS), tl.float32)
    to = inputs
    if KIND == "pair" and TAPS > 1:
        to = inputs + row[None, :] * i_b + line[:, None] * i_d
        sum_before += now_bias
        if not is_second:
            for step in tl.static_range(TAPS - 1):  # from the oldest on
                input = tl.load(to + step * i_t, mask, other=0.0)
                tap = numbers_of(taps + (TAPS - 1 - step) * lines, line, own)
                sum_before += input.to(tl.float32) * tap
                if step > 0:
                    tl.store(to + (step - 1) * i_t, input, mask)
    rms = 1.0
    if ROWS == 1:
        value = row_numbers(x, k, length)
        if PARTS > 0:
            rms = factor_of(squares, row, length, eps, parts, PARTS, ROWS)
        sum1 = tl.zeros((LINES, DEPTH // EACH), tl.float32)
        sum2 = tl.zeros((LINES, DEPTH // EACH), tl.float32)
        for at in range(0, length, DEPTH):
            now1, now2, now_value = next1, next2, value
            if AHEAD == 2:
                next1, next2 = after1, after2
                after1 = fetch(w1, near, at + 2 * DEPTH + k, length, False)
                if KIND == "swiglu":
                    after2 = fetch(w2, near, at + 2 * DEPTH + k, length, False)
            else:
                next1 = fetch(w1, near, at + DEPTH + k, length, False)
                if KIND == "swiglu":
                    next2 = fetch(w2, near, at + DEPTH + k, length, False)
            value = row_numbers(x, at + DEPTH + k, length)
            sum1 += products(now1, now_value, LINES, DEPTH, EACH)
            if KIND == "swiglu":
                sum2 += products(now2, now_value, LINES, DEPTH, EACH)
        a = tl.sum(sum1, 1)[:, None]
        b = tl.sum(sum2, 1)[:, None]
    else:
        kind = x.dtype.element_ty
        if PARTS > 0:
            rms = factor_of(squares, row, length, eps, parts, PARTS, ROWS)
        a = tl.zeros((LINES, ROWS), tl.float32)
        b = tl.zeros((LINES, ROWS), tl.float32)
        for at in tl.range(0, length, DEPTH, num_stages=STAGES):
            value = rows_numbers(x, row, at + k, length, length, EVEN)
            tile1 = fetch(w1, near, at + k, length, EVEN)
            a = tl.dot(as_kind(tile1, kind), value, a)
            if KIND == "swiglu":
                tile2 = fetch(w2, near, at + k, length, EVEN)
                b = tl.dot(as_kind(tile2, kind), value, b)
    a *= rms * times1
    if KIND == "swiglu":
        b *= rms * times2
    out = out1 + row[None, :] * lines + line[:, None]
    kind = out1.dtype.element_ty
    if KIND == "one":
        tl.store(out, a.to(kind), mask)
    elif KIND == "swiglu":
        tl.store(out, (silu(a) * b).to(kind), own[:, None])
    elif KIND == "pair":
        u = a.to(kind)
        a = u.to(tl.float32)
        if TAPS > 1:  # noqa: SIM102 (only this is known to the compiler)
            if not is_second:
                a = a * now_tap + sum_before
                tl.store(to + (TAPS - 2) * i_t, u, mask)
        tl.store(out, silu(a).to(kind), own[:, None])
    else:
        a += old * times_old
        tl.store(out, a.to(kind), own[:, None])
        write_scaled(a, line, row, own, next_gain, out2, new_squares, tile, lines, ROWS)
