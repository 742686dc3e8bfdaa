"""(sequential, fused) on CUDA: one generated kernel forward, one backward and a small sum."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from pararnn.codegen.cuda import (
    LANES,
    Variant,
    check_buildable,
    chunk_of,
    kernels_of,
    most_per_lane,
)
from pararnn.codegen.emit import why_no_kernels
from pararnn.codegen.nvrtc import capability_of
from pararnn.engines.base import Arguments, Engine, Gradients, Solution
from pararnn.engines.layouts import addresses, by_head, copied, narrow, unit_stride
from pararnn.errors import EngineError
from pararnn.program import Program

MAX_LENGTH = 2**30
MAX_BLOCKS = 2**31 - 1
WARPS_A_CORE = 4  # schedulers of a multiprocessor


def _forward(program: Program, args: Arguments, on_failure: str) -> Solution:
    inputs = _Inputs(program, args, by_head(args.gates))
    new, dtype, count = args.gates.new_empty, args.dtype, range(program.num_states)
    size = (inputs.rows, inputs.length, inputs.channels)
    states = tuple(new(size) for _ in count)
    if inputs.all_written:
        final = tuple(new((args.sequences, inputs.channels), dtype=dtype) for _ in count)
    else:  # sequences without a step keep their initial state
        final = tuple(copied(h, dtype) for h in args.start(program.num_states))
    if not inputs.blocks:
        return Solution(states, final, args.gates.new_zeros(2, dtype=torch.int64))
    info = new(2, dtype=torch.int64)
    variant = inputs.variant("forward", chunk_of(*inputs.places))
    inputs.launch(variant, [*inputs.words, *addresses((*states, *final, info))])
    return Solution(states, final, info)


def _backward(
    program: Program,
    args: Arguments,
    states: tuple[Tensor, ...],
    grad_states: tuple[Tensor | None, ...],
    grad_final: tuple[Tensor | None, ...],
) -> Gradients:
    grad_gates = torch.empty_like(args.gates)
    written, gates = by_head(grad_gates), by_head(args.gates)
    if gates.stride() != written.stride():
        gates = torch.empty_like(written).copy_(gates)
    inputs = _Inputs(program, args, gates)
    saved = [s.contiguous() for s in states]
    arriving = [None if g is None else unit_stride(g) for g in grad_states]
    arriving_final = [None if g is None else g.contiguous() for g in grad_final]
    new, zeros, dtype = gates.new_empty, gates.new_zeros, args.dtype
    grad_fields = [new(f.shape, dtype=dtype) for f in args.fields]
    if inputs.all_written:
        grad_initial = [new(h.shape, dtype=dtype) for h in args.initial]
    else:
        ends = grad_final[: len(args.initial)]
        like = zip(args.initial, ends, strict=True)
        grad_initial = [
            zeros(h.shape, dtype=dtype) if g is None else copied(g, dtype) for h, g in like
        ]
    sums = new if inputs.blocks else zeros
    bias = args.bias
    grad_bias = None if bias is None else sums(bias.shape, dtype=inputs.weight_dtype)
    grad_params = [sums(p.shape, dtype=inputs.weight_dtype) for p in args.params]
    if inputs.blocks:
        weights = gates.shape[2] + len(args.params)
        partial = new((inputs.rows, weights, inputs.channels), dtype=dtype)
        places = [*inputs.places, written.data_ptr(), *addresses(saved)]
        places.append(inputs.channels * gates.element_size())
        strides = [(0, 0) if g is None else g.stride()[:2] for g in arriving]
        places += [s * gates.element_size() for pair in strides for s in pair]
        places += addresses(arriving)
        starts: Sequence[Tensor | None] = grad_initial or [None] * program.num_states
        outputs = [written, *_padded(grad_fields), *starts, partial]
        words = [
            *inputs.words,
            *(row for row, _ in strides),
            *(time for _, time in strides),
            *addresses([*saved, *arriving, *arriving_final, *outputs]),
        ]
        variant = inputs.variant(
            "backward", chunk_of(*places), tuple(g is not None for g in arriving)
        )
        inputs.launch(variant, words)
        words = [inputs.rows, *addresses([partial, grad_bias, *_padded(grad_params)])]
        inputs.launch_sum(variant, words, weights)
    if written.data_ptr() != grad_gates.data_ptr():
        grad_gates.copy_(written.reshape(grad_gates.shape))
    return Gradients(
        gates=grad_gates,
        bias=None if bias is None or grad_bias is None else grad_bias.to(bias.dtype),
        fields=tuple(g.to(f.dtype) for g, f in zip(grad_fields, args.fields, strict=True)),
        params=tuple(grad_params),
        initial=tuple(g.to(h.dtype) for g, h in zip(grad_initial, args.initial, strict=True)),
    )


class _Inputs:
    """What both passes begin with: tensors as the kernels take them, and the words that say so."""

    def __init__(self, program: Program, args: Arguments, gates: Tensor) -> None:
        self.program, self.reverse = program, args.reverse
        self.rows, self.length, count, heads, width = gates.shape
        row, time, gate, head, _ = gates.stride()
        if head == width:  # heads side by side are one
            heads, width, head = 1, heads * width, 0
        self.channels, self.width, self.gates = heads * width, width, gates
        # Strides of dimensions of size 1 are never taken.
        self.adjacent = count == 1 or gate == width
        self.adjacent &= self.length == 1 or time == count * width
        fields = [narrow(f, args.dtype) for f in args.fields]
        self.broadcast = tuple(f.shape[-1] < self.channels for f in fields)
        weights = [*args.params, *([] if args.bias is None else [args.bias])]
        own = {w.dtype for w in weights}
        self.weight_dtype = own.pop() if len(own) == 1 else args.dtype
        bias = None if args.bias is None else args.bias.to(self.weight_dtype).contiguous()
        seq = None if args.seq is None else args.seq.contiguous()
        reset = None if args.reset is None else args.reset.contiguous()
        self.events = seq is not None or reset is not None
        params = [p.to(self.weight_dtype).contiguous() for p in args.params]
        initial = [h.to(args.dtype).contiguous() for h in args.initial]
        self.tensors = (bias, seq, reset, *fields, *params, *initial)  # keeps copies alive
        self.all_written = seq is None and self.length > 0
        self.device = gates.device
        self.per_lane = _per_lane(gates.dtype, self.rows, self.channels, gates.device)
        tiles = -(-self.channels // (LANES * self.per_lane))
        self.blocks = self.rows * tiles if self.length else 0
        if self.length >= MAX_LENGTH or self.blocks > MAX_BLOCKS:
            raise EngineError(
                f"kernels take fewer than {MAX_LENGTH} steps and {MAX_BLOCKS} tiles of channels, "
                f"got T = {self.length} and B = {self.rows}; split the sequence, or the batch"
            )
        size = gates.element_size()
        strides = [s for s, n in zip((row, time, gate, head), gates.shape, strict=False) if n > 1]
        self.places = [gates.data_ptr(), width * size, *(s * size for s in strides)]
        self.words = [
            self.rows,
            self.length,
            *(row, time, gate, head),
            *_padded_words([f.stride(0) for f in fields]),
            *_padded_words([f.stride(1) for f in fields]),
            *addresses((gates, bias, seq, reset, *_padded(fields), *_padded(params))),
            *(addresses(initial) or [0] * program.num_states),
        ]

    def variant(self, direction: str, chunk: int, arriving: tuple[bool, ...] = ()) -> Variant:
        return Variant(
            direction,
            self.gates.dtype,
            self.weight_dtype,
            self.channels,
            self.width,
            self.per_lane,
            chunk,
            self.adjacent,
            self.reverse,
            self.events,
            self.broadcast,
            arriving or (False,) * self.program.num_states,
        )

    def launch(self, variant: Variant, words: Sequence[int]) -> None:
        self._launch(variant, variant.direction, (self.blocks, 1), words)

    def launch_sum(self, variant: Variant, words: Sequence[int], weights: int) -> None:
        self._launch(variant, "sum_weights", (-(-self.channels // LANES), weights), words)

    def _launch(
        self, variant: Variant, name: str, grid: tuple[int, int], words: Sequence[int]
    ) -> None:
        kernel = kernels_of(self.program, variant, capability_of(self.device))[name]
        # torch.cuda.current_stream makes a Stream object, which takes longer than the launch.
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        if self.device.index == torch.cuda.current_device():
            kernel(grid, words, stream)
            return
        with torch.cuda.device(self.device):
            kernel(grid, words, stream)


def _padded(tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Arrays of size 0 do not exist in C++: they have one unused item."""
    return tensors or (None,)


def _padded_words(words: Sequence[int]) -> Sequence[int]:
    return words or (0,)


def _per_lane(dtype: torch.dtype, rows: int, channels: int, device: torch.device) -> int:
    """Two channels a lane halve the instructions for addresses, one doubles the warps."""
    most = most_per_lane(dtype)
    warps = rows * -(-channels // (LANES * most))
    return most if warps > _schedulers(device) // 2 else 1


@cache
def _schedulers(device: torch.device) -> int:
    return WARPS_A_CORE * torch.cuda.get_device_properties(device).multi_processor_count


def _build(program: Program, dtype: torch.dtype) -> None:
    check_buildable(program, dtype, capability_of(torch.device("cuda")))


ENGINE = Engine("sequential", "fused", _forward, _backward, why_no_kernels, _build, True)
