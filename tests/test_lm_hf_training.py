"""Language models for transformers in training: loss, checkpointing, compiled, adapted."""

import copy

import pytest
import torch
from lm_kinds import VOCABULARY, hugging, tokens, trainer_of

transformers = pytest.importorskip("transformers")

from transformers import StaticCache, set_seed  # noqa: E402

from pararnn.lm.hf import ParaRNNForCausalLM  # noqa: E402

KINDS = ["gru", "user's", "hybrid"]
ROW = tokens(4, 13)


def gradients(model):
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads


def close(grads, wanted, tolerance):
    assert grads.keys() == wanted.keys()
    for name, value in wanted.items():
        bound = tolerance * float(value.abs().max())
        torch.testing.assert_close(
            grads[name], value, rtol=0, atol=bound, msg=lambda m, n=name: n + m
        )


def direct_loss(logits, labels, z_loss):
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    nats = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100)
    return nats + z_loss * logits.logsumexp(1)[labels != -100].square().mean()


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_the_logits(kind):
    model, labels = hugging(kind), ROW.clone()
    labels[0, :5] = labels[1, -3:] = -100
    model.config.z_loss = 0.01
    output = model(ROW, labels=labels)
    want = direct_loss(output.logits, labels, 0.01)
    torch.testing.assert_close(output.loss, want)
    want.backward()
    wanted = gradients(model)
    model.train()
    out = model(ROW, labels=labels)
    assert out.logits is None
    assert out.past_key_values is None
    torch.testing.assert_close(out.loss, want)
    out.loss.backward()
    close(gradients(model), wanted, 1e-4)


@pytest.mark.parametrize("head", ["ours", "another"])
def test_labels_may_come_shifted(head):
    """As collators and Trainer hand them on, which counts `shift_labels` where there are any."""
    model = hugging("gru").train()
    if head == "another":
        linear = torch.nn.Linear(16, VOCABULARY)
        linear.weight, linear.bias.data = model.lm_head.weight, torch.zeros(VOCABULARY)
        model.lm_head = linear
    shift_labels = torch.nn.functional.pad(ROW[:, 1:], (0, 1), value=-100)
    want = model(ROW, labels=ROW).loss
    torch.testing.assert_close(model(ROW, labels=ROW, shift_labels=shift_labels).loss, want)
    torch.testing.assert_close(model(ROW, shift_labels=shift_labels).loss, want)
    shift_labels[:, 2:5] = -100
    logits = model(ROW).logits.flatten(0, 1)
    want = torch.nn.functional.cross_entropy(logits, shift_labels.flatten())
    torch.testing.assert_close(model(ROW, labels=ROW, shift_labels=shift_labels).loss, want)


def test_accumulated_batches_are_one_batch():
    model, labels = hugging("gru").train(), ROW.clone()
    model.config.z_loss = 0.01
    labels[1, 4:] = -100
    count = (labels[:, 1:] != -100).sum()
    whole = model(ROW, labels=labels, num_items_in_batch=count).loss
    torch.testing.assert_close(whole, model(ROW, labels=labels).loss)
    whole.backward()
    wanted, parts = gradients(model), []
    for row, label in zip(ROW.split(1), labels.split(1), strict=True):
        loss = model(row, labels=label, num_items_in_batch=count).loss
        loss.backward()
        parts.append(loss.detach())
    torch.testing.assert_close(sum(parts), whole.detach(), rtol=1e-6, atol=0)
    close(gradients(model), wanted, 1e-5)


@pytest.mark.parametrize(
    ("kind", "compile"),
    [*((kind, part) for kind in KINDS for part in ("nothing", "blocks")), ("gru", "model")],
)
@pytest.mark.one_in(4)
def test_checkpointing_changes_no_bit(kind, compile):
    # One layer where the whole model is compiled, which takes its time for each.
    model = hugging(kind, **({"num_hidden_layers": 1} if compile == "model" else {})).train()
    blocks, results = model.model.backbone.blocks, []
    for part in {"nothing": [], "blocks": blocks, "model": [model]}[compile]:
        part.compile(backend="aot_eager", fullgraph=True)
    for checkpointing in (False, True):
        if checkpointing:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
            calls = [] if compile == "model" else count_calls(blocks[0].mixer)
        loss = model(ROW, labels=ROW).loss
        loss.backward()
        results.append((loss.detach(), gradients(model)))
    if compile == "nothing":
        assert len(calls) == 2
    (loss, wanted), (again, grads) = results
    assert torch.equal(loss, again)
    assert all(torch.equal(grads[name], value) for name, value in wanted.items())


@pytest.mark.parametrize(("every", "runs"), [(1, 8), (2, 6), (3, 6), (4, 5)])
def test_every_nth_layer_may_be_checkpointed(every, runs):
    model = hugging("gru", num_hidden_layers=4).train()
    calls = [count_calls(block.mixer) for block in model.model.backbone.blocks]
    model.gradient_checkpointing_enable(every_n_layers=every)
    model(ROW, labels=ROW).loss.backward()
    assert sum(map(len, calls)) == runs
    with pytest.raises(ValueError, match="every_n_layers must be 1 or more, got 0"):
        model.gradient_checkpointing_enable(every_n_layers=0)


def count_calls(module):
    calls = []
    module.register_forward_hook(lambda *args: calls.append(1))
    return calls


@torch.no_grad()
@pytest.mark.thorough
def test_blocks_compile_after_hidden_states_were_returned():
    model = hugging("hybrid")
    want = model(ROW, output_hidden_states=True).logits
    for block in model.model.backbone.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(model(ROW).logits, want)
    torch.testing.assert_close(model(ROW, output_hidden_states=True).logits, want)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gru", "hybrid"])
@pytest.mark.thorough
def test_a_decoding_step_is_one_graph(kind):
    model = hugging(kind)
    row = tokens(2, 30)
    want = model(row).logits
    cache = StaticCache(config=model.config, max_cache_len=32)
    model(row[:, :4], past_key_values=cache)
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    got = [step(row[:, at : at + 1], past_key_values=cache).logits for at in (4, 5)]
    with torch.compiler.set_stance("fail_on_recompile"):
        got += [step(row[:, at : at + 1], past_key_values=cache).logits for at in range(6, 30)]
    torch.testing.assert_close(torch.cat(got, 1), want[:, 4:], rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.thorough
def test_compiled_chunks_may_have_positions():
    model, row = hugging("gru"), tokens(2, 14)
    cache = StaticCache(config=model.config, max_cache_len=16)
    got = [model(row[:, :2], past_key_values=cache).logits]
    chunk = torch.compile(model, backend="aot_eager", fullgraph=True)
    for start in (2, 6, 10):
        where = torch.arange(start, start + 4)[None]
        part = row[:, start : start + 4]
        got.append(chunk(part, position_ids=where, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(got, 1), model(row).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["gru", "hybrid"])
@torch.no_grad()
@pytest.mark.thorough
def test_compiled_prompts_may_have_positions_and_ask_for_a_cache(kind):
    model = hugging(kind)
    want = model(ROW).logits
    whole = torch.compile(model, backend="aot_eager")
    out = whole(ROW[:, :9], position_ids=torch.arange(9)[None], use_cache=True)
    more = model(ROW[:, 9:], past_key_values=out.past_key_values).logits
    torch.testing.assert_close(torch.cat([out.logits, more], 1), want, rtol=0, atol=1e-4)


@pytest.mark.thorough
def test_generate_compiles_one_step():
    model, graphs = hugging("gru"), []
    want = model.generate(ROW, max_new_tokens=8, do_sample=False)

    def backend(graph, inputs, **options):
        graphs.append(graph)
        return graph

    config = transformers.CompileConfig(fullgraph=True, backend=backend)
    config._compile_all_devices = True  # else steps are compiled on a GPU only
    static = {"cache_implementation": "static", "compile_config": config}
    got = model.generate(ROW, max_new_tokens=8, do_sample=False, **static)
    assert torch.equal(got, want)
    assert len(graphs) == 1


ADAPTERS = {
    "all-linear": {"target_modules": "all-linear"},
    "named": {"target_modules": ["in_proj", "gate_proj", "up_proj", "down_proj", "out_proj"]},
    "headwise": {"target_modules": [], "target_parameters": ["rnn.proj.weight"]},
}


@pytest.mark.parametrize("targets", ADAPTERS)
@pytest.mark.parametrize("kind", ["user's", "hybrid"])
@pytest.mark.one_in(5)
def test_adapters_train_merge_and_reload(kind, targets, tmp_path):
    peft = pytest.importorskip("peft")
    set_seed(0)
    base = hugging(kind)
    old_logits = base(ROW).logits.detach()
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, **ADAPTERS[targets])
    model = peft.get_peft_model(copy.deepcopy(base), config).train()
    assert any("lora_" in name for name, _ in model.named_parameters())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(3):
        losses.append(model(input_ids=ROW, labels=ROW).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 1e-3
    model.eval()
    with torch.no_grad():
        want = model(ROW).logits
        tokens = model.generate(input_ids=ROW, max_new_tokens=4, do_sample=False)
        assert (want - old_logits).abs().max() > 1e-2
        model.save_pretrained(tmp_path)
        again = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path)
        assert torch.equal(again(ROW).logits, want)
        merged_model = again.merge_and_unload()
        torch.testing.assert_close(merged_model(ROW).logits, want, rtol=0, atol=1e-4)
        assert torch.equal(merged_model.generate(ROW, max_new_tokens=4, do_sample=False), tokens)


@pytest.mark.parametrize("kind", ["gru", "hybrid"])
def test_tuned_prompts_are_read_once(kind):
    """peft looks for the cache by the name that it had before transformers 5.24."""
    peft = pytest.importorskip("peft")
    set_seed(0)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(hugging(kind), config).eval()
    with torch.no_grad():
        for parameter in model.prompt_encoder.parameters():
            parameter.normal_()
    text = ROW
    for _ in range(5):
        text = torch.cat([text, model(input_ids=text).logits[:, -1:].argmax(-1)], 1)
    for use_cache in (True, False):
        options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
        assert torch.equal(model.generate(input_ids=ROW, use_cache=use_cache, **options), text)


@pytest.mark.parametrize(
    "options", [{"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"]}]
)
def test_adapters_of_the_head_enter_the_loss(options):
    peft = pytest.importorskip("peft")
    base = hugging("gru")
    base.config.z_loss = 0.1
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, **{"target_modules": ["in_proj"]} | options
    )
    model = peft.get_peft_model(copy.deepcopy(base), config).train()
    labels = ROW.clone()
    labels[:, 3] = -100
    plain = base(ROW, labels=labels).loss
    torch.testing.assert_close(model(input_ids=ROW, labels=labels).loss, plain)
    loss = model(input_ids=ROW, labels=labels, num_items_in_batch=7).loss
    torch.testing.assert_close(loss, base(ROW, labels=labels, num_items_in_batch=7).loss)
    loss.backward()
    trainable = [p for name, p in model.named_parameters() if "lm_head" in name and p.requires_grad]
    assert sum(parameter.grad.abs().sum() for parameter in trainable) > 0


@pytest.mark.parametrize("kind", ["gru", "tied"])
def test_a_resized_vocabulary_keeps_the_chunked_loss(kind, monkeypatch):
    model = hugging(kind)
    old_logits = model(ROW).logits.detach()
    model.resize_token_embeddings(VOCABULARY + 5)
    new_output = model(ROW, labels=ROW)
    assert torch.equal(new_output.logits[..., :VOCABULARY], old_logits)
    monkeypatch.setattr("pararnn.lm.hf.model.logits_loss", None)  # which reads them
    loss = model.train()(ROW, labels=ROW).loss
    torch.testing.assert_close(loss, new_output.loss)
    loss.backward()
    assert model.lm_head.weight.grad.shape == (VOCABULARY + 5, 16)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (kind == "tied")


@torch.no_grad()
def test_the_loss_of_packed_rows_is_that_of_their_documents():
    from transformers import DataCollatorWithFlattening

    model = hugging("hybrid")
    rows = [tokens(1, length, seed=length) for length in (3, 9, 6)]
    batch = [{"input_ids": row[0].tolist(), "labels": row[0].tolist()} for row in rows]
    parts = [model(row, labels=row).loss * (row.numel() - 1) for row in rows]
    for options in ({}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}):
        one_row = DataCollatorWithFlattening(**options)(batch)
        torch.testing.assert_close(model(**one_row).loss, sum(parts) / 15)


class Renamed(ParaRNNForCausalLM):
    """A user's subclass."""


def shard(model):
    """Give a model's class the name that `fully_shard` makes of it."""
    model.__class__ = type(f"FSDP{type(model).__name__}", (type(model),), {})
    return model


def with_lora(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["in_proj"])
    return peft.get_peft_model(model, config)


def rename(model):
    model.__class__ = Renamed
    return model


@pytest.mark.parametrize("change", [None, rename, shard, with_lora])
def test_label_smoothing_in_trainer_uses_the_next_token(change, tmp_path):
    """Trainer shifts them for the classes whose names transformers knows."""
    pytest.importorskip("accelerate")
    from transformers import default_data_collator

    model, share = hugging("gru"), 0.1
    logs = model(ROW).logits[:, :-1].detach().log_softmax(-1)
    of_labels = logs.gather(-1, ROW[:, 1:, None]).mean()
    want = -((1 - share) * of_labels + share * logs.mean()).item()
    rows = [{"input_ids": row, "labels": row} for row in ROW]
    model = model if change is None else change(model)
    smoothing = {"label_smoothing_factor": share}
    trainer = trainer_of(model, tmp_path, rows, default_data_collator, **smoothing)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(want, rel=1e-5)


def test_trainer_trains_on_packed_rows(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import DataCollatorWithFlattening

    rows = [tokens(length, seed=length).tolist() for length in range(3, 27)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    model, records = hugging("hybrid"), []

    def record(module, args, options, out):
        count = (options["position_ids"] == 0).sum().item()
        records.append((module.training, count, out.logits is None, out.past_key_values is None))

    model.register_forward_hook(record, with_kwargs=True)
    sizes = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    steps = {"gradient_accumulation_steps": 2, "max_steps": 3, "learning_rate": 1e-2}
    trainer = trainer_of(model, tmp_path, data, DataCollatorWithFlattening(), **sizes, **steps)
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < first
    assert records.count((True, 4, True, True)) == 6
    assert {entry[:2] for entry in records} == {(True, 4), (False, 4)}
    assert {entry[2] for entry in records if not entry[0]} == {False}
    predictions = trainer.predict(data[:1]).predictions
    assert predictions.shape == (1, 3, VOCABULARY)
