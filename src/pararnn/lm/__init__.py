"""Language models on top of the layers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pararnn.base.extras import require
from pararnn.lm.cache import LMCache
from pararnn.lm.checkpoint import CLASSES, CheckpointError, load_checkpoint, save_checkpoint
from pararnn.lm.config import LMConfig
from pararnn.lm.delta_rule import gated_delta_rule, kda
from pararnn.lm.draft_head import DraftHead, load_draft_head, save_draft_head
from pararnn.lm.drafts import Drafter
from pararnn.lm.lookup import Lookup
from pararnn.lm.loss import causal_lm_loss
from pararnn.lm.mixers import MIXERS, Mixer
from pararnn.lm.model import LanguageModel, bits_per_byte, set_solver
from pararnn.lm.prefixes import Prefixes
from pararnn.lm.presets import PRESETS, Preset, preset
from pararnn.lm.quantise import QuantiseError, quantise_weights
from pararnn.lm.sample import sample
from pararnn.lm.state_file import StateError, load_state, save_state
from pararnn.lm.tokens import BYTES, save_byte_tokenizer

if TYPE_CHECKING:
    from pararnn.lm.hf import ParaRNNConfig as ParaRNNConfig
    from pararnn.lm.hf import ParaRNNForCausalLM as ParaRNNForCausalLM
    from pararnn.lm.hf import ParaRNNForSequenceClassification as ParaRNNForSequenceClassification
    from pararnn.lm.hf import ParaRNNForTokenClassification as ParaRNNForTokenClassification
    from pararnn.lm.hf import ParaRNNModel as ParaRNNModel

__all__ = [
    "BYTES",
    "MIXERS",
    "PRESETS",
    "CheckpointError",
    "DraftHead",
    "Drafter",
    "LMCache",
    "LMConfig",
    "LanguageModel",
    "Lookup",
    "Mixer",
    "Prefixes",
    "Preset",
    "QuantiseError",
    "StateError",
    "bits_per_byte",
    "causal_lm_loss",
    "gated_delta_rule",
    "kda",
    "load_checkpoint",
    "load_draft_head",
    "load_state",
    "preset",
    "quantise_weights",
    "sample",
    "save_byte_tokenizer",
    "save_checkpoint",
    "save_draft_head",
    "save_state",
    "set_solver",
]

HF = tuple(CLASSES.values())
"""Names that need transformers, not in __all__ for that reason; MissingExtra without it. The first
to be imported makes the Auto classes know all."""


def __getattr__(name: str) -> Any:
    if name not in (*HF, "hf"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("transformers")
    hf = importlib.import_module("pararnn.lm.hf")
    return hf if name == "hf" else getattr(hf, name)
