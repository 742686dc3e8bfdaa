"""Sentences of docs/language-models.md whose figures are read from the result files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lm_generate import KEYS as GENERATED
from markdown_tables import Row, hold, listed, one, prose, read, span

from pararnn.lm.replay import WORTH

NAMES = {"gru": "GRU", "lstm": "LSTM", "mamba2": "Mamba2", "transformer": "Transformer"}
CELLS = ("gru", "lstm")
PAPER_RATES = {"gru": 37, "lstm": 35, "mamba2": 27}
"""Tokens/s of the paper's Figure 3, at any length."""


def generated(model: str, way: str = "cache") -> dict[int, float]:
    """Return the tokens/s of generating by the number of tokens, of a 1B model."""
    rows = [r for r in read("lm_generate.csv") if (r["model"], r["way"]) == (f"{model}-1B", way)]
    hold(len({tuple(r[key] for key in GENERATED) for r in rows}) == len(rows), "a row a length")
    return {int(row["tokens"]): float(row["tokens_per_s"]) for row in rows}


def sampling() -> str:
    """Return what `sample` does on a GPU, and what that is worth."""
    rates = generated("gru")
    return prose(
        "On a GPU `sample` records the step of a token as a CUDA graph and replays it, from "
        f"{WORTH} tokens on. The result is bit-identical to separate calls, but avoids the host's "
        f"launch time: the paper's 1B GRU takes {1e3 / rates[max(rates)]:.1f} ms a token, and "
        f"{1e3 / rates[1]:.0f} by calls ([measured](#decoding)). It falls back to calls if the "
        "model has attention, compiled blocks, hooks, or parameters that are not plain tensors "
        "of one GPU, and under autocast, a profiler or a mode of PyTorch's."
    )


def ratio(rows: Iterable[Row], key: str, mine: dict[str, Any], other: dict[str, Any]) -> float:
    """Return a figure of one row over that of another."""
    rows = list(rows)
    return float(one(rows, **mine)[key]) / float(one(rows, **other)[key])


def packing() -> str:
    """Return what packed rows cost, and how far peaks of memory may be trusted."""
    rows = read("lm_step.csv")
    costs, left = [], 0.0
    for cell in CELLS:
        alone, packed = (
            {"model": f"{cell}-400M", "T": 32768, "packed": packed} for packed in (False, True)
        )
        costs.append(100 * (ratio(rows, "median_ms", packed, alone) - 1))
        peaks = [float(one(rows, **case)["peak_GiB"]) for case in (packed, alone)]
        left = max(left, peaks[0] - peaks[1])
    return prose(
        f"Documents packed into one row cost {costs[0]:.0f}% (GRU) and {costs[1]:.0f}% (LSTM) "
        "beside the same row as one document. Memory is an upper bound: a case's peak holds what "
        f"the case before had not yet freed, up to {left:.0f} GiB behind a 1B model."
    )


def context() -> str:
    """Return how rates and memory depend on the context."""
    rows = [row for row in read("lm_context.csv") if not row["note"]]
    rates = {
        name: {int(r["T"]): int(r["tokens_per_s"]) for r in rows if r["model"].startswith(name)}
        for name in NAMES
    }
    lengths = sorted(rates["transformer"])
    first, last = lengths[0], lengths[-1]
    apart = max(100 * (1 - min(rates[c].values()) / max(rates[c].values())) for c in CELLS)
    over = {
        length: span(
            [rates[cell][length] / rates["transformer"][length] for cell in CELLS], ".1f", " times"
        )
        for length in (first, 32768, last)
    }
    slowest = min(rates["mamba2"], key=rates["mamba2"].__getitem__)
    few = min(int(row["repeats"]) for row in rows)
    tokens = {int(row["B"]) * int(row["T"]) for row in rows}
    memory = {
        count: [float(r["peak_GiB"]) for r in rows if int(r["B"]) * int(r["T"]) == count]
        for count in sorted(tokens)
    }
    grown = listed(
        f"{span(found, '.0f')} GiB at {count:,} tokens" for count, found in memory.items()
    )
    transformer = rates["transformer"]
    return prose(
        "A recurrent layer's work for a token does not depend on the tokens before it. GRU and "
        f"LSTM keep their rate within {apart:.1f}% from {first:,} to {last:,} tokens. Attention's "
        f"work grows with T: the Transformer falls from {round(transformer[first], -3):,} to "
        f"{round(transformer[last], -3):,} tokens/s. GRU and LSTM have {over[first]} its rate at "
        f"{first:,}, {over[32768]} at 32,768 and {over[last]} at {last:,}. Mamba2's work for a "
        f"token is constant too, but its rate is not: it is lowest at {slowest:,}, and why has "
        "not been looked into.",
        "Memory grows with the tokens of a step, which above 32,768 are T, in all four models: "
        f"{grown}. Flash attention keeps no matrix of T x T. Each case is timed for two seconds, "
        f"the slowest ones by {few} step{'s' * (few > 1)}, so that their last digits mean little.",
    )


def decoding() -> str:
    """Return what the table of decoding says."""
    rows = read("lm_decode.csv")

    def ms(model: str, way: str = "graph", batch: int = 1, before: int = 2048) -> float:
        case = {"model": f"{model}-1B", "way": way, "B": batch, "context": before}
        return float(one(rows, **case)["median_ms"])

    def over(batch: int, before: int) -> float:
        return ms("transformer", batch=batch, before=before) / ms("gru", batch=batch)

    hold(ms("transformer", "eager") > ms("transformer", "eager", before=32768), "eager says little")
    growth = ms("mamba2", "eager", 64) / ms("mamba2", "eager")
    extra = [ms("gru", "generate", batch) - ms("gru", batch=batch) for batch in (1, 64)]
    cache = {
        name: float(one(rows, model=f"{name}-1B", way="graph", B=1, context=before)["cache_MB"])
        for name, before in (("gru", 2048), ("transformer", 131072))
    }
    return prose(
        'Eager calls and graphs of all models are of one run (2f2c809). The row of "searched" is '
        "of another commit (e4c5db6), from a run that its time limit cut short: "
        "`torch.compile`'s `coordinate_descent_tuning` makes kernels for products with a single "
        f"row. `generate` (ef7deec) adds {span(extra, '.1f')} ms a token for what transformers "
        "does between steps. Called eagerly, a token's time is the host's and says little about "
        "a model: the Transformer's first row took longer than its rows with more to read, and "
        f"Mamba2's 64 rows {growth:.1f} times as long as one.",
        "By graphs the recurrent models stay where they are, whatever the context. The "
        f"Transformer takes {over(1, 32768):.1f} times the GRU's time at 32,768 tokens, "
        f"{over(1, 131072):.1f} times at 131,072, and {over(64, 2048):.1f} times at batch 64 with "
        "2,048 tokens. What is remembered of a context is in the column `cache`: a recurrent "
        f"model's state is the same at any length, {cache['gru']:.1f} MB for the GRU, where keys "
        f"and values grow to {cache['transformer'] / 1e3:.1f} GB at 131,072 tokens. The "
        "Transformer's keys are random, at the context that stands in the row.",
    )


def figure_3() -> str:
    """Return what the paper's Figure 3 says, and what it compares."""
    rates = {name: generated(name) for name in NAMES}
    last = max(rates["transformer"])
    ours = listed(f"{NAMES[n]} {rates[n][last]:.0f}" for n in ("gru", "lstm", "mamba2"))
    paper = listed(f"{NAMES[name]} {rate}" for name, rate in PAPER_RATES.items())
    short = [count for count in rates["gru"] if count < WORTH]
    calls = [1e3 / rates[cell][count] for cell in CELLS for count in short]
    most = {name: max(rates[name][count] for count in short) for name in NAMES}
    hold(
        max(most, key=most.__getitem__) == "transformer", "the Transformer is first where all call"
    )
    behind = [count for count in rates["gru"] if count >= WORTH]
    hold(all(rates[c][n] > rates["transformer"][n] for c in CELLS for n in behind), "graphs pay")
    none = generated("transformer", "no cache")
    return prose(
        f"The paper has {paper} tokens/s at any length, and a Transformer that falls with it. "
        f"Here, at {last:,} tokens, they make {ours}, and the Transformer with its cache "
        f"{rates['transformer'][last]:.0f}. The left panel compares a replayed step with a called "
        "one: a graph needs tensors that keep their sizes, which recurrent models have and a "
        "growing cache has not. The right panel has graphs on both sides, of compiled blocks and "
        "a cache of one size, from the table above.",
        f"Called, a token's time is the host's, {span(calls, '.0f')} ms for GRU and LSTM on that "
        f"host, and a recurrent block makes more calls than attention. Below {WORTH} tokens, "
        "where nothing is recorded, the Transformer is the fastest. Recording takes about as "
        'long as one called step. Rows with a cache are of one machine; "no cache" was measured '
        f"to {max(none):,} tokens on another one. A whole curve of the Transformer takes minutes: "
        "lengths end where the seconds of a curve do (`--seconds`), with fewer repetitions than "
        "the paper's 5 in the end.",
    )


def first_text() -> str:
    """Return what cuDNN's plans cost a first text."""
    rows = read("lm_first_text.csv")
    planned, again = (one(rows, kernels="PyTorch's", text=text) for text in (1, 2))
    slower = float(planned["median_ms"]) / float(again["median_ms"])
    return prose(
        "The least of several repetitions hides what a first text costs. PyTorch takes cuDNN's "
        "attention on Hopper, which plans a kernel for every number of keys that it meets for "
        f"the first time: a first text then takes {slower:.1f} times as long. `LanguageModel` and "
        "its counterpart in transformers leave cuDNN out where a growing cache is read and "
        'nobody asks for gradients ("any length"). PyTorch\'s choice stays without a cache, in '
        "training, and with a cache of a fixed length (transformers' static one), where one "
        "length comes again and again and cuDNN's kernels are the faster ones. It stays too in "
        "code that a caller has compiled. By `benchmarks/lm_first_text.py`:"
    )
