"""The passes of matrix cells on a GPU: a block runs one head of one row."""

from __future__ import annotations

from collections.abc import Mapping

from pararnn.base.errors import EngineError
from pararnn.codegen.interface import Words
from pararnn.codegen.matrix_cuda import (
    MatrixVariant,
    emitted_for,
    memory_of,
    parts_of,
    trajectory_numbers,
)
from pararnn.codegen.mixing_cuda import shared_bytes_of
from pararnn.codegen.targets import Gpu
from pararnn.engines.arguments import Arguments
from pararnn.engines.fused.launch import Addresses
from pararnn.engines.fused.matrix import MatrixLaunch, Strides, pack
from pararnn.program.matrix import CHECKPOINT
from pararnn.program.program import Program

MAX_LENGTH, MAX_BLOCKS = 2**30, 2**31 - 1


def variant_of(gpu: Gpu, program: Program, args: Arguments, direction: str) -> MatrixVariant:
    """Return the variant of a pass on calls of a signature."""
    dtypes = {param.dtype for param in args.params}
    matrix_dtype = dtypes.pop() if len(dtypes) == 1 else args.dtype
    return MatrixVariant(
        direction=direction,
        dtype=args.gates.dtype,
        matrix_parts=parts_of(program, args.gates.dtype, matrix_dtype),
        events=args.seq is not None or args.reset is not None,
        shared=shared_bytes_of(gpu.capability(args.gates.device)),
    )


def make_launch(
    gpu: Gpu, program: Program, strides: Strides | None, args: Arguments
) -> MatrixLaunch:
    """Pack the words of a pass on calls of a signature. Raises EngineError for sizes that kernels
    do not support."""
    sizes, device = program.head_sizes, args.gates.device
    assert sizes is not None
    rows, length, _ = args.signature.size
    blocks = rows * sizes.heads if length else 0
    if length >= MAX_LENGTH or blocks > MAX_BLOCKS:
        raise EngineError(
            f"kernels take fewer than {MAX_LENGTH} steps and {MAX_BLOCKS} heads of all rows, got "
            f"T = {length} and B = {rows}; split the sequence, or the batch"
        )
    variant = variant_of(gpu, program, args, "forward" if strides is None else "backward")
    copies, scratch = emitted_for(program, variant).layout.warps, 0
    if strides is not None and not memory_of(program, variant).trajectory:
        scratch = blocks * CHECKPOINT * trajectory_numbers(program, variant)

    def others(addresses: Addresses) -> Mapping[str, Words]:
        return {"trajectory": addresses.next() if scratch else 0, "copies": copies}

    conversions, template = pack(program, args, "cuda", strides, {"flags": 0}, others)
    kernels = gpu.kernels(program, variant, gpu.capability(device))

    def run(words: list[int]) -> None:
        if blocks:
            gpu.call(device, kernels["run"], (blocks, 1), words, gpu.stream(device))

    return MatrixLaunch(conversions, template, run, copies, scratch)


def check_backward(gpu: Gpu, program: Program, args: Arguments) -> None:
    """Raise EngineError where the backward pass does not fit this GPU."""
    memory_of(program, variant_of(gpu, program, args, "backward"))
