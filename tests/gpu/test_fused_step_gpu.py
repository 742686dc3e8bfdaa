"""Steps and passes in five kernels a layer, against calls in float64 and each other."""

from functools import partial

import pytest
import torch
from relative import relative_error

from pararnn.codegen.mixing_cuda import shared_bytes_of
from pararnn.lm import LanguageModel, fused_step, replay, sample
from pararnn.lm.cache import SteadyCache
from pararnn.lm.config import LMConfig
from pararnn.lm.quantise import is_quantised, quantise_weights
from pararnn.lm.replay import next_logits
from pararnn.zoo import CELLS

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
VOCABULARY = 700


def model_of(dtype, cell="gru", width=512, **options):
    torch.manual_seed(0)
    config = LMConfig(width, 2, vocab_size=VOCABULARY, cell=cell, **{"num_heads": 4, **options})
    model = LanguageModel(config, device="cuda", dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name or "scale" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def in_float64(model):
    """A copy whose weights are plain and have the values of the model's."""
    exact = LanguageModel(model.config, device="cuda", dtype=torch.float64).eval()
    values = {
        name: value.dequantize() if is_quantised(value) else value
        for name, value in model.state_dict().items()
    }
    exact.load_state_dict(values)
    return exact


@torch.no_grad()
def errors(model, steps=4, rows=1):
    """Relative errors of fused steps and of called ones, next to calls in float64."""
    exact = in_float64(model)
    tokens = torch.randint(VOCABULARY, (rows, 6 + steps), device="cuda")
    caches = [each.new_cache() for each in (model, exact, model)]
    for each, cache in zip((model, exact, model), caches, strict=True):
        next_logits(each, tokens[:, :6], cache)
    replay.make_steady(caches[0], steps)
    result = []
    for place in range(6, 6 + steps):
        column = tokens[:, place]
        mine = fused_step.fused_logits(model, column, caches[0])
        reference = next_logits(exact, column[:, None], caches[1])
        other = next_logits(model, column[:, None], caches[2])
        result.append([relative_error(each, reference) for each in (mine, other)])
    for own, other in zip(caches[0].layers, caches[1].layers, strict=True):
        if own.states is not None:
            assert relative_error(own.states, other.states) < BOUNDS[model.lm_head.weight.dtype]
    return result


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_steps_are_as_near_to_float64_as_calls(cell, dtype):
    model = model_of(dtype, cell)
    assert fused_step.takes(model, 1)
    for own_error, call_error in errors(model):
        assert own_error < max(BOUNDS[dtype] / 4, 1.5 * call_error)


@pytest.mark.parametrize("rows", [2, 8, 17, 40, 64])
@pytest.mark.parametrize("width", [512, 1024, 2048])
def test_several_rows(width, rows):
    model = model_of(torch.bfloat16, "lstm" if rows == 40 else "gru", width)
    assert fused_step.takes(model, rows)
    for own_error, call_error in errors(model, rows=rows):
        assert own_error < max(5e-3, 2 * call_error)


@pytest.mark.parametrize("rows", [1, 2, 16, 21, 64])
@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_weights_in_8_bits(weights, rows):
    pytest.importorskip("torchao")
    model = model_of(torch.bfloat16, "lstm" if rows == 21 else "gru")
    assert not fused_step.takes(model, 9)
    quantise_weights(model, weights)
    assert fused_step.takes(model, rows)
    assert not fused_step.takes(model, 65)
    for own_error, call_error in errors(model, rows=rows):
        assert own_error < max(5e-3, 2 * call_error)


def test_weights_in_8_bits_of_one_row_in_float32():
    pytest.importorskip("torchao")
    model = model_of(torch.float32)
    quantise_weights(model, "int8")
    assert fused_step.takes(model, 1)
    assert not fused_step.takes(model, 2)
    assert max(own_error for own_error, _ in errors(model)) < 1e-5


@pytest.mark.parametrize("cell", CELLS)
def test_cells_that_have_kernels_step_as_they_are_called(cell):
    try:
        model = model_of(torch.float32, cell, width=64)
    except ValueError:
        model = model_of(torch.float32, cell, width=64, num_heads=1)
    if not fused_step.takes(model, 1):
        pytest.skip("has no fused step")
    for own_error, call_error in errors(model):
        assert own_error < max(1e-5, 4 * call_error)


@pytest.mark.parametrize(
    "options",
    [{"conv_kernel_size": 1}, {"conv_kernel_size": 2}, {"width": 96, "num_heads": 3},
     {"num_heads": 1, "intermediate_size": 1000}, {"tie_word_embeddings": True}],
    ids=str,
)  # fmt: skip
def test_other_sizes(options):
    model = model_of(torch.float32, **options)
    assert fused_step.takes(model, 1)
    assert max(own_error for own_error, _ in errors(model)) < 1e-5


HYBRID = {"mixers": ("attention", "rnn"), "num_attention_heads": 8}


OTHERS = {
    "attention": {"cell": "lstm", **HYBRID},
    "attention alone": {"mixers": ("attention",) * 2, "num_attention_heads": 8},
    "transformer": {"mixers": ("attention",) * 2, "num_attention_heads": 8, "norm": "layer"},
    "no query norms": {"mixers": ("attention",) * 2, "num_attention_heads": 8, "qk_norm": False},
    "layer norms": {"cell": "lstm", **HYBRID, "norm": "layer"},
    "matrix": {"cell": "gated-delta", "mixers": ("matrix",) * 2},
    "mixing": {"cell": "head-lstm"},
}


@pytest.mark.parametrize("weights", [None, "int8"], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8, 40])
@pytest.mark.parametrize("kind", OTHERS)
def test_mixers_without_kernels_are_called_between_them(kind, rows, weights):
    model = model_of(torch.bfloat16, **OTHERS[kind])
    if weights:
        pytest.importorskip("torchao")
        quantise_weights(model, weights)
    assert fused_step.takes(model, rows)
    assert not fused_step.takes(model, 1, 2)
    for own_error, call_error in errors(model, rows=rows, steps=20):
        assert own_error < max(5e-3, 2 * call_error)


@pytest.mark.parametrize("options", [{}, HYBRID, {"mixers": ("attention",) * 2}], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_recorded_samples_are_those_of_calls(options, rows, monkeypatch):
    """In float32: no two logits are as near as rounding. Keys pass into later pages."""
    model = model_of(torch.float32, **options)
    prompt = torch.randint(VOCABULARY, (rows, 13), device="cuda")
    text, log_probs = sample(model, prompt, 60, 0, return_log_probs=True)
    monkeypatch.setattr(replay, "replayable", lambda *_, **__: False)
    called = sample(model, prompt, 60, 0, return_log_probs=True)
    assert torch.equal(text, called[0])
    torch.testing.assert_close(log_probs, called[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 5])
def test_recorded_samples_have_the_bits_of_calls(rows, monkeypatch):
    model = model_of(torch.bfloat16, batch_invariant=True, **HYBRID)
    prompt = torch.randint(VOCABULARY, (rows, 13), device="cuda")
    draw = partial(sample, model, prompt, 60, 0, return_log_probs=True)
    recorded = draw()
    monkeypatch.setattr(replay, "replayable", lambda *_, **__: False)
    assert all(map(torch.equal, recorded, draw()))


def test_samples_of_one_row_are_fused(monkeypatch):
    """In float32 the texts are those of calls: no two logits are as near as rounding."""
    model, prompt = model_of(torch.float32), torch.arange(5, device="cuda").unsqueeze(0)
    steps = []
    monkeypatch.setattr(
        replay, "fused_logits", lambda *args: steps.append(1) or fused_step.fused_logits(*args)
    )
    text = sample(model, prompt, 40, 0)
    assert len(steps) == 2  # a first one, and the recorded one
    monkeypatch.setattr(replay, "replayable", lambda *_, **__: False)
    assert torch.equal(text, sample(model, prompt, 40, 0))


SIZES_OF_1B = {"width": 2048, "intermediate_size": 5632, "num_heads": 4}
"""With them, products have the tiles of the 1B model."""
PASSES = [
    (torch.bfloat16, None, "gru", SIZES_OF_1B, 1, 8),
    (torch.bfloat16, None, "gru", SIZES_OF_1B, 1, 3),
    (torch.bfloat16, "int8", "gru", SIZES_OF_1B, 1, 8),
    (torch.bfloat16, "fp8", "gru", SIZES_OF_1B, 1, 5),
    (torch.bfloat16, "int8", "lstm", {}, 2, 4),
    (torch.float16, None, "lstm", {"conv_kernel_size": 2}, 2, 3),
    (torch.float32, None, "gru", {}, 1, 4),
    (torch.float32, None, "lstm", {}, 1, 8),
    (torch.float32, None, "gru", {"width": 1024}, 2, 4),
    (torch.float32, None, "lstm", {"width": 256, "intermediate_size": 512}, 1, 7),
    (torch.bfloat16, None, "lstm", {"width": 256, "intermediate_size": 512}, 1, 7),
    (torch.bfloat16, None, "lstm", {"width": 1024}, 1, 8),
    (torch.float32, None, "lem", {"width": 96, "num_heads": 3, "conv_kernel_size": 1}, 3, 2),
    (torch.bfloat16, None, "gru", {"num_heads": 1, "intermediate_size": 1008}, 1, 6),
    (torch.float32, None, "gru", {"norm": "layer"}, 1, 8),
    (torch.bfloat16, None, "lstm", {"norm": "layer"}, 2, 4),
]
"""A dtype, a format of weights, a cell, sizes, rows, and tokens of a pass."""


@pytest.mark.parametrize(("dtype", "weights", "cell", "options", "rows", "count"), PASSES, ids=str)
@torch.no_grad()
def test_passes_have_the_bits_of_steps(dtype, weights, cell, options, rows, count):
    """Of one row by itself too; and they leave the cache as it is."""
    model = model_of(dtype, cell, **options)
    if weights:
        pytest.importorskip("torchao")
        quantise_weights(model, weights)
    assert fused_step.takes(model, rows, count)
    assert fused_step.takes(model, rows)
    text = torch.randint(VOCABULARY, (rows, 6 + count), device="cuda")
    cache, exact = model.new_cache(), in_float64(model)
    next_logits(model, text[:, :6], cache)
    replay.make_steady(cache)
    single, before = cache.fork(rows), cache.fork(rows)
    single.layers = [
        SteadyCache(*(None if x is None else x[-1:] for x in layer.read()))
        for layer in cache.layers
    ]
    logits, memories = fused_step.fused_pass(model, text[:, 6:], cache)
    for layer, old in zip(cache.layers, before.layers, strict=True):
        assert all(
            a is b or torch.equal(a, b) for a, b in zip(layer.read(), old.read(), strict=True)
        )
    bound = 1e-5 if dtype == torch.float32 else 4e-2
    assert relative_error(logits, exact(text)[:, 6:].flatten(0, 1)) < bound
    assert relative_error(model.lm_head(memories[-1][1]).flatten(0, 1), logits) < bound
    for place in range(count):
        column = text[:, 6 + place]
        step = fused_step.fused_logits(model, column, cache)
        assert torch.equal(step, logits.view(rows, count, -1)[:, place]), place
        assert torch.equal(fused_step.fused_logits(model, column[-1:], single), step[-1:]), place
        for layer, memory in zip(cache.layers, memories, strict=False):
            for old, new in zip(layer.read(), memory, strict=True):
                assert old is new or torch.equal(old, new[:, place]), place


@torch.no_grad()
def test_a_first_pass_compiles_its_kernels_at_once(monkeypatch):
    from triton.runtime import _async_compile
    from triton.runtime.jit import JITFunction

    model = model_of(torch.bfloat16, width=320, num_heads=5, intermediate_size=688)
    tokens, cache = torch.arange(4, device="cuda").unsqueeze(0), model.new_cache()
    next_logits(model, tokens, cache)
    replay.make_steady(cache)
    compile_one, counts = JITFunction._do_compile, []

    def compile_at_once(self, *args):
        assert _async_compile.active_mode.get() is not None, "a launch compiles"
        counts.append(1)
        return compile_one(self, *args)

    monkeypatch.setattr(JITFunction, "_do_compile", compile_at_once)
    fused_step.fused_pass(model, tokens[:, :3], cache)
    assert len(counts) >= 6
    counts.clear()
    fused_step.fused_pass(model, tokens[:, :3] + 1, cache)
    assert not counts


@torch.no_grad()
def test_less_shared_memory_has_smaller_tiles(monkeypatch):
    """Those of a GPU with 99 KiB a program."""
    shared = shared_bytes_of((12, 0))
    monkeypatch.setattr(fused_step, "shared_bytes_of", lambda _: shared)
    for own_error, call_error in errors(model_of(torch.bfloat16, width=1024), rows=64):
        assert own_error < max(5e-3, 2 * call_error)


def test_what_has_no_fused_step():
    model = model_of(torch.float32)
    assert not fused_step.takes(model, 9)
    assert fused_step.takes(model, 2, 4)
    assert not fused_step.takes(model, 3, 3)
    assert not fused_step.takes(model_of(torch.float32, intermediate_size=1000), 2)
    assert not fused_step.takes(model.cpu(), 1)
    assert not fused_step.takes(model_of(torch.float64), 1)
    attention = LMConfig(64, 2, vocab_size=50, mixers=("rnn", "attention"), num_attention_heads=2)
    assert not fused_step.takes(LanguageModel(attention, device="cuda"), 1, 2)
