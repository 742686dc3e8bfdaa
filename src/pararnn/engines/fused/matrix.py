"""The passes of matrix cells: launches packed once a signature, and sums over rows.

A device's module packs what its kernels need in addition, and runs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.cells.shapes import ParamShape
from pararnn.codegen.families import interface_of
from pararnn.codegen.interface import Words
from pararnn.engines.arguments import Arguments, Gradients, Solution
from pararnn.engines.engine import Arriving
from pararnn.engines.fused.launch import (
    Addresses,
    Conversions,
    Template,
    conversions_for,
    input_values,
    template_of,
    to_kernel_layout,
)
from pararnn.engines.fused.layout import (
    gradients_like,
    new_grad_initial,
    new_states,
    unit_stride,
)
from pararnn.program.program import Program

SOLVER = "sequential"


class MatrixLaunch(NamedTuple):
    """A pass on calls of one signature.

    run: launches the kernel on words. copies: of a row's sums. scratch: numbers of memory that the
    kernel needs for itself.
    """

    conversions: Conversions
    template: Template
    run: Callable[[list[int]], None]
    copies: int = 1
    scratch: int = 0


class Strides(NamedTuple):
    """Strides (B, T, H) on which a backward pass depends in addition to a call's signature: those
    of the output's gradient, and of the gates' own."""

    output: tuple[int, ...]
    gates: tuple[int, ...]


Launches = Callable[[Program, Arguments, Strides | None], MatrixLaunch]
"""Function that returns the launch of a pass: the forward one without strides."""


def solve(program: Program, args: Arguments, launches: Launches) -> Solution:
    """Run the forward pass."""
    launch = launches(program, args, None)
    tensors = to_kernel_layout(args, launch.conversions)
    outputs, final = new_states(program, args)
    launch.run(launch.template.fill([*tensors, *outputs, *final]))
    return Solution(outputs, final, args.gates.new_zeros((1, 2), dtype=torch.int64))


def differentiate(
    program: Program,
    args: Arguments,
    outputs: Sequence[Tensor],
    grad_output: Tensor | None,
    grad_final: Arriving,
    wanted: Sequence[str],
    launches: Launches,
) -> Gradients:
    """Run the backward pass."""
    sizes = program.head_sizes
    assert sizes is not None
    grad_gates = torch.empty_like(args.gates)
    kernel_gates = sizes.by_head(unit_stride(grad_gates))
    arriving = None if grad_output is None else unit_stride(grad_output)
    strides = Strides(() if arriving is None else arriving.stride()[:3], kernel_gates.stride()[:3])
    launch = launches(program, args, strides)
    tensors = to_kernel_layout(args, launch.conversions)
    grad_initial = new_grad_initial(args, grad_final)
    numbers = [math.prod(sizes.param(_kind(program, name))[1:]) for name in program.params]
    batch, dtype = args.gates.shape[0], args.signature.dtype
    partial_sums = args.gates.new_zeros(
        (batch * launch.copies, sizes.heads, sizes.width + sum(numbers)), dtype=dtype
    )
    tensors += [outputs[1].contiguous(), arriving]
    tensors += [None if grad is None else grad.contiguous() for grad in grad_final]
    tensors += [kernel_gates, *(grad_initial or [None] * len(grad_final)), partial_sums]
    if launch.scratch:
        tensors.append(args.gates.new_empty(launch.scratch, dtype=dtype))
    launch.run(launch.template.fill(tensors))
    grad_bias, *grads = partial_sums.sum(0).split([sizes.width, *numbers], -1)
    grad_params = [
        of_param(grad, sizes.param(_kind(program, name)))
        for name, grad in zip(program.params, grads, strict=True)
    ]
    bias = grad_bias.reshape(1, -1)
    return gradients_like(
        args, grad_gates, kernel_gates, bias, (), grad_params, grad_initial, wanted
    )


def _kind(program: Program, name: str) -> ParamShape:
    return program.step.cls.params[name].kind


def of_param(grad: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return the gradient of a parameter of a size, of that of each head (H, numbers)."""
    return grad.contiguous().view(size) if size else grad.sum()


def pack(
    program: Program,
    args: Arguments,
    target: str,
    strides: Strides | None,
    inputs: Mapping[str, Words],
    others: Callable[[Addresses], Mapping[str, Words]],
) -> tuple[Conversions, Template]:
    """Pack the words of a pass on calls of a signature, and return the conversions before it.

    inputs: words of the target's own fields of `Inputs`. others: returns those of its own fields
    of a backward pass.
    """
    interface, addresses = interface_of(program, target, SOLVER), Addresses()
    sizes, counts, dtype = program.head_sizes, interface.counts, args.signature.dtype
    assert sizes is not None
    conversions = conversions_for(args, unit_stride, dtype, dtype)
    own = Arguments.unflatten(to_kernel_layout(args, conversions), args.flatten()[1])
    batch, steps, _ = args.signature.size
    own_inputs = input_values(addresses, counts, args, ())
    for name in ("fields", "field_row", "field_time"):
        del own_inputs[name]
    values: dict[str, Words] = {
        **own_inputs,
        "rows": batch,
        "length": steps,
        "heads": sizes.heads,
        "reverse": int(args.options.reverse),
        **_strides("gate", sizes.by_head(own.gates).stride()),
        **inputs,
    }
    words: dict[str, Words] = {"in": interface.pack("Inputs", values)}
    if strides is None:
        words |= {"output": addresses.next(), "memory": addresses.next()}
        words["final"] = addresses.array(counts.states)
        return conversions, template_of(interface.pack("ForwardLaunch", words))
    words |= {
        "memory": addresses.next(),
        **_strides("output", strides.output or (0, 0, 0)),
        "grad_output": addresses.next(),
        "grad_final": addresses.array(counts.states),
        **_strides("grad", strides.gates),
        "grad_gates": addresses.next(),
        "grad_initial": addresses.array(counts.states),
        "partial": addresses.next(),
    }
    words |= others(addresses)
    return conversions, template_of(interface.pack("BackwardLaunch", words))


def _strides(prefix: str, strides: Sequence[int]) -> dict[str, Words]:
    names = ("row", "time", "head")
    return {f"{prefix}_{name}": stride for name, stride in zip(names, strides[:3], strict=True)}
