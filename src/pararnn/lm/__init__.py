"""Language models on top of the layers."""

from pararnn.lm.config import LMConfig
from pararnn.lm.loss import causal_lm_loss
from pararnn.lm.mixers import MIXERS, Mixer
from pararnn.lm.model import LanguageModel, bits_per_byte, set_solver
from pararnn.lm.presets import PRESETS, Preset, preset
from pararnn.lm.sample import sample

__all__ = [
    "MIXERS",
    "PRESETS",
    "LMConfig",
    "LanguageModel",
    "Mixer",
    "Preset",
    "bits_per_byte",
    "causal_lm_loss",
    "preset",
    "sample",
    "set_solver",
]
