"""Sentences of docs/language-models.md whose figures are read from the result files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lm_generate import KEYS as GENERATED
from markdown_tables import CELLS, NAMES, Row, enumeration, hold, one, prose, read, span

from pararnn.lm.quantise import DTYPES as FORMATS
from pararnn.lm.replay import WORTH

PAPER_RATES = {"gru": 37, "lstm": 35, "mamba2": 27}
"""Tokens/s of the paper's Figure 3, at any length."""


def generation_rates(model: str, way: str = "cache") -> dict[int, float]:
    """Return the tokens/s of generating by the number of tokens, of a 1B model."""
    rows = [r for r in read("lm_generate.csv") if (r["model"], r["way"]) == (f"{model}-1B", way)]
    hold(len({tuple(r[key] for key in GENERATED) for r in rows}) == len(rows), "a row a length")
    return {int(row["tokens"]): float(row["tokens_per_s"]) for row in rows}


def lm_sample_says() -> str:
    """Return the gain of `sample` by CUDA graphs."""
    rates = generation_rates("gru")
    return prose(
        "On a GPU `sample` records the step of a token as a CUDA graph and replays it, from "
        f"{WORTH} tokens on. The result is bit-identical to separate calls, but avoids the host's "
        f"launch time: the paper's 1B GRU takes {1e3 / rates[max(rates)]:.1f} ms a token, and "
        f"{1e3 / rates[1]:.0f} by calls ([measured](#decoding)). One row of a model with "
        "elementwise cells, and several rows of one with weights in 8 bits, run in fused kernels "
        "on GPUs from Hopper on, which round otherwise than calls. One row takes half the time. "
        "It falls back to calls if the model has attention, compiled blocks, hooks, or parameters "
        "that are not plain tensors of one GPU, and under autocast, a profiler or a mode of "
        "PyTorch's."
    )


def ratio(rows: Iterable[Row], key: str, mine: dict[str, Any], other: dict[str, Any]) -> float:
    """Return a figure of one row over that of another."""
    rows = list(rows)
    return float(one(rows, **mine)[key]) / float(one(rows, **other)[key])


def lm_step_says() -> str:
    """Return the cost of packed rows, and the precision of peaks of memory."""
    rows = read("lm_step.csv")
    costs, excess = [], 0.0
    for cell in CELLS:
        single, several = (
            {"model": f"{cell}-400M", "T": 32768, "packed": flag} for flag in (False, True)
        )
        costs.append(100 * (ratio(rows, "median_ms", several, single) - 1))
        peaks = [float(one(rows, **case)["peak_GiB"]) for case in (several, single)]
        excess = max(excess, peaks[0] - peaks[1])
    return prose(
        "All lengths, and memory: [`lm_step.csv`](../benchmarks/results/lm_step.csv). Documents "
        f"packed into one row take {costs[0]:.0f}% (GRU) and {costs[1]:.0f}% (LSTM) longer than "
        "the same row as one document. Memory is an upper bound: a peak includes up to "
        f"{excess:.0f} GiB that the case before had not freed yet."
    )


def context_rates() -> dict[str, dict[int, int]]:
    """Return the tokens/s of training by model and context."""
    rows = [row for row in read("lm_context.csv") if not row["note"]]
    return {
        name: {int(r["T"]): int(r["tokens_per_s"]) for r in rows if r["model"].startswith(name)}
        for name in NAMES
    }


def slowdown(rates: Mapping[int, int]) -> float:
    """Return the percents by which the lowest rate is below the highest."""
    return 100 * (1 - min(rates.values()) / max(rates.values()))


def lm_step_matrix_says() -> str:
    """Return how long a training step with matrix states takes, next to the GRU's."""
    rows = {row["model"]: row for row in read("lm_step_matrix.csv")}
    gru, matrix = rows["gru-400M"], rows["matrix-400M"]
    ratio = float(matrix["median_ms"]) / float(gru["median_ms"])
    hold(ratio > 1.1, "matrix states cost more than a tenth")
    return prose(
        f"With M2RNN of 32 heads of 16 x 32 in each of its 24 blocks, a model of 400M takes "
        f"{float(matrix['median_ms']):.0f} ms for a training step, {ratio:.2f} times the GRU's "
        f"{float(gru['median_ms']):.0f} ms (B = {gru['B']}, T = {int(gru['T']):,}, compiled, "
        f"{gru['device']}, commit {gru['commit']}; `benchmarks/results/lm_step_matrix.csv`): its "
        "states are 16 times as many numbers, and each step waits for a product."
    )


def lm_context_says() -> str:
    """Return the dependence of rates and memory on the context."""
    rows, rates = [row for row in read("lm_context.csv") if not row["note"]], context_rates()
    lengths = sorted(rates["transformer"])
    first, last = lengths[0], lengths[-1]
    loss = max(slowdown(rates[cell]) for cell in CELLS)
    ratios = {
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
    peaks = enumeration(
        f"{span(own, '.0f')} GiB at {count:,} tokens" for count, own in memory.items()
    )
    transformer = rates["transformer"]
    return prose(
        "A recurrent layer's work for a token does not depend on the tokens before it. GRU and "
        f"LSTM keep their rate within {loss:.1f}% from {first:,} to {last:,} tokens. Attention's "
        f"work grows with T: the Transformer falls from {round(transformer[first], -3):,} to "
        f"{round(transformer[last], -3):,} tokens/s. GRU and LSTM have {ratios[first]} its rate at "
        f"{first:,}, {ratios[32768]} at 32,768 and {ratios[last]} at {last:,}. Mamba2's work for a "
        f"token is constant too, but its rate is not: it is lowest at {slowest:,}, for "
        "an unknown reason.",
        "Memory grows with the tokens of a step in all four models: "
        f"{peaks}. Flash attention stores no T x T matrix. Each case is timed for two seconds, the "
        f"slowest ones by {few} step{'s' * (few > 1)}: their last digits mean little.",
    )


def lm_conv_says() -> str:
    """Return what the convolution's kernels take, and a step with and without them."""
    rows = read("conv.csv")
    shares = [float(row["median_ms"]) / float(row["traffic_ms"]) for row in rows if is_ours(row)]
    sizes = ("B", "T", "D", "pass")
    gains = [
        ratio(rows, "median_ms", {**case, "way": "PyTorch"}, {**case, "way": "kernels"})
        for case in ({key: row[key] for key in sizes} for row in rows if is_ours(row))
    ]
    profile = [row for row in read("lm_step_profile.csv") if row["packed"] == "False"]

    def of(way: str, kind: str, key: str) -> float:
        return float(one(profile, **{"convolution": way, "class": kind})[key])

    plain, ours = (of(way, "step", "median_ms") for way in ("PyTorch", "kernels"))
    gain_ms = plain - ours
    hold(gain_ms > 0, "the kernels save time")
    glue = [of(way, "elementwise", "busy_ms") for way in ("PyTorch", "kernels")]
    own = of("kernels", "convolution", "busy_ms")
    later = one(read("lm_step.csv"), model="gru-400M", B=16, T=2048, packed="False")
    hold(float(later["median_ms"]) < ours, "the later run is faster")
    return prose(
        "The convolution of a recurrent block, with its SiLU, is one Triton kernel forward and one "
        "backward, which sums the gradients of weights and biases on the way "
        "([`conv.csv`](../benchmarks/results/conv.csv), by `benchmarks/conv.py`). It takes "
        f"{span(shares, '.1f')} times as long as its traffic does at the bandwidth of a copy, and "
        f"compiled PyTorch {span(gains, '.1f')} times as long as the kernels.",
        f"A step of the 400M GRU with 16 rows of 2,048 tokens takes {ours:.0f} ms, and "
        f"{plain:.0f} with PyTorch's convolution in the same run. Its elementwise kernels take "
        f"{glue[1]:.0f} ms in place of {glue[0]:.0f}, and the convolutions {own:.1f} "
        "([`lm_step_profile.csv`](../benchmarks/results/lm_step_profile.csv)). A later run, in the "
        f"table above, took {float(later['median_ms']):.0f} ms, its fastest step "
        f"{float(later['min_ms']):.0f}; the other models there are older than the kernels.",
    )


def is_ours(row: Row) -> bool:
    """Return whether a row of conv.csv is of our kernels."""
    return row["way"] == "kernels"


def lm_decode_says() -> str:
    """Return the comparison of ways to decode, and of models."""
    rows = read("lm_decode.csv")

    def case(model: str, way: str, batch: int, context: int, weights: str) -> Row:
        sizes = {"B": batch, "context": context, "weights": weights}
        return one(rows, model=f"{model}-1B", way=way, **sizes)

    def ms(
        model: str,
        way: str = "graph",
        batch: int = 1,
        context: int = 2048,
        weights: str = "bfloat16",
    ) -> float:
        return float(case(model, way, batch, context, weights)["median_ms"])

    def times_gru(batch: int, context: int) -> float:
        return ms("transformer", batch=batch, context=context) / ms("gru", batch=batch)

    longer = ms("transformer", "eager", context=32768)
    hold(ms("transformer", "eager") > longer, "eager says little")
    growth = ms("mamba2", "eager", 64) / ms("mamba2", "eager")
    extra = [ms("gru", "generate", batch) - ms("gru", batch=batch) for batch in (1, 64)]
    cache = {
        name: float(case(name, "graph", 1, context, "bfloat16")["cache_MB"])
        for name, context in (("gru", 2048), ("transformer", 131072))
    }
    ours = {name: case("gru", "fused", 1, 2048, name) for name in ("bfloat16", *FORMATS)}
    hold(len({row["commit"] for row in ours.values()}) == 1, "one run")
    own = {name: float(row["median_ms"]) for name, row in ours.items()}
    reads = [float(ours[name]["weights_ms"]) for name in ("bfloat16", "int8")]
    several = {name: ms("gru", "fused", 64, weights=name) for name in FORMATS}
    calls_ms = ms("gru", "recorded", 64)
    hold(calls_ms < min(several.values()), "64 rows are slower in 8 bits")
    return prose(
        '"fused" is a step as `sample` records it on GPUs from Hopper on, for models '
        "whose mixers are all recurrent with an elementwise cell: five Triton kernels a layer, "
        "where a compiled block has a dozen. Norms, the convolution, the cell's step, SwiGLU and "
        f"residuals are parts of the products around them. The 1B GRU takes {own['bfloat16']:.2f} "
        f"ms a token in 16 bits, {own['int8']:.2f} in int8, {own['fp8']:.2f} in fp8, and "
        f"{ms('gru'):.2f} by compiled blocks. Reading its weights takes {reads[0]:.2f} in 16 bits "
        f"and {reads[1]:.2f} in 8. Several rows are fused with weights in 8 bits alone: 64 rows "
        f"take {several['int8']:.2f} in int8 and {several['fp8']:.2f} in fp8, where 16 bits take "
        f"{calls_ms:.2f} as they are called (recorded), and {ms('gru', batch=64):.2f} by compiled "
        "blocks, which are the caller's choice. What else was tried is in [Negative results]"
        "(negative-results.md#language-models-one-kernel-for-a-whole-decoding-step).",
        'Graphs of GRU, LSTM and Transformer are from one run. "searched" is from '
        "another commit (e4c5db6): `torch.compile`'s `coordinate_descent_tuning` makes kernels for "
        f"products with a single row. `generate` (ef7deec) adds {span(extra, '.1f')} ms a token, "
        "for transformers' own work between steps. Called eagerly (2f2c809), a token takes the "
        "host's time, which says little about a model: the Transformer's first row took longer "
        f"than its rows with more to read, and Mamba2's 64 rows {growth:.1f} times as long as one.",
        "As graphs, recurrent models take the same time at any context. The Transformer takes "
        f"{times_gru(1, 32768):.1f} times the GRU's time at 32,768 tokens, "
        f"{times_gru(1, 131072):.1f} times at 131,072, and {times_gru(64, 2048):.1f} times at "
        "batch 64 with 2,048 tokens. The column `cache` has the memory of a context: a recurrent "
        f"state has the same size at any length, {cache['gru']:.1f} MB for the GRU; keys and "
        f"values grow to {cache['transformer'] / 1e3:.1f} GB at 131,072 tokens. The Transformer's "
        "keys are random numbers.",
    )


def lm_quantise_says() -> str:
    """Return what weights in 8 bits cost a small trained model."""
    rows = read("lm_quantise.csv")
    case = {"model": "gru-128", "text": "moby", "dtype": "bfloat16"}

    def bits(weights: str) -> float:
        return float(one(rows, **case, weights=weights)["bits_per_byte"])

    whole, others = bits("as stored"), {name: bits(name) for name in FORMATS}
    hold(all(abs(other - whole) < 0.002 for other in others.values()), "8 bits cost little")
    parameters = int(one(rows, **case, weights="int8")["parameters"])
    return prose(
        f"A GRU of {parameters:,} parameters, trained on books for some minutes, has "
        f"{whole:.4f} bits per byte on another book in bfloat16, "
        f"{enumeration(f'{other:.4f} with {name}' for name, other in others.items())} "
        "([`lm_quantise.csv`](../benchmarks/results/lm_quantise.csv), by "
        "`benchmarks/lm_quantise.py`). Larger models have not been measured: measure yours."
    )


def lm_generate_says() -> str:
    """Return the paper's Figure 3 next to ours."""
    rates = {name: generation_rates(name) for name in NAMES}
    last = max(rates["transformer"])
    ours = enumeration(f"{NAMES[n]} {rates[n][last]:.0f}" for n in ("gru", "lstm", "mamba2"))
    paper = enumeration(f"{NAMES[name]} {rate}" for name, rate in PAPER_RATES.items())
    short = [count for count in rates["gru"] if count < WORTH]
    calls = [1e3 / rates[cell][count] for cell in CELLS for count in short]
    most = {name: max(rates[name][count] for count in short) for name in NAMES}
    hold(
        max(most, key=most.__getitem__) == "transformer", "the Transformer is first where all call"
    )
    longer = [count for count in rates["gru"] if count >= WORTH]
    hold(all(rates[c][n] > rates["transformer"][n] for c in CELLS for n in longer), "graphs win")
    none = generation_rates("transformer", "no cache")
    return prose(
        f"The paper has {paper} tokens/s at any length, and a Transformer that falls with it. "
        f"Here, at {last:,} tokens, it is {ours}, and {rates['transformer'][last]:.0f} for the "
        "Transformer with its cache "
        "([`lm_generate.csv`](../benchmarks/results/lm_generate.csv)). The left panel compares a "
        "replayed step with a called one: a graph needs tensors of a constant size, which "
        "recurrent models have and a growing cache has not. The right panel compares graphs with "
        "graphs, of compiled blocks and a cache of one size, from the table above.",
        f"Called, a token takes the host's time, {span(calls, '.0f')} ms for GRU and LSTM, and a "
        f"recurrent block makes more calls than attention. Below {WORTH} tokens, where nothing is "
        "recorded, the Transformer is the fastest. Recording takes about as long as one called "
        f'step. "no cache" was measured to {max(none):,} tokens, on another machine. Long '
        "lengths have fewer repetitions than the paper's 5, and end where the seconds of a curve "
        "do (`--seconds`).",
    )


def lm_first_text_says() -> str:
    """Return the cost of cuDNN's plans for a first text."""
    rows = read("lm_first_text.csv")
    first, second = (one(rows, kernels="PyTorch's", text=text) for text in (1, 2))
    slower = float(first["median_ms"]) / float(second["median_ms"])
    return prose(
        "The least of several repetitions hides the cost of a first text. On Hopper PyTorch uses "
        "cuDNN's attention, which plans a kernel for every new number of keys: a first text then "
        f"takes {slower:.1f} times as long "
        "([`lm_first_text.csv`](../benchmarks/results/lm_first_text.csv), by "
        "`benchmarks/lm_first_text.py`). `LanguageModel` and its counterpart in transformers avoid "
        "cuDNN where a growing cache is read without gradients. They keep PyTorch's choice without "
        "a cache, in training, and with a cache of a fixed length (transformers' static one): "
        "there one length repeats, and cuDNN's kernels are faster. Code that a caller has compiled "
        "keeps it too."
    )
