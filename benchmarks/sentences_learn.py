"""Sentences of docs/learning.md whose figures are read from the result files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from markdown_tables import hold, listed, one, prose, read, span
from tables_learn import Point, Result, leaders, results

NAMES = {
    "gru": "the GRU",
    "lstm": "the LSTM",
    "mamba2": "Mamba2",
    "transformer": "the Transformer",
    "hybrid": "the hybrid",
}
RECURRENT = ("gru", "lstm")


def found(corpus: str) -> dict[str, Result]:
    """Return a corpus's results by mixer, the best at the end first."""
    return {each.mixer: each for each in results(read(f"learn_{corpus}.csv"))}


def above(value: float, other: float) -> float:
    """Return by how many percent a value is above another."""
    return 100 * (value / other - 1)


def below(value: float, other: float) -> float:
    """Return by how many percent a value is below another."""
    return 100 * (1 - value / other)


def millions(tokens: float) -> str:
    """Return a number of tokens in millions."""
    return f"{tokens / 1e6:.1f}M"


def at(curve: Sequence[Point], tokens: int) -> Point:
    """Return a curve's point at a number of tokens."""
    return next(point for point in curve if point[0] == tokens)


def crossing(every: Mapping[str, Result], last: str) -> tuple[str, int, float]:
    """Return who was first before `last` was, up to how many tokens, and the seconds it took."""
    lead = leaders(list(every.values()))
    hold(lead[-1][0] == last, f"{last} is first in the end")
    name, tokens = lead[-2]
    return name, tokens, at(every[name].curve, tokens)[1]


def english() -> str:
    """Return what the English corpus says."""
    every = found("english")
    best, second = list(every.values())[:2]
    hold((best.mixer, second.mixer) == ("transformer", "lstm"), "Transformer before LSTM")
    others = [result for name, result in every.items() if name != best.mixer]
    first_other = min(others, key=lambda result: result.least[2])
    hold(first_other.mixer == "lstm", "the LSTM has the least mean of the others")
    leader, tokens, seconds = crossing(every, best.mixer)
    hold(leader in RECURRENT, "GRU and LSTM lead before the Transformer")
    early = next(p[0] for p in best.curve if p[0] > 0.25 * best.curve[-1][0])
    gaps = [below(at(every[n].curve, early)[2], at(best.curve, early)[2]) for n in RECURRENT]
    turn = {result.least[0] for result in others}
    rows = [row for row in read("learn_english.csv") if row["stage"] == "final"]
    epochs = max(float(row["epochs"]) for row in rows)
    corpus = best.curve[-1][0] / epochs
    rates = [float(row["rate"]) for row in read("learn_english.csv") if row["stage"] == "sweep"]
    lowest = [name for name, r in every.items() if float(r.first["rate"]) == min(rates)]
    return prose(
        "**What English says.** The Transformer has the fewest bits, at the end by "
        f"{below(best.mean, second.mean):.1f}% and at its least by "
        f"{below(best.least[2], first_other.least[2]):.1f}% below the LSTM, the best of the "
        f"others. Before that GRU and LSTM lead, up to {millions(tokens)} tokens or {seconds:.0f} "
        f"seconds. At {millions(early)} tokens they are {span(gaps, '.1f', '%')} below the "
        f"Transformer. The corpus has {millions(corpus)} tokens and is read {epochs:.1f} times. "
        f"After {millions(max(turn))} tokens, not three readings, all but the Transformer learn "
        "it by heart and lose on Moby-Dick; the Transformer goes on to "
        f"{millions(best.least[0])}. So the bits at the end compare overfitting as much as "
        "learning. What can be said: recurrent models take more out of the first readings, and "
        "the Transformer makes more of the later ones. Who would be ahead on text that is read "
        "once, this corpus cannot tell; the code, which is read once, is there for that. The "
        f"rates of {listed(NAMES[name] for name in lowest)} are the least of the four that were "
        "tried, so that lower ones might do better."
    )


def code() -> str:
    """Return what the corpus of code says."""
    every = found("code")
    order = list(every)
    hold(order[0] == "mamba2" and order[1] == "hybrid", "Mamba2 before the hybrid")
    hold(order[-1] == "transformer", "the Transformer is last")
    hold(
        [name for name, _ in leaders(list(every.values()))] == ["mamba2"], "Mamba2 leads all along"
    )
    best, second, last = every["mamba2"], every["hybrid"], every["transformer"]
    pair = [every[name].mean for name in RECURRENT]
    rows = read("learn_code.csv")
    epochs = max(float(row["epochs"]) for row in rows if row["stage"] == "final")
    sweep = max(int(row["tokens"]) for row in rows if row["stage"] == "sweep")
    rates = [float(row["rate"]) for row in rows if row["stage"] == "sweep"]
    lowest = [name for name, r in every.items() if float(r.first["rate"]) == min(rates)]
    slower = speed(second) / speed(best)
    return prose(
        f"**What code says.** No file is read twice: {millions(best.curve[-1][0])} tokens, "
        f"{100 * epochs:.0f}% of the corpus, and rates chosen after {millions(sweep)}. Mamba2 has "
        f"the fewest bits all along, at the end {below(best.mean, second.mean):.1f}% below the "
        f"hybrid and {span([below(best.mean, bits) for bits in pair], '.1f', '%')} below GRU and "
        f"LSTM, which are within {above(max(pair), min(pair)):.1f}% of each other. The "
        "Transformer is last: it ends "
        f"{span([above(last.mean, bits) for bits in pair], '.1f', '%')} above GRU and LSTM. By "
        f"seconds the hybrid is first: Mamba2 takes {slower:.1f} times as long for a token. The "
        f"rates of {listed(NAMES[name] for name in lowest)} are the least that were tried."
    )


def speed(result: Result) -> float:
    """Return the tokens/s of a training."""
    return result.curve[-1][0] / result.seconds


def mamba() -> str:
    """Return what Mamba2's seconds are worth."""
    every = found("code")
    longer = [row for row in read("lm_step.csv") if row["T"] == "2048" and row["packed"] == "False"]
    rates = {
        name: int(one(longer, model=f"{name}-400M")["tokens_per_s"]) for name in ("mamba2", "gru")
    }
    share = speed(every["mamba2"]) / speed(every["gru"])
    return prose(
        "Mamba2's seconds are those of kernels that Python launches one by one: about "
        f"{round(speed(every['mamba2']), -4):,.0f} tokens/s, {share:.2f} of the GRU's. [At "
        "400M](language-models.md#measured), with longer kernels, it has "
        f"{rates['mamba2'] / rates['gru']:.2f} of the GRU's. By tokens it learns about as the GRU "
        "does at first on English and ends last there; on code it is ahead from the first look "
        "on."
    )


def layers() -> str:
    """Return how `auto` chose on the layers of trained models, and when that was."""
    rows = [row for c in ("english", "code") for row in read(f"learn_layers_{c}.csv")]
    taken = [row for row in rows if row["auto"] == "True" and float(row["of_best"]) > 1]
    sizes = {(row["corpus"], row["B"], row["T"]) for row in taken}
    hold(sizes == {("english", "8", "2048")}, "`auto` lost at one size of one corpus only")
    return prose(
        "`auto` takes the best pair in every layer at all sizes but one: at 8 x 2,048 the layers "
        "trained on English were measured when `auto` took the loop there, which was up to "
        f"{max(float(row['of_best']) for row in taken):.1f} times as slow as splitting time. [The "
        "rule](solvers-and-backends.md#what-auto-does) follows from those times now. The GRU's "
        "layers trained on code were measured with it, and the others' have not been."
    )
