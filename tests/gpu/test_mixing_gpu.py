"""Steps that mix channels inside heads, on a GPU: contract, sizes, layers, PyTorch's features."""

import threading
from functools import partial

import pytest
import torch
from captures import check_replays
from mixing_cells import CELLS, Coupled, Elman, HeadGRU, HeadLSTM, HeadSLSTM, Mixture, ResetAfter
from mixing_runs import KERNELS, LOOP, check_agreement, run_case
from oracle import failures
from table import DTYPES, by_head, check_case, dtype_name, gate_layouts, make_case
from torch.nn.utils.rnn import pack_sequence

import pararnn
from pararnn.base.numerics import FORWARD_TOLERANCE

F64, F32, BF16, F16 = DTYPES
WIDTHS, BATCHES = (16, 33, 64, 128, 20, 32), (1, 3, 8, 17, 67)
SMOOTH_CELLS = [cell_class for cell_class in CELLS if cell_class is not Mixture]
"""Cells without jumps, where rounding would decide a step's branch, and so its gradient."""
VARIANTS = ("plain", "resets", "packed", "reverse")


def _name(value):
    return value.__name__ if isinstance(value, type) else str(value).removeprefix("torch.")


def _case(cell_class, dtype=F32, length=50, variant="initial", **sizes):
    sizes = {"channels": 128, "num_heads": 4, "batch": 3, "device": "cuda", **sizes}
    return make_case(cell_class, dtype, length, variant, **sizes)


_check = partial(check_case, **KERNELS)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("cell_class", CELLS, ids=_name)
def test_kernels_obey_the_contract(cell_class, dtype):
    """Each cell and dtype at a width, a batch size and two variants of its own."""
    turn = CELLS.index(cell_class) + 2 * DTYPES.index(dtype)
    width, batch = WIDTHS[turn % len(WIDTHS)], BATCHES[turn % len(BATCHES)]
    if dtype == F64:
        width = min(width, 64)
    sizes = {"channels": 2 * width, "num_heads": 2, "batch": batch}
    events = VARIANTS[1 + turn % 3]
    check_agreement(_case(cell_class, dtype, 0, "initial", **sizes), FORWARD_TOLERANCE[dtype])
    check_agreement(_case(cell_class, dtype, 1, "initial", **sizes), FORWARD_TOLERANCE[dtype])
    loss = 1e-3 if dtype == F16 else 1e-9
    _check(_case(cell_class, dtype, 100, "plain", **sizes), loss_scale=loss)
    _check(_case(cell_class, dtype, 100, events, **sizes))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=dtype_name)
@pytest.mark.parametrize("cell_class", SMOOTH_CELLS, ids=_name)
def test_long_sequences_agree_with_the_cpu_in_float64(cell_class, dtype):
    sizes = {"channels": 128, "num_heads": 2, "device": "cpu"}
    assert not failures(_case(cell_class, dtype, 1000, "resets", **sizes))


WIDE = [
    (HeadLSTM, BF16, 256, 2),
    (HeadLSTM, BF16, 512, 1),
    (HeadLSTM, F16, 760, 1),
    (HeadLSTM, F32, 300, 2),
    (HeadSLSTM, BF16, 200, 3),
    (HeadSLSTM, F32, 768, 1),
    (HeadGRU, F32, 256, 1),
    (HeadGRU, BF16, 512, 1),
    (Coupled, BF16, 512, 1),
    (Elman, F32, 512, 1),
    (Elman, F64, 256, 1),
]


@pytest.mark.parametrize(("cell_class", "dtype", "width", "heads"), WIDE, ids=_name)
def test_wide_heads(cell_class, dtype, width, heads):
    sizes = {"channels": width * heads, "num_heads": heads}
    _check(_case(cell_class, dtype, 60, **sizes))
    _check(_case(cell_class, dtype, 60, "resets", **sizes))
    case = _case(cell_class, dtype, 30, "packed", **sizes)
    if (cell_class, dtype) == (HeadSLSTM, BF16):  # whose rounding decides which number is larger
        _check(case)
    else:
        check_agreement(case, 1e-4 if dtype in (F64, F32) else 2e-2)


def test_wide_heads_in_blocks_of_8_rows():
    sizes = {"channels": 512, "num_heads": 2}
    check_agreement(_case(HeadLSTM, BF16, 20, "resets", **sizes, batch=301), 2e-2)
    check_agreement(_case(HeadGRU, F32, 20, "resets", **sizes, batch=301), 1e-5)


def test_bits_of_wide_heads_repeat():
    case = _case(HeadLSTM, BF16, 200, channels=512, num_heads=1, batch=16)
    first = run_case(case, BF16, KERNELS)
    for _ in range(20):
        assert all(map(torch.equal, run_case(case, BF16, KERNELS), first))


@pytest.mark.parametrize("width", [1, 3, 5, 8, 40, 100])
def test_any_width_and_number_of_rows(width):
    for batch in (1, 4, 9, 67):
        sizes = {"channels": 3 * width, "num_heads": 3, "batch": batch}
        check_agreement(_case(HeadGRU, F32, 6, **sizes), 1e-5)


def test_batches_that_fill_the_gpu():
    """More blocks than multiprocessors, each of 8 rows."""
    sizes = {"channels": 256, "num_heads": 8, "batch": 333}
    check_agreement(_case(HeadLSTM, F32, 30, "resets", **sizes), 1e-5)
    check_agreement(_case(HeadLSTM, BF16, 30, "resets", **sizes), FORWARD_TOLERANCE[BF16])


def _train_like(cell_class, dtype, length=300):
    """Return a case with large recurrent weights, and channels that never forget."""
    case = _case(cell_class, dtype, length)
    with torch.no_grad():
        for parameter in case.cell.recurrent_parameters():
            parameter.copy_(torch.randn_like(parameter) * 2 * parameter.shape[-1] ** -0.5)
        gate = {"HeadLSTM": 1, "HeadSLSTM": 1, "ResetAfter": 1}.get(cell_class.__name__, 0)
        latches = 20.0 if "LSTM" in cell_class.__name__ else -20.0
        case.gates.mul_(2)[:, :, gate, ::7] += latches
    return case


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=dtype_name)
@pytest.mark.parametrize("cell_class", [HeadLSTM, ResetAfter, HeadSLSTM], ids=_name)
def test_weights_as_trained(cell_class, dtype):
    _check(_train_like(cell_class, dtype))


def test_matrices_in_single_precision_with_gates_in_bfloat16():
    case = _case(HeadLSTM, BF16, 100)
    case.cell.float()
    with torch.no_grad():
        for parameter in case.cell.parameters():
            parameter.mul_(1.001)  # no numbers of bfloat16
    _check(case)


def test_layouts_of_gates():
    case = _case(HeadGRU, F32, 20)
    reference = run_case(case, F32, KERNELS)
    for name, gates in gate_layouts(by_head(case.gates, 4)).items():
        if name == "expanded":
            continue
        results = run_case(case._replace(gates=gates), F32, KERNELS)
        for value, other in zip(results, reference, strict=True):
            torch.testing.assert_close(value.reshape(other.shape), other, msg=name)
    one = torch.randn(1 + case.gates.numel(), device="cuda")[1:].view(case.gates.shape)
    check_agreement(case._replace(gates=one), 1e-5)  # not aligned


def test_fields_by_step_and_by_channel():
    case = _case(Coupled, F32, 40)
    check_agreement(case, 1e-5)
    fields = {"dt": torch.rand(3, 40, 128, device="cuda")}
    check_agreement(case._replace(options={"fields": fields}), 1e-5)


def test_gradients_arrive_at_some_states_only():
    case = _case(HeadLSTM, F32, 20)
    for arriving in ([1], [2], [0, 3]):
        check_agreement(case, 1e-5, arriving=arriving)


def test_frozen_parameters_leave_other_gradients_alone():
    case = _case(ResetAfter, F32, 20)
    case.cell.R_z.requires_grad_(False)
    check_agreement(case, 1e-5)
    for parameter in case.cell.parameters():
        parameter.requires_grad_(False)
    check_agreement(case, 1e-5)


def test_non_finite_inputs_spread_as_in_the_loop():
    case = _case(HeadGRU, F32, 30)
    case.gates[1, 4, 0, 2] = torch.nan
    case.gates[2, 2, 1, 9] = torch.inf
    states, reference = (
        pararnn.solve(case.cell, case.gates, **pair)[0] for pair in (KERNELS, LOOP)
    )
    assert torch.equal(states.isnan(), reference.isnan())
    assert states.isnan().any()
    assert states[0].isfinite().all()


def test_bits_repeat_and_rows_do_not_depend_on_each_other():
    case = _case(HeadLSTM, F32, 40, batch=19)
    first, again = (run_case(case, F32, KERNELS) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    part = case._replace(gates=case.gates[8:11], initial=tuple(h[8:11] for h in case.initial))
    for value, other in zip(run_case(part, F32, KERNELS)[:4], first[:4], strict=True):
        torch.testing.assert_close(value, other[8:11])  # blocks of fewer rows are another kernel


def _layer(cell_class=HeadLSTM, **options):
    torch.manual_seed(0)
    options = {"num_heads": 4, "device": "cuda", "backend": "fused", **options}
    if "num_layers" in options:
        layer = pararnn.ParaRNN(cell_class, 32, 128, batch_first=True, **options)
    else:
        layer = pararnn.RecurrentLayer(cell_class, 32, 128, **options)
    x = torch.randn(3, 50, 32, device="cuda", dtype=next(layer.parameters()).dtype)
    return layer, x.requires_grad_()


def _grads(layer, x, call=None, **options):
    """Return the output, the final states, and gradients of the input and of all parameters."""
    output, final = (layer if call is None else call)(x, **options)
    output = output.data if hasattr(output, "batch_sizes") else output
    final = final if isinstance(final, tuple) else (final,)
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape)
    loss = (output * weights.to(output.dtype)).sum() + sum(h.sin().sum() for h in final)
    leaf = x.data if hasattr(x, "batch_sizes") else x
    return [output, *final, *torch.autograd.grad(loss, [leaf, *layer.parameters()])]


def _same(values, reference, tolerance=1e-5):
    for value, other in zip(values, reference, strict=True):
        error = float((value - other).detach().abs().max())
        assert error <= tolerance * float(other.abs().max()), error


@pytest.mark.parametrize("bidirectional", [False, True])
def test_layers_agree_with_the_loop(bidirectional):
    layer, x = _layer(num_layers=2, bidirectional=bidirectional, dtype=F64)
    reset = torch.rand(3, 50, device="cuda") < 0.1
    data = [torch.randn(n, 32, device="cuda", dtype=F64) for n in (50, 9, 31)]
    sequences = pack_sequence(data, enforce_sorted=False)
    sequences.data.requires_grad_()
    calls = [
        (x, {}),
        (x, {"reset": reset}),
        (x, {"lengths": [50, 7, 1], "reset": reset}),
        (sequences, {}),
    ]
    for inputs, options in calls:
        values = _grads(layer, inputs, **options)
        layer.solver, layer.backend = LOOP["solver"], LOOP["backend"]
        _same(values, _grads(layer, inputs, **options), 1e-10)
        layer.solver, layer.backend = "auto", "fused"


@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-10), (F32, 1e-4)], ids=str)
@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_layers_are_those_of_torch_nn(name, dtype, tolerance, monkeypatch):
    """With their weights, in both directions, of rows as long as others and of packed ones."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    options = {"num_layers": 2, "bidirectional": True, "device": "cuda", "dtype": dtype}
    theirs = getattr(torch.nn, name)(32, 96, batch_first=True, **options)
    ours = getattr(pararnn, name)(32, 96, batch_first=True, backend="fused", **options)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 50, 32, device="cuda", dtype=dtype, requires_grad=True)
    sequences = pack_sequence([x.detach()[0], x.detach()[1, :9]])
    sequences.data.requires_grad_()
    for inputs in (x, sequences):
        _same(_grads(ours, inputs), _grads(theirs, inputs), tolerance)


@pytest.mark.parametrize("cell_class", [HeadGRU, HeadSLSTM, Coupled], ids=_name)
def test_layers_of_other_cells(cell_class):
    layer, x = _layer(cell_class)
    fields = {name: torch.rand(3, 50, device="cuda") for name in cell_class.fields}
    options = {"fields": fields} if fields else {}
    values = _grads(layer, x, **options)
    layer.solver, layer.backend = LOOP["solver"], LOOP["backend"]
    _same(values, _grads(layer, x, **options), 1e-4)


def test_auto_takes_the_kernels():
    layer, x = _layer()
    layer.backend = "auto"
    layer(x)
    assert layer.choice.pair == ("sequential", "fused")


@pytest.mark.parametrize("dtype", [BF16, F16], ids=dtype_name)
def test_autocast(dtype):
    layer, x = _layer()
    reference = _grads(layer, x)
    with torch.autocast("cuda", dtype):
        values = _grads(layer, x)
    assert values[0].dtype == dtype
    _same(values, reference, 0.05)


def test_compile_fullgraph():
    layer, x = _layer()
    call = torch.compile(layer, fullgraph=True)
    _same(_grads(layer, x, call), _grads(layer, x))


@pytest.mark.parametrize("cell_class", [HeadLSTM, HeadGRU], ids=_name)
def test_cuda_graphs(cell_class):
    layer, x = _layer(cell_class)
    check_replays(lambda x: _grads(layer, x), x)


def test_no_memory_growth():
    layer, x = _layer()

    def train():
        for value in _grads(layer, x):
            del value
        layer(x)[0].sum().backward()
        x.grad = None
        layer.zero_grad()

    for _ in range(3):
        train()
    old_bytes = torch.cuda.memory_allocated()
    for _ in range(100):
        train()
    assert torch.cuda.memory_allocated() <= old_bytes


def test_no_synchronisation_with_the_host():
    layer, x = _layer()
    reset = torch.rand(3, 50, device="cuda") < 0.1
    _grads(layer, x, reset=reset)
    torch.cuda.set_sync_debug_mode("error")
    try:
        _grads(layer, x, reset=reset)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_threads_and_streams_do_not_disturb_each_other():
    layers = [_layer(cell_class) for cell_class in (HeadLSTM, HeadGRU)]
    reference = [_grads(layer, x) for layer, x in layers]
    torch.cuda.synchronize()
    errors = []

    def train(index):
        layer, x = layers[index]
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    values = _grads(layer, x)
                torch.cuda.current_stream().synchronize()
            _same(values, reference[index], 0.0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_devices():
    layer, x = _layer()
    reference = _grads(layer, x)
    other, there = layer.to("cuda:1"), x.detach().to("cuda:1").requires_grad_()
    assert torch.cuda.current_device() == 0
    values = _grads(other, there)
    _same([t.cpu() for t in values], [t.cpu() for t in reference], 1e-6)


def test_steps_agree_with_sequences():
    layer, x = _layer(num_layers=2)
    with torch.no_grad():
        reference, final = layer(x)
        state, outputs = None, []
        for t in range(x.shape[1]):
            y, state = layer.step(x[:, t], state)
            outputs.append(y)
    _same([torch.stack(outputs, 1), *state], [reference, *final], 1e-5)


def test_a_head_that_is_too_wide_is_named_with_the_cure():
    case = make_case(Elman, F64, 2, channels=4096, num_heads=1, batch=1, device="cuda")
    message = "Elman with heads of 4096 channels needs .* Use more heads, or backend='torch'"
    with pytest.raises(pararnn.EngineError, match=message):
        pararnn.solve(case.cell, case.gates, **KERNELS)
