"""Layers of cells that mix channels inside heads: all that layers do works with them."""

import copy
import io
import pickle

import pytest
import torch
from call_results import as_tuple
from mixing_cells import Coupled, Elman, HeadGRU, HeadLSTM, Mixture, matrices
from table import FUSED, PLAIN, needs_compiler

import pararnn
from pararnn import Param
from pararnn.lm import LanguageModel, LMConfig

pytestmark = needs_compiler

KERNELS = {"solver": FUSED[0], "backend": FUSED[1]}
LOOP = {"solver": PLAIN[0], "backend": PLAIN[1]}
STEPS = 9


class Reading(Mixture):
    """A readout that multiplies by a matrix of its own, and by one of the step's."""

    params = {**Mixture.params, **matrices("W"), "v": Param("D", mean=1.0)}

    def readout(self, state, gate, param):
        return torch.tanh(state.h @ param.W + param.v * (state.c @ param.R.mT)) * gate.f


def _layer(cell_class, **options):
    torch.manual_seed(0)
    options = {"num_heads": 2, "dtype": torch.float64, "batch_first": True, **options}
    return pararnn.ParaRNN(cell_class, 4, 8, **options)


def _inputs(cell_class, batch=3):
    torch.manual_seed(1)
    x = torch.randn(batch, STEPS, 4, dtype=torch.float64, requires_grad=True)
    return x, {name: torch.rand(batch, STEPS, dtype=torch.float64) for name in cell_class.fields}


def _tensors(results):
    output, final = results[:2]
    return [output, *as_tuple(final)]


def _agree(layer, x, *leaves, h_0=None, **options):
    """Results and gradients by kernels and by the loop are the same."""
    runs = []
    for pair in (KERNELS, LOOP):
        with pararnn.using(**pair):
            results = _tensors(layer(x, h_0, **options))
        loss = sum(result.sin().sum() for result in results)
        grads = torch.autograd.grad(loss, [x, *leaves, *layer.parameters()], allow_unused=True)
        runs.append([*results, *(grad for grad in grads if grad is not None)])
    for own, truth in zip(*runs, strict=True):
        torch.testing.assert_close(own, truth, rtol=1e-10, atol=1e-12)


def _starts(cell_class, lead):
    starts = [torch.randn(*lead, 8, dtype=torch.float64) for _ in cell_class.states]
    return tuple(start.requires_grad_() for start in starts)


def _of(starts):
    return starts if len(starts) > 1 else starts[0]


@pytest.mark.parametrize("cell_class", [HeadGRU, Coupled, Reading])
def test_resets_to_given_states_in_both_directions(cell_class):
    layer = _layer(cell_class, num_layers=2, bidirectional=True)
    x, fields = _inputs(cell_class)
    initial = _starts(cell_class, (4, 3))
    reset = torch.rand(3, STEPS) < 0.3
    _agree(layer, x, *initial, h_0=_of(initial), reset=reset, fields=fields)
    single = _layer(cell_class)
    states = _starts(cell_class, (1, int(reset.sum())))
    _agree(single, x, *states, reset=reset, reset_states=_of(states), fields=fields)


@pytest.mark.parametrize("cell_class", [HeadLSTM, Reading])
def test_packed_rows(cell_class):
    layer, (x, fields) = _layer(cell_class, bidirectional=True), _inputs(cell_class, batch=1)
    cuts = torch.tensor([0, 4, 4, 7])
    initial = _starts(cell_class, (2, 3))
    _agree(layer, x, *initial, h_0=_of(initial), cu_seqlens=cuts, fields=fields)


@pytest.mark.parametrize("cell_class", [Coupled, Reading])
def test_steps_make_up_the_whole(cell_class):
    layer, (x, fields) = _layer(cell_class, num_layers=2), _inputs(cell_class)
    reset = torch.rand(3, STEPS) < 0.3
    whole, final = layer(x, reset=reset, fields=fields)
    state = None
    for t in range(STEPS):
        at = {name: field[:, t] for name, field in fields.items()}
        output, state = layer.step(x[:, t], state, reset=reset[:, t], fields=at)
        torch.testing.assert_close(output, whole[:, t])
    torch.testing.assert_close(state, final)


@pytest.mark.thorough
def test_compiled_code_has_the_gradients():
    layer, (x, fields) = _layer(Reading), _inputs(Reading)
    leaves = [x, *layer.parameters()]
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    outputs = [module(x, fields=fields)[0] for module in (run, layer)]
    grads = [torch.autograd.grad(output.sin().sum(), leaves) for output in outputs]
    for own, truth in zip((outputs[0], *grads[0]), (outputs[1], *grads[1]), strict=True):
        torch.testing.assert_close(own, truth)


@pytest.mark.thorough
def test_exported_programs_take_any_sizes():
    layer, (x, fields) = _layer(Reading), _inputs(Reading)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("steps")}
    dynamic_shapes = {"x": sizes, "fields": dict.fromkeys(fields, sizes)}
    with torch.no_grad():
        inputs = (x.detach(),), {"fields": fields}
        program = torch.export.export(layer, *inputs, dynamic_shapes=dynamic_shapes)
        run = program.module()
        more = torch.randn(5, 12, 4, dtype=torch.float64)
        others = {name: torch.rand(5, 12, dtype=torch.float64) for name in fields}
        torch.testing.assert_close(run(more, fields=others)[0], layer(more, fields=others)[0])


@pytest.mark.thorough
def test_export_to_onnx_is_a_scan_of_plain_operators(monkeypatch):
    """As within torch.onnx.export; by its flag, for compilers know the function by identity."""
    monkeypatch.setattr("torch.onnx._internal.exporter._flags._is_onnx_exporting", True)
    layer, (x, _) = _layer(HeadGRU), _inputs(HeadGRU)
    with torch.no_grad():
        program = torch.export.export(layer, (x.detach(),))
        calls = [n.target for n in program.graph.nodes if n.op == "call_function"]
        assert calls.count(torch.ops.higher_order.scan) == 1
        assert all(getattr(call, "namespace", "") != "pararnn" for call in calls)
        torch.testing.assert_close(program.module()(x)[0], layer(x)[0])


def test_verify_and_explain():
    layer, (x, fields) = _layer(Reading), _inputs(Reading)
    report = pararnn.verify(layer, x.detach(), fields=fields)
    assert report.passed, report
    assert "sequential on fused" in str(report)
    assert "readout" in str(report)
    explanation = pararnn.explain(layer, tuple(x.shape))
    assert (explanation.solver, explanation.backend) == FUSED
    text = str(explanation)
    assert "(newton, fused)" in text
    assert "steps that mix channels inside heads" in text


def test_autotune_measures_what_can_run(tmp_path, monkeypatch, no_caches):
    monkeypatch.setattr("pararnn.engines.tuned.cache_folder", lambda: tmp_path)
    tuning = pararnn.autotune(_layer(Elman, dtype=torch.float32), (2, 20, 4))
    pairs = {(row.solver, row.backend) for row in tuning.measured}
    assert FUSED in pairs
    assert PLAIN not in pairs


@pytest.mark.parametrize("source", ["bfloat16", "autocast"])
def test_16_bits(source):
    layer, (x, _) = _layer(HeadLSTM, dtype=torch.float32), _inputs(HeadLSTM)
    truth = layer(x.detach().float())[0]
    if source == "bfloat16":
        output, (h, _) = layer.bfloat16()(x.bfloat16())
    else:
        with torch.autocast("cpu", torch.bfloat16):
            output, (h, _) = layer(x.float())
    assert output.dtype == torch.bfloat16
    assert h.dtype == torch.float32
    torch.testing.assert_close(output.float(), truth, rtol=0.05, atol=0.02)
    output.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_copies_files_and_meta_layers():
    layer, (x, _) = _layer(HeadGRU), _inputs(HeadGRU)
    truth = layer(x)[0]
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = _layer(HeadGRU, device="meta").to_empty(device="cpu")
    other.load_state_dict(torch.load(file))
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), other):
        assert torch.equal(twin(x)[0], truth)


def test_second_derivatives_by_the_loop_and_by_kernels():
    layer, (x, _) = _layer(HeadGRU, **LOOP), _inputs(HeadGRU, batch=1)
    assert torch.autograd.gradgradcheck(lambda x: layer(x)[0], x[:, :2])
    _, tangent = torch.func.jvp(lambda x: layer(x)[0].sum(), (x.detach(),), (x.detach(),))
    (grad,) = torch.autograd.grad(layer(x)[0].sum(), x)
    torch.testing.assert_close(tangent, (grad * x).sum().detach())
    fast = _layer(HeadGRU, **KERNELS)
    fast.load_state_dict(layer.state_dict())
    seconds = []
    for own in (layer, fast):
        (grad,) = torch.autograd.grad(own(x)[0].sin().sum(), x, create_graph=True)
        seconds += torch.autograd.grad(grad.square().sum(), x)
    torch.testing.assert_close(*seconds)


def test_orthogonal_matrices_of_heads():
    layer, (x, _) = _layer(Elman), _inputs(Elman)
    torch.nn.utils.parametrizations.orthogonal(layer.cell, "R")
    R = layer.cell.R
    torch.testing.assert_close(R @ R.mT, torch.eye(4, dtype=R.dtype).expand(2, 4, 4))
    _agree(layer, x)


@pytest.mark.parametrize("by", ["elementwise", "norm"])
def test_clipping_of_matrices(by):
    """Entries are clamped; a norm is that of each head's matrix, and bounds what a product does."""
    layer = _layer(HeadGRU)
    cell = layer.cell
    with torch.no_grad():
        cell.R_z[0].mul_(1e-3)
        cell.R_z[1].mul_(10)
    small, large = cell.R_z.detach().clone()
    layer.layers[0].clip_recurrent(by)
    assert torch.equal(cell.R_z[0], small)
    if by == "elementwise":
        assert torch.equal(cell.R_z[1], large.clamp(-0.5, 0.5))
        return
    torch.testing.assert_close(cell.R_z[1], large * (0.5 / large.norm()))
    vectors = torch.randn(20, 8, dtype=torch.float64)
    lengths = (vectors.unflatten(-1, (2, 4)).unsqueeze(-2) @ cell.R_r).norm(dim=-1).squeeze(-1)
    assert (lengths <= 0.5 * vectors.unflatten(-1, (2, 4)).norm(dim=-1) + 1e-12).all()


@pytest.mark.parametrize("by", ["elementwise", "norm"])
@pytest.mark.parametrize("make", [Elman, pararnn.GRUCell])
def test_a_bound_of_zero_makes_zeros(by, make):
    """Also of what is zero already, whose norm divides by nothing."""
    layer = _layer(make)
    for _ in range(2):
        layer.layers[0].clip_recurrent(by, 0.0)
        assert not any(parameter.any() for parameter in layer.layers[0].recurrent_parameters())


def test_language_models_decode_with_mixing_cells():
    torch.manual_seed(0)
    config = LMConfig(
        vocab_size=16,
        hidden_size=16,
        num_hidden_layers=2,
        num_heads=2,
        intermediate_size=16,
        cell="mixing_cells:HeadLSTM",
    )
    model = LanguageModel(config)
    tokens = torch.randint(0, 16, (2, 12))
    whole = model(tokens)
    cache = model.new_cache()
    parts = [model(tokens[:, :7], cache=cache)]
    parts += [model(tokens[:, t : t + 1], cache=cache) for t in range(7, 12)]
    torch.testing.assert_close(torch.cat(parts, 1), whole)
    model.loss(tokens).backward()
    assert all(p.grad is not None for p in model.parameters())
