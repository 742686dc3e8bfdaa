"""Configs changed by texts `key=value`, and printed as such."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_type_hints

from pararnn.lab.train.config import RunConfig
from pararnn.lab.values import KINDS, Kind
from pararnn.lm.config import LMConfig


def resolved(config: RunConfig, overrides: Iterable[str]) -> RunConfig:
    """Return the config with `overrides` ("steps=10", "model.cell = lstm"); the last of a key wins.

    A key is a field's name, behind those of the records that it is in. Values are numbers, true or
    false, texts (as JSON strings where blanks at their ends or other characters would be lost),
    none if a field may be None, mixers with commas (a single one is for all blocks), and a JSON
    object for model.cell_config.

    Values that follow from a model's sizes are computed again: intermediate_size, unless it is
    given here or the recipe has another than the width's, and the mixers, if they are all alike.

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
        values[key] = kinds[key].value(key, text)
    return _rebuilt(config, values)


def texts_of(config: RunConfig) -> dict[str, str]:
    """Return the values of a config as texts, by their keys."""
    return {key: kind.write(value) for key, kind, value in _leaves(config)}


def config_text(config: RunConfig) -> str:
    """Return the config as lines `key = value`, which `resolved` reads."""
    return "\n".join(f"{key} = {text}" for key, text in texts_of(config).items())


def nearest(name: str, names: Mapping[str, str]) -> list[str]:
    """Return up to three values whose keys are like `name`, the most alike first."""
    near = difflib.get_close_matches(name.lower(), names, n=6)
    return list(dict.fromkeys(names[each] for each in near))[:3]


def _hint(key: str, keys: Iterable[str]) -> str:
    full = {each: each for each in keys}
    inside = [each for each in full if each.startswith(f"{key}.")]
    if inside:
        return f": it is a record, with fields such as {inside[0]}"
    # Users may leave out the record, or shorten a name as other libraries do.
    own = key.rpartition(".")[2].lower()
    fields = {each.rpartition(".")[2]: each for each in full}
    short = [each for name, each in fields.items() if own in _short(name)]
    near = short or nearest(own, fields) or nearest(key, full)
    return f"; did you mean {near[0]}?" if near else "; --print shows all keys"


def _short(name: str) -> set[str]:
    """Return short forms of a name: its first letters, and the words at its end."""
    words = name.split("_")
    return {"".join(word[0] for word in words), *("_".join(words[at:]) for at in range(len(words)))}


def _leaves(record: Any, prefix: str = "") -> Iterator[tuple[str, Kind, Any]]:
    """Yield keys, kinds and values of a record's fields, and of records in it."""
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
        changes = _with_dependents(record, changes)
    return replace(record, **changes)


def _with_dependents(model: LMConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of a model, and those that follow from them."""
    changes, mixers = dict(changes), model.mixers or ()
    if model.intermediate_size == replace(model, intermediate_size=None).intermediate_size:
        changes.setdefault("intermediate_size", None)
    if len(set(mixers)) == 1:
        changes.setdefault("mixers", mixers[:1])
    if len(changes.get("mixers") or ()) == 1:
        changes["mixers"] *= changes.get("num_hidden_layers", model.num_hidden_layers)
    return changes
