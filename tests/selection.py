"""The cases that `make test` runs, by markers beside the tests; `make test-all` runs all."""

from collections import Counter
from collections.abc import Collection, Iterable

import pytest
import torch
from table import DTYPES, ELEMENTWISE


def is_left_out(params: Collection[object]) -> bool:
    """Return True for an elementwise cell in neither float32 nor a second dtype, its own in turn.

    A cell's code knows its dtype only by conversions and functions, which all cells share.
    """
    others = [dtype for dtype in DTYPES if dtype != torch.float32]
    for turn, cell in enumerate(ELEMENTWISE):
        if cell in params:
            second = others[turn % len(others)]
            return any(dtype in params for dtype in others if dtype != second)
    return False


def mark(items: Iterable[pytest.Item]) -> None:
    """Mark as `thorough` what the markers `one_in` and `two_dtypes` leave out.

    one_in(n): one case in n stays. It has no factor in common with the sizes of a table's axes,
    where it has several, so that each value of each axis stays. two_dtypes: see `is_left_out`.
    """
    order: Counter[str] = Counter()
    for item in items:
        one_in = item.get_closest_marker("one_in")
        two = item.get_closest_marker("two_dtypes") and hasattr(item, "callspec")
        if two and is_left_out(item.callspec.params.values()):
            item.add_marker(pytest.mark.thorough)
        elif one_in is not None:
            function = item.nodeid.partition("[")[0]
            if order[function] % one_in.args[0]:
                item.add_marker(pytest.mark.thorough)
            order[function] += 1
