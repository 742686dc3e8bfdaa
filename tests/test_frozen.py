"""A backward pass computes no gradient that nobody asked for, where engines can leave it out."""

import pytest
import torch
from emulated import gpu, install
from fake_newton import patch_engine
from table import OPS, needs_compiler
from torch.func import functional_call, grad, jvp
from torch.utils._python_dispatch import TorchDispatchMode

import pararnn
from pararnn import op
from pararnn.engines import table
from pararnn.engines.fused import gpu as gpus
from pararnn.op import _Solve

PARTS = {"gates": "proj", "bias": "bias", "params": "cell"}


def _input(device):
    return torch.randn(2, 20, 3, device=device)


class _Recorded:
    """Stands in an engine's place, and keeps what its backward was asked for and gave."""

    def __init__(self, monkeypatch, pair, device):
        key = (*pair, device) if (*pair, device) in table.TABLE else (*pair, table.ANY_DEVICE)
        self.calls, engine = [], table.TABLE[key]

        def backward(*arguments):
            self.calls.append((arguments[-1].wanted, engine.backward(*arguments)))
            return self.calls[-1][1]

        monkeypatch.setitem(table.TABLE, key, patch_engine(engine, backward=backward))


def _requests():
    """Return (pair, parts, compile): all without a compiler, and each pair and part with one."""
    parts = [("gates",), ("bias",), ("params",), ("gates", "params")]
    eager = [(pair, part, False) for pair in OPS for part in parts]
    rounds = max(len(OPS), len(parts))
    return eager + [(OPS[i % len(OPS)], parts[i % len(parts)], True) for i in range(rounds)]


@pytest.mark.parametrize(("pair", "parts", "compile"), _requests(), ids=str)
@pytest.mark.one_in(5)
def test_engines_are_asked_for_what_is_wanted(monkeypatch, device, pair, parts, compile):
    torch.manual_seed(0)
    options = {"solver": pair[0], "backend": pair[1], "device": device}
    layer, x = pararnn.RecurrentLayer(pararnn.LSTMCell, 3, 4, **options), _input(device)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compile else layer
    layer(x)[0].sum().backward()
    reference = {name: p.grad for name, p in layer.named_parameters()}
    layer.zero_grad()
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(any(name.startswith(PARTS[part]) for part in parts))
    recorder = _Recorded(monkeypatch, pair, device)
    run(x)[0].sum().backward()
    [(wanted, grads)] = recorder.calls
    assert list(wanted) == list(parts)
    for part, nothing in (("bias", None), ("params", ()), ("fields", ()), ("initial", ())):
        assert part in parts or getattr(grads, part) == nothing
    for name, parameter in layer.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, reference[name])


@pytest.mark.parametrize("heads", [1, 2])
def test_a_call_computes_no_gradients_but_its_own(monkeypatch, heads):
    """As a penalty on the gradient by the input, and a product with the Hessian of weights."""
    monkeypatch.setattr("pararnn.op.can_bypass_dispatcher", lambda: False)
    wanted, run = [], op._run_backward
    record = lambda *inputs: wanted.append(inputs[2]) or run(*inputs)  # noqa: E731
    monkeypatch.setattr(op, "_run_backward", record)
    layer = pararnn.RecurrentLayer(pararnn.zoo.HeadGRUCell, 4, 4, num_heads=heads)
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}
    x, products = torch.randn(2, 5, 4, requires_grad=True), _Products()
    with products:
        torch.autograd.grad(layer(x)[0].sum(), x)
    assert (wanted, products.count) == ([["gates"]], 2)  # forward, and by the input
    torch.autograd.grad(layer(x)[0].sum(), layer.bias)
    assert wanted.pop() == ["bias"]

    def slope(weights, along):
        def loss(weights):
            return functional_call(layer, weights, (x.detach(),))[0].sum()

        return jvp(loss, (weights,), (along,))[1]

    grad(slope)(weights, {name: weight.cos() for name, weight in weights.items()})
    assert wanted.pop() == ["gates", "bias", "params"]  # of the solve, then of its tangents
    # h, products with three matrices and their tangents. PyTorch's tangents of batched products
    # depend on what does not move, so that those of gates are wanted too.
    fields = ["fields"] if heads > 1 else [f"fields.{i}" for i in range(7)]
    assert wanted.pop() == ["gates", "bias", *fields, *[f"params.{i}" for i in range(4)]]


@pytest.mark.parametrize("pair", OPS, ids="-".join)
def test_autograd_is_given_none_for_what_needs_no_gradient(monkeypatch, device, pair):
    options = {"solver": pair[0], "backend": pair[1], "device": device}
    layer = pararnn.RecurrentLayer(pararnn.GRUCell, 3, 4, **options)
    layer.cell.a_r.requires_grad_(False)
    records, backward = [], _Solve.backward

    def record(ctx, *grads):
        out = backward(ctx, *grads)
        records.append([ctx.needs_input_grad, out])
        return out

    monkeypatch.setattr(_Solve, "backward", staticmethod(record))
    layer(_input(device))[0].sum().backward()
    [(flags, out)] = records
    assert [grad is not None for grad in out] == list(flags)
    assert layer.cell.a_r.grad is None
    assert layer.cell.a_z.grad is not None


@needs_compiler
@pytest.mark.parametrize("wanted", ["proj", "bias", "cell"])
@pytest.mark.parametrize("solver", ["sequential", "newton"])
@pytest.mark.one_in(11)
def test_cuda_adds_up_no_weights_that_are_frozen(monkeypatch, solver, wanted):
    install(gpu(), monkeypatch)
    counts, real = [], gpus.GpuKernel.__call__

    def record(kernel, arguments):
        if kernel.grid[1] > 1:
            counts.append(kernel.grid[1])
        real(kernel, arguments)

    monkeypatch.setattr(gpus.GpuKernel, "__call__", record)
    layer = pararnn.RecurrentLayer(pararnn.GRUCell, 3, 4, solver=solver, backend="fused")
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name.startswith(wanted))
    layer(_input("cpu"))[0].sum().backward()
    assert counts == ([] if wanted == "proj" else [3 + 3])


class _Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(
    ("x_wanted", "weight_wanted", "products"),
    [(True, True, 2), (True, False, 1), (False, True, 1), (False, False, 0)],
)
def test_the_projection_multiplies_for_what_is_wanted(heads, x_wanted, weight_wanted, products):
    layer = pararnn.RecurrentLayer(pararnn.GRUCell, 4, 6, num_heads=heads)
    layer.proj.weight.requires_grad_(weight_wanted)
    output, _ = layer(torch.randn(2, 20, 4, requires_grad=x_wanted))
    with _Products() as products_mode:
        output.sum().backward()
    assert products_mode.count == products
