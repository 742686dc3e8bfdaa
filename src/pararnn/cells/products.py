"""Products of a step with matrices inside heads: `x @ param.R`, and the ops that record them.

A matrix is (H, K, K), one for each of the H heads of K = D / H channels, or (D, D), for one head.
`product` is plain PyTorch. `recorded_product` computes the same by a custom op, which stays a
single node where a step is traced, in its derivative too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor, bool], Tensor]
"""Function of x (..., D), a matrix, and whether its transpose is meant: returns (..., D)."""


def product(x: Tensor, matrix: Tensor, transpose: bool = False) -> Tensor:
    """Return x (..., D) times the matrix of each head, or times its transpose."""
    factor = matrix.mT if transpose else matrix
    if factor.ndim == 2:
        return x @ factor
    heads = x.unflatten(-1, (factor.shape[0], factor.shape[1]))
    return torch.einsum("...hi,hij->...hj", heads, factor).flatten(-2)


def outer(x: Tensor, y: Tensor, matrix: Tensor) -> Tensor:
    """Return the sum over all leading dimensions of x_i y_j inside heads, sized as the matrix."""
    heads = (1, *matrix.shape)[-3:-1]
    pairs = [t.reshape(-1, *heads) for t in (x, y)]
    return torch.einsum("rhi,rhj->hij", *pairs).reshape(matrix.shape)


_LIBRARY = torch.library.Library("pararnn", "FRAGMENT")
_LIBRARY.define("mix(Tensor x, Tensor matrix, bool transpose) -> Tensor")
_LIBRARY.define("outer(Tensor x, Tensor y, Tensor matrix) -> Tensor")
# An op returns new memory of the usual strides, which compilers rely on.
_LIBRARY.impl(
    "mix", lambda x, m, transpose: product(x, m, transpose).clone(), "CompositeExplicitAutograd"
)
_LIBRARY.impl("outer", lambda x, y, m: outer(x, y, m).clone(), "CompositeExplicitAutograd")
torch.library.register_fake("pararnn::mix", lambda x, m, t: x.new_empty(x.shape), lib=_LIBRARY)
torch.library.register_fake("pararnn::outer", lambda x, y, m: m.new_empty(m.shape), lib=_LIBRARY)

MIX = torch.ops.pararnn.mix.default
OUTER = torch.ops.pararnn.outer.default


def recorded_product(x: Tensor, matrix: Tensor, transpose: bool = False) -> Tensor:
    """Return `product` by the op `pararnn::mix`, whose derivatives are such ops again."""
    result: Tensor = _Mix.apply(x, matrix, transpose)
    return result


class _Mix(torch.autograd.Function):
    """The op `mix` with its derivatives."""

    @staticmethod
    def forward(x: Tensor, matrix: Tensor, transpose: bool) -> Tensor:
        return torch.ops.pararnn.mix(x, matrix, transpose)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, matrix, ctx.transpose = inputs
        ctx.save_for_backward(x, matrix)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, matrix = ctx.saved_tensors
        of_x, of_matrix = ctx.needs_input_grad[:2]
        pair = (grad, x) if ctx.transpose else (x, grad)
        return (
            _Mix.apply(grad, matrix, not ctx.transpose) if of_x else None,
            _OuterProduct.apply(*pair, matrix) if of_matrix else None,
            None,
        )

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, matrix: Tensor, transpose: bool) -> Any:
        """Compute copies of a matrix as more heads of one."""
        if dims[1] is None:
            return _Mix.apply(x.movedim(dims[0], 0), matrix, transpose), 0
        size = info.batch_size
        out = _Mix.apply(_as_heads(x, dims[0], size), _as_heads_of(matrix, dims[1]), transpose)
        return out.unflatten(-1, (size, -1)), out.ndim - 1


class _OuterProduct(torch.autograd.Function):
    """The op `outer` with its derivatives."""

    @staticmethod
    def forward(x: Tensor, y: Tensor, matrix: Tensor) -> Tensor:
        return torch.ops.pararnn.outer(x, y, matrix)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        of_x, of_y, _ = ctx.needs_input_grad
        return (
            _Mix.apply(y, grad, True) if of_x else None,
            _Mix.apply(x, grad, False) if of_y else None,
            None,
        )

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, y: Tensor, matrix: Tensor) -> Any:
        size = info.batch_size
        pairs = [_as_heads(t, dim, size) for t, dim in ((x, dims[0]), (y, dims[1]))]
        whole = matrix.expand(size, *matrix.shape) if dims[2] is None else matrix
        whole = whole.movedim(dims[2] or 0, 0)
        return _OuterProduct.apply(*pairs, _as_heads_of(whole, 0)).reshape(whole.shape), 0


def _as_heads(x: Tensor, dim: int | None, size: int) -> Tensor:
    """Return copies of x (..., D) next to each other, (..., size D)."""
    if dim is None:
        return x.unsqueeze(-2).expand(*x.shape[:-1], size, x.shape[-1]).flatten(-2)
    return x.movedim(dim, -2).flatten(-2)


def _as_heads_of(matrix: Tensor, dim: int) -> Tensor:
    """Return copies of a matrix as heads of one, (size H, K, K)."""
    whole = matrix.movedim(dim, 0)
    return whole if whole.ndim == 3 else whole.flatten(0, 1)


class Matrix:
    """A parameter as a step multiplies by it: `x @ param.R` and `x @ param.R.mT` are products.

    To all other functions of PyTorch it is the tensor.
    """

    def __init__(self, tensor: Tensor, product: Product, transpose: bool = False) -> None:
        self._tensor, self._product, self._transpose = tensor, product, transpose

    def of(self, tensor: Tensor) -> Matrix:
        """Another tensor, by which a step multiplies as by this one."""
        return Matrix(tensor, self._product, self._transpose)

    @property
    def mT(self) -> Matrix:
        """The transpose of each head's matrix."""
        return Matrix(self._tensor, self._product, not self._transpose)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return _multiply(x, self)

    def __matmul__(self, other: Any) -> Any:
        return _plain(self) @ _plain(other)

    def __getattr__(self, name: str) -> Any:
        return getattr(_plain(self), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of PyTorch on the tensor; products by `product`."""
        if len(args) == 2 and not kwargs and isinstance(args[1], Matrix):
            if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
                return _multiply(args[0], args[1])
            if func is torch.nn.functional.linear:
                return _multiply(args[0], args[1].mT)
        return func(*_plain(tuple(args)), **_plain(dict(kwargs or {})))


def _of_tensor(name: str) -> Callable[..., Any]:
    def method(self: Matrix, *args: Any) -> Any:
        return getattr(_plain(self), name)(*_plain(args))

    return method


for _name in ("add", "sub", "mul", "truediv", "pow"):
    for _side in ("", "r"):
        setattr(Matrix, f"__{_side}{_name}__", _of_tensor(f"__{_side}{_name}__"))
for _name in ("neg", "getitem", "len", "iter"):
    setattr(Matrix, f"__{_name}__", _of_tensor(f"__{_name}__"))


def _plain(value: Any) -> Any:
    """Return the tensor behind a matrix; of lists, tuples and dicts that of each entry."""
    if isinstance(value, Matrix):
        return value._tensor.mT if value._transpose else value._tensor
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return {name: _plain(v) for name, v in value.items()} if type(value) is dict else value


def _multiply(x: Any, matrix: Matrix) -> Any:
    tensor = matrix._tensor
    channels = tensor.shape[-1] * (tensor.shape[0] if tensor.ndim == 3 else 1)
    if isinstance(x, Matrix) or x.shape[-1:] != (channels,):  # not of a state
        return _plain(x) @ _plain(matrix)
    return matrix._product(x, tensor, matrix._transpose)
