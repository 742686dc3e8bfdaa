"""The paper's models: the docs' table is the paper's Table 3, and presets have its values."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pararnn.lm import PRESETS, LanguageModel, preset

PAGE = (Path(__file__).parent.parent / "docs" / "language-models.md").read_text()
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
TABLE_3 = {(row[0], row[1]): row[2:] for row in ROWS if tuple(row[:2]) in PRESETS}
"""By preset: blocks, heads, width, parameters, those in the paper, peak rate, decay."""
# Nodes, batch a GPU, effective batch, z-loss, steps, warm-up, billions of tokens.
TABLE_4 = {
    "400M": (1, 32, 256, 1e-4, 20_000, 2_000, 10.5),
    "1B": (1, 32, 256, 1e-4, 55_000, 5_500, 28.8),
    "2.9B": (4, 16, 512, 1e-4, 55_000, 5_500, 57.7),
    "7B": (32, 8, 2048, 5e-6, 33_000, 3_300, 138.4),
}


def model_of(sizes):
    """Build a preset's model without the gains of qk-norm, which the paper does not count."""
    if not isinstance(sizes, dict):
        return LanguageModel(replace(sizes, qk_norm=False), device="meta")
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        return transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**sizes))


@pytest.mark.parametrize("pair", PRESETS, ids="-".join)
@pytest.mark.one_in(5)
def test_presets_are_the_papers_tables(pair):
    (architecture, scale), row = pair, preset(*pair)
    model = row.model if architecture == "mamba2" else row.model.to_dict()
    heads = {"transformer": "num_attention_heads"}.get(architecture, "num_heads")
    count = sum(parameter.numel() for parameter in model_of(row.model).parameters())
    text = f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
    sizes = [model["num_hidden_layers"], model[heads], model["hidden_size"]]
    values = [*sizes, f"{count:,}", text, row.learning_rate, row.weight_decay]
    assert list(map(str, values)) == TABLE_3[pair]
    assert (row.name, row.params_in_paper) == (f"{architecture}-{scale}", text)
    assert (
        row.nodes,
        row.batch_per_gpu,
        row.batch,
        row.z_loss,
        row.steps,
        row.warmup_steps,
        round(row.training_tokens / 1e9, 1),
    ) == TABLE_4[scale]
    assert (row.sequence_length, model["vocab_size"]) == (2048, 50_432)
    assert not model["tie_word_embeddings"]
    if architecture in ("gru", "lstm"):
        assert (model["cell"], model["norm"], model["conv_kernel_size"]) == (architecture, "rms", 4)
        assert set(model["mixers"]) == {"rnn"}
    if architecture == "transformer":
        assert (set(model["mixers"]), model["norm"], model["qk_norm"]) == (
            {"attention"},
            "layer",
            True,
        )


def test_the_decay_is_decoupled_from_the_rate():
    gru = preset("gru", "400M")
    assert gru.torch_weight_decay * gru.learning_rate == pytest.approx(1e-3)
    assert gru.torch_weight_decay == pytest.approx(0.2)


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
