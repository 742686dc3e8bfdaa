"""Language models on top of the layers."""

from pararnn.lm.checkpoint import load_checkpoint, save_checkpoint
from pararnn.lm.model import ByteLM, bits_per_byte, set_solver

__all__ = ["ByteLM", "bits_per_byte", "load_checkpoint", "save_checkpoint", "set_solver"]
