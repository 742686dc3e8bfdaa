"""Steps that sample by noise that they are given: kernels, loops and single steps draw the same."""

import pytest
import torch
from call_results import with_gradients
from table import needs_compiler

import pararnn
from pararnn import Param

LOOP, KERNELS = ({"solver": "sequential", "backend": backend} for backend in ("torch", "fused"))


class Zoneout(pararnn.Cell):
    """A leaky state that some steps leave as it is."""

    states = ("h",)
    gates = ("z", "n")
    fields = ("u",)

    def step(self, state, gate, param):
        z = torch.sigmoid(gate.z)
        new = (1 - z) * state.h + z * torch.tanh(gate.n)
        return torch.where(gate.u < 0.3, state.h, new)


class Dropout(pararnn.Cell):
    """What a step adds is dropped by channel, and the rest is scaled."""

    states = ("h",)
    gates = ("f", "n")
    fields = ("u",)

    def step(self, state, gate, param):
        keep = (gate.u >= 0.2).to(gate.n.dtype) / 0.8
        return torch.sigmoid(gate.f) * state.h + keep * torch.tanh(gate.n + 0.5 * state.h)


class Sampled(pararnn.Cell):
    """Categorical variables, sampled beside a state of vectors, with gradients straight through."""

    states = {"h": "V", "z": ("G", "C")}
    gates = {"u": "V", "x": "V", "l": ("G", "C"), "noise": ("G", "C")}
    params = {"R": Param("H,V,V")}

    def step(self, state, gate, param):
        u = torch.sigmoid(gate.u + state.z.sum((-2, -1))[..., None])
        product = (state.h[..., None, :] @ param.R)[..., 0, :]
        h = u * state.h + (1 - u) * torch.tanh(gate.x + product)
        logits = gate.l + h.mean(-1)[..., None, None]
        noisy = logits + gate.noise
        hard = (noisy >= noisy.amax(-1, keepdim=True)).to(noisy.dtype)
        soft = torch.softmax(logits, -1)
        return h, hard + (soft - soft.detach())

    def readout(self, state, gate, param):
        return state.h


def _results(cell, gates, pair):
    """Output, final states and gradients of gates."""
    leaf = gates.clone().requires_grad_()
    return with_gradients(pararnn.solve(cell, leaf, **pair), [leaf])


@needs_compiler
@pytest.mark.parametrize("cls", [Zoneout, Dropout])
def test_noise_of_a_field_is_drawn_alike(cls):
    layer = pararnn.ParaRNN(cls, 8, 16, **LOOP)
    x, u = torch.randn(3, 40, 8), torch.rand(3, 40, 16)
    reference, h_n = layer(x, fields={"u": u})
    ours, _ = layer(x, fields={"u": u}, **KERNELS)
    torch.testing.assert_close(ours, reference)
    assert not torch.allclose(layer(x, fields={"u": u.flip(1)})[0], reference)
    state, steps = None, []
    for t in range(x.shape[1]):
        output, state = layer.step(x[:, t], state, fields={"u": u[:, t]})
        steps.append(output)
    torch.testing.assert_close(torch.stack(steps, 1), reference)
    torch.testing.assert_close(state, h_n)


@needs_compiler
def test_classes_are_sampled_alike_with_gradients_straight_through():
    cell = Sampled(16, num_heads=2, G=3, C=4)
    gates = torch.randn(2, 30, 2, cell.head_sizes.width)
    *_, noise = cell.head_sizes.split(gates)
    noise.copy_(-torch.log(-torch.log(torch.rand(noise.shape).clamp(1e-6, 1 - 1e-6))))
    reference, ours = (_results(cell, gates, pair) for pair in (LOOP, KERNELS))
    for a, b in zip(ours, reference, strict=True):
        torch.testing.assert_close(a, b)
    sampled = reference[2].round()
    assert torch.equal(sampled.sum(-1), torch.ones(2, 2, 3))
    *_, logits, of_noise = cell.head_sizes.split(reference[-1])
    assert logits.abs().sum() > 0
    assert of_noise.abs().sum() == 0, "the choice has no gradient but the probabilities'"
