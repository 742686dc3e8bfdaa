"""The CUDA kernels among PyTorch's features: graphs, streams, compilation, memory, decoding."""

import subprocess
import sys

import pytest
import torch
from call_results import as_tuple
from captures import check_replays
from mixing_cells import HeadGRU, HeadLSTM
from torch.utils.checkpoint import checkpoint
from user_cells import Cumulative

import pararnn
from pararnn.codegen import cuda

cells = pytest.mark.parametrize("cell_class", [pararnn.LSTMCell, HeadLSTM])


def layer_of(cell_class=pararnn.LSTMCell, **options):
    """Return a layer of a cell on a GPU, and its input."""
    torch.manual_seed(0)
    options = {"num_heads": 4, "device": "cuda", "backend": "fused", **options}
    layer = pararnn.ParaRNN(cell_class, 64, 128, **options)
    x = torch.randn(3, 50, 64, device="cuda", dtype=next(layer.parameters()).dtype)
    return layer, x.requires_grad_()


def grads_of(layer, x, call=None, **options):
    """Return the output, the final states, and gradients of the input and of all parameters."""
    output, final = (layer if call is None else call)(x, **options)
    output = output.data if hasattr(output, "batch_sizes") else output
    final = as_tuple(final)
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape)
    loss = (output * weights.to(output.dtype)).sum() + sum(h.sin().sum() for h in final)
    leaf = x.data if hasattr(x, "batch_sizes") else x
    return [output, *final, *torch.autograd.grad(loss, [leaf, *layer.parameters()])]


def agree(values, reference, tolerance=1e-5):
    """Check that no value is farther from another one than a fraction of its largest entry."""
    for value, other in zip(values, reference, strict=True):
        error = float((value - other).detach().abs().max())
        assert error <= tolerance * float(other.abs().max()), error


def test_auto_takes_the_kernels():
    cell, gates = pararnn.GRUCell(8, device="cuda"), torch.randn(2, 9, 3, 8, device="cuda")
    from pararnn.engines.table import choose

    program = pararnn.program_of(cell)
    engine = choose(program, (2, 9, 8), gates.dtype, gates.device, "auto", "auto").engine()
    assert (engine.solver, engine.backend) == ("sequential", "fused")
    cell = Cumulative(8, device="cuda")
    with pytest.raises(pararnn.EngineError, match="mixes channels"):
        pararnn.solve(cell, gates[:, :, :1], backend="fused")


def test_layers_agree_with_the_loop():
    layer, x = layer_of(num_layers=2)
    kernels = grads_of(layer, x)
    layer.backend, layer.solver = "torch", "sequential"
    agree(kernels, grads_of(layer, x))


@cells
def test_compile_fullgraph(cell_class):
    layer, x = layer_of(cell_class)
    program = torch.compile(layer, fullgraph=True)
    agree(grads_of(layer, x, program), grads_of(layer, x))
    with torch.no_grad():
        agree(program(x[:2])[:1], layer(x[:2])[:1])


@pytest.mark.parametrize("cell_class", [pararnn.LSTMCell, HeadLSTM, HeadGRU])
def test_cuda_graphs(cell_class):
    layer, x = layer_of(cell_class)
    check_replays(lambda x: grads_of(layer, x), x)


def test_streams_order_the_work():
    layer, _ = layer_of()
    streams = [torch.cuda.Stream() for _ in range(4)]
    inputs = [torch.randn(8, 700, 64, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    with torch.no_grad():
        results = []
        for stream, x in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                late = x
                for _ in range(20):  # the kernel must wait for these
                    late = late + 1
                results.append(layer(late)[0])
        torch.cuda.synchronize()
        for x, result in zip(inputs, results, strict=True):
            late = x
            for _ in range(20):
                late = late + 1
            assert torch.equal(result, layer(late)[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@cells
def test_devices(cell_class):
    layer, x = layer_of(cell_class)
    reference = grads_of(layer, x)
    other = layer.to("cuda:1")
    x_there = x.detach().to("cuda:1").requires_grad_()
    assert torch.cuda.current_device() == 0
    agree([t.cpu() for t in grads_of(other, x_there)], [t.cpu() for t in reference], 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@cells
def test_autocast(cell_class, dtype):
    layer, x = layer_of(cell_class)
    reference = grads_of(layer, x)
    with torch.autocast("cuda", dtype):
        got = grads_of(layer, x)
    assert got[0].dtype == dtype
    agree(got, reference, 0.05)


def test_recomputing():
    layer, x = layer_of()
    reference = grads_of(layer, x)
    got = grads_of(layer, x, lambda x: checkpoint(layer, x, use_reentrant=False))
    agree(got, reference, 0.0)
    again, _ = layer_of(recompute_gates=True)
    agree(grads_of(again, x), reference, 0.0)


def test_recomputing_gates_keeps_less():
    def memory(recompute):
        layer = pararnn.ParaGRU(256, 256, device="cuda", recompute_gates=recompute)
        x = torch.randn(8, 512, 256, device="cuda", requires_grad=True)
        old_bytes = torch.cuda.memory_allocated()
        output, _ = layer(x)
        more_bytes = torch.cuda.memory_allocated() - old_bytes
        output.sum().backward()
        return more_bytes / x.nbytes

    assert memory(False) >= 4  # three gates and the states
    assert memory(True) <= 1.1


def test_no_hidden_copies():
    cell = pararnn.LSTMCell(512, num_heads=4, device="cuda", dtype=torch.bfloat16)
    gates = torch.randn(4, 8, 256, 3, 128, device="cuda", dtype=torch.bfloat16)
    gates = gates.permute(1, 2, 3, 0, 4).requires_grad_()  # as the projection leaves it
    options = {"solver": "sequential"}
    pararnn.solve(cell, gates, **options)[0][0].sum().backward()  # compiles
    gates.grad = None
    cell.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    old_bytes = torch.cuda.memory_allocated()
    (h, c), _ = pararnn.solve(cell, gates, **options)
    outputs = h.nbytes + c.nbytes
    assert torch.cuda.max_memory_allocated() - old_bytes <= 1.05 * outputs
    h.backward(torch.randn_like(h))
    size = outputs + h.nbytes + gates.nbytes
    assert torch.cuda.max_memory_allocated() - old_bytes <= 1.1 * size


@cells
def test_no_synchronisation_with_the_host(cell_class):
    layer, x = layer_of(cell_class, num_layers=2)
    reset = torch.rand(3, 50, device="cuda") < 0.1
    start = tuple(torch.randn(2, 3, 128, device="cuda") for _ in range(2))

    def step():
        output, (h, _) = layer(x, start, reset=reset)
        (output.sum() + h.sum()).backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@cells
def test_decoding(cell_class, dtype):
    layer, x = layer_of(cell_class, num_layers=2, dtype=dtype)
    x = x.detach().to(dtype)
    with torch.no_grad():
        reference, last = layer(x)
        state, outputs = None, []
        for t in range(x.shape[1]):
            y, state = layer.step(x[:, t], state)
            outputs.append(y)
        got = torch.stack(outputs, 1)
        near = 1e-5 if dtype == torch.float32 else 3e-2
        agree([got.float()], [reference.float()], near)
        agree(state, last, near)
        assert all(s.dtype == torch.float32 for s in state)

        token, old_state = x[:, 0].clone(), tuple(s.clone() for s in state)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, end = layer.step(token, old_state)
        token.copy_(x[:, 7])
        graph.replay()
        agree([y, *end], [layer.step(x[:, 7], state)[0], *layer.step(x[:, 7], state)[1]], 0.0)


def test_demo_generates_on_the_kernels():
    model = pararnn.ParaGRU(32, 32, device="cuda")
    assert pararnn.verify(model, torch.randn(2, 33, 32, device="cuda"))


def test_first_use_says_so_and_the_next_compiles_nothing(tmp_path, monkeypatch, messages):
    monkeypatch.setenv("PARARNN_CACHE_DIR", str(tmp_path))
    pararnn.clear_caches()
    layer, x = layer_of(pararnn.GRUCell)
    pararnn.precompile(layer)
    assert "compiling GRUCell's sequential forward kernel for sm_" in messages.getvalue()
    assert str(tmp_path) in messages.getvalue()
    messages.truncate(0)
    pararnn.clear_caches()
    monkeypatch.setattr(cuda, "compile_cubin", None)  # a compilation would fail
    grads_of(layer, x)
    assert not messages.getvalue()  # precompile has made what the layer runs


def test_wrong_cu_seqlens_stop_the_device():
    code = (
        "import torch, pararnn; cell = pararnn.GRUCell(4, device='cuda'); "
        "cuts = torch.tensor([0, 9, 5], device='cuda'); "
        "pararnn.solve(cell, torch.randn(1, 9, 3, 4, device='cuda'), cu_seqlens=cuts); "
        "torch.cuda.synchronize()"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode != 0
    assert "cu_seqlens must start at 0" in process.stdout + process.stderr
