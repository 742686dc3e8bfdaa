"""Steps whose gradient is their own: by torch.autograd.Function, or by detach."""

import sys

import pytest
import torch
from table import PAIRS, PLAIN, needs_compiler, passed
from torch.autograd.function import once_differentiable

import pararnn
from pararnn import Param
from pararnn.check.contract import check_solves
from pararnn.program.reads import reads_of
from pararnn.program.structure import STRUCTURES

SHARP = 1.0
HERE = sys.modules[__name__]


class Spike(torch.autograd.Function):
    """Saved tensors and a number kept on ctx; its backward reads a global."""

    @staticmethod
    def forward(ctx, x, threshold):
        ctx.save_for_backward(x)
        ctx.threshold = threshold
        return (x > threshold).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad / (1 + SHARP * (x - ctx.threshold).abs()) ** 2, None


class Rounded(torch.autograd.Function):
    """As torch.func wants it, with setup_context; a gradient in place."""

    @staticmethod
    def forward(x):
        return torch.round(4 * x) / 4

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad.clone().mul_(1 - ctx.saved_tensors[0].square())


class Turned(torch.autograd.Function):
    """Two tensors in, two out, one of which is not used; gradients by needs_input_grad."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y, x - y

    @staticmethod
    def backward(ctx, first, second):
        x, y = ctx.saved_tensors
        of_y = 0.5 * first * x - second if ctx.needs_input_grad[1] else None
        return first * y + second, of_y


def make_class(step, structure=None, states=("h",)):
    body = {"states": states, "gates": ("x",), "step": step, "structure": structure}
    return type("Made", (pararnn.Cell,), {**body, "params": {"a": Param("D", std=0.3)}})


STEPS = {
    "saved": lambda h, x, a: Spike.apply(a * h + x, 0.1),
    "setup_context": lambda h, x, a: Rounded.apply(torch.tanh(a * h + x)),
    "several": lambda h, x, a: torch.tanh(sum(Turned.apply(a * h, x))),
    "beside others": lambda h, x, a: 0.5 * h + x * Spike.apply(torch.sin(a * h), -0.5),
}


def run(cell, gates, pair):
    states, final = pararnn.solve(cell, gates, solver=pair[0], backend=pair[1])
    loss = states.sin().sum() + final.square().sum()
    return states.detach(), *torch.autograd.grad(loss, [gates, cell.a])


@pytest.mark.parametrize("structure", [None, "dense"])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.one_in(5)
def test_a_function_of_the_users_own_has_its_own_gradient(name, structure):
    """By every pair what autograd makes of the loop, which calls the function itself."""

    def step(self, state, gate, param):
        return STEPS[name](state.h, gate.x, param.a)

    torch.manual_seed(0)
    cell = make_class(step, structure)(6, dtype=torch.float64)
    gates = torch.randn(2, 40, 1, 6, dtype=torch.float64, requires_grad=True)
    reference = run(cell, gates, PLAIN)
    assert all(t.abs().max() > 0.01 for t in reference)
    for pair in PAIRS if structure is None else PAIRS[:2]:
        for mine, true in zip(run(cell, gates, pair), reference, strict=True):
            torch.testing.assert_close(mine, true, rtol=1e-10, atol=1e-11)


def test_the_functions_own_gradient_is_not_that_of_its_value():
    def step(self, state, gate, param):
        return Turned.apply(torch.tanh(state.h + gate.x), param.a)[0]

    cell, plain = (
        make_class(f)(4, dtype=torch.float64)
        for f in (step, lambda self, s, g, p: torch.tanh(s.h + g.x) * p.a)
    )
    with torch.no_grad():
        plain.a.copy_(cell.a)
    gates = torch.randn(1, 20, 1, 4, dtype=torch.float64, requires_grad=True)
    mine, other = (run(c, gates, ("newton", "torch")) for c in (cell, plain))
    torch.testing.assert_close(mine[0], other[0])
    torch.testing.assert_close(2 * mine[2], other[2])


def test_the_contract_holds():
    def step(self, state, gate, param):
        return Rounded.apply(torch.tanh(param.a * state.h + gate.x)) + 0.3 * state.h

    for result in check_solves(make_class(step)(5), torch.randn(2, 60, 1, 5), pairs=PAIRS):
        passed(result)


def test_what_the_backward_reads_is_looked_at_in_every_call(monkeypatch):
    def step(self, state, gate, param):
        return Spike.apply(param.a * state.h + gate.x, 0.0)

    cell = make_class(step)(4, dtype=torch.float64)
    gates = torch.randn(1, 20, 1, 4, dtype=torch.float64, requires_grad=True)
    old = run(cell, gates, ("newton", "torch"))
    reads = reads_of(type(cell), STRUCTURES, "")
    monkeypatch.setattr(HERE, "SHARP", 5.0)
    assert reads.change() is not None
    new = run(cell, gates, ("newton", "torch"))
    torch.testing.assert_close(old[0], new[0])
    torch.testing.assert_close(new, run(cell, gates, PLAIN))
    assert not torch.allclose(old[1], new[1])


def bound_grad(grad):
    return grad.clamp(-1e-3, 1e-3)


def normalise(grad):
    return grad / (1e-12 + grad.abs())


def branching(grad):
    return grad if grad.max() < 1 else 0.5 * grad


NONLINEAR = {
    bound_grad: "Made.step calls a torch.autograd.Function whose backward is not linear",
    normalise: r"bounds or normalises it, say.*clip_grad_norm_.*structure = 'sequential'",
    branching: "whose backward reads a tensor's value in Python.*torch.where.*'sequential'",
    None: r"Made's (Jacobian|gradient) cannot be traced: You must implement either the backward",
}


@pytest.mark.parametrize("structure", [None, "dense"])
@pytest.mark.parametrize("backward", NONLINEAR)
def test_backwards_that_no_parallel_solver_can_compose_are_refused(backward, structure):
    methods = {"forward": staticmethod(lambda ctx, x: torch.tanh(x))}
    if backward is not None:
        methods["backward"] = staticmethod(lambda ctx, grad: backward(grad))
    function = type("Own", (torch.autograd.Function,), methods)

    def step(self, state, gate, param):
        return function.apply(param.a * state.h + gate.x)

    with pytest.raises(pararnn.CellError, match=NONLINEAR[backward]):
        pararnn.program_of(make_class(step, structure)(4))
    gates = torch.randn(1, 9, 1, 4)
    states, _ = pararnn.solve(make_class(step, "sequential")(4), gates)
    assert states.isfinite().all()


@needs_compiler
def test_surrogate_gradients_by_detach():
    def step(self, state, gate, param):
        v = param.a * state.h + gate.x
        soft = v / (1 + v.abs())
        return (v > 0).to(v.dtype) + (soft - soft.detach())

    cls = make_class(step)
    cell, gates = cls(6), torch.randn(2, 40, 1, 6, requires_grad=True)
    with torch.no_grad():
        cell.a.fill_(0.3)
    grads = []
    for pair in (("sequential", "torch"), ("newton", "torch"), ("sequential", "fused")):
        states, _ = pararnn.solve(cell, gates, solver=pair[0], backend=pair[1])
        torch.testing.assert_close(states, states.round(), rtol=0, atol=1e-5)
        if pair[0] == "sequential":  # and none of those in between
            assert set(states.unique().tolist()) == {0.0, 1.0}
        grads.append(torch.autograd.grad(states.square().sum(), gates)[0])
    h, total, x = torch.zeros(2, 6), 0.0, gates.detach().requires_grad_()
    for t in range(40):
        h = Spike.apply(0.3 * h + x[:, t, 0], 0.0)
        total = total + h.square().sum()
    (reference,) = torch.autograd.grad(total, x)
    assert reference.abs().max() > 0.1
    for grad in grads:
        torch.testing.assert_close(grad, reference)
