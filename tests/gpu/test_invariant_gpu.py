"""`batch_invariant` on a GPU: operators, layers, then whole models by random schedules.

Where a model fails, the tests of operators and layers before it say which one is to blame.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from invariance import CASES, DTYPES, KINDS, Schedule, differs, model_of, schedules
from lm_kinds import borders, tokens
from relative import relative_error
from torch import Tensor

from pararnn.lm import LanguageModel, gated_delta_rule, kda, replay, sample
from pararnn.lm.fused_step import takes
from pararnn.lm.invariant import RowsRecurrentLayer
from pararnn.lm.quantise import DTYPES as FORMATS
from pararnn.lm.rows_op import (
    paged_attention,
    rows_attention,
    rows_conv,
    rows_gated,
    rows_log_prob,
    rows_norm,
    rows_product,
)
from pararnn.zoo import CELLS

LONGEST = 400
"""Tokens of a text: four of them, or a token of each, are rows of every tile of products."""
WIDTH, HEADS = 256, 4
COUNTS = (1, 2, 15, 16, 17, 63, 64, 65, 200, 256, 257, 1000, 1024, 1025, 4096, 4100)
"""Rows of a product, of every tile and on both sides of each limit."""


def normal(*size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, device="cuda").to(dtype)


def gpu_model(kind: str, dtype: torch.dtype, invariant: bool = True) -> LanguageModel:
    return model_of(kind, dtype, invariant, "cuda", WIDTH, HEADS)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(1, 1024, 512), (1, 2048, 1000), (4, 72, 200)], ids=str)
def test_products_of_any_number_of_rows(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    heads, inputs, outputs = size
    x, weight = (
        normal(4100, heads, inputs, dtype=dtype),
        normal(heads, outputs, inputs, dtype=dtype),
    )
    one_by_one = torch.cat([rows_product(x[i : i + 1], weight) for i in range(0, 4100, 41)], 1)
    for count in COUNTS:
        y = rows_product(x[:count], weight)
        for i, row in zip(range(0, count, 41), one_by_one.unbind(1), strict=False):
            assert torch.equal(y[:, i], row), (count, i)
        late = rows_product(x[4100 - count :], weight)
        assert torch.equal(late[:, -1], rows_product(x[-1:], weight)[:, 0]), count
    exact = x.double().transpose(0, 1) @ weight.double().mT
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert relative_error(rows_product(x, weight), exact) < bound


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weights", FORMATS)
def test_products_of_weights_in_8_bits(weights: str, dtype: torch.dtype) -> None:
    x, scale = normal(4100, 1, 2048, dtype=dtype), torch.rand(1, 1000, device="cuda")
    weight = normal(1, 1000, 2048, dtype=torch.float32).mul(20).round().to(FORMATS[weights])
    one_by_one = [rows_product(x[i : i + 1], weight, scale)[:, 0] for i in range(0, 4100, 410)]
    for count in COUNTS:
        y = rows_product(x[:count], weight, scale)
        for i, row in zip(range(0, count, 410), one_by_one, strict=False):
            assert torch.equal(y[:, i], row), (count, i)
    exact = x.double().transpose(0, 1) @ (weight.double() * scale.double()[..., None]).mT
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert relative_error(rows_product(x, weight, scale), exact) < bound


@pytest.mark.parametrize("weights", [None, *FORMATS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_tile_sums_in_one_order(dtype: torch.dtype, weights: str | None) -> None:
    """The instructions of tiles have 16 to 256 columns."""
    from pararnn.lm.rows_kernels import LARGE, TILES, product

    x, weight = normal(300, 1, 2048, dtype=dtype), normal(1, 500, 2048, dtype=dtype)
    scale = None
    if weights is not None:
        weight = weight.float().mul(20).round().to(FORMATS[weights])
        scale = torch.rand(1, 500, device="cuda")
    tiles = *(t for _, t in TILES), LARGE
    first, *others = (product(x, weight, scale, tile) for tile in tiles)
    assert [(first != y).sum().item() for y in others] == [0] * len(others)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("width", [72, 1000, 2048])
def test_functions_of_a_row(width: int, dtype: torch.dtype) -> None:
    count = 700
    x, gate, gain = (normal(*size, dtype=dtype) for size in ((count, width),) * 2 + ((width,),))
    taps, halo = normal(4, width, dtype=dtype), normal(1, 3, width, dtype=dtype)
    target = torch.randint(width, (count,), device="cuda")
    functions = {
        "rms": lambda s: rows_norm(x[s], None, gain, 1e-5, False),
        "gated rms": lambda s: rows_norm(x[s], gate[s], gain, 1e-5, False),
        "layer norm": lambda s: rows_norm(x[s], None, gain, 1e-5, True),
        "silu": lambda s: rows_gated(x[s], None),
        "gated": lambda s: rows_gated(x[s], gate[s]),
        "log prob": lambda s: rows_log_prob(x[s], target[s]),
    }
    for name, function in functions.items():
        whole = function(slice(None))
        for first, end in ((0, 1), (5, 6), (699, 700), (3, 67), (64, 700)):
            assert torch.equal(function(slice(first, end)), whole[first:end]), name
        assert whole.isfinite().all()
    logits = x.double().log_softmax(-1).gather(1, target[:, None])[:, 0]
    assert (functions["log prob"](slice(None)).double() - logits).abs().max() < 1e-4
    u = x[None]
    for since in (None, torch.randint(9, (1, count), device="cuda")):
        whole = rows_conv(u, taps, gain, halo, since)
        for cut in (1, 2, 63, 300):
            before = torch.cat([halo, u[:, :cut]], 1)[:, -3:]
            steps = (None, None) if since is None else (since[:, :cut], since[:, cut:])
            first = rows_conv(u[:, :cut], taps, gain, halo, steps[0])
            rest = rows_conv(u[:, cut:], taps, gain, before, steps[1])
            assert torch.equal(torch.cat([first, rest], 1), whole), cut
    # A document's start is the same as no inputs before.
    fresh = rows_conv(u, taps, gain, None, None)
    starts = torch.arange(count, device="cuda")[None]
    assert torch.equal(rows_conv(u, taps, gain, halo, starts), fresh)
    assert torch.equal(rows_conv(torch.cat([u, u]), taps, gain, None, None)[1:], fresh)


def in_pages(
    size: int, page: int, dtype: torch.dtype, steps: int, tokens: int = 3000
) -> tuple[Tensor, ...]:
    """Queries, keys and values in pages that lie anywhere, their table, and places."""
    batch, heads, count = 3, 4, -(-tokens // page)
    pages = batch * count + 5
    memory = torch.full((pages, 2 * heads * page * size), torch.nan, dtype=dtype, device="cuda")
    table = (torch.randperm(batch * count, device="cuda") + 3).view(batch, count).int()
    memory[table.flatten()] = normal(batch * count, memory.shape[1], dtype=dtype)
    numbers, shape = heads * page * size, (heads, page, size)
    keys, values = (memory[:, i : i + numbers].unflatten(1, shape) for i in (0, numbers))
    q = normal(batch, steps, heads, size, dtype=dtype).transpose(1, 2)
    starts = torch.tensor([0, tokens // 2, tokens - 100], device="cuda")
    return q, keys, values, table, torch.arange(steps, device="cuda") + starts[:, None]


def whole(table: Tensor, *pages: Tensor) -> list[Tensor]:
    """Return keys or values in one piece, (B, H, S, D)."""
    return [x[table.long()].transpose(1, 2).flatten(2, 3) for x in pages]


PAGED = list(itertools.product((20, 64, 128, 300), (1, 16, 24), (*DTYPES, torch.float16)))
"""Sizes of heads and of pages, and dtypes."""


@pytest.mark.parametrize(("size", "page", "dtype"), PAGED, ids=str)
def test_pages_have_the_bits_of_whole_keys(size: int, page: int, dtype: torch.dtype) -> None:
    q, keys, values, table, last = in_pages(size, page, dtype, 70)
    result = paged_attention(q, keys, values, table, last)
    assert result.isfinite().all()
    k, v = whole(table, keys, values)
    assert torch.equal(result, rows_attention(q, k, v, torch.zeros_like(last), last))
    for step in (0, 33, 69):  # steps of a token, in the company of others
        one = slice(step, step + 1)
        alone = paged_attention(q[:, :, one], keys, values, table, last[:, one])
        assert torch.equal(alone, result[:, one])


@pytest.mark.parametrize(("size", "page", "dtype"), PAGED, ids=str)
@pytest.mark.parametrize("steps", [1, 7, 16])
def test_few_queries_of_pages(steps: int, size: int, page: int, dtype: torch.dtype) -> None:
    q, keys, values, table, last = in_pages(size, page, dtype, steps)
    check_few(q, keys, values, table, last)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("place", [0, 35_000, -1])
def test_one_query_of_a_long_text(place: int, dtype: torch.dtype) -> None:
    """One key of the longest text, anywhere, outweighs all others."""
    q, keys, values, table, last = in_pages(64, 16, dtype, 1, 70_000)
    last[0] = 12_345
    place = place % (int(last[2]) + 1)
    keys[table[2, place // 16].long(), :, place % 16] = 6 * q[2, :, 0]
    check_few(q, keys, values, table, last)
    result = paged_attention(q, keys, values, table, last, False)
    value = values[table[2, place // 16].long(), :, place % 16]
    assert (result[2, 0] - value).abs().max() < 1e-2


def check_few(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, last: Tensor) -> None:
    """Hold few queries of pages against float64, and rows against the same rows alone."""
    dtype = q.dtype
    result = paged_attention(q, keys, values, table, last, False)
    k, v = (x.nan_to_num().double() for x in whole(table, keys, values))
    sees = torch.arange(k.shape[2], device="cuda") <= last[:, None, :, None]
    exact = F.scaled_dot_product_attention(q.double(), k, v, attn_mask=sees).transpose(1, 2)
    by_rows = paged_attention(q, keys, values, table, last)
    errors = [(x - exact).abs().max() for x in (result, by_rows)]
    assert errors[0] <= max(1.5 * errors[1], torch.finfo(dtype).eps)
    for row in range(len(q)):
        one = slice(row, row + 1)
        alone = paged_attention(q[one], keys, values, table[one], last[one], False)
        assert torch.equal(alone, result[one])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [64, 512])
@pytest.mark.parametrize("cell", ["gru", "lstm", "head-gru", "head-lstm", "layer-norm-lstm"])
def test_layers_in_any_batch(cell: str, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    options = {"num_heads": 2, "device": "cuda", "dtype": dtype}
    layer = RowsRecurrentLayer(CELLS[cell], width, width, **options)
    x = normal(300, 40, width, dtype=dtype)
    trained, _ = layer(x)
    with torch.no_grad():
        for count in (1, 3, 4, 5, 8, 64, 299):
            part, _ = layer(x[:count])
            assert torch.equal(part, trained[:count]), count
        state, parts = None, []
        for chunk in x[:7].split([1, 13, 2, 24], 1):
            part, state = layer(chunk, state)
            parts.append(part)
        assert torch.equal(torch.cat(parts, 1), trained[:7])
        step, _ = layer.step(x[:5, 0])
        assert torch.equal(step, trained[:5, 0])
        packed, _ = layer(x[:6].reshape(1, 240, width), cu_seqlens=torch.arange(7).cuda() * 40)
        assert torch.equal(packed.view(6, 40, width), trained[:6])


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
@settings(max_examples=10)
@given(schedules(LONGEST))
def test_schedules_do_not_change_a_bit(kind: str, dtype: torch.dtype, schedule) -> None:
    assert not differs(gpu_model(kind, dtype), schedule, LONGEST)


def test_schedules_change_bits_without_the_option() -> None:
    model = gpu_model("gru", torch.bfloat16, False)
    fixed = [([LONGEST, 90, 2], [30, 4], way) for way in Schedule.WAYS]
    assert any(differs(model, schedule, LONGEST) for schedule in fixed)


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
def test_training_and_sampling_say_the_same(kind: str, dtype: torch.dtype, monkeypatch) -> None:
    """By a recorded graph and by calls, for one row too."""
    model = gpu_model(kind, dtype)
    assert not takes(model, 1)
    for rows in (1, 5):
        prompt, generator = tokens(rows, 70).cuda(), torch.Generator("cuda")
        results = []
        for recorded in (True, False):
            with monkeypatch.context() as patch:
                if not recorded:
                    patch.setattr(replay, "replayable", lambda *_, **__: False)
                results.append(sample(model, prompt, 40, generator=generator.manual_seed(1),
                                      return_log_probs=True))  # fmt: skip
        assert all(map(torch.equal, *results))
        drawn, of_draws = results[0]
        whole = torch.cat([prompt, drawn], 1)
        chances = model.log_probs(whole)
        assert chances.requires_grad
        assert torch.equal(chances[:, 70:], of_draws)
        row = model.log_probs(whole.view(1, -1), cu_seq_lens=borders([110] * rows).cuda())
        assert torch.equal(row.view(rows, 110), chances)


@pytest.mark.parametrize("kind", ["gru", "head-lstm", "gated-delta", "hybrid"])
def test_compiled_blocks_have_the_bits_of_eager_ones(kind: str) -> None:
    eager, batch = gpu_model(kind, torch.bfloat16), tokens(3, 200).cuda()
    model = LanguageModel(eager.config, device="cuda", dtype=torch.bfloat16)
    model.load_state_dict(eager.state_dict())
    for block in model.backbone.layers:
        block.compile(fullgraph=True)
    assert torch.equal(model.log_probs(batch), eager.log_probs(batch))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_repeat_and_are_those_of_the_plain_model(kind: str) -> None:
    batch = tokens(3, 200).cuda()

    def gradients(invariant: bool, dtype: torch.dtype) -> list[Tensor]:
        model = gpu_model(kind, dtype, invariant)
        model.zero_grad()
        model.loss(batch).backward()
        return [p.grad.clone() for p in model.parameters()]

    assert all(map(torch.equal, *(gradients(True, torch.bfloat16) for _ in range(2))))
    pairs = zip(*(gradients(flag, torch.float32) for flag in (True, False)), strict=True)
    for index, (ours, theirs) in enumerate(pairs):
        assert relative_error(ours, theirs) < 1e-2, index


def test_chunks_are_not_taken() -> None:
    layer = gpu_model("gated-delta", torch.bfloat16).recurrent_layers()[0]
    gpu_model("gated-delta", torch.bfloat16)(tokens(3, 200).cuda())
    assert layer.choice.pair == ("sequential", "fused")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", [gated_delta_rule, kda])
def test_delta_rules_at_any_cut(rule, dtype: torch.dtype) -> None:
    q, k, v = (normal(5, 100, 2, size, dtype=dtype) for size in (64, 64, 48))
    of_decay = (64,) if rule is kda else ()
    g = torch.nn.functional.logsigmoid(normal(5, 100, 2, *of_decay, dtype=torch.float32))
    beta = torch.rand(5, 100, 2, device="cuda")
    tensors, options = (q, k, v, g, beta), {"use_qk_l2norm_in_kernel": True}
    whole, final = rule(*tensors, output_final_state=True, **options)
    state, parts = None, []
    for chunk in zip(*(x.split([1, 63, 36], 1) for x in tensors), strict=True):
        part, state = rule(*chunk, None, state, True, **options)
        parts.append(part)
    assert torch.equal(torch.cat(parts, 1), whole)
    assert torch.equal(state, final)
    assert torch.equal(rule(*(x[3:4] for x in tensors), **options)[0], whole[3:4])
