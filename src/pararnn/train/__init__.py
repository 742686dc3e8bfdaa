"""Training: a loop with a time budget, and the demo."""

from pararnn.errors import MissingExtra
from pararnn.train.demo import DemoConfig, run_demo
from pararnn.train.loop import History, Recipe, Record, evaluate, train

__all__ = [
    "DemoConfig",
    "History",
    "MissingExtra",
    "Recipe",
    "Record",
    "evaluate",
    "run_demo",
    "train",
]
