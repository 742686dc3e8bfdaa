"""Names that code loads, and packages whose code may change."""

from __future__ import annotations

import dis
import functools
import hashlib
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import NamedTuple

import torch

_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_CLOSURE = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"}
_SKIPPED = {"EXTENDED_ARG", "CACHE", "NOP", "NOT_TAKEN", "PRECALL", "PUSH_NULL"}


class Load(NamedTuple):
    """A name in code and the attributes that are read off it at once: `name.path[0].path[1]`.

    kind: "global", "closure", "local", "import", "attribute" (of what an expression gives) or
    "text", a string that may be getattr's.
    """

    kind: str
    name: str
    path: tuple[str, ...] = ()


COMPUTED = "getattr"
"""Stands for a name that code computes: any attribute of the owners may be read."""


def loads(code: CodeType) -> Iterator[Load]:
    """Yield what a code object reads, without the functions inside it."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _SKIPPED]
    position = 0
    while position < len(steps):
        step, position = steps[position], position + 1
        kind = kind_of(step.opname)
        if kind is None:
            continue
        name = step.argval if isinstance(step.argval, str) else step.argval[-1]
        path: list[str] = []
        while kind in ROOTS and position < len(steps) and steps[position].opname in _READ_OFF:
            path.append(steps[position].argval)
            position += 1
        yield Load(kind, name, tuple(path))
        computes = kind == "global" and name in ("getattr", "hasattr") and not path
        if computes and not _literal(steps[position:]):
            yield Load("attribute", COMPUTED)
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            yield Load("text", constant)


ROOTS = ("global", "closure", "local")
_READ_OFF = ("LOAD_ATTR", "LOAD_METHOD")


def kind_of(opname: str) -> str | None:
    """Return the kind of Load that an instruction is, if it is one."""
    if opname in _GLOBAL:
        return "global"
    if opname in _CLOSURE:
        return "closure"
    if opname in _ATTRIBUTE:
        return "attribute"
    if opname == "IMPORT_NAME":
        return "import"
    return "local" if "LOAD_FAST" in opname else None


def _literal(steps: list[dis.Instruction]) -> bool:
    """Check that a call of getattr or hasattr, whose arguments these load, names the attribute."""
    owner, *tail = steps[:4]
    while tail and tail[0].opname in _READ_OFF:
        tail = tail[1:]
    is_call = any(step.opname.startswith(("CALL", "KW_NAMES")) for step in tail[1:3])
    return bool(tail) and kind_of(owner.opname) is not None and is_call and _text(tail[0])


def _text(step: dis.Instruction) -> bool:
    return step.opname == "LOAD_CONST" and isinstance(step.argval, str)


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def digest(code: CodeType) -> str:
    """Return a code's instructions, names and constants in short, whatever its file and lines."""
    constants = [
        sorted(map(repr, c)) if isinstance(c, frozenset) else repr(c)
        for c in code.co_consts
        if not isinstance(c, CodeType)
    ]
    contents = (code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants)
    return hashlib.sha256(repr(contents).encode()).hexdigest()


def methods_of(cls: type) -> list[FunctionType]:
    """Return the functions of a class's body that take its instance: methods and properties'."""
    members = [value.fget if isinstance(value, property) else value for value in vars(cls).values()]
    return [value for value in members if isinstance(value, FunctionType)]


def packages_of(cls: type) -> set[str]:
    """Return the top-level packages that define a cell's class and its bases."""
    return {base.__module__.partition(".")[0] for base in cls.__mro__} - {"torch", "builtins"}


@functools.cache
def is_library(root: str) -> bool:
    """Check whether a top-level package belongs to Python or is installed, and so stays fixed."""
    if root in sys.stdlib_module_names or root in sys.builtin_module_names:
        return root != "__main__"
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return file.startswith(tuple(folder + os.sep for folder in library_folders()))


def library_folders() -> set[str]:
    """Return the folders of installed packages: this environment's, its base's and the user's.

    PyTorch counts as installed wherever it is, a local build included.
    """
    environment = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    site_folders = {*site.getsitepackages(), site.getusersitepackages()}
    return environment | site_folders | {os.path.dirname(torch.__file__)}


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())
