"""The operator: two raw library ops under one autograd formula, for every engine with a backward.

Compilers see two opaque calls. Ops take no callables, so a cell travels as its Program's key.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from pararnn.engines.base import Arguments, Engine
from pararnn.engines.split import Pin
from pararnn.engines.table import find
from pararnn.errors import EngineError
from pararnn.program import Program, program_by_key, program_in_use

_PLAIN = "use solver='sequential', backend='torch', which is plain differentiable PyTorch"

_LIBRARY = torch.library.Library("pararnn", "DEF")
_INPUTS = (
    "str key, str solver, str backend, Tensor gates, Tensor? bias, Tensor[] fields, "
    "Tensor[] params, Tensor[] initial, SymInt sequences, Tensor? seq, Tensor? reset, "
    "bool reverse, int? segments, int? burn_in"
)
_LIBRARY.define(f"forward({_INPUTS}, str on_failure) -> (Tensor[], Tensor[], Tensor)")
_LIBRARY.define(
    f"backward({_INPUTS}, Tensor[] states, Tensor?[] grad_states, Tensor?[] grad_final) -> Tensor[]"
)


def apply_engine(
    program: Program,
    engine: Engine,
    args: Arguments,
    split: Pin,
    on_failure: str,
    output_only: bool,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """Run an engine with a backward as one differentiable op: states, final states, info.

    `split`: what is asked of an engine that cuts time, in both passes.
    `output_only` marks the sequences of all states but the first as carrying no gradient. Raises
    NotImplementedError, with the cure, for forward-mode and second derivatives, and for vmap over
    cells that mix channels, over where sequences start, and over gradients.
    """
    counts = (len(args.fields), len(args.params), len(args.initial), program.num_states)
    names = (program.key, engine.solver, engine.backend)
    static = (*names, args.sequences, args.reverse, *split, on_failure)
    single = (args.gates, args.bias, args.seq, args.reset)
    tensors = (*single, *args.fields, *args.params, *args.initial)
    if torch.compiler.is_compiling() and not torch.is_grad_enabled():
        # Older compilers mistake the context for an argument where no gradient is needed.
        inputs = _op_inputs(static, counts, tensors)
        states, final, info = torch.ops.pararnn.forward(*inputs, on_failure)
        return tuple(states), tuple(final), info
    try:
        out = _apply(_Solve, static, counts, output_only, *tensors)
    except NotImplementedError as error:
        if "jvp" not in str(error):
            raise
        raise NotImplementedError(
            f"forward-mode derivatives of ({engine.solver}, {engine.backend}): {_PLAIN}"
        ) from error
    n = program.num_states
    return out[:n], out[n : 2 * n], out[-1]


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply`, in eager mode without what binds default arguments: that takes 20 us."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


class _Solve(torch.autograd.Function):
    """The one autograd formula over the raw ops. It has no jvp on purpose: PyTorch then raises."""

    @staticmethod
    def forward(static: Any, counts: Any, output_only: bool, *tensors: Any) -> Any:
        inputs = _op_inputs(static, counts, tensors)
        states, final, info = torch.ops.pararnn.forward(*inputs, static[-1])
        return (*states, *final, info)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.static, ctx.counts, output_only, *tensors = inputs
        num_states = ctx.counts[-1]
        states = output[:num_states]
        unread = states[1:] if output_only else ()
        ctx.mark_non_differentiable(*unread, output[-1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *states)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        num_states = ctx.counts[-1]
        saved = ctx.saved_tensors
        tensors, states = saved[:-num_states], saved[-num_states:]
        # Compiled graphs cannot be differentiated twice, and cannot hold the inner Function.
        given = (ctx.static, ctx.counts, *tensors, *states, *grads[: 2 * num_states])
        if torch.compiler.is_compiling():
            out = _run_backward(*given)
        else:
            out = _apply(_SolveBackward, *given)
        gates, rest = out[0], list(out[1:])
        bias = rest.pop(0) if tensors[1] is not None else None
        return (None, None, None, gates, bias, None, None, *rest)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, static: Any, counts: Any, output_only: bool, *tensors: Any
    ) -> Any:
        """Copies of a cell side by side are one cell of more channels, which do not meet."""
        gates, bias, seq, reset, *rest = zip(tensors, in_dims[3:], strict=True)
        if program_by_key(static[0]).couples_channels:
            raise NotImplementedError(f"vmap over a solve of a cell that mixes channels: {_PLAIN}")
        if seq[1] is not None or reset[1] is not None:
            raise NotImplementedError(f"vmap over where sequences start: {_PLAIN}")
        size = info.batch_size
        heads = gates[0].ndim - (gates[1] is not None) > 4
        beside = _beside(*gates, size, -3) if heads else _beside(*gates, size, -2)
        channels = [
            None if tensor is None else _beside(tensor, dim, size, -2).flatten(-2)
            for tensor, dim in (bias, *rest)
        ]
        given = (beside.flatten(-3, -2) if heads else beside, channels[0], seq[0], reset[0])
        out = _apply(_Solve, static, counts, output_only, *given, *channels[1:])
        parts = tuple(part.unflatten(-1, (size, -1)) for part in out[:-1])
        return (*parts, out[-1]), (*(part.ndim - 2 for part in parts), None)


def _beside(tensor: Tensor, dim: int | None, size: int, at: int) -> Tensor:
    """A mapped tensor with its mapped dimension at `at`; one that is not mapped, repeated there."""
    if dim is not None:
        return tensor.movedim(dim, at)
    repeated = tensor.unsqueeze(at)
    return repeated.expand(*(size if i == repeated.ndim + at else -1 for i in range(repeated.ndim)))


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
        raise NotImplementedError(f"vmap over the gradient of a solve by this engine: {_PLAIN}")


def _run_backward(static: Any, counts: Any, *tensors: Any) -> Any:
    num_states = counts[-1]
    given, rest = tensors[: -3 * num_states], tensors[-3 * num_states :]
    states, grads = rest[:num_states], rest[num_states:]
    return torch.ops.pararnn.backward(
        *_op_inputs(static, counts, given),
        list(states),
        list(grads[:num_states]),
        list(grads[num_states:]),
    )


def _op_inputs(static: Any, counts: tuple[int, ...], tensors: Sequence[Any]) -> Any:
    """The arguments that both ops begin with, from the autograd function's flat ones."""
    key, solver, backend, sequences, *how, _ = static
    fields, params, initial, _ = counts
    gates, bias, seq, reset, *rest = tensors
    lists = (
        rest[:fields],
        rest[fields : fields + params],
        rest[fields + params : fields + params + initial],
    )
    return key, solver, backend, gates, bias, *lists, sequences, seq, reset, *how


def _engine(solver: str, backend: str, device: torch.device) -> Engine:
    engine = find(solver, backend, device)
    if engine is None or engine.backward is None:
        raise EngineError(f"no operator for ({solver}, {backend}) on {device.type}")
    return engine


def _arguments(gates: Tensor, bias: Tensor | None, *rest: Any) -> Arguments:
    fields, params, initial = (tuple(given or ()) for given in rest[:3])  # AOTInductor: [] is None
    sequences, seq, reset, reverse, *split = rest[3:]
    others = (sequences, seq, reset, reverse, Pin(*split))
    return Arguments(gates, bias, fields, params, initial, *others)


def _forward_op(
    key: str, solver: str, backend: str, *given: Any
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    *inputs, on_failure = given
    args, program = _arguments(*inputs), program_in_use(key)
    engine = _engine(solver, backend, args.gates.device)
    if not engine.completes:
        args = args.completed(program.num_states)
    # The solver's precision is the contract's, whatever the caller's autocast region says.
    device = args.gates.device.type
    autocast = torch.is_autocast_enabled(device)
    with torch.autocast(device, enabled=False) if autocast else nullcontext():
        solution = engine.forward(program, args, on_failure)
    return list(solution.states), list(solution.final), solution.info


def _backward_op(key: str, solver: str, backend: str, *given: Any) -> list[Tensor]:
    *inputs, states, grad_states, grad_final = given
    args, program = _arguments(*inputs), program_by_key(key)
    engine = _engine(solver, backend, args.gates.device)
    assert engine.backward is not None
    full = args if engine.completes else args.completed(program.num_states)
    grads = engine.backward(program, full, tuple(states), tuple(grad_states), tuple(grad_final))
    bias = () if grads.bias is None else (grads.bias,)
    initial = grads.initial if args.initial else ()
    params = [grad.to(p.dtype) for grad, p in zip(grads.params, args.params, strict=True)]
    return [grads.gates, *bias, *grads.fields, *params, *initial]


def _forward_fake(
    key: str, solver: str, backend: str, *given: Any
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    args, count = _arguments(*given[:-1]), program_by_key(key).num_states
    batch, steps = args.gates.shape[:2]
    states = [args.gates.new_empty(batch, steps, args.channels) for _ in range(count)]
    size = (args.sequences, args.channels)
    final = [args.gates.new_empty(size, dtype=args.dtype) for _ in range(count)]
    rows = _engine(solver, backend, args.gates.device).info_rows
    return states, final, args.gates.new_empty((rows, 2), dtype=torch.int64)


def _backward_fake(key: str, solver: str, backend: str, *given: Any) -> list[Tensor]:
    args = _arguments(*given[:-3])
    bias = () if args.bias is None else (args.bias,)
    leaves = (*bias, *args.fields, *args.params, *args.initial)
    rest = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in leaves]
    return [torch.empty_like(args.gates), *rest]


_LIBRARY.impl("forward", _forward_op, "CompositeExplicitAutograd")
_LIBRARY.impl("backward", _backward_op, "CompositeExplicitAutograd")
torch.library.register_fake("pararnn::forward", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("pararnn::backward", _backward_fake, lib=_LIBRARY)
