"""OpenAI's completions protocol: what a request may say, and how answers are written."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.exceptions import HTTPException

from pararnn.lm.text import REPLACEMENT

MOST_SAMPLES, MOST_STOPS, MOST_LIKELIEST = 128, 16, 20
Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[int], Field(min_length=1, fail_fast=True)]


class Refusal(HTTPException):
    """A request that is not served: the status, headers, and the error's fields."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        error_type: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        error = {"message": message, "type": error_type, "param": param, "code": code}
        self.content = {"error": error}


class Fields(BaseModel):
    """A JSON object with only these fields, in which null stands for a field's default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        return {name: value for name, value in content.items() if value is not None}


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool = False


class TextPart(Fields):
    """A piece of a message or a prediction."""

    type: Literal["text"]
    text: str


Content = str | list[TextPart]


def text_of(content: Content) -> str:
    """Return a content as one text."""
    return content if isinstance(content, str) else "".join(piece.text for piece in content)


class Prediction(Fields):
    """A text that the answer is likely to have."""

    type: Literal["content"]
    content: Content


class Request(Fields):
    """What requests of all paths may say.

    A field's description says what it must be. Fields without one are not served: they take what
    requests nothing.
    """

    model: str | None = Field(None, description="a text")
    temperature: float = Field(1.0, ge=0, description="a finite number, 0 or more")
    top_p: float = Field(1.0, gt=0, le=1, description="a number, above 0, at most 1")
    top_k: int = Field(0, ge=0, description="an integer, at least 0; 0 is all tokens")
    n: int = Field(1, ge=1, le=MOST_SAMPLES, description=f"from 1 to {MOST_SAMPLES}")
    stop: Text | Annotated[list[Text], Field(max_length=MOST_STOPS)] = Field(
        [], description=f"a text, or a list of up to {MOST_STOPS}, none of them empty"
    )
    seed: int | None = Field(None, description="an integer")
    stream: bool = Field(False, description="true or false")
    stream_options: StreamOptions = Field(
        StreamOptions(), description='an object with "include_usage", true or false'
    )
    user: str | None = Field(None, description="a text")
    prediction: Prediction | None = Field(
        None, description='an object with "type": "content", and "content" as of a message'
    )
    frequency_penalty: float = Field(0.0, ge=0, le=0)
    logit_bias: dict[str, Any] = Field({}, max_length=0)
    presence_penalty: float = Field(0.0, ge=0, le=0)

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def samples(self) -> int:
        """Texts that are written after each prompt."""
        return self.n

    @property
    def top(self) -> int | None:
        """How many likeliest tokens are named next to each one; None for no chances at all."""
        raise NotImplementedError

    @property
    def scores_prompt(self) -> bool:
        """Whether chances of the prompt's tokens are asked for."""
        return False

    @property
    def limit(self) -> int | None:
        """Largest number of tokens; None is as many as fit."""
        raise NotImplementedError


class Completion(Request):
    """A request to continue texts."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
    ) = Field(description="a text, a list of texts, a list of token ids, or a list of such lists")
    max_tokens: int = Field(16, ge=0, description="an integer, at least 0")
    best_of: int | None = Field(
        None, ge=1, le=MOST_SAMPLES, description=f"from n to {MOST_SAMPLES}, and n in a stream"
    )
    echo: bool = Field(False, description="true or false")
    logprobs: int | None = Field(
        None, ge=0, le=MOST_LIKELIEST, description=f"an integer from 0 to {MOST_LIKELIEST}"
    )
    suffix: Literal[""] = ""

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, one or several."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt  # type: ignore[list-item, return-value]

    @property
    def samples(self) -> int:
        """Texts that are written after each prompt, of which the n likeliest are answered."""
        return self.best_of or self.n

    @property
    def top(self) -> int | None:
        """See `Request.top`; choosing needs the texts' own chances."""
        return 0 if self.logprobs is None and self.samples > self.n else self.logprobs

    @property
    def scores_prompt(self) -> bool:
        return self.echo and self.logprobs is not None

    @property
    def limit(self) -> int | None:
        return self.max_tokens


class Message(Fields):
    """A message of a chat."""

    role: str
    content: Content
    name: str | None = None

    def template(self) -> dict[str, str]:
        """Return the message as templates of tokenizers read it."""
        name = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text_of(self.content), **name}


class TextFormat(Fields):
    """The format of messages that are texts."""

    type: Literal["text"]


class Chat(Request):
    """A request for the next message of a chat."""

    messages: Annotated[list[Message], Field(min_length=1)] = Field(
        description='a list of objects with "role" and "content", a text or pieces of type "text"'
    )
    max_completion_tokens: int | None = Field(None, ge=1, description="an integer, at least 1")
    max_tokens: int | None = Field(None, ge=1, description="an integer, at least 1")
    logprobs: bool = Field(False, description="true or false")
    top_logprobs: int = Field(
        0, ge=0, le=MOST_LIKELIEST, description=f"an integer from 0 to {MOST_LIKELIEST}"
    )
    tools: None = None
    tool_choice: Literal["none"] = "none"
    response_format: TextFormat | None = None

    @property
    def top(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


Asked = TypeVar("Asked", bound=Request)


def read_request(body: bytes, model: str, kind: type[Asked]) -> Asked:
    """Read the body of a request of a kind to the model of a name; Refusal says what is wrong."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error, kind) from None
    if request.model not in (None, model):
        raise Refusal(
            f"there is no model {_short(request.model)} here: name {model!r}",
            status=404,
            param="model",
            code="model_not_found",
        )
    if request.samples < request.n or (request.stream and request.samples > request.n):
        words = Completion.model_fields["best_of"].description
        raise Refusal(f"best_of must be {words}, got {request.samples}", param="best_of")
    return request


def _refusal(error: ValidationError, kind: type[Request]) -> Refusal:
    """Return the first fault of a request."""
    fault = error.errors(include_url=False)[0]
    if not fault["loc"]:
        return Refusal(f"the body must be a JSON object: {fault['msg']}", code="invalid_json")
    name, value = str(fault["loc"][0]), _short(fault["input"])
    words = {field: info.description for field, info in kind.model_fields.items()}
    if fault["type"] == "missing" and len(fault["loc"]) == 1:
        return Refusal(f"give {name}, {words[name]}", param=name)
    if name not in words:
        served = ", ".join(field for field in words if words[field])
        message = f"there is no field {_short(name)}: name some of {served}"
        return Refusal(message, param=name, code="unknown_parameter")
    if words[name] is None:
        message = f"{name} = {value} is not served here: leave it out"
        return Refusal(message, param=name, code="unsupported_parameter")
    return Refusal(f"{name} must be {words[name]}, got {value}", param=name)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Head(NamedTuple):
    """Fields that all answers to one request share."""

    id: str
    created: int
    model: str


class Style(NamedTuple):
    """How the answers of a path are written: what their ids begin with, the names of a whole answer
    and of one in pieces, and the functions that build a choice of each, and chances of tokens."""

    prefix: str
    whole: str
    piece: str
    choice: Callable[[int, str, Any, str | None], dict[str, Any]]
    delta: Callable[[int, str, Any, str | None], dict[str, Any]]
    logprobs: Callable[[Sequence[Word]], dict[str, Any]]

    def head(self, model: str) -> Head:
        """Make the head of the answers to a new request."""
        return Head(f"{self.prefix}-{uuid.uuid4().hex}", int(time.time()), model)


class Word(NamedTuple):
    """A token's text, its chance's logarithm (None for the first of a prompt), the likeliest
    tokens' in its place, and where it begins in the answer: a token that has some bytes of a
    character, at that one."""

    text: str
    logprob: float | None
    top: tuple[tuple[str, float], ...]
    start: int


def answer(head: Head, name: str, choices: Sequence[Mapping[str, Any]], **more: Any) -> Any:
    """Build an answer of `choices`, whose object has a name."""
    return {**head._asdict(), "object": name, "choices": list(choices), **more}


def choice(index: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
    """Build a choice of a completion: a whole text, or text added to it."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _message(index: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}


def _delta(index: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
    """Build a piece of a message; one without a text is the first, or the last."""
    delta = {"content": text} if text else {} if finish else {"role": "assistant", "content": ""}
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}


def _logprobs(words: Sequence[Word]) -> dict[str, Any]:
    """Build the chances of a completion's tokens.

    Of tokens with the same text the likeliest counts.
    """
    tops = []
    for word in words:
        top: dict[str, float] = {}
        for text, logprob in word.top:
            top.setdefault(text, logprob)
        if word.logprob is not None:
            top.setdefault(word.text, word.logprob)
        tops.append(top if word.logprob is not None else None)
    return {
        "tokens": [word.text for word in words],
        "token_logprobs": [word.logprob for word in words],
        "top_logprobs": tops,
        "text_offset": [word.start for word in words],
    }


def _chat_logprobs(words: Sequence[Word]) -> dict[str, Any]:
    """Build the chances of a message's tokens."""

    def one(text: str, logprob: float | None) -> dict[str, Any]:
        is_text = REPLACEMENT not in text
        return {
            "token": text,
            "logprob": logprob,
            "bytes": list(text.encode()) if is_text else None,
        }

    return {
        "content": [
            {**one(word.text, word.logprob), "top_logprobs": [one(*top) for top in word.top]}
            for word in words
        ]
    }


STYLES: dict[type[Request], Style] = {
    Completion: Style("cmpl", "text_completion", "text_completion", choice, choice, _logprobs),
    Chat: Style(
        "chatcmpl", "chat.completion", "chat.completion.chunk", _message, _delta, _chat_logprobs
    ),
}
"""How the answers to each kind of request are written."""


def usage(
    prompt: int, completion: int, cached: int, drafts: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Build the count of tokens of an answer.

    cached: those that no pass read again. drafts: drafted tokens that were right, and wrong; None
    where none are drafted.
    """
    names = "accepted_prediction_tokens", "rejected_prediction_tokens"
    details = {"completion_tokens_details": dict(zip(names, drafts, strict=True))} if drafts else {}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        **details,
    }


def event(content: Mapping[str, Any] | None) -> bytes:
    """Write an answer as an event of a stream; None is the end.

    In ASCII: many clients also end a line at U+0085 and U+2028, which JSON leaves in a text.
    """
    text = "[DONE]" if content is None else json.dumps(content)
    return f"data: {text}\n\n".encode()
