"""`scan` equals the loop, in every engine, with all gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from relative import relative_error
from table import FUSED, PAIRS

import pararnn
from pararnn.base.numerics import FORWARD_TOLERANCE

KINDS = [1, 2, 3, 4, "complex", "real"]  # "real": a is, b is complex


def _inputs(kind, device="cpu", batch=2, steps=40, channels=5, dtype=torch.float64, scale=0.5):
    torch.manual_seed(0)
    block = (kind,) if isinstance(kind, int) and kind > 1 else ()
    real = dtype
    if kind in ("complex", "real"):
        dtype = {torch.float32: torch.complex64, torch.float64: torch.complex128}[dtype]

    def draw(*size):
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(size, dtype=wide).to(device, dtype)

    a = scale * draw(batch, steps, *block * 2, channels)
    if kind == "real":
        a = a.real.to(real)
    inputs = (a, draw(batch, steps, *block, channels), draw(batch, *block, channels))
    return [t.requires_grad_() for t in inputs]


def _loop(a, b, h, reverse=False):
    """The recurrence, step by step."""
    order, blocks = range(b.shape[1]), b.shape[2:-1]
    a = a.expand(*b.shape[:2], *blocks, *blocks, b.shape[-1])
    out = {}
    for t in reversed(order) if reverse else order:
        carry = torch.einsum("bijd,bjd->bid", a[:, t], h) if a.ndim == 5 else a[:, t] * h
        out[t] = h = carry + b[:, t]
    return torch.stack([out[t] for t in order], 1)


def check_scan(inputs, reverse=False, **options):
    """States and gradients against the loop in float64 on the same numbers."""
    a, b, h = inputs
    wide = torch.complex128 if b.is_complex() else torch.float64
    exact = [
        t.detach().to(wide if t.is_complex() else torch.float64).requires_grad_() for t in inputs
    ]
    torch.manual_seed(1)
    results = []
    for leaves, states in (
        (inputs, pararnn.scan(a, b, h, reverse=reverse, **options)),
        (exact, _loop(*exact, reverse)),
    ):
        weights = torch.linspace(-1, 1, states.numel(), device=b.device).view(states.shape)
        value = states.to(wide)
        loss = (weights * (value.abs().square() if b.is_complex() else value.sin())).sum()
        results.append((states, *torch.autograd.grad(loss, leaves)))
    real = b.real.dtype if b.is_complex() else b.dtype
    for mine, true, like in zip(*results, (b, *inputs), strict=True):
        assert (mine.dtype, mine.shape) == (like.dtype, like.shape)
        error = relative_error(mine.detach().abs(), true.detach().abs())
        assert error <= 2 * FORWARD_TOLERANCE[real]
        assert relative_error((mine - true).detach().abs() + 1, torch.ones_like(true.abs())) <= max(
            2 * FORWARD_TOLERANCE[real] * float(true.detach().abs().max()), 1e-12
        )


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(13)
def test_scan_equals_the_loop(kind, pair, reverse):
    check_scan(_inputs(kind), reverse, solver=pair[0], backend=pair[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.one_in(2)
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
    reference = pararnn.scan(a, b, h)
    by_time = [t.detach().transpose(0, 1).contiguous().transpose(0, 1) for t in (a, b)]
    assert torch.equal(pararnn.scan(*by_time, h), reference)
    wide_strides = [torch.stack([t.detach()] * 2, -1)[..., 0] for t in (a, b)]
    assert torch.equal(pararnn.scan(*wide_strides, h), reference)
    decay = torch.rand(5, dtype=b.dtype).expand(2, 40, 5)
    assert torch.allclose(pararnn.scan(decay, b, h), _loop(decay, b, h), atol=1e-12)


def test_a_min_gru_of_three_lines():
    x = torch.randn(2, 60, 8)
    gate, candidate = torch.nn.Linear(8, 16), torch.nn.Linear(8, 16)
    z = gate(x).sigmoid()
    h = pararnn.scan(1 - z, z * candidate(x))
    assert torch.allclose(h, _loop(1 - z, z * candidate(x), torch.zeros(2, 16)), atol=1e-5)


@pytest.mark.parametrize("grad", [True, False], ids=["gradients", "none asked for"])
@pytest.mark.thorough
def test_compile_fullgraph(grad):
    a, b, h = (tensor.requires_grad_(grad) for tensor in _inputs(2))
    program = torch.compile(pararnn.scan, fullgraph=True, backend="aot_eager")
    assert torch.allclose(program(a, b, h), pararnn.scan(a, b, h), atol=1e-12)


@pytest.mark.thorough
def test_compiled_calls_of_several_kinds():
    """The second size makes Dynamo take every size for a symbol, the number of states too."""
    program = torch.compile(pararnn.scan, fullgraph=True, backend="aot_eager")
    for kind in (1, 2, "complex"):
        inputs = _inputs(kind)
        assert torch.allclose(program(*inputs), pararnn.scan(*inputs), atol=1e-12)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.thorough
def test_compile_what_is_broadcast_reset_and_padded(dynamic):
    _, b, h = _inputs("real")
    decay = torch.rand(5, dtype=torch.float64)
    options = {"reset": torch.rand(2, 40) < 0.1, "lengths": torch.tensor([40, 7])}
    options["return_final"] = True
    program = torch.compile(pararnn.scan, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for mine, eager in zip(
        program(decay, b, h, **options), pararnn.scan(decay, b, h, **options), strict=True
    ):
        assert torch.allclose(mine, eager, atol=1e-12)


SMALLER = [(1, (5,)), (1, ()), (1, (40, 1)), (1, (2, 1, 5)), (1, (2, 40, 1)), (2, (2, 2, 5))]
SMALLER += [(2, (40, 1, 2, 1)), ("complex", (5,)), ("complex", (40, 1)), ("real", (5,))]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize(("kind", "size"), SMALLER, ids=str)
@pytest.mark.one_in(7)
def test_a_is_broadcast_and_its_gradient_summed(kind, size, pair):
    full, b, h = _inputs(kind, scale=0.3)
    a = full.detach().flatten()[: math.prod(size)].reshape(size).requires_grad_()
    check_scan((a, b, h), solver=pair[0], backend=pair[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_broadcast_decay_of_16_bits_is_summed_in_32(dtype):
    """2,000 contributions of 1 each: in 16 bits their sum stops growing at 256, or rounds."""
    a = torch.zeros(1, dtype=dtype, requires_grad=True)
    b = torch.ones(1, 2001, 1, dtype=dtype)
    pararnn.scan(a, b).sum().backward()
    assert a.grad.dtype == dtype
    assert a.grad.item() == 2000.0


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("kind", [1, 2, "complex", "real"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.one_in(3)
def test_resets_and_lengths(kind, reverse, pair):
    """States, final states and gradients are those of pieces run by themselves."""
    a, b, h = leaves = _inputs(kind)
    reset = torch.zeros(2, 40, dtype=torch.bool)
    reset[0, 12] = reset[1, 30] = True
    options = {"reverse": reverse, "return_final": True, "solver": pair[0], "backend": pair[1]}
    states, final = pararnn.scan(a, b, h, reset=reset, lengths=[40, 25], **options)
    pieces = [(0, 0, 12), (0, 12, 40), (1, 0, 25)]  # the other reset lies in padding
    if reverse:  # a step that resets is the first of what comes before it
        pieces = [(0, 0, 13), (0, 13, 40), (1, 0, 25)]
    reference, ends = torch.zeros_like(b), [None, None]
    for row, begin, end in pieces:
        first = end in (40, 25) if reverse else begin == 0
        start = h[row : row + 1] if first else torch.zeros_like(h[:1])
        whole = slice(row, row + 1), slice(begin, end)
        piece = _loop(a[whole], b[whole], start, reverse)
        reference[whole] = piece.detach()
        last = begin == 0 if reverse else end in (40, 25)
        if last:
            ends[row] = piece[:, 0 if reverse else -1]
    assert torch.allclose(states, reference, rtol=1e-10, atol=1e-12)
    assert torch.allclose(final, torch.cat(ends), rtol=1e-10, atol=1e-12)
    assert (final.dtype, final.shape) == (h.dtype, h.shape)
    mine = torch.autograd.grad(final.abs().square().sum(), leaves)
    true = torch.autograd.grad(torch.cat(ends).abs().square().sum(), leaves)
    for one, other in zip(mine, true, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-11)


def test_final_states_are_carried_over():
    """Two halves, the second from where the first ended, are the whole; carried in float32."""
    a, b, h = (t.detach() for t in _inputs(2, dtype=torch.bfloat16, scale=0.3))
    whole, end = pararnn.scan(a, b, h, return_final=True)
    first, middle = pararnn.scan(a[:, :20], b[:, :20], h, return_final=True)
    second, last = pararnn.scan(a[:, 20:], b[:, 20:], middle, return_final=True)
    assert middle.dtype == torch.float32
    assert torch.equal(torch.cat([first, second], 1), whole)
    assert torch.equal(last, end)


A, B = torch.zeros(2, 9, 4), torch.zeros(2, 9, 4)
WRONG = [
    (
        ValueError,
        (A[:, :8], B),
        r"a must be \(2, 9, 4\) for b \(2, 9, 4\), or broadcast to it, got",
    ),
    (ValueError, (A[None], B), r"or broadcast to it, got \(1, 2, 9, 4\)"),
    (TypeError, (0.5, B), "a must be a tensor, got float"),
    (ValueError, (A, B, B), r"initial must be \(2, 4\)"),
    (ValueError, (A, B[0]), r"b must be \(B, T, D\) or \(B, T, N, D\), got"),
    (ValueError, (A, torch.zeros(2, 9, 5, 4)), "up to 4 states a channel"),
    (ValueError, (A, torch.zeros(2, 9, 2, 4) * 1j), r"b must be \(B, T, D\), got torch.complex64"),
    (TypeError, (A * 1j, B), "a is complex: b must be too"),
    (TypeError, (A, B.int()), "int32"),
    (pararnn.EngineError, (A, B, None, "picard"), "unknown solver 'picard'"),
]


@pytest.mark.parametrize(("error", "arguments", "message"), WRONG, ids=[w[2] for w in WRONG])
def test_wrong_inputs(error, arguments, message):
    a, b, initial, solver = (*arguments, None, "auto")[:4] if len(arguments) < 4 else arguments
    with pytest.raises(error, match=message):
        pararnn.scan(a, b, initial, solver=solver or "auto")


def test_kernels_read_strided_tensors_in_place():
    """Views that only move strides are not copied."""
    if FUSED not in PAIRS:
        pytest.skip("needs a C++ compiler")
    a, b = torch.randn(2, 30, 2, 2, 8), torch.randn(2, 30, 2, 8)
    from pararnn.engines.fused.layout import narrow_field

    entries = [e for row in a.unbind(2) for e in row.unbind(2)]
    assert all(narrow_field(e, torch.float32).data_ptr() == e.data_ptr() for e in entries)
    assert pararnn.scan(a, b).shape == b.shape
