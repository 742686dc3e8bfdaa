"""The running batch on a GPU, whose step is recorded: texts are those alone, bit for bit."""

import pytest
import torch
from lm_kinds import add_noise

from pararnn.lab.serving.batch import Batch
from pararnn.lab.serving.draw import Choice, draw
from pararnn.lab.serving.engine import Continuation, Engine, Prompt
from pararnn.lm import LanguageModel, LMConfig, quantise_weights, sample


def _write(engine: Engine, requests: list[dict]) -> list[str]:
    pieces = [[] for _ in requests]

    def submit(index: int) -> None:
        options = dict(requests[index])
        prompt = Prompt(options.pop("prompt"))
        words = lambda tokens: "".join(chr(0x100 + token) for token in tokens)  # noqa: E731
        engine.submit([Continuation(prompt, words, pieces[index].append, **options)])

    half = len(requests) // 2
    for index in range(half):
        submit(index)
    for _ in range(5):
        engine.step()
    for index in range(half, len(requests)):  # while others are running
        submit(index)
    while engine.step():
        pass
    assert all(own[-1].finish == "length" for own in pieces)
    return ["".join(piece.text for piece in own) for own in pieces]


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8")],
    ids=str,
)
def test_texts_that_join_and_leave_are_those_alone(cell, dtype, weights, device):
    torch.manual_seed(0)
    config = LMConfig(256, 2, vocab_size=500, num_heads=4, cell=cell)
    model = add_noise(LanguageModel(config, dtype=dtype)).to(device)
    if weights is not None:
        pytest.importorskip("torchao")
        quantise_weights(model, weights)
    generator = torch.Generator().manual_seed(1)
    requests = [
        {
            "prompt": torch.randint(500, (1 + 13 * i % 70,), generator=generator).tolist(),
            "max_tokens": 5 + 7 * i % 30,
            "temperature": (0, 1.0, 0.7)[i % 3],
            "top_p": (1.0, 0.8)[i % 2],
            "seed": i,
        }
        for i in range(40)
    ]
    batch = Batch(model, 16)
    assert batch.is_repeatable()
    assert batch.steps is not None
    assert batch.steps.recording is not None
    together = _write(Engine(batch, chunk=32), requests)
    alone = [_write(Engine(batch, chunk=32), [request])[0] for request in requests[::5]]
    assert together[::5] == alone
    assert len(set(together)) == 40


@pytest.mark.parametrize("temperature", [1e-37, 1e-44, 1e-46, 5e-324])
def test_small_temperatures_have_their_limit(temperature, device):
    logits = torch.tensor([[0.0, 3.0, -torch.inf, 2.0, -6e4]], device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        choices = [Choice(temperature, 1.0, 0.999), Choice(temperature, 5e-324, 0.999)]
        assert [draw(logits.to(dtype), [choice])[0] for choice in choices] == [1, 1]
    model = add_noise(LanguageModel(LMConfig(32, 2, vocab_size=50, num_heads=2))).to(device)
    prompt = torch.arange(6, device=device).view(2, 3)
    assert torch.equal(sample(model, prompt, 20, temperature), sample(model, prompt, 20, 0))


def test_broken_logits_raise_and_leave_the_gpu_usable(device):
    model = add_noise(LanguageModel(LMConfig(32, 2, vocab_size=50, num_heads=2))).to(device)
    prompt = torch.arange(6, device=device).view(2, 3)
    weight = model.lm_head.weight.detach().clone()
    for temperature in (0, 1e-46, 1.0):
        with torch.no_grad():
            model.lm_head.weight[3] = torch.nan
        with pytest.raises(FloatingPointError, match="logits of token 0 of row 0 are not finite"):
            sample(model, prompt, 20, temperature)
        with torch.no_grad():
            model.lm_head.weight.copy_(weight)
        assert sample(model, prompt, 20, temperature).shape == (2, 20)
