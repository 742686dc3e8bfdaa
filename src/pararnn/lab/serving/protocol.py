"""OpenAI's completions protocol: what a request may say, and how answers are written."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.exceptions import HTTPException

MOST_SAMPLES, MOST_STOPS = 128, 16
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


class Request(Fields):
    """A request.

    A field's description says what it must be. Fields without one are not served: they take what
    requests nothing.
    """

    model: str | None = Field(None, description="a text")
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
    ) = Field(description="a text, a list of texts, a list of token ids, or a list of such lists")
    max_tokens: int = Field(16, ge=1, description="an integer, at least 1")
    temperature: float = Field(1.0, ge=0, description="a finite number, 0 or more")
    top_p: float = Field(1.0, gt=0, le=1, description="a number, above 0, at most 1")
    n: int = Field(1, ge=1, le=MOST_SAMPLES, description=f"from 1 to {MOST_SAMPLES}")
    stop: Text | Annotated[list[Text], Field(max_length=MOST_STOPS)] = Field(
        [], description=f"a text, or a list of up to {MOST_STOPS}, none of them empty"
    )
    seed: int | None = Field(None, description="an integer")
    stream: bool = Field(False, description="true or false")
    stream_options: StreamOptions = Field(
        StreamOptions(), description='an object with "include_usage", true or false'
    )
    logprobs: Literal[0] | None = Field(None, description="0, for those of drawn tokens alone")
    user: str | None = Field(None, description="a text")
    best_of: Literal[1] = 1
    echo: Literal[False] = False
    frequency_penalty: float = Field(0.0, ge=0, le=0)
    logit_bias: dict[str, Any] = Field({}, max_length=0)
    presence_penalty: float = Field(0.0, ge=0, le=0)
    suffix: Literal[""] = ""

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, one or several."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if is_one else self.prompt  # type: ignore[list-item, return-value]

    @property
    def stops(self) -> list[str]:
        """The texts that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop


def read_request(body: bytes, model: str) -> Request:
    """Read the body of a request to the model of a name; Refusal says what is wrong."""
    try:
        request = Request.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None
    if request.model not in (None, model):
        raise Refusal(
            f"there is no model {_short(request.model)} here: name {model!r}",
            status=404,
            param="model",
            code="model_not_found",
        )
    return request


def _refusal(error: ValidationError) -> Refusal:
    """Return the first fault of a request."""
    fault = error.errors(include_url=False)[0]
    if not fault["loc"]:
        return Refusal(f"the body must be a JSON object: {fault['msg']}", code="invalid_json")
    name, value = str(fault["loc"][0]), _short(fault["input"])
    words = {field: info.description for field, info in Request.model_fields.items()}
    if fault["type"] == "missing":
        return Refusal(f"give a {name}", param=name)
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


def new_head(model: str) -> Head:
    """Make the head of the answers to a new request."""
    return Head(f"cmpl-{uuid.uuid4().hex}", int(time.time()), model)


def answer(head: Head, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
    """Build an answer of `choices`."""
    return {**head._asdict(), "object": "text_completion", "choices": list(choices), **more}


def choice(
    index: int,
    text: str,
    finish: str | None,
    drawn: Sequence[tuple[int, float]] | None = None,
) -> dict[str, Any]:
    """Build a choice of an answer: a whole text, or text added to it; with the tokens that were
    drawn and their log-probabilities, which None leaves out."""
    chances = None
    if drawn is not None:
        names = [f"token_id:{token}" for token, _ in drawn]
        chances = {"tokens": names, "token_logprobs": [chance for _, chance in drawn]}
    return {"index": index, "text": text, "logprobs": chances, "finish_reason": finish}


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
