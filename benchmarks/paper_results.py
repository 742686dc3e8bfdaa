"""Results of the paper's models: Table 5, whose rows of 7B are Table 2."""

from __future__ import annotations

from typing import NamedTuple

TASKS = (
    ("arc_challenge", 25),
    ("arc_challenge", 3),
    ("hellaswag", 10),
    ("hellaswag", 0),
    ("openbookqa", 10),
    ("openbookqa", 0),
    ("winogrande", 5),
    ("winogrande", 0),
    ("piqa", 0),
    ("mmlu", 0),
)
"""Tasks of the paper, by their names in lm-eval, and shots."""


class Published(NamedTuple):
    """A row of the table; accuracies in percent in the order of `TASKS`."""

    size: str
    model: str
    parameters: str
    perplexity: float
    accuracies: tuple[float, ...]

    @property
    def tables(self) -> str:
        """Tables of the paper that have this row."""
        return "Tables 2, 5" if self.size == "7B" else "Table 5"


# fmt: off
PUBLISHED = tuple(
    Published(size, model, parameters, perplexity, tuple(accuracies))
    for size, model, parameters, perplexity, *accuracies in (
        ("400M", "Transformer", "412M", 17.00,
         24.23, 23.81, 36.11, 35.91, 26.60, 29.40, 51.77, 51.69, 64.64, 25.37),
        ("400M", "ParaGRU", "406M", 18.56,
         22.27, 21.93, 38.69, 39.21, 25.00, 25.80, 53.04, 52.41, 67.30, 23.68),
        ("400M", "ParaLSTM", "406M", 18.40,
         23.12, 24.23, 37.43, 37.52, 26.20, 26.20, 51.22, 49.49, 65.94, 23.37),
        ("400M", "Mamba2", "409M", 16.49,
         24.32, 25.09, 40.53, 41.00, 30.00, 34.00, 50.99, 51.14, 66.97, 23.41),
        ("1B", "Transformer", "1.44B", 12.90,
         26.87, 25.51, 47.25, 47.14, 34.00, 33.40, 54.06, 54.22, 68.49, 23.12),
        ("1B", "ParaGRU", "1.42B", 13.20,
         24.15, 23.81, 48.71, 48.85, 24.80, 25.80, 53.43, 53.28, 71.27, 24.55),
        ("1B", "ParaLSTM", "1.42B", 13.11,
         24.15, 24.32, 45.82, 46.53, 24.40, 27.00, 51.14, 51.07, 70.46, 24.75),
        ("1B", "Mamba2", "1.43B", 12.26,
         28.41, 27.47, 50.90, 51.21, 36.20, 36.00, 55.25, 55.17, 71.71, 24.39),
        ("2.9B", "Transformer", "2.80B", 10.97,
         30.72, 29.52, 55.59, 55.20, 36.80, 35.40, 57.06, 58.41, 73.12, 23.12),
        ("2.9B", "ParaGRU", "2.90B", 10.92,
         23.98, 23.12, 57.58, 57.94, 26.00, 26.60, 53.83, 56.51, 74.48, 23.75),
        ("2.9B", "ParaLSTM", "2.90B", 10.87,
         24.15, 24.06, 54.22, 55.14, 26.80, 27.40, 53.83, 53.75, 71.71, 23.99),
        ("2.9B", "Mamba2", "2.83B", 10.13,
         34.47, 33.70, 61.13, 61.12, 42.20, 37.80, 59.43, 59.51, 73.78, 24.89),
        ("7B", "Transformer", "6.89B", 9.55,
         34.30, 33.36, 62.98, 62.20, 40.00, 37.20, 61.48, 60.85, 74.97, 23.12),
        ("7B", "ParaGRU", "6.76B", 9.19,
         39.68, 36.77, 65.85, 65.75, 42.20, 40.40, 61.40, 59.83, 76.66, 25.29),
        ("7B", "ParaLSTM", "6.76B", 9.16,
         37.46, 36.52, 62.47, 62.85, 42.20, 38.80, 57.70, 59.12, 75.19, 25.31),
        ("7B", "Mamba2", "6.96B", 8.62,
         40.02, 39.59, 69.78, 69.68, 42.20, 42.20, 65.19, 63.77, 76.66, 26.61),
    )
)
# fmt: on
