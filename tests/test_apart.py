"""What traces a cell runs in a thread of its own, and leaves nothing of that thread behind."""

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pararnn.program.apart import call_outside_modes


def test_modes_of_the_caller_are_not_seen():
    with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        assert torch.is_autocast_enabled("cpu")
        assert not call_outside_modes(torch.is_autocast_enabled, "cpu")
        assert call_outside_modes(torch.empty, 1).device.type == "cpu"


@pytest.mark.parametrize("gpus", [None, False, True])
def test_the_stand_in_for_gpus_outlives_the_thread(monkeypatch, gpus):
    """PyTorch built for CUDA, without a GPU, keeps that of the first thread with fake tensors."""
    threads, enter = [], FakeTensorMode.__enter__

    def enter_and_count(mode):
        threads.append(threading.current_thread())
        return enter(mode)

    def fake():
        with FakeTensorMode():
            return threading.current_thread()

    monkeypatch.setattr(torch.version, "cuda", None if gpus is None else "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(gpus))
    monkeypatch.setattr(FakeTensorMode, "__enter__", enter_and_count)
    other, own = call_outside_modes(fake), threading.current_thread()
    assert other is not own
    assert threads == ([own, other] if gpus is False else [other])


def test_errors_are_the_callers():
    with pytest.raises(ValueError, match="invalid literal"):
        call_outside_modes(int, "x")
