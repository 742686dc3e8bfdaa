"""Rows of a language model: padding, packing and pieces change no logit."""

from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_kinds import KINDS, borders, documents, pad_rows, plain, positions, tokens, unpad

import pararnn
from pararnn.lm.rows import starts_of

LENGTHS = [19, 12, 2, 1]
# Logits are up to 6 here. In bfloat16 recurrent models gave the same bits, attention 0.03.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.08}

model_of = lru_cache(maxsize=None)(plain)


def run_in_pieces(model, batch, cuts, mask=None):
    """Compute the logits of a batch, piece by piece, with a cache."""
    cache, pieces = model.new_cache(), []
    for start, stop in zip([0, *cuts], [*cuts, batch.shape[1]], strict=True):
        mask_so_far = None if mask is None else mask[:, :stop]
        pieces.append(model(batch[:, start:stop], cache, padding_mask=mask_so_far))
    assert cache.length == batch.shape[1]
    return torch.cat(pieces, 1)


def own_logits(model, rows):
    return torch.cat([model(row[None])[0] for row in rows])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
@pytest.mark.one_in(3)
def test_all_ways_give_the_same_logits(kind, dtype):
    model, rows = model_of(kind, dtype), documents(LENGTHS)
    want = own_logits(model, rows)
    assert 2 < want.abs().max() < 8
    left_rows, left_mask = pad_rows(rows, "left")
    right, right_mask = pad_rows(rows, "right")
    one_row, last = torch.cat(rows)[None], LENGTHS[0]
    got = {
        "left padded": unpad(model(left_rows, padding_mask=left_mask), left_mask),
        "right padded": unpad(model(right, padding_mask=right_mask), right_mask),
        "borders": model(one_row, cu_seq_lens=borders(LENGTHS))[0],
        "positions": model(one_row, position_ids=positions(LENGTHS))[0],
    }
    for name, cuts in {"steps": range(1, last), "chunks": (7, 9, 18), "late": (18,)}.items():
        result = run_in_pieces(model, left_rows, list(cuts), left_mask)
        got[f"{name}, padded"] = unpad(result, left_mask)
        got[name] = torch.cat([run_in_pieces(model, rows[0][None], list(cuts))[0], want[last:]])
    got = {name: logits.float() for name, logits in got.items()}
    for name, logits in got.items():
        error = float((logits - want.float()).abs().max())
        assert error <= BOUNDS[dtype], name


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
@pytest.mark.one_in(5)
def test_bfloat16_is_near_float32(kind):
    row = tokens(2, 20)
    torch.testing.assert_close(
        model_of(kind, torch.bfloat16)(row).float(), model_of(kind)(row), rtol=0, atol=0.6
    )


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from(["user's", "hybrid"]))
@settings(max_examples=20)
@torch.no_grad()
def test_any_documents_in_a_row_have_their_own_logits(lengths, kind):
    model, rows = model_of(kind), documents(lengths)
    one_row, want = torch.cat(rows)[None], own_logits(model, rows)
    for options in ({"cu_seq_lens": borders(lengths)}, {"position_ids": positions(lengths)}):
        torch.testing.assert_close(model(one_row, **options)[0], want, rtol=0, atol=1e-4)


@given(
    st.sets(st.integers(1, 15)),
    st.lists(st.integers(1, 16), min_size=1, max_size=3),
    st.sampled_from(["user's", "hybrid", "no convolution"]),
)
@settings(max_examples=20)
@torch.no_grad()
def test_any_chunks_of_padded_rows_give_the_full_pass(cuts, lengths, kind):
    model, rows = model_of(kind), documents([*lengths, 16])
    batch, mask = pad_rows(rows, "left")
    result = run_in_pieces(model, batch, sorted(cuts), mask)
    torch.testing.assert_close(unpad(result, mask), own_logits(model, rows), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["gru", "lstm", "user's", "attention", "hybrid"])
def test_documents_in_a_row_do_not_affect_each_other(kind):
    model, lengths = model_of(kind), [5, 8, 4]
    first = tokens(1, 17)
    second = first.clone()
    second[:, 5:13] = tokens(1, 8, seed=3)
    in_first = torch.tensor([True] * 5 + [False] * 8 + [True] * 4)
    results = []
    for row in (first, second):
        model.zero_grad()
        inputs = {}
        hook = model.embed_tokens.register_forward_hook(lambda *args, i=inputs: i.update(x=args[2]))
        logits = model(row, cu_seq_lens=borders(lengths))
        hook.remove()
        inputs["x"].retain_grad()
        logits[:, in_first].square().sum().backward()
        assert not inputs["x"].grad[:, ~in_first].any()
        # The head's and the embedding's gradients at other documents' tokens are 0 as well.
        results.append((logits.detach()[:, in_first], [p.grad.clone() for p in model.parameters()]))
    (old_logits, gradients), (new_logits, others) = results
    assert torch.equal(old_logits, new_logits)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(one.abs().max()))


@torch.no_grad()
def test_fields_of_cells_are_neutral():
    timeless = plain("user's", cell="user_cells:Timeless")
    row = tokens(2, 9)
    torch.testing.assert_close(timeless(row), model_of("user's")(row), rtol=0, atol=1e-4)


@torch.no_grad()
def test_arguments_that_do_not_fit_raise():
    model, row = model_of("gru"), tokens(1, 6)
    for options in ({"cu_seq_lens": borders([2, 4])}, {"position_ids": positions([2, 4])}):
        with pytest.raises(ValueError, match="packed documents"):
            model(row, model.new_cache(), **options)
    two_documents = {"cu_seq_lens": borders([2, 4])}
    for batch, options, message in (
        (row, {"padding_mask": torch.ones(1, 5)}, "padding mask must be"),
        (row, {"position_ids": torch.arange(5)[None]}, "position_ids must be"),
        (tokens(2, 6), two_documents, "packs all documents into one row"),
        (row, {**two_documents, "padding_mask": torch.ones(1, 6)}, "no padding"),
        (row[0], {}, r"tokens must be integers \(B, T\), got .* \(6,\)"),
        (row.float(), {}, r"tokens must be integers .* got torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            model(batch, **options)


@pytest.mark.parametrize("cuts", [[0, 3], [2, 6], [0, 4, 2, 6], [-1, 6], [0, 9], []], ids=str)
def test_borders_must_be_those_of_the_tokens(cuts):
    """Tokens behind the last border were one more document, and were learned."""
    with pytest.raises(ValueError, match=r"cu_seq_lens (must|is)"):
        model_of("gru").loss(tokens(1, 6), cu_seq_lens=torch.tensor(cuts, dtype=torch.int64))


@torch.no_grad()
def test_attention_needs_a_mask_for_padding_in_a_cache():
    batch, mask = pad_rows(documents([6, 3]), "left")
    for kind, needs_mask in (("hybrid", True), ("gru", False)):
        model = model_of(kind)
        cache = model.new_cache()
        model(batch[:, :4], cache, padding_mask=mask[:, :4])
        if needs_mask:
            with pytest.raises(ValueError, match=r"for all tokens so far, \(2, 4\), and the new"):
                model(batch[:, 4:], cache)
            model(batch[:, 4:], cache, padding_mask=mask)
        else:
            model(batch[:, 4:], cache)
        assert cache.length == 6


@torch.no_grad()
@pytest.mark.thorough
def test_compiled_blocks_take_rows_of_any_length():
    """From the second length on it is a symbol to whom compiles."""
    model, rows = plain("layer norm"), [tokens(2, steps) for steps in (5, 17, 64)]
    want = [model(row) for row in rows]
    for block in model.backbone.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for row, reference in zip(rows, want, strict=True):
        torch.testing.assert_close(model(row), reference, rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.thorough
def test_packed_rows_of_many_lengths_compile_a_few_times():
    model = plain("hybrid")
    for block in model.backbone.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    generator = torch.Generator().manual_seed(0)

    def run(steps):
        cut = int(torch.randint(1, steps, (), generator=generator))
        row = tokens(1, steps)
        got = model(row, cu_seq_lens=borders([cut, steps - cut]))
        return got, row, cut

    for steps in (20, 33, 100, 131):  # engines are chosen anew at 64 steps
        run(steps)
    with torch.compiler.set_stance("fail_on_recompile"):
        for steps in torch.randint(8, 160, (100,), generator=generator).tolist():
            got, row, cut = run(steps)
    want = torch.cat([plain("hybrid")(part) for part in (row[:, :cut], row[:, cut:])], 1)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("mask", "has_cache", "message"),
    [
        ([1, 0, 1], False, "has holes.*one piece of its 3 places"),
        ([1, 0, 1], True, "has holes"),
        ([1, 1, 0], True, "pad on the left"),
        ([0, 1, 0], True, "pad on the left"),
    ],
)
def test_padding_has_no_holes_and_no_cache_behind_it(mask, has_cache, message):
    model = plain("gru")
    cache = model.new_cache() if has_cache else None
    masks = torch.tensor([[1, 1, 1], mask])
    with pytest.raises(ValueError, match=message):
        model(tokens(2, 3), cache, padding_mask=masks)


@pytest.mark.parametrize("kind", ["gru", "user's", "hybrid", "attention"])
def test_padding_may_be_on_both_sides(kind):
    """As reinforcement learning lays out rows: prompts end where answers begin."""
    model, rows = plain(kind), [tokens(1, n, seed=n) for n in (9, 5, 1)]
    batch, mask = tokens(3, 12, seed=3), torch.zeros(3, 12)
    for index, (row, start) in enumerate(zip(rows, (1, 4, 7), strict=True)):
        at = slice(start, start + row.shape[1])
        batch[index, at], mask[index, at] = row[0], 1
    got = model(batch, padding_mask=mask)[mask.bool()]
    want = torch.cat([model(row)[0] for row in rows])
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    weights = list(model.parameters())
    losses = [model.loss(row) * (row.shape[1] - 1) for row in rows[:2]]
    grads = torch.autograd.grad(model.loss(batch, padding_mask=mask), weights)
    for gradient, right in zip(grads, torch.autograd.grad(sum(losses) / 12, weights), strict=True):
        torch.testing.assert_close(gradient, right, rtol=0, atol=1e-4)


def test_starts_are_the_same_without_cummax_as_in_onnx(monkeypatch):
    start = torch.rand(3, 40, generator=torch.Generator().manual_seed(0)) < 0.2
    start[1] = False
    real = torch.ones(3, 40).bool()
    real[2, :7] = real[2, 30:] = False
    want = starts_of(real, start)
    monkeypatch.setattr("pararnn.sequences.exporting_to_onnx", lambda: True)
    for got, right in zip(starts_of(real, start), want, strict=True):
        assert torch.equal(got, right)


@pytest.mark.thorough
def test_export_of_padded_rows():
    """For any number of rows."""
    model, free = plain("hybrid"), torch.export.Dim.DYNAMIC
    batch, mask = pad_rows([tokens(n, seed=n) for n in (7, 4, 2)], "left")
    sizes = {"tokens": {0: free}, "padding_mask": {0: free}}
    inputs = {"tokens": batch, "padding_mask": mask}
    with torch.no_grad(), pararnn.using(solver="sequential", backend="torch"):
        program = torch.export.export(model, (), inputs, dynamic_shapes=sizes, strict=False)
        batch, mask = pad_rows([tokens(n, seed=n) for n in (7, 5)], "left")
        want = model(batch, padding_mask=mask)
    got = program.module()(tokens=batch, padding_mask=mask)
    torch.testing.assert_close(unpad(got, mask), unpad(want, mask), rtol=0, atol=1e-4)
