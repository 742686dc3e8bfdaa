"""A run's config with some of its values changed, as `key=value` says them, and printed so."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple, get_type_hints

from pararnn.lm.config import LMConfig
from pararnn.train.config import RunConfig


class Kind(NamedTuple):
    """A field's type, said in words, read from a text (ValueError if it is none), and written."""

    wanted: str
    read: Callable[[str], Any]
    write: Callable[[Any], str] = str


def resolved(config: RunConfig, overrides: Iterable[str]) -> RunConfig:
    """The config with what `overrides` ("steps=10", "model.cell = lstm") say; the last counts.

    A key is a field's name, behind those of the records that it is in. Values are numbers, true or
    false, texts (as JSON strings where blanks at their ends or other characters would be lost),
    none where a field may be None, mixers with commas (one alone is for all blocks), and a JSON
    object for model.cell_config.

    What follows from a model's sizes follows again where they change: intermediate_size, unless it
    is given here or the recipe has another than the width's, and the mixers, if they are all alike.

    Raises ValueError for unknown keys, with the nearest one, and for values of another type or that
    a config refuses.
    """
    kinds = {key: kind for key, kind, _ in _leaves(config)}
    values = {}
    for override in overrides:
        key, equals, text = (part.strip() for part in override.partition("="))
        if not equals:
            raise ValueError(f"{override!r} is no key=value, such as steps=10")
        if key not in kinds:
            raise ValueError(f"there is no key {key!r}{_hint(key, kinds)}")
        try:
            values[key] = kinds[key].read(text)
        except ValueError:
            raise ValueError(f"{key} must be {kinds[key].wanted}, got {text!r}") from None
    return _rebuilt(config, values)


def printed(config: RunConfig) -> str:
    """The config as lines `key = value`, which `resolved` takes."""
    return "\n".join(f"{key} = {kind.write(value)}" for key, kind, value in _leaves(config))


def nearest(name: str, names: Mapping[str, str]) -> list[str]:
    """Up to three values whose keys are like `name`, the likest first."""
    near = difflib.get_close_matches(name.lower(), names, n=6)
    return list(dict.fromkeys(names[each] for each in near))[:3]


def _hint(key: str, keys: Iterable[str]) -> str:
    full = {each: each for each in keys}
    inside = [each for each in full if each.startswith(f"{key}.")]
    if inside:
        return f": it is a record, with fields such as {inside[0]}"
    # Who leaves out the record means its field, and who knows other libraries may shorten its name.
    own = key.rpartition(".")[2].lower()
    fields = {each.rpartition(".")[2]: each for each in full}
    short = [each for name, each in fields.items() if own in _short(name)]
    near = short or nearest(own, fields) or nearest(key, full)
    return f"; did you mean {near[0]}?" if near else "; --print shows all keys"


def _short(name: str) -> set[str]:
    """What a name may be shortened to: its first letters, and the words at its end."""
    words = name.split("_")
    return {"".join(word[0] for word in words), *("_".join(words[at:]) for at in range(len(words)))}


def _leaves(record: Any, prefix: str = "") -> Iterator[tuple[str, Kind, Any]]:
    """Keys, kinds and values of a record's fields, and of those of records in it."""
    hints = get_type_hints(type(record))
    for field in fields(record):
        key, value = prefix + field.name, getattr(record, field.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, KINDS[hints[field.name]], value


def _rebuilt(record: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    changes = {}
    for field in fields(record):
        key, value = prefix + field.name, getattr(record, field.name)
        if is_dataclass(value):
            changes[field.name] = _rebuilt(value, values, f"{key}.")
        elif key in values:
            changes[field.name] = values[key]
    if isinstance(record, LMConfig):
        changes = _followed(record, changes)
    return replace(record, **changes)


def _followed(model: LMConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes of a model, and those that follow from them."""
    changes, mixers = dict(changes), model.mixers or ()
    if model.intermediate_size == replace(model, intermediate_size=None).intermediate_size:
        changes.setdefault("intermediate_size", None)
    if len(set(mixers)) == 1:
        changes.setdefault("mixers", mixers[:1])
    if len(changes.get("mixers") or ()) == 1:
        changes["mixers"] *= changes.get("num_hidden_layers", model.num_hidden_layers)
    return changes


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
"""By the types of the configs' fields."""
