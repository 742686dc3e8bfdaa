"""Passes of matrix cells: launches packed once a signature, and sums over rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from pararnn.codegen.families import interface_of
from pararnn.codegen.interface import Counts, Words
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

    def forward(self, program: Program, args: Arguments) -> Solution:
        """Run the forward pass."""
        launch, tensors = self.launch(program, args)
        outputs, final = new_states(program, args)
        launch.run([*tensors, *outputs, *final])
        return Solution(outputs, final, args.gates.new_zeros((1, 2), dtype=torch.int64))

    def backward(self, program: Program, args: Arguments, inputs: BackwardInputs) -> Gradients:
        """Run the backward pass from the checkpoints of a forward pass, the second of `states`."""
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
        tensors += [states[1].contiguous(), incoming]
        tensors += [None if grad is None else grad.contiguous() for grad in grad_final]
        # Sequences without a step have no gradient.
        memories = args.params[len(counts) :]
        grad_memories = [memory.new_zeros(memory.shape, dtype=dtype) for memory in memories]
        tensors += [kernel_gates, *(grad_initial or [None] * len(grad_final)), partial]
        tensors += grad_memories
        launch.run(tensors)
        sums = sum_spans(partial, args.samples)
        bias, grad_params = of_heads(program, sums)
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
    target: str,
    inputs: Mapping[str, Words],
    others: Mapping[str, Words],
    memory: Iterable[str] = (),
) -> Template:
    """Pack the arguments of a pass on calls of a signature, `args` in kernel layout.

    inputs: the target's additional fields of `Inputs`. others, memory: those of a backward pass,
    and the names of its temporaries.
    """
    interface, addresses = interface_of(program, target, MatrixSchedule.solver), Addresses()
    counts = interface.counts
    lengths = [*args.lengths_of_calls(program).values()] if program.memory else []
    values = {**words_of_inputs(program, args, addresses, counts), "memory_lengths": lengths}
    problem: dict[str, Words] = {"in": pack_known(interface, "Inputs", values | dict(inputs))}
    if layouts.gates is None:
        problem |= {"output": addresses.next(), "memory": addresses.next()}
        problem["final"] = addresses.array(counts.states)
        return template_of(interface.pack("ForwardLaunch", problem))
    problem |= {
        "memory": addresses.next(),
        **words_of_gradients(layouts, addresses, counts),
        "grad_memories": addresses.array(counts.memories),
    }
    problem |= {**others, **{name: addresses.next() for name in memory}}
    return template_of(pack_known(interface, "BackwardLaunch", problem))


def words_of_inputs(
    program: Program, args: Arguments, addresses: Addresses, counts: Counts
) -> dict[str, Words]:
    """Return the fields of `Inputs` that every pass of matrix cells has."""
    of_call, (batch, steps, _) = input_values(addresses, counts, args), args.size
    params, sizes = cast("list[int]", of_call["params"]), program.step.head
    return {
        **of_call,
        "params": params[: counts.params],
        "memories": params[counts.params :],
        "rows": batch,
        "length": steps,
        "heads": sizes.heads,
        "reverse": int(args.options.reverse),
        **head_strides_of("gate", sizes.by_head(args.gates).stride()),
    }


def words_of_gradients(layouts: Layouts, addresses: Addresses, counts: Counts) -> dict[str, Words]:
    """Return the fields that every backward pass has, of incoming gradients and its results."""
    (of_output,), of_gates = layouts.incoming, layouts.gates
    assert of_gates is not None
    return {
        **head_strides_of("output", of_output or (0, 0, 0)),
        "grad_output": addresses.next(),
        "grad_final": addresses.array(counts.states),
        **head_strides_of("grad", of_gates),
        "grad_gates": addresses.next(),
        "grad_initial": addresses.array(counts.states),
        "partial": addresses.next(),
    }


def head_strides_of(prefix: str, strides: Sequence[int]) -> dict[str, Words]:
    """Return the fields of strides (B, T, H, ...), by a prefix."""
    names = ("row", "time", "head")
    return {f"{prefix}_{name}": stride for name, stride in zip(names, strides[:3], strict=True)}
