"""The backbone: blocks of norm, mixer, residual and norm, SwiGLU, residual; and a final norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pararnn.base.parameters import Draw
from pararnn.lm.cache import CarriedCache, LayerCache
from pararnn.lm.config import LMConfig
from pararnn.lm.invariant import PLAIN, Layers, layers_of
from pararnn.lm.mixers import (
    MixerError,
    input_draw,
    make_mixer,
    make_norm,
    output_draw,
    rotary_tables,
    without_plans,
)
from pararnn.lm.recompute import save_only
from pararnn.lm.rows import Rows
from pararnn.messages.group import OnRanks, remember


class SwiGLU(nn.Module):
    """V (silu(W x) * U x), no biases."""

    def __init__(self, width: int, hidden: int, layers: Layers = PLAIN, **factory: Any) -> None:
        super().__init__()
        self.gate_proj = layers.linear(width, hidden, bias=False, **factory)
        self.up_proj = layers.linear(width, hidden, bias=False, **factory)
        self.down_proj = layers.linear(hidden, width, bias=False, **factory)
        self.gated = layers.gated

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gated(self.gate_proj(x), self.up_proj(x)))


class Block(nn.Module):
    """s x + mixer(norm(x)), then x + SwiGLU(norm(x)), on (B, T, d).

    s are learnable factors, one a channel, 1 at first, for mixers with `scales_residual` (paper,
    Appendix C: "a residual connection with a learnable scaling of the input").
    """

    def __init__(self, name: str, config: LMConfig, **factory: Any) -> None:
        super().__init__()
        width = config.hidden_size
        self.mixer_norm = make_norm(config, **factory)
        self.mixer = make_mixer(name, config, **factory)
        scale = nn.Parameter(torch.empty(width, **factory)) if self.mixer.scales_residual else None
        self.residual_scale = scale
        self.mlp_norm = make_norm(config, **factory)
        layers = layers_of(config)
        self.mlp = SwiGLU(width, cast(int, config.intermediate_size), layers, **factory)
        self.scaled_sum = layers.scaled_sum
        if config.batch_invariant and not self.mixer.batch_invariant:
            raise MixerError(
                f"batch_invariant=True is for mixers whose bits do not depend on the batch, got "
                f"{name!r}: take 'rnn', 'matrix' or 'attention', or say batch_invariant = True in "
                "your own"
            )

    def forward(self, x: Tensor, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        """Compute the block; `rows` and `cache` as in `Mixer.forward`."""
        x = self.mix(x, rows, cache)
        return x + self.mlp(self.mlp_norm(x))

    def mix(self, x: Tensor, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        """Compute s x + mixer(norm(x))."""
        if self.mixer.kept and cache is None:
            out = save_only(self.mixer.kept, self._mix, x, rows)
        elif self.mixer.kept and isinstance(cache, CarriedCache):
            out, *new_memory = save_only(self.mixer.kept, self._mix_carried, x, rows, *cache.read())
            cache.after = tuple(new_memory)
        else:
            out = self._mix(x, rows, cache)
        scale = self.residual_scale
        return out + x if scale is None else self.scaled_sum(out, x, scale)

    def _mix(self, x: Tensor, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        return self.mixer(self.mixer_norm(x), rows, cache)

    def _mix_carried(self, x: Tensor, rows: Rows, *memory: Tensor | None) -> tuple[Any, ...]:
        """Mix without a side effect, which recomputed code may not have."""
        cache = CarriedCache(*memory)
        return self._mix(x, rows, cache), *cache.after

    def draws(self, layer: int) -> Iterator[tuple[nn.Module, str, Draw]]:
        """Yield for each parameter its module, its name there, and its initial draw."""
        ones = Draw("constant", mean=1)
        yield self.mixer_norm, "weight", ones
        yield self.mlp_norm, "weight", ones
        if self.residual_scale is not None:
            yield self, "residual_scale", ones
        for linear in (self.mlp.gate_proj, self.mlp.up_proj):
            yield linear, "weight", input_draw(linear.in_features)
        down = self.mlp.down_proj
        yield down, "weight", output_draw(down.in_features, layer)
        for path, draw in self.mixer.draws(layer).items():
            owner, _, name = path.rpartition(".")
            yield self.mixer.get_submodule(owner), name, draw


class Backbone(OnRanks, nn.Module):
    """A language model without its embedding and its head: (B, T, d) to (B, T, d).

    gradient_checkpointing: whether every `checkpoint_every`-th block stores only its input in
    training.
    """

    def __init__(self, config: LMConfig, **factory: Any) -> None:
        super().__init__()
        self.config = config
        mixers = cast(tuple[str, ...], config.mixers)
        self.layers = nn.ModuleList(Block(name, config, **factory) for name in mixers)
        self.norm = make_norm(config, **factory)
        self.gradient_checkpointing = False
        self.checkpoint_every = 1
        self._gradient_checkpointing_func: Callable[..., Any] = partial(
            checkpoint, use_reentrant=False
        )

    @property
    def blocks(self) -> list[Block]:
        """Blocks, typed."""
        return cast(list[Block], list(self.layers))

    @property
    def needs_positions(self) -> bool:
        """True if a mixer reads positions and masks."""
        return any(block.mixer.needs_positions for block in self.blocks)

    def forward(
        self,
        x: Tensor,
        rows: Rows,
        cache: Sequence[LayerCache] | None = None,
        observe: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Compute (B, T, d) of embedded tokens x (B, T, d).

        rows: see `rows_of`. cache: one a block. observe: called with the residual stream before
        each block.
        """
        rows = self.with_rotary(rows, x.dtype)
        eager = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
        with without_plans() if eager and self._keys_grow(cache) else nullcontext():
            for index, block in enumerate(self.blocks):
                if observe is not None:
                    observe(x)
                memory = None if cache is None else cache[index]
                repeatable = memory is None or isinstance(memory, CarriedCache)
                chosen = self.gradient_checkpointing and index % self.checkpoint_every == 0
                if chosen and self.training and repeatable:
                    call = remember(block.__call__) if self.group else block.__call__
                    x = self._gradient_checkpointing_func(call, x, rows, memory)
                else:
                    x = block(x, rows, memory)
        return self.norm(x)

    def with_rotary(self, rows: Rows, dtype: torch.dtype) -> Rows:
        """Return rows with the rotary tables that attention reads, in a dtype."""
        if rows.rotary is not None or not self.needs_positions:
            return rows
        size = self.config.hidden_size // self.config.num_attention_heads
        cos, sin = rotary_tables(rows.positions, size, self.config.rope_theta)
        return rows._replace(rotary=(cos.to(dtype), sin.to(dtype)))

    def _keys_grow(self, cache: Sequence[LayerCache] | None) -> bool:
        """Return whether attention has keys of another length at every call."""
        return cache is not None and any(
            block.mixer.needs_positions and cache[index].grows
            for index, block in enumerate(self.blocks)
        )

    def draws(self) -> Iterator[tuple[nn.Module, str, Draw]]:
        """Yield modules, names and initial draws, as `Block.draws`."""
        for layer, block in enumerate(self.blocks):
            yield from block.draws(layer)
        yield self.norm, "weight", Draw("constant", mean=1)
