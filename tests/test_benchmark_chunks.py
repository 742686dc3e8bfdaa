"""The benchmark of kernels over chunks: its rows, besides times on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import chunk_ways
import chunks_gpu
import tables_chunks
from chunk_ways import CASES, Case, Peer, Settings
from common import read_rows
from table import needs_compiler
from test_benchmark_mixing import Inline

import pararnn

CPU = Settings("cpu", budget=1.0, cache=0, tilelang=None)
TINY = Case("tiny", "gated-delta", ("fla",), 2, 8, 2, 4)


@pytest.fixture
def fake_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer for the tiny case: our loop in PyTorch, on gates apart."""

    def make(parts: chunk_ways.Parts) -> Peer:
        cell = chunk_ways.make_cell(TINY, "cpu")

        def run(*parts: Tensor) -> tuple[Tensor, None]:
            gates = torch.cat([x if x.dim() == 4 else x[..., None] for x in parts], -1)
            pair = {"solver": "sequential", "backend": "torch"}
            return pararnn.solve(cell, gates, **pair)[0], None

        return Peer(run, [parts[name] for name in "qkvab"])

    monkeypatch.setitem(chunk_ways.PEERS, ("gated-delta", "fla"), make)
    monkeypatch.setitem(chunk_ways._state, "tuning", chunk_ways.Tuning())
    monkeypatch.setattr(chunk_ways, "enter", lambda way, settings: None)
    monkeypatch.setattr(chunk_ways.importlib.metadata, "version", lambda name: "1.2")


def test_cases_have_what_makes_their_peers() -> None:
    names = [chunks_gpu.name_of((case, way)) for case in CASES for way in case.ways]
    assert len(set(names)) == len(names)
    for case in CASES:
        for way in case.peers:
            assert chunk_ways.peer_of(case, way)
            assert way in chunk_ways.PACKAGES


@needs_compiler
def test_rows_have_times_and_what_failed(
    fake_peer: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Chunks have no kernels on a CPU."""
    monkeypatch.setattr(chunks_gpu, "CASES", (TINY,))
    monkeypatch.setattr(chunks_gpu, "Isolated", Inline)
    chunks_gpu.main(
        ["--device", "cpu", "--budget", "1", "--out", str(tmp_path), "--processes", "1"]
    )
    rows = {(r["case"], r["way"]): r for r in read_rows(tmp_path / "chunks_cpu.csv")}
    assert list(rows) == [("tiny", way) for way in TINY.ways]
    assert "cannot run GatedDeltaCell on cpu" in rows["tiny", "chunks"]["note"]
    for way, version in (("loop", ""), ("fla", "1.2")):
        row = rows["tiny", way]
        assert all(
            float(row[f"{step}_{name}"]) > 0
            for step in ("forward", "both")
            for name in ("ms", "min_ms", "over_copy")
        )
        assert (row["both_launch"], row["version"], row["note"]) == ("call", version, "")
    assert float(rows["tiny", "fla"]["difference"]) < 1e-2


def test_bytes_are_those_of_gates_and_outputs() -> None:
    gates, output = 2 * 8 * 2 * (3 * 4 + 2) * 2, 2 * 8 * 2 * 4 * 2
    moved = {"forward": gates + output, "both": 3 * gates + 2 * output}
    assert chunks_gpu.bytes_moved(TINY) == moved


def row(way: str, forward: str, both: str, launch: str = "graph", note: str = "") -> dict[str, Any]:
    case = CASES[0]
    values = {
        "commit": "c",
        "device": "GPU",
        "torch": "2",
        "python": "3",
        "copy_GB_per_s": "1000.0",
    }
    values |= chunks_gpu.empty_row(case, way)
    for step, ms in (("forward", forward), ("both", both)):
        if ms:
            values |= {f"{step}_ms": ms, f"{step}_min_ms": ms, f"{step}_launch": launch}
    return {key: str(value) for key, value in (values | {"note": note}).items()}


def test_table_says_ratios_and_what_a_reader_must_know() -> None:
    rows = [
        row("fla", "0.3", "3", "call", chunk_ways.LIFTED),
        row("fla, TileLang", "", "", note="forward by call: ValueError: no"),
        row("chunks", "0.15", "0.6"),
    ]
    results = [{k: str(v) for k, v in r.items()} for r in chunks_gpu.with_ratios(rows)]
    lines = tables_chunks.CHUNKS.markdown(results).splitlines()[2:]
    start = "| gated-delta | 64 x 64; 16, 1,024; 12 |"
    assert lines == [
        f"{start} (chunks, fused) | 0.15 (0.15) | 0.6 (0.6) |  |",
        f"{start} fla | 0.3 (0.3, 2 x, by calls) | 3 (3, 5 x, by calls) | {chunk_ways.LIFTED} |",
        f"{start} fla, TileLang |  |  | an error, see the file |",
    ]
