"""(sequential, fused) and (newton, fused) on CUDA: one generated kernel a pass, and a small sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.codegen.cuda import (
    INFO_SLOTS,
    LANES,
    Variant,
    check_buildable,
    chunk_of,
    kernels_of,
    most_per_lane,
    ring_of,
)
from pararnn.codegen.emit import why_no_kernels
from pararnn.codegen.nvrtc import CLUSTERS, MAX_CLUSTER, Kernel, capability_of
from pararnn.engines.base import Arguments, Engine, Gradients, Solution
from pararnn.engines.layouts import addresses, by_head, copied, narrow, unit_stride
from pararnn.engines.split import MIN_LENGTH, WARPS_A_CORE, Split, segments_for, split_of
from pararnn.errors import EngineError
from pararnn.numerics import compute_dtype
from pararnn.program import Program

MAX_LENGTH = 2**30
MAX_BLOCKS = 2**31 - 1


def _forward(solver: str, program: Program, args: Arguments, on_failure: str) -> Solution:
    inputs = _Inputs(solver, program, args, by_head(args.gates))
    new, dtype, count = args.gates.new_empty, args.dtype, range(program.num_states)
    size = (inputs.rows, inputs.length, inputs.channels)
    states = tuple(new(size) for _ in count)
    if inputs.all_written:
        final = tuple(new((args.sequences, inputs.channels), dtype=dtype) for _ in count)
    else:  # sequences without a step keep their initial state
        final = tuple(copied(h, dtype) for h in args.start(program.num_states))
    if not inputs.blocks:
        return Solution(states, final, new((INFO_SLOTS[solver], 2), dtype=torch.int64).zero_())
    run = inputs.prepared("forward", chunk_of(*inputs.places))
    # Where tiles share slots, these are zero at first.
    info = new((INFO_SLOTS[solver], 2), dtype=torch.int64)
    if solver == "newton" and inputs.blocks > len(info):
        info.zero_()
    run([*inputs.words, *addresses((*states, *final, info))])
    return Solution(states, final, info)


def _backward(
    solver: str,
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
    inputs = _Inputs(solver, program, args, gates)
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
        places = [*inputs.places, written.data_ptr(), *addresses(saved)]
        places.append(inputs.channels * gates.element_size())
        strides = [(0, 0) if g is None else g.stride()[:2] for g in arriving]
        places += [s * gates.element_size() for pair in strides for s in pair]
        places += addresses(arriving)
        run = inputs.prepared("backward", chunk_of(*places), tuple(g is not None for g in arriving))
        weights, spans = gates.shape[2] + len(args.params), inputs.rows * run.split.segments
        sums_of = new((spans, weights, inputs.channels), dtype=dtype)
        starts: Sequence[Tensor | None] = grad_initial or [None] * program.num_states
        outputs = [written, *_padded(grad_fields), *starts, sums_of]
        words = [
            *inputs.words,
            *(row for row, _ in strides),
            *(time for _, time in strides),
            *addresses([*saved, *arriving, *arriving_final, *outputs]),
        ]
        run(words)
        words = [spans, *addresses([sums_of, grad_bias, *_padded(grad_params)])]
        run.sum_weights(words, weights)
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

    def __init__(self, solver: str, program: Program, args: Arguments, gates: Tensor) -> None:
        self.solver, self.program, self.reverse = solver, program, args.reverse
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
        whole = [f for f, one in zip(fields, self.broadcast, strict=True) if not one]
        steps = [s * f.element_size() for f in whole for s in (self.channels, *f.stride()[:2])]
        self.field_chunk = chunk_of(*(f.data_ptr() for f in whole), *steps)
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
        self.per_lane = most_per_lane(gates.dtype)
        if solver == "sequential":
            self.per_lane = _per_lane(gates.dtype, self.rows, self.channels, gates.device)
        self.blocks = self.rows * _tiles(self.channels, self.per_lane) if self.length else 0
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

    def prepared(self, direction: str, chunk: int, arriving: tuple[bool, ...] = ()) -> _Run:
        """The kernels of a pass, and how they cut time."""
        variant = Variant(
            direction,
            self.gates.dtype,
            self.weight_dtype,
            self.channels,
            self.width,
            self.per_lane,
            chunk,
            self.field_chunk,
            self.adjacent,
            self.reverse,
            self.events,
            self.broadcast,
            arriving or (False,) * self.program.num_states,
            self.solver,
        )
        return _Run(self, variant)


class _Run:
    """One pass: called with the words of its problem, it launches the kernel."""

    def __init__(self, inputs: _Inputs, variant: Variant) -> None:
        self.inputs = inputs
        self.split, self.cluster = Split(1, inputs.length, 0), 0
        if variant.solver == "sequential":
            self.kernels = self._kernels(variant)
            return
        steps, cores = ring_of(inputs.program, variant).steps, _cores(inputs.device)
        split = partial(split_of, inputs.length, inputs.blocks, variant.dtype, steps, cores)
        self.split = split(inputs.blocks * inputs.length)
        if self._fits_clusters(cores):
            self.kernels = self._kernels(variant._replace(cluster=True))
            most = self._on_device(self.kernels["run"].most_in_cluster, inputs.device.index)
            self.cluster = self.split.segments if self.split.segments <= most else 0
        if not self.cluster:
            self.kernels = self._kernels(variant)
            self.split = split(self._on_device(self.kernels["run"].blocks_a_core) * cores)
        self.shooting = _shooting(inputs, self.split, bool(self.cluster))

    def __call__(self, words: Sequence[int]) -> None:
        grid, launch = (self.inputs.blocks * self.split.segments, 1), self.kernels["run"]
        stream = self._stream()
        if self.inputs.solver == "sequential":
            self._on_device(launch, grid, words, stream)
            return
        words = [*words, *self.split, *self.shooting.words]
        together = not self.cluster and self.split.segments > 1
        self._on_device(launch, grid, words, stream, together=together, cluster=self.cluster)

    def sum_weights(self, words: Sequence[int], weights: int) -> None:
        """Add up what the spans of all rows have summed."""
        grid = (-(-self.inputs.channels // LANES), weights)
        self._on_device(self.kernels["sum_weights"], grid, words, self._stream())

    def _fits_clusters(self, cores: int) -> bool:
        """Whether clusters pay: they fill multiprocessors unevenly, which few blocks do anyway."""
        segments = self.split.segments
        few = segments <= MAX_CLUSTER and self.inputs.blocks * segments <= 2 * cores
        return few and capability_of(self.inputs.device) >= CLUSTERS

    def _kernels(self, variant: Variant) -> dict[str, Kernel]:
        return kernels_of(self.inputs.program, variant, capability_of(self.inputs.device))

    def _stream(self) -> int:
        # torch.cuda.current_stream makes a Stream object, which takes longer than the launch.
        return torch._C._cuda_getCurrentRawStream(self.inputs.device.index)

    def _on_device(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if self.inputs.device.index == torch.cuda.current_device():
            return call(*args, **options)
        with torch.cuda.device(self.inputs.device):
            return call(*args, **options)


class _Shared(NamedTuple):
    """What segments share: its words, and the memory, which lives as long as this."""

    words: list[int]
    memory: tuple[Tensor, ...]


def _shooting(inputs: _Inputs, split: Split, cluster: bool) -> _Shared:
    """What the segments of a Newton solve share: see kernels/cuda/boundaries.h, meeting_grid.h.

    Counted in words of 64 bits: one number of 32 bits that is posted, or two that are not.
    """
    new, dtype = inputs.gates.new_empty, compute_dtype(inputs.gates.dtype)
    states, columns = inputs.program.num_states, inputs.blocks
    lanes, words = inputs.per_lane * LANES, dtype.itemsize // 4
    spans, map_size = columns * split.segments, states**2 + states
    board = spans * lanes * (2 * map_size + states) * words
    found = spans * lanes * (2 * states + 2) * words // 2
    shared = new(board + found, dtype=torch.int64)
    places = _places(shared, [board, found])
    if cluster:
        return _Shared([*places, 0], (shared,))  # an empty struct has a size
    ends = spans * lanes * states * words
    zeros = inputs.gates.new_zeros(columns + ends + columns, dtype=torch.int64)
    return _Shared([*places, *_places(zeros, [columns, ends, columns])], (shared, zeros))


def _places(tensor: Tensor, sizes: Sequence[int]) -> list[int]:
    """The addresses of neighbours of so many elements in a tensor."""
    starts = accumulate([0, *sizes[:-1]])
    return [tensor.data_ptr() + start * tensor.element_size() for start in starts]


def _padded(tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Arrays of size 0 do not exist in C++: they have one unused item."""
    return tensors or (None,)


def _padded_words(words: Sequence[int]) -> Sequence[int]:
    return words or (0,)


def _tiles(channels: int, per_lane: int) -> int:
    """The warps that run a row's channels side by side."""
    return -(-channels // (LANES * per_lane))


def _per_lane(dtype: torch.dtype, rows: int, channels: int, device: torch.device) -> int:
    """Two channels a lane halve the instructions for addresses, one doubles the warps."""
    most = most_per_lane(dtype)
    warps = rows * _tiles(channels, most)
    return most if warps > WARPS_A_CORE * _cores(device) // 2 else 1


@cache
def _cores(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def segments_of(size: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> int:
    """Into how many segments (newton, fused) cuts time on a device; size is (B, T, D)."""
    batch, steps, channels = size
    if steps < MIN_LENGTH or not torch.cuda.is_available():
        return 1
    columns = batch * _tiles(channels, most_per_lane(dtype))
    return segments_for(steps, columns, _cores_as_constant(device))


def _cores_as_constant(device: torch.device) -> int:
    return _cores(device)


# Compiled regions need not look into it: see pararnn.engines.table.
_cores_as_constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _build(solver: str, program: Program, dtype: torch.dtype) -> None:
    check_buildable(program, dtype, capability_of(torch.device("cuda")), solver)


def _engine(solver: str) -> Engine:
    forward, backward = partial(_forward, solver), partial(_backward, solver)
    build, rows = partial(_build, solver), INFO_SLOTS[solver]
    return Engine(solver, "fused", forward, backward, why_no_kernels, build, True, rows)


SEQUENTIAL, NEWTON = _engine("sequential"), _engine("newton")
