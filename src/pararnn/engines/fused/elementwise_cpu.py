"""Schedule of elementwise steps on the CPU: the loop, or Newton's method on segments of time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.base.numerics import compute_dtype
from pararnn.codegen.families import interface_of
from pararnn.codegen.interface import Interface, Words
from pararnn.engines.arguments import Arguments
from pararnn.engines.fused import host
from pararnn.engines.fused.launch import (
    Address,
    Addresses,
    Conversion,
    Conversions,
    Launch,
    Temporary,
    conversions_for,
    pack_known,
    template_of,
)
from pararnn.engines.fused.layout import head_strides, heads_of, in_matrix_heads, unit_stride
from pararnn.engines.fused.schedule import Layouts
from pararnn.engines.fused.vectors import VectorPass, VectorSchedule, problem_values
from pararnn.engines.rule import Size
from pararnn.engines.split import NO_REQUEST, Split, SplitRequest, plan_split
from pararnn.engines.tuned import Workload
from pararnn.program.program import Program

MIN_HEAD_CHANNELS = 16
"""Channels of a head below which vector lanes would be idle: gates are then copied without heads"""
TILE_BYTES = 256
"""Channels of a row that are worth a thread: four of the widest vectors."""


class CpuPass(VectorPass):
    """Pass on the CPU, whose kernels add up the sums of spans by themselves."""

    def new_bias(self, args: Arguments) -> Tensor:
        """Allocate the gradient of the bias, which kernels write in any case."""
        size = args.gates.shape[2], args.signature.size[2]
        return args.gates.new_empty(size, dtype=self.weights)


class CpuVectors(host.OnCpu, VectorSchedule):
    """Schedule of steps of vectors on the CPU."""

    def gates_layout(self, args: Arguments) -> Conversion:
        """Return the conversion of gates to kernel layout: adjacent channels, in the heads of
        matrices, else in those given unless they are narrow."""
        return in_matrix_heads(args, _to_layout)

    def conversions(self, args: Arguments, backward: bool) -> Conversions:
        return conversions_for(args, self.gates_layout(args), args.dtype, args.dtype)

    def values(
        self, program: Program, layouts: Layouts, args: Arguments, addresses: Addresses
    ) -> tuple[Interface, dict[str, Any]]:
        """Return the interface of a pass, and its kernel's arguments by field."""
        interface, (threads, openmp) = interface_of(program, "cpp", self.solver), layouts.facts
        (_, _, channels), (heads, width) = args.size, heads_of(args.gates.shape)
        values: dict[str, Any] = problem_values(
            interface,
            addresses,
            layouts,
            args,
            head_strides(args.gates.shape, args.gates.stride()),
            field_channel=[int(field.shape[-1] > 1) for field in args.fields],
            heads=heads,
            channels=width,
            reverse=int(args.options.reverse),
            threads=threads,
            openmp=openmp,
        )
        if layouts.gates is not None:
            bias, row = values["bias"].tensor, channels * args.dtype.itemsize
            rows = [Address(bias, gate * row) for gate in range(interface.counts.gates)]
            values["grad_weights"] = [*rows, *values["params"]]
        return interface, values


class ElementwiseCpu(CpuVectors):
    """Schedule of elementwise steps by one solver."""

    def __init__(self, solver: str) -> None:
        self.solver, self.cuts_time = solver, solver == "newton"

    def segments(self, size: Size, dtype: torch.dtype, device: torch.device) -> int:
        wide = compute_dtype(dtype)
        idle = host.threads_as_constant() // max(1, _columns(size, wide))
        return min(idle, plan_segments(size, wide).segments)

    def plan_split(self, program: Program, workload: Workload, request: SplitRequest) -> Split:
        return plan_segments(workload.size, compute_dtype(workload.dtype), request)

    def plan(self, program: Program, layouts: Layouts, args: Arguments) -> CpuPass:
        addresses = Addresses()
        interface, values = self.values(program, layouts, args, addresses)
        problem: dict[str, Words] = {
            "pass": pack_known(interface, layouts.struct("Problem"), values)
        }
        (batch, _, channels), dtype, states = args.size, args.dtype, interface.counts.states
        spans, memory = batch, dict[str, Temporary]()
        if self.cuts_time:  # see elementwise/shooting.h
            split = plan_segments(args.size, dtype, args.split)
            spans *= split.segments
            of_states = Temporary((batch, split.segments, states, channels), dtype)
            memory = dict.fromkeys(("starts", "ends", "sizes"), of_states)
            of_products = (batch, split.segments, states**2, channels)
            memory["products"] = Temporary(of_products, dtype, zeros=True)
            if layouts.gates is not None:  # counts that nobody reads
                memory["info"] = Temporary((1, 2), torch.int64)
            shooting = {"info": values.get("info", 0), **split._asdict()}
            shooting |= {name: addresses.next() for name in memory}
            problem["shooting"] = interface.pack("ShootingWords", shooting)
        template = template_of(interface.pack(layouts.struct("Launch"), problem))
        launch = Launch(self.kernel(program, layouts, args), template, (*memory.values(),))
        return CpuPass(launch, spans, dtype, args.samples)


def plan_segments(size: Size, dtype: torch.dtype, request: SplitRequest = NO_REQUEST) -> Split:
    """Plan the segments for a compute dtype."""
    steps, columns = max(1, size[1]), max(1, _columns(size, dtype))
    capacity, least = columns * steps, host.MIN_SIZE
    return plan_split(steps, columns, dtype, 1, host.CORES, capacity, request, least)


def _columns(size: Size, dtype: torch.dtype) -> int:
    """Return the threads that a batch keeps busy if time is not cut."""
    batch, _, channels = size
    return batch * -(-channels * dtype.itemsize // TILE_BYTES)


def _to_layout(gates: Tensor) -> Tensor:
    if gates.ndim == 5 and gates.shape[-1] < MIN_HEAD_CHANNELS:
        gates = gates.flatten(3)
    return unit_stride(gates)
