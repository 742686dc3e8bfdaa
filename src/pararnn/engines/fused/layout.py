"""Layout of tensors for kernels: adjacent channels, heads by stride."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pararnn.codegen.interface import Interface
from pararnn.codegen.source import chunk_of
from pararnn.engines.arguments import Arguments, Gradients
from pararnn.engines.fit import output_sizes, saved_size
from pararnn.program.program import Program


def unit_stride(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy of it, with adjacent elements in its last dimension."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def narrow_field(field: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a field in the compute dtype; one with one value a step becomes (B, T, 1)."""
    if field.stride(-1) == 0:
        return field[..., :1].to(dtype)
    return unit_stride(field.to(dtype))


def contiguous_as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor contiguous in a dtype: itself if it is."""
    return (tensor if tensor.dtype == dtype else tensor.to(dtype)).contiguous()


def as_dtype(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor in another's dtype: itself if it has that, as `to` takes longer to see."""
    return tensor if tensor.dtype == like.dtype else tensor.to(like.dtype)


def gradients_like(
    args: Arguments,
    grad_gates: Tensor,
    kernel_gates: Tensor,
    grad_bias: Tensor | None,
    grad_fields: Sequence[Tensor | None],
    grad_params: Sequence[Tensor],
    grad_initial: Sequence[Tensor],
    wanted: Sequence[str],
) -> Gradients:
    """Return the gradients that a kernel has written, in the dtypes of the arguments, if wanted.

    `kernel_gates`: the gates' gradient in kernel layout, a view of `grad_gates` or copied there.
    """
    if kernel_gates.data_ptr() != grad_gates.data_ptr():
        grad_gates.copy_(kernel_gates.reshape(grad_gates.shape))

    def like(name: str, grads: Sequence[Any], arguments: Sequence[Tensor]) -> tuple[Any, ...]:
        pairs = zip(grads, arguments, strict=True) if name in wanted else ()
        return tuple([None if grad is None else as_dtype(grad, tensor) for grad, tensor in pairs])

    bias = None
    if args.bias is not None and grad_bias is not None and "bias" in wanted:
        bias = as_dtype(grad_bias, args.bias)
    return Gradients(
        gates=grad_gates,
        bias=bias,
        fields=like("fields", grad_fields, args.fields),
        params=like("params", grad_params, args.params),
        initial=like("initial", grad_initial, args.initial),
    )


def common_chunk(tensors: Sequence[Tensor | None]) -> int:
    """Return the bytes that may be copied at once by the addresses of tensors."""
    return chunk_of(*[0 if tensor is None else tensor.data_ptr() for tensor in tensors])


def row_and_time(tensor: Tensor) -> tuple[int, int]:
    """Return the strides (B, T) of a tensor."""
    return tensor.stride(0), tensor.stride(1)


def heads_of(shape: Sequence[int]) -> tuple[int, int]:
    """Return the heads of gates of a shape, and the channels of one."""
    return (shape[3], shape[4]) if len(shape) == 5 else (1, shape[3])


def heads_of_matrices(params: Iterable[Tensor]) -> int | None:
    """Return the heads of the matrices among a cell's parameters; None if there are none."""
    return next((p.shape[0] if p.ndim == 3 else 1 for p in params if p.ndim > 1), None)


def in_matrix_heads(
    args: Arguments, otherwise: Callable[[Tensor], Tensor] = unit_stride
) -> Callable[[Tensor], Tensor]:
    """Return the conversion of gates to kernel layout: (B, T, G, H, K) in the heads of a call's
    matrices, also (B, T, G, K) in one, with adjacent channels; `otherwise` for a call without
    matrices."""
    heads = heads_of_matrices(args.params)
    return otherwise if heads is None else partial(_in_heads, heads=heads)


def _in_heads(gates: Tensor, heads: int) -> Tensor:
    if gates.ndim == 5 and gates.shape[3] != heads:
        gates = gates.flatten(3)
    gates = unit_stride(gates)
    return gates if gates.ndim == 5 or heads == 1 else gates.unflatten(3, (heads, -1))


def head_strides(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return the strides (B, T, G, H) of gates."""
    return [*strides[:3], strides[3] if len(shape) == 5 else shape[3]]


def gate_strides(interface: Interface, strides: Sequence[int]) -> list[int]:
    """Return the kernel arguments of the strides (B, T, G, H) of gates."""
    row, time, gate, head = strides
    return interface.pack("GateStrides", {"row": row, "time": time, "gate": gate, "head": head})


def new_states(program: Program, args: Arguments) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Allocate the results of a forward pass: the states, and the final ones."""
    signature, new = args.signature, args.gates.new_empty
    dtype = signature.dtype
    outputs = signature.cache((output_sizes, program), output_sizes, program, args)
    states = tuple([new(size, dtype=of_output) for size, of_output in outputs])
    if args.all_written:
        sizes = signature.cache((Arguments.state_sizes, program), args.state_sizes, program)
        return states, tuple([new((args.sequences, *size), dtype=dtype) for size in sizes])
    # Sequences without a step return their initial state.
    return states, tuple([_copy(h, dtype) for h in args.start(program)])


def new_saved(program: Program, args: Arguments) -> Tensor | None:
    """Allocate the values that a forward pass is to save; None if it is to save none."""
    if not args.options.save_values:
        return None
    return args.gates.new_empty(saved_size(program, args), dtype=args.dtype)


def new_grad_initial(args: Arguments, grad_final: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Allocate the gradients of initial states; none where initial states are absent."""
    new, dtype, initial = args.gates.new_empty, args.signature.dtype, args.initial
    if args.all_written:
        return tuple([new(h.shape, dtype=dtype) for h in initial])
    ends = zip(initial, grad_final[: len(initial)], strict=True)
    # Not zeros_like, whose strides follow the state's: kernels write contiguous ones.
    return tuple(
        [new(h.shape, dtype=dtype).zero_() if g is None else _copy(g, dtype) for h, g in ends]
    )


def sum_spans(
    x: Tensor, samples: tuple[int, ...], steps: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """Return sums over spans, the first dimension: rows, or parts of these next to each other; by
    `Arguments.samples` those of each sample (*samples, ...). steps: whether to sum over the second
    dimension too."""
    first = len(samples)
    apart = x.unflatten(0, (*samples, len(x) // math.prod(samples)))
    return apart.sum([first, first + 1] if steps else first, dtype=dtype)


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)
