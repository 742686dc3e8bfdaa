"""Traversal of the objects that code reads. Objects whose changes cannot be seen are refused."""

from __future__ import annotations

import builtins
import enum
import functools
import operator
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import nn

from pararnn.base.errors import CellError
from pararnn.base.private import CustomOpDef, OpOverload, OpOverloadPacket
from pararnn.cells.base import OPTIONAL_METHODS, Cell
from pararnn.program.loads import (
    COMPUTED,
    ROOTS,
    Load,
    codes,
    digest,
    is_library,
    loads,
    methods_of,
    packages_of,
    words,
)

CONTRACT = ("states", "gates", "fields", "params", "structure")
METHODS = ("step", "jacobian")
"""The attributes of a cell's class that a Program is made of."""
DERIVED = "head_axes"
"""The attribute that a class derives from these."""
OF_FUNCTIONS = ("forward", "setup_context", "backward", "vjp")
"""Methods of a torch.autograd.Function."""
PLAIN = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented)}
)
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_C_METHODS = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.MethodWrapperType,
)
_OF_TORCH = (
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(OpOverload, OpOverloadPacket, CustomOpDef),
)
_FIXED = (
    *(types.GenericAlias, types.UnionType, typing.TypeVar, typing._Final),
    *(numpy.number, numpy.bool_, numpy.ufunc, numpy.dtype),
)


_OUTSIDE = words("""
    os posix nt sys time random _random secrets datetime _datetime io _io socket pathlib shelve
    sqlite3 contextvars _contextvars threading _thread multiprocessing subprocess importlib inspect
""")
"""Modules whose functions and classes may return other values at the next call."""
_BUILTINS_OUTSIDE = words("open input")
_BUILTINS_HIDDEN = words("globals locals vars eval exec compile __import__")
_STATE_OF_TORCH = ("get_", "are_", "is_grad", "is_inference", "is_autocast", "initial_seed")
_HIDDEN = words("""
    __dict__ __globals__ __closure__ __builtins__ __self__ __func__ __wrapped__ __code__
    __defaults__ __kwdefaults__ __getattribute__ __subclasses__ __mro__ __bases__
""")
"""Attributes that lead to others by names which no code shows."""


class _Missing:
    def __repr__(self) -> str:
        return "not there"


MISSING = _Missing()


class Follower:
    """Collects the attributes and items that code reads.

    An attribute that is read off a name at once belongs to that name's value. Any other may belong
    to every owner that has it: modules, classes and functions that code passes on, and the cell.
    """

    def __init__(self, cls: type[Cell]) -> None:
        self.cls = cls
        self.what = f"{cls.__name__}.step"
        self.bases = bases_of(cls)
        self.methods = {f for base in self.bases for f in methods_of(base)}
        self.packages = packages_of(cls)
        self.attributes: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self.items: dict[tuple[int, Any], tuple[Mapping[Any, Any], Any, Any]] = {}
        self.contents: dict[int, tuple[Any, list[Any] | None, list[Any]]] = {}
        self.names: dict[str, None] = {}
        self.owners: dict[int, Any] = {}
        self.values: dict[int, Any] = {}
        self.lines: list[str] = []

    def finish(self) -> None:
        """Look every name up at every owner, until there are no more of either."""
        size = (-1, -1)
        while size != (len(self.names), len(self.owners)):
            size = (len(self.names), len(self.owners))
            for owner in list(self.owners.values()):
                names = self.names_of(owner) if COMPUTED in self.names else []
                for name in [*self.names, *names]:
                    self.look_up(owner, name)

    def names_of(self, owner: Any) -> list[str]:
        """Return the names of all attributes of an owner."""
        bases = self.bases if owner is self.cls else (owner,)
        contract = {*vars(Cell), "readout"}  # noted by `reads_of`, or read by no step
        return [
            name
            for base in bases
            for name in vars(base)
            if not (name.startswith("__") or name in contract)
        ]

    def owner(self, value: Any) -> None:
        """Note a module, class or function that code passes on: its attributes may be read by any
        name."""
        follows = isinstance(value, (ModuleType, type)) and self.follows(_module_of(value))
        if follows or isinstance(value, FunctionType):
            self.owners[id(value)] = value

    def look_up(self, owner: Any, name: str) -> None:
        """Note an owner's attribute if it has it; of a class, also what `super()` would find."""
        if isinstance(owner, type):
            for base in owner.__mro__ if name != DERIVED else ():
                if name in vars(base) and base is not Cell and self.follows(base.__module__):
                    self.attribute(owner, name)
                    self.attribute(base, name)
        elif name in vars(owner):
            self.item(vars(owner), name)

    def attribute(self, owner: Any, name: str) -> None:
        """Note an attribute, and follow its value."""
        if (id(owner), name) in self.attributes:
            return
        value = getattr(owner, name, MISSING)
        self.attributes[id(owner), name] = (owner, name, value)
        static = vars(owner).get(name, value) if isinstance(owner, type) else value
        self.value(static, name)

    def item(self, mapping: Mapping[Any, Any], key: Any, passed_on: bool = True) -> None:
        """Note a mapping's item, and follow its value."""
        value = mapping.get(key, MISSING)
        if (id(mapping), key) not in self.items:
            self.items[id(mapping), key] = (mapping, key, value)
            self.value(value, str(key), passed_on)
        elif passed_on:
            self.owner(value)

    def value(self, value: Any, name: str, passed_on: bool = True) -> None:
        """Follow a value that was read as `name`; CellError for what may change unseen."""
        if passed_on:
            self.owner(value)
        if value is operator.attrgetter:
            self.names[COMPUTED] = None
        plain = type(value) in PLAIN
        self.lines.append(f"{name} = {value!r}" if plain else f"{name}: {type(value).__name__}")
        if plain or id(value) in self.values:
            return
        self.values[id(value)] = value
        value_type = type(value)
        for classes, follow in _FOLLOW.items():
            if issubclass(value_type, classes):  # a proxy may report another class
                follow(self, value, name)
                return
        self.refuse(value, name)

    def refuse(self, value: Any, name: str) -> None:
        """Raise CellError for a value whose change could not be seen."""
        noun = _article(type(value).__name__)
        first = "a function of torch.nn.functional, " if isinstance(value, nn.Module) else ""
        raise CellError(
            f"{self.what} reads {name}, {noun}, whose changes cannot be seen: "
            f"make it {first}a config value, a Param (trainable=False for a constant) or a field"
        )

    def path(self, value: Any, path: Iterable[str]) -> None:
        """Follow attributes that are read off a value at once, one off the other."""
        for name in path:
            if name in _HIDDEN:
                self.refuse_name(name)
            if isinstance(value, type):
                self.look_up(value, name)
            elif isinstance(value, FunctionType):
                self.item(vars(value), name, passed_on=False)
            elif not isinstance(value, ModuleType):
                return
            elif name in vars(value) and self.follows(value.__name__):
                self.item(vars(value), name, passed_on=False)
            else:
                self.of_library(value, name)
            value = getattr(value, name, MISSING)
        self.owner(value)

    def of_library(self, module: ModuleType, name: str) -> None:
        """Check an attribute of an installed module, and note it if it is plain data."""
        value = getattr(module, name, MISSING)
        if self.follows(module.__name__) and value is not MISSING:
            self.refuse(value, f"{module.__name__}.{name} by the module's __getattr__")
        if type(value) in PLAIN:
            self.attribute(module, name)
        else:
            self.value(value, f"{module.__name__}.{name}", passed_on=False)

    def refuse_name(self, name: str) -> None:
        """Raise CellError for an attribute that hides which values are read."""
        raise CellError(
            f"{self.what} reads {name}, behind which changes cannot be seen: name the attribute "
            "itself, or make the value config, a Param or a field"
        )

    def function(self, function: FunctionType, name: str) -> None:
        """Follow code, defaults, closure and globals; of a library only the functions it wraps."""
        is_user = self.follows(function.__globals__.get("__name__"))
        for cell in function.__closure__ or ():
            if is_user or isinstance(_content(cell), (FunctionType, MethodType, functools.partial)):
                self.attribute(cell, "cell_contents")
        if not is_user:
            self.outside(function, name)
            return
        for attribute in ("__code__", "__defaults__", "__kwdefaults__"):
            if getattr(function, attribute) is not None:
                self.attribute(function, attribute)
        closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        self_name = function.__code__.co_varnames[:1] if function in self.methods else ()
        for code in codes(function.__code__):
            self.lines.append(digest(code))
            for load in loads(code):
                self.load(load, function.__globals__, closure, self_name)

    def load(
        self,
        load: Load,
        namespace: dict[str, Any],
        closure: Mapping[str, Any],
        self_name: tuple[str, ...],
    ) -> None:
        """Follow a name in code; `self_name`: that of the cell in its methods."""
        kind, name, path = load
        if kind == "import":
            self.item(sys.modules, name)
        elif kind == "global":
            if name in namespace or hasattr(builtins, name):
                self.item(namespace, name, passed_on=False)
                if name not in namespace:
                    self.value(getattr(builtins, name), name, passed_on=False)
                self.path(namespace.get(name, getattr(builtins, name, MISSING)), path)
        elif kind == "closure" and name in closure:
            self.path(_content(closure[name]), path)
        else:
            if (name,) == self_name and path:
                self.check_self(path[0])
            for read in path if kind in ROOTS else (name,):
                if read in _HIDDEN and kind != "text":
                    self.refuse_name(read)
                if not read.startswith("__"):
                    self.names[read] = None

    def check_self(self, name: str) -> None:
        """Raise CellError for attributes of nn.Module or Cell that a step may not read."""
        owner = next((base for base in self.cls.__mro__ if name in vars(base)), None)
        of_module = owner in Cell.__mro__ or name in {*nn.Module.__annotations__, *vars(Cell)}
        if of_module and name not in _OF_SELF and not name.startswith("__"):
            raise CellError(
                f"{self.what} reads self.{name}, which it may not: parameters arrive as param, "
                "config is read as self.<name>; pass anything else in as a field"
            )

    def members(self, value: Any, name: str) -> None:
        """Follow the functions and objects in a method, partial or descriptor."""
        for attr in ("__func__", "__self__", "func", "args", "keywords", "fget"):
            member = getattr(value, attr, None)
            if member is not None and not (attr == "__self__" and isinstance(member, ModuleType)):
                self.value(member, f"{name}.{attr}" if attr != "__self__" else f"{name}'s owner")

    def builtin(self, value: BuiltinFunctionType, name: str) -> None:
        """Check a function in C, and follow the object that it is a method of."""
        self.outside(value, name)
        self.members(value, name)

    def container(self, value: Any, name: str) -> None:
        """Note and follow a container's entries; CellError for subclasses of list, dict and set."""
        if type(value) not in (list, dict, set):
            self.refuse(value, name)
        keys = [*value] if isinstance(value, dict) else None
        entries = [*value] if keys is None else [*value.values()]
        self.contents[id(value)] = (value, keys, entries)
        self.entries([*(keys or ()), *entries], name)

    def entries(self, value: Iterable[Any], name: str) -> None:
        """Follow the entries of a container that cannot change."""
        for entry in value:
            self.value(entry, f"an entry of {name}")

    def tuple(self, value: tuple[Any, ...], name: str) -> None:
        """Follow the entries of a tuple; CellError for one with attributes."""
        if hasattr(value, "__dict__"):
            self.refuse(value, name)
        self.entries(value, name)

    def member(self, value: enum.Enum, name: str) -> None:
        """Follow a member of an enumeration."""
        self.owners[id(value)] = value
        self.item(vars(value), "_value_")
        self.value(type(value), type(value).__name__)

    def type(self, value: type, name: str) -> None:
        """Follow the methods of a class that PyTorch or Python calls; code names the others."""
        if not self.follows(value.__module__):
            self.outside(value, name)
            return
        if self.follows(type(value).__module__):
            self.refuse(value, name)
        if issubclass(value, torch.autograd.Function):
            for attribute in OF_FUNCTIONS:
                self.look_up(value, attribute)
        for base in () if issubclass(value, Cell) else value.__mro__:
            for attribute, method in vars(base).items():
                special = attribute.startswith("__") and attribute not in _UNCALLED
                if special and isinstance(method, FunctionType):
                    self.look_up(value, attribute)

    def outside(self, value: Any, name: str) -> None:
        """Raise CellError for what reads clocks, files, random numbers or the environment."""
        module = getattr(value, "__module__", None) or _module_of(getattr(value, "__self__", None))
        function = getattr(value, "__name__", name)
        root = str(module).partition(".")[0]
        if root == "builtins" and function in _BUILTINS_HIDDEN:
            self.refuse_name(f"{function}()")
        of_builtins = root == "builtins" and function in _BUILTINS_OUTSIDE
        of_torch = root == "torch" and function.startswith(_STATE_OF_TORCH)
        if root in _OUTSIDE or of_builtins or of_torch:
            where = "" if root == "builtins" else f"{root}."
            raise CellError(
                f"{self.what} calls {where}{function}, whose value may change from one call to the "
                "next: call it outside, and make the value config, a Param or a field"
            )

    def follows(self, module: str | None) -> bool:
        """Check whether a module's code is the user's, so that it may change."""
        root = (module or "").partition(".")[0]
        return root in self.packages or not is_library(root)


_OF_SELF = ("step", *OPTIONAL_METHODS, "training", "states", "gates", "fields", "structure")
"""Attributes that a step may read off itself in addition to those that its class defines."""
_UNCALLED = words("""
    __repr__ __str__ __format__ __init_subclass__ __set_name__ __class_getitem__ __del__
    __reduce__ __reduce_ex__ __getstate__ __setstate__ __copy__ __deepcopy__
""")
"""Special methods that no arithmetic calls."""
_FOLLOW: dict[Any, Callable[[Follower, Any, str], None]] = {
    FunctionType: Follower.function,
    BuiltinFunctionType: Follower.builtin,
    (MethodType, functools.partial, staticmethod, classmethod, property): Follower.members,
    # The attributes of modules are looked up where code reads them.
    (ModuleType, _Missing, CodeType, range, slice, *_OF_TORCH, *_SLOTS, *_C_METHODS, *_FIXED): (
        lambda follower, value, name: None
    ),
    tuple: Follower.tuple,
    frozenset: Follower.entries,
    (list, dict, set): Follower.container,
    enum.Enum: Follower.member,
    type: Follower.type,
}
"""Function that follows a value, by its types; other values are refused."""


def bases_of(cls: type[Cell]) -> tuple[type, ...]:
    """Return a cell's class and its bases before `Cell`."""
    return cls.__mro__[: cls.__mro__.index(Cell)]


def _module_of(value: Any) -> str | None:
    """Return the name of the module that a value is, or was defined in."""
    return value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return MISSING


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
