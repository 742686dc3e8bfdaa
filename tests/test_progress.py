"""How far long work is: bars, lines, and how they say numbers."""

import sys

import pytest

from pararnn.lab import progress
from pararnn.lab.progress import Progress, amount, duration, say


def test_numbers_are_said_in_short():
    texts = {0: "0 s", 59.6: "1 min 0 s", 61: "1 min 1 s", 3600: "1 h 0 min", 90061: "1 d 1 h"}
    assert {seconds: duration(seconds) for seconds in texts} == texts
    counts = {0: "0 ", 999: "999 ", 999.7: "1 k", 12_345: "12.3 k", 5e9: "5 G", 4e12: "4 T"}
    assert {count: amount(count) for count in counts} == counts


@pytest.fixture
def clock(monkeypatch):
    """Seconds, as tests set them."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_file_has_a_line_now_and_then(clock, capsys):
    with Progress("reading") as progress:
        for clock[0], count in ((10, 2_000_000), (31, 3_100_000), (40, 1), (70, 7_000_000)):
            progress.update(count)
    assert capsys.readouterr().err.splitlines() == [
        "reading: 3.1 MB, 100 kB/s",
        "reading: 7 MB, 100 kB/s",
    ]


def test_where_the_end_is_known_the_time_left_is_said(clock, capsys):
    with Progress("parity, gru", 4000, "steps") as progress:
        clock[0] = 50.0
        progress.update(1000, loss="0.5")
    assert capsys.readouterr().err == (
        "parity, gru: 1,000 of 4,000 steps, 20 steps/s, 2 min 30 s left, loss 0.5\n"
    )


def test_a_terminal_has_a_bar(monkeypatch, capsys):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress("parity, gru", 10, "steps") as progress:
        progress.update(4, loss="0.5")
    assert "parity, gru:" in capsys.readouterr().err


def test_of_several_processes_one_speaks(monkeypatch, capsys):
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        say(f"rank {rank}")
    assert capsys.readouterr().err == "rank 0\n"
