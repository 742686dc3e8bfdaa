"""Records as JSON: what is NaN or infinite is null."""

import json
import math
from pathlib import Path

import pytest

from pararnn.lab.records import finite, read_json, to_json


def test_what_is_not_finite_is_null():
    record = {"a": [1.5, math.nan, (math.inf, -math.inf)], "b": {"c": math.nan}, "d": "nan", "e": 1}
    text = to_json(record)
    assert json.loads(text, parse_constant=pytest.fail) == finite(record)
    assert finite(record) == {"a": [1.5, None, [None, None]], "b": {"c": None}, "d": "nan", "e": 1}
    assert text.endswith("}\n")
    assert read_json("[NaN, Infinity, 2]") == [None, None, 2]


def test_other_types_are_written_as_said():
    assert json.loads(to_json({"path": Path("a")}, default=str)) == {"path": "a"}
    with pytest.raises(TypeError):
        to_json({"path": Path("a")})
