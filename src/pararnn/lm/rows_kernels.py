"""Triton kernels of `pararnn.lm.rows_op`; imported where they first run.

Products have tokens as rows of tensor cores' tiles and lines of the weight as columns. A result is
the sum over inputs in order, by the same instructions along inputs, whatever the tile: `TILES`
differ in the results of a program, and none divides a sum. Other kernels run a row by a program.
"""

# ruff: noqa: RUF005 (Triton's tuples grow by sums alone)

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pararnn.base.device import Gpu, type_of
from pararnn.base.errors import EngineError
from pararnn.codegen.mixing_cuda import shared_bytes_of
from pararnn.lm import conv_kernels
from pararnn.lm.conv_kernels import on_device
from pararnn.lm.conv_op import MOST_TAPS


class Tile(NamedTuple):
    """Results of a program (rows, lines), its warps, and the stages of its ring of operands."""

    rows: int
    lines: int
    warps: int
    stages: int


INPUTS = 64
"""Inputs of a step of all tiles, four of the tensor cores' in 16 bits."""
GROUP = 8
"""Tiles of rows that run together, so that they read lines of the weight from the cache."""
TILES: tuple[tuple[int, Tile], ...] = (
    (64, Tile(64, 16, 4, 6)),
    (256, Tile(64, 64, 4, 5)),
    (1024, Tile(128, 128, 8, 4)),
)
"""Tiles for up to so many rows: few rows need many programs, which then read few lines each."""
LARGE = Tile(128, 256, 8, 4)
WIDE_FLOATS = Tile(64, 32, 4, 2)
"""Tile of float32, whose products are no tensor cores'."""
BLOCKS = {2: (64, 64), 4: (16, 16)}
"""Queries and keys of a block of attention, by a number's bytes, whatever their numbers."""
WIDE_BLOCK = (16, 16)
"""Those of heads whose blocks would be larger than registers and shared memory."""
WIDE_HEAD = 256
"""Numbers of the largest head with other blocks."""
BLOCK_STAGES = 3
"""Most stages of the ring of keys and values."""
FEW = (16, 32)
"""Queries and keys of a block of few queries in 16 bits, by one warp: warps that share a block wait
for one another at every block, which takes longer than to read it."""
FEW_STAGES = 4
"""Most stages of its ring."""
FEW_SPANS = 64
"""Most spans of a row's keys where queries are few: as many programs attend to a long text."""
FEW_BLOCKS = 2
"""Least blocks of keys of such a span."""
SPAN = 512
"""Keys of a span of others, which is attended to by itself, whatever the number of keys."""
AHEAD = 8
"""Spans whose numbers are loaded before they are merged."""
PROGRAMS = 4096
"""Programs among which spans of few rows are divided: some for each of a GPU's multiprocessors."""
MOST_NUMBERS = 2**25
"""Numbers of spans, before they are merged, that may be in memory at once: 128 MiB."""
ALIGNMENT = 16
"""Bytes by which Triton tells aligned tensors from others."""
NUMBERS = 1024
"""Numbers of a program of elementwise functions."""
LOGITS = 4096
"""Logits that a program reads at once."""


def tile_of(rows: int, dtype: torch.dtype) -> Tile:
    """Return the tile of a product of so many rows."""
    if dtype == torch.float32:
        return WIDE_FLOATS
    return next((tile for most, tile in TILES if rows <= most), LARGE)


def _stages(x: Tensor, most: int, stage: int, others: int = 0) -> int:
    """Return the stages, of so many numbers each, that fit into a GPU's shared memory, or the most.

    others: numbers beside them.
    """
    record, size = type_of(x.device), x.dtype.itemsize
    if not isinstance(record, Gpu):  # Triton's interpreter
        return most
    free = shared_bytes_of(record.capability(x.device)) - others * size
    return min(most, free // (stage * size))


def attention_options(x: Tensor, few: bool = False) -> dict[str, int]:
    """Return the blocks and stages of attention to keys (..., D).

    few: whether blocks may be of few queries, with other bits. Raises EngineError for heads that do
    not fit into a GPU's shared memory.
    """
    width = max(16, triton.next_power_of_2(x.shape[-1]))
    few = few and x.dtype.itemsize == 2 and width <= WIDE_HEAD
    queries, keys = BLOCKS[x.dtype.itemsize] if width <= WIDE_HEAD else WIDE_BLOCK
    if few:
        queries, keys = FEW
    most = FEW_STAGES if few else BLOCK_STAGES
    stages = _stages(x, most, 2 * keys * width, queries * width)
    if stages < 1:
        raise EngineError(
            f"batch_invariant=True and keys in pages have no kernel for heads of {x.shape[-1]} "
            f"numbers in {x.dtype} on this GPU: {(queries + 2 * keys) * width * x.dtype.itemsize} "
            "bytes exceed its shared memory; take more heads, or 16 bits"
        )
    blocks = {"SIZE": width, "QUERIES": queries, "KEYS": keys}
    return blocks | {"num_stages": stages, "num_warps": 1 if few else 4}


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
def product_of_rows(
    x, weight, scale, y, rows, outputs, inputs, x_row, x_head,
    ROWS: tl.constexpr, LINES: tl.constexpr, INPUTS: tl.constexpr, GROUP: tl.constexpr,
    SCALES: tl.constexpr, FULL: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute a tile of y (H, rows, outputs) = x (rows, H, inputs) weight (H, outputs, inputs)^T.

    SCALES: weights have 8 bits, and their lines factors (H, outputs). FULL: no
    tile has rows or lines beyond the last. EVEN: inputs are whole steps.
    """
    head = tl.program_id(1).to(tl.int64)
    row_tiles, line_tiles = tl.cdiv(rows, ROWS), tl.cdiv(outputs, LINES)
    first = tl.program_id(0) // (GROUP * line_tiles) * GROUP
    in_group, size = tl.program_id(0) % (GROUP * line_tiles), min(row_tiles - first, GROUP)
    row = ((first + in_group % size) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    line = (in_group // size * LINES + tl.arange(0, LINES)).to(tl.int64)
    k = tl.arange(0, INPUTS)
    is_row, is_line = (row < rows)[:, None], (line < outputs)[None, :]
    a_at = x + head * x_head + row[:, None] * x_row + k[None, :]
    b_at = weight + (head * outputs + line[None, :]) * inputs + k[:, None]
    sums = tl.zeros((ROWS, LINES), tl.float32)
    for begin in range(0, inputs, INPUTS):
        if FULL and EVEN:
            a, b = tl.load(a_at), tl.load(b_at)
        elif EVEN:
            a, b = tl.load(a_at, mask=is_row, other=0.0), tl.load(b_at, mask=is_line, other=0.0)
        else:
            inside = begin + k < inputs
            a = tl.load(a_at, mask=is_row & inside[None, :], other=0.0)
            b = tl.load(b_at, mask=is_line & inside[:, None], other=0.0)
        sums = tl.dot(a, b.to(a.dtype), sums, input_precision="ieee")
        a_at += INPUTS
        b_at += INPUTS
    if SCALES:
        sums *= tl.load(scale + head * outputs + line, mask=line < outputs, other=0.0)[None, :]
    to = y + (head * rows + row[:, None]) * outputs + line[None, :]
    if FULL:
        tl.store(to, sums.to(y.dtype.element_ty))
    else:
        tl.store(to, sums.to(y.dtype.element_ty), mask=is_row & is_line)


@triton.jit
def norm_of_row(
    x, gate, weight, y, size, eps, GATE: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute weight * n(x silu(gate)) of a row."""
    at, first = tl.arange(0, BLOCK), tl.program_id(0).to(tl.int64) * size
    inside = at < size
    value = tl.load(x + first + at, mask=inside, other=0.0).to(tl.float32)
    if GATE:
        logit = tl.load(gate + first + at, mask=inside, other=0.0).to(tl.float32)
        value = value * (logit * tl.sigmoid(logit))
    if CENTRED:
        value = tl.where(inside, value - tl.sum(value) / size, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(value * value) / size + eps)
    gain = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + first + at, (value * scale * gain).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gated_numbers(a, b, y, count, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """Compute silu(a) * b, or silu(a)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(a + at, mask=at < count, other=0.0).to(tl.float32)
    value = logit * tl.sigmoid(logit)
    if GATED:
        value = value * tl.load(b + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=at < count)


@triton.jit
def log_prob_of_row(logits, target, y, size, BLOCK: tl.constexpr):
    """Compute log softmax(logits)[target] of a row, 0 where the target is negative."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    source, chosen = logits + row * size, tl.load(target + row)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, size, BLOCK):
        value = tl.load(source + first + at, mask=first + at < size, other=float("-inf"))
        largest = tl.maximum(largest, value.to(tl.float32), propagate_nan=tl.PropagateNan.ALL)
    most = tl.max(largest)
    sums = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, size, BLOCK):
        value = tl.load(source + first + at, mask=first + at < size, other=float("-inf"))
        sums += tl.exp(value.to(tl.float32) - most)
    own = tl.load(source + tl.maximum(chosen, 0)).to(tl.float32)
    tl.store(y + row, tl.where(chosen >= 0, own - most - tl.log(tl.sum(sums)), 0.0))


@triton.jit
def _merge(most, total, sums, next_most, next_total, next_sums):
    """Return the largest score, the sum of chances and that of values of two spans of keys."""
    larger = tl.maximum(most, next_most)
    finite = tl.where(larger == float("-inf"), 0.0, larger)
    factor, next_factor = tl.exp(most - finite), tl.exp(next_most - finite)
    # By `fma`, as compilers choose otherwise which product is rounded.
    total = tl.fma(total, factor, next_total * next_factor)
    factor, next_factor = factor[:, None], next_factor[:, None]
    return larger, total, tl.fma(sums, factor, next_sums * next_factor)


@triton.jit
def _attend_to_span(
    queries, in_document, ends, k, v, table, base, stop, size, scale,
    k_row, k_time, v_row, v_time, length,
    SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Return what `_merge` takes of a span of keys: `length` from base on, or up to stop."""
    of_key, at = tl.arange(0, KEYS), tl.arange(0, SIZE)
    is_number = at < size
    most = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, SIZE), tl.float32)
    for first in range(base, min(base + length, stop + 1), KEYS):
        key = first + of_key
        exists = key <= stop
        if PAGE:
            page = tl.load(table + key // PAGE, mask=exists, other=0).to(tl.int64)
            k_line = page * k_row + (key % PAGE) * k_time
            v_line = page * v_row + (key % PAGE) * v_time
        else:
            k_line, v_line = key.to(tl.int64) * k_time, key.to(tl.int64) * v_time
        k_at = k + k_line[None, :] + at[:, None]
        keys = tl.load(k_at, mask=exists[None, :] & is_number[:, None], other=0.0)
        scores = tl.dot(queries, keys, input_precision="ieee") * scale
        sees = in_document[:, None] & (key[None, :] <= ends[:, None])
        scores = tl.where(sees, scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        finite = tl.where(larger == float("-inf"), 0.0, larger)
        chances, factor = tl.exp(scores - finite[:, None]), tl.exp(most - finite)
        v_at = v + v_line[:, None] + at[None, :]
        values = tl.load(v_at, mask=exists[:, None] & is_number[None, :], other=0.0)
        total = total * factor + tl.sum(chances, 1)
        sums = sums * factor[:, None]
        sums = tl.dot(chances.to(values.dtype), values, sums, input_precision="ieee")
        most = larger
    return most, total, sums


@triton.jit
def attention_of_rows(
    q, k, v, y, first, last, table, heads, steps, size, scale, none, last_row, last_time,
    q_row, q_head, q_time, k_row, k_head, k_time, v_row, v_head, v_time, table_row,
    SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of queries to the keys of each document in it, one after the other.

    Spans of keys are counted from a document's first. What a query does not see changes none of its
    bits. none: a number larger than any key's. PAGE: tokens of a page, which the row's line of the
    table finds, of one document; 0 for keys in one piece.
    """
    row, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    query, at = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES), tl.arange(0, SIZE)
    inside, is_number = query < steps, at < size
    start(PDL)
    wait(PDL)
    last_at = last + row * last_row + query * last_time
    ends = tl.load(last_at, mask=inside, other=-1).to(tl.int32)
    if PAGE:
        begins = tl.where(inside, 0, none)
        k_at, v_at = k + head * k_head, v + head * v_head
    else:
        begins = tl.load(first + row * last_row + query * last_time, mask=inside, other=none)
        k_at, v_at = k + row * k_row + head * k_head, v + row * v_row + head * v_head
    q_at = q + row * q_row + head * q_head + query[:, None] * q_time + at[None, :]
    queries = tl.load(q_at, mask=inside[:, None] & is_number[None, :], other=0.0)
    most = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, SIZE), tl.float32)
    begin = tl.min(begins)
    while begin < none:
        in_document = begins == begin
        stop = tl.max(tl.where(in_document, ends, -1))
        for base in range(begin, stop + 1, SPAN):
            span_most, span_total, span_sums = _attend_to_span(
                queries, in_document, ends, k_at, v_at, table + row * table_row, base, stop, size,
                scale, k_row, k_time, v_row, v_time, SPAN, SIZE, QUERIES, KEYS, PAGE,
            )  # fmt: skip
            most, total, sums = _merge(most, total, sums, span_most, span_total, span_sums)
        begin = tl.min(tl.where(begins > begin, begins, none))
    y_at = y + ((row * steps + query[:, None]) * heads + head) * size + at[None, :]
    result = (sums / total[:, None]).to(y.dtype.element_ty)
    tl.store(y_at, result, mask=inside[:, None] & is_number[None, :])


@triton.jit
def _span_of(keys, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Return the keys of a span: at least so many, and of at most MOST spans."""
    return tl.cdiv(tl.cdiv(keys, LEAST), MOST) * LEAST


@triton.jit
def attention_of_spans(
    q, k, v, numbers, last, table, heads, steps, size, scale, spans, last_row, last_time,
    q_row, q_head, q_time, k_row, k_head, k_time, v_row, v_head, v_time, table_row,
    SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    SPAN: tl.constexpr, SPANS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend from a row's queries to some spans of its pages; write what `_merge` takes of each.

    numbers: float32 (B H, spans, steps, size + 2), sums before the largest score and the total.
    SPAN: keys of a span. SPANS: if it is not 0, most spans of a row, and SPAN their least keys.
    """
    row, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    query, at = tl.arange(0, QUERIES), tl.arange(0, SIZE)
    inside, is_number = query < steps, at < size
    start(PDL)
    wait(PDL)
    last_at = last + row * last_row + query * last_time
    ends = tl.load(last_at, mask=inside, other=-1).to(tl.int32)
    stop = tl.max(ends)
    q_at = q + row * q_row + head * q_head + query[:, None] * q_time + at[None, :]
    queries = tl.load(q_at, mask=inside[:, None] & is_number[None, :], other=0.0)
    length = _span_of(stop + 1, SPAN, SPANS) if SPANS else SPAN
    for span in range(tl.program_id(0), tl.cdiv(stop + 1, length), tl.num_programs(0)):
        most, total, sums = _attend_to_span(
            queries, inside, ends, k + head * k_head, v + head * v_head, table + row * table_row,
            span * length, stop, size, scale, k_row, k_time, v_row, v_time, length,
            SIZE, QUERIES, KEYS, PAGE,
        )  # fmt: skip
        place = (tl.program_id(1).to(tl.int64) * spans + span) * steps + query
        to = numbers + place * (size + 2)
        tl.store(to[:, None] + at[None, :], sums, mask=inside[:, None] & is_number[None, :])
        tl.store(to + size, most, mask=inside)
        tl.store(to + size + 1, total, mask=inside)


@triton.jit
def merge_of_spans(
    numbers, y, last, heads, steps, size, spans, last_row, last_time,
    SIZE: tl.constexpr, SPAN: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the spans that a query sees, in order, as `attention_of_rows` does.

    AHEAD: spans that are loaded before the first of them is merged; those without keys change
    nothing.
    """
    start(PDL)
    wait(PDL)
    row, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    query, at = tl.program_id(0), tl.arange(0, SIZE)
    of_query = tl.zeros((1,), tl.int64)
    mask = (at < size)[None, :]
    end = tl.load(last + row * last_row + query * last_time).to(tl.int32)
    first = tl.program_id(1).to(tl.int64) * spans
    most = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    sums = tl.zeros((1, SIZE), tl.float32)
    count = tl.cdiv(end + 1, SPAN)
    for begin in range(0, count, AHEAD):
        loaded = ()  # type: tuple
        for ahead in tl.static_range(AHEAD):
            span = begin + ahead + of_query
            exists = span < count
            at_span = numbers + ((first + span) * steps + query) * (size + 2)
            loaded = loaded + (
                tl.load(at_span + size, mask=exists, other=float("-inf")),
                tl.load(at_span + size + 1, mask=exists, other=0.0),
                tl.load(at_span[:, None] + at[None, :], mask=mask & exists[:, None], other=0.0),
            )
        for ahead in tl.static_range(AHEAD):
            most, total, sums = _merge(
                most, total, sums, loaded[3 * ahead], loaded[3 * ahead + 1], loaded[3 * ahead + 2]
            )
    y_at = y + ((row * steps + query) * heads + head) * size + at[None, :]
    tl.store(y_at, (sums / total[:, None]).to(y.dtype.element_ty), mask=mask)


@triton.jit
def merge_at_once(
    numbers, y, last, heads, steps, size, spans, last_row, last_time,
    SIZE: tl.constexpr, QUERIES: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Merge the spans of a row's keys, at most SPANS, all at once; see `attention_of_spans`."""
    start(PDL)
    row, head = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    query, at, span = tl.program_id(0), tl.arange(0, SIZE), tl.arange(0, SPANS)
    of_row, inside = tl.arange(0, QUERIES), at < size
    wait(PDL)
    last_at = last + row * last_row + of_row * last_time
    stop = tl.max(tl.load(last_at, mask=of_row < steps, other=-1).to(tl.int32))
    exists = span < tl.cdiv(stop + 1, _span_of(stop + 1, SPAN, SPANS))
    place = (tl.program_id(1).to(tl.int64) * spans + span) * steps + query
    of_span = numbers + place * (size + 2)
    mask = exists[:, None] & inside[None, :]
    largest = tl.load(of_span + size, mask=exists, other=float("-inf"))
    totals = tl.load(of_span + size + 1, mask=exists, other=0.0)
    sums = tl.load(of_span[:, None] + at[None, :], mask=mask, other=0.0)
    factor = tl.exp(largest - tl.max(largest))
    result = tl.sum(sums * factor[:, None], 0) / tl.sum(totals * factor)
    y_at = y + ((row * steps + query) * heads + head) * size + at
    tl.store(y_at, result.to(y.dtype.element_ty), mask=inside)


@triton.jit
def put_token(
    k, v, key_pages, value_pages, table, last, steps, size, last_row, last_time, table_row,
    k_row, k_head, k_time, v_row, v_head, v_time,
    key_page, key_head, key_time, value_page, value_head, value_time,
    PAGE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Copy a token's key and value of a head to its place in the pages."""
    row, step = (tl.program_id(0) // steps).to(tl.int64), tl.program_id(0) % steps
    head, at = tl.program_id(1).to(tl.int64), tl.arange(0, SIZE)
    place = tl.load(last + row * last_row + step * last_time)
    page = tl.load(table + row * table_row + place // PAGE).to(tl.int64)
    key = tl.load(k + row * k_row + head * k_head + step * k_time + at, mask=at < size)
    value = tl.load(v + row * v_row + head * v_head + step * v_time + at, mask=at < size)
    to_key = key_pages + page * key_page + head * key_head + place % PAGE * key_time + at
    to_value = value_pages + page * value_page + head * value_head + place % PAGE * value_time + at
    tl.store(to_key, key.to(key_pages.dtype.element_ty), mask=at < size)
    tl.store(to_value, value.to(value_pages.dtype.element_ty), mask=at < size)


def put(
    k: Tensor, v: Tensor, key_pages: Tensor, value_pages: Tensor, table: Tensor, last: Tensor
) -> None:
    """Do what `put_in_pages` does."""
    batch, heads, steps, size = k.shape
    tensors = [x if x.stride(3) == 1 else x.contiguous() for x in (k, v)]
    tensors += [key_pages, value_pages]
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    sizes = steps, size, *last.stride(), table.stride(0)
    options = {"PAGE": key_pages.shape[2], "SIZE": triton.next_power_of_2(size), "num_warps": 1}
    _launch(
        k, put_token, (batch * steps, heads), (*tensors, table, last, *sizes, *strides), options
    )


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor | None,
    last: Tensor,
    table: Tensor | None = None,
    by_rows: bool = True,
    out: Tensor | None = None,
    launch: Mapping[str, bool] | None = None,
) -> Tensor:
    """Compute `rows_attention`, or with a table of pages `paged_attention`.

    out: where the result goes, (B, T, H, D) in one piece. launch: PDL, whether kernels may start
    before those before have ended, and Triton's option.
    """
    batch, heads, steps, size = q.shape
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    y = q.new_empty((batch, steps, heads, size)) if out is None else out
    strides = [stride for x in (q, k, v) for stride in x.stride()[:3]]
    page = 0 if table is None else k.shape[2]
    few = table is not None and not by_rows and steps <= FEW[0]
    launch = launch or {"PDL": False}
    options = {**attention_options(q, few), "PAGE": page, **launch}
    queries, lines = options["QUERIES"], batch * heads
    sizes = heads, steps, size, 1 / math.sqrt(size)
    line = 0
    if table is None:
        assert first is not None
        first, last = (x.to(torch.int32).contiguous() for x in (first, last))
    else:
        line, keys = table.stride(0), table.shape[1] * page
        least = FEW_BLOCKS * options["KEYS"] if few else SPAN
        spans = triton.cdiv(keys, least)
        if few:
            spans = min(spans, FEW_SPANS)
        programs = min(spans, PROGRAMS // max(1, lines))
        is_small = lines * spans * steps * (size + 2) <= MOST_NUMBERS
        if programs > 1 and is_small and steps <= queries:
            numbers = q.new_empty(lines, spans, steps, size + 2, dtype=torch.float32)
            arguments = q, k, v, numbers, last, table, *sizes, spans, *last.stride(), *strides, line
            most = {"SPAN": least, "SPANS": FEW_SPANS if few else 0}
            _launch(numbers, attention_of_spans, (programs, lines), arguments, options | most)
            arguments = numbers, y, last, *sizes[:3], spans, *last.stride()
            options = {"SIZE": options["SIZE"], "SPAN": least, "num_warps": 1, **launch}
            if few:
                options |= {"QUERIES": queries, "SPANS": FEW_SPANS, "num_warps": 4}
                return _launch(y, merge_at_once, (steps, lines), arguments, options)
            options |= {"AHEAD": AHEAD}
            return _launch(y, merge_of_spans, (steps, lines), arguments, options)
    options |= {"SPAN": SPAN}
    others = last if first is None else first, last, last if table is None else table
    arguments = q, k, v, y, *others, *sizes, 2**30, *last.stride(), *strides, line
    return _launch(y, attention_of_rows, (triton.cdiv(steps, queries), lines), arguments, options)


def product(
    x: Tensor, weight: Tensor, scale: Tensor | None = None, tile: Tile | None = None
) -> Tensor:
    """Compute `rows_product`, by a tile or that of `tile_of`."""
    if scale is None and x.dtype != weight.dtype:
        raise EngineError(
            f"batch_invariant=True multiplies inputs and weights of one dtype, got {x.dtype} and "
            f"{weight.dtype}: convert one of them, or use autocast"
        )
    rows, heads, inputs = x.shape
    x, weight, outputs = (
        x if x.stride(2) == 1 else x.contiguous(),
        weight.contiguous(),
        weight.shape[1],
    )
    y = x.new_empty((heads, rows, outputs))
    tile = tile or tile_of(rows, x.dtype)
    row_tiles, line_tiles = triton.cdiv(rows, tile.rows), triton.cdiv(outputs, tile.lines)
    full = rows % tile.rows == 0 and outputs % tile.lines == 0
    options = {"ROWS": tile.rows, "LINES": tile.lines, "INPUTS": INPUTS, "GROUP": GROUP}
    options |= {"SCALES": scale is not None, "FULL": full, "EVEN": inputs % INPUTS == 0}
    stages = _stages(x, tile.stages, (tile.rows + tile.lines) * INPUTS)
    options |= {"num_warps": tile.warps, "num_stages": max(1, stages)}
    sizes = rows, outputs, inputs, x.stride(0), x.stride(1)
    grid = row_tiles * line_tiles, heads
    scale = x if scale is None else scale.contiguous()
    return _launch(y, product_of_rows, grid, (x, weight, scale, y, *sizes), options)


def _aligned(x: Tensor) -> Tensor:
    """Return x contiguous, and aligned: on the alignment depends which numbers a thread adds up."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, centred: bool) -> Tensor:
    """Compute `rows_norm`."""
    x, size, has_gate = _aligned(x), x.shape[-1], gate is not None
    gate = x if gate is None else _aligned(gate)
    y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype))
    block = triton.next_power_of_2(size)
    options = {"GATE": has_gate, "CENTRED": centred, "BLOCK": block}
    options["num_warps"] = min(8, max(1, block // 256))
    grid = (x.numel() // max(1, size),)
    return _launch(y, norm_of_row, grid, (x, gate, _aligned(weight), y, size, eps), options)


def gated(a: Tensor, b: Tensor | None) -> Tensor:
    """Compute `rows_gated`."""
    a, is_gated = a.contiguous(), b is not None
    b, y = a if b is None else b.contiguous(), torch.empty_like(a)
    grid = (triton.cdiv(y.numel(), NUMBERS),)
    options = {"GATED": is_gated, "BLOCK": NUMBERS}
    return _launch(y, gated_numbers, grid, (a, b, y, y.numel()), options)


def conv(
    u: Tensor, weight: Tensor, bias: Tensor, halo: Tensor | None, since: Tensor | None
) -> Tensor:
    """Compute `rows_conv`, by the kernel of `pararnn.lm.conv_op`."""
    if len(weight) > MOST_TAPS:
        raise EngineError(
            f"batch_invariant=True takes convolutions of up to {MOST_TAPS} taps on a GPU, got "
            f"{len(weight)}: set conv_kernel_size to at most {MOST_TAPS}"
        )
    return conv_kernels.forward(u, weight, bias, halo, since)


def log_prob(logits: Tensor, target: Tensor) -> Tensor:
    """Compute `rows_log_prob`."""
    logits = _aligned(logits)
    y = logits.new_empty(len(logits), dtype=torch.float32)
    arguments = logits, target.long().contiguous(), y, logits.shape[1]
    return _launch(y, log_prob_of_row, (len(logits),), arguments, {"BLOCK": LOGITS, "num_warps": 8})


def _launch(
    y: Tensor,
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
) -> Tensor:
    """Launch a kernel that writes y, on its GPU; return y."""
    if y.numel():
        on_device(y)(kernel[grid], *arguments, **options)
    return y
