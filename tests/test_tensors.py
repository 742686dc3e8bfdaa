"""What is given in another form than a tensor is taken, or named with what to do."""

import numpy as np
import pytest
import torch

import pararnn

GENERATOR = torch.Generator().manual_seed(0)
X, RESET = torch.randn(2, 6, 4, generator=GENERATOR), torch.arange(12).view(2, 6) % 5 == 3
STATES = torch.randn(1, 2, 6, 5, generator=GENERATOR)[:, RESET]
NESTED = torch.nested.nested_tensor([X[0], X[1, :3]], layout=torch.jagged)
FORMS = {"list": torch.Tensor.tolist, "array": torch.Tensor.numpy}


@pytest.fixture(scope="module")
def gru():
    torch.manual_seed(0)
    return pararnn.ParaGRU(4, 5)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    "arguments",
    [{"lengths": torch.tensor([3, 6])}, {"reset": RESET}, {"cu_seqlens": torch.tensor([0, 2, 6])}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_lists_and_arrays_are_accepted(gru, form, arguments):
    other = {name: form(value) for name, value in arguments.items()}
    x = X[:1] if "cu_seqlens" in arguments else X
    assert torch.equal(gru(x, **other)[0], gru(x, **arguments)[0])
    if "lengths" not in arguments:
        assert torch.equal(gru.layers[0](x, **other)[0], gru.layers[0](x, **arguments)[0])
        gates = gru.layers[0].proj(x)
        solutions = [pararnn.solve(gru.cell, gates, **way)[0] for way in (other, arguments)]
        assert torch.equal(*solutions)
    if "cu_seqlens" not in arguments:
        scans = [pararnn.scan(0.5 * torch.ones(4), x, **way) for way in (other, arguments)]
        assert torch.equal(*scans)


def test_step_accepts_resets_as_lists_and_arrays(gru):
    reference, _ = gru.step(X[:, 0], STATES[:, :2], reset=torch.tensor([True, False]))
    for reset in ([True, False], np.array([True, False])):
        assert torch.equal(gru.step(X[:, 0], STATES[:, :2], reset=reset)[0], reference)
    single, _ = gru.step(X[0, 0], STATES[:, 0], reset=True)
    assert torch.allclose(single, reference[0], atol=1e-6)


def test_no_sequences_and_no_lengths(gru):
    output, h_n = gru(X[:0], lengths=[])
    assert (output.shape, h_n.shape) == ((0, 6, 5), (1, 0, 5))


def test_a_field_may_be_a_tensor_without_dimensions():
    layer = pararnn.ParaRNN(pararnn.LRCCell, 4, 5)
    gap = torch.tensor(0.3, requires_grad=True)
    for run, x in ((layer, X), (layer.step, X[:, 0])):
        output, _ = run(x, fields={"dt": gap})
        assert torch.equal(output, run(x, fields={"dt": 0.3})[0])
        assert torch.autograd.grad(output.sum(), gap)[0] != 0
    layer.batch_first = False
    assert layer(X, fields={"dt": np.float32(0.3)})[0].shape == (2, 6, 5)


ZERO, TENSOR = "to start from zero give None in place of all", "must be a tensor, got"
WRONG = {
    "the input as an array": (TypeError, f"{TENSOR} ndarray", lambda gru: gru(X.numpy())),
    "a nested input": (TypeError, "nested tensor, which is not supported", lambda gru: gru(NESTED)),
    "a step's input as a list": (
        TypeError,
        f"{TENSOR} list",
        lambda gru: gru.step(X[:, 0].tolist()),
    ),
    "one layer's input": (TypeError, f"x {TENSOR} ndarray", lambda gru: gru.layers[0](X.numpy())),
    "no h_0 in a tuple": (TypeError, ZERO, lambda gru: gru(X, hx=(None,))),
    "one layer's": (TypeError, ZERO, lambda gru: gru.layers[0](X, (None,))),
    "a step's": (TypeError, ZERO, lambda gru: gru.step(X[:, 0], (None,))),
    "h_0 as an array": (TypeError, f"{TENSOR} ndarray", lambda gru: gru(X, np.zeros((1, 2, 5)))),
    "no lengths": (
        ValueError,
        r"lengths must be .* \(2,\), got .* \(0,\)",
        lambda gru: gru(X, lengths=[]),
    ),
    "lengths of floats": (
        ValueError,
        r"\(2,\), got torch.float32",
        lambda gru: gru(X, lengths=[1.0, 2]),
    ),
    "ragged lengths": (
        TypeError,
        "lengths must be a tensor, a list",
        lambda gru: gru(X, lengths=[[1], 2]),
    ),
    "falling cu_seqlens": (ValueError, "not fall", lambda gru: gru(X[:1], cu_seqlens=[0, 4, 2])),
    "no cu_seqlens": (ValueError, "must hold the end", lambda gru: gru(X[:1], cu_seqlens=[])),
    "reset of floats": (
        ValueError,
        r"reset must be bool \(2,\), got torch.float32 \(2,\)",
        lambda gru: gru.step(X[:, 0], reset=torch.tensor([1.0, 0.0])),
    ),
    "reset of another rank": (
        ValueError,
        r"reset must be bool \(\), got torch.bool \(1,\)",
        lambda gru: gru.step(X[0, 0], reset=[True]),
    ),
    "states of one layer": (
        ValueError,
        r"ParaGRU: reset_states must be .* \(1, K, 5\) each, .* got \[\(2, 5\)\]",
        lambda gru: gru(X, reset=RESET, reset_states=STATES[0]),
    ),
    "states as an array": (
        TypeError,
        f"reset_states {TENSOR} ndarray",
        lambda gru: gru(X, reset=RESET, reset_states=STATES.numpy()),
    ),
    "too few states": (
        ValueError,
        "reset must be true at 1 steps, as reset_states hold 1 states, one a step, got 2",
        lambda gru: gru(X, reset=RESET, reset_states=STATES[:, :1]),
    ),
    "a field as a list": (
        TypeError,
        f"field 'dt' {TENSOR} list",
        lambda _: pararnn.ParaRNN(pararnn.LRCCell, 4, 5)(X, fields={"dt": [[1.0] * 6] * 2}),
    ),
    "a nested b": (TypeError, "b is a nested tensor", lambda _: pararnn.scan(X, NESTED)),
    "b as an array": (TypeError, f"b {TENSOR} ndarray", lambda _: pararnn.scan(X, X.numpy())),
}


@pytest.mark.parametrize(("error", "message", "call"), WRONG.values(), ids=WRONG)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_errors_name_what_is_no_tensor(gru, error, message, call):
    with pytest.raises(error, match=message):
        call(gru)
