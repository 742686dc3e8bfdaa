"""A decoding step of one row of recurrent models in five kernels a layer, in place of a dozen.

`pararnn.lm.replay` records it in place of the model's call. Weights are read once, as they are;
what PyTorch rounds between two kernels stays in float32 here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from pararnn.cells.base import unwrap
from pararnn.device import Gpu, type_of
from pararnn.errors import EngineError
from pararnn.lm.backbone import Block
from pararnn.lm.cache import LayerCache, LMCache
from pararnn.lm.conv_op import DTYPES, HAS_TRITON, MOST_TAPS
from pararnn.lm.mixers import RNNMixer
from pararnn.lm.model import LanguageModel
from pararnn.program.program import ELEMENTWISE, Program, program_of

PROGRAMS = 256
"""Least number of programs of a product, about two a multiprocessor."""
TILE = 8192
"""Numbers of a matrix that a program fetches at once."""
DEPTH = 256
"""Inputs that a program of a recurrent step reads at once."""
LAUNCH: dict[str, Any] = {"num_warps": 4, "num_stages": 1, "PDL": True, "launch_pdl": True}
"""Options of kernels, which start before those that they wait for end."""


def takes(model: LanguageModel, rows: int) -> bool:
    """Return whether `fused_logits` computes a step of this model with so many rows.

    There must be one row, and every mixer must be the paper's recurrent block, with an elementwise
    cell without a readout, on a GPU of compute capability 9 or more with Triton, in float32 or a
    16-bit dtype.
    """
    head = model.lm_head.weight
    record = type_of(head.device)
    return (
        rows == 1
        and isinstance(record, Gpu)
        and HAS_TRITON
        and record.capability(head.device) >= (9, 0)
        and model.config.norm == "rms"
        and head.dtype in DTYPES
        and all(_takes_block(block, head.dtype) for block in model.backbone.blocks)
    )


def _takes_block(block: Block, dtype: torch.dtype) -> bool:
    mixer = block.mixer
    if type(mixer) is not RNNMixer or mixer.rnn.reverse or mixer.context:
        return False
    linears = [mixer.in_proj, mixer.gate_proj, mixer.out_proj]
    linears += [block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj]
    if any(type(each) is not nn.Linear or each.weight.dtype != dtype for each in linears):
        return False
    if mixer.conv is not None and len(mixer.conv.weight) > MOST_TAPS:
        return False
    return has_kernel(program_of(mixer.rnn.cell))


@lru_cache(maxsize=64)
def has_kernel(program: Program) -> bool:
    """Return whether a cell's step has a kernel."""
    if program.family != ELEMENTWISE or program.structure is None or program.step.has_readout:
        return False
    from pararnn.lm.step_cell import step_lines

    try:
        step_lines(program)
    except EngineError:
        return False
    return True


def fused_logits(model: LanguageModel, token: Tensor, cache: LMCache) -> Tensor:
    """Compute logits (1, V) of the token after tokens (1,), and write into the cache's tensors.

    The cache's layers hold what an earlier call left: their memory stays where it is.
    """
    record = type_of(token.device)
    assert isinstance(record, Gpu)
    cache.length += 1
    return record.call(token.device, _logits, model, token, cache)


def _logits(model: LanguageModel, token: Tensor, cache: LMCache) -> Tensor:
    eps = model.config.norm_eps
    x = model.embed_tokens(token)
    for block, memory in zip(model.backbone.blocks, cache.layers, strict=True):
        _block(block, x, memory, eps)
    norm = cast(nn.RMSNorm, model.backbone.norm)
    logits = x.new_empty(1, model.lm_head.out_features)
    _product("one", x, [model.lm_head.weight], [logits], eps, gain=norm.weight)
    return logits


def _block(block: Block, x: Tensor, memory: LayerCache, eps: float) -> None:
    """Run a block on x (1, d), in place."""
    mixer, mlp = cast(RNNMixer, block.mixer), block.mlp
    gain = cast(nn.RMSNorm, block.mixer_norm).weight
    u, z, y = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    weights = [mixer.in_proj.weight, mixer.gate_proj.weight]
    _product("pair", x, weights, [u, z], eps, gain=gain)
    inputs, states = memory.read()
    _recurrence(mixer, u, z, inputs, cast(Tensor, states), y)
    options: dict[str, Any] = {"residual": x, "factor": block.residual_scale}
    if mixer.conv is not None:
        options |= {"u": u, "inputs": inputs}
    _product("add", y, [mixer.out_proj.weight], [x], eps, gain=mixer.norm.weight, **options)
    hidden = x.new_empty(1, mlp.gate_proj.out_features)
    weights = [mlp.gate_proj.weight, mlp.up_proj.weight]
    gain = cast(nn.RMSNorm, block.mlp_norm).weight
    _product("swiglu", x, weights, [hidden], eps, gain=gain)
    _product("add", hidden, [mlp.down_proj.weight], [x], eps, residual=x)


def _power(least: int) -> int:
    """Return the least power of two that is no smaller."""
    return 1 << max(least - 1, 0).bit_length()


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return a tensor, or another one that the kernel does not read."""
    return other if tensor is None else tensor


def _strides(inputs: Tensor | None) -> tuple[int, ...]:
    """Return the strides of a convolution's inputs (1, d, K - 1) by channels and steps."""
    return (0, 0) if inputs is None else inputs.stride()[1:]


def _product(
    kind: str,
    x: Tensor,
    weights: list[Tensor],
    outs: list[Tensor],
    eps: float,
    gain: Tensor | None = None,
    residual: Tensor | None = None,
    factor: Tensor | None = None,
    u: Tensor | None = None,
    inputs: Tensor | None = None,
) -> None:
    """Launch `step_kernels.product`, which says what the kinds are."""
    from pararnn.lm import step_kernels

    lines, length = weights[0].shape
    block = 1 << max(0, min(16, lines // PROGRAMS).bit_length() - 1)
    depth = min(_power(length), TILE // block // (2 if kind == "swiglu" else 1))
    tensors = [_or(each, x) for each in (residual, factor, u, inputs)]
    step_kernels.product[(-(-lines // block) * (2 if kind == "pair" else 1),)](
        *(x, _or(gain, x), weights[0], weights[-1], outs[0], outs[-1], *tensors),
        *(length, lines, *_strides(inputs), eps),
        BLOCK=block,
        DEPTH=depth,
        NORM=gain is not None,
        KIND=kind,
        FACTOR=factor is not None,
        TAPS=1 if inputs is None else inputs.shape[2] + 1,
        **LAUNCH,
    )


def _recurrence(
    mixer: RNNMixer, u: Tensor, z: Tensor, inputs: Tensor | None, states: Tensor, y: Tensor
) -> None:
    """Launch the cell's kernel: convolution, gates, step, and the output times its gate."""
    from pararnn.lm.step_cell import kernel_of

    cell, layer, conv = unwrap(mixer.rnn.cell), mixer.rnn, mixer.conv
    program = program_of(cell)
    channels, size = u.shape[1], u.shape[1] // layer.num_heads
    block = min(_power(size), max(1, min(16, _power(channels // PROGRAMS))))
    of_conv = (u, u) if conv is None else (conv.weight, conv.bias)
    params = [getattr(cell, name) for name in program.params]
    kernel_of(program)[(layer.num_heads * -(-size // block),)](
        *(u, z, _or(inputs, u), *of_conv, layer.proj.weight, _or(layer.bias, u), states, y),
        *(*params, channels, size, size, *_strides(inputs)),
        BLOCK=block,
        DEPTH=min(_power(size), DEPTH),
        TAPS=1 if conv is None else len(conv.weight),
        BIAS=layer.bias is not None,
        **LAUNCH,
    )
