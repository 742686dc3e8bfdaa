"""Steps with large matrices, which clusters of blocks run, on a GPU: next to the float64 loop."""

import copy

import pytest
import torch
from call_results import as_tuple, with_gradients
from captures import capture, check_replays
from memory_cells import make_call
from test_axes_twice import CELLS as TWICE
from test_clusters import Softmaxes
from test_folds import Gram
from test_windows import Convolves, Filters, Register
from torch.utils._pytree import tree_leaves

import pararnn
from pararnn.base.numerics import SEQUENTIAL_ERRORS
from pararnn.codegen.clusters import runs_in_clusters
from pararnn.program.program import program_of
from pararnn.zoo import CELLS as VECTORS
from pararnn.zoo import MEMORY_CELLS, WORLD_CELLS, AtlasCell, ProjectedLSTMCell

CELLS = {
    "projected": lambda: ProjectedLSTMCell(256, num_heads=1, K=1024),
    "projected heads": lambda: ProjectedLSTMCell(3 * 100, num_heads=3, K=130),
    "projected wide": lambda: ProjectedLSTMCell(640, num_heads=1, K=2048),
    "dreamer-gru": lambda: WORLD_CELLS["dreamer-gru"](512, num_heads=1, G=8, K=64, E=64, U=512),
    "dreamer-gru odd": lambda: WORLD_CELLS["dreamer-gru"](231, num_heads=1, G=3, K=77, E=50, U=90),
    "softmaxes": lambda: Softmaxes(2 * 24, num_heads=1, G=2, N=24),
    "rssm": lambda: WORLD_CELLS["rssm"](896, num_heads=1, G=8, K=48, E=56, C=16, N=16, U=200),
}
TOLERANCES = {
    torch.float64: 1e-11,
    torch.float32: 2e-5,
    torch.bfloat16: 1.5e-2,
    torch.float16: 2e-3,
}
SIZES = ((16, 40), (3, 17), (70, 6))


def _leaves(cell, rows, steps, dtype, device, sequences=None, lengths=None):
    sizes = cell.head_sizes.of_call(lengths or {})
    carried = torch.float64 if dtype == torch.float64 else torch.float32
    gates = torch.randn(rows, steps, sizes.heads, sizes.width, device=device).to(dtype)
    initial = [
        torch.randn(sequences or rows, *size, device=device, dtype=carried)
        for size in sizes.state_sizes
    ]
    return gates, initial


def _run(cell, backend, gates, initial, scale=1.0, **options):
    gates, initial = gates.clone().requires_grad_(), [h.clone().requires_grad_() for h in initial]
    out, final = pararnn.solve(
        cell, gates, initial, solver="sequential", backend=backend, **options
    )
    results = tree_leaves((out, final))
    generator = torch.Generator(gates.device).manual_seed(1)
    cotangents = [
        torch.randn(x.shape, generator=generator, device=x.device) * scale for x in results
    ]
    grads = torch.autograd.grad(
        results, [gates, *initial, *cell.parameters()],
        [c.to(x.dtype) for c, x in zip(cotangents, results, strict=True)],
    )  # fmt: skip
    return [*results, *grads]


def _check(results, expected, dtype, times=1, loops=()):
    """loops: results of loops in this dtype, which are as far from the expected ones."""
    for i, (got, want) in enumerate(zip(results, expected, strict=True)):
        assert got.isfinite().all()
        samples = [_error(loop[i], want) for loop in loops]
        limit = times * TOLERANCES[dtype] + SEQUENTIAL_ERRORS * max(samples, default=0.0)
        assert _error(got, want) <= limit


def _error(got, want):
    gap = (got.double().to(want.device) - want).abs().max()
    return float(gap / want.abs().max().clamp_min(1e-300))


def _wide(cell, gates, initial):
    return copy.deepcopy(cell).double(), gates.double(), [h.double() for h in initial]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CELLS)
def test_clusters_are_the_loop(name, dtype, device):
    """For few and many rows, in both directions of time, with resets and small gradients."""
    cell = CELLS[name]().to(device, dtype)
    assert runs_in_clusters(program_of(cell))
    for i, (rows, steps) in enumerate(SIZES):
        gates, initial = _leaves(cell, rows, steps, dtype, device)
        reset = torch.rand(rows, steps, device=device) < 0.1 if i else None
        options = {"reset": reset, "reverse": i == 1}
        # The gates' gradient is of their dtype, in which a small one underflows.
        scale = 1.0 if dtype == torch.float16 else 1e-9
        results = _run(cell, "fused", gates, initial, scale, **options)
        expected = _run(*_with_backend(_wide(cell, gates, initial)), scale, **options)
        _check(results, expected, dtype)


def _with_backend(call):
    cell, *others = call
    return cell, "torch", *others


@pytest.mark.parametrize("name", ["layer-norm-lstm", "layer-norm-gru"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [40, 64, 512])
def test_steps_of_vectors_with_norms(name, width, dtype, device):
    """Their heads are matrix cells, with all states as outputs: a row by a warp, or by blocks."""
    cell = VECTORS[name](width).to(device, dtype)
    program = program_of(cell)
    assert runs_in_clusters(program.of_kernels)
    gates = torch.randn(11, 24, len(program.gates), width, device=device).to(dtype)
    initial = [torch.randn(11, width, device=device) for _ in range(program.num_states)]
    results = _run(cell, "fused", gates, initial, 1e-9)
    expected = _run(*_with_backend(_wide(cell, gates, initial)), 1e-9)
    # Norms of few channels amplify: the loop in float32 is up to 8e-5 from the one in float64.
    _check(results, expected, dtype, 10 if width == 40 and dtype == torch.float32 else 1)


@pytest.mark.parametrize("name", ["projected", "rssm"])
def test_packed_rows(name, device):
    cell = CELLS[name]().to(device)
    gates, initial = _leaves(cell, 1, 60, torch.float32, device, sequences=4)
    options = {"cu_seqlens": torch.tensor([0, 7, 8, 30, 60], device=device)}
    results = _run(cell, "fused", gates, initial, **options)
    expected = _run(*_with_backend(_wide(cell, gates, initial)), **options)
    _check(results, expected, torch.float32)


@pytest.mark.parametrize("name", ["projected", "dreamer-gru"])
def test_many_steps(name, device):
    """Rounds of many steps, by clusters that run at the same time and in turn."""
    cell = CELLS[name]().to(device)
    gates, initial = _leaves(cell, 130, 200, torch.float32, device)
    with torch.no_grad():
        results = [
            pararnn.solve(cell, gates, initial, solver="sequential", backend=backend)
            for backend in ("fused", "fused", "torch")
        ]
    flat = [[*as_tuple(out), *as_tuple(final)] for out, final in results]
    for first, second, loop in zip(*flat, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(first, loop, rtol=1e-4, atol=1e-4)


def test_gradients_repeat(device):
    """Sums have one order, whatever clusters run beside each other."""
    cell = CELLS["dreamer-gru"]().to(device, torch.bfloat16)
    call = _leaves(cell, 40, 30, torch.bfloat16, device)
    first, second = (_run(cell, "fused", *call) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_graphs_replay(device):
    cell = CELLS["projected"]().to(device, torch.bfloat16)
    gates, initial = _leaves(cell, 16, 20, torch.bfloat16, device)
    with torch.no_grad():
        graph, (out, _) = capture(
            lambda: pararnn.solve(cell, gates, initial, solver="sequential", backend="fused")
        )
        gates.normal_()
        graph.replay()
        want, _ = pararnn.solve(cell, gates, initial, solver="sequential", backend="fused")
        assert torch.equal(out, want)


def test_a_layer_of_torch_nn_with_a_projection(device):
    """As cuDNN computes it, on its weights."""
    peer = torch.nn.LSTM(96, 512, proj_size=128, batch_first=True, device=device)
    layer = pararnn.LSTM(96, 512, proj_size=128, batch_first=True).to(device)
    layer.load_state_dict(peer.state_dict())
    x = torch.randn(9, 50, 96, device=device, requires_grad=True)
    results = []
    for module in (layer, peer):
        out, (h, c) = module(x)
        weights = [dict(module.named_parameters())[name] for name, _ in peer.named_parameters()]
        grads = torch.autograd.grad(out.square().sum() + c.sum(), [x, *weights])
        results.append([out, h, c, *grads])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(
            got, want, rtol=5e-3, atol=5e-3 * float(want.detach().abs().max())
        )


def test_a_compiled_layer(device):
    layer = pararnn.LSTM(96, 256, proj_size=64, batch_first=True).to(device)
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(3, 20, 96, device=device)
    results = []
    for module in (layer, compiled):
        leaf = x.clone().requires_grad_()
        out, _ = module(leaf)
        results.append([out, *torch.autograd.grad(out.square().sum(), [leaf])])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


ATTENTION = {"K": 128, "E": 512}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("length", [1, 64, 300])
@pytest.mark.parametrize("name", ["attention-lstm", "location-attention-lstm"])
def test_attention_to_a_memory(name, dtype, length, device):
    """Of any length, with masks and resets: outputs and all gradients, also by what has been
    attended to."""
    rows, steps = 11, 14
    cell = MEMORY_CELLS[name](256, num_heads=1, **ATTENTION).to(device, dtype)
    assert runs_in_clusters(program_of(cell))
    gates, initial = _leaves(cell, rows, steps, dtype, device, lengths={"S": length})
    memory = {
        "keys": torch.randn(rows, length, ATTENTION["K"], device=device).to(dtype),
        "values": torch.randn(rows, length, ATTENTION["E"], device=device).to(dtype),
        "mask": torch.zeros(rows, length, device=device, dtype=dtype),
    }
    memory["mask"][1::2, 1 + length // 2 :] = -torch.inf
    reset = torch.rand(rows, steps, device=device) < 0.1

    def run(backend, cell, gates, initial, memory):
        memory = {k: m.clone().requires_grad_(k != "mask") for k, m in memory.items()}
        leaves = [gates.clone().requires_grad_(), *(h.clone().requires_grad_() for h in initial)]
        out, final = pararnn.solve(
            cell, leaves[0], leaves[1:], memory=memory, reset=reset, solver="sequential",
            backend=backend,
        )  # fmt: skip
        leaves += [memory["keys"], memory["values"], *cell.parameters()]
        return with_gradients((out, final), leaves)

    wide = {key: m.double() for key, m in memory.items()}
    results = run("fused", cell, gates, initial, memory)
    _check(results, run("torch", *_wide(cell, gates, initial), wide), dtype)


def test_graphs_of_attention_replay(device):
    """With gradients, also by what has been attended to."""
    cell = MEMORY_CELLS["attention-lstm"](256, num_heads=1, **ATTENTION).to(device, torch.bfloat16)
    gates, _ = _leaves(cell, 11, 14, torch.bfloat16, device, lengths={"S": 64})
    memory = {
        key: torch.randn(11, 64, ATTENTION[axis], device=device, dtype=torch.bfloat16)
        for key, axis in (("keys", "K"), ("values", "E"))
    }
    leaves = [m.requires_grad_() for m in memory.values()]
    memory["mask"] = torch.zeros(11, 64, device=device, dtype=torch.bfloat16)

    def run(gates):
        out, _ = pararnn.solve(cell, gates, memory=memory, solver="sequential", backend="fused")
        return [out, *torch.autograd.grad(out.square().sum(), [gates, *leaves])]

    check_replays(run, gates)


TWO_AXES = {"several": (70, 33), "spread": (90,), "two-encoders": (130, 40), "weights": ()}
"""Cells with memories of several lengths, and with square ones, by these lengths."""


def _results_with_memory(cell, gates, initial, memory, backend, **options):
    """Outputs, final states, and the gradients of all leaves."""
    leaves = [gates.clone().requires_grad_(), *(h.clone().requires_grad_() for h in initial)]
    of_floats = {k: m.clone().requires_grad_() for k, m in memory.items() if m.dtype != torch.bool}
    out, final = pararnn.solve(
        cell, leaves[0], tuple(leaves[1:]), memory=memory | of_floats, solver="sequential",
        backend=backend, **options,
    )  # fmt: skip
    leaves += [*of_floats.values(), *cell.parameters()]
    return with_gradients((out, final), leaves, allow_unused=True)


def _compare_with_memory(cell, gates, initial, memory, **options):
    """Compare kernels with the loop in float64."""
    ours = _results_with_memory(cell, gates, initial, memory, "fused", **options)
    wide = {k: m if m.dtype == torch.bool else m.double() for k, m in memory.items()}
    loop = _results_with_memory(*_wide(cell, gates, initial), wide, "torch", **options)
    # Resets decide how far the loop in float32 is from it: up to 3e-5.
    narrow = _results_with_memory(cell, gates, initial, memory, "torch", **options)
    all_three = [each for each in zip(ours, loop, narrow, strict=True) if each[1] is not None]
    results, expected, sample = zip(*all_three, strict=True)
    _check(results, expected, gates.dtype, loops=[sample])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("values", [3, 32])
@pytest.mark.parametrize("name", TWO_AXES)
def test_memories_of_several_lengths_and_square_ones(name, values, dtype, device):
    """For rows that fill no cluster, with resets, a memory for each head, and packed rows."""
    options = {"values": values, "dtype": dtype}
    calls = [make_call(name, 11, 9, TWO_AXES[name], **options)]
    calls.append(make_call(name, 1, 20, TWO_AXES[name], sequences=3, by_head=True, **options))
    others = [{"reset": torch.rand(11, 9, device=device) < 0.2, "reverse": True}]
    others.append({"cu_seqlens": torch.tensor([0, 9, 9, 18], device=device)})
    for call, more in zip(calls, others, strict=True):
        cell = call.cell.to(device)
        assert runs_in_clusters(program_of(cell))
        gates, *initial = (x.detach().to(device) for x in (call.gates, *call.initial))
        memory = {k: m.detach().to(device) for k, m in call.memory.items()}
        _compare_with_memory(cell, gates, initial, memory, **more)


FOLDS = {
    **{name: lambda cls=cls: cls(2 * 24, num_heads=2, K=20) for name, cls in TWICE.items()},
    "Convolves": lambda: Convolves(2 * 9, num_heads=2, K=4),
    "Filters": lambda: Filters(2 * 40, num_heads=2),
    "Register": lambda: Register(2 * 9, num_heads=2, K=17),
    "atlas 16": lambda: AtlasCell(32, num_heads=2, K=16, iterations=2, coefficients=(2, -1.5, 0.5)),
    "atlas 64": lambda: AtlasCell(64, num_heads=1, K=64, iterations=2, coefficients=(2, -1.5, 0.5)),
}
"""Cells that read values at other indices than their own."""


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in FOLDS
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
        # Shared memory does not hold the values of its backward pass in float64.
        if (name, dtype) != ("atlas 64", torch.float64)
    ],
    ids=str,
)
def test_values_at_other_indices(name, dtype, device):
    """Products of states, transposes, windows and moves, for rows that fill no cluster."""
    cell = FOLDS[name]().to(device, dtype)
    assert runs_in_clusters(program_of(cell))
    for rows, steps in ((3, 17), (19, 5)):
        gates, initial = _leaves(cell, rows, steps, dtype, device)
        options = {"reset": torch.rand(rows, steps, device=device) < 0.1} if rows == 3 else {}
        initial = [h / 2 for h in initial]
        results = _run(cell, "fused", gates, initial, **options)
        expected = _run(*_with_backend(_wide(cell, gates, initial)), **options)
        # Products of states amplify: in float32 the loop is up to 2e-3 from the one in float64.
        loops = [_run(cell, "torch", gates, initial, **options)]
        _check(results, expected, dtype, 10, loops)


def test_a_head_that_a_cluster_does_not_hold(device):
    cell = Gram(300, num_heads=1, K=300).to(device)
    gates, initial = _leaves(cell, 2, 3, torch.float32, device)
    memory = {"A": torch.randn(2, 300, 300, device=device)}
    with pytest.raises(pararnn.EngineError, match="registers have room for 16"):
        pararnn.solve(cell, gates, initial, memory=memory, solver="sequential", backend="fused")
