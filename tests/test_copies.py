"""Gradients of single samples, `vmap` of `grad`: those of a loop over the samples, in one pass."""

import pytest
import torch
from emulated import gpu, install
from sample_cases import CASES, LAYERS, Case, samples_of, samples_of_layer, worst
from table import FUSED, PLAIN, needs_compiler

from pararnn import op, zoo

pytestmark = needs_compiler

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 3e-2}


@pytest.fixture
def passes(monkeypatch):
    """`Options.samples` of backward passes that ran."""
    found, backward = [], op._backward

    def noted(program, engine, args, *others):
        found.append(args.options.samples)
        return backward(program, engine, args, *others)

    monkeypatch.setattr(op, "_backward", noted)
    return found


def _check(passes, name, count=3, batch=1, dtype=None, **options):
    """Check the gradients of samples, and that one backward pass gave all."""
    dtype = dtype or (torch.float32 if name == "chunks" else torch.float64)
    assert (
        worst(*samples_of(CASES[name], count, batch, dtype=dtype, **options)) <= TOLERANCES[dtype]
    )
    assert passes == [count]


THOROUGH = [pytest.param(name, marks=pytest.mark.thorough) for name in CASES]


def test_kernels_of_a_gpu(passes, monkeypatch):
    install(gpu(), monkeypatch)
    _check(passes, "mixing", 5)


@pytest.mark.parametrize("name", THOROUGH)
def test_resets_in_reverse(name, passes, monkeypatch):
    """Of samples of two sequences, by the emulator."""
    install(gpu(), monkeypatch)
    reset = torch.rand(2, CASES[name].steps) < 0.3
    _check(passes, name, batch=2, reset=reset, reverse=True)


@pytest.mark.parametrize("name", THOROUGH)
def test_packed_rows(name, passes, monkeypatch):
    """With sequences without steps, and padding, by the emulator."""
    install(gpu(), monkeypatch)
    steps = CASES[name].steps
    ends = torch.tensor([0, 0, steps // 2, steps // 2, steps - 1])
    _check(passes, name, batch=4, cu_seqlens=ends)


@pytest.mark.parametrize("count", [1, 16, 33])
@pytest.mark.parametrize("name", ["elementwise", "mixing", "matrix", "clusters"])
@pytest.mark.thorough
def test_numbers_of_samples(name, count, passes, monkeypatch):
    install(gpu(cores=1), monkeypatch)
    _check(passes, name, count)


@pytest.mark.parametrize(
    "name", ["elementwise", "newton", "mixing", "matrix", "clusters", "chunks"]
)
@pytest.mark.thorough
def test_half_precision(name, passes, monkeypatch):
    install(gpu(), monkeypatch)
    _check(passes, name, dtype=torch.bfloat16)


@pytest.mark.parametrize("name", [name for name in CASES if name != "chunks"])
@pytest.mark.thorough
def test_kernels_of_a_cpu(name, passes):
    _check(passes, name, batch=2)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("emulates", [False, True])
@pytest.mark.thorough
def test_layers(name, emulates, passes, monkeypatch):
    """Of biases too."""
    loop = samples_of_layer(name, PLAIN)
    if emulates:
        install(gpu(), monkeypatch)
    assert worst(samples_of_layer(name, FUSED), loop) <= 1e-12
    assert set(passes) == {3}


@pytest.mark.thorough
def test_products_inside_lines(passes, monkeypatch):
    """A block of a GPU adds them up over its rows: samples are computed one by one."""
    install(gpu(), monkeypatch)
    case = Case(lambda: zoo.MEMORY_CELLS["location-attention-lstm"](8, C=3, J=3))
    assert worst(*samples_of(case, 3, 1)) <= TOLERANCES[torch.float64]
    assert passes == [0, 0, 0]
