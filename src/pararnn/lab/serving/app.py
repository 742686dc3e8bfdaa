"""The server: OpenAI's completions and chats by HTTP, from an engine in a separate thread."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
from array import array
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pararnn.lab.serving.answers import Texts, Writer
from pararnn.lab.serving.batch import Batch, ServingError
from pararnn.lab.serving.engine import Continuation, Delta, Engine, EngineEnded, Prompt, QueueFull
from pararnn.lab.serving.load import ChatError, ServedModel, load_served
from pararnn.lab.serving.protocol import (
    Chat,
    Completion,
    Refusal,
    Request,
    event,
    read_request,
    text_of,
)
from pararnn.lm.prefixes import GRAIN, Prefixes

GRACE = 10
"""Seconds that running answers have to end when the server is stopped."""

KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than clients keep theirs, which would
otherwise send a request into a connection that is just being closed."""


class Outbox:
    """Deltas on their way from the engine's thread to the event loop that runs now.

    The loop wakes up once for those of all rows: each time it may keep the engine from its work.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.waiting: deque[tuple[asyncio.Queue[tuple[int, Delta]], int, Delta]] = deque()

    def put(self, deltas: asyncio.Queue[tuple[int, Delta]], index: int, delta: Delta) -> None:
        """Send a delta of a text to its queue, in the engine's thread alone."""
        self.waiting.append((deltas, index, delta))
        if len(self.waiting) == 1:  # else the loop has yet to take the ones before
            self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self.waiting:
            deltas, index, delta = self.waiting.popleft()
            deltas.put_nowait((index, delta))


class Service:
    """Answers to requests.

    Args:
        served_model: the model and its words.
        engine: what writes texts.
        max_length: largest number of tokens of a prompt and its continuation together; fewer where
            the engine has no pages for so many.

    outbox: of the event loop, which sets it.
    """

    outbox: Outbox

    def __init__(self, served_model: ServedModel, engine: Engine, max_length: int) -> None:
        self.served_model, self.engine = served_model, engine
        self.max_length = max_length if engine.longest is None else min(max_length, engine.longest)
        is_memory = self.max_length < max_length
        option = "--prefix-mib, which holds the keys of attention" if is_memory else "--max-length"
        self.why_length = f"ask for fewer, or start the server with a larger {option}"
        engine.reader.prepare()
        self.is_repeatable = engine.batch.is_repeatable()
        self.is_exact = engine.is_exact()
        self.encoding = asyncio.Lock()
        # A byte takes up to six characters of JSON, and a token rarely more than 16 bytes.
        self.most_bytes = 100 * max_length + (1 << 16)

    async def complete(self, http: HttpRequest) -> Response:
        """Answer POST /v1/completions."""
        return await self._answer(http, Completion)

    async def chat(self, http: HttpRequest) -> Response:
        """Answer POST /v1/chat/completions."""
        return await self._answer(http, Chat)

    async def _answer(self, http: HttpRequest, kind: type[Request]) -> Response:
        """Answer a request of a kind."""
        request = read_request(await self._body(http), self.served_model.name, kind)
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
        writer = Writer(texts, self.served_model)
        if request.stream:
            return Stream(self, self._events(texts, writer), texts.items)
        watch = asyncio.create_task(_disconnect(http))
        work = asyncio.create_task(self._whole(texts, writer))
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
        """Build the texts of a request: some for each prompt."""
        given: Sequence[str | list[int]] = [""]
        if isinstance(request, Completion):
            given = request.prompts
        count = len(given) * request.samples
        if count > self.engine.capacity:
            raise Refusal(
                f"the request is for {count} texts, and rows and queue have places for "
                f"{self.engine.capacity}: send several requests",
                param="n",
            )
        if isinstance(request, Chat):
            messages = [message.template() for message in request.messages]
            given = [self._chat_text(messages)]
        # A seed promises the same text, and so the same bits.
        reuses = request.seed is None or self.is_exact
        is_chat, top = isinstance(request, Chat), request.top if request.scores_prompt else None
        prediction = await self._prediction(request)
        prompts = [
            Prompt(await self._tokens(prompt, is_chat), reuses, top, prediction) for prompt in given
        ]
        longest = max(len(prompt.tokens) for prompt in prompts)
        max_tokens = request.limit
        if max_tokens is None:
            max_tokens = max(1, self.max_length - longest)
        self._check_length(longest, max_tokens)
        deltas: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()

        def text(index: int) -> Continuation:
            def deliver(delta: Delta) -> None:
                self.outbox.put(deltas, index, delta)

            return Continuation(
                prompts[index // request.samples],
                self.served_model.decode,
                deliver,
                max_tokens=max_tokens,
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                seed=None if request.seed is None else f"{request.seed} {index}",
                stop=request.stops,
                ends=self.served_model.ends,
                top=request.top,
            )

        items = [text(index) for index in range(count)]
        return Texts(request, items, deltas, prompts, given)

    async def _prediction(self, request: Request) -> Sequence[int]:
        """Return the tokens of a request's prediction, in which drafts are looked up."""
        if request.prediction is None:
            return []
        if self.engine.lookup is None:
            raise Refusal(
                "prediction is for drafts, and this server drafts no tokens: leave it out, or "
                "start the server with --drafts 7",
                param="prediction",
                code="unsupported_parameter",
            )
        text = text_of(request.prediction.content)
        tokens = await self._tokens(text, is_chat=True) if text else []
        if len(tokens) > self.max_length:  # the engine's thread indexes it, while all rows wait
            raise Refusal(
                f"texts have up to {self.max_length} tokens here, got a prediction of "
                f"{len(tokens)}: leave out what the answer cannot have",
                param="prediction",
                code="context_length_exceeded",
            )
        return tokens

    def _chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        try:
            return self.served_model.chat(messages)
        except ChatError as error:
            raise Refusal(str(error), param="messages") from None

    async def _tokens(self, prompt: str | list[int], is_chat: bool = False) -> Sequence[int]:
        if isinstance(prompt, list):
            return token_array(prompt, self.served_model.model.config.vocab_size)
        async with self.encoding:  # long texts take a while, and a tokenizer serves one thread
            # A template writes special tokens itself.
            tokens = await asyncio.to_thread(self.served_model.encode, prompt, not is_chat)
        if not tokens:
            raise Refusal("the prompt has no tokens: give some text", param="prompt")
        return tokens

    def _check_length(self, prompt: int, more: int) -> None:
        if prompt + more > self.max_length:
            raise Refusal(
                f"texts have up to {self.max_length} tokens here, got a prompt of {prompt} and "
                f"max_tokens = {more}: {self.why_length}",
                param="prompt",
                code="context_length_exceeded",
            )

    async def _whole(self, texts: Texts, writer: Writer) -> Any:
        """Return the answer, when all texts have ended."""
        answers: list[list[Delta]] = [[] for _ in texts.items]
        running = len(answers)
        while running:
            index, delta = await texts.deltas.get()
            if delta.finish == "error":
                raise _failure(delta)
            answers[index].append(delta)
            running -= delta.finish is not None
        return writer.whole(answers)

    async def _events(self, texts: Texts, writer: Writer) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""
        ends: dict[int, Delta] = {}
        with_usage = texts.request.stream_options.include_usage
        more = {"usage": None} if with_usage else {}
        while len(ends) < len(texts.items):
            index, delta = await texts.deltas.get()
            if delta.finish == "error":
                yield event(_failure(delta).content)
                return
            if delta.finish:
                ends[index] = delta
            for piece in writer.pieces(index, delta, **more):
                yield event(piece)
        if with_usage:
            yield event(writer.ending(ends))
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
        """Answer GET /health: the state of the rows, the queue and the kept states."""
        engine, prefixes, pool = self.engine, self.engine.prefixes, self.engine.batch.pool
        drafts = {"exact": engine.batch.verifies_exactly, **vars(engine.counts)}
        return JSONResponse(
            {
                "model": self.served_model.name,
                "rows": engine.batch.rows,
                "active": engine.active,
                "waiting": len(engine.waiting),
                "places": engine.places,
                "repeatable": self.is_repeatable,
                "prefixes": None if prefixes is None else prefixes.counts._asdict(),
                "prefixes_exact": self.is_exact,
                "max_length": self.max_length,
                "pages": None if pool is None else {"count": pool.capacity, "in_use": pool.in_use},
                "preempted": engine.preempted,
                "drafts": drafts if engine.lookup else None,
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


def token_array(tokens: Sequence[int], size: int) -> array[int]:
    """Return a prompt's tokens as an array; Refusal where one is none of a vocabulary's."""
    try:
        numbers = array("q", tokens)
        values = np.frombuffer(numbers, np.int64)
        is_known = values.min() >= 0 and values.max() < size
    except OverflowError:
        is_known = False
    if not is_known:
        unknown = next(token for token in tokens if not 0 <= token < size)
        raise Refusal(f"tokens are from 0 to {size - 1}, got {unknown}", param="prompt")
    return numbers


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
    ("/v1/chat/completions", "POST", "chat"),
    ("/v1/models", "GET", "models"),
    ("/v1/models/{name:path}", "GET", "models"),
    ("/health", "GET", "health"),
)
"""Paths, their methods, and the method of `Service` that answers."""


def new_app(service: Service) -> Starlette:
    """Build the ASGI application; its engine runs while the application does."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.outbox = Outbox()
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
    prefix_mib: int = 1024,
    prefix_grain: int = GRAIN,
    prefix_answers: bool = True,
    prefix_prompts: bool = True,
    drafts: int = 0,
) -> Service:
    """Load the model of a folder of `save_checkpoint` or `save_pretrained`, with a tokenizer, and
    make the service for it; options as of `pararnn serve`, see `commands.serve`.

    Raises CheckpointError where the folder holds no such model, ServingError where it cannot be
    served.
    """
    served_model = load_served(folder, device, name, weights)
    prefixes = None
    if prefix_mib:
        try:
            prefixes = Prefixes(served_model.model, prefix_mib << 20, prefix_grain)
        except ValueError as error:
            raise ServingError(f"--prefix-mib {prefix_mib}: {error}") from error
    batch = Batch(served_model.model, rows, None if prefixes is None else prefixes.pool, drafts)
    engine = Engine(batch, prefill_chunk, queue, prefixes, prefix_answers, prefix_prompts)
    return Service(served_model, engine, max_length)


def listen(host: str, port: int) -> socket.socket:
    """Open a socket; ServingError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ServingError(f"cannot listen on {host}, port {port}: {error}") from error
    # Connections inherit it. Else an event waits until the client has confirmed the one before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


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
