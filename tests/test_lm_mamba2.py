"""Mamba2 of the benchmarks against transformers', with plain functions in place of kernels."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import lm_decode
import mamba2

from pararnn.lab.tasks.mamba2 import scan
from pararnn.lm import sample

SIZES = mamba2.TINY


def small_model() -> mamba2.LanguageModel:
    torch.manual_seed(0)
    return mamba2.language_model(SIZES).eval()


def theirs(model: mamba2.LanguageModel) -> torch.nn.Module:
    """Build transformers' model with the same parameters."""
    transformers = pytest.importorskip("transformers")
    other = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**SIZES)).eval()
    state = {
        "backbone.embeddings.weight": model.embed_tokens.weight,
        "backbone.norm_f.weight": model.backbone.norm.weight,
        "lm_head.weight": model.lm_head.weight,
    }
    for index, block in enumerate(model.backbone.layers):
        mixer, at = block.mixer, f"backbone.layers.{index}."
        own = {
            "dt_bias": mixer.dt_bias,
            "A_log": mixer.a_log,
            "D": mixer.skip,
            "conv1d.weight": mixer.conv_weight.T.unsqueeze(1),
            "conv1d.bias": mixer.conv_bias,
            "norm.weight": mixer.norm.weight,
            "out_proj.weight": mixer.out_proj.weight,
            "in_proj.weight": torch.cat(
                [mixer.gate_proj.weight, mixer.in_proj.weight, mixer.small_proj.weight]
            ),
        }
        state |= {f"{at}norm.weight": block.mixer_norm.weight}
        state |= {f"{at}mixer.{name}": value for name, value in own.items()}
    other.load_state_dict(state)
    return other


@torch.no_grad()
def test_logits_are_those_of_transformers() -> None:
    model = small_model()
    tokens = torch.randint(50, (2, 30))
    torch.testing.assert_close(model(tokens), theirs(model)(tokens).logits, rtol=0, atol=1e-4)


@torch.no_grad()
def test_steps_of_one_token_give_the_logits_of_the_row() -> None:
    model = small_model()
    tokens = torch.randint(50, (2, 12))
    logits = model(tokens)
    mamba2.ready_to_decode(model)
    torch.testing.assert_close(model(tokens), logits)
    cache = model.new_cache()
    parts = [model(token, cache) for token in tokens.split(1, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), logits, rtol=0, atol=1e-5)
    assert sample(model, tokens[:, :1], 3, temperature=0).shape == (2, 3)


def test_unsupported_inputs_and_sizes_raise() -> None:
    model = small_model()
    tokens = torch.randint(50, (1, 12))
    with pytest.raises(ValueError, match="no packed documents"):
        model(tokens, cu_seq_lens=torch.tensor([0, 5, 12]))
    with pytest.raises(RuntimeError, match="ready_to_decode"):
        model(tokens[:, :1], model.new_cache())
    mamba2.ready_to_decode(model)
    with pytest.raises(ValueError, match="a token at a time"):
        model(tokens, model.new_cache())
    with pytest.raises(ValueError, match="n_groups must be 1, got 2"):
        mamba2.language_model({**SIZES, "n_groups": 2})


def plain(x, dt, a, b, c, skip, bias):
    dt = F.softplus(dt + bias)
    return scan(x * dt.unsqueeze(-1), dt * a, b[:, :, 0], c[:, :, 0]) + x * skip.unsqueeze(-1)


def plain_backward(grad, x, dt, a, b, c, out, chunk, *, D, dt_bias, dt_softplus):
    """In the order in which mamba-ssm's function returns gradients."""
    assert dt_softplus
    assert chunk == mamba2.CHUNK
    inputs = [part.detach().requires_grad_() for part in (x, dt, a, b, c, D, dt_bias)]

    def backward():
        y = plain(*inputs)
        torch.testing.assert_close(out, y.detach())
        return torch.autograd.grad(y, inputs, grad)

    with ThreadPoolExecutor(1) as other:  # an operator's own thread records no gradients
        *grads, bias = other.submit(backward).result()
    return *grads, None, bias, None


@pytest.fixture
def forward_calls(monkeypatch) -> list[int]:
    """Put plain functions in the place of mamba-ssm's; the list has an entry a forward pass."""
    calls = []

    def plain_forward(x, dt, a, b, c, chunk, *, D, dt_bias, dt_softplus):
        calls.append(1)
        return plain(x, dt, a, b, c, D, dt_bias), None, None

    module = SimpleNamespace(
        _mamba_chunk_scan_combined_fwd=plain_forward, _mamba_chunk_scan_combined_bwd=plain_backward
    )
    monkeypatch.setattr(mamba2, "kernels", lambda name: module)
    return calls


def by_operator(x, dt, a, b, c, skip, bias):
    return mamba2.ssd(x, dt, a, b.unsqueeze(2), c.unsqueeze(2), skip, bias, mamba2.CHUNK)


@pytest.mark.usefixtures("forward_calls")
def test_the_operator_has_the_recurrences_gradients() -> None:
    torch.manual_seed(0)
    x, b, c = torch.randn(2, 20, 3, 4), torch.randn(2, 20, 5), torch.randn(2, 20, 5)
    dt, a, skip, bias = torch.randn(2, 20, 3), -torch.rand(3), torch.randn(3), torch.randn(3)
    inputs = [part.requires_grad_() for part in (x, dt, a, b, c, skip, bias)]
    right, y = mamba2.recurrence(*inputs), by_operator(*inputs)
    torch.testing.assert_close(y, right)
    grad = torch.randn_like(y)
    reference = torch.autograd.grad(right, inputs, grad)
    torch.testing.assert_close(torch.autograd.grad(y, inputs, grad), reference)


@pytest.mark.thorough
def test_its_blocks_compile_to_one_graph(monkeypatch, forward_calls) -> None:
    """By the operator, which a CPU would not take; its results are kept, not computed again."""
    model = small_model().train()
    tokens = torch.randint(50, (2, 16))
    parameters = list(model.parameters())
    right = model.loss(tokens)
    reference = torch.autograd.grad(right, parameters)
    monkeypatch.setattr(mamba2, "recurrence", by_operator)
    for block in model.backbone.layers:
        block.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    loss = model.loss(tokens)
    torch.testing.assert_close(loss, right)
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), reference)
    assert len(forward_calls) == len(model.backbone.layers)


@pytest.mark.parametrize("compile", [False, True])
@torch.no_grad()
def test_a_token_by_the_kernel(compile: bool, monkeypatch) -> None:
    """The cache's states change in place, in compiled blocks too."""
    model = small_model()
    tokens = torch.randint(50, (2, 6))
    right = model(tokens)
    mamba2.ready_to_decode(model)
    plain_advance = mamba2.advance

    def plain_update(states, x, dt, a, b, c, skip, dt_bias, dt_softplus):
        assert dt_softplus
        dt, a, skip, bias = dt[..., 0], a[..., 0, 0], skip[..., 0], dt_bias[..., 0]
        return plain_advance(states, x, dt, a, b[:, 0], c[:, 0], skip, bias)

    module = SimpleNamespace(selective_state_update=plain_update)
    monkeypatch.setattr(mamba2, "kernels", lambda name: module)
    monkeypatch.setattr(mamba2, "advance", mamba2.advance_by_kernel)
    cache = lm_decode.cache_of(model, lm_decode.Case("", mamba2.TINY, "eager", 2, 1))
    parts = [model(tokens[:, :1], cache)]
    if compile:
        for block in model.backbone.layers:
            block.compile(fullgraph=True, backend="aot_eager")
    states = [layer.states for layer in cache.layers]
    parts += [model(token, cache) for token in tokens[:, 1:].split(1, 1)]
    assert all(layer.states is old for layer, old in zip(cache.layers, states, strict=True))
    torch.testing.assert_close(torch.cat(parts, 1), right, rtol=0, atol=1e-5)
