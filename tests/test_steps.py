"""What a step may say: in elementwise cells, in cells that mix channels, in matrix cells."""

import copy

import pytest
import torch
import torch.nn.functional as F
from step_forms import cells, taken
from table import needs_compiler

import pararnn
from pararnn import CellError, Param
from pararnn.base.errors import EngineError
from pararnn.codegen.emit import emit_elementwise
from pararnn.program.program import program_of

KINDS = ("elementwise", "heads", "matrix")
GROUPS = 5
FUSED = {"solver": "sequential", "backend": "fused"}


def loop(cell, gates):
    """The states (B, T, N, ...) of a loop over the Python step."""
    step, sizes, params = program_of(cell).step, cell.head_sizes, cell.lifted_params()
    states = [gates.new_zeros(gates.shape[0], *size) for size in cell.state_sizes]
    outputs = []
    for gate in gates.unbind(1):
        inputs = gate.unbind(1) if sizes is None else sizes.split(gate)
        states = step(states, inputs, params)
        read = step.has_readout
        outputs.append(step.call("readout", states, inputs, params) if read else states[0])
    return torch.stack(outputs, 1)


def assert_is_the_loop(cell, gates, **options):
    """Compare outputs and all gradients of a solve with the loop's on a CPU."""
    results = []
    for own, x in ((cell, gates), (copy.deepcopy(cell).cpu(), gates.cpu())):
        x = x.detach().requires_grad_()
        output = pararnn.solve(own, x, **options)[0] if own is cell else loop(own, x)
        torch.manual_seed(1)
        arriving = torch.randn(output.shape, dtype=output.dtype).to(output)
        leaves = [x, *own.parameters()]
        grads = torch.autograd.grad(output, leaves, arriving, allow_unused=True)
        results.append([output, *grads])
    for own, wanted in zip(*results, strict=True):
        if own is None or wanted is None:
            assert all(grad is None or not grad.any() for grad in (own, wanted))
            continue
        # Vector by vector: next to a gradient of 1e12, as that of a normalised zero, others count.
        scale = wanted.detach().abs().amax(-1, keepdim=True).clamp(min=1e-30)
        torch.testing.assert_close(own.cpu() / scale, wanted / scale, rtol=0, atol=1e-11)


def gates_of(cell, rows=2, steps=3):
    """Random gates of a cell of 6 channels in 2 heads."""
    torch.manual_seed(0)
    sizes = cell.head_sizes
    size = (len(cell.gates), 6) if sizes is None else (2, sizes.width)
    gates = torch.randn(rows, steps, *size, dtype=torch.float64)
    return gates.to(next(cell.parameters(), gates))


def make(cls, device="cpu", **options):
    """A cell of 6 channels in 2 heads, in float64."""
    torch.manual_seed(0)
    return cls(6, num_heads=2, dtype=torch.float64, **options).to(device)


@needs_compiler
@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("kind", range(len(KINDS)), ids=KINDS)
@pytest.mark.one_in(7)
def test_forms_are_those_of_pytorch(kind, group):
    """A step that adds up forms, by its kernels and by a loop in PyTorch."""
    check_forms(kind, group)


def check_forms(kind, group, device="cpu"):
    """Compare kernels of a group of forms with the loop."""
    cell = make(cells(dict([*taken().items()][group::GROUPS]))[kind], device)
    assert program_of(cell).family == ("elementwise", "mixing", "matrix")[kind]
    assert_is_the_loop(cell, gates_of(cell), **FUSED)


def step_of(kind, body, **attributes):
    """A cell class of a kind whose step is tanh(body(y, self, state, gate, param)), y a product."""

    def of_heads(self, state, gate, param):
        return torch.tanh(body(state.h @ param.R + gate.x, self, state, gate, param))

    def of_matrix(self, state, gate, param):
        product = (state.h[..., None, :] @ param.R)[..., 0, :]
        return torch.tanh(body(product + gate.x, self, state, gate, param))

    def of_channels(self, state, gate, param):
        return torch.tanh(body(state.h * param.R + gate.x, self, state, gate, param))

    names = ("x", "z")
    contract = {
        "elementwise": {"states": ("h",), "gates": names, "step": of_channels},
        "heads": {"states": ("h",), "gates": names, "step": of_heads},
        "matrix": {"states": {"h": "V"}, "gates": dict.fromkeys(names, "V"), "step": of_matrix},
    }[kind]
    shapes = {"elementwise": ("D", "D"), "heads": ("H,K,K", "D"), "matrix": ("H,V,V", "H,V")}[kind]
    params = {"R": Param(shapes[0]), "b": Param(shapes[1])}
    return type("Made", (pararnn.Cell,), {**contract, "params": params, **attributes})


GRADIENTS_OF_ZERO = {
    "round": torch.round,
    "sign": torch.sign,
    "sgn": torch.sgn,
    "trunc": torch.trunc,
    "div_floor": lambda y: torch.div(y, 2, rounding_mode="floor"),
    "div_trunc": lambda y: torch.div(y, torch.tensor(2.0), rounding_mode="trunc"),
    "copysign": lambda y: torch.copysign(torch.ones_like(y), y),
    "compare": lambda y: (y > 0).to(y.dtype),
    "detach": lambda y: y.detach() // 2,
}


@pytest.mark.parametrize("name", GRADIENTS_OF_ZERO)
@pytest.mark.parametrize("kind", KINDS)
def test_products_without_a_gradient_keep_their_kernels(kind, name):
    function = GRADIENTS_OF_ZERO[name]
    cell = make(step_of(kind, lambda y, self, state, gate, param: function(3 * y) + gate.z))
    program = program_of(cell)
    assert program.family == {"heads": "mixing"}.get(kind, kind), program.why_no_family
    assert_is_the_loop(cell, gates_of(cell), solver="sequential", backend="torch")


def _norm(x):
    return x / (1 + x.square().sum(-1, keepdim=True))


@pytest.mark.parametrize("name", ["sgn", "copysign", "div_floor", "hardsigmoid"])
def test_steps_without_kernels_take_what_autograd_makes_by_itself(name):
    """Zeros on the device of the states."""
    forms = {"hardsigmoid": F.hardsigmoid, **GRADIENTS_OF_ZERO}
    function = forms[name]
    body = lambda y, self, state, gate, param: _norm(state.h) + function(3 * y)  # noqa: E731
    cell = make(step_of("elementwise", body, structure="dense"))
    for solver in ("sequential", "newton"):
        assert_is_the_loop(cell, gates_of(cell), solver=solver, backend="torch")


@pytest.mark.parametrize("kind", KINDS)
def test_checks_of_a_step_bear_its_values(kind):
    """NaN at some points, a gradient of 1e8, and PyTorch's 1/6 of float32 are no faults."""
    bodies = (
        lambda y, self, state, gate, param: torch.sqrt(y) + torch.log(y) + torch.asin(y),
        lambda y, self, state, gate, param: torch.exp(10 * y) * 1e-3,
        lambda y, self, state, gate, param: F.hardsigmoid(y),
    )
    for body in bodies:
        assert program_of(make(step_of(kind, body))).why_no_family is None
    cell = make(step_of(kind, bodies[-1]))
    assert_is_the_loop(cell, gates_of(cell), solver="sequential", backend="torch")


REFUSED = {
    "y // 2": (lambda y: y // 2, "uses floor_divide, .*rounding_mode='floor'"),
    "2 % y": (lambda y: 2 % y, "uses remainder, .*x.new_tensor"),
    "heaviside": (lambda y: torch.heaviside(y, y), "uses heaviside, .*torch.where"),
    "new dtype": (lambda y: y * (y > 0).float(), r"_to_copy.*mask.to\(x.dtype\)"),
    "list": (lambda y: y + torch.tensor([0.5]), r"torch.tensor\).*x.new_tensor"),
    "number of dimensions": (lambda y: y * y.ndim, "must treat leading dimensions"),
    "size of a batch": (lambda y: y * y.numel(), "must treat leading dimensions"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_refused_has_a_cure(kind, name):
    function, message = REFUSED[name]
    with pytest.raises(CellError, match=message):
        program_of(make(step_of(kind, lambda y, *others: function(y))))


READERS = {
    "tolist": lambda y: y * y.detach().tolist()[0],
    "numpy": lambda y: y * float(y.detach().numpy().sum()),
    "nonzero": lambda y: y * len(y.nonzero()),
    "selection": lambda y: y + y[y > 0].sum(),
    "address": lambda y: y * (y.data_ptr() % 7),
}


@pytest.mark.filterwarnings("ignore::pararnn.CellCostWarning")
@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_that_python_reads_are_no_part_of_a_trace(kind, name):
    cls, message = step_of(kind, lambda y, *others: READERS[name](y)), "reads a tensor's value"
    if kind == "matrix":
        with pytest.raises(CellError, match=message):
            program_of(make(cls))
    else:
        assert message in program_of(make(cls)).why_sequential


LEAK = 0.5
NAMES = {
    "getattr": lambda y, self, state, gate, param: sum(getattr(gate, n) for n in ("x", "z")) + y,
    "of a parameter": lambda y, self, state, gate, param: getattr(param, "bR"[:1]) * y,
    "with a default": lambda y, self, state, gate, param: y * getattr(param, "R" + "_no", LEAK),
    "of the cell": lambda y, self, state, gate, param: y * sum(getattr(self, n) for n in ("c",)),
    "hasattr": lambda y, self, state, gate, param: y if hasattr(param, "bR"[:1]) else 0 * y,
    "asdict": lambda y, self, state, gate, param: y * gate._asdict()["z"],
    "replace": lambda y, self, state, gate, param: y * gate._replace(z=y).z,
    "iteration": lambda y, self, state, gate, param: sum(gate) + y,
    "unpacking": lambda y, self, state, gate, param: (lambda x, z: x * z)(*gate) + y,
    "zip": lambda y, self, state, gate, param: y + dict(zip(gate._fields, gate, strict=True))["z"],
    "contract": lambda y, self, state, gate, param: y * len(self.states) * len(self.gates),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_names_may_be_computed(kind, name):
    cell = make(step_of(kind, NAMES[name], config={"c": 0.5}))
    assert program_of(cell).why_no_family is None
    assert_is_the_loop(cell, gates_of(cell), solver="sequential", backend="torch")


SLIPS = {
    "gate.y is not there: it has x, z": lambda y, self, state, gate, param: gate.y,
    "param.R cannot be set": lambda y, self, state, gate, param: setattr(param, "R", 1),
    "param.new cannot be set": lambda y, self, state, gate, param: setattr(param, "new", 1),
    "sets self.count, which it may not": lambda y, self, *others: setattr(self, "count", 1),
    r"reads vars\(\), behind": lambda y, self, state, gate, param: vars(param)["R"],
    "reads self.R, .* param.R": lambda y, self, state, gate, param: self.R * y,
    "reads self.num_heads, .*(in config|self.V)": lambda y, self, *others: self.num_heads * y,
}


@pytest.mark.parametrize("message", SLIPS)
@pytest.mark.parametrize("kind", KINDS)
def test_slips_say_what_is_wrong(kind, message):
    with pytest.raises(CellError, match=message):
        program_of(make(step_of(kind, SLIPS[message])))


def test_attributes_that_cell_makes_of_the_contract_are_refused_in_all_cells():
    for states, gates in ((("h",), ("x",)), ({"h": "V"}, {"x": "V"})):

        class Own(pararnn.Cell):
            def step(self, state, gate, param):
                return state.h * len(self.head_axes.states)

        body = {"states": states, "gates": gates}
        with pytest.raises(CellError, match=r"reads self\.head_axes, which it may not"):
            program_of(make(type("Made", (Own,), body)))


class Sized(pararnn.Cell):
    """Reads the lengths of its axes as numbers."""

    states, gates = {"H": ("K", "V")}, {"k": "K", "v": "V"}

    def step(self, state, gate, param):
        pair = gate.k[..., :, None] * gate.v[..., None, :] / (self.K * self.V) ** 0.5
        ones = (torch.ones_like(state.H) * gate.k[..., :, None]).sum(-1)  # V times each key
        also = (torch.ones_like(gate.v)[..., None, :] @ state.H.mT)[..., 0, :] / self.V
        return torch.tanh(0.5 * state.H + pair + (0.1 * ones + also)[..., :, None])

    def readout(self, state, gate, param):
        return state.H.sum(-2) / self.K


@pytest.mark.parametrize("backend", ["torch", pytest.param("fused", marks=needs_compiler)])
def test_lengths_of_axes_are_numbers(backend):
    """And constants of more axes than what they multiply keep them."""
    cell = make(Sized, K=5)
    assert program_of(cell).why_no_family is None
    assert_is_the_loop(cell, gates_of(cell), solver="sequential", backend=backend)
    with pytest.raises(CellError, match="config 'V' is the name of the axis"):
        type("Own", (Sized,), {"config": {"V": 4}})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whole_numbers_are_exact_or_refused(dtype):
    def source(function):
        cell = make(step_of("elementwise", lambda y, *others: function(y) * y))
        return emit_elementwise(program_of(cell), dtype)

    for function in (lambda y: (y > 0).long() * 2 - 1, lambda y: y.clamp(-9, 9).long() * 7 % 3):
        assert "vjp" in source(function)
    with pytest.raises(EngineError, match=r"may exceed 2\^24"):
        source(lambda y: y.long() * 1000003 % 7)


def _weighted(norm):
    return lambda x, p: norm(x, x.shape[-1:]) * p.w + p.b


NORMS = {
    "normalize": lambda x, p: F.normalize(x, dim=-1),
    "normalize_1": lambda x, p: F.normalize(x, p=1, dim=-1, eps=0.1),
    "normalize_3": lambda x, p: F.normalize(x, p=3.0, dim=-1),
    "norm_2": lambda x, p: x * torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "norm_1": lambda x, p: x * torch.linalg.vector_norm(x, 1, dim=-1)[..., None],
    "norm_inf": lambda x, p: x * torch.linalg.vector_norm(x, float("inf"), -1, keepdim=True),
    "norm_least": lambda x, p: x * torch.linalg.vector_norm(x, -float("inf"), -1, keepdim=True),
    "norm_0": lambda x, p: x * torch.linalg.vector_norm(x, 0, -1, keepdim=True),
    "norm_method": lambda x, p: x / (1 + x.norm(dim=-1, keepdim=True)),
    "cosine": lambda x, p: x * F.cosine_similarity(x, p.w.expand(x.shape), -1)[..., None],
    "var": lambda x, p: x * x.var(-1, keepdim=True),
    "var_biased": lambda x, p: x * x.var(-1, unbiased=False)[..., None],
    "var_mean": lambda x, p: x * sum(torch.var_mean(x, -1, keepdim=True)),
    "std": lambda x, p: x * x.std(-1, correction=0, keepdim=True),
    "layer_norm": lambda x, p: F.layer_norm(x, x.shape[-1:], eps=0.1),
    "layer_norm_weighted": _weighted(F.layer_norm),
    "rms_norm": lambda x, p: F.rms_norm(x, x.shape[-1:], eps=0.1),
    "rms_norm_weighted": _weighted(F.rms_norm),
    "softmax": lambda x, p: torch.softmax(x, -1),
    "logsumexp": lambda x, p: x - torch.logsumexp(x, -1, keepdim=True),
    "mean": lambda x, p: x - x.mean(-1, keepdim=True),
    "any": lambda x, p: torch.where((x > 1).any(-1, keepdim=True), x, 2 * x),
    "all": lambda x, p: torch.where((x > -1).all(-1, keepdim=True), x, 2 * x),
}


def norms(names):
    """A cell that sums norms of its keys, and of its state along both axes."""
    functions = [NORMS[name] for name in names]

    class Norms(pararnn.Cell):
        states, gates = {"H": ("K", "V")}, {"k": "K", "v": "V"}
        params = {"w": Param("H,K", mean=1.0, std=0.5), "b": Param("H,K")}

        def step(self, state, gate, param):
            k = sum((i + 1) * f(gate.k, param) for i, f in enumerate(functions)) / len(functions)
            rows = F.normalize(state.H, dim=-1) + F.normalize(state.H, dim=-2)
            size = torch.linalg.vector_norm(state.H, dim=(-2, -1))[..., None, None]
            new = 0.5 * rows / (1 + size) + k[..., :, None] * gate.v[..., None, :]
            return 0.5 * state.H + 0.5 * torch.tanh(new)

        def readout(self, state, gate, param):
            return (F.normalize(gate.k, dim=-1)[..., None, :] @ state.H)[..., 0, :]

    return Norms


def check_norms(names, device="cpu"):
    """Compare with the loop, from a state of zeros on, and with keys of zeros now and then."""
    cell = make(norms(names), device, K=5)
    assert program_of(cell).why_no_family is None
    gates = gates_of(cell, steps=6)
    gates[:, 1::3, :, :5] = 0
    gates[0, 0] = 0
    assert_is_the_loop(cell, gates, **FUSED)


@needs_compiler
@pytest.mark.parametrize("group", range(3))
def test_norms_of_keys_and_states(group):
    check_norms([*NORMS][group::3])


def test_what_has_no_statement_is_named_as_the_step_wrote_it():
    cures = {
        "aten.max.dim .write amax": lambda y: y - y.max(-1, keepdim=True).values,
        "aten.roll.default": lambda y: y.roll(1, -1),
        "aten.slice.Tensor, which takes one entry": lambda y: y * y[..., :1],
    }
    for message, function in cures.items():
        with pytest.warns(pararnn.CellCostWarning, match=message):
            program_of(make(step_of("matrix", lambda y, *others, f=function: f(y))))
