"""What a run loses when it is killed, when the disk is full, when a rank is lost."""

import errno
import os
import random
import resource
import shutil
import time
import traceback
from functools import partial
from signal import SIGKILL

import pytest
from processes import launch, on_processes
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.multiprocessing import ProcessExitedException

pytest.importorskip("transformers")

from test_train_stateful import config, make_data
from test_train_trainer import losses, same_bits, weights

from pararnn.base.errors import TrainingError
from pararnn.lab.train import checkpoints, log, run
from pararnn.lab.train import folder as folder_module
from pararnn.lab.train import trainer as trainer_module
from pararnn.lab.train.run import run_training

KILLS = int(os.environ.get("PARARNN_KILLS", "8"))
OFTEN = {"steps": 6 * KILLS, "save_every": 2, "valid_every": 7, "verify_every": 5}
STEP, FILE = b"s", b"f"
"""Events that a child reports: a step, and a file that is on the disk."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    run_training(config(out), make_data())
    return out


def figures(out):
    """Of the log what does not depend on the clock."""
    clock = ("tokens_per_second", "mfu", "memory_gib")
    rows = log.read_rows(out / "log.jsonl")
    return [{name: value for name, value in row.items() if name not in clock} for row in rows]


def is_same(out, whole):
    same_bits(weights(out / "model"), weights(whole / "model"))
    return figures(out) == figures(whole)


def dies_while_it_saves(out, rank):
    write_mark = checkpoints.write_mark

    def dying(folder, *args):
        if folder.name == "checkpoint-6":
            os.kill(os.getpid(), SIGKILL)
        write_mark(folder, *args)

    checkpoints.write_mark = dying
    run_training(config(out), make_data())


def test_a_killed_run_goes_on_with_the_same_bits(whole, tmp_path):
    """States are carried, a lock is held, and a checkpoint is half written."""
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        on_processes(partial(dies_while_it_saves, tmp_path), world=1)
    assert checkpoints.folders(tmp_path) == [(3, tmp_path / "checkpoint-3")]
    assert losses(tmp_path).keys() == {1, 2, 3, 4, 5, 6}
    run_training(config(tmp_path), make_data())
    assert is_same(tmp_path, whole)


def child(out, events, answers):
    """Start a run that tells of its steps and of files on the disk, and waits for answers."""
    process = os.fork()
    if process:
        return process
    try:

        def with_event(function, event):
            def telling(*args):
                os.write(events, event)
                os.read(answers, 1)
                return function(*args)

            return telling

        os.fsync = with_event(os.fsync, FILE)
        learn = with_event(trainer_module.RunTrainer.learn, STEP)
        trainer_module.RunTrainer.learn = learn
        run_training(config(out, **OFTEN), make_data())
    except BaseException:
        (out / "error").write_text(traceback.format_exc())
    finally:
        os._exit(1)


def kill_often(out, rank):
    random.seed(5)
    kills = []
    for kill in range(KILLS):
        (read, write), (read_answer, write_answer) = os.pipe(), os.pipe()
        process = child(out, write, read_answer)
        os.close(write)
        # A step and each file of a checkpoint is an event: some four of them a step.
        wanted = random.choice([0, *random.choices(range(1, 30), k=5)])
        for _ in range(wanted):
            os.write(write_answer, os.read(read, 1))
        if kill % 2:  # while a checkpoint is written: its file waits for an answer
            while (event := os.read(read, 1)) == STEP:
                os.write(write_answer, event)
        elif kill % 4:  # before a step, when none is written
            while (event := os.read(read, 1)) == FILE:
                os.write(write_answer, event)
        else:  # up to the next event
            time.sleep(random.uniform(0, 0.3 if wanted == 0 else random.choice([0.001, 0.02])))
        os.kill(process, SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -SIGKILL
        for pipe in (read, read_answer, write_answer):  # not before: it would end of a broken pipe
            os.close(pipe)
        assert not (out / "error").exists(), (out / "error").read_text()
        last = checkpoints.last_complete(out)
        assert max(losses(out), default=0) - (last[0] if last else 0) <= 2
        kills.append(bool(checkpoints.folders(out / checkpoints.NEW)))
    assert KILLS // 5 <= sum(kills) <= KILLS - KILLS // 5, kills
    assert 0 < last[0] < OFTEN["steps"]


@pytest.mark.thorough
def test_each_kill_loses_at_most_an_interval_and_changes_no_bit(tmp_path):
    run_training(config(tmp_path / "whole", **OFTEN), make_data())
    on_processes(partial(kill_often, tmp_path / "run"), world=1)
    run_training(config(tmp_path / "run", **OFTEN), make_data())
    assert is_same(tmp_path / "run", tmp_path / "whole")


class Full:
    """A disk on which no file may be larger than `size` bytes, as the kernel has it."""

    def __init__(self, size):
        self.size = size

    def __enter__(self):
        self.old_limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.old_limits[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.old_limits)


def full_checkpoint(patch, whole):
    """The weights are the largest file."""
    size = (whole / "checkpoint-3" / "__0_0.distcp").stat().st_size
    save = trainer_module.save_checkpoint

    def full(out, step, *args):
        if step != 6:
            return save(out, step, *args)
        with Full(size - 1):
            return save(out, step, *args)

    patch.setattr(trainer_module, "save_checkpoint", full)


def full_log(patch, whole):
    """In the middle of a row."""
    append = trainer_module.append_row

    def full(path, row):
        if row["step"] != 5:
            return append(path, row)
        with Full(path.stat().st_size + 20):
            return append(path, row)

    patch.setattr(trainer_module, "append_row", full)


def no_space(owner, name):
    def error(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    return lambda patch, _: patch.setattr(owner, name, error)


@pytest.mark.parametrize(
    ("fill", "goes_on"),
    [
        (full_checkpoint, "checkpoint-3"),
        (no_space(folder_module, "write_text"), "the start"),
        (full_log, "checkpoint-3"),
        (no_space(run, "export"), "checkpoint-6"),
    ],
)
@pytest.mark.one_in(2)
def test_a_full_disk_costs_an_interval_at_most(whole, tmp_path, monkeypatch, fill, goes_on):
    with monkeypatch.context() as patch:
        fill(patch, whole)
        wanted = rf"could not be written.*: [^\n]+\. Make room .* resumes from .*{goes_on}$"
        with pytest.raises(TrainingError, match=wanted):
            run_training(config(tmp_path), make_data())
    run_training(config(tmp_path), make_data())
    assert is_same(tmp_path, whole)


def a_rank(out, ranks, dies=False):
    log_row = trainer_module.RunTrainer.log

    def dying(self, logs, *args):
        log_row(self, logs, *args)
        if os.environ["RANK"] == "1" and self.step == 5:
            os.kill(os.getpid(), SIGKILL)

    if dies:
        trainer_module.RunTrainer.log = dying
    run_training(config(out, device_batch=4 // ranks), make_data())


@pytest.mark.thorough
def test_a_lost_rank_ends_the_run_and_other_numbers_of_ranks_go_on(whole, tmp_path):
    """Rows of a step are on other ranks and in other parts each time."""
    with pytest.raises(ChildFailedError):
        launch(partial(a_rank, tmp_path / "run", 2, True), tmp_path / "logs")
    assert checkpoints.folders(tmp_path / "run")[-1][0] == 3
    for ranks in (1, 2, 4):
        out = shutil.copytree(tmp_path / "run", tmp_path / f"on-{ranks}")
        output = launch(partial(a_rank, out, ranks), tmp_path / f"logs-{ranks}", ranks)
        assert f"resumes from {out / 'checkpoint-3'}" in output
        assert losses(out).keys() == losses(whole).keys()
        for step, loss in losses(out).items():
            assert float(loss) == pytest.approx(float(losses(whole)[step]), abs=1e-4)
