"""`adapt`: layers leave (newton, fused) where many solves in a row needed many sweeps."""

import copy
import pickle

import pytest
import torch

import pararnn
from pararnn.engines.split import SplitRequest
from pararnn.tune.adapt import SWEEP_COST

SHAPE, SIZE = (2, 128, 4), (2, 128, 6)
SEGMENTS = 4


@pytest.fixture
def layer(newton_fused):
    """A layer of which `auto` cuts time into SEGMENTS."""
    layer = pararnn.ParaGRU(4, 6)
    newton_fused.taken_by_auto(layer.cell, SIZE, SplitRequest(SEGMENTS))
    return layer


def _pairs(layer, count, shape=SHAPE, **options):
    """Return a letter for each of `count` forward passes: n for Newton, s for the loop."""
    letters = ""
    for _ in range(count):
        with torch.no_grad():
            layer(torch.randn(shape), **options)
        letters += "n" if layer.last_solve.sweeps.any() else "s"
    return letters


@pytest.mark.parametrize(("sweeps", "slow"), [(1, False), (2, True), (3, True)])
def test_layers_switch_where_sweeps_persist(layer, newton_fused, messages, sweeps, slow):
    newton_fused.sweeps = sweeps
    adaptation = pararnn.adapt(layer, patience=3)
    # A solve is judged in the next forward pass, so the fourth is the last.
    assert _pairs(layer, 8) == ("nnnnssss" if slow else "n" * 8)
    assert adaptation.switched == ({"layers.0": [(2, 128)]} if slow else {})
    message = "layers.0 (GRUCell) runs at (B, T) = (2, 128) by the loop"
    assert messages.getvalue().count(message) == slow
    adaptation.reset()
    assert adaptation.switched == {}
    assert _pairs(layer, 5) == ("nnnns" if slow else "nnnnn")
    adaptation.remove()
    assert _pairs(layer, 5) == "nnnnn"


def test_the_rule_is_as_it_says():
    for phrase in (f"about {SWEEP_COST:g} k / W of", f"at {SWEEP_COST:g} k >= W"):
        assert phrase in pararnn.adapt.__doc__


def test_only_solves_in_a_row_count(layer, newton_fused):
    pararnn.adapt(layer, patience=3)
    for sweeps in (3, 3, 1, 3, 3, 1):
        newton_fused.sweeps = sweeps
        assert _pairs(layer, 1) == "n"
    newton_fused.sweeps = 3
    assert _pairs(layer, 5) == "nnnns"


def test_sizes_switch_each_by_itself(layer, newton_fused):
    newton_fused.taken_by_auto(layer.cell, (1, 200, 6), SplitRequest(50))
    newton_fused.sweeps = 3
    with pararnn.adapt(layer, patience=2):
        for _ in range(5):
            last = _pairs(layer, 1), _pairs(layer, 1, (1, 200, 4))
        assert last == ("s", "n")
    assert _pairs(layer, 3) == "nnn"


def test_what_is_asked_for_is_left_alone(layer, newton_fused):
    newton_fused.sweeps = 4
    options = {"solver": "newton", "backend": "fused"}
    adaptation = pararnn.adapt(layer, patience=2)
    assert _pairs(layer, 5, **options) == "nnnnn"
    with pararnn.using(**options):
        assert _pairs(layer, 5) == "nnnnn"
    with pararnn.using(segments=5):
        assert _pairs(layer, 5) == "nnnnn"
    assert adaptation.switched == {}
    assert _pairs(layer, 4) == "nnns"
    assert _pairs(layer, 2, **options) == "nn"
    newton_fused.requests.clear()
    _pairs(layer, 2, backend="torch")
    assert layer.last_solve.sweeps.any()  # so it was (newton, torch), by the rule
    assert not newton_fused.requests
    assert layer.solver == "auto"
    with pararnn.using(segments=5):
        assert _pairs(layer, 2) == "nn"
    own = pararnn.ParaGRU(4, 6, **options)
    pararnn.adapt(own, patience=1)
    assert _pairs(own, 4) == "nnnn"


def test_layers_and_directions_switch_each_by_itself(newton_fused, monkeypatch):
    model = torch.nn.Sequential(pararnn.ParaGRU(4, 6, bidirectional=True, num_layers=2))
    newton_fused.taken_by_auto(model[0].cell, SIZE, SplitRequest(SEGMENTS))
    adaptation = pararnn.adapt(model, patience=2)
    newton_fused.sweeps = 3

    def quick_in_reverse(layer, inputs, options):
        newton_fused.sweeps = 1 if layer.reverse else 3

    for layer in model[0]._all_layers():
        layer.register_forward_pre_hook(quick_in_reverse, with_kwargs=True)
    _pairs(model[0], 5)
    assert adaptation.switched == {"0.layers.0": [(2, 128)], "0.layers.1": [(2, 128)]}
    assert model[0].last_solve.sweeps.tolist() == [0, 1, 0, 1]


def test_a_layer_alone_switches_however_it_is_called(newton_fused):
    layer = pararnn.RecurrentLayer(pararnn.GRUCell, 4, 6, backend="fused")
    newton_fused.taken_by_auto(layer.cell, SIZE, SplitRequest(SEGMENTS))
    newton_fused.sweeps = 3
    adaptation = pararnn.adapt(layer, patience=2)
    x = torch.randn(SHAPE)
    for _ in range(2):
        layer(x, mode="PARALLEL_FUSED")  # not judged
    for call in (lambda: layer(x), lambda: layer(x=x), lambda: layer(x, mode=None)):
        call()
        assert layer.last_solve.sweeps.item() == 3
    assert adaptation.switched == {"": [(2, 128)]}
    layer(x=x)
    assert layer.last_solve.sweeps.item() == 0


def test_training_goes_on_across_the_switch(layer, newton_fused):
    newton_fused.sweeps = 4
    pararnn.adapt(layer, patience=2)
    x = torch.randn(SHAPE)
    results = []
    for _ in range(5):
        output, _ = layer(x)
        results.append(torch.autograd.grad(output.square().sum(), list(layer.parameters())))
    assert [which for which, *_ in newton_fused.requests] == ["forward", "backward"] * 3
    for first, last in zip(results[0], results[-1], strict=True):
        assert torch.allclose(first, last, rtol=1e-4, atol=1e-5)


def test_copies_and_pickles(layer, newton_fused):
    newton_fused.sweeps = 4
    pararnn.adapt(layer, patience=2)
    assert _pairs(layer, 2) == "nn"
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert _pairs(other, 4) == "nnss"  # it had one, with another pending
    assert _pairs(layer, 2) == "ns"


@pytest.mark.thorough
def test_compiled_code_is_left_alone(layer, newton_fused):
    newton_fused.sweeps = 4
    adaptation = pararnn.adapt(layer, patience=1)
    program = torch.compile(layer, fullgraph=True, backend="aot_eager")
    newton_fused.requests.clear()  # what tracing ran
    for count in range(1, 5):
        with torch.no_grad():
            program(torch.randn(SHAPE))
        assert len(newton_fused.requests) == count
    assert adaptation.switched == {}
    assert layer.last_solve is None
    assert _pairs(layer, 3) == "nns"
    newton_fused.requests.clear()
    with torch.no_grad():
        program(torch.randn(SHAPE))
    assert len(newton_fused.requests) == 1


def test_transforms_are_left_alone(layer, newton_fused):
    newton_fused.sweeps = 4
    adaptation = pararnn.adapt(layer, patience=1)
    parameters, x = dict(layer.named_parameters()), torch.randn(SHAPE)

    def loss(parameters):
        return torch.func.functional_call(layer, parameters, (x,))[0].square().mean()

    for _ in range(3):
        torch.func.grad(loss)(parameters)
    assert adaptation.switched == {}
    assert _pairs(layer, 3) == "nns"


def test_other_engines_are_never_left():
    layer = pararnn.ParaGRU(4, 6, backend="torch")
    adaptation = pararnn.adapt(layer, patience=1)
    assert _pairs(layer, 3) == "nnn"
    assert adaptation.switched == {}


def test_wrong_arguments():
    with pytest.raises(ValueError, match="Linear holds no pararnn layer"):
        pararnn.adapt(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="patience must be 1 or more solves, got 0"):
        pararnn.adapt(pararnn.ParaGRU(2, 2), patience=0)
