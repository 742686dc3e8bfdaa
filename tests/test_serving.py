"""The server, asked by OpenAI's client and by those who do it wrong."""

import asyncio
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial

import httpx
import openai
import pytest
import torch
from hypothesis import given, settings, strategies
from lm_kinds import add_noise
from overrides import plain
from processes import start
from table import HANGS_AFTER
from torch.multiprocessing import ProcessExitedException

from pararnn.lab import cli
from pararnn.lab.serving import protocol
from pararnn.lab.serving.answers import Offsets
from pararnn.lab.serving.app import Outbox, Service, listen, new_app, new_server, new_service
from pararnn.lab.serving.batch import ServingError
from pararnn.lab.serving.engine import Delta
from pararnn.lab.serving.load import end_tokens, load_served
from pararnn.lab.serving.protocol import Completion
from pararnn.lm import LanguageModel, LMConfig, save_byte_tokenizer, save_checkpoint
from pararnn.lm.quantise import matrix_of
from pararnn.lm.tokens import BYTES

WAIT = HANGS_AFTER
"""Seconds after which a test fails that waits for what never happens."""


def write_model(folder, cell="gru", end=None, **options):
    """A model on bytes. Without an end token, which it might draw, its texts have their length."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "num_heads": 2}
    vocabulary = BYTES + (end is not None)
    sizes |= {"cell": cell, "vocab_size": vocabulary, **options}
    model = add_noise(LanguageModel(LMConfig(**sizes)))
    with torch.no_grad():  # text that a person can read, in which every letter is likely
        model.lm_head.weight[:97] = model.lm_head.weight[123:] = 0
        model.lm_head.weight[97:123] *= 3
    save_checkpoint(model, folder)
    save_byte_tokenizer(folder, end)
    return folder


def test_an_event_loop_wakes_up_once_for_several_deltas(monkeypatch):
    async def main():
        outbox, queues, calls = Outbox(), [asyncio.Queue() for _ in range(2)], []
        call = outbox.loop.call_soon_threadsafe
        monkeypatch.setattr(
            outbox.loop, "call_soon_threadsafe", lambda run: calls.append(run) or call(run)
        )
        for _ in range(3):
            for number in range(6):
                outbox.put(queues[number % 2], number, Delta("a", number))
            for first, queue in enumerate(queues):
                for number in range(first, 6, 2):
                    assert await queue.get() == (number, Delta("a", number))
        assert len(calls) == 3

        def write():
            for number in range(20_000):
                outbox.put(queues[0], number, Delta("", number))

        writer = threading.Thread(target=write)
        writer.start()
        assert [(await queues[0].get())[0] for _ in range(20_000)] == [*range(20_000)]
        writer.join()
        assert not outbox.waiting

    asyncio.run(asyncio.wait_for(main(), WAIT))


@contextmanager
def running(folder, **options):
    """A server of a folder: its address and its service."""
    service = new_service(folder, **options)
    server = new_server(service)
    with listen("127.0.0.1", 0) as own:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [own]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{own.getsockname()[1]}", service
        finally:
            server.should_exit = True
            thread.join(WAIT)
            assert not thread.is_alive()
            assert not service.engine.is_running


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(folder):
    with running(folder, name="tiny", rows=8, queue=100, prefill_chunk=32, max_length=4000) as own:
        yield own


@pytest.fixture(scope="module")
def http():
    with httpx.Client(timeout=WAIT) as client:
        yield client


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0)


def wait_for(condition):
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def idle(service):
    return not service.engine.active and not service.engine.waiting


def test_models(client, server, http):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "pararnn"
    with pytest.raises(openai.NotFoundError, match="there is no model 'large' here: name 'tiny'"):
        client.models.retrieve("large")
    health = http.get(f"{server[0]}/health").json()
    assert health["rows"] == 8
    assert health["repeatable"] is True


def test_a_completion(client):
    result = client.completions.create(model="tiny", prompt="once", max_tokens=20, seed=1)
    (choice,) = result.choices
    assert result.object == "text_completion"
    assert result.model == "tiny"
    assert len(choice.text) == 20
    assert len(set(choice.text)) > 5
    assert choice.finish_reason == "length"
    assert result.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 4,
        "completion_tokens": 20,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    same = client.completions.create(model="tiny", prompt="once", max_tokens=20, seed=1)
    assert same.choices[0].text == choice.text
    other = client.completions.create(model="tiny", prompt="once", max_tokens=20, seed=2)
    assert other.choices[0].text != choice.text
    default = client.completions.create(model="tiny", prompt=list(b"once"))
    assert default.usage.completion_tokens == 16


def test_streams_bring_the_same_text_in_pieces(client):
    options = {"model": "tiny", "prompt": "once", "max_tokens": 30, "seed": 1, "n": 2}
    whole = client.completions.create(**options)
    events = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert len({event.id for event in events}) == 1
    texts, ends = ["", ""], ["", ""]
    for event in events[:-1]:
        (choice,) = event.choices
        texts[choice.index] += choice.text
        ends[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert ends == ["length", "length"]
    assert len(events) > 30
    assert events[-1].choices == []
    assert events[-1].usage == whole.usage


def test_log_probabilities_are_the_trainers_to_the_bit(tmp_path):
    """Of prompts and of texts that run together, by a model with batch_invariant."""
    folder = write_model(tmp_path / "exact", "head-gru", batch_invariant=True)
    model = load_served(folder).model
    with running(folder, name="exact", rows=4, max_length=400) as (address, _):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        options = {"model": "exact", "prompt": ["once", "upon a time"], "n": 2, "seed": 1}
        options |= {"max_tokens": 13, "logprobs": 0, "echo": True, "extra_body": {"top_k": 20}}
        whole = client.completions.create(**options)
    for choice in whole.choices:
        chances, text = choice.logprobs, choice.text.encode("ascii")
        assert len(text) == len(chances.tokens)
        wanted = model.log_probs(torch.tensor([list(text)]))[0]
        assert chances.token_logprobs[1:] == wanted[1:].tolist()


def test_samples_of_several_prompts_are_in_order(client):
    result = client.completions.create(
        model="tiny", prompt=["once", "upon"], max_tokens=10, n=3, seed=4
    )
    assert [choice.index for choice in result.choices] == list(range(6))
    assert len({choice.text for choice in result.choices}) == 6
    assert result.usage.prompt_tokens == 8
    first = client.completions.create(model="tiny", prompt="once", max_tokens=10, n=3, seed=4)
    assert [c.text for c in first.choices] == [c.text for c in result.choices[:3]]


def test_temperature_and_top_p(client):
    def text(**options):
        return (
            client.completions.create(model="tiny", prompt="once", max_tokens=40, **options)
            .choices[0]
            .text
        )

    likeliest = text(temperature=0)
    assert text(temperature=0, seed=5) == likeliest
    assert text(top_p=1e-6) == likeliest
    assert text(temperature=1e-6) == likeliest
    assert text(seed=5) != likeliest
    assert len(set(text(temperature=50, seed=5))) > len(set(text(temperature=0.1, seed=5)))


def test_a_stop_string_ends_a_text_before_it(client):
    options = {"model": "tiny", "prompt": "once", "max_tokens": 40, "seed": 1}
    text = client.completions.create(**options).choices[0].text
    stop = text[11:14]
    (choice,) = client.completions.create(**options, stop=["###", stop]).choices
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop"
    events = client.completions.create(**options, stop=stop, stream=True)
    assert "".join(event.choices[0].text for event in events) == choice.text


def test_64_clients_get_what_each_gets_alone(client, server):
    def options(i):
        return {
            "model": "tiny",
            "prompt": "abcdefgh"[: 1 + i % 8] * (1 + i % 5),
            "max_tokens": 5 + 7 * i % 20,
            "seed": i,
            "temperature": (0, 0.7, 1.5)[i % 3],
            "top_p": (1, 0.8)[i % 2],
        }

    async def ask(requests):
        async with openai.AsyncOpenAI(base_url=f"{server[0]}/v1", api_key="none") as many:
            return await asyncio.gather(*[_text(many, **request) for request in requests])

    async def _text(many, **request):
        if request["seed"] % 2:
            return (await many.completions.create(**request)).choices[0].text
        stream = await many.completions.create(**request, stream=True)
        return "".join([event.choices[0].text async for event in stream])

    together = asyncio.run(ask([options(i) for i in range(64)]))
    chosen = range(0, 64, 7)
    alone = [client.completions.create(**options(i)).choices[0].text for i in chosen]
    assert [together[i] for i in chosen] == alone
    assert len(set(together)) > 40
    wait_for(lambda: idle(server[1]))


def test_prompts_that_begin_alike_are_read_once(folder, http):
    prompt = "once upon a time there was a prompt of some length. "  # 52 tokens
    with running(folder, name="tiny", rows=8, prefill_chunk=64) as (url, service):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def cached(text, **options):
            create = client.completions.create
            result = create(model="tiny", prompt=text, max_tokens=4, temperature=0, **options)
            return result.usage.prompt_tokens_details.cached_tokens, result.choices[0].text

        assert cached(prompt)[0] == 0
        assert cached(prompt + "so")[0] == 48
        assert cached([prompt + "it", "other"], n=2)[0] == 48
        counts = http.get(f"{url}/health").json()["prefixes"]
        assert counts["hits"] == 2
        assert counts["tokens_saved"] == 96
        assert counts["lookups"] == 4
        assert counts["bytes"] == service.engine.prefixes.nbytes > 0
        stream = client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        )
        assert list(stream)[-1].usage.prompt_tokens_details.cached_tokens == 48
        # A seed promises the same text: where hits are not exact, such prompts are read whole.
        service.is_exact = False
        assert cached(prompt, seed=1)[0] == 0
        service.is_exact = True
        assert cached(prompt, seed=1)[0] == 48
    with running(folder, name="tiny", prefix_mib=0) as (url, service):
        assert http.get(f"{url}/health").json()["prefixes"] is None
        body = {"prompt": prompt}
        usages = [http.post(f"{url}/v1/completions", json=body).json()["usage"] for _ in range(2)]
        assert [own["prompt_tokens_details"]["cached_tokens"] for own in usages] == [0, 0]


def _reference(server, text):
    """The log-chances of all tokens of a text on bytes, and of its successor."""
    model = server[1].served_model.model
    with torch.no_grad():
        return model(torch.tensor([list(text.encode())]))[0].log_softmax(-1)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_brings_the_prompt_and_its_chances(client, server, stream):
    options = {"model": "tiny", "prompt": "once upon", "logprobs": 2, "echo": True, "seed": 3}
    options["extra_body"] = {"top_k": 8}  # letters, as bytes that are no text have no offsets
    result = client.completions.create(**options, max_tokens=5, stream=stream)
    choices = [choice for event in result for choice in event.choices] if stream else result.choices
    text = "".join(choice.text for choice in choices)
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    tokens, logprobs, tops, offsets = (
        [x for choice in choices for x in getattr(choice.logprobs, name)] for name in names
    )
    assert text.startswith("once upon")
    assert "".join(tokens) == text
    assert offsets == list(range(14))
    logs = _reference(server, text)
    assert (logprobs[0], tops[0]) == (None, None)
    for index in range(1, 14):
        assert logprobs[index] == pytest.approx(logs[index - 1, ord(text[index])].item(), abs=1e-4)
        assert tops[index][text[index]] == logprobs[index]
        assert max(tops[index].values()) == pytest.approx(logs[index - 1].max().item(), abs=1e-4)
        assert 2 <= len(tops[index]) <= 3
    bare = client.completions.create(**options, max_tokens=0).choices[0]
    assert bare.text == "once upon"
    assert bare.logprobs.token_logprobs == logprobs[:9]
    assert bare.finish_reason == "length"
    own = client.completions.create(**options | {"echo": False}, max_tokens=5).choices[0]
    assert own.text == text[9:]
    assert own.logprobs.token_logprobs == logprobs[9:]
    plain_echo = client.completions.create(
        model="tiny", prompt=list(b"ab"), max_tokens=0, echo=True
    )
    assert (plain_echo.choices[0].text, plain_echo.choices[0].logprobs) == ("ab", None)


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_count_the_texts_characters(client, stream):
    prompt = "h\u00e9 \U0001f600\u0301x"
    result = client.completions.create(
        model="tiny", prompt=prompt, logprobs=0, echo=True, seed=3, max_tokens=4, stream=stream
    )
    choices = [choice for event in result for choice in event.choices] if stream else result.choices
    text = "".join(choice.text for choice in choices)
    tokens, offsets = (
        [x for choice in choices for x in getattr(choice.logprobs, name)]
        for name in ("tokens", "text_offset")
    )
    assert (text[:6], len(text)) == (prompt, 10)
    assert offsets == [0, 1, 1, 2, 3, 3, 3, 3, 4, 4, 5, 6, 7, 8, 9]
    assert [tokens[index] for index in (0, 3, *range(10, 15))] == [*"h x", *text[6:]]


def test_offsets_of_texts_with_spaces_and_of_bytes_that_are_no_text():
    def places(decode, tokens, **options):
        offsets = Offsets(decode, **options)
        return [offsets.add(token, decode([token])) for token in tokens]

    words = lambda tokens: " ".join(f"w{token}" for token in tokens)  # noqa: E731
    assert places(words, [0, 1, 2]) == [0, 3, 6]
    assert places(words, [1, 2], before=[0], start=2) == [3, 6]
    utf8 = lambda tokens: bytes(tokens).decode("utf-8", "replace")  # noqa: E731
    assert places(utf8, b"a\xff\xfeb\xe2\x82c") == [0, 1, 1, 3, 4, 4, 5]


def test_the_best_of_several_are_the_likeliest(client, server):
    options = {"model": "tiny", "max_tokens": 6, "seed": 2, "temperature": 1.5, "logprobs": 0}
    every = client.completions.create(**options, prompt=["once", "upon"], n=8).choices
    best = client.completions.create(**options, prompt=["once", "upon"], n=2, best_of=8)
    sums = [sum(choice.logprobs.token_logprobs) for choice in every]
    for first in (0, 8):
        order = sorted(range(first, first + 8), key=lambda i: -sums[i])[:2]
        texts = [choice.text for choice in best.choices[first // 4 : first // 4 + 2]]
        assert texts == [every[i].text for i in order]
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert best.usage.completion_tokens == 96
    unscored = client.completions.create(
        **options | {"logprobs": None}, prompt=["once", "upon"], n=2, best_of=8
    )
    assert [c.text for c in unscored.choices] == [c.text for c in best.choices]
    assert unscored.choices[0].logprobs is None
    extra = {"top_k": 1}
    (one,) = client.completions.create(**options, prompt="once", extra_body=extra).choices
    likeliest = client.completions.create(**options | {"temperature": 0}, prompt="once").choices[0]
    assert one.text == likeliest.text


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("chats"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with running(folder, name="tiny", rows=4, max_length=300) as own:
        yield own


def test_chats_are_written_by_the_tokenizers_template(chats):
    url, _ = chats
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "o"}, {"type": "text", "text": "k"}]},
    ]
    options = {"model": "tiny", "messages": messages, "seed": 5}
    result = client.chat.completions.create(**options, max_completion_tokens=7)
    prompt = "[system] be brief\n[user] ok\n[assistant] "
    same = client.completions.create(model="tiny", prompt=prompt, max_tokens=7, seed=5)
    assert result.object == "chat.completion"
    assert result.id.startswith("chatcmpl-")
    assert result.choices[0].message.model_dump(exclude_none=True) == {
        "role": "assistant",
        "content": same.choices[0].text,
    }
    assert result.usage.prompt_tokens == len(prompt)
    scored = client.chat.completions.create(
        **options, max_tokens=7, logprobs=True, top_logprobs=2, n=2
    )
    content = scored.choices[0].logprobs.content
    assert "".join(own.token for own in content) == scored.choices[0].message.content
    assert [bytes(own.bytes).decode() for own in content] == [own.token for own in content]
    assert all(len(own.top_logprobs) == 2 for own in content)
    events = list(
        client.chat.completions.create(
            **options, max_tokens=7, n=2, stream=True, stream_options={"include_usage": True}
        )
    )
    assert {event.object for event in events} == {"chat.completion.chunk"}
    texts, roles = ["", ""], ["", ""]
    for event in events[:-1]:
        (choice,) = event.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role or ""
    assert texts == [choice.message.content for choice in scored.choices]
    assert roles == ["assistant", "assistant"]
    assert events[-1].usage.completion_tokens == 14
    rest = client.chat.completions.create(**options)  # up to the longest text
    assert rest.usage.total_tokens == 300


def test_wrong_chats_are_told_why(chats, server, http):
    def told(url, **body):
        response = http.post(f"{url}/v1/chat/completions", json=body)
        return response.status_code, response.json()["error"]["message"]

    message = {"role": "user", "content": "a"}
    status, words = told(server[0], messages=[message])
    assert status == 400
    assert "the tokenizer of tiny has no chat template" in words
    for body, reason in (
        ({}, "give messages, a list of objects"),
        ({"messages": []}, "messages must be a list of objects"),
        ({"messages": [{"role": "user"}]}, "messages must be a list of objects"),
        ({"messages": [{**message, "role": "tool"}]}, "template refuses the messages: no tools"),
        ({"messages": [message], "tools": [{}]}, "tools = [{}] is not served here"),
        ({"messages": [message], "prompt": "a"}, "there is no field 'prompt'"),
        ({"messages": [message], "max_completion_tokens": 0}, "must be an integer, at least 1"),
        ({"messages": [message], "max_tokens": 300}, "texts have up to 300 tokens here"),
        ({"messages": [{**message, "content": "a" * 300}]}, "texts have up to 300 tokens here"),
    ):
        status, words = told(chats[0], **body)
        assert status == 400
        assert reason in words
    body = {"messages": [message], "max_tokens": 2, "response_format": {"type": "text"}}
    assert http.post(f"{chats[0]}/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"", 400, "the body must be a JSON object: Invalid JSON"),
        (b"{", 400, "the body must be a JSON object: Invalid JSON"),
        (b"null", 400, "the body must be a JSON object"),
        (b"[]", 400, "the body must be a JSON object"),
        (b"\xff\xfe{", 400, "the body must be a JSON object: Invalid JSON"),
        (b'{"prompt": "\xff"}', 400, "the body must be a JSON object: Invalid JSON"),
        (b"[" * 100_000, 400, "the body must be a JSON object: Invalid JSON"),
        (b'{"prompt": ' + b"[" * 100_000, 400, "the body must be a JSON object: Invalid JSON"),
        (rb'{"prompt": "\ud800"}', 400, "the body must be a JSON object: Invalid JSON"),
        (
            rb'{"prompt": "a", "stop": "\udc00"}',
            400,
            "the body must be a JSON object: Invalid JSON",
        ),
        (rb'{"prompt": "a", "\ud800": 1}', 400, "the body must be a JSON object: Invalid JSON"),
        (b"{}", 400, "give prompt, a text, a list"),
        ({"prompt": None}, 400, "give prompt, a text, a list"),
        ({"prompt": ""}, 400, "the prompt has no tokens"),
        ({"prompt": []}, 400, "prompt must be a text, a list of texts"),
        ({"prompt": [[]]}, 400, "prompt must be a text, a list of texts"),
        ({"prompt": {}}, 400, "prompt must be a text, a list of texts"),
        ({"prompt": [1, "a"]}, 400, "prompt must be a text"),
        ({"prompt": [1, None]}, 400, "prompt must be a text"),
        ({"prompt": [True]}, 400, "prompt must be a text"),
        ({"prompt": [1.5]}, 400, "prompt must be a text"),
        ({"prompt": [256]}, 400, "tokens are from 0 to 255, got 256"),
        ({"prompt": [-1]}, 400, "tokens are from 0 to 255, got -1"),
        ({"prompt": [1, 256, -1]}, 400, "tokens are from 0 to 255, got 256"),
        ({"prompt": [[1], [10**400]]}, 400, "tokens are from 0 to 255, got 1000"),
        ({"prompt": "a", "model": "large"}, 404, "there is no model 'large' here: name 'tiny'"),
        ({"prompt": "a", "model": ["tiny"]}, 400, "model must be a text, got ['tiny']"),
        ({"prompt": "a", "max_tokens": -1}, 400, "max_tokens must be an integer, at least 0, got"),
        ({"prompt": "a", "max_tokens": True}, 400, "max_tokens must be an integer"),
        ({"prompt": "a", "max_tokens": 16.0}, 400, "max_tokens must be an integer"),
        ({"prompt": "a", "max_tokens": 4000}, 400, "up to 4000 tokens here, got a prompt of 1 and"),
        ({"prompt": "a", "max_tokens": 10**400}, 400, "up to 4000 tokens here, got a prompt of 1"),
        ({"prompt": "a" * 4000}, 400, "got a prompt of 4000 and max_tokens = 16"),
        ({"prompt": "a" * 500_000}, 413, "longer than the 465536 bytes"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature must be a finite number, 0 or more"),
        ({"prompt": "a", "temperature": "1"}, 400, "temperature must be a finite number"),
        (b'{"prompt": "a", "temperature": NaN}', 400, "temperature must be a finite number"),
        (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature must be a finite number"),
        ({"prompt": "a", "temperature": 10**400}, 400, "temperature must be a finite number"),
        ({"prompt": "a", "top_p": 0}, 400, "top_p must be a number, above 0, at most 1, got 0"),
        ({"prompt": "a", "top_p": 10**400}, 400, "top_p must be a number, above 0, at most 1"),
        ({"prompt": "a", "n": 0}, 400, "n must be from 1 to 128"),
        ({"prompt": "a", "n": 10**400}, 400, "n must be from 1 to 128"),
        ({"prompt": "a", "n": 128}, 400, "the request is for 128 texts, and rows and queue have"),
        ({"prompt": "a", "stop": [""]}, 400, "stop must be a text, or a list of up to 16"),
        ({"prompt": "a", "stop": ["."] * 17}, 400, "stop must be a text, or a list of up to 16"),
        ({"prompt": "a", "seed": "x"}, 400, "seed must be an integer"),
        ({"prompt": "a", "stream": 1}, 400, "stream must be true or false"),
        ({"prompt": "a", "stream_options": {"x": 1}}, 400, 'an object with "include_usage"'),
        ({"prompt": "a", "stream_options": []}, 400, 'an object with "include_usage"'),
        ({"prompt": "a", "logprobs": 21}, 400, "logprobs must be an integer from 0 to 20, got 21"),
        ({"prompt": "a", "logprobs": True}, 400, "logprobs must be an integer from 0 to 20"),
        ({"prompt": "a", "echo": 1}, 400, "echo must be true or false, got 1"),
        ({"prompt": "a", "suffix": "b"}, 400, "suffix = 'b' is not served here: leave it out"),
        ({"prompt": "a", "logit_bias": {"1": 2}}, 400, "logit_bias = "),
        ({"prompt": "a", "presence_penalty": 0.5}, 400, "presence_penalty = 0.5 is not served"),
        ({"prompt": "a", "presence_penalty": 10**400}, 400, "presence_penalty = 1000"),
        ({"prompt": "a", "best_of": [1]}, 400, "best_of must be from n to 128, and n in a stream"),
        ({"prompt": "a", "best_of": 2, "n": 3}, 400, "best_of must be from n to 128"),
        ({"prompt": "a", "best_of": 2, "stream": True}, 400, "best_of must be from n to 128"),
        ({"prompt": "a", "top_k": -1}, 400, "top_k must be an integer, at least 0; 0 is all"),
        ({"prompt": "a", "min_p": 0.5}, 400, "there is no field 'min_p': name some of model"),
        ({"messages": [{"role": "user"}], "prompt": "a"}, 400, "there is no field 'messages'"),
    ],
)
def test_wrong_requests_are_told_why(body, status, message, server, http):
    content = body if isinstance(body, bytes) else json.dumps(body)
    response = http.post(f"{server[0]}/v1/completions", content=content)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]
    wait_for(lambda: idle(server[1]))


NUMBERS = ("0", "1", "-1", "2.0", "0.5", "1e-320", "1e999", "NaN", "-Infinity", "1" + "0" * 400)
TEXTS = ('""', '"a"', r'"\ud800"', r'"\udc00\ud800"', r'"\u0000"', '"\xff"', '"\x01"')
DEEP = ("[" * 150 + "]" * 150, "[" * 300 + "]" * 300, '{"a":' * 300 + "1" + "}" * 300)
VALUES = strategies.recursive(
    strategies.sampled_from(("null", "true", "false", "1" + "0" * 5000, *NUMBERS, *TEXTS, *DEEP)),
    lambda values: (
        strategies.lists(values, max_size=3).map(lambda items: f"[{','.join(items)}]")
        | strategies.tuples(strategies.sampled_from(TEXTS), values).map(
            lambda item: f"{{{item[0]}:{item[1]}}}"
        )
    ),
)
NAMES = strategies.sampled_from([*(f'"{name}"' for name in Completion.model_fields), *TEXTS])
"""Pieces of JSON, and of what is none, as it comes over the wire."""


def test_any_body_is_served_or_told_why(server, http):
    @settings(max_examples=80)
    @given(strategies.lists(strategies.tuples(NAMES, VALUES), max_size=3), strategies.booleans())
    def check(items, is_latin):
        fields = [f"{name}:{value}" for name, value in (('"prompt"', '"a"'), *items)]
        content = f"{{{','.join(fields)}}}".encode("latin-1" if is_latin else "utf-8")
        response = http.post(f"{server[0]}/v1/completions", content=content)
        if response.headers["content-type"] != "application/json":
            assert response.text.endswith("data: [DONE]\n\n")
            assert response.status_code == 200
        elif response.status_code == 200:
            assert response.json()["choices"]
        else:
            assert 400 <= response.status_code < 500
            assert response.json()["error"]["message"]

    check()


def test_what_fails_in_the_server_itself_is_json(folder, http, capfd):
    with running(folder, rows=1) as (url, service), pytest.MonkeyPatch.context() as patch:
        patch.setattr(service, "_tokens", lambda *prompt: 1 / 0)
        response = http.post(f"{url}/v1/completions", json={"prompt": "a"})
    assert response.status_code == 500
    assert "ZeroDivisionError" in response.json()["error"]["message"]
    assert "Traceback" in capfd.readouterr().err


def test_what_asks_for_nothing_is_served(client):
    fields = dict.fromkeys(Completion.model_fields) | {
        "model": "tiny",
        "prompt": "a",
        "echo": False,
    }
    fields["extra_body"] = {name: fields.pop(name) for name in ("top_k", "prediction")}
    fields |= {"best_of": 1, "logit_bias": {}, "presence_penalty": 0, "suffix": "", "user": "me"}
    fields["frequency_penalty"] = 0.0
    assert client.completions.create(**fields).usage.completion_tokens == 16
    fields["extra_body"] |= {"top_k": 10**400}  # all tokens, too
    assert client.completions.create(**fields).usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/v1/embeddings", 404), ("GET", "/v1/completions", 405), ("GET", "/", 404)],
)
def test_other_paths_name_those_there_are(method, path, status, server, http):
    response = http.request(method, server[0] + path)
    assert response.status_code == status
    assert "this server has POST /v1/completions" in response.json()["error"]["message"]


@contextmanager
def halted(service):
    """Let no row write a token after its first before the end."""
    event, step = threading.Event(), service.engine.batch.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service.engine.batch, "step", lambda tokens: event.wait() and step(tokens))
        try:
            yield
        finally:
            event.set()


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_frees_the_row(stream, server):
    url, service = server
    wait_for(lambda: idle(service))
    host, port = url.removeprefix("http://").split(":")
    with halted(service):
        with socket.create_connection((host, int(port))) as own:
            body = json.dumps({"prompt": "once", "max_tokens": 3900, "stream": stream}).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            own.sendall(head.encode() + body)
            wait_for(lambda: service.engine.active == 1)
            (text,) = [text for text in service.engine.rows if text is not None]
        wait_for(lambda: text.is_cancelled)
    wait_for(lambda: idle(service))
    assert text.tokens < 3900


def test_who_sends_half_a_request_holds_nobody_up(server, client):
    host, port = server[0].removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as own:
        own.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"pro')
        assert client.completions.create(model="tiny", prompt="a").usage.total_tokens == 17


def test_who_leaves_in_the_middle_of_a_request_is_no_fault(server):
    service = Service(server[1].served_model, server[1].engine, 100)
    messages = [
        {"type": "http.request", "body": b'{"pro', "more_body": True},
        {"type": "http.disconnect"},
    ]
    answers = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        answers.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(new_app(service)(scope, receive, send))  # as uvicorn does, which prints what raises
    assert answers[0]["status"] == 499


def test_a_full_queue_is_told_at_once(folder):
    with running(folder, rows=1, queue=1) as (url, service):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        options = {"model": folder.name, "prompt": "a", "max_tokens": 30_000, "stream": True}
        create = client.completions.create
        with halted(service), create(**options), create(**options):
            wait_for(lambda: service.engine.active == 1 and len(service.engine.waiting) == 1)
            with pytest.raises(openai.RateLimitError, match="1 texts wait for 1 rows") as error:
                create(model=folder.name, prompt="a")
            assert error.value.response.headers["retry-after"] == "1"
        wait_for(lambda: idle(service))
        assert client.completions.create(model=folder.name, prompt="a", seed=0).choices


def test_a_model_that_fails_is_told(folder, capfd):
    with running(folder, rows=2) as (url, service):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(service.engine.batch, "step", lambda tokens: 1 / 0)
            with pytest.raises(openai.InternalServerError, match="ZeroDivisionError"):
                client.completions.create(model=folder.name, prompt="a")
            with pytest.raises(openai.APIError, match="ZeroDivisionError"):
                list(client.completions.create(model=folder.name, prompt="a", stream=True))
        assert client.completions.create(model=folder.name, prompt="a").usage.total_tokens > 1
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_end_tokens_are_the_folders(tmp_path):
    folder = write_model(tmp_path, end="<end>")
    assert load_served(folder).ends == {BYTES}
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert end_tokens(folder, None) == {3, 4}


def test_a_tokenizer_of_more_tokens_is_refused(tmp_path):
    folder = write_model(tmp_path)
    save_byte_tokenizer(folder, "<end>")
    with pytest.raises(ServingError, match="the tokenizer has 257 tokens, and the model 256"):
        load_served(folder)


def test_a_port_in_use_is_told():
    with listen("127.0.0.1", 0) as own, pytest.raises(ServingError, match="cannot listen on"):
        listen("127.0.0.1", own.getsockname()[1])


def test_connections_do_not_wait_for_confirmations():
    """Else the second of two events might come 40 ms late."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


OPTIONS = "--port 0 --device cpu --rows 8 --name mine"


def serve_command(folder, out, rank):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with open(out, "w", buffering=1) as sys.stdout:
        cli.main(["serve", str(folder), *OPTIONS.split()])


def test_the_command_serves_until_a_signal(folder, tmp_path, http):
    out = tmp_path / "out"
    process_context = start(partial(serve_command, folder, out), 1)
    try:
        wait_for(lambda: out.exists() and out.read_text().endswith("\n"))
        name, _, url = out.read_text().strip().partition(" at ")
        assert name == "mine"
        body = {"prompt": "once", "max_tokens": 5}
        answer = http.post(f"{url}/completions", json=body).json()
        assert answer["usage"]["total_tokens"] == 9
        os.kill(process_context.pids()[0], signal.SIGINT)
        with pytest.raises(ProcessExitedException) as error:
            process_context.join(WAIT)
        assert error.value.exit_code == 128 + signal.SIGINT
    finally:
        process_context.processes[0].kill()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "Required options"),
        ("nowhere", "there is no model in nowhere: it has no config.json"),
        ("nowhere --rows 0", "--rows: must be at least 1"),
        ("nowhere --port 70000", "must be from 0 to 65535, got '70000'"),
        ("nowhere --host 203.0.113.1", "cannot listen on 203.0.113.1, port 8000"),
    ],
)
def test_bad_options_of_the_command_give_one_line(options, message, capsys):
    options = f"{options} --port 0" if options == "nowhere" else options
    with pytest.raises(SystemExit) as error:
        cli.main(["serve", *options.split()])
    assert error.value.code == 2
    assert message in plain(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--rows 99999999999", "--rows 99999999999, --drafts 0: at least .* bytes on cpu, whose"),
        ("--rows 9999999999999999999999", "--rows 9999999999999999999999, .*: ask for less"),
        ("--drafts 99999999999", "--drafts 99999999999: at least .*, whose memory is"),
        ("--prefix-mib 99999999", "--prefix-mib 99999999: the budget is .*: give less"),
        ("--prefix-mib 99999999999999999999", "--prefix-mib 9+: the budget is .* on cpu"),
    ],
)
@pytest.mark.parametrize("mixers", [("rnn", "rnn"), ("rnn", "attention")])
def test_more_memory_than_there_is_gives_one_line(mixers, options, message, tmp_path, capsys):
    folder = write_model(tmp_path, mixers=mixers, num_attention_heads=2)
    with pytest.raises(SystemExit) as error:
        cli.main(["serve", str(folder), "--port", "0", *options.split()])
    assert error.value.code == 2
    assert re.search(message, plain(capsys.readouterr().err))


def test_without_the_extra_the_command_names_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit):
        cli.main(["serve", "nowhere"])
    assert "pip install -e '.[serve]'" in capsys.readouterr().err


def test_weights_in_8_bits(folder, http):
    pytest.importorskip("torchao")
    with running(folder, rows=2, weights="int8") as (url, service):
        assert matrix_of(service.served_model.model.lm_head.weight).numbers.dtype == torch.int8
        body = {"prompt": "once", "max_tokens": 12, "temperature": 0}
        texts = [http.post(f"{url}/v1/completions", json=body).json() for _ in range(2)]
    assert len(texts[0]["choices"][0]["text"]) == 12
    assert texts[0]["choices"] == texts[1]["choices"]


def test_a_model_with_attention_is_served(tmp_path, http):
    """Its keys are in the memory of kept states, which says how long texts may be."""
    sizes = {"mixers": ("rnn", "attention"), "num_attention_heads": 2}
    folder = write_model(tmp_path / "hybrid", **sizes)
    with running(folder, rows=4, prefix_mib=1, prefill_chunk=32) as (url, service):
        assert service.max_length == 16 * (512 - 1 - 1)  # pages of 2 KiB: one for free rows, a copy
        body = {"prompt": "once upon a time, " * 5, "max_tokens": 20, "temperature": 0}
        first, again = (http.post(f"{url}/v1/completions", json=body).json() for _ in range(2))
        assert first["choices"][0]["text"] == again["choices"][0]["text"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 80
        answer = http.post(f"{url}/v1/completions", json={**body, "max_tokens": 8100})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["message"].endswith("a larger --prefix-mib, which holds the keys of attention")
        wait_for(lambda: not service.engine.batch.pool.in_use)  # an answer comes before its end
        health = http.get(f"{url}/health").json()
        assert (health["pages"], health["preempted"]) == ({"count": 511, "in_use": 0}, 0)
        assert health["max_length"] == 8160
    with running(folder, rows=2, prefix_prompts=False) as (url, service):
        third = http.post(f"{url}/v1/completions", json=body).json()
        assert third["choices"][0]["text"] == first["choices"][0]["text"]
        assert http.get(f"{url}/health").json()["prefixes"]["states"] == 0
    with pytest.raises(
        ServingError, match=r"layer 1 of the model .Attention. has keys, whose pages"
    ):
        new_service(folder, prefix_mib=0)


def test_drafts_and_predictions(tmp_path, http):
    """The same texts as without; answers count drafted tokens, and /health those of all."""
    folder = write_model(tmp_path / "exact", "head-gru", batch_invariant=True)
    options = {"model": "tiny", "prompt": "once upon", "max_tokens": 40, "seed": 1, "n": 2}
    whole = {"stream": True, "stream_options": {"include_usage": True}}

    def client_of(url):
        return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    with running(folder, name="tiny", rows=4) as (url, _):
        create = client_of(url).completions.create
        texts = [choice.text for choice in create(**options).choices]
        assert http.get(f"{url}/health").json()["drafts"] is None
        assert create(**options).usage.completion_tokens_details is None
        with pytest.raises(
            openai.BadRequestError, match="start the server with --drafts 7"
        ) as error:
            create(**options, extra_body={"prediction": {"type": "content", "content": "a"}})
        assert error.value.param == "prediction"
    with running(folder, name="tiny", rows=4, drafts=5) as (url, service):
        create = client_of(url).completions.create
        parts = [{"type": "text", "text": text} for text in (texts[0][:17], texts[0][17:])]
        prediction = {"type": "content", "content": parts}
        result = create(**options, extra_body={"prediction": prediction})
        assert [choice.text for choice in result.choices] == texts
        details = result.usage.completion_tokens_details
        assert details.accepted_prediction_tokens > 25
        assert details.rejected_prediction_tokens >= 0
        counts = http.get(f"{url}/health").json()["drafts"]
        assert counts["exact"] is True
        assert counts["accepted"] == details.accepted_prediction_tokens
        drafted = counts["accepted"] + details.rejected_prediction_tokens
        assert (counts["drafted"], counts["passes"] > 0) == (drafted, True)
        events = list(create(**options, **whole, extra_body={"prediction": prediction}))
        for index in (0, 1):
            pieces = [e.choices[0].text for e in events[:-1] if e.choices[0].index == index]
            assert "".join(pieces) == texts[index]
        assert events[-1].usage.completion_tokens_details.accepted_prediction_tokens > 25
        for wrong in ("text", {"type": "content"}, {"type": "other", "content": "a"}):
            with pytest.raises(openai.BadRequestError, match="prediction must be an object with"):
                create(**options, extra_body={"prediction": wrong})
        long = {"type": "content", "content": "a" * 32_769}
        with pytest.raises(openai.BadRequestError, match="got a prediction of 32769") as error:
            create(**options, extra_body={"prediction": long})
        assert error.value.code == "context_length_exceeded"
        empty = {"type": "content", "content": ""}
        again = create(**options, extra_body={"prediction": empty})
        assert [choice.text for choice in again.choices] == texts
        wait_for(lambda: idle(service))


def test_an_event_is_one_line_however_clients_split():
    text = "a\x85b\u2028c\u2029\x0b\x1e\n\r\xe4"
    line, *rest = protocol.event({"text": text}).decode().splitlines()
    assert rest == [""]
    assert json.loads(line.removeprefix("data: ")) == {"text": text}
