"""States in files: the same bits again, and no other model's."""

import pytest
import torch
from lm_kinds import KINDS, plain, tokens
from safetensors.torch import load_file, save_file

from pararnn.lm import StateError, load_state, sample, save_state
from pararnn.lm.quantise import quantise_weights


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_saved_state_continues_with_the_same_bits(kind, tmp_path):
    model, more = plain(kind), tokens(2, 5, seed=3)
    state = model.new_cache()
    model(tokens(2, 20), state)
    save_state(state, model, tmp_path / "state")
    again = load_state(plain(kind, solver="sequential", backend="torch"), tmp_path / "state")
    assert again.length == 20
    for one, other in zip(state.layers, again.layers, strict=True):
        assert vars(one).keys() == vars(other).keys()
        for a, b in zip(one.read(), other.read(), strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    reference = sample(model, more, 9, 0, state=state)
    assert torch.equal(sample(model, more, 9, 0, state=again), reference)
    assert torch.equal(model(more, state), model(more, again))


def test_another_models_state_raises(tmp_path):
    model, file = plain("gru"), tmp_path / "state"
    state = model.new_cache()
    model(tokens(1, 20), state)
    save_state(state, model, file)
    with torch.no_grad():
        model.backbone.layers[1].mixer.rnn.cell.float()
        other = plain("gru")
        other.backbone.norm.weight[3] += 1e-6
    for wrong, what in ((plain("lstm"), "config"), (other, "weights")):
        with pytest.raises(StateError, match=f"state of a model with another {what}"):
            load_state(wrong, file)
    with pytest.raises(StateError, match="another weights"):
        load_state(plain("gru", torch.bfloat16), file)
    with pytest.raises(StateError, match="there is no state"):
        load_state(model, tmp_path / "none")
    with pytest.raises(StateError, match="holds no state"):  # but files
        load_state(model, tmp_path)
    (tmp_path / "bad").write_bytes(b"nothing")
    with pytest.raises(StateError, match="holds no state"):
        load_state(model, tmp_path / "bad")
    save_file(load_file(file), tmp_path / "plain")
    with pytest.raises(StateError, match="its format is not"):
        load_state(model, tmp_path / "plain")


@pytest.mark.parametrize("name", ["nowhere/state", "file/state"])
def test_a_file_that_cannot_be_written_is_named(name, tmp_path):
    (tmp_path / "file").touch()
    model = plain("gru")
    with pytest.raises(StateError, match=f"{name} cannot be written: .*; name a file in a folder"):
        save_state(model.new_cache(), model, tmp_path / name)


def test_a_padded_cache_with_keys_is_not_saved(tmp_path):
    model, mask = plain("hybrid"), torch.ones(1, 6)
    mask[0, 0] = 0
    state = model.new_cache()
    model(tokens(1, 6), state, padding_mask=mask)
    with pytest.raises(StateError, match="a file holds no mask"):
        save_state(state, model, tmp_path / "state")
    assert not (tmp_path / "state").exists()


@pytest.mark.thorough
def test_weights_in_8_bits_are_another_model(tmp_path):
    pytest.importorskip("torchao")
    model = plain("gru")
    state = model.new_cache()
    model(tokens(1, 6), state)
    save_state(state, model, tmp_path / "state")
    quantise_weights(model, "int8")
    with pytest.raises(StateError, match="another weights"):
        load_state(model, tmp_path / "state")
