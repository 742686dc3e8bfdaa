"""How far a value is from a reference."""

from torch import Tensor


def relative_error(value: Tensor, reference: Tensor) -> float:
    """max |value - reference| over max |reference|, in float64, 0 when empty.

    Places where the reference is not finite must match it exactly, else the error is inf.
    """
    value, reference = value.detach().double().cpu(), reference.detach().double().cpu()
    if value.shape != reference.shape:
        raise ValueError(f"shapes differ: {tuple(value.shape)} and {tuple(reference.shape)}")
    if reference.numel() == 0:
        return 0.0
    finite = reference.isfinite()
    same = (value == reference) | (value.isnan() & reference.isnan())
    if not bool((finite | same).all()) or not bool(value[finite].isfinite().all()):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    error = (value - reference)[finite].abs().max()
    if float(error) == 0.0:
        return 0.0
    return float(error / reference[finite].abs().max())
