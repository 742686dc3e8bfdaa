"""Training: a loop, recipes, and the demo."""

from pararnn.errors import MissingExtra
from pararnn.train.demo import DemoConfig, run_demo

__all__ = ["DemoConfig", "MissingExtra", "run_demo"]
