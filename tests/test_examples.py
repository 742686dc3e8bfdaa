"""The examples run as they stand, are short, and reach what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from table import needs_compiler

import pararnn

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


def run(name: str) -> Any:
    """Return the result of an example's main()."""
    return load(name).main()


def load(name: str) -> Any:
    """Return an example as a module."""
    path = next(path for path in EXAMPLES if path.stem == name)
    spec = importlib.util.spec_from_file_location(f"example_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_is_short_and_tested(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60
    assert f"test_{path.stem}" in globals()


@needs_compiler
@pytest.mark.thorough
def test_custom_cell() -> None:
    error, report = run("custom_cell")
    assert error < 0.01
    assert report.passed, str(report)


@needs_compiler
@pytest.mark.thorough
def test_digits() -> None:
    pytest.importorskip("sklearn")
    assert run("digits") >= 0.95


@needs_compiler
@pytest.mark.thorough
def test_grpo() -> None:
    """Without the option the ratio of the first step is not 1, so this says something."""
    (distance, reward), (distance_without, _) = run("grpo")
    assert distance == 0
    assert 0 < distance_without < 1e-4
    assert reward > 0.5


@needs_compiler
@pytest.mark.thorough
def test_irregular() -> None:
    true, constant = run("irregular")
    assert true >= 0.95
    assert constant <= 0.75


@needs_compiler
@pytest.mark.thorough
def test_lora() -> None:
    pytest.importorskip("peft")
    error_before, error_after, change = run("lora")
    assert error_before > 0.1
    assert error_after < 0.02
    assert change <= 1e-5


@needs_compiler
def test_lru() -> None:
    right, gap = run("lru")
    assert right >= 0.99
    assert gap <= 1e-5


@needs_compiler
@pytest.mark.thorough
def test_world_model() -> None:
    right, still = run("world_model")
    assert right >= 0.9
    assert still <= 0.05


@needs_compiler
@pytest.mark.thorough
def test_truncated_bptt() -> None:
    accuracy, fresh, gap = run("truncated_bptt")
    assert accuracy >= 0.98
    assert fresh <= 0.92
    assert gap <= 1e-5


@needs_compiler
@pytest.mark.thorough
def test_wgan_gp() -> None:
    before, after, slope = run("wgan_gp")
    assert abs(before) < 0.3
    assert after < -0.2
    assert 0.5 < slope < 1.5


@needs_compiler
@pytest.mark.thorough
def test_lyapunov() -> None:
    error, exponents, total = run("lyapunov")
    assert error < 0.05
    assert exponents.max() < 0
    assert abs(exponents.sum() - total) < 1e-6 * abs(total)


@needs_compiler
@pytest.mark.thorough
def test_maml() -> None:
    before, after = run("maml")
    assert after < 0.7 * before < 0.1


@needs_compiler
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_dp_sgd() -> None:
    pytest.importorskip("opacus")
    example = load("dp_sgd")
    assert example.main() >= 0.9
    for name, layers in (("LSTM", 2), ("GRU", 1)):
        layer = getattr(pararnn, name)(3, 4, layers, batch_first=True, dtype=torch.float64)
        x = torch.randn(5, 7, 3, dtype=torch.float64)
        net = example.Net(layer, torch.nn.Linear(4, 1).double())
        losses = [net(sample[None]).sin().mean() for sample in x]
        loop = [torch.autograd.grad(loss, [*layer.parameters()]) for loss in losses]
        example.GradSampleModule(net)(x).sin().mean().backward()
        for weight, of_samples in zip(layer.parameters(), zip(*loop, strict=True), strict=True):
            torch.testing.assert_close(weight.grad_sample, torch.stack(of_samples))
