"""Conversion of the op's arguments to a solver's System: direction, sequences, resets, padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pararnn.base import private
from pararnn.engines.arguments import Arguments, Gradients
from pararnn.engines.fused.layout import gradients_like
from pararnn.program.program import Program
from pararnn.solvers.boundaries import Boundaries, first_real
from pararnn.solvers.heads import HeadSystem, unroll_heads
from pararnn.solvers.system import System


def to_system(program: Program, args: Arguments) -> System:
    """Convert the arguments to a System in forward time; differentiable."""
    inputs, (reset, boundaries) = step_inputs(args), _boundaries_of(args)
    initial = torch.stack([h.to(args.dtype) for h in args.initial], 1)
    if boundaries is None:
        if reset is None:
            return System(program, inputs, args.params, initial)
        start = initial.new_zeros(()).expand(*reset.shape, *initial.shape[1:])
        return System(program, inputs, args.params, initial, reset.unsqueeze(-1), start)
    begins, padding = boundaries.begins, boundaries.padding
    fresh = begins | padding if reset is None else begins | padding | reset
    nothing = initial.new_zeros(begins.shape[0], *initial.shape[1:])
    start = torch.where(begins[..., None, None], boundaries.initial(initial), 0.0)
    *rows, start = fill_padding([*inputs, start], padding)
    masks = (fresh.unsqueeze(-1), start, padding.unsqueeze(-1))
    return System(program, tuple(rows), args.params, nothing, *masks, boundaries=boundaries)


def to_head_system(program: Program, args: Arguments) -> HeadSystem:
    """Convert the arguments of a matrix cell to a system in forward time; differentiable."""
    sizes, (zero, boundaries) = program.step.head, _boundaries_of(args)
    gates = in_order(sizes.by_head(args.gates), args.options.reverse).to(args.dtype)
    if args.bias is not None:
        gates = gates + args.bias.to(args.dtype).view(sizes.heads, sizes.width)
    initial = tuple([h.to(args.dtype) for h in args.initial])
    if boundaries is None:
        return HeadSystem(program, gates, args.params, initial, zero)
    (gates,) = fill_padding([gates], boundaries.padding)
    zero = boundaries.padding if zero is None else zero | boundaries.padding
    at_padding = tuple(map(boundaries.first_start, initial))
    return HeadSystem(program, gates, args.params, initial, zero, boundaries, at_padding)


def _boundaries_of(args: Arguments) -> tuple[Tensor | None, Boundaries | None]:
    """Return a call's resets and boundaries in forward time; None where there are none."""
    reverse = args.options.reverse
    reset = None if args.reset is None else in_order(args.reset, reverse)
    if args.seq is None:
        return reset, None
    return reset, Boundaries.of(in_order(args.seq, reverse), reset)


def solve_heads(program: Program, args: Arguments) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a matrix cell's outputs (B, T, H, V) and final states by the loop; differentiable."""
    output, final = unroll_heads(to_head_system(program, args))
    return in_order(output, args.options.reverse).to(args.gates.dtype), final


def step_inputs(args: Arguments) -> tuple[Tensor, ...]:
    """Return gates, bias added, and fields for the step: (B, T, D) each, in the compute dtype."""
    dtype = args.dtype
    gates = args.gates.flatten(3) if args.gates.ndim == 5 else args.gates
    gates = in_order(gates, args.options.reverse).to(dtype)
    if args.bias is not None:
        gates = gates + args.bias.to(dtype)
    fields = (in_order(f, args.options.reverse).to(dtype) for f in args.fields)
    return (*gates.unbind(2), *fields)


def output_states(args: Arguments, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Convert states (B, T, D) to the arguments' time order and I/O dtype, for the op to return."""
    return tuple(in_order(s, args.options.reverse).to(args.gates.dtype) for s in states)


def state_cotangent(
    args: Arguments,
    boundaries: Boundaries | None,
    like: Tensor,
    grad_states: tuple[Tensor | None, ...],
    grad_final: tuple[Tensor | None, ...],
) -> Tensor:
    """Return incoming gradients as one cotangent (B, T, N, D) in forward time."""
    cotangent = torch.zeros_like(like)
    for n, grad in enumerate(grad_states):
        if grad is not None:
            cotangent[:, :, n] += in_order(grad, args.options.reverse)
    for n, grad in enumerate(grad_final):
        if grad is None or not like.shape[1]:
            continue
        if boundaries is None:
            cotangent[:, -1, n] += grad
        else:
            at_end = grad[boundaries.seq[boundaries.last].long()]
            cotangent[:, :, n][boundaries.last] += at_end.to(like.dtype)
    return cotangent


def to_gradients(
    args: Arguments,
    boundaries: Boundaries | None,
    grad_previous: Tensor,
    grad_inputs: tuple[Tensor, ...],
    grad_params: tuple[Tensor, ...],
    grad_final: tuple[Tensor | None, ...],
    wanted: Sequence[str],
) -> Gradients:
    """Convert a System's gradients to those of the gates and of the wanted arguments."""
    num_gates, reverse = args.gates.shape[2], args.options.reverse
    gates = torch.stack(grad_inputs[:num_gates], 2)
    bias = gates.sum((0, 1)) if "bias" in wanted else None
    fields = [in_order(grad, reverse) for grad in grad_inputs[num_gates:]]
    initial: tuple[Tensor, ...] = ()
    if "initial" in wanted:
        initial = _grad_initial(args, boundaries, grad_previous, grad_final)
    grad_gates = in_order(gates, reverse).reshape(args.gates.shape).to(args.gates.dtype)
    laid_out = torch.empty_like(args.gates)
    if grad_gates.stride() == laid_out.stride():
        laid_out = grad_gates
    others = (bias, fields, grad_params, initial)
    return gradients_like(args, laid_out, grad_gates, *others, wanted)


def own_memory(
    outputs: Sequence[Tensor], args: Arguments, incoming: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """Return the outputs contiguous and sharing no memory: ops may not return arguments."""
    inputs = (args.gates, *args.params, *args.initial, *incoming)
    storages = {t.untyped_storage().data_ptr() for t in inputs}
    results = []
    for output in outputs:
        tensor = output.contiguous()
        if tensor.untyped_storage().data_ptr() in storages:
            tensor = tensor.clone()
        storages.add(tensor.untyped_storage().data_ptr())
        results.append(private.unsafe_view(tensor, tensor.shape))
    return tuple(results)


def _grad_initial(
    args: Arguments,
    boundaries: Boundaries | None,
    grad_previous: Tensor,
    grad_final: tuple[Tensor | None, ...],
) -> tuple[Tensor, ...]:
    out = []
    steps = grad_previous.shape[1]
    for n, (initial, final) in enumerate(zip(args.initial, grad_final, strict=True)):
        grad = torch.zeros_like(initial, dtype=grad_previous.dtype)
        if boundaries is None:
            if steps:
                grad = grad_previous[:, 0, n]
                if args.reset is not None:
                    first = args.reset[:, -1 if args.options.reverse else 0]
                    grad = grad.masked_fill(first.unsqueeze(-1), 0)
            elif final is not None:
                grad = final
        else:
            ids = boundaries.seq[boundaries.begins].long()
            grad = grad.index_put(
                (ids,), grad_previous[:, :, n][boundaries.begins], accumulate=True
            )
            if final is not None:
                has_step = torch.zeros_like(initial[:, :1], dtype=torch.bool)
                has_step[boundaries.seq[boundaries.last].long()] = True
                grad = grad + final.masked_fill(has_step, 0)
        out.append(grad.to(initial.dtype))
    return tuple(out)


def fill_padding(inputs: Sequence[Tensor], padding: Tensor) -> tuple[Tensor, ...]:
    """Replace what steps read, (B, T, ...), at padding (B, T) by that of the first real step.

    Steps are computed at padding too, and 0 times a non-finite value there is NaN in the gradients
    of parameters. What a real step reads is known to be in the step's domain; zeros may not be.
    Ones replace it where there is no real step at all.
    """
    if not padding.numel():
        return tuple(inputs)
    first, nowhere = first_real(padding), padding.all()

    def fill(x: Tensor) -> Tensor:
        real = x.detach().flatten(0, 1).index_select(0, first).nan_to_num(0, 0, 0)
        at_padding = padding.view(*padding.shape, *[1] * (x.ndim - 2))
        return torch.where(at_padding, real.masked_fill(nowhere, 1), x)

    return tuple(fill(x) for x in inputs)


def in_order(x: Tensor, reverse: bool) -> Tensor:
    """Return a series (B, T, ...) in the order of processing, or back in the caller's."""
    return x.flip(1) if reverse else x
