"""What the shared table says of the machine, and which cases `make test` leaves out."""

from typing import NamedTuple

import pytest
import selection
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


class Item(NamedTuple):
    nodeid: str
    marks: list[pytest.MarkDecorator]

    def get_closest_marker(self, name):
        return next((mark.mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark):
        self.marks.append(mark)


@pytest.mark.parametrize(("n", "stay"), [(1, [0, 1, 2, 3, 4]), (3, [0, 3]), (7, [0])])
def test_one_case_in_some_stays(n, stay):
    items = [Item(f"test_m.py::test_a[{i}]", [pytest.mark.one_in(n)]) for i in range(5)]
    selection.mark([*items, Item("test_m.py::test_b", [])])
    assert [i for i, item in enumerate(items) if item.marks[1:] == []] == stay


def test_each_cell_and_each_dtype_stay():
    pairs = [(cell, dtype) for cell in ELEMENTWISE for dtype in DTYPES]
    stay = [pair for pair in pairs if not selection.is_left_out(pair)]
    assert len(stay) == 2 * len(ELEMENTWISE)
    assert {dtype for _, dtype in stay} == {*DTYPES}
    assert not selection.is_left_out((torch.float16, "dense-gru"))
