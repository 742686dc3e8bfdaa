"""Keys and values of a cache: all tokens in order, also in copies and after a crop."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from lm_kinds import cudnn_allowed
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pararnn.lm import LanguageModel, LMConfig, sample
from pararnn.lm import cache as caches
from pararnn.lm.cache import LEAST_FREE, LayerCache, PlainCache, copy_memory


def tokens(count: int, rows: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, 3, count, 4, dtype=dtype)


def check_extend(cache: PlainCache, parts: list[Tensor]) -> None:
    """Each call gives all so far; values are keys' negatives."""
    for number in range(len(parts)):
        keys, values = cache.extend(parts[number], -parts[number])
        reference = torch.cat(parts[: number + 1], 2)
        assert torch.equal(keys, reference)
        assert torch.equal(values, -reference)
        assert cache.keys is keys
        assert cache.values is values


@pytest.mark.parametrize("first", [1, 5, 9 * LEAST_FREE])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_cache_returns_all_tokens_in_order(first: int, gradients: bool) -> None:
    with torch.set_grad_enabled(gradients):
        check_extend(PlainCache(), [tokens(first), *(tokens(1) for _ in range(5)), tokens(700)])


@torch.no_grad()
def test_most_additions_copy_no_tokens() -> None:
    cache = PlainCache()
    addresses = set()
    for _ in range(2 * LEAST_FREE):
        keys, _ = cache.extend(tokens(1), tokens(1))
        addresses.add(keys.data_ptr())
    assert len(addresses) <= 4
    assert keys.shape[2] == 2 * LEAST_FREE


@torch.no_grad()
@pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy])
def test_copies_of_a_cache_are_independent(copy_of: object) -> None:
    start = [tokens(3), tokens(1)]
    one = PlainCache()
    check_extend(one, start)
    other = copy_of(one)  # type: ignore[operator]
    for _ in range(3):
        ours, theirs = tokens(1), tokens(1)
        one.extend(ours, ours)
        other.extend(theirs, theirs)
        start.append(theirs)
    assert one.keys is not None
    assert torch.equal(other.keys, torch.cat(start, 2))
    assert not torch.equal(one.keys, other.keys)


@torch.no_grad()
def test_cropped_and_selected_caches_continue() -> None:
    cache = PlainCache()
    start = tokens(6)
    check_extend(cache, [start[:, :, :5], start[:, :, 5:]])
    earlier = cache.keys
    assert earlier is not None
    assert cache.values is not None
    cache.keys, cache.values = earlier[:, :, :4], cache.values[:, :, :4]
    more = tokens(1)
    keys, _ = cache.extend(more, more)
    assert torch.equal(keys, torch.cat([start[:, :, :4], more], 2))
    assert torch.equal(earlier, start)
    cache.keys, cache.values = keys[:1], cache.values[:1]
    keys, _ = cache.extend(more[:1], more[:1])
    assert torch.equal(keys, torch.cat([start[:1, :, :4], more[:1], more[:1]], 2))


@torch.no_grad()
def test_rows_and_dtypes_are_not_changed_silently() -> None:
    cache = PlainCache()
    half = tokens(1, dtype=torch.bfloat16)
    cache.extend(half, half)
    cache.extend(half, half)
    more = tokens(1)
    assert torch.equal(cache.extend(more, more)[0], torch.cat([half, half, more], 2))
    with pytest.raises(RuntimeError, match="match"):
        cache.extend(tokens(1, rows=1), tokens(1, rows=1))


def test_gradients_of_every_call_reach_all_tokens() -> None:
    """As attention's are, which keeps the keys of each call for its backward pass."""
    parts = [tokens(2).requires_grad_() for _ in range(3)]
    cache = PlainCache()
    losses = []
    for part in parts:
        keys, values = cache.extend(part, 2 * part)
        losses.append((keys * values).sum())
    torch.stack(losses).sum().backward()
    for calls, part in zip((3, 2, 1), parts, strict=True):
        assert part.grad is not None
        torch.testing.assert_close(part.grad, 4 * calls * part.detach())


def test_caches_from_inference_mode_continue_outside() -> None:
    cache = PlainCache()
    parts = [tokens(1) for _ in range(5)]
    with torch.inference_mode():
        check_extend(cache, parts[:3])
    with torch.no_grad():
        cache.extend(parts[3], parts[3])
        keys, _ = cache.extend(parts[4], parts[4])
    assert torch.equal(keys, torch.cat(parts, 2))


MIXERS = {"attention": ("attention", "attention"), "hybrid": ("rnn", "attention")}


def model_and_record(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> tuple[LanguageModel, list[bool]]:
    """Return a model, and a list as of `cudnn_allowed`."""
    config = LMConfig(32, 2, 61, num_attention_heads=2, mixers=MIXERS[kind])
    return LanguageModel(config), cudnn_allowed(monkeypatch)


@pytest.mark.parametrize("kind", MIXERS)
def test_growing_caches_do_not_use_cudnn(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model, flags = model_and_record(monkeypatch, kind)
    row = torch.randint(61, (1, 9))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        sample(model, row, 4)
        assert not any(flags)
        assert len(flags) == 4 * MIXERS[kind].count("attention")
        flags.clear()
        model(row)  # one length, which trainings repeat
        model(row, model.new_cache())  # gradients are asked for
        with torch.no_grad():
            model(row)
        assert all(flags)
        assert flags
        assert torch.backends.cuda.cudnn_sdp_enabled()


def test_caches_of_a_fixed_length_may_use_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's kernels read many rows' keys in less time, and are planned once."""
    model, flags = model_and_record(monkeypatch, "attention")
    monkeypatch.setattr(PlainCache, "grows", False)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        sample(model, torch.randint(61, (1, 9)), 2)
    assert all(flags)
    assert flags


def test_a_single_allowed_kernel_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model, flags = model_and_record(monkeypatch, "attention")
    row = torch.randint(61, (1, 9))
    with sdpa_kernel(SDPBackend.MATH):
        sample(model, row, 1)
        assert not any(flags)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    flags.clear()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), contextlib.suppress(RuntimeError):
        sample(model, row, 1)  # without a GPU there is no such kernel
    assert all(flags)
    assert flags


def test_an_error_restores_the_choice_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = model_and_record(monkeypatch, "attention")
    monkeypatch.setattr(F, "scaled_dot_product_attention", None)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        with pytest.raises(TypeError):
            sample(model, torch.randint(61, (1, 9)), 1)
        assert torch.backends.cuda.cudnn_sdp_enabled()


def test_memory_is_copied_by_a_call_for_each_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for several dtypes would be a kernel for each tensor."""
    calls, copy_all = [], caches.foreach_copy

    def foreach_copy(to, values):
        calls.append({(one.dtype, other.dtype) for one, other in zip(to, values, strict=True)})
        copy_all(to, values)

    monkeypatch.setattr(caches, "foreach_copy", foreach_copy)

    def layer(inputs=torch.bfloat16):
        return LayerCache(torch.randn(2, 3).to(inputs), torch.randn(2, 4))

    sources = [layer(), layer(), LayerCache(None, torch.randn(2, 4)), layer(), LayerCache()]
    targets = [layer(), layer(), layer(), layer(torch.float32), layer()]
    targets[0].states = sources[0].states
    before = targets[2].inputs.clone()
    copy_memory(sources, targets)
    half, single = torch.bfloat16, torch.float32
    assert calls == [{(half, half)}, {(single, single)}, {(single, half)}]
    for source, target in zip(sources, targets, strict=True):
        for new, held in zip(source.read(), target.read(), strict=True):
            assert new is None or torch.equal(new.to(held.dtype), held)
    assert torch.equal(targets[2].inputs, before)
    calls.clear()
    copy_memory([LayerCache()], [layer()])
    assert not calls
