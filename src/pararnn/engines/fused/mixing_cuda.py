"""Schedule on a GPU of steps that mix channels inside heads: kernels, and products after them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.base.errors import EngineError
from pararnn.codegen.families import interface_of
from pararnn.codegen.mixing_cuda import (
    PACK_THREADS,
    MixingVariant,
    cluster_of,
    gives_sums,
    shared_bytes_of,
    tiles_of,
    vector_dtype,
)
from pararnn.codegen.nvrtc import MAX_CLUSTER
from pararnn.codegen.source import chunk_of
from pararnn.engines.arguments import Arguments
from pararnn.engines.fused import gpu as gpus
from pararnn.engines.fused.launch import (
    Addresses,
    Launch,
    pack_known,
    template_of,
    to_kernel_layout,
)
from pararnn.engines.fused.layout import head_strides, heads_of
from pararnn.engines.fused.schedule import Layouts
from pararnn.engines.fused.vectors import MixingSchedule, VectorPass, problem_values
from pararnn.program.mixing import OuterIndices
from pararnn.program.program import Program

SUM_CHANNELS = 32
"""Channels of a block that adds up sums."""
FEW_WARPS, MIN_UNITS = 8, 8
"""Warps a multiprocessor, of 8 units and 4 rows each, up to which blocks of 4 rows take less time
than half as many of 8."""
PRODUCT_TILE = 128
"""Rows and columns of a result that a block of a batched product computes, about."""


class OuterProducts(NamedTuple):
    """Outer products of a backward pass, whose sums are the gradients of matrices.

    lefts, rights: numbers of vectors of a step. size: heads, steps of all rows, and channels of a
    head. dtype: of vectors. cores: multiprocessors. samples: groups of adjacent rows, of which each
    has sums of its own.
    """

    outers: tuple[OuterIndices, ...]
    lefts: int
    rights: int
    size: tuple[int, int, int]
    dtype: torch.dtype
    cores: int
    samples: int

    def new_vectors(self, gates: Tensor) -> list[Tensor]:
        """Allocate the left and the right vectors (heads, steps, vector, K)."""
        heads, steps, width = self.size
        sizes = ((heads, steps, count, width) for count in (self.lefts, self.rights))
        return [gates.new_empty(size, dtype=self.dtype) for size in sizes]

    def sum(self, grads: Sequence[Tensor | None], lefts: Tensor, rights: Tensor) -> None:
        """Sum the outer products of vectors to matrices' gradients."""
        totals: dict[int, Tensor] = {}
        samples, (heads, steps, width) = self.samples, self.size
        pieces, steps = heads * samples, steps // samples
        # One product for a vector of one side, with all of the other side that go with it.
        by_left = self.lefts <= self.rights
        for index in range(min(self.lefts, self.rights)):
            outers = [o for o in self.outers
                      if index == (o.left_vector if by_left else o.right_vector)]  # fmt: skip
            of_left = _span([outer.left_vector for outer in outers])
            of_right = _span([outer.right_vector for outer in outers])
            x, y = lefts[:, :, of_left], rights[:, :, of_right]
            chunks = _chunks(pieces, steps, x.shape[2] * width, y.shape[2] * width, self.cores)
            size = heads, samples, chunks, x.shape[2], width, y.shape[2], width
            x = x.reshape(pieces * chunks, steps // chunks, -1)
            y = y.reshape(pieces * chunks, steps // chunks, -1)
            products = gpus.multiply(x.mT, y).view(size).permute(3, 5, 1, 0, 4, 6, 2)
            sums = products.sum(-1) if chunks > 1 else products.squeeze(-1)
            for outer in outers:
                i, j = outer.left_vector - of_left.start, outer.right_vector - of_right.start
                term, total = sums[i, j], totals.get(outer.matrix)
                totals[outer.matrix] = term if total is None else total + term
        results = []
        for matrix in totals:
            grad = grads[matrix]
            assert grad is not None
            results.append(grad.view(samples, heads, width, width))
        torch._foreach_copy_(results, [*totals.values()])  # one kernel for all


@dataclass(frozen=True)
class GpuMixingPass(VectorPass):
    """Pass of a step that mixes channels on a GPU.

    products: after a backward pass. without_vectors: builds the launch of one that writes no
    vectors for them.
    """

    products: OuterProducts | None = None
    without_vectors: Callable[[], Launch] | None = None

    def new_params(self, args: Arguments) -> list[Tensor]:
        zeros, new = args.gates.new_zeros, args.gates.new_empty
        if self.launch is None:
            new = zeros
        matrices = {outer.matrix for outer in self.products.outers} if self.products else set()
        many = self.samples
        return [
            new(p.shape, dtype=self.weights)
            if p.ndim == 1
            else (new if i in matrices else zeros)((*many, *p.shape), dtype=p.dtype)
            for i, p in enumerate(args.params)
        ]

    def backward(
        self, tensors: list[Tensor | None], weights: list[Tensor | None], wanted: Sequence[str]
    ) -> None:
        launch, gates, vectors = self.launch, tensors[0], list[Tensor]()
        if launch is None or gates is None:
            return
        if "params" in wanted and self.products is not None:
            vectors = self.products.new_vectors(gates)
        elif self.without_vectors is not None:
            launch = self.without_vectors()
        launch.run([*tensors, *weights, *(vectors or (None, None))])
        self.add_up([tensors[-1], *weights], wanted)
        if vectors and self.products is not None:
            self.products.sum(weights[1:], *vectors)


class MixingCuda(gpus.OnGpu, MixingSchedule):
    """Schedule of the loop over steps that mix channels on a type of GPU."""

    def can_save_values(self, program: Program, dtype: torch.dtype) -> bool:
        """Return True if pre-activations can be those of returned states."""
        return gives_sums(program, dtype)

    def check_backward(self, program: Program, args: Arguments) -> None:
        batch, steps, channels = args.size
        if not batch or not steps:
            return
        tensors = to_kernel_layout(args, self.conversions(args, True))
        args = Arguments.unflatten(tensors, args.with_options(save_values=True).flatten()[1])
        forward = Layouts(None, (), False, self.facts(program, args, tensors, ()))
        incoming = ((steps * channels, channels, 1),) * program.num_states
        for layouts in (forward, forward._replace(gates=args.gates.stride(), incoming=incoming)):
            tiles_of(program, self._variant(program, layouts, args))

    def _variant(self, program: Program, layouts: Layouts, args: Arguments) -> MixingVariant:
        """Return the variant of a pass on calls of a signature.

        Raises EngineError for sizes that kernels do not support.
        """
        gates, device, (rows, length, channels) = args.gates, args.gates.device, args.size
        (heads, width), dtype, size = heads_of(gates.shape), gates.dtype, gates.dtype.itemsize
        mixing, capability = program.mixing[args.dtype], self.gpu.capability(device)
        matrix_dtype = next((args.params[i].dtype for i in mixing.matrices), args.dtype)
        strides = [head_strides(gates.shape, gates.stride())]
        chunk, _, other_chunk = layouts.facts
        offsets = [chunk, other_chunk, width * size, channels * size]
        if layouts.gates is not None:
            strides.append(head_strides(gates.shape, layouts.gates))
            offsets.append(width * vector_dtype(dtype, matrix_dtype).itemsize)
        of_incoming = [stride[:2] for stride in layouts.incoming if stride is not None]
        offsets += [s * size for row in (*strides, *of_incoming) for s in row]
        variant = MixingVariant(
            matrix_dtype=matrix_dtype,
            heads=heads,
            head_width=width,
            gate_gap=width if {gate for _, _, gate, _ in strides} == {width} else 0,
            chunk=chunk_of(*offsets),
            shared=shared_bytes_of(capability),
            cluster=cluster_of(capability),
            sums=layouts.gates is None and bool(args.options.save_values),
            has_starts=layouts.has_starts,
            **gpus.variant_fields(layouts, args),
        )
        cores = self.gpu.cores(device)
        if args.options.one_layout:
            variant = variant._replace(sides=1)
        else:
            variant = _with_sides(program, variant, -(-rows // 4) * heads, cores)
        block_rows = 4 * variant.sides
        gpus.check_limits(
            length,
            -(-rows // block_rows) * heads,
            f"blocks of {block_rows} rows and a head",
            f"B = {rows} and {heads} heads",
            blocks_a_unit=MAX_CLUSTER,
        )
        return variant._replace(whole=rows % block_rows == 0)

    def plan(self, program: Program, layouts: Layouts, args: Arguments) -> GpuMixingPass:
        gpu, weights = self.gpu, gpus.weight_dtype(args)
        (rows, length, channels), device, dtype = args.size, args.gates.device, args.dtype
        if not rows or not length:
            return GpuMixingPass(None, 0, weights, args.samples)
        variant, mixing = self._variant(program, layouts, args), program.mixing[dtype]
        heads, width, blocks = variant.heads, variant.head_width, -(-rows // (4 * variant.sides))
        interface, addresses = interface_of(program, "cuda", self.solver), Addresses()
        strides = head_strides(args.gates.shape, args.gates.stride())
        values = problem_values(interface, addresses, layouts, args, strides)
        for name in ("left", "right") if layouts.gates is not None else ():
            values[name] = addresses.next()
        values["packed"] = addresses.next() if tiles_of(program, variant).words else 0
        template = template_of(pack_known(interface, layouts.struct("Problem"), values))
        capability = gpu.capability(device)

        def launch_of(variant: MixingVariant) -> Launch:
            kernels, tiles = gpu.kernels(program, variant, capability), tiles_of(program, variant)
            slices, kernel, words = tiles.slices, kernels["run"], heads * tiles.words
            if slices > 1:
                most = gpu.call(device, kernel.most_in_cluster, device.index)
                if most < slices:  # than other GPUs of this capability have
                    return launch_of(variant._replace(cluster=most))
            grid, cluster = (heads * blocks * slices, 1), slices if slices > 1 else 0
            run = gpus.GpuKernel(gpu, device, kernel, grid, cluster=cluster)
            if not words:
                return Launch(run, template)
            grid = -(-words // (4 * tiles.matrix_parts * PACK_THREADS)), 1
            pack = gpus.GpuKernel(gpu, device, kernels["pack"], grid)
            return Launch(run, template, (gpus.packed(pack, interface, args, heads, words),))

        launch = launch_of(variant)
        if layouts.gates is None:
            return GpuMixingPass(launch, rows, weights)
        products, sums = None, None
        if mixing.outers:
            products = OuterProducts(
                mixing.outers,
                mixing.lefts,
                mixing.rights,
                (heads, rows * length, width),
                vector_dtype(args.gates.dtype, variant.matrix_dtype),
                gpu.cores(device),
                math.prod(args.samples),
            )
        if not args.samples and (summed := len(program.gates) + len(mixing.channel_params)):
            kernel = gpu.kernels(program, variant, capability)["sum_weights"]
            grid = -(-channels // SUM_CHANNELS), summed
            of_sums = gpus.sum_template(interface, rows, mixing.channel_params)
            sums = Launch(gpus.GpuKernel(gpu, device, kernel, grid), of_sums)
        without = cache(partial(launch_of, variant._replace(vectors=False)))
        return GpuMixingPass(launch, rows, weights, args.samples, sums, products, without)


def _span(indices: Sequence[int]) -> slice:
    return slice(min(indices), 1 + max(indices))


def _chunks(heads: int, steps: int, rows: int, columns: int, cores: int) -> int:
    """Return the chunks of steps whose products run at once, so that they keep a GPU busy."""
    tiles = heads * -(-rows // PRODUCT_TILE) * -(-columns // PRODUCT_TILE)
    chunks = 1
    while tiles * chunks < cores and steps % (2 * chunks) == 0 and steps > 128 * chunks:
        chunks *= 2
    return chunks


def _with_sides(program: Program, variant: MixingVariant, blocks: int, cores: int) -> MixingVariant:
    """Return a variant with the columns of a lane.

    One where `blocks` of 4 rows are few, as they take less time than half as many of 8, in training
    passes of narrow heads in 16 bits, and where two do not fit.

    Raises EngineError where neither fits.
    """
    one, two = variant._replace(sides=1), variant._replace(sides=2)
    slices, backward = tiles_of(program, one).slices, variant.direction == "backward"
    warps = blocks * -(-variant.head_width // MIN_UNITS)
    if (blocks * slices <= cores) if slices > 1 else (warps <= FEW_WARPS * cores):
        return one
    if slices == 1 and variant.dtype.itemsize == 2 and (backward or variant.sums):
        return one
    try:
        tiles_of(program, two)
    except EngineError:
        return one
    return two
