"""OpenAI's completions protocol: what a request may say, and how answers are written."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MOST_SAMPLES, MOST_STOPS = 128, 16


class Refusal(Exception):
    """A request that is not served: the status and the error's fields."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.content = {
            "error": {"message": message, "type": kind, "param": param, "code": code},
        }


@dataclass(frozen=True)
class Wanted:
    """A field of a request: its default, its condition and that in words."""

    default: Any
    holds: Callable[[Any], bool]
    words: str


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _is_integer(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_prompt(x: Any) -> bool:
    if isinstance(x, str):
        return True
    if not isinstance(x, list) or not x:
        return False
    if all(map(_is_integer, x)) or all(isinstance(part, str) for part in x):
        return True
    return all(isinstance(part, list) and part and all(map(_is_integer, part)) for part in x)


def _are_stops(x: Any) -> bool:
    texts = [x] if isinstance(x, str) else x
    is_list = isinstance(texts, list) and len(texts) <= MOST_STOPS
    return is_list and all(isinstance(part, str) and part for part in texts)


def _is_option(x: Any) -> bool:
    return (
        isinstance(x, dict) and set(x) <= {"include_usage"} and all(v in (0, 1) for v in x.values())
    )


FIELDS = {
    "model": Wanted(None, lambda x: isinstance(x, str), "a text"),
    "prompt": Wanted(
        None, _is_prompt, "a text, a list of texts, a list of token ids, or a list of such lists"
    ),
    "max_tokens": Wanted(16, lambda x: _is_integer(x) and x >= 1, "an integer, at least 1"),
    "temperature": Wanted(1.0, lambda x: _is_number(x) and x >= 0, "a number, 0 or more"),
    "top_p": Wanted(1.0, lambda x: _is_number(x) and 0 < x <= 1, "a number, above 0, at most 1"),
    "n": Wanted(
        1, lambda x: _is_integer(x) and 1 <= x <= MOST_SAMPLES, f"from 1 to {MOST_SAMPLES}"
    ),
    "stop": Wanted((), _are_stops, f"a text, or a list of up to {MOST_STOPS}, none of them empty"),
    "seed": Wanted(None, _is_integer, "an integer"),
    "stream": Wanted(False, lambda x: isinstance(x, bool), "true or false"),
    "stream_options": Wanted({}, _is_option, 'an object with "include_usage", true or false'),
    "user": Wanted(None, lambda x: isinstance(x, str), "a text"),
}
"""Fields of a request. null stands for the default."""

NEUTRAL: dict[str, Sequence[Any]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (),
    "presence_penalty": (0,),
    "suffix": ("",),
}
"""Fields that are not served, and the values that ask for nothing."""


class Request(NamedTuple):
    """A request whose fields hold what `FIELDS` says."""

    prompts: list[str] | list[list[int]]
    max_tokens: int
    temperature: float
    top_p: float
    n: int
    stop: list[str]
    seed: int | None
    stream: bool
    with_usage: bool


def read_request(body: bytes, model: str) -> Request:
    """Read the body of a request to the model of a name; Refusal says what is wrong."""
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is no JSON: {error}", code="invalid_json") from None
    if not isinstance(content, dict):
        raise Refusal(f"the body must be a JSON object, got {type(content).__name__}")
    content = {name: value for name, value in content.items() if value is not None}
    for name, value in content.items():
        if name in NEUTRAL:
            if value not in NEUTRAL[name]:
                raise Refusal(
                    f"{name} = {_short(value)} is not served here: leave it out",
                    param=name,
                    code="unsupported_parameter",
                )
        elif name not in FIELDS:
            raise Refusal(
                f"there is no field {_short(name)}: name some of {', '.join(FIELDS)}",
                param=name,
                code="unknown_parameter",
            )
        elif not FIELDS[name].holds(value):
            raise Refusal(f"{name} must be {FIELDS[name].words}, got {_short(value)}", param=name)
    if "prompt" not in content:
        raise Refusal("give a prompt", param="prompt")
    fields = {name: content.get(name, wanted.default) for name, wanted in FIELDS.items()}
    if fields["model"] not in (None, model):
        raise Refusal(
            f"there is no model {_short(fields['model'])} here: name {model!r}",
            status=404,
            param="model",
            code="model_not_found",
        )
    prompt, stop = fields["prompt"], fields["stop"]
    is_one = isinstance(prompt, str) or _is_integer(prompt[0])
    return Request(
        prompts=[prompt] if is_one else prompt,
        max_tokens=fields["max_tokens"],
        temperature=float(fields["temperature"]),
        top_p=float(fields["top_p"]),
        n=fields["n"],
        stop=[stop] if isinstance(stop, str) else list(stop),
        seed=fields["seed"],
        stream=fields["stream"],
        with_usage=bool(fields["stream_options"].get("include_usage")),
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Head(NamedTuple):
    """Fields that all answers to one request share."""

    id: str
    created: int
    model: str


def new_head(model: str) -> Head:
    """Make the head of the answers to a new request."""
    return Head(f"cmpl-{uuid.uuid4().hex}", int(time.time()), model)


def answer(head: Head, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """Build an answer of `choices`."""
    return {**head._asdict(), "object": "text_completion", "choices": list(choices), **more}


def choice(index: int, text: str, finish: str | None) -> dict[str, Any]:
    """Build a choice of an answer: one text, or what was added to it."""
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Build the count of tokens of an answer."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def event(content: Mapping[str, Any] | None) -> bytes:
    """Write an answer as an event of a stream; None is the end."""
    text = "[DONE]" if content is None else json.dumps(content, ensure_ascii=False)
    return f"data: {text}\n\n".encode()
