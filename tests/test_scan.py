"""`scan` equals the loop, in every engine, with all gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from table import FUSED, PAIRS

import pararnn
from pararnn.numerics import FORWARD_TOLERANCE, relative_error

KINDS = [1, 2, 3, 4, "complex"]


def _inputs(kind, device="cpu", batch=2, steps=40, channels=5, dtype=torch.float64, scale=0.5):
    torch.manual_seed(0)
    block = (kind,) if isinstance(kind, int) and kind > 1 else ()
    if kind == "complex":
        dtype = {torch.float32: torch.complex64, torch.float64: torch.complex128}[dtype]

    def draw(*size):
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(size, dtype=wide).to(device, dtype)

    a = scale * draw(batch, steps, *block * 2, channels)
    inputs = (a, draw(batch, steps, *block, channels), draw(batch, *block, channels))
    return [t.requires_grad_() for t in inputs]


def _loop(a, b, h, reverse=False):
    """The recurrence, step by step."""
    order = range(b.shape[1])
    out = {}
    for t in reversed(order) if reverse else order:
        carried = torch.einsum("bijd,bjd->bid", a[:, t], h) if a.ndim == 5 else a[:, t] * h
        out[t] = h = carried + b[:, t]
    return torch.stack([out[t] for t in order], 1)


def check_scan(inputs, reverse=False, **how):
    """States and gradients against the loop in float64 on the same numbers."""
    a, b, h = inputs
    wide = torch.complex128 if b.is_complex() else torch.float64
    exact = [t.detach().to(wide).requires_grad_() for t in inputs]
    torch.manual_seed(1)
    results = []
    for leaves, states in (
        (inputs, pararnn.scan(a, b, h, reverse=reverse, **how)),
        (exact, _loop(*exact, reverse)),
    ):
        weights = torch.linspace(-1, 1, states.numel(), device=b.device).view(states.shape)
        value = states.to(wide)
        loss = (weights * (value.abs().square() if b.is_complex() else value.sin())).sum()
        results.append((states, *torch.autograd.grad(loss, leaves)))
    real = b.real.dtype if b.is_complex() else b.dtype
    for mine, true in zip(*results, strict=True):
        assert mine.dtype == b.dtype
        error = relative_error(mine.detach().abs(), true.detach().abs())
        assert error <= 2 * FORWARD_TOLERANCE[real]
        assert relative_error((mine - true).detach().abs() + 1, torch.ones_like(true.abs())) <= max(
            2 * FORWARD_TOLERANCE[real] * float(true.detach().abs().max()), 1e-12
        )


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("kind", KINDS)
def test_scan_equals_the_loop(kind, pair, reverse):
    check_scan(_inputs(kind), reverse, solver=pair[0], backend=pair[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(dtype):
    check_scan(_inputs(1, dtype=dtype))
    check_scan(_inputs(2, dtype=dtype, scale=0.3))


@settings(max_examples=20)
@given(st.integers(0, 3), st.integers(0, 40), st.integers(1, 70), st.sampled_from(KINDS))
def test_any_size(batch, steps, channels, kind):
    a, b, h = _inputs(kind, batch=batch, steps=steps, channels=channels, scale=0.2)
    states = pararnn.scan(a, b, h)
    assert states.shape == b.shape
    if steps:
        assert torch.allclose(states, _loop(a, b, h), rtol=1e-10, atol=1e-12)


def test_without_initial_states_it_starts_from_zero():
    a, b, h = _inputs(2)
    assert torch.equal(pararnn.scan(a, b), pararnn.scan(a, b, torch.zeros_like(h)))


def test_layouts():
    a, b, h = _inputs(1)
    expected = pararnn.scan(a, b, h)
    turned = [t.detach().transpose(0, 1).contiguous().transpose(0, 1) for t in (a, b)]
    assert torch.equal(pararnn.scan(*turned, h), expected)
    spread = [torch.stack([t.detach()] * 2, -1)[..., 0] for t in (a, b)]
    assert torch.equal(pararnn.scan(*spread, h), expected)
    decay = torch.rand(5, dtype=b.dtype).expand(2, 40, 5)
    assert torch.allclose(pararnn.scan(decay, b, h), _loop(decay, b, h), atol=1e-12)


def test_a_min_gru_of_three_lines():
    x = torch.randn(2, 60, 8)
    gate, candidate = torch.nn.Linear(8, 16), torch.nn.Linear(8, 16)
    z = gate(x).sigmoid()
    h = pararnn.scan(1 - z, z * candidate(x))
    assert torch.allclose(h, _loop(1 - z, z * candidate(x), torch.zeros(2, 16)), atol=1e-5)


def test_compile_fullgraph():
    a, b, h = _inputs(2)
    compiled = torch.compile(pararnn.scan, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(a, b, h), pararnn.scan(a, b, h), atol=1e-12)


A, B = torch.zeros(2, 9, 4), torch.zeros(2, 9, 4)
WRONG = [
    (ValueError, (A[:, :8], B), r"a must be \(2, 9, 4\) for b \(2, 9, 4\), got \(2, 8, 4\)"),
    (ValueError, (A, B, B), r"initial must be \(2, 4\)"),
    (ValueError, (A, B[0]), r"b must be \(B, T, D\) or \(B, T, N, D\), got"),
    (ValueError, (A, torch.zeros(2, 9, 5, 4)), "up to 4 states a channel"),
    (ValueError, (A, torch.zeros(2, 9, 2, 4) * 1j), r"b must be \(B, T, D\), got torch.complex64"),
    (TypeError, (A * 1j, B), "both be floating-point or both complex"),
    (TypeError, (A, B.int()), "int32"),
    (pararnn.EngineError, (A, B, None, "picard"), "unknown solver 'picard'"),
]


@pytest.mark.parametrize(("error", "given_", "message"), WRONG, ids=[w[2] for w in WRONG])
def test_wrong_inputs(error, given_, message):
    a, b, initial, solver = (*given_, None, "auto")[:4] if len(given_) < 4 else given_
    with pytest.raises(error, match=message):
        pararnn.scan(a, b, initial, solver=solver or "auto")


def test_the_kernels_take_what_lies_in_memory():
    """Views that only move strides are not copied."""
    if FUSED not in PAIRS:
        pytest.skip("needs a C++ compiler")
    a, b = torch.randn(2, 30, 2, 2, 8), torch.randn(2, 30, 2, 8)
    from pararnn.engines.strides import narrow

    entries = [e for row in a.unbind(2) for e in row.unbind(2)]
    assert all(narrow(e, torch.float32).data_ptr() == e.data_ptr() for e in entries)
    assert pararnn.scan(a, b).shape == b.shape
