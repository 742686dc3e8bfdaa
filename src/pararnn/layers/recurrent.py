"""One layer in one direction: projection, bias and cell."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from pararnn.base.numerics import autocast_dtype
from pararnn.base.parameters import CLIPS, Draw, draw_parameters
from pararnn.base.private import (
    are_functorch_transforms_active,
    calls_forward_alone,
    exporting,
    forward_level,
    get_tracing_state,
    unsafe_view,
)
from pararnn.base.tensors import ArrayLike, States, check_tensor
from pararnn.cells import Cell
from pararnn.cells.base import call_cell, resolve_config, sizes_of_class, unwrap
from pararnn.cells.find import check_cell_class
from pararnn.engines.arguments import Arguments, Options, checked_options, totals
from pararnn.engines.fused.layout import as_dtype
from pararnn.engines.request import DEFER, Request, loop_of, request, resolve
from pararnn.engines.table import PAIRS, Choice
from pararnn.layers.checks import check_count
from pararnn.layers.direct import may_run_directly, sequence_launch, step_launch
from pararnn.layers.onnx import operator_of, run_operator
from pararnn.layers.projection import (
    HeadwiseLinear,
    Weights,
    check_weight,
    project,
    record_projections,
)
from pararnn.layers.readout import Results, check_readout, solve_and_read
from pararnn.layers.recompute import gate_source, recompute_compiled, solve_without_gates
from pararnn.layers.resets import memory_of_pieces, split_at_resets
from pararnn.messages.group import OnRanks
from pararnn.program.program import program_of
from pararnn.sequences import Sequences, checked_reset, sequences_of, without_padding
from pararnn.solve import (
    Fields,
    Memory,
    SolveInputs,
    arguments_of,
    by_name,
    check_gates,
    exports_to_onnx,
    initial_of,
    plan_solve,
)


class SolveInfo(NamedTuple):
    """Counts of the last eager call's solves, int64, one entry for each layer and direction.

    sweeps: Newton updates. mended: columns finished by the sequential solver; with
    (newton, fused), tiles of channels that took more than one sweep.
    """

    sweeps: Tensor
    mended: Tensor


class Clipping:
    """Base of modules whose recurrent parameters `clip_after_step` bounds."""

    recurrent_clip: float | None

    def recurrent_parameters(self) -> list[Tensor]:
        """Return the parameters that are clipped.

        Raises ValueError for one that a parametrisation or a hook computes: it cannot be clamped.
        """
        raise NotImplementedError

    def clip_bound(self, to: float | None = None) -> float | None:
        """Return the bound of recurrent parameters, `to` or the layer's own; None for none.

        Raises ValueError for a negative one, and NaN: clamping would make all of them one number.
        """
        bound = self.recurrent_clip if to is None else to
        if bound is not None and not bound >= 0:
            raise ValueError(f"recurrent parameters are clipped to 0 or more, got {bound}")
        return bound

    @torch.no_grad()
    def clip_recurrent(self, by: str = "elementwise", to: float | None = None) -> None:
        """Clip the recurrent parameters, see `pararnn.clip_after_step`.

        Raises ValueError as `recurrent_parameters` and `clip_bound`.
        """
        bound = self.clip_bound(to)
        if bound is not None:
            for parameter in self.recurrent_parameters():
                CLIPS[by](parameter, bound)


class RecurrentLayer(OnRanks, Clipping, nn.Module):
    """One layer in one direction: `ParaRNN` stacks them, and models put them into their blocks.

    Args:
        cell_class: the `Cell` subclass.
        input_size, hidden_size: channels in and out; multiples of num_heads.
        bias: True if gates have biases.
        num_heads: heads of the input projection (block-diagonal; paper, Appendix C).
        reverse: run from the last step to the first.
        solver, backend, on_failure: as in `pararnn.solve`.
        mode: one of the paper's modes (`MODES`) in place of a solver and a backend.
        recurrent_clip: bound that `clip_after_step` clamps recurrent parameters to; None for none.
        recompute_gates: project the input again in the backward pass, in place of saving the gates
            (B, T, G, D): a layer then saves its input and its states only.
        keep_dtype: return final states in the output's dtype, as torch.nn.GRU does; else in float32
            (float64), the compute dtype, so that chunks lose nothing. `step` always returns states
            in the compute dtype.
        projection_gain: Kaiming's gain of the projection, see `HeadwiseLinear.draws`.
        recurrent_std: standard deviation of the recurrent parameters, see `Cell.draws`.
        device, dtype: of the parameters.
        config: the cell's config.

    Raises CellError for a malformed cell, ValueError for impossible sizes, TypeError for sizes that
    are no integers, EngineError for an unknown solver, backend or mode.
    """

    bias: nn.Parameter | None
    cell: Cell
    batch_invariant: bool = False
    """True if results of a row may not depend, to the bit, on other rows and on cuts in time: then
    the kernels of the loop run, by one layout (`Options.one_layout`)."""
    projection: type[HeadwiseLinear] = HeadwiseLinear
    """Class of the input projection."""
    shares_final: bool = True
    """True if several ranks exchange final states; False where nobody reads them."""

    def __init__(
        self,
        cell_class: type[Cell],
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        num_heads: int = 1,
        reverse: bool = False,
        solver: str | None = None,
        backend: str | None = None,
        mode: str | None = None,
        on_failure: str = "warn",
        recurrent_clip: float | None = 0.5,
        recompute_gates: bool = False,
        keep_dtype: bool = False,
        projection_gain: float = 1.0,
        recurrent_std: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **config: Any,
    ) -> None:
        super().__init__()
        check_cell_class(cell_class)
        sizes = {"input_size": input_size, "hidden_size": hidden_size, "num_heads": num_heads}
        for name, value in sizes.items():
            check_count(name, value)
        pair = request(solver, backend, mode)
        self.solver, self.backend = pair.solver or "auto", pair.backend or "auto"
        self.on_failure, self.recurrent_clip = on_failure, recurrent_clip
        self.input_size, self.hidden_size, self.num_heads = input_size, hidden_size, num_heads
        self.reverse, self.recompute_gates = reverse, recompute_gates
        self.keep_dtype = keep_dtype
        self.projection_gain, self.recurrent_std = projection_gain, recurrent_std
        self.counts: Tensor | None = None  # of the last eager call: see `pararnn.solve.Solved`
        self.choice: Choice | None = None
        self._make_weights(cell_class, bias, {"device": device, "dtype": dtype}, config)
        program_of(self.cell)  # now, because tracing cannot happen inside a compiled region
        check_readout(self.cell)

    def _make_weights(
        self, cell_class: type[Cell], bias: bool, factory: dict[str, Any], config: dict[str, Any]
    ) -> None:
        """Make the projection, the bias and the cell."""
        heads, size = self.num_heads, self.hidden_size
        if self.input_size % heads or size % heads:
            raise ValueError(
                f"input_size and hidden_size must be multiples of num_heads = {heads}, got "
                f"{self.input_size} and {size}"
            )
        values = resolve_config(cell_class, config)
        gates, channels = sizes_of_class(cell_class, values, (size, heads)).projected
        self.proj = self.projection(
            self.input_size, gates, channels, heads, gain=self.projection_gain, **factory
        )
        self.bias = nn.Parameter(torch.zeros((gates, channels), **factory)) if bias else None
        self.cell = cell_class(size, num_heads=heads, **factory, **config)
        if self.recurrent_std is not None:
            self.cell.reset_parameters(self.recurrent_std)

    def state_sizes_in(self, memory: Memory | None) -> tuple[tuple[int, ...], ...]:
        """Return the sizes of the states of one sequence, as a call with these memories takes and
        returns them."""
        return unwrap(self.cell).state_sizes_in(memory)

    @property
    def last_solve(self) -> SolveInfo | None:
        """Counts of the last eager call's solve; None before it.

        Compiled, exported and transformed (torch.func) calls leave it unchanged: recording from
        there would be a side effect, which activation checkpointing forbids.
        """
        return None if self.counts is None else SolveInfo(*totals(self.counts).unsqueeze(1))

    def forward(
        self,
        x: Tensor,
        initial: States | None = None,
        *,
        fields: Fields | None = None,
        memory: Memory | None = None,
        reset: ArrayLike | None = None,
        reset_states: States | None = None,
        cu_seqlens: ArrayLike | None = None,
        sequences: Sequences | None = None,
        all_states: bool = False,
        weights: Weights | None = None,
        keep_dtype: bool | None = None,
        solver: str | None = None,
        backend: str | None = None,
        mode: str | None = None,
    ) -> Any:
        """Run over whole sequences.

        Args:
            x: (B, T, input_size).
            initial: (B, hidden_size), a tuple of N for N states; None is zero. S in place of B with
                `cu_seqlens`, `sequences.total` with `sequences`.
            fields: the cell's fields by name, each (B, T), (B, T, hidden_size) or a number.
            memory: the cell's memories by name, as in `pararnn.solve`.
            reset: bool (B, T); such a step starts from the zero state, in the order of processing.
            reset_states: the states that such steps start from instead, (K, hidden_size) for K of
                them, row by row (as in `states[reset]`); a tuple of N for N states. They are
                differentiable.
            cu_seqlens: int (S + 1,), the starts of S sequences packed into one row (B = 1) and the
                end of the last; steps beyond it are padding, where x may hold anything.
            sequences: any other split into sequences, a `pararnn.sequences.Sequences`: the index of
                each step's sequence, int32 (B, T), -1 at padding, and their number. x must be
                finite at padding.
            all_states: return all states at all steps too.
            weights: those to run with, of a stack that holds them; None for the layer's own.
            keep_dtype: for this call; None for the layer's own.
            solver, backend, mode: for this call; else those of `using`, else the layer's own.

        Returns:
            (output, final): the first state, or the cell's readout, (B, T, hidden_size) in the
            dtype of the projection's result, 0 at padding; the final states, like `initial`, in
            float32 (or float64), unless `keep_dtype`. With `all_states` a third item: the states,
            a tuple of N tensors like the output.
        """
        cell = unwrap(self.cell)
        pair = self.requested_pair(solver, backend, mode)
        is_whole = sequences is None or (sequences.seq is sequences.reset is sequences.last is None)
        fields = by_name(fields)
        others = fields or None, memory, reset, reset_states, cu_seqlens, all_states or None
        if is_whole and all(other is None for other in others):
            direct = self._run_directly(cell, x, initial, weights, pair)
            if direct is not None:
                return direct
        order = reset, cu_seqlens, sequences
        named = fields, memory
        inputs = self._inputs(cell, x, initial, reset_states, named, all_states, order)
        sequences = inputs.sequences
        if cu_seqlens is not None:
            x = without_padding(x, sequences)
        compiling = torch.compiler.is_compiling()
        eager = not (compiling or are_functorch_transforms_active())
        recomputes = self.recompute_gates and torch.is_grad_enabled()
        # Exported programs have no backward pass, and Dynamo fails at checkpoints of any sizes.
        recomputes = recomputes and not (get_tracing_state() or exporting())
        program = program_of(cell)
        if recomputes:
            # Values take the memory that gates do.
            inputs = inputs._replace(options=inputs.options._replace(save_values=False))
        operator = None
        if compiling and weights is not None and exports_to_onnx():
            operator = operator_of(cell, x, weights, sequences, all_states)

        if operator is not None and weights is not None:
            output, final = run_operator(operator, cell, x, inputs, weights)
            states: tuple[Tensor, ...] = (output,)
        elif recomputes and compiling:

            def whole(x: Tensor, initial: Any) -> Results:
                args = self._arguments(cell, x, inputs._replace(initial=initial), weights)
                return solve_and_read(program, plan_solve(program, args, *pair), args)

            output, states, final, counts = recompute_compiled(whole, x, inputs.initial)
        elif recomputes and eager and forward_level() < 0:
            with record_projections() as projections:
                args = self._arguments(cell, x, inputs, weights)
            plan, source = plan_solve(program, args, *pair), gate_source(args.gates, projections)
            output, states, final, counts = solve_without_gates(program, plan, args, source)
        else:  # transforms of torch.func and levels of forward mode know no checkpoints
            args = self._arguments(cell, x, inputs, weights)
            plan = plan_solve(program, args, *pair)
            output, states, final, counts = solve_and_read(program, plan, args)
        if eager:
            self.__dict__["counts"] = counts  # nn.Module's way takes a microsecond longer
            self.__dict__["choice"] = plan.choice
        if sequences.last is not None:
            final = tuple([h.index_select(0, sequences.last) for h in final])
        if self.keep_dtype if keep_dtype is None else keep_dtype:
            final = tuple([as_dtype(h, output) for h in final])
        final = self._final_states(final)
        results = output, final[0] if len(final) == 1 else final
        return (*results, states) if all_states else results

    def _slow_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward` under a tracer. An exporter of PyTorch gives it all its arguments by
        position, which would fail: refuse that before."""
        exports_to_onnx()
        return super()._slow_forward(*args, **kwargs)

    def arguments(
        self,
        x: Tensor,
        initial: States | None = None,
        *,
        fields: Fields | None = None,
        memory: Memory | None = None,
        reset_states: States | None = None,
        all_states: bool = False,
        weights: Weights | None = None,
        reset: ArrayLike | None = None,
        cu_seqlens: ArrayLike | None = None,
        sequences: Sequences | None = None,
    ) -> Arguments:
        """Return the record of the solve that `forward` runs for these."""
        cell, order = unwrap(self.cell), (reset, cu_seqlens, sequences)
        named = fields, memory
        inputs = self._inputs(cell, x, initial, reset_states, named, all_states, order)
        if cu_seqlens is not None:
            x = without_padding(x, inputs.sequences)
        return self._arguments(cell, x, inputs, weights)

    def why_no_context(self) -> str | None:
        """Return the reason why ranks cannot share the layer's sequences, or None."""
        cell = unwrap(self.cell)
        program = program_of(cell)
        if program.why_one_sequence is not None:
            return f"{program.why_one_sequence}, which ranks do not share"
        if program.has_kernels or program.structure is not None:
            return None
        return (
            f"{type(cell).__name__} runs by autograd alone, which does not see other ranks "
            f"({program.why_sequential}): split the batch over ranks, or take another cell"
        )

    def cell_with(self, weights: Weights | None = None) -> Cell:
        """Return the layer's cell; for weights of a stack a copy that holds their values."""
        cell = unwrap(self.cell)
        if weights is not None:
            cell = copy.deepcopy(cell)
            for name, value in zip(type(cell).params, weights.params, strict=True):
                cell.register_parameter(name, nn.Parameter(value.detach().clone()))
        return cell

    def requested_pair(
        self, solver: str | None = None, backend: str | None = None, mode: str | None = None
    ) -> tuple[str, str]:
        """Return the pair that a call with these requests: else `using`'s, else the layer's."""
        pair = resolve(request(solver, backend, mode), Request(self.solver, self.backend))
        return loop_of(pair) if self.batch_invariant else pair

    def _decoding_pair(self) -> tuple[str, str]:
        """Return the pair for a single step."""
        pair = decoding_pair(self.backend)
        return loop_of(pair) if self.batch_invariant else pair

    def _inputs(
        self,
        cell: Cell,
        x: Tensor,
        initial: States | None,
        reset_states: States | None,
        named: tuple[Fields | None, Memory | None],
        all_states: bool,
        order: tuple[ArrayLike | None, ArrayLike | None, Sequences | None],
    ) -> SolveInputs:
        """Return what a call on x solves in addition to its gates; named: its fields and its
        memories; order: its resets, borders and sequences, see `sequences_of`."""
        check_tensor("x", x)
        if x.ndim != 3 or x.shape[-1] != self.input_size:
            raise ValueError(
                f"RecurrentLayer: Expected input to be (B, T, {self.input_size}), got "
                f"{tuple(x.shape)}"
            )
        if self.group and reset_states is not None:
            raise ValueError(
                "reset_states number sequences again on each rank, and the ranks would differ: "
                "begin sequences by cu_seqlens, with their initial states"
            )
        sequences = sequences_of(x, *order, self.group)
        fields, memory = named
        if reset_states is not None:
            whole = sequences
            sizes = dict(zip(cell.states, cell.state_sizes_in(memory), strict=True))
            initial, sequences = split_at_resets(
                x, initial, sequences, reset_states, sizes, self.reverse
            )
            memory = memory_of_pieces(memory, whole, sequences)
        options = self._options(cell, all_states)
        return SolveInputs(initial, sequences, options, fields, memory)

    def _final_states(self, final: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the final states of a solve as a call returns them."""
        return final

    def _options(self, cell: Cell, all_states: bool) -> Options:
        if all_states and not cell.keeps_states:
            raise ValueError(
                f"all_states of {type(cell).__name__} are tensors of each head, which no solver "
                "keeps for all steps: run pieces of the sequence, and take their final states"
            )
        return checked_options(
            reverse=self.reverse,
            on_failure=self.on_failure,
            output_only=not (all_states or cell.has_readout),
            context=self.group,
            no_final=bool(self.group) and not self.shares_final,
            one_layout=self.batch_invariant,
        )

    def _arguments(
        self, cell: Cell, x: Tensor, inputs: SolveInputs, weights: Weights | None
    ) -> Arguments:
        others: tuple[Any, ...] = (self.bias,)
        if weights is None:
            gates = self.proj(x)
        else:
            gates = self._project(cell, x, weights)
            others = (weights.bias, weights.params)
        check_gates(cell, gates)
        return arguments_of(cell, gates, inputs, *others)

    def _project(self, cell: Cell, x: Tensor, weights: Weights) -> Tensor:
        """Return the gates of an input by given weights, without their bias."""
        return project(x, weights.projection, cell.num_gates)

    def step(
        self,
        x_t: Tensor,
        state: States | None = None,
        *,
        fields: Fields | None = None,
        memory: Memory | None = None,
        reset: ArrayLike | None = None,
        reset_states: States | None = None,
        weights: Weights | None = None,
    ) -> tuple[Tensor, States]:
        """Run one time step, for decoding: x_t (B, input_size), states and results as in `forward`.

        It is `forward` at T = 1 by the sequential solver; fields are (B,), (B, hidden_size) or
        numbers, reset is (B,), memory is that of `forward`. States are as they are carried, in
        float32 (or float64): rounded ones (`keep_dtype`) would be off the layer's. Raises
        ValueError for a reverse layer.
        """
        self._check_step(x_t)
        others = memory, reset, reset_states, weights
        fields = {**by_name(fields)}
        if not fields and all(argument is None for argument in others):
            result = self.step_directly(x_t, state)
            if result is not None:
                return result
        for name, value in fields.items():
            if torch.is_tensor(value) and value.ndim:
                fields[name] = value.unsqueeze(1)
        if reset is not None:
            reset = checked_reset(x_t, reset, 1).unsqueeze(1)
        solver, backend = self._decoding_pair()
        x, final = self(
            x_t.unsqueeze(1),
            state,
            fields=fields,
            memory=memory,
            reset=reset,
            reset_states=reset_states,
            weights=weights,
            keep_dtype=False,
            solver=solver,
            backend=backend,
        )
        return x.squeeze(1), final

    def _check_step(self, x_t: Tensor) -> None:
        """Check that the layer can run one step, and its input."""
        if self.reverse:
            raise ValueError(
                "a reverse layer cannot decode step by step: it starts from the last step"
            )
        if self.group:
            raise ValueError(
                "a layer on several ranks cannot decode step by step: each holds a span of time"
            )
        check_tensor("x_t", x_t)
        if x_t.ndim != 2 or x_t.shape[1] != self.input_size:
            raise ValueError(
                f"RecurrentLayer: Expected input to be (B, {self.input_size}), got "
                f"{tuple(x_t.shape)}"
            )

    def _may_run_directly(self) -> bool:
        """Return True where a step needs no gradient, and is the forward pass of this class."""
        own = type(self).forward is RecurrentLayer.forward and not self.group
        return own and may_run_directly() and calls_forward_alone(self)

    def _run_directly(
        self,
        cell: Cell,
        x: Tensor,
        initial: States | None,
        weights: Weights | None,
        pair: tuple[str, str],
    ) -> tuple[Tensor, States] | None:
        """Run over whole rows by a cached launch that projects its inputs, if there is one; None
        where there is none, as where a gradient may be needed, on a GPU and for other inputs."""
        plain = isinstance(x, Tensor) and x.is_cpu and x.ndim == 3
        plain = plain and autocast_dtype(x.device) is None
        if not (plain and cell.keeps_states and self._may_run_directly()):
            return None
        if cell.fields or cell.has_readout or type(self)._project is not RecurrentLayer._project:
            return None
        if weights is None:
            if type(self.proj) is not HeadwiseLinear or not calls_forward_alone(self.proj):
                return None
            weights = Weights(self.proj.weight, self.bias, call_cell(cell))
        bias = () if weights.bias is None else (weights.bias,)
        given = () if initial is None else initial_of(cell, initial)
        check_weight(x, weights.projection)
        tensors = (x, weights.projection, *bias, *given, *weights.params)
        launch = sequence_launch(program_of(cell), pair, tensors, len(bias), self.reverse)
        if launch is None:
            return None
        output, final = launch.run(tensors)
        self.__dict__["counts"], self.__dict__["choice"] = launch.counts, launch.choice
        return output, final[0] if len(final) == 1 else final

    def step_directly(
        self, x_t: Tensor, state: States | None, *, stacked: bool = False, **options: Any
    ) -> tuple[Tensor, States] | None:
        """Run one time step from given states or zero, by a cached launch if it has one; None where
        a gradient may be needed. stacked: states are those of a stack of one layer, (1, B, D).
        options: as in `step_launch`."""
        cell = unwrap(self.cell)
        if cell.fields or cell.memory or not self._may_run_directly():
            return None
        gates = self.proj(x_t.unsqueeze(1))
        check_gates(cell, gates)
        bias = () if self.bias is None else (self.bias,)
        initial = states_of_step(cell, state, options)
        tensors = (gates, *bias, *initial, *call_cell(cell))
        how = arguments_of_step, len(bias), len(initial), stacked
        return self._launch_step(cell, tensors, *how, **options)

    def _launch_step(
        self,
        cell: Cell,
        tensors: Sequence[Tensor],
        arguments: Callable[..., Arguments],
        *how: Any,
        check: Callable[[], object] | None = None,
        shares: bool = False,
    ) -> tuple[Tensor, States]:
        """Run one time step on the tensors of a call, see `step_launch`; `how` ends with whether
        states are those of a stack."""
        program, pair = program_of(cell), self._decoding_pair()
        lead = (1,) * how[-1]
        options = {"check": check, "lead": lead, "shares": shares}
        step = step_launch(program, pair, tensors, arguments, *how, **options)
        if step is not None:
            output, final = step.run(tensors)
            choice, counts = step.choice, step.counts
        else:
            if check is not None:
                check()
            args = replace(arguments(tensors, *how), options=self._options(cell, False))
            plan = plan_solve(program, args, *pair)
            output, _, final, counts = solve_and_read(program, plan, args)
            choice, output = plan.choice, output.squeeze(1)
            final = tuple([unsafe_view(h, (*lead, *h.shape)) for h in final]) if lead else final
        self.__dict__["counts"], self.__dict__["choice"] = counts, choice
        return output, final[0] if len(final) == 1 else final

    def recurrent_parameters(self) -> list[Tensor]:
        return clipped_parameters(unwrap(self.cell))

    def draws(self) -> dict[str, Draw]:
        """Return how the layer's bias is drawn: zero. The projection and the cell draw theirs."""
        return {} if self.bias is None else {"bias": Draw("constant")}

    def reset_parameters(self) -> None:
        """Initialise again (paper, Appendix C): see `HeadwiseLinear` and `Param`; zero biases."""
        self.proj.reset_parameters(self.projection_gain)
        std = self.recurrent_std
        self.cell.reset_parameters(*(() if std is None else (std,)))  # a cell's own takes none
        draw_parameters(self, self.draws())

    def extra_repr(self) -> str:
        names = ("num_heads", "reverse", "solver", "backend")
        options = [f"{name}={getattr(self, name)!r}" for name in names]
        return ", ".join([str(self.input_size), str(self.hidden_size), *options])


def stored_parameter(module: nn.Module, name: str) -> Tensor:
    """Return a recurrent parameter to be clipped. Raises ValueError for one that is computed."""
    if name not in module._parameters:
        raise ValueError(
            f"{name} is computed by a parametrisation or a hook: clamping it would change "
            "nothing; leave recurrent_clip at None, or let that bound it"
        )
    parameter: Tensor = getattr(module, name)
    return parameter


def clipped_parameters(cell: Cell) -> list[Tensor]:
    """Return the parameters of a cell that are clipped.

    Raises ValueError for one that a parametrisation or a hook computes: it cannot be clamped.
    """
    for name, param in type(cell).params.items():
        if param.recurrent and param.trainable and name not in cell._parameters:
            owner = "parametrisation" if is_parametrized(cell, name) else "hook"
            raise ValueError(
                f"{name} of {program_of(cell).cell_name} is computed by a {owner}: "
                "clamping it would change nothing; set recurrent_clip=None on the layer or let "
                f"the {owner} bound it"
            )
    return list(cell.recurrent_parameters())


def states_of_step(
    cell: Cell, state: States | None, options: Mapping[str, Any]
) -> tuple[Tensor, ...]:
    """Return the initial states of a step as a tuple; errors as a solve, unless options has a
    `check` of its own."""
    if state is None:
        return ()
    if options.get("check") is None:
        return initial_of(cell, state)
    return state if type(state) is tuple else (state,)  # type: ignore[return-value]


def arguments_of_step(
    tensors: Sequence[Tensor], biases: int, states: int, stacked: bool
) -> Arguments:
    """Return the record of a step on gates, a bias or none, initial states, which may be those of a
    stack of one layer, and parameters."""
    gates, *rest = tensors
    bias, initial = rest[:biases], rest[biases : biases + states]
    if stacked:
        initial = [h.squeeze(0) for h in initial]
    params = tuple(rest[biases + states :])
    return Arguments(
        gates=gates,
        bias=bias[0] if bias else None,
        fields=(),
        params=params,
        initial=tuple(initial),
        sequences=len(gates),
        options=Options(output_only=True),
    )


def decoding_pair(backend: str) -> tuple[str, str]:
    """Return the pair for a single step of a layer with this backend."""
    _, backend = resolve(DEFER, Request(None, backend))
    return "sequential", backend if ("sequential", backend) in PAIRS else "auto"
