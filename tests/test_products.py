"""`x @ param.R` in a step: PyTorch's product inside heads, and the ops that record it."""

import pytest
import torch
from mixing_cells import HeadGRU

from pararnn.cells.products import MIX, OUTER, Matrix, outer, product, recorded_product
from pararnn.program.record import record

HEADS, WIDTH = 3, 4


def _draw(dense=False, lead=(2, 5)):
    torch.manual_seed(0)
    size = (HEADS * WIDTH,) * 2 if dense else (HEADS, WIDTH, WIDTH)
    x, matrix = (torch.randn(s, dtype=torch.float64) for s in ((*lead, HEADS * WIDTH), size))
    return x.requires_grad_(), matrix.requires_grad_()


def _by_blocks(x, matrix, transpose=False):
    whole = matrix if matrix.ndim == 2 else torch.block_diag(*matrix)
    return x @ (whole.mT if transpose else whole)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("multiply", [product, recorded_product])
@pytest.mark.one_in(3)
def test_a_product_is_that_of_the_block_diagonal_matrix(multiply, dense, transpose):
    x, matrix = _draw(dense)
    own, truth = multiply(x, matrix, transpose), _by_blocks(x, matrix, transpose)
    torch.testing.assert_close(own, truth)
    cotangent = torch.randn_like(own)
    grads = [torch.autograd.grad(y, (x, matrix), cotangent) for y in (own, truth)]
    torch.testing.assert_close(*grads)
    assert torch.autograd.gradcheck(lambda *t: multiply(*t, transpose), (x, matrix))
    assert torch.autograd.gradgradcheck(lambda *t: multiply(*t, transpose), (x, matrix))


def test_a_matrix_in_a_step_reads_as_the_user_writes_it():
    x, matrix = _draw()
    own = Matrix(matrix, product)
    for y in (x @ own, torch.matmul(x, own), x.matmul(own)):
        torch.testing.assert_close(y, _by_blocks(x, matrix))
    for y in (x @ own.mT, torch.nn.functional.linear(x, own)):
        torch.testing.assert_close(y, _by_blocks(x, matrix, True))
    torch.testing.assert_close(x @ own.mT.mT, x @ own)
    assert own.shape == matrix.shape
    torch.testing.assert_close(torch.cat([own, own]), torch.cat([matrix, matrix]))
    assert isinstance(own + 1, torch.Tensor)


def test_a_recording_has_one_node_for_each_product_and_its_gradients():
    x, matrix = _draw(lead=())

    def step(x, matrix):
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_(), matrix.detach().requires_grad_()]
            y = recorded_product(torch.tanh(leaves[0]), leaves[1])
            return [y.detach(), *torch.autograd.grad(y.sin().sum(), leaves)]

    own = [n.target for n in record(step, [x.detach(), matrix.detach()]).nodes]
    assert own.count(MIX) == 2
    assert own.count(OUTER) == 1


@pytest.mark.parametrize("dims", [(0, None), (None, 0), (1, 2)])
def test_copies_of_a_product(dims):
    many = 3
    x, matrix = (t.detach() for t in _draw())
    x = x if dims[0] is None else torch.stack([x * n for n in range(many)], dims[0])
    matrix = matrix if dims[1] is None else torch.stack([matrix + n for n in range(many)], dims[1])
    own = torch.func.vmap(recorded_product, dims)(x, matrix)
    torch.testing.assert_close(own, torch.func.vmap(product, dims)(x, matrix))

    def grads(multiply):
        def loss(x, matrix):
            return multiply(x, matrix).sin().sum()

        return torch.func.vmap(torch.func.grad(loss, (0, 1)), dims)(x, matrix)

    torch.testing.assert_close(grads(recorded_product), grads(product))


def test_the_op_and_a_step_compile():
    x, matrix = _draw()
    torch.compiler.reset()
    compiled_product = torch.compile(recorded_product, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled_product(x, matrix), product(x, matrix))
    (grad,) = torch.autograd.grad(compiled_product(x, matrix).sin().sum(), matrix)
    torch.testing.assert_close(grad, outer(x, product(x, matrix).cos(), matrix))

    def step(x, matrix):
        own = Matrix(matrix, product)
        return torch.tanh(x @ own) @ own.mT

    compiled_step = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled_step(x, matrix), step(x, matrix))


def test_matrices_of_heads_are_drawn_for_their_width():
    torch.manual_seed(0)
    cell = HeadGRU(256, num_heads=16)
    assert cell.R_z.shape == (16, 16, 16)
    assert cell.draws()["R_z"].spread == 0.25
    assert cell.draws(recurrent_std=0.5)["R_z"].spread == 0.5
