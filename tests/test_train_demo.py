"""The demo: what it trains on, prints and leaves."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from pararnn.lab.train.demo import demo_config, run_demo, with_text
from pararnn.lm import load_checkpoint


@pytest.fixture
def small(tmp_path):
    """A run of seconds on text whose next byte is certain within a word."""
    torch.manual_seed(0)
    words = [b"alpha ", b"beta ", b"gamma ", b"delta "]
    path = tmp_path / "text.txt"
    path.write_bytes(b"".join(words[i] for i in torch.randint(4, (3000,)).tolist()))
    demo = demo_config()
    data = replace(demo.data, train=str(path), sequence_length=33, cache=str(tmp_path / "cache"))
    model = replace(demo.model, hidden_size=16, intermediate_size=32, num_heads=1)
    short = {"steps": 60, "valid_every": 30, "save_every": 60, "report_to": "none"}
    return replace(demo, data=data, model=model, out=str(tmp_path / "run"), **short)


def test_the_demo_learns_more_than_counting_and_checks_every_engine(small, monkeypatch, capsys):
    monkeypatch.setattr("pararnn.lab.train.demo.SHAPES", ((2, 32),))
    result = run_demo(small)
    bits = result["bits_per_byte"]
    assert bits["validation"] < bits["unigram"]
    assert bits["bigram"] < bits["unigram"]
    assert result["verified"]
    pairs = {(engine["solver"], engine["backend"]) for engine in result["engines"]}
    assert ("sequential", "torch") in pairs
    times = [engine[name] for engine in result["engines"] for name in ("forward_ms", "both_ms")]
    assert all(time > 0 for time in times)
    out = capsys.readouterr().out
    assert "within the contract" in out
    assert "<- auto" in out
    assert "pararnn generate --model" in out
    folder = f"{small.out}/model"
    assert load_checkpoint(folder).config.hidden_size == 16
    assert json.loads(Path(small.out, "demo.json").read_text())["steps"] == 60


def test_a_demo_shorter_than_its_log_interval_shows_its_loss(small, monkeypatch):
    """It ended in an IndexError."""
    monkeypatch.setattr("pararnn.lab.train.demo.SHAPES", ((2, 32),))
    assert run_demo(replace(small, steps=2))["bits_per_byte"]["train"] > 0


def test_the_texts_bytes_are_as_they_were(small, tmp_path):
    text = bytes(range(256)) * 50
    (tmp_path / "text.txt").write_bytes(text)
    config, corpus = with_text(small)
    train, valid = (Path(path).read_bytes() for path in (config.data.train, config.data.valid))
    assert train + valid == text
    assert bytes(corpus.valid.tolist()) == valid
