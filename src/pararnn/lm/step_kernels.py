"""Triton kernels of a decoding step: products of few rows, with all that stands around them.

A product reads its weights once, in 16 or 8 bits, and computes a tile of lines and rows. One row is
multiplied by lanes, several by tensor cores. A norm before a product is two things: the kernel that
writes a row multiplies it by the gain and sums its squares, and the one that reads it multiplies
its result by the factor. So no kernel reads a row to norm it. Kernels start while the one before
ends, fetch what no kernel writes, and wait then (programmatic dependent launch). One row's weights
are fetched into registers: their latency, not their bytes, took most of a step.
"""

# ruff: noqa: RUF005 (Triton's tuples grow by sums alone)

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
def floats_of_int8(a):
    """Return int8 as float32: 2^23 + 128 + a by its bits, less 2^23 + 128.

    Converting instructions are four times as slow as sums, and Triton's own way takes two more.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 shifted;
        xor.b32 shifted, $4, 0x80808080;
        prmt.b32 $0, shifted, 0x4B000000, 0x7440;
        prmt.b32 $1, shifted, 0x4B000000, 0x7441;
        prmt.b32 $2, shifted, 0x4B000000, 0x7442;
        prmt.b32 $3, shifted, 0x4B000000, 0x7443;
        sub.f32 $0, $0, 0f4B000080;
        sub.f32 $1, $1, 0f4B000080;
        sub.f32 $2, $2, 0f4B000080;
        sub.f32 $3, $3, 0f4B000080;
        }""",
        "=&f,=&f,=&f,=&f,r",
        [a],
        dtype=tl.float32,
        is_pure=True,
        pack=4,
    )


@triton.jit
def floats(a):
    """Return numbers of a matrix as float32."""
    if a.dtype == tl.int8:
        return floats_of_int8(a)
    return a.to(tl.float32)


@triton.jit
def numbers(a, dtype: tl.constexpr):
    """Return numbers of a matrix in the dtype of rows."""
    if a.dtype == tl.int8:
        return floats_of_int8(a).to(dtype)
    return a.to(dtype)


@triton.jit
def first_columns(
    matrix, line, length, DEPTH: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Load the first AHEAD blocks of DEPTH columns of a matrix's lines, a tuple."""
    k = tl.arange(0, DEPTH)
    blocks = ()  # type: tuple
    for block in tl.static_range(AHEAD):
        blocks = blocks + (fetch(matrix, line, block * DEPTH + k, length, EVEN),)
    return blocks


@triton.jit
def row_blocks(x, length, DEPTH: tl.constexpr, BLOCKS: tl.constexpr):
    """Load a row by blocks of DEPTH columns, a tuple."""
    k = tl.arange(0, DEPTH)
    blocks = ()  # type: tuple
    for block in tl.static_range(BLOCKS):
        column = block * DEPTH + k
        blocks = blocks + (tl.load(x + column, mask=column < length, other=0.0),)
    return blocks


@triton.jit
def line_sums(
    blocks, row, matrix, line, length, LINES: tl.constexpr, DEPTH: tl.constexpr,
    BLOCKS: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return the products (lines, 1) of a row with a matrix's lines, whose first blocks are here.

    Numbers that a thread loads at once are added up first.
    """
    VECTOR: tl.constexpr = min(DEPTH, 128 // matrix.dtype.element_ty.primitive_bitwidth)
    k = tl.arange(0, DEPTH)
    sums = tl.zeros((LINES, DEPTH // VECTOR), tl.float32)
    for block in tl.static_range(BLOCKS):
        if block + AHEAD < BLOCKS:
            column = (block + AHEAD) * DEPTH + k
            blocks = blocks + (fetch(matrix, line, column, length, EVEN),)
        value = floats(blocks[block]) * row[block].to(tl.float32)[None, :]
        sums += tl.sum(tl.reshape(value, (LINES, DEPTH // VECTOR, VECTOR)), 2)
    return tl.sum(sums, 1)[:, None]


@triton.jit
def of_lines(vector, line):
    """Load a vector's numbers of lines as float32, (lines, 1)."""
    return tl.load(vector + line)[:, None].to(tl.float32)


@triton.jit
def rows_numbers(x, row, k, length, width, EVEN: tl.constexpr):
    """Load columns k of rows of a width, (columns, rows); those from `length` on are 0."""
    address = x + row[None, :] * width + k[:, None]
    if EVEN:
        return tl.load(address)
    return tl.load(address, mask=(k < length)[:, None], other=0.0)


@triton.jit
def sums_of_squares(squares, row, tiles, TILES: tl.constexpr, ROWS: tl.constexpr):
    """Load sums (tiles, rows) of rows' squares."""
    tile = tl.arange(0, TILES)
    address = squares + tile[:, None] * ROWS + row[None, :]
    return tl.load(address, mask=(tile < tiles)[:, None], other=0.0)


@triton.jit
def past_inputs(inputs, step_stride, mask, TAPS: tl.constexpr):
    """Load the numbers that a convolution of TAPS taps reads of earlier steps, oldest first."""
    past = ()  # type: tuple
    for step in tl.static_range(TAPS - 1):
        past = past + (tl.load(inputs + step * step_stride, mask, other=0.0),)
    return past


@triton.jit
def taps_of_lines(taps, line, lines, TAPS: tl.constexpr):
    """Load a convolution's factors of lines, that of the current step first."""
    weights = ()  # type: tuple
    for tap in tl.static_range(TAPS):
        weights = weights + (of_lines(taps + tap * lines, line),)
    return weights


@triton.jit
def convolved(u, past, weights, bias, inputs, step_stride, mask, TAPS: tl.constexpr):
    """Convolve numbers with those of earlier steps, and write what the next step remembers."""
    value = u.to(tl.float32) * weights[0] + bias
    for step in tl.static_range(TAPS - 1):
        value += past[step].to(tl.float32) * weights[TAPS - 1 - step]
    tl.debug_barrier()  # several threads load a number, and one stores it
    for step in tl.static_range(1, TAPS - 1):
        tl.store(inputs + (step - 1) * step_stride, past[step], mask)
    tl.store(inputs + (TAPS - 2) * step_stride, u, mask)
    return value


@triton.jit
def write_scaled(
    value, line, row, valid, gain, times_gain, squares, tile, lines, ROWS: tl.constexpr
):  # fmt: skip
    """Write numbers (lines, rows) times the next norm's gain, and the sums of their squares.

    gain: (lines, 1).
    """
    dtype = times_gain.dtype.element_ty
    value = tl.where(valid[:, None], value.to(dtype).to(tl.float32), 0.0)
    address = times_gain + row[None, :] * lines + line[:, None]
    tl.store(address, (value * gain).to(dtype), valid[:, None])
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
    lines_gain = of_lines(gain, tl.minimum(line, width - 1))
    wait(PDL)
    word = tl.load(token + row, mask=row < rows, other=0)
    address = table + word[None, :] * width + line[:, None]
    valid = line < width
    value = tl.load(address, mask=valid[:, None] & (row < rows)[None, :], other=0.0)
    tl.store(x + row[None, :] * width + line[:, None], value, valid[:, None])
    write_scaled(value, line, row, valid, lines_gain, times_gain, squares, tile, width, ROWS)


@triton.jit
def product(
    x, squares, w1, w2, scale1, scale2, out1, out2, residual, factor, gain, new_squares,
    inputs, taps, bias, partial, counter,
    rows, length, lines, square_tiles, i_b, i_d, i_t, eps,
    EPILOGUE: tl.constexpr, LINES: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
    BLOCKS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, SQUARE_TILES: tl.constexpr,
    FACTOR: tl.constexpr, SCALES: tl.constexpr, TAPS: tl.constexpr, EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Multiply rows x (R, K) by lines of matrices (N, K), and write (R, N).

    EPILOGUE: "one" writes products; "pair" those with two matrices, silu(conv(w1 x)) and silu(w2
    x); "swiglu" silu(w1 x) * (w2 x); "add" w1 x + factor * residual into `out1`, and the same times
    `gain` into `out2`. SQUARE_TILES: those of `squares`, 0 without a norm. BLOCKS: of DEPTH columns
    in K; one row loads STAGES of them before it waits. SPLIT: programs that share the sums of a
    tile; the last one adds them, in order.
    """
    start(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    tile_counter = counter + tile
    IS_SWIGLU: tl.constexpr = EPILOGUE == "swiglu"
    MATRICES: tl.constexpr = 2 if IS_SWIGLU else 1
    SIZE: tl.constexpr = LINES * ROWS
    tile_partial = partial + tile * (SPLIT * MATRICES * SIZE)
    count = tl.cdiv(lines, LINES)
    is_second = False
    if EPILOGUE == "pair":
        is_second = tile >= count
        if is_second:
            tile -= count
            w1, out1, scale1 = w2, out2, scale2
    line = tile * LINES + tl.arange(0, LINES)
    valid = line < lines
    near = tl.minimum(line, lines - 1)
    row = tl.arange(0, ROWS)
    is_last = True
    # What no kernel writes is loaded before the wait, and all else before the first sum.
    if ROWS == 1:
        ahead1 = first_columns(w1, near, length, DEPTH, STAGES, EVEN)
        ahead2 = ahead1
        if IS_SWIGLU:
            ahead2 = first_columns(w2, near, length, DEPTH, STAGES, EVEN)
    else:
        k = tl.arange(0, DEPTH)
        share = tl.cdiv(length, SPLIT * DEPTH) * DEPTH
        begin_k = split * share
        end_k = tl.minimum(begin_k + share, length)
    if SCALES:
        lines_scale1 = of_lines(scale1, near)
        if IS_SWIGLU:
            lines_scale2 = of_lines(scale2, near)
    if EPILOGUE == "add":
        lines_gain = of_lines(gain, near)
        if FACTOR:
            lines_factor = of_lines(factor, near)
    if TAPS > 1:
        weights = taps_of_lines(taps, near, lines, TAPS)
        lines_bias = of_lines(bias, near)
    wait(PDL)
    if ROWS == 1:
        values = row_blocks(x, length, DEPTH, BLOCKS)
        if SQUARE_TILES > 0:
            sums = sums_of_squares(squares, row, square_tiles, SQUARE_TILES, ROWS)
        if EPILOGUE == "add":
            old = tl.load(residual + line[:, None], valid[:, None], other=0.0).to(tl.float32)
        if EPILOGUE == "pair":
            past = past_inputs(inputs + line[:, None] * i_d, i_t, valid[:, None], TAPS)
        a = line_sums(ahead1, values, w1, near, length, LINES, DEPTH, BLOCKS, STAGES, EVEN)
        b = a
        if IS_SWIGLU:
            b = line_sums(ahead2, values, w2, near, length, LINES, DEPTH, BLOCKS, STAGES, EVEN)
    else:
        dtype = x.dtype.element_ty
        a = tl.zeros((LINES, ROWS), tl.float32)
        b = tl.zeros((LINES, ROWS), tl.float32)
        for column in tl.range(begin_k, end_k, DEPTH, num_stages=STAGES):
            value = rows_numbers(x, row, column + k, length, length, EVEN)
            a = tl.dot(numbers(fetch(w1, near, column + k, length, EVEN), dtype), value, a)
            if IS_SWIGLU:
                b = tl.dot(numbers(fetch(w2, near, column + k, length, EVEN), dtype), value, b)
        if SPLIT > 1:
            offset = tl.arange(0, LINES)[:, None] * ROWS + row[None, :]
            tl.store(tile_partial + split * SIZE + offset, a)
            if IS_SWIGLU:
                tl.store(tile_partial + (SPLIT + split) * SIZE + offset, b)
            tl.debug_barrier()  # all threads have written
            is_last = tl.atomic_add(tile_counter, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
            if is_last:
                tl.store(tile_counter, 0)  # for the next kernel
                a = sum_of(tile_partial + offset, SIZE, SPLIT, LINES, ROWS)
                if IS_SWIGLU:
                    b = sum_of(tile_partial + SPLIT * SIZE + offset, SIZE, SPLIT, LINES, ROWS)
    if is_last:
        mask = valid[:, None] & (row < rows)[None, :]
        at = row[None, :] * lines + line[:, None]
        remembered = inputs + row[None, :] * i_b + line[:, None] * i_d
        if ROWS > 1:
            if SQUARE_TILES > 0:
                sums = sums_of_squares(squares, row, square_tiles, SQUARE_TILES, ROWS)
            if EPILOGUE == "add":
                old = tl.load(residual + at, valid[:, None], other=0.0).to(tl.float32)
            if EPILOGUE == "pair":
                past = past_inputs(remembered, i_t, mask, TAPS)
        if SCALES:
            a *= lines_scale1
            if IS_SWIGLU:
                b *= lines_scale2
        if SQUARE_TILES > 0:
            rms = tl.rsqrt(tl.sum(sums, 0) / length + eps)[None, :]
            a *= rms
            b *= rms
        out = out1 + at
        dtype = out1.dtype.element_ty
        if EPILOGUE == "one":
            tl.store(out, a.to(dtype), mask)
        elif IS_SWIGLU:
            tl.store(out, (silu(a) * b).to(dtype), valid[:, None])
        elif EPILOGUE == "pair":
            u = a.to(dtype)
            a = u.to(tl.float32)
            if TAPS > 1:  # noqa: SIM102 (only this is known to the compiler)
                if not is_second:
                    a = convolved(u, past, weights, lines_bias, remembered, i_t, mask, TAPS)
            tl.store(out, silu(a).to(dtype), valid[:, None])
        else:
            if FACTOR:
                old *= lines_factor
            a += old
            tl.debug_barrier()  # several threads load a number, and one stores it
            tl.store(out, a.to(dtype), valid[:, None])
            write_scaled(a, line, row, valid, lines_gain, out2, new_squares, tile, lines, ROWS)
