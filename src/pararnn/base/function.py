"""Calls of autograd Functions in eager mode and under the transforms of torch.func.

PyTorch's calls bind default arguments, and take apart and put together all of them as trees at each
transform: several times the time of a small solve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.base import private
from pararnn.base.errors import EngineError
from pararnn.base.numerics import without_autocast

Function = type[torch.autograd.Function]
Maybe = Tensor | None
DualFunction = Callable[
    [Sequence[Maybe], Sequence[Maybe]], tuple[Sequence[Tensor], Sequence[Maybe]]
]


class Source(NamedTuple):
    """Tensors saved for the backward pass instead of the gates, and the function for these."""

    make: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]

    def gates(self, *tensors: Tensor) -> Tensor:
        """Compute the gates: differentiably in a backward pass that is differentiated."""
        with without_autocast(tensors[0].device):
            return self.make(*tensors)


def apply_function(function: Function, *args: Any) -> Any:
    """Call a Function, as its `apply` does. Its arguments are tensors, a Source, and what holds no
    tensors; its results, a tuple under transforms, are tensors, none of them an argument."""
    if torch.compiler.is_compiling():
        return function.apply(*_distinct(args))
    if not private.are_functorch_transforms_active():
        # In a function of its own compilers would trace it, where a region ends around this one.
        return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]
    transform = private.innermost_transform()
    args = _map(private.unwrap_if_dead, args)
    if transform.name == "vmap":
        return _over_copies(function, transform, args)
    args = _map(transform.lift, args)
    with private.single_level_functions():
        return _of_level(function).apply(*args)  # type: ignore[attr-defined]


def _distinct(args: tuple[Any, ...]) -> list[Any]:
    """Return arguments with a view in place of a repeated tensor, such as one zero for two states:
    Dynamo takes each tensor once."""
    seen: list[Tensor] = []
    distinct = []
    for x in args:
        if isinstance(x, Tensor):
            repeated = any(x is other for other in seen)
            seen.append(x)
            x = x.view_as(x) if repeated else x
        distinct.append(x)
    return distinct


def _map(change: Callable[[Tensor], Tensor], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments of a Function with other tensors."""
    return tuple(
        [
            change(x)
            if isinstance(x, Tensor)
            else x._replace(tensors=tuple(map(change, x.tensors)))
            if isinstance(x, Source)
            else x
            for x in args
        ]
    )


@cache
def _of_level(function: Function) -> type[private.SingleLevelFunction]:
    """Return the Function whose formulas are those of the innermost transform, and whose forward
    pass calls `function` without it. It is none of `torch.autograd.Function`, on which PyTorch
    runs all transforms."""

    def forward(*args: Any) -> tuple[Tensor, ...]:
        transform = private.innermost_transform()
        inner = _map(transform.unwrap, args)
        # A forward pass takes no derivatives, but transforms around this one do.
        with torch.enable_grad(), private.set_forward_mode(True), transform.without():
            results = apply_function(function, *inner)
        return tuple([transform.wrap(x) for x in results])

    methods = {name: getattr(function, name) for name in ("setup_context", "backward", "jvp")}
    methods["forward"] = forward
    attributes = {name: staticmethod(method) for name, method in methods.items()}
    return type(function.__name__, (private.SingleLevelFunction,), attributes)


def _over_copies(function: Function, transform: private.Transform, args: tuple[Any, ...]) -> Any:
    """Call a Function on copies that a vmap runs, by its rule if any argument differs in them."""
    pairs = [transform.unbatch(x) if isinstance(x, Tensor) else (x, None) for x in args]
    inner, dims = zip(*pairs, strict=True)
    with transform.without():
        if all(dim is None for dim in dims):
            return apply_function(function, *args)
        results, of_results = function.vmap(transform, dims, *inner)
    copies = zip(results, of_results, strict=True)
    return tuple([x if dim is None else transform.batch(x, dim) for x, dim in copies])


def apply_to_duals(
    function: DualFunction, tensors: Sequence[Maybe], join: Callable[..., tuple[Tensor, ...]]
) -> tuple[Tensor, ...] | None:
    """Return the results of a function where tensors have tangents of the innermost level of
    forward mode, with their tangents; None where none has, or where a vmap hides them.

    function: of values and their tangents, which returns values and their tangents; None for no
    tangent. join: where autograd may differentiate the results in the same level, returns both as
    the results of one operation on the tensors.
    """
    if hides_tangents():
        return None
    duals = [(None, None) if x is None else private.unpack_dual(x) for x in tensors]
    if all(tangent is None for _, tangent in duals):
        return None
    values, tangents = zip(*duals, strict=True)
    if private.transforms()[-1:] != ["jvp"]:
        results = function(values, tangents)
        return join(*results) if gradients_have_tangents(values) else tuple(map(_dual, *results))
    transform = private.innermost_transform()
    inner = ([None if x is None else transform.unwrap(x) for x in x] for x in (values, tangents))
    with transform.without():
        results = function(*inner)
    wrapped = ([None if x is None else transform.wrap(x) for x in x] for x in results)
    return tuple(map(_dual, *wrapped))


def hides_tangents() -> bool:
    """Return True inside of a vmap of the innermost level of forward mode: PyTorch finds tangents
    below the vmap only, where a Function's rule calls it again."""
    for name in reversed(private.transforms()):
        if name in ("jvp", "vmap"):
            return name == "vmap"
    return False


class Guarded(private.CustomOpDef):
    """A custom operator that only a backward pass differentiates.

    PyTorch computes it without tangents in forward mode, and has no formula of it for gradients by
    torch.func. A call that either would need raises EngineError. reason: what the operator is of,
    and what to do, for the message.
    """

    reason: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _check_backward_alone([x for x in args if isinstance(x, Tensor)], self.reason)
        return super().__call__(*args, **kwargs)


def guarded(reason: str) -> Callable[[private.CustomOpDef], Guarded]:
    """Make a custom operator a `Guarded` one, to be applied to what torch.library.custom_op
    returns."""

    def guard(operator: private.CustomOpDef) -> Guarded:
        operator.__class__ = Guarded
        assert isinstance(operator, Guarded)
        operator.reason = reason
        return operator

    return guard


def _check_backward_alone(tensors: Sequence[Tensor], reason: str) -> None:
    if private.forward_level() >= 0 and (
        hides_tangents() or any(private.unpack_dual(x)[1] is not None for x in tensors)
    ):
        raise EngineError(f"forward-mode derivatives (torch.func.jvp) of {reason}")
    if not private.are_functorch_transforms_active() or not torch.is_grad_enabled():
        return
    if any(x.requires_grad for x in tensors):
        raise EngineError(f"gradients by torch.func (grad, vjp) of {reason}")


def gradients_have_tangents(tensors: Sequence[Maybe]) -> bool:
    """Return True if autograd may differentiate what comes of tensors in a level of
    torch.autograd.forward_ad around them: levels of torch.func differ from those of gradients."""
    if not torch.is_grad_enabled() or private.are_functorch_transforms_active():
        return False
    return any(x is not None and x.requires_grad for x in tensors)


def _dual(value: Any, tangent: Maybe) -> Tensor:
    result: Tensor = value if tangent is None else private.make_dual(value, tangent)
    return result
