"""Hooks on a cell run wherever its parameters are read: by layers, their steps and `solve`."""

import copy

import pytest
import torch
from table import PAIRS
from torch import nn
from torch.nn.utils import prune, remove_weight_norm, weight_norm

import pararnn
from pararnn.base.errors import CellError
from pararnn.cells.base import call_cell

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
MAKE = {
    "stack": lambda **options: pararnn.ParaGRU(4, 6, **options),
    "layer": lambda **options: pararnn.RecurrentLayer(pararnn.GRUCell, 4, 6, **options),
}


@pytest.fixture(params=list(MAKE))
def make(request):
    return MAKE[request.param]


def _set(layer, **values):
    """A copy of the layer without hooks, whose cell has other parameters."""
    other = type(layer)(*([] if hasattr(layer, "layers") else [pararnn.GRUCell]), 4, 6)
    own = {k: v for k, v in layer.state_dict().items() if "cell" not in k}
    cell = {k: v for k, v in other.state_dict().items() if "cell" in k}
    other.load_state_dict(cell | own)
    with torch.no_grad():
        for name in ("a_z", "a_r", "a_c"):
            value = values.get(name, layer.cell._parameters.get(name))
            getattr(other.cell, name).copy_(value)
    return other


def _outputs(layer, x):
    first = x[:, 0]
    gates = torch.zeros(2, 3, 3, 6)
    states = pararnn.solve(layer.cell, gates + 0.1)[0]
    return layer(x)[0], layer.step(first)[0], states


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_pruned_cell(make, pair):
    """The mask is applied by a pre-hook, to what has been loaded."""
    x = torch.randn(2, 9, 4)
    options = dict(zip(("solver", "backend"), pair, strict=True))
    pruned_layer, fresh = make(**options), make(**options)
    for layer in (pruned_layer, fresh):
        prune.identity(layer.cell, "a_z")
    with torch.no_grad():
        pruned_layer.cell.a_z_orig.fill_(0.4)
        pruned_layer.cell.a_z_mask[:4] = 0
    fresh.load_state_dict(pruned_layer.state_dict())
    right = _set(fresh, a_z=pruned_layer.cell.a_z_orig * pruned_layer.cell.a_z_mask)
    for got, want in zip(_outputs(fresh, x), _outputs(right, x), strict=True):
        assert torch.allclose(got, want, atol=1e-6)
    fresh(x)[0].sum().backward()
    assert fresh.cell.a_z_orig.grad[4:].all()
    assert not fresh.cell.a_z_orig.grad[:4].any()


def test_weight_norm_of_a_cell(make):
    x, layer = torch.randn(2, 9, 4), make()
    weight_norm(layer.cell, "a_r", dim=None)
    with torch.no_grad():
        layer.cell.a_r_g.fill_(0.7)
    value = 0.7 * layer.cell.a_r_v / layer.cell.a_r_v.norm()
    for got, want in zip(_outputs(layer, x), _outputs(_set(layer, a_r=value), x), strict=True):
        assert torch.allclose(got, want, atol=1e-6)
    layer(x)[0].sum().backward()
    assert layer.cell.a_r_g.grad is not None
    remove_weight_norm(layer.cell, "a_r")
    assert torch.allclose(layer.cell.a_r, value)


def _halve(cell, inputs, params):
    return tuple((p * 16).round() / 16 for p in params)


def test_a_forward_hook_gives_other_parameters(make):
    """As fake quantisation does."""
    x, layer = torch.randn(2, 9, 4), make(recompute_gates=True)
    layer.cell.register_forward_hook(_halve)
    cell = layer.cell
    values = zip(("a_z", "a_r", "a_c"), _halve(cell, (), cell.lifted_params()), strict=True)
    for got, want in zip(_outputs(layer, x), _outputs(_set(layer, **dict(values)), x), strict=True):
        assert torch.allclose(got, want, atol=1e-6)


def test_hooks_run_once_a_call(make):
    layer, calls = make(recompute_gates=True), []
    layer.cell.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.cell.register_forward_hook(lambda *_: calls.append("after"))
    layer.cell.register_full_backward_hook(lambda *_: calls.append("backward"))
    x = torch.randn(2, 9, 4, requires_grad=True)
    layer(x)[0].sum().backward()
    assert calls == ["before", "after", "backward"]
    calls.clear()
    with torch.no_grad():
        layer.step(x[:, 0])
    assert calls == ["before", "after"]


WRONG = {
    "fewer": (lambda *a: a[2][:1], r"a tuple of 3 tensors, .*'a_z', 'a_r', 'a_c'.* got 1"),
    "a list": (lambda *a: list(a[2]), "got list"),
    "of another size": (lambda *a: (*a[2][:2], a[2][2][:3]), r"a_c of GRUCell must be \(6,\)"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_what_a_forward_hook_may_not_give(make, case):
    layer, (hook, message) = make(), WRONG[case]
    layer.cell.register_forward_hook(hook)
    with pytest.raises((TypeError, ValueError), match=message):
        layer(torch.randn(2, 9, 4))


def test_a_pre_hook_may_give_no_arguments(make):
    layer = make()
    layer.cell.register_forward_pre_hook(lambda *_: (1,))
    with pytest.raises(TypeError, match=r"called without arguments.*must return None"):
        layer(torch.randn(2, 9, 4))


def test_offloading(make):
    """By accelerate's hook: parameters are on the meta device between calls."""
    hooks = pytest.importorskip("accelerate.hooks")
    x, layer = torch.randn(2, 9, 4), make()
    right = copy.deepcopy(layer)
    weights = {k: v.clone() for k, v in layer.cell.state_dict().items()}
    hook = hooks.AlignDevicesHook("cpu", offload=True, weights_map=weights)
    hooks.add_hook_to_module(layer.cell, hook)
    assert all(p.is_meta for p in layer.cell.parameters())
    for got, want in zip(_outputs(layer, x), _outputs(right, x), strict=True):
        assert torch.equal(got, want)
    assert all(p.is_meta for p in layer.cell.parameters())


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.one_in(5)
def test_compiled_and_exported(grad):
    layer, x = MAKE["layer"](), torch.randn(2, 9, 4)
    prune.random_unstructured(layer.cell, "a_z", 3)
    layer.cell.register_forward_hook(_halve)
    right = layer(x)[0]
    with torch.set_grad_enabled(grad):
        program = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)[0]
        graph_module = torch.export.export(layer, (x,)).module()(x)[0]
    assert torch.allclose(program, right, atol=1e-6)
    assert torch.allclose(graph_module, right, atol=1e-6)


def test_what_writes_into_computed_parameters_is_refused(make):
    layer = make()
    prune.identity(layer.cell, "a_z")
    with pytest.raises(ValueError, match="a_z of GRUCell is computed by a hook: clamping"):
        layer.recurrent_parameters()
    with pytest.raises(ValueError, match="a_z of GRUCell is computed by a hook: clamping"):
        pararnn.clip_after_step(torch.optim.SGD(layer.parameters(), 0.1), layer)
    with pytest.raises(ValueError, match="a_z of GRUCell is computed by a hook, as"):
        layer.reset_parameters()
    weights = pararnn.paper_weights(layer.layers[0] if hasattr(layer, "layers") else layer)
    with pytest.raises(ValueError, match="a_z of GRUCell is computed by a hook, as"):
        pararnn.load_paper_weights(layer, **weights)


class _InPlace(nn.Module):
    """Hands attributes on, and is not called."""

    def __init__(self, cell):
        super().__init__()
        self.cell_of_module = cell

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.cell_of_module, name)


def test_hooks_on_what_stands_in_a_cells_place_are_refused():
    layer, x, calls = MAKE["layer"](), torch.randn(2, 9, 4), []
    layer.cell = _InPlace(layer.cell)
    layer.cell.itself.register_forward_pre_hook(lambda *_: calls.append(1))
    layer(x)
    assert calls == [1]
    layer.cell.register_forward_pre_hook(lambda *_: calls.append(2))
    with pytest.raises(TypeError, match=r"hooks on _InPlace.*layer.cell.itself"):
        layer(x)


def test_forward_is_the_cells_own():
    with pytest.raises(CellError, match=r"Own.forward: a call of a cell gives its parameters"):

        class Own(pararnn.GRUCell):
            def forward(self):
                return 1


def test_a_cell_that_gathers_its_parameters_for_its_call_alone():
    """As fully_shard does: the parameters are gone when the solve reads them."""
    cell = pararnn.GRUCell(6)

    def let_go(module, inputs, params):
        for param in params:
            param.untyped_storage().resize_(0)

    cell.register_forward_hook(let_go)
    with pytest.raises(TypeError, match=r"Shard the layer around it: fully_shard\(rnn.layers"):
        call_cell(cell)
