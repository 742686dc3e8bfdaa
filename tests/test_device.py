"""Facts and operations of devices come from their records, and from nowhere else."""

import re
from dataclasses import replace
from pathlib import Path

import emulated
import pytest
import torch

import pararnn
from pararnn.base import device
from pararnn.codegen import targets
from pararnn.engines import rule, table
from pararnn.engines.fused import gpu
from pararnn.sequences import of_lengths
from pararnn.tune import timing

ROOT = Path(pararnn.__file__).parent
CPU = torch.device("cpu")


@pytest.fixture
def calls(monkeypatch):
    """Names of the functions of the CPU's record that have been called."""
    names = []

    def noting(name, function):
        def call(*args):
            names.append(name)
            return function(*args)

        return call

    own = {name: noting(name, value) for name, value in vars(device.CPU).items() if callable(value)}
    monkeypatch.setitem(device.TYPES, "cpu", replace(device.CPU, **own))
    return names


def test_clocks_wait_for_the_device(calls):
    timing.median_seconds(lambda: None, CPU, 2)
    assert timing.device_name(CPU) == device.CPU.name_of(CPU)
    assert calls == ["wait"] * 6 + ["name_of"]


def test_values_are_checked_by_the_device(calls):
    with pytest.raises(ValueError, match=r"lengths must be 0 to 4, got \[5, 2\]"):
        of_lengths(torch.tensor([5, 2]), "right", 2, 4, CPU)
    assert calls == ["require"]


def test_explain_numbers_the_device(calls):
    pararnn.explain(pararnn.GRUCell(4), (1, 8), device="cpu")
    assert "with_index" in calls


def test_adapt_reads_counts_through_the_device(calls):
    layer = pararnn.ParaGRU(4, 64)
    with pararnn.adapt(layer), pararnn.using(solver="newton"):
        layer(torch.randn(1, 8, 4))
    assert "capturing" not in calls  # the solver was requested
    with pararnn.adapt(layer):
        layer(torch.randn(1, 8, 4))
    assert "capturing" in calls


def test_precompile_runs_the_jobs_of_the_target(monkeypatch):
    jobs = []
    target = targets.DeviceKernels(lambda *args: {"job": lambda: jobs.append("job")})
    monkeypatch.setitem(targets.TARGETS, "cpu", target)
    pararnn.precompile(pararnn.GRUCell(4))
    assert jobs == ["job"]


def test_other_devices_run_pytorch_only():
    xpu = torch.device("xpu")
    assert device.type_of(xpu) is device.OTHER
    assert targets.approximate_dtypes(xpu) == frozenset()
    with pytest.raises(pararnn.EngineError, match="generated for cpu and cuda devices, got xpu"):
        targets.target_of(xpu)
    with pytest.raises(pararnn.EngineError, match="no such engine for xpu"):
        pararnn.explain(pararnn.GRUCell(4), (1, 8), device=xpu, solver="newton", backend="fused")


def test_commands_name_devices_that_are_here():
    assert device.parse_device("cpu") == CPU
    for text, message in {
        "gpu": "is not a device",
        "meta": "is not supported",
        "cuda:99": "PyTorch sees",
    }.items():
        with pytest.raises(ValueError, match=f"'{text}' .*{message}"):
            device.parse_device(text)


FACTS = re.compile(r"\.is_cuda\b|device\.type [!=]= |^[^\"`]*torch\.cuda\.(?!\w+\(\)\))")


def test_facts_of_devices_stand_in_one_module():
    modules = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        for line in path.read_text().splitlines()
        if FACTS.search(line)
    }
    assert modules == {"base/device.py"}


@pytest.mark.parametrize("kind", ["mps", "xpu"])
@pytest.mark.parametrize("cell", [pararnn.GRUCell(8), pararnn.zoo.MLSTMCell(8, num_heads=2, K=3)])
def test_devices_without_kernels_say_so(kind, cell):
    """PyTorch runs there, and no pair ends with an internal error."""
    shape = (1, 1 << 15, 24)
    explanation = pararnn.explain(cell, shape, device=kind)
    assert explanation.backend == "torch"
    for pair in (("sequential", "fused"), ("newton", "fused"), ("newton", "scan")):
        assert explanation.others[pair] == f"there is no such engine for {kind}"
        with pytest.raises(pararnn.EngineError, match=f"no such engine for {kind}.*Pairs that can"):
            pararnn.explain(cell, shape, device=kind, solver=pair[0], backend=pair[1])


@pytest.mark.parametrize("cell", [pararnn.GRUCell(8), pararnn.zoo.MLSTMCell(8, num_heads=2, K=3)])
def test_a_new_target_ranks_as_a_gpu(cell, monkeypatch):
    """Nothing has been measured on it."""
    monkeypatch.setattr(gpu, "cores_of_rank", lambda device: 64)
    for solver in emulated.SOLVERS:
        engine = emulated.Emulated(solver, emulated.gpu())
        monkeypatch.setitem(table.TABLE, (solver, "fused", "xpu"), engine)
    program = pararnn.program_of(cell)
    for length, solver in ((1 << 15, "newton"), (1 << 10, "sequential")):
        choice = table.choose(
            program, (1, length, 8), torch.float32, torch.device("xpu"), "auto", "auto"
        )
        elementwise = program.head_sizes is None
        assert choice.pair == ("newton" if elementwise else solver, "fused")
    for limits in (rule.MIN_SEGMENTS, rule.MATRIX_MIN_LENGTH, rule.NEWTON_MAX_COUPLED):
        assert rule.measured(limits, torch.device("xpu")) == limits["cuda"]
    assert rule.measured(rule.MATRIX_MIN_LENGTH, CPU) == float("inf")
