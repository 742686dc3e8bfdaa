"""Cells by name: those of the table, and any class by its import path."""

from __future__ import annotations

from collections.abc import Mapping

from pararnn.base.errors import CellError
from pararnn.base.imports import import_class, is_import_path
from pararnn.cells.base import Cell


def find_cell(name: str, table: Mapping[str, type[Cell]]) -> type[Cell]:
    """Return the cell class of a name in `table`, or of an import path "package.module:Class".

    Raises CellError where there is none, with what to do.
    """
    if name in table:
        return table[name]
    if not is_import_path(name):
        raise CellError(
            f"there is no cell {name!r}: name one of {', '.join(table)}, or a class of your own by "
            "its import path, such as 'mypackage.cells:MyCell'"
        )
    cell_class: type[Cell] = import_class(name, "cell", Cell, "pararnn.Cell", CellError)
    return cell_class


def check_cell_class(value: object) -> None:
    """Raise CellError for what is no subclass of Cell, such as a name or a cell."""
    if isinstance(value, type) and issubclass(value, Cell):
        return
    cure = ""
    if isinstance(value, str):
        cure = ": pararnn.CELLS has those of this package by name"
    elif isinstance(value, Cell):
        cure = f": {type(value).__name__} is one, and what you gave is a cell"
    raise CellError(f"cell_class must be a subclass of pararnn.Cell, got {value!r}{cure}")


def cell_name(cell_class: type[Cell], table: Mapping[str, type[Cell]]) -> str:
    """Return the name under which `find_cell` finds a class, in other processes too.

    Raises CellError for a class that is defined inside a function, which nobody can import.
    """
    for name, entry in table.items():
        if entry is cell_class:
            return name
    if "<locals>" in cell_class.__qualname__:
        raise CellError(
            f"{cell_class.__qualname__} is defined inside a function, so that no other process can "
            "import it: move it to the top level of a module"
        )
    return f"{cell_class.__module__}:{cell_class.__qualname__}"
