"""Weights of language models in 8 bits, by torchao: half the bytes that decoding reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from pararnn.base.errors import PararnnError
from pararnn.base.extras import require
from pararnn.engines.signature import PLAIN_TYPES

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Dtypes of numbers by the names of weights."""
CONFIGS = {"int8": "Int8WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig"}
"""torchao's configs, by the same names."""

LEVELS = 127
"""Largest number in int8 that a line's largest becomes."""
LEAST_FACTOR = torch.finfo(torch.float32).eps
"""Least factor of a line in int8 that torchao chooses."""


class QuantiseError(PararnnError, ValueError):
    """A model's weights cannot be stored in 8 bits."""


class Weight(NamedTuple):
    """A matrix (N, K), and the factors (N, 1) of its lines if its numbers have 8 bits."""

    numbers: Tensor
    scale: Tensor | None = None


def quantise_weights(model: nn.Module, weights: str) -> None:
    """Store the matrices of a model's linear layers in 8 bits, in place, with a factor a line.

    For decoding: what is computed keeps its dtype. Embeddings and a head that shares its weight
    with one, the projections into gates, and all vectors stay as they are. `torch.save`
    stores quantised models; `pickle` those in int8 alone, as it has no way to store numbers in
    fp8. Their `repr` is that of the model before.

    Args:
        model: a `LanguageModel` or a `ParaRNNForCausalLM`, on its device.
        weights: "int8", or "fp8" (e4m3).

    Raises QuantiseError for other names, for a model without such layers or whose layers are
    already quantised, in float64 or not finite; MissingExtra without torchao.
    """
    if weights not in CONFIGS:
        raise QuantiseError(f"weights must be one of {', '.join(CONFIGS)}, got {weights!r}")
    linears = {name: x for name, x in model.named_modules() if isinstance(x, nn.Linear)}
    if any(type(layer.weight) not in PLAIN_TYPES for layer in linears.values()):
        raise QuantiseError(
            "the model's weights are not plain tensors: quantise a model once, before it is "
            "sharded or adapted"
        )
    shared = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    chosen = {name: x for name, x in linears.items() if id(x.weight) not in shared}
    if not chosen:
        raise QuantiseError("the model has no linear layers: give a language model")
    for name, layer in chosen.items():
        _check_values(name, layer.weight)
    torchao = require("torchao.quantization")
    config = getattr(torchao, CONFIGS[weights])(set_inductor_config=False)
    ids = set(map(id, chosen.values()))
    condition: Callable[..., bool] = lambda layer, name: id(layer) in ids  # noqa: E731
    small_lines = {name: _small_lines(x.weight) for name, x in chosen.items()}
    torchao.quantize_(model, config, filter_fn=condition)
    if not all(is_readable(layer.weight) for layer in linears.values()):
        raise QuantiseError(
            "this version of torchao stores other numbers than the kernels read: install 0.18 or a "
            "newer one"
        )
    for name, layer in chosen.items():
        _clear_lines_of_zeros(layer.weight)
        if weights == "int8":
            _write_lines(layer.weight, *small_lines[name])
        layer.__dict__.pop("extra_repr", None)  # torchao's, which cannot be pickled


def _check_values(name: str, weight: Tensor) -> None:
    """Raise QuantiseError for a weight that 8 bits and a factor a line cannot hold."""
    if weight.dtype == torch.float64:
        raise QuantiseError(
            f"{name}.weight is float64, and weights in 8 bits have factors in float32: convert the "
            "model by float() first"
        )
    if not weight.isfinite().all():
        raise QuantiseError(
            f"{name}.weight has numbers that are not finite, which would make whole lines NaN"
        )


def _small_lines(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of the lines whose factor in int8 torchao bounds, and those lines.

    Of float16 none: its own steps at this size are as large.
    """
    largest = weight.detach().abs().amax(1).float()
    bounded = (largest > 0) & (largest < LEVELS * LEAST_FACTOR) & (weight.dtype != torch.float16)
    numbers = bounded.nonzero().flatten()
    return numbers, weight.detach()[numbers]


def _write_lines(weight: Tensor, numbers: Tensor, lines: Tensor) -> None:
    """Write lines of a weight in int8, by factors of their own."""
    stored, scale = matrix_of(weight)
    assert scale is not None
    least = torch.finfo(scale.dtype).tiny
    factors = (lines.float().abs().amax(1, keepdim=True) / LEVELS).clamp_min(least)
    stored[numbers] = (lines.float() / factors).round().to(stored.dtype)
    scale[numbers] = factors


def _clear_lines_of_zeros(weight: Tensor) -> None:
    """Write zeros where a line's factor is 0: torchao divides by it in fp8, which gives NaN."""
    numbers, scale = matrix_of(weight)
    assert scale is not None
    numbers.view(torch.uint8).masked_fill_(scale == 0, 0)


def matrix_of(weight: Tensor) -> Weight:
    """Return a layer's matrix as it is stored, see `is_readable`."""
    if type(weight) in PLAIN_TYPES:
        return Weight(weight)
    tensor = cast(Any, weight)
    return Weight(tensor.qdata, tensor.scale)


def is_quantised(weight: Tensor) -> bool:
    """Return whether a weight is torchao's."""
    return type(weight).__module__.startswith("torchao.")


def is_readable(weight: Tensor) -> bool:
    """Return whether a weight is a plain tensor or was quantised by `quantise_weights`."""
    if type(weight) in PLAIN_TYPES:
        return True
    numbers, scale = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    zero = getattr(weight, "zero_point", None)
    return (
        is_quantised(weight)
        and getattr(weight, "act_quant_kwargs", None) is None
        and numbers is not None
        and numbers.dtype in DTYPES.values()
        and numbers.shape == weight.shape
        and numbers.is_contiguous()
        and scale is not None
        and scale.shape == (len(numbers), 1)
        and scale.dtype == torch.float32
        and (zero is None or not zero.any())
    )
