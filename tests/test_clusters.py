"""Steps with large matrices on a GPU: clusters of blocks run some rows each, compiled for a CPU."""

import re

import pytest
import torch
from emulated import gpu, install
from mixing_runs import KERNELS
from norm_cells import NormLSTM
from table import check_case, make_case, needs_compiler
from torch.utils._pytree import tree_leaves

import pararnn
from pararnn import Param
from pararnn.check.contract import check_solve
from pararnn.codegen import clusters
from pararnn.codegen.cluster_layout import ClusterVariant, layout_of, local_results, steps_of
from pararnn.codegen.clusters import cluster_variants, runs_in_clusters, slices_of
from pararnn.codegen.nvrtc import MAX_CLUSTER
from pararnn.engines.fused.clusters import ClusterCuda
from pararnn.program.links import IN_ARRAYS, passes_of, why_not
from pararnn.program.program import program_of
from pararnn.solve import prepare
from pararnn.zoo import CELLS as CELLS_OF_VECTORS
from pararnn.zoo import MATRIX_CELLS, MEMORY_CELLS, WORLD_CELLS, ProjectedLSTMCell

CELLS = {
    "projected": lambda: ProjectedLSTMCell(40, num_heads=2, K=72),
    "dreamer-gru": lambda: WORLD_CELLS["dreamer-gru"](40, num_heads=1, G=2, K=20, E=24, U=40),
    "rssm": lambda: WORLD_CELLS["rssm"](70, num_heads=1, G=2, K=20, E=24, C=3, N=5, U=40),
}
TOLERANCES = {
    torch.float64: 1e-14,
    torch.float32: 3e-6,
    torch.bfloat16: 1.5e-2,
    torch.float16: 2e-3,
}


@pytest.fixture
def device(monkeypatch):
    """Run CUDA kernels on a CPU."""
    install(gpu(), monkeypatch)


def _run(cell, backend, gates, initial, scale, **options):
    out, final = pararnn.solve(
        cell, gates, initial, solver="sequential", backend=backend, **options
    )
    results = tree_leaves((out, final))
    torch.manual_seed(1)
    loss = sum((x.double() * torch.randn(x.shape, dtype=torch.float64)).sum() for x in results)
    grads = torch.autograd.grad(loss * scale, [gates, *initial, *cell.parameters()])
    return [*results, *grads]


def _check(name, dtype, rows, steps, weights=None, **options):
    """Compare outputs, final states and all gradients with the float64 loop."""
    cell, wide = CELLS[name]().to(weights or dtype), CELLS[name]().double()
    wide.load_state_dict(cell.state_dict())
    sizes = cell.head_sizes
    gates = torch.randn(rows, steps, sizes.heads, sizes.width).to(dtype)
    carried = torch.float64 if dtype == torch.float64 else torch.float32
    sequences = options.get("sequences", rows)
    options.pop("sequences", None)
    initial = [torch.randn(sequences, *size).to(carried) for size in sizes.state_sizes]

    def tensors(of):
        return gates.to(of or dtype, copy=True).requires_grad_(), tuple(
            h.to(of or carried, copy=True).requires_grad_() for h in initial
        )

    scale = 1.0 if dtype == torch.float16 else 1e-9  # the gates' gradient is float16
    results = _run(cell, "fused", *tensors(None), scale, **options)
    expected = _run(wide, "torch", *tensors(torch.float64), scale, **options)
    for got, want in zip(results, expected, strict=True):
        error = (got.double() - want).abs().max() / want.abs().max().clamp_min(1e-30)
        assert error <= TOLERANCES[dtype]


@needs_compiler
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.one_in(6)
def test_clusters_are_the_loop(device, monkeypatch, name, slices):
    """In both directions of time, with resets, for rows that fill no cluster."""
    monkeypatch.setattr(clusters, "slices_of", lambda program, cluster: slices)
    monkeypatch.setattr("pararnn.engines.fused.clusters.slices_of", clusters.slices_of)
    dtype = (torch.float32, torch.bfloat16)[slices == 1]
    _check(name, dtype, 9, 3, reverse=True, reset=torch.rand(9, 3) < 0.3)


@needs_compiler
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.one_in(4)
def test_dtypes(device, monkeypatch, dtype):
    monkeypatch.setattr(clusters, "BLOCK_NUMBERS", 6000)
    _check("dreamer-gru", dtype, 3, 2)


@needs_compiler
def test_weights_of_another_dtype_than_the_gates(device, monkeypatch):
    monkeypatch.setattr(clusters, "BLOCK_NUMBERS", 10**6)
    _check("projected", torch.bfloat16, 2, 3, weights=torch.float32)


@needs_compiler
@pytest.mark.parametrize(("name", "width"), [("layer-norm-lstm", 64), ("layer-norm-gru", 40)])
@pytest.mark.one_in(2)
def test_steps_of_vectors_with_norms(device, name, width):
    """Their heads are matrix cells, with all states as outputs."""
    cell = CELLS_OF_VECTORS[name](width)
    gates = torch.randn(3, 3, len(program_of(cell).gates), width, requires_grad=True)
    count = program_of(cell).num_states
    initial = [torch.randn(3, width, requires_grad=True) for _ in range(count)]
    results = [_run(cell, backend, gates, initial, 1e-9) for backend in ("fused", "torch")]
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(
            got, want, rtol=1e-3, atol=1e-5 * float(want.detach().abs().max())
        )


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.one_in(2)
def test_norms_of_channels_that_are_almost_alike(device, dtype):
    """They enlarge the errors of products."""
    case = make_case(NormLSTM, dtype, 20, "reverse", channels=8, batch=3)
    check_case(case, **KERNELS)


def test_vectors_behind_a_norm_keep_more_than_half_precision(device):
    """Of both vectors of an outer product: rounded ones use up a fifth of the limit and more."""
    case = make_case(NormLSTM, torch.bfloat16, 17, channels=8, batch=3)
    checks = check_solve(case.cell, case.gates, case.initial, **KERNELS, **case.options).checks
    matrices = [check for check in checks if check.name.startswith("grad R")]
    assert len(matrices) == 4
    assert all(check.fraction < 0.1 for check in matrices), matrices


@pytest.mark.thorough
def test_a_row_that_is_not_finite_stays_alone(device):
    cell = CELLS["dreamer-gru"]()
    gates, others = torch.randn(2, 9, 4, 1, cell.head_sizes.width)
    with torch.no_grad():
        results = []
        for first in (gates, others):
            x = torch.cat([first[:1], gates[1:]])
            x[0, 1] = torch.inf if first is others else x[0, 1]
            results.append(pararnn.solve(cell, x, solver="sequential", backend="fused")[0])
    assert not results[1][0].isfinite().all()
    assert torch.equal(results[0][1:], results[1][1:])


class Detached(pararnn.Cell):
    """A step whose gradient multiplies by no matrix."""

    states = {"h": "V"}
    gates = {"x": "V"}
    params = {"W": Param("H,K,V")}
    config = {"K": None}

    def step(self, state, gate, param):
        y = (param.W @ state.h[..., None]).squeeze(-1).detach()
        return torch.tanh(gate.x + 0.5 * state.h + y.sum(-1, keepdim=True))


@needs_compiler
def test_a_backward_pass_without_matrices(device):
    cell, results = Detached(8, num_heads=1, K=6), []
    gates = torch.randn(2, 3, 1, 8, requires_grad=True)
    for backend in ("fused", "torch"):
        out, _ = pararnn.solve(cell, gates, solver="sequential", backend=backend)
        results.append([out, *torch.autograd.grad(out.sum(), [gates])])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


class Softmaxes(pararnn.Cell):
    """Softmaxes of groups, and a product inside each."""

    states = {"h": ("G", "N")}
    gates = {"x": ("G", "N")}
    outputs = {"h": ("G", "N")}
    params = {"W": Param("H,G,K,N")}
    config = {"G": None, "N": None, "K": 5}

    def step(self, state, gate, param):
        weights = torch.softmax(3 * state.h + gate.x, -1)
        y = (param.W @ weights[..., None]).squeeze(-1)
        return torch.tanh(gate.x - weights * y.sum(-1, keepdim=True))

    def readout(self, state, gate, param):
        return state.h


@needs_compiler
@pytest.mark.parametrize("sizes", [(3, 16), (2, 24), (2, 40), (1, 70)], ids=str)
@pytest.mark.one_in(2)
def test_reductions_of_rows(device, sizes):
    """By warps in registers where these have whole groups, else through shared memory."""
    groups, number = sizes
    cell = Softmaxes(groups * number, num_heads=1, G=groups, N=number, dtype=torch.float64)
    program, results = program_of(cell), []
    variant = ClusterVariant("forward", torch.float64, torch.float64, False, 1, 200_000)
    layout = layout_of(program, variant)
    assert bool(layout.in_rows) == (number != 40)
    gates = 4 * torch.randn(9, 3, 1, groups * number, dtype=torch.float64).requires_grad_()
    for backend in ("fused", "torch"):
        out, _ = pararnn.solve(cell, gates, solver="sequential", backend=backend)
        loss = (out * torch.linspace(-1e-9, 1e-9, out.numel()).view_as(out)).sum()
        results.append([out, *torch.autograd.grad(loss, [gates, *cell.parameters()])])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(
            got, want, rtol=1e-9, atol=1e-12 * float(want.detach().abs().max())
        )


@needs_compiler
@pytest.mark.thorough
def test_packed_rows(device):
    """Sequences of a row, the last steps of which are padding."""
    _check("rssm", torch.float32, 1, 12, cu_seqlens=[0, 5, 6, 12], sequences=3)


@needs_compiler
@pytest.mark.thorough
def test_without_a_gradient_of_outputs(device):
    cell = CELLS["projected"]()
    gates = torch.randn(2, 4, 2, cell.head_sizes.width, requires_grad=True)
    results = []
    for backend in ("fused", "torch"):
        _, final = pararnn.solve(cell, gates, solver="sequential", backend=backend)
        results.append(torch.autograd.grad(final[1].sum(), [gates, *cell.parameters()]))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_stages_of_the_world_models():
    """A block waits for others as often as one result needs another of all entries."""
    passes = passes_of(program_of(CELLS["dreamer-gru"]()), torch.float32)
    assert (passes.saving.stages, passes.backward.stages) == (5, 5)
    kinds = [link.kind for link in passes.saving.links]
    assert kinds == ["gather", "gather", "reduce", "gather", "reduce", *["gather"] * 3]


@pytest.mark.parametrize("name", ["dreamer-gru", "rssm"])
def test_every_process_has_the_same_kernels(name):
    """As kernels are cached by their text, which has numbers of links."""
    program = program_of(CELLS[name]())
    links = [
        [
            (link.kind, link.stage, link.value.node.name)
            for steps in passes_of.__wrapped__(program, torch.float32)[:3]
            for link in steps.links
        ]
        for _ in range(8)
    ]
    assert all(others == links[0] for others in links)


def test_values_that_move_along_a_memory_are_arrays():
    """What windows take, and factors and results of products inside lines."""
    cell = MEMORY_CELLS["location-attention-lstm"](6, num_heads=2, K=4, E=5, J=3, C=2)
    passes = passes_of(program_of(cell), torch.float32)
    kinds = [link.kind for link in passes.saving.links if link.kind in IN_ARRAYS]
    assert kinds == ["view", "array", "rows", "rows"]
    assert [axes for v in passes.kept if (axes := v.axes)[:1] == ("S",)] == [("S",)]
    factors = [(lhs.axes, rhs.axes) for _, lhs, rhs in passes.backward.line_outers]
    assert factors == [(("S", "J"), ("S", "C")), (("S", "C"), ("S", "K"))]


def test_sums_of_products_are_one():
    """Of the gradients of four gates by the projected state a block sends one sum."""
    passes = passes_of(program_of(CELLS["projected"]()), torch.float32)
    last = passes.backward.links[-1]
    assert (last.kind, len(last.products)) == ("scatter", 4)


def test_a_softmax_inside_a_block_waits_for_no_other():
    cell = WORLD_CELLS["rssm"](296, num_heads=1, G=2, K=20, E=24, C=4, N=32, U=40)
    program = program_of(cell)
    variant = ClusterVariant("forward", torch.float32, torch.float32, False, 2, 200_000)
    steps, layout = steps_of(program, variant), layout_of(program, variant)
    local = [
        link
        for link in steps.links
        if link.kind == "reduce" and local_results(steps, link, layout.shares)
    ]
    assert len(local) == 3
    assert {link.stage for link in local} - {*layout.received}


def test_who_runs_in_clusters():
    """Steps that multiply vectors by parameters, or read memories; products of matrix states do
    not."""
    assert runs_in_clusters(program_of(ProjectedLSTMCell(256, num_heads=1, K=512)))
    assert runs_in_clusters(program_of(CELLS["projected"]()))
    assert not runs_in_clusters(program_of(MATRIX_CELLS["gated-delta"](32, num_heads=2)))
    m2rnn = MATRIX_CELLS["m2rnn"](32, num_heads=2, K=16)
    assert why_not(program_of(m2rnn)) == "it multiplies a matrix by a matrix"
    attention = MEMORY_CELLS["attention-lstm"](32, num_heads=1, K=16, E=16)
    assert runs_in_clusters(program_of(attention))


@needs_compiler
def test_a_compiled_layer(device):
    layer, x = pararnn.LSTM(6, 12, proj_size=5), torch.randn(4, 3, 6)
    results = []
    for module in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        out, _ = module(leaf)
        results.append([out, *torch.autograd.grad(out.square().sum(), [leaf])])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_compiled_code_asks_who_runs_in_clusters():
    of_heads = program_of(CELLS_OF_VECTORS["layer-norm-lstm"](40)).of_kernels
    programs = [program_of(ProjectedLSTMCell(256, num_heads=1, K=512)), of_heads]

    @torch.compile(fullgraph=True, backend="eager")
    def answer(x):
        return x + sum(runs_in_clusters(program) for program in programs)

    assert answer(torch.zeros(())) == 2


def test_attention_of_published_size_fits_a_block():
    """Gradients of four gates by the state travel as one sum, in place of all gates."""
    program = program_of(MEMORY_CELLS["attention-lstm"](1024, num_heads=1, K=128, E=512))
    for variant in cluster_variants(program, torch.bfloat16, torch.bfloat16, (9, 0)):
        assert layout_of(program, variant._replace(lines=(512,))).bytes <= variant.shared


@pytest.mark.parametrize(
    ("batch", "one_layout", "rows"), [(3, False, 4), (999, False, 8), (3, True, 8)]
)
def test_rows_of_a_cluster_follow_the_batch_unless_bits_must_not(batch, one_layout, rows):
    cell = ProjectedLSTMCell(32, num_heads=1, K=64)
    gates = torch.zeros(batch, 1, 1, cell.head_sizes.width)
    args = prepare(cell, gates).with_options(one_layout=one_layout)
    variant = ClusterCuda(gpu(cores=132))._variant(program_of(cell), args, "forward")
    assert variant.rows == rows


def test_numbers_of_a_line_are_computed_once():
    """Weights of attention, which loops over what they weigh read."""
    program = program_of(MEMORY_CELLS["attention-lstm"](32, num_heads=1, K=16, E=16))
    for variant in cluster_variants(program, torch.bfloat16, torch.bfloat16, (9, 0)):
        source = clusters.source_of_clusters(program, variant._replace(lines=(16,)))
        loops = re.findall(r"Entry<(Share\d+)>& e\)[^{]*\{(.*?)\n {4,6}\}", source, re.DOTALL)
        weighed = {
            name for name, line in re.findall(r"struct (Share\d+) : ShareOf<.*, (\d+)>", source)
            if int(line) > 1
        }  # fmt: skip
        assert any("exp(" in body for name, body in loops if name not in weighed)
        assert not any("exp(" in body for name, body in loops if name in weighed)


def test_matrices_of_a_large_cell_are_in_shared_memory():
    cell = ProjectedLSTMCell(256, num_heads=1, K=1024)
    program = program_of(cell)
    assert slices_of(program, MAX_CLUSTER) == MAX_CLUSTER
    for variant in cluster_variants(program, torch.bfloat16, torch.bfloat16, (9, 0)):
        layout = layout_of(program, variant)
        assert layout.held_tiles == layout.matrix_tiles
