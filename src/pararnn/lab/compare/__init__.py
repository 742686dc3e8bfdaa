"""Training runs next to each other: tables with mean and spread, curves, a report."""

from pararnn.lab.compare.report import compare_runs

__all__ = ["compare_runs"]
