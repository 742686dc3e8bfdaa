"""Derivatives beyond the gradient by CUDA kernels, against plain PyTorch in float64 on the CPU."""

from functools import partial

import pytest
import torch
from captures import capture
from relative import relative_error
from sample_cases import CASES, LAYERS, samples_of, samples_of_layer, worst
from table import FUSED, PLAIN
from test_tangents import (
    CELLS,
    MODULES,
    QUICK,
    Call,
    _assert_close,
    _cell,
    _derivatives,
    _module_derivatives,
    _transforms,
    derivative_calls,
)
from torch.func import functional_call, grad, jvp, vmap

import pararnn
from pararnn import zoo
from pararnn.base.numerics import SEQUENTIAL_ERRORS

LARGE = ("location-attention-lstm",)
"""Cells of whose tangents shared memory does not hold a backward pass's values in float64."""


def _on(device, call, dtype=torch.float64):
    """Return the same call's function on a GPU, by its kernels, and its tensors."""
    options = call.options.items()
    call.options = {key: x.to(device) if torch.is_tensor(x) else x for key, x in options}
    return call(FUSED), [x.to(device, dtype) for x in call.tensors]


def _assert_equals(ours, truth, tolerance=1e-10):
    _assert_close([x.double().cpu() for x in ours], truth, tolerance)


@pytest.mark.parametrize("name", CELLS)
def test_every_cell(name, device):
    """First and second derivatives, and those along a direction, with resets and in reverse."""
    call = Call(_cell(name), 5, reset=torch.rand(2, 5) < 0.3, reverse=True)
    options = {"forward_mode": name != "lif"}
    truth = _derivatives(call(PLAIN), call.tensors, **options)
    dtype, tolerance = (torch.float32, 1e-4) if name in LARGE else (torch.float64, 1e-10)
    ours = _derivatives(*_on(device, call, dtype), **options)
    _assert_equals(ours, truth, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*QUICK, "lstm", "head-gru", "layer-norm-lstm"])
def test_low_precision(name, dtype, device):
    """Of many steps, with gates in half precision."""
    call = Call(_cell(name, channels=64), 100)
    rounded = [x.to(dtype).double() if i == 0 else x for i, x in enumerate(call.tensors)]
    truth = _derivatives(call(PLAIN), rounded)
    narrow = [x.to(dtype if i == 0 else torch.float32) for i, x in enumerate(call.tensors)]
    loop = _derivatives(call(PLAIN), narrow)
    function, tensors = _on(device, call, torch.float32)
    ours = _derivatives(function, [tensors[0].to(dtype), *tensors[1:]])
    # Norms amplify: a loop in the same dtype is up to 6e-4, or 5e-2, from the one in float64.
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    error = max(map(relative_error, loop, truth))
    _assert_equals(ours, truth, tolerance + SEQUENTIAL_ERRORS * error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_in_half_precision(dtype, device):
    """All tensors in one dtype: products of known states are rounded to it."""
    call = Call(_cell("head-lstm", channels=64), 100)
    truth = _derivatives(call(PLAIN), [x.to(dtype).double() for x in call.tensors])
    ours = _derivatives(*_on(device, call, dtype))
    _assert_equals(ours, truth, {torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype])


def test_packed_rows_of_a_cell_with_matrices(device):
    """In reverse, with resets, a sequence that is empty, and padding."""
    call = Call(_cell("head-gru"), 9, 3, cu_seqlens=torch.tensor([0, 4, 4, 7]), reverse=True,
                reset=torch.arange(9)[None] % 3 == 2)  # fmt: skip
    truth = _derivatives(call(PLAIN), call.tensors)
    _assert_equals(_derivatives(*_on(device, call)), truth)


@pytest.mark.parametrize("name", QUICK)
def test_transforms_of_transforms(name, device):
    """Gradients of samples and of ensembles, products with Hessians, and Hessians."""
    call = Call(_cell(name, channels=4))
    _assert_equals(_transforms(call, FUSED, device), _transforms(call, PLAIN))


def test_checks_of_pytorch(device):
    """gradcheck with forward mode, and gradgradcheck."""
    call = Call(_cell("lstm", channels=4), steps=3)
    function, tensors = _on(device, call)
    leaves = [x.requires_grad_() for x in tensors]
    options = {"fast_mode": True, "nondet_tol": 0.0}
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True,
                                    check_batched_grad=True, **options)  # fmt: skip
    assert torch.autograd.gradgradcheck(function, leaves, **options)


@pytest.mark.parametrize("name", MODULES)
def test_modules(name, device):
    ours = _module_derivatives(name, "fused", device)
    _assert_equals(ours, _module_derivatives(name, "torch"))


@pytest.mark.parametrize("count", [1, 3, 16, 33])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_samples(name, count, device):
    """Of two sequences each, with resets and in reverse."""
    reset = torch.rand(2, CASES[name].steps) < 0.3
    dtype = torch.float32 if name == "chunks" else torch.float64
    results = samples_of(CASES[name], count, 2, device, dtype, reset=reset, reverse=True)
    assert worst(*results) <= {torch.float32: 1e-4, torch.float64: 1e-12}[dtype]


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_samples_of_packed_rows(name, device):
    """In half precision, with sequences without steps, and padding."""
    steps = CASES[name].steps
    ends = torch.tensor([0, 0, steps // 2, steps // 2, steps - 1])
    results = samples_of(CASES[name], 3, 4, device, torch.bfloat16, cu_seqlens=ends)
    assert worst(*results) <= 5e-2


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_samples_of_layers(name, device):
    ours = samples_of_layer(name, FUSED, device)
    assert worst(ours, samples_of_layer(name, PLAIN)) <= 1e-12


def test_a_wide_layer(device):
    """By clusters: a jvp and a product with the Hessian of the projected LSTM's matrices."""
    cell = zoo.ProjectedLSTMCell(256, num_heads=1, K=512, dtype=torch.float64)
    call = Call(cell, 6)
    truth = _derivatives(call(PLAIN), call.tensors)
    _assert_equals(_derivatives(*_on(device, call, torch.float32)), truth, 1e-4)


def _check_recorded(run, tensors, tolerance):
    """Replays of a recorded call on new inputs give what calls do."""
    static = [x.clone() for x in tensors]
    graph, results = capture(partial(run, *static))
    for scale in (1.0, 0.5, -0.7):
        fresh = [scale * x + 0.1 * torch.randn_like(x) for x in tensors]
        for x, new in zip(static, fresh, strict=True):
            x.copy_(new)
        graph.replay()
        replayed = [x.clone() for x in results]
        _assert_equals(replayed, [x.double().cpu() for x in run(*fresh)], tolerance)


@pytest.mark.parametrize("what", ["penalty", "jvp", "product", "samples"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*QUICK, "lstm", "head-gru", "layer-norm-lstm"])
def test_recorded(name, dtype, what, device):
    """In a CUDA graph, with resets."""
    call = Call(_cell(name, channels=64), 40, reset=torch.rand(2, 40) < 0.1)
    _, tensors = _on(device, call, torch.float32)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    run = derivative_calls(call, FUSED)[what]
    _check_recorded(run, [tensors[0].to(dtype), *tensors[1:]], tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cls", [pararnn.LSTM, pararnn.GRU, pararnn.ParaLSTM, pararnn.ParaGRU])
def test_recorded_layers(cls, dtype, device):
    """Products with the Hessian of weights, and gradients of samples, in one graph."""
    options = {} if issubclass(cls, pararnn.ParaRNN) else {"batch_first": True}
    layer = cls(64, 64, dtype=dtype, **options).to(device)
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}
    along = {name: torch.randn_like(weight) for name, weight in weights.items()}

    def loss(weights, x):
        return functional_call(layer, weights, (x,))[0].square().mean()

    def run(x):
        slope = grad(lambda w: jvp(lambda w: loss(w, x), (w,), (along,))[1])
        samples = vmap(grad(loss), (None, 0))(weights, x.unsqueeze(1))
        return [*slope(weights).values(), *samples.values()]

    x = torch.randn(4, 40, 64, device=device, dtype=dtype)
    _check_recorded(run, [x], {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype])
