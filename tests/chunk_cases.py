"""Cells and calls by which kernels over chunks are held against the loop, on any device."""

import copy
import math

import torch
from affine_cells import AFFINE, Cell, outer, random_cell, read
from matrix_cells import Call

import pararnn
from pararnn.base.numerics import FORWARD_TOLERANCE
from pararnn.check.matrix import check_matrix
from pararnn.engines.fused.chunks import ChunksEngine
from pararnn.program.program import program_of
from pararnn.solve import one_gate, prepare, run
from pararnn.zoo import MATRIX_CELLS, MLSTMCell
from pararnn.zoo.unit import unit

CHUNKS = {"solver": "chunks", "backend": "fused"}
LOOP = {"solver": "sequential", "backend": "torch"}
VARIANTS = ("plain", "resets", "reverse", "packed", "packed in reverse")


class ValuesByKeys(pararnn.Cell):
    """A state in the order values, keys; a number is the first of the gates, so that vectors begin
    at odd numbers."""

    states = {"S": ("V", "K")}
    gates = {"b": "", "k": "K", "v": "V", "q": "K", "a": ""}

    def step(self, state, gate, param):
        k, b = unit(gate.k, 1e-6), torch.sigmoid(gate.b)[..., None]
        error = gate.v - (state.S * k[..., None, :]).sum(-1)
        decayed = torch.sigmoid(gate.a)[..., None, None] * state.S
        return decayed + (b * error)[..., :, None] * k[..., None, :]

    def readout(self, state, gate, param):
        return (state.S * gate.q[..., None, :]).sum(-1)


class AlongValues(pararnn.Cell):
    """Corrections along V; the readout has a number of the state."""

    states = {"S": ("K", "V")}
    gates = {"k": "K", "c": "V", "f": "V", "b": ""}

    def step(self, state, gate, param):
        c, b = unit(gate.c, 1e-6), torch.sigmoid(gate.b)[..., None]
        decayed = torch.sigmoid(gate.f)[..., None, :] * state.S
        return decayed + outer(gate.k - b * (decayed * c[..., None, :]).sum(-1), c)

    def readout(self, state, gate, param):
        both = ((state.S * gate.f[..., None, :]).sum(-1) * gate.k).sum(-1, keepdim=True)
        return torch.tanh(both) * gate.c


class ValuesByKeysAlone(pararnn.Cell):
    """A state in the order values, keys that nothing corrects: the readout says which are keys."""

    states = {"S": ("V", "K")}
    gates = {"q": "K", "k": "K", "v": "V", "a": ""}

    def step(self, state, gate, param):
        decayed = torch.sigmoid(gate.a)[..., None, None] * state.S
        return decayed + gate.v[..., :, None] * gate.k[..., None, :]

    def readout(self, state, gate, param):
        y = (state.S * gate.q[..., None, :]).sum(-1)
        return y / (1 + y.square().mean(-1, keepdim=True))


class Unguarded(Cell):
    """The delta rule with keys divided by their length: 0 / 0 where there is no step."""

    def step(self, state, gate, param):
        k = gate.k / gate.k.norm(dim=-1, keepdim=True)
        b = torch.sigmoid(gate.b)[..., None]
        decayed = torch.sigmoid(gate.a)[..., None, None] * state.S
        return decayed + outer(b * k, gate.v - read(k, decayed))


class Decays(Cell):
    """The delta rule with decays and rates as they come, by keys of any length."""

    def step(self, state, gate, param):
        decayed = gate.a[..., None, None] * state.S
        return decayed + outer(gate.b[..., None] * gate.k, gate.v - read(gate.k, decayed))


class VectorDecays(Cell):
    """The same with a decay for each key."""

    gates = {"q": "K", "k": "K", "v": "V", "a": "K", "b": ""}

    def step(self, state, gate, param):
        decayed = gate.a[..., :, None] * state.S
        return decayed + outer(gate.b[..., None] * gate.k, gate.v - read(gate.k, decayed))


class Grows(pararnn.Cell):
    """A decay that is its gate, however large."""

    states = {"S": ("K", "V")}
    gates = {"k": "K", "v": "V", "d": ""}

    def step(self, state, gate, param):
        return gate.d[..., None, None] * state.S + outer(gate.k, gate.v)

    def readout(self, state, gate, param):
        return read(gate.k, state.S)


class WithParams(pararnn.Cell):
    """Parameters of all kinds: of a head, of its keys and values, and of all heads; two queries."""

    states = {"S": ("K", "V")}
    gates = {"q": "K", "k": "K", "v": "V", "a": ""}
    params = {
        "decay": pararnn.Param("H,K"),
        "rate": pararnn.Param("H"),
        "shift": pararnn.Param("H,V"),
        "gain": pararnn.Param("H,V"),
    }

    def step(self, state, gate, param):
        decayed = torch.sigmoid(param.decay + gate.a[..., None])[..., :, None] * state.S
        k, b = unit(gate.k, 1e-6), torch.sigmoid(param.rate)[..., None]
        return decayed + outer(b * k, gate.v + param.shift - read(k, decayed))

    def readout(self, state, gate, param):
        y = read(gate.q, state.S) * torch.sigmoid(read(gate.k, state.S))
        return param.gain * y + gate.v


class Apart(pararnn.Cell):
    """Matrices with decays of their own; a vector that is decayed and written as one of them; the
    last key, which others read, and a number that is not affine."""

    states = {"S": ("K", "V"), "last": "K", "R": ("K", "V"), "n": "K", "z": ""}
    gates = {"q": "K", "k": "K", "v": "V", "a": "", "b": ""}
    params = {"w": pararnn.Param("H,K"), "c": pararnn.Param("H")}

    def step(self, state, gate, param):
        a, b = torch.sigmoid(gate.a)[..., None], torch.sigmoid(gate.b)[..., None]
        k = unit(gate.k, 1e-6)
        shifted = k + torch.tanh(param.w) * state.last
        z = torch.tanh(gate.a + param.c * state.z)
        decayed = torch.sigmoid(z)[..., None, None] * state.S
        new = decayed + outer(a * k, gate.v - read(k, decayed))
        other = b[..., None] * state.R + outer(shifted, gate.v)
        return new, k, other, b * state.n + shifted, z

    def readout(self, state, gate, param):
        scale = torch.sigmoid(state.z)[..., None] / (1 + (state.n * gate.q).sum(-1, True).square())
        return read(gate.q, state.S) + scale * read(gate.q, state.R)


def queried(seed):
    """A random affine cell with a readout that kernels take."""
    base = random_cell(seed)
    along_values = base.gates["x0"] == "V"

    def readout(self, state, gate, param):
        total = sum(x.mT if along_values else x for x in state)
        y, z = read(gate.x0, total), read(gate.x1, total)
        if along_values:
            return (y * gate.y0).sum(-1, keepdim=True) * gate.x1 + param.x
        return y * torch.sigmoid(z) + gate.z0[..., None] * param.y

    return type(f"Queried{seed}", (base,), {"readout": readout})


ZOO = ("gated-delta", "rwkv7", "titans", "mlstm", "kda", "gated-delta-product", "comba", "mamba2")
CELLS = {name: MATRIX_CELLS[name] for name in ZOO}
CELLS |= {name: AFFINE[name] for name in ("NormedProduct", "ScalarDecay")}
CELLS |= {name: AFFINE[name] for name in ("Selects", "Masks", "Resets", "Spellings")}
CELLS |= {name: AFFINE[name] for name in ("UnitAndKey", "Means")}
OWN = (ValuesByKeys, ValuesByKeysAlone, AlongValues, Unguarded, Decays, VectorDecays)
OWN += (WithParams, Apart)
CELLS |= {cls.__name__: cls for cls in OWN}
"""Cells that kernels over chunks take, by name."""
RAW = ("Decays", "VectorDecays")
"""Cells whose decays and rates are gates: these begin between 0 and 1."""


def make_call(
    cls, rows=2, steps=37, heads=2, keys=16, values=16, dtype=torch.float32, device="cpu"
):
    """A cell, and random gates and states on a device."""
    cell = cls(heads * values, num_heads=heads, K=keys, dtype=dtype, device=device)
    sizes = cell.head_sizes
    gates = torch.randn(rows, steps, heads, sizes.width)
    if cls.__name__ in RAW:
        for name, gate in views_of(cell, gates).items():
            if name in "ab":
                gate.copy_(torch.rand(gate.shape))
            elif name == "k":
                gate.copy_(unit(gate, 1e-6))
    with torch.no_grad():
        for param in cell.parameters():
            param.copy_(0.5 * torch.randn(param.shape))
    initial = [0.5 * torch.randn(rows, *size) for size in sizes.state_sizes]
    leaves = [x.to(device, dtype).requires_grad_() for x in (gates, *initial)]
    return Call(cell, leaves[0], tuple(leaves[1:]))


def views_of(cell, gates):
    """The gates (B, T, H, ...) of a call by name, as views."""
    split = cell.head_sizes.split(gates)
    return dict(zip(cell.gates, split, strict=True))


RATES = [(0.5, False), (0.999, True), (1.9, True), (2.0, True)]
HARD = {
    "zero": lambda a: torch.where(torch.rand_like(a) < 0.1, 0.0, a),
    "negative": lambda a: torch.where(torch.rand_like(a) < 0.5, -a, a),
    "1.02": lambda a: torch.full_like(a, 1.02),
    "exp(-50)": lambda a: torch.where(torch.rand_like(a) < 0.1, 1.93e-22, a),
    "all exp(-50)": lambda a: torch.full_like(a, 1.93e-22),
}
"""Decays by name, and rates with keys that are alike or not."""


def make_hard(call, decay, rate, alike):
    """A call of a cell whose decays and rates are gates, with hard ones."""
    with torch.no_grad():
        views = views_of(call.cell, call.gates)
        views["a"].copy_(HARD[decay](views["a"]))
        views["b"].fill_(rate)
        if alike:
            views["k"].copy_(torch.nn.functional.normalize(0.02 * views["k"] + 1.0, dim=-1))
    return call


def late_and_large(call):
    """A call whose values are large at two of its last steps."""
    steps = call.gates.shape[1]
    with torch.no_grad():
        for at, factor in ((steps * 5 // 8, 1e4), (steps - 2, 1e6)):
            views_of(call.cell, call.gates)["v"][:, at] *= factor
    return call


def in_variant(call, variant):
    """A call and its options. Packed rows have sequences without steps and padding, of NaN."""
    rows, steps = call.gates.shape[:2]
    device, options = call.gates.device, {"reverse": "reverse" in variant}
    if variant != "plain":
        options["reset"] = torch.rand(rows, steps).to(device) < 0.1
    if "packed" not in variant:
        return call, options
    lengths = [0, steps // 2, 0, 1, steps // 4]
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    gates = call.gates.detach()[:1].clone()
    gates[:, ends[-1] :] = torch.nan
    initial = [
        torch.randn(len(lengths), *size).to(gates).requires_grad_()
        for size in call.cell.head_sizes.state_sizes
    ]
    options |= {"cu_seqlens": torch.tensor(ends, device=device), "reset": options["reset"][:1]}
    return Call(call.cell, gates.requires_grad_(), tuple(initial)), options


def obeys(call, initial=True, loss_scale=1.0, **options):
    """The checks of the numerics contract that do not hold, but for those that the loop exceeds as
    much: gradients of bfloat16 gates with resets do. Where the normaliser of the mLSTM divides,
    gradients of its gates i and f are differences of equal numbers, of which operands keep 16 bits:
    those of 16 bits are compared with the largest of all steps."""
    call = call if initial else Call(call.cell, call.gates, ())
    args = prepare(call.cell, one_gate(call.cell, call.gates), call.initial or None, **options)

    def failures(pair):
        checks = check_matrix(call.cell, args, tuple(pair.values()), 0, loss_scale).checks
        return {check.name: check for check in checks if not check.passed}

    ours = failures(CHUNKS)
    if isinstance(call.cell, MLSTMCell) and call.gates.dtype != torch.float32:
        ours.pop("grad gates", None)
        assert_close(call, scale=loss_scale, **options)
    loop = failures(LOOP) if ours else {}
    return [c for n, c in ours.items() if n not in loop or c.error > 1.1 * loop[n].error]


def exactly(call):
    """The call in float64."""
    leaf = lambda x: x.detach().double().requires_grad_()  # noqa: E731
    cell = copy.deepcopy(call.cell).double()
    return Call(cell, leaf(call.gates), tuple(map(leaf, call.initial)))


def solved(call, pair, scale=1.0, arriving="all", bias=None, **options):
    """Outputs, final states and gradients of all leaves. arriving: to "all", "output", "final"."""
    leaves = [*call.leaves(), *([] if bias is None else [bias])]
    args = prepare(
        call.cell, one_gate(call.cell, call.gates), call.initial or None, bias=bias, **options
    )
    (output, *_), final, _, _ = run(program_of(call.cell), args, *pair.values())
    results = [output, *final]
    generator = torch.Generator().manual_seed(0)
    noise = [
        scale * torch.randn(r.shape, generator=generator, dtype=torch.float64) for r in results
    ]
    chosen = {"all": slice(None), "output": slice(1), "final": slice(1, None)}[arriving]
    pairs = [(r, n.to(r)) for r, n in zip(results, noise, strict=True)][chosen]
    outputs, arriving = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)
    grads = torch.autograd.grad(outputs, leaves, arriving, materialize_grads=True)
    return [x.detach() for x in (*results, *grads)]


def error(actual, reference):
    """The largest error over the largest entry."""
    if not reference.numel():
        return 0.0
    size = reference.abs().max().clamp(min=1e-300)
    return float((actual.double() - reference).abs().max() / size)


def assert_close(call, factor=1.0, bias=None, **options):
    """Chunks are as close to the loop in float64 as the contract says, tensor by tensor."""
    double = None if bias is None else bias.detach().double().requires_grad_()
    ours, loop = (solved(call, pair, bias=bias, **options) for pair in (CHUNKS, LOOP))
    exact = solved(exactly(call), LOOP, bias=double, **options)
    assert [x.dtype for x in ours] == [x.dtype for x in loop]
    for number, (a, b, e) in enumerate(zip(ours, loop, exact, strict=True)):
        limit = factor * max(FORWARD_TOLERANCE[call.gates.dtype], FORWARD_TOLERANCE[a.dtype])
        assert error(a, e) <= limit + 4 * error(b, e), number


def counts_of_loops(monkeypatch):
    """A list of how many heads each launch of the loop has run again, from now on."""
    counts, run_loop = [], ChunksEngine._run_loop

    def record(call, launch, tensors):
        counts.append(int(call.flags.sum()))
        run_loop(call, launch, tensors)

    monkeypatch.setattr(ChunksEngine, "_run_loop", staticmethod(record))
    return counts


def assert_alike(ours, loop, limit):
    """NaN and infinity are where the loop has them, and the rest is close."""
    for number, (a, b) in enumerate(zip(ours, loop, strict=True)):
        assert torch.equal(a.isnan(), b.isnan()), number
        assert torch.equal(a.isposinf(), b.isposinf()), number
        assert torch.equal(a.isneginf(), b.isneginf()), number
        a, b = (x.double().nan_to_num(0, 0, 0) for x in (a, b))
        assert error(a, b) <= limit, number


def gate_at(cell, gate):
    """Where a gate begins among the numbers of a head."""
    return sum(map(math.prod, cell.head_sizes.gates[:gate]))
