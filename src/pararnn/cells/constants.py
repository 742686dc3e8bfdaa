"""Values of config: JSON's, in types that cannot change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pararnn.base.errors import CellError


class _Constants(dict[str, Any]):
    """A dictionary of config: it can be read, copied and pickled, and does not change."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("config is immutable: make a new cell with another value")

    __setitem__ = __delitem__ = __ior__ = _refuse
    update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> Any:
        return type(self), (dict(self),)


def immutable(value: Any, what: str) -> Any:
    """Return a JSON value in types that cannot change: tuples for lists.

    Raises CellError, which begins with `what`, for anything else.
    """
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return tuple(immutable(entry, what) for entry in value)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return _Constants({key: immutable(entry, what) for key, entry in value.items()})
    for scalar_type, plain in _SCALARS.items():
        if isinstance(value, scalar_type):
            return plain(value)
    raise CellError(
        f"{what} must be a JSON value (number, string, bool, None, list, or dict with strings for "
        f"keys), got {type(value).__name__}"
    )


_SCALARS: Mapping[type, Any] = {bool: bool, int: int, float: float, str: str.__str__}
"""Conversion of a value of each type, or of a subclass, to that type."""
