"""(chunks, fused) on a GPU: steps that are affine in their states, by chunks on tensor cores.

Heads in which a number is not finite run again by the loop's kernels, on the device: NaN is then
where the loop has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.base.device import has_gpu
from pararnn.codegen.chunks import (
    CHUNK,
    GRADIENT_WARPS,
    LANES,
    PASSES,
    ChunkVariant,
    state_bytes,
    components_of,
    interface_of_chunks,
    is_plain,
    launchable,
    param_numbers,
    source_of_chunks,
    why_no_chunks,
)
from pararnn.codegen.cuda import kernels_of
from pararnn.codegen.families import interface_of
from pararnn.codegen.interface import Words
from pararnn.codegen.mixing_cuda import shared_bytes_of
from pararnn.codegen.nvrtc import capability_of
from pararnn.codegen.targets import CUDA, Gpu
from pararnn.engines.arguments import Arguments, Gradients, Solution
from pararnn.engines.engine import Arriving, Engine
from pararnn.engines.fused import matrix
from pararnn.engines.fused.launch import (
    Addresses,
    Conversions,
    Template,
    conversions_for,
    template_of,
    to_kernel_layout,
)
from pararnn.engines.fused.layout import (
    gradients_like,
    new_grad_initial,
    new_states,
    unit_stride,
)
from pararnn.engines.fused.matrix import Strides
from pararnn.engines.fused.matrix_cuda import make_launch as make_loop_launch
from pararnn.engines.rule import Rank, Size
from pararnn.program.affine import AffineForm
from pararnn.program.program import Program

LOWEST = (9, 0)
"""Lowest compute capability for which `auto` takes chunks: where they were measured."""


class Launch(NamedTuple):
    """A pass on calls of one signature. blocks: of its grid."""

    conversions: Conversions
    template: Template
    kernel: Any
    blocks: int


class ChunksEngine(Engine):
    """Kernels over chunks on a type of GPU."""

    solver, backend = "chunks", "fused"
    completes = True
    builds = True

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def gives_sums(self, program: Program, dtype: torch.dtype) -> bool:
        """Return True: states before chunks are written only where a backward pass reads them."""
        return True

    def stored(self, program: Program, args: Arguments) -> list[Any]:
        """Return nothing: the states before chunks are where those of checkpoints are."""
        return []

    def linearises_returned(self, program: Program) -> bool:
        """Return False: states before chunks are not rounded."""
        return False

    def why_not(self, program: Program) -> str | None:
        """Return the reason why there are no kernels over chunks for a cell, or None."""
        form = program.affine_form()
        if isinstance(form, str):
            return f"its step is not affine in its states: {form}"
        return why_no_chunks(program, form)

    def rank(
        self, program: Program, size: Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Rank, str]:
        """Rank by request only."""
        return Rank.ON_REQUEST_ONLY, "it was requested"

    def build(self, program: Program, dtype: torch.dtype, compiles: bool = True) -> None:
        """Compile the kernels, or only generate them. Raises EngineError where that fails."""
        capability = self.capability()
        shared = shared_bytes_of(capability)
        form = program.affine_form()
        assert isinstance(form, AffineForm)
        for direction in PASSES:
            variant = ChunkVariant(direction, dtype, 0, False, False, is_plain(form), shared)
            if compiles:
                kernels_of(program, variant, capability)
            else:
                source_of_chunks(program, variant)

    def capability(self) -> tuple[int, int]:
        """Return the compute capability to build for."""
        return capability_of(torch.device("cuda"))

    def forward(self, program: Program, args: Arguments) -> Solution:
        """Solve the recurrence."""
        (output, memory), final = new_states(program, args)
        spans = _spans(args)
        flags = _new_flags(program, args)
        tensors, launch = self._launch(program, args, "forward", spans)
        keeps = args.options.sums and _fits(program, spans)
        own = [*tensors, spans, output, memory if keeps else None, *final, flags]
        self._run(args, launch, own)
        if args.gates.numel():
            self._loop_forward(program, args, (output, None), final, flags)
        return Solution((output, memory), final, args.gates.new_zeros((1, 2), dtype=torch.int64))

    def _loop_forward(
        self,
        program: Program,
        args: Arguments,
        outputs: Sequence[Tensor | None],
        final: Sequence[Tensor],
        flags: Tensor,
    ) -> None:
        """Run heads with a flag again."""
        launch = self._loop(program, args, None)
        tensors = to_kernel_layout(args, launch.conversions)
        words = launch.template.fill([*tensors, *outputs, *final])
        launch.run(_with_flags(program, words, flags))

    def _loop(self, program: Program, args: Arguments, strides: Strides | None) -> Any:
        key = make_loop_launch, self.gpu, program, strides
        return args.signature.cache(key, *key, args)

    def backward(
        self,
        program: Program,
        args: Arguments,
        states: tuple[Tensor, ...],
        grad_states: Arriving,
        grad_final: Arriving,
        wanted: Sequence[str],
    ) -> Gradients:
        """Return the gradients by two kernels: the adjoint of the states, then the gates'."""
        sizes, spans, flags = program.head_sizes, _spans(args), _new_flags(program, args)
        assert sizes is not None
        memory, chunks = states[1], _chunks(args, spans)
        new = args.gates.new_empty
        if not args.options.sums or not _fits(program, spans):
            memory = new(chunks * sizes.heads * state_bytes(program), dtype=torch.uint8)
            (output, _), final = new_states(program, args)
            tensors, launch = self._launch(program, args, "forward", spans)
            self._run(args, launch, [*tensors, spans, output, memory, *final, flags])
        grad_gates = torch.empty_like(args.gates)
        if args.seq is not None:
            grad_gates.zero_()
        kernel_gates = sizes.by_head(unit_stride(grad_gates))
        arriving = grad_states[0]
        arriving = args.gates.new_zeros(states[0].shape) if arriving is None else arriving
        arriving = unit_stride(arriving)
        strides = Strides(arriving.stride()[:3], kernel_gates.stride()[:3])
        grad_initial = new_grad_initial(args, grad_final)
        given = [None if grad is None else grad.contiguous() for grad in grad_final]
        starts = grad_initial or (None,) * len(given)
        adjoints = new(chunks * sizes.heads * state_bytes(program), dtype=torch.uint8)
        numbers = param_numbers(program)
        partial = args.gates.new_zeros((chunks, sizes.heads, sum(numbers)), dtype=args.dtype)
        tensors, launch = self._launch(program, args, "reverse", spans, strides)
        self._run(args, launch, [*tensors, spans, arriving, adjoints, *given, *starts, flags])
        tensors, launch = self._launch(program, args, "gradients", spans, strides)
        own = [arriving, memory, adjoints, kernel_gates, partial, flags]
        self._run(args, launch, [*tensors, spans, *own])
        loop = self._loop(program, args, strides)
        rows = args.gates.shape[0]
        of_loop = args.gates.new_zeros(
            (rows * loop.copies, sizes.heads, sizes.width + sum(numbers)), dtype=args.dtype
        )
        if args.gates.numel():
            # The loop's states: those of a forward pass of heads with a flag.
            (output, checkpoints), final = new_states(program, args)
            self._loop_forward(program, args, (output, checkpoints), final, flags)
            inputs = to_kernel_layout(args, loop.conversions)
            inputs += [checkpoints, arriving, *given, kernel_gates, *starts, of_loop]
            if loop.scratch:
                inputs.append(new(loop.scratch, dtype=args.dtype))
            loop.run(_with_flags(program, loop.template.fill(inputs), flags))
        bias = None
        if args.bias is not None:
            bias = kernel_gates.sum((0, 1), dtype=args.dtype).reshape(1, -1)
        grad_params = []
        if numbers:
            rows_of = torch.arange(chunks, device=flags.device) // max(1, chunks // max(1, rows))
            if spans is not None:
                rows_of = _rows_of_chunks(spans, chunks)
            partial = partial.masked_fill(flags[rows_of][..., None] != 0, 0)
            total = partial.sum(0) + of_loop.sum(0)[:, sizes.width :]
            grad_params = [
                matrix.of_param(grad, sizes.param(program.step.cls.params[name].kind))
                for name, grad in zip(program.params, total.split(numbers, -1), strict=True)
            ]
        return gradients_like(
            args, grad_gates, kernel_gates, bias, (), grad_params, grad_initial, wanted
        )

    def _run(self, args: Arguments, launch: Launch, tensors: Sequence[Tensor | None]) -> None:
        if launch.blocks:
            device = args.gates.device
            words = launch.template.fill(tensors)
            self.gpu.call(device, launch.kernel, (launch.blocks, 1), words, self.gpu.stream(device))

    def _launch(
        self,
        program: Program,
        args: Arguments,
        direction: str,
        spans: Tensor | None,
        strides: Strides | None = None,
    ) -> tuple[list[Tensor | None], Launch]:
        """Return a call's tensors in kernel layout, and the cached launch of a pass."""
        chunks = _chunks(args, spans)
        aligned = args.gates.data_ptr() % 4 == 0
        key = (_make_launch, self.gpu, program, direction, chunks, strides, aligned)
        launch = args.signature.cache(key, *key, args)
        return to_kernel_layout(args, launch.conversions), launch


def _new_flags(program: Program, args: Arguments) -> Tensor:
    sizes = program.head_sizes
    assert sizes is not None
    return args.gates.new_zeros((args.gates.shape[0], sizes.heads), dtype=torch.int32)


def _chunks(args: Arguments, spans: Tensor | None) -> int:
    """Return the number of chunks of all sequences, at most."""
    rows, length = args.gates.shape[:2]
    most = -(-length // CHUNK)
    return rows * most if spans is None else rows * most + args.sequences


def _fits(program: Program, spans: Tensor | None) -> bool:
    """Return True if states before chunks, as operands, take the place of checkpoints."""
    sizes = program.head_sizes
    assert sizes is not None
    whole = all(length % CHUNK == 0 for size in sizes.states for length in size)
    return spans is None and whole and all(len(size) > 1 for size in sizes.states)


def _spans(args: Arguments) -> Tensor | None:
    """Return row, first step, steps and first chunk of each sequence, int32 (S, 4); None if rows
    are sequences."""
    if args.seq is None:
        return None
    rows, length = args.seq.shape
    device, count = args.seq.device, args.sequences
    seq = args.seq.flatten().long()
    real = seq >= 0
    index = torch.where(real, seq, count)
    position = torch.arange(rows * length, device=device)
    steps = torch.zeros(count + 1, dtype=torch.int64, device=device)
    steps = steps.scatter_add(0, index, torch.ones_like(index))[:count]
    first = torch.full((count + 1,), rows * length, dtype=torch.int64, device=device)
    first = first.scatter_reduce(0, index, position, "amin")[:count]
    chunks = -(-steps // CHUNK)
    base = chunks.cumsum(0) - chunks
    length = max(length, 1)
    row = torch.where(steps > 0, first // length, 0)
    return torch.stack([row, first % length, steps, base], 1).to(torch.int32)


def _rows_of_chunks(spans: Tensor, chunks: int) -> Tensor:
    """Return the row of each chunk."""
    number = torch.arange(chunks, device=spans.device)
    base = spans[:, 3].long().contiguous()
    sequence = torch.searchsorted(base, number, right=True) - 1
    return spans[:, 0].long()[sequence]


def _with_flags(program: Program, words: list[int], flags: Tensor) -> list[int]:
    """Return words of a loop's launch that runs heads with a flag only."""
    words[interface_of(program, "cuda", matrix.SOLVER).words("Inputs") - 1] = flags.data_ptr()
    return words


def _make_launch(
    gpu: Gpu,
    program: Program,
    direction: str,
    chunks: int,
    strides: Strides | None,
    aligned: bool,
    args: Arguments,
) -> Launch:
    """Pack the words of a pass on calls of a signature."""
    sizes, form, device = program.head_sizes, program.affine_form(), args.gates.device
    assert sizes is not None
    assert isinstance(form, AffineForm)
    dtype = args.signature.dtype
    conversions = conversions_for(args, unit_stride, dtype, dtype)
    tensors = to_kernel_layout(args, conversions)
    gates = tensors[0]
    assert gates is not None
    by_head = sizes.by_head(gates)
    gate_strides = by_head.stride()[:3]
    even = aligned and all(stride % 2 == 0 for stride in gate_strides)
    if strides is not None:
        even = even and all(stride % 2 == 0 for stride in strides.gates)
    (component,) = [i for i, c in enumerate(form.components) if c in components_of(form)]
    events = args.seq is not None or args.reset is not None
    variant = ChunkVariant(
        direction,
        args.gates.dtype,
        component,
        events,
        even,
        is_plain(form),
        shared_bytes_of(gpu.capability(device)),
    )
    interface, addresses = interface_of_chunks(program, component), Addresses()
    states = interface.counts.states
    rows, length = args.gates.shape[:2]
    flat = Arguments.unflatten(addresses.array(len(tensors)), args.flatten()[1])
    inputs: dict[str, Words] = {
        "length": length,
        "heads": sizes.heads,
        "width": sizes.width,
        "reverse": int(args.options.reverse),
        **dict(zip(("gate_row", "gate_time", "gate_head"), gate_strides, strict=True)),
        "gates": flat.gates if args.gates is not None else 0,
        "bias": flat.bias if args.bias is not None else 0,
        "params": list(flat.params),
        "spans": addresses.next(),
        "reset": flat.reset,
        "initial": list(flat.initial) or [0] * states,
    }
    words: dict[str, Words] = {"in": interface.pack("Inputs", inputs)}
    answer_stride = rows * length * sizes.heads * sizes.lengths["V"]
    sequences = rows if args.seq is None else args.sequences
    blocks = sequences * sizes.heads
    if direction == "forward":
        words |= {
            "answers": addresses.next(),
            "answer_stride": answer_stride,
            "memory": addresses.next(),
            "final": addresses.array(states),
            "flags": addresses.next(),
        }
        struct = "ForwardLaunch"
    else:
        assert strides is not None
        names = ("answer_row", "answer_time", "answer_head")
        words |= {"grad_answers": addresses.next(), "answer_stride": answer_stride}
        words |= dict(zip(names, strides.output, strict=True))
        if direction == "reverse":
            words |= {
                "memory": addresses.next(),
                "grad_final": addresses.array(states),
                "grad_initial": addresses.array(states),
                "flags": addresses.next(),
            }
            struct = "ReverseLaunch"
        else:
            names = ("grad_row", "grad_time", "grad_head")
            most = -(-length // CHUNK)
            words |= {
                "chunks": most,
                "spans": sequences,
                "states": addresses.next(),
                "adjoints": addresses.next(),
                **dict(zip(names, strides.gates, strict=True)),
                "grad_gates": addresses.next(),
                "partial": addresses.next(),
                "flags": addresses.next(),
            }
            struct = "GradientLaunch"
            blocks = -(-blocks * most // GRADIENT_WARPS)
    kernel = gpu.kernels(program, variant, gpu.capability(device))["run"]
    template = template_of(interface.pack(struct, words))
    return Launch(conversions, template, kernel, blocks if length else 0)


ENGINE = ChunksEngine(CUDA)
