"""One layer in one direction: its calls, its parts, its draws, compiled and wrapped."""

import copy
import math
from collections import OrderedDict

import pytest
import torch
import torch._dynamo
from call_results import as_tuple
from table import CELLS, FUSED, PAIRS
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import pararnn
from pararnn import RecurrentLayer
from pararnn.base.parameters import Draw, draw
from pararnn.sequences import Sequences, of_lengths

LAYERS = {
    "layer": lambda **options: RecurrentLayer(pararnn.LSTMCell, 4, 6, **options),
    "stack": lambda **options: pararnn.ParaLSTM(4, 6, num_layers=2, **options),
}


def _close(got, reference, atol=1e-6):
    pairs = zip(as_tuple(got), as_tuple(reference), strict=True)
    assert all(torch.allclose(a, b, atol=atol) for a, b in pairs)


def _fields(layer, *size):
    return {name: torch.rand(size) for name in layer.cell.fields}


@pytest.mark.parametrize("name", list(CELLS))
def test_a_layer_is_projection_bias_and_solve(name):
    torch.manual_seed(0)
    layer = RecurrentLayer(CELLS[name], 6, 8, num_heads=2)
    nn.init.normal_(layer.bias)
    x, fields = torch.randn(3, 11, 6), _fields(layer, 3, 11)
    reset = torch.rand(3, 11) < 0.2
    count = len(layer.cell.states)
    initial = tuple(torch.randn(3, 8) for _ in range(count))
    initial = initial if count > 1 else initial[0]
    output, final, states = layer(x, initial, fields=fields, reset=reset, all_states=True)
    gates = layer.proj(x).flatten(-2) + layer.bias
    reference, end = pararnn.solve(layer.cell, gates, initial, fields=fields, reset=reset)
    _close(states, reference)
    _close(final, end)
    assert type(final) is type(initial)
    assert torch.equal(states[0], output)
    assert all(state.requires_grad for state in states)
    assert {s.dtype for s in as_tuple(final)} == {torch.float32}
    assert [name for name, _ in layer.named_parameters()][:2] == ["bias", "proj.weight"]


@pytest.mark.parametrize("name", list(CELLS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.one_in(5)
def test_step_by_step(name, dtype):
    torch.manual_seed(0)
    layer = RecurrentLayer(CELLS[name], 4, 6, dtype=dtype)
    x, fields = torch.randn(3, 9, 4, dtype=dtype), _fields(layer, 3, 9)
    output, final = layer(x, fields=fields)
    state, steps = None, []
    for t in range(9):
        y, state = layer.step(x[:, t], state, fields={k: v[:, t] for k, v in fields.items()})
        steps.append(y)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    _close(torch.stack(steps, 1).float(), output.float(), tolerance)
    _close(state, final, tolerance)
    assert {s.dtype for s in as_tuple(state)} == {torch.float32}


def test_a_stack_equals_its_layers():
    stack = pararnn.ParaLSTM(4, 6, num_layers=2, num_heads=2)
    x = torch.randn(2, 9, 4)
    output, finals = stack(x)
    h, ends = x, []
    for part in stack.layers:
        layer = RecurrentLayer(pararnn.LSTMCell, part.input_size, 6, num_heads=2)
        layer.load_state_dict(part.state_dict())
        h, end = layer(h)
        ends.append(end)
    assert torch.equal(h, output)
    _close(tuple(torch.stack(states) for states in zip(*ends, strict=True)), finals, 0)


def test_attributes_of_a_stack_are_those_of_its_parts():
    stack = pararnn.ParaGRU(4, 6, 2, bidirectional=True, solver="newton", on_failure="raise")
    stack.backend, stack.recurrent_clip, stack.on_failure = "torch", None, "warn"
    parts = [*stack.layers, *stack.reverse_layers]
    attributes = {(p.solver, p.backend, p.recurrent_clip, p.on_failure) for p in parts}
    assert attributes == {("newton", "torch", None, "warn")}
    assert (stack.solver, stack.recurrent_clip) == ("newton", None)
    assert [part.reverse for part in parts] == [False, False, True, True]


def test_reverse():
    layer = RecurrentLayer(pararnn.GRUCell, 4, 6, reverse=True)
    forward = RecurrentLayer(pararnn.GRUCell, 4, 6)
    forward.load_state_dict(layer.state_dict())
    x = torch.randn(2, 9, 4)
    output, final = layer(x)
    reference, end = forward(x.flip(1))
    _close((output, final), (reference.flip(1), end))
    with pytest.raises(ValueError, match="a reverse layer cannot decode"):
        layer.step(x[:, 0])


def test_packed_rows():
    layer = RecurrentLayer(pararnn.LSTMCell, 4, 6)
    x = torch.randn(1, 9, 4)
    x[:, 7:] = torch.nan  # padding
    starts = torch.tensor([0, 3, 3, 7])
    initial = tuple(torch.randn(3, 6) for _ in range(2))
    output, final = layer(x, initial, cu_seqlens=starts)
    for index, (begin, end) in enumerate([(0, 3), (3, 3), (3, 7)]):
        single = layer(x[:, begin:end], tuple(s[index : index + 1] for s in initial))
        _close(output[:, begin:end], single[0])
        _close(tuple(s[index : index + 1] for s in final), single[1])
    assert not output[:, 7:].any()
    output.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_left_padding_by_sequences():
    layer, x = RecurrentLayer(pararnn.GRUCell, 4, 6), torch.randn(3, 9, 4)
    sequences = of_lengths(torch.tensor([9, 2, 0]), "left", 3, 9, x.device)
    initial = torch.randn(3, 6)
    output, final = layer(x, initial, sequences=sequences)
    single = layer(x[1:2, 7:], initial[1:2])
    _close(output[1, 7:], single[0][0])
    _close(final[1:2], single[1])
    _close(final[2], initial[2])
    assert not output[1, :7].any()
    row = Sequences(sequences.seq[:1], 1)
    with pytest.raises(ValueError, match="cu_seqlens and sequences both"):
        layer(x[:1], cu_seqlens=torch.tensor([0, 9]), sequences=row)


def test_a_request_by_layer_context_and_call():
    layer, x = RecurrentLayer(pararnn.GRUCell, 4, 6, mode="PARALLEL"), torch.randn(1, 80, 4)
    assert layer.last_solve is None
    layer(x)
    assert layer.last_solve.sweeps.item() >= 2
    assert layer.last_solve.mended.shape == (1,)
    with pararnn.using("sequential"):
        layer(x)
    assert not layer.last_solve.sweeps.any()
    layer(x, solver="newton")
    assert layer.last_solve.sweeps.any()
    layer.step(x[:, 0])
    assert not layer.last_solve.sweeps.any()


def test_explain_autotune_and_verify_accept_a_single_layer(monkeypatch, tmp_path, no_caches):
    monkeypatch.setattr("pararnn.engines.tuned.cache_folder", lambda: tmp_path)
    layer = RecurrentLayer(pararnn.GRUCell, 4, 6, solver="newton", backend="torch")
    assert pararnn.explain(layer, (2, 20, 4)).solver == "newton"
    assert pararnn.autotune(layer, (2, 20, 4), backward=False).size == (2, 20, 6)
    report = pararnn.verify(layer, torch.randn(1, 30, 4), cu_seqlens=torch.tensor([0, 9, 25]))
    assert report.passed
    assert "newton on torch" in str(report)


def test_clipping_finds_bare_layers_once_each(monkeypatch):
    model = nn.ModuleList([RecurrentLayer(pararnn.GRUCell, 3, 4), pararnn.ParaGRU(3, 4, 2)])
    model.append(model[0])
    model[1].layers[1].recurrent_clip = None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    pararnn.clip_after_step(optimizer, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(2.0)
    layers, real = [], RecurrentLayer.clip_recurrent

    def record(layer, *arguments):
        layers.append(layer)
        real(layer, *arguments)

    monkeypatch.setattr(RecurrentLayer, "clip_recurrent", record)
    optimizer.step()
    assert layers == [model[0], *model[1].layers]
    assert [layer.cell.a_z.max().item() for layer in layers] == [0.5, 0.5, 2.0]
    assert model[0].bias.max() == 2


WRONG = [
    (torch.zeros(2, 4), {}, r"Expected input to be \(B, T, 4\), got \(2, 4\)"),
    (torch.zeros(2, 3, 5), {}, r"Expected input to be \(B, T, 4\), got \(2, 3, 5\)"),
    (torch.zeros(2, 3, 4), {"initial": torch.zeros(1, 6)}, r"'h' must be \(2, 6\), got \(1, 6\)"),
    (torch.zeros(2, 3, 4), {"solver": "magic"}, "unknown solver 'magic'"),
]


@pytest.mark.parametrize(("x", "options", "message"), WRONG)
def test_wrong_inputs(x, options, message):
    with pytest.raises((ValueError, pararnn.EngineError), match=message):
        RecurrentLayer(pararnn.GRUCell, 4, 6)(x, **options)


def test_wrong_sizes():
    with pytest.raises(ValueError, match="hidden_size must be positive, got 0"):
        RecurrentLayer(pararnn.GRUCell, 4, 0)
    with pytest.raises(ValueError, match="multiples of num_heads = 4, got 4 and 6"):
        RecurrentLayer(pararnn.GRUCell, 4, 6, num_heads=4)
    with pytest.raises(ValueError, match=r"Expected input to be \(B, 4\), got \(2, 1, 4\)"):
        RecurrentLayer(pararnn.GRUCell, 4, 6).step(torch.zeros(2, 1, 4))
    for gradients in (True, False):
        wrong = pytest.raises(ValueError, match=r"Expected input to be \(B, 4\), got \(2, 5\)")
        with torch.set_grad_enabled(gradients), wrong:
            RecurrentLayer(pararnn.GRUCell, 4, 6).step(torch.zeros(2, 5))


# Draws.


def test_draws_cover_what_modules_own():
    layer = RecurrentLayer(pararnn.SLSTMCell, 4, 6, num_heads=2)
    for module in (layer, layer.proj, layer.cell):
        names = {*module._parameters, *module._buffers}
        assert set(module.draws()) == names
    assert layer.draws() == {"bias": Draw("constant")}
    assert RecurrentLayer(pararnn.GRUCell, 4, 6, bias=False).draws() == {}
    assert layer.proj.draws(2.0) == {"weight": Draw("uniform", spread=2 * math.sqrt(3 / 2))}
    cell = pararnn.GRUCell(16)
    assert cell.draws() == dict.fromkeys(("a_z", "a_r", "a_c"), Draw("normal", spread=0.25))
    assert cell.draws(0.125)["a_z"].spread == 0.125
    liquid = pararnn.LRCCell(6)  # Params that say their own
    own = {name for name, param in type(liquid).params.items() if param.std is not None}
    assert own
    assert all(liquid.draws(9.0)[name] == liquid.draws()[name] for name in own)


def test_a_seed_draws_what_it_drew():
    torch.manual_seed(0)
    stack = pararnn.ParaGRU(4, 6, num_layers=2, num_heads=2)
    torch.manual_seed(0)
    for part, inputs in zip(stack.layers, (2, 3), strict=True):
        bound = math.sqrt(3 / inputs)
        assert torch.equal(part.proj.weight, torch.empty(2, 9, inputs).uniform_(-bound, bound))
        for name in ("a_z", "a_r", "a_c"):
            assert torch.equal(getattr(part.cell, name), torch.empty(6).normal_(0, 6**-0.5))


def test_options_of_the_initialisation():
    options = {"projection_gain": math.sqrt(2), "recurrent_std": 0.01}
    for make in (pararnn.ParaGRU, lambda *a, **k: RecurrentLayer(pararnn.GRUCell, *a, **k)):
        torch.manual_seed(0)
        module = make(400, 600, **options)
        for _ in range(2):
            (weight,) = (p for n, p in module.named_parameters() if n.endswith("proj.weight"))
            assert weight.std().item() == pytest.approx(math.sqrt(2 / 400), rel=0.02)
            assert module.cell.a_z.std().item() == pytest.approx(0.01, rel=0.1)
            module.reset_parameters()


def test_a_cells_own_reset_is_kept():
    class Own(pararnn.GRUCell):
        def reset_parameters(self):
            for parameter in self.parameters():
                nn.init.constant_(parameter, 0.25)

    layer = RecurrentLayer(Own, 4, 6)
    layer.reset_parameters()
    assert (layer.cell.a_z == 0.25).all()


def test_kinds_of_draws():
    torch.manual_seed(0)
    noise = draw(torch.empty(10000), Draw("normal", 1.0, 2.0))
    assert noise.mean().item() == pytest.approx(1, abs=0.1)
    assert noise.std().item() == pytest.approx(2, rel=0.05)
    cut = draw(torch.empty(10000), Draw("normal", 1.0, 2.0, cut=1.5))
    assert 3.9 < cut.max() <= 4
    assert -2 <= cut.min() < -1.9
    uniform = draw(torch.empty(10000), Draw("uniform", 1.0, 2.0))
    assert 2.9 < uniform.max() <= 3
    assert -1 <= uniform.min() < -0.9
    assert (draw(torch.empty(3), Draw("constant", 7.0)) == 7).all()
    with pytest.raises(ValueError, match=r"kind must be one of .* got 'gaussian'"):
        Draw("gaussian")


def test_a_loader_may_keep_what_it_has_loaded(monkeypatch):
    """Its functions take the place of those of torch.nn.init, and see the parameters themselves."""
    layer = RecurrentLayer(pararnn.GRUCell, 4, 6)
    parameter, real = layer.cell.a_r, nn.init.normal_
    old = parameter.detach().clone()

    def normal_unless_loaded(tensor, *args, **options):
        return tensor if tensor is parameter else real(tensor, *args, **options)

    monkeypatch.setattr(nn.init, "normal_", normal_unless_loaded)
    others = layer.cell.a_z.detach().clone()
    layer.reset_parameters()
    assert torch.equal(parameter, old)
    assert not torch.equal(layer.cell.a_z, others)


def test_parametrised_parameters_are_drawn():
    class Doubled(nn.Module):
        def forward(self, half):
            return 2 * half

        def right_inverse(self, whole):
            return whole / 2

    layer = RecurrentLayer(pararnn.GRUCell, 4, 6, recurrent_std=0.5)
    parametrize.register_parametrization(layer.cell, "a_z", Doubled())
    old = layer.cell.a_z.detach().clone()
    torch.manual_seed(0)
    layer.reset_parameters()
    torch.manual_seed(0)
    torch.empty(1, 18, 4).uniform_()
    assert torch.allclose(layer.cell.a_z, torch.empty(6).normal_(0, 0.5))
    assert not torch.equal(layer.cell.a_z, old)


# Compiled.


def _compile(run, backend="aot_eager"):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(run, fullgraph=True, backend=counter), counter


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("pair", [FUSED, ("newton", "torch")], ids="-".join)
@pytest.mark.parametrize("kind", list(LAYERS))
@pytest.mark.thorough
def test_compiled_checkpointing(kind, pair, recompute):
    if pair not in PAIRS:
        pytest.skip("needs a C++ compiler")
    torch.manual_seed(0)
    layer = LAYERS[kind](recompute_gates=recompute, solver=pair[0], backend=pair[1])
    x = torch.randn(2, 9, 4, requires_grad=True)
    run, _ = _compile(lambda x: checkpoint(layer, x, use_reentrant=False)[0])
    results = []
    for output in (run(x), layer(x)[0]):
        grads = torch.autograd.grad(output.square().sum(), [x, *layer.parameters()])
        results.append((output, *grads))
    _close(*results)


def test_compiled_calls_record_nothing():
    layer, x = RecurrentLayer(pararnn.GRUCell, 4, 6), torch.randn(2, 9, 4)
    run, _ = _compile(layer)
    run(x)
    assert layer.last_solve is None
    layer(x, solver="newton", backend="torch")
    run(x)
    assert layer.last_solve.sweeps.any()  # of the eager call


def test_compiled_without_gradients():
    layer, x = RecurrentLayer(pararnn.LSTMCell, 4, 6), torch.randn(2, 9, 4)

    @torch.no_grad()
    def run(x):
        return layer(x)

    reference = run(x)
    output, final = _compile(run)[0](x)
    _close((output, *final), (reference[0], *reference[1]), 0)


def test_compiled_decoding():
    layer = RecurrentLayer(pararnn.LSTMCell, 4, 6)

    @torch.no_grad()
    def step(x, state):
        return layer.step(x, state)

    run, counter = _compile(step)
    state = reference = tuple(torch.zeros(2, 6) for _ in range(2))
    for _ in range(5):
        x = torch.randn(2, 4)
        y, state = run(x, state)
        z, reference = step(x, reference)
        _close((y, *state), (z, *reference))
    assert counter.frame_count == 1


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.rnn = nn.RMSNorm(6), RecurrentLayer(pararnn.GRUCell, 6, 6)

    def forward(self, x, state):
        y, state = self.rnn(self.norm(x), state)
        return x + y, state


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("of_blocks", [False, True])
@pytest.mark.thorough
def test_layers_of_one_shape_share_one_compilation(of_blocks, grad):
    counter = CompileCounterWithBackend("aot_eager")
    layers = [Block() if of_blocks else RecurrentLayer(pararnn.GRUCell, 6, 6) for _ in range(10)]
    states = [torch.randn(2, 6) for _ in layers]
    with torch.set_grad_enabled(grad):
        layers[4](torch.randn(2, 9, 6), states[4])  # an eager call leaves something behind
        for layer in layers:
            layer.compile(fullgraph=True, backend=counter)
        for _ in range(2):
            x = torch.randn(2, 9, 6)
            for layer, state in zip(layers, states, strict=True):
                x, _ = layer(x, state)
    assert counter.frame_count <= 1 + grad  # the first input needs no gradient, the others do


# Wrapped.


@pytest.mark.parametrize("kind", list(LAYERS))
def test_a_cell_that_peft_saves(kind, tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(before=nn.Linear(4, 4), rnn=LAYERS[kind]()))
    base = copy.deepcopy(model)
    x = torch.randn(2, 9, 4)
    old_output = model(x)[0]
    config = peft.LoraConfig(r=2, target_modules=["before"], modules_to_save=["cell"])
    lora_model = peft.get_peft_model(model, config)
    assert torch.equal(lora_model(x)[0], old_output)
    trainable = {name: p for name, p in lora_model.named_parameters() if p.requires_grad}
    assert sum("cell.modules_to_save" in name for name in trainable) in (5, 10)
    optimizer = torch.optim.SGD(trainable.values(), lr=1.0)
    pararnn.clip_after_step(optimizer, lora_model)
    lora_model(x)[0].square().sum().backward()
    optimizer.step()
    new_output = lora_model(x)[0]
    assert not torch.allclose(new_output, old_output)
    assert pararnn.verify(lora_model, x).passed
    assert pararnn.explain(model.rnn, x.shape).cell == "LSTMCell"
    with lora_model.disable_adapter():
        assert torch.equal(lora_model(x)[0], old_output)
    lora_model.save_pretrained(tmp_path)
    assert torch.equal(peft.PeftModel.from_pretrained(base, tmp_path)(x)[0], new_output)
    merged_model = lora_model.merge_and_unload()
    assert torch.allclose(merged_model(x)[0], new_output, atol=1e-6)
    assert isinstance(merged_model.rnn.cell, pararnn.LSTMCell)


def test_one_tensor_may_be_several_states_in_compiled_code():
    """One zero for h and c is common, and its gradient is the sum of both."""
    torch.manual_seed(0)
    layer, x = pararnn.RecurrentLayer(pararnn.LSTMCell, 4, 8), torch.randn(2, 6, 4)
    start = torch.randn(2, 8, requires_grad=True)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    ours, reference = (
        torch.autograd.grad(run(x, (start, start))[0].square().sum(), [start, *layer.parameters()])
        for run in (compiled, layer)
    )
    torch.testing.assert_close(ours, reference)
