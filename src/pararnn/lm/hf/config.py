"""The config of a language model for transformers."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from pararnn.cells import Cell
from pararnn.cells.find import cell_name
from pararnn.lm.checkpoint import AUTO_MAP, CODE, write_code
from pararnn.lm.config import LAYER_TYPES, LMConfig
from pararnn.lm.mixers import layer_types as types_of
from pararnn.zoo import CELLS

OTHERS = {
    **dict.fromkeys(("rope_scaling", "rope_parameters"), ("rope_theta", (None,))),
    "partial_rotary_factor": ("rope_theta", (None, 1)),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), ("", ("silu",))),
    **dict.fromkeys(("initializer_range",), ("projection_gain and recurrent_std", (None,))),
    **dict.fromkeys(("n_embd", "d_model", "dim"), ("hidden_size", ())),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers"), ("num_hidden_layers", ())),
    **dict.fromkeys(("n_head", "num_kv_heads", "num_key_value_heads"), ("num_attention_heads", ())),
    **dict.fromkeys(("head_dim", "state_size", "expand"), ("hidden_size and heads", (None,))),
    **dict.fromkeys(("d_conv", "conv_kernel"), ("conv_kernel_size", ())),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), ("", (None, False))),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias"), ("", (None, False))),
    **dict.fromkeys(("dropout", "attention_dropout", "hidden_dropout_prob"), ("", (None, 0))),
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), ("", (None, 0))),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), ("", (None,))),
    "use_qk_norm": ("qk_norm", ()),
    "chunk_size_feed_forward": ("", (None, 0)),
}
"""Options of other models' configs that these models lack: what to set instead, and the values that
change nothing."""


def check_names(known_names: Collection[str], options: Mapping[str, Any]) -> None:
    """Check that no name has an effect only in other models' configs, or is nearly a known name."""
    for name, value in options.items():
        instead, harmless = OTHERS.get(name, ("", None))
        if harmless is None:
            near = difflib.get_close_matches(name, known_names, 1, cutoff=0.85)
            if near and name not in known_names:
                raise ValueError(
                    f"there is no {name!r} in a ParaRNNConfig: did you mean {near[0]!r}?"
                )
        elif value not in harmless:
            advice = f"set {instead}" if instead else "leave it out"
            raise ValueError(
                f"{name} = {value!r} has no effect: a ParaRNN model has no such part, {advice}"
            )


class ParaRNNConfig(PretrainedConfig):
    """Config of a `ParaRNNModel`.

    Args:
        layer_types: a word of transformers for every layer: "linear_attention" is a recurrent
            mixer, "full_attention" attention. None is "linear_attention" throughout.
        mixers: every layer's mixer, as in `pararnn.lm.LMConfig`, where its type does not tell it:
            classes of your own by their import paths. Types then follow from the mixers.
        cell: a name in `pararnn.CELLS`, an import path "package.module:Class", or a `Cell` class.
        z_loss: weight of the squared log-partition in the loss (paper, Table 4).
        others: as in `pararnn.lm.LMConfig`, under the same names.

    Raises ValueError for a number of layer types that is not num_hidden_layers, for words that are
    not in `LAYER_TYPES`, for names in `OTHERS` and names that nearly are an argument's, and as
    `LMConfig`. Other names are stored, as in all configs of transformers.
    """

    model_type = "pararnn"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    pad_token_id = bos_token_id = eos_token_id = None  # read of configs without these
    attribute_map = dict.fromkeys(
        ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"), "norm_eps"
    )

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
        batch_invariant: bool = False,
        z_loss: float = 0.0,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        mixers: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        types = ["linear_attention"] * num_hidden_layers if layer_types is None else layer_types
        if mixers is not None:
            types = types_of(mixers)
            if layer_types is not None and list(layer_types) != types:
                raise ValueError(
                    f"layer_types must be those of the mixers, {', '.join(types)}, or None, got "
                    f"{', '.join(layer_types)}"
                )
            self.mixers = list(mixers)
        if unknown := sorted(set(types) - set(LAYER_TYPES)):
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
        self.batch_invariant = batch_invariant
        self.z_loss, self.use_cache = z_loss, use_cache
        self.tie_word_embeddings = tie_word_embeddings
        self.intermediate_size = self.to_lm().intermediate_size
        known_names = {*vars(self), *self.attribute_map}
        # Values that are ours anyway.
        if kwargs.get("num_key_value_heads") in (None, num_attention_heads):
            kwargs.pop("num_key_value_heads", None)
        if kwargs.get("head_dim") == hidden_size / num_attention_heads:
            kwargs.pop("head_dim")
        check_names(known_names, kwargs)
        auto_map = kwargs.pop("auto_map", None) or {}
        super().__init__(**kwargs)
        # Not those of a folder's own file with a prefix: they would be looked for on the Hub.
        theirs = {auto: name for auto, name in auto_map.items() if Path(CODE).stem not in name}
        self.auto_map = AUTO_MAP | theirs

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any
    ) -> Any:
        """Write config.json, and next to it the file that `trust_remote_code=True` runs."""
        write_code(Path(save_directory))
        return super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Register a user's subclass, as transformers does.

        Folders name our class already, and transformers would write a copy of this module, with
        another class.
        """
        if cls is not ParaRNNConfig:
            super().register_for_auto_class(auto_class)

    def to_lm(self) -> LMConfig:
        """Return the config of the same model in plain PyTorch."""
        return LMConfig.of_hf(vars(self))

    @classmethod
    def of_lm(cls, config: LMConfig, **kwargs: Any) -> ParaRNNConfig:
        """Build the config of a model in plain PyTorch; ValueError as `layer_types`."""
        return cls(**config.to_hf(types_of(config.mixers or ())), **kwargs)
