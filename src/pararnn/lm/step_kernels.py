"""Triton kernels of a decoding step: products of few rows, with all that stands around them.

A product reads its weights once, in 16 or 8 bits, and computes a tile of lines and rows. One row is
multiplied by lanes, several by tensor cores. A norm before a product is two things: the kernel that
writes a row multiplies it by the gain and sums its squares, and the one that reads it multiplies
its result by the factor. So no kernel reads a row to norm it. Kernels start while the one before
ends, fetch their first weights if there is one row, and wait then (programmatic dependent launch).
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
    address = matrix + line.to(tl.int64)[:, None] * length + k[None, :]
    if EVEN:
        return tl.load(address, eviction_policy="evict_first")
    return tl.load(address, mask=(k < length)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def rows_numbers(x, row, k, length, width, EVEN: tl.constexpr):
    """Load columns k of rows of a width, (columns, rows); those from `length` on are 0."""
    address = x + row[None, :] * width + k[:, None]
    if EVEN:
        return tl.load(address)
    return tl.load(address, mask=(k < length)[:, None], other=0.0)


@triton.jit
def factor_of(squares, row, length, eps, tiles, TILES: tl.constexpr, ROWS: tl.constexpr):
    """Return 1 / sqrt(mean square) of rows, of sums (tiles, rows) of their squares, (1, rows)."""
    tile = tl.arange(0, TILES)
    address = squares + tile[:, None] * ROWS + row[None, :]
    sums = tl.load(address, mask=(tile < tiles)[:, None], other=0.0)
    return tl.rsqrt(tl.sum(sums, 0) / length + eps)[None, :]


@triton.jit
def write_scaled(
    value, line, row, valid, gain, times_gain, squares, tile, lines, ROWS: tl.constexpr
):  # fmt: skip
    """Write numbers (lines, rows) times the next norm's gain, and the sums of their squares."""
    dtype = times_gain.dtype.element_ty
    value = tl.where(valid[:, None], value.to(dtype).to(tl.float32), 0.0)
    times = tl.load(gain + line, mask=valid, other=0.0).to(tl.float32)[:, None]
    tl.store(
        times_gain + row[None, :] * lines + line[:, None], (value * times).to(dtype), valid[:, None]
    )
    tl.store(squares + tile * ROWS + row, tl.sum(value * value, 0))


@triton.jit
def sum_of(
    tiles, size, SPLIT: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Return the sum of tiles (lines, rows) that several programs have written, in order."""
    result = tl.zeros((LINES, ROWS), tl.float32)
    for split in tl.static_range(SPLIT):
        result += tl.load(tiles + split * size, cache_modifier=".cg")
    return result


@triton.jit
def begin(
    token, table, gain, x, times_gain, squares, rows, width,
    LINES: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the tokens' vectors of a table, as a norm before a product needs them."""
    start(PDL)
    tile = tl.program_id(0)
    line, row = tile * LINES + tl.arange(0, LINES), tl.arange(0, ROWS)
    wait(PDL)
    word = tl.load(token + row, mask=row < rows, other=0)
    address = table + word[None, :] * width + line[:, None]
    valid = line < width
    value = tl.load(address, mask=valid[:, None] & (row < rows)[None, :], other=0.0)
    tl.store(x + row[None, :] * width + line[:, None], value, valid[:, None])
    write_scaled(value, line, row, valid, gain, times_gain, squares, tile, width, ROWS)


@triton.jit
def product(
    x, squares, w1, w2, scale1, scale2, out1, out2, residual, factor, gain, new_squares,
    inputs, taps, bias, partial, counter,
    rows, length, lines, square_tiles, i_b, i_d, i_t, eps,
    EPILOGUE: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, SQUARE_TILES: tl.constexpr, FACTOR: tl.constexpr,
    SCALES: tl.constexpr, TAPS: tl.constexpr, EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply rows x (R, K) by lines of matrices (N, K), and write (R, N).

    EPILOGUE: "one" writes products; "pair" those with two matrices, silu(conv(w1 x)) and silu(w2
    x); "swiglu" silu(w1 x) * (w2 x); "add" w1 x + factor * residual into `out1`, and the same times
    `gain` into `out2`. SQUARE_TILES: those of `squares`, 0 without a norm. SPLIT: programs that
    share the sums of a tile; the last one adds them, in order.
    """
    start(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    tile_counter = counter + tile
    MATRICES: tl.constexpr = 2 if EPILOGUE == "swiglu" else 1
    SIZE: tl.constexpr = LINES * ROWS
    tile_partial = partial + tile * (SPLIT * MATRICES * SIZE)
    count = tl.cdiv(lines, LINES)
    is_second = False
    if EPILOGUE == "pair":
        is_second = tile >= count
        if is_second:
            tile -= count
            w1, out1, scale1 = w2, out2, scale2
    first = tile * LINES
    line = first + tl.arange(0, LINES)
    valid = line < lines
    near = tl.minimum(line, lines - 1)
    row = tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    share = tl.cdiv(length, SPLIT * DEPTH) * DEPTH
    begin_k = split * share
    end_k = tl.minimum(begin_k + share, length)
    if ROWS == 1:
        next1 = fetch(w1, near, k, length, False)
        next2 = next1
        if EPILOGUE == "swiglu":
            next2 = fetch(w2, near, k, length, False)
        wait(PDL)
        sum1 = tl.zeros((LINES, DEPTH), tl.float32)
        sum2 = tl.zeros((LINES, DEPTH), tl.float32)
        for column in range(0, length, DEPTH):
            now1, now2 = next1, next2
            next1 = fetch(w1, near, column + DEPTH + k, length, False)
            if EPILOGUE == "swiglu":
                next2 = fetch(w2, near, column + DEPTH + k, length, False)
            value = tl.load(x + column + k, mask=column + k < length, other=0.0).to(tl.float32)
            sum1 += now1.to(tl.float32) * value[None, :]
            if EPILOGUE == "swiglu":
                sum2 += now2.to(tl.float32) * value[None, :]
        a = tl.sum(sum1, 1)[:, None]
        b = tl.sum(sum2, 1)[:, None]
    else:
        wait(PDL)
        dtype = x.dtype.element_ty
        a = tl.zeros((LINES, ROWS), tl.float32)
        b = tl.zeros((LINES, ROWS), tl.float32)
        for column in tl.range(begin_k, end_k, DEPTH, num_stages=STAGES):
            value = rows_numbers(x, row, column + k, length, length, EVEN)
            a = tl.dot(fetch(w1, near, column + k, length, EVEN).to(dtype), value, a)
            if EPILOGUE == "swiglu":
                b = tl.dot(fetch(w2, near, column + k, length, EVEN).to(dtype), value, b)
    is_last = True
    if SPLIT > 1:
        offset = tl.arange(0, LINES)[:, None] * ROWS + row[None, :]
        tl.store(tile_partial + split * SIZE + offset, a)
        if EPILOGUE == "swiglu":
            tl.store(tile_partial + (SPLIT + split) * SIZE + offset, b)
        tl.debug_barrier()  # all threads have written
        is_last = tl.atomic_add(tile_counter, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if is_last:
            tl.store(tile_counter, 0)  # for the next kernel
            a = sum_of(tile_partial + offset, SIZE, SPLIT, LINES, ROWS)
            if EPILOGUE == "swiglu":
                b = sum_of(tile_partial + SPLIT * SIZE + offset, SIZE, SPLIT, LINES, ROWS)
    if is_last:
        if SCALES:
            a *= tl.load(scale1 + near)[:, None]
            if EPILOGUE == "swiglu":
                b *= tl.load(scale2 + near)[:, None]
        if SQUARE_TILES > 0:
            rms = factor_of(squares, row, length, eps, square_tiles, SQUARE_TILES, ROWS)
            a *= rms
            b *= rms
        mask = valid[:, None] & (row < rows)[None, :]
        out = out1 + row[None, :] * lines + line[:, None]
        dtype = out1.dtype.element_ty
        if EPILOGUE == "one":
            tl.store(out, a.to(dtype), mask)
        elif EPILOGUE == "swiglu":
            tl.store(out, (silu(a) * b).to(dtype), valid[:, None])
        elif EPILOGUE == "pair":
            u = a.to(dtype)
            a = u.to(tl.float32)
            if TAPS > 1:  # noqa: SIM102 (only this is known to the compiler)
                if not is_second:
                    a *= tl.load(taps + near)[:, None].to(tl.float32)
                    a += tl.load(bias + near)[:, None].to(tl.float32)
                    to = inputs + row[None, :] * i_b + line[:, None] * i_d
                    for step in tl.static_range(TAPS - 1):  # from the oldest on
                        old = tl.load(to + step * i_t, mask, other=0.0)
                        weight = tl.load(taps + (TAPS - 1 - step) * lines + near)[:, None]
                        a += old.to(tl.float32) * weight.to(tl.float32)
                        tl.debug_barrier()  # several threads load a number, and one stores it
                        if step > 0:
                            tl.store(to + (step - 1) * i_t, old, mask)
                    tl.store(to + (TAPS - 2) * i_t, u, mask)
            tl.store(out, silu(a).to(dtype), valid[:, None])
        else:
            old = tl.load(
                residual + row[None, :] * lines + line[:, None], valid[:, None], other=0.0
            )
            old = old.to(tl.float32)
            if FACTOR:
                old *= tl.load(factor + near)[:, None].to(tl.float32)
            a += old
            tl.store(out, a.to(dtype), valid[:, None])
            write_scaled(a, line, row, valid, gain, out2, new_squares, tile, lines, ROWS)
