"""Launches are cached by signature, which has all that changes their words, and no tensor."""

import copy
import gc
import threading
import weakref
from dataclasses import dataclass, replace

import pytest
import torch
from emulated import gpu, install
from table import needs_compiler

import pararnn
from pararnn.base.cache import cached_or_error
from pararnn.codegen.elementwise_cuda import ElementwiseVariant
from pararnn.engines.fused import cpu, cuda, elementwise_cuda, host
from pararnn.engines.fused.matrix_cuda import MatrixCuda
from pararnn.engines.fused.vectors import Adjoint
from pararnn.engines.signature import SIGNATURES
from pararnn.program.program import program_of
from pararnn.solve import prepare

pytestmark = needs_compiler

BATCH, STEPS, CHANNELS = 2, 300, 32


@dataclass(frozen=True)
class Kernel:
    """Record of a kernel that a launch would run."""

    cell: str
    variant: ElementwiseVariant
    capability: tuple[int, int]

    def most_in_cluster(self, device):
        return 16

    def blocks_a_core(self):
        return 16


def _device(cores):
    """A GPU on which nothing is compiled; one with a number is an older one."""
    return replace(
        gpu(cores=cores),
        kernels=lambda program, variant, capability: dict.fromkeys(
            ("run", "sum_weights"), Kernel(program.cell_name, variant, capability)
        ),
        capability=lambda device: (9, 0) if device.index is None else (8, 0),
    )


GPU, OTHER = _device(cores=4), _device(cores=64)


class Leaky(pararnn.Cell):
    """A cell with a field."""

    states, gates, fields = ("h",), ("z", "r", "c"), ("f",)
    params = {name: pararnn.Param() for name in ("a_z", "a_r", "a_c")}

    def step(self, state, gate, param):
        z = torch.sigmoid(gate.z + param.a_z * state.h)
        r = torch.sigmoid(gate.r + param.a_r * state.h)
        return gate.f * z * state.h + (1 - z) * torch.tanh(gate.c + r * param.a_c * state.h)


class Other(Leaky):
    """A cell of the same words and another step."""

    def step(self, state, gate, param):
        return gate.f * super().step(state, gate, param)


def _record(dtype=torch.float32, batch=BATCH, steps=STEPS, gate_stride=1, wide=True, **options):
    torch.manual_seed(0)
    cell = Leaky(CHANNELS)
    gates = torch.randn(batch, steps, 3 * gate_stride, CHANNELS)[:, :, ::gate_stride].to(dtype)
    field = torch.rand(batch, steps, CHANNELS) if wide else torch.rand(batch, steps)
    return prepare(cell, gates, fields={"f": field}, bias=torch.randn(3, CHANNELS), **options)


def _shift(record):
    """Gates of which no 16 bytes are aligned."""
    gates = torch.empty(record.gates.numel() + 1)[1:].view(record.gates.shape)
    return replace(record, gates=gates.copy_(record.gates))


def _field_shifted(record):
    """The same of a field."""
    (field,) = record.fields
    copy = torch.empty(field.numel() + 1)[1:].view(field.shape)
    return replace(record, fields=(copy.copy_(field),))


def _halve(record):
    """All weights of another dtype."""
    params = tuple(p.bfloat16() for p in record.params)
    return replace(record, bias=record.bias.bfloat16(), params=params)


def _cpu(record, solver="newton", adjoint=None):
    record = replace(record)  # whose signature is computed anew
    program = program_of(Leaky(CHANNELS))
    return cpu.ENGINES[solver].schedule(program).launch(program, record, adjoint)[0]


def _cuda(record, solver="newton", adjoint=None, device=GPU, cell=Leaky):
    program = program_of(cell(CHANNELS))
    schedule = cuda.GpuEngine(solver, device).schedule(program)
    return schedule.launch(program, replace(record), adjoint)[0]


PLAIN = _record()
COMMON = {
    "solver": ("sequential", PLAIN),
    "dtype": ("newton", _record(torch.float64)),
    "shape": ("newton", _record(batch=1)),
    "strides": ("newton", _record(gate_stride=2)),
    "fields": ("newton", _record(wide=False)),
    "reverse": ("newton", _record(reverse=True)),
    "split": ("newton", PLAIN.with_options(segments=7, burn_in=3)),
    "initial": ("newton", replace(PLAIN, initial=(torch.zeros(BATCH, CHANNELS),))),
}
CUDA = COMMON | {
    "chunk": ("newton", _shift(PLAIN)),
    "field chunk": ("newton", _field_shifted(PLAIN)),
    "events": ("newton", _record(reset=torch.zeros(BATCH, STEPS, dtype=torch.bool))),
    "weight dtype": ("newton", _halve(PLAIN)),
}


@pytest.mark.parametrize("name", COMMON)
@pytest.mark.one_in(7)
def test_cpu_launches_depend_on(name):
    solver, record = COMMON[name]
    first = _cpu(PLAIN)
    assert _cpu(record, solver) != first
    assert _cpu(PLAIN) is first


def test_cpu_launches_depend_on_threads(monkeypatch):
    first = _cpu(PLAIN)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 7)
        assert _cpu(PLAIN) != first
    monkeypatch.setattr(host, "openmp", lambda: 12345)
    assert _cpu(PLAIN) != first


@pytest.mark.parametrize("name", CUDA)
def test_cuda_launches_depend_on(name):
    solver, record = CUDA[name]
    first = _cuda(PLAIN)
    assert _cuda(record, solver) != first
    assert _cuda(PLAIN) is first


def test_cuda_launches_depend_on_the_gpu_and_the_program():
    first = _cuda(PLAIN)
    assert _cuda(PLAIN, device=OTHER) != first
    assert _cuda(PLAIN, cell=Other) != first


def test_signatures_differ_by_device_gradients_negation_and_options():
    gates = PLAIN.gates.clone()
    records = [
        replace(PLAIN),
        replace(PLAIN, gates=gates.to("meta")),
        replace(PLAIN, gates=gates.requires_grad_()),
        replace(PLAIN, gates=torch._neg_view(gates.detach())),
        PLAIN.with_options(on_failure="raise"),
        PLAIN.with_options(output_only=True),
    ]
    assert len({id(record.signature) for record in records}) == len(records)
    assert replace(PLAIN).signature is records[0].signature
    assert [record.signature.requires_grad for record in records[:3]] == [True] * 3
    assert [record.signature.plain for record in records[2:4]] == [True, False]


def test_backward_launches_depend_on_the_layout_of_gradients():
    gates = torch.empty_like(PLAIN.gates)
    wide = gates.new_empty(BATCH, STEPS, 3, 2 * CHANNELS)[..., ::2]
    states = [gates.new_empty(BATCH, STEPS, CHANNELS)]
    rows = gates.new_empty(BATCH, 2 * STEPS, CHANNELS)[:, :STEPS]
    one_value = gates.new_empty(1, 1, CHANNELS).expand(BATCH, STEPS, -1)
    view = gates.new_empty(BATCH * STEPS * CHANNELS + 1)[1:].view(BATCH, STEPS, CHANNELS)
    each = [
        Adjoint(gates, states, states),
        Adjoint(gates, states, [one_value]),
        Adjoint(gates, states, [rows]),
        Adjoint(gates, states, [None]),
    ]
    cpu = [_cpu(PLAIN, adjoint=adjoint) for adjoint in (*each[:3], Adjoint(wide, states, states))]
    cuda = [_cuda(PLAIN, adjoint=adjoint) for adjoint in (*each, Adjoint(gates, states, [view]))]
    for launches in (cpu, cuda):
        assert not any(a == b for i, a in enumerate(launches) for b in launches[:i])


@pytest.mark.parametrize("emulate", [False, True], ids=["cpu", "cuda"])
@pytest.mark.one_in(2)
def test_gradients_arrive_in_any_layout_one_after_the_other(emulate, monkeypatch):
    if emulate:
        install(gpu(), monkeypatch)
    cell = pararnn.GRUCell(8)
    gates = torch.randn(2, 20, 3, 8, requires_grad=True)
    wide = torch.randn(2, 40, 16)
    layouts = [
        wide[:, :20, :8].contiguous(),
        wide[:, ::2, :8],
        wide[:, :20, ::2],
        wide[:, :20, :8].transpose(0, 1).contiguous().transpose(0, 1),
        wide[:1, :1, :8].expand(2, 20, 8),
    ]
    for grad in layouts:
        results = []
        for backend in ("fused", "torch"):
            states, _ = pararnn.solve(cell, gates, solver="sequential", backend=backend)
            results.append(torch.autograd.grad(states, [gates, *cell.parameters()], grad))
        for mine, plain in zip(*results, strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_a_gradient_that_arrives_unaligned_is_copied_in_small_pieces(monkeypatch):
    install(gpu(), monkeypatch)
    chunks, real = [], elementwise_cuda.ElementwiseCuda.plan

    def record(schedule, program, layouts, *call):
        if layouts.gates is not None:
            chunks.append(layouts.facts[-1])
        return real(schedule, program, layouts, *call)

    monkeypatch.setattr(elementwise_cuda.ElementwiseCuda, "plan", record)
    cell, gates = pararnn.GRUCell(8), torch.randn(2, 20, 3, 8, requires_grad=True)
    for first in (0, 1):
        states, _ = pararnn.solve(cell, gates, solver="sequential", backend="fused")
        grad = torch.randn(states.numel() + 1)[first : first + states.numel()].view_as(states)
        torch.autograd.grad(states, gates, grad)
    assert chunks == [16, 4]


def test_launches_hold_no_tensors():
    layer = pararnn.RecurrentLayer(pararnn.GRUCell, 8, 8)
    x = torch.randn(2, 9, 8)
    output, final = layer(x)
    output.sum().backward()
    tensors = [x, output, final, *layer.parameters(), *(p.grad for p in layer.parameters())]
    references = [weakref.ref(tensor) for tensor in tensors]
    del x, output, final, tensors, layer
    gc.collect()
    assert not any(ref() is not None for ref in references)


def _replace_parameters(layer):
    layer.cell.a_z = torch.nn.Parameter(torch.full_like(layer.cell.a_z, 0.5))
    layer.bias = torch.nn.Parameter(torch.ones_like(layer.bias))


def _another_backend(layer):
    layer.solver, layer.backend = "newton", "fused"


CHANGES = {
    "parameters": _replace_parameters,
    "dtype": lambda layer: layer.double(),
    "backend": _another_backend,
    "frozen": lambda layer: layer.cell.a_r.requires_grad_(False),
    "no bias": lambda layer: setattr(layer, "bias", None),
    "direction": lambda layer: setattr(layer, "reverse", True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_layer_that_changes_runs_as_a_new_one(change):
    def results(layer):
        x = torch.randn(2, 300, 8, generator=torch.Generator().manual_seed(0))
        output, _ = layer(x.to(layer.proj.weight.dtype))
        leaves = [p for p in layer.parameters() if p.requires_grad]
        return layer.choice, [output, *torch.autograd.grad(output.square().sum(), leaves)]

    layer = pararnn.RecurrentLayer(pararnn.GRUCell, 8, 8)
    new = copy.deepcopy(layer)
    early = results(layer)
    change(layer)
    change(new)
    SIGNATURES.clear()
    reference = results(new)
    late = results(layer)
    assert late[0] == reference[0]
    assert len(late[1]) == len(reference[1])
    assert all(torch.equal(a, b) for a, b in zip(late[1], reference[1], strict=True))
    same = [
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(early[1], late[1], strict=False)
    ]
    assert not all(same) or len(early[1]) != len(late[1]) or early[0] != late[0]


def test_threads_share_a_layer():
    layer = pararnn.RecurrentLayer(pararnn.GRUCell, 8, 8)
    inputs = [torch.randn(1 + i % 3, 5 + i % 4, 8) for i in range(24)]
    reference = [layer(x)[0].detach() for x in inputs]
    wrong = []

    def run(own):
        for _ in range(20):
            for i in own:
                if not torch.equal(layer(inputs[i])[0], reference[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=run, args=(range(k, 24, 4),)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_none_is_cached_too(monkeypatch):
    """A check returns None, and runs once for calls that launch alike."""
    count = []
    signature, memory = replace(PLAIN).signature, {}
    for _ in range(2):
        assert signature.cache("check", count.append, 1) is None
        assert cached_or_error(memory, "check", lambda: count.append(2)) is None
    assert count == [1, 2]
    del signature._values["check"]
    monkeypatch.setattr(MatrixCuda, "check_backward", lambda *args: count.append(3))
    cell = pararnn.zoo.M2RNNCell(6, num_heads=2, K=4)
    gates = torch.zeros(1, 5, 1, 2, cell.head_sizes.width)
    for _ in range(2):
        args = prepare(cell, gates).complete(program_of(cell))
        cuda.GpuEngine("sequential", GPU).check_backward(program_of(cell), args)
    assert count == [1, 2, 3]
