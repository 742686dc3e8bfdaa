"""`scan` on a GPU, in one piece and in segments, and over millions of steps."""

import pytest
import torch
from relative import relative_error
from test_scan import KINDS, _inputs, check_scan

import pararnn

PAIRS = [("sequential", "fused"), ("newton", "fused"), ("newton", "scan")]


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("kind", KINDS)
def test_scan_equals_the_loop(kind, pair, reverse):
    with pararnn.using(segments=5, burn_in=0):
        inputs = _inputs(kind, "cuda", steps=150, channels=37)
        check_scan(inputs, reverse, solver=pair[0], backend=pair[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [1, 2, "complex"])
def test_dtypes(kind, dtype):
    if kind == "complex" and dtype != torch.float32:
        pytest.skip("PyTorch has no such complex numbers")
    inputs = _inputs(kind, "cuda", steps=300, channels=66, dtype=dtype, scale=0.3)
    with pararnn.using(segments=6, burn_in=8):
        check_scan(inputs, solver="newton", backend="fused")
    check_scan(inputs)


@pytest.mark.parametrize("decay", [0.5, 0.999, 1.0])
def test_millions_of_steps(decay):
    steps = 2**22
    torch.manual_seed(0)
    a = decay * torch.ones(1, steps, 8) - (decay < 1) * 0.001 * torch.rand(1, steps, 8)
    b = torch.randn(1, steps, 8) / steps**0.5
    exact = pararnn.scan(a.double(), b.double())
    leaves = [t.cuda().requires_grad_() for t in (a, b)]
    states = pararnn.scan(*leaves, solver="newton", backend="fused")
    own = relative_error(pararnn.scan(a, b), exact)
    assert relative_error(states.detach().cpu(), exact) < 2e-5 + 4 * own
    states.sum().backward()
    backward = pararnn.scan(a.double(), torch.ones_like(b.double()), reverse=True)  # a is symmetric
    if decay == 1.0:
        assert relative_error(leaves[1].grad.cpu(), backward) < 2e-5


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("kind", [1, "complex", "real"])
def test_a_is_broadcast(kind, pair):
    a, b, h = _inputs(kind, "cuda", steps=150, channels=37, scale=0.3)
    for smaller in (a[0, 0], a[0, :, :1]):
        leaf = smaller.detach().clone().requires_grad_()
        check_scan((leaf, b, h), solver=pair[0], backend=pair[1])


@pytest.mark.parametrize("kind", [1, 2, "complex"])
def test_resets_lengths_and_final_states(kind):
    a, b, h = (t.detach() for t in _inputs(kind, steps=150, channels=37))
    options = {"lengths": [150, 90], "return_final": True}
    reset = torch.rand(2, 150) < 0.05
    reference = pararnn.scan(a, b, h, reset=reset, solver="sequential", backend="torch", **options)
    got = pararnn.scan(a.cuda(), b.cuda(), h.cuda(), reset=reset.cuda(), **options)
    for mine, true in zip(got, reference, strict=True):
        assert torch.allclose(mine.cpu(), true, rtol=1e-10, atol=1e-12)
