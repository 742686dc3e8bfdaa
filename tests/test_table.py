"""What the shared table says of the machine."""

import pytest
from table import there

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
