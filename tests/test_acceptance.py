"""Constants of cuda/elementwise/acceptance.h follow from the measurements in its comments."""

import re

import torch

from pararnn.base.numerics import REVERSE_TOLERANCE
from pararnn.codegen import headers
from pararnn.engines.rule import MIN_SEGMENTS

UNIT = torch.finfo(torch.float32).eps


def constant(pattern):
    """Return the number in the header that matches a pattern's group."""
    text = (headers.folder("cuda") / "elementwise/acceptance.h").read_text()
    (number,) = re.findall(pattern, text)
    return int(number)


def test_the_tolerance_of_adjoints_is_a_loops_accumulated_rounding():
    tolerance = constant(r"backward \? (\d+) : 2\) \* unit")
    steps, channels = 512, 4096
    generator = torch.Generator().manual_seed(0)
    jacobian = 1 + 0.02 * torch.randn(steps, channels, generator=generator)
    gradient = torch.randn(steps, channels, generator=generator)
    single, exact = torch.zeros(channels), torch.zeros(channels, dtype=torch.float64)
    largest = exact
    for j, g in zip(jacobian, gradient, strict=True):
        single, exact = g + j * single, g.double() + j.double() * exact
        largest = torch.maximum(largest, exact.abs())
    units = (single - exact).abs() / largest / UNIT
    assert 1 < units.median() < 3
    assert tolerance / 2 < units.quantile(0.999) < tolerance
    assert tolerance * UNIT <= REVERSE_TOLERANCE[torch.float32] / 100


def test_rounds_without_result_take_at_most_a_third_more_than_the_loop():
    patience = constant(r"patience = (\d+);")
    assert patience >= 2
    assert patience <= 4 / 3 * MIN_SEGMENTS["cuda"]
