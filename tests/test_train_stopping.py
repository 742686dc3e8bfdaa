"""Runs that signals stop: they end the step, save and say where the same command goes on."""

import os
import signal
import threading

import pytest

pytest.importorskip("transformers")

from test_train_trainer import Packed, config, losses, same_bits, weights
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from pararnn.lab import cli
from pararnn.lab.train import checkpoints, stopping
from pararnn.lab.train import run as run_module
from pararnn.lab.train.run import run_training
from pararnn.lab.train.trainer import RunTrainer


@pytest.fixture(autouse=True)
def signals(monkeypatch):
    """Heed all signals, also where the shell that began the tests ignores some."""
    monkeypatch.delenv("RANK", raising=False)
    handlers = {number: signal.getsignal(number) for number in stopping.SIGNALS}
    for number in handlers:
        own = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, own)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def send(patch, numbers, step, name="learn"):
    """Send signals to oneself within a step of a run."""
    method = getattr(RunTrainer, name)

    def sending(self, *args, **kwargs):
        result = method(self, *args, **kwargs)
        if self.step == step:
            for number in numbers:
                os.kill(os.getpid(), number)
        return result

    patch.setattr(RunTrainer, name, sending)


@pytest.mark.parametrize("number", stopping.SIGNALS)
@pytest.mark.one_in(4)
def test_a_signal_saves_and_the_run_goes_on_from_there(tmp_path, monkeypatch, number):
    """Also in the first step, while a checkpoint is written, and in the last step."""
    run_training(config(tmp_path / "whole"), Packed())
    out = tmp_path / "run"
    handlers = [signal.getsignal(each) for each in stopping.SIGNALS]
    # In a step of this number that follows, and where the checkpoint is.
    for step, name, saved in ((0, "learn", 1), (3, "save", 4), (5, "learn", 6)):
        with monkeypatch.context() as patch:
            send(patch, [number], step, name)
            goes_on = rf"stopped by {number.name}: the same command resumes from {out}"
            with pytest.raises(KeyboardInterrupt, match=rf"{goes_on}/checkpoint-{saved}$"):
                run_training(config(out), Packed())
        assert checkpoints.last_complete(out) == (saved, out / f"checkpoint-{saved}")
        assert [signal.getsignal(each) for each in stopping.SIGNALS] == handlers
    assert not (out / "model").exists()
    run_training(config(out), Packed())
    same_bits(weights(out / "model"), weights(tmp_path / "whole" / "model"))
    assert losses(out) == losses(tmp_path / "whole")


def test_ignored_signals_stay_ignored(tmp_path, monkeypatch):
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    send(monkeypatch, [signal.SIGHUP], 2)
    run_training(config(tmp_path, steps=3), Packed())
    assert (tmp_path / "model").exists()


def test_threads_have_no_signals():
    def look():
        with stopping.stopping():
            handlers_in_thread.append([signal.getsignal(each) for each in stopping.SIGNALS])

    handlers_in_thread, handlers = [], [signal.getsignal(each) for each in stopping.SIGNALS]
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers_in_thread == [handlers]


def test_a_second_ctrl_c_ends_a_run_that_is_alone(monkeypatch):
    """A launcher sends on what its processes have got from the terminal already."""
    with stopping.stopping() as signals:
        for number in (signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        monkeypatch.setenv("RANK", "0")
        signal.raise_signal(signal.SIGINT)
        assert signals == [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]


@pytest.mark.parametrize("method", ["write_data", "read_data"])
def test_ctrl_c_within_a_checkpoint_is_no_fault_of_the_disk(tmp_path, monkeypatch, method):
    """A second one while it is written, or the first one while it is read."""
    owner = {"write_data": FileSystemWriter, "read_data": FileSystemReader}[method]
    run_training(config(tmp_path, steps=3), Packed())

    def interrupt(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_training(config(tmp_path), Packed())
    run_training(config(tmp_path), Packed())
    assert losses(tmp_path).keys() == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("message", ["", "stopped by SIGTERM: the same command"])
def test_a_command_that_is_stopped_says_one_line(monkeypatch, capsys, message, rank):
    def raise_error(config):
        raise KeyboardInterrupt(message)

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(run_module, "run_training", raise_error)
    with pytest.raises(SystemExit) as exit_error:
        cli.main(["train", "tiny"])
    assert exit_error.value.code == 130
    err = capsys.readouterr().err
    assert err == ("" if rank == "1" else f"pararnn: {message or 'interrupted'}\n")
