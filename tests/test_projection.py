"""The headwise projection: its product, derivatives of all kinds, layouts."""

import pytest
import torch

import pararnn
from pararnn.base import private
from pararnn.layers.projection import HeadwiseLinear, headwise_gates, headwise_product


def _inputs(dtype=torch.float64):
    torch.manual_seed(0)
    rows = torch.randn(7, 3, 4, dtype=dtype, requires_grad=True)
    return rows, torch.randn(3, 5, 4, dtype=dtype, requires_grad=True)


def test_derivatives():
    for leaves in ((True, True), (True, False), (False, True)):
        inputs = tuple(t.requires_grad_(f) for t, f in zip(_inputs(), leaves, strict=True))
        options = {"check_forward_ad": True, "check_batched_grad": True}
        assert torch.autograd.gradcheck(headwise_product, inputs, **options)
        assert torch.autograd.gradgradcheck(headwise_product, inputs)


def test_several_gradients_at_once():
    rows, weight = _inputs()
    product = headwise_product(rows, weight)
    (many,) = torch.func.vmap(lambda one: torch.autograd.grad(product, rows, one))(
        torch.stack([product, 2 * product]).detach()
    )
    (grad,) = torch.autograd.grad(headwise_product(rows, weight), rows, product.detach())
    assert torch.allclose(many, torch.stack([grad, 2 * grad]))


def test_the_gradient_of_rows_has_their_layout():
    rows, weight = _inputs()
    (grad,) = torch.autograd.grad(headwise_product(rows, weight).square().sum(), rows)
    assert grad.is_contiguous()
    plain = torch.einsum("rhi,hoi->hro", rows, weight)
    assert torch.allclose(grad, torch.autograd.grad(plain.square().sum(), rows)[0])


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_projection_is_block_diagonal(heads):
    torch.manual_seed(0)
    proj, x = HeadwiseLinear(8, 3, 16, heads), torch.randn(2, 5, 8)
    gates = proj(x)
    flat = gates.flatten(3) if heads > 1 else gates
    assert flat.shape == (2, 5, 3, 16)
    for head in range(heads):
        own = x[..., 8 // heads * head : 8 // heads * (head + 1)]
        reference = (own @ proj.weight[head].mT).unflatten(-1, (3, -1))
        part = flat[..., 16 // heads * head : 16 // heads * (head + 1)]
        assert torch.allclose(part, reference, atol=1e-5)


@pytest.mark.parametrize("dense", [False, True])
def test_gates_are_laid_out_as_the_input_is(dense):
    torch.manual_seed(0)
    weight = torch.randn(6, 8) if dense else torch.randn(1, 6, 8)
    by_time, by_row = torch.randn(5, 2, 8), torch.randn(2, 5, 8)
    for x, first in ((by_row, 0), (by_time.transpose(0, 1), 1)):
        gates = headwise_gates(x, weight, 3)
        assert gates.transpose(0, first).is_contiguous()
        expected = (x @ weight.view(6, 8).mT).unflatten(-1, (3, 2))
        torch.testing.assert_close(gates, expected)


def test_autocast_decides_the_dtype():
    proj, x = HeadwiseLinear(8, 3, 16, 2), torch.randn(2, 5, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        gates = proj(x)
    assert gates.dtype == torch.bfloat16
    gates.float().square().sum().backward()
    assert x.grad.dtype == proj.weight.grad.dtype == torch.float32


def test_transforms_and_compilation():
    rows, weight = _inputs()
    reference = headwise_product(rows, weight)
    batch = torch.func.vmap(headwise_product, (0, None))(torch.stack([rows, 2 * rows]), weight)
    assert torch.allclose(batch, torch.stack([reference, 2 * reference]))
    program = torch.compile(headwise_product, fullgraph=True, backend="aot_eager")
    grads = torch.autograd.grad(program(rows, weight).sum(), (rows, weight))
    wanted = torch.autograd.grad(reference.sum(), (rows, weight))
    assert all(torch.allclose(a, b) for a, b in zip(grads, wanted, strict=True))


@pytest.mark.parametrize(("batch", "steps"), [(0, 5), (2, 0), (0, 0)])
@pytest.mark.parametrize("heads", [1, 2])
def test_empty_inputs_give_empty_gates(heads, batch, steps):
    proj, x = HeadwiseLinear(8, 3, 16, heads), torch.randn(batch, steps, 8, requires_grad=True)
    gates = proj(x)
    assert gates.shape == (batch, steps, 3, *([16] if heads == 1 else [heads, 16 // heads]))
    gates.sum().backward()
    assert x.grad.shape == x.shape
    assert not proj.weight.grad.any()


def test_forward_mode_multiplies_the_tangents_that_there_are():
    """PyTorch's own formula multiplies zeros too, in the time of other numbers."""
    x, weight = torch.randn(2, 5, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    products = []

    class Count(private.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            products.extend([func] * (func is torch.ops.aten.mm.default))
            return func(*args, **(kwargs or {}))

    for function, tensors in (
        (lambda x: headwise_gates(x, weight, 3), (x,)),
        (lambda w: headwise_gates(x, w, 3), (weight,)),
        (lambda x, w: headwise_gates(x, w, 3), (x, weight)),
    ):
        along = tuple(tensor.cos() for tensor in tensors)
        products.clear()
        with Count():
            gates, slope = torch.func.jvp(function, tensors, along)
        assert len(products) == 1 + len(tensors)
        torch.testing.assert_close(gates, headwise_gates(x, weight, 3))
        halves = [function(*(t + s * u / 2 for t, u in zip(tensors, along, strict=True)))
                  for s in (1, -1)]  # fmt: skip
        torch.testing.assert_close(slope, halves[0] - halves[1])


@pytest.mark.parametrize(
    ("dtype", "cure"), [(torch.int64, "Embedding"), (torch.complex64, "view_")]
)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("autocast", [False, True])
def test_inputs_are_floating_point(dtype, cure, heads, autocast):
    """Under autocast too, which would drop imaginary parts."""
    layer = pararnn.ParaGRU(4, 8, num_heads=heads)
    x = torch.ones(2, 3, 4, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for call in (lambda: layer(x), lambda: layer.step(x[:, 0])):
            with pytest.raises(ValueError, match=rf"got {dtype}: .*{cure}"):
                call()
