"""Private names of PyTorch, all in this file; tests/test_private.py has a test for each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.utils import enable_single_level_autograd_function
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CustomOpDef", "OpOverload", "OpOverloadPacket", "TorchDispatchMode"]

Function = TypeVar("Function", bound=Callable[..., Any])

# The functions of PyTorch themselves: Dynamo knows some of them by identity.
are_functorch_transforms_active = torch._C._are_functorch_transforms_active
assert_async = torch._assert_async
autocast_enabled = torch._C._is_any_autocast_enabled
dispatch_modes = torch._C._len_torch_dispatch_stack
cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
cpu_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention.default
cudnn_attention_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention.default
foreach_copy = torch._foreach_copy_
foreach_multiply = torch._foreach_mul_
foreach_norm = torch._foreach_norm
function_modes = torch._C._len_torch_function_stack
get_tracing_state = torch._C._get_tracing_state
is_legacy_batchedtensor = torch._C._functorch.is_legacy_batchedtensor
is_zerotensor = Tensor._is_zerotensor
local_scalar = torch.ops.aten._local_scalar_dense.default
profiler_enabled = torch._C._autograd._profiler_enabled
set_forward_mode = forward_ad._set_fwd_grad_enabled
"""Context in which forward-mode derivatives are taken, or are not."""
SingleLevelFunction = _SingleLevelFunction
"""Base class of a Function that has the formulas of the innermost transform."""
single_level_functions = enable_single_level_autograd_function
"""Context in which a Function may be called that has the formulas of the innermost transform."""
unwrap_if_dead = torch._C._functorch.unwrap_if_dead
"""Return a tensor without transforms that have ended."""
unsafe_view = torch.ops.aten._unsafe_view.default
"""Another size in the same memory, but no view for autograd, which forbids to detach views in place
or write to them. For tensors that nothing else reads: writes do not change the source's version."""


def constant_in_graphs(function: Function) -> Function:
    """Mark a function whose result Dynamo takes as a constant, and does not trace.

    torch.compiler.assume_constant_result does the same, but imports the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_graphs
def transforms() -> list[str]:
    """Return the names of the transforms of torch.func around a call, the outermost first."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return [level.key().name.lower() for level in stack]


class Transform:
    """The innermost transform of torch.func around a call.

    name, as `transforms` has it. batch_size: of a vmap, the copies that it runs.
    """

    def __init__(self, interpreter: Any) -> None:
        self.name = interpreter.key().name.lower()
        self._interpreter, self._level = interpreter, interpreter.level()

    @property
    def batch_size(self) -> int:
        """The copies that a vmap runs."""
        return self._interpreter.batch_size()

    def lift(self, tensor: Tensor) -> Tensor:
        """Return a tensor as one that a gradient or a jvp sees."""
        return self._interpreter._cptr.lift(tensor)

    def wrap(self, tensor: Tensor) -> Tensor:
        """Return a result of a call without a gradient or a jvp as one of that."""
        return torch._C._functorch._wrap_for_grad(tensor, self._level)

    def unwrap(self, tensor: Tensor) -> Tensor:
        """Return a tensor without a gradient or a jvp."""
        return torch._C._functorch._unwrap_for_grad(tensor, self._level)

    def batch(self, tensor: Tensor, dim: int) -> Tensor:
        """Return copies along a dimension as a tensor that a vmap runs over."""
        return torch._C._functorch._add_batch_dim(tensor, dim, self._level)

    def unbatch(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        """Return the copies of a tensor that a vmap runs over, and their dimension, else None."""
        return torch._C._functorch._unwrap_batched(tensor, self._level)

    def without(self) -> AbstractContextManager[Any]:
        """Return the context of calls without the transform."""
        return self._interpreter.lower()


def outside_of_grad(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor without the one torch.func.grad around a call. Compiled regions take it:
    from PyTorch 2.15 on tensors require gradients in them for that transform too."""
    return None if tensor is None else torch._C._functorch._unwrap_for_grad(tensor, 1)


def innermost_transform() -> Transform:
    """Return the innermost transform of torch.func around a call."""
    return Transform(retrieve_current_functorch_interpreter())


def unpack_dual(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return a tensor without its tangent of the current level, and the tangent.

    Without gradients PyTorch's value requires one, and has no place in a graph.
    """
    value, tangent = forward_ad.unpack_dual(tensor)
    return value if torch.is_grad_enabled() else value.detach(), tangent


def make_dual(tensor: Tensor, tangent: Tensor) -> Tensor:
    """Return a tensor with a tangent of the current level."""
    return forward_ad.make_dual(tensor, tangent)


def batch_level(tensor: Tensor) -> int:
    """Return the level of a batch of gradients by `is_grads_batched`. Raises NotImplementedError
    for a batch of batches.

    PyTorch's counter of levels is another one in the threads that run a GPU's backward passes.
    """
    for level in range(1, MAX_LEVELS):
        if not is_legacy_batchedtensor(from_batch(tensor, level)):
            return level
    raise NotImplementedError("is_grads_batched inside of is_grads_batched: use torch.func.vmap")


MAX_LEVELS = 65
"""One more than the levels of batches that PyTorch allows."""


def from_batch(tensor: Tensor, level: int) -> Tensor:
    """Return a tensor of `is_grads_batched` with a first dimension for the batch."""
    return torch._remove_batch_dim(tensor, level, 1, 0)


def to_batch(tensor: Tensor, level: int) -> Tensor:
    """Return a tensor whose first dimension is the batch as one of `is_grads_batched`."""
    return torch._add_batch_dim(tensor, 0, level)


def forward_level() -> int:
    """Return the level of forward-mode differentiation, -1 outside of it."""
    return forward_ad._current_level


def is_transformed() -> bool:
    """Return whether a call is within a transform of torch.func, or in forward mode, which compiled
    regions do not trace."""
    return are_functorch_transforms_active() or (
        not torch.compiler.is_compiling() and forward_level() >= 0
    )


def is_differentiated_again() -> bool:
    """Return whether more than one gradient is taken of a call, as far as it can be known: by
    transforms of torch.func, or in forward mode."""
    if not is_transformed():
        return False
    names = transforms()
    return forward_level() >= 0 or "jvp" in names or names.count("grad") > 1


def needed_inputs(ctx: Any) -> tuple[bool, ...]:
    """Return, for each input of a torch.autograd.Function, whether the running backward pass has
    use for its gradient: `ctx.needs_input_grad`, less what torch.autograd.grad is not called for.
    """
    flags = ctx.needs_input_grad
    if torch.compiler.is_compiling():
        return flags
    nodes = iter([node for node, _ in ctx.next_functions if node is not None])
    return tuple([flag and _will_run(next(nodes)) for flag in flags])


def _will_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # PyTorch's answer for a leaf whose gradient a call returns
        return True


def calls_forward_alone(module: nn.Module) -> bool:
    """Return True if a call of a module runs the `forward` of its class, and nothing else."""
    return not (
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or module._compiled_call_impl
        or "forward" in module.__dict__
        or torch.nn.modules.module._has_any_global_hook()
    )


def exporting() -> bool:
    """Return True under torch.export.

    torch.compiler.is_exporting() is no substitute: Dynamo of PyTorch 2.9 to 2.11 takes it for true
    in all that it compiles, and layers would have no gradient.
    """
    return torch.compiler._is_exporting_flag


@constant_in_graphs
def exporting_to_onnx() -> bool:
    """Return True where torch.onnx.export captures a program.

    Dynamo takes torch.onnx.is_in_onnx_export() for false always.
    """
    return exporting() and torch.onnx.is_in_onnx_export()


def higher_order_scan(
    step: Callable[..., Any],
    carry: Sequence[Tensor],
    series: Sequence[Tensor],
    additional_inputs: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:
    """Call PyTorch's scan operator, which becomes ONNX's Scan, over the first dimension of series.

    step: takes the carried tensors, a row of each series and the other tensors, and returns the
    carried tensors and the outputs, in one list; so does the operator. The public function would
    have Dynamo trace the step, which mistakes tensors and sizes of the code around it for inputs.
    """
    from torch._higher_order_ops.scan import scan_op

    return tuple(scan_op(step, list(carry), list(series), tuple(additional_inputs)))


def raw_stream(index: int) -> int:
    """Return the current CUDA stream. torch.cuda.current_stream makes an object, which is slower
    than a launch."""
    return torch._C._cuda_getCurrentRawStream(index)


@functools.cache
def is_composite(op: Any) -> bool:
    """Return True if an op consists of other ops, even if it has a kernel of its own."""
    key = "CompositeImplicitAutograd"
    overload = isinstance(op, OpOverload)
    return overload and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key)


def core_aten_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return PyTorch's decompositions into core ATen."""
    from torch._decomp import _core_aten_decompositions_post_autograd

    return _core_aten_decompositions_post_autograd()


def fake_tensor_mode() -> Any:
    """Return a new FakeTensorMode."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def inductor_config() -> Any:
    """Return Inductor's settings, which are slow to import."""
    from torch._inductor import config

    return config
