"""`pararnn serve` next to `transformers serve`: the same model and the same clients.

python benchmarks/serve_peers.py [--device cuda --models gru-400M hybrid-400M --dtype bfloat16 ...]

A model with random weights is written in Hugging Face's format, with a tokenizer of bytes. One
server after the other runs it in a process of its own. Clients stream greedy texts one after
another until `--seconds` are over: prompts of 10 to 8,000 tokens, as many of 10 to 20 as of 4,000
to 8,000, and 1 to 200 tokens each, the same requests to each server. Streams that run then are
given up and count as unfinished, with their tokens. Everything else but a whole text is an error,
and is printed. Memory is the server's before the clients come, after half of the time and at the
end; that of the GPU is all that is in use.

Servers: `pararnn`; `pararnn drafts`, which drafts tokens (greedy texts of random weights repeat
themselves, and so favour it); `transformers`, one text at a time; `transformers batching`, with
--continuous-batching, which is for attention: `llama-400M`, a Transformer by transformers' own
class, is for it. A server that does not answer the first requests gets a row with a note.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch
from common import new_parser
from serve import Server, memory_mb, record_of, running
from serve_long import LEAST, MOST, WRITTEN, Record, gpu_mb
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from pararnn.lm import LanguageModel, LMConfig, preset, save_byte_tokenizer, save_checkpoint

FIRST = 60
"""Seconds that a server has to answer each of the first requests."""
LETTERS = range(ord("a"), ord("z") + 1)
"""Tokens of all texts, so that a character is a token."""
WARM_UP = (LEAST, 600, MOST)
"""Tokens of the first prompts, which compile kernels and are not measured."""
KEYS = (
    *("model", "server", "dtype", "device"),
    *("clients", "seconds", "at_once", "rows"),
)
"""Columns that identify a case."""
CACHE_ON_CPU = ("--cb-num-blocks", "4096", "--cb-max-batch-tokens", "512")
"""Sizes that continuous batching does not find by itself there."""


class Setting(NamedTuple):
    """A server's model, device and sizes."""

    folder: str
    device: str
    rows: int
    clients: int
    prefix_mib: int


def our_command(setting: Setting, *more: str) -> list[str]:
    """Return the arguments of `pararnn` for our server."""
    sizes = ["--rows", str(setting.rows), "--queue", str(setting.clients)]
    sizes += ["--max-length", str(MOST + WRITTEN), "--prefix-mib", str(setting.prefix_mib)]
    return ["serve", setting.folder, "--name", setting.folder, *sizes, *more]


def their_command(setting: Setting, *more: str) -> list[str]:
    """Return the arguments of `pararnn` for transformers' server."""
    return ["run", "transformers", "serve", setting.folder, "--log-level", "error", *more]


SERVERS: dict[str, Callable[[Setting], list[str]]] = {
    "pararnn": our_command,
    "pararnn drafts": lambda setting: our_command(setting, "--drafts", "7"),
    "transformers": their_command,
    "transformers batching": lambda setting: their_command(
        setting,
        "--continuous-batching",
        *(CACHE_ON_CPU if setting.device == "cpu" else ()),
    ),
}


def configs() -> dict[str, LMConfig | LlamaConfig]:
    large, attention = preset("gru", "400M").model, preset("transformer", "400M").model
    assert isinstance(large, LMConfig)
    assert isinstance(attention, LMConfig)
    tiny = LMConfig(64, 4, vocab_size=256, num_heads=4, num_attention_heads=4)
    hybrid = ("rnn", "rnn", "rnn", "attention")
    return {
        "gru-tiny": tiny,
        "hybrid-tiny": replace(tiny, mixers=hybrid),
        "gru-400M": large,
        "hybrid-400M": replace(large, mixers=hybrid * 6, num_attention_heads=8),
        "llama-tiny": llama(tiny),
        "llama-400M": llama(attention),
    }


def llama(config: LMConfig) -> LlamaConfig:
    """Return the config of transformers' own Transformer of the sizes of ours."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    return LlamaConfig(
        **{name: getattr(config, name) for name in names},
        intermediate_size=config.intermediate_size,
        max_position_embeddings=MOST + WRITTEN,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )


def write_model(
    folder: Path, config: LMConfig | LlamaConfig, dtype: torch.dtype, device: str
) -> int:
    """Write a model whose likeliest tokens are letters; return the number of its parameters."""
    torch.manual_seed(0)
    model: Any  # transformers' methods have no types
    if isinstance(config, LMConfig):
        model = LanguageModel(config, dtype=dtype, device=device)
    else:
        model = LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():
        model.lm_head.weight[: LETTERS.start] = 0
        model.lm_head.weight[LETTERS.stop :] = 0
    if isinstance(config, LMConfig):
        save_checkpoint(model, folder)
    else:
        model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def request(client: int, number: int) -> tuple[int, int]:
    """Draw the tokens of a client's prompt, and of the text after it."""
    draw = random.Random(f"{client} {number}")
    length = round(math.exp(draw.uniform(math.log(LEAST), math.log(MOST))))
    return length, draw.randint(1, WRITTEN)


def body(model: str, length: int, tokens: int, seed: str) -> dict[str, Any]:
    """Build a request for a text of some tokens after a prompt of a length."""
    prompt = "".join(map(chr, random.Random(seed).choices(LETTERS, k=length)))
    options = {"max_tokens": tokens, "temperature": 0, "stream": True}
    return {"model": model, "prompt": prompt, **options}


def start(stack: ExitStack, setting: Setting, name: str) -> Server:
    """Start a server, which runs until the stack's end."""
    return stack.enter_context(running(SERVERS[name](setting), setting.device))


async def ask(client: httpx.AsyncClient, content: dict[str, Any], record: Record) -> str:
    """Stream a text, and record its times as it comes, or the error; return it."""
    last, text = time.perf_counter(), ""
    async with client.stream("POST", "/completions", json=content) as response:
        if response.status_code != 200:
            await response.aread()
            record.errors[f"status {response.status_code}: {response.text[:200]}"] += 1
            return text
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now, event = time.perf_counter(), json.loads(line[6:])
            if "choices" not in event:
                record.errors[line[:200]] += 1
                return text
            if not (piece := event["choices"][0]["text"]):
                continue
            if not text:
                record.counts["prompt_tokens"] += len(content["prompt"])
            (record.gaps if text else record.first).append(1000 * (now - last))
            record.counts["tokens"] += len(piece)
            text, last = text + piece, now
    if len(text) == content["max_tokens"]:
        record.counts["answered"] += 1
    else:
        record.errors[f"{len(text)} letters of {content['max_tokens']}"] += 1
    return text


async def measure(server: Server, setting: Setting, seconds: float) -> dict[str, Any]:
    """Let clients ask until the time is over; return what they have seen.

    Raises RuntimeError for a server that does not answer the first requests.
    """
    record, memory = Record(), [("", "")] * 3
    limits = httpx.Limits(max_connections=setting.clients)
    url, process = f"{server.address}/v1", server.process.pid
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        for length in WARM_UP:
            content = body(setting.folder, length, 16, f"first {length}")
            try:
                text = await asyncio.wait_for(ask(client, content, record), FIRST)
            except (asyncio.TimeoutError, httpx.HTTPError) as error:
                raise RuntimeError(f"no answer to a prompt of {length} tokens") from error
            print(f"  {length} letters, then {text!r}", flush=True)
        if record.errors:
            raise RuntimeError(f"the first requests failed: {next(iter(record.errors))}")
        record, start = Record(), time.perf_counter()

        def remaining() -> float:
            return max(0.0, start + seconds - time.perf_counter())

        async def work(number: int) -> None:
            for count in range(sys.maxsize):
                length, tokens = request(number, count)
                content = body(setting.folder, length, tokens, f"{number} {count}")
                try:
                    await asyncio.wait_for(ask(client, content, record), remaining())
                except asyncio.TimeoutError:
                    record.counts["unfinished"] += 1
                    return
                except httpx.HTTPError as error:
                    record.errors[repr(error)[:200]] += 1

        async def watch() -> None:
            for index in range(3):
                memory[index] = f"{memory_mb(process):.1f}", gpu_mb(setting.device)
                await asyncio.sleep(remaining() if index else seconds / 2)

        await asyncio.gather(watch(), *[work(number) for number in range(setting.clients)])
        memory[2] = f"{memory_mb(process):.1f}", gpu_mb(setting.device)
    return results(seconds, record, memory)


def results(seconds: float, record: Record, memory: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the columns of a server's row."""
    names = ("answered", "unfinished", "tokens", "prompt_tokens")
    whens = ("begin", "middle", "end")
    return {
        **{name: record.counts[name] for name in names},
        **record.columns(seconds),
        **{f"{when}_MB": both[0] for when, both in zip(whens, memory, strict=True)},
        **{f"gpu_{when}_MB": both[1] for when, both in zip(whens, memory, strict=True)},
    }


EMPTY = dict.fromkeys(results(1, Record(), [("", "")] * 3), "")
"""The columns of a server that did not answer."""


def main() -> None:
    parser = new_parser(__doc__)
    every = configs()
    parser.add_argument("--models", nargs="+", default=["gru-tiny"], choices=every)
    parser.add_argument(
        "--servers", nargs="+", default=["pararnn", "transformers"], choices=SERVERS
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=30, help="of each server's load")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rows", type=int, default=64, help="of our server")
    parser.add_argument("--prefix-mib", type=int, default=1024, help="of our server")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--at-once",
        action="store_true",
        help="start all servers first, to save time: a GPU's memory is then that of all",
    )
    options = parser.parse_args()
    record = record_of(options, "serve_peers", KEYS)
    record.shared = {**record.shared, "transformers": version("transformers")}
    for name in options.models:
        with tempfile.TemporaryDirectory() as room, ExitStack() as stack:
            folder, dtype = Path(room, "model"), getattr(torch, options.dtype)
            parameters = write_model(folder, every[name], dtype, options.device)
            setting = Setting(
                str(folder), options.device, options.rows, options.clients, options.prefix_mib
            )
            early = options.servers if options.at_once else []
            started = {kind: start(stack, setting, kind) for kind in early}
            for kind in options.servers:
                print(f"{name}, {kind}", flush=True)
                note, found = "", EMPTY
                server = started[kind] if kind in started else start(stack, setting, kind)
                try:
                    server.wait()
                    found = asyncio.run(measure(server, setting, options.seconds))
                except RuntimeError as error:
                    note = str(error)
                    server.show()
                server.process.terminate()
                about = {"model": name, "parameters": parameters, "server": kind}
                about |= {
                    key: getattr(options, key) for key in ("dtype", "clients", "seconds", "at_once")
                }
                about["rows"] = options.rows if kind.startswith("pararnn") else ""
                record.add(about | found | {"note": note})


if __name__ == "__main__":
    main()
