"""Tests for a GPU are collected where there is one; what they import must exist everywhere."""

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "gpu"
FILES = sorted(FOLDER.glob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_a_module_can_be_imported(file, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)  # as dataclasses look for it
    try:
        spec.loader.exec_module(module)
    except pytest.skip.Exception:
        pass  # it needs a package that is not here
    else:
        assert any(name.startswith(("test_", "Test")) for name in vars(module))
