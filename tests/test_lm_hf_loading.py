"""Language models for transformers: written, loaded, initialised, spread over devices."""

import copy
import math
import pickle

import pytest
import torch
from lm_kinds import hugging, is_wide, plain, tokens

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402

from pararnn.base.errors import CellError  # noqa: E402
from pararnn.lm.hf import ParaRNNConfig, ParaRNNForCausalLM, ParaRNNModel  # noqa: E402
from pararnn.lm.hf.cache import NAME  # noqa: E402

ROW = tokens(2, 9)
SAVED = ["user's", "hybrid", "tied"]
MIXERS = ("rnn", "rnn", "rnn", "attention")


@torch.no_grad()
def logits_of(model):
    return model(ROW, use_cache=False).logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for kind in SAVED:
        hugging(kind).save_pretrained(root / kind, max_shard_size="5KB")
    return root


@pytest.mark.parametrize("kind", SAVED)
def test_loading_gives_the_same_bits(kind, folders):
    model = hugging(kind)
    assert len(list((folders / kind).glob("*.safetensors"))) > 2
    copy, info = AutoModelForCausalLM.from_pretrained(folders / kind, output_loading_info=True)
    assert not any(info.values())
    assert isinstance(copy, ParaRNNForCausalLM)
    assert torch.equal(logits_of(copy), logits_of(model))
    assert (copy.lm_head.weight is copy.model.embed_tokens.weight) == (kind == "tied")
    assert copy.config.to_lm() == model.config.to_lm()
    body = AutoModel.from_pretrained(folders / kind)
    assert isinstance(body, ParaRNNModel)
    with torch.no_grad():
        assert torch.equal(copy.lm_head(body(ROW).last_hidden_state), logits_of(model))


@pytest.mark.parametrize("kind", ["gru", "hybrid", "attention"])
def test_models_pickle_and_copy(kind):
    model = hugging(kind)
    model.generate(ROW, max_new_tokens=2, do_sample=False)
    model(ROW, labels=ROW).loss.backward()
    want = logits_of(model)
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(logits_of(other), want)


@torch.no_grad()
def test_weights_survive_a_resize_and_post_init(folders):
    model = AutoModelForCausalLM.from_pretrained(folders / "hybrid")
    model.resize_token_embeddings(60)
    want = logits_of(model)
    model.post_init()
    assert torch.equal(logits_of(model), want)
    model.resize_token_embeddings(4000, mean_resizing=False)
    for new in (model.lm_head.weight[60:], model.model.embed_tokens.weight[60:]):
        assert new.std().item() == pytest.approx(1 / 4, rel=0.05)  # 1/sqrt(d), as other tokens


def test_a_missing_cell_raises_with_advice(folders):
    config = AutoConfig.from_pretrained(folders / "user's")
    assert config.cell == "user_cells:Memory"
    assert config.cell_config == {"decay": 0.75}
    config.cell = "nowhere.cells:Mine"
    with pytest.raises(CellError, match=r"nowhere.cells.*PYTHONPATH"):
        AutoModelForCausalLM.from_config(config)


def test_only_missing_weights_are_drawn(tmp_path):
    model = hugging(
        "hybrid", hidden_size=64, intermediate_size=96, num_hidden_layers=4, mixers=MIXERS
    )
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    block, attention = "model.backbone.layers.1", "model.backbone.layers.3"
    constants = {
        f"{block}.mixer.rnn.bias": 0.0,
        f"{block}.mixer.conv.bias": 0.0,
        f"{block}.residual_scale": 1.0,
        f"{block}.mixer.norm.weight": 1.0,
        f"{attention}.mixer.q_norm.weight": 1.0,
        "model.backbone.norm.weight": 1.0,
    }
    spreads = {
        f"{block}.mixer.rnn.cell.a_z": 1 / 8,
        f"{block}.mixer.conv.weight": 0.5 / math.sqrt(3),
        f"{block}.mixer.in_proj.weight": 1 / 8,
        f"{block}.mixer.out_proj.weight": 1 / 8 / math.sqrt(4),
        f"{block}.mlp.down_proj.weight": 1 / math.sqrt(96 * 4),
        f"{attention}.mixer.out_proj.weight": 1 / 8 / math.sqrt(8),
        "model.embed_tokens.weight": 1 / 8,
        "lm_head.weight": 1 / 8,
    }
    for name in {**constants, **spreads}:
        del weights[name]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    copy = AutoModelForCausalLM.from_pretrained(tmp_path)
    parameters = dict(copy.named_parameters())
    assert set(parameters) == set(weights) | set(constants) | set(spreads)
    for name, value in weights.items():
        assert torch.equal(parameters[name], value), name
    for name, value in constants.items():
        assert (parameters[name] == value).all(), name
    for name, sigma in spreads.items():
        error = 4 * sigma / math.sqrt(2 * parameters[name].numel())
        assert parameters[name].std().item() == pytest.approx(
            sigma * 0.987, abs=error + 0.02 * sigma
        )


@pytest.mark.parametrize("kind", ["user's", "hybrid"])
def test_new_models_are_drawn_as_plain_ones(kind):
    wide = {"hidden_size": 64, "intermediate_size": 96}
    torch.manual_seed(1)
    want = plain(kind, **wide)
    want.reset_parameters()
    config = ParaRNNConfig.of_lm(want.config)
    with torch.device("meta"):
        empty = ParaRNNForCausalLM(config)
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    theirs = AutoModelForCausalLM.from_config(config)
    reference = {name: p.detach() for name, p in want.named_parameters()}
    assert len(reference) == len(dict(theirs.named_parameters()))
    for name, value in theirs.named_parameters():
        other, error = reference[name.removeprefix("model.")], 6 / math.sqrt(value.numel())
        sigma = float(other.std()) if other.numel() > 1 else 1.0
        assert value.mean().item() == pytest.approx(float(other.mean()), abs=error * sigma), name
        if value.numel() > 1:
            assert value.std().item() == pytest.approx(sigma, rel=error), name


def test_cells_and_states_stay_float32_in_bfloat16_models(folders):
    for kind in SAVED:
        model = AutoModelForCausalLM.from_pretrained(folders / kind, dtype=torch.bfloat16)
        for name, parameter in model.named_parameters():
            assert parameter.dtype == (torch.float32 if is_wide(name) else torch.bfloat16), name
        reference = plain(kind, torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(logits_of(model), reference(ROW))
            cache = model(ROW).past_key_values
        assert cache.layers[0].recurrent_states[0].dtype == torch.float32
        assert cache.layers[0].conv_states[0].dtype == torch.bfloat16
    new = AutoModelForCausalLM.from_config(hugging("hybrid").config, dtype=torch.bfloat16)
    assert {name: p.dtype for name, p in new.named_parameters()} == {
        name: torch.float32 if is_wide(name) else torch.bfloat16
        for name, _ in new.named_parameters()
    }
    assert logits_of(new).isfinite().all()


def test_models_load_with_a_device_map_and_offloading(folders, tmp_path):
    pytest.importorskip("accelerate")
    for kind in SAVED:
        want = logits_of(hugging(kind))
        little = {"max_memory": {"cpu": "10KB"}, "offload_folder": tmp_path / kind}
        for options in ({"device_map": {"": "cpu"}}, {"device_map": "auto", **little}):
            model = AutoModelForCausalLM.from_pretrained(folders / kind, **options)
            if "max_memory" in options:
                assert "disk" in model.hf_device_map.values()
            assert torch.equal(logits_of(model), want)
            got = model.generate(ROW, max_new_tokens=3, do_sample=False)
            assert torch.equal(got, hugging(kind).generate(ROW, max_new_tokens=3, do_sample=False))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
def test_linear_layers_may_be_int8():
    for kind in ("user's", "hybrid"):
        model = hugging(kind)
        want = logits_of(model)
        narrow = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, torch.qint8)
        error = (logits_of(narrow) - want).std() / want.std()
        assert 1e-3 < error < 0.2
        row = narrow.generate(ROW, max_new_tokens=4, do_sample=False)
        again = narrow.generate(ROW, max_new_tokens=4, do_sample=False, use_cache=False)
        assert row.shape == again.shape == (2, 13)


@pytest.mark.parametrize("kind", ["gru", "hybrid"])
@torch.no_grad()
def test_a_cache_may_be_passed_by_either_name(kind):
    model = hugging(kind).eval()
    for part in (model, model.model):
        whole = part(ROW, use_cache=False)[0]
        for name in ("cache", "past_key_values"):
            first = part(ROW[:, :5])
            second = part(ROW[:, 5:], **{name: getattr(first, NAME)})
            assert (torch.cat([first[0], second[0]], 1) - whole).abs().max() < 1e-5
            assert getattr(second, NAME).get_seq_length() == ROW.shape[1]
        caches = (getattr(part(ROW[:, :5]), NAME) for _ in range(2))
        both = dict(zip(("cache", "past_key_values"), caches, strict=True))
        with pytest.raises(ValueError, match="two names of one argument"):
            part(ROW[:, 5:], **both)
        same = part(ROW[:, 5:], **dict.fromkeys(both, both["cache"]))  # as peft passes it
        assert torch.equal(same[0], second[0])
