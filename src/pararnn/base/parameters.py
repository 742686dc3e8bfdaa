"""Initialisation, clipping and assignment of parameters, parametrised or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

DRAWS = ("normal", "uniform", "constant")


@dataclass(frozen=True)
class Draw:
    """Distribution of a parameter's entries, which are independent.

    kind "normal": the Gaussian of standard deviation `spread` around `mean`, truncated at `cut`
    standard deviations if set; "uniform": from mean - spread to mean + spread; "constant": the
    mean.
    """

    kind: str
    mean: float = 0.0
    spread: float = 0.0
    cut: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in DRAWS:
            raise ValueError(f"kind must be one of {DRAWS}, got {self.kind!r}")


def draw(tensor: Tensor, distribution: Draw) -> Tensor:
    """Draw a tensor in place, by the functions of torch.nn.init; one on the meta device has no
    values."""
    if tensor.is_meta:  # PyTorch would import its compiler
        return tensor
    kind, mean, spread = distribution.kind, distribution.mean, distribution.spread
    # Looked up at each call: loaders of weights replace these functions.
    if kind == "constant":
        return nn.init.constant_(tensor, mean)
    if kind == "uniform":
        return nn.init.uniform_(tensor, mean - spread, mean + spread)
    if distribution.cut is None:
        return nn.init.normal_(tensor, mean, spread)
    reach = distribution.cut * spread
    return nn.init.trunc_normal_(tensor, mean, spread, mean - reach, mean + reach)


@torch.no_grad()
def draw_parameters(module: nn.Module, draws: Mapping[str, Draw]) -> None:
    """Draw these parameters and buffers of a module; see `assign`."""
    for name, distribution in draws.items():
        if is_parametrized(module, name):
            assign(module, name, draw(torch.empty_like(getattr(module, name)), distribution))
        else:
            draw(_stored_tensor(module, name), distribution)


@torch.no_grad()
def assign(module: nn.Module, name: str, value: Tensor) -> None:
    """Give `module.name` a value, converted to its dtype and device.

    Through its parametrisations where it has some: by their `right_inverse`, and PyTorch's error
    where they have none.
    """
    if is_parametrized(module, name):
        setattr(module, name, value.to(getattr(module, name)))
    else:
        _stored_tensor(module, name).copy_(value)


def _stored_tensor(module: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer of the module. ValueError for one that a hook computes."""
    for tensors in (module._parameters, module._buffers):
        if (tensor := tensors.get(name)) is not None:
            return tensor
    raise ValueError(
        f"{name} of {type(module).__name__} is computed by a hook, as torch.nn.utils.prune and "
        "weight_norm have it: writing to it would change nothing. Write to what it is computed "
        "from, or remove the hook first"
    )


def _clamp(parameter: Tensor, bound: float) -> None:
    parameter.clamp_(-bound, bound)


def _scale_down(parameter: Tensor, bound: float) -> None:
    heads = parameter.ndim > 2
    # A single norm has no axis: FSDP2 cannot scale the shards of one row by a factor of a row.
    norm = torch.linalg.vector_norm(parameter, dim=(-2, -1) if heads else None, keepdim=heads)
    least = torch.finfo(norm.dtype).tiny  # a bound of 0 leaves norms of 0
    parameter.mul_(bound / norm.clamp(min=max(bound, least)))


CLIPS = {"elementwise": _clamp, "norm": _scale_down}
"""Functions that bring a recurrent parameter within a bound, in place."""
