"""A decoding step of recurrent models in five kernels a layer, in place of a dozen.

In `pararnn.lm.replay` it stands for the model's call on a GPU. Weights are read once, as they are;
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

MOST_ROWS = 64
"""Largest number of rows; cuBLAS's products are better with more."""
PROGRAMS = 512
"""Programs of a product of one row, about four a multiprocessor."""
TILE = 4096
"""Numbers of a matrix that a program of one row fetches at once."""
DEPTH = 256
"""Inputs that a program of a recurrent step of one row reads at once."""


def takes(model: LanguageModel, rows: int) -> bool:
    """Return whether `fused_logits` computes a step of this model with so many rows.

    Every mixer must be the paper's recurrent block, with an elementwise cell without a readout, on
    a GPU of compute capability 9 or more with Triton, in float32 or a 16-bit dtype.
    """
    device = model.lm_head.weight.device
    record = type_of(device)
    if not (isinstance(record, Gpu) and HAS_TRITON and rows <= MOST_ROWS):
        return False
    if record.capability(device) < (9, 0) or model.config.norm != "rms":
        return False
    blocks = model.backbone.blocks
    return model.lm_head.weight.dtype in DTYPES and all(
        _takes_block(block, model.lm_head.weight.dtype) for block in blocks
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
    if len({mixer.rnn.cell.hidden_size, mixer.rnn.hidden_size, mixer.rnn.input_size}) != 1:
        return False
    return can_generate(program_of(mixer.rnn.cell))


@lru_cache(maxsize=64)
def can_generate(program: Program) -> bool:
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
    """Compute logits (B, V) of the token after tokens (B,), and write the cache's tensors anew.

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
    logits = x.new_empty(len(x), model.lm_head.out_features)
    _product("one", x, [model.lm_head.weight], [logits], eps, gain=norm.weight)
    return logits


def _block(block: Block, x: Tensor, memory: LayerCache, eps: float) -> None:
    """Run a block on x (B, d), in place."""
    mixer, mlp = cast(RNNMixer, block.mixer), block.mlp
    gain = cast(nn.RMSNorm, block.mixer_norm).weight
    u, z, y = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    weights = [mixer.in_proj.weight, mixer.gate_proj.weight]
    _product("pair", x, weights, [u, z], eps, gain=gain)
    inputs, states = memory.read()
    _recurrence(mixer, u, z, inputs, cast(Tensor, states), y)
    moves = {} if mixer.conv is None else {"u": u, "inputs": inputs}
    options: dict[str, Any] = {"residual": x, "factor": block.residual_scale, **moves}
    _product("add", y, [mixer.out_proj.weight], [x], eps, gain=mixer.norm.weight, **options)
    hidden = x.new_empty(len(x), mlp.gate_proj.out_features)
    weights = [mlp.gate_proj.weight, mlp.up_proj.weight]
    gain = cast(nn.RMSNorm, block.mlp_norm).weight
    _product("swiglu", x, weights, [hidden], eps, gain=gain)
    _product("add", hidden, [mlp.down_proj.weight], [x], eps, residual=x)


def _power(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def _padded(rows: int) -> int:
    """Return the rows of a tile: one, or as many as tensor cores take."""
    return 1 if rows == 1 else max(16, _power(rows))


def _strides(inputs: Tensor | None) -> tuple[int, ...]:
    """Return the strides of a convolution's inputs, which no layout is prescribed for."""
    return (0, 0, 0) if inputs is None else inputs.stride()


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

    (rows, length), lines = x.shape, len(weights[0])
    pad = _padded(rows)
    if pad == 1:
        block = 1 << max(0, min(16, lines // PROGRAMS).bit_length() - 1)
        depth = min(_power(length), TILE // block // (2 if kind == "swiglu" else 1))
    else:
        block, depth = (32 if lines >= 4096 else 16), min(128, max(16, _power(length)))
    count = -(-lines // block) * (2 if kind == "pair" else 1)
    step_kernels.product[(count,)](
        x,
        x if gain is None else gain,
        weights[0],
        weights[-1],
        outs[0],
        outs[-1],
        x if residual is None else residual,
        x if factor is None else factor,
        x if u is None else u,
        x if inputs is None else inputs,
        rows,
        length,
        lines,
        0 if u is None else u.shape[1],
        *_strides(inputs),
        eps,
        ROWS=pad,
        BLOCK=block,
        DEPTH=depth,
        NORM=gain is not None,
        KIND=kind,
        FACTOR=factor is not None,
        TAPS=1 if inputs is None else inputs.shape[2] + 1,
        PDL=PDL,
        num_warps=4,
        num_stages=1 if pad == 1 else 4,
        **({"launch_pdl": True} if PDL else {}),
    )


PDL = True
"""Whether kernels start before those that they wait for end."""


def _recurrence(
    mixer: RNNMixer, u: Tensor, z: Tensor, inputs: Tensor | None, states: Tensor, y: Tensor
) -> None:
    """Launch the cell's kernel: convolution, gates, step, and the output times its gate."""
    from pararnn.lm.step_cell import kernel_of

    cell, layer, conv = unwrap(mixer.rnn.cell), mixer.rnn, mixer.conv
    program = program_of(cell)
    (rows, channels), heads = u.shape, layer.num_heads
    size = channels // heads
    pad = _padded(rows)
    block = 16 if pad > 1 else min(_power(size), max(1, min(16, _power(channels // PROGRAMS))))
    depth = min(_power(size), DEPTH) if pad == 1 else max(16, min(_power(size), 64))
    kernel_of(program)[(heads * -(-size // block),)](
        u,
        z,
        u if inputs is None else inputs,
        u if conv is None else conv.weight,
        u if conv is None else conv.bias,
        layer.proj.weight,
        u if layer.bias is None else layer.bias,
        states,
        y,
        *(getattr(cell, name) for name in program.params),
        rows,
        channels,
        size,
        size,
        *_strides(inputs),
        ROWS=pad,
        BLOCK=block,
        DEPTH=depth,
        TAPS=1 if conv is None else len(conv.weight),
        BIAS=layer.bias is not None,
        HEIGHT=block if pad == 1 else pad,
        WIDTH=depth if pad == 1 else block,
        PDL=PDL,
        num_warps=4,
        num_stages=1 if pad == 1 else 3,
        **({"launch_pdl": True} if PDL else {}),
    )
