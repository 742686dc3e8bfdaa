"""(chunks, torch): the scan over chunks of steps that are affine in their states, in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pararnn.base.numerics import without_autocast
from pararnn.base.private import constant_in_graphs
from pararnn.cells.matrix import HeadSizes
from pararnn.engines.arguments import Arguments, Gradients, Solution
from pararnn.engines.chunk_layout import Chunks, Span, chunks_of
from pararnn.engines.engine import BackwardInputs, Engine
from pararnn.engines.fit import output_sizes
from pararnn.engines.forward_time import own_memory
from pararnn.engines.fused.layout import gradients_like
from pararnn.engines.rule import Rank, measured, rank_of_chunks
from pararnn.engines.tuned import Workload
from pararnn.program.affine import AffineForm
from pararnn.program.derive import gradients, leaves_of
from pararnn.program.program import Program, program_by_key
from pararnn.solvers.affine_cells import States, Tile, solve_by_chunks, solve_by_steps
from pararnn.solvers.chunks import with_first

STEPS = 32
"""Steps of a chunk."""
TILE_NUMBERS = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Numbers of gates in a tile, which has a chunk of each sequence at least."""


class ChunksTorch(Engine):
    """Scan over chunks, tile by tile: the chunks of some positions in time, of all sequences.

    A tile in which anything is not finite runs by the cell's own steps: so NaN is only where the
    loop has it, and no product overflows that the loop does not have. The backward pass runs tiles
    again, from the states at their starts.
    """

    solver, backend = "chunks", "torch"

    def why_not(self, program: Program) -> str | None:
        return _why_no_form(program.key)

    def rank(self, program: Program, workload: Workload) -> tuple[Rank, str]:
        return rank_of_chunks(program, workload.size[1], workload.device)

    @torch.no_grad()
    def forward(self, program: Program, args: Arguments) -> Solution:
        call = _Call.of(program, args)
        (output_size, _), (memory_size, _) = output_sizes(program, args)
        make = args.gates.new_empty if args.seq is None else args.gates.new_zeros
        output, memory = make(output_size), args.gates.new_empty(memory_size, dtype=args.dtype)
        slots, states = memory.flatten(0, 1), call.initial
        for span in call.spans:
            before = tuple(s[: span.sizes[0]] for s in states)
            if span.slot is not None:
                slots[span.slot : span.slot + span.sizes[0]] = call.sizes.join_states(before)
            tile = call.tile(span, before)
            out, after, is_finite = solve_by_chunks(tile, call.form)
            if not is_finite:
                out, after = solve_by_steps(tile)
            call.chunks.put(output, out.transpose(1, 2), span)
            states = tuple(map(with_first, states, after))
        own = own_memory([output, memory, *call.chunks.by_sequence(states)], args)
        return Solution(own[:2], own[2:], args.gates.new_zeros((1, 2), dtype=torch.int64))

    @torch.no_grad()
    def backward(self, program: Program, args: Arguments, inputs: BackwardInputs) -> Gradients:
        """Return the gradients, tile by tile from the last one."""
        with without_autocast(args.gates.device):
            return _differentiate(program, args, inputs)


def _differentiate(program: Program, args: Arguments, inputs: BackwardInputs) -> Gradients:
    (_, memory, *_), (grad_output, *_), grad_final, wanted = inputs
    call, grad_gates = _Call.of(program, args), torch.empty_like(args.gates)
    if args.seq is not None:
        grad_gates.zero_()
    by_head, slots, count = call.sizes.by_head(grad_gates), memory.flatten(0, 1), len(call.initial)
    pairs = zip(args.initial, grad_final, strict=True)
    adjoint = call.chunks.in_order([torch.zeros_like(h) if g is None else g for h, g in pairs])
    # Float64, as a plain sum over many tiles would lose what is small.
    sums = [torch.zeros_like(param, dtype=torch.float64) for param in args.params]
    of_bias = args.gates.new_zeros((call.sizes.heads, call.sizes.width), dtype=torch.float64)
    for span in reversed(call.spans):
        before = tuple(s[: span.sizes[0]] for s in call.initial)
        if span.slot is not None:
            before = call.sizes.split_states(slots[span.slot : span.slot + span.sizes[0]])
        tile = call.tile(span, before)
        arriving = torch.zeros_like(tile.gates[..., :1])
        if grad_output is not None:
            arriving = call.take(grad_output, span)
        if tile.real is not None:
            arriving = arriving.masked_fill(~tile.real[:, None, :, None], 0)
        of_final = (a[: span.sizes[0]] for a in adjoint)
        of_gates, *others = _pull_back(tile, call.form, (arriving, *of_final))
        call.chunks.put(by_head, of_gates.transpose(1, 2), span)
        adjoint = tuple(map(with_first, adjoint, others[:count]))
        for total, grad in zip(sums, others[count:], strict=True):
            total += grad
        if args.bias is not None:
            of_bias += of_gates.sum((0, 2))
    arrived = [g for g in grad_final if g is not None]
    initial = own_memory(call.chunks.by_sequence(adjoint), args, arrived)
    bias = of_bias.view(1, -1)
    return gradients_like(args, grad_gates, by_head, bias, (), sums, initial, wanted)


@constant_in_graphs
def _why_no_form(key: str) -> str | None:
    """Return the reason why a program's step has no form for chunks, or None."""
    form = program_by_key(key).affine_form()
    if isinstance(form, AffineForm):
        return None
    return f"chunks need a step that is affine in its matrix states, and here is {form}"


@dataclass(frozen=True)
class _Call:
    """A call in chunks. initial: the states (S, H, ...) of sequences in the order of chunks."""

    program: Program
    args: Arguments
    form: AffineForm
    sizes: HeadSizes
    chunks: Chunks
    initial: States
    spans: list[Span]

    @classmethod
    def of(cls, program: Program, args: Arguments) -> _Call:
        form, sizes = program.affine_form(args.dtype), program.step.head
        assert isinstance(form, AffineForm)
        chunks = chunks_of(args, STEPS)
        numbers = STEPS * sizes.heads * sizes.width
        spans = chunks.spans(int(measured(TILE_NUMBERS, args.gates.device)) // numbers)
        initial = chunks.in_order([h.to(args.dtype) for h in args.initial])
        return cls(program, args, form, sizes, chunks, initial, spans)

    def take(self, series: Tensor, span: Span) -> Tensor:
        """Return a series (B, T, H, ...) of a span's steps, (N, H, C, ...) in the compute dtype."""
        count = span.chunks.stop - span.chunks.start
        size = (count, series.shape[2], self.chunks.steps, *series.shape[3:])
        out = series.new_empty(size, dtype=self.args.dtype)
        self.chunks.take(out.transpose(1, 2), series, span)
        return out

    def tile(self, span: Span, states: States) -> Tile:
        """Return the tile of a span, given the states before it."""
        args = self.args
        gates = self.take(self.sizes.by_head(args.gates), span)
        if args.bias is not None:
            gates += args.bias.to(args.dtype).view(self.sizes.heads, 1, self.sizes.width)
        zero, real = None, None if self.chunks.real is None else self.chunks.real[span.chunks]
        if args.reset is not None:
            zero = args.reset.new_empty(gates.shape[0], gates.shape[2])
            self.chunks.take(zero, args.reset, span)
            zero = zero if real is None else zero & real
        return Tile(self.program, span.sizes, gates, args.params, states, zero, real)


def _pull_back(tile: Tile, form: AffineForm, arriving: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the gradients of a tile's gates, states and parameters, of those of its outputs and
    last states."""
    count = len(tile.states)
    leaves = leaves_of([tile.gates, *tile.states, *tile.params])
    own = replace(
        tile, gates=leaves[0], states=tuple(leaves[1 : count + 1]), params=leaves[count + 1 :]
    )

    def differentiate(output: Tensor, states: States) -> tuple[Tensor, ...]:
        output_like = arriving[0].expand(output.shape)
        return gradients([output, *states], leaves, [output_like, *arriving[1:]])

    with torch.enable_grad():
        output, states, is_finite = solve_by_chunks(own, form)
        if is_finite:
            grads = differentiate(output, states)
            if torch.stack([grad.sum() for grad in grads]).isfinite().all():
                return grads
        return differentiate(*solve_by_steps(own))


ENGINE = ChunksTorch()
