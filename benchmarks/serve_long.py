"""The server for a given time under many clients with prompts of very different lengths.

python benchmarks/serve_long.py [--seconds 3600] [--device cuda --width 2048 --layers 24 ...]

A model of bytes with random weights is served by `pararnn serve` in a process of its own. Clients
stream texts one after another until the time is over: prompts of 10 to 8,000 tokens, as many of 10
to 20 as of 4,000 to 8,000, half of which begin like earlier ones; up to 200 tokens each; one of
twenty leaves in the middle. Everything but a whole stream, or one that was left, is an error, and
is printed. Memory is the server's after a tenth of the time and at the end; `gpu_early_MB` and
`gpu_end_MB` are all of the GPU's.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
from serve import idle_health, memory_mb, parser_of, record_of, serving, write_model

LEAST, MOST, WRITTEN = 10, 8000, 200
BEGINNINGS = 16
"""Number of texts that half of the prompts begin like."""


class Load(NamedTuple):
    """What clients send, and for how long."""

    url: str
    process: int
    clients: int
    seconds: float
    device: str


class Record:
    """Times in ms, and counts, of what clients have seen."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.gaps: list[float] = []
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    def columns(self, seconds: float) -> dict[str, Any]:
        """Return rates and percentiles, and the number of errors, which are printed."""
        for error, count in self.errors.items():
            print(f"{count} x {error}")
        return {
            "errors": sum(self.errors.values()),
            "tokens_per_s": round(self.counts["tokens"] / seconds, 1),
            "prompt_tokens_per_s": round(self.counts["prompt_tokens"] / seconds),
            **{
                f"{name}_p{share}_ms": percentile(times, share / 100)
                for name, times in (("first", self.first), ("gap", self.gaps))
                for share in (50, 99)
            },
        }


def percentile(times: Sequence[float], share: float) -> float | str:
    """Return the time that a share of times is below; nothing without any."""
    if not times:
        return ""
    return round(sorted(times)[min(len(times) - 1, int(share * len(times)))], 2)


def gpu_mb(device: str) -> str:
    """Return the used memory of a GPU, of all processes; nothing on a CPU."""
    if device == "cpu":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    return f"{(total - free) / 2**20:.0f}"


def new_body(draw: random.Random) -> dict[str, Any]:
    length = round(math.exp(draw.uniform(math.log(LEAST), math.log(MOST))))
    is_shared = draw.random() < 0.5
    words = random.Random(draw.randrange(BEGINNINGS) if is_shared else draw.random())
    prompt = [words.randrange(256) for _ in range(length)]
    if is_shared:
        prompt[-LEAST // 2 :] = [draw.randrange(256) for _ in range(LEAST // 2)]
    return {
        "prompt": prompt,
        "max_tokens": draw.randint(1, WRITTEN),
        "temperature": draw.choice((0, 1)),
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def ask(client: httpx.AsyncClient, draw: random.Random, record: Record) -> None:
    """Stream a text, and record its times, or the error."""
    body, leaves = new_body(draw), draw.random() < 0.05
    last, tokens, finish, usage = time.perf_counter(), 0, None, None
    try:
        async with client.stream("POST", "/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                record.errors[f"status {response.status_code}: {response.text[:200]}"] += 1
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now, content = time.perf_counter(), json.loads(line[6:])
                if "error" in content:
                    record.errors[content["error"]["message"][:200]] += 1
                    return
                if not content["choices"]:
                    usage = content["usage"]
                    continue
                (record.gaps if tokens else record.first).append(1000 * (now - last))
                last, tokens, finish = now, tokens + 1, content["choices"][0]["finish_reason"]
                if leaves and tokens > 3:
                    record.counts["left"] += 1
                    return
    except httpx.HTTPError as error:
        record.errors[repr(error)[:200]] += 1
        return
    if finish is None or usage is None:
        record.errors["a stream without an end"] += 1
        return
    record.counts["answered"] += 1
    record.counts["tokens"] += usage["completion_tokens"]
    record.counts["prompt_tokens"] += usage["prompt_tokens"]
    record.counts["cached_tokens"] += usage["prompt_tokens_details"]["cached_tokens"]


async def measure(load: Load) -> dict[str, Any]:
    """Let clients ask until the time is over; return what they have seen."""
    record, start = Record(), time.perf_counter()
    limits = httpx.Limits(max_connections=load.clients)
    early: list[Any] = []
    async with httpx.AsyncClient(base_url=load.url, timeout=600, limits=limits) as client:

        async def work(number: int) -> None:
            draw = random.Random(number)
            while time.perf_counter() - start < load.seconds:
                if time.perf_counter() - start > load.seconds / 10 and not early:
                    early.extend((memory_mb(load.process), gpu_mb(load.device)))
                await ask(client, draw, record)

        await asyncio.gather(*[work(number) for number in range(load.clients)])
        seconds = time.perf_counter() - start
        health = await idle_health(client, load.url)
    names = ("answered", "left", "tokens", "prompt_tokens", "cached_tokens")
    return {
        "seconds": round(seconds, 1),
        **{name: record.counts[name] for name in names},
        **record.columns(seconds),
        "early_MB": round(early[0], 1),
        "end_MB": round(memory_mb(load.process), 1),
        "gpu_early_MB": early[1],
        "gpu_end_MB": gpu_mb(load.device),
        "kept_MB": round((health["prefixes"] or {"bytes": 0})["bytes"] / 1e6, 1),
    }


def main() -> None:
    parser = parser_of(__doc__, width=64, layers=2)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prefix-mib", type=int, default=1024)
    options = parser.parse_args()
    names = ("clients", "rows", "width", "layers", "dtype", "prefix_mib")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "model")
        write_model(folder, options.width, options.layers, getattr(torch, options.dtype))
        more = ("--prefix-mib", str(options.prefix_mib))
        queue, length = options.clients, MOST + WRITTEN
        with serving(folder, options.device, options.rows, queue, length, *more) as (url, process):
            load = Load(url, process, options.clients, options.seconds, options.device)
            results = asyncio.run(measure(load))
    row = {name: getattr(options, name) for name in names} | results
    record_of(options, "serve_long").add(row)


if __name__ == "__main__":
    main()
