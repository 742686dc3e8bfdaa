"""Precise replacements of functions that lose precision in PyTorch's translation to ONNX.

log(sigmoid(x)) becomes the logarithm of a sigmoid, which is -inf below -18 in onnxruntime. log1p(x)
becomes log(1 + x), expm1(x) becomes exp(x) - 1, and logaddexp becomes log(exp(x) + exp(y)).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pararnn.base.private import exporting_to_onnx

Result = TypeVar("Result")


def call_precisely(function: Callable[..., Result], *args: Any) -> Result:
    """Call a function of PyTorch's operations; an export to ONNX keeps its precision."""
    if not exporting_to_onnx():
        return function(*args)
    with _Precise():
        return function(*args)


class _Precise(TorchFunctionMode):
    """Mode that calls functions of `PRECISE` in place of PyTorch's."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of PyTorch, or the one in its place."""
        return PRECISE.get(func, func)(*args, **(kwargs or {}))


def _log1p(input: Tensor) -> Tensor:
    # By Kahan: the rounding of 1 + x moves the logarithm as much as the quotient moves it back.
    shifted = 1 + input
    moved = shifted - 1
    ratio = torch.where(moved == input, 1.0, input / moved)
    return torch.where(shifted == 1, input, torch.log(shifted) * ratio)


def _expm1(input: Tensor) -> Tensor:
    power = torch.exp(input)
    near_0 = (power - 1) * (input / torch.log(power))
    result = torch.where(input.abs() < 0.5, near_0, power - 1)
    return torch.where(power == 1, input, result)


def _logsigmoid(input: Tensor) -> Tensor:
    return torch.clamp(input, max=0) - _log1p(torch.exp(-input.abs()))


def _logaddexp(input: Tensor, other: Tensor) -> Tensor:
    # Equal infinities have no difference.
    gap = torch.where(input == other, 0.0, input - other)
    return torch.maximum(input, other) + _log1p(torch.exp(-gap.abs()))


PRECISE: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.logsigmoid: _logsigmoid,
    **dict.fromkeys((torch.log1p, Tensor.log1p, torch.special.log1p), _log1p),
    **dict.fromkeys((torch.expm1, Tensor.expm1, torch.special.expm1), _expm1),
    **dict.fromkeys((torch.logaddexp, Tensor.logaddexp), _logaddexp),
}
"""Replacements by PyTorch's function."""
