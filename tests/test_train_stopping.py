"""Runs that are asked to stop by signals."""

import os
import re
import signal
import threading
from functools import partial

import pytest

pytest.importorskip("transformers")

from processes import on_processes
from test_train_trainer import Packed, config, losses, run_until, same_bits, weights

from pararnn.lab import cli
from pararnn.lab.train import checkpoints, stopping
from pararnn.lab.train import run as run_module
from pararnn.lab.train.run import run_training
from pararnn.lab.train.stopping import Stop, Stopped
from pararnn.lab.train.trainer import RunTrainer


def reset_signals():
    """Heed all signals, also where the shell that began the tests ignores some."""
    for number in stopping.SIGNALS:
        own = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, own)


@pytest.fixture(autouse=True)
def signals():
    handlers = {number: signal.getsignal(number) for number in stopping.SIGNALS}
    reset_signals()
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    run_training(config(out), Packed())
    return out


def send(patch, number, step, name="log"):
    """Send a signal to oneself in a step of a run: behind its row of the log, or its pass."""
    method = getattr(RunTrainer, name)

    def sending(self, *args, **kwargs):
        result = method(self, *args, **kwargs)
        if self.step == step and not sending.is_sent:
            sending.is_sent = True
            os.kill(os.getpid(), number)
        return result

    sending.is_sent = False
    patch.setattr(RunTrainer, name, sending)


@pytest.mark.parametrize("number", stopping.SIGNALS)
@pytest.mark.one_in(3)
def test_a_signal_saves_and_the_run_goes_on_from_there(whole, tmp_path, monkeypatch, number):
    handlers = [signal.getsignal(each) for each in stopping.SIGNALS]
    with monkeypatch.context() as patch:
        send(patch, number, 4)
        message = rf"stopped by {number.name}: the same command goes on from .*checkpoint-5$"
        with pytest.raises(Stopped, match=message) as error:
            run_training(config(tmp_path), Packed())
    assert isinstance(error.value, KeyboardInterrupt)
    assert [signal.getsignal(each) for each in stopping.SIGNALS] == handlers
    assert not (tmp_path / "model").exists()
    assert losses(tmp_path).keys() == {1, 2, 3, 4, 5}
    run_training(config(tmp_path), Packed())
    same_bits(weights(tmp_path / "model"), weights(whole / "model"))
    assert losses(tmp_path) == losses(whole)


def test_a_signal_where_the_step_is_saved_anyway_saves_once(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        send(patch, signal.SIGTERM, 2, "learn")
        with pytest.raises(Stopped, match=r"checkpoint-3$"):
            run_training(config(tmp_path), Packed())
    assert [step for step, _ in checkpoints.checkpoints(tmp_path)] == [3]
    run_training(config(tmp_path), Packed())
    same_bits(weights(tmp_path / "model"), weights(whole / "model"))


def test_a_signal_before_the_first_step_ends_the_run_at_once(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        send(patch, signal.SIGTERM, 0, "learn")
        with pytest.raises(Stopped, match=r"goes on from the start$"):
            run_training(config(tmp_path), Packed())
    assert checkpoints.checkpoints(tmp_path) == []
    with monkeypatch.context() as patch:  # nothing new is there to save
        run_until(patch, 4, config(tmp_path))
        send(patch, signal.SIGTERM, 3, "learn")
        with pytest.raises(Stopped, match=r"goes on from .*checkpoint-3$"):
            run_training(config(tmp_path), Packed())
    assert [step for step, _ in checkpoints.checkpoints(tmp_path)] == [3]


@pytest.mark.parametrize("owner", ["last step", "export"])
def test_a_signal_at_the_end_leaves_the_last_checkpoint(whole, tmp_path, monkeypatch, owner):
    export = run_module.export
    with monkeypatch.context() as patch:
        if owner == "last step":
            send(patch, signal.SIGTERM, 6)
        else:
            sends = lambda *args: (os.kill(os.getpid(), signal.SIGTERM), export(*args))  # noqa: E731
            patch.setattr(run_module, "export", sends)
        with pytest.raises(Stopped, match=r"goes on from .*checkpoint-6$"):
            run_training(config(tmp_path), Packed())
    assert not (tmp_path / "model").exists()
    run_training(config(tmp_path), Packed())
    same_bits(weights(tmp_path / "model"), weights(whole / "model"))


def test_a_signal_while_data_are_read_ends_the_run(tmp_path, monkeypatch):
    def bare(config):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("pararnn.lab.train.setup.bare_model", bare)
    with pytest.raises(Stopped, match=r"goes on from the start$"):
        run_training(config(tmp_path / "run"), Packed())
    assert not (tmp_path / "run").exists()


def test_ignored_signals_stay_ignored(tmp_path, monkeypatch):
    """As under nohup."""
    old_handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        send(monkeypatch, signal.SIGHUP, 2)
        run_training(config(tmp_path, steps=3), Packed())
    finally:
        signal.signal(signal.SIGHUP, old_handler)
    assert (tmp_path / "model").exists()


def test_threads_have_no_signals(monkeypatch):
    handlers_in_thread = []

    def look():
        with stopping.stopping(lambda: "the start"):
            handlers_in_thread.append([signal.getsignal(each) for each in stopping.SIGNALS])

    handlers = [signal.getsignal(each) for each in stopping.SIGNALS]
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers_in_thread == [handlers]


@pytest.mark.parametrize(("torchrun", "ends"), [(False, True), (True, False)])
def test_a_second_ctrl_c_ends_a_run_that_is_alone(monkeypatch, torchrun, ends):
    """A launcher sends on what its processes have got from the terminal already."""
    signals = []
    monkeypatch.setattr(signal, "raise_signal", signals.append)
    monkeypatch.setattr(signal, "signal", lambda *args: signals.append(args))
    if torchrun:
        monkeypatch.setenv("RANK", "0")
    stop = Stop(lambda: "the start")
    stop.waits = True
    for number in (signal.SIGTERM, signal.SIGTERM):
        stop.request(number)
    assert signals == []
    stop.request(signal.SIGINT)
    end = [(signal.SIGINT, signal.SIG_DFL), signal.SIGINT]
    assert signals == end * ends
    with pytest.raises(Stopped, match="SIGTERM"):
        stop.obey()


def two_ranks(out, rank):
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            send(patch, signal.SIGTERM, 3)
        with pytest.raises(Stopped) as error:
            run_training(config(out, device_batch=2), Packed())
    assert "checkpoint-5" in str(error.value)


@pytest.mark.thorough
def test_ranks_stop_in_the_same_step(whole, tmp_path):
    """One of them gets a signal: its vote of step 4 is counted in step 5."""
    on_processes(partial(two_ranks, tmp_path))
    assert [step for step, _ in checkpoints.checkpoints(tmp_path)] == [3, 5]
    run_training(config(tmp_path), Packed())
    assert losses(tmp_path).keys() == losses(whole).keys()
    for step, loss in losses(tmp_path).items():
        assert float(loss) == pytest.approx(float(losses(whole)[step]), abs=1e-4)


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (Stopped(signal.SIGTERM, "x/checkpoint-7"), "stopped by SIGTERM: the same command"),
    ],
)
def test_a_command_that_is_stopped_says_one_line(monkeypatch, capsys, error, message, rank):
    def raise_error(config):
        raise error

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(run_module, "run_training", raise_error)
    with pytest.raises(SystemExit) as exit_error:
        cli.main(["train", "tiny"])
    assert exit_error.value.code == 130
    err = capsys.readouterr().err
    assert re.fullmatch("" if rank == "1" else rf"pararnn: {message}.*\n", err)
