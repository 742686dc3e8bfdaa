"""Each claim of the contract on an error, where it alone fails."""

import pytest
import torch

from pararnn.base.numerics import CHANNEL_FACTOR, SEQUENTIAL_ERRORS
from pararnn.check.claims import QUIET, compare

TOLERANCE = 2e-4
NOISE = 10 * TOLERANCE
WITH_NOISE = TOLERANCE + SEQUENTIAL_ERRORS * NOISE


def _check(error, size, noise=(0.0, 0.0)):
    tensors = (torch.tensor(x, dtype=torch.float64) for x in (error, size, noise))
    error, size, noise = tensors
    return compare("x", error, size, [noise], TOLERANCE, 0.0)


CASES = {  # errors, sizes and noises of two channels; each error just beyond what the claim allows
    "all that is judged": ((1.1 * WITH_NOISE, 0.0), (1.0, 1.0), (NOISE, 0.0)),
    "what rounding leaves alone": ((0.0, 1.1 * TOLERANCE), (1.0, 1.0), (NOISE, 0.0)),
    "each channel": ((0.0, 1.1 * CHANNEL_FACTOR * TOLERANCE * 1e-3), (1.0, 1e-3), (0.0, 0.0)),
}


@pytest.mark.parametrize("claim", CASES)
def test_each_claim_fails_alone(claim):
    error, size, noise = CASES[claim]
    assert NOISE < QUIET
    check = _check(error, size, noise)
    assert not check.passed
    assert check.fraction == pytest.approx(1.1)  # so it is no other claim that is meant
    small_errors = tuple(x / 1.2 for x in error)
    assert _check(small_errors, size, noise).passed


def test_what_rounding_moves_is_not_judged_and_named():
    check = _check((0.5, 0.0), (1.0, 1.0), (2 * QUIET, 0.0))
    assert check.passed
    assert check.note == "1 of 2 channels not judged: rounding alone moves them"


def test_noise_is_asked_for_until_the_check_passes():
    sizes = []

    def noises():
        for size in (0.0, 1e-3, 1e-2):
            sizes.append(size)
            yield torch.tensor([size], dtype=torch.float64)

    one = torch.ones(1, dtype=torch.float64)
    assert compare("x", 1.1e-3 * one, one, noises(), TOLERANCE, 0.0).passed
    assert sizes == [0.0, 1e-3]
