"""Rows that go on where the last step's ended: states, borders, checkpoints, ranks, compiled."""

import pytest
import torch
from lm_kinds import VOCABULARY, hugging, options, tokens

pytest.importorskip("transformers")

from test_train_trainer import LENGTH, Packed, Tokenizer, losses, run_until, same_bits, weights
from test_train_trainer import config as any_config

from pararnn.lab.train import checkpoints, states, trainer
from pararnn.lab.train.config import DataConfig, OptimiserConfig
from pararnn.lab.train.feed import StepSampler
from pararnn.lab.train.log import read_rows
from pararnn.lab.train.run import run_training
from pararnn.lm.cache import CarriedCache
from pararnn.lm.config import LMConfig
from pararnn.lm.hf import ParaRNNForCausalLM

KINDS = ["gru", "lstm", "no convolution"]


class Stream(torch.utils.data.Dataset):
    """Contiguous rows of one long text, whose documents may be marked."""

    def __init__(self, count, documents=False):
        self.count, self.tokens = count, tokens(count * LENGTH)
        self.positions = None
        if documents:  # of 1 to 17 tokens, so that borders are at all places of a row
            lengths = [1 + (7 * at) % 17 for at in range(count * LENGTH)]
            self.positions = torch.cat([torch.arange(length) for length in lengths])

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        at = slice(index * LENGTH, (index + 1) * LENGTH)
        row = {"input_ids": self.tokens[at], "labels": self.tokens[at]}
        return row if self.positions is None else row | {"position_ids": self.positions[at]}


def config(out, **more):
    data = DataConfig(sequence_length=LENGTH, stateful=True, resets=more.pop("resets", False))
    return any_config(out, **{"data": data} | more)


def make_data(**more):
    return Packed(Stream(22, **more), Stream(6), Tokenizer())


def carried_by(model, old_cache=None):
    layers = model.config.num_hidden_layers
    if old_cache is None:
        return [CarriedCache() for _ in range(layers)]
    return [CarriedCache(*cache.after) for cache in old_cache]


def hidden(model, ids, cache, positions=None):
    return model.model(ids, position_ids=positions, carried=cache).last_hidden_state


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_go_on_are_one_row(kind, documents):
    model = hugging(kind).train()
    ids = tokens(17, 24)
    places = torch.arange(24).repeat(17, 1)
    if documents:  # row b has a border at token b + 4, which is before, at and behind the cut
        places = torch.stack(
            [torch.cat([places[0, : b + 4], places[0, : 20 - b]]) for b in range(17)]
        )
    want = hidden(model, ids, carried_by(model), places if documents else None)
    first = carried_by(model)
    got = [hidden(model, ids[:, :12], first, places[:, :12] if documents else None)]
    second = carried_by(model, first)
    got.append(hidden(model, ids[:, 12:], second, places[:, 12:] if documents else None))
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=0, atol=2e-6)
    anew = hidden(model, ids[:, 12:], carried_by(model), places[:, 12:] if documents else None)
    begins = places[:, 12] == 0
    assert begins.any() == documents
    distance = (anew - want[:, 12:]).abs().flatten(1).amax(1)
    assert (distance[~begins] > 1e-3).all()
    assert (distance[begins] < 2e-6).all()


def test_a_document_may_begin_with_the_row():
    """Without a border within the row, only the position says so."""
    model, ids = hugging("gru"), tokens(2, 24)
    first = carried_by(model)
    hidden(model, ids[:, :12], first)
    places = torch.stack([torch.arange(12), torch.arange(1, 13)])
    got = hidden(model, ids[:, 12:], carried_by(model, first), places)
    torch.testing.assert_close(got[0], hidden(model, ids[:, 12:], carried_by(model))[0])
    torch.testing.assert_close(got[1], hidden(model, ids[:, 12:], carried_by(model, first))[1])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_number_of_ranks_reads_what_two_wrote(tmp_path, world):
    rows = torch.arange(8.0).unsqueeze(1)  # of 8 streams of one row each, stream r carries r
    run = config(tmp_path, batch=8, device_batch=2, steps=1)
    ranks = []
    for rank in range(2):
        parts = StepSampler(run, 8, rank, 2, 0)
        ranks.append(torch.stack([rows[at] for at in parts]))
    batch = states.batch_of(torch.cat(ranks), 2)
    assert torch.equal(batch, rows)
    for rank in range(world):
        local = states.RowStates(1, 4 // world)
        local.restore({"0.states": states.rows_of(batch, 4 // world, rank, world)})
        want = list(StepSampler(run, 8, rank, world, 0))
        assert local.tensors()["0.states"].flatten(1).int().tolist() == want


def test_the_gradient_is_that_of_given_states():
    """The second step's loss as a function of the weights, the states it starts from held fast."""
    model = hugging("gru").double().train()
    ids = tokens(3, 24)
    first = carried_by(model)
    hidden(model, ids[:, :12], first)
    for cache in first:
        assert not any(value.requires_grad for value in cache.after)
        cache.after = tuple(value.double() for value in cache.after)
    weight = model.model.backbone.layers[0].mixer.rnn.proj.weight
    loss = model(ids[:, 12:], labels=ids[:, 12:], carried=carried_by(model, first)).loss
    (grad,) = torch.autograd.grad(loss, weight)
    index = tuple(size // 2 for size in weight.shape)
    results = []
    for step in (1e-4, -1e-4):
        with torch.no_grad():
            weight[index] += step
            again = model(ids[:, 12:], labels=ids[:, 12:], carried=carried_by(model, first)).loss
            weight[index] -= step
        results.append(float(again))
    assert float(grad[index]) == pytest.approx((results[0] - results[1]) / 2e-4, rel=1e-4)


def with_checkpoints(model):
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


def gradients(model, ids, old_cache):
    cache = carried_by(model, old_cache)
    loss = model(ids, labels=ids, carried=cache).loss
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach(), grads, [value for each in cache for value in each.after]


@pytest.mark.parametrize(
    ("kind", "way"), [("gru", "checkpointing"), ("gru", "compiled"), ("lstm", "both")]
)
@pytest.mark.one_in(4)
def test_other_ways_to_compute_carry_the_same(kind, way):
    ids = tokens(3, 24)
    results = []
    for change in (False, True):
        model = hugging(kind).train()
        first = carried_by(model)
        hidden(model, ids[:, :12], first)
        if change and way != "compiled":
            with_checkpoints(model)
        if change and way != "checkpointing":
            torch.compiler.reset()
            for block in model.model.backbone.blocks:
                block.compile(fullgraph=True, backend="aot_eager")
        results.append(gradients(model, ids[:, 12:], first))
    (loss, grads, states), (own_loss, own_grads, own_after) = results
    torch.testing.assert_close(own_loss, loss)
    torch.testing.assert_close(own_grads, grads, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(own_after, states)


def test_other_caches_are_not_read_twice():
    """A block that runs again in the backward pass would start from where it ended."""
    results = []
    for again in (False, True):
        model, ids = hugging("gru").train(), tokens(2, 8)
        if again:
            with_checkpoints(model)
        loss = model(ids, labels=ids, use_cache=True).loss
        results.append(torch.autograd.grad(loss, list(model.parameters())))
    torch.testing.assert_close(*results)


def test_what_does_not_carry_raises(tmp_path):
    with pytest.raises(ValueError, match=r"mixers has 'attention'.*data.stateful=false, or train"):
        config(tmp_path, model=LMConfig(**options("hybrid")))
    model = hugging("hybrid")
    with pytest.raises(RuntimeError, match="keys of attention would grow"):
        model(tokens(1, 4), carried=carried_by(model))
    model = hugging("gru")
    with pytest.raises(ValueError, match="give no cache"):
        model(tokens(1, 4), carried=carried_by(model), attention_mask=torch.ones(1, 4))


@pytest.fixture(scope="module", params=[False, True], ids=["one text", "documents"])
def resets(request):
    return request.param


@pytest.fixture(scope="module")
def whole(tmp_path_factory, resets):
    """Two epochs of five steps, with two parts of a batch each."""
    out = tmp_path_factory.mktemp("whole") / "run"
    request = config(out, steps=8, device_batch=2, resets=resets, keep=9)
    run_training(request, make_data(documents=resets))
    return out


def test_losses_are_those_of_rows_end_to_end(tmp_path):
    """With a rate of nearly 0: the third step's loss is of the third row behind the other two."""
    optimiser = OptimiserConfig(learning_rate=1e-12, weight_decay=0, z_loss=0, clip="none")
    request = config(tmp_path, steps=6, device_batch=2, optimiser=optimiser, save_every=1, keep=9)
    run_training(request, make_data())
    model = ParaRNNForCausalLM.from_pretrained(tmp_path / "model").train()
    text = Stream(22).tokens[: 20 * LENGTH].view(4, 5 * LENGTH)  # a stream a row
    states = model.model(text).last_hidden_state
    run_losses = losses(tmp_path)
    for step in range(5):
        part = slice(step * LENGTH, (step + 1) * LENGTH)
        logits = model.lm_head(states[:, part])[:, :-1].reshape(-1, VOCABULARY)
        labels = text[:, part][:, 1:].reshape(-1)
        want = torch.nn.functional.cross_entropy(logits, labels).item()
        assert float(run_losses[step + 1]) == pytest.approx(want, abs=2e-6), step
    assert float(run_losses[6]) == pytest.approx(
        float(run_losses[1]), abs=2e-6
    )  # from zero states again


@pytest.mark.parametrize("step", [5, 7])
@pytest.mark.one_in(4)
def test_going_on_changes_no_bit(whole, tmp_path, monkeypatch, resets, step):
    out = tmp_path / "run"
    request = config(out, steps=8, device_batch=2, resets=resets)
    monkeypatch.setattr("test_train_trainer.Packed", lambda: make_data(documents=resets))
    run_until(monkeypatch, step, request)
    run_training(request, make_data(documents=resets))
    same_bits(weights(out / "model"), weights(whole / "model"))
    assert losses(out) == losses(whole)


def test_validation_starts_from_zero_states(whole, resets):
    model = ParaRNNForCausalLM.from_pretrained(whole / "model").eval()
    checkpoints.load_weights(whole / "checkpoint-6", model)
    rows = torch.stack([Stream(6)[index]["input_ids"] for index in range(6)])
    nats = model(rows, labels=rows).loss.item()
    squares = model(rows).logits[:, :-1].logsumexp(-1).square().mean().item()
    valid_rows = [row for row in read_rows(whole / "log.jsonl") if "valid_loss" in row]
    assert int(valid_rows[1]["step"]) == 6
    want = nats - model.config.z_loss * squares
    assert float(valid_rows[1]["valid_loss"]) == pytest.approx(want, abs=1e-5)


def test_parts_of_a_batch_carry_their_own(whole, tmp_path, resets):
    run_training(config(tmp_path, steps=8, resets=resets), make_data(documents=resets))
    for step, loss in losses(tmp_path).items():
        assert float(loss) == pytest.approx(float(losses(whole)[step]), abs=1e-4)


def test_carried_states_count(whole, tmp_path, monkeypatch, resets):
    """Or none of these tests would say anything."""
    monkeypatch.setattr(trainer.RowStates, "take", lambda self: [CarriedCache() for _ in range(2)])
    run_training(config(tmp_path, steps=3, resets=resets), make_data(documents=resets))
    distance = [abs(float(losses(tmp_path)[n]) - float(losses(whole)[n])) for n in (1, 2, 3)]
    assert distance[0] < 1e-6 < 1e-4 < distance[1]
