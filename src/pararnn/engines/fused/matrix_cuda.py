"""Schedule of matrix cells on a GPU: a block runs one head of one row."""

from __future__ import annotations

from typing import Any

import torch

from pararnn.codegen.families import interface_of
from pararnn.codegen.matrix_cuda import (
    MatrixVariant,
    emitted_for,
    memory_of,
    parts_of,
    trajectory_numbers,
)
from pararnn.codegen.mixing_cuda import shared_bytes_of
from pararnn.engines.arguments import Arguments
from pararnn.engines.fused import gpu as gpus
from pararnn.engines.fused.launch import Launch, Temporary
from pararnn.engines.fused.matrix import MatrixSchedule, template_for
from pararnn.engines.fused.schedule import Layouts, Pass
from pararnn.program.matrix import CHECKPOINT
from pararnn.program.program import Program


class MatrixCuda(MatrixSchedule, gpus.OnGpu):
    """Schedule of matrix cells on a type of GPU."""

    min_size = 128

    def cores(self, device: torch.device) -> int:
        return self.gpu.cores(self.gpu.with_index(device))

    def cores_of_rank(self, device: torch.device) -> int:
        return gpus.cores_of_rank(device)

    def facts(self, program: Program, args: Arguments, *tensors: Any) -> tuple[int, ...]:
        """Return the terms that products split parameters into."""
        return (args.signature.cache((self, program), _terms, program, args),)

    def check_backward(self, program: Program, args: Arguments) -> None:
        memory_of(program, self._variant(args, _terms(program, args), "backward"))

    def _variant(self, args: Arguments, terms: int, direction: str) -> MatrixVariant:
        return MatrixVariant(
            direction=direction,
            dtype=args.gates.dtype,
            matrix_parts=terms,
            events=gpus.has_events(args),
            shared=shared_bytes_of(self.gpu.capability(args.gates.device)),
        )

    def plan(self, program: Program, layouts: Layouts, args: Arguments) -> Pass:
        sizes, device, gpu = program.step.head, args.gates.device, self.gpu
        rows, length, _ = args.size
        blocks = rows * sizes.heads if length else 0
        gpus.check_limits(length, blocks, "heads of all rows", f"B = {rows}")
        (terms,), direction = layouts.facts, layouts.direction()
        variant = self._variant(args, terms, direction)
        copies = emitted_for(program, variant).layout.warps
        others, memory = {"flags": 0, "copies": copies}, tuple[Temporary, ...]()
        if direction == "backward" and not memory_of(program, variant).trajectory:
            numbers = blocks * CHECKPOINT * trajectory_numbers(program, variant)
            memory = (Temporary((numbers,), args.dtype),)
        else:
            others["trajectory"] = 0
        interface = interface_of(program, "cuda", self.solver)
        template = template_for(program, args, layouts, interface, others)
        kernels = gpu.kernels(program, variant, gpu.capability(device))
        if not blocks:
            return Pass(None, rows * copies)
        kernel = gpus.GpuKernel(gpu, device, kernels["run"], (blocks, 1))
        return Pass(Launch(kernel, template, memory), rows * copies)


def _terms(program: Program, args: Arguments) -> int:
    """Return the terms that products split parameters into, by the dtype that these have."""
    return parts_of(program, args.gates.dtype, gpus.common_dtype(args.params, args.dtype))
