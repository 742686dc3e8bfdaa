"""The sLSTM layer of the xlstm package: its numbers, a plain loop, pieces of sequences, errors."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from table import needs_compiler
from torch.nn.utils import prune

import pararnn

pytestmark = needs_compiler
PACKAGE = {
    "y": [
        [1.1410315624341143, -7.673648776688024e-05, 1.1164407784391945, -1.9696985178130224],
        [1.1409397032508177, -7.67303100665191e-05, 1.116006453903852, -1.9689322537979175],
        [1.1409907368752314, -7.673374217236477e-05, -1.1157740181704658, 1.968522175333945],
        [1.1410373497143935, -7.673687697220717e-05, 1.1164309904225536, -1.9696812491479554],
        [1.1409485137755646, -7.673090259064085e-05, -1.086305329455599, 1.916531569468839],
    ],
    "h": [0.4644432111644851, 0.09968348807726578, -0.195348475755245, -0.16873079106783762],
    "ratio": [
        0.834413582864783 / 1.6117425285447937,
        0.8345977547794221 / 2.6598935065210023,
        -0.6630231180716598 / 1.2939668889513554,
        -0.8098593526150809 / 1.7353610836468898,
    ],
}
"""What xlstm 2.0.6 gives, backend "vanilla", float64, for the layer and input of `_of_package`; h
and c / n are those after the last step."""


def _of_package():
    """Return a layer of 4 channels in 2 heads with weights by a formula, and an input."""
    layer = pararnn.SLSTMLayer(4, 2, 3, dtype=torch.float64)
    with torch.no_grad():
        for number, (_, weight) in enumerate(sorted(layer.named_parameters())):
            values = torch.sin(torch.arange(weight.numel(), dtype=torch.float64) * 1.7 + number)
            weight.copy_(values.view_as(weight))
    return layer, torch.cos(torch.arange(20, dtype=torch.float64)).view(1, 5, 4)


def test_numbers_are_the_packages():
    layer, x = _of_package()
    y, state = layer(x, return_last_state=True)
    torch.testing.assert_close(y[0], torch.tensor(PACKAGE["y"], dtype=torch.float64))
    h, c, n, _ = state["slstm_state"][:, 0]
    torch.testing.assert_close(h, torch.tensor(PACKAGE["h"], dtype=torch.float64))
    torch.testing.assert_close(c / n, torch.tensor(PACKAGE["ratio"], dtype=torch.float64))
    assert torch.equal(state["conv_state"], x[:, -2:])


def _layer(size=4, dtype=torch.float64, heads=3, channels=12):
    torch.manual_seed(0)
    layer = pararnn.SLSTMLayer(channels, heads, size, dtype=dtype)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(torch.randn_like(weight) * 0.5)
    return layer


def _loop(layer, x):
    """Return the outputs by a loop over steps, written from the paper's equations."""
    heads, weights = layer.num_heads, dict(layer.named_parameters())
    batch, steps, channels = x.shape
    convolved = x
    if layer.conv1d is not None:
        kernel, bias = weights["conv1d.conv.weight"], weights["conv1d.conv.bias"]
        padded = F.pad(x, (0, 0, kernel.shape[2] - 1, 0))
        taps = (padded[:, i : i + steps] * kernel[:, 0, i] for i in range(kernel.shape[2]))
        convolved = F.silu(sum(taps) + bias)
    recurrent = weights["slstm_cell._recurrent_kernel_"].view(heads, 4, -1, channels // heads)
    bias = weights["slstm_cell._bias_"].view(4, heads, -1)
    h = c = n = x.new_zeros(batch, heads, channels // heads)
    m, outputs = torch.full_like(h, -math.inf), []
    for t in range(steps):
        pre = []
        for gate, name in enumerate(("fgate", "igate", "zgate", "ogate")):
            source = (convolved if gate < 2 else x)[:, t].view(batch, heads, -1)
            product = torch.einsum("bhi,hoi->bho", source, weights[f"{name}.weight"])
            product = product + torch.einsum("bhi,hoi->bho", h, recurrent[:, gate])
            pre.append(product + bias[gate])
        i, f, z, o = pre
        keep = F.logsigmoid(f) + m
        m = torch.maximum(keep, i)
        i, f = torch.exp(i - m), torch.exp(keep - m)
        c, n = f * c + i * torch.tanh(z), f * n + i
        h = torch.sigmoid(o) * c / n
        outputs.append(F.layer_norm(h, h.shape[-1:]).flatten(1) * (1 + layer.group_norm.weight))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize(("size", "heads"), [(4, 3), (1, 3), (0, 1)])
def test_results_and_gradients_are_the_loops(size, heads):
    layer = _layer(size, heads=heads)
    x = torch.randn(2, 9, 12, dtype=torch.float64, requires_grad=True)
    y, reference = layer(x), _loop(layer, x)
    torch.testing.assert_close(y, reference, rtol=1e-11, atol=1e-11)
    arriving = torch.randn_like(y)
    leaves = (x, *(p for p in layer.parameters()))
    grads, wanted = (torch.autograd.grad(of, leaves, arriving) for of in (y, reference))
    torch.testing.assert_close(grads, wanted, rtol=1e-9, atol=1e-9)
    assert layer.recurrence.choice.backend == "fused"


@pytest.mark.parametrize("size", [4, 0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_pieces_and_steps_are_the_whole(size, dtype):
    layer = _layer(size, dtype)
    x = torch.randn(2, 9, 12, dtype=dtype)
    whole = layer(x)
    first, state = layer(x[:, :4], return_last_state=True)
    second, state = layer(x[:, 4:], **state, return_last_state=True)
    bound = 1e-12 if dtype == torch.float64 else 0.1
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=bound, atol=bound)
    assert set(state) == ({"slstm_state", "conv_state"} if size else {"slstm_state"})
    state, steps = {}, []
    for t in range(9):
        y, state = layer.step(x[:, t : t + 1], **state)
        steps.append(y)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=bound, atol=bound)


def test_a_state_of_the_packages_kind_may_have_any_normaliser():
    """c and n may be scaled together, with m: only c / n and m + log n count."""
    layer = _layer()
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    _, state = layer(x, return_last_state=True)
    h, c, n, m = state["slstm_state"]
    scaled = torch.stack([h, c * 3, n * 3, m - math.log(3)])
    y = layer(x, **state)
    torch.testing.assert_close(layer(x, state["conv_state"], scaled), y)
    zero = torch.zeros_like(scaled).requires_grad_()
    beginning = layer(x, state["conv_state"], zero)
    torch.testing.assert_close(beginning, layer(x, state["conv_state"]))
    (grad,) = torch.autograd.grad(beginning.sum(), zero)
    assert grad.isfinite().all()
    assert grad[0].ne(0).any()


def test_a_layer_is_made_from_the_packages():
    sizes = {"embedding_dim": 12, "num_heads": 3, "conv1d_kernel_size": 4, "dropout": 0.0}
    theirs = _layer()
    theirs.config = SimpleNamespace(function="slstm", **sizes)
    ours = pararnn.SLSTMLayer.from_xlstm(theirs.eval())
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    assert torch.equal(ours(x), theirs(x))
    assert not ours.training
    theirs.config.function = "lstm"
    with pytest.raises(ValueError, match="'slstm', got 'lstm'"):
        pararnn.SLSTMLayer.from_xlstm(theirs)


TIREX = [
    [-2.1297, 1.7449, 0.0353, -0.6503, -3.0146, 0.4868, -0.0042, 1.5736],
    [-1.9323, 1.5719, 0.0432, -0.7717, 1.6590, -0.2020, -0.0322, 1.2402],
    [-2.4231, 1.0198, 0.0575, -0.4803, 3.0401, -0.0848, -0.0268, -0.1890],
]
"""What tirex-ts 1.4.2 gives, backend "torch", for the weights and input of `_of_tirex`, rounding to
bfloat16 inside."""


def _of_tirex():
    """Return weights by a formula in TiRex's layout, of 8 channels in 2 heads, and an input."""
    sizes = {f"{name}.weight": (2, 4, 4) for name in ("fgate", "igate", "zgate", "ogate")}
    sizes |= {"group_norm.weight": (8,), "slstm_cell._bias_": (32,)}
    sizes["slstm_cell._recurrent_kernel_"] = (2, 4, 16)
    weights = {}
    for number, (name, size) in enumerate(sorted(sizes.items())):
        values = torch.arange(math.prod(size), dtype=torch.float64) * 1.7 + number
        weights[name] = torch.sin(values).view(size)
    return weights, torch.cos(torch.arange(24, dtype=torch.float64)).view(1, 3, 8)


def test_weights_of_tirex_load_both_ways():
    weights, x = _of_tirex()
    layer = pararnn.SLSTMLayer(8, 2, 0, dtype=torch.float64)
    layer.load_state_dict(weights)
    reference = torch.tensor(TIREX, dtype=torch.float64)
    torch.testing.assert_close(layer(x)[0], reference, rtol=0.02, atol=0.02)
    assert weights.keys() == layer.tirex_state_dict().keys()
    for name, weight in layer.tirex_state_dict().items():
        assert torch.equal(weight, weights[name])
    again = pararnn.SLSTMLayer(8, 2, 0, dtype=torch.float64)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), layer(x))
    with pytest.raises(ValueError, match="conv1d_kernel_size=0"):
        pararnn.SLSTMLayer(8, 2).tirex_state_dict()


def test_tirex_itself():
    cells = pytest.importorskip("tirex.models.slstm.cell")
    layers = pytest.importorskip("tirex.models.slstm.layer")
    weights, x = _of_tirex()
    config = cells.sLSTMBlockConfig(embedding_dim=8, num_heads=2)
    theirs = layers.sLSTMLayer(config, "torch").double()
    theirs.load_state_dict(weights)
    ours = pararnn.SLSTMLayer.from_xlstm(theirs)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0.02, atol=0.02)
    theirs.load_state_dict(ours.tirex_state_dict())
    assert all(torch.equal(w, weights[name]) for name, w in theirs.state_dict().items())


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match="multiple of num_heads, got 10 and 4"):
        pararnn.SLSTMLayer(10)
    with pytest.raises(ValueError, match="conv1d_kernel_size must be 0"):
        pararnn.SLSTMLayer(8, conv1d_kernel_size=-1)
    with pytest.raises(ValueError, match=r"Expected x to be \(B, T, 8\)"):
        pararnn.SLSTMLayer(8)(torch.randn(2, 8))
    x = torch.randn(2, 5, 8)
    for wrong in ((2, 1, 8), (1, 3, 8), (2, 3, 4), (2, 8)):
        with pytest.raises(ValueError, match=r"conv_state must be .*\(2, 3, 8\), got"):
            pararnn.SLSTMLayer(8)(x, torch.zeros(wrong))
    for wrong in ((3, 2, 8), (4, 1, 8), (4, 2, 4), (2, 8)):
        with pytest.raises(ValueError, match=r"slstm_state must be h, c, n and m, \(4, 2, 8\)"):
            pararnn.SLSTMLayer(8)(x, slstm_state=torch.zeros(wrong))


@pytest.mark.parametrize("size", [0, 1, 4])
def test_a_piece_may_have_no_steps(size):
    torch.manual_seed(0)
    layer = pararnn.SLSTMLayer(8, 2, size)
    _, before = layer(torch.randn(2, 5, 8), return_last_state=True)
    y, after = layer(torch.randn(2, 0, 8), **before, return_last_state=True)
    assert y.shape == (2, 0, 8)
    torch.testing.assert_close(after["slstm_state"][0], before["slstm_state"][0])
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(layer(x, **after), layer(x, **before))


def test_recurrent_matrices_are_clipped():
    layer = pararnn.SLSTMLayer(8, 2)
    matrices = layer.slstm_cell._recurrent_kernel_
    with torch.no_grad():
        matrices.fill_(3.0)
    optimizer = torch.optim.SGD(layer.parameters(), 0.0)
    pararnn.clip_after_step(optimizer, layer)
    layer(torch.randn(2, 5, 8)).sum().backward()
    optimizer.step()
    assert matrices.eq(3).all()  # no bound of its own
    pararnn.clip_after_step(optimizer, layer, to=0.25)
    optimizer.step()
    assert matrices.eq(0.25).all()
    torch.nn.utils.parametrizations.weight_norm(layer.slstm_cell, "_recurrent_kernel_")
    with pytest.raises(ValueError, match="_recurrent_kernel_ is computed by a parametrisation"):
        pararnn.clip_after_step(optimizer, layer, to=0.25)


def test_initial_weights_remember():
    torch.manual_seed(0)
    layer = pararnn.SLSTMLayer(64)
    bias = layer.slstm_cell._bias_.view(4, 4, 16)
    assert bias[1, :, 0].eq(3).all()
    assert bias[1, :, -1].eq(6).all()
    assert bias[[0, 2, 3]].eq(0).all()
    assert layer.zgate.weight.std().item() == pytest.approx(math.sqrt(2 / 80), rel=0.1)
    assert layer(torch.randn(2, 5, 64)).isfinite().all()
    assert layer.train()(torch.zeros(1, 3, 64)).shape == (1, 3, 64)


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("fgate", "weight"),
        ("ogate", "weight"),
        ("group_norm", "weight"),
        ("slstm_cell", "_recurrent_kernel_"),
        ("slstm_cell", "_bias_"),
    ],
)
def test_pruned_weights_follow_what_is_learned(part, name):
    """Hooks in front of a part's call compute its weights anew."""
    torch.manual_seed(0)
    layer, x = pararnn.SLSTMLayer(8, 2), torch.randn(2, 5, 8)
    prune.random_unstructured(layer.get_submodule(part), name, 0.5)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
    pruned = layer(x)
    prune.remove(layer.get_submodule(part), name)
    torch.testing.assert_close(layer(x), pruned)


def test_a_compiled_layer_is_one_graph():
    torch.manual_seed(0)
    layer, x = pararnn.SLSTMLayer(8, 2), torch.randn(2, 5, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    y, state = layer(x, return_last_state=True)
    torch.testing.assert_close(compiled(x, return_last_state=True), (y, state))
    torch.testing.assert_close(compiled(x, **state), layer(x, **state))
