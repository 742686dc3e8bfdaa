"""A decoding step in five kernels a layer, against calls in float64."""

import pytest
import torch
from relative import relative_error

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
    caches[0].layers = [SteadyCache(*layer.read()) for layer in caches[0].layers]
    result = []
    for place in range(6, 6 + steps):
        column = tokens[:, place]
        mine = fused_step.fused_logits(model, column, caches[0])
        reference = next_logits(exact, column[:, None], caches[1])
        other = next_logits(model, column[:, None], caches[2])
        result.append([relative_error(each, reference) for each in (mine, other)])
    for own, other in zip(caches[0].layers, caches[1].layers, strict=True):
        assert relative_error(own.states, other.states) < BOUNDS[model.lm_head.weight.dtype]
    return result


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_steps_are_as_near_to_float64_as_calls(cell, dtype):
    model = model_of(dtype, cell)
    assert fused_step.takes(model, 1)
    for own_error, call_error in errors(model):
        assert own_error < max(BOUNDS[dtype] / 4, 1.5 * call_error)


@pytest.mark.parametrize("rows", [1, 2, 16, 21, 64])
@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_weights_in_8_bits(weights, rows):
    pytest.importorskip("torchao")
    model = model_of(torch.bfloat16, "lstm" if rows == 21 else "gru")
    assert not fused_step.takes(model, 2)
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


def test_samples_of_one_row_are_fused(monkeypatch):
    """In float32 the texts are those of calls: no two logits are as near as rounding."""
    model, prompt = model_of(torch.float32), torch.arange(5, device="cuda").unsqueeze(0)
    steps = []
    monkeypatch.setattr(
        replay, "fused_logits", lambda *args: steps.append(1) or fused_step.fused_logits(*args)
    )
    text = sample(model, prompt, 40, 0)
    assert len(steps) == 2  # a first one, and the recorded one
    monkeypatch.setattr(replay, "replayable", lambda *_: False)
    assert torch.equal(text, sample(model, prompt, 40, 0))


def test_what_has_no_fused_step():
    model = model_of(torch.float32)
    assert not fused_step.takes(model, 2)
    assert not fused_step.takes(model.cpu(), 1)
    assert not fused_step.takes(model_of(torch.float64), 1)
    assert not fused_step.takes(model_of(torch.float32, norm="layer"), 1)
    attention = LMConfig(64, 2, vocab_size=50, mixers=("rnn", "attention"), num_attention_heads=2)
    assert not fused_step.takes(LanguageModel(attention, device="cuda"), 1)
