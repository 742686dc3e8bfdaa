"""The operator: two raw library ops under one autograd formula, for every engine with a backward.

Compilers see two opaque calls. Ops take no callables, so a cell travels as its Program's key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pararnn.engines.arguments import REST, Arguments, Engine, Solution, schema
from pararnn.engines.fit import check_fit, check_kept, check_numbers
from pararnn.engines.fused.layout import as_dtype
from pararnn.engines.meta import gradients, outputs
from pararnn.engines.signature import plain
from pararnn.engines.table import find
from pararnn.errors import EngineError
from pararnn.numerics import without_autocast
from pararnn.program.program import Program, program_by_key, program_in_use

_PLAIN = "use solver='sequential', backend='torch', which is plain differentiable PyTorch"
_MANY_GRADIENTS = f"vmap over the gradient of a solve by this engine: {_PLAIN}"

_OUTPUT_ONLY = REST.index("output_only")
_LIBRARY = torch.library.Library("pararnn", "DEF")
_HOW = "str key, str solver, str backend"
_LIBRARY.define(f"forward({_HOW}, {schema()}) -> (Tensor[], Tensor[], Tensor)")
_LIBRARY.define(
    "backward(Tensor[] states, Tensor?[] grad_states, Tensor?[] grad_final, str[] wanted, "
    f"{_HOW}, {schema()}) -> Tensor[]"
)


class How(NamedTuple):
    """What runs a call, by names: a Program's key, and an engine's solver and backend."""

    key: str
    solver: str
    backend: str


class Source(NamedTuple):
    """What is kept for the backward pass in place of the gates, and what makes them of it."""

    make: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]

    def gates(self, *tensors: Tensor) -> Tensor:
        """The gates of such tensors as they are in the dtypes of these, without a gradient."""
        with torch.no_grad(), without_autocast(tensors[0].device):
            return self.make(*tensors)


def apply_engine(
    program: Program, engine: Engine, args: Arguments, source: Source | None = None
) -> Solution:
    """Run an engine with a backward as one differentiable op; in eager mode it keeps a `source` of
    the gates in their place.

    Raises NotImplementedError, with the cure, for forward-mode and second derivatives, and for vmap
    over cells that mix channels, over where sequences start, and over gradients.
    """
    alone = can_bypass_dispatcher() and args.form.plain
    if alone and not (args.form.leaves and torch.is_grad_enabled()):
        return _forward(program, engine, args)
    tensors, rest = args.flatten()
    how = How(program.key, engine.solver, engine.backend)
    if torch.compiler.is_compiling():
        gradients = torch.is_grad_enabled() and _wants_gradient(tensors)
        gradients &= not _exporting()  # whose programs hold no Function
        if not (gradients or torch._C._are_functorch_transforms_active()):
            # Compilers mistake the context for an argument where no gradient is needed.
            states, final, info = torch.ops.pararnn.forward(*how, *args.values())
            return Solution(tuple(states), tuple(final), info)
    try:
        direct = (program, engine, args) if alone else None
        out = apply_function(_Solve, how, rest, direct, source, *tensors)
    except NotImplementedError as error:
        if "jvp" not in str(error):
            raise
        raise NotImplementedError(
            f"forward-mode derivatives of ({engine.solver}, {engine.backend}): {_PLAIN}"
        ) from error
    n = program.num_states
    return Solution(out[:n], out[n : 2 * n], out[-1])


def _exporting() -> bool:
    """Whether torch.export is at work.

    Not torch.compiler.is_exporting(): Dynamo of PyTorch 2.9 to 2.11 takes it for true in all that
    it compiles, and layers would have no gradient.
    """
    return torch.compiler._is_exporting_flag


def _wants_gradient(tensors: Iterable[Tensor | None]) -> bool:
    """Whether any of them wants a gradient."""
    return True in [tensor is not None and tensor.requires_grad for tensor in tensors]


def can_bypass_dispatcher() -> bool:
    """Whether nobody but autograd sees a call on plain tensors: no compiler, transform, mode,
    tracer or profiler.

    The dispatcher then only calls what is behind the op, for which it takes 50 us.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._get_tracing_state()
        or torch._C._autograd._profiler_enabled()
        or forward_ad._current_level >= 0
    )


def is_batched_gradient(grad: Tensor | None) -> bool:
    """Whether a gradient is several at once, by `is_grads_batched` of torch.autograd.grad, which
    shows in nothing else."""
    return grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad)


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply`, in eager mode without what binds default arguments: that takes 20 us."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


class _Solve(torch.autograd.Function):
    """The one autograd formula over the raw ops. It has no jvp on purpose: PyTorch then raises."""

    @staticmethod
    def forward(how: How, rest: Any, direct: Any, source: Any, *tensors: Any) -> Any:
        if direct is not None:
            solution = _forward(*direct)
            return (*solution.states, *solution.final, solution.info)
        args = Arguments.unflatten(tensors, rest)
        states, final, info = torch.ops.pararnn.forward(*how, *args.values())
        return (*states, *final, info)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.how, ctx.rest, direct, source, *tensors = inputs
        ctx.direct = direct and direct[:2]  # the record would keep tensors, saved or not
        ctx.num_states = n = len(output) // 2
        unread = output[1:n] if ctx.rest[_OUTPUT_ONLY] else ()
        ctx.mark_non_differentiable(*unread, output[-1])
        ctx.set_materialize_grads(False)
        ctx.source = source and source._replace(tensors=())
        ctx.sources = len(source.tensors) if source else 0
        if source:
            tensors = [*source.tensors, *tensors[1:]]
        ctx.save_for_backward(*tensors, *output[:n])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        n, how, rest, saved = ctx.num_states, ctx.how, ctx.rest, ctx.saved_tensors
        tensors, states = saved[:-n], saved[-n:]
        if ctx.source:
            tensors = (ctx.source.gates(*tensors[: ctx.sources]), *tensors[ctx.sources :])
        grads, needed = grads[: 2 * n], ctx.needs_input_grad[4:]
        compiled = torch.compiler.is_compiling()
        if not compiled and any(map(is_batched_gradient, grads)):
            raise NotImplementedError(_MANY_GRADIENTS)
        # What was nobody else's in the forward pass still is, but for gradients that arrive.
        direct = ctx.direct
        alone = (
            direct
            and not torch.is_grad_enabled()
            and can_bypass_dispatcher()
            and all(map(plain, grads))
        )
        wanted, places = (_wanted_again if alone else _wanted)(needed, rest)
        if alone:
            args = Arguments.unflatten(tensors, rest)
            out = _backward(direct[0], direct[1], args, states, grads[:n], grads[n:], wanted)
        else:
            # Compiled graphs cannot be differentiated twice, and cannot hold the inner Function.
            given = (how, rest, wanted, n, *states, *grads, *tensors)
            out = _run_backward(*given) if compiled else apply_function(_SolveBackward, *given)
        return (
            None,
            None,
            None,
            None,
            *[None if place is None else out[place] for place in places],
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, how: How, rest: Any, *given: Any) -> Any:
        """Copies of a cell side by side are one cell of more channels, which do not meet."""
        args = Arguments.unflatten(given[2:], rest)
        dims: Any = Arguments.unflatten(in_dims[4:], rest)
        if program_by_key(how.key).couples_channels:
            raise NotImplementedError(f"vmap over a solve of a cell that mixes channels: {_PLAIN}")
        if dims.seq is not None or dims.reset is not None:
            raise NotImplementedError(f"vmap over where sequences start: {_PLAIN}")
        size = info.batch_size
        heads = args.gates.ndim - (dims.gates is not None) > 4
        gates = _beside(args.gates, dims.gates, size, -3 if heads else -2)

        def wide(tensor: Tensor, dim: int | None) -> Tensor:
            return _beside(tensor, dim, size, -2).flatten(-2)

        own = replace(
            args,
            gates=gates.flatten(-3, -2) if heads else gates,
            bias=None if args.bias is None else wide(args.bias, dims.bias),
            fields=tuple(map(wide, args.fields, dims.fields)),
            params=tuple(map(wide, args.params, dims.params)),
            initial=tuple(map(wide, args.initial, dims.initial)),
        )
        out = apply_function(_Solve, how, rest, None, None, *own.flatten()[0])
        parts = tuple(part.unflatten(-1, (size, -1)) for part in out[:-1])
        return (*parts, out[-1]), (*(part.ndim - 2 for part in parts), None)


def _beside(tensor: Tensor, dim: int | None, size: int, at: int) -> Tensor:
    """A mapped tensor with its mapped dimension at `at`; one that is not mapped, repeated there."""
    if dim is not None:
        return tensor.movedim(dim, at)
    repeated = tensor.unsqueeze(at)
    return repeated.expand(*(size if i == repeated.ndim + at else -1 for i in range(repeated.ndim)))


def _wanted(needed: tuple[bool, ...], rest: Any) -> tuple[list[str], list[int | None]]:
    """The names of the gradients that are asked of an engine, and for each tensor of a record its
    gradient's place among those, None where none is needed."""
    asked = Arguments.unflatten(needed, rest)
    wanted = asked.named_true()
    beside = zip(asked.beside(count(), wanted), needed, strict=True)
    return wanted, [place if need else None for place, need in beside]


_wanted_again = lru_cache(maxsize=4096)(_wanted)  # compilers do not see through it


class _SolveBackward(torch.autograd.Function):
    """The backward op, with a formula that raises: it would otherwise pass as a constant."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return tuple(_run_backward(*args))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"second derivatives of a solve by this engine: {_PLAIN}")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotImplementedError(_MANY_GRADIENTS)


def _run_backward(how: How, rest: Any, wanted: list[str], n: int, *tensors: Any) -> Any:
    states, grad_states, grad_final = (list(tensors[i * n : i * n + n]) for i in range(3))
    args = Arguments.unflatten(tensors[3 * n :], rest)
    given = (states, grad_states, grad_final, wanted)
    return torch.ops.pararnn.backward(*given, *how, *args.values())


def _engine(how: How, device: torch.device) -> Engine:
    engine = find(how.solver, how.backend, device)
    if engine is None or engine.backward is None:
        raise EngineError(f"no operator for ({how.solver}, {how.backend}) on {device.type}")
    return engine


def _call(*given: Any) -> tuple[How, Arguments]:
    return How(*given[:3]), Arguments.of_values(given[3:])


def _forward_op(*given: Any) -> tuple[list[Tensor], list[Tensor], Tensor]:
    how, args = _call(*given)
    program, engine = program_in_use(how.key), _engine(how, args.gates.device)
    # A graph may be given sizes and numbers that nobody has looked at.
    args.form.kept((check_fit, program), check_fit, program, args)
    check_numbers(args)
    solution = _forward(program, engine, args)
    return list(solution.states), list(solution.final), solution.info


def _forward(program: Program, engine: Engine, args: Arguments) -> Solution:
    if not engine.completes:
        args = args.completed(program.num_states)
    if not torch._C._is_any_autocast_enabled():
        return engine.forward(program, args)
    with without_autocast(args.gates.device):
        return engine.forward(program, args)


def _backward_op(
    states: Sequence[Tensor],
    grad_states: Sequence[Any],
    grad_final: Sequence[Any],
    wanted: list[str],
    *given: Any,
) -> list[Tensor]:
    how, args = _call(*given)
    # In lists with None the dispatcher leaves negations that are put off, which kernels do not see.
    of_states, of_final = (
        tuple([None if grad is None else grad.resolve_neg() for grad in grads])
        for grads in (grad_states, grad_final)
    )
    program, engine = program_by_key(how.key), _engine(how, args.gates.device)
    return _backward(program, engine, args, tuple(states), of_states, of_final, wanted)


def _backward(
    program: Program,
    engine: Engine,
    args: Arguments,
    states: tuple[Tensor, ...],
    grad_states: tuple[Tensor | None, ...],
    grad_final: tuple[Tensor | None, ...],
    wanted: list[str],
) -> list[Tensor]:
    assert engine.backward is not None
    args.form.kept((check_fit, program), check_fit, program, args)
    check_kept(args, states)
    if engine.completes:
        grads = engine.backward(program, args, states, grad_states, grad_final, wanted)
        return grads.leaves(wanted)
    full = args.completed(program.num_states)
    grads = engine.backward(program, full, states, grad_states, grad_final, wanted)
    params = tuple(map(as_dtype, grads.params, args.params))
    return grads._replace(params=params).leaves(wanted)


def _forward_fake(*given: Any) -> tuple[list[Tensor], list[Tensor], Tensor]:
    how, args = _call(*given)
    rows = _engine(how, args.gates.device).info_rows
    solution = outputs(program_by_key(how.key), args, rows)
    return list(solution.states), list(solution.final), solution.info


def _backward_fake(
    states: Any, grad_states: Any, grad_final: Any, wanted: list[str], *given: Any
) -> list[Tensor]:
    return gradients(_call(*given)[1]).leaves(wanted)


_LIBRARY.impl("forward", _forward_op, "CompositeExplicitAutograd")
_LIBRARY.impl("backward", _backward_op, "CompositeExplicitAutograd")
torch.library.register_fake("pararnn::forward", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("pararnn::backward", _backward_fake, lib=_LIBRARY)
