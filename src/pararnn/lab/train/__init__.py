"""Training: a loop, recipes, and the demo."""

from pararnn.base.errors import MissingExtra
from pararnn.lab.train.demo import DemoConfig, run_demo

__all__ = ["DemoConfig", "MissingExtra", "run_demo"]
