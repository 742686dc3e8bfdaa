"""Derivatives beyond the gradient, by kernels and by Newton's method, against plain PyTorch.

Every cell of the library; resets, packed rows, both directions, initial states, half precision and
small cotangents; gradients of samples; modules of torch.nn's names.
"""

from functools import partial
from unittest import mock

import pytest
import torch
from emulated import gpu, install
from hypothesis import given, settings
from random_cells import random_cell, recipes
from table import FUSED, OPS, PLAIN, needs_compiler
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import pararnn
from pararnn import op, zoo
from pararnn.base.private import TorchDispatchMode
from pararnn.engines.tangents import tangent_call
from pararnn.program.along import along, known_of
from pararnn.program.program import program_by_key
from pararnn.program.tangent import tangent_of
from pararnn.solve import prepare

CELLS = {**zoo.CELLS, **zoo.MATRIX_CELLS, **zoo.MEMORY_CELLS}
QUICK = ["gru", "slstm", "head-lstm", "gated-delta"]
"""An elementwise cell, one of many states, products in heads, a matrix state."""


class Call:
    """A solve as a function of tensors: gates, initial states, fields, memories, parameters."""

    def __init__(self, cell, steps=5, batch=2, dtype=torch.float64, **options):
        torch.manual_seed(0)
        self.cell, self.options, heads = cell, options, cell.head_sizes
        size = (heads.heads, heads.width) if heads else (cell.num_gates, cell.hidden_size)
        rows = 1 if "cu_seqlens" in options else batch
        draw = {"dtype": torch.float64}
        tensors = [torch.randn(rows, steps, *size, **draw)]
        sizes, memories = cell.tensor_sizes, ()
        if heads:
            axes = {a for names in heads.memory for a in names if a not in heads.lengths}
            sizes = heads.of_call(dict.fromkeys(axes, 3))
            memories = sizes.memory_sizes
        tensors += [torch.randn(batch, *size, **draw) / 2 for size in sizes.state_sizes]
        tensors += [torch.rand(rows, steps, cell.hidden_size, **draw) + 0.1 for _ in cell.fields]
        drawn = [torch.randn(batch, heads.heads, *size, **draw) for size in memories]
        # A softmax of nothing is NaN, and so are its derivatives.
        tensors += [x.abs() if n == "mask" else x for n, x in zip(cell.memory, drawn, strict=True)]
        tensors += [weight.detach() for weight in cell.parameters()]
        self.tensors = tuple(x.to(dtype) for x in tensors)

    def __call__(self, pair):
        """Return the function that solves by a pair: states, or the output, and final states."""
        cell, counts = self.cell, [len(self.cell.states), len(self.cell.fields)]
        names = [name for name, _ in cell.named_parameters()]

        class Module(torch.nn.Module):
            def __init__(module):
                super().__init__()
                module.cell = cell

            def forward(module, gates, states, fields, memory):
                states = states if len(states) > 1 else states[0]
                solver, backend = pair
                options = {"fields": fields, "memory": memory or None, **self.options}
                return pararnn.solve(
                    module.cell, gates, states, solver=solver, backend=backend, **options
                )

        module = Module()

        def function(gates, *others):
            others = list(others)
            states, fields, memory = (
                [others.pop(0) for _ in range(count)] for count in (*counts, len(cell.memory))
            )
            weights = {f"cell.{name}": x for name, x in zip(names, others, strict=True)}
            named = [
                dict(zip(*pair, strict=True))
                for pair in ((cell.fields, fields), (cell.memory, memory))
            ]
            out = functional_call(module, weights, (gates, states, *named))
            return tuple(x for many in out for x in ((many,) if torch.is_tensor(many) else many))

        return function


def _cell(name, heads=2, channels=8, dtype=torch.float64):
    return CELLS[name](channels, num_heads=1 if name == "dense-gru" else heads, dtype=dtype)


def _derivatives(function, tensors, forward_mode=True):
    """Return first and second derivatives, and those along a direction."""
    generator = torch.Generator().manual_seed(1)

    def like(tensors):
        return [torch.randn(x.shape, generator=generator).to(x) for x in tensors]

    leaves = [x.detach().requires_grad_() for x in tensors]
    results = function(*leaves)
    terms = [(x * w + x * x).sum() for x, w in zip(results, like(results), strict=True)]
    value = torch.stack(terms).sum()
    options = {"allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad(value, leaves, create_graph=True, **options)
    along = like(leaves)
    slope = sum((g * u).sum() for g, u in zip(grads, along, strict=True))
    seconds = torch.autograd.grad(slope, leaves, **options)
    tangents = jvp(function, tuple(tensors), tuple(along))[1] if forward_mode else ()
    return [*grads, *seconds, *tangents]


def _assert_close(ours, truth, tolerance=1e-10):
    for x, reference in zip([x.detach() for x in ours], [x.detach() for x in truth], strict=True):
        if reference.numel():
            assert float((x - reference).abs().max()) <= tolerance * float(reference.abs().max())


def derivative_calls(call, pair):
    """Return functions of a call's tensors, by name, that take derivatives as users do."""
    function, inputs = call(pair), 1 + len(call.cell.states) + len(call.cell.fields)

    def loss(*tensors):
        return torch.stack([x.square().sum() for x in function(*tensors)]).sum()

    def penalty(*tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        value = loss(*leaves)
        (by_gates,) = torch.autograd.grad(value, leaves[:1], create_graph=True)
        return torch.autograd.grad(value + by_gates.norm(), leaves)

    def tangents(*tensors):
        return jvp(function, tensors, tuple(x.cos() for x in tensors))[1]

    def product(*tensors):
        along = tuple(x.cos() for x in tensors)
        slope = grad(lambda *x: jvp(loss, x, along)[1], tuple(range(len(tensors))))
        return slope(*tensors)

    def samples(*tensors):
        every, dims = tuple(range(len(tensors))), [None] * (len(tensors) - inputs)
        copies = [torch.stack([x, x.cos()]) for x in tensors[:inputs]]
        return vmap(grad(loss, every), (*[0] * inputs, *dims))(*copies, *tensors[inputs:])

    return {"penalty": penalty, "jvp": tangents, "product": product, "samples": samples}


class _OfDevice(TorchDispatchMode):
    """Mode that collects ops which wait for a device, or copy from the host to it."""

    NAMES = ("_local_scalar_dense", "is_nonzero", "nonzero", "lift_fresh", "lift_fresh_copy",
             "masked_select", "equal", "_pin_memory", "item", "unique", "bincount")  # fmt: skip

    def __init__(self):
        super().__init__()
        self.found, self.count = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if func.namespace == "pararnn":  # the mode sees into it
            with self:
                return {"forward": op._forward_op, "backward": op._backward_op}[name](*args)
        self.count += 1
        self.found |= {name} & {*self.NAMES}
        if name in ("index", "index_put", "index_put_"):  # by masks they count
            self.found |= {name for x in args[1] if x is not None and x.dtype == torch.bool}
        return func(*args, **kwargs)


THOROUGH = [pytest.param(name, marks=pytest.mark.thorough) for name in CELLS if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *THOROUGH])
@pytest.mark.parametrize("steps", [0, 5])
@needs_compiler
def test_every_cell(name, steps):
    call = Call(_cell(name), steps, reset=torch.rand(2, steps) < 0.3, reverse=True)
    # PyTorch's loop has no forward mode of a surrogate gradient by an old autograd function.
    options = {"forward_mode": name != "lif"}
    _assert_close(*(_derivatives(call(pair), call.tensors, **options) for pair in (FUSED, PLAIN)))


@needs_compiler
@pytest.mark.parametrize("name", QUICK)
@pytest.mark.one_in(2)
def test_no_call_waits_for_a_device(name):
    """Nor copies from the host, so that CUDA graphs may record it."""
    call = Call(_cell(name), reset=torch.tensor([[False, True, False, False, True]] * 2))
    for what, run in derivative_calls(call, FUSED).items():
        run(*call.tensors)  # compiles
        with _OfDevice() as mode:
            run(*call.tensors)
        assert mode.count > 10, what
        assert not mode.found, what


PASSES = {
    "gru": {"penalty": (2, 3), "jvp": (1, 0), "product": (1, 1), "samples": (1, 1)},
    "head-lstm": {"penalty": (2, 3), "jvp": (1, 0), "product": (2, 2), "samples": (1, 1)},
}
"""Forward and backward passes by kernels: of states, of tangents, or of both in one cell."""


@needs_compiler
@pytest.mark.parametrize("name", PASSES)
def test_passes_of_derivatives(name):
    """No pass runs twice."""
    call = Call(_cell(name))
    counts = {}
    for what, run in derivative_calls(call, FUSED).items():
        with (
            mock.patch.object(op, "_forward", wraps=op._forward) as forward,
            mock.patch.object(op, "_backward", wraps=op._backward) as backward,
        ):
            run(*call.tensors)
        counts[what] = forward.call_count, backward.call_count
    assert counts == PASSES[name]


@needs_compiler
def test_numbers_for_fields_are_not_copied_from_the_host():
    cell = zoo.CfCCell(4)
    gates, fields = torch.randn(2, 5, cell.num_gates, 4), dict.fromkeys(cell.fields, 0.5)
    options = {"fields": fields, "solver": FUSED[0], "backend": FUSED[1]}
    pararnn.solve(cell, gates, **options)  # compiles
    with _OfDevice() as mode:
        pararnn.solve(cell, gates, **options)
    assert not mode.found


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.new_tensor(1.0),
        lambda x: torch.as_tensor(1.0),
        lambda x: x.sum().item(),
        lambda x: bool(x.sum()),
        lambda x: x[x > 0],
    ],
)
def test_ops_that_wait_are_found(call):
    with _OfDevice() as mode:
        call(torch.ones(2))
    assert mode.found


def test_ranks_that_share_sequences_say_what_they_lack():
    cell = _cell("gru")
    args = prepare(cell, torch.randn(2, 5, 3, 8, dtype=torch.float64)).with_options(context="ring")
    with pytest.raises(NotImplementedError, match="of sequences that ranks share"):
        tangent_call(pararnn.program_of(cell), FUSED, args, args)


@pytest.mark.parametrize("pair", OPS, ids="-".join)
@pytest.mark.parametrize("name", ["gru", "lstm"])
@pytest.mark.one_in(3)
def test_packed_rows(pair, name):
    """With a sequence that is empty, and padding."""
    call = Call(_cell(name), steps=9, batch=3, cu_seqlens=torch.tensor([0, 4, 4, 7]))
    _assert_close(*(_derivatives(call(each), call.tensors) for each in (pair, PLAIN)), 1e-9)


@needs_compiler
def test_packed_rows_of_a_cell_with_matrices():
    """In reverse, with resets, a sequence that is empty, and padding."""
    call = Call(_cell("head-gru"), 9, 3, cu_seqlens=torch.tensor([0, 4, 4, 7]), reverse=True,
                reset=torch.arange(9)[None] % 3 == 2)  # fmt: skip
    _assert_close(*(_derivatives(call(pair), call.tensors) for pair in (FUSED, PLAIN)))


def test_scale_changes_nothing_but_scale():
    """Losses of 65,536 tokens have small gradients, of which second derivatives are exact too."""
    call = Call(_cell("lstm", dtype=torch.float32), dtype=torch.float32)
    leaves = [x.clone().requires_grad_() for x in call.tensors]

    def seconds(scale):
        loss = scale * sum(x.square().sum() for x in call(FUSED)(*leaves))
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum(g.sum() for g in grads), leaves)

    for small, usual in zip(seconds(2.0**-40), seconds(1.0), strict=True):
        assert torch.equal(small * 2.0**40, usual)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype):
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    call = Call(_cell("head-lstm"))
    tensors = [x.to(dtype) if i in (0,) else x.float() for i, x in enumerate(call.tensors)]
    truth = _derivatives(call(PLAIN), [x.double() for x in tensors])
    ours = _derivatives(call(FUSED), tensors)
    assert {x.dtype for x in ours} <= {dtype, torch.float32}
    _assert_close([x.double() for x in ours], truth, tolerance)


def _transforms(call, pair, device="cpu"):
    """Return derivatives of two copies: of samples, of ensembles, products with Hessians; and
    Hessians."""
    torch.manual_seed(1)
    many = tuple(x + torch.randn(2, *x.shape, dtype=x.dtype) / 4 for x in call.tensors)
    inputs = 1 + len(call.cell.states)
    many, tensors = ([x.to(device) for x in copies] for copies in (many, call.tensors))
    shared = tuple(0 if i < inputs else None for i in range(len(many)))
    every = tuple(range(len(many)))
    function = call(pair)

    def loss(*tensors):
        return sum(x.sin().sum() for x in function(*tensors))

    def by_state(state):
        return loss(tensors[0], state, *tensors[2:])

    def product(*tensors):
        return jvp(grad(loss, every), tensors, tuple(x.cos() for x in tensors))[1]

    return [
        *vmap(grad(loss, every), shared)(*many[:inputs], *tensors[inputs:]),
        *vmap(grad(loss, every))(*many),
        *vmap(product)(*many),
        hessian(by_state)(tensors[1]),
        jacfwd(jacfwd(by_state))(tensors[1]),
        jacrev(jacrev(by_state))(tensors[1]),
    ]


@needs_compiler
@pytest.mark.parametrize("name", QUICK)
@pytest.mark.one_in(4)
def test_transforms_of_transforms(name):
    call = Call(_cell(name, channels=4))
    _assert_close(*(_transforms(call, pair) for pair in (FUSED, PLAIN)))


@needs_compiler
@pytest.mark.parametrize(
    ("name", "pair"), [("gru", FUSED), ("gru", ("newton", "torch")), ("head-elman", FUSED)]
)
@pytest.mark.one_in(2)
def test_checks_of_pytorch(name, pair):
    """gradcheck with forward mode, gradgradcheck, and torch.autograd.functional."""
    call = Call(_cell(name, channels=4), steps=3)
    leaves = [x.clone().requires_grad_() for x in call.tensors]
    function, options = call(pair), {"fast_mode": True}
    assert torch.autograd.gradcheck(function, leaves, check_forward_ad=True,
                                    check_batched_grad=True, **options)  # fmt: skip
    assert torch.autograd.gradgradcheck(function, leaves, **options)

    def loss_by(pair):
        function = call(pair)
        return lambda gates: function(gates, *call.tensors[1:])[0].square().sum()

    functional = torch.autograd.functional
    reference = functional.hessian(loss_by(PLAIN), call.tensors[0], vectorize=True)
    for vectorize in (False, True):
        result = functional.hessian(loss_by(pair), call.tensors[0], vectorize=vectorize)
        _assert_close([result], [reference])


def _product_in_a_level(function, tensors):
    """Return the gradients of a loss in one level of forward mode, and their tangents."""
    with forward_ad.dual_level():
        leaves = [x.detach().requires_grad_() for x in tensors]
        duals = [forward_ad.make_dual(x, x.detach().cos()) for x in leaves]
        grads = torch.autograd.grad(sum(x.sin().sum() for x in function(*duals)), leaves)
        return [x for grad in grads for x in forward_ad.unpack_dual(grad)]


@needs_compiler
@pytest.mark.parametrize(
    ("name", "pair"),
    [
        *((name, FUSED) for name in ("gru", "head-lstm", "gated-delta")),
        ("gru", ("newton", "torch")),
    ],
)
def test_gradients_in_a_level_of_forward_mode(name, pair):
    """They have tangents: products with the Hessian by torch.autograd.forward_ad, and Hessians of
    torch.autograd.functional by batches of tangents."""
    call = Call(_cell(name, channels=4), steps=3)
    functional = torch.autograd.functional
    by_pair = []
    for each in (pair, PLAIN):
        function = call(each)

        def output(state, function=function):
            return function(call.tensors[0], state, *call.tensors[2:])[0]

        def loss(state, output=output):
            return output(state).sin().sum()

        state, options = call.tensors[1], {"vectorize": True}
        hessian = functional.hessian(loss, state, outer_jacobian_strategy="forward-mode", **options)
        jacobian = functional.jacobian(output, state, strategy="forward-mode", **options)
        by_pair.append([*_product_in_a_level(function, call.tensors), hessian, jacobian])
    _assert_close(*by_pair)


def _in_a_level(function, tensors, along):
    with forward_ad.dual_level():
        result = function(*map(forward_ad.make_dual, tensors, along))
        return forward_ad.unpack_dual(result)[1]


@needs_compiler
@pytest.mark.parametrize("takes", [jvp, _in_a_level], ids=["jvp", "a level"])
@pytest.mark.parametrize("name", QUICK)
def test_copies_inside_of_forward_mode(name, takes):
    """Tangents of samples, and of gradients of samples, by inputs and by weights."""
    layer = pararnn.RecurrentLayer(CELLS[name], 4, 4, num_heads=2, dtype=torch.float64)
    weights = {k: p.detach() for k, p in layer.named_parameters()}
    x = torch.randn(3, 2, 5, 4, dtype=torch.float64)

    def function(pair):
        options = dict(zip(("solver", "backend"), pair, strict=True))

        def output(x, *values):
            named = dict(zip(weights, values, strict=True))
            return functional_call(layer, named, (x,), options)[0]

        def gradient(*tensors):
            grads = grad(lambda *x: output(*x).sin().sum(), tuple(range(len(tensors))))(*tensors)
            return torch.cat([x.flatten() for x in grads])

        return output, gradient

    tensors = (x, *weights.values())
    along = tuple(x.cos() for x in tensors)
    dims = (0, *[None] * len(weights))
    for ours, truth in zip(function(FUSED), function(PLAIN), strict=True):
        tangents = [
            jvp(truth, (row, *tensors[1:]), (of_row, *along[1:]))[1]
            for row, of_row in zip(x, along[0], strict=True)
        ]
        result = takes(vmap(ours, dims), tensors, along)
        result = result[1] if takes is jvp else result
        _assert_close([result], [torch.stack(tangents)])


@needs_compiler
@pytest.mark.parametrize("name", QUICK)
def test_pullbacks_outlive_their_transform(name):
    """What vjp returns is called outside of it: also of a gradient, and twice."""
    call = Call(_cell(name, channels=4), steps=3)
    by_pair = []
    for pair in (FUSED, PLAIN):
        function = call(pair)
        slope = grad(lambda *x, f=function: sum(y.sin().sum() for y in f(*x)), (0, 1))
        (results, pull), (_, pull_slope) = (vjp(f, *call.tensors) for f in (function, slope))
        cotangents = tuple(x.cos() for x in results)
        pull(cotangents)
        by_pair.append([*pull(cotangents), *pull_slope(tuple(x.cos() for x in call.tensors[:2]))])
    _assert_close(*by_pair)


@needs_compiler
@pytest.mark.parametrize("name", ["gru", "lstm", "head-lstm", "gated-delta"])
@pytest.mark.thorough
def test_kernels_of_a_gpu(name, monkeypatch):
    """By the emulator, in float32."""
    call = Call(_cell(name), reset=torch.rand(2, 5) < 0.3)
    truth = _derivatives(call(PLAIN), call.tensors)
    install(gpu(cores=4), monkeypatch)
    ours = _derivatives(call(FUSED), [x.float() for x in call.tensors])
    _assert_close([x.double() for x in ours], truth, 1e-4)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "pair"), [("head-lstm", FUSED), ("dense-gru", ("newton", "torch"))]
)
def test_third_derivatives(name, pair):
    call = Call(_cell(name, channels=4), steps=4)
    results = []
    for each in (pair, PLAIN):
        gates = call.tensors[0].clone().requires_grad_()
        value = call(each)(gates, *call.tensors[1:])[0].square().sum()
        for _ in range(3):
            (value,) = torch.autograd.grad(value.sin().sum(), gates, create_graph=True)
        results.append([value.detach()])
    _assert_close(*results)


@needs_compiler
def test_third_derivatives_by_both_modes():
    """The gradient of a product with a Hessian, itself the tangent of a gradient."""
    call = Call(_cell("head-gru", channels=4), steps=4, reverse=True)
    results = []
    for pair in (FUSED, PLAIN):
        function = call(pair)

        def loss(tensors, function=function):
            return sum(x.sin().sum() for x in function(*tensors))

        def curvature(tensors, loss=loss):
            along = tuple(x.cos() for x in tensors)
            return sum((x * x).sum() for x in jvp(grad(loss), (tensors,), (along,))[1])

        results.append(grad(curvature)(call.tensors))
    _assert_close(*results)


MODULES = {
    "LSTM": (pararnn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "GRU, gates recomputed": (pararnn.GRU, {"recompute_gates": True}),
    "ParaGRU": (pararnn.ParaGRU, {}),
    "ParaLSTM, by its output": (pararnn.ParaLSTM, {"num_heads": 2}),
    "gated delta, gates recomputed": (
        partial(pararnn.ParaRNN, zoo.GatedDeltaCell),
        {"recompute_gates": True},
    ),
}


def _module_derivatives(name, backend, device="cpu"):
    """Return a penalty's gradients, tangents of weights, gradients of samples, a product with the
    Hessian in a level of forward mode."""
    torch.manual_seed(0)
    cls, options = MODULES[name]
    layer = cls(4, 4, dtype=torch.float64, **options).to(device)
    x = torch.randn(5, 2, 4, dtype=torch.float64).to(device)
    weights = {key: weight.detach() for key, weight in layer.named_parameters()}
    along = {key: weight.cos() for key, weight in weights.items()}

    def loss(weights, x):
        return functional_call(layer, weights, (x,))[0].sin().sum()

    with pararnn.using(solver="sequential", backend=backend):
        leaf, leaves = x.clone().requires_grad_(), [*layer.parameters()]
        (first,) = torch.autograd.grad(layer(leaf)[0].sin().sum(), leaf, create_graph=True)
        seconds = torch.autograd.grad(first.norm(), [leaf, *leaves])
        tangent = jvp(lambda w: loss(w, x), (weights,), (along,))[1]
        samples = vmap(grad(loss), (None, 0))(weights, torch.stack([x, x.cos()]))

        def by_tensors(x, *tensors):
            return functional_call(layer, dict(zip(weights, tensors, strict=True)), (x,))[:1]

        product = _product_in_a_level(by_tensors, [x, *weights.values()])
    return [*seconds, tangent, *samples.values(), *product]


@needs_compiler
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.one_in(2)
def test_modules(name):
    _assert_close(*(_module_derivatives(name, backend) for backend in ("fused", "torch")))


ALONG = {
    "head-gru": [0],
    "head-lstm": [1],
    "head-elman": [],
    "head-slstm": [1, 2],
    "block-gru": [0],
    "layer-norm-lstm": [1],
    "layer-norm-gru": [0],
    "cornn": [0, 1],
}
"""Cells whose tangents are solved along known states, and the states that steps read apart from
products."""


@pytest.mark.parametrize("name", zoo.CELLS)
@pytest.mark.one_in(3)
def test_cells_whose_products_known_states_give(name):
    known = known_of(pararnn.program_of(_cell(name)))
    assert ([*known.states] if known else None) == ALONG.get(name)


class OtherProducts(zoo.HeadElmanCell):
    """Multiplies what is not a state."""

    def step(self, state, gate, param):
        return torch.tanh(gate.h_in + (2 * state.h) @ param.R_h)


class OtherUses(zoo.HeadElmanCell):
    """Reads a matrix otherwise than as a factor."""

    structure = "dense"

    def step(self, state, gate, param):
        return torch.tanh(gate.h_in + state.h @ param.R_h + param.R_h.sum())


@pytest.mark.parametrize("cls", [OtherProducts, OtherUses])
def test_other_steps_have_states_and_tangents_in_one_cell(cls):
    program = pararnn.program_of(cls(8, num_heads=2, dtype=torch.float64))
    assert known_of(program) is None
    call = Call(program.step.cls(8, num_heads=2, dtype=torch.float64))
    _assert_close(
        *(_derivatives(call(pair), call.tensors) for pair in (("newton", "torch"), PLAIN))
    )


def test_a_program_of_tangents_along_known_states():
    """It has the cell's states, products and matrices, once, and fields for what is known."""
    program = pararnn.program_of(_cell("head-lstm"))
    tangents = along(program, ["R_f", "+bias"])
    assert program_by_key(tangents.key) is tangents
    assert tangents.states == ("d_h", "d_c")
    assert tangents.gates == program.gates
    assert tangents.fields == ("c", "pd_0", "pd_1", "pd_2", "pd_3", "qd_1")
    assert tangents.params == (*program.params, "bd_i", "bd_f", "bd_g", "bd_o")
    passes = [tangents.mixing[torch.float32], program.mixing[torch.float32]]
    ours, cells = ((len(x.forward.products), len(x.backward.products), x.outers) for x in passes)
    assert ours == cells


@needs_compiler
def test_a_penalty_is_five_solves():
    """Gradients of a gradient by the states join those of the loss in one backward pass."""
    layer, x = pararnn.LSTM(4, 8, dtype=torch.float64), torch.randn(5, 2, 4, dtype=torch.float64)
    x.requires_grad_()
    with (
        pararnn.using(solver="sequential", backend="fused"),
        mock.patch.object(op, "_forward", wraps=op._forward) as forward,
        mock.patch.object(op, "_backward", wraps=op._backward) as backward,
    ):
        loss = layer(x)[0].sin().sum()
        (by_input,) = torch.autograd.grad(loss, x, create_graph=True)
        torch.autograd.grad(loss + by_input.norm(), [x, *layer.parameters()])
    assert (forward.call_count, backward.call_count) == (2, 3)


@needs_compiler
@pytest.mark.filterwarnings("ignore::pararnn.CellCostWarning")
@pytest.mark.parametrize(
    "product",
    [
        pytest.param(lambda h, param: h @ param.R, id="products"),
        pytest.param(lambda h, param: (h * h) @ param.R, id="states and tangents"),
    ],
)
def test_tangents_of_steps_that_branch_on_their_channels(product):
    """A step that was traced on the layer's channels has tangents of these, not of a trace's 8."""

    class Branches(pararnn.Cell):
        states, gates, params = ("h",), ("x",), {"R": pararnn.Param("D,D")}

        def step(self, state, gate, param):
            x = product(state.h, param) + gate.x
            return torch.tanh(x) if x.shape[-1] > 7 else torch.sin(x)

    call = Call(Branches(6, dtype=torch.float64))
    results = [_derivatives(call(pair), call.tensors) for pair in (FUSED, PLAIN)]
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)


@needs_compiler
def test_hardsigmoid_has_second_derivatives():
    """PyTorch has no derivative of its gradient, and that of relu6 is the same."""

    def cell(gate_of):
        class Hard(pararnn.Cell):
            states, gates = ("h",), ("z", "n")

            def step(self, state, gate, param):
                z = gate_of(3 * gate.z + state.h)
                return z * state.h + (1 - z) * torch.tanh(gate.n)

        return Hard(8, dtype=torch.float64)

    composed = Call(cell(lambda x: torch.nn.functional.relu6(x + 3) / 6))
    expected = _derivatives(composed(PLAIN), composed.tensors)
    call = Call(cell(torch.nn.functional.hardsigmoid))
    # PyTorch's derivative multiplies by a sixth in float32.
    torch.testing.assert_close(
        _derivatives(call(FUSED), call.tensors), expected, rtol=1e-6, atol=1e-7
    )


def test_tangents_whose_gradients_have_one_size_say_so():
    """PyTorch's derivative of `sgn`, which that of `abs` is, is as long as that of the trace."""

    class Absolute(pararnn.Cell):
        states, gates, structure = ("h",), ("x",), "dense"

        def step(self, state, gate, param):
            return torch.tanh(gate.x - state.h.abs().cumsum(-1))

    gates = torch.randn(2, 5, 1, 4, dtype=torch.float64, requires_grad=True)
    states, _ = pararnn.solve(Absolute(4), gates, solver="newton")
    (slope,) = torch.autograd.grad(states.sum(), gates, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"one size alone.*solver='sequential'"):
        slope.square().sum().backward()


def test_a_tangent_program_by_its_key():
    """As another process makes it, from the key that a graph holds."""
    program = pararnn.program_of(_cell("gru"))
    tangent = tangent_of(program, ["a_z"])
    assert tangent_of(program, ["a_z"]) is tangent
    assert tangent.params == ("a_z", "a_r", "a_c", "d_a_z")
    assert (tangent.gates, tangent.fields) == (program.gates, ())
    assert program_by_key(tangent.key) is tangent
    assert tangent_of(tangent, ["d_a_z"]).states == ("h", "d_h", "dd_h", "dd_d_h")


@pytest.mark.thorough
@given(recipe=recipes())
@settings(max_examples=20, deadline=None)
def test_random_cells(recipe):
    cell = random_cell(*recipe)(4, dtype=torch.float64)
    call = Call(cell)
    _assert_close(
        *(_derivatives(call(pair), call.tensors) for pair in (("newton", "torch"), PLAIN)), 1e-8
    )
