"""Record of what a cell's step reads in addition to its arguments, and checks for changes.

A Program freezes what its step reads. It notes the owner and the name of each value, found in the
code of the step and of the functions that it calls, and is valid while the values are the same. A
step may read only values whose changes can be seen: numbers, text, plain containers of them,
functions, classes, modules and PyTorch itself.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import Tensor

from pararnn.cells.base import Cell
from pararnn.program.follow import CONTRACT, METHODS, MISSING, PLAIN, Follower, bases_of
from pararnn.program.loads import COMPUTED, codes, loads, methods_of


@dataclass(frozen=True)
class Reads:
    """Attributes and items that a step reads, with their values.

    attributes: (owner, name, value). items: (mapping, key, value). contents: (container, its keys
    if it has any, its entries). text: all of it in words, the same in every process.
    names: all names of attributes that the code reads.
    """

    attributes: tuple[tuple[Any, str, Any], ...]
    items: tuple[tuple[Mapping[Any, Any], Any, Any], ...]
    contents: tuple[tuple[Any, list[Any] | None, list[Any]], ...]
    text: str
    names: frozenset[str]

    @functools.cached_property
    def _columns(self) -> tuple[tuple[Any, ...], ...]:
        return tuple(zip(*self.attributes, strict=True)) or ((), (), ())

    def change(self) -> str | None:
        """Return what has changed since, in words, or None. Takes some ns an attribute."""
        owners, names, values = self._columns  # mostly unchanged: a loop in C
        same = all(map(operator.is_, map(getattr, owners, names, repeat(MISSING)), values))
        return self._first_change(() if same else self.attributes)

    def _first_change(self, attributes: Iterable[tuple[Any, str, Any]]) -> str | None:
        for owner, name, value in attributes:
            now = getattr(owner, name, MISSING)
            if now is not value and not _same(now, value):
                return change_of(f"{_name_of(owner)}.{name}", value, now)
        for mapping, key, value in self.items:
            now = mapping.get(key, MISSING)
            if now is not value and not _same(now, value):
                return change_of(str(key), value, now)
        for container, keys, entries in self.contents:
            now = container if keys is None else container.values()
            same = len(now) == len(entries) and all(map(operator.is_, now, entries))
            if not same or (keys is not None and [*container] != keys):
                return f"the entries of a {type(container).__name__} ({_short(container)})"
        return None


def reads_of(cls: type[Cell], registry: Mapping[Any, Any], key: Any) -> Reads:
    """Return what the step and the Jacobian of a cell's class read now, and `registry[key]`.

    Functions, methods, closures, globals, class attributes and modules are followed by the names in
    their code. The standard library, torch and installed packages, except the cell's, are assumed
    not to change. Raises CellError, with the name, for everything whose change could not be seen:
    objects, tensors, modules of PyTorch's, clocks, files, random numbers.
    """
    follower = Follower(cls)
    follower.items[id(registry), key] = (registry, key, registry.get(key, MISSING))
    for name in CONTRACT:
        value = getattr(cls, name)
        follower.attributes[id(cls), name] = (cls, name, value)
        follower.lines.append(f"{name} = {value!r}")
    for param in cls.params.values():
        if not isinstance(param.shape, str):
            for attribute in (param.shape.name, param.shape.size, param.shape.lift):
                follower.value(attribute, "the shape of a Param")
    follower.owner(cls)
    follower.names.update(dict.fromkeys((*METHODS, "__getattr__", "__getattribute__")))
    for base in follower.bases:  # which may get the method later
        for name in METHODS:
            follower.items[id(base), name] = (vars(base), name, vars(base).get(name, MISSING))
    follower.finish()
    readout = getattr(cls, "readout", None)
    if isinstance(readout, FunctionType):  # only its reads of the cell: it is not frozen
        follower.what = f"{cls.__name__}.readout"
        for load in (load for code in codes(readout.__code__) for load in loads(code)):
            if (load.name,) == readout.__code__.co_varnames[:1] and load.path:
                follower.check_self(load.path[0])
    return Reads(
        tuple(follower.attributes.values()),
        tuple(follower.items.values()),
        tuple(follower.contents.values()),
        "\n".join(follower.lines),
        frozenset(follower.names),
    )


def reads_mode(cls: type[Cell], reads: Reads) -> bool:
    """Check whether a step, or its readout, reads `self.training`."""
    if "training" in reads.names or COMPUTED in reads.names:
        return True
    functions = (function for base in bases_of(cls) for function in methods_of(base))
    return any("training" in code.co_names for f in functions for code in codes(f.__code__))


def _same(now: Any, then: Any) -> bool:
    """Check whether two values that are not one object are the same number or bound method."""
    if type(now) is not type(then):
        return False
    if isinstance(then, (MethodType, BuiltinFunctionType)):
        return bool(now == then)
    return type(then) in PLAIN and repr(now) == repr(then)


def _name_of(owner: Any) -> str:
    return str(getattr(owner, "__qualname__", None) or f"a {type(owner).__name__}")


def change_of(name: str, then: Any, now: Any) -> str:
    """Return the end of a sentence, with a name's old and new value."""
    return f"{name}, which was {_short(then)} and is {_short(now)}"


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
