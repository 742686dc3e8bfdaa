"""The server under load, by clients on the same machine.

python benchmarks/serve.py [--device cuda] [--requests 10000]

A model of bytes with random weights is served by `pararnn serve` in a process of its own. First
1, 8 and 64 clients stream texts one after another. Then 64 clients send requests of many kinds:
samples, clients that leave in the middle, over-long prompts, malformed JSON, into a queue that is
too short. What comes back is counted, and the server's memory is read after a tenth of the
requests and after all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
from common import Record, new_parser, provenance

from pararnn.lm import LanguageModel, LMConfig, save_byte_tokenizer, save_checkpoint

CLIENTS = (1, 8, 64)
QUEUE, MAX_LENGTH = 16, 2048
START, LOG = 240, 3000
"""Seconds that a server has to start, and letters of its log that are shown where it fails."""
CODES = {200: "answered", 400: "refused_400", 413: "refused_400", 429: "refused_429"}


def parser_of(doc: str | None, width: int = 256, layers: int = 4) -> argparse.ArgumentParser:
    """Build a parser with the options of a server's model."""
    parser = new_parser(doc)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=width)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--dtype", default="float32")
    return parser


def record_of(options: argparse.Namespace, name: str, keys: Sequence[str] = ()) -> Record:
    """Return the record of a file, of which a GPU has another one."""
    file = f"{name}{'' if options.device == 'cpu' else '_cuda'}.csv"
    cores = len(os.sched_getaffinity(0))
    return Record(options.out / file, provenance(options.device) | {"cores": str(cores)}, keys)


def write_model(folder: Path, width: int, layers: int, dtype: torch.dtype) -> None:
    """Write a model of bytes, and its tokenizer."""
    torch.manual_seed(0)
    config = LMConfig(width, layers, vocab_size=256, num_heads=4)
    save_checkpoint(LanguageModel(config, dtype=dtype), folder)
    save_byte_tokenizer(folder)


class Server(NamedTuple):
    """A server's address, its process, and what it writes."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait(self) -> None:
        """Wait until it answers. Raises RuntimeError where it does not start."""
        end = time.monotonic() + START
        while self.process.poll() is None and time.monotonic() < end:
            try:
                httpx.get(f"{self.address}/health").raise_for_status()
                return
            except httpx.HTTPError:
                time.sleep(0.2)
        raise RuntimeError("it did not start")

    def show(self) -> None:
        """Print the last of what it has written."""
        print(self.log.read_text()[-LOG:], flush=True)


@contextmanager
def running(command: Sequence[str], device: str) -> Iterator[Server]:
    """Run a server by `pararnn`, and yield it, which `Server.wait` waits for; show what it has
    written where that fails."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    where = ["--host", "127.0.0.1", "--port", str(port), "--device", device]
    with (
        tempfile.NamedTemporaryFile() as log,
        subprocess.Popen(
            [sys.executable, "-m", "pararnn", *command, *where],
            stdout=log,
            stderr=log,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        ) as process,
    ):
        server = Server(f"http://127.0.0.1:{port}", process, Path(log.name))
        try:
            yield server
        except Exception:
            server.show()
            raise
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def serving(
    folder: Path, device: str, rows: int, queue: int, max_length: int = MAX_LENGTH, *more: str
) -> Iterator[tuple[str, int]]:
    """Run our server with more options; yield the address of its API and its process."""
    sizes = ["--rows", str(rows), "--queue", str(queue), "--max-length", str(max_length)]
    with running(["serve", str(folder), *sizes, *more], device) as server:
        server.wait()
        yield f"{server.address}/v1", server.process.pid


def memory_mb(process: int) -> float:
    """Return what a process has in memory."""
    status = Path(f"/proc/{process}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def content_of(**body: Any) -> bytes:
    """Return the content of a request for a stream."""
    return json.dumps({**body, "stream": True}).encode()


async def events(client: httpx.AsyncClient, content: bytes) -> AsyncGenerator[float]:
    """Stream a text; yield the time of each event, a token here."""
    async with client.stream("POST", "/completions", content=content) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield time.perf_counter()


async def idle_health(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """Return the server's state, once the rows of those that left are free."""
    for _ in range(100):
        health = (await client.get(url.removesuffix("/v1") + "/health")).json()
        if health["active"] == health["waiting"] == 0:
            return health
        await asyncio.sleep(0.1)
    raise RuntimeError(f"rows are in use ten seconds after all clients have ended: {health}")


async def spread(count: int, clients: int, work: Callable[[int], Awaitable[None]]) -> float:
    """Do `count` pieces of work by some clients; return the seconds."""
    numbers = iter(range(count))

    async def client() -> None:
        for number in numbers:
            await work(number)

    start = time.perf_counter()
    await asyncio.gather(*[client() for _ in range(clients)])
    return time.perf_counter() - start


async def measure_clients(url: str, clients: int, requests: int) -> dict[str, Any]:
    """Measure streams of texts of 64 tokens after prompts of 32."""
    first: list[float] = []
    gaps: list[float] = []
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def work(number: int) -> None:
            content = content_of(prompt=[number % 256] * 32, max_tokens=64, seed=number)
            last, count = time.perf_counter(), 0
            async for now in events(client, content):
                (gaps if count else first).append(1000 * (now - last))
                last, count = now, count + 1

        await spread(2 * clients, clients, work)
        first.clear()
        gaps.clear()
        seconds = await spread(requests, clients, work)
    return {
        "answered": requests,
        "seconds": round(seconds, 2),
        "tokens_per_s": round(64 * requests / seconds),
        "first_ms": round(statistics.median(first), 2),
        "first_p95_ms": round(statistics.quantiles(first, n=20)[-1], 2),
        "gap_ms": round(statistics.median(gaps), 3),
        "gap_p95_ms": round(statistics.quantiles(gaps, n=20)[-1], 3),
    }


async def measure_mixture(url: str, process: int, clients: int, requests: int) -> dict[str, Any]:
    """Count the answers to requests of many kinds, and read the server's memory."""
    counts: Counter[str] = Counter()
    early = 0.0
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def work(number: int) -> None:
            nonlocal early
            if number == requests // 10:
                early = memory_mb(process)
            draw = random.Random(number)
            body: dict[str, Any] = {
                "prompt": [draw.randrange(256) for _ in range(draw.randint(1, 200))],
                "max_tokens": draw.randint(1, 32),
                "temperature": draw.choice((0, 1)),
                "n": draw.choice((1, 1, 1, 2)),
                "stop": ["ab"],
            }
            kind = draw.random()
            if kind < 0.1:  # leaves after a few tokens
                endless = body | {"max_tokens": 1000, "stop": None}
                with_events = events(client, content_of(**endless))
                try:
                    async for _ in with_events:
                        if draw.random() < 0.2:
                            break
                    counts["left"] += 1
                except httpx.HTTPStatusError as error:
                    counts[CODES[error.response.status_code]] += 1
                finally:
                    await with_events.aclose()
                return
            if kind < 0.15:
                body["prompt"] = "a" * (MAX_LENGTH + 1)
            content = json.dumps(body)
            if 0.15 < kind < 0.2:
                content = content[: draw.randrange(len(content))]
            response = await client.post("/completions", content=content)
            counts[CODES[response.status_code]] += 1

        seconds = await spread(requests, clients, work)
        await idle_health(client, url)
    return {
        "answered": counts["answered"],
        "seconds": round(seconds, 2),
        "left": counts["left"],
        "refused_400": counts["refused_400"],
        "refused_429": counts["refused_429"],
        "early_MB": round(early, 1),
        "end_MB": round(memory_mb(process), 1),
    }


COLUMNS = (
    *("answered", "seconds", "tokens_per_s", "first_ms", "first_p95_ms", "gap_ms", "gap_p95_ms"),
    *("left", "refused_400", "refused_429", "early_MB", "end_MB"),
)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="of many kinds")
    parser.add_argument("--streams", type=int, default=256, help="of 64 clients; fewer of fewer")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64], help="of streams")
    options = parser.parse_args()
    record = record_of(options, "serve")

    def add(part: str, clients: int, batch: int, results: dict[str, Any]) -> None:
        sizes = {name: getattr(options, name) for name in ("width", "layers", "dtype")}
        sizes["rows"] = batch
        row = {"part": part, "clients": clients, **sizes}
        record.add(row | {name: results.get(name, "") for name in COLUMNS})

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "model")
        write_model(folder, options.width, options.layers, getattr(torch, options.dtype))
        for batch in options.rows:
            with serving(folder, options.device, batch, 64) as (url, _):
                for clients in CLIENTS:
                    count = max(options.streams * clients // 64, 8)
                    add(
                        "streams", clients, batch, asyncio.run(measure_clients(url, clients, count))
                    )
        if options.requests:
            with serving(folder, options.device, 16, QUEUE) as (url, process):
                mixture = measure_mixture(url, process, 64, options.requests)
                add("mixture", 64, 16, asyncio.run(mixture))


if __name__ == "__main__":
    main()
