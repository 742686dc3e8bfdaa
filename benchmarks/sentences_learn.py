"""Sentences of docs/learning.md whose figures are read from the result files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from learn_results import Point, Result, final_rows, leaders, results
from markdown_tables import CELLS, enumeration, hold, one, prose, read, span

NAMES = {
    "gru": "the GRU",
    "lstm": "the LSTM",
    "mamba2": "Mamba2",
    "transformer": "the Transformer",
    "hybrid": "the hybrid",
    "m2rnn": "M2RNN",
}


def mixers(corpus: str) -> dict[str, Result]:
    """Return a corpus's results by mixer, the best at the end first."""
    return {each.mixer: each for each in results(read(f"learn_{corpus}.csv"))}


def percents(value: float, other: float) -> float:
    """Return the percents by which a value is below another; negative if it is above."""
    return 100 * (1 - value / other)


def millions(tokens: float) -> str:
    """Return a number of tokens in millions."""
    return f"{tokens / 1e6:.1f}M"


def at(curve: Sequence[Point], tokens: int) -> Point:
    """Return a curve's point at a number of tokens."""
    return next(point for point in curve if point[0] == tokens)


def epochs(corpus: str) -> float:
    """Return the number of readings of a corpus in its final trainings."""
    return max(float(row["epochs"]) for row in final_rows(read(f"learn_{corpus}.csv")))


def lowest_rate(corpus: str, every: Mapping[str, Result]) -> str:
    """Return the mixers whose rate is the lowest that was tried, to begin a sentence."""
    rows = read(f"learn_{corpus}.csv")
    least = min(float(row["rate"]) for row in rows if row["stage"] == "sweep")
    text = enumeration(NAMES[name] for name, r in every.items() if float(r.first["rate"]) == least)
    return text[0].upper() + text[1:]


def learn_english_says() -> str:
    """Return the result on the English corpus."""
    every = mixers("english")
    best, second = list(every.values())[:2]
    hold((best.mixer, second.mixer) == ("transformer", "lstm"), "Transformer before LSTM")
    others = [result for name, result in every.items() if name != best.mixer]
    first_other = min(others, key=lambda result: result.least[2])
    hold(first_other.mixer == "lstm", "the LSTM has the least mean of the others")
    *_, (leader, tokens), (last, _) = leaders(list(every.values()))
    hold(last == best.mixer, "the Transformer is first in the end")
    hold(leader in CELLS, "GRU and LSTM lead before the Transformer")
    seconds = at(every[leader].curve, tokens)[1]
    early = next(p[0] for p in best.curve if p[0] > 0.25 * best.curve[-1][0])
    gaps = [percents(at(every[n].curve, early)[2], at(best.curve, early)[2]) for n in CELLS]
    turn = max(result.least[0] for result in others)
    return prose(
        "**English.** The Transformer has the fewest bits: at the end "
        f"{percents(best.mean, second.mean):.1f}% below the LSTM, the second, and at its least "
        f"{percents(best.least[2], first_other.least[2]):.1f}% below. Before that GRU and LSTM "
        f"lead, up to {millions(tokens)} tokens or {seconds:.0f} seconds. At {millions(early)} "
        f"tokens they are {span(gaps, '.1f', '%')} below the Transformer. The corpus has "
        f"{millions(best.curve[-1][0] / epochs('english'))} tokens and is read "
        f"{epochs('english'):.1f} times. After {millions(turn)} tokens, before the third reading "
        "ends, all but the Transformer overfit: they get worse on Moby-Dick. The Transformer "
        f"improves until {millions(best.least[0])}. So the bits at the end compare overfitting as "
        "much as learning. Recurrent models gain more from the first readings, and the Transformer "
        "from later ones. This corpus cannot tell who would lead on text that is read once; the "
        f"code is there for that. {lowest_rate('english', every)} have the lowest "
        "of the four rates that were tried; lower ones might be better."
    )


def learn_code_says() -> str:
    """Return the result on the corpus of code."""
    every = mixers("code")
    order = list(every)
    hold(order[:2] == ["mamba2", "hybrid"], "Mamba2 before the hybrid")
    hold(order[-1] == "transformer", "the Transformer is last")
    hold([name for name, _ in leaders(list(every.values()))] == ["mamba2"], "Mamba2 always leads")
    best, second, last = every["mamba2"], every["hybrid"], every["transformer"]
    pair = [every[name].mean for name in CELLS]
    sweep = max(int(r["tokens"]) for r in read("learn_code.csv") if r["stage"] == "sweep")
    return prose(
        f"**Code.** No file is read twice: {millions(best.curve[-1][0])} tokens, "
        f"{100 * epochs('code'):.0f}% of the corpus, and rates chosen after {millions(sweep)}. "
        "Mamba2 has the fewest bits from beginning to end: "
        f"{percents(best.mean, second.mean):.1f}% below the hybrid and "
        f"{span([percents(best.mean, bits) for bits in pair], '.1f', '%')} below GRU and LSTM, "
        f"which differ by {-percents(max(pair), min(pair)):.1f}%. The Transformer is last: it "
        f"ends {span([-percents(last.mean, bits) for bits in pair], '.1f', '%')} above GRU and "
        "LSTM. By seconds the hybrid is first: Mamba2 takes "
        f"{second.speed / best.speed:.1f} times as long for a token. "
        f"{lowest_rate('code', every)} have the lowest of the rates that were tried."
    )


def learn_mamba_says() -> str:
    """Return the reason for Mamba2's seconds."""
    every = mixers("code")
    longer = [row for row in read("lm_step.csv") if row["T"] == "2048" and row["packed"] == "False"]
    mamba2, gru = (
        int(one(longer, model=f"{name}-400M")["tokens_per_s"]) for name in ("mamba2", "gru")
    )
    fast, slow = every["gru"].speed, every["mamba2"].speed
    return prose(
        "Mamba2's time is that of kernels which Python launches one by one: about "
        f"{round(slow, -4):,.0f} tokens/s, {slow / fast:.2f} of the GRU's. [At "
        f"400M](language-models.md#measured), where kernels are longer, it has {mamba2 / gru:.2f} "
        "of the GRU's. By tokens it learns about as fast as the GRU at first on English and ends "
        "last there; on code it leads from the first point on."
    )


def sweep_end(mixer: str) -> float:
    """Return the fewest bits with which a mixer's sweep on code ended."""
    return min(
        float(row["bits_per_byte"])
        for row in read("learn_code.csv")
        if (row["mixer"], row["stage"], row["step"]) == (mixer, "sweep", row["steps"])
    )


def learn_m2rnn_says() -> str:
    """Return what M2RNN has learned so far."""
    rows = read("learn_code.csv")
    hold(
        {row["stage"] for row in rows if row["mixer"] == "m2rnn"} == {"sweep"},
        "M2RNN has sweeps only",
    )
    bits = {mixer: sweep_end(mixer) for mixer in ("m2rnn", "gru", "mamba2", "transformer")}
    hold(bits["gru"] < bits["m2rnn"] < bits["transformer"], "between GRU and Transformer")
    (first, *_) = (row for row in rows if row["mixer"] == "m2rnn")
    rates = sorted({float(row["rate"]) for row in rows if row["mixer"] == "m2rnn"})
    return prose(
        f"M2RNN (heads of 32 keys and 64 values, {millions(float(first['parameters']))}) has had "
        f"its sweep only, at {enumeration(f'{rate:g}' for rate in rates)}. After "
        f"{millions(max(int(r['tokens']) for r in rows if r['mixer'] == 'm2rnn'))} tokens of code "
        f"it needs {bits['m2rnn']:.2f} bits a byte, where the GRU needs {bits['gru']:.2f}, Mamba2 "
        f"{bits['mamba2']:.2f} and the Transformer {bits['transformer']:.2f} ({first['device']}, "
        f"commit {first['commit']}). Its forget gates have no bias, and are near 0.5 at first."
    )


def learn_speed_says() -> str:
    """Return what a graph does for Mamba2, and what matrices cost."""
    speeds = {row["mixer"]: int(row["tokens_per_s"]) for row in read("learn_speed.csv")}
    by_calls = mixers("code")["mamba2"].speed
    stack, m2rnn, entries = (
        speeds[name] for name in ("mamba2-head-lstm", "m2rnn", "matrix-elementwise")
    )
    hold(stack > 1.5 * by_calls, "launches were what Mamba2 waited for")
    lstm = mixers("code")["lstm"].speed
    return prose(
        "22 blocks of Mamba2 and one of the head-mixing LSTM learn "
        f"{round(stack, -3):,.0f} tokens/s; 23 blocks of Mamba2 had {round(by_calls, -3):,.0f} in "
        "the table above, whose kernels Python launched one by one, on another H200. So what "
        "the tables above say of seconds is of calls. The head-mixing LSTM has "
        f"{speeds['head-lstm'] / lstm:.2f} of the speed that the LSTM has there. M2RNN takes "
        f"{entries / m2rnn:.1f} times as long as the same cell without a product: "
        f"{100 * (1 - m2rnn / entries):.0f}% of its step is states of 32 x 64 times matrices of "
        "64 x 64, forward and backward."
    )


def choosing_says() -> str:
    """Return what a cell costs in a whole model."""
    rows = {row["mixer"]: row for row in read("learn_speed.csv")}
    speeds = {name: f"{round(int(row['tokens_per_s']), -3):,}" for name, row in rows.items()}
    row = rows["head-lstm"]
    return prose(
        f"In a whole model of 60M training learns {speeds['head-lstm']} tokens/s with the LSTM of "
        f"heads of 64, {speeds['matrix-elementwise']} with a matrix state whose entries do not "
        f"meet, {speeds['gated-delta']} with the gated delta rule, {speeds['m2rnn']} with M2RNN "
        f"(ten heads of 32 x 64), and {speeds['mamba2-head-lstm']} with 22 blocks of Mamba2 and "
        f"one of that LSTM ({row['device']}, PyTorch {row['torch']}, commit {row['commit']}; "
        "`benchmarks/results/learn_speed.csv`)."
    )


def learn_forgetting_says() -> str:
    """Return what memories of different lengths at the beginning do for small models."""
    rows = [row for row in read("learn_forgetting.csv") if row["step"] == row["steps"]]
    bits = {row["mixer"]: float(row["bits_per_byte"]) for row in rows}
    gains = {
        name: percents(bits[f"{name}-long"], bits[name])
        for name in ("m2rnn", "gated-delta", "head-lstm")
    }
    hold(gains["gated-delta"] > 0 > max(gains["m2rnn"], gains["head-lstm"]), "one gains of three")
    hold(min(bits, key=lambda name: bits[name]) == "head-lstm", "the head-mixing LSTM is first")
    row = rows[0]
    return prose(
        "Is that why? Small models of bytes "
        f"({float(row['parameters']) / 1e6:.1f}M, {int(row['bytes']):,} bytes of Python's standard "
        f"library, rate {row['rate']}, one seed) learned with biases drawn around 3 next to none, "
        "so that heads remember from 2 to some 500 steps at first. At this size it is not: M2RNN "
        "needs "
        f"{-gains['m2rnn']:.1f}% more bits with them and the head-mixing LSTM "
        f"{-gains['head-lstm']:.1f}% more, the gated delta rule {gains['gated-delta']:.1f}% less. "
        f"Without them the head-mixing LSTM has {bits['head-lstm']:.3f} bits, the GRU "
        f"{bits['gru']:.3f}, M2RNN {bits['m2rnn']:.3f} and the gated delta rule "
        f"{bits['gated-delta']:.3f} ({row['device']}, PyTorch {row['torch']}, commit "
        f"{row['commit']}; `benchmarks/results/learn_forgetting.csv`)."
    )


def learn_layers_says() -> str:
    """Return the quality of `auto`'s choice on the layers of trained models, and its date."""
    rows = [row for c in ("english", "code") for row in read(f"learn_layers_{c}.csv")]
    losses = [row for row in rows if row["auto"] == "True" and float(row["of_best"]) > 1]
    sizes = {(row["corpus"], row["B"], row["T"]) for row in losses}
    hold(sizes == {("english", "8", "2048")}, "`auto` lost at one size of one corpus only")
    return prose(
        "`auto` chose the best pair in every layer at all sizes but one. At 8 x 2,048, layers "
        "trained on English were measured with an older rule that chose the loop there; splitting "
        f"time was up to {max(float(row['of_best']) for row in losses):.1f} times as fast. [The "
        "rule](solvers-and-backends.md#what-auto-does) now follows these times. With it only the "
        "GRU's layers trained on code have been measured."
    )
