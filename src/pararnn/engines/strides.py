"""Tensors as kernels take them: adjacent channels, heads by stride."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pararnn.codegen.interface import Interface, Values
from pararnn.engines.base import Arguments, Gradients


def by_head(gates: Tensor) -> Tensor:
    """Gates as (B, T, G, H, D/H) with adjacent channels; a copy only where strides demand it."""
    return unit_stride(gates.unsqueeze(3) if gates.ndim == 4 else gates)


def unit_stride(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it, with adjacent elements in its last dimension."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def narrow(field: Tensor, dtype: torch.dtype) -> Tensor:
    """A field in the compute dtype; one value a step stays (B, T, 1)."""
    if field.stride(-1) == 0:
        return field[..., :1].to(dtype)
    return unit_stride(field.to(dtype))


def copied(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy."""
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)


def gradients_like(
    args: Arguments,
    grad_gates: Tensor,
    written: Tensor,
    grad_bias: Tensor | None,
    grad_fields: Sequence[Tensor],
    grad_params: Sequence[Tensor],
    grad_initial: Sequence[Tensor],
    wanted: Sequence[str],
) -> Gradients:
    """What a kernel has written, in the dtypes of the arguments, as far as it is wanted.

    `written`: gradients of the gates as the kernel takes them, a view of `grad_gates` or to be
    copied there.
    """
    if written.data_ptr() != grad_gates.data_ptr():
        grad_gates.copy_(written.reshape(grad_gates.shape))

    def like(name: str, grads: Sequence[Tensor], given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(map(as_dtype, grads, given)) if name in wanted else ()

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


def as_dtype(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor in another's dtype: itself where it has that, as `to` takes longer to see."""
    return tensor if tensor.dtype == like.dtype else tensor.to(like.dtype)


def row_and_time(grad: Tensor | None) -> tuple[int, ...]:
    """The strides (B, T) of a gradient that arrives; 0 for None."""
    return (0, 0) if grad is None else grad.stride()[:2]


def adjoint_values(
    saved: Sequence[Tensor],
    arriving: Sequence[Tensor | None],
    arriving_final: Sequence[Tensor | None],
    written: Tensor,
    grad_fields: Sequence[Tensor],
    partial: Tensor,
) -> Values:
    """What backward kernels of all targets read and write, by name: see codegen/interface.py."""
    strides = [row_and_time(grad) for grad in arriving]
    return {
        "grad_row": [row for row, _ in strides],
        "grad_time": [time for _, time in strides],
        "states": addresses(saved),
        "grad_states": addresses(arriving),
        "grad_final": addresses(arriving_final),
        "grad_gates": written.data_ptr(),
        "grad_fields": addresses(grad_fields),
        "partial": partial.data_ptr(),
    }


def address(tensor: Tensor | None) -> int:
    """An address for a kernel; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def addresses(tensors: Iterable[Tensor | None]) -> list[int]:
    """Addresses for a kernel, as `address`."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def gate_strides(interface: Interface, strides: Sequence[int]) -> list[int]:
    """The strides (B, T, G, H, ...) of `by_head` gates for a kernel."""
    row, time, gate, head, *_ = strides
    return interface.packed("GateStrides", {"row": row, "time": time, "gate": gate, "head": head})
