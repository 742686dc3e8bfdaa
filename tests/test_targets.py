"""What is asked of a device is asked of its target."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pararnn
from pararnn.codegen import targets
from pararnn.sequences import of_lengths
from pararnn.tune import timing

ROOT = Path(pararnn.__file__).parent
CPU = torch.device("cpu")


@pytest.fixture
def asked(monkeypatch):
    """A target in the CPU's place, and what it was asked for."""
    calls = []

    def noting(name, answer):
        def call(*args):
            calls.append(name)
            return answer(*args)

        return call

    own = {
        name: noting(name, value) for name, value in vars(targets.CPU).items() if callable(value)
    }
    monkeypatch.setitem(targets.TARGETS, "cpu", replace(targets.CPU, **own))
    return calls


def test_clocks_wait_for_the_device(asked):
    timing.median_seconds(lambda: None, CPU, 2)
    assert timing.device_name(CPU) == targets.CPU.title(CPU)
    assert asked == ["wait"] * 6 + ["title"]


def test_values_are_checked_as_the_device_can(asked):
    with pytest.raises(ValueError, match=r"lengths must be 0 to 4, got \[5, 2\]"):
        of_lengths(torch.tensor([5, 2]), "right", 2, 4, CPU)
    assert asked == ["require"]


def test_explain_numbers_the_device(asked):
    pararnn.explain(pararnn.GRUCell(4), (1, 8), device="cpu")
    assert "numbered" in asked


def test_adapt_has_counts_sent(asked):
    layer = pararnn.ParaGRU(4, 64)
    with pararnn.adapt(layer), pararnn.using(solver="newton"):
        layer(torch.randn(1, 8, 4))
    assert "capturing" not in asked  # the solver was asked for
    with pararnn.adapt(layer):
        layer(torch.randn(1, 8, 4))
    assert "capturing" in asked


def test_precompile_makes_what_the_target_says(asked):
    pararnn.precompile(pararnn.GRUCell(4))
    assert asked == ["usual"]


def test_other_devices_are_asked_as_the_cpu_is():
    assert targets.target_of(torch.device("xpu")) is targets.CPU
    assert targets.target_of(torch.device("cuda", 1)) is targets.CUDA


# Programs that choose a device, and what is the compiler's or the user's own.
ELSEWHERE = {"cli.py", "evaluation", "lm", "tasks", "train"}
FACTS = re.compile(r"\.is_cuda\b|device\.type [!=]= \"cuda\"|cuda\.(Event|synchronize|device\()")


def test_facts_of_devices_have_one_place():
    found = [
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if path.relative_to(ROOT).parts[0] not in ELSEWHERE and FACTS.search(path.read_text())
    ]
    assert found == ["codegen/targets.py"]
