"""Recorded steps: the tokens of called ones, and recorded only where that changes nothing."""

from __future__ import annotations

import pytest
import torch
from lm_kinds import KINDS, plain, tokens
from recordings import recordings_of_run as recordings_of_run
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import pararnn
from pararnn.lm import LanguageModel, LMConfig, replay, sample
from pararnn.lm.cache import SteadyCache
from pararnn.lm.pages import NoRoom
from pararnn.lm.replay import WORTH, Recording, can_record, make_steady, replayable

STEADY = [kind for kind in KINDS if "attention" not in plain(kind).config.mixers]
LENGTH = WORTH + 3


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_steps_draw_the_same_tokens(kind: str, recordings_of_run: list[Recording]) -> None:
    """Of attention too, whose keys pass into other pages meanwhile."""
    model, prompt = plain(kind), tokens(3, 14)

    def draw(length: int, temperature: float) -> Tensor:
        return sample(model, prompt, length, temperature, torch.Generator().manual_seed(3))

    for temperature in (0, 1.0):
        draw(WORTH - 1, temperature)
        assert not recordings_of_run
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replay, "_records", lambda device: False)
            by_calls = draw(LENGTH, temperature)
        assert torch.equal(draw(LENGTH, temperature), by_calls)
        assert len(recordings_of_run) == 1
        recordings_of_run.clear()
    assert len(by_calls.unique()) > 3


def test_how_a_step_runs_is_chosen_before_it_is_recorded(
    recordings_of_run: list[Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in 8 bits are looked at for it, which a recording does not permit."""
    chosen = []
    monkeypatch.setattr(replay, "takes", lambda model, rows: chosen.append(rows))
    sample(plain("gru"), tokens(3, 5), LENGTH)
    assert (chosen, len(recordings_of_run)) == ([3], 1)


def test_a_steady_cache_owns_its_memory() -> None:
    """A prompt's states may be a view of what others read."""
    inputs, states = torch.randn(2, 3, 4), torch.randn(2, 1, 3)
    old_values = inputs.clone(), states.clone()
    cache = SteadyCache(inputs, states)
    views = cache.read()
    cache.keep(inputs + 1, states + 1)
    cache.keep(*cache.read())  # as mixers do that change theirs in place
    assert all(a is b for a, b in zip(cache.read(), views, strict=True))
    assert torch.equal(views[0], old_values[0] + 1)
    assert torch.equal(views[1], old_values[1] + 1)
    assert torch.equal(inputs, old_values[0])
    assert torch.equal(states, old_values[1])


def test_keys_that_grow_are_refused() -> None:
    with pytest.raises(RuntimeError, match="is not steady"):
        SteadyCache().extend(torch.zeros(1), torch.zeros(1))


@pytest.mark.parametrize("kind", KINDS)
def test_models_with_caches_of_fixed_size_are_recorded(
    kind: str, recordings_of_run: list[Recording]
) -> None:
    model = plain(kind)
    assert can_record(model) == (kind in STEADY)
    assert can_record(model, paged=True)
    sample(model, tokens(1, 3), LENGTH)
    assert len(recordings_of_run) == 1


@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_keys_have_room_for_the_tokens_to_come(length: int) -> None:
    """And no more than a page beside."""
    model, text = plain("hybrid"), tokens(2, length + 17)
    cache, called = model.new_cache(), model.new_cache()
    with torch.no_grad():
        for each in (cache, called):
            model(text[:, :length], each)
        make_steady(cache, 17)
        assert cache.places is not None
        assert 0 <= cache.places.table.shape[1] * 16 - length - 17 < 16
        for place in range(length, length + 17):
            token = text[:, place : place + 1]
            torch.testing.assert_close(model(token, cache), model(token, called))
            fork = model(text[:, :1], cache.fork(2))
            torch.testing.assert_close(fork, model(text[:, :1], called.fork(2)))
        pages = cache.places.table.shape[1] * 16
        rest = tokens(2, pages - length - 17)
        if rest.numel():
            torch.testing.assert_close(model(rest, cache), model(rest, called))
        with pytest.raises(NoRoom, match=f"rows of {pages} tokens go on by 1, .* {pages} tokens"):
            model(text[:, :1], cache)


def test_nothing_is_recorded_on_a_cpu() -> None:
    assert not replayable(plain("gru"), LENGTH)


class Branching(pararnn.Cell):
    """A cell whose steps depend on what the host has read."""

    states, gates, structure = ("h",), ("x",), "sequential"

    def step(self, state, gate, param):
        return gate.x if float(state.h.sum()) > 0 else state.h + gate.x


def test_cells_that_branch_are_not_recorded() -> None:
    assert not can_record(LanguageModel(LMConfig(16, 1, 61, cell=f"{__name__}:Branching")))


class Watched(Tensor):
    """A tensor that somebody watches over."""


WATCHED = {
    "a hook": lambda model: model.backbone.layers[0].mlp.register_forward_hook(print),
    "a hook before": lambda model: model.backbone.register_forward_pre_hook(print),
    "a forward of its own": lambda model: setattr(model.backbone.norm, "forward", print),
    "a compiler": lambda model: model.backbone.layers[1].compile(),
    "a parameter elsewhere": lambda model: model.backbone.norm.to("meta"),
    "a subclass": lambda model: setattr(
        model.backbone.norm, "weight", nn.Parameter(torch.ones(16).as_subclass(Watched))
    ),
}


@pytest.mark.parametrize("change", WATCHED)
def test_models_with_hooks_are_not_recorded(change: str) -> None:
    model = plain("gru")
    assert can_record(model)
    WATCHED[change](model)
    assert not can_record(model)


def test_nothing_is_recorded_under_modes_profilers_or_autocast() -> None:
    model = plain("gru")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not can_record(model)
    with FlopCounterMode(display=False):
        assert not can_record(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert not can_record(model)
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert not can_record(model)
    assert can_record(model)
