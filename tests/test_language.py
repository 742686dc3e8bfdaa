"""Docstrings and names are in plain technical English: see the glossary in CONTRIBUTING.md."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
QUESTIONS = {"What", "Whether", "How", "Where", "When", "Who", "Which", "Those", "That"}
BARE = re.compile(
    "above|after|apart|before|behind|below|beside|between|how|into|onto|over|rest|under|within|"
    "without|begun|done|drawn|found|given|gone|held|kept|known|left|made|meant|said|seen|shown|taken|told|"
    "written|[a-z]{2,}ed"
)
"""Prepositions, irregular participles, and regular ones."""
NOT_PARTICIPLES = {"embed", "feed", "need", "seed", "speed"}
WORDS_OF_THE_FIELD = {"shared", "wanted"}
"""Tensors that all rows share; the gradients, or results, that somebody wants."""
PUBLIC = {
    "after": "lm/cache.py lm/backbone.py train/carry.py tests/test_train_stateful.py",
    "before": "lm/conv.py",
    "carried": "lm/hf/model.py",
    "configured": "tasks/run.py",
    "created": "serving/protocol.py",
    "emitted": "codegen/source.py",
    "fused": "train/optimiser.py",
    "judged": "tasks/base.py",
    "kept": "lm/mixers.py benchmarks/mamba2.py",
    "lifted": "cells/shapes.py",
    "masked": "lm/cache.py lm/model.py",
    "measured": "tune/autotune.py",
    "mended": "layers/recurrent.py check/claims.py",
    "packed": "train/run.py benchmarks/lm_step.py",
    "passed": "check/claims.py check/verify.py",
    "pulled": "program/structure.py tests/test_structure_heads.py",
    "resolved": "train/overrides.py",
    "scattered": "tasks/recall.py",
    "shuffled": "tasks/recall.py",
    "switched": "tune/adapt.py",
}
"""Names that users, files or PyTorch know, by the files that bind them."""


@cache
def _trees(*folders: str) -> list[tuple[Path, ast.Module]]:
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in files]


def _docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of modules, classes, functions, fields and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield from (
                ast.literal_eval(part.value)
                for part in node.body
                if isinstance(part, ast.Expr)
                and isinstance(part.value, ast.Constant)
                and isinstance(part.value.value, str)
            )


def test_docstrings_state_and_do_not_ask():
    wrong = [
        f"{path}: {text.splitlines()[0]}"
        for path, tree in _trees("src", "benchmarks")
        for text in _docstrings(tree)
        if text.split()[0].strip(",.:") in QUESTIONS
    ]
    assert wrong == []


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that code binds: functions, classes, arguments, variables, attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                yield node.name
            case ast.arg():
                yield node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr


def _is_bare(name: str) -> bool:
    """Return True for a participle or a preposition without a noun."""
    word = name.strip("_")
    return BARE.fullmatch(word) is not None and word not in NOT_PARTICIPLES | WORDS_OF_THE_FIELD


def test_names_are_nouns_or_verbs():
    bound = {
        (name, path.relative_to(ROOT).as_posix())
        for path, tree in _trees("src", "benchmarks", "tests")
        for name in _names(tree)
        if _is_bare(name)
    }
    public = {(name, file) for name, files in PUBLIC.items() for file in files.split()}
    exempt = {(n, f) for n, f in bound for name, file in public if n == name and f.endswith(file)}
    assert bound - exempt == set()
    assert len(exempt) == len(public), "a name of PUBLIC is bound no more"


def test_participles_and_prepositions_are_told_from_other_names():
    assert all(map(_is_bare, ["taken", "_kept", "beside", "packed", "unwatched"]))
    assert not any(map(_is_bare, ["seed", "speed", "to_kernel_layout", "kept_rows", "red", "x"]))
