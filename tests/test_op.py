"""Transforms of a parallel solve work or raise with the cure; none is silently wrong."""

import io
import warnings
from dataclasses import replace

import pytest
import torch
from table import OPS, PAIRS, PLAIN, cell_of, make_case, pairs_of
from user_cells import Cumulative

import pararnn
from pararnn.sequences import Sequences


@pytest.fixture
def case():
    return make_case(pararnn.LSTMCell, torch.float64, 20, "initial")


@pytest.fixture(params=OPS, ids="-".join)
def pair(request):
    return request.param


def _loss(case, gates, pair):
    solver, backend = pair
    (h, c), (h_n, _) = pararnn.solve(case.cell, gates, case.initial, solver=solver, backend=backend)
    return (h * c).sum() + h_n.square().sum()


def _seconds(case, gates, pair):
    (grad,) = torch.autograd.grad(_loss(case, gates, pair), gates, create_graph=True)
    return torch.autograd.grad(grad.sin().sum(), gates)[0]


def test_second_derivatives(case, pair):
    gates = case.gates.requires_grad_()
    torch.testing.assert_close(_seconds(case, gates, pair), _seconds(case, gates, PLAIN))


def test_forward_mode(case, pair):
    tangent = torch.randn_like(case.gates)
    loss, tangents = torch.func.jvp(lambda g: _loss(case, g, pair), (case.gates,), (tangent,))
    gates = case.gates.clone().requires_grad_()
    truth = _loss(case, gates, pair)
    (grad,) = torch.autograd.grad(truth, gates)
    assert torch.allclose(loss, truth, rtol=1e-12)
    assert torch.allclose(tangents, (grad * tangent).sum(), rtol=1e-10)


@pytest.mark.parametrize("heads", [1, 2])
def test_vmap(case, pair, heads):
    many = torch.randn(3, *case.gates.shape, dtype=torch.float64)
    many = many.unflatten(-1, (heads, -1)) if heads > 1 else many
    outputs = torch.func.vmap(lambda g: _loss(case, g, pair))(many)
    single = torch.stack([_loss(case, g, pair) for g in many])
    assert torch.allclose(outputs, single, rtol=1e-11)
    grad = torch.func.grad(lambda g: _loss(case, g, pair))
    grads = torch.func.vmap(grad)(many)
    torch.testing.assert_close(grads, torch.stack([*map(grad, many)]))


@pytest.mark.parametrize("create_graph", [False, True])
def test_several_gradients_at_once(case, pair, create_graph):
    """By torch.autograd.grad, as jacobian(vectorize=True) does, and by vmap around it."""
    gates, pair_options = case.gates.requires_grad_(), {"solver": pair[0], "backend": pair[1]}
    (h, _), _ = pararnn.solve(case.cell, gates, case.initial, **pair_options)
    many = torch.randn(3, *h.shape, dtype=h.dtype)
    options = {"create_graph": create_graph, "retain_graph": True}
    single = [torch.autograd.grad(h, gates, one, **options)[0] for one in many]
    (batch,) = torch.autograd.grad(h, gates, many, is_grads_batched=True, **options)
    (mapped,) = torch.func.vmap(lambda one: torch.autograd.grad(h, gates, one, **options))(many)
    for grads in (batch, mapped):
        torch.testing.assert_close(grads, torch.stack(single))
        if create_graph:
            seconds = [torch.autograd.grad(x.square().sum(), gates, retain_graph=True)[0]
                       for x in (grads, torch.stack(single))]  # fmt: skip
            torch.testing.assert_close(*seconds)


@pytest.mark.parametrize(
    ("name", "pair"),
    [
        (name, pair)
        for name in ("lstm", "slstm", "lrc", "Coupled", "ResetAfter", "Dense")
        for pair in pairs_of(name, OPS)
    ],
)
@pytest.mark.one_in(5)
def test_vmap_over_weights(name, pair):
    """Stacked layers are separate ones, with their gradients; fields and states too."""
    cell_class = cell_of(name)
    options = {"num_heads": 2, "solver": pair[0], "backend": pair[1], "dtype": torch.float64}
    layers = [pararnn.RecurrentLayer(cell_class, 4, 6, **options) for _ in range(3)]
    stack, _ = torch.func.stack_module_state(layers)
    x = torch.randn(3, 2, 15, 4, dtype=torch.float64)
    start = tuple(torch.randn(2, 6, dtype=torch.float64) for _ in cell_class.states)
    start = start if len(start) > 1 else start[0]
    fields = {field: torch.rand(2, 15, dtype=torch.float64) for field in cell_class.fields}

    def loss(layer, weights, rows):
        call = torch.func.functional_call
        output, final = call(layer, weights, (rows, start), {"fields": fields})
        return (output * output.cos()).sum() + torch.stack(tuple(final)).square().sum()

    losses = torch.func.vmap(lambda weights, rows: loss(layers[0], weights, rows))(stack, x)
    losses.sum().backward()
    for index, layer in enumerate(layers):
        single = loss(layer, dict(layer.named_parameters()), x[index])
        single.backward()
        assert torch.allclose(losses[index], single, rtol=1e-12)
        for key, weight in layer.named_parameters():
            assert torch.allclose(stack[key].grad[index], weight.grad, rtol=1e-9), key


@pytest.mark.parametrize("cell_class", [Cumulative, pararnn.GRUCell])
def test_vmap_runs_other_copies_one_by_one(cell_class):
    """Copies of weights where channels couple by more than products, and their resets."""
    options = {"solver": "newton", "backend": "torch", "dtype": torch.float64}
    resets = torch.rand(2, 1, 6) < 0.4
    layers = [pararnn.RecurrentLayer(cell_class, 4, 6, **options) for _ in range(2)]
    stack, _ = torch.func.stack_module_state(layers)
    x = torch.randn(1, 6, 4, dtype=torch.float64)

    def loss(weights, reset):
        given = (x,), {"reset": reset}
        return torch.func.functional_call(layers[0], weights, *given)[0].sin().sum()

    grads = torch.func.vmap(torch.func.grad(loss))(stack, resets)
    for index, layer in enumerate(layers):
        single = torch.func.grad(loss)(dict(layer.named_parameters()), resets[index])
        for name, grad in single.items():
            torch.testing.assert_close(grads[name][index], grad)


@pytest.mark.parametrize("maps_starts", [False, True])
def test_vmap_of_shared_weights_runs_copies_as_rows(case, pair, maps_starts):
    """Of gates, initial states, resets and packed rows, and the gradients of what is mapped."""
    cell, steps = case.cell, case.gates.shape[1]
    gates = torch.randn(3, 1, *case.gates.shape[1:], dtype=torch.float64, requires_grad=True)
    initial = tuple(torch.randn(3, 2, 4, dtype=torch.float64) for _ in cell.states)
    resets = torch.rand(3, 1, steps) < 0.3
    cut = torch.tensor([0, steps // 2, steps])

    def run(g, h, r):
        r = r if maps_starts else resets[0]
        given = {"reset": r, "cu_seqlens": cut, "solver": pair[0], "backend": pair[1]}
        states, final = pararnn.solve(cell, g, h, **given)
        return torch.cat([x.flatten() for x in (*states, *final)])

    many = torch.func.vmap(run)(gates, initial, resets)
    single = [run(g, tuple(x[i] for x in initial), resets[i]) for i, g in enumerate(gates)]
    torch.testing.assert_close(many, torch.stack(single), rtol=1e-10, atol=1e-12)
    grads = [torch.autograd.grad(x.sin().sum(), gates)[0] for x in (many, torch.stack(single))]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)


def test_func_grad(case, pair):
    gates = case.gates.clone().requires_grad_()
    (grad,) = torch.autograd.grad(_loss(case, gates, pair), gates)
    functional = torch.func.grad(lambda g: _loss(case, g, pair))(case.gates)
    assert torch.equal(functional, grad)


def _penalised():
    layer, x = pararnn.ParaGRU(3, 4, dtype=torch.float64), torch.randn(2, 6, 3, dtype=torch.float64)
    layer(x)

    def loss(x):
        return layer(x)[0].sin().sum()

    def second(x):
        return torch.func.grad(lambda y: torch.func.grad(loss)(y).square().sum())(x)

    return layer, loss, second, x


def test_compiled_regions_refuse_what_they_would_get_wrong():
    """PyTorch takes the gradient inside for a constant: the second derivative would be 0."""
    _, _, second, x = _penalised()
    with pytest.raises(Exception, match=r"grad of grad of a solve inside a region"):
        torch.compile(second, fullgraph=True, backend="aot_eager")(x)


def _by_weights(layer, weights, x):
    """The gradient of a loss by the weights and the inputs."""

    def loss(weights, x):
        return torch.func.functional_call(layer, weights, (x,))[0].sin().sum()

    return torch.func.grad(loss, (0, 1))(weights, x)


def test_a_region_holds_a_gradient_by_weights():
    layer, x = pararnn.ParaGRU(3, 4, dtype=torch.float64), torch.randn(2, 6, 3, dtype=torch.float64)
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}
    program = torch.compile(_by_weights, fullgraph=True, backend="aot_eager")
    if torch.__version__ < "2.10":
        with pytest.raises(Exception, match=r"needs PyTorch 2\.10 or later"):
            program(layer, weights, x)
        return
    torch.testing.assert_close(program(layer, weights, x), _by_weights(layer, weights, x))


@pytest.mark.thorough
def test_more_that_compiled_regions_refuse():
    """Gradients of samples, a direction, weights whose second derivatives would be lost, and, by
    PyTorch, second derivatives of a region."""
    _, loss, _, x = _penalised()
    samples = torch.func.vmap(torch.func.grad(lambda row: loss(row[None])))
    refused = {
        r"grad of vmap|vmap of grad": samples,
        r"jvp of a solve": lambda x: torch.func.jvp(loss, (x,), (x,))[1],
        r"of weights that require gradients": lambda x: torch.func.grad(loss)(x).square().sum(),
    }
    for message, function in refused.items():
        with pytest.raises(Exception, match=message):
            torch.compile(function, fullgraph=True, backend="aot_eager")(x)
    for fullgraph in (True, False):
        program = torch.compile(loss, fullgraph=fullgraph, backend="aot_eager")
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(program(leaf), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            first.norm().backward()


@pytest.mark.thorough
def test_regions_that_end_at_transforms():
    """Without fullgraph=True, the call runs in eager mode."""
    layer, loss, second, x = _penalised()

    def samples(x):
        return torch.func.vmap(torch.func.grad(lambda row: loss(row[None])))(x)

    def penalty(x):
        return torch.func.grad(loss)(x).square().sum()

    for function in (second, samples):
        program = torch.compile(function, backend="aot_eager")
        torch.testing.assert_close(program(x), function(x))
    seconds = [
        torch.autograd.grad(function(x), [*layer.parameters()])
        for function in (torch.compile(penalty, backend="aot_eager"), penalty)
    ]
    torch.testing.assert_close(*seconds)
    _, slope = torch.func.jvp(torch.compile(loss, backend="aot_eager"), (x,), (x.cos(),))
    torch.testing.assert_close(slope, (torch.func.grad(loss)(x) * x.cos()).sum())


@pytest.mark.parametrize(
    ("name", "solver"), [("lstm", "newton"), ("lstm", "sequential"), ("dense-gru", "newton")]
)
@pytest.mark.one_in(3)
def test_compile_fullgraph(name, solver):
    case = make_case(pararnn.CELLS[name], torch.float64, 30, "resets")
    pararnn.program_of(case.cell)

    def loss(gates, reset):
        states, final = pararnn.solve(case.cell, gates, case.initial, reset=reset, solver=solver)
        states = states if isinstance(states, torch.Tensor) else states[0]
        final = final if isinstance(final, torch.Tensor) else final[1]
        return (states * 3).sin().sum() + final.sum()

    program = torch.compile(loss, fullgraph=True, backend="aot_eager")
    results = []
    for function in (loss, program):
        gates = case.gates.clone().requires_grad_()
        value = function(gates, case.options["reset"])
        results.append((value, *torch.autograd.grad(value, [gates, *case.cell.parameters()])))
    for eager, graph in zip(*results, strict=True):
        assert torch.allclose(eager, graph, atol=1e-12)


@pytest.mark.parametrize("pair", [("auto", "auto"), *PAIRS], ids="-".join)
@pytest.mark.one_in(7)
def test_compile_a_whole_layer(pair):
    options = {"solver": pair[0], "backend": pair[1], "dtype": torch.float64}
    layer = pararnn.ParaGRU(4, 6, num_layers=2, **options)
    # The plain loop is compiled step by step.
    x = torch.randn(2, 3 if pair == PLAIN else 20, 4, dtype=torch.float64)
    program = torch.compile(layer, fullgraph=True, backend="aot_eager")
    output, h_n = program(x)
    reference, last = layer(x)
    assert torch.allclose(output, reference, atol=1e-12)
    assert torch.allclose(h_n, last, atol=1e-12)


def test_first_use_inside_a_compiled_region_says_what_to_do():
    class Unseen(pararnn.ElmanCell):
        pass

    cell = Unseen(4)

    def run(gates):
        return pararnn.solve(cell, gates, solver="newton")[0]

    with pytest.raises(Exception, match="program_of"):
        torch.compile(run, fullgraph=True, backend="eager")(torch.randn(1, 9, 1, 4))


def test_ops_pass_pytorchs_own_checks(case, pair):
    program = pararnn.program_of(case.cell)
    params = [p.detach() for p in case.cell.lifted_params(torch.float64)]
    sequences = len(case.initial[0])
    inputs = (program.key, *pair, case.gates, None, [], params, list(case.initial), sequences)
    others = (None, None, False, None, None)
    torch.library.opcheck(
        torch.ops.pararnn.forward.default,
        (*inputs, *others, "warn"),
        test_utils=("test_schema", "test_faketensor"),
    )
    states, final, _ = torch.ops.pararnn.forward(*inputs, *others, "warn")
    grads, wanted = [torch.randn_like(s) for s in states], ["gates", "params"]
    torch.library.opcheck(
        torch.ops.pararnn.backward.default,
        (states, [grads[0], None], [None, torch.randn_like(final[1])], wanted, *inputs, *others),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_autocast_leaves_the_solve_alone():
    case = make_case(pararnn.DenseGRUCell, torch.float32, 20)
    for solver in ("newton", "sequential"):
        plain, _ = pararnn.solve(case.cell, case.gates, solver=solver)
        with torch.autocast("cpu", torch.bfloat16):
            inside, _ = pararnn.solve(case.cell, case.gates, solver=solver)
        assert torch.equal(plain, inside)


def test_inference_modes(case, pair):
    options = {"solver": pair[0], "backend": pair[1]}
    reference, _ = pararnn.solve(case.cell, case.gates, **options)
    with torch.no_grad():
        assert torch.equal(pararnn.solve(case.cell, case.gates, **options)[0][0], reference[0])
    with torch.inference_mode():
        assert torch.equal(pararnn.solve(case.cell, case.gates, **options)[0][0], reference[0])


def _trace(layer, *inputs, check_trace=False):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(layer, inputs, check_trace=check_trace)


@pytest.mark.parametrize("argument", ["x", "states"])
def test_a_trace_holds_for_its_batch(pair, argument):
    """It keeps the number of rows, by which kernels would read and write beyond their memory."""
    layer = pararnn.ParaLSTM(4, 6, solver=pair[0], backend=pair[1])

    def inputs(batch, steps):
        states = tuple(torch.randn(1, batch, 6) for _ in range(2))
        return torch.randn(batch, steps, 4), *((states,) if argument == "states" else ())

    trace = _trace(layer, *inputs(2, 9))
    x = inputs(2, 9)
    assert torch.equal(trace(*x)[0], layer(*x)[0])
    for batch in (1, 3, 40):
        with pytest.raises(RuntimeError, match=r"torch.jit.trace keeps the batch"):
            trace(*inputs(batch, 9))


TRACED = {
    "LSTM": (pararnn.LSTM, {}),
    "GRU by heads": (pararnn.GRU, {"num_heads": 2, "num_layers": 2, "bidirectional": True}),
    "RNN, gates recomputed": (pararnn.RNN, {"recompute_gates": True}),
    "ParaGRU by heads": (pararnn.ParaGRU, {"num_heads": 2}),
    "ParaLSTM, gates recomputed": (pararnn.ParaLSTM, {"recompute_gates": True}),
    "sLSTM": (pararnn.SLSTM, {"num_heads": 2}),
}


@pytest.mark.parametrize("name", TRACED)
def test_a_trace_is_the_same_with_and_without_gradients(name):
    """torch.jit.trace makes it with them, and checks it without; it trains, too."""
    cls, options = TRACED[name]
    torch.manual_seed(0)
    layer, x = cls(4, 6, **options).eval(), torch.randn(9, 2, 4)
    trace = _trace(layer, x, check_trace=True)
    output, reference = trace(x)[0], layer(x)[0]
    assert torch.equal(output, reference)
    names = dict(layer.named_parameters())
    weights = dict(trace.named_parameters())
    grads = torch.autograd.grad(output.square().sum(), [weights[name] for name in names])
    expected = torch.autograd.grad(reference.square().sum(), [*names.values()])
    for grad, own in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, own)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError, match="Could not export Python function call '_Solve'"):
            torch.jit.save(trace, io.BytesIO())


class _Lengths(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, lengths):
        return self.layer(x, lengths=lengths)


def test_a_trace_with_lengths_holds_for_its_batch(pair):
    module = _Lengths(pararnn.ParaGRU(4, 6, solver=pair[0], backend=pair[1]))
    trace = _trace(module, torch.randn(2, 9, 4), torch.tensor([9, 4]))
    x, lengths = torch.randn(2, 9, 4), torch.tensor([2, 9])
    assert torch.equal(trace(x, lengths)[0], module(x, lengths)[0])
    for batch in (3, 40):
        with pytest.raises(RuntimeError, match="numbers of sequences must be below 2"):
            trace(torch.randn(batch, 9, 4), torch.full((batch,), 3))


def _record(**changes):
    layer = pararnn.RecurrentLayer(pararnn.GRUCell, 4, 6)
    args = layer.arguments(
        torch.randn(2, 9, 4),
        torch.zeros(2, 6),
        reset=torch.zeros(2, 9, dtype=torch.bool),
        sequences=Sequences(torch.zeros(2, 9, dtype=torch.int32) + torch.tensor([[0], [1]]), 2),
    )
    return pararnn.program_of(layer.cell).key, replace(args, **changes)


WRONG = {
    "a batch that is another": ({"seq": None, "sequences": 3, "initial": ()}, "batch of 3 got one"),
    "a number beyond": ({"sequences": 1, "initial": ()}, "must be below 1"),
    "numbers of int64": ({"seq": torch.zeros(2, 9, dtype=torch.int64)}, "seq must be torch.int32"),
    "fewer numbers": ({"seq": torch.zeros(2, 3, dtype=torch.int32)}, r"seq must be \(2, 9\)"),
    "fewer resets": ({"reset": torch.zeros(1, 9, dtype=torch.bool)}, r"reset must be \(2, 9\)"),
    "resets of uint8": (
        {"reset": torch.zeros(2, 9, dtype=torch.uint8)},
        "reset must be torch.bool",
    ),
    "fewer states": ({"initial": (torch.zeros(1, 6),)}, r"state 'h' must be \(2, 6\)"),
    "a shorter bias": ({"bias": torch.zeros(3, 4)}, r"bias of GRUCell must be \(3, 6\)"),
    "a bias of ints": ({"bias": torch.zeros(3, 6, dtype=torch.int32)}, "must be a floating-point"),
    "shorter weights": ({"params": (torch.zeros(2),) * 3}, r"a_z of GRUCell must be \(6,\)"),
    "fewer gates": ({"gates": torch.zeros(2, 9, 2, 6)}, r"must be \(B, T, 3, ...\)"),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_the_op_takes_nothing_that_kernels_would_trust_wrongly(pair, case):
    changes, message = WRONG[case]
    key, args = _record(**changes)
    with pytest.raises((TypeError, ValueError), match=message):
        torch.ops.pararnn.forward(key, *pair, *args.values())


@pytest.mark.parametrize("name", ["bias", "cell.a_z", "proj.weight"])
def test_weights_of_another_size_are_refused(name):
    layer = pararnn.RecurrentLayer(pararnn.GRUCell, 4, 6)
    owner, _, own = name.rpartition(".")
    shorter = layer.get_parameter(name).detach()[..., :2].clone()
    setattr(layer.get_submodule(owner), own, torch.nn.Parameter(shorter))
    with pytest.raises((ValueError, RuntimeError), match=r"must be \(|shapes"):
        layer(torch.randn(2, 9, 4))


def test_a_bias_elsewhere_is_refused():
    layer = pararnn.RecurrentLayer(pararnn.GRUCell, 4, 6)
    layer.bias = torch.nn.Parameter(layer.bias.to("meta"))
    with pytest.raises(ValueError, match="bias of GRUCell is on meta, gates on cpu"):
        layer(torch.randn(2, 9, 4))


@pytest.mark.parametrize("compress", [torch.Tensor.bfloat16, lambda tensor: tensor[:1]])
def test_saved_tensors_that_hooks_have_changed_are_refused(pair, compress):
    """By a hook that compresses what is kept and does not restore it."""
    layer = pararnn.RecurrentLayer(pararnn.LSTMCell, 4, 6, solver=pair[0], backend=pair[1])

    def pack(tensor):
        return compress(tensor) if tensor.shape == (2, 9, 6) else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output, _ = layer(torch.randn(2, 9, 4))
    with pytest.raises(
        ValueError, match=r"saved for the backward pass was \(2, 9, 6\) torch.float32"
    ):
        output.sum().backward()
