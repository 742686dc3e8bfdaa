"""Giving a parameter another value, parametrised or not."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized


@torch.no_grad()
def assign(module: nn.Module, name: str, value: Tensor) -> None:
    """Give `module.name` a value, converted to its dtype and device.

    Through its parametrisations where it has some: by their `right_inverse`, and PyTorch's error
    where they have none.
    """
    old = getattr(module, name)
    if is_parametrized(module, name):
        setattr(module, name, value.to(old))
    else:
        old.copy_(value)
