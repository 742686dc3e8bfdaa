"""The operator: two raw library ops under one autograd formula, for every engine with a backward.

Compilers see two opaque calls. Ops take no callables, so a cell travels as its Program's key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.base import private
from pararnn.base.errors import EngineError
from pararnn.base.numerics import without_autocast
from pararnn.engines.arguments import Arguments, Solution, schema, wanted_gradients
from pararnn.engines.engine import Engine
from pararnn.engines.fit import check_fit, check_numbers, check_saved
from pararnn.engines.fused.layout import as_dtype
from pararnn.engines.meta import gradients, outputs
from pararnn.engines.signature import is_plain
from pararnn.program.program import Program, program_by_key, program_in_use
from pararnn.ranks.engine import engine_of

_PLAIN = "use solver='sequential', backend='torch', which is plain differentiable PyTorch"
_MANY_GRADIENTS = f"vmap over the gradient of a solve by this engine: {_PLAIN}"

_LIBRARY = torch.library.Library("pararnn", "DEF")
_ENGINE_KEY = "str key, str solver, str backend"
_LIBRARY.define(f"forward({_ENGINE_KEY}, {schema()}) -> (Tensor[], Tensor[], Tensor)")
_LIBRARY.define(
    "backward(Tensor[] states, Tensor?[] grad_states, Tensor?[] grad_final, str[] wanted, "
    f"{_ENGINE_KEY}, {schema()}) -> Tensor[]"
)


class EngineKey(NamedTuple):
    """Names of a Program and an engine: the Program's key, solver and backend. `outputs`: the
    number of tensors that come in place of states, see `Program.num_outputs`, and behind them the
    `stored_count` ones, which only the backward pass reads, see `Engine.stored`."""

    key: str
    solver: str
    backend: str
    outputs: int = 0
    stored_count: int = 0

    def saved_count(self) -> int:
        """Return the number of outputs that the backward pass reads."""
        return self.outputs + self.stored_count


class Source(NamedTuple):
    """Tensors saved for the backward pass instead of the gates, and the function for these."""

    make: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]

    def gates(self, *tensors: Tensor) -> Tensor:
        """Compute the gates, without a gradient."""
        with torch.no_grad(), without_autocast(tensors[0].device):
            return self.make(*tensors)


def apply_engine(
    program: Program, engine: Engine, args: Arguments, source: Source | None = None
) -> Solution:
    """Run an engine with a backward as one differentiable op; eager mode saves a `source` of the
    gates in their place.

    Raises NotImplementedError, with the cure, for forward-mode and second derivatives, and for vmap
    over cells that mix channels, over where sequences start, and over gradients.
    """
    direct = can_bypass_dispatcher() and args.signature.plain
    if direct and not (args.signature.requires_grad and torch.is_grad_enabled()):
        return _without_stored(program, _forward(program, engine, args))
    if direct:
        engine.check_backward(program, args)
    gradients = torch.is_grad_enabled() and _requires_grad(args.flatten()[0])
    gradients &= not private.exporting()  # exported programs hold no Function
    decided = args.options.save_values is not None or private.get_tracing_state()
    # A trace must not differ by gradients.
    if gradients and not decided and engine.can_save_values(program, args.gates.dtype):
        args = args.with_options(save_values=True)
    tensors, values = args.flatten()
    counts = program.num_outputs, len(engine.stored(program, args))
    engine_key = EngineKey(program.key, engine.solver, engine.backend, *counts)
    transforms = private.are_functorch_transforms_active()
    if torch.compiler.is_compiling() and not (gradients or transforms):
        # Compilers mistake the context for an argument where no gradient is needed.
        states, final, info = torch.ops.pararnn.forward(*engine_key[:3], *args.values())
        return _without_stored(program, Solution(tuple(states), tuple(final), info))
    try:
        call = (program, engine, args) if direct else None
        out = apply_function(_Solve, engine_key, values, call, source, *tensors)
    except NotImplementedError as error:
        if "jvp" not in str(error):
            raise
        raise NotImplementedError(
            f"forward-mode derivatives of ({engine.solver}, {engine.backend}): {_PLAIN}"
        ) from error
    return Solution(out[: counts[0]], out[sum(counts) : -1], out[-1])


def _without_stored(program: Program, solution: Solution) -> Solution:
    """Return a solution without what only its backward pass reads."""
    if len(solution.states) == program.num_outputs:
        return solution
    return solution._replace(states=solution.states[: program.num_outputs])


def _requires_grad(tensors: Iterable[Tensor | None]) -> bool:
    return True in [tensor is not None and tensor.requires_grad for tensor in tensors]


def can_bypass_dispatcher() -> bool:
    """Return True if only autograd sees a call on plain tensors: there is no compiler, transform,
    mode, tracer or profiler.

    The dispatcher would then only call the op's implementation, which takes 50 us.
    """
    return not (
        torch.compiler.is_compiling()
        or private.are_functorch_transforms_active()
        or private.dispatch_modes()
        or private.function_modes()
        or private.get_tracing_state()
        or private.profiler_enabled()
        or private.forward_level() >= 0
    )


def is_batched_gradient(grad: Tensor | None) -> bool:
    """Return True if a gradient is a batch, by `is_grads_batched` of torch.autograd.grad."""
    return grad is not None and private.is_legacy_batchedtensor(grad)


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call `function.apply`, in eager mode without binding default arguments."""
    if torch.compiler.is_compiling() or private.are_functorch_transforms_active():
        return function.apply(*args)
    return private.apply_unbound(function, *args)


class _Solve(torch.autograd.Function):
    """Autograd formula over the raw ops. It has no jvp on purpose: PyTorch then raises."""

    @staticmethod
    def forward(engine_key: EngineKey, values: Any, call: Any, source: Any, *tensors: Any) -> Any:
        if call is not None:
            solution = _forward(*call)
            return (*solution.states, *solution.final, solution.info)
        args = Arguments.unflatten(tensors, values)
        states, final, info = torch.ops.pararnn.forward(*engine_key[:3], *args.values())
        return (*states, *final, info)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.engine_key, ctx.values, call, source, *tensors = inputs
        ctx.call = call and call[:2]  # the record would keep tensors alive, saved or not
        n, end = ctx.engine_key.outputs, ctx.engine_key.saved_count()
        *_, options = ctx.values
        unread = output[1:n] if options.output_only else ()
        of_final = output[end:-1] if options.no_final else ()
        ctx.mark_non_differentiable(*unread, *output[n:end], *of_final, output[-1])
        ctx.set_materialize_grads(False)
        ctx.source = source and source._replace(tensors=())
        ctx.sources = len(source.tensors) if source else 0
        if source:
            tensors = [*source.tensors, *tensors[1:]]
        ctx.save_for_backward(*tensors, *output[:end])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        engine_key, values = ctx.engine_key, ctx.values
        n, end = engine_key.outputs, engine_key.saved_count()
        all_tensors = ctx.saved_tensors  # each look unpacks them anew
        tensors, states = all_tensors[:-end], all_tensors[-end:]
        if ctx.source:
            tensors = (ctx.source.gates(*tensors[: ctx.sources]), *tensors[ctx.sources :])
        grads, needs_grad = (*grads[:n], *grads[end:-1]), ctx.needs_input_grad[4:]
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and any(map(is_batched_gradient, grads)):
            raise NotImplementedError(_MANY_GRADIENTS)
        # The record was plain in the forward pass, and still is; arriving gradients may not be.
        call = ctx.call
        direct = call and not torch.is_grad_enabled() and can_bypass_dispatcher()
        if direct and all(map(is_plain, grads)):
            args = Arguments.unflatten(tensors, values)
            wanted = args.signature.cache(needs_grad, wanted_gradients, needs_grad, values)
            out = _backward(call[0], call[1], args, states, grads[:n], grads[n:], wanted.names)
        else:
            wanted = wanted_gradients(needs_grad, values)
            # Compiled graphs cannot be differentiated twice, and cannot hold the inner Function.
            inputs = (engine_key, values, wanted.names, len(grads), *states, *grads, *tensors)
            out = (
                _run_backward(*inputs) if is_compiling else apply_function(_SolveBackward, *inputs)
            )
        return (
            None,
            None,
            None,
            None,
            *[None if index is None else out[index] for index in wanted.indices],
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, engine_key: EngineKey, values: Any, *inputs: Any) -> Any:
        """Run copies of a call as more rows; copies of weights too as more channels, or heads, of
        one cell, which do not mix."""
        args = Arguments.unflatten(inputs[2:], values)
        dims: Any = Arguments.unflatten(in_dims[4:], values)
        program = program_by_key(engine_key.key)
        count = len(program.params)
        if dims.bias is None and not any(dim is not None for dim in dims.params[:count]):
            rows = _as_rows(args, dims, info.batch_size, count)
            out = apply_function(
                _Solve, engine_key, rows.flatten()[1], None, None, *rows.flatten()[0]
            )
            copies = [part.unflatten(0, (info.batch_size, -1)) for part in out[:-1]]
            return (*copies, out[-1]), (*(0 for _ in copies), None)
        if not program.widens:
            what = "mixes channels" if program.keeps_states else "has matrix states"
            raise NotImplementedError(
                f"vmap over the weights of {program.cell_name}, which {what}, in a solve by "
                f"({engine_key.solver}, {engine_key.backend}): {_PLAIN}"
            )
        if dims.seq is not None or dims.reset is not None:
            raise NotImplementedError(f"vmap over weights and where sequences start: {_PLAIN}")
        size = info.batch_size
        heads = args.gates.ndim - (dims.gates is not None) > 4
        gates = _move_or_repeat(args.gates, dims.gates, size, -3 if heads else -2)

        def wide(tensor: Tensor, dim: int | None) -> Tensor:
            return _move_or_repeat(tensor, dim, size, -2).flatten(-2)

        def wide_param(tensor: Tensor, dim: int | None) -> Tensor:
            dims_of_one = tensor.ndim - (dim is not None)
            if dims_of_one < 2:
                return wide(tensor, dim)
            copies = _move_or_repeat(tensor, dim, size, -1 - dims_of_one)
            return copies if dims_of_one == 2 else copies.flatten(0, 1)

        own = replace(
            args,
            gates=gates.flatten(-3, -2) if heads else gates,
            bias=None if args.bias is None else wide(args.bias, dims.bias),
            fields=tuple(map(wide, args.fields, dims.fields)),
            params=tuple(map(wide_param, args.params, dims.params)),
            initial=tuple(map(wide, args.initial, dims.initial)),
        )
        out = apply_function(_Solve, engine_key, values, None, None, *own.flatten()[0])
        parts = tuple(part.unflatten(-1, (size, -1)) for part in out[:-1])
        return (*parts, out[-1]), (*(part.ndim - 2 for part in parts), None)


def _move_or_repeat(tensor: Tensor, dim: int | None, size: int, at: int) -> Tensor:
    """Move a mapped dimension to `at`; repeat a tensor that is not mapped there."""
    if dim is not None:
        return tensor.movedim(dim, at)
    copies = tensor.unsqueeze(at)
    return copies.expand(*(size if i == at % copies.ndim else -1 for i in range(copies.ndim)))


def _as_rows(args: Arguments, dims: Any, size: int, weights: int) -> Arguments:
    """Return copies of a call whose weights are shared, the first `weights` of its params, as one
    call of `size` times the rows."""

    def rows(tensor: Tensor, dim: int | None) -> Tensor:
        return _move_or_repeat(tensor, dim, size, 0).flatten(0, 1)

    seq = args.seq
    if seq is not None:
        first = torch.arange(size, device=seq.device, dtype=seq.dtype) * args.sequences
        copies = _move_or_repeat(seq, dims.seq, size, 0)
        seq = torch.where(copies < 0, copies, copies + first[:, None, None]).flatten(0, 1)
    return replace(
        args,
        gates=rows(args.gates, dims.gates),
        fields=tuple(map(rows, args.fields, dims.fields)),
        params=(
            *args.params[:weights],
            *map(rows, args.params[weights:], dims.params[weights:]),
        ),
        initial=tuple(map(rows, args.initial, dims.initial)),
        sequences=size * args.sequences,
        seq=seq,
        reset=None if args.reset is None else rows(args.reset, dims.reset),
    )


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


def _run_backward(
    engine_key: EngineKey, values: Any, wanted: list[str], count: int, *tensors: Any
) -> Any:
    n, end = engine_key.outputs, engine_key.saved_count()
    states, grads, others = (
        tensors[:end],
        tensors[end : end + count],
        tensors[end + count :],
    )
    args = Arguments.unflatten(others, values)
    inputs = (list(states), list(grads[:n]), list(grads[n:]), wanted)
    return torch.ops.pararnn.backward(*inputs, *engine_key[:3], *args.values())


def _engine(program: Program, engine_key: EngineKey, args: Arguments) -> Engine:
    engine = engine_of(program, engine_key.solver, engine_key.backend, args)
    if engine is None or not engine.has_backward:
        pair = f"({engine_key.solver}, {engine_key.backend})"
        raise EngineError(f"no operator for {pair} on {args.gates.device.type}")
    return engine


def _parse(*inputs: Any) -> tuple[EngineKey, Arguments]:
    return EngineKey(*inputs[:3]), Arguments.of_values(inputs[3:])


def _forward_op(*inputs: Any) -> tuple[list[Tensor], list[Tensor], Tensor]:
    engine_key, args = _parse(*inputs)
    program = program_in_use(engine_key.key)
    engine = _engine(program, engine_key, args)
    # A graph may be run on sizes and numbers that nothing has checked.
    _check(program, args)
    check_numbers(args)
    solution = _forward(program, engine, args)
    return list(solution.states), list(solution.final), solution.info


def _check(program: Program, args: Arguments) -> None:
    args.signature.cache((check_fit, program), check_fit, program, args)


def _forward(program: Program, engine: Engine, args: Arguments) -> Solution:
    if not engine.completes:
        args = args.complete(program)
    if not private.autocast_enabled():
        return engine.forward(program, args)
    with without_autocast(args.gates.device):
        return engine.forward(program, args)


def _backward_op(
    states: Sequence[Tensor],
    grad_states: Sequence[Any],
    grad_final: Sequence[Any],
    wanted: list[str],
    *inputs: Any,
) -> list[Tensor]:
    engine_key, args = _parse(*inputs)
    # The dispatcher does not resolve lazy negations in lists with None, and kernels do not see
    # them.
    of_states, of_final = (
        tuple([None if grad is None else grad.resolve_neg() for grad in grads])
        for grads in (grad_states, grad_final)
    )
    program = program_by_key(engine_key.key)
    engine = _engine(program, engine_key, args)
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
    _check(program, args)
    check_saved(program, args, states, engine.stored(program, args))
    if engine.completes:
        grads = engine.backward(program, args, states, grad_states, grad_final, wanted)
        return grads.leaves(wanted)
    full = args.complete(program)
    grads = engine.backward(program, full, states, grad_states, grad_final, wanted)
    params = tuple(map(as_dtype, grads.params, args.params))
    return grads._replace(params=params).leaves(wanted)


def _forward_fake(*inputs: Any) -> tuple[list[Tensor], list[Tensor], Tensor]:
    engine_key, args = _parse(*inputs)
    program = program_by_key(engine_key.key)
    solution = outputs(program, _engine(program, engine_key, args), args)
    return list(solution.states), list(solution.final), solution.info


def _backward_fake(
    states: Any, grad_states: Any, grad_final: Any, wanted: list[str], *inputs: Any
) -> list[Tensor]:
    return gradients(_parse(*inputs)[1]).leaves(wanted)


_LIBRARY.impl("forward", _forward_op, "CompositeExplicitAutograd")
_LIBRARY.impl("backward", _backward_op, "CompositeExplicitAutograd")
torch.library.register_fake("pararnn::forward", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("pararnn::backward", _backward_fake, lib=_LIBRARY)
