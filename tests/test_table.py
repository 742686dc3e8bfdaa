"""What the shared table says of the machine, and which cases `make test` leaves out."""

from pathlib import Path
from typing import NamedTuple

import pytest
import thorough
import torch
from table import DTYPES, ELEMENTWISE, there

import pararnn


def test_what_is_required_is_not_skipped(monkeypatch):
    missing = pararnn.EngineError("no compiler")
    monkeypatch.setenv("PARARNN_REQUIRE_KERNELS", "1")
    assert there(None)
    with pytest.raises(RuntimeError, match=r"REQUIRE_KERNELS is set, .*: no compiler"):
        there(missing)
    monkeypatch.setenv("PARARNN_REQUIRE_KERNELS", "0")
    assert not there(missing)
    monkeypatch.delenv("PARARNN_REQUIRE_KERNELS")
    assert not there(missing)


def test_what_make_test_leaves_out_exists():
    assert thorough.unknown(Path(__file__).parent) == []


class Item(NamedTuple):
    path: Path
    originalname: str
    marks: list[pytest.MarkDecorator]

    def add_marker(self, mark):
        self.marks.append(mark)


@pytest.mark.parametrize(
    ("table", "stay"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"m": {"test_a": 0}}, []),
        ({"m": {"test_a": 3}}, [0, 3]),
        ({"m": {"test_b": 0}, "n": {"test_a": 0}}, [0, 1, 2, 3, 4]),
    ],
)
def test_one_case_in_some_stays(table, stay):
    items = [Item(Path("test_m.py"), "test_a", []) for _ in range(5)]
    thorough.mark(items, table)
    assert [i for i, item in enumerate(items) if not item.marks] == stay


def test_each_cell_and_each_dtype_stay():
    pairs = [(cell, dtype) for cell in ELEMENTWISE for dtype in DTYPES]
    stay = [pair for pair in pairs if not thorough.is_left_out(pair)]
    assert len(stay) == 2 * len(ELEMENTWISE)
    assert {dtype for _, dtype in stay} == {*DTYPES}
    assert not thorough.is_left_out((torch.float16, "dense-gru"))
