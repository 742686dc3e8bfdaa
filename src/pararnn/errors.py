"""Errors and warnings: each message says what was got, what is allowed and what to do."""


class PararnnError(Exception):
    """Base of the errors that are about the library's own concepts."""


class CellError(PararnnError, TypeError):
    """A cell class is malformed: names, parameter shapes, config, or what its step returns."""


class StructureError(PararnnError, ValueError):
    """A declared Jacobian structure, or a hand-written Jacobian, contradicts the traced step."""


class EngineError(PararnnError, ValueError):
    """The requested (solver, backend) pair does not exist or cannot run this cell here."""


class ConvergenceError(PararnnError, RuntimeError):
    """A parallel solve did not reach the numerics contract and `on_failure="raise"` was asked for."""


class ConvergenceWarning(UserWarning):
    """A parallel solve did not reach the contract everywhere and was finished sequentially."""


class CellCostWarning(UserWarning):
    """The step's structure rules out the fast paths; declare `structure` to accept the cost."""
