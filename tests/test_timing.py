"""Times are medians, taken after a warm-up, of blocks of calls."""

import torch

from pararnn.tune.timing import BLOCK_SECONDS, device_name, median_seconds, settled_seconds

CPU = torch.device("cpu")


def test_timings_are_medians_after_a_warm_up(monkeypatch):
    clock = iter([0, 9, 10, 11, 20, 25, 30, 33])  # calls that take 9, 1, 5 and 3 seconds
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    assert median_seconds(lambda: None, CPU, 3) == 3


def test_short_calls_are_timed_in_blocks(monkeypatch):
    now, calls = [0.0], []
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def call():
        calls.append(None)
        now[0] += BLOCK_SECONDS / 4

    assert abs(settled_seconds(call, CPU, 10 * BLOCK_SECONDS) - BLOCK_SECONDS / 4) < 1e-9
    assert len(calls) == 1 + 4 * 10
    calls.clear()
    settled_seconds(call, CPU, 0.0)
    assert len(calls) == 1 + 4 * 3


def test_devices_have_names():
    assert device_name(CPU)
