"""The comparison of mixers: equal tokens in equal order, text held out, and what follows."""

from __future__ import annotations

import csv
import json
import sys
import time
from contextvars import ContextVar
from dataclasses import asdict
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import learn
import learn_data
import learn_forgetting
import learn_layers
import learn_models
import learn_results
import learn_run
import triton_tuning
from learn_run import Corpus, Job, Shape, Trainee

import pararnn
from pararnn.lab.train.corpus.packing import Part
from pararnn.lm.loss import IGNORED

CPU = torch.device("cpu")
SHAPE = Shape(2, 16)


@pytest.fixture
def corpus() -> Corpus:
    tokens = torch.randint(100, (400,), generator=torch.Generator().manual_seed(0)).int()
    return Corpus("some", tokens[:300], tokens[300:], 250)


def job(mixer: str, seed: int = 0, rate: float = 1e-2) -> Job:
    return Job(mixer, "some", "final", rate, seed, steps=2, marks=2)


def test_mixers_read_the_same_tokens_and_start_anew(corpus: Corpus) -> None:
    rows = []
    for mixer in ("gru", "transformer"):
        trainee = Trainee(learn_models.tiny()[mixer], CPU, SHAPE)
        first = list(trainee.train(job(mixer), corpus))
        again = list(trainee.train(job(mixer), corpus))
        time_columns = ("seconds", "tokens_per_s")
        assert [{**row, **dict.fromkeys(time_columns)} for row in first] == [
            {**row, **dict.fromkeys(time_columns)} for row in again
        ]
        rows += [*first, *trainee.train(job(mixer, seed=1), corpus)]
    learn.check_equal(rows)
    assert [row["tokens"] for row in rows[:2]] == [32, 64]
    assert len({row["order"] for row in rows}) == 4  # two seeds, two looks
    nats = rows[0]["valid_nats"] * (len(corpus.valid) - 1)
    assert rows[0]["bits_per_byte"] == pytest.approx(nats / np.log(2) / 250, abs=1e-4)


def test_mixers_that_read_other_tokens_raise(corpus: Corpus) -> None:
    trainee = Trainee(learn_models.tiny()["gru"], CPU, SHAPE)
    rows = list(trainee.train(job("gru"), corpus))
    other = {**rows[-1], "mixer": "lstm", "order": "another"}
    with pytest.raises(RuntimeError, match="not read the same"):
        learn.check_equal([*rows, other])


def test_each_token_held_out_is_predicted_once(corpus: Corpus) -> None:
    labels = torch.cat([labels[:, 1:].flatten() for _, labels in learn_run.held_out(corpus, SHAPE)])
    assert labels[labels != IGNORED].tolist() == corpus.valid[1:].tolist()


def test_steps_fit_into_the_time_and_are_one_number() -> None:
    speeds = {"fast": (200.0, 0.0), "slow": (100.0, 0.1)}
    runs, most = {"sweep": 2, "final": 1}, {"sweep": 3200, "final": 6400}
    whole = (2 * 3200 + 6400) * (1 / 200 + 1 / 100)
    looks = 0.1 * (2 * learn.MARKS["sweep"] + learn.MARKS["final"])
    assert learn.plan_steps(speeds, 1e6, runs, most, SHAPE) == {"sweep": 100, "final": 200}
    half = learn.plan_steps(speeds, whole / 2 + looks + 1e-6, runs, most, SHAPE)
    assert half == {"sweep": 50, "final": 100}
    with pytest.raises(SystemExit, match="too few"):
        learn.plan_steps(speeds, 1.0, runs, most, SHAPE)


def test_the_rate_of_the_fewest_bits_is_chosen() -> None:
    bits = {1e-3: 3.0, 2e-3: 2.5, 4e-3: float("nan"), 8e-3: 2.7}
    rows = [
        {"corpus": "some", "mixer": "gru", "stage": "sweep", "rate": rate, "step": step}
        | {"steps": 4, "bits_per_byte": value if step == 4 else 0.0}
        for rate, value in bits.items()
        for step in (2, 4)
    ]
    assert learn.best_rates(rows) == {("some", "gru"): 2e-3}


def test_files_are_held_out_by_their_paths() -> None:
    files = [(f"package/{n}.py", b"x = %d\n" % (n % 900)) for n in range(1000)]
    files += [("package/empty.py", b""), ("package/bytes.py", b"\xff")]
    train, valid = learn_data.split(reversed(files))
    assert not set(train) & set(valid)
    assert len(train) + len(valid) == 900
    assert 0 < len(valid) < 50
    assert (train, valid) == learn_data.split(files)
    fewer = learn_data.split(files[:450])  # whatever else there is, a file stays where it is
    more = learn_data.split(files[:900])
    assert set(fewer[0]) <= set(more[0])
    assert set(fewer[1]) <= set(more[1])


@pytest.mark.thorough
def test_a_whole_run_of_two_mixers(tmp_path: Path) -> None:
    """They learn at two rates, and each at the better one with two seeds."""
    folder = tmp_path / "some"
    folder.mkdir()
    tokens = np.random.default_rng(0).integers(100, size=400).astype(np.uint16)
    meta = {"dtype": "uint16", "vocabulary": 101, "end": 100}
    for name, part in (("train", tokens[:300]), ("valid", tokens[300:])):
        part.tofile(folder / f"{name}.bin")
        meta[name] = asdict(Part(len(part), 1, 3 * len(part)))
    (folder / "meta.json").write_text(json.dumps(meta))
    where = ["some", "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--smoke"]
    size = ["--rows", "2", "--length", "16", "--sweep-tokens", "320", "--final-tokens", "384"]
    few = ["--rates", "1e-3", "1e-2", "--seeds", "2", "--probe", "1", "--layers-seconds", "0"]
    learn.main([*where, *size, *few, "--mixers", "gru", "transformer", "--seconds", "10000"])
    with (tmp_path / "out" / "learn_some.csv").open() as file:
        rows = list(csv.DictReader(file))
    learn.check_equal(rows)
    ends = [row for row in rows if row["step"] == row["steps"]]
    count = {(row["mixer"], row["stage"]): row["tokens"] for row in ends}
    assert count == {
        (mixer, stage): tokens
        for mixer in ("gru", "transformer")
        for stage, tokens in (("sweep", "320"), ("final", "384"))
    }
    assert len(ends) == 2 * (2 + 2)
    with (tmp_path / "out" / "learn_speed.csv").open() as file:
        assert [row["mixer"] for row in csv.DictReader(file)] == ["gru", "transformer"]

    # A third mixer joins them, and a training that had no end starts anew.
    path = tmp_path / "out" / "learn_some.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    join = ["--steps", "10", "12", "--mixers", "hybrid", "transformer", "--seconds", "10000"]
    learn.main([*where, *size[:4], *few, *join])
    with path.open() as file:
        more = list(csv.DictReader(file))
    looks = learn.MARKS["final"]
    old = rows[:-looks]  # of all that ended
    assert more[: len(old)] == old
    assert [row["mixer"] for row in more].count("hybrid") == len(rows) / 2
    times, last = dict.fromkeys(("seconds", "tokens_per_s")), ("transformer", "final", "1")
    first, again = (
        [{**row, **times} for row in part if (row["mixer"], row["stage"], row["seed"]) == last]
        for part in (rows, more)
    )
    assert first == again
    assert len(again) == looks
    learn.check_equal(more)

    # What would take too long is left out.
    learn.main([*where, *size[:4], *few, *join[:-1], "0.1", "--seeds", "3"])
    assert path.read_text().count("\n") == len(more) + 1

    # Longer trainings join the table and have results of their own.
    longer = ["--steps", "10", "12", "20", "--mixers", "hybrid", "--seconds", "10000"]
    learn.main([*where, *size[:4], *few, *longer])
    with path.open() as file:
        most = list(csv.DictReader(file))
    assert most[: len(more)] == more
    assert {(row["mixer"], row["steps"]) for row in most[len(more) :]} == {("hybrid", "20")}
    assert len(most) == len(more) + 2 * looks
    assert learn_results.lengths(most) == [12, 20]
    assert learn_results.results(most) == learn_results.results(more)
    assert [result.mixer for result in learn_results.results(most, 20)] == ["hybrid"]


@pytest.mark.thorough
def test_layers_of_a_trained_model_by_their_pairs(corpus: Corpus, monkeypatch) -> None:
    monkeypatch.setattr(learn_layers, "SIZES", ((2, 32), (1, 64), (1, 4096)))
    trainee = Trainee(learn_models.tiny()["hybrid"], CPU, SHAPE)
    list(trainee.train(job("hybrid"), corpus))
    model = trainee.model
    arguments = (model.config, model.state_dict(), corpus)
    rows = list(learn_layers.layer_rows("hybrid", *arguments, until=time.time() + 1e6))
    assert {(row["B"], row["T"], row["D"]) for row in rows} == {(2, 32, 32), (1, 64, 32)}
    for size in (32, 64):
        for layer in (1, 2, 3):
            own = [row for row in rows if (row["T"], row["layer"]) == (size, layer)]
            assert sum(row["auto"] for row in own) <= 1
            assert min(row["of_best"] for row in own) == 1
    assert not list(learn_layers.layer_rows("hybrid", *arguments, until=0))


def final(mixer: str, bits: list[list[float]], speed: float) -> list[dict[str, str]]:
    """Rows of final trainings, as a file has them: `bits` by seeds and looks."""
    shared = {"mixer": mixer, "stage": "final", "parameters": "60000000", "rate": "0.002"}
    size = {
        "B": "2",
        "T": "16",
        "steps": str(len(bits[0])),
        "epochs": "1.0",
        "device": "x",
        "torch": "y",
    }
    return [
        {**shared, **size, "commit": "z", "seed": str(seed), "step": str(step)}
        | {"tokens": str(32 * step), "bits_per_byte": str(value), "seconds": str(step / speed)}
        for seed, values in enumerate(bits)
        for step, value in enumerate(values, 1)
    ]


def test_results_of_mixers_that_ended_and_the_leader_on_the_way() -> None:
    early, late = final("gru", [[3.0, 2.0, 2.6]], 2.0), final("lstm", [[3.5, 2.5, 2.2]], 1.0)
    results = learn_results.results([*early, *late])
    assert [result.mixer for result in results] == ["lstm", "gru"]
    assert [result.least[2] for result in results] == [2.2, 2.0]
    diverging = final("hybrid", [[3.0, 2.0, 2.0], [float("nan")]], 1.0)
    assert learn_results.results([*early, *late, *diverging]) == results


def test_rates_are_said_by_mixers_that_tried_them() -> None:
    rows = [
        {**row, "stage": stage, "rate": rate}
        for mixer, rates in (("gru", ("0.001", "0.004")), ("lstm", ("0.001",)))
        for row in final(mixer, [[2.0]], 1.0)
        for stage, rate in (("final", "0.001"), *(("sweep", rate) for rate in rates))
    ]
    every = learn_results.results(rows)
    assert learn_results.rates_of(every, rows) == "0.001, 0.004 (gru); 0.001 (lstm)"
    assert learn_results.rates_of(every[:1], rows) == "0.001, 0.004"


def test_a_block_of_each_kind_is_compiled(corpus: Corpus) -> None:
    trainee = Trainee(learn_models.tiny()["hybrid-m2rnn"], CPU, SHAPE)
    layers = list(trainee.model.backbone.layers)
    calls = []
    for number, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, number=number: calls.append(number))
    trainee.compile(corpus)
    assert calls == [0, 3, 0, 3]  # M2RNN and attention, with gradients and without
    assert list(trainee.model.backbone.layers) == layers
    assert all(copy.grad is None for copy in trainee.copies)


def test_blocks_of_a_stack_of_mamba2_are_ours() -> None:
    def kinds(name: str) -> list[str]:
        layers = learn_models.tiny()[name]().backbone.layers
        return [type(each.mixer).__name__.removesuffix("Mixer") for each in layers]

    assert kinds("mamba2-m2rnn") == ["Mamba2", "Matrix", "Mamba2"]
    attention, mamba2 = "Attention", "Mamba2"
    own = [attention, "RNN", attention, attention]
    assert kinds("mamba2-attention-head-lstm") == [mamba2, *own, mamba2]


@pytest.mark.parametrize(("size", "least", "most"), [("60M", 59, 61), ("150M", 148, 155)])
@pytest.mark.one_in(3)
def test_models_of_a_size_have_about_as_many_parameters(size: str, least: int, most: int) -> None:
    makers = learn_models.models(size)
    assert list(makers) == learn_models.MIXERS
    for make in makers.values():
        model = make(device="meta", dtype=torch.float32)
        assert least < learn_models.body_size(model) / 1e6 < most


@pytest.mark.parametrize(
    ("long", "base", "gate"),
    [
        (learn_forgetting.LongM2RNN, pararnn.zoo.M2RNNCell, "f"),
        (learn_forgetting.LongGatedDelta, pararnn.zoo.GatedDeltaCell, "a"),
    ],
)
def test_long_cells_add_a_bias_to_their_forget_gates(long, base, gate) -> None:
    torch.manual_seed(0)
    cell, plain = (kind(8, num_heads=2, K=3) for kind in (long, base))
    plain.load_state_dict({n: p for n, p in cell.state_dict().items() if n != "b"})
    gates = torch.randn(2, 5, 2, cell.head_sizes.width)
    parts = dict(zip(base.gates, plain.head_sizes.split(gates), strict=True))
    parts[gate] = parts[gate] + cell.b
    joint = torch.cat([each.reshape(2, 5, 2, -1) for each in parts.values()], -1)
    pair = {"solver": "sequential", "backend": "torch"}
    torch.testing.assert_close(
        pararnn.solve(cell, gates, **pair)[0], pararnn.solve(plain, joint, **pair)[0]
    )
    assert float(cell.b.detach().mean()) > 0


class Tuned(NamedTuple):
    """What a module of Triton's names has: its timer, the calls that it timed, and a tuner."""

    testing: Any
    timings: list[Any]
    tuner: Any


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Tuned:
    """A Triton without a GPU, and a peer's kernel that has chosen."""
    timings: list[Any] = []
    names = ("testing", "runtime", "runtime._async_compile", "p")
    testing, runtime, compilation, peer = (ModuleType(f"triton.{name}") for name in names)
    testing.do_bench = lambda call, quantiles, **_: timings.append(call) or [2.0 for _ in quantiles]
    runtime.Autotuner = type("Autotuner", (), {"cache": {"key": "config"}})
    compilation.active_mode = ContextVar("active_mode", default=None)
    tuner = runtime.Autotuner()
    peer.kernel = SimpleNamespace(fn=tuner)
    modules = {"triton": ModuleType("triton"), "mamba_ssm.peer": peer}
    modules |= {each.__name__: each for each in (testing, runtime, compilation)}
    modules["triton"].__spec__ = ModuleSpec("triton", None)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return Tuned(testing, timings, tuner)


def test_tuners_time_nothing_before_begin(tuned: Tuned) -> None:
    tuning, calls = triton_tuning.Tuning(), []
    assert tuned.testing.do_bench(lambda: calls.append(1), quantiles=(0.5, 0.2)) == [1.0, 1.0]
    assert (len(calls), len(tuned.timings)) == (1, 0)
    tuning.begin()
    assert not tuned.tuner.cache
    assert tuned.testing.do_bench(lambda: calls.append(1), quantiles=(0.5, 0.2)) == [2.0, 2.0]
    assert (len(calls), len(tuned.timings)) == (1, 1)


def test_threads_compile_what_tuners_may_take(tuned: Tuned) -> None:
    """A kernel that a thread compiles is not launched; one that cannot be compiled is no error."""
    tuning, compiled, launched = triton_tuning.Tuning(threads=2), [], []
    mode = sys.modules["triton.runtime._async_compile"].active_mode

    def kernel(size: int) -> None:
        mode.get().submit(size, lambda: compiled.append(1 // size), None)
        launched.append(size)

    for size in (1, 0, 1):
        assert tuned.testing.do_bench(partial(kernel, size), quantiles=(0.5,)) == [1.0]
    tuning.wait()
    assert (compiled, launched, mode.get()) == ([1, 1], [], None)
