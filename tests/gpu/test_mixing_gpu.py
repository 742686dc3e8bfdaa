"""Steps that mix channels inside heads, on a GPU: contract, sizes, layers, PyTorch's features."""

import threading
from functools import partial

import pytest
import torch
from mixing_cells import CELLS, Coupled, Elman, HeadGRU, HeadLSTM, HeadSLSTM, Mixture, ResetAfter
from mixing_runs import KERNELS, LOOP, check_agreement, check_layouts, run_case
from oracle import failures
from table import DTYPES, check_case, dtype_name, make_case
from test_fused_torch_gpu import agree, grads_of, layer_of
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
    check_layouts(case, F32, KERNELS)
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


@pytest.mark.parametrize("bidirectional", [False, True])
def test_layers_agree_with_the_loop(bidirectional):
    layer, x = layer_of(HeadLSTM, num_layers=2, bidirectional=bidirectional, dtype=F64)
    reset = torch.rand(3, 50, device="cuda") < 0.1
    data = [torch.randn(n, 64, device="cuda", dtype=F64) for n in (50, 9, 31)]
    sequences = pack_sequence(data, enforce_sorted=False)
    sequences.data.requires_grad_()
    calls = [
        (x, {}),
        (x, {"reset": reset}),
        (x, {"lengths": [50, 7, 1], "reset": reset}),
        (sequences, {}),
    ]
    for inputs, options in calls:
        values = grads_of(layer, inputs, **options)
        layer.solver, layer.backend = LOOP["solver"], LOOP["backend"]
        agree(values, grads_of(layer, inputs, **options), 1e-10)
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
        agree(grads_of(ours, inputs), grads_of(theirs, inputs), tolerance)


@pytest.mark.parametrize("cell_class", [HeadGRU, HeadSLSTM, Coupled], ids=_name)
def test_layers_of_other_cells(cell_class):
    layer, x = layer_of(cell_class)
    fields = {name: torch.rand(3, 50, device="cuda") for name in cell_class.fields}
    options = {"fields": fields} if fields else {}
    values = grads_of(layer, x, **options)
    layer.solver, layer.backend = LOOP["solver"], LOOP["backend"]
    agree(values, grads_of(layer, x, **options), 1e-4)


def test_auto_takes_the_kernels():
    layer, x = layer_of(HeadLSTM)
    layer.backend = "auto"
    layer(x)
    assert layer.layers[0].choice.pair == ("sequential", "fused")


def test_no_memory_growth():
    layer, x = layer_of(HeadLSTM)

    def train():
        for value in grads_of(layer, x):
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


def test_threads_and_streams_do_not_disturb_each_other():
    layers = [layer_of(cell_class) for cell_class in (HeadLSTM, HeadGRU)]
    reference = [grads_of(layer, x) for layer, x in layers]
    torch.cuda.synchronize()
    errors = []

    def train(index):
        layer, x = layers[index]
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    values = grads_of(layer, x)
                torch.cuda.current_stream().synchronize()
            agree(values, reference[index], 0.0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_head_that_is_too_wide_is_named_with_the_cure():
    case = make_case(Elman, F64, 2, channels=4096, num_heads=1, batch=1, device="cuda")
    message = "Elman with heads of 4096 channels needs .* Use more heads, or backend='torch'"
    with pytest.raises(pararnn.EngineError, match=message):
        pararnn.solve(case.cell, case.gates, **KERNELS)
