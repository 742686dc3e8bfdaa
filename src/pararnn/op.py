"""The operator: two raw library ops under one autograd formula, for every engine with a backward.

Compilers see two opaque calls. Ops take no callables, so a cell travels as its Program's key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.base import private
from pararnn.base.device import type_of
from pararnn.base.errors import EngineError
from pararnn.base.function import Source, apply_function, apply_to_duals
from pararnn.base.numerics import without_autocast
from pararnn.engines.along import along_call
from pararnn.engines.arguments import (
    LEAVES,
    Arguments,
    Gradients,
    Options,
    Solution,
    schema,
    wanted_gradients,
    with_arguments,
)
from pararnn.engines.copies import Copies
from pararnn.engines.engine import BackwardInputs, Engine
from pararnn.engines.fit import check_fit, check_numbers, check_saved
from pararnn.engines.fused.layout import as_dtype
from pararnn.engines.meta import gradients, outputs
from pararnn.engines.signature import is_plain
from pararnn.engines.tangents import (
    gradients_of,
    join_gradients,
    tangent_call,
    tangents_of,
    values_of,
    wanted_of,
)
from pararnn.program.along import known_of
from pararnn.program.derive import with_zeros
from pararnn.program.program import Program, program_by_key, program_in_use
from pararnn.program.tangent import leaf
from pararnn.ranks.engine import engine_of

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


def apply_engine(
    program: Program, engine: Engine, args: Arguments, source: Source | None = None
) -> Solution:
    """Run an engine with a backward as one differentiable op; eager mode saves a `source` of the
    gates in their place.

    Raises NotImplementedError, with the cure, for derivatives that no engine has.
    """
    if private.forward_level() >= 0 and not torch.compiler.is_compiling():
        with_tangents = _solve_duals(program, engine, args)
        if with_tangents is not None:
            return with_tangents
    direct = can_bypass_dispatcher() and args.signature.plain
    if direct and not (args.signature.requires_grad and torch.is_grad_enabled()):
        return _without_stored(program, _forward(program, engine, args))
    if direct:
        engine.check_backward(program, args)
    gradients = torch.is_grad_enabled() and _requires_grad(args.flatten()[0])
    gradients &= not private.exporting()  # exported programs hold no Function
    # Kernels that save values may have another layout than those that do not.
    decided = args.options.save_values is not None or args.options.one_layout
    decided = decided or bool(private.get_tracing_state())
    # A trace must not differ by gradients.
    if gradients and not decided and engine.can_save_values(program, args.gates.dtype):
        args = args.with_options(save_values=True)
    tensors, values = args.flatten()
    counts = program.num_outputs, len(engine.stored(program, args))
    engine_key = EngineKey(program.key, engine.solver, engine.backend, *counts)
    transforms = private.are_functorch_transforms_active()
    if transforms and torch.compiler.is_compiling():
        # PyTorch takes gradients inside a compiled region for constants.
        names = " of ".join(private.transforms())  # PyTorch 2.9 compiles no comparison of lists
        if names != "grad":
            raise NotImplementedError(
                f"{names} of a solve inside a region by torch.compile: "
                "it takes torch.func.grad alone. Compile without fullgraph=True: the call then "
                "runs in eager mode"
            )
        if torch.__version__ < "2.10":
            raise NotImplementedError(
                "torch.func.grad inside a region by torch.compile needs PyTorch 2.10 or later, got "
                f"{torch.__version__}. Compile without fullgraph=True, or take gradients of the "
                "compiled function"
            )
        if _requires_grad(map(private.outside_of_grad, (args.bias, *args.params))):
            raise NotImplementedError(
                "torch.func.grad inside a region by torch.compile, of weights that require "
                "gradients: those of its result would be lost. Compile without fullgraph=True: the "
                "call then runs in eager mode; or detach the weights (torch.func.functional_call)"
            )
    if torch.compiler.is_compiling() and not (gradients or transforms):
        # Compilers mistake the context for an argument where no gradient is needed. They see the
        # sizes of all results: a number of checkpoints, which may be 1, would divide the lengths.
        if not program.keeps_states:
            args = args.with_options(forward_only=True)
        states, final, info = torch.ops.pararnn.forward(*engine_key[:3], *args.values())
        return _without_stored(program, Solution(tuple(states), tuple(final), info))
    call = (program, engine, args) if direct else None
    out = apply_function(_solve_function(), engine_key, values, call, source, *tensors)
    return Solution(out[: counts[0]], out[sum(counts) : -1], out[-1])


def _solve_duals(program: Program, engine: Engine, args: Arguments) -> Solution | None:
    """Solve for states and tangents at once where arguments have tangents of the innermost level;
    return None where none has."""
    tensors, values = args.flatten()
    n = program.num_outputs

    def run(*pair: Sequence[Tensor | None]) -> Duals:
        if any(map(is_batched_gradient, pair[1])):
            return _over_tangents(run, *pair)
        primal, direction = (Arguments.unflatten(of_call, values) for of_call in pair)
        engine_pair = engine.solver, engine.backend
        states, final, info = _solve_with_tangents(program, engine_pair, primal, direction)
        return (*states[0], *final[0], info), (*states[1], *final[1], None)

    def join(*duals: Any) -> tuple[Tensor, ...]:
        engine_key = EngineKey(program.key, engine.solver, engine.backend, n)
        return apply_function(_KnownSolve, engine_key, values, duals, None, *tensors)

    results = apply_to_duals(run, tensors, join)
    return None if results is None else Solution(results[:n], results[n:-1], results[-1])


def _over_tangents(
    function: Callable[..., Duals], primal: Sequence[Tensor | None], direction: Sequence[Any]
) -> Duals:
    """Return the values of a function along directions, some of whose tensors are batches as those
    of `is_grads_batched`, and its tangents as such batches."""
    counts: list[int] = []

    def along(*direction: Any) -> list[Any]:
        results, tangents = function(primal, direction)
        counts.append(len(results))
        return [*results, *tangents]

    level, stacks = _stacks(along, direction)
    batches = [None if x is None else private.to_batch(x, level) for x in stacks[counts[0] :]]
    return [x[0] for x in stacks[: counts[0]]], batches  # values are the same in each copy


Pairs = tuple[Sequence[Tensor], Sequence[Tensor]]
"""Values, and their tangents."""
Duals = tuple[Sequence[Tensor], Sequence[Tensor | None]]
"""Values, and their tangents where they have one."""


def _solve_with_tangents(
    program: Program, pair: tuple[str, str], args: Arguments, direction: Any
) -> tuple[Pairs, Pairs, Tensor]:
    """Return what a call gives in place of states and its final states, with their tangents along a
    direction, and its info; differentiable."""
    n, is_accelerator = program.num_states, type_of(args.gates.device).accelerator
    # On a CPU, where states and tangents share what they read, one cell takes less time; along
    # known states only a gradient does.
    tensors = [*args.flatten()[0], *direction.flatten()[0]]
    if known_of(program) is not None and (is_accelerator or _is_differentiated(tensors)):
        states, final, _, info = _run(program, pair, args)
        of_states, of_final = _tangents_along(program, pair, args, direction, states)
        return (states[:n], of_states), (final, of_final), info
    call = tangent_call(program, pair, args, direction)
    outputs, final, tangent_key, info = _run(call.program, call.pair, call.args)
    outputs = outputs[: tangent_key.outputs]
    both = values_of(program, outputs), tangents_of(program, outputs)
    return both, (final[:n], final[n:]), info


def _tangents_along(
    program: Program,
    pair: tuple[str, str],
    args: Arguments,
    direction: Any,
    states: Sequence[Tensor],
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the tangents of states that a call has returned, and of final states; differentiable.
    The program has `known_of`."""
    call = along_call(program, pair, args, direction, states[: program.num_states])
    outputs, final, *_ = _run(call.program, call.pair, call.args)
    return outputs[: program.num_states], final


def _without_stored(program: Program, solution: Solution) -> Solution:
    """Return a solution without what only its backward pass reads."""
    if len(solution.states) == program.num_outputs:
        return solution
    return solution._replace(states=solution.states[: program.num_outputs])


def _requires_grad(tensors: Iterable[Tensor | None]) -> bool:
    return True in [tensor is not None and tensor.requires_grad for tensor in tensors]


def _is_differentiated(tensors: Iterable[Tensor | None]) -> bool:
    """Return True if autograd may differentiate what comes of tensors."""
    by_transform = "grad" in private.transforms()
    return torch.is_grad_enabled() and (by_transform or _requires_grad(tensors))


def can_bypass_dispatcher() -> bool:
    """Return True if only autograd sees a call on plain tensors: there is no compiler, transform,
    mode, tracer or profiler.

    The dispatcher would then only call the op's implementation, which takes 50 us.
    """
    return private.forward_level() < 0 and _is_unseen()


def _is_unseen() -> bool:
    """Return True if no compiler, transform, mode, tracer or profiler sees a call."""
    return not (
        torch.compiler.is_compiling()
        or private.are_functorch_transforms_active()
        or private.dispatch_modes()
        or private.function_modes()
        or private.get_tracing_state()
        or private.profiler_enabled()
    )


def is_batched_gradient(grad: Any) -> bool:
    """Return True if a gradient is a batch, by `is_grads_batched` of torch.autograd.grad, which
    compiled regions do not see."""
    if torch.compiler.is_compiling() or not isinstance(grad, Tensor):
        return False
    return private.is_legacy_batchedtensor(grad)


def _saved(ctx: Any) -> tuple[Any, ...]:
    """Return the tensors that a Function has saved, without transforms that have ended: the
    function that torch.func.vjp returns is called outside of its own."""
    saved: tuple[Any, ...] = ctx.saved_tensors
    if getattr(ctx, "call", None) or torch.compiler.is_compiling():
        return saved
    return tuple([None if x is None else private.unwrap_if_dead(x) for x in saved])


def _saved_values(ctx: Any) -> Sequence[Any]:
    """Return the tensors that a Function has saved without their tangents, for its jvp."""
    return [None if x is None else private.unpack_dual(x)[0] for x in _saved(ctx)]


class _Solve(torch.autograd.Function):
    """Autograd formula over the raw ops."""

    @staticmethod
    def forward(engine_key: EngineKey, values: Any, call: Any, source: Any, *tensors: Any) -> Any:
        if call is not None:
            solution = _forward(*call)
            return (*solution.states, *solution.final, solution.info)
        args = Arguments.unflatten(tensors, values)
        direct = _is_unseen() and args.signature.plain
        forward = _forward_op if direct else torch.ops.pararnn.forward
        states, final, info = forward(*engine_key[:3], *args.values())
        return (*states, *final, info)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.engine_key, ctx.values, call, source, *tensors = inputs
        ctx.call = call and call[:2]  # the record would keep tensors alive, saved or not
        n, end = ctx.engine_key.outputs, ctx.engine_key.saved_count()
        *_, options = ctx.values
        unread = output[1:n] if _drops_states(ctx.engine_key, options) else ()
        of_final = output[end:-1] if options.no_final else ()
        ctx.mark_non_differentiable(*unread, *output[n:end], *of_final, output[-1])
        ctx.set_materialize_grads(False)
        ctx.source = source and source._replace(tensors=())
        ctx.sources = len(source.tensors) if source else 0
        if private.forward_level() >= 0:
            ctx.save_for_forward(*tensors)
        if source:
            tensors = [*source.tensors, *tensors[1:]]
        ctx.save_for_backward(*tensors, *output[:end])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        engine_key, values = ctx.engine_key, ctx.values
        n, end = engine_key.outputs, engine_key.saved_count()
        all_tensors = _saved(ctx)
        tensors, states = all_tensors[:-end], all_tensors[-end:]
        if ctx.source:
            tensors = (ctx.source.gates(*tensors[: ctx.sources]), *tensors[ctx.sources :])
        grads, needs_grad = (*grads[:n], *grads[end:-1]), private.needed_inputs(ctx)[4:]
        is_compiling = torch.compiler.is_compiling()
        if is_compiling and private.are_functorch_transforms_active():
            # Compilers take arguments of torch.func.grad for tensors that need none.
            needs_grad = tuple([tensor is not None for tensor in tensors])
        # The record was plain in the forward pass, and still is; arriving gradients may not be.
        call = ctx.call
        batched = not is_compiling and any(map(is_batched_gradient, grads))
        direct = call and not (batched or torch.is_grad_enabled()) and can_bypass_dispatcher()
        if direct and all(map(is_plain, grads)):
            args = Arguments.unflatten(tensors, values)
            wanted = args.signature.cache(needs_grad, wanted_gradients, needs_grad, values)
            out = _backward(call[0], call[1], args, states, grads[:n], grads[n:], wanted.names)
        else:
            wanted = wanted_gradients(needs_grad, values)
            # Compiled graphs cannot be differentiated twice, and cannot hold the inner Function.
            inputs = (engine_key, values, wanted.names, len(grads), *states, *grads, *tensors)
            if is_compiling:
                out = _run_backward(*inputs)
            elif batched:
                backward = partial(apply_function, _SolveBackward, *inputs[:4])
                out = _over_batches(backward, inputs[4:])
            else:
                out = apply_function(_SolveBackward, *inputs)
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
        one cell, which do not mix; and others one after the other."""
        copies = Copies.of(engine_key.key, values, inputs[2:], in_dims[4:], info.batch_size)
        function = _solve_function()

        def run(args: Arguments) -> Any:
            tensors, values = args.flatten()
            return apply_function(function, engine_key, values, None, None, *tensors)

        outputs = copies.run(run)
        return outputs, (*(0 for _ in outputs[:-1]), None)


class _SolveWithTangents(_Solve):
    """The formula with forward-mode derivatives, which compilers do not take."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Solve for the states and their tangents at once."""
        engine_key, values = ctx.engine_key, ctx.values
        args = Arguments.unflatten(_saved_values(ctx), values)
        direction = Arguments.unflatten(tangents[4:], values)
        program = program_by_key(engine_key.key)
        outputs, final, _ = _solve_with_tangents(program, engine_key[1:3], args, direction)
        return _tangents_of_results(ctx, [*outputs[1], *final[1]])


def _tangents_of_results(ctx: Any, tangents: Sequence[Any]) -> tuple[Any, ...]:
    """Return the tangents of states and final states, with None for results without a gradient."""
    engine_key, (*_, options) = ctx.engine_key, ctx.values
    of_outputs, of_final = [*tangents[: engine_key.outputs]], [*tangents[engine_key.outputs :]]
    if _drops_states(engine_key, options):
        of_outputs[1:] = [None] * (len(of_outputs) - 1)
    if options.no_final:
        of_final = [None] * len(of_final)
    return (*of_outputs, *[None] * engine_key.stored_count, *of_final, None)


class _KnownSolve(_SolveWithTangents):
    """The formula of a call whose results are known, with their tangents, in the place of `call`.

    Its backward pass sees arguments and states with their tangents, as those of PyTorch's
    operations do: in forward mode gradients have tangents too.
    """

    @staticmethod
    def forward(engine_key: EngineKey, values: Any, call: Any, source: Any, *tensors: Any) -> Any:
        return tuple([private.unsafe_view(x, x.shape) for x in call[0]])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        engine_key, values, (_, ctx.known), *others = inputs
        _SolveWithTangents.setup_context(ctx, (engine_key, values, None, *others), output)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        known = ctx.known
        del ctx.known
        return _tangents_of_results(ctx, known[:-1])


def _drops_states(engine_key: EngineKey, options: Options) -> bool:
    """Return True if states beyond the first carry no gradient: none is read, and second
    derivatives, which compiled regions lack, take no gradient by them."""
    if not options.output_only or torch.compiler.is_compiling():
        return options.output_only
    program = program_by_key(engine_key.key)
    return not (program.keeps_states and program.couples_channels)


def _solve_function() -> type[_Solve]:
    return _Solve if private.forward_level() < 0 else _SolveWithTangents


def _run(
    program: Program, pair: tuple[str, str], args: Arguments, reads_saved: bool = False
) -> tuple[Any, Any, EngineKey, Tensor]:
    """Return what a call gives in place of states and what is stored behind it, its final states,
    its engine key and its info; differentiable.

    reads_saved: whether a backward pass follows that autograd knows nothing of.
    """
    solver, backend = pair
    engine = engine_of(program, solver, backend, args)
    assert engine is not None
    reads_saved |= _is_differentiated(args.flatten()[0])
    if reads_saved and engine.can_save_values(program, args.gates.dtype):
        args = args.with_options(save_values=True)
    counts = program.num_outputs, len(engine.stored(program, args))
    engine_key = EngineKey(program.key, solver, backend, *counts)
    tensors, values = args.flatten()
    out = apply_function(_solve_function(), engine_key, values, None, None, *tensors)
    return out[: sum(counts)], out[sum(counts) : -1], engine_key, out[-1]


class _SolveBackward(torch.autograd.Function):
    """The backward op under its own formulas. A gradient's derivatives are a gradient of tangents:
    <u, J^T g> = <J u, g>, and J u is what a tangent call along u gives."""

    @staticmethod
    def forward(*args: Any) -> Any:
        # Forward-mode derivatives refuse views of memory inside an op.
        return tuple([private.unsafe_view(x, x.shape) for x in _run_backward(*args)])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.engine_key, ctx.values, ctx.wanted, ctx.count, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        if private.forward_level() >= 0:
            ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if any(map(is_batched_gradient, grads)):
            return tuple(_over_batches(partial(_SolveBackward._second_order, ctx), grads))
        return _SolveBackward._second_order(ctx, *grads)

    @staticmethod
    def _second_order(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        end = 4 + ctx.engine_key.saved_count()
        states, incoming, args = _parts(ctx.engine_key, ctx.values, ctx.count, _saved(ctx))
        needed = private.needed_inputs(ctx)[end + ctx.count :]
        wanted = wanted_gradients(needed, ctx.values)
        nothing = [None] * (end + ctx.count + len(needed))
        if all(grad is None for grad in grads):
            return tuple(nothing)
        direction = Gradients(**_in_places(args, ctx.wanted, grads, False))
        of_states: Sequence[Any] = nothing[4:end]
        call = ctx.engine_key, args, direction
        if known_of(program_by_key(ctx.engine_key.key)) is not None:
            # Autograd adds gradients by states to the incoming ones of the solve that gave them.
            n, flags = ctx.engine_key.outputs, private.needed_inputs(ctx)[4:end]
            both, by_states, leaves = _second_along(*call, states[:n], incoming, wanted.names)
            of_states = [*by_states, *of_states[n:]] if any(flags) else of_states
        else:
            zeros = [None] * len(incoming)
            tangents, final, leaves = _second(*call, zeros, incoming, wanted.names)
            both = (*tangents, *final)
        of_args = [None if index is None else leaves[index] for index in wanted.indices]
        of_incoming = [
            None if grad is None else tangent for grad, tangent in zip(incoming, both, strict=True)
        ]
        return (*nothing[:4], *of_states, *of_incoming, *of_args)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        if any(map(is_batched_gradient, tangents)):
            return tuple(_over_batches(partial(_SolveBackward._moved, ctx), tangents))
        return _SolveBackward._moved(ctx, *tangents)

    @staticmethod
    def _moved(ctx: Any, *tangents: Any) -> Any:
        end = 4 + ctx.engine_key.saved_count()
        states, incoming, args = _parts(ctx.engine_key, ctx.values, ctx.count, _saved_values(ctx))
        of_incoming, of_args = tangents[end : end + ctx.count], tangents[end + ctx.count :]
        if all(tangent is None for tangent in of_args):
            inputs = (*states, *of_incoming, *args.flatten()[0])
            return apply_function(
                _SolveBackward, ctx.engine_key, ctx.values, ctx.wanted, ctx.count, *inputs
            )
        direction = Arguments.unflatten(of_args, ctx.values)
        call = ctx.engine_key, args, direction
        if known_of(program_by_key(ctx.engine_key.key)) is not None:
            return tuple(_moved_along(*call, states, of_incoming, incoming, ctx.wanted))
        return tuple(_second(*call, of_incoming, incoming, ctx.wanted)[-1])

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        engine_key: EngineKey,
        values: Any,
        wanted: list[str],
        count: int,
        *tensors: Any,
    ) -> Any:
        """Run copies of a backward pass, see `_Solve.vmap`. Sums over steps of weights' gradients
        are those of one copy."""
        states, incoming, others = _split(engine_key, count, tensors)
        dims = _split(engine_key, count, in_dims[4:])
        copies = Copies.of(engine_key.key, values, others, dims[2], info.batch_size)

        def run(args: Arguments, states: Sequence[Any], incoming: Sequence[Any]) -> Any:
            tensors, values = args.flatten()
            inputs = (*states, *incoming, *tensors)
            return apply_function(_SolveBackward, engine_key, values, wanted, count, *inputs)

        engine = _engine(copies.program, engine_key, copies.args)
        # Of gradients by sample, which transforms around this one and levels of forward mode may
        # differentiate, no formula is known.
        is_last = not (private.is_transformed() or _requires_grad(tensors))
        sums_samples = is_last and engine.sums_samples(copies.program)
        mapped = (states, dims[0]), (incoming, dims[1])
        outputs = copies.differentiate(run, *mapped, wanted, sums_samples)
        return outputs, tuple(0 for _ in outputs)


def _over_batches(function: Callable[..., Sequence[Any]], tensors: Sequence[Any]) -> list[Any]:
    """Return the results of a function of tensors, some of which are batches of gradients by
    `is_grads_batched`, as such batches. None among the results stays."""
    level, stacks = _stacks(function, tensors)
    return [None if x is None else private.to_batch(x, level) for x in stacks]


def _stacks(
    function: Callable[..., Sequence[Any]], tensors: Sequence[Any]
) -> tuple[int, list[Any]]:
    """Return the level of batches among tensors, and the results of a function of these, whose
    first dimension is the batch. None among the results stays."""
    level = private.batch_level(next(filter(is_batched_gradient, tensors)))
    present: list[bool] = []
    apart = [private.from_batch(x, level) if is_batched_gradient(x) else x for x in tensors]
    batched = [i for i, x in enumerate(tensors) if is_batched_gradient(x)]

    def call(*rows: Tensor) -> tuple[Tensor, ...]:
        inputs = [*apart]
        for index, row in zip(batched, rows, strict=True):
            inputs[index] = row
        results = function(*inputs)
        present[:] = [x is not None for x in results]
        return tuple([x for x in results if x is not None])

    outputs = iter(torch.func.vmap(call)(*(apart[i] for i in batched)))
    return level, [next(outputs) if there else None for there in present]


def _split(engine_key: EngineKey, count: int, tensors: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Return the states, the incoming gradients and the others among inputs of a backward pass."""
    end = engine_key.saved_count()
    return tensors[:end], tensors[end : end + count], tensors[end + count :]


def _parts(
    engine_key: EngineKey, values: Any, count: int, tensors: Sequence[Any]
) -> tuple[Any, Any, Arguments]:
    states, incoming, others = _split(engine_key, count, tensors)
    return states, incoming, Arguments.unflatten(others, values)


def _in_places(
    args: Arguments, wanted: Sequence[str], leaves: Sequence[Any], keeps: bool
) -> dict[str, Any]:
    """Return the leaves of a call by name, with other tensors in the order of
    `Arguments.leaves(wanted)`; elsewhere what is there, if it `keeps` that, or None."""
    found = dict(zip(args.places(wanted), leaves, strict=True))
    values = [(name, getattr(args, name)) for name in LEAVES]
    return {
        name: tuple([found.get((name, i), x if keeps else None) for i, x in enumerate(value)])
        if isinstance(value, tuple)
        else found.get((name, 0), value if keeps else None)
        for name, value in values
    }


def _second(
    engine_key: EngineKey,
    args: Arguments,
    direction: Any,
    of_values: Sequence[Any],
    of_tangents: Sequence[Any],
    wanted: list[str],
) -> tuple[Sequence[Tensor], Sequence[Tensor], list[Tensor]]:
    """Return the tangents of outputs and of final states along a direction, and the gradients of
    wanted arguments for incoming gradients of values and of tangents."""
    program = program_by_key(engine_key.key)
    call = tangent_call(program, engine_key[1:3], args, direction)
    outputs, final, tangent_key, _ = _run(call.program, call.pair, call.args, bool(wanted))
    leaves: list[Tensor] = []
    if wanted:
        n = engine_key.outputs
        incoming = join_gradients(program, of_values[:n], of_tangents[:n])
        both = (*incoming, *of_values[n:], *of_tangents[n:])
        tensors, values = call.args.flatten()
        if tangent_key.stored_count:
            values = call.args.with_options(save_values=True).flatten()[1]
        names = wanted_of(call, wanted)
        inputs = (tangent_key, values, names, len(both), *outputs, *both, *tensors)
        leaves = gradients_of(call, apply_function(_SolveBackward, *inputs), wanted)
    of_outputs = tangents_of(program, outputs[: tangent_key.outputs])
    return of_outputs, final[program.num_states :], leaves


def _second_along(
    engine_key: EngineKey,
    args: Arguments,
    direction: Any,
    states: Sequence[Tensor],
    incoming: Sequence[Any],
    wanted: list[str],
) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """Return the tangents of states and of final ones along a direction, of states that are known;
    and, for incoming gradients of these, the gradients by the states, and by wanted arguments where
    the states stay."""
    program = program_by_key(engine_key.key)

    def tangents(*inputs: Tensor) -> list[Tensor]:
        call = replace(args, **_in_places(args, wanted, inputs[len(states) :], True))
        pair = _tangents_along(program, engine_key[1:3], call, direction, inputs[: len(states)])
        return [x for some in pair for x in some]

    cotangents = {i: grad for i, grad in enumerate(incoming) if grad is not None}
    results, grads = _results_and_gradients(tangents, [*states, *args.leaves(wanted)], cotangents)
    return results, grads[: len(states)], grads[len(states) :]


def _results_and_gradients(
    function: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    cotangents: Mapping[int, Tensor],
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the results of a function, and the gradients by its inputs for cotangents of some of
    the results; both differentiable where gradients are enabled."""
    if private.are_functorch_transforms_active():
        results, pull = torch.func.vjp(lambda *x: tuple(function(*x)), *inputs)
        zeros = [cotangents.get(i, torch.zeros_like(x)) for i, x in enumerate(results)]
        return results, pull(tuple(zeros))
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = [leaf(x) for x in inputs]
        results = function(*leaves)
    outputs = [results[i] for i in cotangents]
    grads = torch.autograd.grad(
        outputs, leaves, [*cotangents.values()], create_graph=create_graph, allow_unused=True
    )
    results = results if create_graph else [x.detach() for x in results]
    return results, with_zeros(grads, leaves, create_graph)


def _moved_along(
    engine_key: EngineKey,
    args: Arguments,
    direction: Any,
    saved: Sequence[Any],
    of_values: Sequence[Any],
    of_tangents: Sequence[Any],
    wanted: list[str],
) -> list[Any]:
    """Return the derivative of a backward pass along a direction of its call, which moves states
    too, and of its incoming gradients, in the order of `Arguments.leaves(wanted)`."""
    n = engine_key.outputs
    _, of_states, of_leaves = _second_along(
        engine_key, args, direction, saved[:n], of_tangents, wanted
    )
    # What the states add is their own backward pass, with that of the moved incoming gradients.
    of_states = [x if g is None else x + g for x, g in zip(of_states, of_values[:n], strict=True)]
    tensors, values = args.flatten()
    inputs = (engine_key, values, wanted, len(of_values), *saved, *of_states, *of_values[n:])
    totals = apply_function(_SolveBackward, *inputs, *tensors)
    return [x + y for x, y in zip(totals, of_leaves, strict=True)]


def _run_backward(
    engine_key: EngineKey, values: Any, wanted: list[str], count: int, *tensors: Any
) -> Any:
    n = engine_key.outputs
    states, grads, args = _parts(engine_key, values, count, tensors)
    direct = _is_unseen() and args.signature.plain and all(map(is_plain, (*states, *grads)))
    backward = _backward_op if direct else torch.ops.pararnn.backward
    inputs = (list(states), list(grads[:n]), list(grads[n:]), wanted)
    return backward(*inputs, *engine_key[:3], *args.values())


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
    return _states_of_op(args, solution), list(solution.final), solution.info


def _states_of_op(args: Arguments, solution: Solution) -> list[Tensor]:
    """Return what the op gives in place of states."""
    output, *others = solution.states
    return [output, output.new_empty(0)] if args.options.forward_only else [output, *others]


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
    inputs = BackwardInputs(states, grad_states, grad_final, with_arguments(wanted))
    if engine.completes:
        grads = engine.backward(program, args, inputs)
        return grads.leaves(wanted)
    full = args.complete(program)
    grads = engine.backward(program, full, inputs)
    params = tuple(map(as_dtype, grads.params, args.params))
    return grads._replace(params=params).leaves(wanted)


def _forward_fake(*inputs: Any) -> tuple[list[Tensor], list[Tensor], Tensor]:
    engine_key, args = _parse(*inputs)
    program = program_by_key(engine_key.key)
    solution = outputs(program, _engine(program, engine_key, args), args)
    return _states_of_op(args, solution), list(solution.final), solution.info


def _backward_fake(
    states: Any, grad_states: Any, grad_final: Any, wanted: list[str], *inputs: Any
) -> list[Tensor]:
    return gradients(_parse(*inputs)[1]).leaves(wanted)


_LIBRARY.impl("forward", _forward_op, "CompositeExplicitAutograd")
_LIBRARY.impl("backward", _backward_op, "CompositeExplicitAutograd")
torch.library.register_fake("pararnn::forward", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("pararnn::backward", _backward_fake, lib=_LIBRARY)
