"""What the benchmarks compute besides times."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pararnn import GRUCell
from pararnn.lm import LanguageModel, LMConfig
from pararnn.program.program import program_of
from pararnn.solve import prepare, run

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import host_call
import parallel
import scaling
import start
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
