"""Passes of matrix cells: launches packed once a signature, and sums over rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from pararnn.codegen.interface import Interface, Words
from pararnn.engines.arguments import Arguments, Gradients, Solution, TensorSize
from pararnn.engines.engine import BackwardInputs
from pararnn.engines.fused.launch import (
    Addresses,
    Conversions,
    Template,
    conversions_for,
    input_values,
    pack_known,
    template_of,
)
from pararnn.engines.fused.layout import (
    gradients_like,
    new_grad_initial,
    new_states,
    sum_spans,
    unit_stride,
)
from pararnn.engines.fused.schedule import Adjoint, KernelSchedule, Layouts
from pararnn.program.program import MATRIX, Program


class MatrixSchedule(KernelSchedule):
    """Schedule of matrix cells, a step at a time."""

    family = MATRIX
    min_size = 1
    """Least steps of a segment of time, where segments run as rows."""

    def cores(self, device: torch.device) -> int:
        """Return the cores of a device for which segments of time are planned."""
        raise NotImplementedError

    def cores_of_rank(self, device: torch.device) -> int:
        """Return the cores that `auto` fills with segments of time, 0 if it never cuts time."""
        return 0

    def conversions(self, args: Arguments, backward: bool) -> Conversions:
        return conversions_for(args, unit_stride, args.dtype, args.dtype)

    def stored(self, program: Program, args: Arguments) -> list[TensorSize]:
        """Return nothing: checkpoints are among the outputs."""
        return []

    def kept(self, outputs: Sequence[Tensor], stored: Sequence[Tensor]) -> Tensor | None:
        """Return what a backward pass reads of a forward pass, among its outputs and what it has
        stored: the checkpoints."""
        return outputs[1]

    def new_sums(self, program: Program, args: Arguments, launch: Any) -> list[Tensor | None]:
        """Allocate further results of a backward pass, of which `sums_of` is made."""
        return []

    def sums_of(
        self, program: Program, args: Arguments, launch: Any, results: Sequence[Tensor | None]
    ) -> Iterable[tuple[int, Tensor]]:
        """Return terms of the gradients of parameters that a backward pass has not added up, by the
        number of the parameter."""
        return ()

    def forward(self, program: Program, args: Arguments) -> Solution:
        launch, tensors = self.launch(program, args)
        outputs, final = new_states(program, args)
        new = args.gates.new_empty
        stored = tuple([new(size, dtype=dtype) for size, dtype in self.stored(program, args)])
        launch.run([*tensors, outputs[0], self.kept(outputs, stored), *final])
        info = args.gates.new_zeros((1, 2), dtype=torch.int64)
        return Solution((*outputs, *stored), final, info)

    def backward(self, program: Program, args: Arguments, inputs: BackwardInputs) -> Gradients:
        """Run the backward pass from what a forward pass has kept, and add up the gradients of
        parameters."""
        states, grad_states, grad_final, wanted = inputs
        sizes, grad_output = program.step.head, grad_states[0]
        grad_gates = torch.empty_like(args.gates)
        kernel_gates = sizes.by_head(unit_stride(grad_gates))
        incoming = None if grad_output is None else unit_stride(grad_output)
        launch, tensors = self.launch(program, args, Adjoint(kernel_gates, (), [incoming]))
        grad_initial = new_grad_initial(args, grad_final)
        counts = program.param_numbers
        dtype = args.signature.dtype
        partial = args.gates.new_zeros(
            (launch.spans, sizes.heads, sizes.width + sum(counts)), dtype=dtype
        )
        kept = self.kept(states, states[2:])
        assert kept is not None
        tensors += [kept.contiguous(), incoming]
        tensors += [None if grad is None else grad.contiguous() for grad in grad_final]
        # Sequences without a step have no gradient.
        memories = args.params[len(counts) :]
        grad_memories = [memory.new_zeros(memory.shape, dtype=dtype) for memory in memories]
        tensors += [kernel_gates, *(grad_initial or [None] * len(grad_final)), partial]
        others = self.new_sums(program, args, launch)
        launch.run([*tensors, *grad_memories, *others])
        bias, grad_params = of_heads(program, sum_spans(partial, args.samples))
        if "params" in wanted:
            for number, grad in self.sums_of(program, args, launch, others):
                grad_params[number] = grad_params[number] + grad
        grad_params += grad_memories
        return gradients_like(
            args, grad_gates, kernel_gates, bias, (), grad_params, grad_initial, wanted
        )


def of_heads(program: Program, sums: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of the bias and of params, of those of each head, (*samples, H, numbers
    of gates, then of params)."""
    sizes, shapes = program.step.head, program.step.cls.params
    bias, *grads = sums.split([sizes.width, *program.param_numbers], -1)
    of_params = []
    for name, grad in zip(program.params, grads, strict=True):
        size = sizes.param(shapes[name].kind)
        full = grad.contiguous().view(*grad.shape[:-2], *size) if size else grad.sum([-2, -1])
        of_params.append(full)
    return bias.contiguous().flatten(-2).unsqueeze(-2), of_params


def template_for(
    program: Program,
    args: Arguments,
    layouts: Layouts,
    interface: Interface,
    others: Mapping[str, Words],
) -> Template:
    """Pack the arguments of a pass on calls of a signature, `args` in kernel layout: behind those
    of the call, its tensors are in the order of the fields.

    others: fields of a target that are no addresses of tensors, of `Inputs` too.
    """
    addresses, counts = Addresses(), interface.counts
    lengths = [*args.lengths_of_calls(program).values()] if program.memory else []
    of_call, (batch, steps, _) = input_values(addresses, counts, args), args.size
    params, sizes = cast("list[int]", of_call["params"]), program.step.head
    inputs: dict[str, Words] = {
        **of_call,
        "params": params[: counts.params],
        "memories": params[counts.params :],
        "memory_lengths": lengths,
        "lines": lengths,
        "rows": batch,
        "length": steps,
        "heads": sizes.heads,
        "reverse": int(args.options.reverse),
        **head_strides_of("gate", sizes.by_head(args.gates).stride()),
        **others,
    }
    values: dict[str, Words] = {"in": pack_known(interface, "Inputs", inputs), **others}
    if layouts.gates is not None:
        (of_output,) = layouts.incoming
        values |= head_strides_of("output", of_output or (0, 0, 0))
        values |= head_strides_of("grad", layouts.gates)
    return template_of(pack_known(interface, layouts.struct("Launch"), values, addresses))


def head_strides_of(prefix: str, strides: Sequence[int]) -> dict[str, Words]:
    """Return the fields of strides (B, T, H, ...), by a prefix."""
    names = ("row", "time", "head")
    return {f"{prefix}_{name}": stride for name, stride in zip(names, strides[:3], strict=True)}
