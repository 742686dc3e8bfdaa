"""Schedule of matrix cells with large matrices on a GPU: a cluster of blocks runs some rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pararnn.cells.matrix import Axes
from pararnn.codegen.cluster_layout import (
    CLUSTERS,
    ClusterVariant,
    arrays_of,
    layout_of,
    line_sums_of,
    passes_in,
    reduces,
    saved_numbers,
    steps_of,
    stream_offsets,
)
from pararnn.codegen.clusters import (
    interface_of_clusters,
    lines_of,
    packed_words,
    runs_in_clusters,
    slices_of,
    with_rows,
)
from pararnn.codegen.mixing_cuda import PACK_THREADS, cluster_of, shared_bytes_of
from pararnn.engines.arguments import Arguments, Gradients, TensorSize
from pararnn.engines.engine import BackwardInputs
from pararnn.engines.fused import gpu as gpus
from pararnn.engines.fused.launch import (
    Allocation,
    Conversions,
    Launch,
    Temporary,
    conversions_for,
)
from pararnn.engines.fused.layout import unit_stride
from pararnn.engines.fused.matrix import MatrixSchedule, template_for
from pararnn.engines.fused.schedule import Layouts, Pass
from pararnn.program.links import Lengths, passes_of
from pararnn.program.matrix import axes_by_kind
from pararnn.program.program import Program
from pararnn.program.statements import Outer


@dataclass(frozen=True)
class ClusterPass(Pass):
    """Pass on calls of one signature, of a variant."""

    variant: ClusterVariant | None = None


class ClusterCuda(gpus.OnGpu, MatrixSchedule):
    """Schedule of steps whose rows share large matrices, on a type of GPU."""

    code = CLUSTERS

    def takes(self, program: Program) -> bool:
        return runs_in_clusters(program)

    def sums_samples(self, program: Program) -> bool:
        """Return False for products inside lines, which a block adds up over its rows."""
        return not passes_of(program, torch.float32).backward.line_outers

    def can_save_values(self, program: Program, dtype: torch.dtype) -> bool:
        """Return True: a forward pass keeps states, sums and reductions of all steps."""
        return True

    def stored(self, program: Program, args: Arguments) -> list[TensorSize]:
        """Return the size of what a forward pass keeps, (B, T, H, numbers)."""
        if not args.options.save_values:
            return []
        batch, steps, _ = args.size
        numbers = saved_numbers(program.key, args.gates.dtype, _lines(program, args))
        return [((batch, steps, program.step.head.heads, numbers), args.dtype)]

    def conversions(self, args: Arguments, backward: bool) -> Conversions:
        dtype = gpus.common_dtype(args.params, args.dtype)
        return conversions_for(args, unit_stride, dtype, dtype)

    def facts(self, program: Program, args: Arguments, *tensors: object) -> tuple[int, ...]:
        """Return nothing: launches depend on what a signature says."""
        return ()

    def check_backward(self, program: Program, args: Arguments) -> None:
        for direction in ("saving", "backward"):
            layout_of(program, self._variant(program, args, direction))

    def _variant(self, program: Program, args: Arguments, direction: str) -> ClusterVariant:
        capability = self.gpu.capability(args.gates.device)
        variant = ClusterVariant(
            direction=direction,
            dtype=args.gates.dtype,
            matrix_dtype=gpus.common_dtype(args.params, args.dtype),
            events=gpus.has_events(args),
            slices=slices_of(program, cluster_of(capability)),
            shared=shared_bytes_of(capability),
            lines=_lines(program, args),
            reduces=reduces(program, args.gates.dtype),
        )
        if args.options.one_layout:
            return variant
        return with_rows(program, variant, args.size[0], self.gpu.cores(args.gates.device))

    def kept(self, outputs: Sequence[Tensor], stored: Sequence[Tensor]) -> Tensor | None:
        """Return what a forward pass has stored, if anything."""
        return stored[0] if stored else None

    def backward(self, program: Program, args: Arguments, inputs: BackwardInputs) -> Gradients:
        if len(inputs.states) < 3:
            again = self.forward(program, args.with_options(save_values=True))
            inputs = inputs._replace(states=again.states)
        return super().backward(program, args, inputs)

    def new_sums(self, program: Program, args: Arguments, launch: ClusterPass) -> Any:
        """Allocate the vectors of outer products, and zeros for the sums over lines of each block,
        (clusters of rows, H, blocks, numbers), None where there are none."""
        variant, heads, (batch, steps, _) = launch.variant, program.step.head.heads, args.size
        assert variant is not None
        numbers = stream_offsets(program, args.gates.dtype)[-1]
        size = batch, steps, heads, variant.stream_parts, numbers
        streams = args.gates.new_empty(size, dtype=variant.stream_dtype)
        numbers = line_sums_of(program, variant)[-1]
        lines = -(-batch // variant.rows), heads, variant.slices, numbers
        return [streams, args.gates.new_zeros(lines, dtype=args.dtype) if numbers else None]

    def sums_of(
        self, program: Program, args: Arguments, launch: ClusterPass, results: Sequence[Any]
    ) -> Iterable[tuple[int, Tensor]]:
        streams, line_sums = results
        if line_sums is not None and launch.variant is not None:
            yield from _sums_of_lines(program, launch.variant, line_sums)
        for number, grad in _outer_products(program, streams, args):
            yield number, grad.to(args.dtype)

    def plan(self, program: Program, layouts: Layouts, args: Arguments) -> ClusterPass:
        sizes, device, gpu = program.step.head, args.gates.device, self.gpu
        rows, length, _ = args.size
        direction = layouts.direction()
        if direction == "forward" and args.options.save_values:
            direction = "saving"
        variant = self._variant(program, args, direction)
        units = -(-rows // variant.rows) * sizes.heads if length else 0
        unit = f"clusters of {variant.rows} rows and a head"
        gpus.check_limits(length, units, unit, f"B = {rows}", blocks_a_unit=variant.slices)
        if not units:
            return ClusterPass(None, rows, variant)
        kernels = gpu.kernels(program, variant, gpu.capability(device))
        # Other GPUs of this capability have larger clusters.
        while (
            variant.slices > 1
            and gpu.call(device, kernels["run"].most_in_cluster, device.index) < variant.slices
        ):
            variant = variant._replace(slices=variant.slices // 2)
            kernels = gpu.kernels(program, variant, gpu.capability(device))
        cluster = variant.slices if variant.slices > 1 else 0
        grid = units * variant.slices, 1
        run = gpus.GpuKernel(gpu, device, kernels["run"], grid, cluster=cluster)
        interface, memory = interface_of_clusters(program), dict[str, Allocation]()
        if numbers := arrays_of(program, variant)[""]:
            memory["arrays"] = Temporary((units, numbers), args.dtype)
        if words := sizes.heads * packed_words(program, variant):
            pack = gpus.GpuKernel(gpu, device, kernels["pack"], (-(-words // PACK_THREADS), 1))
            memory["packed"] = gpus.packed(pack, interface, args, sizes.heads, words)
        absent = dict.fromkeys({"arrays", "packed"} - {*memory}, 0)
        template = template_for(program, args, layouts, interface, absent)
        return ClusterPass(Launch(run, template, (*memory.values(),)), rows, variant)


def _lines(program: Program, args: Arguments) -> tuple[int, ...]:
    """Return the lines of kernels for a call, of each axis that only memories have."""
    return lines_of(args.lengths_of_calls(program).values())


def _outer_products(program: Program, streams: Tensor, args: Arguments) -> list[tuple[int, Tensor]]:
    """Return terms of the gradients of matrices, (*samples, H, ...) in the order of their axes, by
    the number of the parameter: sums over rows and steps of outer products of vectors."""
    samples, dtype = args.samples, args.gates.dtype
    backward, offsets = passes_in(program, dtype).backward, stream_offsets(program, dtype)
    params = axes_by_kind(program.step)["param"]
    count, (batch, steps) = math.prod(samples), streams.shape[:2]

    def vector(part: int, number: int, shared: Axes, others: Axes) -> Tensor:
        """Return a vector's terms as (samples, H and shared axes, steps of rows, other axes)."""
        axes, lengths = backward.streams[number].axes, program.step.head.lengths
        size = [lengths[axis] for axis in axes]
        x = streams[..., part, offsets[number] : offsets[number + 1]].unflatten(-1, size)
        x = x.unflatten(0, (count, batch // count))
        of_shared, of_others = ([4 + axes.index(a) for a in group] for group in (shared, others))
        x = x.permute(0, 3, *of_shared, 1, 2, *of_others)
        first, last = x.shape[: 2 + len(shared)], x.shape[x.ndim - len(others) :]
        return x.reshape(math.prod(first), batch // count * steps, math.prod(last))

    count_of_terms, terms = streams.shape[-2], []
    for outer, left, right in backward.outers:
        shape = params[outer.param]
        shared, lhs, rhs = _sides(outer, shape)
        lefts = [vector(i, left, shared, lhs).mT for i in range(count_of_terms)]
        rights = [vector(i, right, shared, rhs) for i in range(count_of_terms)]
        # As in the kernels, terms whose numbers add up to less than the count of terms.
        pairs = ((x, y) for i, x in enumerate(lefts) for y in rights[: count_of_terms - i])
        products = [gpus.multiply(x, y) for x, y in pairs]
        product = functools.reduce(torch.add, products)
        heads, lengths = program.step.head.heads, program.step.head.lengths
        size = [lengths[axis] for axis in (*shared, *lhs, *rhs)]
        product = product.reshape(*samples, heads, *size)
        if len({*shape}) == len(shape):
            order = [(*shared, *lhs, *rhs).index(axis) for axis in shape]
            first = product.ndim - len(order)
            product = product.permute(*range(first), *(first + i for i in order))
        terms.append((outer.param, product))
    return terms


def _sums_of_lines(
    program: Program, variant: ClusterVariant, sums: Tensor
) -> list[tuple[int, Tensor]]:
    """Return terms of the gradients of matrices that are sums over lines, as `_outer_products`."""
    offsets, lengths = line_sums_of(program, variant), Lengths(program.step.head.lengths)
    params, whole, terms = axes_by_kind(program.step)["param"], sums.sum((0, 2)), []
    for i, (param, lhs, rhs) in enumerate(steps_of(program, variant).line_outers):
        axes = lhs.axes[1], rhs.axes[1]
        grad = whole[:, offsets[i] : offsets[i + 1]].unflatten(-1, [lengths[a] for a in axes])
        terms.append((param, grad if axes == params[param] else grad.mT))
    return terms


def _sides(outer: Outer, shape: Axes) -> tuple[Axes, Axes, Axes]:
    """Return the axes of a parameter that both vectors have, and the others of each of these."""
    if len({*shape}) < len(shape):
        return (), outer.lhs.axes, outer.rhs.axes
    shared = tuple(axis for axis in outer.lhs.axes if axis in outer.rhs.axes)
    lhs, rhs = (
        tuple(axis for axis in vector.axes if axis not in shared)
        for vector in (outer.lhs, outer.rhs)
    )
    return shared, lhs, rhs
