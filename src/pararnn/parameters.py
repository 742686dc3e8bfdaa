"""How parameters are drawn and clipped, and giving them another value, parametrised or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

DRAWS = ("normal", "uniform", "constant")


@dataclass(frozen=True)
class Draw:
    """What a parameter's entries are drawn from, independently.

    kind "normal": the Gaussian of standard deviation `spread` around `mean`, of which `cut` keeps
    what is within so many standard deviations; "uniform": from mean - spread to mean + spread;
    "constant": the mean.
    """

    kind: str
    mean: float = 0.0
    spread: float = 0.0
    cut: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in DRAWS:
            raise ValueError(f"kind must be one of {DRAWS}, got {self.kind!r}")


def draw(tensor: Tensor, how: Draw) -> Tensor:
    """Draw a tensor in place, by the functions of torch.nn.init."""
    mean, spread = how.mean, how.spread
    # Looked up at each call: loaders of weights put functions of their own in their place.
    if how.kind == "constant":
        return nn.init.constant_(tensor, mean)
    if how.kind == "uniform":
        return nn.init.uniform_(tensor, mean - spread, mean + spread)
    if how.cut is None:
        return nn.init.normal_(tensor, mean, spread)
    reach = how.cut * spread
    return nn.init.trunc_normal_(tensor, mean, spread, mean - reach, mean + reach)


@torch.no_grad()
def draw_anew(module: nn.Module, draws: Mapping[str, Draw]) -> None:
    """Draw the parameters and buffers of a module that are named; see `assign`."""
    for name, how in draws.items():
        if is_parametrized(module, name):
            assign(module, name, draw(torch.empty_like(getattr(module, name)), how))
        else:
            draw(_own(module, name), how)


@torch.no_grad()
def assign(module: nn.Module, name: str, value: Tensor) -> None:
    """Give `module.name` a value, converted to its dtype and device.

    Through its parametrisations where it has some: by their `right_inverse`, and PyTorch's error
    where they have none.
    """
    if is_parametrized(module, name):
        setattr(module, name, value.to(getattr(module, name)))
    else:
        _own(module, name).copy_(value)


def _own(module: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer of the module. ValueError for what a hook on it computes."""
    for named in (module._parameters, module._buffers):
        if (found := named.get(name)) is not None:
            return found
    raise ValueError(
        f"{name} of {type(module).__name__} is computed by a hook, as torch.nn.utils.prune and "
        "weight_norm have it: writing to it would change nothing. Write to what it is computed "
        "from, or remove the hook first"
    )


def _clamp(parameter: Tensor, bound: float) -> None:
    parameter.clamp_(-bound, bound)


def _scale_down(parameter: Tensor, bound: float) -> None:
    norm = torch.linalg.vector_norm(parameter)
    parameter.mul_(bound / norm.clamp(min=bound))


CLIPS = {"elementwise": _clamp, "norm": _scale_down}
"""How a recurrent parameter is brought within a bound, in place."""
