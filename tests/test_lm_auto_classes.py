"""When transformers' Auto classes know the language models, and that nothing waits for it."""

import importlib
import sys

import pytest
from fresh import run_fresh

from pararnn.lm import auto_classes

pytest.importorskip("transformers")

KNOWN = "assert type(AutoConfig.for_model('pararnn')).__module__ == 'pararnn.lm.hf.config'"


def passes_afresh(*lines):
    ended = run_fresh("\n".join(("import sys", *lines)))
    assert not ended.returncode, ended.stderr


def test_nothing_imports_transformers():
    passes_afresh(
        "import pararnn.cli, pararnn.evaluation, pararnn.lm, pararnn.tasks, pararnn.train",
        "assert 'transformers' not in sys.modules",
    )


@pytest.mark.parametrize(
    "lines",
    [
        (
            "import pararnn.lm, importlib.util",
            f"assert importlib.util.find_spec({auto_classes.AUTO!r})",  # which imports nothing
            "from transformers import AutoConfig",
        ),
        ("from transformers import AutoConfig", "import pararnn.lm"),
    ],
    ids=["before", "after"],
)
def test_auto_classes_know_the_models_whoever_comes_first(lines):
    finder = (
        f"assert not any(type(f).__module__ == {auto_classes.__name__!r} for f in sys.meta_path)"
    )
    passes_afresh(*lines, KNOWN, finder)


def test_a_version_that_is_too_old_is_a_warning(monkeypatch):
    def fail(name):
        raise ImportError("cannot import name 'initialization'")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.warns(UserWarning, match=r"too old .*initialization.* pip install 'pararnn\[hf\]'"):
        auto_classes.register()
    assert "pararnn.lm" in sys.modules
