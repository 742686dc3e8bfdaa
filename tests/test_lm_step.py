"""The benchmarks of language models: what they measure, and what follows from times."""

import itertools
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from overrides import resolved

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import batch_invariant
import lm_context
import lm_decode
import lm_first_text
import lm_generate
import lm_step
import mamba2
import tables_lm
from common import add_row, provenance, read_rows
from lm_kinds import cudnn_allowed
from torch.nn.attention import SDPBackend, sdpa_kernel

MODELS = ["gru-tiny", "transformer-tiny", "mamba2-tiny", "gru-tiny"]
CHOICES_AND_TEXTS = list(itertools.product(lm_first_text.CHOICES, (1, 2)))


def decoder(case, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model = mamba2.language_model(case.config, dtype=dtype).eval()
    mamba2.ready_to_decode(model)
    return model


def test_language_models_have_steps() -> None:
    cpu = torch.device("cpu")
    rows = [
        {**provenance(cpu), **lm_step.measure(case, cpu, False, warmup=1, repeats=2)}
        for case in lm_step.smoke_cases()
    ]
    assert all(0 < row["min_ms"] <= row["median_ms"] for row in rows)
    assert [row["B"] * row["T"] for row in rows] == [64, 64, 64, 200, 64]
    assert [row["model"] for row in rows] == [*MODELS, "matrix-tiny"]


def test_language_models_decode(monkeypatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(lm_decode, "MORE", 2)
    rows = []
    for case in lm_decode.smoke_cases():
        model = decoder(case, torch.bfloat16)
        rows.append(lm_decode.measure(case, model, rounds=1))
    assert [row["model"] for row in rows] == [*MODELS[:3], "matrix-tiny", "gru-tiny"]
    assert [row["way"] for row in rows] == ["eager"] * 4 + ["generate"]
    assert all(row["median_ms"] > 0 and row["cache_MB"] > 0 for row in rows[:4])


@pytest.mark.parametrize("name", ["hybrid-gated-delta-beside-gru-15M", "hybrid-mamba2-15M"])
def test_models_that_learn_compares_decode(name: str) -> None:
    (case,) = (c for c in lm_decode.learned_cases("15M", True) if (c.name, c.batch) == (name, 1))
    model = lm_decode.model_of(case, torch.device("cpu")).eval()
    mamba2.ready_to_decode(model)
    row = lm_decode.measure(case, model, rounds=1)
    assert row["median_ms"] > 0
    assert row["cache_MB"] > 0


def test_the_cost_of_equal_bits_is_measured() -> None:
    cpu = torch.device("cpu")
    rows = [batch_invariant.measure(case, cpu, 1) for case in batch_invariant.smoke_cases()]
    assert [row["what"] for row in rows] == [*batch_invariant.WHAT][:3]
    assert all(row["plain_ms"] > 0 and row["invariant_ms"] > 0 for row in rows)
    assert [row["repeats"] for row in rows] == [2] * 3


def test_caches_report_their_bytes() -> None:
    attention = lm_decode.smoke_cases()[1]
    for case, layer_bytes in (
        (lm_decode.Case("", mamba2.TINY, "eager", 3, 8), 3 * (4 * 8 * 4 * 4 + 3 * 40 * 2)),
        (attention._replace(batch=3), 3 * 2 * 8 * 16 * 2),
        (attention._replace(batch=3, way=lm_decode.RECORDED), 3 * 2 * 8 * 16 * 2),  # in pages
    ):
        model = decoder(case, torch.bfloat16)
        cache = lm_decode.cache_of(model, case)
        lm_decode.step_of(model, case, cache)()
        sizes = [lm_decode.cache_bytes(layer, case.context) for layer in cache.layers]
        assert sizes == pytest.approx([layer_bytes] * 2)


def test_steps_against_the_context(tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    cpu, path = torch.device("cpu"), tmp_path / "lm_context.csv"
    about = provenance(cpu)
    for case in lm_step.smoke_cases()[:3]:
        row = lm_context.measure(case, cpu, False, seconds=0.01)
        add_row(path, {**about, **row}, lm_context.KEYS)
    assert all(int(row["repeats"]) >= 1 and not row["note"] for row in read_rows(path))

    def too_large(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(lm_context, "step_times", too_large)
    large = lm_step.smoke_cases()[0]._replace(length=64)
    add_row(path, {**about, **lm_context.measure(large, cpu, False, 1.0)}, lm_context.KEYS)
    lm_context.plot(path)
    assert path.with_suffix(".png").stat().st_size > 0
    assert read_rows(path)[-1]["note"] == "out of memory"


def test_generation_by_the_papers_protocol(tmp_path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "lm_generate.csv"
    for case in lm_step.smoke_cases()[:3]:
        model = decoder(case, torch.bfloat16)
        ways = lm_generate.ways_of(lm_generate.Case(case.name, case.config), list(lm_generate.WAYS))
        assert (ways == list(lm_generate.WAYS)) == case.name.startswith("transformer")
        for way in ways:
            for row in lm_generate.curve(model, way, (1, 4), seconds=60):
                shared = {**provenance("cpu"), "model": case.name}
                add_row(path, {**shared, **row}, lm_generate.KEYS)
    rows = read_rows(path)
    assert [(row["tokens"], row["repeats"]) for row in rows] == [("1", "5"), ("4", "5")] * 4
    lm_generate.plot(path)
    assert path.with_suffix(".png").stat().st_size > 0


def test_first_texts_by_the_kernels_that_attention_may_take(monkeypatch) -> None:
    flags = cudnn_allowed(monkeypatch)
    case = lm_step.smoke_cases()[1]
    model, rows = mamba2.language_model(case.config).eval(), []
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        for row in lm_first_text.rows(model, 3):
            rows.append({**provenance("cpu"), "model": case.name, **row})
            assert set(flags) == {row["kernels"] == "PyTorch's"}
            flags.clear()
    assert all(0 < row["median_ms"] <= row["max_ms"] for row in rows)
    assert [(row["kernels"], row["text"]) for row in rows] == CHOICES_AND_TEXTS


@torch.no_grad()
def test_both_ways_generate_the_same_tokens() -> None:
    torch.manual_seed(0)
    for case in lm_step.smoke_cases()[:3]:
        model = decoder(case)
        tokens = [generate(model, 12) for generate in lm_generate.WAYS.values()]
        assert torch.equal(*tokens)


def test_ratios_of_steps_stand_next_to_the_papers(monkeypatch) -> None:
    rates = {"commit": "c", "device": "d", "torch": "t", "T": "2048", "mfu_percent": "50"}
    rates |= {"tokens_per_s": "1000", "peak_GiB": "10", "packed": "False", "way": "plain"}
    rates |= {"overrides": "", "note": "", "gpus": "2"}
    names = ("gru", "lstm", "mamba2", "transformer")

    def rows(key: str, *scales: str) -> list[dict[str, str]]:
        times = itertools.product(zip(names, (90.0, 95.0, 150.0, 100.0), strict=True), scales)
        return [
            {**rates, key: f"{name}-{scale}", "median_ms": str(ms)} for (name, ms), scale in times
        ]

    files = {
        "lm_step.csv": rows("model", "400M", "1B"),
        "lm_scale.csv": rows("recipe", "2.9b", "7b"),
    }
    monkeypatch.setattr(tables_lm, "read", files.__getitem__)
    lines = tables_lm.lm_ratios().splitlines()
    assert lines[4].startswith("| gru-400M | 1 GPU, no optimizer | 90.0 | ")
    assert lines[4].endswith(" | 0.90 | 1.18 |")
    assert lines[-2].startswith("| mamba2-7B | 2 GPUs, `pararnn train` | 150.0 | ")
    assert lines[-2].endswith(" | 1.50 |  |")
    assert len(lines) == 4 + 4 * 4


def test_rows_take_the_place_of_their_case(tmp_path) -> None:
    path = tmp_path / "rows.csv"
    add_row(path, {"model": "a", "T": 1, "ms": 5}, ("model", "T"))
    add_row(path, {"model": "b", "T": 1, "ms": 6}, ("model", "T"))
    add_row(path, {"model": "a", "T": 1, "ms": 7, "GiB": 2}, ("model", "T"))
    assert read_rows(path) == [
        {"model": "a", "T": "1", "ms": "7", "GiB": "2"},
        {"model": "b", "T": "1", "ms": "6", "GiB": ""},
    ]


def test_mamba2_trains_as_recipes_do(monkeypatch, tmp_path) -> None:
    """Several in one process, each freed before the next."""
    train_step = pytest.importorskip("train_step")
    monkeypatch.setattr(train_step, "peer_sizes", lambda name: mamba2.TINY)
    assert train_step.config_of("gru-7b") == train_step.recipe("gru-7b")
    config = resolved(train_step.config_of("mamba2-7b"), ["data.sequence_length=16"])
    config = replace(config, device_batch=2, batch=2, steps=100, out=str(tmp_path), compile=False)
    references, plain = [], train_step.prepare_model

    def prepare(*args):
        assert all(model() is None for model in references)
        model = plain(*args)
        references.append(weakref.ref(model))
        return model

    monkeypatch.setattr(train_step, "prepare_model", prepare)
    with train_step.process_group():
        rows = [train_step.measure(config, "bare", warmup=1, steps=2) for _ in range(2)]
    with torch.device("meta"):
        model = mamba2.language_model(mamba2.TINY)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert [(row["recipe"], row["steps"], row["parameters"]) for row in rows] == [
        ("mamba2-7b", 2, count)
    ] * 2
    with pytest.raises(ValueError, match="give --paths bare"):
        train_step.by_trainer(config, None, None, 0)
