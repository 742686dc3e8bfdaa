"""Layers of DreamerV3: the block GRU and the RSSM, next to its code written anew."""

import copy

import pytest
import torch
import torch.nn.functional as F
from call_results import with_gradients
from table import needs_compiler
from torch.nn.utils import parametrizations, prune

import pararnn

pytestmark = needs_compiler
LOOP, KERNELS = ({"solver": "sequential", "backend": backend} for backend in ("torch", "fused"))
NEAR = {"rtol": 1e-3, "atol": 1e-2}
SIZES = {"belief_size": 24, "hidden_size": 10, "num_categoricals": 3, "num_classes": 4}
BATCH, STEPS, ACTIONS, CHANNELS, BLOCKS = 3, 12, 2, 5, 4


def _rssm(dtype=torch.float64, **options):
    torch.manual_seed(0)
    model = pararnn.RSSM(ACTIONS, CHANNELS, num_blocks=BLOCKS, dtype=dtype, **SIZES, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def _data(model):
    """Actions, some above 1, embeddings, where episodes begin, and noise."""
    torch.manual_seed(1)
    dtype = next(model.parameters()).dtype
    action = 2 * torch.randn(BATCH, STEPS, ACTIONS, dtype=dtype)
    embedding = torch.randn(BATCH, STEPS, CHANNELS, dtype=dtype)
    return action, embedding, torch.rand(BATCH, STEPS) < 0.2, model.new_noise(action)


def _layer(x, weight, eps=1e-4):
    return F.silu(weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt())


def _core(belief, inputs, cell, bias):
    """DreamerV3's `_core`: all inputs next to each block, block-linear layers, gates."""
    heads = {name: value[0] for name, value in cell.named_parameters()}
    groups = belief.unflatten(-1, (BLOCKS, -1))
    dense = _layer(belief @ heads["W_h"].flatten(0, 1) + heads["b_h"], heads["w_h"])
    every = torch.cat([dense, *(x for x, _ in inputs)], -1)
    x = torch.cat([groups, every[:, None].expand(-1, BLOCKS, -1)], -1)
    blocks = torch.cat([heads["B"], heads["B_h"], *(matrix for _, matrix in inputs)], 1)
    x = torch.einsum("bgi,gio->bgo", x, blocks).flatten(1) + bias
    x = _layer(x, heads["w"].flatten()).unflatten(-1, (BLOCKS, -1))
    gates = torch.cat([heads["R_r"], heads["R_c"], heads["R_u"]], 1)
    biases = torch.cat([heads["b_r"], heads["b_c"], heads["b_u"]], 1)
    reset, candidate, update = (torch.einsum("bgi,goi->bgo", x, gates) + biases).chunk(3, -1)
    update = torch.sigmoid(update - 1)
    new = update * torch.tanh(torch.sigmoid(reset) * candidate) + (1 - update) * groups
    return new.flatten(1)


def _by_block(matrix):
    """A linear layer's weight (G E, U) as the matrices (G, U, E) of blocks."""
    return matrix.unflatten(0, (BLOCKS, -1)).mT


def _observe(model, action, embedding, begins, noise):
    """All results of a loop over DreamerV3's code."""
    cell, steps = model.cell, []
    heads = {name: value[0] for name, value in cell.named_parameters()}
    belief = action.new_zeros(BATCH, SIZES["belief_size"])
    state = action.new_zeros(BATCH, noise[0, 0].numel())
    for t in range(STEPS):
        keep = (~begins[:, t, None]).to(action.dtype)
        belief, state, a = belief * keep, state * keep, action[:, t] * keep
        a = a / a.detach().abs().clamp(min=1)
        hidden = _layer(model.action.linear(a), model.action.weight)
        sample = _layer(state @ heads["W_z"].flatten(0, 1) + heads["b_z"], heads["w_z"])
        inputs = [(sample, heads["B_z"]), (hidden, _by_block(model.proj.weight))]
        belief = _core(belief, inputs, cell, model.proj.bias)
        posterior = belief @ heads["W_o"].flatten(0, 1) + model.embed(embedding[:, t])
        posterior = _layer(posterior, heads["w_o"]) @ heads["L"].flatten(0, 1).T
        logits = posterior.unflatten(-1, noise.shape[-2:]) + heads["b_l"]
        prior = model.prior(belief).unflatten(-1, noise.shape[-2:])
        probabilities = [0.99 * x.softmax(-1) + 0.01 / noise.shape[-1] for x in (logits, prior)]
        best = (probabilities[0].log() + noise[:, t]).argmax(-1)
        hard = F.one_hot(best, noise.shape[-1]).to(belief.dtype)
        state = (hard + probabilities[0] - probabilities[0].detach()).flatten(-2)
        steps.append((belief, state, *(p.log() for p in probabilities)))
    return [torch.stack(series, 1) for series in zip(*steps, strict=True)]


@pytest.mark.parametrize("pair", [LOOP, KERNELS], ids=["loop", "kernels"])
def test_an_rssm_is_dreamers(pair):
    """Beliefs, samples, logits of posterior and prior, and all gradients, with resets."""
    model = _rssm(**pair)
    action, embedding, begins, noise = _data(model)
    leaves = [action.requires_grad_(), embedding.requires_grad_(), *model.parameters()]
    output, (belief, state) = model(action, embedding, reset=begins, noise=noise)
    reference = _observe(model, action, embedding, begins, noise)
    assert torch.equal(belief, output.belief[:, -1])
    assert torch.equal(state, output.state[:, -1])
    ours, true = (with_gradients(results, leaves) for results in (output, reference))
    for own, exact in zip(ours, true, strict=True):
        assert exact.abs().max() > 1e-3
        torch.testing.assert_close(own, exact, rtol=1e-9, atol=1e-10)


def test_acting_and_replay_draw_the_same():
    model = _rssm(torch.float32)
    action, embedding, begins, noise = _data(model)
    output, final = model(action, embedding, reset=begins, noise=noise)
    state = None
    with torch.no_grad():
        for t in range(STEPS):
            now = {"reset": begins[:, t], "noise": noise[:, t]}
            state = model.step(action[:, t], embedding[:, t], state, **now)
            torch.testing.assert_close(state[0], output.belief[:, t])
            assert torch.equal(state[1], output.state[:, t])
    pieces, carried = [], None
    for part in (slice(5), slice(5, None)):
        given = {"reset": begins[:, part], "noise": noise[:, part]}
        result, carried = model(action[:, part], embedding[:, part], carried, **given)
        pieces.append(result.belief)
    torch.testing.assert_close(torch.cat(pieces, 1), output.belief)
    torch.testing.assert_close(carried, final)


def test_a_prediction_is_the_prior_of_the_step():
    """The belief that an action leads to, whatever is observed then, and a choice by the noise."""
    model = _rssm()
    action, embedding, _, noise = _data(model)
    output, _ = model(action, embedding, noise=noise)
    before = output.state[:, :-1], output.belief[:, :-1]
    logits, state, belief = model.predict(*before, action[:, 1:], noise=noise[:, 1:])
    torch.testing.assert_close(belief, output.belief[:, 1:])
    torch.testing.assert_close(logits, output.prior_logits[:, 1:])
    best = F.one_hot((logits + noise[:, 1:]).argmax(-1), logits.shape[-1]).to(state.dtype)
    assert torch.equal(state, best.flatten(-2))


def test_divergences_are_of_categorical_distributions():
    model = _rssm()
    action, embedding, *_ = _data(model)
    output, _ = model(action, embedding)
    post, prior = (
        torch.distributions.Categorical(logits=x)
        for x in (output.posterior_logits, output.prior_logits)
    )
    truth = torch.distributions.kl_divergence(post, prior).sum(-1)
    of_prior, of_posterior = output.divergences(free=0.0)
    torch.testing.assert_close(of_prior, truth)
    torch.testing.assert_close(of_posterior, truth)
    alone = output._replace(posterior_logits=output.posterior_logits.detach().requires_grad_())
    (grad,) = torch.autograd.grad(alone.divergences(0.0)[1].sum(), alone.posterior_logits)
    assert grad.abs().sum() > 0
    (grad,) = torch.autograd.grad(
        alone.divergences(0.0)[0].sum(), alone.posterior_logits, allow_unused=True
    )
    assert grad is None
    torch.testing.assert_close(output.divergences(0.5)[0], truth.clamp(min=0.5))


def test_imagination_follows_a_policy():
    model = _rssm()
    action, embedding, *_ = _data(model)
    _, start = model(action, embedding)
    policy = torch.nn.Linear(SIZES["belief_size"], ACTIONS).double()
    seen = []

    def act(belief, state):
        seen.append((belief, state))
        return policy(belief)

    dream = model.imagine(start, act, 4)
    shapes = [tuple(x.shape) for x in dream]
    assert shapes == [(BATCH, 4, 24), (BATCH, 4, 12), (BATCH, 4, 3, 4), (BATCH, 4, ACTIONS)]
    assert seen[0][0] is start[0]
    assert torch.equal(seen[1][1], dream.state[:, 0])
    dream.belief.square().sum().backward()
    assert policy.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("pair", [LOOP, KERNELS], ids=["loop", "kernels"])
def test_a_block_gru_is_dreamers(pair):
    torch.manual_seed(0)
    sizes = (6, ACTIONS)
    layer = pararnn.DreamerGRU(sizes, 24, BLOCKS, 10, dtype=torch.float64, **pair)
    inputs = [torch.randn(BATCH, STEPS, n, dtype=torch.float64) for n in sizes]
    h_0 = torch.randn(BATCH, 24, dtype=torch.float64)
    begins = torch.rand(BATCH, STEPS) < 0.2
    leaves = [*(x.requires_grad_() for x in (*inputs, h_0)), *layer.parameters()]
    output, h_n = layer(inputs, h_0, reset=begins)
    h, steps, stepped = h_0, [], h_0
    matrices = [_by_block(matrix) for matrix in layer.proj.weight.split(10, 1)]
    for t in range(STEPS):
        hidden = [
            _layer(dense.linear(x[:, t]), dense.weight)
            for dense, x in zip(layer.inputs, inputs, strict=True)
        ]
        h = h * (~begins[:, t, None])
        h = _core(h, [*zip(hidden, matrices, strict=True)], layer.cell, layer.proj.bias)
        steps.append(h)
        stepped = layer.step([x[:, t] for x in inputs], stepped, reset=begins[:, t])
        torch.testing.assert_close(stepped, h)
    ours, true = (
        with_gradients(results, leaves) for results in ([output, h_n], [torch.stack(steps, 1), h])
    )
    for own, exact in zip(ours, true, strict=True):
        torch.testing.assert_close(own, exact, rtol=1e-9, atol=1e-10)


def test_a_compiled_rssm_is_one_graph():
    model = _rssm(torch.float32)
    action, embedding, begins, noise = _data(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for call in ({"noise": noise}, {"noise": noise, "reset": begins}):
        ours, _ = compiled(action, embedding, **call)
        for a, b in zip(ours, model(action, embedding, **call)[0], strict=True):
            torch.testing.assert_close(a, b)
    start, zeros = model.step(action[:, 0], embedding[:, 0]), torch.zeros(BATCH, 2, 3, 4)
    dream = torch.compile(model.imagine, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        dream(start, lambda belief, _: belief[:, :ACTIONS], 2, noise=zeros),
        model.imagine(start, lambda belief, _: belief[:, :ACTIONS], 2, noise=zeros),
    )


def test_sizes_that_do_not_fit_raise():
    with pytest.raises(ValueError, match="multiple of num_blocks = 8"):
        pararnn.DreamerGRU([3], 12)
    with pytest.raises(ValueError, match="multiple of num_blocks = 5"):
        pararnn.RSSM(2, 3, 12, num_blocks=5)


@pytest.mark.parametrize("pair", [LOOP, KERNELS], ids=["loop", "kernels"])
def test_without_a_uniform_share_large_logits_stay_finite(pair):
    """Probabilities that are 0 in floating point have logarithms all the same."""
    model = _rssm(torch.float32, unimix=0.0, **pair)
    with torch.no_grad():
        model.cell.L *= 1000
        model.prior[-1].weight *= 1000
    action, embedding, begins, noise = _data(model)
    output, _ = model(action, embedding, reset=begins, noise=noise)
    exact, _ = copy.deepcopy(model).double()(
        action.double(), embedding.double(), reset=begins, noise=noise.double()
    )
    assert exact.posterior_logits.min() < -200
    torch.testing.assert_close(output.posterior_logits.double(), exact.posterior_logits, **NEAR)
    torch.testing.assert_close(output.prior_logits.double(), exact.prior_logits, **NEAR)
    sum(loss.mean() for loss in output.divergences()).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_imagination_goes_on_from_states_as_they_are_carried(dtype):
    """Final states and those of a step are float32, next to weights in 16 bits."""
    model = _rssm(torch.float32).to(dtype)
    policy = torch.nn.Linear(24 + 12, ACTIONS, dtype=dtype)
    action, embedding, *_ = _data(model)
    start = model.step(action[:, 0], embedding[:, 0])
    assert start[0].dtype == torch.float32
    dream = model.imagine(start, lambda *now: policy(torch.cat(now, -1)), 3)
    assert dream.belief.dtype == dream.state.dtype == dtype
    assert dream.belief.isfinite().all()


def test_what_does_not_fit_is_named():
    model = _rssm(torch.float32)
    action, embedding, _, noise = _data(model)
    belief, sample = torch.zeros(BATCH, 24), torch.zeros(BATCH, 12)
    wanted = r"initial states must be \('h', 'z'\) of the sizes \[\(3, 24\), \(3, 12\)\]"
    # Rows of other sizes that have as many numbers in all would be other rows.
    for wrong in ((belief,), (sample, belief), (belief.view(1, -1), sample.view(1, -1)), belief):
        with pytest.raises(ValueError, match=wanted):
            model(action, embedding, wrong)
        with pytest.raises(ValueError, match=wanted):
            model.step(action[:, 0], embedding[:, 0], wrong)
    with pytest.raises(ValueError, match=r"action must be \(B, T, 2\), got \(12, 2\)"):
        model(action[0], embedding[0])
    with pytest.raises(ValueError, match=r"embedding must be \(3, 12, 5\), got \(3, 4, 5\)"):
        model(action, embedding[:, :4])
    with pytest.raises(ValueError, match=r"noise must be \(3, 12, 3, 4\), got \(3, 12, 4, 3\)"):
        model(action, embedding, noise=noise.mT)
    with pytest.raises(ValueError, match=r"noise must be \(3, 3, 4\), got \(3, 12\)"):
        model.step(action[:, 0], embedding[:, 0], noise=noise[:, 0].flatten(1))
    with pytest.raises(ValueError, match="length must be positive, got 0"):
        model.imagine((belief, sample), lambda *_: action[:, 0], 0)
    with pytest.raises(ValueError, match="unimix must be a fraction, from 0 to 1, got 2"):
        _rssm(unimix=2)
    layer = pararnn.DreamerGRU((6, ACTIONS), 24, BLOCKS, 10)
    inputs = [torch.randn(BATCH, STEPS, n) for n in (6, ACTIONS)]
    for wrong, got in ((inputs[:1], "1"), (torch.cat(inputs, -1), "a tensor")):
        with pytest.raises(ValueError, match=rf"a list of 2, of \(6, 2\) channels, got {got}"):
            layer(wrong)
    with pytest.raises(ValueError, match=r"input 1 must be \(3, 12, 2\), got \(3, 12, 6\)"):
        layer([inputs[0], inputs[0]])
    with pytest.raises(ValueError, match=r"\('h',\) of the sizes \[\(3, 24\)\], got \[\(1, 72\)"):
        layer(inputs, belief.view(1, -1))
    with pytest.raises(ValueError, match="num_blocks must be positive, got 0"):
        pararnn.DreamerGRU((6,), 24, 0)


def test_matrices_are_clipped():
    model = _rssm(torch.float32)
    action, embedding, *_ = _data(model)
    model(action, embedding)[0].belief.sum().backward()
    before = model.cell.R_u.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    pararnn.clip_after_step(optimizer, model)
    optimizer.step()
    assert torch.equal(model.cell.R_u, before)  # no bound of its own
    pararnn.clip_after_step(optimizer, model, to=0.05)
    optimizer.step()
    assert torch.equal(model.cell.R_u, before.clamp(-0.05, 0.05))
    assert model.cell.w.max() > 0.5
    assert model.proj.weight.abs().max() > 0.05


@pytest.mark.parametrize("kind", ["parametrisation", "prune", "hook"])
def test_a_prediction_has_the_weights_that_the_cell_computes(kind):
    model = _rssm()
    if kind == "parametrisation":
        parametrizations.weight_norm(model.cell, "W_z")
        model.cell.parametrizations.W_z.original0.data *= 2
    elif kind == "prune":
        prune.random_unstructured(model.cell, "W_z", 0.5)
    else:
        model.cell.register_forward_hook(lambda _, __, values: tuple(v / 2 for v in values))
    action, embedding, _, noise = _data(model)
    output, _ = model(action, embedding, noise=noise)
    before = output.state[:, :-1], output.belief[:, :-1]
    logits, _, belief = model.predict(*before, action[:, 1:])
    torch.testing.assert_close(belief, output.belief[:, 1:])
    torch.testing.assert_close(logits, output.prior_logits[:, 1:])
