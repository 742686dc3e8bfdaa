"""Matrix cells that are affine in their states, and cells that are not."""

import random

import torch

import pararnn
from pararnn import Param
from pararnn.zoo import GatedDeltaProductCell, Mamba2Cell
from pararnn.zoo.unit import unit

ZOO = ("gated-delta", "rwkv7", "mlstm", "titans", "kda", "gated-delta-product", "comba")
ZOO += ("mamba2", "mamba3")
"""Cells of the zoo that are affine in their states."""

F = torch.nn.functional


def read(k, state):
    """The sum over keys of a state with weights."""
    return (k[..., :, None] * state).sum(-2)


def outer(k, v):
    """The product of a vector of keys and one of values."""
    return k[..., :, None] * v[..., None, :]


class Cell(pararnn.Cell):
    """A matrix S that is read along K, unless a subclass says more."""

    states = {"S": ("K", "V")}
    gates = {"q": "K", "k": "K", "v": "V", "a": "", "b": ""}
    config = {"eps": 1e-6}

    def readout(self, state, gate, param):
        return read(gate.q, state.S)


class NormedProduct(GatedDeltaProductCell):
    """Two factors a step, and a norm of the output."""

    def readout(self, state, gate, param):
        y = read(gate.q, state.S)
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)


class ThreeSteps(Cell):
    """The delta rule three times a step, with one key and other values."""

    def step(self, state, gate, param):
        new = state.S
        for i in range(3):
            k = unit(gate.k + i * gate.q, self.eps)
            b = torch.sigmoid(gate.b + i)[..., None]
            new = new + outer(b * k, gate.v * (i + 1) - read(k, new))
        return torch.sigmoid(gate.a)[..., None, None] * new


class ScalarDecay(Mamba2Cell):
    """Mamba-2's recurrence with an output gate."""

    gates = {"C": "K", "B": "K", "x": "V", "dt": "", "z": "V"}

    def readout(self, state, gate, param):
        return super().readout(state, gate, param) * F.silu(gate.z)


class MomentumDelta(Cell):
    """A momentum M of the delta rule, and a memory S with a decay for each key."""

    states = {"S": ("K", "V"), "M": ("K", "V")}
    gates = {"q": "K", "k": "K", "v": "V", "a": "K", "e": "", "b": ""}

    def step(self, state, gate, param):
        k = unit(gate.k, self.eps)
        e, b = torch.sigmoid(gate.e)[..., None, None], torch.sigmoid(gate.b)[..., None]
        momentum = e * state.M - outer(b * k, read(k, state.S) - gate.v)
        return torch.sigmoid(gate.a)[..., :, None] * state.S + momentum, momentum


class AlongValues(Cell):
    """A correction along V and a decay for each value; a readout with weights of both axes."""

    gates = {"q": "K", "k": "K", "v": "V", "c": "V", "f": "V", "b": ""}

    def step(self, state, gate, param):
        c = unit(gate.c, self.eps)
        memory = (state.S * c[..., None, :]).sum(-1)
        decayed = torch.sigmoid(gate.f)[..., None, :] * state.S
        return decayed + outer(gate.k - torch.sigmoid(gate.b)[..., None] * memory, c)

    def readout(self, state, gate, param):
        both = (gate.q * (state.S * gate.c[..., None, :]).sum(-1)).sum(-1, keepdim=True)
        return read(gate.k, state.S) + torch.tanh(both)


class Filters(Cell):
    """A filter of a filter of the writes, without reads: two states of one component; looks."""

    states = {"A": ("K", "V"), "B": ("K", "V")}

    def step(self, state, gate, param):
        a, b = torch.sigmoid(gate.a)[..., None, None], torch.sigmoid(gate.b)[..., None, None]
        first = a * state.A + outer(gate.k, gate.v)
        return first, b * state.B + (1 - b) * first / 3

    def readout(self, state, gate, param):
        y = ((state.A + state.B) * gate.v[..., None, :]).sum(-1)
        return read(gate.q, state.B) + torch.softmax(y, -1).sum(-1, keepdim=True) * gate.v


class Shift(Cell):
    """The last key and value are states, which the next step reads as gates; a whole vector is read
    by the readout. One gate is multiplied by a square parameter."""

    states = {"S": ("K", "V"), "last": "K", "y": "V", "z": ""}
    params = {"W": Param("H,K,K"), "w": Param("H,K")}

    def step(self, state, gate, param):
        a = torch.sigmoid(gate.a)[..., None, None]
        k = (gate.k[..., None, :] @ param.W).squeeze(-2) + param.w * state.last
        y = torch.sigmoid(gate.b)[..., None] * state.y + gate.v
        z = 0.9 * state.z + gate.b
        return a * state.S + outer(k, gate.v) - outer(gate.q, read(k, state.S)), gate.k, y, z

    def readout(self, state, gate, param):
        return (
            read(gate.q, state.S)
            + torch.tanh(state.y)
            + (state.z[..., None] * state.last).mean(-1)[..., None]
        )


class Selects(Cell):
    """Steps that b turns off or on, by where alone."""

    gates = {"q": "K", "k": "K", "v": "V", "a": "", "b": "", "d": "K"}

    def step(self, state, gate, param):
        k, on = unit(gate.k, self.eps), (gate.b > 0)[..., None, None]
        a = torch.sigmoid(gate.a)[..., None, None]
        new = torch.where((gate.d > 0.5)[..., :, None], 0.5 * state.S, a * state.S)
        new = new + outer(k, gate.v - read(k, new))
        return torch.where(on, new, state.S)


class Masks(Cell):
    """Masks that multiply, fused operations, constants and a norm of the readout."""

    def step(self, state, gate, param):
        keep = (gate.b > 0)[..., None, None]
        new = torch.addcmul(state.S * keep, gate.k[..., :, None], gate.v[..., None, :], value=0.5)
        new = new.mul(0.9).sub(state.S, alpha=0.1).add(1.0)
        new = new - torch.einsum("...k,...v->...kv", gate.q, READS[2](gate.k, new))
        return new / (1 + gate.b.square())[..., None, None] - gate.a[..., None, None]

    def readout(self, state, gate, param):
        return F.layer_norm(state.S.mean(-2), (self.V,))


class Resets(Cell):
    """The state is forgotten by where, then corrected."""

    def step(self, state, gate, param):
        new = torch.where((gate.b > 0)[..., None, None], 0.0, state.S)
        return new + outer(gate.k, gate.v - read(gate.k, new))


class ManyStates(pararnn.Cell):
    """A state twice, one that stays, one that is constant, and chains of vectors and of numbers."""

    states = dict.fromkeys("SPZD", ("K", "V")) | {"u": "K", "w": "K", "m": "", "l": ""}
    gates = {"q": "K", "k": "K", "v": "V", "a": ""}

    def step(self, state, gate, param):
        new = torch.sigmoid(gate.a)[..., None, None] * state.S + outer(gate.k, gate.v)
        m = torch.maximum(state.m, gate.a)
        u = torch.tanh(state.u + gate.k)
        vectors = u, 0.5 * state.w + u * gate.k
        return new, state.P, torch.zeros_like(state.Z), new, *vectors, m, torch.tanh(m + state.l)

    def readout(self, state, gate, param):
        y = read(gate.q, state.S + state.P + 2 * state.Z) + read(gate.k, state.D)
        return y + read(state.u * state.w, state.P) + (state.m + state.l)[..., None]


class Spellings(Cell):
    """One column and one read, in several spellings; the key itself would be another column."""

    gates = {"q": "K", "k": "K", "v": "V", "a": "", "b": "", "d": "K"}

    def step(self, state, gate, param):
        k, b = unit(gate.k, self.eps), torch.sigmoid(gate.b)[..., None]
        decayed = gate.a[..., None, None] * state.S + torch.tanh(gate.d)[..., :, None] * state.S
        erased = outer(k, b * read(k, state.S)) + outer(k * b, read(2 * k, state.S))
        return decayed - erased + outer(b * k, gate.v) + b[..., None] * outer(-k, 3 * gate.v)


class UnitAndKey(Cell):
    """Writes by a key of length 1, by the key itself, which may be of any length, and by a product
    of vectors in both orders."""

    def step(self, state, gate, param):
        new = state.S + outer(unit(gate.k, self.eps), gate.v) + outer(gate.k, gate.v * gate.v)
        return new + outer(gate.k * gate.q, torch.tanh(gate.v)) - outer(gate.q * gate.k, gate.v)


class Means(Cell):
    """A read without weights, also of what has no axis K."""

    def step(self, state, gate, param):
        mean = (state.S + gate.v[..., None, :] + gate.b[..., None, None]).mean(-2)
        return 0.9 * state.S - outer(gate.k, mean)


class TwoSides(pararnn.Cell):
    """Two matrices that are corrected along different axes, and a sum over all entries of both."""

    states = {"S": ("K", "V"), "R": ("K", "V")}
    gates = {"q": "K", "k": "K", "v": "V", "w": "V"}

    def step(self, state, gate, param):
        k, w = unit(gate.k, 1e-6), unit(gate.w, 1e-6)
        by_keys = state.S + outer(k, gate.v - read(k, state.S))
        return by_keys, state.R + outer(gate.q - (state.R * w[..., None, :]).sum(-1), w)

    def readout(self, state, gate, param):
        both = state.S + state.R
        number = (read(gate.q, both) * gate.v).sum(-1, keepdim=True)
        other = ((both * gate.w[..., None, :]).sum(-1) * gate.k).sum(-1, keepdim=True)
        return read(gate.k, both) * number + gate.v * other


class VectorAlone(pararnn.Cell):
    """A vector state, which is the output."""

    states = {"h": "V"}
    gates = {"i": "V", "f": "V", "K": "K"}

    def step(self, state, gate, param):
        f = torch.sigmoid(gate.f) + gate.K.mean(-1, keepdim=True)
        return f * state.h + (1 - f) * gate.i


AFFINE = {
    cls.__name__: cls
    for cls in (NormedProduct, ThreeSteps, ScalarDecay, MomentumDelta, AlongValues)
} | {cls.__name__: cls for cls in (Filters, Shift, Selects, Masks, Resets)}
AFFINE |= {cls.__name__: cls for cls in (ManyStates, VectorAlone, Spellings, UnitAndKey)}
AFFINE |= {cls.__name__: cls for cls in (Means, TwoSides)}
"""Cells that have a form, by name."""


READS = (
    lambda w, x: (w[..., :, None] * x).sum(-2),
    lambda w, x: (w[..., None, :] @ x).squeeze(-2),
    lambda w, x: torch.einsum("...k,...kv->...v", w, x),
    lambda w, x: (x / x.shape[-2] * w[..., :, None]).mean(-2) * x.shape[-2] ** 2,
)
"""Spellings of a sum over the first axis of a matrix with weights."""


def random_cell(seed):
    """A cell of one or two matrices, whose step is up to three random sub-steps: decays by numbers
    or vectors, writes, corrections of one side, and selections by gates."""
    draw = random.Random(seed)
    count, along_values = draw.choice((1, 1, 2)), draw.random() < 0.3
    moves = [draw.choice(_MOVES) for _ in range(draw.randint(1, 3))]
    step_tape, readout_tape = (tuple(draw.random() for _ in range(200)) for _ in range(2))

    def swap(x):
        return x.mT if along_values else x

    def step(self, state, gate, param):
        draws = _Draws(step_tape, gate, param)
        states = [swap(x) for x in state]
        for move in moves:
            states = move(draws, states)
        new = tuple(swap(x) for x in states)
        return new if count > 1 else new[0]

    def readout(self, state, gate, param):
        draws = _Draws(readout_tape, gate, param)
        states = [swap(x) for x in state]
        queried = draws.read(draws.side(), sum(states))
        looked = (states[-1] * draws.other()[..., None, :]).sum(-1)
        number = (looked * draws.side()).sum(-1, keepdim=True)
        by_other = torch.tanh(queried) * draws.number()[..., None] + number * draws.other()
        by_side = torch.softmax(looked, -1) + draws.side()
        by_values, by_keys = (by_side, by_other) if along_values else (by_other, by_side)
        return by_values + (by_keys * by_keys).mean(-1, keepdim=True)

    side, other = ("V", "K") if along_values else ("K", "V")
    axes = {"x": side, "y": other, "z": ""}
    members = {
        "states": {f"S{i}": ("K", "V") for i in range(count)},
        "gates": {f"{name}{i}": of for name, of in axes.items() for i in range(4)},
        "params": {"x": Param(f"H,{side}"), "y": Param(f"H,{other}"), "z": Param("H")},
        "step": step,
        "readout": readout,
    }
    return type(f"Random{seed}", (pararnn.Cell,), members)


class _Draws:
    """Random gates and parameters, by numbers that were drawn before."""

    def __init__(self, tape, gate, param):
        self.tape, self.gate, self.param = iter(tape), gate, param

    def chance(self, probability):
        return next(self.tape) < probability

    def index(self, count):
        return int(next(self.tape) * count)

    def read(self, weights, x):
        return READS[self.index(len(READS))](weights, x)

    def _pick(self, name):
        i = self.index(5)
        return getattr(self.param, name) if i == 4 else getattr(self.gate, f"{name}{i}")

    def side(self):
        x = self._pick("x")
        return unit(x, 1e-6) if self.chance(0.6) else torch.tanh(x)

    def other(self):
        return self._pick("y")

    def number(self):
        return torch.sigmoid(self._pick("z"))


def _decay(draws, states):
    vectors = [draws.chance(0.5) for _ in states]
    rates = [
        torch.sigmoid(draws.side())[..., :, None] if is_vector else draws.number()[..., None, None]
        for is_vector in vectors
    ]
    return [rate * x for rate, x in zip(rates, states, strict=True)]


def _write(draws, states):
    i = draws.index(len(states))
    write = outer(draws.side() * draws.number()[..., None], draws.other())
    return [x + write if j == i else x - 0.5 * write for j, x in enumerate(states)]


def _correct(draws, states):
    k, b = draws.side(), draws.number()[..., None]
    error = draws.other() - draws.read(k, states[0] + 0.3 * sum(states[1:]))
    i = draws.index(len(states))
    return [x + outer(b * k, error) if j <= i else x for j, x in enumerate(states)]


def _couple(draws, states):
    weight = draws.number()[..., None, None]
    return [torch.lerp(states[-1], x, weight) / (1 + weight) for x in states]


def _select(draws, states):
    changed = (_correct, _decay, _write)[draws.index(3)](draws, states)
    if draws.chance(0.5):
        condition = (draws.number() > 0.5)[..., None, None]
    else:
        condition = (draws.side() > 0.1)[..., :, None]
    return [torch.where(condition, a, b) for a, b in zip(changed, states, strict=True)]


_MOVES = (_decay, _write, _correct, _correct, _couple, _select)


class Oja(Cell):
    """What is read of the state multiplies it."""

    def step(self, state, gate, param):
        y = read(gate.k, state.S)
        back = (state.S * y[..., None, :]).sum(-1)
        return state.S + gate.b[..., None, None] * outer(gate.k - back, y)


class RateOfState(Cell):
    """A decay that depends on the state."""

    def step(self, state, gate, param):
        rate = torch.sigmoid(read(gate.k, state.S))[..., None, :]
        return rate * state.S + outer(gate.k, gate.v)


class EntryDecay(Cell):
    """A decay for each entry of the matrix, and reads."""

    params = {"w": Param("H,K,V")}

    def step(self, state, gate, param):
        return param.w * state.S + outer(gate.k, gate.v - read(gate.k, state.S))


class EntryRead(Cell):
    """A read whose weights are a matrix."""

    params = {"w": Param("H,K,V")}

    def step(self, state, gate, param):
        return 0.9 * state.S + outer(gate.k, gate.v - (param.w * state.S).sum(-2))


class BothSides(Cell):
    """Corrections along both axes in one step."""

    def step(self, state, gate, param):
        along_values = (state.S * gate.v[..., None, :]).sum(-1)
        return state.S - outer(gate.k, read(gate.k, state.S)) - outer(along_values, gate.v)


class BothWeights(Cell):
    """A number that is read with weights of both axes."""

    def step(self, state, gate, param):
        number = (read(gate.k, state.S) * gate.v).sum(-1)[..., None]
        return 0.9 * state.S + outer(gate.k, gate.v * number)


class OtherSide(Cell):
    """A decay along the axis that reads do not sum over."""

    def step(self, state, gate, param):
        decayed = torch.sigmoid(gate.v)[..., None, :] * state.S
        return decayed + outer(gate.k, gate.v - read(gate.k, state.S))


class MatrixWrite(Cell):
    """A write that is no product of vectors."""

    params = {"w": Param("H,K,V")}

    def step(self, state, gate, param):
        return 0.9 * state.S + torch.tanh(param.w * gate.v[..., None, :])


class NormOfState(Cell):
    """A readout of every entry of the state."""

    def step(self, state, gate, param):
        return 0.9 * state.S + outer(gate.k, gate.v)

    def readout(self, state, gate, param):
        return torch.tanh(state.S).sum(-2)


class VectorOfMatrix(Cell):
    """A vector state that reads the matrix, which reads the vector."""

    states = {"S": ("K", "V"), "n": "K"}

    def step(self, state, gate, param):
        new = 0.9 * state.S + outer(gate.k, gate.v) + state.n[..., :, None]
        return new, 0.9 * state.n + state.S.sum(-1)


class SolvedAsGate(Cell):
    """A vector state that decides on the decay of a matrix, and is no function of its entry."""

    states = {"S": ("K", "V"), "n": "K"}

    def step(self, state, gate, param):
        n = 0.9 * state.n + gate.k * (1 - (gate.k * state.n).sum(-1, keepdim=True))
        return torch.sigmoid(n)[..., :, None] * state.S + outer(gate.k, gate.v), n


class Detached(Cell):
    """A gradient that its operations do not show."""

    def step(self, state, gate, param):
        return 0.9 * state.S + outer(gate.k.detach(), gate.v)


REFUSED = {
    Oja: "aten.mul of a value that depends on S",
    RateOfState: "aten.sigmoid of a value that depends on S",
    EntryDecay: "a decay along both axes, K and V",
    EntryRead: "a sum over K of S with weights along both axes",
    BothSides: "reads along K and along V in one step",
    BothWeights: "a read of S that is weighted along both axes",
    OtherSide: "a decay along V and reads along K in one step",
    MatrixWrite: "a write with axes K and V that is no product of vectors",
    NormOfState: "aten.tanh of a value that depends on S",
    VectorOfMatrix: "a dependence between states of different axes, S and n",
    SolvedAsGate: "a dependence between states of different axes, S and n",
    Detached: "a gradient other than that of its operations (detach, a torch.autograd.Function)",
}
"""Cells that have no form, and the reason."""
