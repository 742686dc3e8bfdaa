"""The benchmark of several GPUs: cases, child processes, logs, traces, rows and pictures."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import lm_launch
import lm_lost
import lm_scale
from common import add_row, provenance, read_rows, write_csv
from step_profile import Kernel, breakdown, kernels_of

from pararnn.lab.train.log import LOG, append_row
from pararnn.lab.train.log import read_rows as read_log

SMALL = ["--smoke", "--gpus", "1", "2", "--warmup", "2", "--steps", "4", "--every", "2"]


def test_a_breakdown_counts_time_that_other_streams_do_not_hide() -> None:
    kernels = [
        Kernel("nvjet_tst_128x256", 0, 4000, 7),
        Kernel("ncclDevKernel_AllGather_RING_LL", 3000, 4000, 20),  # 3 ms behind the product
        Kernel("run", 5000, 1000, 7),  # within the collective
        Kernel("sum_weights", 5500, 500, 8),  # on another stream, at the same time
        Kernel("triton_poi_fused_mm_nccl", 9000, 1000, 7),
    ]
    rows = breakdown(kernels)
    assert rows == [
        {"class": "products", "kernels": 1, "streams": 1, "busy_ms": 4.0, "alone_ms": 3.0},
        {"class": "NCCL", "kernels": 1, "streams": 1, "busy_ms": 4.0, "alone_ms": 2.0},
        {"class": "recurrence", "kernels": 2, "streams": 2, "busy_ms": 1.0, "alone_ms": 0.0},
        {"class": "elementwise", "kernels": 1, "streams": 1, "busy_ms": 1.0, "alone_ms": 1.0},
        {"class": "idle", "kernels": 0, "streams": 0, "busy_ms": 2.0, "alone_ms": 2.0},
    ]
    assert breakdown(kernels[::-1])[-1] == rows[-1]
    assert breakdown([]) == []


def test_a_trace_is_read(tmp_path) -> None:
    event = {"ph": "X", "cat": "kernel", "name": "run", "ts": 5.5, "dur": 2.0}
    host = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 9.0}
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": [event | {"args": {"stream": 7}}, host]}))
    assert kernels_of(trace) == [Kernel("run", 5.5, 2.0, 7)]


def out_of(arguments) -> Path:
    return Path(next(text for text in arguments if text.startswith("--out="))[6:])


def stands_for_torchrun(arguments, gpus, output, seconds, steps=None, profile=False):
    """Leaves what a run would: plain Mamba2 does not fit, 2 GPUs are 1.5 times as fast."""
    out = out_of(arguments)
    (out / lm_launch.PARAMETERS).write_text("1000")
    if arguments[1].startswith("mamba2") and "--checkpointing=True" not in arguments:
        (out / lm_launch.TOO_LARGE).touch()
        return lm_launch.RunEnd(1, 1.0, "torch.OutOfMemoryError")
    for step in range(2, steps + 3, 2):
        slow = 10 if step == 2 or step > steps else 1  # what is not to count
        rate = 1000 * (1.5 if gpus == 2 else 1) / slow
        row = {
            "step": step,
            "loss": 1,
            "tokens_per_second": rate,
            "mfu": 0.5,
            "memory_gib": 1.0 * step,
        }
        append_row(out / LOG, row)
    trace = {"cat": "kernel", "name": "run", "ts": 0, "dur": 1000, "args": {"stream": 7}}
    (out / lm_launch.TRACE).write_text(json.dumps({"traceEvents": [trace]}))
    return lm_launch.RunEnd(0, 1.0, "")


@pytest.mark.thorough
def test_from_cases_to_rows_and_picture(tmp_path, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(lm_scale, "launch", stands_for_torchrun)
    names = {"tiny": "gru-1b", "mamba2-tiny": "mamba2-1b"}
    monkeypatch.setattr(lm_scale, "recipes_of", lambda args, scale: list(names.values()))
    argv = [*SMALL, "--sections", "scaling", "--profile", "--out", str(tmp_path), "reshard=False"]
    lm_scale.main(argv)
    rows = read_rows(tmp_path / lm_scale.FILE)
    about = [(row["recipe"], row["gpus"], row["way"], row["note"]) for row in rows]
    assert about == [
        ("gru-1b", "1", "plain", ""),
        ("gru-1b", "2", "plain", ""),
        ("mamba2-1b", "1", "plain", "out of memory"),
        ("mamba2-1b", "2", "plain", "out of memory"),
        ("mamba2-1b", "1", "checkpointing", ""),
        ("mamba2-1b", "2", "checkpointing", ""),
    ]
    assert list(rows[0])[:4] == ["commit", "device", "torch", "python"]
    reference = {"log_rows": "2", "tokens_per_s": "1000", "peak_GiB": "6.0"}
    assert (reference | {"overrides": "reshard=False"}).items() <= rows[0].items()
    profile = read_rows(tmp_path / lm_scale.PROFILE)
    busy = [(row["class"], row["busy_ms"]) for row in profile[:2]]
    assert busy == [("recurrence", "1.0"), ("idle", "0.0")]
    lm_scale.plot(tmp_path / lm_scale.FILE)
    picture = tmp_path / "lm_scale.png"
    assert picture.stat().st_size > 0
    picture.unlink()
    path = tmp_path / "alone" / lm_scale.FILE
    write_csv(path, rows[:1])
    lm_scale.plot(path)  # a point is no curve
    assert list(path.parent.iterdir()) == [path]

    monkeypatch.setattr(lm_scale, "launch", None)  # nothing is measured again
    lm_scale.main([*argv, "--missing"])


def test_what_fails_has_no_row_and_ends_with_an_error(tmp_path, monkeypatch, capsys) -> None:
    run_end = lm_launch.RunEnd(1, 3.0, "KeyError: wrong")
    monkeypatch.setattr(lm_scale, "launch", lambda *args: run_end)
    with pytest.raises(SystemExit, match=r"without a row:\n.*tiny.*exit code 1 after 3 s"):
        lm_scale.main([*SMALL, "--sections", "scaling", "--only", "tiny", "--out", str(tmp_path)])
    assert "KeyError: wrong" in capsys.readouterr().err
    assert not (tmp_path / lm_scale.FILE).exists()
    with pytest.raises(SystemExit, match="left out, the time is over"):
        lm_scale.main([*SMALL, "--sections", "scaling", "--seconds", "0"])


def test_a_rank_is_killed_after_its_checkpoint(tmp_path, monkeypatch) -> None:
    """The runs are fakes: the whole one, the killed one, and those that resume."""
    kills = []

    def stands(arguments, gpus, output, seconds, meanwhile=None):
        out = out_of(arguments)
        steps = 41 if out.name == "lost" else lm_lost.STEPS
        (out / "checkpoint-40").mkdir(exist_ok=True)
        (out / "checkpoint-40" / ".pararnn.json").touch()
        for n in range(steps):
            append_row(out / LOG, {"step": n + 1, "loss": 1.0 + (out.name == "on-1")})
        if out.name == "lost":
            (out / "pid-3").write_text("99")
            meanwhile()
            meanwhile()
        return lm_launch.RunEnd(int(out.name == "lost"), 1.0, "")

    monkeypatch.setattr(lm_lost, "launch", stands)
    monkeypatch.setattr(lm_lost.os, "kill", lambda *kill_arguments: kills.append(kill_arguments))
    for row in lm_lost.rows("gru-30m", [1, 2, 4], tmp_path, 1e18, []):
        add_row(tmp_path / lm_lost.FILE, {**provenance("cpu"), **row}, lm_lost.KEYS)
    assert kills == [(99, lm_lost.SIGKILL)]
    rows = read_rows(tmp_path / lm_lost.FILE)
    fields = [(row["goes_on_with"], row["goes_on_from"], row["largest_difference"]) for row in rows]
    assert fields == [("4", "40", "0.0"), ("2", "40", "0.0"), ("1", "40", "1.0")]


def test_a_child_trains_by_the_command_and_ends_after_its_steps(tmp_path, monkeypatch) -> None:
    """The paper's Mamba2 by `pararnn train`; then the same without room in memory."""
    lm_scale_run = pytest.importorskip("lm_scale_run")
    pytest.importorskip("tokenizers")
    for owner, name in (
        (lm_scale_run.trainer, "RunTrainer"),
        (lm_scale_run.setup, "bare_model"),
    ):  # put back after the test
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(lm_scale_run, "RECIPES", dict(lm_scale_run.RECIPES))
    monkeypatch.setattr("pararnn.lab.train.recipes.RECIPES", lm_scale_run.RECIPES)
    lm_launch.write_corpus(tmp_path / "corpus.txt", 20_000)
    args = lm_scale.parse([*SMALL, "compile=False"])
    case = lm_scale.Case("mamba2-tiny", 1, 2, 16, "checkpointing")
    command = ["train", case.recipe, *lm_scale.overrides_of(case, tmp_path, args)]

    def child(out, profile) -> int | None:
        options = json.dumps({"steps": 6, "profile": profile})
        monkeypatch.setattr(sys, "argv", ["", options, *command, f"--out={out}"])
        with pytest.raises(SystemExit) as error:
            lm_scale_run.main()
        return error.value.code

    out = tmp_path / "run"
    assert child(out, profile=True) == 0
    log = read_log(out / LOG)
    assert [row["step"] for row in log if row["step"] <= 6] == [2, 4, 6]
    assert not (out / "model").exists()
    assert not list(out.glob("checkpoint-*"))
    assert kernels_of(out / lm_launch.TRACE) == []  # of a CPU there are none
    assert int((out / lm_launch.PARAMETERS).read_text()) > 0
    assert not (out / lm_launch.TOO_LARGE).exists()

    def too_large(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(lm_scale_run.cli, "main", too_large)
    monkeypatch.setattr(lm_scale_run.os, "_exit", sys.exit)
    assert child(tmp_path / "large", profile=False) == 1
    assert (tmp_path / "large" / lm_launch.TOO_LARGE).exists()
