"""Runs of training without their curves, which take a third of a small run's time."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def undrawn() -> Iterator[None]:
    """No run in this block draws its curves."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("run", "trainer"):
            patch.setattr(f"pararnn.lab.train.{module}.plot_rows", lambda *_: None)
        yield
