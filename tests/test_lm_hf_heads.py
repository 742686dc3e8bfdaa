"""Language models for transformers, with heads that classify texts and tokens."""

import pytest
import torch
from lm_kinds import hugging, pad_rows, tokens, trainer_of

transformers = pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from pararnn.lm.hf import ParaRNNConfig  # noqa: E402

KINDS = ["gru", "user's", "hybrid"]
HEADS = {"sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}


def with_head(kind, head, labels):
    """Put the head of a new model on the body of `hugging`."""
    body = hugging(kind)
    config = ParaRNNConfig.from_dict(body.config.to_dict() | {"num_labels": labels})
    torch.manual_seed(0)
    model = HEADS[head].from_config(config)
    model.model.load_state_dict(body.model.state_dict())
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_rows_are_classified_by_their_last_token(kind):
    model, rows = with_head(kind, "sequence", 1), [tokens(n, seed=n) for n in (7, 4, 1)]
    want = torch.cat([model(row[None]).logits for row in rows])
    assert want.std() > 0.1
    for side in ("left", "right"):
        batch, mask = pad_rows(rows, side)
        batch = batch * mask  # padding is what config.pad_token_id says
        for training in (False, True):
            got = model.train(training)(batch, attention_mask=mask).logits
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
    rewards = torch.tensor([0.5, -1.0, 2.0])
    loss = model(batch, attention_mask=mask, labels=rewards).loss
    torch.testing.assert_close(loss, (want[:, 0] - rewards).square().mean())


@torch.no_grad()
def test_batches_need_a_padding_token():
    config = ParaRNNConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_heads=2)
    model, row = AutoModelForSequenceClassification.from_config(config).eval(), tokens(2, 5) % 8
    assert model(row[:1]).logits.shape == (1, 2)
    with pytest.raises(ValueError, match="padding token"):
        model(row)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_tokens_are_classified_from_the_tokens_up_to_them(kind):
    model, row = with_head(kind, "token", 5), tokens(2, 9)
    logits = model(row).logits
    assert logits.shape == (2, 9, 5)
    torch.testing.assert_close(logits, model.score(model.model(row).last_hidden_state))
    labels = torch.arange(18).view(2, 9) % 5
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(model(row, labels=labels).loss, want)


@pytest.mark.parametrize("head", HEADS)
def test_heads_are_drawn_saved_and_added_to_language_models(head, tmp_path):
    hugging("hybrid", hidden_size=64).save_pretrained(tmp_path / "lm")
    options = {"num_labels": 3, "output_loading_info": True}
    model, info = HEADS[head].from_pretrained(tmp_path / "lm", **options)
    assert {name.split(".")[0] for name in info["missing_keys"]} == {"score"}
    assert model.score.weight.std().item() == pytest.approx(1 / 8, rel=0.2)
    for name, value in hugging("hybrid", hidden_size=64).model.named_parameters():
        assert torch.equal(model.model.get_parameter(name), value), name
    model.save_pretrained(tmp_path / "judge")
    again = HEADS[head].from_pretrained(tmp_path / "judge")
    row = tokens(1, 5)
    assert torch.equal(again(row).logits, model(row).logits)


def test_trainer_trains_a_reward_model(tmp_path):
    pytest.importorskip("accelerate")
    model = with_head("gru", "sequence", 1)
    rows = [tokens(6, seed=seed) for seed in range(8)]
    data = [{"input_ids": row, "labels": float(row[-1] > 24)} for row in rows]
    trainer = trainer_of(model, tmp_path, data, max_steps=8, learning_rate=3e-2)
    old_loss = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.7 * old_loss
