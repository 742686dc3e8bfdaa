"""What is put around a layer or its parts, each time against autograd through the loop."""

import copy
import operator
from functools import cache

import pytest
import torch
import torch._inductor.config
from call_results import as_tuple
from table import FUSED, PLAIN, needs_compiler
from test_habits import (
    agree,
    input_of,
    layer_of,
    layers,
    loop_of,
    loss_of,
    pairs,
    passes_afresh,
    results,
    same,
    state_of,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrizations, parametrize
from torch.utils._pytree import tree_leaves

import pararnn

SIZES = [(3, 9), (5, 11), (7, 17)]  # equal sizes would be taken for one: none is 2, 4 or 6


def _unseen_sizes(layer, run, stance="fail_on_recompile", **draw):
    """Results at several sizes, of which only the first may compile, unless `stance` allows it."""
    for index, (batch, steps) in enumerate(SIZES):
        x = input_of(layer, batch, steps)
        options = {name: make(batch, steps, x.device) for name, make in draw.items()}
        with torch.compiler.set_stance(stance if index else "default"):
            got = results(layer, x, run, **options)
        agree(got, results(loop_of(layer), x, **options))


def _compile(layer, backend="aot_eager"):
    return torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)


def _resets(batch, steps, device):
    return torch.rand(batch, steps, device=device) < 0.2


def _lengths(batch, steps, device):
    return torch.arange(1, batch + 1, device=device)


each_once = pytest.mark.parametrize(
    ("cls", "pair"),
    [(pararnn.ParaGRU, ("newton", "torch")), (pararnn.ParaLSTM, FUSED)],
    ids=["gru-newton-torch", "lstm-sequential-fused"],
)
"""Each layer and each engine, as each case compiles for seconds."""


@layers
@pairs
@pytest.mark.thorough
def test_compile(cls, pair, device):
    layer, graphs = layer_of(cls, pair, device), []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    _unseen_sizes(layer, _compile(layer, backend))
    # No number that turned out to be constant had it compiled again; PyTorch 2.11 compiles twice.
    assert len(graphs) <= (1 if torch.__version__ >= "2.13" else 2)


@each_once
@pytest.mark.thorough
def test_compile_frozen(cls, pair, device):
    layer = layer_of(cls, pair, device).requires_grad_(False)
    x, program = input_of(layer), _compile(layer)
    got, reference = program(x)[0], loop_of(layer)(x)[0]
    assert not got.requires_grad
    agree({"output": got}, {"output": reference})
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(program(leaf)[0]), leaf)
    (exact,) = torch.autograd.grad(loss_of(loop_of(layer)(leaf)[0]), leaf)
    agree({"grad": grad}, {"grad": exact})


@each_once
@pytest.mark.one_in(5)
def test_compile_with_resets_in_both_directions(cls, pair, device):
    layer = layer_of(cls, pair, device, num_layers=1, bidirectional=True)
    _unseen_sizes(layer, _compile(layer), reset=_resets)


@each_once
@pytest.mark.one_in(5)
def test_compile_with_lengths(cls, pair, device):
    layer = layer_of(cls, pair, device, num_layers=1)
    _unseen_sizes(layer, _compile(layer), lengths=_lengths)


@pytest.fixture
def few_compilations():
    """Precompiled headers take longer than the three or four files that would include them."""
    own = {"cpp_cache_precompile_headers": False, "aot_inductor.precompile_headers": False}
    own["aot_inductor.compile_wrapper_opt_level"] = "O0"
    with torch._inductor.config.patch(own):
        yield


@pytest.mark.usefixtures("few_compilations")
@layers
@pytest.mark.one_in(5)
def test_compile_by_inductor(cls, device):
    layer = layer_of(cls, FUSED, device, num_layers=1, num_heads=1)
    _unseen_sizes(layer, _compile(layer, "inductor"))


class Batches(nn.Module):
    """Layers by both pairs, as an exporter takes them: positional inputs, flat outputs."""

    def __init__(self, device):
        super().__init__()
        self.gru = layer_of(pararnn.ParaGRU, FUSED, device, bidirectional=True)
        self.lstm = layer_of(pararnn.ParaLSTM, ("newton", "torch"), device, num_layers=1)

    def forward(self, x, lengths, reset):
        output, h_n = self.gru(x, lengths=lengths, reset=reset)
        states, (h, c) = self.lstm(x, reset=reset)
        return output, h_n, states, h, c


@cache
def _export(device):
    """Return a module, its program, which several tests share, and inputs of other sizes."""
    batch, steps = torch.export.Dim("batch"), torch.export.Dim("steps")
    sizes = {"x": {0: batch, 1: steps}, "lengths": {0: batch}, "reset": {0: batch, 1: steps}}
    module = Batches(device)

    def draw(batch, steps):
        x = input_of(module.gru, batch, steps)
        return x, _lengths(batch, steps, x.device), _resets(batch, steps, x.device)

    inputs = [draw(*size) for size in SIZES]
    program = torch.export.export(module, inputs[0], dynamic_shapes=sizes)
    assert module.gru.last_solve is None
    return module, program, inputs[1:]


def test_export(tmp_path, device):
    module, program, others = _export(device)
    torch.export.save(program, tmp_path / "program.pt2")
    program_of_file = torch.export.load(tmp_path / "program.pt2")
    for inputs in others:
        reference = module(*inputs)
        for run in (program.module(), program_of_file.module()):
            assert all(torch.equal(a, b) for a, b in zip(run(*inputs), reference, strict=True))
    torch.save((inputs, reference), tmp_path / "case")
    passes_afresh(
        "import pararnn",
        "run = torch.export.load(sys.argv[1] + '/program.pt2').module()",
        "inputs, expected = torch.load(sys.argv[1] + '/case')",
        "assert all(torch.equal(a, b) for a, b in zip(run(*inputs), expected))",
        folder=tmp_path,
    )


def test_wrong_states_are_named_where_sizes_are_symbols(device):
    layer = pararnn.ParaLSTM(4, 6, device=device)
    x, states = torch.randn(2, 5, 4, device=device), torch.zeros(1, 2, 6, device=device)
    rows = torch.export.Dim("rows")
    with pytest.raises(ValueError, match="Expected hidden states"):
        torch.export.export(layer, (x, (states,)), dynamic_shapes=({0: rows}, ({1: rows},)))


@needs_compiler
def test_export_of_packed_rows(device):
    """Any number of sequences, and steps on either side of where a solver in PyTorch would change:
    which one comes first is nothing to a layer that runs by kernels. On a GPU `auto` takes one of
    two by the number of steps, so the solver is named."""
    solver = "sequential" if device == "cuda" else "auto"
    layer = pararnn.ParaGRU(4, 6, device=device, solver=solver)
    x = {1: torch.export.Dim("steps")}
    sizes = {"x": x, "cu_seqlens": {0: torch.export.Dim("borders", min=3)}}

    def draw(steps, count):
        borders = torch.linspace(0, steps, count + 1, device=device).long()
        return {"x": torch.randn(1, steps, 4, device=device), "cu_seqlens": borders}

    program = torch.export.export(layer, (), draw(20, 3), dynamic_shapes=sizes).module()
    for steps, count in ((20, 3), (9, 7), (200, 2)):
        arguments = draw(steps, count)
        for got, reference in zip(program(**arguments), layer(**arguments), strict=True):
            assert torch.equal(got, reference)


@needs_compiler
@pytest.mark.parametrize("steps", [7, 40])
def test_export_of_matrix_cells(steps, device):
    """Checkpoints, one for 16 steps, divide the lengths of no program and of no compiled code."""
    layer = pararnn.ParaRNN(pararnn.zoo.M2RNNCell, 4, 6, device=device, solver="sequential", K=2)
    sizes = {"x": {0: torch.export.Dim("batch"), 1: torch.export.Dim("steps")}}
    inputs = (input_of(layer, 3, steps),)
    program = torch.export.export(layer, inputs, dynamic_shapes=sizes).module()
    counter = CompileCounterWithBackend("aot_eager")
    with torch.no_grad():
        compiled = torch.compile(layer, backend=counter, dynamic=True)
        for count in (steps, 2, 16, 17, 40):
            x = input_of(layer, 2, count)
            reference = layer(x)
            for results in (program(x), compiled(x)):
                assert all(torch.equal(a, b) for a, b in zip(results, reference, strict=True))
    assert counter.frame_count <= (1 if torch.__version__ >= "2.13" else 2)  # as in test_compile


class _OneStep(torch.nn.Module):
    """A step as users export it, to decode elsewhere."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, state):
        return self.layer.step(x, state)


@pytest.fixture
def to_onnx(monkeypatch):
    """As within torch.onnx.export; by its flag, for compilers know the function by identity."""
    monkeypatch.setattr("torch.onnx._internal.exporter._flags._is_onnx_exporting", True)
    assert torch.onnx.is_in_onnx_export()


@pytest.mark.usefixtures("to_onnx")
@pytest.mark.parametrize(
    "pair_options", [{}, {"solver": "newton", "backend": "fused"}], ids=["", "newton"]
)
@pytest.mark.thorough
def test_onnx(pair_options):
    """The loop is taken by itself: one scan and ATen operators, and for a step these alone."""
    gru, x = pararnn.ParaGRU(4, 8, **pair_options), torch.randn(2, 5, 4)
    one, state = _OneStep(gru), torch.randn(1, 2, 8)
    for module, inputs in ((gru, (x,)), (one, (x[:, 0], state))):
        with torch.no_grad():
            program = torch.export.export(module, inputs).run_decompositions()
        scans, calls = _scans_and_others(program)
        assert scans == (module is gru)
        assert calls
        assert all(op.namespace == "aten" for op in calls)
        for mine, own in zip(program.module()(*inputs), module(*inputs), strict=True):
            torch.testing.assert_close(mine, own)


def _scans_and_others(program):
    calls = [n.target for n in program.graph.nodes if n.op == "call_function"]
    scan, parts = torch.ops.higher_order.scan, (torch.ops.higher_order.scan, operator.getitem)
    return calls.count(scan), [op for op in calls if op not in parts]


class _Packed(torch.nn.Module):
    """A layer with edges of sequences and given states."""

    def __init__(self):
        super().__init__()
        self.rnn = pararnn.ParaLSTM(4, 8)

    def forward(self, x, state, reset, lengths):
        return self.rnn(x, state, reset=reset, lengths=lengths)


@pytest.mark.usefixtures("to_onnx")
@pytest.mark.thorough
def test_onnx_any_sizes():
    """The loop's scan takes any batch and T, and knows of given states, resets and lengths."""
    torch.manual_seed(0)
    module, any_size = _Packed(), torch.export.Dim.DYNAMIC

    def inputs_of(batch, steps):
        state = (torch.randn(1, batch, 8), torch.randn(1, batch, 8))
        reset, lengths = torch.rand(batch, steps) < 0.2, torch.arange(batch) % steps + 1
        return torch.randn(batch, steps, 4), state, reset, lengths

    rows, batch = {0: any_size, 1: any_size}, {1: any_size}
    sizes = {"x": rows, "state": (batch, batch), "reset": rows, "lengths": {0: any_size}}
    with torch.no_grad():
        program = torch.export.export(module, inputs_of(5, 6), dynamic_shapes=sizes)
        assert _scans_and_others(program)[0] == 1
        for inputs in (inputs_of(5, 6), inputs_of(3, 11)):
            want, got = (tree_leaves(run(*inputs)) for run in (module, program.module()))
            for mine, own in zip(got, want, strict=True):
                torch.testing.assert_close(mine, own)


@pytest.mark.usefixtures("few_compilations")
@pytest.mark.thorough
def test_aot_inductor(tmp_path, device):
    if device == "cuda":
        pytest.skip("PyTorch 2.11 crashes where it loads such a package")
    module, program, others = _export(device)
    path = str(tmp_path / "package.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    package = torch._inductor.aoti_load_package(path)
    for inputs in others:
        for got, reference in zip(package(*inputs), module(*inputs), strict=True):
            assert torch.allclose(got, reference, atol=1e-12)


@pytest.mark.parametrize("heads", [1, 2])
@layers
@pairs
def test_weight_norm(cls, pair, heads, device):
    layer = layer_of(cls, pair, device, num_heads=heads)
    x = input_of(layer)
    old = layer(x)[0]
    for part in layer.layers:
        parametrizations.weight_norm(part.proj, "weight", dim=1)  # a length for each row of gates
        for name in type(part.cell).params:
            parametrizations.weight_norm(part.cell, name, dim=None)
    assert torch.allclose(layer(x)[0], old)
    assert layer.layers[0].proj.parametrizations.weight.original0.shape == (1, 18 // heads, 1)
    agree(results(layer, x), results(loop_of(layer), x))


@pytest.mark.parametrize("heads", [1, 2])
@layers
@pairs
def test_spectral_norm(cls, pair, heads, device):
    layer = layer_of(cls, pair, device, num_heads=heads)
    x = input_of(layer)
    for part in layer.layers:
        parametrizations.spectral_norm(part.proj, "weight", n_power_iterations=100, dim=1)
    layer(x)
    layer.eval()
    agree(results(layer, x), results(loop_of(layer), x))
    weights = [part.proj.weight.detach() for part in layer.layers]
    largest = max(float(torch.linalg.matrix_norm(weight, 2).max()) for weight in weights)
    assert largest == pytest.approx(1, abs=1e-6) if heads == 1 else largest <= 1


class _Bounded(nn.Module):
    def forward(self, free):
        return 0.5 * torch.tanh(free)


@layers
@pairs
def test_parametrised_recurrence(cls, pair, device):
    layer = layer_of(cls, pair, device)
    x = input_of(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    pararnn.clip_after_step(optimizer, layer)
    parametrize.register_parametrization(layer.cell, "a_z", _Bounded())
    agree(results(layer, x), results(loop_of(layer), x))
    assert layer.cell.a_z.abs().max() <= 0.5
    message = "a_z of .* is computed by a parametrisation.*recurrent_clip=None"
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    with pytest.raises(ValueError, match=message):
        pararnn.clip_after_step(torch.optim.SGD(layer.parameters(), lr=0.1), layer)
    layer.recurrent_clip = None
    pararnn.clip_after_step(optimizer, layer)
    optimizer.step()


class Model(nn.Module):
    """A recurrent layer among others, as users have it."""

    def __init__(self, rnn):
        super().__init__()
        factory = {"device": rnn.cell.a_z.device, "dtype": rnn.cell.a_z.dtype}
        self.preamble = nn.Sequential(nn.Linear(5, rnn.input_size, **factory), nn.GELU())
        self.rnn = rnn
        self.head = nn.Sequential(
            nn.LayerNorm(rnn.hidden_size, **factory), nn.Linear(rnn.hidden_size, 2, **factory)
        )

    def forward(self, x):
        return self.head(self.rnn(self.preamble(x))[0])


def _model_of(layer):
    """A model, a twin of it that loops, and its input."""
    model = Model(layer)
    twin = copy.deepcopy(model)
    twin.rnn.solver, twin.rnn.backend = PLAIN
    return model, twin, torch.randn(3, 9, 5, device=layer.cell.a_z.device, dtype=torch.float64)


def _train(module, x):
    """The gradients of two steps, and the weights after them."""
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trainable.values(), lr=0.5)
    pararnn.clip_after_step(optimizer, module)
    tensors = {}
    for step in range(2):
        optimizer.zero_grad()
        loss_of(module(x)).backward()
        tensors |= {f"{step} {name}": p.grad.clone() for name, p in trainable.items()}
        nn.utils.clip_grad_norm_(trainable.values(), 1.0)
        optimizer.step()
    return tensors | {name: p.detach() for name, p in module.named_parameters()}


@layers
@pairs
def test_inside_a_model(cls, pair, device):
    model, twin, x = _model_of(layer_of(cls, pair, device))
    agree(_train(model, x), _train(twin, x), 1e-8)
    assert max(p.abs().max() for p in model.rnn.recurrent_parameters()) == 0.5
    loss_of(model(x)).backward()
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("heads", [1, 2])
@layers
@pairs
def test_lora(cls, pair, heads, device):
    peft = pytest.importorskip("peft")
    model, twin, x = _model_of(layer_of(cls, pair, device, num_heads=heads))
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=["proj.weight"])
    old, lora_models = model(x), []
    for each in (model, twin):
        torch.manual_seed(2)
        lora_models.append(peft.get_peft_model(each, config))
    assert torch.equal(lora_models[0](x), old)
    loss_of(lora_models[0](x)).backward()
    with_grad = [name for name, p in lora_models[0].named_parameters() if p.grad is not None]
    assert len(with_grad) == 4
    assert all("proj.lora_" in name for name in with_grad)
    got, reference = (_train(each, x) for each in lora_models)
    got, reference = ({k: v for k, v in d.items() if v.any()} for d in (got, reference))
    agree(got, reference, 1e-8)
    new_output = lora_models[0](x)
    assert not torch.allclose(new_output, old)
    assert torch.allclose(lora_models[0].merge_and_unload()(x), new_output)


class Damped(pararnn.GRUCell):
    def step(self, state, gate, param):
        return 0.5 * super().step(state, gate, param)


class DampedLSTM(pararnn.LSTMCell):
    def step(self, state, gate, param):
        h, c = super().step(state, gate, param)
        return 0.5 * h, c


@layers
@pairs
def test_subclassed_step(cls, pair, device):
    base = layer_of(cls, pair, device, num_layers=1)
    x = input_of(base)
    old = results(base, x)
    cell_class = Damped if cls is pararnn.ParaGRU else DampedLSTM

    def own(*args, **options):
        return pararnn.ParaRNN(cell_class, *args, **options)

    layer = layer_of(own, pair, device, num_layers=1)
    layer.load_state_dict(base.state_dict())
    assert torch.allclose(layer(x[:, :1])[0], 0.5 * base(x[:, :1])[0])
    agree(results(layer, x), results(loop_of(layer), x))
    assert not torch.allclose(layer(x)[0], old["output"])
    same(results(base, x), old)


@layers
@pairs
@pytest.mark.one_in(3)
def test_states_changed_in_place(cls, pair, device):
    layer = layer_of(cls, pair, device)
    x, results = input_of(layer, steps=12), []
    for module in (layer, loop_of(layer)):
        current, outputs = state_of(module), []
        for chunk in x.split(4, 1):
            output, h_n = module(chunk, current if len(current) > 1 else current[0])
            loss_of(output).backward()
            for state, new in zip(current, as_tuple(h_n), strict=True):
                state.copy_(new.detach())
            outputs.append(output)
        grads = {name: p.grad for name, p in module.named_parameters()}
        results.append({"output": torch.cat(outputs, 1)} | grads)
    agree(*results)
    output, h_n = layer(x)
    loss = loss_of(output, *as_tuple(h_n))
    for state in as_tuple(h_n):
        state.mul_(2)
    loss.backward()
    with pytest.raises(RuntimeError, match="inplace"):
        layer(x)[0].mul_(2).sum().backward()


def test_wrong_dtypes_and_devices(device):
    layer = layer_of(pararnn.ParaGRU, PLAIN, device, dtype=torch.float32)
    x = input_of(layer)
    with pytest.raises(
        ValueError, match=r"RNN input dtype \(torch.float64\) does not match weight"
    ):
        layer(x.double())
    with pytest.raises(ValueError, match="are not at the same device, found input tensor at meta"):
        layer(x.to("meta"))
    with pytest.raises(TypeError, match="initial state 'h' must be a floating-point tensor"):
        layer(x, torch.zeros(2, 3, 6, device=device, dtype=torch.long))
    with pytest.raises(ValueError, match="initial state 'h' is on meta"):
        layer(x, torch.zeros(2, 3, 6, device="meta"))
