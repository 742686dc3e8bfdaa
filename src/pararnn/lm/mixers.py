"""Mixers, the parts of a block that read other tokens, in a table that users can add to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pararnn.base.errors import PararnnError
from pararnn.base.imports import import_class, is_import_path
from pararnn.base.parameters import Draw
from pararnn.base.private import OpOverload, is_differentiated_again
from pararnn.base.tensors import States
from pararnn.cells.base import Cell, head_sizes_of, resolve_config
from pararnn.cells.find import find_cell
from pararnn.cells.matrix import HeadSizes
from pararnn.layers import RecurrentLayer
from pararnn.layers.marks import run_with_marks
from pararnn.lm.cache import LayerCache
from pararnn.lm.config import LAYER_TYPES, LMConfig
from pararnn.lm.conv import CausalConv
from pararnn.lm.invariant import PRODUCTS as ROWS_PRODUCTS
from pararnn.lm.invariant import layers_of
from pararnn.lm.recompute import HALOS, PRODUCTS, PRODUCTS_BY_HEADS, SOLVES
from pararnn.lm.rows import Rows
from pararnn.lm.rows_op import rows_attention
from pararnn.messages.group import OnRanks
from pararnn.program.program import program_of
from pararnn.ranks.attention import attend_on_ranks, keys_of_earlier_ranks
from pararnn.zoo import CELLS, MATRIX_CELLS


class MixerError(PararnnError, ValueError):
    """A name is no mixer's, or a mixer lacks a required attribute or method."""


class Mixer(OnRanks, nn.Module):
    """A mixer: (B, T, d) to (B, T, d), made from the model's config.

    `scales_residual`: whether its block multiplies the residual by learnable factors, one a
    channel. `needs_positions`: whether it reads `Rows.rotary` and `Rows.attend`. `kept`: the
    operations whose results compiled code stores for the backward pass, and no others
    (`pararnn.lm.recompute`); without any the compiler chooses. It is an attribute of the class or a
    property: a module that holds PyTorch's operations cannot be pickled. `steady`: whether a step
    of one token may be recorded and replayed (`pararnn.lm.replay`): its cache keeps its size, and
    nothing on the host depends on computed values. `marks`: whether it gives its memory after the
    steps of `LayerCache.marks` to `keep_marked`; else such passes are read in pieces. `layer_type`:
    transformers' word for its layer's cache, a key of `LAYER_TYPES`: "linear_attention" for one
    that calls `read` and `keep`, "full_attention" for one that calls `extend`. `paged`: whether
    such a mixer calls `attend` in its place where `LayerCache.places` is not None, so that a step
    may be recorded. `batch_invariant`: whether, made from a config with that option, a row's bits
    depend on no other row and on no cut of it in time.
    """

    scales_residual: ClassVar[bool] = False
    needs_positions: ClassVar[bool] = False
    kept: tuple[OpOverload, ...] = ()
    steady: bool = False
    marks: bool = False
    layer_type: ClassVar[str] = "linear_attention"
    paged: ClassVar[bool] = False
    batch_invariant: ClassVar[bool] = False

    def forward(self, x: Tensor, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        """Mix each of the rows' tokens with those before it; `cache` holds earlier ones."""
        raise NotImplementedError(f"{type(self).__name__} must define forward")

    def why_no_context(self) -> str | None:
        """Return the reason why ranks cannot share a sequence.

        None is for mixers that read other tokens only through pararnn's layers.
        """
        return (
            f"{type(self).__name__} reads tokens of its own rank only: take mixers 'rnn', or "
            "define why_no_context to return None if it reads others by pararnn's layers alone"
        )

    def draws(self, layer: int) -> dict[str, Draw]:
        """Return the initial draws of its parameters by name, in a layer, counted from 0."""
        raise NotImplementedError(f"{type(self).__name__} must define draws")


def output_draw(inputs: int, layer: int) -> Draw:
    """Return DCLM's draw for outputs to the residual stream: smaller in deeper layers."""
    return Draw("normal", spread=1 / math.sqrt(2 * inputs * (layer + 1)), cut=3)


def input_draw(inputs: int) -> Draw:
    """Return DCLM's draw for other matrices: 1/sqrt(inputs), cut at three deviations."""
    return Draw("normal", spread=1 / math.sqrt(inputs), cut=3)


def cell_of(config: LMConfig) -> type[Cell]:
    """Return the class of a config's cell. Raises CellError for a name that is none's."""
    return find_cell(config.cell, {**CELLS, **MATRIX_CELLS})


def make_recurrent(
    config: LMConfig,
    layer: type[RecurrentLayer] | None = None,
    input_size: int | None = None,
    **factory: Any,
) -> RecurrentLayer:
    """Build the config's recurrent layer, of a class and for inputs of a size.

    Raises ValueError for what `batch_invariant` does not allow.
    """
    made = (layer or layers_of(config).recurrent)(
        cell_of(config),
        input_size or config.hidden_size,
        config.hidden_size,
        num_heads=config.num_heads,
        solver=config.solver,
        backend=config.backend,
        recurrent_clip=config.recurrent_clip,
        recompute_gates=config.recompute_gates,
        **factory,
        **config.cell_config,
    )
    made.batch_invariant = config.batch_invariant
    cell = made.cell
    reads_out = cell.has_readout and cell.keeps_states  # kernels of matrix cells read out too
    if config.batch_invariant and (config.recompute_gates or reads_out):
        reason = "recompute_gates=True" if config.recompute_gates else "a cell with a readout"
        raise ValueError(
            f"batch_invariant=True takes no layer with {reason}, whose operations PyTorch rounds "
            f"by the size of the batch: got cell={config.cell!r}, leave out one of the two"
        )
    return made


def widen_channels(layer: RecurrentLayer) -> None:
    """Make a layer's parameters per channel float32, as solvers read them (the numerics contract):
    those of its cell, and its bias, which it has."""
    layer.cell.float()
    assert layer.bias is not None
    layer.bias = nn.Parameter(layer.bias.float())


def neutral_fields(layer: RecurrentLayer) -> dict[str, float]:
    """Return 1 for every field of a layer's cell: fields are time gaps and weights."""
    return dict.fromkeys(type(layer.cell).fields, 1.0)


def join_states(states: States) -> Tensor:
    """Return states (B, ...) as one tensor (B, N, ...), of several sizes (B, 1, numbers)."""
    if torch.is_tensor(states):
        return states.unsqueeze(1)  # without a copy
    if all(state.shape == states[0].shape for state in states):
        return torch.stack(states, 1)
    return torch.cat([state.flatten(1) for state in states], 1).unsqueeze(1)


def join_marked(states: tuple[Tensor, ...]) -> Tensor:
    """Return states (B, n, ...) after n steps as `join_states` does, (B, n, N, ...)."""
    lead = states[0].shape[:2]
    return join_states(tuple([state.flatten(0, 1) for state in states])).unflatten(0, lead)


def states_of(joint: Tensor, sizes: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    """Return states of these sizes from the tensor that `join_states` returned."""
    if len({*sizes}) == 1:
        return joint.unbind(1)
    flat_states = joint.squeeze(1).split([math.prod(size) for size in sizes], 1)
    return tuple([flat.view(-1, *size) for flat, size in zip(flat_states, sizes, strict=True)])


class RNNMixer(Mixer):
    """The paper's recurrent block (Appendix C, Figure 9), for any cell.

    u, z = W x; u = silu(conv(u)); h = cell(u), by heads; y = norm(h * silu(z)); the result is V y.
    W is two matrices: the compiled gradient of one result split in two is slower than two products.
    """

    scales_residual = True
    batch_invariant = True

    def __init__(self, config: LMConfig, **factory: Any) -> None:
        super().__init__()
        width, layers = config.hidden_size, layers_of(config)
        channels, taps = self.input_channels(config), config.conv_kernel_size
        self.in_proj = layers.linear(width, channels, bias=False, **factory)
        self.gate_proj = layers.linear(width, width, bias=False, **factory)
        self.conv = CausalConv(channels, taps, layers, **factory) if taps > 1 else None
        self.gated, self.gated_norm = layers.gated, layers.gated_norm
        self.rnn = self.make_layer(config, **factory)
        self.rnn.shares_final = False  # only caches read them, which ranks have not
        self.state_sizes = self.rnn.cell.state_sizes
        self.steady = not program_of(self.rnn.cell).may_branch
        self.marks = type(self).forward is RNNMixer.forward
        self.projection_gain, self.recurrent_std = config.projection_gain, config.recurrent_std
        if factory.get("dtype") in (torch.bfloat16, torch.float16):
            widen_channels(self.rnn)
        self.norm = layers.rms_norm(width, eps=config.norm_eps, **factory)
        self.out_proj = layers.linear(width, width, bias=False, **factory)
        self.fields = neutral_fields(self.rnn)

    def input_channels(self, config: LMConfig) -> int:
        """Return the channels that the convolution reads."""
        return config.hidden_size

    def make_layer(self, config: LMConfig, **factory: Any) -> RecurrentLayer:
        return make_recurrent(config, **factory)

    def layer_inputs(self, u: Tensor, x: Tensor) -> Tensor:
        """Return the recurrent layer's input, from the convolution's result and the tokens."""
        return u

    @property
    def kept(self) -> tuple[OpOverload, ...]:  # type: ignore[override]
        """Operations as in `Mixer`: products, solves and, unless recomputed, gates."""
        gates = () if self.rnn.recompute_gates else PRODUCTS_BY_HEADS
        return (*PRODUCTS, *ROWS_PRODUCTS, *gates, *SOLVES, *HALOS)

    def why_no_context(self) -> str | None:
        """Return None: its layer answers for its cell."""

    def forward(self, x: Tensor, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        u, z = self.in_proj(x), self.gate_proj(x)
        inputs, states = (None, None) if cache is None else cache.read()
        initial = None if states is None else states_of(states, self.state_sizes)
        conv_inputs = u
        u, tail = (self.gated(u, None), None) if self.conv is None else self.conv(u, rows, inputs)
        u = self.layer_inputs(u, x)
        single_token = u.shape[1] == 1 and not self.group
        is_whole = rows.real is None and rows.start is None
        final: States
        if cache is not None and cache.marks is not None and is_whole:
            marks = cache.marks
            h, final, marked = run_with_marks(self.rnn, u, _one(initial), marks, self.fields)
            kept = None if self.conv is None else self.conv.inputs_after(conv_inputs, inputs, marks)
            cache.keep_marked(kept, join_marked(marked))
        elif single_token and is_whole:
            h, final = self.rnn.step(u.squeeze(1), _one(initial), fields=self.fields)
            h = h.unsqueeze(1)
        else:
            h, final = self.rnn(u, _one(initial), fields=self.fields, sequences=rows.sequences())
        if cache is not None:
            cache.keep(tail, join_states(final))
        return self.out_proj(self.gated_norm(self.norm, h, z))

    def draws(self, layer: int) -> dict[str, Draw]:
        width, rnn = self.out_proj.in_features, self.rnn
        draws = {
            "in_proj.weight": input_draw(width),
            "gate_proj.weight": input_draw(width),
            "norm.weight": Draw("constant", mean=1),
            "out_proj.weight": output_draw(width, layer),
        }
        by_prefix = {
            "rnn.": rnn.draws(),
            "rnn.proj.": rnn.proj.draws(self.projection_gain),
            "rnn.cell.": rnn.cell.draws(self.recurrent_std),
            "conv.": {} if self.conv is None else self.conv.draws(),
        }
        for prefix, inner in by_prefix.items():
            draws |= {prefix + name: draw for name, draw in inner.items()}
        return draws


def _one(states: tuple[Tensor, ...] | None) -> Any:
    """Return initial states as `RecurrentLayer` reads them: a single one is no tuple."""
    return states[0] if states is not None and len(states) == 1 else states


class GivenGates(nn.Module):
    """The projection of a layer whose input is its cell's gates, (B, T, H W) to (B, T, 1, H W)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(2)

    def draws(self, gain: float = 1.0) -> dict[str, Draw]:
        """Return no draws: it has no weights."""
        return {}

    def reset_parameters(self, gain: float = 1.0) -> None:
        """Leave everything as it is."""


class MatrixLayer(RecurrentLayer):
    """A matrix cell's layer whose input is the gates, those of a head one after the other."""

    def _make_weights(
        self, cell_class: type[Cell], bias: bool, factory: dict[str, Any], config: dict[str, Any]
    ) -> None:
        size, heads = self.hidden_size, self.num_heads
        self.proj = GivenGates()  # type: ignore[assignment]
        self.cell = cell_class(size, num_heads=heads, **factory, **config)
        self.bias = nn.Parameter(torch.zeros((1, self.input_size), **factory)) if bias else None
        if self.recurrent_std is not None:
            self.cell.reset_parameters(self.recurrent_std)


class MatrixMixer(RNNMixer):
    """A block for cells of matrix states, such as M2RNN: dense projections to their gates.

    For a cell with vectors k, q, v and a number f: k, q, v = silu(conv(W x)); f = W' x;
    h = cell(k, q, v, f), by heads; y = norm(h * silu(z)); the result is V y.
    """

    def __init__(self, config: LMConfig, **factory: Any) -> None:
        super().__init__(config, **factory)
        sizes = matrix_sizes(config)
        numbers = sizes.heads * sizes.gates.count(())
        self.number_proj = (
            layers_of(config).linear(config.hidden_size, numbers, bias=False, **factory)
            if numbers
            else None
        )
        self.sizes = sizes

    def input_channels(self, config: LMConfig) -> int:
        """Return the channels of all gates but numbers."""
        sizes = matrix_sizes(config)
        return sizes.heads * (sizes.width - sizes.gates.count(()))

    def make_layer(self, config: LMConfig, **factory: Any) -> RecurrentLayer:
        """Build the layer, which reads gates. Raises ValueError for `recompute_gates`."""
        if config.recompute_gates:
            raise ValueError(
                "recompute_gates=True is for mixers whose recurrent layer makes its gates, and the "
                "mixer 'matrix' gives them to it: leave it False"
            )
        sizes = matrix_sizes(config)
        width = sizes.heads * sizes.width
        return make_recurrent(config, MatrixLayer, width, **factory)

    def layer_inputs(self, u: Tensor, x: Tensor) -> Tensor:
        """Return the gates of all heads, in the cell's order, (B, T, H W)."""
        sizes = self.sizes
        vectors = u.unflatten(-1, (sizes.heads, -1))
        vector_gates = iter(vectors.split([math.prod(size) for size in sizes.gates if size], -1))
        number_gates: Iterator[Tensor] = iter(())
        if self.number_proj is not None:
            number_gates = iter(self.number_proj(x).unflatten(-1, (sizes.heads, -1)).split(1, -1))
        gates = [next(vector_gates if size else number_gates) for size in sizes.gates]
        return torch.cat(gates, -1).flatten(-2)

    def draws(self, layer: int) -> dict[str, Draw]:
        width = self.out_proj.in_features
        draws = {} if self.number_proj is None else {"number_proj.weight": input_draw(width)}
        return super().draws(layer) | draws


def matrix_sizes(config: LMConfig) -> HeadSizes:
    """Return the sizes of a config's cell. Raises ValueError for one without matrix states."""
    cell = cell_of(config)
    config_values = resolve_config(cell, config.cell_config)
    sizes = head_sizes_of(cell, config_values, (config.hidden_size, config.num_heads))
    if sizes is None:
        raise ValueError(
            "the mixer 'matrix' is for cells whose states are matrices of heads, got cell="
            f"{config.cell!r}: take one of {', '.join(MATRIX_CELLS)} or a class of your own, or "
            "the mixer 'rnn'"
        )
    return sizes


class Attention(Mixer):
    """DCLM's attention: rotary positions, normed queries and keys, no biases."""

    needs_positions = True
    layer_type = "full_attention"
    paged = True
    batch_invariant = True

    def __init__(self, config: LMConfig, **factory: Any) -> None:
        super().__init__()
        width, heads, layers = config.hidden_size, config.num_attention_heads, layers_of(config)
        if width % heads or width // heads % 2:
            raise ValueError(
                f"hidden_size must be an even multiple of num_attention_heads, got {width} and "
                f"{heads}"
            )
        self.heads = heads
        self.by_rows = config.batch_invariant
        self.q_proj = layers.linear(width, width, bias=False, **factory)
        self.k_proj = layers.linear(width, width, bias=False, **factory)
        self.v_proj = layers.linear(width, width, bias=False, **factory)
        self.q_norm = make_norm(config, **factory) if config.qk_norm else nn.Identity()
        self.k_norm = make_norm(config, **factory) if config.qk_norm else nn.Identity()
        self.out_proj = layers.linear(width, width, bias=False, **factory)
        self.rotate = layers.rotate

    def forward(self, x: Tensor, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        assert rows.rotary is not None
        q, k, v = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        q, k = self.rotate(q, *rows.rotary), self.rotate(k, *rows.rotary)
        if cache is not None and cache.places is not None:
            out = cache.attend(q, k, v, rows.positions, self.by_rows)
            return self.out_proj(out.flatten(2))
        if cache is not None:
            k, v = cache.extend(k, v)
        if self.by_rows:
            return self.out_proj(rows_attention(q, k, v, *_seen(rows, q, k)).flatten(2))
        if rows.share is not None and rows.attend is None and rows.weights is None:
            out = attend_on_ranks(q, k, v, rows.share, self.group)
            return self.out_proj(out.transpose(1, 2).flatten(2))
        if rows.share is not None:
            k, v = keys_of_earlier_ranks(k, v, rows.share, self.group)
        causal = False
        if rows.attend is None and q.shape[2] > 1:  # `causal = ...` would be a symbol, compiled
            causal = True
        if rows.weights is None and not is_differentiated_again():  # PyTorch's kernels have one
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=rows.attend, is_causal=causal)
        else:
            weights = attention_weights(q, k, rows.attend, causal)
            if rows.weights is not None:
                rows.weights(weights)
            out = weights @ v
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def why_no_context(self) -> str | None:
        """Return None: every rank gets the keys and values of all."""

    def draws(self, layer: int) -> dict[str, Draw]:
        width = self.out_proj.in_features
        norms = [name for name in ("q_norm", "k_norm") if hasattr(getattr(self, name), "weight")]
        inputs = {f"{name}_proj.weight": input_draw(width) for name in "qkv"}
        ones = {f"{name}.weight": Draw("constant", mean=1) for name in norms}
        return inputs | ones | {"out_proj.weight": output_draw(width, layer)}


def _seen(rows: Rows, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the last key that each query sees, int (B, T).

    Raises MixerError for what may not be computed by rows.
    """
    attend, (steps, keys) = rows.attend, (q.shape[2], k.shape[2])
    if rows.share is not None or rows.weights is not None or (
        attend is not None and attend.dtype != torch.bool
    ):  # fmt: skip
        raise MixerError(
            "with batch_invariant=True attention reads a document's keys up to its own token: give "
            "no mask of numbers, no output_attentions, and no sequences that ranks share"
        )
    if attend is None:
        # Several queries are of the first keys: a static cache has free places behind them.
        end = steps if steps > 1 else keys
        last = torch.arange(end - steps, end, device=q.device).expand(len(q), steps)
        return torch.zeros_like(last), last
    flags = attend[:, 0].to(torch.uint8).expand(len(q), steps, keys)
    return flags.argmax(-1), keys - 1 - flags.flip(-1).argmax(-1)


def attention_weights(q: Tensor, k: Tensor, attend: Tensor | None, causal: bool) -> Tensor:
    """Return the weight of each key for each query, (B, H, T, S): see `Rows.attend`."""
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    if causal:
        attend = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device)
        attend = attend.tril(scores.shape[3] - scores.shape[2])
    if attend is not None and attend.dtype == torch.bool:
        # Not minus infinity: padding may see no key, and its NaN would reach others by 0 * NaN.
        scores = scores.masked_fill(~attend, torch.finfo(scores.dtype).min)
    elif attend is not None:
        scores = scores + attend
    wide = torch.promote_types(q.dtype, torch.float32)
    return scores.softmax(-1, dtype=wide).to(q.dtype)


@contextmanager
def without_plans() -> Iterator[None]:
    """Let PyTorch choose attention's kernels without cuDNN, for keys of ever new lengths.

    For a new length cuDNN plans a kernel first: some 35 ms on an H200, where a token of the paper's
    1B Transformer takes 11. A growing cache's keys have another length at every call. For a fixed
    length cuDNN's kernels are faster, and stay. Nothing changes where the caller allows cuDNN only.
    As with PyTorch's own switches, threads share the choice.
    """
    cuda = torch.backends.cuda
    other_kernels = cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled
    if not cuda.cudnn_sdp_enabled() or not any(is_on() for is_on in other_kernels):
        yield
        return
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(True)


def make_norm(config: LMConfig, **factory: Any) -> nn.Module:
    """Build the config's norm over the channels, without bias."""
    layers = layers_of(config)
    if config.norm == "layer":
        return layers.layer_norm(config.hidden_size, eps=config.norm_eps, bias=False, **factory)
    return layers.rms_norm(config.hidden_size, eps=config.norm_eps, **factory)


def rotary_tables(positions: Tensor, size: int, base: float) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines (B or 1, 1, T, size) in float32 that rotate pairs of channels."""
    powers = torch.arange(0, size, 2, device=positions.device, dtype=torch.float32) / size
    angles = positions.unsqueeze(-1).float() * base**-powers
    angles = torch.cat([angles, angles], -1).unsqueeze(1)
    return angles.cos(), angles.sin()


MIXERS: dict[str, Callable[..., Mixer]] = {
    "rnn": RNNMixer,
    "attention": Attention,
    "matrix": MatrixMixer,
}
"""Mixers by names, for `LMConfig.mixers`; each is called with (config, device=, dtype=)."""
OURS = tuple(MIXERS)
"""Names in `MIXERS` that every process knows."""


def find_mixer(name: str) -> Callable[..., Mixer]:
    """Return the mixer of a name in `MIXERS`, or the class at an import path.

    Raises MixerError where there is none.
    """
    if not is_import_path(name):
        if name not in MIXERS:
            raise MixerError(
                f"there is no mixer {name!r}: name one of {', '.join(MIXERS)}, a class of your own "
                "by its import path, such as 'mypackage.mixers:Mine', or add yours to "
                "pararnn.lm.MIXERS"
            )
        return MIXERS[name]
    mixer: type[Mixer] = import_class(name, "mixer", Mixer, "pararnn.lm.Mixer", MixerError)
    return mixer


def make_mixer(name: str, config: LMConfig, **factory: Any) -> Mixer:
    """Build the mixer of a name or an import path, see `find_mixer`."""
    return find_mixer(name)(config, **factory)


def layer_types(mixers: Sequence[str]) -> list[str]:
    """Return transformers' words for the caches of mixers.

    Raises ValueError for a name in `MIXERS` that other processes would not know, and MixerError for
    what is no mixer.
    """
    words = []
    for name in mixers:
        if name not in OURS and not is_import_path(name):
            raise MixerError(
                f"mixers may hold {', '.join(OURS)} where transformers is to know the model, or "
                f"classes by their import paths, which other processes find too; got {name!r}"
            )
        word = getattr(find_mixer(name), "layer_type", None)
        if word not in LAYER_TYPES:
            raise MixerError(
                f"layer_type of the mixer {name!r} must be one of {', '.join(LAYER_TYPES)}, got "
                f"{word!r}"
            )
        words.append(word)
    return words
