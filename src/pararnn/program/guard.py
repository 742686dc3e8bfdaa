"""What goes wrong while a step is traced, said of the step and of the user's own line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from pararnn.errors import CellError

# What hangs a function on a tensor, or keeps its gradient: a graph of the step's ops has no such
# tensor, and in a loop it sees the gradient from outside the step too.
HOOKS = {
    Tensor.register_hook: "register_hook",
    Tensor.retain_grad: "retain_grad",
    Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook",
    Tensor.grad_fn.__get__: "grad_fn",  # type: ignore[union-attr]
}


class BranchError(Exception):
    """The step reads a tensor's value in Python (a branch, .item()): it cannot be traced."""


def guarded(
    what: str, trace: Callable[[], fx.GraphModule], inputs: Sequence[Tensor]
) -> fx.GraphModule:
    """What `trace` returns at `inputs`; BranchError or CellError for what it raises of a step."""
    from torch._subclasses.fake_tensor import DataDependentOutputException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    try:
        with _HooksRefused(what):
            return trace()
    except (DataDependentOutputException, GuardOnDataDependentSymNode) as error:
        raise BranchError(str(error)) from error
    except (AttributeError, IndexError) as error:
        if "can't set attribute" in str(error):
            raise CellError(
                f"{what} sets an attribute of state, gate or param{line_of(error)}, which it may "
                "only read: name the new tensor (h = state.h + ...) and return it"
            ) from from_the_users_line(error)
        raise CellError(f"{what} fails: {error}{line_of(error)}") from from_the_users_line(error)
    except AssertionError as error:
        if "FakeTensor" not in str(error):
            raise
        raise CellError(
            f"{what} reads a tensor from outside, which a step that mixes channels may not: make "
            "it a number, a Param (trainable=False for a constant) or a field"
        ) from error
    except RuntimeError as error:
        if "_local_scalar_dense" in str(error) or "data-dependent" in str(error):
            raise BranchError(str(error)) from error
        if "inplace operation" in str(error) or "in-place" in str(error):
            raise CellError(
                f"{_step_of(what)} writes into a tensor in place (h += ..., h[mask] = ..., h.add_()"
                "), and its gradient needs what was there: make a new one, by torch.where for a "
                "mask"
            ) from from_the_users_line(error)
        sizes = ""
        if re.search(r"sizes?\b|shapes?\b|dimension", str(error)):
            sizes = (
                f". Steps are traced on {inputs[0].shape[-1]} channels, whatever a layer has, so "
                "they may hold no size of their own: read it off a state, or make it a Param"
            )
        raise CellError(
            f"{what} cannot be traced: {error}{line_of(error)}{sizes}"
        ) from from_the_users_line(error)


def _step_of(what: str) -> str:
    """What is to blame where a derivative of the step cannot be traced: the step."""
    return re.split(r"'s |[.]", what)[0] + ".step"


def _users_part(error: BaseException) -> TracebackType | None:
    """The traceback from the first line on that is not of this package, torch or Python."""
    files = (os.path.dirname(__file__), torch.__file__, os.__file__)
    inside = tuple(os.path.dirname(str(file)) + os.sep for file in files)
    part = error.__traceback__
    while part is not None:
        name = part.tb_frame.f_code.co_filename
        if os.path.isabs(name) and not name.startswith(inside):
            return part
        part = part.tb_next
    return None


def from_the_users_line(error: Exception) -> Exception:
    """An error without the frames above the user's line, if one of those is there."""
    part = _users_part(error)
    return error if part is None else error.with_traceback(part)


def line_of(error: Exception) -> str:
    """Where the user's code is, in words."""
    part = _users_part(error)
    if part is None:
        return ""
    return f" ({part.tb_frame.f_code.co_filename}, line {part.tb_lineno})"


class _HooksRefused(TorchFunctionMode):
    """Raises CellError where the step hangs a hook on a tensor."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function of PyTorch's that is no hook."""
        if func in HOOKS:
            raise CellError(
                f"{self.what} uses {HOOKS[func]}: a parallel solver runs a graph of the step, "
                "where tensors carry no hooks. Hang it on what goes into the solve or comes out of "
                "it (gates, parameters, the layer's output), or declare structure = 'sequential'"
            )
        return func(*args, **(kwargs or {}))
