"""Schedules of steps of vectors: the passes that they share, and the arguments of their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pararnn.codegen.interface import Interface, Values, Words
from pararnn.engines.arguments import Arguments, Gradients, Solution, wants
from pararnn.engines.engine import BackwardInputs
from pararnn.engines.fused.launch import Addresses, Conversion, Launch, input_values
from pararnn.engines.fused.layout import (
    gate_strides,
    gradients_like,
    head_strides,
    in_matrix_heads,
    new_grad_initial,
    new_saved,
    new_states,
    sum_spans,
    unit_stride,
)
from pararnn.engines.fused.schedule import Adjoint, KernelSchedule, Layouts, Pass
from pararnn.engines.rule import Rank, Size, rank_of_segments
from pararnn.engines.tuned import Workload
from pararnn.program.program import ELEMENTWISE, MIXING, Program


@dataclass(frozen=True)
class VectorPass(Pass):
    """Pass of a step of vectors.

    weights: dtype of the gradients of bias and params (D,). samples: see `Arguments.samples`. sums:
    launch that adds these up over spans, None where the pass does, or by samples.
    """

    weights: torch.dtype = torch.float32
    samples: tuple[int, ...] = ()
    sums: Launch | None = None

    def new_info(self, gates: Tensor) -> Tensor:
        """Allocate the counts of a forward pass."""
        return gates.new_zeros((1, 2), dtype=torch.int64)

    def new_bias(self, args: Arguments) -> Tensor | None:
        """Allocate the gradient of the bias; zero where nothing is launched."""
        new = args.gates.new_zeros if self.launch is None else args.gates.new_empty
        return None if args.bias is None else new(args.bias.shape, dtype=self.weights)

    def new_params(self, args: Arguments) -> list[Tensor]:
        """Allocate the gradients of params; zero where nothing is launched."""
        new = args.gates.new_zeros if self.launch is None else args.gates.new_empty
        return [new(p.shape, dtype=self.weights) for p in args.params]

    def backward(
        self, tensors: list[Tensor | None], weights: list[Tensor | None], wanted: Sequence[str]
    ) -> None:
        """Run a backward pass, which writes the sums of spans to the last of the tensors, and add
        these up into `weights` if wanted."""
        self.run([*tensors, *weights])
        self.add_up([tensors[-1], *weights], wanted)

    def by_sample(
        self, grad_bias: Tensor | None, grad_params: list[Tensor], partial: Tensor
    ) -> tuple[Tensor | None, list[Tensor]]:
        """Return the gradients of bias and params, by `Options.samples`, of what a pass has written
        for these and for the spans: those of matrices are, others are sums over spans."""
        if not self.samples:
            return grad_bias, grad_params
        sums = sum_spans(partial, self.samples)
        matrices = [grad.ndim > 1 for grad in grad_params]
        gates = sums.shape[1] - matrices.count(False)
        of_params = map(Tensor.contiguous, sums[:, gates:].unbind(1))
        pairs = zip(grad_params, matrices, strict=True)
        return sums[:, :gates].contiguous(), [
            g if matrix else next(of_params) for g, matrix in pairs
        ]

    def add_up(self, tensors: Sequence[Tensor | None], wanted: Sequence[str]) -> None:
        """Add up the sums of spans, the first tensor, into the others if wanted."""
        if self.sums is not None and ("bias" in wanted or "params" in wanted):
            self.sums.run(tensors)


class VectorSchedule(KernelSchedule):
    """Schedule of steps of vectors; of elementwise steps, unless a subclass takes others."""

    family = ELEMENTWISE

    def segments(self, size: Size, dtype: torch.dtype, device: torch.device) -> int:
        """Return how many segments of time run at once on cores that would be idle otherwise."""
        raise NotImplementedError

    def rank(self, program: Program, workload: Workload) -> tuple[Rank, str]:
        """Rank the loop above all but enough concurrent segments of time."""
        if not self.cuts_time:
            return super().rank(program, workload)
        _, size, dtype, device, _ = workload
        return rank_of_segments(program, self.segments(size, dtype, device), device)

    def gates_layout(self, args: Arguments) -> Conversion:
        """Return the conversion of gates to the layout in which kernels write their gradient:
        adjacent channels, in the heads of a call's matrices if it has any."""
        return in_matrix_heads(args)

    def with_saved(
        self, program: Program, args: Arguments, states: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the states of a forward pass, and behind them saved values that kernels read."""
        return states

    def forward(self, program: Program, args: Arguments) -> Solution:
        launch, tensors = self.launch(program, args)
        states, final = new_states(program, args)
        info, saved = launch.new_info(args.gates), new_saved(program, args)
        launch.run([*tensors, saved, *states, *final, info])
        return Solution(states if saved is None else (*states, saved), final, info)

    def backward(self, program: Program, args: Arguments, inputs: BackwardInputs) -> Gradients:
        """Return the gradients by one kernel, on a GPU and a small sum."""
        states, grad_states, grad_final, wanted = inputs
        grad_gates = torch.empty_like(args.gates)
        kernel_gates = self.gates_layout(args)(grad_gates)
        outputs = [s.contiguous() for s in self.with_saved(program, args, states)]
        incoming = [None if g is None else unit_stride(g) for g in grad_states]
        launch, tensors = self.launch(program, args, Adjoint(kernel_gates, outputs, incoming))
        new, (_, _, channels), dtype = args.gates.new_empty, args.signature.size, args.dtype
        grad_fields = [
            new(field.shape, dtype=dtype) if wants(wanted, "fields", i) else None
            for i, field in enumerate(args.fields)
        ]
        grad_initial = new_grad_initial(args, grad_final)
        grad_bias, grad_params = launch.new_bias(args), launch.new_params(args)
        weights = len(program.gates) + len(args.channel_params)
        partial = new((launch.spans, weights, channels), dtype=dtype)
        tensors.append(outputs.pop() if len(outputs) > program.num_states else None)
        tensors += [*outputs, *incoming]
        tensors += [None if g is None else g.contiguous() for g in grad_final]
        tensors += (kernel_gates, *grad_fields, *(grad_initial or (None,) * len(outputs)), partial)
        launch.backward(tensors, [grad_bias, *grad_params], wanted)
        grad_bias, grad_params = launch.by_sample(grad_bias, grad_params, partial)
        grads = (grad_bias, grad_fields, grad_params, grad_initial)
        return gradients_like(args, grad_gates, kernel_gates, *grads, wanted)


class MixingSchedule(VectorSchedule):
    """Schedule of steps that mix channels, whose backward passes read saved pre-activations."""

    family = MIXING

    def with_saved(
        self, program: Program, args: Arguments, states: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the states of a forward pass, and pre-activations behind them: those that it has
        saved, or those of a forward pass whose steps start from these states."""
        if args.options.save_values:
            return states
        args, starts = args.with_options(save_values=True), [state.contiguous() for state in states]
        launch, tensors = self.launch(program, args, starts=starts)
        saved = new_saved(program, args)
        assert saved is not None
        launch.run([*tensors, saved, *starts, *(None for _ in starts), None])
        return (*states, saved)


def problem_values(
    interface: Interface,
    addresses: Addresses,
    layouts: Layouts,
    args: Arguments,
    strides: Sequence[int],
    **inputs: Words,
) -> dict[str, Words]:
    """Return the arguments of a kernel, by field of its problem.

    `args` are in kernel layout, strides those (B, T, G, H) of its gates. inputs: fields of `Inputs`
    that a target has in addition.
    """
    counts, (rows, length, _) = interface.counts, args.size
    fields: Values = {
        "rows": rows,
        "length": length,
        "gate_strides": gate_strides(interface, strides),
        **input_values(addresses, counts, args),
        **inputs,
    }
    values: dict[str, Words] = {"in": interface.pack("Inputs", fields), "sums": addresses.next()}
    values["states"] = addresses.array(counts.states)
    if layouts.gates is None:
        return values | {"final": addresses.array(counts.states), "info": addresses.next()}
    grad_strides = head_strides(args.gates.shape, layouts.gates)
    return values | {
        "grad_gate_strides": gate_strides(interface, grad_strides),
        "grad_row": [strides[0] if strides else 0 for strides in layouts.incoming],
        "grad_time": [strides[1] if strides else 0 for strides in layouts.incoming],
        "grad_states": addresses.array(counts.states),
        "grad_final": addresses.array(counts.states),
        "grad_gates": addresses.next(),
        "grad_fields": addresses.array(counts.fields),
        "grad_initial": addresses.array(counts.states),
        "partial": addresses.next(),
        "bias": addresses.next(),
        "params": addresses.array(counts.params),
    }
