import subprocess
import sys

import pytest
import torch

from pararnn import cli
from pararnn.train import DemoConfig


@pytest.fixture
def configs(monkeypatch):
    """The configs that reach the demo, which is not run."""
    seen = []

    def record(config):
        seen.append(config)
        return {"verified": True}

    monkeypatch.setattr(cli, "run_demo", record)
    return seen


def test_options_become_the_config(configs):
    options = "--device cpu --text a.txt --cell lrc --seconds 2.5 --steps 7 --out o --seed 3"
    assert cli.main(["demo", *options.split()]) == 0
    assert configs == [
        DemoConfig("cpu", text="a.txt", cell="lrc", seconds=2.5, steps=7, out="o", seed=3)
    ]


def test_defaults_are_the_configs(configs):
    assert cli.main(["demo"]) == 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert configs == [DemoConfig(device=device)]


def test_a_failed_verification_is_exit_code_1(monkeypatch):
    monkeypatch.setattr(cli, "run_demo", lambda config: {"verified": False})
    assert cli.main(["demo"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "required: command"),
        ("train", "invalid choice: 'train'"),
        ("demo --cell gpu", "invalid choice: 'gpu'"),
        ("demo --seconds 0", "--seconds: must be a positive number, got '0'"),
        ("demo --seconds nan", "--seconds: must be a positive number, got 'nan'"),
        ("demo --seconds soon", "--seconds: must be a number, got 'soon'"),
        ("demo --steps 0", "--steps: must be at least 1, got '0'"),
        ("demo --steps 1.5", "--steps: must be an integer, got '1.5'"),
        ("demo --seed -1", "--seed: must be from 0 to 2^63 - 1, got '-1'"),
        ("demo --device tpu", "'tpu' is not a device"),
        ("demo --device meta", "'meta' is not supported"),
        ("demo --device cuda:99", "'cuda:99' is not here"),
        ("demo --wdith 3", "unrecognized arguments: --wdith 3"),
    ],
)
def test_bad_values_give_one_line_and_exit_code_2(options, message, configs, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(options.split())
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("pararnn")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert configs == []


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read"), (b"", "is empty"), (b"x" * 99, "too few")],
)
def test_bad_texts_give_one_line_and_exit_code_2(content, message, tmp_path, capsys):
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo", "--text", str(path), "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_a_blocked_out_folder_gives_one_line(tmp_path, capsys):
    pytest.importorskip("tqdm")
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo", "--out", str(tmp_path / "file" / "out")])
    assert stopped.value.code == 2
    assert "Not a directory" in capsys.readouterr().err


def test_a_missing_extra_gives_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo"])
    assert stopped.value.code == 2
    assert "pip install 'pararnn[demo]'" in capsys.readouterr().err


def test_the_command_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "pararnn.cli", "demo", "--cell", "gpu"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    shown = subprocess.run(
        [sys.executable, "-m", "pararnn.cli", "demo", "--help"], capture_output=True, text=True
    )
    assert shown.returncode == 0
    assert "--seconds" in shown.stdout
