"""The property table and the hard cases on a GPU."""

import pytest
import torch
from table import (
    ALL_PAIRS,
    CELLS,
    DTYPES,
    LATCHES,
    PEAKS,
    VARIANTS,
    broken,
    case_of,
    check_case,
    check_contract,
    covering,
    dtype_name,
    make_case,
    pairs_of,
    passed,
    peak_case,
    with_checks,
)

import pararnn


@pytest.mark.parametrize("length", [0, 1, 2, 3, 17, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("name", CELLS)
def test_solves_obey_the_contract(name, dtype, length):
    pairs = pairs_of(name, ALL_PAIRS)
    for variant in VARIANTS:
        case = make_case(pararnn.CELLS[name], dtype, length, variant, device="cuda")
        assert not broken(with_checks(case, pairs, segments=5, burn_in=8)), variant


@pytest.mark.parametrize(("row", "name", "dtype"), covering())
def test_rows_obey_the_contract(row, name, dtype):
    case = case_of(row, name, dtype, device="cuda")
    assert not broken(with_checks(case, pairs_of(name, ALL_PAIRS), row.segments, burn_in=8))


@pytest.mark.filterwarnings("ignore::pararnn.ConvergenceWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("peak", PEAKS)
@pytest.mark.parametrize("name", LATCHES)
def test_values_that_come_late_large_and_rare(name, peak, dtype):
    """By each pair, and by the one that `auto` takes for a long row."""
    case = peak_case(name, peak, dtype, 256, device="cuda")
    for result in with_checks(case, ALL_PAIRS, segments=8, burn_in=8):
        passed(result)
    case = peak_case(name, peak, dtype, 1 << 14, device="cuda")
    output, reference = (
        pararnn.solve(case.cell, case.gates, solver=solver, backend=backend, **case.options)[0]
        for solver, backend in (("auto", "auto"), ("sequential", "fused"))
    )
    before = slice(71, -20)  # no peak but the first
    worst = (output - reference)[:, before].abs().max()
    assert worst <= 0.02 * reference[:, before].abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize(("name", "cell_class"), CELLS.items(), ids=CELLS)
def test_long_sequences(name, cell_class, dtype):
    channels = 8 if name == "dense-gru" else 64
    case = make_case(cell_class, dtype, 1000, "resets", channels=channels, device="cuda")
    check_case(case, solver="newton")


@pytest.mark.filterwarnings("ignore::pararnn.ConvergenceWarning")
@pytest.mark.parametrize("scale", [1, 4])
@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_large_recurrent_weights(name, scale):
    case = make_case(pararnn.CELLS[name], torch.float32, 1000, channels=16, device="cuda")
    with torch.no_grad():
        for parameter in case.cell.recurrent_parameters():
            parameter.copy_(torch.randn_like(parameter) * scale)
    check_contract(case.cell, case.gates * 3, solver="newton")


def test_non_finite_inputs():
    case = make_case(pararnn.LSTMCell, torch.float32, 100, channels=5, device="cuda")
    case.gates[0, 40, 0, 2] = float("nan")
    (newton, _), _ = pararnn.solve(case.cell, case.gates, solver="newton")
    (loop, _), _ = pararnn.solve(case.cell, case.gates, solver="sequential")
    assert torch.equal(newton.isnan(), loop.isnan())
    assert newton.isnan().any()


def test_gradients_keep_the_layout_of_the_gates():
    cell = pararnn.GRUCell(6, num_heads=3, device="cuda")
    gates = torch.randn(3, 2, 80, 3, 2, device="cuda").permute(1, 2, 3, 0, 4).requires_grad_()
    states, _ = pararnn.solve(cell, gates, solver="newton")
    (grad,) = torch.autograd.grad(states.sum(), gates)
    assert grad.stride() == gates.stride()


def test_devices_must_agree():
    with pytest.raises(ValueError, match="the cell is on cpu and gates on cuda:0"):
        pararnn.solve(pararnn.GRUCell(4), torch.zeros(1, 3, 3, 4, device="cuda"))


def test_layers_train_under_autocast():
    torch.manual_seed(0)
    layer = pararnn.ParaLSTM(32, 64, num_layers=2, num_heads=4, device="cuda")
    optimizer = torch.optim.AdamW(layer.parameters(), 1e-2)
    pararnn.clip_after_step(optimizer, layer)
    x = torch.randn(4, 256, 32, device="cuda")
    losses = []
    for _ in range(5):
        with torch.autocast("cuda", torch.bfloat16):
            output, _ = layer(x)
            assert output.dtype == torch.bfloat16
            loss = (output.float() - 0.3).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert layer.last_solve.mended.tolist() == [0, 0]
    assert pararnn.verify(layer, x[:1, :100])


def test_compile_fullgraph():
    layer = pararnn.ParaGRU(16, 32, solver="newton", device="cuda")
    x = torch.randn(2, 128, 16, device="cuda")
    program = torch.compile(layer, fullgraph=True)
    assert torch.allclose(program(x)[0], layer(x)[0], atol=1e-5)


def test_demo_runs(tmp_path):
    from pararnn.lab.cli import main

    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 800)
    arguments = ["demo", "--steps", "20", "--data.train", str(text), "--data.cache", str(tmp_path)]
    assert main([*arguments, "--out", str(tmp_path / "out")]) in (0, None)
    assert (tmp_path / "out").exists()
