"""What a cell's step reads besides its arguments, and whether it still reads the same.

A Program freezes what its step reads. So it notes where each value was found, from the code of the
step and of what that calls, and serves only while the same values are there.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import operator
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn

from pararnn.cells.base import Cell
from pararnn.errors import CellError

CONTRACT = ("states", "gates", "fields", "params", "structure")
METHODS = ("step", "jacobian")
"""The attributes of a cell's class that a Program is made of."""

OF_FUNCTIONS = ("forward", "setup_context", "backward", "vjp")
"""What a torch.autograd.Function consists of."""

_NUMBERS_AND_TEXT = (int, float, complex, bool, str, bytes, type(None))
_METHODS = (MethodType, BuiltinFunctionType)
_SLOTS = (MemberDescriptorType, GetSetDescriptorType)
GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}


class _Missing:
    def __repr__(self) -> str:
        return "not there"


MISSING = _Missing()


@dataclass(frozen=True)
class Reads:
    """The places that a step reads, with what was found there.

    attributes: (owner, name, value). items: (mapping, key, value). contents: (container, its keys
    if it has any, the entries that it held). text: what was read, the same in every process.
    """

    attributes: tuple[tuple[Any, str, Any], ...]
    items: tuple[tuple[Mapping[Any, Any], Any, Any], ...]
    contents: tuple[tuple[Any, list[Any] | None, list[Any]], ...]
    text: str

    @functools.cached_property
    def _columns(self) -> tuple[tuple[Any, ...], ...]:
        return tuple(zip(*self.attributes, strict=True)) or ((), (), ())

    def changed(self) -> str | None:
        """What has changed since, in words; None if nothing has. Takes some ns a place."""
        owners, names, values = self._columns  # most are as they were: a loop in C says so
        same = all(map(operator.is_, map(getattr, owners, names, repeat(MISSING)), values))
        return self._changed(() if same else self.attributes)

    def _changed(self, attributes: Iterable[tuple[Any, str, Any]]) -> str | None:
        for owner, name, value in attributes:
            now = getattr(owner, name, MISSING)
            if now is not value and not _same(now, value):
                return _said(f"{_called(owner)}.{name}", value, now)
        for mapping, key, value in self.items:
            now = mapping.get(key, MISSING)
            if now is not value and not _same(now, value):
                return _said(str(key), value, now)
        for container, keys, entries in self.contents:
            now = container if keys is None else container.values()
            same = len(now) == len(entries) and all(map(operator.is_, now, entries))
            if not same or (keys is not None and [*container] != keys):
                return f"the entries of a {type(container).__name__} ({_short(container)})"
        return None


def reads_of(cls: type, places: Mapping[Any, Any], key: Any) -> Reads:
    """What the step and the Jacobian of a cell's class read now, and `places[key]`.

    Followed are functions, methods, closures, globals, class attributes, containers, and attributes
    of modules, classes and objects that the code names. The standard library, torch and other
    installed packages than the cell's own are taken to stay as they are. Raises CellError, with the
    name, for objects whose changes cannot be seen.
    """
    follower = _Follower(cls)
    follower.items[id(places), key] = (places, key, places.get(key, MISSING))
    for name in CONTRACT:
        value = getattr(cls, name)
        follower.attributes[id(cls), name] = (cls, name, value)
        follower.lines.append(f"{name} = {value!r}")
    follower.owners.append(cls)
    for name in METHODS:
        follower.names[name] = None
    for base in cls.__mro__[: cls.__mro__.index(Cell)]:  # which may get one that it has not yet
        for name in METHODS:
            follower.items[id(base), name] = (vars(base), name, vars(base).get(name, MISSING))
    follower.finish()
    return Reads(
        tuple(follower.attributes.values()),
        tuple(follower.items.values()),
        tuple(follower.contents.values()),
        "\n".join(follower.lines),
    )


class _Follower:
    """Collects the places that code reads: `names` of attributes times `owners` of them."""

    def __init__(self, cls: type) -> None:
        self.what = f"{cls.__name__}.step"
        self.own = {base.__module__.partition(".")[0] for base in cls.__mro__} - {"torch"}
        self.attributes: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self.items: dict[tuple[int, Any], tuple[Mapping[Any, Any], Any, Any]] = {}
        self.contents: dict[int, tuple[Any, list[Any] | None, list[Any]]] = {}
        self.names: dict[str, None] = {}
        self.owners: list[Any] = []
        self.seen: dict[int, Any] = {}
        self.lines: list[str] = []

    def finish(self) -> None:
        """Look every name up at every owner, until there are no more of either."""
        size = (-1, -1)
        while size != (len(self.names), len(self.owners)):
            size = (len(self.names), len(self.owners))
            for owner in list(self.owners):
                for name in list(self.names):
                    self.look_up(owner, name)

    def look_up(self, owner: Any, name: str) -> None:
        """Note an owner's attribute if it has it; of a class, also what `super()` would find."""
        if isinstance(owner, type):
            for base in owner.__mro__:
                if name in vars(base) and base is not Cell and self.follows(base.__module__):
                    self.attribute(owner, name)
                    self.attribute(base, name)
        elif name in getattr(owner, "__dict__", ()):
            self.item(vars(owner), name)
        elif isinstance(getattr(type(owner), name, None), _SLOTS):
            self.attribute(owner, name)

    def attribute(self, owner: Any, name: str) -> None:
        """Note an attribute, and follow what it is."""
        if (id(owner), name) in self.attributes:
            return
        value = getattr(owner, name, MISSING)
        self.attributes[id(owner), name] = (owner, name, value)
        static = vars(owner).get(name, value) if isinstance(owner, type) else value
        self.value(static, name)

    def item(self, mapping: Mapping[Any, Any], key: Any) -> None:
        """Note a mapping's item, and follow what it is."""
        if (id(mapping), key) in self.items:
            return
        value = mapping.get(key, MISSING)
        self.items[id(mapping), key] = (mapping, key, value)
        self.value(value, str(key))

    def value(self, value: Any, name: str) -> None:
        """Follow a value that was read as `name`."""
        plain = isinstance(value, _NUMBERS_AND_TEXT)
        self.lines.append(f"{name} = {value!r}" if plain else f"{name}: {type(value).__name__}")
        if plain or id(value) in self.seen:
            return
        self.seen[id(value)] = value
        for kinds, follow in _FOLLOW.items():
            if isinstance(value, kinds):
                follow(self, value, name)
                return
        self.object(value, name)

    def function(self, function: FunctionType, name: str) -> None:
        """Code, defaults, closure and globals; of library code the functions that it wraps."""
        own = self.follows(function.__globals__.get("__name__"))
        for cell in function.__closure__ or ():
            if own or isinstance(_content(cell), (FunctionType, MethodType, functools.partial)):
                self.attribute(cell, "cell_contents")
        if not own:
            return
        for part in ("__code__", "__defaults__", "__kwdefaults__"):
            if getattr(function, part) is not None:
                self.attribute(function, part)
        for code in codes(function.__code__):
            self.lines.append(_digest(code))
            for kind, read in named(code):
                if kind == "IMPORT_NAME":
                    self.item(sys.modules, read)
                elif kind not in GLOBAL:
                    if not read.startswith("__"):
                        self.names[read] = None
                elif read in function.__globals__ or hasattr(builtins, read):
                    self.item(function.__globals__, read)

    def parts(self, value: Any, name: str) -> None:
        """What a method, partial or descriptor is made of."""
        for part in ("__func__", "__self__", "func", "args", "keywords", "fget"):
            held = getattr(value, part, None)
            if held is not None and not (part == "__self__" and isinstance(held, ModuleType)):
                self.value(held, f"{name}.{part}")

    def fixed(self, value: Any, name: str) -> None:
        """The entries of a container that cannot change."""
        for entry in value:
            self.value(entry, f"an entry of {name}")

    def container(self, value: Any, name: str) -> None:
        """The entries of a container, and that they stay."""
        keys = [*value] if isinstance(value, dict) else None
        entries = [*value] if keys is None else [*value.values()]
        self.contents[id(value)] = (value, keys, entries)
        self.fixed([*(keys or ()), *entries], name)

    def tensor(self, value: Tensor, name: str) -> None:
        """A tensor is as old as its version."""
        if value.is_inference():
            raise CellError(
                f"{self.what} reads {name}, a tensor made in inference mode, whose changes cannot "
                "be seen; make it a config value, a Param or a field"
            )
        self.attribute(value, "_version")

    def module(self, value: ModuleType, name: str) -> None:
        """The attributes of a user's module that code names."""
        if self.follows(value.__name__):
            self.owners.append(value)

    def type(self, value: type, name: str) -> None:
        """The attributes of a user's class that code names, and its operators."""
        if self.follows(value.__module__):
            self.owners.append(value)
            if issubclass(value, torch.autograd.Function):  # PyTorch calls these by name
                self.names.update(dict.fromkeys(OF_FUNCTIONS))

    def network(self, value: nn.Module, name: str) -> None:
        """All of a module of PyTorch's: its code reads what the step's does not name."""
        self.container(vars(value), name)
        self.object(value, name)
        self.names["forward"] = None

    def object(self, value: Any, name: str) -> None:
        """The attributes of an object that code names."""
        kind = type(value)
        if hasattr(value, "__dict__") or self.follows(kind.__module__):
            self.owners.append(value)
            self.value(kind, kind.__name__)
            if self.follows(kind.__module__):
                for base in kind.__mro__:
                    for key, part in vars(base).items():
                        if key.startswith("__") and isinstance(part, FunctionType):
                            self.look_up(kind, key)
        elif kind.__hash__ is None:
            raise CellError(
                f"{self.what} reads {name}, {_article(kind.__name__)}, whose changes cannot be "
                "seen; make it a tuple, a config value, a Param or a field"
            )

    def follows(self, module: str | None) -> bool:
        """Whether a module's code is the user's, so that it may change."""
        root = (module or "").partition(".")[0]
        return root in self.own or not is_library(root)


_FOLLOW: dict[Any, Callable[[_Follower, Any, str], None]] = {
    FunctionType: _Follower.function,
    (MethodType, BuiltinFunctionType, functools.partial, staticmethod, classmethod, property): (
        _Follower.parts
    ),
    (tuple, frozenset): _Follower.fixed,
    (list, dict, set): _Follower.container,
    Tensor: _Follower.tensor,
    ModuleType: _Follower.module,
    type: _Follower.type,
    nn.Module: _Follower.network,
    (_Missing, CodeType, torch.dtype, torch.device): lambda follower, value, name: None,
}
"""By kind of value, how it is followed; any other is an object."""


@functools.cache
def is_library(root: str) -> bool:
    """Whether a top-level package belongs to Python or is installed, and so taken to be fixed."""
    if root in sys.stdlib_module_names or root in sys.builtin_module_names:
        return root != "__main__"
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return file.startswith(tuple({sysconfig.get_path(kind) for kind in ("purelib", "platlib")}))


def codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def named(code: CodeType) -> Iterator[tuple[str, str]]:
    """The names in code, each with the kind of instruction; strings may be getattr's."""
    for instruction in dis.get_instructions(code):
        if instruction.argval in code.co_names:
            yield instruction.opname, instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            yield "getattr", constant


def _digest(code: CodeType) -> str:
    """A code's instructions, names and constants in short, whatever its file and lines."""
    constants = [
        sorted(map(repr, c)) if isinstance(c, frozenset) else repr(c)
        for c in code.co_consts
        if not isinstance(c, CodeType)
    ]
    parts = (code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return MISSING


def _same(now: Any, then: Any) -> bool:
    """Whether two values that are not one object are the same: numbers and bound methods."""
    if type(now) is not type(then):
        return False
    if isinstance(then, _METHODS):
        return bool(now == then)
    return isinstance(then, _NUMBERS_AND_TEXT) and repr(now) == repr(then)


def _called(owner: Any) -> str:
    return str(getattr(owner, "__qualname__", None) or f"a {type(owner).__name__}")


def _said(name: str, then: Any, now: Any) -> str:
    return f"{name}, which was {_short(then)} and is {_short(now)}"


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
