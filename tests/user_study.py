"""Recipes that a user defines, for tests: valid ones, and objects that are none."""

from dataclasses import replace

from pararnn.lab.train.config import RunConfig
from pararnn.lab.train.recipes import on_bytes

VALUE = 3


def small() -> RunConfig:
    run = on_bytes("small", "gru", width=16, blocks=1, steps=4)
    return replace(run, precision="float32", compile=False)


def of_width(width: int) -> RunConfig:
    return on_bytes("of_width", "gru", width=width, blocks=1, steps=4)


def empty() -> None:
    return None


class Study:
    small = staticmethod(small)
