"""What a step reads, said by content, so that another process may know a Program again.

`Reads` tells within a process whether a step still reads the same, by identity. Here the same
places are written out: equal texts mean equal graphs. What can be written out is listed, and the
list is short; a step that reads anything else is traced in every process.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import math
import operator
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from pararnn.cells.base import Cell
from pararnn.program.follow import CONTRACT, MISSING
from pararnn.program.loads import codes, is_library, loads, packages_of, words
from pararnn.program.reads import Reads

STARTED = time.time()
PACKAGE = Path(__file__).parents[1]

_PLAIN = (int, float, complex, bool, str, bytes, type(None), type(Ellipsis))
_NAMED = (torch.dtype, torch.device)
_LIBRARIES = (torch, F, torch.special, math, operator)


_BUILTINS = words("""
    abs all any bool bytes complex dict divmod enumerate filter float frozenset int isinstance
    issubclass iter len list map max min next pow property range repr reversed round set slice
    sorted staticmethod str sum super tuple type zip ArithmeticError AssertionError
    AttributeError Exception IndexError KeyError NotImplementedError RuntimeError TypeError
    ValueError __name__ __debug__
""")
"""Built-in names whose value depends on their arguments alone, and that show the caller nothing."""
_TORCH = words("Tensor tensor as_tensor dtype device finfo iinfo no_grad enable_grad")
"""Names of torch that a step may read beside dtypes, numbers and functions that ATen has."""
_DUNDERS = frozenset({"__class__", "__name__"})
_HARMLESS = words("""
    __module__ __qualname__ __doc__ __dict__ __weakref__ __init__ __annotations__ __annotate__
    __annotate_func__ __annotations_cache__ __abstractmethods__ __firstlineno__ __parameters__
    __static_attributes__ __orig_bases__ __repr__ __init_subclass__
""")
"""What a cell's class may define with such names: a step runs on an object that never calls it."""


class UnknownContent(Exception):
    """A step reads something whose content cannot be written out; the message names it."""


def content_of(cls: type[Cell], config: Mapping[str, Any], reads: Reads) -> str:
    """All that the Program of a class under a config depends on, as text.

    Raises UnknownContent for what is not on the lists above: classes of the user's own, modules
    other than torch and math, getattr and the like, code of this package that has changed since the
    process began.
    """
    writer = _Writer(cls)
    return "\n".join([machinery(), f"config {_json(config)}", *writer.lines_of(reads)])


def machinery() -> str:
    """What traces: this package's code, PyTorch, Python. UnknownContent where it has changed."""
    python = (*sys.version_info, sys.implementation.name, sys.flags.optimize)
    return "\n".join(
        (
            f"pararnn {_own_source()}",
            f"torch {torch.__version__} {torch.version.git_version} {torch.get_default_dtype()}",
            f"python {python}",
        )
    )


@functools.cache
def _own_source() -> str:
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.stat().st_mtime > STARTED:
            raise UnknownContent(f"{file} has changed since this process began")
        digest.update(f"{file.relative_to(PACKAGE)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _json(value: Any) -> str:
    """A config value, with its types: JSON takes a tuple for a list, and 1.0 of NumPy for 1.0."""
    if type(value) in _PLAIN:
        return repr(value)
    if type(value) in (list, tuple):
        return f"{type(value).__name__}({', '.join(map(_json, value))})"
    if isinstance(value, dict):
        return f"dict({', '.join(f'{_json(k)}: {_json(v)}' for k, v in value.items())})"
    raise UnknownContent(f"config of type {type(value).__name__}")


class _Writer:
    """Writes places out; objects that several places may share are numbered as they come."""

    def __init__(self, cls: type[Cell]) -> None:
        self.cls = cls
        self.lines: list[str] = []
        self.numbers: dict[int, int] = {}
        self.alive: list[Any] = []
        self.names: dict[str, None] = {}
        self.modules: dict[str, ModuleType] = {}
        self.written: set[int] = set()
        self.followed: set[int] = set()
        self.own = packages_of(cls)

    def lines_of(self, reads: Reads) -> list[str]:
        """The lines of all places of `reads`, and of what code names in libraries."""
        self.followed = {id(owner) for owner, name, _ in reads.attributes if name == "__code__"}
        self.check_classes()
        for name, param in self.cls.params.items():
            if not isinstance(param.shape, str):
                parts = (param.shape.name, param.shape.size, param.shape.lift)
                self.lines.append(f"shape {[self.said(part, name) for part in parts]}")
        for owner, name, value in reads.attributes:
            static = vars(owner).get(name, value) if isinstance(owner, type) else value
            contract = owner is self.cls and name in CONTRACT
            said = repr(value) if contract else self.said(static, name)
            self.lines.append(f"{self.number(owner)}.{name} = {said}")
        for mapping, key, value in reads.items:
            if mapping is sys.modules:
                raise UnknownContent(f"an import of {key} inside the step")
            self.lines.append(f"{self.number(mapping)}[{key!r}] = {self.said(value, str(key))}")
        for container, keys, entries in reads.contents:
            kind = type(container)
            values = [self.said(entry, "an entry") for entry in entries]
            named_by = [self.said(key, "a key") for key in keys or ()]
            content = sorted(values) if kind is set else [*named_by, *values]
            self.lines.append(f"{self.number(container)} = {kind.__name__} {content}")
        self.libraries()
        return self.lines

    def number(self, value: Any) -> str:
        """The number of an object."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.numbers)
            self.alive.append(value)  # so that no other object gets its id
        return f"#{self.numbers[id(value)]}"

    def said(self, value: Any, name: str) -> str:
        """A value, by its content or by the number under which its parts are written."""
        kind = type(value)
        if value is MISSING or kind in _NAMED or kind in _PLAIN:
            return f"{kind.__name__} {value!r}"
        if kind in (tuple, frozenset):
            entries = [self.said(entry, f"an entry of {name}") for entry in value]
            return f"{kind.__name__} {sorted(entries) if kind is frozenset else entries}"
        if kind in (list, dict, set):  # among the contents
            return self.number(value)
        if kind is CodeType:
            return _digest(value)
        number = self.number(value)
        if id(value) not in self.written:
            self.written.add(id(value))
            self.lines.append(f"{number} = {self.description(value, name)}")
        return number

    def description(self, value: Any, name: str) -> str:
        """What an object of one of the kinds that can be written is."""
        if isinstance(value, FunctionType) and id(value) in self.followed:
            self.code(value)
            closure = [self.number(cell) for cell in value.__closure__ or ()]
            globals_ = self.number(value.__globals__)
            return f"function {value.__module__} globals {globals_} closure {closure}"
        if isinstance(value, (FunctionType, BuiltinFunctionType)):
            return _library_function(value, name)
        if type(value) is ModuleType:
            root = value.__name__.partition(".")[0]
            if root in ("torch", "math", "operator"):
                self.modules[value.__name__] = value
                return f"module {value.__name__}"
            if root in self.own or not is_library(root):
                return f"module {value.__name__} {self.number(vars(value))}"
            raise UnknownContent(f"the module {value.__name__}")
        if isinstance(value, type):
            return self.type(value)
        if type(value) in (MethodType, functools.partial, staticmethod, classmethod, property):
            parts = ("__func__", "__self__", "func", "args", "keywords", "fget")
            held = {part: getattr(value, part, None) for part in parts}
            said = {part: self.said(v, name) for part, v in held.items() if v is not None}
            return f"{type(value).__name__} {said}"
        raise UnknownContent(f"{name}, of type {type(value).__name__}")

    def type(self, value: type) -> str:
        """A class: one whose places are among the reads (the cell's, its bases, and functions with
        a backward of their own), or a known one."""
        root = value.__module__.partition(".")[0]
        fixed = root == "pararnn" or (root == "builtins" and value.__name__ in _BUILTINS)
        own = value in self.cls.__mro__ or _is_function(value, self.own)
        if own or fixed or value is Tensor:
            bases = [f"{base.__module__}:{base.__qualname__}" for base in value.__mro__]
            return f"class {bases}"
        raise UnknownContent(f"the class {value.__qualname__}")

    def check_classes(self) -> None:
        """Raise UnknownContent where a class says how its attributes are found."""
        for base in self.cls.__mro__:
            if base in (*Cell.__mro__, Cell):
                continue
            odd = {name for name in vars(base) if name.startswith("__")} - _HARMLESS
            if odd or type(base) is not type:
                raise UnknownContent(f"{base.__qualname__} has {sorted(odd) or 'a metaclass'}")

    def code(self, function: FunctionType) -> None:
        """Note the names in a function's code; UnknownContent for those that find anything."""
        for code in codes(function.__code__):
            for kind, name, path in loads(code):
                if kind == "import":
                    raise UnknownContent(f"an import of {name} inside the step")
                own = kind != "global" or name in function.__globals__
                if not own and hasattr(builtins, name) and name not in _BUILTINS:
                    raise UnknownContent(f"the built-in {name}")
                for read in (name, *path) if kind == "attribute" else path:
                    if read.startswith("__") and read not in _DUNDERS:
                        raise UnknownContent(f"the attribute {read}")
                self.names.update(dict.fromkeys((name, *path)))

    def libraries(self) -> None:
        """Write out what the code names in libraries, and see that it is the libraries' own."""
        done: set[tuple[str, str]] = set()
        while todo := [
            (module, name)
            for module in list(self.modules.values())
            for name in self.names
            if (module.__name__, name) not in done
        ]:
            for module, name in todo:
                done.add((module.__name__, name))
                value = getattr(module, name, MISSING)
                own = not isinstance(value, FunctionType)
                if value is MISSING or (module is torch and name in _TORCH and own):
                    continue
                if isinstance(value, (FunctionType, BuiltinFunctionType)):
                    said = _library_function(value, name)
                else:
                    said = self.said(value, f"{module.__name__}.{name}")
                self.lines.append(f"{module.__name__}.{name} = {said}")
        for name in self.names:
            method = getattr(Tensor, name, None)
            if isinstance(method, FunctionType) and not _of_torch(method):
                raise UnknownContent(f"Tensor.{name}, which is not torch's own")


def _is_function(value: type, own: set[str]) -> bool:
    """Whether a class is a torch.autograd.Function of the user's, whose attributes are plain."""
    if not issubclass(value, Function):
        return False
    bases = value.__mro__[: value.__mro__.index(Function)]
    roots = {base.__module__.partition(".")[0] for base in bases}
    odd = {name for base in bases for name in vars(base) if name.startswith("__")} - _HARMLESS
    plain = all(type(base) is type(Function) for base in bases)
    return plain and not odd and not any(map(is_library, roots - own))


def _library_function(function: Any, name: str) -> str:
    """A function of torch or of math, by its name."""
    own = not isinstance(function, FunctionType) or _of_torch(function)
    for module, called, found in _library_functions().get(id(function), ()):
        if not own or found is not function:
            continue
        pure = module in (math, operator, F, torch.special) or called in _TORCH
        if pure or hasattr(torch.ops.aten, called):
            return f"{module.__name__}.{called}"
    raise UnknownContent(f"the function {getattr(function, '__qualname__', name)}")


@functools.cache
def _library_functions() -> dict[int, list[tuple[ModuleType, str, Any]]]:
    """The functions of libraries, by id: several may have one name, and one several."""
    found: dict[int, list[tuple[ModuleType, str, Any]]] = {}
    for module in _LIBRARIES:
        for called, function in vars(module).items():
            if isinstance(function, (FunctionType, BuiltinFunctionType)):
                found.setdefault(id(function), []).append((module, called, function))
    return found


def _of_torch(function: FunctionType) -> bool:
    return str(function.__globals__.get("__name__")).partition(".")[0] == "torch"


def _digest(code: CodeType) -> str:
    """All of a code object that decides what it does, whatever its file and lines."""
    constants = [_digest(c) if isinstance(c, CodeType) else _constant(c) for c in code.co_consts]
    parts = (
        code.co_code,
        constants,
        *(code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        *(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
        getattr(code, "co_exceptiontable", b""),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _constant(value: Any) -> str:
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(_constant, value))}"
    return repr(value)
