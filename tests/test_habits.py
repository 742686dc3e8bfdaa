"""What PyTorch users do with any layer, each time against autograd through the loop."""

import copy
import io
import pickle

import pytest
import torch
from call_results import as_tuple
from fresh import run_fresh
from table import FUSED, PAIRS, PLAIN, dtype_name, has_compiler
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

import pararnn

NEAR = {torch.bfloat16: 0.06, torch.float16: 0.01, torch.float32: 2e-5, torch.float64: 1e-10}
layers = pytest.mark.parametrize("cls", [pararnn.ParaGRU, pararnn.ParaLSTM], ids=["gru", "lstm"])
pairs = pytest.mark.parametrize("pair", [("newton", "torch"), FUSED], ids="-".join)


def layer_of(cls, pair, device, **options):
    """A layer by a pair: two layers of two heads in float64, unless options say otherwise."""
    if pair == FUSED and device == "cpu" and not has_compiler():
        pytest.skip("needs a C++ compiler")
    torch.manual_seed(0)
    options = {"num_layers": 2, "num_heads": 2, "dtype": torch.float64} | options
    return cls(4, 6, solver=pair[0], backend=pair[1], device=device, **options)


def loop_of(layer):
    """The same layer by plain PyTorch, one step after the other: the reference."""
    loop = copy.deepcopy(layer)
    loop.solver, loop.backend = PLAIN
    return loop


def input_of(layer, batch=3, steps=9):
    weight = next(layer.parameters())
    return torch.randn(batch, steps, layer.input_size, device=weight.device, dtype=weight.dtype)


def state_of(layer, batch=3):
    """Initial states with the same numbers for every layer of a size."""
    count = layer.num_layers * (1 + layer.bidirectional)
    generator = torch.Generator().manual_seed(1)
    weight = next(layer.parameters())
    names = layer.cell.states
    shape = (len(names), count, batch, layer.hidden_size)
    states = torch.randn(shape, generator=generator, dtype=torch.float64)
    return tuple(states.to(weight.device, weight.dtype).unbind())


def packed_states(states):
    return states if len(states) > 1 else states[0]


def loss_of(*outputs):
    """A number to which every entry contributes in its own way."""
    total = 0
    for output in outputs:
        weights = torch.linspace(-1, 1, output.numel(), device=output.device, dtype=torch.float64)
        total = total + (output.double() * weights.view(output.shape)).sum()
    return total


def results(layer, x, run=None, parameters=None, **options):
    """Outputs, final states and the gradients of all that takes one, by name."""
    x = x.detach().clone().requires_grad_()
    start = [state.clone().requires_grad_() for state in state_of(layer, x.shape[0])]
    output, h_n = (layer if run is None else run)(x, packed_states(tuple(start)), **options)
    by_name = {"output": output} | {f"final {i}": h for i, h in enumerate(as_tuple(h_n))}
    leaves = {"x": x} | {f"start {i}": h for i, h in enumerate(start)}
    leaves |= parameters or dict(layer.named_parameters())
    leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    grads = torch.autograd.grad(loss_of(*by_name.values()), list(leaves.values()))
    return by_name | {f"grad {name}": g for name, g in zip(leaves, grads, strict=True)}


def agree(got, reference, tolerance=NEAR[torch.float64]):
    assert got.keys() == reference.keys()
    for name, value in reference.items():
        error, size = (got[name].double() - value.double()).abs().max(), value.double().abs().max()
        assert size > 0, name
        assert error <= tolerance * size, (name, float(error / size))


def same(got, reference):
    """Bit for bit."""
    assert got.keys() == reference.keys()
    assert all(torch.equal(got[name], value) for name, value in reference.items())


def passes_afresh(*lines, folder):
    """Run a script in a process of its own, with a path."""
    process = run_fresh("\n".join(["import sys, torch", *lines]), str(folder))
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
@layers
@pairs
@pytest.mark.one_in(3)
def test_autocast(cls, pair, dtype, device):
    layer = layer_of(cls, pair, device, dtype=torch.float32)
    x, loop = input_of(layer), loop_of(layer)
    autocast = torch.autocast(device, dtype)
    got = results(layer, x, autocast(layer.forward))
    assert got["output"].dtype == dtype
    assert {value.dtype for name, value in got.items() if name != "output"} == {torch.float32}
    agree(got, results(loop, x, autocast(loop.forward)), NEAR[dtype])
    agree(got, results(loop, x), NEAR[dtype])


@layers
@pairs
def test_grad_scaler(cls, pair, device):
    layer = layer_of(cls, pair, device, dtype=torch.float32)
    x, loop = input_of(layer), loop_of(layer)

    def step(module, scale):
        optimizer, scaler = torch.optim.SGD(module.parameters(), lr=0.5), torch.amp.GradScaler
        scaler = scaler(device, init_scale=scale)
        with torch.autocast(device, torch.float16):
            loss = (module(x)[0].float() - 0.3).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return {name: p.detach().clone() for name, p in module.named_parameters()}, scaler

    old = {name: p.detach().clone() for name, p in layer.named_parameters()}
    new, _ = step(layer, 1024.0)
    changes = {name: new[name] - old[name] for name in old}
    reference = step(loop, 1024.0)[0]
    agree(changes, {name: reference[name] - old[name] for name in old}, NEAR[torch.float16])
    again, scaler = step(layer, 1e38)
    same(again, new)  # gradients that overflow take no step
    assert scaler.get_scale() < 1e38


@layers
@pairs
def test_deepcopy(cls, pair, device):
    layer = layer_of(cls, pair, device)
    x = input_of(layer)
    old = results(layer, x)
    other = copy.deepcopy(layer)
    same(results(other, x), old)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    same(results(layer, x), old)
    agree(results(other, x), results(loop_of(other), x))
    assert not torch.allclose(results(other, x)["output"], old["output"])


@layers
@pairs
def test_pickle_and_save(cls, pair, device):
    layer = layer_of(cls, pair, device)
    x = input_of(layer)
    reference = results(layer, x)
    same(results(pickle.loads(pickle.dumps(layer)), x), reference)
    whole, weights = io.BytesIO(), io.BytesIO()
    torch.save(layer, whole)
    torch.save(layer.state_dict(), weights)
    whole.seek(0)
    weights.seek(0)
    same(results(torch.load(whole, weights_only=False), x), reference)
    fresh = cls(4, 6, 2, num_heads=2, dtype=x.dtype, device=device, solver=pair[0], backend=pair[1])
    fresh.load_state_dict(torch.load(weights, weights_only=True))
    same(results(fresh, x), reference)


@pairs
def test_pickle_in_a_fresh_process(pair, tmp_path, device):
    cases = []
    for cls in (pararnn.ParaGRU, pararnn.ParaLSTM):
        layer = layer_of(cls, pair, device)
        x = input_of(layer)
        with torch.no_grad():
            _, state = layer(x)
            cases.append((layer, x, state, layer(x, state)[0]))
    (tmp_path / "cases").write_bytes(pickle.dumps(cases))
    passes_afresh(
        "import pickle",
        "for layer, x, state, expected in pickle.load(open(sys.argv[1], 'rb')):",
        "    assert torch.equal(layer(x, state)[0], expected)",
        folder=tmp_path / "cases",
    )


@layers
@pairs
def test_functional_call(cls, pair, device):
    layer = layer_of(cls, pair, device)
    x = input_of(layer)
    own = results(layer, x)
    other = {
        name: (p * 0.8 + 0.1).detach().requires_grad_() for name, p in layer.named_parameters()
    }

    def run(x, h_0):
        return torch.func.functional_call(layer, other, (x, h_0))

    got = results(layer, x, run, parameters=other)
    loop = loop_of(layer)
    loop.load_state_dict(other)
    agree(got, results(loop, x))
    grads = torch.func.grad(lambda p: loss_of(torch.func.functional_call(layer, p, (x,))[0]))(other)
    reference = torch.autograd.grad(loss_of(loop(x)[0]), list(loop.parameters()))
    agree(grads, dict(zip(other, reference, strict=True)))
    same(results(layer, x), own)
    copy.deepcopy(layer)  # nothing of the transform stays behind


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=dtype_name)
@layers
@pairs
def test_state_dict_across_dtypes_and_devices(cls, pair, dtype, device):
    source = layer_of(cls, PLAIN, "cpu", dtype=torch.float32)
    layer = layer_of(cls, pair, device, dtype=dtype)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(0.5)
    layer.load_state_dict(source.state_dict())
    for name, parameter in layer.named_parameters():
        assert (parameter.device.type, parameter.dtype) == (device, dtype)
        assert torch.equal(parameter.cpu(), source.get_parameter(name).to(dtype))
    x = input_of(layer)
    agree(results(layer, x), results(loop_of(layer), x), NEAR[dtype])
    source.load_state_dict(layer.state_dict())
    assert {p.dtype for p in source.parameters()} == {torch.float32}


@layers
@pairs
def test_meta_device(cls, pair, device):
    layer = layer_of(cls, pair, device)
    x = input_of(layer)
    meta = layer_of(cls, pair, "meta")
    assert all(p.is_meta for p in meta.parameters())
    meta.load_state_dict(layer.state_dict(), assign=True)
    same(results(meta, x), results(layer, x))
    meta = layer_of(cls, pair, "meta").to_empty(device=device)
    torch.manual_seed(0)
    meta.reset_parameters()
    same(meta.state_dict(), layer.state_dict())


@pytest.mark.parametrize("frozen", ["x", "proj", "cell", "bias", "layers"])
@layers
@pairs
def test_frozen_parameters(cls, pair, frozen, device):
    layer = layer_of(cls, pair, device)
    x = input_of(layer)
    reference = results(loop_of(layer), x)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(frozen not in name)
    start = packed_states(state_of(layer))
    leaf = x.clone().requires_grad_(frozen != "x")
    output, h_n = layer(leaf, start)
    assert output.requires_grad == (frozen != "layers" or leaf.requires_grad)
    loss_of(output, *as_tuple(h_n)).backward()
    grads = {"x": leaf.grad} | {name: p.grad for name, p in layer.named_parameters()}
    for name, grad in grads.items():
        assert (grad is None) == (frozen in name), name
    trainable = {name: grad for name, grad in grads.items() if grad is not None}
    agree(trainable, {name: reference[f"grad {name}"] for name in trainable})
    assert not layer.requires_grad_(False)(x)[0].requires_grad


@layers
@pairs
def test_no_grad_and_inference_mode(cls, pair, device):
    layer = layer_of(cls, pair, device)
    x = input_of(layer)
    reference = layer(x)[0]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            output, _ = layer(x)
            y, state = layer.step(x[:, 0])
        assert torch.equal(output, reference)
        assert not output.requires_grad
        assert torch.allclose(y, reference[:, 0], atol=1e-12)
        assert len(as_tuple(state)) == len(layer.cell.states)
    copy.deepcopy(layer)


@layers
@pairs
def test_train_and_eval(cls, pair, device):
    layer = layer_of(cls, pair, device, dropout=0.5)
    x, both_results = input_of(layer), []
    for module in (layer, loop_of(layer)):
        torch.manual_seed(1)
        both_results.append(results(module, x))
    agree(*both_results)
    plain = layer_of(cls, pair, device)
    same(results(layer.eval(), x), results(plain, x))
    assert not torch.allclose(layer.train()(x)[0], plain(x)[0])


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
@layers
@pairs
def test_activation_checkpointing(cls, pair, reentrant, device):
    layer = layer_of(cls, pair, device)

    def flat(x, *start):  # reentrant checkpoints pass gradients of plain tensors only
        output, h_n = layer(x, packed_states(start))
        return output, *as_tuple(h_n)

    def run(x, start):
        output, *h_n = checkpoint(flat, x, *as_tuple(start), use_reentrant=reentrant)
        return output, tuple(h_n)

    x = input_of(layer)
    if not reentrant:
        agree(results(layer, x, run), results(loop_of(layer), x))
        return
    leaves = [t.clone().requires_grad_() for t in (x, *state_of(layer))]
    output, h_n = run(leaves[0], tuple(leaves[1:]))
    loss_of(output, *h_n).backward()  # reentrant checkpoints know no torch.autograd.grad
    reference = results(loop_of(layer), x)
    by_name = dict(zip(["x", *(f"start {i}" for i in range(len(h_n)))], leaves, strict=True))
    by_name |= dict(layer.named_parameters())
    agree({k: v.grad for k, v in by_name.items()}, {k: reference[f"grad {k}"] for k in by_name})


@layers
@pairs
def test_recompute_gates(cls, pair, device):
    layer = layer_of(cls, pair, device, recompute_gates=True)
    x = input_of(layer)
    agree(results(layer, x), results(loop_of(layer), x))
    same(results(layer, x), results(layer_of(cls, pair, device), x))


@layers
@pairs
def test_hooks(cls, pair, device):
    layer = layer_of(cls, pair, device)
    x, calls = input_of(layer), []
    reference = results(loop_of(layer), x)
    inner = layer.layers[1]
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.register_forward_hook(lambda *_: calls.append("after"))
    inner.register_forward_hook(lambda *_: calls.append("layer"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    inner.proj.register_full_backward_hook(lambda *_: calls.append("projection backward"))
    agree(results(layer, x), reference)
    assert calls == ["before", "layer", "after", "projection backward", "backward"]
    handle = layer.cell.a_z.register_hook(lambda grad: 2 * grad)
    doubled_grad = {"grad layers.0.cell.a_z": 2 * reference["grad layers.0.cell.a_z"]}
    agree(results(layer, x), reference | doubled_grad)
    handle.remove()
    layer.cell.a_z.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad))
    loss_of(layer(x.requires_grad_())[0]).backward()
    assert any(item is layer.cell.a_z.grad for item in calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=dtype_name)
@layers
@pairs
def test_moving_between_dtypes(cls, pair, dtype, device):
    layer = layer_of(cls, pair, device)
    old = dict(layer.named_parameters())
    short = {torch.float32: "float", torch.bfloat16: "bfloat16", torch.float16: "half"}[dtype]
    getattr(layer, short)()
    assert all(p is old[name] for name, p in layer.named_parameters())
    x = input_of(layer)
    got = results(layer, x)
    assert got["output"].dtype == dtype
    assert {v.dtype for name, v in got.items() if name.startswith("grad")} == {dtype}
    agree(got, results(loop_of(layer), x), NEAR[dtype])
    layer.to(device, torch.float64)
    agree(results(layer, x.double()), results(loop_of(layer), x.double()))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_another_default_device_changes_nothing(pair):
    layer, x = layer_of(pararnn.ParaGRU, pair, "cpu"), torch.randn(2, 40, 4, dtype=torch.float64)
    sequence = pack_padded_sequence(x, [40, 9], batch_first=True)
    options = {"solver": pair[0], "backend": pair[1]}

    def calls():
        yield layer(x)[0]
        yield layer(x, lengths=[3, 40])[0]
        yield layer(sequence)[0].data
        yield pararnn.scan(x, x, lengths=[3, 40], **options)

    reference = list(calls())
    with torch.device("meta"):
        assert all(map(torch.equal, calls(), reference))
        assert pararnn.verify(layer, x).passed
