"""Values read at other indices than their own, by clusters of a GPU: compiled for a CPU."""

import emulated
import pytest
import torch
from memory_cells import make_call
from table import PLAIN, needs_compiler
from test_axes_twice import CELLS as TWICE
from test_axes_twice import FUSED, TORCH, leaves_of, results_of
from test_cuda import needs_nvrtc
from test_matrix import _close
from test_tangents import Call, _assert_close, _derivatives
from test_windows import Convolves, Filters, Register
from torch.func import grad, vmap

import pararnn
from pararnn import Param, zoo
from pararnn.codegen import cluster_layout, clusters
from pararnn.codegen.cluster_layout import layout_of
from pararnn.codegen.clusters import cluster_variants, runs_in_clusters, source_of_clusters
from pararnn.codegen.cuda import cubin_of
from pararnn.program.links import is_point, passes_of
from pararnn.program.program import program_of
from pararnn.program.statements import Rename, sources_of


class Gram(pararnn.Cell):
    """A product of a state with itself, and a vector's of the row's matrix."""

    states = {"X": ("K", "V")}
    gates = {"x": ("K", "V"), "q": "K"}
    memory = {"A": ("K", "K")}

    def step(self, state, gate, param, memory):
        return torch.tanh(gate.x + 0.3 * state.X @ state.X.mT @ state.X)

    def readout(self, state, gate, param, memory):
        moved = (gate.q[..., None, :] @ memory.A).squeeze(-2)
        return (moved[..., :, None] * state.X).sum(-2)


CELLS = {**TWICE, "Convolves": Convolves, "Filters": Filters, "Register": Register}
MEMORIES = ("several", "spread", "two-encoders", "weights")


def _install(monkeypatch, blocks):
    """Run CUDA kernels on a CPU, a head by a number of blocks."""
    monkeypatch.setattr(clusters, "slices_of", lambda program, cluster: blocks)
    monkeypatch.setattr("pararnn.engines.fused.clusters.slices_of", clusters.slices_of)
    emulated.install(emulated.gpu(), monkeypatch)


def _cell(name, values=3, **options):
    cls = CELLS[name]
    axes = {axis: values + 1 for axis in cls.head_axes.arguments if axis not in cls.config}
    return cls(2 * values, num_heads=2, **axes, **options)


@needs_compiler
def test_products_of_states_and_of_a_square_memory(monkeypatch):
    """Small gradients, with resets, in reverse."""
    _install(monkeypatch, 2)
    cell = Gram(2 * 10, num_heads=2, K=9, dtype=torch.float64)
    gates, initial = leaves_of(cell, 2, 3)
    A, results = torch.randn(2, 9, 9, dtype=torch.float64, requires_grad=True), []
    reset = torch.tensor([[False, True, False], [False, False, True]])
    options = {"memory": {"A": A}, "reset": reset, "reverse": True}
    for pair in (FUSED, TORCH):
        output, final = pararnn.solve(cell, gates, initial, **pair, **options)
        loss = 1e-9 * (output.square().sum() + final.sin().sum())
        results.append([output, final, *torch.autograd.grad(loss, [gates, *initial, A])])
    for got, want in zip(*results, strict=True):
        assert (got - want).abs().max() <= 1e-10 * want.abs().max()


@needs_compiler
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.thorough
def test_kernels_are_the_loop(monkeypatch, name, blocks):
    _install(monkeypatch, blocks)
    torch.manual_seed(0)
    cell = _cell(name, 3 if blocks == 1 else 9 if name == "Convolves" else 17, dtype=torch.float64)
    assert runs_in_clusters(program_of(cell))
    gates, initial = leaves_of(cell, 2, 3)
    _close(*(results_of(cell, gates, initial, pair) for pair in (FUSED, TORCH)))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["Covariance", "Register"])
@pytest.mark.thorough
def test_dtypes(monkeypatch, name, dtype):
    _install(monkeypatch, 1)
    torch.manual_seed(0)
    cell = _cell(name, dtype=dtype)
    gates, initial = leaves_of(cell, 3, 4, dtype)
    initial = tuple(h.float().detach().requires_grad_() for h in initial)
    _close(*(results_of(cell, gates, initial, pair) for pair in (FUSED, TORCH)), dtype)


@needs_compiler
@pytest.mark.parametrize("name", [*CELLS, *MEMORIES, "atlas", "atlas-window"])
@pytest.mark.thorough
def test_second_derivatives_and_tangents(monkeypatch, name):
    _install(monkeypatch, 1)
    if name in MEMORIES:
        cell = make_call(name).cell
    elif name in CELLS:
        cell = _cell(name, dtype=torch.float64)
    else:
        options = {"iterations": 1, "dtype": torch.float64}
        cell = zoo.MATRIX_CELLS[name](8, num_heads=2, K=3, **options)
    call = Call(cell, 3, reset=torch.rand(2, 3) < 0.3, reverse=True)
    _assert_close(*(_derivatives(call(tuple(p.values())), call.tensors) for p in (FUSED, TORCH)))


@needs_compiler
@pytest.mark.parametrize("name", ["Products", "spread", "two-encoders", "weights"])
@pytest.mark.thorough
def test_gradients_of_samples(monkeypatch, name):
    """By one backward pass, as the parameters' gradients of rows are summed afterwards."""
    _install(monkeypatch, 1)
    cell = make_call(name).cell if name in MEMORIES else _cell(name, dtype=torch.float64)
    call = Call(cell, 3)
    rows = 1 + len(cell.states) + len(cell.memory)
    tensors = [torch.stack([x, x.cos()]) if i < rows else x for i, x in enumerate(call.tensors)]
    dims = tuple(0 if i < rows else None for i in range(len(tensors)))
    every, results = tuple(range(len(tensors))), []
    for pair in (tuple(FUSED.values()), PLAIN):
        function = call(pair)
        loss = lambda *x, f=function: 1e-9 * sum(y.sin().sum() for y in f(*x))  # noqa: E731
        results.append(vmap(grad(loss, every), dims)(*tensors))
    _assert_close(*results)


class Largest(pararnn.Cell):
    """Distances from the largest number of a row, with a matrix."""

    states, gates, params = {"h": "V"}, {"x": "V"}, {"W": Param("H,V,V")}

    def step(self, state, gate, param):
        y = torch.sigmoid(gate.x + (state.h[..., None, :] @ param.W).squeeze(-2)) * gate.x
        return torch.tanh(y - y.amax(-1, keepdim=True))


@needs_compiler
def test_an_entry_is_the_largest_one_however_kernels_round(monkeypatch, tmp_path):
    """A backward pass rounds otherwise than a forward pass, on a GPU with other instructions."""
    exact = "::fmaf(guess, ::fmaf(-y, guess, 1.0f), guess)"
    fault = emulated.Fault("backward", "functions.h", exact, "1.000001f * guess")
    device = emulated.with_fault(emulated.gpu(), fault, tmp_path, monkeypatch)
    emulated.install(device, monkeypatch)
    cell, results = Largest(2 * 5, num_heads=2), []
    gates = torch.randn(3, 4, 2, 5, requires_grad=True)
    for pair in (FUSED, TORCH):
        out, _ = pararnn.solve(cell, gates, **pair)
        results.append(torch.autograd.grad(out.sin().sum(), [gates, cell.W]))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_what_is_compared_with_its_largest_number_is_computed_once():
    """As compilers round an expression of two products in one of two ways, by loop."""
    for name in ("Products", "Covariance"):
        passes = passes_of(program_of(_cell(name)), torch.float64)
        values = passes.backward.statements.values
        compared = [v for v in values if v.node.target is torch.ops.aten.eq.Tensor]
        sources = {source for value in compared for source in sources_of(value)}
        assert sources
        assert not any(map(is_point, sources))
        assert sources.isdisjoint(passes.kept)


@needs_compiler
@pytest.mark.thorough
def test_steps_and_padded_batches(monkeypatch):
    """Steps one by one, and rows that end before others, which a memory's lengths follow."""
    _install(monkeypatch, 1)
    options = {"num_heads": 2, "K": 4, "iterations": 1, "dtype": torch.float64}
    layer = pararnn.ParaRNN(zoo.AtlasCell, 6, 6, backend="fused", **options)
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    output, h_n = layer(x, lengths=[5, 2, 0])
    reference, last = layer(x, lengths=[5, 2, 0], backend="torch")
    _close([output, *h_n], [reference, *last])
    state, outputs = None, []
    for x_t in x.unbind(1):
        y_t, state = layer.step(x_t, state)
        outputs.append(y_t)
    _close([torch.stack(outputs, 1)], [layer(x, backend="torch")[0]])


def test_a_fold_reads_what_all_blocks_have_written():
    """One meeting for each product of states; copies in another order are the values themselves."""
    program = program_of(_cell("Orders"))
    passes = passes_of(program, torch.float32)
    views = [x.value.definition for x in passes.forward.links if x.kind == "view"]
    assert all(d.names != d.source.axes for d in views if isinstance(d, Rename))
    cell = zoo.AtlasCell(8, num_heads=1, K=8, iterations=2)
    forward = passes_of(program_of(cell), torch.float32).forward
    assert len([link for link in forward.links if link.kind == "fold"]) == 6
    assert len(forward.meets) == 8
    assert passes_of(program_of(cell), torch.float32).kept[0].axes == ()


def test_a_block_for_each_row_does_not_run_them():
    for cell, what in ((make_call("spread").cell, "a memory"), (_cell("Orders"), "one axis twice")):
        with pytest.raises(pararnn.EngineError, match=f"{what}.*: clusters of blocks run it"):
            pararnn.emitted(cell, "cuda")


def test_kernels_are_of_the_lengths_of_both_axes():
    program = program_of(make_call("two-encoders").cell)
    for variant in cluster_variants(program, torch.bfloat16, torch.bfloat16, (9, 0)):
        assert variant.lines == (64, 64)
        assert clusters.lines_of([100, 7]) == (128, 64)
        assert "place.lines(1)" in source_of_clusters(program, variant._replace(lines=(128, 64)))


def test_states_that_registers_have_no_room_for(monkeypatch):
    """On request kernels raise, and `auto` runs PyTorch and says why."""
    emulated.install(emulated.gpu(), monkeypatch)
    monkeypatch.setattr(cluster_layout, "MAX_ENTRIES", 0)
    layer = pararnn.ParaRNN(Gram, 6, 2 * 5, num_heads=2, K=9)
    x, memory = torch.randn(2, 3, 6), {"A": torch.randn(2, 9, 9)}
    text = r"values of 9 x \d+ numbers \(K, .*2 for each thread .* Use shorter axes"
    with pytest.warns(pararnn.BackendWarning, match=text):
        layer(x, memory=memory)
    assert layer.layers[0].choice.pair == ("sequential", "torch")
    with pytest.raises(pararnn.EngineError, match=text):
        layer(x, memory=memory, backend="fused", solver="sequential")


COMPILED = {
    "two-encoders": torch.bfloat16,
    "spread": torch.float32,
    "weights": torch.float16,
    "Register": torch.float64,
    "atlas": torch.float32,
}


@needs_nvrtc
@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.thorough
def test_kernels_compile(name):
    """A head of published size among them, which a cluster holds."""
    dtype = COMPILED[name]
    if name == "atlas":
        cell = zoo.AtlasCell(64, num_heads=1, K=64)
    else:
        cell = make_call(name).cell if name in MEMORIES else _cell(name)
    program = program_of(cell)
    for variant in cluster_variants(program, dtype, dtype, (9, 0)):
        assert cubin_of(program, variant, "sm_90")
        assert layout_of(program, variant).bytes <= variant.shared
