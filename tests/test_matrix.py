"""Matrix cells by PyTorch: those of the zoo against plain loops, and what users do with them."""

import copy
from types import SimpleNamespace

import pytest
import torch
from call_results import as_tuple, with_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix_cells import CONFIG, LOOPS, Call, loop, make_call

import pararnn
import pararnn.zoo as zoo
from pararnn import Param
from pararnn.base.errors import CellError
from pararnn.lm import LanguageModel, LMConfig
from pararnn.lm.sample import sample

NAMES = list(LOOPS)
TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def _close(actual, reference, dtype=torch.float64):
    """Compare tensors over the largest entry of each."""
    for a, e in zip(actual, reference, strict=True):
        assert a.shape == e.shape
        scale = float(e.detach().abs().max()) if e.numel() else 0.0
        torch.testing.assert_close(
            a.double(), e.double(), rtol=0, atol=TOLERANCES[dtype] * max(scale, 1e-30)
        )


def _compare(name, call, dtype=torch.float64, reset=None, reverse=False, **options):
    """Compare a solve's outputs, final states and all gradients with the loop's."""
    output, final = pararnn.solve(
        call.cell, call.gates, call.initial, reset=reset, reverse=reverse, **options
    )
    final = as_tuple(final)
    reference, ends = loop(name, call, reverse, reset)
    assert output.dtype == call.gates.dtype
    _close([output, *final], [reference, *ends], dtype)
    results, references = [output, *final], [reference, *ends]
    torch.manual_seed(1)
    arriving = [torch.randn(r.shape, dtype=torch.float64).to(r.dtype) for r in results]
    grads = torch.autograd.grad(results, call.leaves(), arriving)
    # A sum that cancels shows the rounding of what arrives.
    arriving = [a.double() for a in arriving]
    wanted = torch.autograd.grad(references, call.leaves(), arriving, allow_unused=True)
    assert [g.dtype for g in grads] == [leaf.dtype for leaf in call.leaves()]
    wanted = [torch.zeros_like(g) if w is None else w for g, w in zip(grads, wanted, strict=True)]
    _close(grads, wanted, dtype)


def check_kernels(cls, values, lengths, dtype=torch.float64, rows=3, device="cpu"):
    """Compare the kernels of a cell of a user's with the loop in PyTorch."""
    torch.manual_seed(0)
    cell = cls(2 * values, num_heads=2, dtype=dtype, device=device, **lengths)
    sizes, results = cell.head_sizes, []

    def draw(*size):
        return torch.randn(*size, dtype=dtype, device=device, requires_grad=True)

    initial = tuple([draw(rows, *size) for size in sizes.state_sizes])
    call = Call(cell, draw(rows, 35, 2, sizes.width), initial)
    for backend in ("fused", "torch"):
        pair = {"solver": "sequential", "backend": backend}
        output, final = pararnn.solve(cell, call.gates, initial, **pair)
        results.append(with_gradients((output, final), call.leaves()))
    _close(*results, dtype)


def check_some_gradients(name):
    """Compare both backends where the output or final states alone are read, by some leaves."""
    call = make_call(name, 2, 5)
    for part in (0, 1):
        results = []
        for backend in ("fused", "torch"):
            pair = {"solver": "sequential", "backend": backend}
            out = pararnn.solve(call.cell, call.gates, call.initial, **pair)
            loss = as_tuple(out[part])[0].square().sum()
            results.append(torch.autograd.grad(loss, [call.gates, call.initial[0]]))
        _close(*results)
    return call


def check_packed_rows(layer, ends, padding=5, recompute=(False,), dtype=torch.float64):
    """Compare both backends on gates as a projection by heads leaves them, with biases; NaN at
    padding behind the last sequence."""
    with torch.no_grad():
        layer.layers[0].bias.normal_()
    like = {"dtype": layer.layers[0].bias.dtype, "device": layer.layers[0].bias.device}
    x = torch.randn(1, ends[-1] + padding, layer.input_size, **like)
    x[:, ends[-1] :] = torch.nan
    h_0 = [torch.randn(1, len(ends) - 1, *size, **like) for size in layer.cell.state_sizes]
    results = []
    for recomputes in recompute:
        for backend in ("fused", "torch"):
            layer.layers[0].recompute_gates = recomputes
            leaves = [tensor.clone().requires_grad_() for tensor in (x, *h_0)]
            output, h_n = layer(leaves[0], tuple(leaves[1:]), cu_seqlens=ends, backend=backend)
            loss = output.square().sum() + sum(h.sum() for h in as_tuple(h_n))
            grads = torch.autograd.grad(loss, [*leaves, *layer.parameters()])
            results.append([output, *as_tuple(h_n), *(g.nan_to_num(0) for g in grads)])
    for other in results[1:]:
        _close(results[0], other, dtype)


@pytest.mark.filterwarnings("ignore::pararnn.CellCostWarning")  # axes of length 1
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12)
@given(
    rows=st.integers(1, 3),
    steps=st.integers(0, 6),
    heads=st.integers(1, 3),
    axes=st.sampled_from([(1, 3), (3, 2), (4, 4)]),  # a program is traced for each
    reverse=st.booleans(),
    resets=st.booleans(),
    seed=st.integers(0, 99),
)
@pytest.mark.one_in(7)
def test_solve_is_the_loop(name, rows, steps, heads, axes, reverse, resets, seed):
    call = make_call(name, rows, steps, heads, *axes, seed=seed)
    reset = torch.rand(rows, steps) < 0.4 if resets else None
    _compare(name, call, reset=reset, reverse=reverse, backend="torch")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.one_in(9)
def test_narrow_dtypes_are_those_of_inputs(name, dtype):
    """Against the float64 loop on the same rounded numbers: states are carried in float32."""
    call = make_call(name, 2, 9, dtype=dtype)
    _compare(name, call, dtype, backend="torch")
    final = as_tuple(pararnn.solve(call.cell, call.gates)[1])
    assert {h.dtype for h in final} == {torch.float32}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_in(5)
def test_zero_is_the_default_start(name):
    call = make_call(name, 2, 5)
    zeros = [torch.zeros_like(h) for h in call.initial]
    _close(
        [pararnn.solve(call.cell, call.gates)[0]],
        [loop(name, Call(call.cell, call.gates, zeros))[0]],
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_in(3)
def test_sequences_may_be_packed(name):
    """One of 3 steps, one of none, one of 4, and 2 steps of padding that hold anything."""
    lengths, at = [3, 0, 4], [0, 3, 3]
    call = make_call(name, 3, 4)
    one_row = torch.full((1, 9, *call.gates.shape[2:]), torch.nan, dtype=torch.float64)
    for i, (start, length) in enumerate(zip(at, lengths, strict=True)):
        one_row[0, start : start + length] = call.gates[i, :length].detach()
    one_row.requires_grad_()
    output, final = pararnn.solve(
        call.cell, one_row, call.initial, cu_seqlens=[0, 3, 3, 7], backend="torch"
    )
    parts = [
        loop(name, Call(call.cell, call.gates[i : i + 1, :n], [h[i : i + 1] for h in call.initial]))
        for i, n in enumerate(lengths)
    ]
    reference = torch.cat([part[0][0] for part in parts])
    _close([output[0, :7]], [reference])
    assert output[0, 7:].eq(0).all()
    ends = [torch.cat(series) for series in zip(*[part[1] for part in parts], strict=True)]
    _close(as_tuple(final), ends)
    (output.square().sum() + sum(h.sum() for h in as_tuple(final))).backward()
    grads = [one_row.grad[0, :7], *(h.grad for h in call.initial)]
    assert one_row.grad[0, 7:].eq(0).all()
    call_grads = torch.autograd.grad(
        reference.square().sum() + sum(h.sum() for h in ends), [call.gates, *call.initial]
    )
    gates = torch.cat([call_grads[0][i, :n] for i, n in enumerate(lengths)])
    _close(grads, [gates, *call_grads[1:]])


def _layer(name="m2rnn", **options):
    """A layer of 2 heads, by PyTorch."""
    torch.manual_seed(0)
    sizes = {"num_heads": 2, "K": 4, "dtype": torch.float64, "backend": "torch"}
    return pararnn.ParaRNN(zoo.MATRIX_CELLS[name], 6, 6, **(sizes | CONFIG.get(name, {}) | options))


def _by_loop(name, layer, x, reset=None, starts=None, initial=None, reverse=False):
    """A layer of one part: its projection by hand, then the loop."""
    part = layer.layers[0]
    heads, _, _ = part.proj.weight.shape
    rows = x.unflatten(-1, (heads, -1))
    gates = torch.einsum("bthi,hoi->btho", rows, part.proj.weight)
    gates = gates + part.bias.view(heads, -1)
    if initial is None:
        sizes = layer.cell.head_sizes.state_sizes
        initial = [torch.zeros(len(x), *s, dtype=torch.float64) for s in sizes]
    output, final = loop(name, Call(layer.cell, gates, initial), reverse, reset, starts)
    return output.flatten(2), final


@pytest.mark.parametrize("name", NAMES)
def test_layers_project_and_read_out(name):
    layer, x = _layer(name), torch.randn(3, 5, 6, dtype=torch.float64)
    output, h_n = layer(x)
    reference, final = _by_loop(name, layer, x)
    _close([output, *(h[0] for h in as_tuple(h_n))], [reference, *final])


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("name", ["m2rnn", "mlstm"])
def test_layers_take_lengths_resets_and_states(name, backend):
    layer, x = _layer(name, backend=backend), torch.randn(3, 6, 6, dtype=torch.float64)
    x_nan = x.clone()
    x_nan[0, 2:], x_nan[1] = torch.nan, torch.nan
    output, h_n = layer(x_nan, lengths=[2, 0, 6])
    reference, final = _by_loop(name, layer, x[:1, :2])
    _close([output[:1, :2]], [reference])
    assert output[0, 2:].eq(0).all()
    assert output[1].eq(0).all()
    _close([h[0, :1] for h in as_tuple(h_n)], final)
    assert all(h[0, 1].eq(0).all() for h in as_tuple(h_n))

    reset = torch.rand(3, 6) < 0.5
    sizes = layer.cell.state_sizes
    starts = [torch.randn(int(reset.sum()), *size, dtype=torch.float64) for size in sizes]
    initial = [torch.randn(3, *size, dtype=torch.float64) for size in sizes]
    output, h_n = layer(
        x, tuple(h[None] for h in initial), reset=reset, reset_states=tuple(h[None] for h in starts)
    )
    reference, final = _by_loop(name, layer, x, reset, starts, initial)
    _close([output, *(h[0] for h in as_tuple(h_n))], [reference, *final])


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("name", ["m2rnn", "mlstm"])
def test_layers_decode_step_by_step(name, backend):
    layer, x = (
        _layer(name, num_layers=2, backend=backend),
        torch.randn(3, 4, 6, dtype=torch.float64),
    )
    output, h_n = layer(x)
    state, steps = None, []
    for t in range(4):
        y, state = layer.step(x[:, t], state)
        steps.append(y)
    _close([torch.stack(steps, 1)], [output])
    _close(as_tuple(state), as_tuple(h_n))
    y, state = layer.step(x[0, 0])  # without a batch
    _close([y], [output[0, 0]])
    assert [h.shape for h in as_tuple(state)] == [(2, *s) for s in layer.cell.state_sizes]


def test_layers_run_both_ways_and_recompute_gates():
    layer, x = _layer(bidirectional=True), torch.randn(3, 5, 6, dtype=torch.float64)
    output, h_n = layer(x)
    assert output.shape == (3, 5, 12)
    assert h_n.shape == (2, 3, 2, 4, 3)
    other = _layer()
    other.layers[0].load_state_dict(layer.reverse_layers[0].state_dict())
    reference, final = _by_loop("m2rnn", other, x, reverse=True)
    _close([output[..., 6:], h_n[1]], [reference, *final])
    grads = []
    for recompute in (False, True):
        other.layers[0].recompute_gates = recompute
        other.zero_grad()
        other(x)[0].square().sum().backward()
        grads.append([p.grad for p in other.parameters()])
    _close(*grads)


def test_a_layer_saves_and_loads_its_weights():
    layer, other = _layer(), _layer()
    assert {"layers.0.proj.weight", "layers.0.bias", "layers.0.cell.W"} == set(layer.state_dict())
    assert layer.cell.W.shape == (2, 3, 3)
    other.reset_parameters()
    other.load_state_dict(layer.state_dict())
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    _close([other(x)[0]], [layer(x)[0]])
    twin = copy.deepcopy(layer)
    _close([twin(x)[0]], [layer(x)[0]])


def test_the_first_cell_of_a_kind_draws_as_later_ones():
    """Its trace drew numbers in between."""
    torch.manual_seed(0)
    layers = []
    for _ in range(2):
        torch.manual_seed(1)
        layers.append(pararnn.ParaRNN(zoo.GatedDeltaCell, 6, 10, num_heads=2, K=3, eps=3e-5))
    following = torch.randn(3)
    torch.manual_seed(1)
    pararnn.ParaRNN(zoo.GatedDeltaCell, 6, 10, num_heads=2, K=3, eps=4e-5)
    assert torch.equal(torch.randn(3), following)
    for one, other in zip(*(layer.parameters() for layer in layers), strict=True):
        assert torch.equal(one, other)


def test_clipping_bounds_recurrent_parameters():
    layer = _layer(recurrent_clip=0.1)
    layer.clip_recurrent()
    assert layer.cell.W.abs().max() <= 0.1
    offsets = _layer("hopfield", recurrent_clip=0.1)
    first = offsets.cell.P.clone()
    offsets.clip_recurrent()  # they are not recurrent
    assert torch.equal(first, offsets.cell.P)
    assert first.abs().max() > 0.1


def test_a_start_does_not_explode():
    """W is drawn with 1/sqrt(V): states and gradients stay bounded over many steps."""
    torch.manual_seed(0)
    layer = pararnn.ParaRNN(zoo.M2RNNCell, 64, 64, num_heads=2, K=8)
    assert abs(float(layer.cell.W.std()) * 32**0.5 - 1) < 0.1
    x = torch.randn(2, 200, 64, requires_grad=True)
    output, h_n = layer(x)
    assert h_n.abs().max() <= 1
    output[:, -1].square().sum().backward()
    assert x.grad[:, 0].norm() < x.grad[:, -1].norm()


def test_explain_says_why_pytorch_runs_it():
    text = str(pararnn.explain(_layer(), (3, 5, 6)))
    assert "(3, 5, 6)" in text
    assert "too large for Newton's method" in text


@pytest.mark.thorough
def test_compilers_see_the_loop():
    layer, x = _layer(), torch.randn(2, 3, 6, dtype=torch.float64)
    by_compiler = torch.compile(layer, backend="aot_eager", fullgraph=True)
    _close([by_compiler(x)[0]], [layer(x)[0]])
    one_row, ends = torch.randn(1, 5, 6, dtype=torch.float64), torch.tensor([0, 2, 5])
    _close([by_compiler(one_row, cu_seqlens=ends)[1]], [layer(one_row, cu_seqlens=ends)[1]])


def test_vmap_runs_copies():
    call = make_call("m2rnn", 2, 3)
    gates = torch.randn(4, *call.gates.shape, dtype=torch.float64)
    run = lambda g: pararnn.solve(call.cell, g, backend="torch")[0]  # noqa: E731
    _close([torch.func.vmap(run)(gates)], [torch.stack(list(map(run, gates)))])


class Base(pararnn.Cell):
    """A cell that subclasses spoil."""

    states = {"H": ("K", "V")}
    gates = {"k": "K", "v": "V"}

    def step(self, state, gate, param):
        return state.H + gate.k[..., :, None] * gate.v[..., None, :]

    def readout(self, state, gate, param):
        return state.H.sum(-2)


WRONG_CLASSES = {
    "axes of its states and not": {"gates": ("k", "v")},
    "axes of its gates and not": {"states": ("H",)},
    r"a number for each head.*Got \('K', 'V', 'U'\)": {"states": {"H": ("K", "V", "U")}},
    r'own axis "H" goes without': {"gates": {"k": "K", "v": "H"}},
    r"has the shape 'D'": {"params": {"a": Param("D")}},
    r"has the axis 'U', which no state, gate or memory has": {"params": {"a": Param("H,U")}},
    "has fields": {"fields": ("dt",)},
    "has structure": {"structure": "dense"},
    "needs a readout": {"readout": None},
    "must be distinct": {"params": {"K": Param("H")}},
}


@pytest.mark.parametrize("message", WRONG_CLASSES)
def test_wrong_declarations_say_what_to_do(message):
    with pytest.raises(CellError, match=message):
        type("Wrong", (Base,), WRONG_CLASSES[message])


def test_axes_of_heads_are_for_matrix_cells():
    with pytest.raises(CellError, match="names axes of heads, which only cells have"):
        type(
            "Wrong",
            (pararnn.Cell,),
            {"states": ("h",), "gates": ("x",), "params": {"W": Param("H,V,V")}},
        )
    with pytest.raises(CellError, match=r"axes of heads such as 'H,K,V'"):
        Param("V,H")


def _transpose(self, state, gate, param):
    return state.H.mT + 0


def _by_row(self, state, gate, param):
    return state.H + gate.k[..., :, None] * gate.v[0]


def _across(self, state, gate, param):
    return state.H + gate.v.sum(0)[..., None, :] if gate.v.ndim > 1 else state.H


def _branch(self, state, gate, param):
    return state.H if gate.k.sum() > 0 else -state.H


def _two(self, state, gate, param):
    return state.H, gate.k


def _random(self, state, gate, param):
    return state.H + torch.rand_like(state.H)


def _hard_coded(self, state, gate, param):
    return state.H.reshape(64, 16)


WRONG_STEPS = {
    r"step must return .*5.* got \(2, 3, 5, 3\)": _transpose,
    r"step fails on tensors with leading dimensions|must treat leading": _by_row,
    "must treat leading dimensions": _across,
    "reads a tensor's value in Python": _branch,
    r"must return 1 tensor\(s\)": _two,
    "draws random numbers": _random,
    r"axes of the lengths V = 5, K = 3": _hard_coded,
}


@pytest.mark.parametrize("message", WRONG_STEPS)
def test_wrong_steps_say_what_to_do(message):
    cls = type("Wrong", (Base,), {"step": WRONG_STEPS[message]})
    with pytest.raises(CellError, match=message):
        pararnn.ParaRNN(cls, 6, 6, num_heads=2)


def test_wrong_readouts_say_what_to_do():
    cls = type("Wrong", (Base,), {"readout": lambda self, state, gate, param: state.H})
    with pytest.raises(CellError, match=r"readout must return \('...', 5\)"):
        pararnn.ParaRNN(cls, 6, 6, num_heads=2)


def test_wrong_sizes_say_what_to_do():
    call = make_call("mlstm", 2, 3)
    with pytest.raises(CellError, match="axis K must be a positive number"):
        zoo.M2RNNCell(6, num_heads=2, K=0)
    with pytest.raises(ValueError, match=r"q 4, k 4, v 3, i 1, f 1, o 3, got \(2, 3, 2, 5\)"):
        pararnn.solve(call.cell, call.gates[..., :5])
    c, n, m = call.initial
    with pytest.raises(ValueError, match=r"initial state 'n' must be \(2, 2, 4\), got \(2, 4\)"):
        pararnn.solve(call.cell, call.gates, (c, n[:, 0], m))
    layer = _layer("mlstm")
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    with pytest.raises(
        ValueError, match=r"of the sizes \[\(1, 2, 2, 4, 3\), \(1, 2, 2, 4\), \(1, 2, 2\)\]"
    ):
        layer(x, tuple(h[None, :1] for h in call.initial))
    with pytest.raises(ValueError, match="which no solver keeps"):
        layer(x, all_states=True)
    with pytest.raises(pararnn.EngineError, match="too large for Newton"):
        _layer("m2rnn")(x, solver="newton")


def test_sizes_have_defaults():
    cell = zoo.M2RNNCell(32, num_heads=2)
    assert cell.config_values() == {"K": 16}
    assert cell.head_sizes.width == 3 * 16 + 1


def test_an_axis_may_have_a_default_of_its_own():
    cls = type("Wide", (Base,), {"config": {"K": 7}})
    assert cls(6, num_heads=2).head_sizes.states == ((7, 3),)
    assert cls(6, num_heads=2, K=2).head_sizes.states == ((2, 3),)


class Plain(pararnn.Cell):
    """No readout: its first state is the output. A gate is a matrix, a parameter a number."""

    states = {"h": "V", "A": ("K", "V")}
    gates = {"x": "V", "G": ("K", "V")}
    params = {"a": Param("", std=1.0), "b": Param("H", std=1.0)}

    def step(self, state, gate, param):
        A = param.a * state.A + gate.G
        return param.b[..., None] * state.h + gate.x + A.amax(-2), A


def test_the_first_state_is_the_output_without_a_readout():
    torch.manual_seed(0)
    cell = Plain(6, num_heads=2, K=4, dtype=torch.float64)
    gates = torch.randn(3, 5, 2, 3 + 12, dtype=torch.float64)
    output, final = pararnn.solve(cell, gates)
    h, A = torch.zeros(3, 2, 3, dtype=torch.float64), torch.zeros(3, 2, 4, 3, dtype=torch.float64)
    for t in range(5):
        A = cell.a * A + gates[:, t, :, 3:].reshape(3, 2, 4, 3)
        h = cell.b.view(1, 2, 1) * h + gates[:, t, :, :3] + A.max(2).values
        _close([output[:, t]], [h])
    _close(final, [h, A])


@pytest.mark.parametrize("name", ["M2RNNCell", "MLSTMCell"])
def test_a_language_model_mixes_by_a_matrix_cell(name):
    config = LMConfig(
        vocab_size=11,
        hidden_size=16,
        num_hidden_layers=1,
        num_heads=2,
        cell=f"pararnn.zoo:{name}",
        cell_config={"K": 4},
    )
    torch.manual_seed(0)
    model = LanguageModel(config)
    tokens = torch.randint(11, (2, 6))
    logits = model(tokens)
    logits = getattr(logits, "logits", logits)
    logits.sum().backward()
    assert logits.shape == (2, 6, 11)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    drawn_tokens = sample(model, tokens, 4, temperature=0.0)
    whole = model(torch.cat([tokens, drawn_tokens], 1))  # decoding goes on from cached states
    assert torch.equal(whole[:, 5:-1].argmax(-1), drawn_tokens)


class Scaled(pararnn.Cell):
    """A step and a readout that read the lengths of axes."""

    states, gates = {"S": ("K", "V")}, {"k": "K", "v": "V"}

    def step(self, state, gate, param):
        return state.S + gate.k[..., :, None] * gate.v[..., None, :] / self.V

    def readout(self, state, gate, param):
        return state.S.sum(-2) / self.K


def test_a_step_by_hand_reads_lengths():
    cell = Scaled(8, num_heads=2, K=3)
    gates = torch.randn(1, 1, 2, 7)
    output, final = pararnn.solve(cell, gates)
    gate = SimpleNamespace(k=gates[:, 0, :, :3], v=gates[:, 0, :, 3:])
    start = SimpleNamespace(S=torch.zeros(1, 2, 3, 4))
    state = SimpleNamespace(S=cell.step(start, gate, SimpleNamespace()))
    torch.testing.assert_close(state.S, final)
    torch.testing.assert_close(cell.readout(state, gate, SimpleNamespace()), output[:, 0])


def test_a_parameter_may_have_the_name_of_the_values():
    class Named(Scaled):
        params = {"V": Param("H")}

    assert Named(8, num_heads=2).V.shape == (2,)
