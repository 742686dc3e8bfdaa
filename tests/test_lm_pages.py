"""Keys in pages: attention's bits, and who holds which page."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from fresh import run_fresh
from hypothesis import given, settings, strategies
from lm_kinds import plain, tokens
from triton_compiler import NEEDS_TRITON, compiled

from pararnn.base.device import type_of
from pararnn.base.errors import EngineError
from pararnn.lm import Prefixes, load_state, replay, sample, save_state
from pararnn.lm.pages import NoRoom, Pool, RowPlaces
from pararnn.lm.prefixes import release
from pararnn.lm.rows_op import paged_attention, rows_attention
from pararnn.lm.states import pack, unpack

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def paged(page: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values in pages of a larger memory, NaN elsewhere, a table, last keys."""
    batch, heads, size, count = 3, 2, 20, -(-96 // page)
    memory = torch.full((batch * count + 5, 2 * heads * page * size + 8), torch.nan, dtype=dtype)
    table = (torch.randperm(batch * count) + 3).view(batch, count).int()
    numbers = heads * page * size
    memory[table.flatten(), : 2 * numbers] = torch.randn(batch * count, 2 * numbers).to(dtype)
    shape = heads, page, size
    keys, values = (memory[:, i : i + numbers].unflatten(1, shape) for i in (0, numbers))
    q = torch.randn(batch, 3, heads, size).to(dtype).transpose(1, 2)
    last = torch.arange(3) + torch.tensor([[0], [61], [93]])
    return q, keys, values, table, last


def whole(pages: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return pages[table.long()].transpose(1, 2).flatten(2, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("page", [1, 5, 16])
def test_pages_have_the_bits_of_whole_keys(page, dtype):
    q, keys, values, table, last = paged(page, dtype)
    result = paged_attention(q, keys, values, table, last)
    k, v = whole(keys, table), whole(values, table)
    assert result.isfinite().all()
    assert torch.equal(result, rows_attention(q, k, v, torch.zeros_like(last), last))
    for row in range(3):  # queries by themselves, in another batch
        one = slice(row, row + 1)
        alone = paged_attention(q[one, :, 1:2], keys, values, table[one], last[one, 1:2])
        assert torch.equal(alone, result[one, 1:2])


TRITON = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
from test_lm_pages import paged, whole
from pararnn.lm import rows_cpu, rows_kernels
for page, span, blocks, spans in ((1, 512, 1, 2), (5, 32, 2, 64)):
    rows_kernels.SPAN, rows_kernels.PROGRAMS, rows_kernels.AHEAD = span, 1024, 2
    q, keys, values, table, last = paged(page, torch.float32)
    result = rows_kernels.attention(q, keys, values, None, last, table)
    k, v = whole(keys, table), whole(values, table)
    assert torch.equal(result, rows_kernels.attention(q, k, v, torch.zeros_like(last), last))
    expected = rows_cpu.attention(q, keys, values, None, last, table)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)
    for programs in (1, 6, 12):  # for 6 rows of heads
        rows_kernels.PROGRAMS = programs
        assert torch.equal(result, rows_kernels.attention(q, keys, values, None, last, table))
        alone = rows_kernels.attention(q[:, :, 1:2], keys, values, None, last[:, 1:2], table)
        assert torch.equal(result[:, 1:2], alone)
    new = [torch.randn(3, 3, 2, 20).transpose(1, 2) for _ in range(2)]
    for places in (last, last[:1].expand(3, 3)):
        pages = [[x.clone() for x in (keys, values)] for _ in range(2)]
        for kernels, into in zip((rows_kernels, rows_cpu), pages):
            kernels.put(*new, *into, table, places)
        for ours, theirs in zip(*pages):
            assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))
    q, keys, values = (x.half() for x in (q, keys, values))
    rows_kernels.FEW_BLOCKS, rows_kernels.FEW_SPANS = blocks, spans
    rows_kernels.PROGRAMS = 1024
    few = rows_kernels.attention(q, keys, values, None, last, table, by_rows=False)
    torch.testing.assert_close(few.float(), expected, rtol=0, atol=4e-3)
    rows_kernels.PROGRAMS = 6
    for row in range(3):
        one = slice(row, row + 1)
        alone, out = (q[one], keys, values, None, last[one], table[one]), few[one] * torch.nan
        rows_kernels.attention(*alone, by_rows=False, out=out)
        assert torch.equal(few[one], out)
"""


@NEEDS_TRITON
def test_the_gpus_kernel_reads_pages():
    """By Triton's interpreter."""
    result = run_fresh(TRITON, str(Path(__file__).parent), environment={"TRITON_INTERPRET": "1"})
    assert result.returncode == 0, result.stderr


HOPPER = dataclasses.replace(type_of(torch.device("cuda")), capability=lambda _: (9, 0))


def attention_launches(monkeypatch, keys, steps, by_rows):
    """Launches of attention from steps of a token to keys in pages, or in one piece."""
    from pararnn.lm import rows_kernels

    launches = []

    def note(y, kernel, grid, arguments, options):
        launches.append((kernel, arguments, options))
        return y

    monkeypatch.setattr(rows_kernels, "_launch", note)
    q = keys.new_empty(1, keys.shape[1], steps, keys.shape[3])
    last = torch.zeros(1, steps, dtype=torch.long)
    table = torch.zeros(1, len(keys), dtype=torch.int32)
    rows_kernels.attention(q, keys, keys, None, last, table, by_rows)
    rows_kernels.attention(q, keys[:1], keys[:1], last, last)
    rows_kernels.put(q, q, keys, keys, table, last)
    return launches


WIDE, NARROW = torch.float32, torch.bfloat16
COMPILED = [
    (128, NARROW, 1),
    *(
        pytest.param(*case, marks=pytest.mark.thorough)
        for case in itertools.product((16, 128, 256, 512), (WIDE, NARROW), (1, 3, 100))
        if case != (128, NARROW, 1)
    ),
]


@NEEDS_TRITON
@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize(("size", "dtype", "steps"), COMPILED)
def test_attention_takes_no_more_shared_memory(size, dtype, steps, by_rows, monkeypatch):
    from pararnn.lm import rows_kernels

    keys = torch.empty(100, 16, 16, size, dtype=dtype)
    monkeypatch.setattr(rows_kernels, "type_of", lambda _: HOPPER)
    for limit in (99, 163, 227):
        monkeypatch.setattr(rows_kernels, "shared_bytes_of", lambda _, size=limit: size * 1024)
        launches = attention_launches(monkeypatch, keys, steps, by_rows)
        assert len(launches) == (4 if steps <= 3 else 3)
        for launch in launches:
            assert compiled(*launch).metadata.shared <= limit * 1024


@NEEDS_TRITON
def test_heads_without_kernels_are_refused(monkeypatch):
    from pararnn.lm import rows_kernels, rows_op

    monkeypatch.setattr(rows_kernels, "type_of", lambda _: HOPPER)
    monkeypatch.setattr(rows_op, "type_of", lambda _: HOPPER)
    for size, dtype, has_kernel in (
        (128, torch.bfloat16, True), (2048, torch.bfloat16, True), (4096, torch.bfloat16, False),
        (2048, torch.float32, False), (128, torch.float64, False),
    ):  # fmt: skip
        keys = torch.empty(1, 1, 16, size, dtype=dtype)
        assert rows_op.takes_pages(keys) == has_kernel, (size, dtype)
    with pytest.raises(EngineError, match=r"heads of 4096 numbers in torch\.float16"):
        rows_kernels.attention_options(torch.empty(1, 4096, dtype=torch.float16))


def test_keys_without_kernels_stay_where_they_are(monkeypatch):
    """Then steps are called."""
    model, asked = plain("hybrid"), []

    def refuse(keys):
        asked.append(keys.shape)
        return False

    def replayable(_, length, paged):
        assert not paged
        return False

    monkeypatch.setattr(replay, "takes_pages", refuse)
    monkeypatch.setattr(replay, "replayable", replayable)
    sample(model, tokens(2, 5), 3)
    assert asked


def _pool(pages: int, grain: int = 4) -> Prefixes:
    model = plain("hybrid")
    return Prefixes(model, (pages + 1) * Prefixes(model, 1 << 20, grain).pool.unit_bytes, grain)


ROWS = strategies.lists(
    strategies.tuples(strategies.integers(0, 2), strategies.integers(-1, 12)), max_size=30
)


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_a_table_has_the_pages_of_rows(changes):
    """A row gets a text of a length, or none; now and then all texts grow."""
    pool = _pool(60).pool
    places, texts = RowPlaces(pool, 3, 2), [None] * 3
    for number, (row, length) in enumerate(changes):
        if texts[row] is not None:
            texts[row].release()
        texts[row] = None if length < 0 else pool.new_cache().places
        if texts[row] is not None:
            texts[row].reserve(length)
        places.set(row, texts[row], max(length, 0))
        if number % 3:
            places.prepare([2, 0, 1])
            places.advance([2, 0, 1])
            expected = torch.zeros_like(places.table)
            for index, pages in enumerate(texts):
                if pages is not None:
                    expected[index, : len(pages.units)] = torch.tensor(pages.units)
            assert torch.equal(places.table, expected)
            assert not places.changes


ACTIONS = strategies.lists(
    strategies.tuples(strategies.sampled_from("nwwfrkk"), strategies.integers(0, 99)), max_size=50
)


@settings(max_examples=60, deadline=None)
@given(strategies.integers(2, 20), ACTIONS)
def test_pages_are_free_once_nobody_needs_them(count, actions):
    """Texts begin, grow, fork and end, and states are kept, in any order."""
    prefixes = _pool(count)
    pool, texts, names = prefixes.pool, [], 0
    state = unpack(torch.zeros(1, pool.state_bytes, dtype=torch.uint8), pool.layout)
    for action, number in actions:
        text = texts[number % len(texts)] if texts else None
        try:
            if action == "n":
                texts.append(pool.new_cache())
            elif text is not None and action == "w":
                text.length += 1 + number % 7
                text.places.reserve(text.length)
            elif text is not None and action == "f":
                other = pool.new_cache()
                other.places, other.length = text.places.fork(), text.length
                texts.append(other)
            elif text is not None and action == "r":
                texts.remove(text)
                release(text)
            elif text is not None and text.length >= pool.grain:
                names += 1
                page = text.places.pages[text.length // pool.grain - 1]
                prefixes.keep([bytes([names])], pack(state), [page])
        except NoRoom:
            assert pool.in_use + len(pool.free) <= pool.capacity
            text.length = text.places.length
        held = {id(page): page for text in texts for page in text.places.pages}
        assert pool.in_use == len(held)
        kept = list(prefixes.kept.values())
        needed = held | {id(page): page for each in kept for page in each.page.line()}
        used = [page.unit for page in needed.values()] + [u for each in kept for u in each.units]
        assert sorted([*used, *pool.free]) == list(range(1, pool.count))
        for text in texts:
            full = text.places.pages[: text.length // pool.grain]
            assert len(text.places.pages) == pool.pages_of(text.length)
            assert [a.before for a in text.places.pages] == [None, *text.places.pages][
                : len(text.places.pages)
            ]
            assert all(page.texts <= 1 for page in text.places.pages[len(full) :])


def test_a_copied_page_has_its_keys():
    pool = _pool(9).pool
    text = pool.new_cache()
    text.places.reserve(6)
    pool.memory[text.places.units] = torch.arange(2, dtype=torch.uint8)[:, None] + 7
    other = text.places.fork()
    assert other.units[0] == text.places.units[0]
    assert other.units[1] != text.places.units[1]
    assert (pool.memory[other.units[1]] == 8).all()
    assert (pool.in_use, other.length) == (3, 6)


def test_no_room_is_told_and_changes_nothing():
    pool = _pool(5).pool
    text = pool.new_cache()
    text.places.reserve(4 * 4)
    with pytest.raises(NoRoom, match="3 units of 512 bytes are needed, and texts use 4 of the 5"):
        text.places.reserve(7 * 4)
    assert (pool.in_use, len(pool.free), text.places.length) == (4, 1, 16)
    other = pool.new_cache()
    other.places.reserve(3)
    with pytest.raises(NoRoom):
        other.places.fork()
    assert (pool.in_use, len(pool.free)) == (5, 0)


@torch.no_grad()
def test_found_beginnings_are_saved_and_forked_without_pages(tmp_path):
    model, text = plain("hybrid"), tokens(1, 40)[0].tolist()
    prefixes = Prefixes(model, 1 << 20)
    names = prefixes.names(text)
    cache, _ = prefixes.find(names)
    prefixes.read(text, names, cache)
    release(cache)
    cache, _ = prefixes.find(prefixes.names(text[:36]))
    save_state(cache, model, tmp_path / "state")
    three = cache.fork(3)
    release(cache)
    pool = prefixes.pool
    pool.memory.fill_(255)
    prompt = torch.tensor([text[32:]])
    reference = sample(model, torch.tensor([text]), 9, 0)
    assert torch.equal(
        sample(model, prompt, 9, 0, state=load_state(model, tmp_path / "state")), reference
    )
    assert torch.equal(
        sample(model, prompt.expand(3, -1), 9, 0, state=three), reference.expand(3, -1)
    )


def test_models_without_attention_have_units_of_a_state():
    pool = Pool(plain("lstm"), 1 << 14, 16)
    assert (pool.has_pages, pool.unit_bytes, pool.longest) == (False, pool.state_bytes, None)
    assert pool.new_cache().places is None


def test_rows_with_pages_take_no_padding():
    model = plain("hybrid")
    cache = Pool(model, 1 << 20, 16).new_cache()
    with pytest.raises(ValueError, match="rows with pages have no padding"):
        model(tokens(1, 3), cache, padding_mask=torch.ones(1, 3))
    with pytest.raises(RuntimeError, match=r"call attend where cache\.places is not None"):
        cache.layers[1].extend(torch.zeros(1), torch.zeros(1))
    with pytest.raises(RuntimeError, match="this cache has no pages"):
        cache.layers[0].attend(*[torch.zeros(1)] * 4)
