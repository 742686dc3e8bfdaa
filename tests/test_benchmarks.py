"""What the benchmarks compute besides times."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pararnn import GRUCell
from pararnn.engines import fused_cpu, rule
from pararnn.lm import LanguageModel, LMConfig
from pararnn.program.program import program_of
from pararnn.solve import prepare, run
from pararnn.train import DemoConfig
from pararnn.tune.adapt import SWEEP_COST

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import auto_layers
import gpu
import host_call
import kernels
import parallel
import scaling
import segments
import start
import tables_cuda
import trained

CASES = {case.name: case for case in parallel.HARD}


def test_steps_to_merge_tell_latches_from_what_forgets() -> None:
    cell = GRUCell(3)
    for parameter in cell.parameters():
        torch.nn.init.zeros_(parameter)
    gates = torch.zeros(1, 600, 3, 3)
    gates[:, :, 2] = 1.0  # the candidate is tanh(1)
    gates[:, :, 0, 0] = 50.0  # forgets at once
    gates[:, 50:, 0, 1] = -50.0  # never again, once it has a state
    args = prepare(cell, gates, bias=torch.zeros(3, 3))  # the last channel halves what is left
    steps = trained.steps_to_merge(cell, args, starts=3, window=100)
    halvings = math.floor(math.log2(math.tanh(1.0) / trained.MERGED))
    assert steps.tolist() == [[0, 100, halvings]] * 3


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_solves_are_those_of_the_models_layers(cell: str) -> None:
    torch.manual_seed(0)
    config = LMConfig(vocab_size=256, hidden_size=8, num_hidden_layers=2, cell=cell)
    model = LanguageModel(config).eval()
    outputs: list[Tensor] = []
    for layer in model.recurrent_layers():
        layer.register_forward_hook(lambda _, __, result: outputs.append(result[0]))
    solves = trained.solves_of(model, torch.randint(256, (2, 30)))
    assert len(solves) == len(outputs) == 2
    for layer, args, output in zip(model.recurrent_layers(), solves, outputs, strict=True):
        program = program_of(layer.cell)
        torch.testing.assert_close(run(program, args, "auto", "auto")[0][0], output)
        part = trained.part_of(args, slice(4, 6), torch.float32)
        states = run(program, part, "auto", "auto")[0][0]
        torch.testing.assert_close(states, output[..., 4:6])


def test_aims_of_hard_cases() -> None:
    long, narrow, single, half = parallel.LONG, parallel.NARROW, torch.float32, torch.bfloat16
    assert CASES["0.2% latches"].aim(long, single, 4.0) == 0.285
    assert CASES["0.2% latches"].aim(long, half, 4.0) == ""
    assert CASES["bias -4"].aim(narrow, single, 4.0) == pytest.approx(5 * 0.026)
    assert CASES["weights 1"].aim(parallel.MEDIUM, single, 0.13) == pytest.approx(2 * 0.13)
    assert CASES["weights 1"].aim(narrow, half, 4.0) == 8.0
    assert CASES["weights 2"].aim(long, single, 4.0) == 8.0


def test_engines_passes_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "SEQUENTIAL", fused_cpu.SEQUENTIAL)
    cell = GRUCell(4)
    args = prepare(cell, torch.randn(2, 9, 3, 4))
    for what in ("forward", "backward"):
        [call] = kernels.calls_of(fused_cpu.NEWTON, program_of(cell), [args], what)
        assert call() is not None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_auto_cuts_time_where_trained_layers_lose_least(dtype: str) -> None:
    rows = segments.both_passes(segments.recorded())
    mine = [row for row in rows if (row["stage"], row["dtype"]) == ("trained", dtype)]
    worst = {least: segments.worst(mine, least) for least in segments.LEAST}
    assert min(worst, key=worst.__getitem__) == rule.MIN_SEGMENTS["cuda"]


def test_adapt_tells_the_layers_for_which_the_loop_is_faster() -> None:
    rows = segments.both_passes(segments.recorded())
    rows = [row for row in rows if row["stage"] == "trained" and segments.segments(row) >= 8]
    for row in rows:
        slow = SWEEP_COST * int(row["sweeps"]) >= segments.segments(row)
        assert slow == (float(row["newton_ms"]) > float(row["sequential_ms"])), row


def test_autos_choice_is_timed_on_fresh_and_trained_layers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    times = {"newton_ms": 0.3, "sweeps": 2, "mended": 1, "sequential_ms": 0.2}
    monkeypatch.setattr(auto_layers, "measured", lambda *args: times)
    monkeypatch.setattr(auto_layers, "inputs_needed", lambda *args: 2)
    monkeypatch.setattr(auto_layers, "SIZES", ((2, 30, 8), (1, 40, 8)))
    monkeypatch.setattr(auto_layers.pararnn, "precompile", lambda *args: None)
    monkeypatch.setattr(gpu, "provenance", lambda device: {"commit": "c", "device": "d"})
    monkeypatch.setattr(gpu, "copy_rate", lambda budget: 1.0)
    config = DemoConfig(width=8, batch=2, length=16, seconds=60.0, steps=2)

    def rows(run: gpu.Run) -> list[gpu.Row]:
        return list(auto_layers.model_rows(run, config))

    monkeypatch.setattr(sys, "argv", ["auto_layers.py", "--out", str(tmp_path)])
    done = gpu.run_sections("", {"gru": (rows, "auto.csv")}, 1.0, 1.0)["auto.csv"]
    assert len(done) == 2 * 2 * 2 * 2 * 2  # stages, sizes, layers, dtypes, passes
    assert {row["auto_of_best"] for row in done} == {1.0}  # the loop, which is said to be faster
    assert [row["train_steps"] for row in done] == [0] * 16 + [2] * 16
    written = [dict(row) for row in csv.DictReader((tmp_path / "auto.csv").open())]
    assert written == [{key: str(value) for key, value in row.items()} for row in done]
    written[0]["newton_ms"] = "0.1"
    assert tables_cuda.of_best(written).splitlines()[2:4] == [
        "| float32 | 2, 30, 8 | sequential | 1.00 | 1.00 | 1.00 | 2.00 | 1.00 | 1.00 |",
        "| bfloat16 | 2, 30, 8 | sequential | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 |",
    ]


def test_host_times_are_held_to_pytorchs_own() -> None:
    rows = host_call.rows("cpu", rounds=2)
    cases = [(row["case"], row["call"]) for row in rows]
    assert cases == [
        *(("forward and backward", call) for call in ("ParaGRU", "RecurrentLayer", host_call.BARE)),
        *(("step", call) for call in ("ParaGRU", "RecurrentLayer", "nn.GRUCell")),
    ]
    assert all(float(row["us"]) > 0 for row in rows)
    assert rows[2]["ratio"] == rows[5]["ratio"] == "1.00"


def test_peers_get_the_reductions_lengths() -> None:
    assert [scaling.REDUCTIONS[0], scaling.REDUCTIONS[-1]] == [2**2, 2**22]
    assert sorted(scaling.PEER_LENGTHS) == scaling.REDUCTIONS
    assert scaling.PEER_LENGTHS[:11] == [2**power for power in range(7, 18)]


def test_starts_are_measured_cold_and_warm() -> None:
    source = Path(__file__).parents[1] / "src"
    cold, warm = start.rows_of("elman", source, "earlier", repeats=1)
    assert (cold["cache"], warm["cache"], cold["commit"]) == ("cold", "warm", "earlier")
    parts = [f"{part}_ms" for part in start.PARTS]
    assert all(row[part] >= 0 for row in (cold, warm) for part in parts)
    assert warm["sum_ms"] == pytest.approx(sum(warm[part] for part in parts[1:]), abs=1)
