"""Cells and mixers that benchmarks compare and that the package does not have.

Cells that remember from the start: a forget gate without a bias is near 0.5 at first, and what it
forgets in two steps has no gradient to tell that it is worth keeping. Biases are drawn around 3, so
that heads begin with memories of some 2 to 500 steps, as the papers of these cells draw their
decays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pararnn import RecurrentLayer
from pararnn.base.parameters import Draw
from pararnn.base.private import OpOverload
from pararnn.cells import Cell, Param
from pararnn.lm.cache import LayerCache
from pararnn.lm.config import LMConfig
from pararnn.lm.conv import CausalConv
from pararnn.lm.invariant import layers_of
from pararnn.lm.mixers import (
    Attention,
    MatrixMixer,
    Mixer,
    RNNMixer,
    input_draw,
    join_states,
    output_draw,
    widen_channels,
)
from pararnn.lm.rows import Rows
from pararnn.zoo import (
    GatedDeltaCell,
    GatedDeltaProductCell,
    GRUCell,
    HeadLSTMCell,
    KDACell,
    M2RNNCell,
    Mamba2Cell,
    MLSTMCell,
    RWKV7Cell,
)

Own = tuple[str, LMConfig]
"""A block's mixer, its name in `pararnn.lm.MIXERS` or import path, and config."""
LONG = Param("H", mean=3.0, std=1.5, recurrent=False)
"""A bias of a head's forget gate: 0.95 in the middle. It is a number of a head, also of cells with
a decay for each key: optimizers let matrices decay."""


class ElementwiseMatrixCell(Cell):
    """M2RNN with a weight for each value in place of its matrix: H' = f H + (1 - f) tanh(w H + k
    v^T), y = H'^T q. What it learns less than M2RNN is what the matrix is good for.
    """

    states = {"H": ("K", "V")}
    gates = {"k": "K", "q": "K", "v": "V", "f": ""}
    params = {"w": Param("H,V"), "b": LONG}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        values = gate.k[..., :, None] * gate.v[..., None, :]
        new = torch.tanh(state.H * param.w[..., None, :] + values)
        f = torch.sigmoid(gate.f + param.b)[..., None, None]
        return f * state.H + (1 - f) * new

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        return (gate.q[..., None, :] @ state.H).squeeze(-2)


class LongM2RNN(M2RNNCell):
    """M2RNN whose heads begin with memories of different lengths."""

    params = {**M2RNNCell.params, "b": LONG}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        return super().step(state, gate._replace(f=gate.f + param.b), param)


class LongGatedDelta(GatedDeltaCell):
    """As `LongM2RNN`, of the gated delta rule, whose gate is a."""

    params = {"b": LONG}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        return super().step(state, gate._replace(a=gate.a + param.b), param)


class SkipGatedDelta(LongGatedDelta):
    """The gated delta rule with what Mamba2 has beside its states: each head adds its value, times
    a weight that begins at 1, to what it reads."""

    params = {**LongGatedDelta.params, "d": Param("H", mean=1.0, recurrent=False)}

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        return super().readout(state, gate, param) + param.d[..., None] * gate.v


class LongGatedDeltaProduct(GatedDeltaProductCell):
    """As `LongGatedDelta`, with two updates a token."""

    params = {"c": LONG}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        return super().step(state, gate._replace(a=gate.a + param.c), param)


class LongKDA(KDACell):
    """As `LongGatedDelta`, with a decay for each key."""

    params = {"c": LONG}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        return super().step(state, gate._replace(a=gate.a + param.c[..., None]), param)


class LongRWKV7(RWKV7Cell):
    """RWKV-7 whose decays begin near 1."""

    params = {"b": LONG}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        return super().step(state, gate._replace(w=gate.w - param.b[..., None]), param)


class LongMLSTM(MLSTMCell):
    """mLSTM whose forget gates begin near 1."""

    params = {"b": LONG}

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor, Tensor]:
        return super().step(state, gate._replace(f=gate.f + param.b), param)


class LongMamba2(Mamba2Cell):
    """Mamba-2 with small steps at first, as its authors draw them: around 0.01."""

    params = {**Mamba2Cell.params, "b": Param("H", mean=-4.5, std=1.2, recurrent=False)}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        return super().step(state, gate._replace(dt=gate.dt + param.b), param)


class LongHeadLSTM(HeadLSTMCell):
    """An LSTM whose channels begin with memories of different lengths."""

    params = {**HeadLSTMCell.params, "b": Param("D", mean=3.0, std=1.5, recurrent=False)}

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        return super().step(state, gate._replace(f=gate.f + param.b), param)


class LongGRU(GRUCell):
    """A GRU whose channels begin with memories of different lengths."""

    params = {**GRUCell.params, "b": Param("D", mean=3.0, std=1.5, recurrent=False)}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        return super().step(state, gate._replace(z=gate.z - param.b), param)


class BesideMixer(Mixer):
    """An elementwise cell beside a matrix state in one layer: both read the tokens, and their
    results are added. cell: its name."""

    cell = "gru"
    scales_residual = True
    marks = False

    def __init__(self, config: LMConfig, **factory: Any) -> None:
        super().__init__()
        elementwise = replace(config, cell=self.cell, cell_config={}, num_heads=4, solver="auto")
        self.matrix = MatrixMixer(config, **factory)
        self.elementwise = RNNMixer(replace(elementwise, backend="auto"), **factory)
        self.steady = self.matrix.steady and self.elementwise.steady

    @property
    def kept(self) -> tuple[OpOverload, ...]:  # type: ignore[override]
        return tuple(dict.fromkeys((*self.matrix.kept, *self.elementwise.kept)))

    def forward(self, x: Tensor, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        if cache is None:
            return self.matrix(x, rows) + self.elementwise(x, rows)
        mixers = (self.matrix, self.elementwise)
        memories = [LayerCache(*memory) for memory in divided(cache, mixers)]
        results = [mixer(x, rows, memory) for mixer, memory in zip(mixers, memories, strict=True)]
        inputs, states = zip(*(memory.read() for memory in memories), strict=True)
        cache.keep(torch.cat(inputs, 1), torch.cat([s.flatten(1) for s in states], 1).unsqueeze(1))
        return results[0] + results[1]

    def draws(self, layer: int) -> dict[str, Draw]:
        parts = {"matrix": self.matrix, "elementwise": self.elementwise}
        return {f"{n}.{k}": d for n, part in parts.items() for k, d in part.draws(layer).items()}


class BesideLSTMMixer(BesideMixer):
    """As `BesideMixer`, with an LSTM."""

    cell = "lstm"


class BesideMinGRUMixer(BesideMixer):
    """As `BesideMixer`, with a cell that is linear in its state: what the other two gain over it,
    they gain as their steps are not."""

    cell = "min-gru"


class DrivenMixer(MatrixMixer):
    """A matrix cell whose gates that are numbers come from a GRU over the tokens."""

    marks = False

    def __init__(self, config: LMConfig, **factory: Any) -> None:
        super().__init__(config, **factory)
        width = config.hidden_size
        self.driver = RecurrentLayer(GRUCell, width, width, num_heads=4, **factory)
        if factory.get("dtype") == torch.bfloat16:
            widen_channels(self.driver)

    def forward(self, x: Tensor, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        whole_rows(cache)
        return super().forward(x, rows)

    def layer_inputs(self, u: Tensor, x: Tensor) -> Tensor:
        return super().layer_inputs(u, self.driver(x)[0])

    def draws(self, layer: int) -> dict[str, Draw]:
        layer_parts: Mapping[str, Any] = {"proj.": self.driver.proj, "cell.": self.driver.cell}
        parts = {"": self.driver, **layer_parts}
        own = {f"driver.{n}{k}": d for n, part in parts.items() for k, d in part.draws().items()}
        return super().draws(layer) | own


class ConvMixer(Mixer):
    """The paper's recurrent block without its cell: what a hybrid of recurrences and attention
    gains over this in its place, it gains by states."""

    scales_residual = True
    marks = False

    def __init__(self, config: LMConfig, **factory: Any) -> None:
        super().__init__()
        width, layers = config.hidden_size, layers_of(config)
        self.in_proj = layers.linear(width, width, bias=False, **factory)
        self.gate_proj = layers.linear(width, width, bias=False, **factory)
        self.conv = CausalConv(width, config.conv_kernel_size, layers, **factory)
        self.norm = layers.rms_norm(width, eps=config.norm_eps, **factory)
        self.out_proj = layers.linear(width, width, bias=False, **factory)
        self.gated_norm = layers.gated_norm

    def forward(self, x: Tensor, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        whole_rows(cache)
        u, _ = self.conv(self.in_proj(x), rows)
        return self.out_proj(self.gated_norm(self.norm, u, self.gate_proj(x)))

    def draws(self, layer: int) -> dict[str, Draw]:
        width = self.out_proj.in_features
        inputs = {f"{name}_proj.weight": input_draw(width) for name in ("in", "gate")}
        outputs = {"out_proj.weight": output_draw(width, layer)}
        conv = {f"conv.{name}": draw for name, draw in self.conv.draws().items()}
        return inputs | conv | {"norm.weight": Draw("constant", mean=1)} | outputs


class ConvAttention(Attention):
    """Attention over tokens to which a causal convolution of theirs is added, as recurrent blocks
    have one: what a hybrid gains over this, it does not gain by that."""

    marks = False

    def __init__(self, config: LMConfig, **factory: Any) -> None:
        super().__init__(config, **factory)
        width, taps = config.hidden_size, config.conv_kernel_size
        self.conv = CausalConv(width, taps, layers_of(config), **factory)

    def forward(self, x: Tensor, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        whole_rows(cache)
        return super().forward(x + self.conv(x, rows)[0], rows)

    def draws(self, layer: int) -> dict[str, Draw]:
        conv = {f"conv.{name}": draw for name, draw in self.conv.draws().items()}
        return super().draws(layer) | conv


def divided(cache: LayerCache, mixers: Sequence[RNNMixer]) -> Sequence[Sequence[Tensor | None]]:
    """Return the memories of several mixers, which a cache holds one behind the other: the inputs
    of their convolutions, and their states as `join_states` makes them."""
    inputs, states = cache.read()
    if inputs is None or states is None:
        return [(None, None)] * len(mixers)
    shapes = [
        join_states(tuple(torch.empty(1, *s, device="meta") for s in m.state_sizes)).shape
        for m in mixers
    ]
    flat = states.flatten(1).split([shape.numel() for shape in shapes], 1)
    joint = [some.unflatten(1, shape[1:]) for some, shape in zip(flat, shapes, strict=True)]
    channels = [mixer.in_proj.out_features for mixer in mixers]
    return list(zip(inputs.split(channels, 1), joint, strict=True))


def whole_rows(cache: LayerCache | None) -> None:
    """Raise ValueError for a cache: these mixers are compared in training alone."""
    if cache is not None:
        raise ValueError("this mixer reads whole rows only: give no cache")
