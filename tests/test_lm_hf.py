"""Language models for transformers: results, caches, generate."""

from functools import lru_cache

import pytest
import torch
from lm_kinds import KINDS, borders, documents, hugging, pad_rows, plain, positions, tokens, unpad

transformers = pytest.importorskip("transformers")

from packaging.version import Version  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402
from transformers.generation.streamers import BaseStreamer, TextIteratorStreamer  # noqa: E402

from pararnn.base.errors import CellError  # noqa: E402
from pararnn.lm.config import LMConfig  # noqa: E402
from pararnn.lm.hf import ParaRNNConfig, ParaRNNForCausalLM, ParaRNNModel  # noqa: E402
from pararnn.lm.hf.cache import LayerView  # noqa: E402

LENGTHS = [19, 12, 2, 1]
RESETS_KEYS = Version(transformers.__version__) >= Version("5.18")
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.08}  # as in test_lm_rows.py
if torch.__version__ < "2.13":  # which rounds one logit of 1,632 to 0.082 from its own
    BOUNDS[torch.bfloat16] = 0.1
GENERATED = ["gru", "user's", "attention", "hybrid", "no convolution"]

model_of = lru_cache(maxsize=None)(hugging)


def run_in_pieces(model, batch, cuts, mask=None, cache=None):
    cache, pieces = DynamicCache(config=model.config) if cache is None else cache, []
    for start, stop in zip([0, *cuts], [*cuts, batch.shape[1]], strict=True):
        mask_so_far = None if mask is None else mask[:, :stop]
        out = model(batch[:, start:stop], attention_mask=mask_so_far, past_key_values=cache)
        pieces.append(out.logits)
    assert int(cache.get_seq_length()) == batch.shape[1]
    return torch.cat(pieces, 1)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
@pytest.mark.one_in(5)
def test_all_ways_give_the_plain_models_logits(kind, dtype):
    model, reference, rows = model_of(kind, dtype), plain(kind, dtype), documents(LENGTHS)
    want = torch.cat([reference(row[None])[0] for row in rows])
    batch, mask = pad_rows(rows, "left")
    right, right_mask = pad_rows(rows, "right")
    one_row, last, where = torch.cat(rows)[None], LENGTHS[0], positions(LENGTHS)
    number = torch.cat([torch.full((n,), i) for i, n in enumerate(LENGTHS)])[None].int()
    ends, index, once = borders(LENGTHS).int(), mask.cumsum(1) - 1, {"use_cache": False}
    collator_options = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 19}
    collator_options |= {"max_length_k": 19, "position_ids": where, "seq_idx": number}
    left_options = {
        "left padded": {},
        "left padded, no cache": once,
        "left padded, positions": {"position_ids": index.clamp_min(0)},
        "left padded, positions 1": {"position_ids": index.masked_fill(mask == 0, 1), **once},
    }
    together = {
        "positions": {"position_ids": where},
        "positions and ones": {"position_ids": where, "attention_mask": torch.ones_like(one_row)},
        "borders": {"cu_seq_lens_q": ends},
        "all that the collator gives": collator_options,
        "numbers": {"seq_idx": number},
    }
    got = {
        name: unpad(model(batch, attention_mask=mask, **options).logits, mask)
        for name, options in left_options.items()
    }
    got |= {name: model(one_row, **options).logits[0] for name, options in together.items()}
    got["right padded"] = unpad(model(right, attention_mask=right_mask, **once).logits, right_mask)
    static = StaticCache(config=model.config, max_cache_len=24)
    for name, cuts, cache in (
        ("steps", range(1, last), None),
        ("chunks", (7, 9, 18), None),
        ("static", (7, 17, 18), static),
    ):
        if static is not cache:
            got[f"{name}, padded"] = unpad(run_in_pieces(model, batch, [*cuts], mask), mask)
        result = run_in_pieces(model, rows[0][None], [*cuts], cache=cache)[0]
        got[name] = torch.cat([result, want[last:]])
    for name, logits in got.items():
        torch.testing.assert_close(
            logits.float(),
            want.float(),
            rtol=0,
            atol=BOUNDS[dtype],
            msg=lambda text, name=name: f"{name}: {text}",
        )


@torch.no_grad()
def greedy(model, prompt, count, least=0):
    """Return the likeliest tokens (count,) from `least` on after one prompt (T,), without any
    cache."""
    row = prompt[None]
    for _ in range(count):
        logits = model(row, use_cache=False).logits[:, -1:, least:]
        row = torch.cat([row, logits.argmax(-1) + least], 1)
    return row[0, len(prompt) :]


def generate(model, inputs=None, **options):
    options = {"max_new_tokens": 6, "do_sample": False, **options}
    return model.generate(inputs, **options)


@pytest.mark.parametrize("kind", GENERATED)
@pytest.mark.one_in(3)
def test_generate_is_greedy_search(kind):
    model, prompts = model_of(kind), documents([7, 4, 1])
    want = torch.stack([greedy(model, prompt, 6) for prompt in prompts])
    assert len(want.unique()) > 4
    batch, mask = pad_rows(prompts, "left")
    for options in (
        {},
        {"use_cache": False},
        {"prefill_chunk_size": 3},
        {"prefill_chunk_size": 1},
        {"cache_implementation": "static"},
        {"cache_implementation": "static", "prefill_chunk_size": 3},
        {"cache_implementation": "static", "prefill_chunk_size": 1},
    ):
        got = generate(model, batch, attention_mask=mask, **options)
        assert torch.equal(got, torch.cat([batch, want], 1)), options
    vectors = model.model.embed_tokens(batch)
    assert torch.equal(generate(model, inputs_embeds=vectors, attention_mask=mask), want)
    row = prompts[0][None]
    assert torch.equal(generate(model, row)[0, 7:], want[0])
    assert torch.equal(generate(model, inputs_embeds=vectors[:1])[0], want[0])


@pytest.mark.parametrize("kind", ["gru", "hybrid"])
def test_padded_prompts_may_be_read_token_by_token(kind):
    model, (batch, mask) = model_of(kind), pad_rows(documents([5, 1]), "left")
    results = []
    for options in (
        {"use_cache": False},
        {"prefill_chunk_size": 1},
        {"prefill_chunk_size": 1, "cache_implementation": "static"},
    ):
        options |= {"output_logits": True, "return_dict_in_generate": True}
        results.append(torch.stack(generate(model, batch, attention_mask=mask, **options).logits))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["gru", "hybrid"])
def test_padding_and_batches_change_no_token(kind):
    model = model_of(kind)
    lengths = (torch.arange(46) * 7 % 23 + 1).tolist()
    prompts = documents(lengths)
    options = {"max_new_tokens": 3}
    single = torch.stack([generate(model, row[None], **options)[0, len(row) :] for row in prompts])
    assert len(single.unique()) > 10
    for side in ("left", "right"):
        for size in (8, 46):
            for start in range(0, 46, size):
                batch, mask = pad_rows(prompts[start : start + size], side)
                got = generate(model, batch, attention_mask=mask, **options)
                assert torch.equal(got[:, -3:], single[start : start + size]), (side, start)


@pytest.mark.parametrize("kind", ["gru", "user's", "hybrid"])
def test_beams_and_samples_are_the_same_with_any_cache(kind):
    model, (batch, mask) = model_of(kind), pad_rows(documents([7, 4, 1]), "left")
    for options in (
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"do_sample": True},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": True, "num_beams": 2, "temperature": 2.0},
    ):
        results = []
        for cache_options in ({}, {"cache_implementation": "static"}, {"use_cache": False}):
            torch.manual_seed(0)
            results.append(generate(model, batch, attention_mask=mask, **options, **cache_options))
        assert torch.equal(results[0], results[2]), options
        assert torch.equal(results[1], results[2]), options


class Collected(BaseStreamer):
    def __init__(self):
        self.pieces = []

    def put(self, value):
        self.pieces.append(value.flatten())

    def end(self):
        self.pieces = torch.cat(self.pieces)


class Letters:
    """A tokenizer, as streamers need it."""

    def decode(self, ids, **kwargs):
        return "".join(chr(65 + int(token)) for token in ids)


@pytest.mark.parametrize("kind", ["gru", "hybrid"])
def test_streams_give_the_tokens(kind):
    model, prompt = model_of(kind), tokens(1, 5)
    want = greedy(model, prompt[0], 6)
    streamer, text = Collected(), TextIteratorStreamer(Letters(), skip_prompt=True)
    generate(model, prompt, streamer=streamer)
    assert torch.equal(streamer.pieces, torch.cat([prompt[0], want]))
    generate(model, prompt, streamer=text)
    assert "".join(text) == Letters().decode(want)


@pytest.mark.parametrize("kind", GENERATED)
@pytest.mark.one_in(2)
def test_generate_goes_on_from_a_cache(kind):
    model, (batch, mask) = model_of(kind), pad_rows(documents([7, 4, 1]), "left")
    more = tokens(3, 4, seed=9)
    static = StaticCache(config=model.config, max_cache_len=24)
    for options in ({}, {"prefill_chunk_size": 3}, {"past_key_values": static}):
        first = generate(
            model,
            batch,
            attention_mask=mask,
            return_dict_in_generate=True,
            max_new_tokens=3,
            **options,
        )
        row = torch.cat([first.sequences, more], 1)
        full_mask = torch.cat([mask, torch.ones(3, 7).long()], 1)
        want = generate(model, row, attention_mask=full_mask, use_cache=False)
        # The last token was drawn and never read.
        assert int(first.past_key_values.get_seq_length()) == 9
        # Of a row that is known in part, or of its new tokens and the mask of all.
        cache, prefill = first.past_key_values, options.get("prefill_chunk_size", 0)
        new = row if not prefill else row[:, 9:]
        got = generate(model, new, attention_mask=full_mask, past_key_values=cache)
        assert torch.equal(got[:, new.shape[1] :], want[:, row.shape[1] :])
        cache.reset()
        if options.get("past_key_values") is static:
            again = generate(model, batch, attention_mask=mask, past_key_values=cache)
            assert torch.equal(again[:, :10], first.sequences)


@torch.no_grad()
def test_other_results_of_forward():
    model, row = model_of("hybrid"), tokens(2, 9)
    out = model(row, output_hidden_states=True, return_dict=True)
    assert len(out.hidden_states) == 3
    assert torch.equal(model.lm_head(out.hidden_states[-1]), out.logits)
    assert torch.equal(out.hidden_states[0], model.model.embed_tokens(row))
    hidden, cache = model.model(row, return_dict=False)
    assert torch.equal(hidden, out.hidden_states[-1])
    assert int(cache.get_seq_length()) == 9
    torch.testing.assert_close(model(row, logits_to_keep=2).logits, out.logits[:, -2:])
    some = torch.tensor([0, 4])
    torch.testing.assert_close(model(row, logits_to_keep=some).logits, out.logits[:, some])
    assert model(row, use_cache=False).past_key_values is None
    model.config.return_dict, model.config.output_hidden_states = False, True
    logits, cache, hidden = model(row)
    model.config.return_dict, model.config.output_hidden_states = True, False
    assert torch.equal(logits, out.logits)
    assert len(hidden) == 3
    torch.testing.assert_close(
        model(inputs_embeds=model.model.embed_tokens(row)).logits, out.logits
    )


@torch.no_grad()
def test_inputs_without_padding_or_borders_make_no_mask(monkeypatch):
    model, row, masks = model_of("hybrid"), tokens(2, 9), []
    want, attend = model(row).logits, torch.nn.functional.scaled_dot_product_attention

    def record(*args, attn_mask=None, **options):
        masks.append(attn_mask)
        return attend(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    for options in (
        {"position_ids": torch.arange(9)[None]},
        {"position_ids": torch.arange(9).expand(2, 9) + 5},
        {"attention_mask": torch.ones(2, 9)},
    ):
        for use_cache in (True, False):
            got = model(row, **options, use_cache=use_cache).logits
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    assert masks == [None] * 6
    uneven = model(row, position_ids=torch.arange(9)[None] * 3, use_cache=False).logits
    use_cache = model(row, position_ids=torch.arange(9)[None] * 3).logits
    assert (uneven - want).abs().max() > 1e-2
    torch.testing.assert_close(use_cache, uneven, rtol=0, atol=1e-4)


def test_assistants_and_packed_rows_with_a_cache_raise():
    model, (left_rows, _) = model_of("hybrid"), pad_rows(documents([5, 3]), "left")
    right, right_mask = pad_rows(documents([5, 3]), "right")
    without_marks = hugging("gru", mixers=("user_mixers:Decay", "rnn"))
    with pytest.raises(ValueError, match="stateful"):
        generate(without_marks, left_rows[:1], prompt_lookup_num_tokens=2)
    with pytest.raises(RuntimeError, match=r"Mixer\.marks.*rows without padding"):
        generate(model_of("attention"), left_rows[:1], assistant_model=without_marks)
    with pytest.raises(ValueError, match=r"padded on the right.*left"):
        model(right, attention_mask=right_mask, use_cache=True)
    with pytest.raises(ValueError, match="packed documents cannot be kept"):
        model(left_rows, position_ids=positions([3, 2]), use_cache=True)
    with pytest.raises(ValueError, match="packed documents cannot be kept"):
        model(left_rows[:1], cu_seq_lens_q=borders([3, 2]), past_key_values=DynamicCache())
    with pytest.raises(ValueError, match=r"\(seq_idx\) must be \(2, 5\), got \(5,\)"):
        model(left_rows, seq_idx=torch.tensor([0, 0, 1, 1, 1]))
    with pytest.raises(ValueError, match="exactly one"):
        model()
    with pytest.raises(ValueError, match=r"DynamicCache\(config=model.config\)"):
        model(left_rows, past_key_values=DynamicCache())


@pytest.mark.parametrize("kind", ["gru", "hybrid"])
def test_padding_on_the_right_is_moved_or_raises(kind):
    model, prompts = model_of(kind), documents([7, 4, 1])
    (right, mask), (left_rows, left_mask) = pad_rows(prompts, "right"), pad_rows(prompts, "left")
    options = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 2}
    want = generate(model, left_rows, attention_mask=left_mask, **options).logits
    vectors = model.model.embed_tokens(right)
    for rows in (
        {"inputs": right},
        {"input_ids": right},
        {"inputs_embeds": vectors},
        {"inputs": right, "inputs_embeds": vectors},
        {"inputs": right, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)},
        {"inputs": right, "cache_implementation": "static"},
        {"inputs": right, "use_cache": False},
    ):
        got = generate(model, attention_mask=mask, **rows, **options).logits
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    for cache in (DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=16)):
        with pytest.raises(ValueError, match="padded on the right"):
            generate(model, right, attention_mask=mask, past_key_values=cache)


def test_static_caches_do_not_grow():
    """For keys of a fixed length attention may take kernels that are planned for it."""
    model = model_of("hybrid")
    attention = model.config.layer_types.index("full_attention")
    caches = DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=16)
    assert [LayerView(cache.layers[attention], 1).grows for cache in caches] == [True, False]


def test_masks_that_do_not_fit_raise():
    model, row = model_of("gru"), tokens(2, 6)
    cache = model(row).past_key_values
    with pytest.raises(ValueError, match=r"attention_mask must be \(2, 7\)"):
        model(row[:, :1], attention_mask=torch.ones(2, 1), past_key_values=cache)
    holes = torch.ones(2, 6).long()
    holes[1, 3] = 0
    wrong = {
        r"mask must be \(2, 6\)": torch.ones(2, 5),
        r"must be a tensor, \(2, 6\).*got list": [[1] * 6] * 2,
        r"mask must be \(2, 6\).*got \(6,\)": torch.ones(6),
        "four dimensions.*position_ids": torch.ones(2, 1, 6, 6).bool(),
        r"has holes.*rows \[1\]": holes,
        "hold 1 at tokens and 0 at padding": torch.tensor([[1, 1, 1, 2, 2, 2]] * 2),
    }
    for options in ({}, {"use_cache": False}, {"use_cache": True}):
        for message, mask in wrong.items():
            with pytest.raises(ValueError, match=message):
                model(row, attention_mask=mask, **options)
    attention = model_of("attention")
    with pytest.raises(ValueError, match=r"must be bool, or numbers to add.*int64"):
        attention(row, attention_mask=torch.ones(2, 1, 6, 6).long())
    with pytest.raises(
        ValueError, match=r"\(B, H, T, S\) with B = 2 and T = 6, got \(3, 1, 6, 6\)"
    ):
        attention(row, attention_mask=torch.ones(3, 1, 6, 6).bool())
    numbers, mask = torch.zeros(2, 6).int(), torch.ones(2, 1, 6, 6).bool()
    with pytest.raises(ValueError, match="both say which tokens are seen"):
        attention(row, attention_mask=mask, seq_idx=numbers)


def test_a_prompt_may_end_as_rows_are_padded():
    # As in GPT-NeoX, whose padding is its end of text: no mask can be made out of that.
    model, row = model_of("hybrid"), tokens(1, 6, seed=3)
    row[:, -1] = row[:, 2] = 0
    want = greedy(model, row[0], 4, least=1)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": 0, "min_new_tokens": 4}
    got = model.generate(row, pad_token_id=0, **options)[0, 6:]
    assert torch.equal(got, want)
    with pytest.raises(ValueError, match="attention_mask has holes"):
        generate(model, row)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", ["gru", "hybrid", "mlstm", "no convolution"])
@torch.no_grad()
def test_caches_continue_for_some_rows_and_for_copies(kind, layers):
    mixers = KINDS[kind].get("mixers", ("rnn", "rnn"))[:layers]
    model = hugging(kind, num_hidden_layers=layers, mixers=mixers)
    rows, mask = tokens(3, 12), torch.tensor([True, False, True])
    for change, argument, want in (
        ("batch_select_indices", torch.tensor([2, 0, 1]), rows[[2, 0, 1]]),
        ("batch_select_indices", mask, rows[mask]),
        ("batch_repeat_interleave", 2, rows.repeat_interleave(2, 0)),
    ):
        cache = DynamicCache(config=model.config)
        cache.activate_past_recording()
        model(rows[:, :5], past_key_values=cache)
        model(rows[:, 5:8], past_key_values=cache)
        getattr(cache, change)(argument)
        cache.crop(-2)
        got = model(want[:, 6:], past_key_values=cache).logits
        torch.testing.assert_close(got, model(want).logits[:, 6:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["gru", "lstm", "user's", "hybrid", "matrix", "no convolution"])
@pytest.mark.one_in(5)
@torch.no_grad()
def test_cropped_caches_continue_from_earlier_tokens(kind):
    model, row, after = model_of(kind), tokens(1, 9), tokens(1, 4, seed=5)
    cache = DynamicCache(config=model.config)
    model(row[:, :4], past_key_values=cache)
    cache.activate_past_recording()
    for chunk in row[:, 4:].split([2, 1, 2], 1):
        model(chunk, past_key_values=cache)
    cache.crop(-3)
    assert cache.get_seq_length() == 6
    want = model(torch.cat([row[:, :6], after], 1)).logits[:, 6:]
    got = [model(chunk, past_key_values=cache).logits for chunk in after.split([3, 1], 1)]
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=0, atol=1e-4)
    cache.crop(0)
    with pytest.raises(RuntimeError, match=r"crop\(-1\).*has recorded 1 tokens"):
        cache.crop(-1)


@pytest.mark.parametrize("kind", ["gru", "user's", "hybrid", "no convolution"])
@torch.no_grad()
def test_caches_that_recorded_all_tokens_go_back_to_none(kind):
    """As assistants' caches do, whose first draft after a prompt of one token was wrong."""
    model, row, other = model_of(kind), tokens(1, 3), tokens(1, 5, seed=5)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    for chunk in row.split([1, 2], 1):
        model(chunk, past_key_values=cache)
    cache.crop(-2)
    cache.crop(-1)
    assert cache.get_seq_length() == 0
    got = [model(chunk, past_key_values=cache).logits for chunk in other.split([2, 3], 1)]
    torch.testing.assert_close(torch.cat(got, 1), model(other).logits, rtol=0, atol=1e-4)
    cache.crop(-3)
    with pytest.raises(RuntimeError, match=r"crop\(-2\).*has recorded 1 tokens"):
        cache.crop(-2)


@pytest.mark.parametrize("kind", ["gru", "hybrid", "no convolution"])
@torch.no_grad()
def test_rows_that_were_reordered_are_cropped(kind):
    """As beams are reordered: what was recorded moves with the rows."""
    model, rows, after = model_of(kind), tokens(3, 5), tokens(3, 4, seed=5)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(rows, past_key_values=cache)
    order = torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    cache.crop(-2)
    want = model(torch.cat([rows[order, :3], after], 1)).logits[:, 3:]
    got = model(after, past_key_values=cache).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@torch.no_grad()
def test_caches_that_do_not_record_are_not_cropped():
    model, row = model_of("gru"), tokens(2, 200)
    cache = model(row).past_key_values
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-2)
    recording = DynamicCache(config=model.config)
    recording.activate_past_recording()
    model(row, past_key_values=recording)
    with pytest.raises(RuntimeError, match=r"has recorded 129 tokens.*at most 128"):
        recording.crop(-129)
    recording.crop(-128)
    assert recording.get_seq_length() == 72
    padded = DynamicCache(config=model.config)
    padded.activate_past_recording()
    mask = torch.ones_like(row)
    mask[0, :3] = 0
    with pytest.raises(RuntimeError, match="rows without padding"):
        model(row, attention_mask=mask, past_key_values=padded)
    recording.reset()
    with pytest.raises(RuntimeError, match="has recorded 0 tokens"):
        recording.crop(-1)


SIDES = {"both": ([3, 1, 0], [1, 4, 7]), "right": ([0, 0, 0], [2, 5, 0])}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", ["gru", "user's", "hybrid", "attention"])
@torch.no_grad()
def test_rows_may_end_in_padding_without_a_cache(kind, side):
    model, (starts, right) = model_of(kind), SIDES[side]
    mask = torch.zeros(3, 12).long()
    for index, (start, stop) in enumerate(zip(starts, right, strict=True)):
        mask[index, start : 12 - stop] = 1
    batch = tokens(3, 12, seed=4)
    for training in (False, True):
        out = model.train(training)(batch, attention_mask=mask)
        assert out.past_key_values is None
        for row, real, logits in zip(batch, mask.bool(), out.logits, strict=True):
            want = model(row[real][None], use_cache=False).logits[0]
            torch.testing.assert_close(logits[real], want, rtol=0, atol=1e-4)
    where = (mask.cumsum(1) - 1).clamp_min(0)
    again = model.eval()(batch, attention_mask=mask, position_ids=where).logits
    torch.testing.assert_close(again[mask.bool()], out.logits[mask.bool()], rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="padded on the right"):
        model(batch, attention_mask=mask, use_cache=True)


@torch.no_grad()
def test_masks_by_keys_work_for_models_of_attention_only():
    model, rows = model_of("attention"), documents([5, 4])
    batch, number = torch.cat(rows)[None], torch.tensor([0] * 5 + [1] * 4)
    bool_mask = (number == number[:, None]).tril()[None, None]
    float_mask = torch.zeros(1, 1, 9, 9).masked_fill(~bool_mask, torch.finfo(torch.float32).min)
    where = positions([5, 4])
    want = model(batch, position_ids=where).logits
    for mask in (bool_mask, float_mask, bool_mask.expand(1, 2, 9, 9)):
        for options in ({}, {"use_cache": False}, {"output_attentions": True}):
            got = model(batch, attention_mask=mask, **{"position_ids": where} | options).logits
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    cache = DynamicCache(config=model.config)
    first = {"position_ids": where[:, :6], "attention_mask": bool_mask[..., :6, :6]}
    parts = [model(batch[:, :6], past_key_values=cache, **first).logits]
    then = {"position_ids": where[:, 6:], "attention_mask": bool_mask[..., 6:, :]}
    parts.append(model(batch[:, 6:], past_key_values=cache, **then).logits)
    torch.testing.assert_close(torch.cat(parts, 1), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["gru", "hybrid", "attention"])
@torch.no_grad()
def test_eager_attention_and_its_weights(kind):
    model, (batch, mask) = hugging(kind), pad_rows(documents([7, 4, 1]), "left")
    layers = model.config.layer_types.count("full_attention")
    want = unpad(model(batch, attention_mask=mask).logits, mask)
    calls = []
    attend = torch.nn.functional.scaled_dot_product_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.nn.functional,
            "scaled_dot_product_attention",
            lambda *args, **options: calls.append(1) or attend(*args, **options),
        )
        with_weights = model(batch, attention_mask=mask, output_attentions=True)
        model.set_attn_implementation("eager")
        eager = model(batch, attention_mask=mask)
        once = model(batch, attention_mask=mask, use_cache=False)
        model.config.output_attentions = True
        by_config = model(batch, attention_mask=mask)
        assert not calls
        model.config.output_attentions = False
        model.set_attn_implementation("sdpa")
        model(batch, attention_mask=mask)
        assert len(calls) == layers
    assert eager.attentions is None
    for out in (with_weights, eager, once, by_config):
        got = unpad(out.logits, mask)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    for out in (with_weights, by_config):
        assert [part.shape for part in out.attentions] == [(3, 2, 7, 7)] * layers
        for part in out.attentions:
            torch.testing.assert_close(part.sum(-1), torch.ones(3, 2, 7))
            assert (part[0].triu(1) == 0).all()
            assert (part[1, :, 3:, :3] == 0).all()
    options = {"return_dict_in_generate": True, "output_attentions": True, "max_new_tokens": 2}
    out = generate(model, batch, attention_mask=mask, **options)
    assert [len(step) for step in out.attentions] == [layers] * 2
    assert torch.equal(out.sequences, generate(model, batch, attention_mask=mask, **options)[0])


@pytest.mark.parametrize("kind", ["gru", "hybrid", "attention"])
@torch.no_grad()
def test_caches_have_a_layer_for_each_of_the_models(kind):
    model, row = model_of(kind), tokens(2, 5)
    static = StaticCache(config=model.config, max_cache_len=8)
    for cache in (None, DynamicCache(config=model.config), static):
        out = model(row, past_key_values=cache)
        assert len(out.past_key_values) == model.config.num_hidden_layers
        assert int(out.past_key_values.get_seq_length()) == 5
        if RESETS_KEYS:
            out.past_key_values.reset()
            assert int(out.past_key_values.get_seq_length()) == 0


def test_other_kinds_of_attention_are_refused():
    model, row = hugging("hybrid"), tokens(1, 5)
    for name in ("flash_attention_2", "flex_attention"):
        with pytest.raises(ValueError, match="does not support"):
            model.set_attn_implementation(name)
    transformers.AttentionInterface.register("mine", lambda *args, **options: None)
    model.set_attn_implementation("mine")
    with pytest.raises(ValueError, match="sdpa or eager, got 'mine'"):
        model(row)


@pytest.mark.parametrize("kind", ["attention", "gru", "lstm", "hybrid", "matrix"])
@pytest.mark.one_in(2)
def test_assistants_and_prompt_lookup_change_no_token(kind):
    model, rows = model_of(kind), (tokens(1, 5).repeat(1, 3), tokens(1, 1))
    shared = {"max_new_tokens": 12, "suppress_tokens": [0]}  # 0 in a text is padding
    wants = [generate(model, row, **shared) for row in rows]
    other = hugging("attention", num_hidden_layers=1, mixers=("attention",))
    recurrent = hugging("gru", num_hidden_layers=1)
    for options in (
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": other},
        {"assistant_model": recurrent},
    ):
        for row, want in zip(rows, wants, strict=True):
            assert torch.equal(generate(model, row, **shared, **options), want)


def test_configs_refuse_what_has_no_effect():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 5}
    errors = {
        "rope_scaling": ({"rope_type": "yarn", "factor": 2.0}, "set rope_theta"),
        "num_key_value_heads": (1, "set num_attention_heads"),
        "head_dim": (16, "set hidden_size"),
        "hidden_act": ("gelu", "leave it out"),
        "attention_dropout": (0.1, "leave it out"),
        "rms_norm_ep": (1e-6, "did you mean 'rms_norm_eps'"),
        "sliding_window": (8, "leave it out"),
        "num_head": (2, "did you mean 'num_heads'"),
        "layer_type": (["full_attention"], "did you mean 'layer_types'"),
    }
    for name, (value, message) in errors.items():
        with pytest.raises(ValueError, match=f"{name}.*{message}"):
            ParaRNNConfig(**sizes, **{name: value})
    harmless = {"rope_scaling": None, "num_key_value_heads": 2, "head_dim": 4, "hidden_act": "silu"}
    more = {"attention_dropout": 0.0, "my_note": "kept", "max_position_embeddings": 64}
    more["rms_norm_eps"] = 1e-3  # another name of ours
    config = ParaRNNConfig(**sizes, **harmless, **more, num_labels=3, dtype="bfloat16")
    assert config.to_lm().norm_eps == config.layer_norm_eps == 1e-3
    again = ParaRNNConfig.from_dict(config.to_dict())
    assert again.to_dict() == config.to_dict()
    assert (again.my_note, again.num_labels, again.max_position_embeddings) == ("kept", 3, 64)


def test_configs_say_what_is_wrong():
    with pytest.raises(ValueError, match="num_hidden_layers = 3 layers, got 2"):
        ParaRNNConfig(num_hidden_layers=3, layer_types=["full_attention"] * 2)
    with pytest.raises(ValueError, match=r"layer_types may hold.*'mamba'"):
        ParaRNNConfig(num_hidden_layers=1, layer_types=["mamba"])
    plainly = LMConfig(hidden_size=8, num_hidden_layers=1, mixers=("mine",))
    with pytest.raises(
        ValueError, match=r"mixers may hold rnn, attention, matrix where .* got 'mine'"
    ):
        ParaRNNConfig.of_lm(plainly)
    small = {"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 5}
    with pytest.raises(CellError, match="PYTHONPATH"):
        ParaRNNForCausalLM(ParaRNNConfig(cell="nowhere.cells:Mine", **small))
    with pytest.raises(CellError, match="name one of"):
        ParaRNNModel(ParaRNNConfig(cell="nothing", **small))
