"""Sizes and parts of a language model, as one frozen record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from pararnn.engines.request import loop_of


class Range(NamedTuple):
    """Accepted values of a config's field, in words and as a condition."""

    wanted: str
    holds: Callable[[Any], bool]


POSITIVE = Range("positive", lambda x: x is None or x > 0)
NOT_NEGATIVE = Range("0 or positive", lambda x: x is None or x >= 0)
COUNT = Range("a positive integer", lambda x: isinstance(x, int) and x > 0)


def at_least(least: float) -> Range:
    """Return the range from a least value on."""
    return Range(f"at least {least}", lambda x: x >= least)


def interval(least: float, most: float) -> Range:
    """Return the range from a least to a most value."""
    return Range(f"from {least} to {most}", lambda x: least <= x <= most)


def one_of(*values: str) -> Range:
    """Return the range of some words."""
    return Range(f"one of {', '.join(values)}", lambda x: x in values)


SIZES = ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size")
HEADS = ("num_heads", "conv_kernel_size", "num_attention_heads")
RANGES = {
    **dict.fromkeys((*SIZES, *HEADS), COUNT),
    **dict.fromkeys(("norm_eps", "projection_gain", "recurrent_std"), NOT_NEGATIVE),
    **dict.fromkeys(("rope_theta", "recurrent_clip"), POSITIVE),
    "norm": one_of("rms", "layer"),
}
"""Ranges of the fields of an `LMConfig`."""


def check_ranges(record: Any, ranges: Mapping[str, Range]) -> None:
    """Check the fields of a record. Raises ValueError for the first that is out of its range."""
    for name, (wanted, holds) in ranges.items():
        value = getattr(record, name)
        if not holds(value):
            raise ValueError(f"{name} must be {wanted}, got {value!r}")


LAYER_TYPES = {"linear_attention": "rnn", "full_attention": "attention"}
"""transformers' words for a layer's cache, and our mixers of that type."""


@dataclass(frozen=True)
class LMConfig:
    """Sizes and parts of a language model; names are those of Hugging Face's configs.

    vocab_size: tokens. hidden_size: channels d of the residual stream and of every mixer.
    intermediate_size: channels h of the SwiGLU; None is 256 ceil(8d/3/256). num_hidden_layers:
    blocks. mixers: every block's mixer, a name in `MIXERS` or the import path of a `Mixer`,
    "package.module:Class"; None is "rnn" throughout.
    tie_word_embeddings: whether the head is the embedding. norm: of blocks, "rms" or "layer" (a
    LayerNorm with gain only, DCLM's). norm_eps: of all norms.

    Recurrent mixers: cell (a name in `pararnn.CELLS` or `pararnn.zoo.MATRIX_CELLS`, or an import
    path, "package.module:Class"), cell_config (its config), num_heads (of its input projection, and
    of a cell with heads), conv_kernel_size (taps of the causal convolution; 1 for none), solver and
    backend (as in `pararnn.solve`), recurrent_clip and recompute_gates (as in
    `pararnn.RecurrentLayer`).

    Attention: num_attention_heads, rope_theta (base of the rotary frequencies), qk_norm.

    batch_invariant: a token's log-probabilities have the same bits on one device and dtype,
    whatever is computed beside it: see "Log-probabilities to the bit" in the docs. For recurrent
    mixers, by the kernels of the loop: solver and backend stay "auto".

    Initialisation: projection_gain and recurrent_std of cells (as in `pararnn.RecurrentLayer`);
    other parameters start as DCLM's, see `pararnn.lm.model.draws`.

    Raises ValueError for impossible values. Names of mixers and cells are looked up when the model
    is made.
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int = 50_432
    intermediate_size: int | None = None
    mixers: tuple[str, ...] | None = None
    tie_word_embeddings: bool = False
    norm: str = "rms"
    norm_eps: float = 1e-5
    cell: str = "gru"
    cell_config: Mapping[str, Any] = field(default_factory=dict)
    num_heads: int = 1
    conv_kernel_size: int = 4
    solver: str = "auto"
    backend: str = "auto"
    recurrent_clip: float | None = 0.5
    recompute_gates: bool = False
    num_attention_heads: int = 8
    rope_theta: float = 10_000.0
    qk_norm: bool = True
    projection_gain: float = 1.0
    recurrent_std: float | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        set_once = object.__setattr__  # the record is frozen for users
        if self.intermediate_size is None:
            set_once(self, "intermediate_size", 256 * -(-8 * self.hidden_size // (3 * 256)))
        if self.mixers is None:
            set_once(self, "mixers", ("rnn",) * self.num_hidden_layers)
        set_once(self, "mixers", tuple(self.mixers or ()))
        check_ranges(self, RANGES)
        if self.batch_invariant:
            loop_of((self.solver, self.backend))
        if len(self.mixers or ()) != self.num_hidden_layers:
            raise ValueError(
                f"mixers must name one mixer for each of the {self.num_hidden_layers} blocks, got "
                f"{len(self.mixers or ())}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self) | {"mixers": list(self.mixers or ())}

    def to_hf(self, layer_types: Sequence[str]) -> dict[str, Any]:
        """Return the fields under transformers' names.

        layer_types: transformers' word for every mixer, see `pararnn.lm.mixers.layer_types`. Where
        they do not tell the mixers, these are there too.
        """
        content = self.to_dict() | {"layer_types": list(layer_types)}
        if content["mixers"] == [LAYER_TYPES[word] for word in layer_types]:
            del content["mixers"]
        return content

    @classmethod
    def of_hf(cls, content: Mapping[str, Any]) -> LMConfig:
        """Build a config of what `to_hf` returned; other keys are transformers' and are ignored."""
        names = [field.name for field in fields(cls) if field.name in content]
        known = {name: content[name] for name in names}
        mixers = known.pop("mixers", None) or [LAYER_TYPES[word] for word in content["layer_types"]]
        return cls(**known, mixers=tuple(mixers))
