import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from table import FUSED, PAIRS
from table import pairs_of as pairs_of_cell
from user_cells import Timeless

import pararnn
from pararnn.base.errors import MissingExtra, TrainingError
from pararnn.base.extras import require
from pararnn.lab.tasks import Corpus, bigram_bits, spread_windows, unigram_bits
from pararnn.lab.train import DemoConfig, budget, demo, run_demo
from pararnn.lab.train.config import OptimiserConfig
from pararnn.lab.train.demo import evaluate, make_model, printable, run_config, train_demo
from pararnn.lab.train.measure import (
    LOOP,
    compare_to_loop,
    pairs_of,
    solver_set_to,
    time_pair,
)
from pararnn.lab.train.optimiser import make_adamw
from pararnn.lm import LanguageModel, LMConfig, load_checkpoint

NO_LIMIT = 1e9
TINY = {
    "width": 8,
    "batch": 2,
    "length": 16,
    "valid_windows": 4,
    "valid_length": 64,
    "timed_length": 64,
    "timed_repeats": 1,
    "sample_bytes": 20,
    "seconds": NO_LIMIT,
    "steps": 2,
}
EXTRAS = ("tqdm", "matplotlib", "safetensors", "transformers")


def words(count: int, seed: int) -> torch.Tensor:
    """Text whose next byte is certain within a word and free between words."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = [b"alpha ", b"beta ", b"gamma ", b"delta "]
    picks = torch.randint(4, (count,), generator=generator).tolist()
    return torch.tensor(list(b"".join(vocabulary[pick] for pick in picks)), dtype=torch.uint8)


@pytest.fixture(scope="module")
def corpus():
    return Corpus("words", words(4000, 0), words(400, 1))


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(words(2500, 2).tolist()))
    return path


def small_lm(cell: str = "gru", **options) -> LanguageModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return LanguageModel(LMConfig(cell=cell, **(sizes | options)))


@pytest.fixture
def quick(tmp_path):
    """Settings of a run of steps on the corpus."""
    pytest.importorskip("transformers")
    return DemoConfig(**TINY, out=str(tmp_path))


@pytest.fixture
def few_rows(monkeypatch):
    """Let runs validate on few rows, which would take most of a short run's time."""
    monkeypatch.setattr(demo, "VALID_BYTES", 20 * 16)


def test_training_learns_more_than_counting(corpus, quick):
    config = replace(quick, width=16, num_layers=1, steps=150, batch=8, length=24, seconds=1000)
    model, curves = train_demo(replace(config, learning_rate=2e-2), corpus)
    unigram = unigram_bits(corpus.train, corpus.valid)
    bigram = bigram_bits(corpus.train, corpus.valid)
    assert 7 < curves.train[0][1] < 9.5  # 8.7 with logits of unit variance, a mean of two steps
    assert curves.valid[-1][1] < bigram < unigram
    rows = corpus.valid[: len(corpus.valid) // 25 * 25].view(-1, 25).long()
    assert len(rows) < demo.VALID_BYTES // 24  # so that a validation reads all rows
    assert curves.valid[-1][1] == pytest.approx(evaluate(model, rows))
    assert not model.training
    assert model.recurrent_layers()[0].cell.a_z.abs().max() <= 0.5


@pytest.mark.usefixtures("few_rows")
def test_a_run_makes_its_steps_validates_ten_times_and_leaves_no_folder(corpus, quick):
    _, curves = train_demo(replace(quick, steps=20), corpus)
    assert curves.steps == 20
    assert [step for step, _ in curves.train] == list(range(1, 21))
    assert [step for step, _ in curves.valid] == list(range(2, 21, 2))
    assert list(Path(quick.out).iterdir()) == []


@pytest.mark.parametrize(("seconds", "steps"), [(100.0, 95), (0.1, 1)])
def test_the_number_of_steps_follows_from_the_time_of_one(
    corpus, quick, monkeypatch, seconds, steps
):
    """A step takes a second; ten validations of five rows those of five steps."""
    counts = []

    def run(trainer):
        counts.append(trainer.config.steps)
        raise InterruptedError

    monkeypatch.setattr("pararnn.lab.train.trainer.RunTrainer.run", run)
    monkeypatch.setattr(budget, "time_step", lambda trainer: 1.0)
    monkeypatch.setattr(budget, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    monkeypatch.setattr(budget, "FORWARD", 0.2)
    config = replace(quick, seconds=seconds, steps=None)
    monkeypatch.setattr(demo, "VALID_BYTES", 5 * 16)  # 5 rows, 10 validations, batches of 2
    with pytest.raises(InterruptedError):
        train_demo(config, corpus)
    assert counts == [steps]


def test_a_run_whose_steps_get_slower_ends_in_time(corpus, quick, monkeypatch):
    monkeypatch.setattr(budget, "time_step", lambda trainer: 1e-5)
    _, curves = train_demo(replace(quick, seconds=1, steps=None), corpus)
    assert curves.steps < 50_000  # planned are 100,000
    assert curves.valid[-1][0] == curves.steps


@pytest.mark.parametrize("step", [1, 7, 20])
def test_the_number_of_steps_follows_from_the_time_of_those_made(step):
    trainer = pytest.importorskip("pararnn.lab.train.trainer")
    assert trainer.steps_within(40 - 2 * step, 2 * step, step) == 20
    assert trainer.steps_within(-1, 60, step) == step


@pytest.mark.usefixtures("few_rows")
def test_runs_repeat_with_their_seed(corpus, quick):
    curves = [train_demo(replace(quick, seed=seed), corpus)[1].train for seed in (0, 0, 1)]
    assert curves[0] == curves[1] != curves[2]


def test_a_short_demo_leaves_out_what_it_has_no_time_for(text_file, tmp_path, monkeypatch, capsys):
    """By a clock that goes on by a second a look: two to measure."""
    for module in EXTRAS:
        pytest.importorskip(module)
    clock = itertools.count()
    monkeypatch.setattr(demo, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(budget, "time_step", lambda trainer: 1e-9)
    config = {**TINY, "seconds": 8, "steps": 8, "text": str(text_file), "out": str(tmp_path)}
    metrics = run_demo(DemoConfig(**config))
    assert metrics["steps"] == 8
    first = (metrics["timings"][0]["solver"], metrics["timings"][0]["backend"])
    assert len(metrics["timings"]) == len(metrics["agreement"]) == 1
    assert metrics["timings"][0]["auto"]
    assert metrics["verified"]
    able = pairs_of(make_model(DemoConfig(**config)))
    assert len(metrics["left_out"]) == 3 * len(able) - 2  # two shapes and verify, for each pair
    text = capsys.readouterr().out
    assert f"pararnn.verify of ({', '.join(first)}): PASS" in text
    assert "left out, as --seconds 8 has no time for it:" in text
    assert f"  {metrics['left_out'][-1]}\n" in text


@pytest.mark.parametrize(
    ("seconds", "windows", "rows"),
    [(0.1, 1, 1), (5, 10, 26), (50, 100, 256), (NO_LIMIT, 100, 256)],
)
def test_short_budgets_evaluate_on_fewer_windows(seconds, windows, rows):
    config = DemoConfig(seconds=seconds)
    assert demo.within_budget(100, config) == windows
    assert run_config(config).valid_rows == rows


def test_only_matrices_decay():
    model = small_lm()
    matrices, others = make_adamw(model, OptimiserConfig(1.0, weight_decay=0.3)).param_groups
    assert (matrices["weight_decay"], others["weight_decay"]) == (0.3, 0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in matrices["params"]} == {
        "embed_tokens.weight",
        "backbone.layers.0.mixer.in_proj.weight",
        "backbone.layers.0.mixer.rnn.proj.weight",
        "backbone.layers.0.mixer.out_proj.weight",
        "backbone.layers.0.mixer.gate_proj.weight",
        "backbone.layers.0.mlp.gate_proj.weight",
        "backbone.layers.0.mlp.up_proj.weight",
        "backbone.layers.0.mlp.down_proj.weight",
        "lm_head.weight",
    }
    assert len(matrices["params"]) + len(others["params"]) == len(names)


def test_matrices_of_cells_decay_and_a_tied_head_once():
    model = small_lm("dense-gru", tie_word_embeddings=True)
    matrices, others = make_adamw(model, OptimiserConfig()).param_groups
    cell = model.recurrent_layers()[0].cell
    assert all(any(p is each for each in matrices["params"]) for p in cell.parameters())
    assert len(matrices["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_evaluation_is_the_mean_over_all_windows(corpus):
    model = small_lm()
    windows = spread_windows(corpus.valid, 7, 20)
    each = [evaluate(model, window.unsqueeze(0)) for window in windows]
    assert evaluate(model, windows, batch=3) == pytest.approx(sum(each) / 7, rel=1e-5)


def test_engines_agree_and_are_put_back():
    model = small_lm()
    windows = torch.randint(256, (2, 41), generator=torch.Generator().manual_seed(0))
    pairs = pairs_of(model)
    assert pairs[-1] == LOOP
    assert set(pairs) == set(PAIRS)
    chosen = []
    for pair in pairs:
        agreement = compare_to_loop(model, windows, pair)
        assert agreement.logits < 1e-4
        assert agreement.gradients < 1e-4
        timing = time_pair(model, windows, pair, 2)
        assert (timing.batch, timing.length) == (2, 40)
        assert (timing.sweeps >= 1) == (pair[0] == "newton")
        assert timing.forward > 0
        chosen += [pair] * timing.auto
    assert chosen == [FUSED if FUSED in PAIRS else LOOP]
    with solver_set_to(model, "newton"):
        assert model.recurrent_layers()[0].solver == "newton"
    assert model.recurrent_layers()[0].solver == "auto"
    with pytest.raises(IndexError), solver_set_to(model, "newton"):
        model(windows + 1000)
    assert model.recurrent_layers()[0].solver == "auto"


def test_printable_escapes_what_a_terminal_obeys():
    data = torch.tensor([*"é\x1b[0m\tx\n".encode(), 0xFF], dtype=torch.uint8)
    assert printable(data) == "é\\x1b[0m\tx\n\\xff"


def test_a_missing_extra_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tqdm", None)
    with pytest.raises(MissingExtra, match=r"tqdm is needed here .*: pip install -e '\.\[demo\]'"):
        require("tqdm")
    with pytest.raises(MissingExtra, match="tqdm"):
        run_demo(DemoConfig(**TINY))


def test_an_unknown_cell_is_named():
    with pytest.raises(pararnn.CellError, match="there is no cell 'gpu': name one of gru, lstm"):
        make_model(DemoConfig(cell="gpu"))
    model = make_model(DemoConfig(cell="user_cells:Timeless", width=8))
    assert any(isinstance(part, Timeless) for part in model.modules())


def test_the_demo_replaces_no_model_of_another(tmp_path):
    for module in EXTRAS:
        pytest.importorskip(module)
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(TrainingError, match=r"config\.json is there, and not by an earlier call"):
        run_demo(DemoConfig(out=str(tmp_path), **TINY))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_default_widths_follow_the_structure():
    assert make_model(DemoConfig(cell="elman")).config.hidden_size == 128
    assert make_model(DemoConfig(cell="dense-gru")).config.hidden_size == 32


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("cell", ["gru", "slstm", "dense-gru"])
@pytest.mark.one_in(3)
def test_the_demo_runs_with_every_structure(cell, text_file, tmp_path, capsys):
    for module in EXTRAS:
        pytest.importorskip(module)
    out = tmp_path / "deep" / "out"
    metrics = run_demo(DemoConfig(cell=cell, text=str(text_file), out=str(out), **TINY))
    assert metrics["verified"]
    assert metrics["steps"] == 2
    assert metrics["corpus"]["name"] == "text.txt"
    assert all(each["logits"] < 1e-4 for each in metrics["agreement"])
    assert all(each["gradients"] < 1e-3 for each in metrics["agreement"])
    runs = [(t["solver"], t["backend"], t["batch"], t["length"]) for t in metrics["timings"]]
    assert set(runs) == {(*p, *shape) for shape in ((2, 16), (1, 64)) for p in pairs_of_cell(cell)}
    assert json.loads((out / "metrics.json").read_text()) == metrics
    assert metrics["environment"]["torch"] == torch.__version__
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    valid = torch.tensor(list(text_file.read_bytes()), dtype=torch.uint8)[-1300:]
    model = load_checkpoint(out)
    assert model.config == make_model(DemoConfig(cell=cell, **TINY)).config
    assert 6 < evaluate(model, spread_windows(valid, 4, 64)) < 9.2
    text = capsys.readouterr().out
    assert "pararnn.verify of (newton, torch): PASS" in text
    assert f"unigram {metrics['bits_per_byte']['unigram']:.3f}" in text
