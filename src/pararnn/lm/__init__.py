"""Language models on top of the layers."""

from pararnn.lm.checkpoint import load_checkpoint, save_checkpoint
from pararnn.lm.loss import causal_lm_loss
from pararnn.lm.model import ByteLM, bits_per_byte, set_solver
from pararnn.lm.presets import PRESETS, Preset, preset

__all__ = [
    "PRESETS",
    "ByteLM",
    "Preset",
    "bits_per_byte",
    "causal_lm_loss",
    "load_checkpoint",
    "preset",
    "save_checkpoint",
    "set_solver",
]
