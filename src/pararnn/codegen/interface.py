"""Structs of kernel arguments: 64-bit words, from one list of fields for C++ and Python.

`Interface.declaration` is their C++; `Interface.pack` lays out values in the same order. A field
has no other definition: a change here changes both sides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

WORD = 8
"""Bytes of a word: a size, a stride or an address."""


class Counts(NamedTuple):
    """Numbers of a program's states, gates, fields, params, memories and of the lengths of these
    that a call decides."""

    states: int
    gates: int
    fields: int
    params: int
    memories: int = 0
    lengths: int = 0

    @property
    def weights(self) -> int:
        """Number of biases, then params."""
        return self.gates + self.params


class Field(NamedTuple):
    """A word of a struct, an array of words, or a struct of the same table.

    `length`: a name of `Counts`, for an array of that length.
    """

    type: str
    name: str
    note: str = ""
    length: str = ""


def integers(*names: str) -> tuple[Field, ...]:
    """Return fields of one integer each."""
    return tuple(Field("int64", name) for name in names)


Words = int | Sequence[int]
"""Value of a field: a number, or the words of an array or a struct."""
Values = Mapping[str, Words]
"""Values of a struct, by field."""
Structs = Mapping[str, tuple[Field, ...]]
"""Fields by struct. A struct comes after those that it contains."""


class Interface:
    """Structs for a program's counts: declared in C++, and packed for a launch."""

    def __init__(self, structs: Structs, counts: Counts) -> None:
        self.structs, self.counts = structs, counts
        self._sizes: dict[str, int] = {}
        for name, fields in structs.items():
            self._sizes[name] = sum(max(1, self._words(field)) for field in fields)

    def length(self, field: Field) -> int:
        """Return the length of a field that is an array, 1 for others."""
        return getattr(self.counts, field.length) if field.length else 1

    def _words(self, field: Field) -> int:
        """Return the number of values of a field, which has at least one word: C++ has no empty
        arrays."""
        return self._sizes[field.type] if field.type in self.structs else self.length(field)

    def words(self, struct: str) -> int:
        """Return the number of words of a struct."""
        return self._sizes[struct]

    def place(self, struct: str, name: str) -> int:
        """Return the index of a field's first word among the words of a struct."""
        place = 0
        for field in self.structs[struct]:
            if field.name == name:
                return place
            place += max(1, self._words(field))
        raise KeyError(f"{struct} has no field {name}")

    def declaration(self) -> str:
        """Return all structs in C++, with an assertion for each that it has no gaps."""
        return "".join(
            "\n".join(
                (
                    f"struct {name} {{",
                    *map(self._declare, fields),
                    "};",
                    f"static_assert(sizeof({name}) == {WORD * self._sizes[name]});",
                    "",
                )
            )
            for name, fields in self.structs.items()
        )

    def _declare(self, field: Field) -> str:
        size = f"[{max(1, self._words(field))}]" if field.length else ""
        return f"  {field.type} {field.name}{size};" + (f"  // {field.note}" if field.note else "")

    def pack(self, struct: str, values: Values) -> list[int]:
        """Return the words of a struct, from the values of its fields.

        Raises ValueError for fields that are missing, unknown or of the wrong length.
        """
        rows = {name: [v] if isinstance(v, int) else list(v) for name, v in values.items()}
        sizes = {field.name: self._words(field) for field in self.structs[struct]}
        lengths = {name: len(row) for name, row in rows.items()}
        if lengths != sizes:
            raise ValueError(f"{struct} takes numbers for {sizes}, got {lengths}")
        return [word for name in sizes for word in rows[name] or [0]]
