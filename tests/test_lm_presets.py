"""The paper's models: parameters counted on the meta device, and the tables' numbers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pararnn.lm import PRESETS, preset

SCALES = ("400M", "1B", "2.9B", "7B")
COUNTS = {
    "gru": (405_644_288, 1_415_268_352, 2_901_854_720, 6_756_896_768),
    "lstm": (405_693_440, 1_415_366_656, 2_902_018_560, 6_757_158_912),
    "transformer": (411_616_256, 1_439_795_200, 2_795_932_160, 6_889_410_560),
    "mamba2": (409_072_640, 1_425_263_104, 2_832_074_240, 6_959_771_648),
}
"""Of the Transformer without the 2d a layer that qk-norm has, as the paper counts."""

CELL_VECTORS = {"gru": 6, "lstm": 8}


def printed(count: int) -> str:
    """As Table 3 prints a number of parameters."""
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


def by_formula(config) -> int:
    """Parameters of a model: its layers', the embedding, the head and the last norm."""
    d, h = config.hidden_size, config.intermediate_size
    layers = {
        "rnn": 3 * d * d // config.num_heads
        + CELL_VECTORS[config.cell] * d
        + 3 * d * d  # in by two, out by one
        + 9 * d,  # convolution 5, norms 3, the branch's scaling 1
        "attention": 4 * d * d + 2 * d + 2 * d * config.qk_norm,
    }
    per_block = [layers[mixer] + 3 * d * h for mixer in config.mixers]
    return sum(per_block) + 2 * config.vocab_size * d + d


def parameters(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("architecture", ["gru", "lstm", "transformer"])
def test_models_have_the_papers_parameters(architecture, scale):
    from pararnn.lm import LanguageModel

    found, count = preset(architecture, scale), COUNTS[architecture][SCALES.index(scale)]
    as_counted = replace(found.model, qk_norm=False)
    assert by_formula(as_counted) == count
    assert parameters(LanguageModel(as_counted, device="meta")) == count
    assert parameters(LanguageModel(found.model, device="meta")) == by_formula(found.model)
    assert printed(count) == found.params_in_paper


@pytest.mark.parametrize("scale", SCALES)
def test_mamba2_has_the_papers_parameters(scale):
    transformers = pytest.importorskip("transformers")
    found = preset("mamba2", scale)
    with torch.device("meta"):
        model = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**found.model))
    assert parameters(model) == COUNTS["mamba2"][SCALES.index(scale)]
    assert printed(parameters(model)) == found.params_in_paper
    assert model.lm_head.weight is not model.backbone.embeddings.weight


def test_the_transformer_has_dclms_shapes():
    for scale in SCALES:
        model = preset("transformer", scale).model
        assert set(model.mixers) == {"attention"}
        assert (model.norm, model.qk_norm, model.tie_word_embeddings) == ("layer", True, False)
        assert model.hidden_size % model.num_attention_heads == 0


# Tables 3 and 4: layers, heads, width, peak rate, decay.
TABLE_3 = {
    ("gru", "400M"): (24, 4, 1024, 5e-3, 1e-3),
    ("lstm", "400M"): (24, 4, 1024, 3e-3, 1e-3),
    ("mamba2", "400M"): (48, 32, 1024, 5e-3, 1e-3),
    ("transformer", "400M"): (24, 8, 1024, 3e-3, 1e-3),
    ("gru", "1B"): (24, 4, 2048, 3e-3, 1e-4),
    ("lstm", "1B"): (24, 4, 2048, 3e-3, 1e-4),
    ("mamba2", "1B"): (48, 64, 2048, 5e-3, 1e-4),
    ("transformer", "1B"): (24, 16, 2048, 2e-3, 1e-4),
    ("gru", "2.9B"): (32, 2, 2560, 2e-3, 1e-4),
    ("lstm", "2.9B"): (32, 2, 2560, 2e-3, 1e-4),
    ("mamba2", "2.9B"): (64, 80, 2560, 3e-3, 1e-4),
    ("transformer", "2.9B"): (32, 32, 2560, 3e-3, 1e-4),
    ("gru", "7B"): (32, 4, 4096, 3e-3, 1e-4),
    ("lstm", "7B"): (32, 4, 4096, 3e-3, 1e-4),
    ("mamba2", "7B"): (64, 128, 4096, 3e-3, 1e-4),
    ("transformer", "7B"): (32, 32, 4096, 3e-3, 1e-4),
}
# Nodes, batch a GPU, effective batch, z-loss, steps, warm-up, billions of tokens.
TABLE_4 = {
    "400M": (1, 32, 256, 1e-4, 20_000, 2_000, 10.5),
    "1B": (1, 32, 256, 1e-4, 55_000, 5_500, 28.8),
    "2.9B": (4, 16, 512, 1e-4, 55_000, 5_500, 57.7),
    "7B": (32, 8, 2048, 5e-6, 33_000, 3_300, 138.4),
}


@pytest.mark.parametrize("pair", TABLE_3, ids="-".join)
def test_presets_are_the_papers_tables(pair):
    found, (architecture, scale) = preset(*pair), pair
    assert found.name == f"{architecture}-{scale}"
    model = found.model if architecture == "mamba2" else found.model.to_dict()
    heads = {"transformer": "num_attention_heads"}.get(architecture, "num_heads")
    assert (
        model["num_hidden_layers"],
        model[heads],
        model["hidden_size"],
        found.learning_rate,
        found.weight_decay,
    ) == TABLE_3[pair]
    assert (
        found.nodes,
        found.batch_per_gpu,
        found.batch,
        found.z_loss,
        found.steps,
        found.warmup_steps,
        round(found.training_tokens / 1e9, 1),
    ) == TABLE_4[scale]
    assert found.sequence_length == 2048
    assert model["vocab_size"] == 50_432
    assert not model["tie_word_embeddings"]
    if architecture in CELL_VECTORS:
        assert (model["cell"], model["norm"], model["conv_kernel_size"]) == (architecture, "rms", 4)
        assert set(model["mixers"]) == {"rnn"}


@pytest.mark.parametrize("pair", TABLE_3, ids="-".join)
def test_the_docs_have_the_presets_values(pair):
    found, (architecture, scale) = preset(*pair), pair
    count = COUNTS[architecture][SCALES.index(scale)]
    *sizes, rate, decay = TABLE_3[pair]
    cells = [*pair, *sizes, f"{count:,}", found.params_in_paper, rate, decay]
    page = Path(__file__).parent.parent / "docs" / "language-models.md"
    assert f"| {' | '.join(map(str, cells))} |\n" in page.read_text()


def test_every_preset_has_a_name():
    assert set(PRESETS) == set(TABLE_3)


def test_the_decay_is_decoupled_from_the_rate():
    found = preset("gru", "400M")
    assert found.torch_weight_decay * found.learning_rate == pytest.approx(1e-3)
    assert found.torch_weight_decay == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("GRU", "400M"), r"architecture must be one of gru, .*'GRU'; did you mean 'gru'\?"),
        (("transfomer", "1B"), r"did you mean 'transformer'\?"),
        (("mamba2", "1b"), r"scale must be one of 400M, 1B, 2.9B, 7B, got '1b'; did you mean '1B'"),
        (("lstm", "13 billion"), r"got '13 billion'$"),
    ],
)
def test_unknown_names_raise_with_near_ones(names, message):
    with pytest.raises(ValueError, match=message):
        preset(*names)
