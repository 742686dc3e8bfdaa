"""Errors of tracing, with the name of the step and the user's line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pararnn.base.errors import CellError
from pararnn.program.record import BranchError, WriteError

# Functions that put a hook on a tensor, or retain its gradient. A graph of the step's ops has no
# such tensor; in a loop, a hook sees gradients from outside the step too.
HOOKS = {
    Tensor.register_hook: "register_hook",
    Tensor.retain_grad: "retain_grad",
    Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook",
    Tensor.grad_fn.__get__: "grad_fn",  # type: ignore[union-attr]
}


_PRODUCTS = (
    "A step multiplies by a matrix 'H,K,K' as it is, x @ param.R or x @ param.R.mT: write "
    "x @ (a * param.R) as a * (x @ param.R), and x @ (param.R + param.S) as two products"
)

_WITHOUT_DERIVATIVE = {
    "floor_divide": "write torch.div(a, b, rounding_mode='floor') for a // b, whose gradient is 0",
    "remainder": "write x.new_tensor(a) % x for a % x",
    "heaviside": "write torch.where(x > 0, torch.ones_like(x), ...), whose gradient is 0",
}

R = TypeVar("R")


class SizeError(CellError):
    """The step does not fit the number of channels that it was traced on; `failure` says how."""

    failure = ""


class DerivativeError(CellError):
    """The step has an op without a derivative in PyTorch."""


def missing_derivative(error: Exception) -> str | None:
    """Return which op has no derivative, and what to write, if that is the error."""
    op = re.search(r"derivative for (?:aten::)?(\w+) is not implemented", str(error))
    if op is None:
        return None
    cure = _WITHOUT_DERIVATIVE.get(op[1], "apply it to a detached value, x.detach()")
    return f"uses {op[1]}, of which PyTorch has no derivative: {cure}"


def guard(what: str, trace: Callable[[], R], inputs: Sequence[Tensor]) -> R:
    """Return `trace()`, a trace at `inputs`; raise BranchError or CellError for its errors."""
    try:
        with _FunctionsRefused(what):
            return trace()
    except WriteError as error:
        frame = next((frame for frame in error.stack if _is_users(frame[0])), None)
        line = "" if frame is None else " ({}, line {})".format(*frame)
        raise CellError(_WRITES.format(_step_of(what), line)) from from_the_users_line(error)
    except (AttributeError, IndexError) as error:
        raise CellError(f"{what} fails: {error}{line_of(error)}") from from_the_users_line(error)
    except AssertionError as error:
        if "FakeTensor" not in str(error):
            raise
        raise CellError(
            f"{what} reads a tensor from outside, which a step that mixes channels may not: make "
            "it a number, a Param (trainable=False for a constant) or a field"
        ) from error
    except RuntimeError as error:
        missing = missing_derivative(error)
        if missing is not None:
            raise DerivativeError(f"{_step_of(what)} {missing}") from error
        if "_local_scalar_dense" in str(error) or "data-dependent" in str(error):
            raise BranchError(str(error)) from error
        if "inplace operation" in str(error) or "in-place" in str(error):
            raise CellError(_WRITES.format(_step_of(what), "")) from from_the_users_line(error)
        failure = f"{what} cannot be traced: {error}{line_of(error)}"
        if not re.search(r"sizes?\b|shapes?\b|dimension", str(error)):
            raise CellError(failure) from from_the_users_line(error)
        channels = inputs[0].shape[-1] if inputs[0].ndim else 1
        if inputs[0].ndim == 1 and any(tensor.ndim == 3 for tensor in inputs):
            failure += f". {_PRODUCTS}"
        size_error = SizeError(
            f"{failure}. It was traced on {channels} channels (8, or the layer's own "
            "where those do not fit): read sizes off a state, or make them config or a Param"
        )
        size_error.failure = failure
        raise size_error from from_the_users_line(error)


_WRITES = (
    "{} writes into a tensor in place{} (h += ..., h[mask] = ..., h.add_()), and its gradient "
    "needs what was there: make a new one, by torch.where for a mask"
)


def _is_users(file: str) -> bool:
    """Check whether a file is not this package's, torch's or Python's."""
    files = (os.path.dirname(__file__), torch.__file__, os.__file__)
    inside = tuple(os.path.dirname(str(path)) + os.sep for path in files)
    return os.path.isabs(file) and not file.startswith(inside)


def _step_of(what: str) -> str:
    """Return the step's name, given that of its derivative."""
    return re.split(r"'s |[.]", what)[0] + ".step"


def _users_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback from the user's first frame on."""
    traceback = error.__traceback__
    while traceback is not None and not _is_users(traceback.tb_frame.f_code.co_filename):
        traceback = traceback.tb_next
    return traceback


def from_the_users_line(error: Exception) -> Exception:
    """Return an error without the frames above the user's line, if there is one."""
    traceback = _users_traceback(error)
    return error if traceback is None else error.with_traceback(traceback)


def line_of(error: Exception) -> str:
    """Return file and line of the user's code, in words."""
    traceback = _users_traceback(error)
    if traceback is None:
        return ""
    return f" ({traceback.tb_frame.f_code.co_filename}, line {traceback.tb_lineno})"


# The derivative of sgn has a fixed size, which a graph of symbolic sizes cannot follow.
OF_REALS = {torch.sgn: torch.sign, Tensor.sgn: Tensor.sign}
READERS = ("numpy", "tolist", "__array__", "__dlpack__", "data_ptr")
"""Methods of tensors that give Python their values, or memory, without an op."""


class _FunctionsRefused(TorchFunctionMode):
    """Mode in which a step that puts a hook on a tensor raises CellError, and one that reads a
    tensor's values BranchError."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of PyTorch's that is neither a hook nor a reader of values."""
        if func in HOOKS:
            raise CellError(
                f"{self.what} uses {HOOKS[func]}: a parallel solver runs a graph of the step, "
                "where tensors carry no hooks. Put it on an input or output of the solve "
                "(gates, parameters, the layer's output), or declare structure = 'sequential'"
            )
        if getattr(func, "__name__", "") in READERS:
            args[0].detach().sum().item()  # which a recorder refuses where it depends on inputs
        return OF_REALS.get(func, func)(*args, **(kwargs or {}))
