"""What a cell's step reads besides its arguments, and whether it still reads the same.

A Program freezes what its step reads. So it notes where each value was found, from the code of the
step and of what that calls, and serves only while the same values are there. A step may read what
cannot change unseen: numbers, text, plain containers of them, functions, classes, modules and
PyTorch itself.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import hashlib
import operator
import sys
import sysconfig
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from pararnn.cells.base import OPTIONAL_METHODS, Cell
from pararnn.errors import CellError

CONTRACT = ("states", "gates", "fields", "params", "structure")
METHODS = ("step", "jacobian")
"""The attributes of a cell's class that a Program is made of."""

OF_FUNCTIONS = ("forward", "setup_context", "backward", "vjp")
"""What a torch.autograd.Function consists of."""

GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_CLOSURE = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"}
_SKIPPED = {"EXTENDED_ARG", "CACHE", "NOP", "NOT_TAKEN", "PRECALL", "PUSH_NULL"}

_PLAIN = frozenset(
    {int, float, complex, bool, str, bytes, type(None), type(Ellipsis), type(NotImplemented)}
)
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_C_METHODS = (
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.MethodWrapperType,
)
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_TORCH_OPS = (
    torch._ops.OpOverload,
    torch._ops.OpOverloadPacket,
    torch._library.custom_ops.CustomOpDef,
)
_TYPING = (types.GenericAlias, types.UnionType, typing.TypeVar, type(typing.Any), type(list[int]))
_NUMPY = (numpy.number, numpy.bool_, numpy.ufunc, numpy.dtype)


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


_OUTSIDE = words("""
    os posix nt sys time random _random secrets datetime _datetime io _io socket pathlib shelve
    sqlite3 contextvars _contextvars threading _thread multiprocessing subprocess importlib inspect
""")
"""Modules whose functions and classes give something else from one call to the next."""
_BUILTINS_OUTSIDE = words("open input globals locals vars eval exec compile __import__")
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


@dataclass(frozen=True)
class Reads:
    """The places that a step reads, with what was found there.

    attributes: (owner, name, value). items: (mapping, key, value). contents: (container, its keys
    if it has any, the entries that it held). text: what was read, the same in every process.
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

    def changed(self) -> str | None:
        """Return what has changed since, in words; None if nothing has. Takes some ns a place."""
        owners, names, values = self._columns  # most are as they were: a loop in C says so
        same = all(map(operator.is_, map(getattr, owners, names, repeat(MISSING)), values))
        return self._changed(() if same else self.attributes)

    def _changed(self, attributes: Iterable[tuple[Any, str, Any]]) -> str | None:
        for owner, name, value in attributes:
            now = getattr(owner, name, MISSING)
            if now is not value and not _same(now, value):
                return change_of(f"{_called(owner)}.{name}", value, now)
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


def reads_of(cls: type[Cell], places: Mapping[Any, Any], key: Any) -> Reads:
    """Return what the step and the Jacobian of a cell's class read now, and `places[key]`.

    Followed are functions, methods, closures, globals, class attributes and modules, by the names
    that code holds. The standard library, torch and other installed packages than the cell's own
    are taken to stay as they are. Raises CellError, with the name, for everything whose change
    could not be seen: objects, tensors, modules of PyTorch's, clocks, files, random numbers.
    """
    follower = _Follower(cls)
    follower.items[id(places), key] = (places, key, places.get(key, MISSING))
    for name in CONTRACT:
        value = getattr(cls, name)
        follower.attributes[id(cls), name] = (cls, name, value)
        follower.lines.append(f"{name} = {value!r}")
    for param in cls.params.values():
        if not isinstance(param.shape, str):
            for part in (param.shape.name, param.shape.size, param.shape.lift):
                follower.value(part, "the shape of a Param")
    follower.owner(cls)
    follower.names.update(dict.fromkeys((*METHODS, "__getattr__", "__getattribute__")))
    for base in cls.__mro__[: cls.__mro__.index(Cell)]:  # which may get one that it has not yet
        for name in METHODS:
            follower.items[id(base), name] = (vars(base), name, vars(base).get(name, MISSING))
    follower.finish()
    readout = getattr(cls, "readout", None)
    if isinstance(readout, FunctionType):  # only what it reads off the cell: it is not frozen
        follower.what = f"{cls.__name__}.readout"
        for load in (load for code in codes(readout.__code__) for load in loads(code)):
            if (load.name,) == readout.__code__.co_varnames[:1] and load.path:
                follower.check_own(load.path[0])
    return Reads(
        tuple(follower.attributes.values()),
        tuple(follower.items.values()),
        tuple(follower.contents.values()),
        "\n".join(follower.lines),
        frozenset(follower.names),
    )


def reads_mode(cls: type[Cell], reads: Reads) -> bool:
    """Check whether a step, or the readout beside it, reads `self.training`."""
    if "training" in reads.names or _COMPUTED in reads.names:
        return True
    functions = (f for base in cls.__mro__[: cls.__mro__.index(Cell)] for f in _functions(base))
    return any("training" in code.co_names for f in functions for code in codes(f.__code__))


class Load(NamedTuple):
    """A name in code and the attributes that are read off it at once: `name.path[0].path[1]`.

    kind: "global", "closure", "local", "import", "attribute" (of what an expression gives) or
    "text", a string that may be getattr's.
    """

    kind: str
    name: str
    path: tuple[str, ...] = ()


_COMPUTED = "getattr"
"""In place of a name that code computes: all that the owners have may be read."""


def loads(code: CodeType) -> Iterator[Load]:
    """Yield what a code object reads, without the functions inside it."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _SKIPPED]
    position = 0
    while position < len(steps):
        step, position = steps[position], position + 1
        kind = _kind(step.opname)
        if kind is None:
            continue
        name = step.argval if isinstance(step.argval, str) else step.argval[-1]
        path: list[str] = []
        while kind in _ROOTS and position < len(steps) and steps[position].opname in _READ_OFF:
            path.append(steps[position].argval)
            position += 1
        yield Load(kind, name, tuple(path))
        if (kind, name, path) == ("global", "getattr", []) and not _literal(steps[position:]):
            yield Load("attribute", _COMPUTED)
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            yield Load("text", constant)


_ROOTS = ("global", "closure", "local")
_READ_OFF = ("LOAD_ATTR", "LOAD_METHOD")


def _kind(opname: str) -> str | None:
    """Return the kind of Load that an instruction is, if it is one."""
    if opname in GLOBAL:
        return "global"
    if opname in _CLOSURE:
        return "closure"
    if opname in _ATTRIBUTE:
        return "attribute"
    if opname == "IMPORT_NAME":
        return "import"
    return "local" if "LOAD_FAST" in opname else None


def _literal(steps: list[dis.Instruction]) -> bool:
    """Check that a call of getattr, whose arguments these load, names the attribute itself."""
    owner, *rest = steps[:4]
    while rest and rest[0].opname in _READ_OFF:
        rest = rest[1:]
    called = any(step.opname.startswith(("CALL", "KW_NAMES")) for step in rest[1:3])
    return bool(rest) and _kind(owner.opname) is not None and called and _text(rest[0])


def _text(step: dis.Instruction) -> bool:
    return step.opname == "LOAD_CONST" and isinstance(step.argval, str)


class _Follower:
    """Collects the places that code reads.

    An attribute that is read off a name at once belongs to that name's value. Any other belongs to
    whichever owner has it: modules, classes and functions that code passes on, and the cell.
    """

    def __init__(self, cls: type[Cell]) -> None:
        self.cls = cls
        self.what = f"{cls.__name__}.step"
        self.bases = cls.__mro__[: cls.__mro__.index(Cell)]
        self.methods = {f for base in self.bases for f in _functions(base)}
        self.own = packages_of(cls)
        self.attributes: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self.items: dict[tuple[int, Any], tuple[Mapping[Any, Any], Any, Any]] = {}
        self.contents: dict[int, tuple[Any, list[Any] | None, list[Any]]] = {}
        self.names: dict[str, None] = {}
        self.owners: dict[int, Any] = {}
        self.seen: dict[int, Any] = {}
        self.lines: list[str] = []

    def finish(self) -> None:
        """Look every name up at every owner, until there are no more of either."""
        size = (-1, -1)
        while size != (len(self.names), len(self.owners)):
            size = (len(self.names), len(self.owners))
            for owner in list(self.owners.values()):
                names = [*self.names, *self.every(owner)] if _COMPUTED in self.names else self.names
                for name in list(names):
                    self.look_up(owner, name)

    def every(self, owner: Any) -> list[str]:
        """Return all names that an owner has."""
        bases = self.bases if owner is self.cls else (owner,)
        fixed = {*CONTRACT, "config", "readout"}
        return [
            name
            for base in bases
            for name in vars(base)
            if not (name.startswith("__") or name in fixed)
        ]

    def owner(self, value: Any) -> None:
        """Note what code passes on, so that its attributes may be read anywhere."""
        if isinstance(value, FunctionType) or self.follows(_module_of(value)):
            self.owners[id(value)] = value

    def look_up(self, owner: Any, name: str) -> None:
        """Note an owner's attribute if it has it; of a class, also what `super()` would find."""
        if isinstance(owner, type):
            for base in owner.__mro__:
                if name in vars(base) and base is not Cell and self.follows(base.__module__):
                    self.attribute(owner, name)
                    self.attribute(base, name)
        elif name in vars(owner):
            self.item(vars(owner), name)

    def attribute(self, owner: Any, name: str) -> None:
        """Note an attribute, and follow what it is."""
        if (id(owner), name) in self.attributes:
            return
        value = getattr(owner, name, MISSING)
        self.attributes[id(owner), name] = (owner, name, value)
        static = vars(owner).get(name, value) if isinstance(owner, type) else value
        self.value(static, name)

    def item(self, mapping: Mapping[Any, Any], key: Any, passed_on: bool = True) -> None:
        """Note a mapping's item, and follow what it is."""
        if (id(mapping), key) not in self.items:
            self.items[id(mapping), key] = (mapping, key, mapping.get(key, MISSING))
        self.value(mapping.get(key, MISSING), str(key), passed_on)

    def value(self, value: Any, name: str, passed_on: bool = True) -> None:
        """Follow a value that was read as `name`; CellError for what may change unseen."""
        if passed_on and isinstance(value, (ModuleType, type, FunctionType)):
            self.owner(value)
        plain = type(value) in _PLAIN
        self.lines.append(f"{name} = {value!r}" if plain else f"{name}: {type(value).__name__}")
        if plain or id(value) in self.seen:
            return
        self.seen[id(value)] = value
        kind = type(value)
        for kinds, follow in _FOLLOW.items():
            if issubclass(kind, kinds):  # what a proxy says of its class does not count
                follow(self, value, name)
                return
        self.refuse(value, name)

    def refuse(self, value: Any, name: str) -> None:
        """Raise CellError for a value whose change could not be seen."""
        kind = type(value)
        first = "a function of torch.nn.functional, " if isinstance(value, nn.Module) else ""
        raise CellError(
            f"{self.what} reads {name}, {_article(kind.__name__)}, whose changes cannot be seen: "
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
        if isinstance(value, (ModuleType, type, FunctionType)):
            self.owner(value)

    def of_library(self, module: ModuleType, name: str) -> None:
        """Check what is read off an installed module, and note it where it is a number."""
        value = getattr(module, name, MISSING)
        if self.follows(module.__name__) and value is not MISSING:
            self.refuse(value, f"{module.__name__}.{name} by the module's __getattr__")
        if type(value) in _PLAIN:
            self.attribute(module, name)
        else:
            self.value(value, f"{module.__name__}.{name}", passed_on=False)

    def refuse_name(self, name: str) -> None:
        """Raise CellError for an attribute that hides what is read."""
        raise CellError(
            f"{self.what} reads {name}, behind which changes cannot be seen: name the attribute "
            "itself, or make the value config, a Param or a field"
        )

    def function(self, function: FunctionType, name: str) -> None:
        """Code, defaults, closure and globals; of library code the functions that it wraps."""
        own = self.follows(function.__globals__.get("__name__"))
        for cell in function.__closure__ or ():
            if own or isinstance(_content(cell), (FunctionType, MethodType, functools.partial)):
                self.attribute(cell, "cell_contents")
        if not own:
            self.outside(function, name)
            return
        for part in ("__code__", "__defaults__"):
            if getattr(function, part) is not None:
                self.attribute(function, part)
        if function.__kwdefaults__ is not None:
            keywords = function.__kwdefaults__
            self.attributes[id(function), "__kwdefaults__"] = (function, "__kwdefaults__", keywords)
            self.container(keywords, name)
        closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        first = function.__code__.co_varnames[:1] if function in self.methods else ()
        for code in codes(function.__code__):
            self.lines.append(_digest(code))
            for load in loads(code):
                self.load(load, function.__globals__, closure, first)

    def load(
        self,
        load: Load,
        namespace: dict[str, Any],
        closure: Mapping[str, Any],
        first: tuple[str, ...],
    ) -> None:
        """Follow a name in code; `first`: what a method of the cell calls the cell."""
        kind, name, path = load
        if kind == "import":
            self.item(sys.modules, name)
        elif kind == "global":
            if name in namespace or hasattr(builtins, name):
                self.item(namespace, name, passed_on=False)
                value = namespace.get(name, getattr(builtins, name, MISSING))
                self.value(value, name, passed_on=False)
                self.path(value, path)
        elif kind == "closure" and name in closure:
            self.path(_content(closure[name]), path)
        else:
            if (name,) == first and path:
                self.check_own(path[0])
            for read in path if kind in _ROOTS else (name,):
                if read in _HIDDEN and kind != "text":
                    self.refuse_name(read)
                if not read.startswith("__"):
                    self.names[read] = None

    def check_own(self, name: str) -> None:
        """Raise CellError for what the cell inherits and a step may not use: it has no tensors."""
        owner = next((base for base in self.cls.__mro__ if name in vars(base)), None)
        of_module = owner in Cell.__mro__ or name in (
            *nn.Module.__annotations__,
            "config",
            "params",
        )
        if of_module and name not in _OF_SELF and not name.startswith("__"):
            raise CellError(
                f"{self.what} reads self.{name}, which it may not: parameters arrive as param, "
                "config is read as self.<name>; pass anything else in as a field"
            )

    def parts(self, value: Any, name: str) -> None:
        """What a method, partial or descriptor is made of."""
        for part in ("__func__", "__self__", "func", "args", "fget"):
            held = getattr(value, part, None)
            if held is not None and not (part == "__self__" and isinstance(held, ModuleType)):
                self.value(held, f"{name}.{part}" if part != "__self__" else f"{name}'s owner")
        if isinstance(value, functools.partial):
            self.container(value.keywords, name)

    def builtin(self, value: BuiltinFunctionType, name: str) -> None:
        """A function in C: the value of its module or class, or a method of an object."""
        self.outside(value, name)
        self.parts(value, name)

    def container(self, value: Any, name: str) -> None:
        """The entries of a container, and that they stay; kinds made of it may do as they like."""
        if type(value) not in (list, dict, set):
            self.refuse(value, name)
        keys = [*value] if isinstance(value, dict) else None
        entries = [*value] if keys is None else [*value.values()]
        self.contents[id(value)] = (value, keys, entries)
        self.fixed([*(keys or ()), *entries], name)

    def fixed(self, value: Iterable[Any], name: str) -> None:
        """The entries of a container that cannot change."""
        for entry in value:
            self.value(entry, f"an entry of {name}")

    def tuple(self, value: tuple[Any, ...], name: str) -> None:
        """The entries of a tuple, if it is nothing more than one."""
        if hasattr(value, "__dict__"):
            self.refuse(value, name)
        self.fixed(value, name)

    def module(self, value: ModuleType, name: str) -> None:
        """A module: its attributes are looked up where code reads them."""

    def member(self, value: enum.Enum, name: str) -> None:
        """A member of an enumeration."""
        self.owners[id(value)] = value
        self.item(vars(value), "_value_")
        self.value(type(value), type(value).__name__)

    def type(self, value: type, name: str) -> None:
        """A class: what PyTorch or Python calls by name; code names the rest."""
        if not self.follows(value.__module__):
            self.outside(value, name)
            return
        if self.follows(type(value).__module__):
            self.refuse(value, name)
        if issubclass(value, torch.autograd.Function):
            for part in OF_FUNCTIONS:
                self.look_up(value, part)
        for base in () if issubclass(value, Cell) else value.__mro__:
            for part, held in vars(base).items():
                special = part.startswith("__") and part not in _UNCALLED
                if special and isinstance(held, FunctionType):
                    self.look_up(value, part)

    def outside(self, value: Any, name: str) -> None:
        """Raise CellError for what reads clocks, files, random numbers or the environment."""
        module = getattr(value, "__module__", None) or _module_of(getattr(value, "__self__", None))
        called = getattr(value, "__name__", name)
        root = str(module).partition(".")[0]
        of_builtins = root == "builtins" and called in _BUILTINS_OUTSIDE
        of_torch = root == "torch" and called.startswith(_STATE_OF_TORCH)
        if root in _OUTSIDE or of_builtins or of_torch:
            where = "" if root == "builtins" else f"{root}."
            raise CellError(
                f"{self.what} calls {where}{called}, whose value may change from one call to the "
                "next: call it outside, and make the value config, a Param or a field"
            )

    def follows(self, module: str | None) -> bool:
        """Check whether a module's code is the user's, so that it may change."""
        root = (module or "").partition(".")[0]
        return root in self.own or not is_library(root)


_OF_CLASS = ("config", "params")
"""What a class says of all its cells: config's defaults are not what a cell was made with."""
_OF_SELF = ("step", *OPTIONAL_METHODS, "training", "states", "gates", "fields", "structure")
"""What a step may read of itself beside what its class defines."""
_UNCALLED = words("""
    __repr__ __str__ __format__ __init_subclass__ __set_name__ __class_getitem__ __del__
    __reduce__ __reduce_ex__ __getstate__ __setstate__ __copy__ __deepcopy__
""")
"""Special methods that no arithmetic calls."""
_FOLLOW: dict[Any, Callable[[_Follower, Any, str], None]] = {
    FunctionType: _Follower.function,
    BuiltinFunctionType: _Follower.builtin,
    (MethodType, functools.partial, staticmethod, classmethod, property): _Follower.parts,
    _OF_TORCH: lambda follower, value, name: None,
    tuple: _Follower.tuple,
    frozenset: _Follower.fixed,
    (list, dict, set): _Follower.container,
    enum.Enum: _Follower.member,
    ModuleType: _Follower.module,
    type: _Follower.type,
    (_Missing, CodeType, range, slice, *_SLOTS, *_C_METHODS, *_TORCH_OPS, *_TYPING, *_NUMPY): (
        lambda follower, value, name: None
    ),
}
"""By kind of value, how it is followed; any other is refused."""


def _functions(cls: type) -> list[FunctionType]:
    """Return the functions of a class's body that take its instance: methods and properties'."""
    found = [value.fget if isinstance(value, property) else value for value in vars(cls).values()]
    return [value for value in found if isinstance(value, FunctionType)]


def _module_of(value: Any) -> str | None:
    """Return the name of the module that a value is, or was defined in."""
    return value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)


def packages_of(cls: type) -> set[str]:
    """Return the top-level packages that define a cell's class and its bases."""
    return {base.__module__.partition(".")[0] for base in cls.__mro__} - {"torch", "builtins"}


@functools.cache
def is_library(root: str) -> bool:
    """Check whether a top-level package belongs to Python or is installed, and so stays fixed."""
    if root in sys.stdlib_module_names or root in sys.builtin_module_names:
        return root != "__main__"
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return file.startswith(tuple({sysconfig.get_path(kind) for kind in ("purelib", "platlib")}))


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def _digest(code: CodeType) -> str:
    """Return a code's instructions, names and constants in short, whatever its file and lines."""
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
    """Check whether two values that are not one object are the same number or bound method."""
    if type(now) is not type(then):
        return False
    if isinstance(then, (MethodType, BuiltinFunctionType)):
        return bool(now == then)
    return type(then) in _PLAIN and repr(now) == repr(then)


def _called(owner: Any) -> str:
    return str(getattr(owner, "__qualname__", None) or f"a {type(owner).__name__}")


def change_of(name: str, then: Any, now: Any) -> str:
    """Return a sentence's end that says what a name was and is."""
    return f"{name}, which was {_short(then)} and is {_short(now)}"


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"
