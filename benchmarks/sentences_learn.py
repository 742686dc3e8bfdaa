"""Sentences of docs/learning.md whose figures are read from the result files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from learn_results import (
    Point,
    Result,
    code_results,
    final_rows,
    front,
    large_results,
    leaders,
    lengths,
    results,
    speeds,
)
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
    order = code_results()
    every = {each.mixer: each for each in order}
    best, second = order[:2]
    wins = max(best.bits) < min(second.bits)
    seeds = "each seed of the one is below each of the other" if wins else "their seeds overlap"
    verdict = seeds if len(best.bits) + len(second.bits) > 2 else "one seed each"
    pair = [every[name].mean for name in CELLS]
    head, lstm = every["head-lstm"], every["lstm"]
    hold(max(head.bits) < min(lstm.bits), "matrices inside heads help the LSTM")
    states = [every[name].mean for name in ("matrix-elementwise", "gated-delta")]
    hold(max(states) < head.mean, "matrix states learn better than matrices inside heads")
    hybrid, gru = every["hybrid"].mean, every["gru"].mean
    hold(order[-1].mixer == "transformer", "the Transformer is last")
    sweep = max(int(r["tokens"]) for r in read("learn_code.csv") if r["stage"] == "sweep")
    mamba2 = every["mamba2"].mean
    hold(mamba2 < hybrid, "Mamba2 before the hybrid")
    return prose(
        f"**Code.** No file is read twice: {millions(best.curve[-1][0])} tokens, "
        f"{100 * epochs('code'):.0f}% of the corpus, and rates chosen after {millions(sweep)}. "
        f"{name_of(best.mixer)} has the fewest bits, {best.mean:.4f}, and {name_of(second.mixer)} "
        f"is next with {second.mean:.4f}: {verdict}. Mamba2 alone is {rank(order, 'mamba2')}, "
        f"{span([percents(mamba2, bits) for bits in pair], '.1f', '%')} below GRU and LSTM. "
        "Without a layer of Mamba2 or attention, "
        f"matrix states are first: with entries that do not meet {states[0]:.4f}, the gated delta "
        f"rule {states[1]:.4f}. The LSTM with matrices inside heads has {head.mean:.4f}, "
        f"{percents(head.mean, lstm.mean):.1f}% below the LSTM of one weight a channel. Three "
        f"layers of attention in twelve take {percents(hybrid, gru):.1f}% from the GRU's bits and "
        f"{percents(every['hybrid-head-lstm'].mean, head.mean):.1f}% from those of that LSTM. The "
        f"Transformer is last, with {every['transformer'].mean:.4f}."
    )


def rank(order: Sequence[Result], mixer: str) -> str:
    """Return the rank of a mixer in words."""
    index = [result.mixer for result in order].index(mixer)
    words = ("first", "second", "third", "fourth", "fifth")
    return words[index] if index < len(words) else f"number {index + 1}"


def name_of(mixer: str) -> str:
    """Return a mixer's name in a sentence."""
    return NAMES.get(mixer, f"`{mixer}`")


def learn_inside_says() -> str:
    """Return what one LSTM whose channels mix adds to Mamba2 with attention."""
    texts, means = list[str](), list[tuple[float, float]]()
    stacks = ("mamba2-attention", "mamba2-attention-head-lstm")
    for steps in lengths(read("learn_code.csv")):
        every = {each.mixer: each for each in code_results(steps)}
        if not every.keys() >= set(stacks):
            continue
        plain, both = (every[mixer] for mixer in stacks)
        means.append((plain.mean, both.mean))
        is_apart = max(plain.bits) < min(both.bits) and len(plain.bits) > 1
        seeds = f" ({len(plain.bits)} seeds each, none of which overlap)" if is_apart else ""
        texts.append(
            f"{plain.mean:.4f} bits without it and {both.mean:.4f} with it at "
            f"{millions(plain.curve[-1][0])} tokens{seeds}"
        )
    hold(all(one_mean < other for one_mean, other in means), "the LSTM costs bits")
    gaps = [percents(one_mean, other) for one_mean, other in means]
    shortest = {each.mixer: each for each in code_results()}
    base, stack = shortest["mamba2"], shortest["mamba2-attention"]
    own = shortest["mamba2-head-lstm"]
    hold(min(base.bits) < own.mean < max(base.bits), "within Mamba2's seeds")
    return prose(
        "**Does the nonlinear layer help?** Not on this text at 60M. One LSTM whose channels mix, "
        f"in a stack of Mamba2 and attention, costs {span(gaps, '.1f', '%')}: {'; '.join(texts)}. "
        f"The gain over Mamba2 alone, {percents(stack.mean, base.mean):.1f}% at "
        f"{millions(base.curve[-1][0])} tokens, is the attention's. In Mamba2 without attention "
        "that LSTM changes less than a seed does."
    )


def learn_large_says() -> str:
    """Return what models of 150M have learned."""
    order = large_results()
    large = {each.mixer: each for each in order}
    small = {each.mixer: each for each in code_results()}
    words = enumeration(f"{name_of(each.mixer)} {each.mean:.4f}" for each in order)
    stacks = ["mamba2-attention-head-lstm", "mamba2-attention"]
    hold(list(large) == [*stacks, "mamba2", "hybrid", "gru"], "stacks, Mamba2, hybrid, GRU")
    rows = [row for row in read("learn_150M_code.csv") if row["stage"] == "sweep"]
    rates = sorted({float(row["rate"]) for row in rows})
    hold({float(e.first["rate"]) for e in order} == {rates[0]}, "all have the lowest rate")
    gaps = {
        mixer: [-percents(every[mixer].mean, every["mamba2"].mean) for every in (small, large)]
        for mixer in ("hybrid", "gru")
    }
    hold(all(far > near for far, near in gaps.values()), "GRUs come closer to Mamba2")
    both, plain = (large[mixer].bits for mixer in stacks)
    hold(min(plain) < max(both) and min(both) < max(plain), "seeds of both stacks overlap")
    return prose(
        f"**150M.** The order is {words}. The two stacks of Mamba2 and attention are {len(both)} "
        "seeds each, which overlap, so at this size the LSTM inside costs nothing that is seen, "
        f"and what it gains is not seen either. The GRU is {gaps['gru'][1]:.1f}% above "
        f"Mamba2 ({gaps['gru'][0]:.1f}% at 60M) and the hybrid {gaps['hybrid'][1]:.1f}% "
        f"({gaps['hybrid'][0]:.1f}%), in {large['hybrid'].seconds:.0f} s where Mamba2 takes "
        f"{large['mamba2'].seconds:.0f} s. "
        f"All are best at {rates[0]:g}, the lower of two rates, so lower ones might be better."
    )


def learn_longer_says() -> str:
    """Return who learns most in a time."""
    steps = lengths(read("learn_code.csv"))
    trainings = [result for count in steps for result in code_results(count)]
    best = front(trainings)
    words = enumeration(
        f"{name_of(each.mixer)} ({millions(each.curve[-1][0])} tokens in {each.seconds:.0f} s, "
        f"{each.mean:.4f})"
        for each in best
    )
    mamba2 = [each for each in trainings if each.mixer == "mamba2"]
    count = sum(each in best for each in mamba2)
    verdict = f"Mamba2's trainings among them: {count} of {len(mamba2)}."
    ends = [_order_at(count) for count in steps[1:]]
    return prose(
        "**Equal seconds.** These trainings have fewer bits than all that took no longer: "
        f"{words}. {verdict} {' '.join(ends)}"
    )


def _order_at(steps: int) -> str:
    """Return a sentence: the mixers of a number of steps, the best first."""
    order = code_results(steps)
    words = enumeration(f"{name_of(each.mixer)} {each.mean:.4f}" for each in order)
    rows = final_rows(read("learn_code.csv"), steps)
    readings = max(float(row["epochs"]) for row in rows)
    return (
        f"At {millions(order[0].curve[-1][0])} tokens, {readings:.1f} readings of the corpus, "
        f"the order is {words}."
    )


def learn_mamba_says() -> str:
    """Return the reason for Mamba2's seconds on English."""
    english, rates = mixers("english"), speeds()
    longer = [row for row in read("lm_step.csv") if row["T"] == "2048" and row["packed"] == "False"]
    mamba2, gru = (
        int(one(longer, model=f"{name}-400M")["tokens_per_s"]) for name in ("mamba2", "gru")
    )
    slow = english["mamba2"].speed
    hold(rates["mamba2"] > 1.2 * slow, "launches cost Mamba2 time")
    return prose(
        "The seconds of the English trainings are of kernels that Python launches one by one, "
        f"which cost Mamba2 most: {round(slow, -4):,.0f} tokens/s there, {rates['mamba2']:,} where "
        "a step is one CUDA graph, as all seconds of the code trainings have it. That is "
        f"{rates['mamba2'] / rates['gru']:.2f} of the GRU's {rates['gru']:,}. [At "
        f"400M](language-models.md#measured) it has {mamba2 / gru:.2f} of the GRU's. By tokens it "
        "learns about as fast as the GRU at first on English and ends last there."
    )


def sweep_end(mixer: str) -> float:
    """Return the fewest bits with which a mixer's sweep on code ended."""
    return min(
        float(row["bits_per_byte"])
        for row in read("learn_code.csv")
        if (row["mixer"], row["stage"], row["step"]) == (mixer, "sweep", row["steps"])
    )


def learn_m2rnn_says() -> str:
    """Return what M2RNN has learned."""
    rows = [row for row in read("learn_code.csv") if row["mixer"] == "m2rnn"]
    others = ("gru", "mamba2", "transformer", "matrix-elementwise")
    bits = {mixer: sweep_end(mixer) for mixer in ("m2rnn", *others)}
    hold(bits["gru"] < bits["m2rnn"] < bits["transformer"], "between GRU and Transformer")
    rates = sorted({float(row["rate"]) for row in rows})
    tokens = max(int(row["tokens"]) for row in rows if row["stage"] == "sweep")
    every = {each.mixer: each.mean for each in code_results()}
    cost = enumeration(
        f"{name_of(other)} {every[other]:.4f} bits, {every[own]:.4f} with it"
        for other, own in (("mamba2", "mamba2-m2rnn"), ("hybrid", "hybrid-m2rnn"))
    )
    hold(every["mamba2"] < every["mamba2-m2rnn"], "M2RNN does not help Mamba2")
    end = (
        f" At {millions(float(code_results()[0].curve[-1][0]))} tokens it has {every['m2rnn']:.4f}."
        if "m2rnn" in every
        else " It has had no training beyond that."
    )
    return prose(
        f"M2RNN (heads of 32 keys and 64 values, {millions(float(rows[0]['parameters']))}) is slow "
        f"to begin: after {millions(tokens)} tokens of code, at the better of "
        f"{enumeration(f'{rate:g}' for rate in rates)}, it needs {bits['m2rnn']:.2f} bits a byte, "
        f"where the GRU needs {bits['gru']:.2f}, Mamba2 {bits['mamba2']:.2f}, the Transformer "
        f"{bits['transformer']:.2f}, and the same cell with a weight in place of its matrix "
        f"{bits['matrix-elementwise']:.2f}.{end} In other models it costs bits too: {cost}. Its "
        "forget gates have no bias, and are near 0.5 at first."
    )


def learn_speed_says() -> str:
    """Return what matrices cost."""
    rates = speeds()
    m2rnn, entries = rates["m2rnn"], rates["matrix-elementwise"]
    return prose(
        f"The head-mixing LSTM has {rates['head-lstm'] / rates['lstm']:.2f} of the speed of the "
        f"LSTM of one weight a channel, and one block of it costs a stack of Mamba2 nothing "
        f"({rates['mamba2-head-lstm']:,} and {rates['mamba2']:,} tokens/s). M2RNN takes "
        f"{entries / m2rnn:.1f} times as long as the same cell without a product: "
        f"{100 * (1 - m2rnn / entries):.0f}% of its step is states of 32 x 64 times matrices of "
        "64 x 64, forward and backward."
    )


def choosing_says() -> str:
    """Return what a cell costs in a whole model."""
    row = one(read("learn_speed.csv"), mixer="head-lstm")
    texts = {name: f"{round(rate, -3):,}" for name, rate in speeds().items()}
    return prose(
        f"In a whole model of 60M training learns {texts['head-lstm']} tokens/s with the LSTM of "
        f"heads of 64, {texts['matrix-elementwise']} with a matrix state whose entries do not "
        f"meet, {texts['gated-delta']} with the gated delta rule, {texts['m2rnn']} with M2RNN "
        f"(ten heads of 32 x 64), and {texts['mamba2-head-lstm']} with 21 blocks of Mamba2 and "
        f"one of that LSTM ({row['device']}, PyTorch {row['torch']}, commit {row['commit']}; "
        "`benchmarks/results/learn_speed.csv`)."
    )


def choosing_needs_says() -> str:
    """Return who needs the fewest bits on code, as the last of the needs."""
    first, second, *_ = code_results()
    steps = lengths(read("learn_code.csv"))
    best = front(result for count in steps for result in code_results(count))
    return prose(
        f"- **Fewest bits on code**: at equal tokens {name_of(first.mixer)} ({first.mean:.3f}) and "
        f"{name_of(second.mixer)} ({second.mean:.3f}) in our study. At equal seconds, from the "
        f"fewest on, {enumeration(dict.fromkeys(name_of(each.mixer) for each in best))}."
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
