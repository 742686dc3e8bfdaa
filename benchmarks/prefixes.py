"""Prompts that begin alike: the first token with kept states, and what it costs to keep them.

python benchmarks/prefixes.py [--device cuda] [--width 2048 --layers 24 --dtype bfloat16]
python benchmarks/prefixes.py --requests 0 --cells gru [--tokens 1024]  # reading, without a server

A model of bytes with random weights is served by `pararnn serve` in a process of its own. A client
sends, one after another, prompts of 16 tokens, and prompts that share 8,192 tokens and differ in
16; with kept states (`--prefix-mib`) and without. Times are from a request, whose content is
written before, to the first token of its stream, in ms, at the client. Then a prompt of 8,192
tokens is read in one pass, in a pass that keeps a state every 16 tokens, and in pieces of 16
tokens, for several cells; with the bytes of the states. On a GPU the server's ways are among them:
chunks of 512 tokens of one prompt, and short prompts one after the other, by calls and by recorded
pieces.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from protocol import wait, wall_ms
from serve import content_of, events, parser_of, record_of, serving, write_model

from pararnn.lm import LanguageModel, LMConfig, Prefixes
from pararnn.lm.prefixes import GRAIN
from pararnn.lm.reading import Reader

SHARED, UNSHARED = 8192, 16
CHUNK, SHORT = 512, 44
"""Tokens of a server's chunk, and of a short prompt, in pieces of 32, 8 and 4."""
CELLS: dict[str, dict[str, Any]] = {
    "gru": {},
    "lstm": {},
    "gated-delta": {"mixers": "matrix", "cell_config": {"K": 64}},
    "m2rnn": {"mixers": "matrix", "cell_config": {"K": 64}},
}
"""Cells whose cost of keeping states is measured, with the config of their models."""
SERVERS = ("states kept", 1024), ("no states kept", 0)
"""Servers, and MiB of their states."""
COLUMNS = ("requests", "first_request_ms", "median_ms", "p99_ms", "cached", "kept_MB")


async def first_tokens(url: str, prompts: list[list[int]]) -> dict[str, Any]:
    """Return the times until the first token of prompts, one after another."""
    times = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        for prompt in prompts:
            content = content_of(prompt=prompt, max_tokens=1, temperature=0)
            start = time.perf_counter()
            async for now in events(client, content):
                times.append(1000 * (now - start))
        health = (await client.get(url.removesuffix("/v1") + "/health")).json()
    kept = health["prefixes"] or {"tokens_saved": 0, "bytes": 0}
    return {
        "requests": len(prompts),
        "first_request_ms": round(times[0], 2),
        "median_ms": round(statistics.median(times[1:]), 2),
        "p99_ms": round(statistics.quantiles(times[1:], n=100)[-1], 2),
        "cached": kept["tokens_saved"],
        "kept_MB": round(kept["bytes"] / 1e6, 1),
    }


def prompts_of(shared: int, count: int) -> list[list[int]]:
    """Draw prompts that share their first tokens, and differ in the others."""
    generator = torch.Generator().manual_seed(shared)
    draw = lambda size: torch.randint(256, (size,), generator=generator).tolist()  # noqa: E731
    beginning = draw(shared)
    return [[*beginning, *draw(UNSHARED)] for _ in range(count)]


def ways(model: LanguageModel, tokens: torch.Tensor) -> dict[str, Callable[[], int]]:
    """Return ways of reading a prompt, which return the bytes of the states that they keep."""

    def pieces(size: int) -> int:
        cache = model.new_cache()
        for piece in tokens.split(size, 1):
            model.hidden(piece, cache)
        return 0

    prefixes, text = Prefixes(model), tokens[0].tolist()

    def kept() -> int:
        while prefixes.evict():
            pass
        prefixes.read(text, prefixes.names(text), model.new_cache())
        return prefixes.counts.bytes

    def served(size: int, is_one: bool, reader: Reader) -> int:
        """Read chunks of one prompt, or prompts of that size, and keep their states."""
        while prefixes.evict():
            pass
        cache, names = model.new_cache(), prefixes.names(text)
        for first in range(0, len(text), size):
            some = text[first : first + size]
            if not is_one:
                cache, names = model.new_cache(), prefixes.names(some)
            prefixes.read(some, names, cache, reader)
        return prefixes.counts.bytes

    every: dict[str, Callable[[], int]] = {
        "one pass": lambda: pieces(tokens.shape[1]),
        "one pass, states kept": kept,
        "pieces of 16": lambda: pieces(16),
    }
    recorded = Reader(model, GRAIN, CHUNK)
    if recorded.most:
        for what, reader in (("called", prefixes.reader), ("recorded", recorded)):
            every[f"chunks of {CHUNK}, {what}"] = partial(served, CHUNK, True, reader)
            every[f"prompts of {SHORT}, {what}"] = partial(served, SHORT, False, reader)
    return every


@torch.no_grad()
def least_ms(call: Callable[[], int], device: torch.device) -> tuple[float, int]:
    """Return the least time of some calls after one, and what that one returned."""
    size = call()
    wait(device)
    return min(wall_ms(call, device) for _ in range(3)), size


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=101, help="to servers; 0 starts none")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--tokens", type=int, default=SHARED, help="of the prompt that is read")
    options = parser.parse_args()
    dtype, record = getattr(torch, options.dtype), record_of(options, "prefixes")
    sizes = {name: getattr(options, name) for name in ("width", "layers", "dtype")}

    def add(what: str, cell: str, shared: int, results: dict[str, Any]) -> None:
        row = {"what": what, "cell": cell, **sizes, "shared": shared, "unshared": UNSHARED}
        record.add(row | {name: results.get(name, "") for name in COLUMNS})

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "model")
        write_model(folder, options.width, options.layers, dtype)
        for what, mib in SERVERS if options.requests else ():
            budget = ("--prefix-mib", str(mib))
            with serving(folder, options.device, 16, 64, 2 * SHARED, *budget) as (url, _):
                asyncio.run(first_tokens(url, prompts_of(0, 4)))
                for shared in (0, SHARED):
                    count = options.requests if mib or not shared else max(options.requests // 5, 3)
                    prompts = prompts_of(shared, count)
                    add(what, "gru", shared, asyncio.run(first_tokens(url, prompts)))
    tokens = torch.randint(256, (1, options.tokens), device=options.device)
    for cell in options.cells:
        more = CELLS[cell]
        mixers = (more.get("mixers", "rnn"),) * options.layers
        config = LMConfig(
            options.width,
            options.layers,
            vocab_size=256,
            num_heads=4,
            cell=cell,
            **more | {"mixers": mixers},
        )
        model = LanguageModel(config, device=options.device, dtype=dtype).eval()
        for what, call in ways(model, tokens).items():
            median, size = least_ms(call, tokens.device)
            add(what, cell, options.tokens, {"median_ms": round(median, 1), "kept_MB": size / 1e6})


if __name__ == "__main__":
    main()
