"""Schedule on the CPU of steps that mix channels: a kernel, and products after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.base.numerics import compute_dtype
from pararnn.engines.arguments import Arguments, wants
from pararnn.engines.fused.elementwise_cpu import CpuPass, CpuVectors
from pararnn.engines.fused.launch import (
    Addresses,
    Launch,
    pack_known,
    template_of,
    to_kernel_layout,
)
from pararnn.engines.fused.layout import heads_of_matrices
from pararnn.engines.fused.schedule import Layouts
from pararnn.engines.fused.vectors import MixingSchedule
from pararnn.program.mixing import OuterIndices
from pararnn.program.program import Program


@dataclass(frozen=True)
class CpuMixingPass(CpuPass):
    """Pass of a step that mixes channels.

    outers, vectors: its outer products, and the sizes of their left and right vectors: see
    mixing/backward.h. gate_of_right: by right vector the gate whose gradient it is, -1 for one that
    is stored. gates_at: index of the gates' gradient among the tensors of a backward pass.
    """

    outers: tuple[OuterIndices, ...] = ()
    vectors: tuple[tuple[int, ...], ...] = ()
    gate_of_right: tuple[int, ...] = ()
    gates_at: int = 0

    def new_params(self, args: Arguments) -> list[Tensor]:
        """Allocate the gradients of params; zero for matrices, to whose the products are added."""
        new, samples = args.gates.new_zeros, self.samples
        return [
            new((*samples, *param.shape), dtype=self.weights) if param.ndim > 1 else g
            for param, g in zip(args.params, super().new_params(args), strict=True)
        ]

    def backward(
        self, tensors: list[Tensor | None], weights: list[Tensor | None], wanted: Sequence[str]
    ) -> None:
        """Run a backward pass, and multiply what it leaves into the gradients of matrices."""
        partial = tensors[-1]
        assert partial is not None
        vectors: list[Tensor] = []
        outers = [outer for outer in self.outers if wants(wanted, "params", outer.matrix)]
        if outers:
            vectors = [partial.new_empty(size) for size in self.vectors]
        super().backward(tensors, [*weights, *(vectors or (None, None))], wanted)
        if not vectors:
            return
        of_gates = tensors[self.gates_at]
        assert of_gates is not None
        lefts, stored = (of_steps.flatten(2, 3) for of_steps in vectors)
        of_stored = iter(stored)
        rights = [
            next(of_stored) if gate < 0 else _by_head(of_gates.select(2, gate), lefts.shape[1])
            for gate in self.gate_of_right
        ]
        for outer in outers:
            grad = weights[1 + outer.matrix]
            assert grad is not None
            # By samples and heads; of one head (1, D, D).
            by_head = grad.view(*self.samples, -1, *grad.shape[-2:])
            pair = lefts[outer.left_vector], rights[outer.right_vector]
            if not self.samples:
                by_head.baddbmm_(pair[0].mT, pair[1])
                continue
            left, right = (x.unflatten(1, (*self.samples, -1)).transpose(0, 1) for x in pair)
            by_head += left.mT @ right


def _by_head(grad: Tensor, heads: int) -> Tensor:
    """Return the gradient of a gate as vectors are stored: (H, B T, K)."""
    grad = grad if grad.ndim == 4 else grad.unflatten(-1, (heads, -1))
    return grad.permute(2, 0, 1, 3).flatten(1, 2)


class InputStrides(NamedTuple):
    """Layout of inputs that a forward pass projects: how many a head has, and strides of x and of
    the weight, whose rows are adjacent for the channels of a gate and head."""

    inputs: int
    x_row: int
    x_time: int
    x_head: int
    weight_gate: int
    weight_head: int


class MixingCpu(CpuVectors, MixingSchedule):
    """Schedule of the loop over steps that mix channels."""

    def can_save_values(self, program: Program, dtype: torch.dtype) -> bool:
        """Return True if a forward pass carries the states that it returns: pre-activations are
        those of carried states."""
        return dtype == compute_dtype(dtype)

    def plan(self, program: Program, layouts: Layouts, args: Arguments) -> CpuMixingPass:
        return self._plan_pass(program, layouts, args, None)

    def launch_with_projection(
        self, program: Program, args: Arguments, projection: InputStrides
    ) -> tuple[Launch, list[Tensor | None]] | None:
        """Return the launch of a forward pass that projects its inputs, and the call's tensors in
        kernel layout; None where gates have another dtype than states. The launch takes what that
        of `launch` does, None for the gates, and then x and the weight.

        args: of a call on gates of which only the sizes count.
        """
        if args.gates.dtype != args.dtype:
            return None
        tensors = to_kernel_layout(args, self.conversions(args, False))
        known = Arguments.unflatten(tensors, args.flatten()[1])
        layouts = Layouts(None, (), False, self.facts())
        launch = self._plan_pass(program, layouts, known, projection).launch
        assert launch is not None
        return launch, [None, *tensors[1:]]

    def _plan_pass(
        self, program: Program, layouts: Layouts, args: Arguments, projection: InputStrides | None
    ) -> CpuMixingPass:
        addresses = Addresses()
        interface, values = self.values(program, layouts, args, addresses)
        (batch, steps, channels), mixing = args.size, program.mixing[args.dtype]
        values["given"] = int(layouts.has_starts)
        values |= dict.fromkeys(("x", "weight", *InputStrides._fields), 0)
        if projection is not None:
            values |= {"x": addresses.next(), "weight": addresses.next(), **projection._asdict()}
        if layouts.gates is not None:
            biases, params = values["grad_weights"][: len(program.gates)], values["params"]
            sums = [params[i] for i in mixing.channel_params]
            values["grad_weights"] = [*biases, *sums, *[0] * len(mixing.matrices)]
            values |= {"left": addresses.next(), "right": addresses.next()}
        problem = {"pass": pack_known(interface, layouts.struct("Problem"), values)}
        template = template_of(interface.pack(layouts.struct("Launch"), problem))
        launch = Launch(self.kernel(program, layouts, args), template)
        heads = heads_of_matrices(args.params) or 1
        size = (heads, batch, steps, channels // heads)
        shares = args.gates.dtype == args.dtype  # else the gates' gradient is rounded
        gates = tuple([gate if shares else -1 for gate in mixing.gate_of_right])
        vectors = tuple((count, *size) for count in (mixing.lefts, gates.count(-1)))
        gates_at = -2 - len(args.fields) - program.num_states
        of_outers = (mixing.outers, vectors, gates, gates_at)
        return CpuMixingPass(launch, batch, args.dtype, args.samples, None, *of_outers)
