"""A GPU as a target of schedules: launches, limits of sizes, and sums of weights' gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.base.device import has_gpu, type_of
from pararnn.base.errors import EngineError
from pararnn.base.private import constant_in_graphs
from pararnn.codegen.cuda import check_buildable
from pararnn.codegen.interface import Interface, Values
from pararnn.codegen.targets import CUDA, Gpu
from pararnn.engines.arguments import Arguments
from pararnn.engines.fused.launch import (
    Addresses,
    Conversion,
    Conversions,
    Launch,
    Template,
    Temporary,
    conversions_for,
    pack_known,
    template_of,
)
from pararnn.engines.fused.layout import common_chunk, in_matrix_heads
from pararnn.engines.fused.schedule import KernelSchedule, Layouts
from pararnn.program.program import Program

MAX_LENGTH, MAX_BLOCKS = 2**30, 2**31 - 1
"""Most steps, and blocks of a launch."""


@dataclass(frozen=True)
class GpuKernel:
    """Kernel with its grid, as a function of its arguments.

    together: its blocks wait for each other. cluster: blocks of a cluster, 0 for none.
    """

    gpu: Gpu
    device: torch.device
    kernel: Any
    grid: tuple[int, int]
    together: bool = False
    cluster: int = 0

    def __call__(self, arguments: list[int]) -> None:
        """Launch it on the device's current stream."""
        self.gpu.call(
            self.device,
            self.kernel,
            self.grid,
            arguments,
            self.gpu.stream(self.device),
            together=self.together,
            cluster=self.cluster,
        )


class Packed(NamedTuple):
    """Temporary that another launch packs a call's matrices into; `params`: their slice among the
    tensors."""

    memory: Temporary
    launch: Launch
    params: slice

    def new(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Allocate it, and pack the matrices."""
        packed = self.memory.new(tensors)
        self.launch.run([packed, *tensors[self.params]])
        return packed


class OnGpu(KernelSchedule):
    """Schedule for a type of GPU."""

    code = ""
    """Name of the kernels' code where it is not the solver's, see `codegen.cuda.CODE`."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def build(self, program: Program, dtype: torch.dtype, compiles: bool = True) -> None:
        capability = self.gpu.capability(torch.device("cuda"))
        check_buildable(program, dtype, capability, self.code or self.solver, compiles)

    def conversions(self, args: Arguments, backward: bool) -> Conversions:
        return conversions_of(args, in_matrix_heads(args))

    def facts(
        self,
        program: Program,
        args: Arguments,
        tensors: Sequence[Tensor | None],
        others: Sequence[Tensor | None],
    ) -> tuple[int, ...]:
        """Return the bytes that may be copied at once by the addresses of gates, of fields, and of
        the others."""
        gates, fields = args.gates_and_fields(tensors)
        full_fields = [f for f in fields if f.shape[-1] == args.signature.size[2]]
        return common_chunk([gates]), common_chunk(full_fields), common_chunk(others)


def conversions_of(args: Arguments, gates: Conversion) -> Conversions:
    """Return the conversions of a call to kernel layout, with one of its gates: weights keep a
    dtype that they share."""
    matrices = [param for param in args.params if param.ndim > 1]
    return conversions_for(args, gates, weight_dtype(args), common_dtype(matrices, args.dtype))


def check_limits(length: int, blocks: int, unit: str, got: str, *, blocks_a_unit: int = 1) -> None:
    """Check that a launch on `length` steps has a size that kernels support; unit: what
    `blocks_a_unit` blocks run. Raises EngineError that says what it got."""
    most = MAX_BLOCKS // blocks_a_unit
    if length >= MAX_LENGTH or blocks > most:
        raise EngineError(
            f"kernels take fewer than {MAX_LENGTH} steps and {most} {unit}, got T = {length} and "
            f"{got}; split the sequence, or the batch"
        )


def has_events(args: Arguments) -> bool:
    """Return whether kernels of matrix cells look for borders of sequences: where there are some,
    and where rows with and without them must have the same bits."""
    return args.seq is not None or args.reset is not None or args.options.one_layout


def variant_fields(layouts: Layouts, args: Arguments) -> dict[str, Any]:
    """Return what variants of steps of vectors share, by field."""
    return {
        "direction": layouts.direction(),
        "dtype": args.gates.dtype,
        "weight_dtype": weight_dtype(args),
        "reverse": args.options.reverse,
        "events": args.seq is not None or args.reset is not None,
        "broadcast": tuple(f.shape[-1] < args.channels for f in args.fields),
        "arriving": tuple(strides is not None for strides in layouts.incoming),
    }


def weight_dtype(args: Arguments) -> torch.dtype:
    """Return the dtype of bias and params (D,); the compute dtype if they differ or are absent."""
    bias = [] if args.bias is None else [args.bias]
    return common_dtype((*args.channel_params, *bias), args.dtype)


def common_dtype(tensors: Iterable[Tensor], otherwise: torch.dtype) -> torch.dtype:
    """Return the dtype of tensors; another one if they differ or there are none."""
    dtypes = {tensor.dtype for tensor in tensors}
    return dtypes.pop() if len(dtypes) == 1 else otherwise


def sum_template(interface: Interface, spans: int, params: Sequence[int]) -> Template:
    """Pack the arguments of the kernel that adds up the gradients of bias and params (D,) of all
    spans; `params`: the indices of these."""
    addresses = Addresses()
    partial, bias = addresses.next(), addresses.next()
    of_params = addresses.array(interface.counts.params)
    summed = [of_params[i] for i in params]
    values: Values = {
        "rows": spans,
        "partial": partial,
        "bias": bias,
        "params": summed + [0] * (len(of_params) - len(summed)),
    }
    return template_of(interface.pack("SumProblem", values))


def packed(
    kernel: GpuKernel, interface: Interface, args: Arguments, heads: int, words: int
) -> Packed:
    """Return the temporary of so many words that a kernel packs the matrices of a call into."""
    addresses, count = Addresses(), interface.counts.params
    values: Values = {"heads": heads, "packed": addresses.next(), "params": addresses.array(count)}
    launch = Launch(kernel, template_of(pack_known(interface, "PackProblem", values)))
    first = 2 + len(args.fields)
    return Packed(Temporary((words,), torch.int32), launch, slice(first, first + count))


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Return a batched product, summed in single precision at least."""
    if x.dtype.itemsize > 2:
        return torch.bmm(x, y)
    if type_of(x.device).accelerator:
        return torch.bmm(x, y, torch.float32)
    return torch.bmm(x.float(), y.float())


def cores_of_rank(device: torch.device) -> int:
    """Return the multiprocessors of a GPU, also in compiled regions; 0 without a GPU."""
    return _cores_as_constant(device) if has_gpu() else 0


@constant_in_graphs
def _cores_as_constant(device: torch.device) -> int:
    return CUDA.cores(device)
