"""The benchmark of recurrences next to peers: its rows, and that loops by hand have our weights."""

from __future__ import annotations

import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace as Tensors

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import step_peer_ways
import step_peers
import tables_step_peers
from common import read_rows
from step_peer_ways import CASES, GATES, KINDS, OURS, Case, Kind, Way
from test_benchmark_mixing import Inline

import pararnn
from pararnn.zoo import LayerNormLSTMCell

IN_PYTORCH = {"solver": "sequential", "backend": "torch"}


def test_names_of_tasks_differ_and_each_kind_has_a_case() -> None:
    tasks = [(case, way) for case in CASES for way in KINDS[case.kind].ways]
    assert len({step_peers.name_of(task) for task in tasks}) == len(tasks)
    assert {case.kind for case in CASES} == set(KINDS)
    assert all(next(iter(kind.ways)) == OURS for kind in KINDS.values())
    assert all(case.width % case.heads == 0 for case in CASES)


def test_sizes_are_those_of_the_cells() -> None:
    sizes = {case.name: KINDS[case.kind].sizes(case) for case in CASES}
    assert sizes["lstm 24 x 32"] == [(16, 1024, 4, 768)]
    assert sizes["m2rnn 12 x 64 x 16, T = 1024"] == [(16, 1024, 12, 64 + 64 + 16 + 1)]
    assert sizes["norm-lstm-cell 12 x 64"] == [(16, 1024, 12, 4 * 64)]
    assert sizes["rssm 512"] == [(16, 64, 6), (16, 64, 512)]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of sums over time, with a peer that agrees, one that does not, one without a backward
    pass and one that is not there."""

    def sum_of(factor: float, weight: Tensor, x: Tensor) -> Tensor:
        if x.requires_grad and factor < 0:
            raise ValueError("no backward pass")
        return factor * weight * x.cumsum(1)

    def sums(factor: float) -> step_peer_ways.Make:
        def make(case: Case, device: str) -> Way:
            weight = torch.ones(case.width, requires_grad=True)
            if factor == 0:
                raise ImportError("no such package")
            return Way(lambda x: sum_of(factor, weight, x), [weight], version="1.2")

        return make

    ways = {OURS: sums(1.0), "same": sums(1.0), "other": sums(3.0), "lost": sums(0.0)}
    ways["forward alone"] = sums(-1.0)
    kind = Kind(lambda case: [(case.batch, case.length, case.width)], lambda case: case.width, ways)
    monkeypatch.setitem(KINDS, "sums", kind)
    monkeypatch.setattr(step_peers, "CASES", (Case("tiny", "sums", 3, 1, 5, 2, "float32"),))
    monkeypatch.setattr(step_peers, "Isolated", Inline)
    monkeypatch.setattr(step_peers, "enter", lambda task, settings: None)


def run(out: Path, *more: str) -> list[dict[str, str]]:
    """Run the benchmark on the CPU, and return the rows of its file."""
    arguments = ["--device", "cpu", "--budget", "1", "--processes", "1", "--out", str(out)]
    step_peers.main([*arguments, *more])
    return read_rows(out / "step_peers_cpu.csv")


def test_rows_have_times_differences_and_what_failed(fakes: None, tmp_path: Path) -> None:
    rows = {(row["way"], row["pass"]): row for row in run(tmp_path)}
    assert list(rows) == [
        (way, step)
        for way in (OURS, "same", "other", "lost", "forward alone")
        for step in ("forward", "both")
    ]
    assert float(rows["forward alone", "forward"]["median_ms"]) > 0
    assert rows["forward alone", "both"]["median_ms"] == ""
    assert "ValueError: no backward pass" in rows["forward alone", "both"]["error"]
    for step, numbers in (("forward", 2), ("both", 5)):
        same, lost = rows["same", step], rows["lost", step]
        assert float(same["median_ms"]) >= float(same["min_ms"]) > 0
        assert float(same["limit_ms"]) == round(numbers * 2 * 5 * 3 * 4 / 1e6, 5)
        assert float(same["over_ours"]) > 0
        assert (same["launch"], same["version"], same["error"]) == ("call", "1.2", "")
        assert float(same["difference"]) == 0
        assert float(rows["other", step]["difference"]) == 2
        assert lost["median_ms"] == lost["over_copy"] == ""
        assert lost["error"] == "preparation: ImportError: no such package"


def test_a_part_of_a_run_leaves_other_rows(fakes: None, tmp_path: Path) -> None:
    old = run(tmp_path)
    new = run(tmp_path, "--ways", "same")
    assert [row for row in new if row["way"] == "lost"] == old[6:8]
    assert run(tmp_path, "--cases", "none") == new


def test_a_crash_has_the_telling_line_of_its_output(tmp_path: Path) -> None:
    task = (CASES[0], OURS)
    settings = step_peers.Settings("cpu", 1.0, 0, tmp_path)
    lines = "begin\nan error\nx: Assertion `y' failed.\nFatal Python error: Aborted\n"
    (tmp_path / step_peers.name_of(task)).write_text(lines)
    crash = step_peers.LostError("its process ended with code -6")
    text = step_peers.error_of(crash, task, settings)
    assert text == "its process ended with code -6: x: Assertion `y' failed."
    late = step_peers.LostError("no end within 3 s")
    assert step_peers.error_of(late, task, settings) == "no end within 3 s"


def test_table_has_ratios_and_remarks() -> None:
    about = {"case": "a", "B": "16", "T": "1024", "dtype": "bfloat16", "version": ""}
    about |= {"min_ms": "1.5", "over_copy": "4", "launch": "graph", "difference": "", "note": ""}
    rows = [
        about | {"way": way, "pass": step, "median_ms": ms, "over_ours": ratio} | more
        for way, ms, ratio, more in (
            ("pararnn", "2", "1.0", {}),
            ("x", "5", "2.5", {"version": "3", "launch": "call", "difference": "0.1", "note": "n"}),
            ("y", "", "", {}),
        )
        for step in ("forward", "both")
    ]
    ours, x, y = tables_step_peers.TABLE.markdown(rows).splitlines()[2:]
    start, cell = "| a | 16, 1,024; bfloat16 |", "5 (1.5, 2.5 x, 4 copies, by calls)"
    assert ours == f"{start} pararnn | 2 (1.5, 4 copies) | 2 (1.5, 4 copies) |  |  |"
    assert x == f"{start} x 3 | {cell} | {cell} | 0.1 / 0.1 | n |"
    assert y == f"{start} y | - | - |  | an error, see the file |"


def gradients(output: Tensor, x: Tensor) -> Tensor:
    """Return the output, and behind it the gradient of the sum of its squares."""
    return torch.cat([output.flatten(), torch.autograd.grad(output.square().sum(), x)[0].flatten()])


@pytest.mark.thorough
def test_the_loop_of_dreamers_gru_has_our_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("world_models.BLOCKS", 2)
    case = Case("", "dreamer-gru", 8, 2, 5, 3, "float32")
    x = torch.randn(3, 5, 8, requires_grad=True)
    with pararnn.using(**IN_PYTORCH), torch.compiler.set_stance("force_eager"):
        ways = [KINDS[case.kind].ways[way](case, "cpu") for way in (OURS, "loop, compiled step")]
        values = [gradients(step_peers.as_list(way.call(x))[0], x) for way in ways]
    torch.testing.assert_close(*values)


def test_with_one_head_its_norms_are_those_of_the_layer_norm_lstm() -> None:
    torch.manual_seed(0)
    heads, dense = step_peer_ways.HeadNormLSTM(6, num_heads=1), LayerNormLSTMCell(6)
    params = {name: torch.randn_like(p) for name, p in dense.named_parameters()}
    assert params.keys() == dict(heads.named_parameters()).keys()
    gates, states = torch.randn(4, 2, 6), torch.randn(2, 2, 6)
    record = namedtuple("Params", params)
    right = dense.step(Tensors(h=states[0], c=states[1]), gates, record(**params))
    h, c = states.unsqueeze(2)
    by_head = {name: p.unsqueeze(0) for name, p in params.items()}
    results = heads.step(Tensors(h=h, c=c), gates.unsqueeze(2), record(**by_head))
    torch.testing.assert_close(torch.stack(results).squeeze(2), torch.stack(right))


def test_gates_head_by_head_are_put_gate_by_gate() -> None:
    case = Case("", "norm-lstm-cell", 6, 3, 2, 1, "float32")
    way = KINDS[case.kind].ways["pararnn, no norms"](case, "cpu")
    gates = torch.arange(2 * 24.0).view(1, 2, 3, 8)
    (result,) = way.inputs([gates])
    assert result.shape == (1, 2, len(GATES), 6)
    assert result[0, 0, 1].tolist() == [2, 3, 10, 11, 18, 19]  # the second gate of all heads
