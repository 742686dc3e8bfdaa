"""A run's folder: what is not the run's own stays, other runs and other data are refused."""

import dataclasses
import errno
import fcntl
import json
import shutil

import pytest

pytest.importorskip("transformers")

from lm_kinds import options
from test_train_trainer import Packed, config, losses, same_bits, weights

from pararnn.base.errors import TrainingError
from pararnn.lab import cli
from pararnn.lab.evaluation.run import run_evaluation
from pararnn.lab.serving.load import load_served
from pararnn.lab.train import checkpoints
from pararnn.lab.train.config import DataConfig
from pararnn.lab.train.log import read_rows
from pararnn.lab.train.run import export_checkpoint, run_training
from pararnn.lab.train.trainer import RunTrainer
from pararnn.lm import LanguageModel, LMConfig, load_checkpoint, save_checkpoint
from pararnn.lm.hf.load import load_model
from pararnn.lm.tokens import save_byte_tokenizer


class Known(Packed):
    """Data whose tokens are known by a hash."""

    content = "these"


class Changed(Packed):
    content = "those"


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    run_training(config(out, keep=9), Known())
    return out


@pytest.fixture
def out(whole_run, tmp_path):
    """A run that has ended, to be changed."""
    return shutil.copytree(whole_run, tmp_path / "run")


def everything(folder):
    """The files below a folder but what every run may write anew."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".run.lock"
    }


def error_of(capsys, *command):
    """The line that a command refuses by."""
    with pytest.raises(SystemExit) as error:
        cli.main([*map(str, command)])
    assert error.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1, message
    return message


@pytest.mark.parametrize("to", ["thesis", "run", ".", "run/tokenizer", "run/checkpoint-3", "file"])
def test_export_takes_no_folder_of_others(out, capsys, to):
    folder = out.parent
    (folder / "thesis").mkdir()
    (folder / "thesis" / "chapter.tex").write_text("mine")
    (folder / "file").write_text("mine")
    old = everything(folder)
    message = error_of(capsys, "export", out, "--to", folder / to)
    assert "name a folder that is new or empty" in message or "is no folder" in message
    assert everything(folder) == old


@pytest.mark.parametrize("to", ["file", "file/model"])
def test_folders_that_cannot_be_made_are_refused_with_advice(out, capsys, to):
    (out.parent / "file").write_text("mine")
    if "/" in to:
        message = error_of(capsys, "export", out, "--to", out.parent / to)
        assert "cannot write to" in message
        assert "name another folder (--to)" in message
    with pytest.raises(TrainingError, match=r"cannot write to .*; name another folder \(--out\)"):
        run_training(config(out.parent / to), Known())


def test_export_replaces_what_it_wrote(out, tmp_path):
    to = tmp_path / "three"
    assert export_checkpoint(out, 3, to) == to
    (to / "README.md").write_text("mine")
    export_checkpoint(out, 6, to)
    same_bits(weights(to), weights(out / "model"))
    assert (to / "README.md").read_text() == "mine"


def test_a_run_s_folder_stands_for_its_model(out, tmp_path):
    (tmp_path / "text.txt").write_text("once upon a time " * 9)
    save_checkpoint(LanguageModel(LMConfig(**options("gru") | {"vocab_size": 256})), out / "model")
    save_byte_tokenizer(out / "model")
    for folder in (out, out / "model"):
        served = load_served(folder)
        assert served.name == folder.name
        same_bits(served.model.state_dict(), load_checkpoint(out / "model").state_dict())
        same_bits(load_model(str(folder))[0].state_dict(), weights(out / "model"))
        report = run_evaluation(str(folder), texts=[str(tmp_path / "text.txt")])
        assert report == out / "model" / "eval" / "results.md"


@pytest.mark.parametrize(
    "command", ["generate --prompt a --model", "serve --port 0", "eval --texts text.txt --limit 1"]
)
def test_what_has_no_model_yet_says_which_command_writes_it(out, capsys, monkeypatch, command):
    monkeypatch.chdir(out)
    (out / "text.txt").write_text("once")
    shutil.rmtree(out / "model")
    message = error_of(capsys, *command.split(), out)
    assert f"{out} is a run's folder, and its training has not ended: write the model of" in message
    assert f"by `pararnn export {out}`" in message
    message = error_of(capsys, *command.split(), out / "checkpoint-3")
    assert "it has no config.json" in message
    assert "`pararnn export` writes the model of a run's checkpoint" in message
    exported = export_checkpoint(out, 3)
    assert f"name one of {exported}, or write" in error_of(capsys, *command.split(), out)


def test_a_model_s_folder_is_no_run(out, capsys):
    message = error_of(capsys, "export", out / "model")
    assert "model is a model's folder, and no run's: name the run's" in message


def test_a_model_keeps_the_reports_in_it(out):
    (out / "model" / "eval").mkdir()
    (out / "model" / "eval" / "results.md").write_text("mine")
    (out / "model" / "README.md").write_text("mine")
    run_training(config(out, steps=7, keep=9), Known())
    assert (out / "model" / "eval" / "results.md").read_text() == "mine"
    assert (out / "model" / "README.md").read_text() == "mine"
    model = weights(out / "model")
    export_checkpoint(out, 7, out.parent / "seven")
    same_bits(model, weights(out.parent / "seven"))


@pytest.mark.parametrize("mark", [True, False], ids=["changed", "of another"])
def test_a_model_that_is_not_the_run_s_own_is_said_at_once(out, mark):
    (out / "model" / "config.json").write_text("{}")
    if not mark:
        (out / "model" / ".pararnn.json").unlink()
    old = everything(out)
    with pytest.raises(TrainingError, match="has changed since" if mark else "is not marked"):
        run_training(config(out, steps=9), Known())
    assert everything(out) == old


@pytest.mark.parametrize("name", ["checkpoint-500", "model", "log.jsonl", "tokenizer"])
def test_a_folder_that_is_no_run_s_is_refused(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "weights").write_text("of another training")
    old = everything(tmp_path)
    with pytest.raises(TrainingError, match=rf"has {name} and no config\.json"):
        run_training(config(tmp_path), Packed())
    assert everything(tmp_path) == old


def test_a_config_of_something_else_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(TrainingError, match=r"config\.json has model\.\w+ = None, and this run"):
        run_training(config(tmp_path), Packed())


@pytest.mark.parametrize("name", ["checkpoint-6", "checkpoint-500"])
def test_checkpoints_of_others_are_in_the_way(out, name):
    """Also those that version 0.2.0 wrote."""
    shutil.rmtree(out / name, ignore_errors=True)
    (out / name).mkdir()
    (out / name / "weights").write_text("of another training")
    old = everything(out)
    with pytest.raises(TrainingError, match=rf"{name} is not a checkpoint as this version.*move"):
        run_training(config(out, steps=9, keep=1), Known())
    assert everything(out) == old


def test_other_files_in_the_folder_stay(tmp_path):
    (tmp_path / "slurm.out").write_text("mine")
    run_training(config(tmp_path, steps=2, save_every=1, keep=1), Packed())
    assert (tmp_path / "slurm.out").read_text() == "mine"
    assert [step for step, _ in checkpoints.checkpoints(tmp_path)] == [2]


def test_two_runs_do_not_share_a_folder(tmp_path, monkeypatch):
    """Until the first one ends."""
    out, log, steps = tmp_path / "run", RunTrainer.log, []

    def second(self, *args):
        log(self, *args)
        with pytest.raises(
            TrainingError, match=r"another run is at work in .*run: wait for.*\.run\.lock"
        ):
            run_training(config(out), Packed())
        steps.append(self.step)

    monkeypatch.setattr(RunTrainer, "log", second)
    for _ in range(2):  # the folder is new, and there
        run_training(config(out, steps=len(steps) + 1, save_every=1), Packed())
    assert steps


def test_a_folder_that_cannot_be_locked_is_refused(tmp_path, monkeypatch):
    def error(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", error)
    with pytest.raises(TrainingError, match=r"run cannot be locked .*No locks available"):
        run_training(config(tmp_path / "run"), Packed())


def text_config(out, source, **data):
    settings = {"cache": str(out.parent / "cache"), "sequence_length": 12, "holdout": 0.3}
    model = LMConfig(
        vocab_size=257, hidden_size=16, intermediate_size=32, num_hidden_layers=1, cell="gru"
    )
    data = DataConfig(train=str(source), **settings | data)
    return config(out, model=model, data=data, steps=2, valid_rows=1, save_every=1)


TEXT = "".join(f"{n} and {n} is {2 * n}.\n" for n in range(20))


def test_the_same_text_by_another_path_goes_on(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    run_training(text_config(tmp_path / "run", tmp_path / "a.txt"))
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").rename(tmp_path / "b" / "other.txt")
    lines = json.dumps({"words": TEXT}) + "\n"
    (tmp_path / "c.jsonl").write_text(lines)
    (tmp_path / "valid.txt").write_text("held out" * 9)
    for request in (
        text_config(tmp_path / "run", tmp_path / "b" / "other.txt"),
        text_config(tmp_path / "run", tmp_path / "b"),
        text_config(tmp_path / "run", tmp_path / "c.jsonl", column="words"),
    ):
        run_training(dataclasses.replace(request, steps=3))
        with pytest.raises(TrainingError, match=r"data\.sequence_length = 12, and this run 8"):
            run_training(
                dataclasses.replace(
                    request, data=dataclasses.replace(request.data, sequence_length=8)
                )
            )
    other = text_config(tmp_path / "run", tmp_path / "b", valid=str(tmp_path / "valid.txt"))
    with pytest.raises(TrainingError, match=r"data\.\w+ = "):
        run_training(other)


@pytest.mark.parametrize("kind", ["train", "valid"])
def test_other_text_under_the_same_path_is_refused(tmp_path, kind):
    for name in ("train", "valid"):
        (tmp_path / f"{name}.txt").write_text(TEXT)
    request = text_config(
        tmp_path / "run", tmp_path / "train.txt", valid=str(tmp_path / "valid.txt")
    )
    run_training(request)
    old = everything(tmp_path / "run")
    path = tmp_path / f"{kind}.txt"
    path.write_text(TEXT.replace("and", "AND"))
    with pytest.raises(TrainingError, match=rf"the data of {tmp_path}/train.txt have changed"):
        run_training(dataclasses.replace(request, steps=3))
    assert everything(tmp_path / "run") == old
    path.write_text(TEXT)
    run_training(dataclasses.replace(request, steps=3))


def test_data_of_one_s_own_are_compared_as_they_say(out):
    run_training(config(out), Known())
    with pytest.raises(TrainingError, match="have changed"):
        run_training(config(out), Changed())
    run_training(config(out), Packed())  # which says nothing
    data = DataConfig(train="elsewhere", sequence_length=12)
    run_training(config(out, data=data), Known())
    with pytest.raises(TrainingError, match=r"data\.train = 'elsewhere', and this run ''"):
        run_training(config(out), Packed())


def test_keys_and_files_that_an_earlier_version_did_not_have(out):
    """It has no hash of its data and no record."""
    (out / "data.json").unlink()
    (out / "record.json").unlink()
    record = json.loads((out / "config.json").read_text())
    del record["data"]["drop"], record["init_from"]
    (out / "config.json").write_text(json.dumps(record))
    data = DataConfig(train="elsewhere", sequence_length=12)
    with pytest.raises(TrainingError, match=r"data\.train = '', and this run 'elsewhere'"):
        run_training(config(out, data=data), Known())
    data = DataConfig(drop="a=b", sequence_length=12)
    with pytest.raises(TrainingError, match=r"data\.drop = '', and this run 'a=b'"):
        run_training(config(out, data=data), Known())
    run_training(config(out, steps=7, keep=9), Known())
    assert json.loads((out / "data.json").read_text()) == {"content": "these"}
    assert 7 in losses(out)


@pytest.mark.parametrize(("save", "valid", "log"), [(2, 1, 3), (9, 9, 9)], ids=["less", "more"])
def test_intervals_of_a_run_that_goes_on_are_its_own(whole_run, tmp_path, save, valid, log):
    out = shutil.copytree(whole_run, tmp_path / "run")
    run_training(
        config(out, steps=10, keep=99, save_every=save, valid_every=valid, log_every=log), Known()
    )
    steps = range(7, 11)
    rows = [row for row in read_rows(out / "log.jsonl") if int(row["step"]) > 6]
    last = {10}  # is logged, validated and saved
    loss_steps = {int(row["step"]) for row in rows if "loss" in row}
    assert loss_steps == {s for s in steps if s % log == 0} | last
    valid_steps = {int(row["step"]) for row in rows if "valid_loss" in row}
    assert valid_steps == {s for s in steps if s % valid == 0} | last
    save_steps = {step for step, _ in checkpoints.checkpoints(out) if step > 6}
    assert save_steps == {s for s in steps if s % save == 0} | last


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


# torch.distributed.checkpoint reads other weights from such a file, without a word.
@pytest.mark.parametrize("part", ["__0_0.distcp", ".metadata", ".pararnn.json"])
@pytest.mark.one_in(2)
def test_a_flipped_bit_is_said_and_the_checkpoint_before_taken(out, whole_run, capsys, part):
    flip_bit(out / "checkpoint-6" / part)
    run_training(config(out, keep=1), Known())
    message = capsys.readouterr()
    assert f"{out / 'checkpoint-6'} is damaged, " in message.err
    assert f"{part} has changed since" in message.err or part == checkpoints.MARK
    assert f"resumes from {out / 'checkpoint-3'}\n" in message.out
    assert (out / "checkpoint-6-damaged" / part).exists()
    same_bits(weights(out / "model"), weights(whole_run / "model"))
    assert losses(out) == losses(whole_run)
    run_training(config(out, keep=1), Known())
    assert "damaged" not in capsys.readouterr().err


def test_where_no_checkpoint_is_whole_a_run_starts_anew(out, whole_run, capsys):
    (out / "checkpoint-3" / ".metadata").unlink()
    flip_bit(out / "checkpoint-6" / "__0_0.distcp")
    run_training(config(out, keep=9), Known())
    message = capsys.readouterr()
    assert "checkpoint-6 is damaged, __0_0.distcp has changed" in message.err
    assert "checkpoint-3 is damaged, .metadata cannot be read: No such file" in message.err
    assert "resumes from" not in message.out
    same_bits(weights(out / "model"), weights(whole_run / "model"))
    assert losses(out) == losses(whole_run)


def test_export_takes_a_checkpoint_that_is_whole(out, capsys):
    flip_bit(out / "checkpoint-6" / "__0_0.distcp")
    assert export_checkpoint(out).name == "model-3"
    assert "checkpoint-6 is damaged, __0_0.distcp has changed" in capsys.readouterr().err
    with pytest.raises(TrainingError, match=r"no whole checkpoint of step 6; its .*: 3, 6$"):
        export_checkpoint(out, 6)
    assert (out / "checkpoint-6").exists()  # a run may be at work


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\x00" * 40, b'{"model": {}}'])
def test_a_damaged_config_is_one_line(out, capsys, content):
    (out / "config.json").write_bytes(content)
    with pytest.raises(TrainingError, match=r"config\.json (cannot be read|has model)"):
        run_training(config(out), Known())
    assert "config.json" in error_of(capsys, "export", out)


@pytest.mark.parametrize("change", [{"steps": -1}, {"batch": "many"}, {"model": 3}])
def test_a_config_with_impossible_values_is_one_line(out, capsys, change):
    record = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(record | change))
    assert "config.json" in error_of(capsys, "export", out)


def test_a_damaged_record_of_the_data_is_one_line(out):
    (out / "data.json").write_text("{")
    with pytest.raises(TrainingError, match=r"data\.json cannot be read"):
        run_training(config(out), Known())


@pytest.mark.parametrize(
    "damage", [lambda text: text.replace(b":", b"", 1), lambda text: b"\0" * len(text)]
)
def test_lines_of_a_log_that_are_damaged_are_left_out(out, damage):
    path = out / "log.jsonl"
    rows = len(read_rows(path))
    path.write_bytes(damage(path.read_bytes()))
    assert len(read_rows(path)) < rows
    run_training(config(out, steps=8, keep=9), Known())
    assert {7, 8} <= losses(out).keys()
