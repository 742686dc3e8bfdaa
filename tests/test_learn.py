"""The comparison of mixers: equal tokens in equal order, text held out, and what follows."""

from __future__ import annotations

import csv
import gzip
import io
import random
import sys
import tarfile
import threading
import time
import zipfile
from contextvars import ContextVar
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
import learn_evidence
import learn_fleet
import learn_layers
import learn_mixers
import learn_models
import learn_packs
import learn_plot
import learn_probes
import learn_results
import learn_run
import learn_scaling
import learn_sources
import markdown_tables
import triton_tuning
from learn_run import Corpus, Job, Shape, Trainee

import pararnn
from pararnn.lab.train.corpus.tokenizer import load_tokenizer, train_tokenizer
from pararnn.lm.loss import IGNORED

CPU = torch.device("cpu")
SHAPE = Shape(2, 16)
MODELS = learn_models.models(learn_models.TINY, "cpu")


@pytest.fixture
def corpus() -> Corpus:
    tokens = torch.randint(100, (400,), generator=torch.Generator().manual_seed(0)).int()
    return Corpus("some", tokens[:300], tokens[300:], 250)


def job(mixer: str, seed: int = 0, rate: float = 1e-2) -> Job:
    return Job(mixer, "4M", rate, seed, steps=2, marks=2)


def test_mixers_read_the_same_tokens_and_start_anew(corpus: Corpus) -> None:
    rows = []
    for mixer in ("gru", "transformer"):
        trainee = Trainee(MODELS[mixer], CPU, SHAPE)
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
    trainee = Trainee(MODELS["gru"], CPU, SHAPE)
    rows = list(trainee.train(job("gru"), corpus))
    other = {**rows[-1], "mixer": "lstm", "order": "another"}
    with pytest.raises(RuntimeError, match="not read the same"):
        learn.check_equal([*rows, other])


def test_each_token_held_out_is_predicted_once(corpus: Corpus) -> None:
    labels = torch.cat([labels[:, 1:].flatten() for _, labels in learn_run.held_out(corpus, SHAPE)])
    assert labels[labels != IGNORED].tolist() == corpus.valid[1:].tolist()


def test_a_training_that_would_end_too_late_raises(corpus: Corpus, monkeypatch) -> None:
    monkeypatch.setattr(learn_run, "PROBE", 0)
    trainee = Trainee(MODELS["gru"], CPU, SHAPE)
    with pytest.raises(learn_run.NoTimeError, match="s are left"):
        list(trainee.train(job("gru"), corpus, until=time.time()))


def curve(size: str, rate: float, bits: float, mixer: str = "gru", steps: int = 4) -> Any:
    """Rows of a training, as a file has them."""
    whole = {"mixer": mixer, "size": size, "rate": f"{rate}", "seed": "0", "steps": f"{steps}"}
    return [
        {**whole, "step": f"{step}", "bits_per_byte": f"{value}"}
        for step, value in ((1, 9.0), (steps, bits))
    ]


def test_rates_follow_one_rule() -> None:
    """A parabola in the logarithm at the smallest size, and a power of the width."""

    def bits(rate: float, best: float) -> float:
        return 2 + np.log(rate / best) ** 2

    rates = (1e-3, 2e-3, 4e-3)
    rows = [row for rate in rates for row in curve("4M", rate, bits(rate, 1.5e-3))]
    assert learn_scaling.rate_of([], "gru", "4M") is None
    assert learn_scaling.rate_of(curve("4M", 1e-3, 2.0), "gru", "4M") is None
    assert learn_scaling.rate_of(rows, "gru", "4M") == 1.5e-3
    assert learn_scaling.rate_of(rows, "gru", "60M") == pytest.approx(1.5e-3 * 256 / 640, rel=1e-2)
    rows += [row for rate in rates for row in curve("4M", rate, bits(rate, 2e-3), "lstm")]
    assert learn_scaling.rate_of(rows, "lstm", "4M") == 2e-3
    assert learn_scaling.rate_of(rows, "kda", "4M") == pytest.approx(3**0.5 * 1e-3, rel=1e-2)
    # The best rates fall with the square root of the width.
    best = 1.5e-3 * (256 / 384) ** 0.5
    lower = (5e-4, *rates)
    rows += [row for rate in lower for row in curve("15M", rate, bits(rate, best), steps=8)]
    assert learn_scaling.power_of(learn_scaling.best_rates(rows)) == pytest.approx(0.5, abs=1e-2)
    # A training that diverged has no place, and one at the border is the best itself.
    rows = [*curve("4M", 1e-3, float("nan")), *curve("4M", 2e-3, 3.0), *curve("4M", 4e-3, 2.0)]
    assert learn_scaling.rate_of(rows, "gru", "4M") == 4e-3


def test_lines_are_jobs_and_none_twice() -> None:
    text = "# some\n4M 320 0.002,0.004 0,1 gru lstm\n4M 320 rule 0 gru gru\n15M 1M rule 0 all\n"
    lines = learn.jobs_of(text, SHAPE)
    assert [len(line) for line in lines] == [8, 2, len(learn_models.MIXERS)]
    assert lines[0][0] == Job("gru", "4M", 0.002, 0, 10, 10)
    assert {(job.rate, job.steps) for job in lines[2]} == {(0.0, 31250)}
    ended = curve("4M", 0.002, 2.0, steps=10)
    assert [len(line) for line in learn.to_do(lines, ended)[:2]] == [7, 1]
    ended += curve("4M", 0.004, 2.1, steps=10)  # the rule's rate is 0.002
    assert [len(line) for line in learn.to_do(lines, ended)[:2]] == [6, 0]
    cut = curve("4M", 0.002, 2.0, steps=10)[:1]
    assert not learn.ended_keys(cut)
    for wrong in ("5M 1M rule 0 gru", "4M 1M rule 0 none", "4M 1M rule 0"):
        with pytest.raises(SystemExit, match="a line is"):
            learn.jobs_of(wrong, SHAPE)


def test_a_rule_waits_for_the_lines_before_it() -> None:
    text = "4M 320 0.002,0.004 0 gru lstm\n4M 320 rule 0 kda\n4M 320 rule 0 mlstm"
    queue, end = learn_fleet.Queue(learn.jobs_of(text, SHAPE), lambda _: 0.003), time.time() + 100
    jobs = [queue.take(("lstm", "4M"), end) for _ in range(6)]
    assert [job.mixer for job in jobs if job] == ["lstm", "lstm", "gru", "gru", "kda", "mlstm"]
    assert queue.take(("", ""), end) is None
    *swept, kda, mlstm = (job for job in jobs if job)
    assert queue.with_rate(swept[0]) is swept[0]
    answers = []
    waits = threading.Thread(target=lambda: answers.append(queue.with_rate(mlstm)))
    waits.start()
    for done in swept:
        assert not answers
        queue.done(done)
    waits.join(5)
    assert answers == [mlstm._replace(rate=0.003)]  # kda, whose rate is a rule too, still runs
    assert queue.with_rate(kda) == kda._replace(rate=0.003)


def test_texts_of_archives_are_read_once(tmp_path: Path) -> None:
    """Held-out projects first; of a wheel, and of a source package with archives for its tests."""
    names = ("pip-a", "src-b")
    for name in names:
        (tmp_path / name).mkdir()
    with zipfile.ZipFile(tmp_path / "pip-a" / "a-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a/one.py", "x = 1\n")
        wheel.writestr("a/two.py", "x  =  2\n")
        wheel.writestr("a/data.bin", b"x")
        wheel.writestr("a/large.py", b"x" * (learn_sources.LARGEST + 1))
    files = {"b/two.py": b"x = 2", "b/main.c": b"int x;", "b/wrong.c": b"\xff", "b/test.tar": b"no"}
    files |= {"b/man/b.3.gz": gzip.compress(b"manual"), "b/test/c.c": b"int y;", "b/empty.c": b" "}
    with tarfile.open(tmp_path / "src-b" / "b.orig.tar.xz", "w:xz") as tar:
        for path, content in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    (tmp_path / "src-b" / "b.dsc").write_text("about b")
    projects = [learn_sources.Project("held-out", "pip", "a==1")]
    projects.append(learn_sources.Project("learn", "src", "b"))
    read = [file for project in projects for file in learn_sources.read(project, tmp_path)]
    found = [(f.project.use, f.kind, f.path) for f in learn_sources.without_copies(read)]
    assert found == [
        ("held-out", "python", "a==1/a/one.py"),
        ("held-out", "python", "a==1/a/two.py"),
        ("learn", "c", "b/b/main.c"),
        ("learn", "documents", "b/b/man/b.3.gz"),
    ]
    every = learn_sources.projects()
    uses = [project.use for project in every]
    assert uses == sorted(uses)  # "held-out" before "learn"
    assert len({project.name for project in every}) == len(every)


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


@pytest.fixture
def packs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packs, which tiny models learn; of made-up probes there are few rows."""
    monkeypatch.setattr(learn_probes, "ROWS", 2)
    folder = tmp_path / "packs"
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=4)) for _ in range(160)]
    texts = [f"def {word}(x):\n    return [{word}(x, y) for y in x]\n" for word in words]
    train_tokenizer(["\n".join(words * 3), *texts], 900, folder)
    kinds = [{"use": "held-out", "kind": kind, "files": 2, "bytes": 70} for kind in ("c", "python")]
    learn_packs.write(folder, texts, texts[:4], kinds, 128)
    return folder


def test_packs_have_all_tokens_in_order(packs: Path, tmp_path: Path, monkeypatch) -> None:
    texts = [f"x{n} = {n}\n" * 9 for n in range(40)]
    written = [text.replace("x7 ", "x7\0") for text in texts]
    monkeypatch.setattr(learn_packs, "BYTES", 1000)
    monkeypatch.setattr(learn_packs, "BATCH", 3)
    kinds = [{"use": "held-out", "kind": "c", "files": 4, "bytes": 70}]
    learn_packs.write(packs, written, texts[:4], kinds, 128)
    assert len(list(packs.glob("train-*"))) > 2
    later, name = tmp_path / "later", "train-001.bin.xz"
    later.mkdir()
    (packs / name).rename(later / name)
    with pytest.raises(SystemExit, match="without gaps"):
        learn_packs.unpack(packs, tmp_path / "whole")
    (later / name).rename(packs / name)
    learn_packs.unpack(packs, tmp_path / "whole")
    with zipfile.ZipFile(packs / learn_packs.REST) as file:
        assert file.namelist()[-1] == "meta.json"  # by which a whole folder is known
    read = learn_run.read_corpus(tmp_path / "whole", CPU)
    tokenizer = load_tokenizer(str(packs))
    assert read.train.tolist() == [
        token for ids in tokenizer.encode_all(texts) for token in (*ids, tokenizer.end)
    ]
    assert read.valid_bytes == sum(map(len, texts[:4]))


def test_a_corpus_has_a_key_of_its_held_out_text(packs: Path, tmp_path: Path) -> None:
    """Files that come later change nothing."""
    learn_packs.unpack(packs, tmp_path)
    key = learn_run.read_corpus(tmp_path, CPU).key
    assert len(key) == 8
    (tmp_path / "train-001.bin").write_bytes(b"\1\0" * 50)
    assert learn_run.read_corpus(tmp_path, CPU).key == key
    path = tmp_path / "valid.bin"
    path.write_bytes(path.read_bytes()[::-1])
    assert learn_run.read_corpus(tmp_path, CPU).key != key


def test_made_up_rows_have_their_answers(packs: Path, tmp_path: Path) -> None:
    learn_packs.unpack(packs, tmp_path / "whole")
    probes = learn_probes.read(tmp_path / "whole")
    assert list(probes) == ["kind", "place", "names", "brackets", "copy", "recall", "variables"]
    copy = probes["copy"]
    first = copy.classes[0].argmax()
    length = learn_probes.COPIES[0]
    assert (copy.tokens[0, first : first + length - 1] == copy.tokens[0, 2 : length + 1]).all()
    tokenizer = load_tokenizer(str(packs)).tokenizer  # type: ignore[union-attr]
    text = tokenizer.decode(probes["brackets"].tokens[0].tolist(), skip_special_tokens=False)
    counted = probes["brackets"].classes[0].nonzero()[0]
    marks = [tokenizer.decode([token]) for token in probes["brackets"].tokens[0][counted]]
    assert marks
    assert all(mark.lstrip()[0] in ")]}" for mark in marks), text
    assert not probes["kind"].classes[:, 0].any()
    counts = np.bincount(probes["kind"].classes.ravel())
    assert sum(counts[1:]) == len(np.fromfile(tmp_path / "whole" / "valid.bin", np.uint16))


def test_probes_measure_the_model(packs: Path, tmp_path: Path) -> None:
    """Their nats are those of the held-out text, and a row of zeros counts nothing."""
    learn_packs.unpack(packs, tmp_path / "whole")
    read = learn_run.read_corpus(tmp_path / "whole", CPU)
    trainee = Trainee(MODELS["gru"], CPU, Shape(2, 128))
    trainee.start(1e-3, 0, 1)
    rows = list(learn_probes.probe_rows(trainee, tmp_path / "whole"))
    kinds = [row for row in rows if row["probe"] == "kind"]
    assert sum(row["count"] for row in kinds) == len(read.valid) - 1
    assert sum(row["nats"] for row in kinds) == pytest.approx(trainee.nats(read), rel=1e-3)


@pytest.mark.thorough
def test_a_whole_run_of_two_mixers(packs: Path, tmp_path: Path, monkeypatch) -> None:
    """They learn at two rates, another at the rule's, and one fails; what ended runs once."""
    jobs, out = tmp_path / "jobs.txt", tmp_path / "out"
    jobs.write_text("4M 96 0.002,0.004 0 gru transformer\n4M 96 rule 0 lstm\n")
    where = ["--jobs", str(jobs), "--packs", str(packs), "--data", str(tmp_path), "--out", str(out)]
    size = ["--rows", "2", "--length", "16", "--smoke", "--processes", "2", "--seconds", "10000"]
    monkeypatch.setattr(learn_packs.os, "cpu_count", lambda: 1)
    learn.main([*where, *size, "--states", str(tmp_path / "states")])
    with (out / "learn_programs.csv").open() as file:
        rows = list(csv.DictReader(file))
    learn.check_equal(rows)
    ends = [row for row in rows if row["step"] == row["steps"]]
    assert len(ends) == 5
    assert {row["tokens"] for row in ends} == {"96"}
    assert len(list((tmp_path / "states").iterdir())) == 5
    with (out / "learn_programs_probes.csv").open() as file:
        probes = list(csv.DictReader(file))
    assert len({(row["mixer"], row["rate"]) for row in probes}) == 5

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(learn_fleet, "probe_rows", fails)
    jobs.write_text("4M 96 0.002 0 gru kda\n4M 96 0.004 0 gru kda\n")
    learn.main([*where, *size])
    with (out / "learn_programs.csv").open() as file:
        more = list(csv.DictReader(file))
    assert more[: len(rows)] == rows
    failures = [row for row in more if row["failure"]]
    assert [row["mixer"] for row in failures] == ["kda", "kda"]
    assert {row["failure"] for row in failures} == {"RuntimeError: no such thing"}


@pytest.mark.thorough
def test_layers_of_a_trained_model_by_their_pairs(corpus: Corpus, monkeypatch) -> None:
    monkeypatch.setattr(learn_layers, "SIZES", ((2, 32), (1, 64), (1, 4096)))
    trainee = Trainee(MODELS["hybrid-gru"], CPU, SHAPE)
    list(trainee.train(job("hybrid-gru"), corpus))
    model = trainee.model
    rows = list(learn_layers.layer_rows("hybrid", model, corpus, until=time.time() + 1e6))
    assert {(row["B"], row["T"], row["D"]) for row in rows} == {(2, 32, 32), (1, 64, 32)}
    for size in (32, 64):
        for layer in (1, 2, 3):
            own = [row for row in rows if (row["T"], row["layer"]) == (size, layer)]
            assert sum(row["auto"] for row in own) <= 1
            assert min(row["of_best"] for row in own) == 1
    assert not list(learn_layers.layer_rows("hybrid", model, corpus, until=0))


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


def ended(
    mixer: str, size: str, bits: float, rate: float = 0.002, seed: int = 0, steps: int = 10
) -> Any:
    """Rows of a training of two validations, as a file has them: 4 s for 10 steps."""
    operations = {"4M": 2.4e7, "15M": 9.6e7, "30M": 1.9e8}[size]
    whole = {"mixer": mixer, "size": size, "rate": f"{rate}", "seed": f"{seed}"}
    whole |= {"steps": f"{steps}"}
    whole |= {"flops": f"{operations}", "B": "2", "T": "16", "failure": ""}
    whole |= {"device": "x", "torch": "y", "commit": "z", "train_nats": "3.0", "parameters": "40"}
    at = ((steps // 2, bits + 1), (steps, bits))
    return [
        {**whole, "step": f"{step}", "tokens": f"{100 * step}", "bits_per_byte": f"{value}"}
        | {"valid_nats": f"{np.log(value)}", "most_norm": "0.1"}
        | {"seconds": f"{0.4 * step}", "most_nats": "3.1"}
        for step, value in at
    ]


def test_evidence_is_of_the_best_rate_and_all_its_seeds() -> None:
    rows = [*ended("gru", "4M", 1.5, 0.004), *ended("gru", "4M", 1.4), *ended("lstm", "4M", 1.25)]
    rows += ended("gru", "4M", 1.2, 0.002, seed=1)
    rows += [*ended("gru", "4M", 1.1, steps=20), *ended("gru", "4M", 1.9, steps=4)]
    rows += [{**rows[0], "mixer": "kda", "step": "", "failure": "OutOfMemoryError: no room"}]
    every = learn_evidence.trainings(rows, "4M")
    assert [(trained.mixer, trained.bits) for trained in every] == [
        ("lstm", [1.25]),
        ("gru", [1.4, 1.2]),
    ]
    assert learn_evidence.after(every[1], 3.0) == pytest.approx(1.8)
    spiky = [{**rows[1], "most_nats": "5.0"}]
    steep = [{**row, "most_norm": norm} for row, norm in zip(rows[:2], ("7", "5.5"), strict=True)]
    early = [{**row, "step": "2", "most_norm": "9"} for row in rows[:1]]
    assert learn_evidence.troubles([*rows, *spiky, *steep, *early]) == [
        ["kda", "4M", "0.004", "0", "0M", "OutOfMemoryError: no room"],
        ["gru", "4M", "0.004", "0", "0M", "a spike of 2.0 nats"],
        ["gru", "4M", "0.004", "0", "0M", "gradients of norm 7.0"],
    ]


def test_trainings_are_compared_in_the_same_time(tmp_path: Path, monkeypatch) -> None:
    """A longer one of a fast mixer stands next to the others; shorter ones are left out."""
    rows = [*ended("gru", "4M", 1.5), *ended("lstm", "4M", 1.4), *ended("lstm", "4M", 1.6, seed=1)]
    rows += [*ended("gru", "4M", 1.3, steps=30), *ended("gru", "4M", 1.0, steps=4)]
    rows = [{**row, "seconds": "9"} if row["mixer"] == "lstm" else row for row in rows]
    learn.write_csv(tmp_path / learn_evidence.CURVES, rows)
    monkeypatch.setattr(markdown_tables, "RESULTS", tmp_path)
    assert learn_evidence.seconds_table("4M").splitlines()[4:] == [
        "| 4 | gru | 0M | 1 | 1.5000 | yes |",
        "| 9 | lstm | 0M | 2 | 1.5000 (1.4000 to 1.6000) | yes |",
        "| 12 | gru | 0M | 1 | 1.3000 | yes |",
    ]


def test_bits_fall_with_a_power_of_compute() -> None:
    rows = [*ended("gru", "4M", 2.0), *ended("gru", "15M", 2.0 * 4**-0.1)]
    ((_, power),) = learn_evidence.fits(rows).values()
    assert power.power == pytest.approx(0.1)
    assert power.factor == pytest.approx(2.0)
    assert power.floor == 0
    short = [{**row, "parameters": "400"} for row in ended("gru", "30M", 1.0)]
    assert len(learn_evidence.fits([*rows, *short])["gru"][0]) == 2
    noisy = [(1e3, 2.0), (1e3, 2.1), (1e4, 1.5), (1e5, 1.2)]
    assert 0 < learn_evidence.fit(noisy).error < 0.02


def test_all_mixers_have_the_same_bits_that_no_compute_saves() -> None:
    """Curves of mixers with three sizes tell it, and one of two sizes is fitted with it."""
    computes = [1e3, 1e4, 4e4]
    one = [(compute, 0.6 + 2.0 * (compute / 1e3) ** -0.3) for compute in computes]
    two = [(compute, 0.6 + 1.0 * (compute / 1e3) ** -0.2) for compute in computes]
    floor = learn_evidence.floor_of([one, two, one[:2]])
    assert floor == pytest.approx(0.6, abs=0.01)
    assert learn_evidence.fit(two[:2], floor).power == pytest.approx(0.2, abs=0.01)
    assert learn_evidence.floor_of([one[:2], two[:2]]) == 0


def test_a_replaced_layer_is_compared_by_seed(tmp_path: Path, monkeypatch) -> None:
    """With the first mixer at the same size, tokens and seed; a size without it is left out."""
    first, second, _ = learn_evidence.CLAIM
    rows = [*ended(first, "15M", 2.0), *ended(first, "15M", 2.2, seed=1), *ended("gru", "15M", 1.0)]
    rows += [*ended(second, "15M", 2.1), *ended(second, "15M", 2.1, seed=1)]
    rows += [*ended(second, "15M", 1.0, seed=2), *ended(second, "4M", 1.0)]
    rows += [*ended(first, "15M", 1.5, steps=20), *ended(second, "15M", 1.4, steps=20)]
    learn.write_csv(tmp_path / learn_evidence.CURVES, rows)
    monkeypatch.setattr(markdown_tables, "RESULTS", tmp_path)
    assert learn_evidence.claim_table().splitlines()[4:] == [
        f"| 15M | 0M | {first} | 2 | 2.1000 (2.0000 to 2.2000) | 2.100 |  | 4 |",
        f"| 15M | 0M | {second} | 3 | 1.7333 (1.0000 to 2.1000) | 1.733 | +0.100, -0.100 | 4 |",
        f"| 15M | 0M | {first} | 1 | 1.5000 | 1.500 |  | 8 |",
        f"| 15M | 0M | {second} | 1 | 1.4000 | 1.400 | -0.100 | 8 |",
    ]


def test_tables_of_programs(tmp_path: Path, monkeypatch) -> None:
    rows = [*ended("gru", "4M", 2.0), *ended("lstm", "4M", 2.1), *ended("gru", "15M", 1.7)]
    names = {"kind": "c", "place": "1024-", "names": "16-63", "brackets": "0-15"}
    names |= {"copy": "32", "recall": "4", "variables": "0"}
    probes = [
        {**row, "probe": probe, "label": label, "count": "10", "nats": "20.0", "hits": "5"}
        for row in rows
        if row["step"] == "10"
        for probe, label in names.items()
    ]
    learn.write_csv(tmp_path / learn_evidence.CURVES, rows)
    learn.write_csv(tmp_path / learn_evidence.PROBES, probes)
    monkeypatch.setattr(markdown_tables, "RESULTS", tmp_path)
    tables = {name: make() for name, make in learn_evidence.evidence(["4M", "15M"]).items()}
    assert "| gru | 0.0M | 0.002 | 1 | 2.0000 | 2.000 | 2.0000 | 4 | 250 |" in tables["evidence_4M"]
    assert "| lstm |  | 2.000 |  |  |  |  | 50.0 | 50.0 |" in tables["evidence_probes_4M"]
    assert "4M: 2.0000, 15M: 1.7000" in tables["evidence_scaling"]


@pytest.mark.thorough
def test_a_picture_of_programs(tmp_path: Path, monkeypatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(learn_plot, "caption", lambda figure, *_: figures.append(figure))
    rows = [*ended("gru", "4M", 2.0), *ended("lstm", "4M", 2.1), *ended("gru", "15M", 1.7)]
    rows += [
        *ended("kda", "4M", 2.0),
        *ended("mlstm", "4M", 2.1),
        *ended("gru", "4M", 1.9, steps=20),
    ]
    learn_plot.plot_programs(rows, tmp_path / "programs.png")
    assert (tmp_path / "programs.png").stat().st_size > 10_000
    tokens, seconds = figures[0].axes[:2]
    ends = [axes.collections[0].get_offsets().tolist() for axes in (tokens, seconds)]
    assert ends == [[[2e-3, 1.9]], [[8.0, 1.9]]]  # of the longer training
    colours = [line.get_color() for line in tokens.lines]
    assert len(set(colours)) == len(colours) == 4


def test_a_block_of_each_kind_is_compiled(corpus: Corpus) -> None:
    trainee = Trainee(MODELS["hybrid-gated-delta-m2rnn"], CPU, SHAPE)
    layers = list(trainee.model.backbone.layers)
    calls = []
    for number, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, number=number: calls.append(number))
    trainee.compile(corpus)
    assert calls == [0, 2, 3, 0, 2, 3]  # two cells and attention, with gradients and without
    assert list(trainee.model.backbone.layers) == layers
    assert all(copy.grad is None for copy in trainee.copies)


@pytest.mark.parametrize("size", ["4M", "60M"])
@pytest.mark.thorough
def test_models_of_a_size_have_about_as_many_parameters(size: str) -> None:
    makers = learn_models.models(learn_models.SIZES[size])
    assert list(makers) == learn_models.MIXERS
    for make in makers.values():
        model = make(device="meta", dtype=torch.float32)
        ratio = learn_models.body_size(model) / learn_models.SIZES[size].parameters
        assert 0.95 < ratio < 1.05


@pytest.mark.parametrize(
    "mixer", ["gated-delta-beside-lstm", "gated-delta-driven", "conv", "transformer-conv"]
)
def test_designs_read_no_later_token(mixer: str) -> None:
    torch.manual_seed(0)
    model = MODELS[mixer]()
    tokens = torch.randint(99, (2, 9))
    other = tokens.clone()
    other[:, 5:] += 1
    with torch.no_grad():
        one, two = model(tokens), model(other)
    torch.testing.assert_close(one[:, :5], two[:, :5])
    assert not torch.allclose(one[:, 5:], two[:, 5:])
    if "beside" not in mixer:
        with pytest.raises(ValueError, match="no cache"):
            model(tokens, model.new_cache())


@pytest.mark.parametrize("mixer", ["gated-delta-beside-lstm", "hybrid-gated-delta-beside-min-gru"])
def test_designs_decode_as_they_read_whole_rows(mixer: str) -> None:
    torch.manual_seed(0)
    model, tokens = MODELS[mixer](), torch.randint(99, (2, 9))
    cache = model.new_cache()
    with torch.no_grad():
        pieces = [model(piece, cache) for piece in tokens.split([4, 1, 1, 3], 1)]
        torch.testing.assert_close(torch.cat(pieces, 1), model(tokens))


@pytest.mark.parametrize(
    ("long", "base", "gate"),
    [
        (learn_mixers.LongM2RNN, pararnn.zoo.M2RNNCell, "f"),
        (learn_mixers.LongGatedDelta, pararnn.zoo.GatedDeltaCell, "a"),
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
