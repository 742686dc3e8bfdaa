"""Values of configs as texts, as in `key=value`: read and written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """A field's type: in words, read from a text (ValueError if it is none), and written."""

    wanted: str
    read: Callable[[str], Any]
    write: Callable[[Any], str] = str

    def value(self, key: str, text: str) -> Any:
        """Read the value of a key; ValueError names both."""
        try:
            return self.read(text)
        except ValueError:
            raise ValueError(f"{key} must be {self.wanted}, got {text!r}") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _text(text: str) -> str:
    value = json.loads(text) if text.startswith('"') else text
    if not isinstance(value, str):
        raise ValueError(text)
    return value


def _write_text(value: str) -> str:
    plain = value == value.strip() and value.isprintable() and value[:1] not in ("", '"')
    return value if plain else json.dumps(value)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError(text)
    return names


def _write_names(names: tuple[str, ...]) -> str:
    return names[0] if len(set(names)) == 1 else ",".join(names)


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


def _or_none(kind: Kind) -> Kind:
    return Kind(
        f"{kind.wanted}, or none",
        lambda text: None if text.lower() == "none" else kind.read(text),
        lambda value: "none" if value is None else kind.write(value),
    )


INTEGER = Kind("an integer", int)
NUMBER = Kind("a finite number", _finite)
NAMES = Kind("names with commas between them", _names, _write_names)

KINDS: dict[Any, Kind] = {
    int: INTEGER,
    float: NUMBER,
    bool: Kind("true or false", _bool, lambda value: str(value).lower()),
    str: Kind('a text, or a JSON string if it begins with "', _text, _write_text),
    int | None: _or_none(INTEGER),
    float | None: _or_none(NUMBER),
    tuple[str, ...] | None: _or_none(NAMES),
    Mapping[str, Any]: Kind("a JSON object", _object, json.dumps),
}
"""Kinds by the types of the configs' fields."""
