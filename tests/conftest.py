"""Shared set-up: one thread a process, as parallel test runs fill the cores; caches of our own."""

import os
import tempfile
from pathlib import Path

import pytest
import torch
from fake_newton import FakeNewton
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
os.environ["PARARNN_CACHE_DIR"] = str(Path(__file__).parents[1] / ".kernels")
# Inductor's key does not tell what the operator returns: it may hold code of an earlier commit.
_INDUCTOR = tempfile.TemporaryDirectory(prefix="pararnn-inductor-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _INDUCTOR.name
# A busy machine is slow.
settings.register_profile("any-speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-speed")


@pytest.fixture
def device() -> str:
    """Where tests that run on any device do: tests/gpu has a fixture of this name of its own."""
    return "cpu"


@pytest.fixture
def newton_fused(monkeypatch) -> FakeNewton:
    """An engine that cuts time, on the CPU."""
    return FakeNewton(monkeypatch)
