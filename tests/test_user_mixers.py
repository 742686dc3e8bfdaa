"""Mixers that a user defines, by import path: trained, resumed, saved, loaded, generated from."""

import json

import pytest
import torch
from lm_kinds import VOCABULARY, options, tokens
from overrides import resolved

pytest.importorskip("transformers")

from test_train_trainer import Packed, config, losses, run_until, same_bits, weights
from transformers import AutoModelForCausalLM
from user_mixers import Attend, Decay

from pararnn.base.errors import TrainingError
from pararnn.lab.train.run import export_checkpoint, run_training
from pararnn.lm import LanguageModel, LMConfig, load_checkpoint, sample, save_checkpoint
from pararnn.lm.hf import ParaRNNConfig, ParaRNNForCausalLM
from pararnn.lm.mixers import MixerError, layer_types

MIXERS = ("user_mixers:Decay", "user_mixers:Attend")
MODEL = LMConfig(**options("gru") | {"mixers": MIXERS})
MORE = {"model": MODEL, "save_every": 2, "report_to": "none"}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("own") / "run"
    run_training(config(out, **MORE), Packed())
    return out


def test_a_model_of_own_mixers_learns(run_folder):
    figures = losses(run_folder)
    assert float(figures[6]) < float(figures[1]) - 0.1
    record = json.loads((run_folder / "config.json").read_text())
    assert record["model"]["mixers"] == list(MIXERS)


def test_a_killed_run_goes_on_bit_for_bit(run_folder, tmp_path, monkeypatch):
    run_until(monkeypatch, 3, config(tmp_path, **MORE))
    run_training(config(tmp_path, **MORE), Packed())
    same_bits(weights(tmp_path / "model"), weights(run_folder / "model"))


def test_its_folders_load_everywhere(run_folder, tmp_path):
    export_checkpoint(run_folder, 6, tmp_path / "six")
    rows = tokens(2, 9)
    models = [
        AutoModelForCausalLM.from_pretrained(run_folder / "model"),
        ParaRNNForCausalLM.from_pretrained(tmp_path / "six"),
    ]
    plain = load_checkpoint(run_folder / "model")
    assert [type(block.mixer) for block in plain.backbone.blocks] == [Decay, Attend]
    logits = plain(rows)
    for model in models:
        assert torch.allclose(model(rows).logits, logits, atol=1e-5)
    save_checkpoint(plain, tmp_path / "plain")
    same_bits(weights(tmp_path / "plain"), weights(run_folder / "model"))


def test_it_generates_with_a_cache_as_without(run_folder):
    model = AutoModelForCausalLM.from_pretrained(run_folder / "model").float()
    rows = tokens(2, 5)
    model.generation_config.eos_token_id = None
    results = [
        model.generate(rows, max_new_tokens=6, do_sample=False, use_cache=use_cache)
        for use_cache in (True, False)
    ]
    assert torch.equal(*results)
    with torch.no_grad():
        more = sample(load_checkpoint(run_folder / "model"), rows, 6, temperature=0)
    assert torch.equal(more[:, -6:], results[0][:, -6:])


def test_runs_start_from_its_weights(run_folder, tmp_path):
    run_training(config(tmp_path / "a", **MORE, steps=2, init_from=str(run_folder)), Packed())
    assert float(losses(tmp_path / "a")[1]) < float(losses(run_folder)[1]) - 0.1
    others = MORE | {"model": LMConfig(**options("gru") | {"mixers": MIXERS[::-1]})}
    with pytest.raises(TrainingError, match=r"has model\.mixers = "):
        run_training(config(tmp_path / "b", **others, init_from=str(run_folder)), Packed())


def test_keys_take_import_paths():
    request = resolved(config("x"), ["model.mixers=user_mixers:Decay"])
    assert request.model.mixers == ("user_mixers:Decay",) * 2


def test_caches_are_of_the_mixers_types():
    assert layer_types(["rnn", *MIXERS, "attention"]) == [
        "linear_attention",
        "linear_attention",
        "full_attention",
        "full_attention",
    ]
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    hugging = ParaRNNConfig(mixers=MIXERS, **sizes)
    assert hugging.layer_types == ["linear_attention", "full_attention"]
    assert hugging.to_lm().mixers == MIXERS
    assert ParaRNNConfig.from_dict(hugging.to_dict()).to_lm() == hugging.to_lm()
    assert "mixers" not in ParaRNNConfig(**sizes).to_dict()
    with pytest.raises(ValueError, match="layer_types must be those of the mixers, linear_att"):
        ParaRNNConfig(mixers=MIXERS, layer_types=["full_attention"] * 2, **sizes)


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        ("no_mixers:Mine", "the mixer 'no_mixers:Mine' cannot be imported .* PYTHONPATH"),
        ("user_mixers:Mine", "user_mixers has no subclass of pararnn.lm.Mixer called 'Mine'"),
        ("user_mixers:NOT_A_MIXER", "no subclass of pararnn.lm.Mixer called 'NOT_A_MIXER'"),
        ("user_mixers:Untyped", "layer_type of the mixer 'user_mixers:Untyped' must be one of .*"),
        ("mine", "mixers may hold rnn, attention, matrix where transformers .* import paths"),
        ("user_mixers:Undrawn", r"mixer\.out_proj\.weight has no initial value: the `draws` of"),
        ("user_mixers:Misnamed", "`draws` of a mixer names 'rates', and its Misnamed has none"),
        ("user_mixers:Buffered", r"mixer\.window is a buffer, which a model that is made for"),
    ],
)
def test_a_mixer_that_is_none_is_refused_at_once(tmp_path, mixer, message):
    model = LMConfig(**options("gru") | {"mixers": (mixer, "rnn")})
    with pytest.raises((TrainingError, MixerError), match=message):
        run_training(config(tmp_path / "run", model=model), Packed())
    assert not (tmp_path / "run").exists()


def test_a_folder_without_its_module_says_so(tmp_path):
    save_checkpoint(LanguageModel(MODEL), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace("user_mixers:Decay", "gone_mixers:Decay"))
    with pytest.raises(MixerError, match="put the folder that holds gone_mixers on PYTHONPATH"):
        load_checkpoint(tmp_path)
