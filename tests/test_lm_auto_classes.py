"""When transformers' Auto classes know the language models, and that nothing waits for it."""

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
            "assert importlib.util.find_spec('transformers')",  # which imports nothing
            "from transformers import AutoModelForCausalLM, AutoConfig",
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


def test_a_version_that_is_too_old_is_left_in_peace(tmp_path):
    (tmp_path / "transformers.py").write_text("__version__ = '4.0'\n")
    passes_afresh(
        "import warnings",
        f"sys.path.insert(0, {str(tmp_path)!r})",
        "import pararnn.lm",
        "with warnings.catch_warnings(record=True) as seen:",
        "    warnings.simplefilter('always')",
        "    import transformers",
        'assert ["pararnn[hf]" in str(one.message) for one in seen] == [True], seen',
    )
