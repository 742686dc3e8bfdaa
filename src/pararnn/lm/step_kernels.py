"""Triton kernels of a decoding step: products of few rows, with all that stands around them.

A product reads its weights once, in 16 or 8 bits, and computes a tile of lines and rows. Few rows
are multiplied by lanes, more by tensor cores. A norm before a product is two things: the kernel
that writes a row multiplies it by the gain and sums its squares, and the one that reads it
multiplies its result by the factor. So no kernel reads a row to norm it. Sums of squares are in
float64, as their order depends on how the compiler lays rows out: those of 16-bit numbers are exact
unless some are 2^18 times as large as others. Kernels
start while the one before ends, fetch what no kernel writes, and wait then (programmatic dependent
launch). Weights of lanes are fetched into registers: their latency, not their bytes, took most of a
step.
"""

# ruff: noqa: RUF005 (Triton's tuples grow by sums alone)

from __future__ import annotations

import triton
import triton.language as tl

from pararnn.lm.rows_kernels import start, wait


@triton.jit
def silu(x):
    """Return x sigmoid(x)."""
    return x * tl.sigmoid(x)


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
def floats_of_bfloat16(a):
    """Return bfloat16 as float32, in an instruction a number: Triton's own way takes two."""
    return tl.inline_asm_elementwise(
        """
        shl.b32 $0, $2, 16;
        and.b32 $1, $2, 0xFFFF0000;
        """,
        "=f,=f,r",
        [a],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def floats(a):
    """Return numbers as float32."""
    if a.dtype == tl.int8:
        return floats_of_int8(a)
    if a.dtype == tl.bfloat16:
        return floats_of_bfloat16(a)
    return a.to(tl.float32)


@triton.jit
def numbers(a, dtype: tl.constexpr):
    """Return numbers of a matrix in the dtype of rows."""
    if a.dtype == tl.int8:
        return floats_of_int8(a).to(dtype)
    return a.to(dtype)


@triton.jit
def block_of_columns(
    matrices, lines, column, length, MATRICES: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Load lines of each matrix at columns, a tuple."""
    blocks = ()  # type: tuple
    for matrix in tl.static_range(MATRICES):
        blocks = blocks + (fetch(matrices[matrix], lines[matrix], column, length, EVEN),)
    return blocks


@triton.jit
def first_columns(
    matrices, lines, length, MATRICES: tl.constexpr, DEPTH: tl.constexpr, AHEAD: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Load the first AHEAD blocks of DEPTH columns of matrices' lines, a tuple."""
    k = tl.arange(0, DEPTH)
    blocks = ()  # type: tuple
    for block in tl.static_range(AHEAD):
        blocks = blocks + block_of_columns(
            matrices, lines, block * DEPTH + k, length, MATRICES, EVEN
        )
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
def block_of_rows(
    x, first, length, width, ROWS: tl.constexpr, SHARE: tl.constexpr, DEPTH: tl.constexpr,
    VECTOR: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Load a block of columns of rows of a width, a tuple of (1, SHARE, columns of a piece).

    SHARE: warps, which have whole lines: each loads the rows for itself, as to share them would
    take a barrier for each. A row's pieces are the halves of a thread's columns where it multiplies
    more than it loads at once.
    """
    PIECES: tl.constexpr = (VECTOR * x.dtype.element_ty.primitive_bitwidth + 127) // 128
    SIZE: tl.constexpr = VECTOR // PIECES
    k = tl.arange(0, DEPTH // PIECES)
    column = first + k // SIZE * VECTOR + k % SIZE
    values = ()  # type: tuple
    for row in tl.static_range(ROWS):
        for piece in tl.static_range(PIECES):
            place = (column + piece * SIZE)[None, None, :]
            address = x + row * width + place + tl.zeros((1, SHARE, 1), tl.int32)
            if EVEN:
                values = values + (tl.load(address),)
            else:
                values = values + (tl.load(address, mask=place < length, other=0.0),)
    return values


@triton.jit
def row_of_block(
    values, row, SHARE: tl.constexpr, LINES: tl.constexpr, DEPTH: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Return a row of what `block_of_rows` loads, as float32 (lines, columns)."""
    PIECES: tl.constexpr = DEPTH // values[0].shape[2]
    SIZE: tl.constexpr = VECTOR // PIECES
    value = floats(values[row * PIECES])
    if PIECES > 1:
        tl.static_assert(PIECES == 2, "a thread multiplies at most twice what it loads at once")
        shape: tl.constexpr = (1, SHARE, DEPTH // VECTOR, SIZE)
        second = tl.reshape(floats(values[row * PIECES + 1]), shape)
        value = tl.permute(tl.join(tl.reshape(value, shape), second), (0, 1, 2, 4, 3))
        value = tl.reshape(value, (1, SHARE, DEPTH))
    return tl.reshape(tl.broadcast_to(value, (LINES // SHARE, SHARE, DEPTH)), (LINES, DEPTH))


@triton.jit
def first_blocks_of_rows(
    x, length, width, LINES: tl.constexpr, DEPTH: tl.constexpr, VECTOR: tl.constexpr,
    BLOCKS: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Load one row by all blocks of DEPTH columns, or the first block of several rows."""
    if ROWS == 1:
        values = row_blocks(x, length, DEPTH, BLOCKS)
    else:
        SHARE: tl.constexpr = WARPS if WARPS < LINES else LINES
        values = block_of_rows(x, 0, length, width, ROWS, SHARE, DEPTH, VECTOR, EVEN)
    return values


@triton.jit
def columns_of(a, SIZE: tl.constexpr):
    """Return the SIZE columns of vectors (..., SIZE), a tuple."""
    columns = ()  # type: tuple
    if SIZE == 1:
        columns = columns + (tl.reshape(a, a.shape[:-1]),)
    else:
        HALF: tl.constexpr = SIZE // 2
        first, second = tl.split(tl.reshape(a, a.shape[:-1] + (HALF, 2)))
        evens, odds = columns_of(first, HALF), columns_of(second, HALF)
        for index in tl.static_range(HALF):
            columns = columns + (evens[index], odds[index])
    return columns


@triton.jit
def dot_of_vectors(
    weight, value, LINES: tl.constexpr, DEPTH: tl.constexpr, VECTOR: tl.constexpr
):  # fmt: skip
    """Multiply (lines, columns) by a row's columns, and add up vectors of columns.

    By eights, from the first to the last of them: which of two products a compiler rounds is not
    left to it.
    """
    SIZE: tl.constexpr = VECTOR if VECTOR < 8 else 8
    shape: tl.constexpr = (LINES, DEPTH // VECTOR, VECTOR // SIZE, SIZE)
    weights = columns_of(tl.reshape(weight, shape), SIZE)
    values = columns_of(tl.reshape(tl.broadcast_to(value, (LINES, DEPTH)), shape), SIZE)
    total = weights[0] * values[0]
    for index in tl.static_range(1, SIZE):
        total = tl.fma(weights[index], values[index], total)
    return tl.sum(total, 2)


@triton.jit
def with_block(
    sums, weights, values, MATRICES: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr,
    DEPTH: tl.constexpr, VECTOR: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Return the sums of several rows with a block of columns more."""
    result = ()  # type: tuple
    for matrix in tl.static_range(MATRICES):
        weight = floats(weights[matrix])
        for row in tl.static_range(ROWS):
            value = row_of_block(values, row, SHARE, LINES, DEPTH, VECTOR)
            more = dot_of_vectors(weight, value, LINES, DEPTH, VECTOR)
            result = result + (sums[matrix * ROWS + row] + more,)
    return result


@triton.jit
def part_of(values, first, COUNT: tl.constexpr):
    """Return COUNT entries of a tuple."""
    result = ()  # type: tuple
    for index in tl.static_range(COUNT):
        result = result + (values[first + index],)
    return result


@triton.jit
def line_sums(
    blocks, values, x, matrices, lines, length, width, MATRICES: tl.constexpr, LINES: tl.constexpr,
    DEPTH: tl.constexpr, VECTOR: tl.constexpr, BLOCKS: tl.constexpr, AHEAD: tl.constexpr,
    ROWS: tl.constexpr, WARPS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Return the products (lines, 1) of rows with matrices' lines.

    blocks: the first AHEAD of the matrices' columns. values: of `first_blocks_of_rows`. A tuple,
    all rows of a matrix after those of the one before. Numbers that a thread loads at once are
    added up first, whatever the number of rows: a row's bits do not depend on the others.
    """
    SHARE: tl.constexpr = WARPS if WARPS < LINES else LINES
    k = tl.arange(0, DEPTH)
    sums = ()  # type: tuple
    if ROWS == 1:
        for matrix in tl.static_range(MATRICES):
            total = tl.zeros((LINES, DEPTH // VECTOR), tl.float32)
            mine = ()  # type: tuple
            for block in tl.static_range(AHEAD):
                mine = mine + (blocks[block * MATRICES + matrix],)
            for block in tl.static_range(BLOCKS):
                if block + AHEAD < BLOCKS:
                    column = (block + AHEAD) * DEPTH + k
                    mine = mine + (fetch(matrices[matrix], lines[matrix], column, length, EVEN),)
                value = values[block].to(tl.float32)[None, :]
                total += dot_of_vectors(floats(mine[block]), value, LINES, DEPTH, VECTOR)
            sums = sums + (total,)
    else:
        for _ in tl.static_range(MATRICES * ROWS):
            sums = sums + (tl.zeros((LINES, DEPTH // VECTOR), tl.float32),)
        LOOPS: tl.constexpr = BLOCKS // AHEAD - 1
        # Unrolled, the products of several rows would take a minute to compile.
        for chunk in tl.range(0, LOOPS, num_stages=1):
            later_blocks = ()  # type: tuple
            for block in tl.static_range(AHEAD):
                first = (chunk * AHEAD + block) * DEPTH
                later_blocks = later_blocks + block_of_columns(
                    matrices, lines, first + AHEAD * DEPTH + k, length, MATRICES, EVEN
                )
                later_values = block_of_rows(
                    x, first + DEPTH, length, width, ROWS, SHARE, DEPTH, VECTOR, EVEN
                )
                weights = part_of(blocks, block * MATRICES, MATRICES)
                sums = with_block(
                    sums, weights, values, MATRICES, ROWS, LINES, DEPTH, VECTOR, SHARE
                )
                values = later_values
            blocks = later_blocks
        for block in tl.static_range(LOOPS * AHEAD, BLOCKS):
            if block + AHEAD < BLOCKS:
                column = (block + AHEAD) * DEPTH + k
                blocks = blocks + block_of_columns(matrices, lines, column, length, MATRICES, EVEN)
            if block + 1 < BLOCKS:
                later_values = block_of_rows(
                    x, (block + 1) * DEPTH, length, width, ROWS, SHARE, DEPTH, VECTOR, EVEN
                )
            weights = part_of(blocks, (block - LOOPS * AHEAD) * MATRICES, MATRICES)
            sums = with_block(sums, weights, values, MATRICES, ROWS, LINES, DEPTH, VECTOR, SHARE)
            if block + 1 < BLOCKS:
                values = later_values
    results = ()  # type: tuple
    for index in tl.static_range(MATRICES * ROWS):
        results = results + (tl.sum(sums[index], 1)[:, None],)
    return results


@triton.jit
def side_by_side(
    rows, FIRST: tl.constexpr, STRIDE: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Return WIDTH of COUNT rows (lines, 1), from the FIRST on, as a tile (lines, WIDTH); those
    that are missing are zeros."""
    if WIDTH == 1:
        tile = rows[FIRST] if FIRST < COUNT else tl.zeros_like(rows[0])
    else:
        HALF: tl.constexpr = WIDTH // 2
        evens = side_by_side(rows, FIRST, 2 * STRIDE, COUNT, HALF)
        odds = side_by_side(rows, FIRST + STRIDE, 2 * STRIDE, COUNT, HALF)
        tile = tl.reshape(tl.join(evens, odds), (rows[0].shape[0], WIDTH))
    return tile


@triton.jit
def in_groups(rows, COUNT: tl.constexpr, WIDTH: tl.constexpr):
    """Return COUNT rows (lines, 1) by groups, a tuple: each by itself, or all in one of WIDTH."""
    return rows if WIDTH == 1 else (side_by_side(rows, 0, 1, COUNT, WIDTH),)


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
def rows_of(group, WIDTH: tl.constexpr):
    """Return the numbers of a group's rows."""
    return group * WIDTH + tl.arange(0, WIDTH)


@triton.jit
def norm_factors(
    squares, tiles, length, eps, gain_scale, TILES: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Return a norm's factors (1, rows) of groups of rows, from sums (tiles, rows) of squares.

    gain_scale: the power of two by which gains were multiplied.
    """
    tile = tl.arange(0, TILES)
    loaded = ()  # type: tuple
    for group in tl.static_range(GROUPS):
        address = squares + tile[:, None] * (GROUPS * WIDTH) + rows_of(group, WIDTH)[None, :]
        loaded = loaded + (tl.load(address, mask=(tile < tiles)[:, None], other=0.0),)
    factors = ()  # type: tuple
    for group in tl.static_range(GROUPS):
        total = tl.sum(loaded[group].to(tl.float64), 0).to(tl.float32)
        mean = (total / length + eps) * (gain_scale * gain_scale)
        factors = factors + (tl.rsqrt(mean)[None, :],)
    return factors


@triton.jit
def tiles_of_rows(
    x, line, valid, lines, GROUPS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Load lines of groups of rows (lines, rows), a tuple."""
    tiles = ()  # type: tuple
    for group in tl.static_range(GROUPS):
        address = x + rows_of(group, WIDTH)[None, :] * lines + line[:, None]
        tiles = tiles + (tl.load(address, valid[:, None], other=0.0),)
    return tiles


@triton.jit
def past_inputs(
    inputs, step_stride, row_stride, valid, rows, TAPS: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Load the numbers that a convolution of TAPS taps reads of earlier steps, oldest first.

    inputs: of lines (lines, 1) of the first row. A tuple, for one group of rows after the other.
    """
    past = ()  # type: tuple
    for group in tl.static_range(GROUPS):
        row = rows_of(group, WIDTH)
        mask = valid[:, None] & (row < rows)[None, :]
        address = inputs + row[None, :] * row_stride
        for step in tl.static_range(TAPS - 1):
            past = past + (tl.load(address + step * step_stride, mask, other=0.0),)
    return past


@triton.jit
def taps_of_lines(taps, line, lines, TAPS: tl.constexpr):
    """Load a convolution's factors of lines, that of the current step first."""
    weights = ()  # type: tuple
    for tap in tl.static_range(TAPS):
        weights = weights + (of_lines(taps + tap * lines, line),)
    return weights


@triton.jit
def convolved(u, past, weights, bias, TAPS: tl.constexpr):
    """Convolve numbers with those of earlier steps."""
    value = u.to(tl.float32) * weights[0] + bias
    for step in tl.static_range(TAPS - 1):
        value += past[step].to(tl.float32) * weights[TAPS - 1 - step]
    return value


@triton.jit
def later(past, u, TAPS: tl.constexpr):
    """Return the past of the step after that of u."""
    result = ()  # type: tuple
    for step in tl.static_range(1, TAPS - 1):
        result = result + (past[step],)
    return result + (u,)


@triton.jit
def convolved_tokens(
    tile, past, windows, line, lines, valid, weights, bias, COUNT: tl.constexpr,
    TOKENS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Convolve rows (lines, rows), COUNT, of which TOKENS follow one another, and write windows.

    past, windows: of `past_inputs` for texts, and of `product`.
    """
    columns = columns_of(tile, tile.shape[1])
    results = ()  # type: tuple
    for row in tl.static_range(COUNT):
        u = columns[row][:, None]
        window = windows + (row // TOKENS * (TAPS - 1 + TOKENS) + row % TOKENS) * lines
        if row % TOKENS == 0:
            recent = part_of(past, row // TOKENS * (TAPS - 1), TAPS - 1)
            write_past(window + line[:, None], lines, recent, valid[:, None], TAPS)
        tl.store(window + (TAPS - 1) * lines + line[:, None], u, valid[:, None])
        results = results + (convolved(u, recent, weights, bias, TAPS),)
        recent = later(recent, u, TAPS)
    return side_by_side(results, 0, 1, COUNT, tile.shape[1])


@triton.jit
def write_past(inputs, step_stride, past, mask, TAPS: tl.constexpr):
    """Write a past."""
    for step in tl.static_range(TAPS - 1):
        tl.store(inputs + step * step_stride, past[step], mask)


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
    wide = value.to(tl.float64)
    tl.store(squares + tile * ROWS + row, tl.sum(wide * wide, 0).to(tl.float32))


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
    token, table, gain, x, times_gain, squares, rows, width, gain_scale,
    LINES: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the tokens' vectors of a table, as a norm before a product needs them."""
    start(PDL)
    tile = tl.program_id(0)
    line = tile * LINES + tl.arange(0, LINES)
    lines_gain = of_lines(gain, tl.minimum(line, width - 1)) * gain_scale
    valid = line < width
    wait(PDL)
    values = ()  # type: tuple
    for group in tl.static_range(GROUPS):
        row = rows_of(group, WIDTH)
        word = tl.load(token + row, mask=row < rows, other=0)
        mask = valid[:, None] & (row < rows)[None, :]
        values = values + (tl.load(table + word[None, :] * width + line[:, None], mask, other=0.0),)
    for group in tl.static_range(GROUPS):
        row = rows_of(group, WIDTH)
        tl.store(x + row[None, :] * width + line[:, None], values[group], valid[:, None])
        write_scaled(
            values[group], line, row, valid, lines_gain, times_gain, squares, tile, width,
            GROUPS * WIDTH,
        )  # fmt: skip


@triton.jit
def product(
    x, squares, w1, w2, w3, scale1, scale2, scale3, out1, out2, out3, residual, factor, gain,
    new_squares, inputs, windows, taps, bias, partial, counter,
    rows, length, lines, square_tiles, i_b, i_d, i_t, eps, gain_scale,
    EPILOGUE: tl.constexpr, LINES: tl.constexpr, LANES: tl.constexpr, GROUPS: tl.constexpr,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, DEPTH: tl.constexpr, VECTOR: tl.constexpr,
    BLOCKS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr,
    SQUARE_TILES: tl.constexpr, FACTOR: tl.constexpr, SCALES: tl.constexpr, TAPS: tl.constexpr,
    EVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply rows x (R, K) by lines of matrices (N, K), and write (R, N).

    EPILOGUE: "plain" writes products with one to three; "pair" silu(conv(w1 x)) and silu(w2
    x); "swiglu" silu(w1 x) * (w2 x); "add" w1 x + factor * residual into `out1`, and the same times
    `gain` into `out2`. LANES: rows that lanes multiply, 0 by tensor cores. GROUPS of rows of a
    WIDTH are in memory, and are written one after the other. TOKENS: rows that follow one another;
    the inputs (B, d, TAPS - 1) of a convolution before one token are replaced by those after it,
    and those before and of several go to `windows` (B, TAPS - 1 + TOKENS, d). SQUARE_TILES: those
    of `squares`, 0 without a norm. BLOCKS: of DEPTH columns in K; lanes load STAGES of them before
    they wait, a thread VECTOR columns at once. SPLIT: programs that share the sums of a tile; the
    last one adds them, in order.
    """
    start(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    tile_counter = counter + tile
    ROWS: tl.constexpr = GROUPS * WIDTH
    IS_SWIGLU: tl.constexpr = EPILOGUE == "swiglu"
    MATRICES: tl.constexpr = 2 if IS_SWIGLU else 1
    SIZE: tl.constexpr = LINES * ROWS
    tile_partial = partial + tile * (SPLIT * MATRICES * SIZE)
    count = tl.cdiv(lines, LINES)
    is_second = False
    if EPILOGUE == "pair" or EPILOGUE == "plain":
        is_second = tile >= count
        if is_second:
            tile -= count
            w1, out1, scale1 = w2, out2, scale2
        if tile >= count:
            tile -= count
            w1, out1, scale1 = w3, out3, scale3
    line = tile * LINES + tl.arange(0, LINES)
    valid = line < lines
    near = tl.minimum(line, lines - 1)
    row = tl.arange(0, WIDTH)
    is_last = True
    # What no kernel writes is loaded before the wait, and all else before the first sum.
    if LANES > 0:
        matrices = (w1, w2)
        both = (near, near)
        ahead = first_columns(matrices, both, length, MATRICES, DEPTH, STAGES, EVEN)
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
        lines_gain = of_lines(gain, near) * gain_scale
        if FACTOR:
            lines_factor = of_lines(factor, near)
    if TAPS > 1:
        weights = taps_of_lines(taps, near, lines, TAPS)
        lines_bias = of_lines(bias, near)
    lines_inputs = inputs + line[:, None] * i_d
    # Texts that are written by groups, or token by token.
    TEXTS: tl.constexpr = GROUPS if TOKENS == 1 else LANES // TOKENS
    TEXT_WIDTH: tl.constexpr = WIDTH if TOKENS == 1 else 1
    wait(PDL)
    if LANES > 0:
        values = first_blocks_of_rows(
            x, length, length, LINES, DEPTH, VECTOR, BLOCKS, LANES, WARPS, EVEN
        )
        if SQUARE_TILES > 0:
            rms = norm_factors(
                squares, square_tiles, length, eps, gain_scale, SQUARE_TILES, GROUPS, WIDTH
            )
        if EPILOGUE == "add":
            old = tiles_of_rows(residual, line, valid, lines, GROUPS, WIDTH)
        if EPILOGUE == "pair":
            past = past_inputs(lines_inputs, i_t, i_b, valid, rows, TAPS, TEXTS, TEXT_WIDTH)
        sums = line_sums(
            ahead, values, x, matrices, both, length, length, MATRICES,
            LINES, DEPTH, VECTOR, BLOCKS, STAGES, LANES, WARPS, EVEN,
        )  # fmt: skip
        firsts = in_groups(part_of(sums, 0, LANES), LANES, WIDTH)
        seconds = in_groups(part_of(sums, (MATRICES - 1) * LANES, LANES), LANES, WIDTH)
    else:
        dtype = x.dtype.element_ty
        sum_a = tl.zeros((LINES, ROWS), tl.float32)
        sum_b = tl.zeros((LINES, ROWS), tl.float32)
        for column in tl.range(begin_k, end_k, DEPTH, num_stages=STAGES):
            value = rows_numbers(x, row, column + k, length, length, EVEN)
            weight = numbers(fetch(w1, near, column + k, length, EVEN), dtype)
            sum_a = tl.dot(weight, value, sum_a)
            if IS_SWIGLU:
                weight = numbers(fetch(w2, near, column + k, length, EVEN), dtype)
                sum_b = tl.dot(weight, value, sum_b)
        if SPLIT > 1:
            offset = tl.arange(0, LINES)[:, None] * ROWS + row[None, :]
            tl.store(tile_partial + split * SIZE + offset, sum_a)
            if IS_SWIGLU:
                tl.store(tile_partial + (SPLIT + split) * SIZE + offset, sum_b)
            tl.debug_barrier()  # all threads have written
            is_last = tl.atomic_add(tile_counter, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
            if is_last:
                tl.store(tile_counter, 0)  # for the next kernel
                sum_a = sum_of(tile_partial + offset, SIZE, SPLIT, LINES, ROWS)
                if IS_SWIGLU:
                    sum_b = sum_of(tile_partial + SPLIT * SIZE + offset, SIZE, SPLIT, LINES, ROWS)
        firsts, seconds = (sum_a,), (sum_b,)
    if is_last:
        if LANES == 0:
            if SQUARE_TILES > 0:
                rms = norm_factors(
                    squares, square_tiles, length, eps, gain_scale, SQUARE_TILES, GROUPS, WIDTH
                )
            if EPILOGUE == "add":
                old = tiles_of_rows(residual, line, valid, lines, GROUPS, WIDTH)
            if EPILOGUE == "pair":
                past = past_inputs(lines_inputs, i_t, i_b, valid, rows, TAPS, TEXTS, TEXT_WIDTH)
        dtype = out1.dtype.element_ty
        if EPILOGUE == "pair" or EPILOGUE == "add":
            tl.debug_barrier()  # several threads load a number, and one stores it
        for group in tl.static_range(GROUPS):
            row = rows_of(group, WIDTH)
            mask = valid[:, None] & (row < rows)[None, :]
            at = row[None, :] * lines + line[:, None]
            out = out1 + at
            first, second = firsts[group], seconds[group]
            if SCALES:
                first *= lines_scale1
                if IS_SWIGLU:
                    second *= lines_scale2
            if SQUARE_TILES > 0:
                first *= rms[group]
                second *= rms[group]
            if EPILOGUE == "plain":
                tl.store(out, first.to(dtype), mask)
            elif IS_SWIGLU:
                tl.store(out, (silu(first) * second).to(dtype), valid[:, None])
            elif EPILOGUE == "pair":
                u = first.to(dtype)
                first = u.to(tl.float32)
                if TAPS > 1 and TOKENS > 1 and WIDTH > 1:
                    if not is_second:
                        first = convolved_tokens(
                            u, past, windows, line, lines, valid, weights, lines_bias, LANES,
                            TOKENS, TAPS,
                        )  # fmt: skip
                elif TAPS > 1:
                    if group % TOKENS == 0:
                        recent = ()  # type: tuple
                        for step in tl.static_range(TAPS - 1):
                            recent = recent + (past[group // TOKENS * (TAPS - 1) + step],)
                    after = later(recent, u, TAPS)
                    if not is_second:
                        first = convolved(u, recent, weights, lines_bias, TAPS)
                        if TOKENS == 1:
                            write_past(lines_inputs + row[None, :] * i_b, i_t, after, mask, TAPS)
                        else:
                            place = group // TOKENS * (TAPS - 1 + TOKENS) + group % TOKENS
                            window = windows + place * lines + line[:, None]
                            if group % TOKENS == 0:
                                write_past(window, lines, recent, mask, TAPS)
                            tl.store(window + (TAPS - 1) * lines, u, mask)
                    recent = after
                tl.store(out, silu(first).to(dtype), valid[:, None])
            else:
                before = old[group].to(tl.float32)
                if FACTOR:
                    before *= lines_factor
                first += before
                tl.store(out, first.to(dtype), valid[:, None])
                write_scaled(
                    first, line, row, valid, lines_gain, out2, new_squares, tile, lines, ROWS
                )


@triton.jit
def norm_of(x, width, eps, BLOCK: tl.constexpr, NORM: tl.constexpr):
    """Return the mean that a norm subtracts from a row, 0 unless "layer", and its factor."""
    at = tl.arange(0, BLOCK)
    inside = at < width
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float64)
    mean = 0.0
    if NORM == "layer":
        wide_mean = tl.sum(value) / width
        value = tl.where(inside, value - wide_mean, 0.0)
        mean = wide_mean.to(tl.float32)
    factor = tl.rsqrt((tl.sum(value * value) / width).to(tl.float32) + eps)
    return mean, factor


@triton.jit
def row_norm(
    x, gain, out, width, eps, BLOCK: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Norm a row of x (R, d), times gains (d), into `out`. NORM: "rms" or "layer"."""
    start(PDL)
    row, at = tl.program_id(0).to(tl.int64) * width, tl.arange(0, BLOCK)
    inside = at < width
    gains = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    mean, factor = norm_of(x + row, width, eps, BLOCK, NORM)
    value = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    value = (value - mean) * factor * gains
    tl.store(out + row + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def turned(
    x, gain, at, partner, inside, cos, sin, width, eps, BLOCK: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Return numbers of a row, normed and rotated with their partners."""
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + partner, mask=inside, other=0.0).to(tl.float32)
    if NORM != "none":
        mean, factor = norm_of(x, width, eps, BLOCK, NORM)
        gains = tl.load(gain + at, mask=inside, other=0.0).to(tl.float32)
        other_gains = tl.load(gain + partner, mask=inside, other=0.0).to(tl.float32)
        value = (value - mean) * factor * gains
        other = (other - mean) * factor * other_gains
    return value * cos + other * sin


@triton.jit
def attention_inputs(
    q, k, v, q_gain, k_gain, cos, sin, query, key_pages, value_pages, table, last,
    width, size, eps, table_row, last_row, angle_row,
    key_page, key_head, key_time, value_page, value_head, value_time,
    PAGE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Norm and rotate a row's query and key of a head, and write key and value into their page.

    q, k, v: (R, d), and `query` as them. cos, sin: (R or 1, size), whose row has a stride
    `angle_row`. NORM: of whole rows, times gains: "rms", "layer" or "none".
    """
    start(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    of_head, half = tl.arange(0, SIZE), size // 2
    inside, is_first = of_head < size, of_head < half
    first = row * width
    at = head * size + of_head
    partner = tl.where(is_first, at + half, at - half)
    wait(PDL)
    place = tl.load(last + row * last_row)
    page = tl.load(table + row * table_row + place // PAGE).to(tl.int64)
    angle = row * angle_row + of_head
    cosine = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    sine = tl.where(is_first, -sine, sine)
    result = turned(q + first, q_gain, at, partner, inside, cosine, sine, width, eps, BLOCK, NORM)
    tl.store(query + first + at, result.to(query.dtype.element_ty), mask=inside)
    result = turned(k + first, k_gain, at, partner, inside, cosine, sine, width, eps, BLOCK, NORM)
    to = key_pages + page * key_page + head * key_head + place % PAGE * key_time + of_head
    tl.store(to, result.to(key_pages.dtype.element_ty), mask=inside)
    value = tl.load(v + first + at, mask=inside, other=0.0)
    to = value_pages + page * value_page + head * value_head + place % PAGE * value_time + of_head
    tl.store(to, value.to(value_pages.dtype.element_ty), mask=inside)
