"""Errors and warnings: each message says what it got, what is allowed and what to do."""

import os
import sys
import warnings


class PararnnError(Exception):
    """Base of the errors that are about the library's own concepts."""


class CellError(PararnnError, TypeError):
    """A cell class is malformed: names, parameter shapes, config, or what its step returns."""


class StructureError(PararnnError, ValueError):
    """A declared Jacobian structure, or a hand-written Jacobian, contradicts the traced step."""


class EngineError(PararnnError, ValueError):
    """The requested (solver, backend) pair does not exist or cannot run this cell here."""


class ConvergenceError(PararnnError, RuntimeError):
    """A parallel solve did not reach the numerics contract under `on_failure="raise"`."""


class TrainingError(PararnnError, RuntimeError):
    """A training run cannot continue; the message says from where it can resume."""


class DivergenceError(TrainingError):
    """A loss, a gradient or a validation of a training run is NaN or infinite, in step `step`."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class EvaluationError(PararnnError, ValueError):
    """An evaluation cannot be made: no task is requested, one is unknown or cannot be loaded."""


class MissingExtra(PararnnError, ImportError):
    """A package of an optional extra cannot be imported; the message names the extra."""


class ConvergenceWarning(UserWarning):
    """A parallel solve did not reach the contract everywhere and was finished sequentially."""


class BackendWarning(UserWarning):
    """`auto` runs without a generated kernel, or kernels cannot be cached; the message says why."""


class CellCostWarning(UserWarning):
    """The step's structure rules out the fast paths; declare `structure` to accept the cost."""


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn at the innermost line of code outside this package and torch."""
    inside = tuple(
        os.path.dirname(str(sys.modules[name].__file__)) + os.sep for name in ("pararnn", "torch")
    )
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
