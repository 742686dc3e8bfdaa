"""Passes on a GPU of steps that mix channels inside heads: kernels, and products after them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.base.device import type_of
from pararnn.base.errors import EngineError
from pararnn.codegen.families import interface_of
from pararnn.codegen.interface import Interface, Values, Words
from pararnn.codegen.mixing_cuda import (
    MixingVariant,
    Tiles,
    cluster_of,
    shared_bytes_of,
    tiles_of,
    vector_dtype,
)
from pararnn.codegen.nvrtc import MAX_CLUSTER
from pararnn.codegen.source import chunk_of
from pararnn.codegen.targets import Gpu
from pararnn.engines.arguments import Arguments
from pararnn.engines.fused.launch import (
    Addresses,
    Template,
    adjoint_values,
    input_values,
    template_of,
)
from pararnn.engines.fused.layout import (
    common_chunk,
    gate_strides,
    head_strides,
    heads_of,
    row_and_time,
)
from pararnn.program.mixing import Mixing
from pararnn.program.program import Program

MAX_LENGTH, MAX_BLOCKS = 2**30, 2**31 - 1
PACK_THREADS, SUM_CHANNELS = 256, 32
"""Threads of a block that packs matrices; channels of one that adds up sums."""
FEW_WARPS, MIN_UNITS = 8, 8
"""Warps a multiprocessor, of 8 units and 4 rows each, up to which blocks of 4 rows take less time
than half as many of 8."""
PRODUCT_TILE = 128
"""Rows and columns of a result that a block of a batched product computes, about."""


class MixingLayouts(NamedTuple):
    """Layouts on which a pass depends in addition to a call's signature.

    chunk: bytes that may be copied at once by the addresses of all that a ring reads. gates:
    strides of the gates' gradient, None in the forward pass. arriving: strides (B, T) of the
    gradients that arrive, None for an absent one. has_starts: True if steps of a forward pass
    start from given states.
    """

    chunk: int
    gates: tuple[int, ...] | None = None
    arriving: tuple[tuple[int, int] | None, ...] = ()
    has_starts: bool = False


class Kernels(NamedTuple):
    """Kernels of a variant by name, and its tiles."""

    kernels: Mapping[str, Any]
    tiles: Tiles


class MixingLaunch(NamedTuple):
    """Pass on calls of one signature. Without blocks there is nothing to launch.

    weights, compute, gates, matrices: dtypes of the weights' gradients, of computations, and of the
    arguments. params: the slice of the params among a call's tensors. size: heads, rows, steps of a
    row, and channels of a head. spans: blocks of a head. cores: multiprocessors. run: the kernels.
    without_vectors: builds those that write no vectors of outer products. templates: words of each
    kernel.
    """

    gpu: Gpu
    weights: torch.dtype
    compute: torch.dtype
    gates: torch.dtype
    matrices: torch.dtype
    params: slice
    mixing: Mixing
    size: tuple[int, int, int, int] = (0, 0, 0, 0)
    spans: int = 0
    cores: int = 1
    run: Kernels | None = None
    without_vectors: Callable[[], Kernels] | None = None
    templates: Mapping[str, Template] | None = None

    def new_info(self, gates: Tensor) -> Tensor:
        """Allocate the counts of a forward pass."""
        return gates.new_zeros((1, 2), dtype=torch.int64)

    def new_weights(self, args: Arguments, gates: int) -> tuple[Tensor | None, list[Tensor]]:
        """Allocate the gradients of bias and params; zero where nothing is written to them."""
        zeros, new = args.gates.new_zeros, args.gates.new_empty
        if self.run is None:
            new = zeros
        matrices = {outer.matrix for outer in self.mixing.outers}
        grad_bias = None if args.bias is None else new(args.bias.shape, dtype=self.weights)
        return grad_bias, [
            new(p.shape, dtype=self.weights)
            if p.ndim == 1
            else (new if i in matrices else zeros)(p.shape, dtype=p.dtype)
            for i, p in enumerate(args.params)
        ]

    def forward(self, tensors: list[Tensor | None], info: Tensor) -> None:
        """Launch a forward pass."""
        if self.run is not None:
            self._run(self.run, tensors)

    def backward(
        self, tensors: list[Tensor | None], weights: list[Tensor | None], wanted: Sequence[str]
    ) -> None:
        """Launch a backward pass, and add up the gradients of weights if wanted."""
        gates, partial = tensors[0], tensors[-1]
        if self.run is None or gates is None or partial is None:
            return
        mixing, (heads, rows, length, width) = self.mixing, self.size
        left_vectors = right_vectors = None
        kernels = self.run
        if "params" in wanted and mixing.outers:
            dtype = vector_dtype(self.gates, self.matrices)
            left_vectors, right_vectors = (
                gates.new_empty((heads, rows * length, n, width), dtype=dtype)
                for n in (mixing.lefts, mixing.rights)
            )
        elif self.without_vectors is not None:
            kernels = self.without_vectors()
        self._run(kernels, [*tensors, left_vectors, right_vectors])
        if ("bias" in wanted or "params" in wanted) and partial.shape[1]:
            grid = (-(-heads * width // SUM_CHANNELS), partial.shape[1])
            self._call(self.run, "sum_weights", grid, [partial, *weights])
        if left_vectors is not None and right_vectors is not None:
            self._sum_outers(weights[1:], left_vectors, right_vectors)

    def _pack(self, kernels: Kernels, tensors: Sequence[Tensor | None]) -> Tensor | None:
        """Return the packed matrices of a kernel; None if it needs none."""
        gates, words = tensors[0], self.size[0] * kernels.tiles.words
        if not words or gates is None:
            return None
        matrices = gates.new_empty(words, dtype=torch.int32)
        threads = words // (4 * kernels.tiles.matrix_parts)
        grid = (-(-threads // PACK_THREADS), 1)
        self._call(kernels, "pack", grid, [*tensors[self.params], matrices])
        return matrices

    def _run(self, kernels: Kernels, tensors: Sequence[Tensor | None]) -> None:
        slices = kernels.tiles.slices
        grid = (self.size[0] * self.spans * slices, 1)
        words = [self._pack(kernels, tensors), *tensors]
        self._call(kernels, "run", grid, words, slices if slices > 1 else 0)

    def _call(
        self,
        kernels: Kernels,
        name: str,
        grid: tuple[int, int],
        tensors: Sequence[Tensor | None],
        cluster: int = 0,
    ) -> None:
        assert self.templates is not None
        device = next(t.device for t in tensors if isinstance(t, Tensor))
        words = self.templates[name].fill(tensors)
        self.gpu.call(
            device, kernels.kernels[name], grid, words, self.gpu.stream(device), cluster=cluster
        )

    def _sum_outers(
        self, grads: Sequence[Tensor | None], left_vectors: Tensor, right_vectors: Tensor
    ) -> None:
        """Sum the outer products of vectors (heads, steps, vector, K) to matrices' gradients."""
        totals: dict[int, Tensor] = {}
        heads, rows, length, width = self.size
        steps = rows * length
        multiply: Callable[[Tensor, Tensor], Tensor] = torch.bmm
        if left_vectors.dtype != self.compute:
            on_gpu = type_of(left_vectors.device).accelerator
            multiply = _bmm_on_gpu if on_gpu else _bmm_on_cpu
        # One product for a vector of one side, with all of the other side that go with it.
        by_left = left_vectors.shape[2] <= right_vectors.shape[2]
        for index in range(min(left_vectors.shape[2], right_vectors.shape[2])):
            outers = [o for o in self.mixing.outers
                      if index == (o.left_vector if by_left else o.right_vector)]  # fmt: skip
            lefts = _span([outer.left_vector for outer in outers])
            rights = _span([outer.right_vector for outer in outers])
            x, y = left_vectors[:, :, lefts], right_vectors[:, :, rights]
            size = heads, -1, x.shape[2], width, y.shape[2], width
            chunks = _chunks(heads, steps, x.shape[2] * width, y.shape[2] * width, self.cores)
            x = x.reshape(heads * chunks, steps // chunks, -1)
            y = y.reshape(heads * chunks, steps // chunks, -1)
            sums = multiply(x.mT, y).view(size).permute(2, 4, 0, 3, 5, 1).sum(-1)
            for outer in outers:
                i, j = outer.left_vector - lefts.start, outer.right_vector - rights.start
                term, total = sums[i, j], totals.get(outer.matrix)
                totals[outer.matrix] = term if total is None else total + term
        results = []
        for matrix in totals:
            grad = grads[matrix]
            assert grad is not None
            results.append(grad.view(heads, width, width))
        torch._foreach_copy_(results, [*totals.values()])  # one kernel for all


def _span(indices: Sequence[int]) -> slice:
    return slice(min(indices), 1 + max(indices))


def _chunks(heads: int, steps: int, rows: int, columns: int, cores: int) -> int:
    """Return the chunks of steps whose products run at once, so that they keep a GPU busy."""
    tiles = heads * -(-rows // PRODUCT_TILE) * -(-columns // PRODUCT_TILE)
    chunks = 1
    while tiles * chunks < cores and steps % (2 * chunks) == 0 and steps > 128 * chunks:
        chunks *= 2
    return chunks


def _bmm_on_gpu(x: Tensor, y: Tensor) -> Tensor:
    return torch.bmm(x, y, torch.float32)


def _bmm_on_cpu(x: Tensor, y: Tensor) -> Tensor:
    """Return the product that `_bmm_on_gpu` does, where the emulator runs kernels."""
    return torch.bmm(x.float(), y.float())


def make_mixing_launch(
    gpu: Gpu,
    program: Program,
    weight_dtype: torch.dtype,
    layouts: MixingLayouts,
    args: Arguments,
    tensors: Sequence[Tensor | None],
) -> MixingLaunch:
    """Plan a pass on calls of a signature, and pack its words; `tensors` are in kernel layout."""
    args = Arguments.unflatten(tensors, args.flatten()[1])
    gates, backward = args.gates, layouts.gates is not None
    (rows, length, channels), (heads, width) = args.size, heads_of(gates.shape)
    dtype, device, compute = gates.dtype, gates.device, args.dtype
    cores = gpu.cores(device)
    start = 2 + len(args.fields)
    params = slice(start, start + len(args.params))
    mixing = program.mixing[compute]
    matrix_dtype = next((args.params[i].dtype for i in mixing.matrices), compute)
    empty = MixingLaunch(gpu, weight_dtype, compute, dtype, matrix_dtype, params, mixing)
    if not rows or not length:
        return empty
    strides = head_strides(gates.shape, gates.stride())
    size = dtype.itemsize
    offsets = [layouts.chunk, width * size, channels * size, *[s * size for s in strides]]
    arriving = [stride or (0, 0) for stride in layouts.arriving]
    offsets += [s * size for stride in arriving for s in stride]
    gaps = {strides[2]}
    if layouts.gates is not None:
        grad_strides = head_strides(gates.shape, layouts.gates)
        gaps.add(grad_strides[2])
        offsets += [s * size for s in grad_strides]
        offsets.append(width * vector_dtype(dtype, matrix_dtype).itemsize)
    capability = gpu.capability(device)
    variant = MixingVariant(
        direction="backward" if backward else "forward",
        dtype=dtype,
        weight_dtype=weight_dtype,
        matrix_dtype=matrix_dtype,
        heads=heads,
        head_width=width,
        gate_gap=width if gaps == {width} else 0,
        chunk=chunk_of(*offsets),
        reverse=args.options.reverse,
        events=args.seq is not None or args.reset is not None,
        broadcast=tuple(f.shape[-1] < channels for f in args.fields),
        arriving=tuple(stride is not None for stride in layouts.arriving),
        shared=shared_bytes_of(capability),
        cluster=cluster_of(capability),
        sums=not backward and bool(args.options.sums),
        has_starts=layouts.has_starts,
    )
    variant = _with_sides(program, variant, -(-rows // 4) * heads, cores)
    block_rows = 4 * variant.sides
    variant = variant._replace(whole=rows % block_rows == 0)
    spans = -(-rows // block_rows)
    if length >= MAX_LENGTH or spans * heads * MAX_CLUSTER > MAX_BLOCKS:
        raise EngineError(
            f"kernels take fewer than {MAX_LENGTH} steps and {MAX_BLOCKS // MAX_CLUSTER} blocks of "
            f"{block_rows} rows and a head, got T = {length}, B = {rows} and {heads} heads; "
            "split the sequence, or the batch"
        )

    def kernels_of(own: MixingVariant) -> Kernels:
        own_kernels = Kernels(gpu.kernels(program, own, capability), tiles_of(program, own))
        slices, kernel = own_kernels.tiles.slices, own_kernels.kernels.get("run")
        if slices > 1 and kernel is not None:  # None where a pass is planned without kernels
            most = gpu.call(device, kernel.most_in_cluster, device.index)
            if most < slices:  # than other GPUs of this capability have
                return kernels_of(own._replace(cluster=most))
        return own_kernels

    interface, addresses = interface_of(program, "cuda", "sequential"), Addresses()
    counts, matrices = interface.counts, addresses.next()
    inputs: Values = {
        "rows": rows,
        "length": length,
        "gate_strides": gate_strides(interface, strides),
        **input_values(addresses, counts, args, args.fields),
    }
    values: dict[str, Words] = {"in": interface.pack("Inputs", inputs), "packed": matrices}
    values["sums"] = addresses.next()
    templates: dict[str, Template] = {}
    if layouts.gates is None:
        values |= {
            "states": addresses.array(counts.states),
            "final": addresses.array(counts.states),
        }
        templates["run"] = template_of(interface.pack("ForwardProblem", values))
    else:
        values |= adjoint_values(addresses, arriving, counts.fields)
        values |= {name: addresses.next() for name in ("left", "right")}
        values["grad_gate_strides"] = gate_strides(interface, grad_strides)
        templates["run"] = template_of(interface.pack("BackwardProblem", values))
        templates["sum_weights"] = _sums_of(interface, mixing, spans)
    templates["pack"] = _pack_of(interface)
    return empty._replace(
        size=(heads, rows, length, width),
        spans=spans,
        cores=cores,
        run=kernels_of(variant),
        without_vectors=cache(partial(kernels_of, variant._replace(vectors=False)))
        if backward
        else None,
        templates=templates,
    )


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


def _pack_of(interface: Interface) -> Template:
    addresses = Addresses()
    values: Values = {
        "params": addresses.array(interface.counts.params),
        "packed": addresses.next(),
    }
    return template_of(interface.pack("PackProblem", values))


def _sums_of(interface: Interface, mixing: Mixing, spans: int) -> Template:
    """Pack the words of the kernel that adds up gradients of bias and params (D,) of all spans."""
    addresses = Addresses()
    partial, bias = addresses.next(), addresses.next()
    params = addresses.array(interface.counts.params)
    own = [params[i] for i in mixing.channel_params]
    values: Values = {
        "rows": spans,
        "partial": partial,
        "bias": bias,
        "params": own + [0] * (len(params) - len(own)),
    }
    return template_of(interface.pack("SumProblem", values))


def mixing_layouts(
    tensors: Sequence[Tensor | None],
    gates: Tensor | None = None,
    states: Sequence[Tensor] = (),
    arriving: Sequence[Tensor | None] = (),
) -> MixingLayouts:
    """Return the layouts of a call's tensors in kernel layout, and of those of a backward pass."""
    chunk = common_chunk([tensors[0], gates, *states, *arriving])
    if gates is None:
        return MixingLayouts(chunk, has_starts=bool(states))
    strides = tuple([None if g is None else row_and_time(g) for g in arriving])
    return MixingLayouts(chunk, gates.stride(), strides)
