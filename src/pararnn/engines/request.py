"""Requests of a user: a pair or a part of it, by call, context or layer, and a split."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from pararnn.base.errors import EngineError
from pararnn.engines.split import NO_REQUEST, SplitRequest
from pararnn.engines.table import check_names

MODES = {
    "SEQUENTIAL": ("sequential", "torch"),
    "PARALLEL": ("newton", "torch"),
    "PARALLEL_CUDA": ("newton", "scan"),
    "PARALLEL_FUSED": ("newton", "fused"),
}
"""The paper's application modes (Appendix D), as pairs."""


class Request(NamedTuple):
    """A solver and a backend.

    `None` defers to the next in precedence: call, `using`, layer, rule.
    """

    solver: str | None = None
    backend: str | None = None


DEFER = Request()
"""Request that defers both parts."""

_Requested = TypeVar("_Requested", Request, SplitRequest)


def request(
    solver: str | None = None, backend: str | None = None, mode: str | None = None
) -> Request:
    """Return the request of these arguments; `mode`, a name in MODES, stands for both parts.

    Raises EngineError for unknown names, and for a mode in addition to a solver or a backend.
    """
    if mode is not None:
        if solver is not None or backend is not None:
            raise EngineError(f"mode {mode!r} names a solver and a backend: pass no other")
        if mode not in MODES:
            raise EngineError(f"unknown mode {mode!r}; known: {', '.join(MODES)}")
        return Request(*MODES[mode])
    if solver is not None or backend is not None:
        check_names(solver or "auto", backend or "auto")
    return Request(solver, backend)


_ENTERED: ContextVar[Context] = ContextVar("pararnn.using")


@dataclass(frozen=True)
class Context:
    """Requests of `using`."""

    pair: Request = DEFER
    split: SplitRequest = NO_REQUEST

    innermost = property(_ENTERED.get)
    """Context of this thread, or this task of asyncio: by default this one.

    Compiled code guards on it as on an attribute, so each call looks it up. Compilers do not look
    into methods of a ContextVar; they call a property in C.
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
    """Have layers use this solver, backend, or mode of the paper within the context.

    Precedence: an argument of the call, the context, the layer's own. `pararnn.solve` uses the
    context where its argument is "auto". Contexts nest, part by part. They hold for the thread that
    entered them, as `torch.no_grad` does, and within it for the task of asyncio. A backward pass
    uses the engine of its forward pass, outside of the context and in autograd's threads too.

    `segments` and `burn_in` concern only (newton, fused): the number of pieces of time, 1 or more,
    and the steps from which each guesses its start, 0 or more. More segments than the device holds
    at once, or than T has room for, are reduced to what fits, see `explain`.

    Raises EngineError as `request`, ValueError for impossible numbers.
    """
    outer = _OUTSIDE.innermost
    pair, split = request(solver, backend, mode), SplitRequest.check(segments, burn_in)
    _ENTERED.set(Context(_merge(pair, outer.pair), _merge(split, outer.split)))
    try:
        yield
    finally:
        _ENTERED.set(outer)  # not by the token, which another task may not use


def _merge(inner: _Requested, outer: _Requested) -> _Requested:
    """Return the requests of a context within another, part by part."""
    requests = (b if a is None else a for a, b in zip(inner, outer, strict=True))
    return type(inner)(*requests)


LOOP = ("sequential", "fused")
"""Pair whose results for a row do not depend on the other rows, nor on where a sequence is cut."""


def loop_of(pair: tuple[str, str]) -> tuple[str, str]:
    """Return the pair that runs a request where rows may not depend on each other, LOOP.

    Raises EngineError for a request of another.
    """
    if any(name not in ("auto", loop) for name, loop in zip(pair, LOOP, strict=True)):
        raise EngineError(
            f"batch_invariant=True runs recurrences by the kernels of the loop alone, as others "
            f"cut time by sizes: got ({', '.join(pair)}), leave solver and backend at 'auto', or "
            f"request ({', '.join(LOOP)})"
        )
    return LOOP


def split_of_context() -> SplitRequest:
    """Return the split that the context requests."""
    return _OUTSIDE.innermost.split


def pair_of_call(solver: str, backend: str) -> tuple[str, str]:
    """Return the pair for a function in which "auto" defers to the context, then to the rule."""
    solver_, backend_ = (None if name == "auto" else name for name in (solver, backend))
    return resolve(Request(solver_, backend_), DEFER)


def resolve(call: Request, default: Request) -> tuple[str, str]:
    """Return the requested pair, part by part: of the call, else the context, else the default."""
    context = _OUTSIDE.innermost.pair
    solver = call.solver or context.solver or default.solver or "auto"
    return solver, call.backend or context.backend or default.backend or "auto"
