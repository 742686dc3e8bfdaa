"""What the user asks for: a pair or a part of it, by call, by context, or by layer; and a split."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from pararnn.engines.split import BY_RULE, SplitRequest, pin
from pararnn.engines.table import check_names
from pararnn.errors import EngineError

MODES = {
    "SEQUENTIAL": ("sequential", "torch"),
    "PARALLEL": ("newton", "torch"),
    "PARALLEL_CUDA": ("newton", "scan"),
    "PARALLEL_FUSED": ("newton", "fused"),
}
"""The paper's application modes (Appendix D), as pairs."""


class Request(NamedTuple):
    """A solver and a backend; None leaves a part to whom it comes after."""

    solver: str | None = None
    backend: str | None = None


OPEN = Request()
"""Leaves both to whom it comes after."""

_Asked = TypeVar("_Asked", Request, SplitRequest)


def request(
    solver: str | None = None, backend: str | None = None, mode: str | None = None
) -> Request:
    """A request from what was given; `mode` is a name in MODES, and stands for both parts.

    Raises EngineError for unknown names, and for a mode beside a solver or a backend.
    """
    if mode is not None:
        if solver is not None or backend is not None:
            raise EngineError(f"mode {mode!r} names a solver and a backend: give it alone")
        if mode not in MODES:
            raise EngineError(f"unknown mode {mode!r}; known: {', '.join(MODES)}")
        return Request(*MODES[mode])
    if solver is not None or backend is not None:
        check_names(solver or "auto", backend or "auto")
    return Request(solver, backend)


_ENTERED: ContextVar[Context] = ContextVar("pararnn.using")


@dataclass(frozen=True)
class Context:
    """What `using` asks for."""

    pair: Request = OPEN
    split: SplitRequest = BY_RULE

    innermost = property(_ENTERED.get)
    """The context that this thread, or this task of asyncio, is in: by default this one.

    Compiled code guards on it as on an attribute, so it is looked up anew where it is called. A
    method of a ContextVar is nothing that compilers look into; a property in C they only call.
    """


_OUTSIDE = Context()


@contextmanager
def using(
    solver: str | None = None,
    backend: str | None = None,
    *,
    mode: str | None = None,
    segments: int | None = None,
    burn_in: int | None = None,
) -> Iterator[None]:
    """Within this context layers take this solver, backend, or mode of the paper, not their own.

    An argument of the call itself comes first; `pararnn.solve` takes the context's where it is
    given "auto". Contexts nest, part by part, and hold for the thread that entered them, as those
    of `torch.no_grad` do, and within it for the task of asyncio. A backward pass stays with what
    its forward pass took, outside of the context and in autograd's own threads too.

    `segments` and `burn_in` concern (newton, fused) alone, where it runs: how many pieces time is
    cut into, 1 or more, and the steps from which each guesses its start, 0 or more. More segments
    than the device holds at once, or than T has room for, are reduced to what fits: `explain` says
    to what.

    Raises EngineError as `request`, ValueError for impossible numbers.
    """
    outer = _OUTSIDE.innermost
    pair, split = request(solver, backend, mode), pin(segments, burn_in)
    _ENTERED.set(Context(_over(pair, outer.pair), _over(split, outer.split)))
    try:
        yield
    finally:
        _ENTERED.set(outer)  # not by the token, which another task may not use


def _over(inner: _Asked, outer: _Asked) -> _Asked:
    """What a context asks for within another, part by part."""
    parts = (b if a is None else a for a, b in zip(inner, outer, strict=True))
    return type(inner)(*parts)


def requested_split() -> SplitRequest:
    """What the context asks of the split."""
    return _OUTSIDE.innermost.split


def requested_pair(solver: str, backend: str) -> tuple[str, str]:
    """The pair of a function whose "auto" leaves a part to the context, else to the rule."""
    solver_, backend_ = (None if name == "auto" else name for name in (solver, backend))
    return chosen(Request(solver_, backend_), OPEN)


def chosen(call: Request, default: Request) -> tuple[str, str]:
    """The pair to ask the table for: the call's parts, else the context's, else the default's."""
    context = _OUTSIDE.innermost.pair
    solver = call.solver or context.solver or default.solver or "auto"
    return solver, call.backend or context.backend or default.backend or "auto"
