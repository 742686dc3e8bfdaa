"""Schedule of matrix cells with large matrices on a GPU: a cluster of blocks runs some rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.base.device import type_of
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
    PACK_THREADS,
    interface_of_clusters,
    lines_of,
    packed_words,
    runs_in_clusters,
    slices_of,
    with_rows,
)
from pararnn.codegen.interface import Values, Words
from pararnn.codegen.mixing_cuda import cluster_of, shared_bytes_of
from pararnn.engines.arguments import Arguments, Gradients, Solution, TensorSize
from pararnn.engines.engine import BackwardInputs
from pararnn.engines.fused import gpu as gpus
from pararnn.engines.fused.launch import (
    Addresses,
    Conversions,
    Launch,
    Temporary,
    conversions_for,
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
from pararnn.engines.fused.matrix import of_heads, words_of_gradients, words_of_inputs
from pararnn.engines.fused.mixing_cuda import Packed
from pararnn.engines.fused.schedule import Adjoint, Layouts
from pararnn.program.links import Lengths, passes_of
from pararnn.program.matrix import axes_by_kind
from pararnn.program.program import MATRIX, Program
from pararnn.program.statements import Outer


class ClusterPass(NamedTuple):
    """Pass on calls of one signature: its variant, and the launch; None if there is no step."""

    variant: ClusterVariant
    launch: Launch | None


class ClusterCuda(gpus.OnGpu):
    """Schedule of steps whose rows share large matrices, on a type of GPU."""

    family = MATRIX
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

    def forward(self, program: Program, args: Arguments) -> Solution:
        """Run the forward pass."""
        plan, tensors = self.launch(program, args)
        outputs, final = new_states(program, args)
        saved = tuple(
            args.gates.new_empty(size, dtype=dtype) for size, dtype in self.stored(program, args)
        )
        if plan.launch is not None:
            arrays = self._arrays(program, args, plan.variant)
            plan.launch.run([*tensors, outputs[0], *(saved or (None,)), *final, arrays])
        info = args.gates.new_zeros((1, 2), dtype=torch.int64)
        return Solution((*outputs, *saved), final, info)

    def backward(self, program: Program, args: Arguments, inputs: BackwardInputs) -> Gradients:
        """Run the backward pass, and add up the gradients of parameters."""
        states, grad_states, grad_final, wanted = inputs
        if len(states) < 3:
            states = self.forward(program, args.with_options(save_values=True)).states
        sizes, dtype, grad_output = program.step.head, args.dtype, grad_states[0]
        grad_gates = torch.empty_like(args.gates)
        kernel_gates = sizes.by_head(unit_stride(grad_gates))
        incoming = None if grad_output is None else unit_stride(grad_output)
        plan, tensors = self.launch(program, args, Adjoint(kernel_gates, (), [incoming]))
        grad_initial = new_grad_initial(args, grad_final)
        (batch, steps, _), counts = args.size, program.param_numbers
        new = args.gates.new_empty
        partial = args.gates.new_zeros((batch, sizes.heads, sizes.width + sum(counts)), dtype=dtype)
        numbers = stream_offsets(program, args.gates.dtype)[-1]
        size = batch, steps, sizes.heads, plan.variant.stream_parts, numbers
        streams = new(size, dtype=plan.variant.stream_dtype)
        # Sequences without a step have no gradient.
        memories = args.params[len(counts) :]
        grad_memories = [memory.new_zeros(memory.shape, dtype=dtype) for memory in memories]
        line_sums = None
        if plan.launch is not None:
            line_sums = self._line_sums(program, args, plan.variant)
            ends = [None if grad is None else grad.contiguous() for grad in grad_final]
            initial = grad_initial or (None,) * len(grad_final)
            results = [kernel_gates, *initial, partial, streams, *grad_memories]
            results += [line_sums, self._arrays(program, args, plan.variant)]
            plan.launch.run([*tensors, states[2].contiguous(), incoming, *ends, *results])
        bias, grad_params = of_heads(program, sum_spans(partial, args.samples))
        if "params" in wanted and line_sums is not None:
            for number, grad in _sums_of_lines(program, plan.variant, line_sums):
                grad_params[number] = grad_params[number] + grad
        if "params" in wanted:
            for number, grad in _outer_products(program, streams, args):
                grad_params[number] = grad_params[number] + grad.to(dtype)
        grad_params += grad_memories
        return gradients_like(
            args, grad_gates, kernel_gates, bias, (), grad_params, grad_initial, wanted
        )

    def _arrays(self, program: Program, args: Arguments, variant: ClusterVariant) -> Tensor | None:
        """Return the memory of values that all blocks read, None where there are none."""
        numbers = arrays_of(program, variant)[""]
        units = -(-args.size[0] // variant.rows) * program.step.head.heads
        return args.gates.new_empty((units, numbers), dtype=args.dtype) if numbers else None

    def _line_sums(
        self, program: Program, args: Arguments, variant: ClusterVariant
    ) -> Tensor | None:
        """Return zeros for the sums over lines of each block, (clusters of rows, H, blocks,
        numbers), None where there are none."""
        numbers, heads = line_sums_of(program, variant)[-1], program.step.head.heads
        size = -(-args.size[0] // variant.rows), heads, variant.slices, numbers
        return args.gates.new_zeros(size, dtype=args.dtype) if numbers else None

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
            return ClusterPass(variant, None)
        kernels = gpu.kernels(program, variant, gpu.capability(device))
        # Other GPUs of this capability have larger clusters.
        while (
            variant.slices > 1
            and gpu.call(device, kernels["run"].most_in_cluster, device.index) < variant.slices
        ):
            variant = variant._replace(slices=variant.slices // 2)
            kernels = gpu.kernels(program, variant, gpu.capability(device))
        kernel = kernels["run"]
        cluster = variant.slices if variant.slices > 1 else 0
        run = gpus.GpuKernel(gpu, device, kernel, (units * variant.slices, 1), cluster=cluster)
        packed = self._packed(program, variant, kernels, args)
        template = template_of(_words(program, layouts, args, bool(packed)))
        return ClusterPass(variant, Launch(run, template, packed))

    def _packed(
        self, program: Program, variant: ClusterVariant, kernels: Mapping[str, Any], args: Arguments
    ) -> tuple[Packed, ...]:
        """Return the temporary with a call's matrices as kernels read them."""
        count, heads = packed_words(program, variant), program.step.head.heads
        if not count:
            return ()
        interface, addresses = interface_of_clusters(program), Addresses()
        words: Values = {
            "packed": addresses.next(),
            "heads": heads,
            "params": addresses.array(len(program.params)),
        }
        grid = -(-heads * count // PACK_THREADS), 1
        kernel = gpus.GpuKernel(self.gpu, args.gates.device, kernels["pack"], grid)
        launch = Launch(kernel, template_of(interface.pack("PackProblem", words)))
        first = 2 + len(args.fields)
        params = slice(first, first + len(program.params))
        return (Packed(Temporary((heads * count,), torch.int32), launch, params),)


def _lines(program: Program, args: Arguments) -> tuple[int, ...]:
    """Return the lines of kernels for a call, of each axis that only memories have."""
    return lines_of(args.lengths_of_calls(program).values())


def _words(program: Program, layouts: Layouts, args: Arguments, has_packed: bool) -> list[int]:
    """Return the arguments of a pass on calls of a signature, `args` in kernel layout; has_packed:
    whether it multiplies by matrices, whose address is the last."""
    interface, addresses = interface_of_clusters(program), Addresses()
    counts = interface.counts
    inputs = words_of_inputs(program, args, addresses, counts)
    inputs["lines"] = [*args.lengths_of_calls(program).values()]
    words: dict[str, Words] = {"in": pack_known(interface, "Inputs", inputs)}
    if layouts.gates is None:
        words |= {"output": addresses.next(), "saved": addresses.next()}
        words["final"] = addresses.array(counts.states)
        words["arrays"] = addresses.next()
        words["packed"] = addresses.next() if has_packed else 0
        return interface.pack("ForwardLaunch", words)
    words |= {
        "saved": addresses.next(),
        **words_of_gradients(layouts, addresses, counts),
        "streams": addresses.next(),
        "grad_memories": addresses.array(counts.memories),
        "line_sums": addresses.next(),
        "arrays": addresses.next(),
        "packed": addresses.next() if has_packed else 0,
    }
    return interface.pack("BackwardLaunch", words)


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
        products = [_multiply(x, y) for x, y in pairs]
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


def _multiply(x: Tensor, y: Tensor) -> Tensor:
    """Return a batched product, summed in single precision at least."""
    if x.dtype.itemsize > 2:
        return torch.bmm(x, y)
    if type_of(x.device).accelerator:
        return torch.bmm(x, y, torch.float32)
    return torch.bmm(x.float(), y.float())
