"""The generated CUDA kernels on one GPU: times, limits, layers, peers and memory.

A kernel's limit is the time in which the bytes that it must move would be copied, at the copy rate
of the same run. Writes results/kernels.csv (sections kernels, layers and peers) and
kernels_memory.csv; a run of some sections only, or a quick one, writes into --out only.

    python benchmarks/kernels.py [--only kernels] [--quick] [--out FOLDER]
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from cpu import output_of
from gpu import (
    Run,
    Sections,
    cache_bytes,
    passes_on,
    report_missing,
    run_sections,
    sets_of,
    times_of,
)
from protocol import Call, Row
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pararnn import Cell, GRUCell, LSTMCell, ParaGRU, ParaLSTM, Param
from pararnn.engines.arguments import LEAVES, Arguments
from pararnn.engines.engine import BackwardInputs, Engine
from pararnn.engines.fused.cuda import SEQUENTIAL
from pararnn.program.program import Program, program_of
from pararnn.solve import prepare

Size = tuple[int, int, int]


class Spring(Cell):
    """A damped spring with learned time steps: two states, as a user would write them."""

    states = ("x", "v")
    gates = ("dt", "drag", "pull")
    params = {name: Param("D") for name in ("a_dt", "a_drag", "a_pull")}

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        dt = torch.sigmoid(gate.dt + param.a_dt * state.x)
        drag = torch.sigmoid(gate.drag + param.a_drag * state.v)
        pull = torch.tanh(gate.pull + param.a_pull * state.x)
        v = (1 - drag) * state.v + dt * pull
        return (1 - dt) * state.x + dt * torch.tanh(v), v


class TwoSpeeds(Cell):
    """A fast and a slow memory behind an output gate: three states."""

    states = ("h", "fast", "slow")
    gates = ("f", "s", "c", "o")
    params = {name: Param("D") for name in ("a_f", "a_s", "a_c", "a_o")}

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor, Tensor]:
        f = torch.sigmoid(gate.f + param.a_f * state.h)
        s = torch.sigmoid(gate.s + param.a_s * state.h)
        fast = f * state.fast + (1 - f) * torch.tanh(gate.c + param.a_c * state.h)
        slow = s * state.slow + (1 - s) * fast
        o = torch.sigmoid(gate.o + param.a_o * slow)
        return o * torch.tanh(fast + slow), fast, slow


BIG, MEDIUM, LONG = (32, 2048, 1024), (8, 2048, 1024), (1, 65536, 1024)
USERS = (Spring, TwoSpeeds)
CASES: list[tuple[type[Cell], Size, torch.dtype]] = [
    *itertools.product((GRUCell, LSTMCell), (BIG, MEDIUM), (torch.float32, torch.bfloat16)),
    *itertools.product((GRUCell,), (BIG,), (torch.float16, torch.float64)),
    *itertools.product((GRUCell, LSTMCell), (LONG,), (torch.float32,)),
    *itertools.product(USERS, (BIG,), (torch.bfloat16,)),
]
COLUMNS = (
    *("section", "what", "pass", "dtype", "B", "T", "D", "graph_ms", "graph_min_ms", "replays"),
    *("do_bench_ms", "limit_ms", "of_limit", "ns_per_step", "of_lstm"),
)
HEADS = 4


def bytes_moved(what: str, size: Size, gates: int, states: int, dtype: torch.dtype) -> int:
    """Return the bytes that a pass must read and write."""
    tensors = {"forward": gates + states, "backward": 2 * gates + states + 1}[what]
    return math.prod(size) * dtype.itemsize * tensors


def row_of(section: str, what: str, step: str, size: Size, dtype: torch.dtype, times: Row) -> Row:
    """Return a row of kernels.csv; `step` is the pass."""
    row: Row = dict.fromkeys(COLUMNS, "") | times
    row |= {"section": section, "what": what, "pass": step, "dtype": str(dtype).split(".")[1]}
    return row | dict(zip("BTD", size, strict=True))


def kernel_calls(cell: Cell, what: str, size: Size, dtype: torch.dtype) -> list[Call]:
    """Return a pass of the engine on enough inputs to exceed the caches."""
    batch, length, channels = size
    shape = (batch, length, len(cell.gates), channels)
    bias = 0.1 * torch.randn(shape[2:], device="cuda")
    draws = sets_of(lambda: [torch.randn(shape, device="cuda", dtype=dtype)], cache_bytes())
    inputs = [prepare(cell, gates, bias=bias) for (gates,) in draws]
    return calls_of(SEQUENTIAL, program_of(cell), inputs, what)


def calls_of(
    engine: Engine, program: Program, inputs: Sequence[Arguments], what: str
) -> list[Call]:
    """Return a pass of an engine on each of the inputs; the output's gradient arrives, no other.

    Gradients of everything are wanted.
    """
    if what == "forward":
        return [partial(engine.forward, program, args) for args in inputs]
    assert engine.has_backward
    unread = (None,) * (program.num_states - 1)
    calls: list[Call] = []
    for args in inputs:
        states = SEQUENTIAL.forward(program, args).states
        grads: tuple[Tensor | None, ...] = (torch.randn_like(states[0]), *unread)
        final = (None, *unread)
        given = BackwardInputs(states, grads, final, LEAVES)
        calls.append(partial(engine.backward, program, args, given))
    return calls


@torch.no_grad()
def kernel_rows(run: Run) -> Iterator[Row]:
    """Yield the engine's passes, after what a kernel of one element takes by both methods.

    of_lstm: of users' cells, the fraction of their limit that they reach over the LSTM's own.
    """
    one = torch.zeros(1, device="cuda")
    empty = times_of([lambda: one.add_(1)], run)
    yield row_of("empty", "one element", "", (1, 1, 1), torch.float32, empty)
    of_limit: dict[tuple[Any, ...], float] = {}
    for cell_class, size, dtype in CASES:
        cell = cell_class(size[2], device="cuda")
        for parameter in cell.parameters():
            parameter.normal_(0, 0.3)
        for what in ("forward",) if size == LONG else ("forward", "backward"):
            times = times_of(kernel_calls(cell, what, size, dtype), run)
            row = row_of("kernels", cell_class.__name__, what, size, dtype, times)
            in_bytes = bytes_moved(what, size, len(cell.gates), len(cell.states), dtype)
            limit = in_bytes / run.copy_rate * 1e3
            row |= {"limit_ms": round(limit, 5), "of_limit": round(row["graph_ms"] / limit, 4)}
            if size == LONG:
                row["ns_per_step"] = round(row["graph_ms"] * 1e6 / size[1], 2)
            of_limit[cell_class, what, size, dtype] = row["of_limit"]
            if cell_class in USERS:
                of_lstm = of_limit[LSTMCell, what, size, dtype]
                row["of_lstm"] = round(of_lstm / row["of_limit"], 4)
            yield row


class Way(NamedTuple):
    """A differentiable function to time: call(*inputs), fresh inputs, and what it learns."""

    call: Callable[..., Tensor]
    inputs: Callable[[], list[Tensor]]
    weights: Sequence[Tensor] = ()


def passes(way: Way) -> ItemsView[str, list[Call]]:
    """Return forward without gradients, and forward + backward, on inputs that exceed the cache."""
    return passes_on(sets_of(way.inputs, cache_bytes()), way.call, way.weights).items()


def normal(*sizes: Sequence[int]) -> Callable[[], list[Tensor]]:
    """Make bfloat16 tensors of these sizes, N(0, 1)."""
    return lambda: [torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in sizes]


def layer_of(layer_class: type[ParaGRU] | type[ParaLSTM], **options: Any) -> ParaGRU | ParaLSTM:
    """Return a layer of the size that all are compared at."""
    options |= {"device": "cuda", "dtype": torch.bfloat16}
    return layer_class(BIG[2], BIG[2], num_heads=HEADS, **options)


def layer_rows(run: Run) -> Iterator[Row]:
    """Whole layers: projection and kernels."""
    for layer_class in (ParaGRU, ParaLSTM):
        layer = layer_of(layer_class)
        for what, calls in passes(Way(output_of(layer), normal(BIG), [*layer.parameters()])):
            names = ("layers", layer_class.__name__, what)
            yield row_of(*names, BIG, torch.bfloat16, times_of(calls, run))


def attention() -> Way:
    """Causal flash attention, 16 heads of 64."""

    def call(*inputs: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in inputs)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return Way(call, normal(*[(*BIG[:2], 16, 64)] * 3))


def cudnn(module: type[nn.GRU] | type[nn.LSTM]) -> Way:
    """Return a dense layer of torch.nn."""
    layer = module(BIG[2], BIG[2], batch_first=True, device="cuda", dtype=torch.bfloat16)
    return Way(output_of(layer), normal(BIG), list(layer.parameters()))


def hgrn() -> Way:
    """HGRN's linear recurrence, without its projections: values and log decays."""
    kernel = importlib.import_module("fla.ops.hgrn").chunk_hgrn
    return Way(lambda x, g: kernel(x, g)[0], lambda: [-t.abs() for t in normal(BIG, BIG)()])


def ssd() -> Way:
    """Mamba 2's state space kernel, without its projections: 16 heads of 64, 128 states."""
    kernel = importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    sizes = [(*BIG[:2], 16, 64), (*BIG[:2], 16), (*BIG[:2], 1, 128), (*BIG[:2], 1, 128)]
    rates = -torch.rand(16, device="cuda") - 0.5

    def call(x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return cast(Tensor, kernel(x, dt, rates, b, c, chunk_size=256, dt_softplus=True))

    return Way(call, normal(*sizes))


def linear_scan(module: str) -> Way:
    """accelerated_scan's linear recurrence, time last: decays and values."""
    scan, size = importlib.import_module(module).scan, (BIG[0], BIG[2], BIG[1])
    return Way(scan, lambda: [torch.sigmoid(t) for t in normal(size, size)()])


LINEAR_SCANS = {
    "accelerated-scan, Triton": "accelerated_scan.scalar",
    "accelerated-scan, warps": "accelerated_scan.warp",
}
"""accelerated-scan 0.3's modules for real numbers; the second is built by nvcc when imported."""
PEERS: Mapping[str, Callable[[], Way]] = {
    "flash attention": attention,
    "torch.nn.GRU (cuDNN)": partial(cudnn, nn.GRU),
    "torch.nn.LSTM (cuDNN)": partial(cudnn, nn.LSTM),
    "fla HGRN chunk": hgrn,
    "mamba_ssm SSD": ssd,
    **{name: partial(linear_scan, module) for name, module in LINEAR_SCANS.items()},
}


def peer_rows(run: Run) -> Iterator[Row]:
    """Yield others' times at this size, torch.nn by do_bench only; print who fails."""
    for name, build in PEERS.items():
        try:
            for what, calls in passes(build()):
                times = times_of(calls, run, graph=not name.startswith("torch.nn"))
                yield row_of("peers", name, what, BIG, torch.bfloat16, times)
        except Exception as error:
            report_missing(name, error)


def layer_parts(size: Size, gates: int, states: int, itemsize: int) -> dict[str, int]:
    """Return the bytes of a layer's tensors; input and hidden size are equal."""
    batch, _, channels = size
    sequence = math.prod(size) * itemsize
    return {
        "x": sequence,
        "gates": gates * sequence,
        "states": states * sequence,
        "final": states * batch * channels * 4,
        "grad_output": sequence,
        "grad_gates": gates * sequence,
        "partial": 2 * gates * batch * channels * 4,  # biases, and as many parameters (GRU)
        "grad_x": sequence,
        "grad_weights": gates * channels * channels // HEADS * itemsize,
    }


KEPT = ("x", "grad_output", "states", "final")
"""Tensors of a layer and its caller after the forward pass, without the gates."""
MOMENTS = (
    (*KEPT, "gates", "grad_gates", "partial"),  # the kernel's backward pass
    (*KEPT, "grad_gates", "grad_x", "grad_weights"),  # the projection's
)
"""Tensors at the two moments that may be the peak."""


def memory_rows(run: Run) -> Iterator[Row]:
    """Yield the bytes of a ParaGRU's forward and backward pass, measured and computed."""
    parts = layer_parts(BIG, len(GRUCell.gates), len(GRUCell.states), 2)
    for recompute in (False, True):
        layer = layer_of(ParaGRU, recompute_gates=recompute)
        bytes_after_forward(layer)  # cuBLAS takes its workspace, kernels are compiled
        baseline = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        row: Row = {"recompute_gates": recompute, **dict(zip("BTD", BIG, strict=True))}
        row |= {
            "kept_bytes": bytes_after_forward(layer) - baseline,
            "kept_explained": sum(parts[n] for n in (*KEPT, *["gates"] * (not recompute))),
            "peak_bytes": torch.cuda.max_memory_allocated() - baseline,
            "peak_explained": max(sum(parts[n] for n in names) for names in MOMENTS),
        }
        yield row | parts


def bytes_after_forward(layer: ParaGRU | ParaLSTM) -> int:
    """Return the bytes allocated between a forward pass and its backward pass, which follows."""
    x, cotangent = normal(BIG, BIG)()
    output, _ = layer(x.requires_grad_())
    in_use = torch.cuda.memory_allocated()
    torch.autograd.grad(output, [x, *layer.parameters()], cotangent)
    return in_use


# Peers come last: a failed capture by one of them could spoil what follows.
SECTIONS: Sections = {
    "kernels": (kernel_rows, "kernels.csv"),
    "layers": (layer_rows, "kernels.csv"),
    "memory": (memory_rows, "kernels_memory.csv"),
    "peers": (peer_rows, "kernels.csv"),
}


if __name__ == "__main__":
    run_sections(__doc__, SECTIONS, graph_budget=500.0)
