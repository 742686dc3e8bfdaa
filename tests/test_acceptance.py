"""Constants of kernels/cuda/elementwise/acceptance.h hold what is said of where they come from."""

import re

import torch

from pararnn.codegen import headers
from pararnn.engines.rule import MIN_SEGMENTS
from pararnn.numerics import REVERSE_TOLERANCE

UNIT = torch.finfo(torch.float32).eps


def constant(pattern):
    """The number that a pattern's group finds in the header."""
    text = (headers.folder("cuda") / "elementwise/acceptance.h").read_text()
    (found,) = re.findall(pattern, text)
    return int(found)


def test_an_adjoints_start_may_be_off_by_what_a_loops_rounding_adds_up_to():
    allowed = constant(r"backward \? (\d+) : 2\) \* unit")
    steps, channels = 512, 4096
    generator = torch.Generator().manual_seed(0)
    jacobian = 1 + 0.02 * torch.randn(steps, channels, generator=generator)
    arriving = torch.randn(steps, channels, generator=generator)
    rounded, exact = torch.zeros(channels), torch.zeros(channels, dtype=torch.float64)
    largest = exact
    for j, g in zip(jacobian, arriving, strict=True):
        rounded, exact = g + j * rounded, g.double() + j.double() * exact
        largest = torch.maximum(largest, exact.abs())
    units = (rounded - exact).abs() / largest / UNIT
    assert 1 < units.median() < 3
    assert allowed / 2 < units.quantile(0.999) < allowed  # of use, and not far beyond
    assert allowed * UNIT <= REVERSE_TOLERANCE[torch.float32] / 100


def test_what_rounds_that_lead_nowhere_take_at_most():
    patience = constant(r"patience = (\d+);")
    assert patience >= 2
    assert patience <= 4 / 3 * MIN_SEGMENTS["cuda"]
