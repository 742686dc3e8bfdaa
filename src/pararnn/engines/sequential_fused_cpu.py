"""(sequential, fused) on the CPU: the loop over time, compiled; forward and backward."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from pararnn.codegen.cpp import kernels_of
from pararnn.codegen.emit import why_no_kernels
from pararnn.engines.base import Arguments, Engine, Gradients, Solution
from pararnn.engines.layouts import addresses, by_head, copied, narrow, unit_stride
from pararnn.program import Program

MIN_HEAD_CHANNELS = 16  # narrower heads waste vector lanes: their gates are copied side by side


def _forward(program: Program, args: Arguments, on_failure: str) -> Solution:
    gates = _by_head(args.gates)
    prepared = _Prepared(args, gates)
    size = (*gates.shape[:2], args.initial[0].shape[-1])
    states = tuple(args.gates.new_empty(size) for _ in args.initial)
    # Sequences without a step keep their initial state.
    final = tuple(copied(h, args.dtype) for h in args.initial)
    kernel = kernels_of(program, args.gates.dtype).forward
    kernel(prepared.sizes, [*prepared.addresses, *addresses([*states, *final])])
    return Solution(states, final, torch.zeros((1, 2), dtype=torch.int64))


def _backward(
    program: Program,
    args: Arguments,
    states: tuple[Tensor, ...],
    grad_states: tuple[Tensor | None, ...],
    grad_final: tuple[Tensor | None, ...],
) -> Gradients:
    gates = _by_head(args.gates)
    prepared = _Prepared(args, gates)
    channels = args.initial[0].shape[-1]
    num_gates, weights = gates.shape[2], gates.shape[2] + len(args.params)
    saved = [s.contiguous() for s in states]
    arriving = [None if g is None else unit_stride(g) for g in grad_states]
    arriving_final = [None if g is None else g.contiguous() for g in grad_final]
    grad_gates = torch.empty_like(args.gates)
    written = _by_head(grad_gates)
    grad_fields = [gates.new_empty(f.shape, dtype=args.dtype) for f in args.fields]
    grad_initial = [
        torch.zeros(h.shape, dtype=args.dtype) if g is None else copied(g, args.dtype)
        for h, g in zip(args.initial, grad_final, strict=True)
    ]
    partial = gates.new_empty((gates.shape[0], weights, channels), dtype=args.dtype)
    grad_bias = gates.new_empty((num_gates, channels), dtype=args.dtype)
    grad_params = [gates.new_empty(channels, dtype=args.dtype) for _ in args.params]
    sizes = [*prepared.sizes, *_gate_strides(written)]
    for grad in arriving:
        sizes += (0, 0) if grad is None else grad.stride()[:2]
    outputs = [written, *grad_fields, *grad_initial, partial, *grad_bias.unbind(), *grad_params]
    tensors = [*saved, *arriving, *arriving_final, *outputs]
    kernel = kernels_of(program, args.gates.dtype).backward
    kernel(sizes, [*prepared.addresses, *addresses(tensors)])
    if written.data_ptr() != grad_gates.data_ptr():
        grad_gates.copy_(written.reshape(grad_gates.shape))
    return Gradients(
        gates=grad_gates,
        bias=None if args.bias is None else grad_bias.to(args.bias.dtype),
        fields=tuple(g.to(f.dtype) for g, f in zip(grad_fields, args.fields, strict=True)),
        params=tuple(grad_params),
        initial=tuple(g.to(h.dtype) for g, h in zip(grad_initial, args.initial, strict=True)),
    )


class _Prepared:
    """What both kernels begin with: tensors in the layouts that they take, sizes and addresses."""

    def __init__(self, args: Arguments, gates: Tensor) -> None:
        batch, steps, _, heads, channels = gates.shape
        fields = [narrow(f, args.dtype) for f in args.fields]
        bias = None if args.bias is None else args.bias.to(args.dtype).contiguous()
        seq = None if args.seq is None else args.seq.contiguous()
        reset = None if args.reset is None else args.reset.contiguous()
        params = [p.contiguous() for p in args.params]
        initial = [h.to(args.dtype).contiguous() for h in args.initial]
        self.tensors = [gates, bias, seq, reset, *fields, *params, *initial]  # keeps copies alive
        self.sizes = [batch, steps, heads, channels, int(args.reverse), torch.get_num_threads()]
        self.sizes += _gate_strides(gates)
        for field in fields:
            self.sizes += (*field.stride()[:2], int(field.shape[-1] > 1))
        self.addresses = [_openmp(), *addresses(self.tensors)]


def _by_head(gates: Tensor) -> Tensor:
    """Gates as kernels take them; narrow heads side by side."""
    if gates.ndim == 5 and gates.shape[-1] < MIN_HEAD_CHANNELS:
        gates = gates.flatten(3)
    return by_head(gates)


def _gate_strides(gates: Tensor) -> tuple[int, ...]:
    return gates.stride()[:4]


@cache
def _openmp() -> int:
    """The address of PyTorch's OpenMP entry, 0 where it has none that we can call."""
    if not torch.backends.openmp.is_available():
        return 0
    entry = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    return 0 if entry is None else ctypes.cast(entry, ctypes.c_void_p).value or 0


ENGINE = Engine("sequential", "fused", _forward, _backward, why_no_kernels, kernels_of)
