"""Cells of world models: DreamerV3's block GRU and RSSM, by kernels and by plain loops."""

import pytest
import torch
from call_results import with_gradients
from emulated import gpu, install
from table import needs_compiler
from world_cells import AXES, LOOPS, loop, make_cell

import pararnn
from pararnn import zoo
from pararnn.codegen.matrix_cuda import matrix_variants, memory_of
from pararnn.program.program import program_of

LOOP, FUSED = ({"solver": "sequential", "backend": backend} for backend in ("torch", "fused"))
STEPS = 20
WIDE = {"G": 2, "K": 16, "E": 32, "U": 48, "C": 3, "N": 16}
"""Axes that fill whole vectors."""


def _gates(cell, rows, steps=STEPS):
    """Random gates, of which the last are noise of Gumbel where the cell samples."""
    gates = torch.randn(rows, steps, 1, cell.head_sizes.width, dtype=torch.float64)
    noise = cell.head_sizes.split(gates)[-1]
    if "noise" in type(cell).gates:
        noise.copy_(-torch.log(-torch.log(torch.rand(noise.shape, dtype=torch.float64))))
    return gates


def _case(name, dtype=torch.float64, rows=3, **axes):
    torch.manual_seed(0)
    cell = make_cell(name, dtype, **axes)
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    initial = [0.5 * torch.randn(rows, *size, dtype=torch.float64) for size in cell.state_sizes]
    leaves = [_gates(cell, rows), *initial]
    return cell, [leaf.to(dtype).requires_grad_() for leaf in leaves], torch.rand(rows, STEPS) < 0.2


def _run(cell, leaves, **options):
    gates, *initial = leaves
    output, final = pararnn.solve(cell, gates, tuple(initial), **options)
    return with_gradients((output, final), [*leaves, *cell.parameters()])


def _reference(name, cell, leaves, reset):
    exact = [leaf.detach().double().requires_grad_() for leaf in [*leaves, *cell.parameters()]]
    gates, initial, params = exact[0], exact[1 : len(leaves)], exact[len(leaves) :]
    return with_gradients(loop(name, cell, gates, initial, params, reset), exact)


def _close(results, references, limit):
    for own, true in zip(results, references, strict=True):
        assert own.shape == true.shape
        assert (own.double() - true).abs().max() <= limit * true.abs().max()


@needs_compiler
@pytest.mark.parametrize("name", LOOPS)
def test_cells_are_the_published_recurrences(name):
    """States, outputs and all gradients with resets: in PyTorch, and by kernels in two dtypes."""
    cell, leaves, reset = _case(name)
    reference = _reference(name, cell, leaves, reset)
    assert all(t.abs().max() > 1e-3 for t in reference)
    for pair in (LOOP, FUSED):
        _close(_run(cell, leaves, reset=reset, **pair), reference, 1e-11)
    cell, leaves, reset = _case(name, torch.float32, 18, **WIDE)
    _close(_run(cell, leaves, reset=reset, **FUSED), _reference(name, cell, leaves, reset), 1e-4)


@needs_compiler
@pytest.mark.parametrize("name", LOOPS)
def test_reverse_and_packed_rows_are_the_loops(name):
    cell, leaves, _ = _case(name, rows=1)
    starts = torch.tensor([0, 7, 8, STEPS - 3])
    gates, *initial = leaves
    leaves = [gates, *(torch.cat([h, 0 * h, -h]).detach().requires_grad_() for h in initial)]
    for options in ({"reverse": True}, {"cu_seqlens": starts}):
        start = [h[: 1 if "reverse" in options else 3] for h in leaves[1:]]
        results = []
        for pair in (FUSED, LOOP):
            output, final = pararnn.solve(cell, gates, tuple(start), **options, **pair)
            results.append(with_gradients((output, final), [*leaves, *cell.parameters()]))
        _close(*results, 1e-11)


@pytest.mark.parametrize(("rows", "steps"), [(0, STEPS), (2, 0), (0, 0)])
@pytest.mark.parametrize("name", LOOPS)
def test_nothing_to_solve(name, rows, steps):
    cell, leaves, _ = _case(name, rows=rows)
    leaves[0] = leaves[0].detach()[:, :steps].requires_grad_()
    output, *_, grad = _run(cell, leaves, **LOOP)
    assert output.shape == (rows, steps, 1, cell.head_sizes.output[1])
    assert not grad.any()


@needs_compiler
def test_steps_of_a_layer_are_the_layer():
    cls, axes = zoo.RSSMCell, AXES
    width = axes["G"] * axes["K"] + 2 * axes["C"] * axes["N"]
    torch.manual_seed(0)
    layer = pararnn.ParaRNN(cls, 8, width, **axes)
    x, begins, state, steps = torch.randn(2, 12, 8), torch.rand(2, 12) < 0.2, None, []
    output, final = layer(x, reset=begins)
    with torch.no_grad():
        for t in range(12):
            y, state = layer.step(x[:, t], state, reset=begins[:, t])
            steps.append(y)
    torch.testing.assert_close(torch.stack(steps, 1), output)
    torch.testing.assert_close(state, final)
    h, z, log_p = layer.cell.head_sizes.split_output(output.unsqueeze(-2))
    assert torch.equal(z.sum(-1), torch.ones(2, 12, 1, axes["C"]))
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(2, 12, 1, axes["C"]))
    assert h.shape == (2, 12, 1, axes["G"], axes["K"])
    assert pararnn.verify(layer, x).passed


@needs_compiler
def test_choices_have_the_frequencies_of_their_probabilities():
    cell = make_cell("rssm", torch.float32)
    gates = _gates(cell, 1, 1).float().expand(20_000, 1, 1, -1).clone()
    noise = cell.head_sizes.split(gates)[-1]
    noise.copy_(-torch.log(-torch.log(torch.rand(noise.shape))))
    output, _ = pararnn.solve(cell, gates, **FUSED)
    _, z, log_p = cell.head_sizes.split_output(output)
    assert (z.mean(0) - log_p[0].exp()).abs().max() < 0.02


@needs_compiler
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.thorough
def test_kernels_for_a_gpu_are_the_loop(name, monkeypatch):
    """On a CPU, of axes whose matrices registers hold; outputs at padding are 0."""
    install(gpu(), monkeypatch)
    axes = {"G": 2, "K": 3, "E": 4, "U": 5, "C": 3, "N": 2}
    cell, leaves, reset = _case(name, torch.float32, 2, **axes)
    _close(_run(cell, leaves, reset=reset, **FUSED), _reference(name, cell, leaves, reset), 1e-4)
    gates, *_ = leaves
    ends = torch.tensor([0, 5, 9])
    output, _ = pararnn.solve(cell, gates[:1], cu_seqlens=ends, **FUSED)
    truth, _ = pararnn.solve(cell, gates[:1], cu_seqlens=ends, **LOOP)
    torch.testing.assert_close(output, truth)
    assert not output[:, 9:].any()


def test_a_gpu_refuses_matrices_that_registers_do_not_hold():
    """Where clusters do not run a cell."""
    program = program_of(make_cell("dreamer-gru", torch.float32, K=32, E=32, U=64))
    variant = matrix_variants(program, torch.float32, torch.float32, (9, 0))[0]
    with pytest.raises(pararnn.EngineError, match="values of parameters for each thread"):
        memory_of(program, variant)


def test_hidden_sizes_are_the_numbers_of_outputs():
    with pytest.raises(pararnn.CellError, match="numbers of its outputs, 6"):
        zoo.DreamerGRUCell(8, G=2, K=3, E=4, U=5)


def test_tensors_are_drawn_for_sums_over_all_axes_but_the_last():
    cell = zoo.DreamerGRUCell(512, G=8, K=64, E=64, U=256)
    assert abs(float(cell.W_h.detach().std()) * 512**0.5 - 1) < 0.02


def test_other_outputs_leave_chunks_and_segments():
    program = program_of(make_cell("dreamer-gru"))
    assert "other axes than V" in str(program.affine_form())
