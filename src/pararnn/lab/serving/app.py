"""The server: OpenAI's completions by HTTP, from an engine in a separate thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pararnn.lab.serving.batch import Batch, ServingError
from pararnn.lab.serving.engine import Continuation, Delta, Engine, EngineEnded, Prompt, QueueFull
from pararnn.lab.serving.load import ServedModel, load_served
from pararnn.lab.serving.protocol import (
    Head,
    Refusal,
    Request,
    answer,
    choice,
    event,
    new_head,
    read_request,
    usage,
)

GRACE = 10
"""Seconds that running answers have to end when the server is stopped."""

KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than clients keep theirs, which would
otherwise send a request into a connection that is just being closed."""


class Texts(NamedTuple):
    """The texts of a request, the queue of their deltas with each text's index, and its prompts'
    number of tokens."""

    items: list[Continuation]
    deltas: asyncio.Queue[tuple[int, Delta]]
    prompt_tokens: int


class Service:
    """Answers to requests.

    Args:
        served_model: the model and its words.
        engine: what writes texts.
        max_length: largest number of tokens of a prompt and its continuation together.
    """

    def __init__(self, served_model: ServedModel, engine: Engine, max_length: int) -> None:
        self.served_model, self.engine, self.max_length = served_model, engine, max_length
        self.is_repeatable = engine.batch.is_repeatable()
        self.encoding = asyncio.Lock()
        # A byte takes up to six characters of JSON, and a token rarely more than 16 bytes.
        self.most_bytes = 100 * max_length + (1 << 16)

    async def complete(self, http: HttpRequest) -> Response:
        """Answer POST /v1/completions."""
        request = read_request(await self._body(http), self.served_model.name)
        texts = await self._texts(request)
        try:
            self.engine.submit(texts.items)
        except QueueFull as error:
            raise Refusal(
                str(error),
                status=429,
                error_type="rate_limit_error",
                code="queue",
                headers={"Retry-After": "1"},
            ) from None
        except EngineEnded as error:
            raise Refusal(str(error), status=503, error_type="server_error", code="ended") from None
        head = new_head(self.served_model.name)
        if request.stream:
            events = self._events(texts, head, request.stream_options.include_usage)
            return Stream(self, events, texts.items)
        watch = asyncio.create_task(_disconnect(http))
        work = asyncio.create_task(self._whole(texts, head))
        try:
            await asyncio.wait([watch, work], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=499)  # to nobody
            return JSONResponse(work.result())
        finally:
            self.engine.cancel(texts.items)
            watch.cancel()
            work.cancel()

    async def _body(self, http: HttpRequest) -> bytes:
        body = bytearray()
        async for chunk in http.stream():
            body += chunk
            if len(body) > self.most_bytes:
                raise Refusal(
                    f"the body is longer than the {self.most_bytes} bytes that texts of "
                    f"{self.max_length} tokens can take",
                    status=413,
                    code="body_too_long",
                )
        return bytes(body)

    async def _texts(self, request: Request) -> Texts:
        """Build the texts of a request: n for each prompt."""
        count = len(request.prompts) * request.n
        if count > self.engine.capacity:
            raise Refusal(
                f"the request is for {count} texts, and rows and queue have places for "
                f"{self.engine.capacity}: send several requests",
                param="n",
            )
        prompts = [Prompt(await self._tokens(prompt)) for prompt in request.prompts]
        for prompt in prompts:
            self._check_length(len(prompt.tokens), request.max_tokens)
        deltas: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def text(index: int) -> Continuation:
            def deliver(delta: Delta) -> None:
                loop.call_soon_threadsafe(deltas.put_nowait, (index, delta))

            return Continuation(
                prompts[index // request.n],
                self.served_model.decode,
                deliver,
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                seed=None if request.seed is None else f"{request.seed} {index}",
                stop=request.stops,
                ends=self.served_model.ends,
                has_log_probs=request.logprobs is not None,
            )

        lengths = [len(prompt.tokens) for prompt in prompts]
        return Texts([text(index) for index in range(count)], deltas, sum(lengths))

    async def _tokens(self, prompt: str | list[int]) -> list[int]:
        size = self.served_model.model.config.vocab_size
        if isinstance(prompt, list):
            if unknown := [token for token in prompt if not 0 <= token < size]:
                raise Refusal(f"tokens are from 0 to {size - 1}, got {unknown[0]}", param="prompt")
            return prompt
        async with self.encoding:  # long texts take a while, and a tokenizer serves one thread
            tokens = await asyncio.to_thread(self.served_model.encode, prompt)
        if not tokens:
            raise Refusal("the prompt has no tokens: give some text", param="prompt")
        return tokens

    def _check_length(self, prompt: int, more: int) -> None:
        if prompt + more > self.max_length:
            raise Refusal(
                f"texts have up to {self.max_length} tokens here, got a prompt of {prompt} and "
                f"max_tokens = {more}",
                param="prompt",
                code="context_length_exceeded",
            )

    async def _whole(self, texts: Texts, head: Head) -> dict[str, Any]:
        """Return the answer, when all texts have ended."""
        answers: list[list[Delta]] = [[] for _ in texts.items]
        ends: dict[int, Delta] = {}
        while len(ends) < len(answers):
            index, delta = await texts.deltas.get()
            if delta.finish == "error":
                raise _failure(delta)
            answers[index].append(delta)
            if delta.finish:
                ends[index] = delta
        choices = []
        for index, (text, deltas) in enumerate(zip(texts.items, answers, strict=True)):
            drawn = [pair for delta in deltas for pair in delta.drawn]
            words = "".join(delta.text for delta in deltas)
            some = drawn if text.has_log_probs else None
            choices.append(choice(index, words, ends[index].finish, some))
        tokens = sum(delta.tokens for delta in ends.values())
        return answer(head, choices, usage=usage(texts.prompt_tokens, tokens))

    async def _events(self, texts: Texts, head: Head, with_usage: bool) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""
        ends: dict[int, Delta] = {}
        more = {"usage": None} if with_usage else {}
        while len(ends) < len(texts.items):
            index, delta = await texts.deltas.get()
            if delta.finish == "error":
                yield event(_failure(delta).content)
                return
            if delta.finish:
                ends[index] = delta
            drawn = delta.drawn if texts.items[index].has_log_probs else None
            yield event(answer(head, [choice(index, delta.text, delta.finish, drawn)], **more))
        if with_usage:
            tokens = sum(delta.tokens for delta in ends.values())
            yield event(answer(head, [], usage=usage(texts.prompt_tokens, tokens)))
        yield event(None)

    async def models(self, http: HttpRequest) -> Response:
        """Answer GET /v1/models and GET /v1/models/NAME."""
        name = self.served_model.name
        model = {"id": name, "object": "model", "created": 0, "owned_by": "pararnn"}
        wanted = http.path_params.get("name")
        if wanted is None:
            return JSONResponse({"object": "list", "data": [model]})
        if wanted != name:
            message = f"there is no model {wanted!r} here: name {name!r}"
            raise Refusal(message, status=404, param="model", code="model_not_found")
        return JSONResponse(model)

    async def health(self, http: HttpRequest) -> Response:
        """Answer GET /health: the state of the rows and the queue."""
        engine = self.engine
        return JSONResponse(
            {
                "model": self.served_model.name,
                "rows": engine.batch.rows,
                "active": engine.active,
                "waiting": len(engine.waiting),
                "places": engine.places,
                "repeatable": self.is_repeatable,
            }
        )


class Stream(StreamingResponse):
    """Events as they come; however it ends, also before it begins, its texts are given up."""

    def __init__(
        self, service: Service, events: AsyncIterator[bytes], texts: Sequence[Continuation]
    ) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.service, self.texts = service, texts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.service.engine.cancel(self.texts)


def _failure(delta: Delta) -> Refusal:
    return Refusal(delta.text, status=500, error_type="server_error", code="model_failed")


async def _disconnect(http: HttpRequest) -> None:
    """Wait until the client is gone."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def _refuse(http: HttpRequest, error: Exception) -> Response:
    """Answer a request that is not served, with the reason."""
    if isinstance(error, ClientDisconnect):
        error = Refusal("the request was not sent to its end", status=499)  # to nobody
    elif not isinstance(error, HTTPException):
        message = f"the server failed: {type(error).__name__}"
        error = Refusal(message, status=500, error_type="server_error", code="failed")
    elif not isinstance(error, Refusal):
        paths = ", ".join(f"{method} {path}" for path, method, _ in ROUTES)
        error = Refusal(
            f"{http.method} {http.url.path}: {error.detail}; this server has {paths}",
            status=error.status_code,
            code="unknown_url",
            headers=error.headers,
        )
    return JSONResponse(error.content, error.status_code, error.headers)


ROUTES = (
    ("/v1/completions", "POST", "complete"),
    ("/v1/models", "GET", "models"),
    ("/v1/models/{name:path}", "GET", "models"),
    ("/health", "GET", "health"),
)
"""Paths, their methods, and the method of `Service` that answers."""


def new_app(service: Service) -> Starlette:
    """Build the ASGI application; its engine runs while the application does."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        thread = threading.Thread(target=service.engine.run, name="pararnn-engine", daemon=True)
        thread.start()
        try:
            yield
        finally:
            service.engine.stop()
            await asyncio.to_thread(thread.join)

    routes = [Route(path, getattr(service, name), methods=[verb]) for path, verb, name in ROUTES]
    handlers: dict[Any, Any] = dict.fromkeys((HTTPException, ClientDisconnect, Exception), _refuse)
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)


def new_service(
    folder: Path | str,
    *,
    device: str = "cpu",
    name: str | None = None,
    weights: str | None = None,
    rows: int = 16,
    queue: int = 256,
    prefill_chunk: int = 512,
    max_length: int = 32_768,
) -> Service:
    """Load a folder's model and make the service for it.

    Args:
        folder: of `save_checkpoint` or `save_pretrained`, with a tokenizer.
        device: of the model.
        name: of the model in requests; None is the folder's.
        weights: "int8" or "fp8" as in `quantise_weights`; None is as they are stored.
        rows: number of texts that are written at once.
        queue: number of texts that may wait for a row; more are refused with status 429.
        prefill_chunk: largest number of prompt tokens that are read between two tokens of the rows.
        max_length: largest number of tokens of a prompt and its continuation together.

    Raises CheckpointError where the folder holds no such model, ServingError where it cannot be
    served.
    """
    served_model = load_served(folder, device, name, weights)
    engine = Engine(Batch(served_model.model, rows), prefill_chunk, queue)
    return Service(served_model, engine, max_length)


def listen(host: str, port: int) -> socket.socket:
    """Open a socket; ServingError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ServingError(f"cannot listen on {host}, port {port}: {error}") from error


def new_server(service: Service) -> uvicorn.Server:
    """Build the HTTP server."""
    return uvicorn.Server(
        uvicorn.Config(
            new_app(service),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=GRACE,
            timeout_keep_alive=KEEP_ALIVE,
        )
    )


def serve(folder: Path | str, *, host: str = "127.0.0.1", port: int = 8000, **options: Any) -> None:
    """Serve a folder's model until a signal; options as in `new_service`."""
    with listen(host, port) as listener:
        service = new_service(folder, **options)
        if not service.is_repeatable:
            print(
                f"with {service.engine.batch.rows} rows this machine computes equal rows with "
                "other bits, so that a text depends on the row that it gets: try a power of two "
                "as --rows",
                file=sys.stderr,
            )
        address, bound_port = listener.getsockname()[:2]
        address = f"[{address}]" if ":" in address else address
        print(f"{service.served_model.name} at http://{address}:{bound_port}/v1", flush=True)
        new_server(service).run(sockets=[listener])
