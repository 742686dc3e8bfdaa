"""The config of a language model, with Hugging Face's habits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from transformers import PretrainedConfig

from pararnn.cells import CELLS, Cell
from pararnn.cells.find import cell_name
from pararnn.lm.config import LAYER_TYPES, LMConfig


class ParaRNNConfig(PretrainedConfig):
    """What a `ParaRNNModel` is made of.

    Args:
        layer_types: a word of transformers for every layer: "linear_attention" is a recurrent
            mixer, "full_attention" attention. None is "linear_attention" throughout.
        cell: a name in `pararnn.CELLS`, an import path "package.module:Class", or a `Cell` class.
        z_loss: weight of the squared log-partition in the loss (paper, Table 4).
        others: as in `pararnn.lm.LMConfig`, under the same names.

    Raises ValueError for a number of layer types that is not num_hidden_layers and for words that
    are not in `LAYER_TYPES`; and as `LMConfig`.
    """

    model_type = "pararnn"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    def __init__(
        self,
        vocab_size: int = 50_432,
        hidden_size: int = 1024,
        intermediate_size: int | None = None,
        num_hidden_layers: int = 24,
        layer_types: Sequence[str] | None = None,
        cell: str | type[Cell] = "gru",
        cell_config: Mapping[str, Any] | None = None,
        num_heads: int = 4,
        conv_kernel_size: int = 4,
        num_attention_heads: int = 8,
        rope_theta: float = 10_000.0,
        qk_norm: bool = True,
        norm: str = "rms",
        norm_eps: float = 1e-5,
        solver: str = "auto",
        backend: str = "auto",
        recurrent_clip: float | None = 0.5,
        recompute_gates: bool = False,
        projection_gain: float = 1.0,
        recurrent_std: float | None = None,
        z_loss: float = 0.0,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        types = ["linear_attention"] * num_hidden_layers if layer_types is None else layer_types
        unknown = sorted(set(types) - set(LAYER_TYPES))
        if unknown:
            raise ValueError(f"layer_types may hold {', '.join(LAYER_TYPES)}, got {unknown[0]!r}")
        if len(types) != num_hidden_layers:
            raise ValueError(
                f"layer_types must name one type for each of num_hidden_layers = "
                f"{num_hidden_layers} layers, got {len(types)}"
            )
        self.layer_types = list(types)
        self.cell = cell if isinstance(cell, str) else cell_name(cell, CELLS)
        self.cell_config = dict(cell_config or {})
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_heads = num_hidden_layers, num_heads
        self.intermediate_size = intermediate_size
        self.conv_kernel_size, self.num_attention_heads = conv_kernel_size, num_attention_heads
        self.rope_theta, self.qk_norm = rope_theta, qk_norm
        self.norm, self.norm_eps = norm, norm_eps
        self.solver, self.backend = solver, backend
        self.recurrent_clip, self.recompute_gates = recurrent_clip, recompute_gates
        self.projection_gain, self.recurrent_std = projection_gain, recurrent_std
        self.z_loss, self.use_cache = z_loss, use_cache
        self.tie_word_embeddings = tie_word_embeddings
        self.intermediate_size = self.to_lm().intermediate_size
        super().__init__(**kwargs)

    def to_lm(self) -> LMConfig:
        """The same model's config in plain PyTorch."""
        own = {f.name: getattr(self, f.name) for f in fields(LMConfig) if f.name != "mixers"}
        return LMConfig(**own, mixers=tuple(LAYER_TYPES[word] for word in self.layer_types))

    @classmethod
    def of_lm(cls, config: LMConfig, **kwargs: Any) -> ParaRNNConfig:
        """The config of a model in plain PyTorch; ValueError for mixers that users have added."""
        words = {mixer: word for word, mixer in LAYER_TYPES.items()}
        own = config.to_dict()
        types = [words.get(mixer, mixer) for mixer in own.pop("mixers")]
        return cls(**own, layer_types=types, **kwargs)
