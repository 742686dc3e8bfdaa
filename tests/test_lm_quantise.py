"""Weights in 8 bits: what is quantised, what a model computes with them, and what raises."""

import pickle
import sys

import pytest
import torch
from lm_kinds import hugging, plain, tokens
from relative import relative_error
from torch import nn

from pararnn.base.errors import MissingExtra
from pararnn.lm import CheckpointError, QuantiseError, quantise_weights, sample, save_checkpoint
from pararnn.lm.quantise import DTYPES, is_readable, matrix_of

pytest.importorskip("torchao")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def _values(linear):
    numbers, scale = matrix_of(linear.weight)
    return numbers.float() if scale is None else numbers.float() * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weights", DTYPES)
def test_linear_layers_are_what_the_kernels_read(weights, dtype):
    model, exact = plain("gru", dtype), plain("gru", dtype)
    quantise_weights(model, weights)
    originals = dict(exact.named_modules())
    for name, part in model.named_modules():
        if not isinstance(part, nn.Linear):
            continue
        assert is_readable(part.weight)
        assert part.weight.dtype == dtype
        assert matrix_of(part.weight).numbers.dtype == DTYPES[weights]
        old = originals[name].weight.float()
        steps = {"int8": old.abs().amax(1, keepdim=True) / 127, "fp8": old.abs() / 8 + 2e-3}
        assert ((_values(part) - old).abs() <= 0.51 * steps[weights]).all()
        part.weight = nn.Parameter(_values(part).to(dtype))
    text = tokens(2, 12)
    reference = model(text)
    quantise_weights(exact, weights)
    limit = 1e-5 if dtype == torch.float32 else 3e-2
    assert relative_error(exact(text), reference) < limit
    assert not torch.equal(reference, plain("gru", dtype)(text))


def test_shared_heads_and_gates_stay(monkeypatch):
    model = plain("tied")
    quantise_weights(model, "int8")
    assert model.lm_head.weight is model.embed_tokens.weight
    assert matrix_of(model.lm_head.weight).scale is None
    assert type(model.backbone.blocks[0].mixer.rnn.proj.weight) is nn.Parameter
    assert matrix_of(model.backbone.blocks[0].mlp.up_proj.weight).scale is not None
    assert sample(model, tokens(2, 3), 4, 0).shape == (2, 4)


def test_models_of_transformers_are_quantised(tmp_path):
    model = hugging("gru")
    quantise_weights(model, "fp8")
    assert matrix_of(model.lm_head.weight).numbers.dtype == torch.float8_e4m3fn
    out = model.generate(tokens(1, 4), max_new_tokens=3, do_sample=False)
    assert out.shape == (1, 7)
    with pytest.raises(CheckpointError, match="save a model before quantise_weights"):
        model.save_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", DTYPES)
def test_lines_of_zeros_and_of_tiny_numbers_stay_finite(weights, dtype):
    """A pruned line, or a matrix that starts from zero, has no factor to divide by."""
    layers = nn.Sequential(nn.Linear(17, 5), nn.Linear(5, 3, bias=False)).to(dtype)
    with torch.no_grad():
        layers[0].weight[2] = 0
        layers[0].weight[3] = 1e-40  # less than the least factor
        layers[0].weight[4, 1] = 1e4
        layers[1].weight.zero_()
    x = torch.randn(4, 17, dtype=dtype)
    exact = layers[0](x).float()
    quantise_weights(layers, weights)
    values = _values(layers[0])
    assert values[2:4].abs().le(1e-39).all()
    assert values[4, 1].sub(1e4).abs() < 60
    assert (layers[0](x).float() - exact)[:, :4].abs().max() < 0.2
    assert torch.equal(layers(x), torch.zeros(4, 3, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("largest", [1.6e-5, 1.4e-5, 1e-8, 1e-20, 1e-30])
@pytest.mark.parametrize("weights", DTYPES)
def test_small_lines_have_as_many_digits(weights, largest, dtype):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 5, bias=False)).to(dtype)
    with torch.no_grad():
        layers[0].weight[1:3] *= largest / layers[0].weight[1:3].abs().amax()
    exact, x = layers[0].weight.detach().float(), torch.randn(3, 64, dtype=dtype)
    y = layers(x).float()
    quantise_weights(layers, weights)
    sizes = exact.abs().amax(1, keepdim=True)
    assert ((_values(layers[0]) - exact).abs() <= sizes / (240 if weights == "int8" else 28)).all()
    assert ((layers(x).float() - y).abs().amax(0) < 0.2 * y.abs().amax(0)).all()


def test_a_quantised_model_pickles():
    model = plain("gru")
    quantise_weights(model, "int8")
    text = tokens(1, 5)
    assert torch.equal(pickle.loads(pickle.dumps(model))(text), model(text))


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_a_quantised_model_is_saved_by_torch(weights, tmp_path):
    model = plain("gru")
    quantise_weights(model, weights)
    torch.save(model, tmp_path / "model.pt")
    text = tokens(1, 5)
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(again(text), model(text))


def test_what_raises(tmp_path, monkeypatch):
    model = plain("gru")
    with pytest.raises(QuantiseError, match="one of int8, fp8, got 'int4'"):
        quantise_weights(model, "int4")
    with pytest.raises(QuantiseError, match="has no linear layers"):
        quantise_weights(nn.Embedding(3, 4), "int8")
    quantise_weights(model, "int8")
    with pytest.raises(QuantiseError, match="quantise a model once"):
        quantise_weights(model, "int8")
    with pytest.raises(CheckpointError, match="save a model before quantise_weights"):
        save_checkpoint(model, tmp_path)
    broken = nn.Linear(3, 4)
    broken.weight.data[1, 2] = torch.inf
    for layer, match in ((broken, "not finite"), (nn.Linear(3, 4).double(), "by float")):
        with pytest.raises(QuantiseError, match=rf"0\.weight .*{match}"):
            quantise_weights(nn.Sequential(layer), "int8")
        assert type(layer.weight) is nn.Parameter
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(MissingExtra, match=r"pip install -e '\.\[quantise\]'"):
        quantise_weights(plain("gru"), "int8")


def test_other_weights_of_torchao_are_not_read():
    """Neither groups of columns nor numbers with a zero point have kernels."""
    from torchao.quantization import Int8WeightOnlyConfig, PerGroup, quantize_

    linear = nn.Linear(64, 32, bias=False)
    quantize_(linear, Int8WeightOnlyConfig(granularity=PerGroup(32)))
    assert not is_readable(linear.weight)
    linear = nn.Linear(64, 32, bias=False)
    quantize_(linear, Int8WeightOnlyConfig())
    assert is_readable(linear.weight)
    linear.weight.zero_point[3] = 1
    assert not is_readable(linear.weight)
