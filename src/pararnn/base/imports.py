"""Objects by their import paths, "package.module:name"."""

from __future__ import annotations

import importlib
from typing import Any

from pararnn.base.errors import PararnnError


def is_import_path(name: str) -> bool:
    """Return whether a name is an import path, and none of a table."""
    return ":" in name


def import_object(path: str, noun: str, error: type[PararnnError]) -> Any:
    """Return the object at an import path, None if its module has none of that name.

    noun: names the object in messages. Raises `error` for what is no import path, and for a module
    that cannot be imported.
    """
    module_name, _, name = path.partition(":")
    if not all(identifier.isidentifier() for identifier in module_name.split(".")):
        raise error(f"the {noun} {path!r} is no import path, such as 'mypackage.module:name'")
    try:
        target: Any = importlib.import_module(module_name)
    except ImportError as reason:
        raise error(
            f"the {noun} {path!r} cannot be imported ({reason}): install the package that defines "
            f"it, or put the folder that holds {module_name.partition('.')[0]} on PYTHONPATH"
        ) from reason
    for attribute in name.split("."):
        target = getattr(target, attribute, None)
    return target


def import_class(path: str, noun: str, base: type, title: str, error: type[PararnnError]) -> Any:
    """Return the subclass of `base` at an import path, see `import_object`.

    title: of the base, as users write it. Raises `error` for what is no subclass, too.
    """
    target = import_object(path, noun, error)
    if not (isinstance(target, type) and issubclass(target, base)):
        module_name, _, class_name = path.partition(":")
        raise error(
            f"the {noun} {path!r} cannot be used: {module_name} has no subclass of {title} "
            f"called {class_name!r}"
        )
    return target
