import copy
import io
import math
import pickle

import pytest
import torch
from fresh import run_fresh
from lm_kinds import borders, pad_rows, positions, tokens

import pararnn.lm.model as model_module
from pararnn.lm import (
    LanguageModel,
    LMConfig,
    Lookup,
    Prefixes,
    bits_per_byte,
    sample,
    set_solver,
)
from pararnn.lm.draws import scaled

HYBRID = {"mixers": ("rnn", "attention")}
MODELS = {"gru": {"cell": "gru", "num_heads": 2}, "hybrid": HYBRID}


def make_lm(**options) -> LanguageModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 24, "num_attention_heads": 2}
    return LanguageModel(LMConfig(**(sizes | options))).eval()


def random_tokens(batch: int, steps: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(256, (batch, steps), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thorough
def test_models_pickle_and_copy(name):
    model, tokens = make_lm(**MODELS[name]), random_tokens(2, 9)
    model.loss(tokens).backward()
    model.backbone.layers[0].compile(backend="aot_eager")
    want = model(tokens)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (
        torch.load(file, weights_only=False),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
    ):
        torch.testing.assert_close(other(tokens), want)


def test_a_new_models_logits_have_unit_variance_and_all_parameters_gradients():
    model, tokens = make_lm(**HYBRID), random_tokens(4, 33)
    loss = bits_per_byte(model(tokens[:, :-1]), tokens[:, 1:])
    # The mean of log2 sum exp of 256 Gaussian logits of variance 1 is 8 + 1 / (2 ln 2).
    assert loss.item() == pytest.approx(8 + 0.5 / math.log(2), abs=0.4)
    loss.backward()
    names = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert names == []


def test_a_loss_builds_its_rows_once(monkeypatch):
    calls = []
    rows_of = model_module.rows_of
    monkeypatch.setattr(
        model_module, "rows_of", lambda *a, **k: calls.append(a) or rows_of(*a, **k)
    )
    make_lm(**HYBRID).loss(random_tokens(1, 12), cu_seq_lens=torch.tensor([0, 5, 12]))
    assert len(calls) == 1


def test_the_loss_is_that_of_the_next_tokens():
    model, tokens = make_lm(), random_tokens(2, 9)
    bits = bits_per_byte(model(tokens[:, :-1]), tokens[:, 1:])
    assert model.loss(tokens).item() / math.log(2) == pytest.approx(bits.item(), rel=1e-5)


def test_bits_per_byte_is_the_mean_surprise():
    chances = torch.full((1, 2, 256), 0.5 / 255)
    chances[0, 0, 7] = chances[0, 1, 9] = 0.5
    targets = torch.tensor([[7, 8]], dtype=torch.uint8)
    bits = (1 - math.log2(0.5 / 255)) / 2
    assert bits_per_byte(chances.log(), targets).item() == pytest.approx(bits, rel=1e-6)


def test_options_reach_the_layers():
    model = make_lm(
        num_hidden_layers=3,
        num_heads=2,
        solver="newton",
        cell_config={"state_nonlinearity": "softsign"},
    )
    layers = model.recurrent_layers()
    assert [layer.num_heads for layer in layers] == [2, 2, 2]
    assert all(layer.cell.state_nonlinearity == "softsign" for layer in layers)
    assert {layer.solver for layer in layers} == {"newton"}
    set_solver(model, "sequential", "torch")
    assert {(layer.solver, layer.backend) for layer in layers} == {("sequential", "torch")}


@torch.no_grad()
def test_greedy_samples_are_the_likeliest_tokens():
    model, text = make_lm(**HYBRID), random_tokens(2, 5)
    samples = sample(model, text, 6, temperature=0)
    assert samples.dtype == torch.int64
    for index in range(6):
        likeliest = model(text)[:, -1].argmax(-1)
        assert torch.equal(samples[:, index], likeliest)
        text = torch.cat([text, likeliest.unsqueeze(1)], 1)


def test_sampling_follows_the_generator_and_the_temperature():
    model, prompt = make_lm(), random_tokens(1, 5)

    def draw(seed, temperature):
        return sample(model, prompt, 40, temperature, torch.Generator().manual_seed(seed))

    assert torch.equal(draw(0, 1.0), draw(0, 1.0))
    assert not torch.equal(draw(0, 1.0), draw(1, 1.0))
    likeliest = sample(model, prompt, 40, 0)
    for temperature in (1e-4, 1e-37, 1e-44, 1e-46, 5e-324):
        assert torch.equal(draw(0, temperature), likeliest)
    assert torch.equal(draw(0, 1e38), draw(0, 1e300))
    assert sample(model, prompt, 0).shape == (1, 0)
    for options in ({}, {"draft": Lookup()}, {"prefixes": Prefixes(model, 1 << 20)}):
        drawn = sample(model, prompt[:0], 3, **options, return_log_probs=True)
        assert [tensor.shape for tensor in drawn] == [(0, 3), (0, 3)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scaled_logits_have_the_limit_of_extreme_temperatures(dtype):
    logits = torch.tensor([[-torch.inf, 3.0, 1.0, 3.0, -6e4], [-1.0, -2.0, -3e4, -3.0, -4.0]])
    logits = logits.to(dtype)
    tiny = 2.0**-24 if dtype == torch.float16 else 1e-38
    logits[1, :2] = torch.tensor([tiny, 0])  # far apart at a temperature below that
    for temperature in (1e-44, 1e-46, 5e-324):
        chances = [[0, 0.5, 0, 0.5, 0], [1.0, 0, 0, 0, 0]]
        assert scaled(logits, temperature).softmax(-1).tolist() == chances
        column = torch.full((2, 1), temperature, dtype=torch.float64)
        assert scaled(logits, column).softmax(-1).tolist() == chances
    for temperature in (1e38, 1e300, math.inf):
        chances = torch.tensor([[0, 0.25, 0.25, 0.25, 0.25], [0.2] * 5], dtype=torch.float64)
        torch.testing.assert_close(scaled(logits, temperature).softmax(-1).double(), chances)
    chances = scaled(logits, 0.5).softmax(-1).double()
    torch.testing.assert_close(chances, (logits.double() / 0.5).softmax(-1))


@pytest.mark.parametrize("temperature", [0, 1e-46, 1.0])
def test_tokens_without_a_chance_are_not_drawn_and_broken_logits_raise(temperature):
    model, prompt = make_lm(), random_tokens(2, 5)

    def draw(values):
        def write(module, inputs, logits):
            logits[:, : len(values)] = torch.tensor(values)
            return logits

        handle = model.lm_head.register_forward_hook(write)
        try:
            return sample(model, prompt, 30, temperature, torch.Generator().manual_seed(0))
        finally:
            handle.remove()

    masked = [-math.inf] * 255
    assert (draw([*masked, 0.0]) == 255).all()
    for broken in ([math.nan], [math.inf], [*masked, -math.inf]):
        with pytest.raises(FloatingPointError, match="logits of token 0 of row 0 are not finite"):
            draw(broken)


@pytest.mark.parametrize(
    ("prompt", "length", "temperature", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.uint8), 3, 1.0, "T >= 1"),
        (torch.zeros(4, dtype=torch.uint8), 3, 1.0, "T >= 1"),
        (torch.zeros(1, 2, dtype=torch.uint8), -1, 1.0, "may not be negative"),
        (torch.zeros(1, 2, dtype=torch.uint8), 3, math.nan, "must be finite, got 3 and nan"),
        (torch.zeros(1, 2, dtype=torch.uint8), 3, math.inf, "must be finite, got 3 and inf"),
        (torch.zeros(1, 2, dtype=torch.uint8), 3, -0.5, "may not be negative"),
    ],
)
def test_sampling_rejects_bad_arguments(prompt, length, temperature, message):
    with pytest.raises(ValueError, match=message):
        sample(make_lm(), prompt, length, temperature)


def test_imports_are_light_and_leave_the_import_system_alone():
    code = (
        "import sys, pararnn\n"
        "finders = list(sys.meta_path)\n"
        "parts = {'pararnn.lm', 'pararnn.lab.tasks', 'pararnn.lab.train', 'pararnn.lab.cli'}\n"
        "assert not parts & set(sys.modules)\n"
        "import pararnn.lm\n"
        "assert sys.meta_path == finders\n"
        "import pararnn.lab.cli, pararnn.lab.evaluation, pararnn.lab.tasks, pararnn.lab.train\n"
        "assert parts <= set(sys.modules)\n"
        "assert not {'matplotlib', 'transformers'} & set(sys.modules)\n"
    )
    process = run_fresh(code)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("way", ["cu_seq_lens", "position_ids", "left", "right"])
def test_no_loss_crosses_a_border(way):
    model, lengths = make_lm(), [9, 4, 6]
    rows = [tokens(length, seed=length) for length in lengths]
    wanted = sum(model.loss(row[None]) * (len(row) - 1) for row in rows) / (sum(lengths) - 3)
    if way in ("left", "right"):
        batch, mask = pad_rows(rows, way)
        loss = model.loss(batch, padding_mask=mask)
    else:
        where = borders(lengths) if way == "cu_seq_lens" else positions(lengths)
        loss = model.loss(torch.cat(rows)[None], **{way: where})
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)


def test_a_loss_may_continue_a_cache():
    model, tokens = make_lm(**HYBRID), random_tokens(2, 12)
    cache = model.new_cache()
    model(tokens[:, :7], cache)
    labels = tokens.long().clone()
    labels[:, :8] = -100
    torch.testing.assert_close(
        model.loss(tokens[:, 7:], cache=cache), model.loss(tokens, labels), rtol=1e-5, atol=0
    )
    assert cache.length == 12
