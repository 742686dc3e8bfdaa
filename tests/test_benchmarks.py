"""The benchmarks compute what they say, besides times."""

from __future__ import annotations

import csv
import fcntl
import itertools
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from table import needs_compiler
from torch import Tensor

import pararnn
from pararnn import CELLS, GRUCell
from pararnn.engines import rule
from pararnn.lab.train.demo import demo_config
from pararnn.lm import LanguageModel, LMConfig, invariant
from pararnn.program.program import program_of
from pararnn.solve import prepare, run
from pararnn.tune.adapt import SWEEP_COST

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import auto_layers
import choosing_plot
import conv
import cpu
import derivatives
import fixed_newton
import gpu
import host_call
import mamba_peer
import paper_kernels
import paper_plots
import paper_ways
import pictures
import protocol
import resources
import scan_cpu
import segments
import trained
from common import Record, read_rows
from compile import seconds
from derivatives import Times


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


def test_solves_are_those_of_the_models_layers() -> None:
    torch.manual_seed(0)
    config = LMConfig(vocab_size=256, hidden_size=8, num_hidden_layers=2, cell="lstm")
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_auto_splits_from_the_segments_of_the_smallest_worst_ratio(dtype: str) -> None:
    rows = segments.both_passes(segments.all_times())
    mine = [row for row in rows if (row["stage"], row["dtype"]) == ("trained", dtype)]
    worst = {least: segments.worst(mine, least) for least in segments.LEAST}
    assert min(worst, key=worst.__getitem__) == rule.MIN_SEGMENTS["cuda"]


def test_adapt_tells_the_layers_for_which_the_loop_is_faster() -> None:
    rows = segments.both_passes(segments.all_times())
    rows = [row for row in rows if row["stage"] == "trained" and "sweeps" in row]
    rows = [row for row in rows if segments.segments(row) >= 8]
    assert rows
    for row in rows:
        newton, loop = float(row["newton_ms"]), float(row["sequential_ms"])
        if abs(newton - loop) > 0.02 * loop:  # or neither costs anything
            slow = SWEEP_COST * int(row["sweeps"]) >= segments.segments(row)
            assert slow == (newton > loop), row


@pytest.mark.thorough
def test_autos_choice_is_timed_on_fresh_and_trained_layers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    times = {"newton_ms": 0.3, "sweeps": 2, "mended": 1, "sequential_ms": 0.2}
    monkeypatch.setattr(auto_layers, "measure", lambda *args: times)
    monkeypatch.setattr(auto_layers, "sets_of", lambda *args: 2)
    monkeypatch.setattr(auto_layers, "SIZES", ((2, 30, 8), (1, 40, 8)))
    monkeypatch.setattr(auto_layers.pararnn, "precompile", lambda *args: None)
    monkeypatch.setattr(gpu, "provenance", lambda device: {"commit": "c", "device": "d"})
    monkeypatch.setattr(gpu, "copy_rate", lambda budget: 1.0)
    demo = demo_config()
    config = replace(
        demo,
        model=replace(demo.model, hidden_size=8, intermediate_size=16, num_heads=1),
        data=replace(demo.data, sequence_length=17, cache=str(tmp_path / "cache")),
        steps=2,
        batch=2,
        device_batch=2,
    )

    def rows(run: gpu.Run) -> list[protocol.Row]:
        return list(auto_layers.model_rows(run, config))

    monkeypatch.setattr(sys, "argv", ["auto_layers.py", "--out", str(tmp_path)])
    results = gpu.run_sections("", {"gru": (rows, "auto.csv")}, 1.0, 1)["auto.csv"]
    assert len(results) == 2 * 2 * 2 * 2 * 2  # stages, sizes, layers, dtypes, passes
    assert {row["auto_of_best"] for row in results} == {1.0}  # the loop, which is said to be faster
    assert [row["train_steps"] for row in results] == [0] * 16 + [2] * 16
    file_rows = [dict(row) for row in csv.DictReader((tmp_path / "auto.csv").open())]
    assert file_rows == [{key: str(value) for key, value in row.items()} for row in results]


def test_autos_worst_ratio_of_each_size_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [dict(zip("BTD", size, strict=True)) for size in ((8, 2048, 64), (1, 32768, 64))]
    rows = [{**size, "auto_of_best": ratio} for size in sizes for ratio in (1.0, 1.25, 1.1)]
    monkeypatch.setattr(
        auto_layers, "run_sections", lambda *args, **options: {"auto_layers.csv": rows}
    )
    auto_layers.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "B, T, D = (8, 2048, 64)",
        "B, T, D = (1, 32768, 64)",
    ]
    assert all("1.25" in line for line in lines)


def test_models_convolve_by_the_way_that_is_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = torch.randn(1, 5, 2), torch.randn(4, 2), torch.randn(2), None, None
    monkeypatch.setattr(invariant, "conv_silu", lambda *args: "kernels")
    monkeypatch.setattr(conv, "takes", lambda u, weight: True)
    with conv.only("kernels"):
        assert invariant.convolve(*inputs) == "kernels"
    with conv.only("PyTorch"):
        assert torch.is_tensor(invariant.convolve(*inputs))


@needs_compiler
@pytest.mark.parametrize(
    "cell", ["gru", pytest.param("layer-norm-gru", marks=pytest.mark.thorough)]
)
def test_kernels_are_compiled_in_a_new_process(cell: str, tmp_path: Path) -> None:
    cold = seconds(cell, "float32", str(tmp_path))
    assert seconds(cell, "float32", str(tmp_path)) < cold


def test_resources_has_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """--help writes no results."""
    monkeypatch.setattr(sys, "argv", ["resources.py", "--help"])
    monkeypatch.setattr(resources, "rows_of", lambda *args: iter(()))
    monkeypatch.setattr(resources.nvrtc, "identity", lambda: "NVRTC")
    with pytest.raises(SystemExit, match="0"):
        resources.main()


def test_host_times_have_ratios_to_pytorchs_own_calls() -> None:
    own = ("ParaGRU", "RecurrentLayer", host_call.BY_HEADS)
    rows = host_call.rows("cpu", rounds=2)
    cases = [(row["case"], row["call"]) for row in rows]
    assert cases == [
        *(("forward and backward", call) for call in (*own, host_call.BARE)),
        *(("step", call) for call in (*own, "nn.GRUCell")),
    ]
    assert all(float(row["us"]) > 0 for row in rows)
    assert rows[3]["ratio"] == rows[7]["ratio"] == "1.00"


def test_protocol_has_the_papers_runs_or_as_many_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(
        time, "perf_counter", lambda: float(next(ticks))
    )  # each look takes a second
    calls: list[int] = []
    row = protocol.protocol_times(lambda: calls.append(1), protocol.CPU, budget=100e3)
    assert row == {"min_ms": 1e3, "median_ms": 1e3, "runs": 100}
    assert len(calls) == 1 + 2 + 20 + 100  # one to compile, two that say how long it takes
    few = protocol.protocol_times(lambda: None, protocol.CPU, budget=50e3)
    least = protocol.protocol_times(lambda: None, protocol.CPU, budget=0.0)
    assert (few["runs"], least["runs"]) == (50, 3)


def test_rows_are_in_the_file_before_the_run_ends(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.csv"
    record = Record(path, {"commit": "c"})
    record.add({"T": 1})
    assert read_rows(path) == [{"commit": "c", "T": "1"}]
    record.add({"T": 2})
    assert read_rows(path) == [{"commit": "c", "T": "1"}, {"commit": "c", "T": "2"}]
    Record(path, {"commit": "d"}, ("T",)).add({"T": 2})
    assert read_rows(path) == [{"commit": "c", "T": "1"}, {"commit": "d", "T": "2"}]


def test_an_exclusive_turn_waits_until_no_process_prepares(tmp_path: Path) -> None:
    path = tmp_path / "turns"

    def can_lock(kind: int) -> bool:
        with path.open("a") as file:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    with protocol.turn(path, exclusive=False):
        assert can_lock(fcntl.LOCK_SH)
        assert not can_lock(fcntl.LOCK_EX)
    with protocol.turn(path, exclusive=True):
        assert not can_lock(fcntl.LOCK_SH)
    assert can_lock(fcntl.LOCK_EX)


def test_three_newton_updates_have_the_loops_states_and_gradients() -> None:
    torch.manual_seed(0)
    cell = CELLS["lstm"](8)
    gates = torch.randn(2, 40, 3, 8, requires_grad=True)
    leaves = [gates, *cell.parameters()]
    reference = cpu.pair(cell, "sequential", "torch")(gates)
    right = torch.autograd.grad(reference.square().sum(), leaves)
    for backend in fixed_newton.SCANS:
        with torch.compiler.set_stance("force_eager"):
            states = fixed_newton.fixed_newton(cell, backend)(gates)
            grads = torch.autograd.grad(states.square().sum(), leaves)
        torch.testing.assert_close(states, reference, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(grads, right, rtol=1e-3, atol=1e-4)
    with torch.compiler.set_stance("force_eager"):
        once = fixed_newton.fixed_newton(cell, "torch", updates=1)(gates)
    assert float((once - reference).detach().abs().max()) > 1e-4  # the number of updates is obeyed


@pytest.mark.thorough
def test_the_papers_figures_from_the_run_to_the_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = replace(
        paper_kernels.quick(paper_kernels.Settings(torch.device("cpu"), channels=4)),
        reductions=(4, 16),
        solves=(1, 9),
        split_length=600,
        burn_ins=(None,),
        budget=0.0,
    )
    ways = ("scan", "Mamba", "newton, fused", "newton, 3 updates, scan", "loop, eager", "torch.nn")
    rows = {}
    about = {"commit": "c", "device": "d", "torch": "t"}
    for name, section in paper_kernels.SECTIONS.items():
        path = tmp_path / f"paper_{name}.csv"
        section(replace(tiny, ways=ways), Record(path, about).add)
        paper_plots.PLOTS[name](path, path.with_suffix(".png"))
        assert path.with_suffix(".png").stat().st_size > 1000
        rows[name] = read_rows(path)
    assert {(row["what"], row["T"]) for row in rows["reduction"]} == {
        (what, length) for what in ("diagonal", "2 x 2") for length in ("4", "16")
    }
    assert "peer left out: Mamba's selective scan" in capsys.readouterr().out
    mine = {row["way"] for row in rows["solve"] if row["what"] == "gru" and row["pass"] == "both"}
    assert mine == {*ways[2:5], "torch.nn.GRU"}
    assert all(float(row["min_ms"]) <= float(row["median_ms"]) for row in rows["solve"])
    by_asked = {(row["asked"], row["way"]): row for row in rows["split"]}
    assert by_asked["8", "newton, fused"]["segments"] == "8"
    assert by_asked["", "sequential, fused"]["sweeps"] == ""


def test_a_loop_over_a_compiled_step_has_the_loops_states() -> None:
    torch.manual_seed(0)
    cell, gates = GRUCell(8), torch.randn(2, 9, 3, 8)
    with torch.compiler.set_stance("force_eager"):
        states = paper_ways.compiled_loop(cell)(gates)
    torch.testing.assert_close(states, cpu.pair(cell, "sequential", "torch")(gates))


def test_pictures_have_a_models_colour_and_say_where_it_was_measured() -> None:
    pytest.importorskip("matplotlib")
    colours = []
    for names in (("gru-1B", "transformer-1B, cache"), ("mamba2-7b", "transformer-7b", "gru-7b")):
        figure = pictures.new_figure(3, 3)
        axes = figure.subplots()
        pictures.draw(axes, {name: [(1, 2.0), (2, 3.0)] for name in names}, "T", "ms")
        colours.append({line.get_label()[:3]: line.get_color() for line in axes.lines})
        pictures.caption(figure, [{"device": "H200", "torch": "2.11"}], "batch 1")
        assert figure.get_suptitle() == "H200, PyTorch 2.11\nbatch 1"
    assert colours[0] == {name: colours[1][name] for name in ("gru", "tra")}
    mamba = {paper_plots.MODELS[way] for way in (paper_ways.MAMBA, paper_ways.SIMPLIFIED)}
    assert mamba == {colours[1]["mam"]}
    rows = [{"way": way} for way in paper_plots.WAYS]
    assert len(set(paper_plots._colours(rows).values())) == len(rows)


def test_panels_share_colours_and_one_legend() -> None:
    pytest.importorskip("matplotlib")
    figure = pictures.new_figure(6, 3)
    panels, names = figure.subplots(1, 2), ["a", "b", "c"]
    for axes, curves in zip(panels, (["a", "c"], ["b", "c"]), strict=True):
        pictures.draw(axes, {name: [(1, 2.0)] for name in curves}, "T", "ms", names=names)
    (colour_a, colour_c), (colour_b, same) = (
        [line.get_color() for line in p.lines] for p in panels
    )
    assert colour_c == same
    assert len({colour_a, colour_b, colour_c}) == 3
    pictures.legend_below(figure, 3)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.texts] == ["a", "c", "b"]


def test_names_of_points_hide_nothing() -> None:
    pytest.importorskip("matplotlib")
    figure = pictures.new_figure(4, 3)
    axes = figure.subplots()
    points = [choosing_plot.Name("128", x, y, "red") for x, y in ((1, 1), (1.1, 1), (2, 0))]
    axes.plot([name.x for name in points], [name.y for name in points], marker="o")
    choosing_plot.name_points(axes, points)
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 3
    path = axes.transData.transform_path(axes.lines[0].get_path())
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:index])
        assert not path.intersects_bbox(box, filled=False)


def test_mambas_scan_computes_the_linear_recurrence() -> None:
    torch.manual_seed(0)
    decay, values = torch.rand(2, 3, 20).clamp(min=0.05), torch.randn(2, 3, 20)
    states = mamba_peer.reduction(decay, values, mamba_peer.reference_scan)()
    torch.testing.assert_close(states.mT, pararnn.scan(decay.mT, values.mT), rtol=1e-4, atol=1e-5)


def test_simplified_mamba_is_causal_and_learns() -> None:
    torch.manual_seed(0)
    model = mamba_peer.SimplifiedMamba(32, mamba_peer.reference_scan, device="cpu")
    x = torch.randn(1, 12, 32, requires_grad=True)
    y = model(x)
    assert y.shape == x.shape
    grads = torch.autograd.grad(y[:, 5].square().sum(), [x, *model.parameters()])
    assert grads[0][:, 6:].count_nonzero() == 0
    assert all(g.count_nonzero() for g in grads)


def test_scans_are_timed_in_rounds_and_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    for what in ("LRU", "minGRU"):
        decay, entering = scan_cpu.random_inputs(what, 20)
        reference = scan_cpu.loop(decay, entering)
        for way in scan_cpu.ways_of(what, 20):
            torch.testing.assert_close(scan_cpu.WAYS[way](decay, entering), reference)
    assert scan_cpu.LOOP not in scan_cpu.ways_of("LRU", 16384)
    assert scan_cpu.FFT not in scan_cpu.ways_of("minGRU", 512)
    measurements = iter(
        ({"ms": 4.0, "min_ms": 3.0}, {"ms": 6.0, "min_ms": 5.0}, {"ms": 5.0, "min_ms": 4.0})
    )
    monkeypatch.setattr(scan_cpu, "measure", lambda *_: next(measurements))
    monkeypatch.setattr(scan_cpu, "cases", lambda _: [("LRU", 20, "pararnn.scan")])
    monkeypatch.setattr(sys, "argv", ["scan_cpu.py", "--out", str(tmp_path)])
    scan_cpu.main()
    (row,) = read_rows(tmp_path / "scan_cpu.csv")
    assert (row["ms"], row["min_ms"], row["rounds"], row["T"]) == ("5.0", "3.0", "3", "20")


def test_multiples_are_of_times_by_the_same_launch() -> None:
    least = derivatives.Least()
    for what, call, graph in (("forward", 4.0, [1.0, 1.5]), ("jvp, input", 6.0, [])):
        times = [Times("call", [call, 7.0]), *([Times("graph", graph)] if graph else [])]
        row = derivatives.columns_of("kernels", what, times, least)
        assert row["kernels_launch"] == times[-1].launch
        assert row["kernels_min_ms"] == (graph or [call])[0]
        assert row.get("kernels_call_min_ms") == (call if graph else None)
    assert row["kernels_multiple"] == 1.5
    row = derivatives.columns_of("peer", "jvp, input", [Times("call", [2.0])], least)
    assert row["peer_multiple"] is None  # of a way without a forward pass


def test_what_is_not_recorded_has_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(calls: object, budget: float) -> list[float]:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr(derivatives, "replay_times", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert derivatives.replayed(lambda: None, 1.0) == ([], "operation not permitted")


def test_rows_bring_what_they_are_multiples_of() -> None:
    assert derivatives.with_bases(["gradients of samples"]) == [
        "forward", "both", "gradients of samples"]  # fmt: skip
