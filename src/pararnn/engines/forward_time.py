"""Conversion of the op's arguments to a solver's System: direction, sequences, resets, padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pararnn.base import private
from pararnn.engines.arguments import Arguments, Gradients
from pararnn.program.program import Program
from pararnn.solvers.heads import Boundaries, HeadSystem, unroll_heads
from pararnn.solvers.system import System


@dataclass(frozen=True)
class Edges:
    """Ends of sequences in processing order; None: row b is sequence b.

    begins (B, T): steps that start from `initial[seq]`; last (B, T): last steps of a sequence.
    """

    seq: Tensor | None = None
    begins: Tensor | None = None
    last: Tensor | None = None


def to_system(program: Program, args: Arguments) -> tuple[System, Edges]:
    """Convert the arguments to a System in forward time; differentiable."""
    inputs = step_inputs(args)
    initial = torch.stack([h.to(args.dtype) for h in args.initial], 1)
    reset = None if args.reset is None else in_order(args.reset, args.options.reverse)
    if args.seq is None:
        if reset is None:
            return System(program, inputs, args.params, initial), Edges()
        start = initial.new_zeros(()).expand(*reset.shape, *initial.shape[1:])
        fresh = reset.unsqueeze(-1)
        return System(program, inputs, args.params, initial, fresh, start), Edges()
    seq = in_order(args.seq, args.options.reverse)
    batch, _ = seq.shape
    begins, last, padding = _edges_of(seq, reset)
    fresh = begins | padding if reset is None else begins | padding | reset
    nothing = initial.new_zeros(batch, *initial.shape[1:])
    some = initial.shape[0] > 0  # len() would be a constant in compiled code
    rows = initial[seq.clamp(min=0).long()] if some else nothing.unsqueeze(1)
    start = torch.where(begins[..., None, None], rows, 0.0)
    masks = (fresh.unsqueeze(-1), start, padding.unsqueeze(-1))
    inputs = without_padding(inputs, padding)
    system = System(program, inputs, args.params, nothing, *masks)
    return system, Edges(seq, begins, last)


def _edges_of(seq: Tensor, reset: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the steps, bool (B, T), that start from `initial[seq]`, last ones, and padding."""
    edge = seq.new_full((seq.shape[0], 1), -2)
    padding = seq < 0
    begins = (seq != torch.cat([edge, seq[:, :-1]], 1)) & ~padding
    last = (seq != torch.cat([seq[:, 1:], edge], 1)) & ~padding
    return begins if reset is None else begins & ~reset, last, padding


def to_head_system(program: Program, args: Arguments) -> HeadSystem:
    """Convert the arguments of a matrix cell to a system in forward time; differentiable."""
    sizes, reverse = program.head_sizes, args.options.reverse
    assert sizes is not None
    gates = in_order(sizes.by_head(args.gates), reverse).to(args.dtype)
    if args.bias is not None:
        gates = gates + args.bias.to(args.dtype).view(sizes.heads, sizes.width)
    zero = None if args.reset is None else in_order(args.reset, reverse)
    marks = None
    if args.seq is not None:
        seq = in_order(args.seq, reverse)
        marks = Boundaries(seq, *_edges_of(seq, zero))
        (gates,) = without_padding([gates], marks.padding)
        zero = marks.padding if zero is None else zero | marks.padding
    initial = [h.to(args.dtype) for h in args.initial]
    return HeadSystem(program, gates, args.params, tuple(initial), zero, marks)


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


def final_states(args: Arguments, edges: Edges, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the last state of each sequence, (S, D) for each of the states (B, T, D), sharing no
    memory. An empty sequence's is its initial state.
    """
    pairs = [(h.to(s.dtype), s) for h, s in zip(args.initial, states, strict=True)]
    if edges.seq is None or edges.last is None:
        # Without a step they still depend on all that the states depend on.
        return tuple([s[:, -1].clone() if s.shape[1] else h + s.sum(1) for h, s in pairs])
    ids = edges.seq[edges.last].long()
    return tuple([h.index_put((ids,), s[edges.last]) for h, s in pairs])


def output_states(args: Arguments, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Convert states (B, T, D) to the arguments' time order and I/O dtype, for the op to return."""
    return tuple(in_order(s, args.options.reverse).to(args.gates.dtype) for s in states)


def state_cotangent(
    args: Arguments,
    edges: Edges,
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
        if edges.seq is None or edges.last is None:
            cotangent[:, -1, n] += grad
        else:
            at_end = grad[edges.seq[edges.last].long()]
            cotangent[:, :, n][edges.last] += at_end.to(like.dtype)
    return cotangent


def to_gradients(
    args: Arguments,
    edges: Edges,
    grad_previous: Tensor,
    grad_inputs: tuple[Tensor, ...],
    grad_params: tuple[Tensor, ...],
    grad_final: tuple[Tensor | None, ...],
    wanted: Sequence[str],
) -> Gradients:
    """Convert a System's gradients to those of the gates and of the wanted arguments."""
    num_gates = args.gates.shape[2]
    gates, bias = torch.stack(grad_inputs[:num_gates], 2), None
    if args.bias is not None and "bias" in wanted:
        bias = gates.sum((0, 1)).to(args.bias.dtype)
    fields = tuple(
        in_order(g, args.options.reverse).to(f.dtype)
        for g, f in zip(grad_inputs[num_gates:], args.fields, strict=True)
        if "fields" in wanted
    )
    initial: tuple[Tensor, ...] = ()
    if "initial" in wanted:
        initial = _grad_initial(args, edges, grad_previous, grad_final)
    grad_gates = (
        in_order(gates, args.options.reverse).reshape(args.gates.shape).to(args.gates.dtype)
    )
    laid_out = torch.empty_like(args.gates)
    if grad_gates.stride() != laid_out.stride():
        grad_gates = laid_out.copy_(grad_gates)
    return Gradients(
        gates=grad_gates,
        bias=bias,
        fields=fields,
        params=grad_params,
        initial=initial,
    )


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
    edges: Edges,
    grad_previous: Tensor,
    grad_final: tuple[Tensor | None, ...],
) -> tuple[Tensor, ...]:
    out = []
    steps = grad_previous.shape[1]
    for n, (initial, final) in enumerate(zip(args.initial, grad_final, strict=True)):
        grad = torch.zeros_like(initial, dtype=grad_previous.dtype)
        if edges.seq is None or edges.begins is None or edges.last is None:
            if steps:
                grad = grad_previous[:, 0, n]
                if args.reset is not None:
                    first = args.reset[:, -1 if args.options.reverse else 0]
                    grad = grad.masked_fill(first.unsqueeze(-1), 0)
            elif final is not None:
                grad = final
        else:
            ids = edges.seq[edges.begins].long()
            grad = grad.index_put((ids,), grad_previous[:, :, n][edges.begins], accumulate=True)
            if final is not None:
                has_step = torch.zeros_like(initial[:, :1], dtype=torch.bool)
                has_step[edges.seq[edges.last].long()] = True
                grad = grad + final.masked_fill(has_step, 0)
        out.append(grad.to(initial.dtype))
    return tuple(out)


def without_padding(inputs: Sequence[Tensor], padding: Tensor) -> tuple[Tensor, ...]:
    """Replace inputs (B, T, ...) at padding (B, T) by those of the first real step.

    Steps are computed at padding too, and 0 times a non-finite value there is NaN in the gradients
    of parameters. A real step's inputs are known to be in the step's domain; zeros may not be. Ones
    replace them where there is no real step at all.
    """
    if not padding.numel():
        return tuple(inputs)
    first = (~padding).flatten().to(torch.uint8).argmax(0, keepdim=True)
    nowhere = padding.all()

    def fill(x: Tensor) -> Tensor:
        real = x.detach().flatten(0, 1).index_select(0, first).nan_to_num(0, 0, 0)
        at_padding = padding.view(*padding.shape, *[1] * (x.ndim - 2))
        return torch.where(at_padding, real.masked_fill(nowhere, 1), x)

    return tuple(fill(x) for x in inputs)


def in_order(x: Tensor, reverse: bool) -> Tensor:
    """Return a series (B, T, ...) in the order of processing, or back in the caller's."""
    return x.flip(1) if reverse else x
