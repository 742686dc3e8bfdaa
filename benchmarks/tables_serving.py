"""Tables of the server's benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from markdown_tables import Table, Text, digits, number, single

FIRST_TOKENS = Table(
    "prefixes.csv",
    "First tokens of streams, one request after another, a GRU of {layers} layers and {width} "
    "channels in {dtype}; medians in ms without the first request, which finds nothing",
    {
        "tokens that prompts share": lambda row: f"{int(row['shared']):,}",
        "and do not": "unshared",
        "": "what",
        "requests": "requests",
        "first request, ms": number("first_request_ms"),
        "median, ms": number("median_ms"),
        "p99, ms": number("p99_ms"),
        "states, MB": number("kept_MB"),
    },
    where=lambda row: row["requests"] != "",
)
READING = Table(
    "prefixes.csv",
    "Least ms of reading {shared} tokens, {layers} layers of {width} channels in {dtype}",
    {"cell": "cell"},
    {"": single(number("median_ms"))},
    lambda row: row["what"],
    {"states, MB": lambda rows: digits(max(float(row["kept_MB"]) for row in rows))},
    where=lambda row: row["requests"] == "",
)
LOAD: dict[str, Text | str] = {
    "answered": "answered",
    "errors": "errors",
    "tokens/s": number("tokens_per_s"),
    "prompt tokens/s": number("prompt_tokens_per_s"),
    "first token, ms, p50": number("first_p50_ms"),
    "p99": number("first_p99_ms"),
    "next token, ms, p50": number("gap_p50_ms"),
    "p99 ": number("gap_p99_ms"),
}
"""Columns of a server under load."""
LONG = Table(
    "serve_long.csv",
    "{clients} clients for {seconds} s, {rows} rows, {layers} layers of {width} channels",
    {
        **LOAD,
        "memory, MB": number("early_MB"),
        "at the end": number("end_MB"),
        "of it states": number("kept_MB"),
        "the GPU's, MB": number("gpu_early_MB"),
        "at the end ": number("gpu_end_MB"),
    },
)
PEERS = Table(
    "serve_peers.csv",
    "{clients} clients, models in {dtype}",
    {
        "model": "model",
        "server": "server",
        "rows": "rows",
        "seconds": number("seconds"),
        **LOAD,
        "memory, MB, begin": number("begin_MB"),
        "middle": number("middle_MB"),
        "end": number("end_MB"),
        "note": "note",
    },
)


def on_both_devices(table: Table) -> Callable[[], str]:
    """Return a function that writes a table of a GPU's file, and that of the CPU's."""
    files = (table.file.replace(".csv", "_cuda.csv"), table.file)
    return lambda: "\n\n".join(replace(table, file=name)() for name in files)


INVARIANT = Table(
    "batch_invariant.csv",
    "Models with `batch_invariant` next to the same without it, in bfloat16: training steps of "
    "rows of {size} tokens with compiled blocks, and tokens decoded by recorded calls",
    {
        "": "what",
        "model": "case",
        "rows": "B",
        "without, ms": number("plain_ms"),
        "with, ms": number("invariant_ms"),
        "ratio": number("ratio"),
    },
    where=lambda row: row["what"] != "product",
)
INVARIANT_PRODUCTS = Table(
    "batch_invariant.csv",
    "Products of N tokens by fixed tiles over the time of PyTorch's, bfloat16",
    {"inputs x outputs": "size"},
    {"": single(number("ratio"))},
    lambda row: f"N = {int(row['B']):,}",
    where=lambda row: row["what"] == "product",
)
SPEEDS = {
    "plain, tokens/s": number("plain_tokens_s"),
    "with drafts": number("lookup_tokens_s"),
    "ratio": number("ratio"),
    "tokens a pass": number("tokens_per_pass"),
}


def _lookup_speed(model: str) -> Table:
    """Return the table of a model whose drafts are spoiled."""
    return Table(
        "lookup.csv",
        "Tokens/s of {tokens} tokens of a row where a token of a draft is right with a chance",
        {
            "model": "model",
            "dtype": "dtype",
            "drafted": "drafts",
            "price": "price",
            "chance": "right",
            **SPEEDS,
        },
        where=lambda row: (
            (row["what"], row["drafter"], row["rows"], row["model"])
            == ("speed", "lookup", "1", model)
        ),
    )


LOOKUP_SPEED, LOOKUP_SPEED_1B = _lookup_speed("small"), _lookup_speed("gru-1B")
VERIFY = Table(
    "lm_verify.csv",
    "Medians in ms of a step of one row (1 token) and of passes over tokens of it, of the 1B GRU "
    "in bfloat16 by fused kernels",
    {"weights": "weights"},
    {"": single(number("median_ms"))},
    lambda row: row["tokens"],
    where=lambda row: (row["way"], row["rows"]) == ("fused", "1"),
)
LOOKUP_CODE = Table(
    "lookup.csv",
    "Tokens/s of code of one row, by small models of bytes",
    {
        "device": "device",
        "nats a byte": "loss",
        "bytes": "tokens",
        "dtype": "dtype",
        "drafted": "drafts",
        "price": "price",
        "temperature": "temperature",
        **SPEEDS,
    },
    where=lambda row: row["what"] == "code" and row["drafter"] == "lookup" and row["rows"] == "1",
)
