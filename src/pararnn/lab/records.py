"""Records as JSON text: NaN and infinite numbers, which JSON lacks, are null."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any


def to_json(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Write a value as lines of JSON; `default` says what to write for other types."""
    return json.dumps(finite(value), indent=1, default=default, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """Return the value with None in the place of numbers that are NaN or infinite."""
    if isinstance(value, Mapping):
        return {name: finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(text: str) -> Any:
    """Read JSON; NaN and Infinity, which earlier versions wrote, are None."""
    return json.loads(text, parse_constant=lambda _: None)


def flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with dots in its keys."""
    result: dict[str, Any] = {}
    for key, value in record.items():
        is_record = isinstance(value, Mapping) and value
        result |= flat(value, f"{prefix}{key}.") if is_record else {prefix + key: value}
    return result
