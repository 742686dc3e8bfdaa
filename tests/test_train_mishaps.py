"""What a run loses when it is killed, when the disk is full, when a rank is lost."""

import errno
import json
import os
import random
import resource
import time
import traceback
from functools import partial
from signal import SIGKILL

import pytest
from processes import launch, on_processes
from table import HANGS_AFTER
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

pytest.importorskip("transformers")

from test_train_stateful import config, make_data
from test_train_trainer import losses, same_bits, weights

from pararnn.base.errors import TrainingError
from pararnn.lab.train import checkpoints, log, run
from pararnn.lab.train import folder as folder_module
from pararnn.lab.train import trainer as trainer_module
from pararnn.lab.train.run import run_training

pytestmark = pytest.mark.usefixtures("no_curves")
KILLS = int(os.environ.get("PARARNN_KILLS", "8"))
STEP, FILE = b"s", b"f"
"""Events that a child reports: a step, and a file of a checkpoint."""


def child(folder, out, request, events=None, answers=None):
    """Start a run that tells of its steps and of the files of its checkpoints; the process.

    Each event waits for an answer.
    """
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        handle = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)

        def with_event(function, event):
            def telling(*args):
                if events is not None:
                    os.write(events, event)
                    os.read(answers, 1)
                return function(*args)

            return telling

        trainer = trainer_module.RunTrainer
        checkpoints.flush = with_event(checkpoints.flush, FILE)
        trainer.learn = with_event(trainer.learn, STEP)
        run.plot_rows = trainer_module.plot_rows = lambda *_: None
        run_training(config(out, **request), make_data())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def exit_code(process):
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def half_saved(out):
    new_checkpoints = checkpoints.checkpoints(out / checkpoints.NEW)
    return any(not (path / "complete").exists() for _, path in new_checkpoints)


def kill_often(folder, steps, rank):
    request = {"steps": steps, "save_every": 2, "valid_every": 7, "verify_every": 5}
    request["report_to"] = "none"
    random.seed(5)
    assert exit_code(child(folder, folder / "whole", request | {"save_every": steps})) == 0
    out, kills = folder / "killed", []
    while len(kills) < KILLS:
        (read, write), (read_answer, write_answer) = os.pipe(), os.pipe()
        process = child(folder, out, request, write, read_answer)
        os.close(write)
        # A step and each file of a checkpoint is an event: some eight of them a step.
        wanted = random.choice([0, *random.choices(range(1, 46), k=5)])
        event = STEP
        for _ in range(wanted):
            event = os.read(read, 1)
            os.write(write_answer, event)
        if len(kills) % 2 and wanted:  # while a checkpoint is written: its file waits for an answer
            while (event := os.read(read, 1)) == STEP:
                os.write(write_answer, event)
        else:  # up to the next event
            time.sleep(random.uniform(0, random.choice([0.001, 0.02]) if wanted else 0.3))
        os.kill(process, SIGKILL)
        code = exit_code(process)
        for pipe in (read, read_answer, write_answer):  # not before: it would end of a broken pipe
            os.close(pipe)
        last = checkpoints.last_complete(out)
        saved_step, at = last[0] if last else 0, max(losses(out), default=0)
        half = half_saved(out)
        kills.append(
            {"events": wanted, "ended": code, "step": at, "kept": saved_step, "half": half}
        )
    assert exit_code(child(folder, out, request)) == 0
    (folder / "kills.json").write_text(json.dumps(kills))


@pytest.mark.thorough
def test_each_kill_loses_at_most_an_interval_and_changes_no_bit(tmp_path):
    steps = 6 * KILLS
    on_processes(partial(kill_often, tmp_path, steps), world=1)
    output = (tmp_path / "output").read_text()
    assert "Traceback" not in output, output
    kills = json.loads((tmp_path / "kills.json").read_text())
    assert [kill["ended"] for kill in kills] == [-9] * KILLS
    assert all(kill["step"] - kill["kept"] <= 2 for kill in kills), kills
    assert sum(kill["half"] for kill in kills) >= KILLS // 5, kills
    assert sum(not kill["half"] for kill in kills) >= KILLS // 5, kills
    assert 0 < kills[-1]["kept"] < steps, kills
    whole, other = tmp_path / "whole", tmp_path / "killed"
    same_bits(weights(other / "model"), weights(whole / "model"))
    assert figures(other) == figures(whole)


def figures(out):
    """Of log.csv what does not depend on the clock."""
    clock = ("tokens_per_second", "mfu", "memory_gib")
    rows = log.read_rows(out / "log.csv")
    return [{name: value for name, value in row.items() if name not in clock} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    run_training(config(out), make_data())
    return out


class Full:
    """A disk on which no file may be larger than `size` bytes, as the kernel has it."""

    def __init__(self, size):
        self.size = size

    def __enter__(self):
        self.old_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.old_limits[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.old_limits)


def sizes(folder):
    return {path.name: path.stat().st_size for path in folder.rglob("*")}


# The largest files of a checkpoint, in the order in which they are written.
@pytest.mark.parametrize("file", ["__0_0.distcp", "rng_state.pth", "streams.safetensors"])
@pytest.mark.one_in(3)
def test_a_full_disk_keeps_the_checkpoint_before(whole, tmp_path, monkeypatch, file):
    """Of files of this size and more none can be written; those before it are."""
    out, save = tmp_path / "run", trainer_module.RunTrainer.save
    size = sizes(whole / "checkpoint-3")[file]

    def full(self, *args):
        if self.step != 6:
            return save(self, *args)
        with Full(size - 1):
            return save(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module.RunTrainer, "save", full)
        wanted = r"checkpoint-6 could not be written: .*Make room .* goes on from .*checkpoint-3"
        with pytest.raises(TrainingError, match=wanted):
            run_training(config(out), make_data())
    assert checkpoints.last_complete(out) == (3, out / "checkpoint-3")
    run_training(config(out), make_data())
    same_bits(weights(out / "model"), weights(whole / "model"))
    assert figures(out) == figures(whole)


def no_space(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("owner", "name", "file", "goes_on"),
    [
        (folder_module, "write_text", "config.json", "the start"),
        (trainer_module, "append_row", "log.csv", "the start"),
        (run, "export", "model", "checkpoint-6"),
        (run, "plot_rows", "curves.png", "checkpoint-6"),
    ],
)
@pytest.mark.one_in(3)
def test_other_files_that_cannot_be_written(
    whole, tmp_path, monkeypatch, owner, name, file, goes_on
):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, no_space)
        message = rf"{file} could not be written: .*No space left.* goes on from .*{goes_on}"
        with pytest.raises(TrainingError, match=message):
            run_training(config(out), make_data())
    run_training(config(out), make_data())
    same_bits(weights(out / "model"), weights(whole / "model"))
    assert figures(out) == figures(whole)


def test_a_full_disk_in_the_middle_of_a_row_of_the_log(whole, tmp_path, monkeypatch):
    out, append = tmp_path / "run", trainer_module.append_row

    def full(path, row):
        if row["step"] != 5:
            return append(path, row)
        with Full(path.stat().st_size + 20):
            return append(path, row)

    with monkeypatch.context() as patch:
        patch.setattr(trainer_module, "append_row", full)
        with pytest.raises(TrainingError, match=r"log\.csv could not be written.*File too large"):
            run_training(config(out), make_data())
    assert not (out / "log.csv").read_text().endswith("\n")
    run_training(config(out), make_data())
    assert figures(out) == figures(whole)


def test_a_full_disk_while_tensorboard_writes(tmp_path, monkeypatch):
    """Its thread keeps the error for the next call, where it is raised."""
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter
    monkeypatch.setattr(writer, "add_scalar", no_space)
    with pytest.raises(TrainingError, match=rf"{tmp_path} could not be written: .*No space left"):
        run_training(config(tmp_path, report_to="tensorboard"), make_data())


def a_rank(out):
    run_training(config(out, device_batch=2), make_data())


def dies(out):
    log_row = trainer_module.RunTrainer.log

    def dying(self, logs, *args):
        log_row(self, logs, *args)
        if os.environ["RANK"] == "1" and self.step == 5:
            os.kill(os.getpid(), SIGKILL)

    trainer_module.RunTrainer.log = dying
    try:
        a_rank(out)
    except RuntimeError:  # gloo's; the launcher has to see the lost one, and to end this one
        if os.environ["RANK"] == "1":
            raise
        time.sleep(HANGS_AFTER)


def test_a_lost_rank_ends_the_run_and_the_same_command_goes_on(whole, tmp_path):
    """One of two processes is killed, and the launcher ends the other."""
    out = tmp_path / "run"
    with pytest.raises(ChildFailedError) as error:
        launch(partial(dies, out), tmp_path / "first")
    assert error.value.failures[1].exitcode == -SIGKILL
    output = launch(partial(a_rank, out), tmp_path / "again")
    assert f"goes on from {out / 'checkpoint-3'}" in output
    assert losses(out).keys() == losses(whole).keys()
    for step, loss in losses(out).items():
        assert float(loss) == pytest.approx(float(losses(whole)[step]), abs=1e-4)
