"""(chunks, fused) on a GPU: steps that are affine in their states, by chunks on tensor cores.

States that are solved by entries come first. Heads in which a number is not finite run again by the
loop's kernels, on the device: NaN is then where the loop has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.base.device import has_gpu
from pararnn.base.errors import EngineError
from pararnn.base.private import constant_in_graphs
from pararnn.codegen.chunks import (
    CHUNK,
    CHUNKS,
    PASSES,
    ChunkVariant,
    Plan,
    fields_of,
    form_of,
    gates_of,
    groups_of,
    interface_of_chunks,
    is_plain,
    plan_of,
    splits_of,
    state_bytes,
    why_no_chunks,
)
from pararnn.codegen.cuda import check_buildable
from pararnn.codegen.families import interface_of
from pararnn.codegen.interface import Words
from pararnn.codegen.mixing_cuda import shared_bytes_of
from pararnn.codegen.targets import CUDA, Gpu
from pararnn.engines.arguments import Arguments, Gradients, Solution, TensorSize
from pararnn.engines.engine import BackwardInputs, Engine
from pararnn.engines.fused.entries import entries_of
from pararnn.engines.fused.gpu import GpuKernel
from pararnn.engines.fused.launch import (
    Addresses,
    Launch,
    conversions_for,
    pack_known,
    template_of,
    to_kernel_layout,
)
from pararnn.engines.fused.layout import (
    gradients_like,
    new_grad_initial,
    new_states,
    sum_spans,
    unit_stride,
)
from pararnn.engines.fused.matrix import head_strides_of, of_heads
from pararnn.engines.fused.matrix_cuda import MatrixCuda
from pararnn.engines.fused.schedule import Adjoint
from pararnn.engines.fused.series import Pulled, Series, as_series, inputs_of, of_sequences, pull
from pararnn.engines.rule import Rank
from pararnn.engines.tuned import Workload
from pararnn.program.program import Program, program_by_key
from pararnn.program.pullback import evaluate

LOWEST = (9, 0)
"""Lowest compute capability for which `auto` takes chunks: where they were measured."""
MIN_LENGTH, MIN_AXIS = 256, 64
"""Steps, and lengths of both axes of a state, from which on `auto` takes chunks, for gates of 16
bits and readouts that are one sum over a state. benchmarks/chunks.py times 256 and 1,024 steps,
benchmarks/chunks_gpu.py 1,024 and 8,192."""
STORED_TERMS = torch.bfloat16, torch.float16
"""Dtypes of gates for which states before chunks are stored where checkpoints have no room."""


class Strides(NamedTuple):
    """Strides (B, T, H) on which a backward pass depends in addition to a call's signature: those
    of the answers' gradient, and of the gates' own."""

    output: tuple[int, ...]
    gates: tuple[int, ...]


class Slice(NamedTuple):
    """Where an answer of the readout is: group, query, and values; width 0: a number."""

    group: int
    query: int
    first: int
    width: int

    def of(self, answers: Sequence[Tensor]) -> Tensor:
        """Return the answer (B, T, H, ...) of those of all groups, a view."""
        x = answers[self.group][:, self.query]
        return x.narrow(-1, self.first, self.width) if self.width else x.select(-1, self.first)


@lru_cache(maxsize=1024)
def slices_of(program: Program) -> tuple[Slice, ...]:
    """Return where the answers are that a readout reads, in order."""
    form, slices = form_of(program), []
    for answer in form.answers:
        group = next(
            g for g, numbers in enumerate(groups_of(program)) if answer.component in numbers
        )
        plan, index = plan_of(program, group), groups_of(program)[group].index(answer.component)
        piece, width = plan.pieces[index], plan.size_values - len(plan.pieces) + 1
        query = plan.component.query.index(piece.query[answer.index])
        first = width + index - 1 if index else 0
        slices.append(Slice(group, query, first, width if piece.other else 0))
    return tuple(slices)


class Facts(NamedTuple):
    """Numbers of a program on which sizes of stored tensors depend.

    entries: entries of each stored series of states. answers: the queries and values of each group,
    none if an answer is the output. state_bytes: of each group, for gates of 16 and of 32 bits.
    """

    heads: int
    entries: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]
    state_bytes: tuple[tuple[int, ...], tuple[int, ...]]
    state_numbers: int


# Compiled regions must not look into the derivation of a form.
@constant_in_graphs
def _why_not(key: str) -> str | None:
    """Return the reason why there are no kernels over chunks for a program, or None."""
    return why_no_chunks(program_by_key(key))


@constant_in_graphs
def _pays(key: str, device: torch.device) -> bool:
    """Return True for programs whose chunks are faster than the loop on a GPU."""
    program = program_by_key(key)
    if not has_gpu() or CUDA.capability(device) < LOWEST or why_no_chunks(program) is not None:
        return False
    if entries_of(CUDA, program) or len(groups_of(program)) > 1 or not is_plain(program):
        return False
    plan = plan_of(program, 0)
    return min(plan.size_keys, plan.size_values) >= MIN_AXIS


@constant_in_graphs
def _facts(key: str) -> tuple[Any, ...]:
    return tuple(_facts_of(program_by_key(key)))


@lru_cache(maxsize=1024)
def _facts_of(program: Program) -> Facts:
    groups = range(len(groups_of(program)))
    plans = [plan_of(program, group) for group in groups]
    solvers, sizes = entries_of(CUDA, program), program.step.head
    answers = [(len(plan.component.query), plan.size_values) for plan in plans]
    by_dtype = [
        tuple(state_bytes(program, group, dtype) for group in groups)
        for dtype in (torch.bfloat16, torch.float32)
    ]
    return Facts(
        sizes.heads,
        tuple(entries.channels for entries in solvers for _ in entries.keys),
        () if is_plain(program) else tuple(answers),
        (by_dtype[0], by_dtype[1]),
        sum(math.prod(size) for size in sizes.states),
    )


@dataclass
class _Call:
    """A call of a program, with what its passes share.

    spans: see `_spans`. flags: heads of rows to run again, int32 (B, H). tensors: of the call, in
    kernel layout. series: states of all steps that are solved before others.
    """

    program: Program
    args: Arguments
    spans: Tensor | None
    flags: Tensor
    tensors: list[Tensor | None]
    series: Series = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, args: Arguments) -> _Call:
        make = args.signature.cache
        conversions = make(_Call, conversions_for, args, unit_stride, args.dtype, args.dtype)
        size = args.gates.shape[0], program.step.head.heads
        return cls(
            program,
            args,
            _spans(args),
            args.gates.new_zeros(size, dtype=torch.int32),
            to_kernel_layout(args, conversions),
        )

    @property
    def plans(self) -> list[Plan]:
        """Plan of each group."""
        return [plan_of(self.program, group) for group in range(len(groups_of(self.program)))]

    @property
    def chunks(self) -> int:
        """Chunks of all sequences, at most."""
        return _chunks(self.args)

    def fields(self) -> list[Tensor | None]:
        """Return the states that kernels read as gates, in the order of `fields_of`."""
        keys = fields_of(self.program)
        return [None if key[0] == "gate" else self.series[key].contiguous() for key in keys]

    def new_field_gradients(self) -> list[Tensor]:
        """Allocate gradients of fields, (B, T, H, ...)."""
        sizes, new = self.program.step.head, self.args.gates.new_zeros
        lead = (*self.args.gates.shape[:2], sizes.heads)
        of_kind = {"gate": sizes.gates, "state": sizes.states, "new_state": sizes.states}
        keys = fields_of(self.program)
        return [new((*lead, *of_kind[kind][n]), dtype=self.args.dtype) for kind, n in keys]

    def inputs(self, group: int) -> list[Tensor | None]:
        """Return the tensors with which the arguments of all kernels begin."""
        states: list[Tensor | None] = [None] * len(self.plans[group].component.states)
        if self.args.initial:
            of_call: Any = Arguments.unflatten(self.tensors, self.args.flatten()[1])
            states = [*join(self.plans[group], of_call.initial)]
        return [*self.tensors, self.spans, *states, *self.fields()]

    def memory_sizes(self) -> list[int]:
        """Return the bytes of the states of each group at chunks."""
        facts = _facts_of(self.program)
        return [self.chunks * facts.heads * n for n in _bytes(facts, self.args)]

    def new_memories(self) -> list[Tensor]:
        """Allocate the states of each group at chunks."""
        new = self.args.gates.new_empty
        return [new(size, dtype=torch.uint8) for size in self.memory_sizes()]

    def in_checkpoints(self, checkpoints: Tensor) -> list[Tensor]:
        """Return the states of each group at chunks in the place of checkpoints."""
        sizes = self.memory_sizes()
        return [*checkpoints.contiguous().view(-1).view(torch.uint8)[: sum(sizes)].split(sizes)]


class ChunksEngine(Engine):
    """Kernels over chunks on a type of GPU."""

    solver, backend = "chunks", "fused"
    completes = True
    builds = True

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.loop = gpu, MatrixCuda(gpu)

    def sums_samples(self, program: Program) -> bool:
        return True

    def can_save_values(self, program: Program, dtype: torch.dtype) -> bool:
        """Return True: states before chunks are written only where a backward pass reads them."""
        return True

    def stored(self, program: Program, args: Arguments) -> list[TensorSize]:
        """Return the sizes of states that are solved before others, of answers that a readout
        reads, and of states before chunks where these do not take the place of checkpoints."""
        if not args.options.save_values:
            return []
        facts = Facts(*_facts(program.key))
        rows, length = args.gates.shape[:2]
        sizes: list[tuple[int, ...]] = [(rows, length, n) for n in facts.entries]
        sizes += [(rows, q, length, facts.heads, v) for q, v in facts.answers]
        if _memory_place(facts, args) == "stored":
            numbers = (_chunks(args) * facts.heads * n // 4 for n in _bytes(facts, args))
            sizes += [(n,) for n in numbers]
        return [(size, args.dtype) for size in sizes]

    def linearises_returned(self, program: Program) -> bool:
        """Return False: states before chunks are not rounded."""
        return False

    def why_not(self, program: Program) -> str | None:
        return _why_not(program.key)

    def rank(self, program: Program, workload: Workload) -> tuple[Rank, str]:
        """Rank above the loop where chunks were measured to be faster, and are within the
        contract."""
        is_long, is_narrow = workload.size[1] >= MIN_LENGTH, workload.dtype.itemsize == 2
        if is_narrow and is_long and _pays(program.key, workload.device):
            return Rank.CHUNKS, "chunks of steps on tensor cores beat the loop"
        return Rank.ON_REQUEST_ONLY, "it was requested"

    def build(self, program: Program, dtype: torch.dtype, compiles: bool = True) -> None:
        """Compile the kernels, and those of the loop, or only generate them. Raises EngineError
        where that fails."""
        if dtype == torch.float64:
            raise EngineError(
                "kernels over chunks compute in float32, and gates are float64. Use gates of "
                "another dtype, or solver='sequential'"
            )
        capability = self.gpu.capability(torch.device("cuda"))
        for solver in (CHUNKS, self.loop.solver):
            check_buildable(program, dtype, capability, solver, compiles)
        for entries in entries_of(self.gpu, program):
            entries.build(compiles)

    def forward(self, program: Program, args: Arguments) -> Solution:
        call, facts = _Call.of(program, args), _facts_of(program)
        (output, checkpoints), final = new_states(program, args)
        place = _memory_place(facts, args) if args.options.save_values else "nowhere"
        memories: list[Tensor] = []
        if place == "checkpoints":
            memories = call.in_checkpoints(checkpoints)
        elif place == "stored":
            memories = call.new_memories()
        states, answers = self._solve(call, output, final, memories)
        self._loop_forward(call, (output, None), final)
        stored: list[Tensor] = []
        if args.options.save_values:
            stored = [*states, *(answers if facts.answers else ())]
            stored += [memory.view(torch.float32) for memory in memories if place == "stored"]
        info = args.gates.new_zeros((1, 2), dtype=torch.int64)
        return Solution((output, checkpoints, *stored), final, info)

    def _solve(
        self, call: _Call, output: Tensor, final: Sequence[Tensor], memories: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Write the output and final states, and states before chunks to the memories of groups if
        there are any. Return the states that are solved first, and the answers of each group."""
        program, args = call.program, call.args
        states: list[Tensor] = []
        for entries in entries_of(self.gpu, program):
            of_entries = entries.forward(args, final, call.flags)
            states += of_entries
            call.series |= entries.series(of_entries)
        answers: list[Tensor] = []
        for group, plan in enumerate(call.plans):
            of_group = output
            if not is_plain(program):
                (rows, length), heads = args.gates.shape[:2], program.step.head.heads
                size = (rows, len(plan.component.query), length, heads, plan.size_values)
                of_group = args.gates.new_empty(size, dtype=args.dtype)
            if call.spans is not None:
                of_group.zero_()  # also where there is no sequence
            last = join(plan, final)
            memory = memories[group] if memories else None
            self._run(call, group, "forward", None, [of_group, memory, *last, call.flags])
            put_apart(plan, last, final)
            answers.append(of_group)
        if not is_plain(program):
            output.copy_(_read_out(call, answers))
        return states, answers

    def _loop_forward(
        self, call: _Call, outputs: Sequence[Tensor | None], final: Sequence[Tensor]
    ) -> None:
        """Run heads with a flag again."""
        loop, tensors = self.loop.launch(call.program, call.args)
        self._run_loop(call, loop.launch, [*tensors, *outputs, *final])

    @staticmethod
    def _run_loop(call: _Call, launch: Launch | None, tensors: list[Tensor | None]) -> None:
        """Launch the loop on heads with a flag."""
        if launch is None:
            return
        tensors += [temporary.new(tensors) for temporary in launch.temporaries]
        words = launch.template.fill(tensors)
        interface = interface_of(call.program, "cuda", MatrixCuda.solver)
        words[interface.place("Inputs", "flags")] = call.flags.data_ptr()
        launch.kernel(words)

    def backward(self, program: Program, args: Arguments, inputs: BackwardInputs) -> Gradients:
        """Return the gradients by two kernels a group: the adjoint of the states, then the gates';
        before them those of the readout, after them those of states that were solved first."""
        states, grad_states, grad_final, wanted = inputs
        call, sizes = _Call.of(program, args), program.step.head
        memory, answers = self._recall(call, states)
        solvers = entries_of(self.gpu, program)
        grad_gates = torch.empty_like(args.gates)
        if args.seq is not None:
            grad_gates.zero_()
        kernel_gates = sizes.by_head(unit_stride(grad_gates))
        of_gates = sizes.split(kernel_gates)
        arriving = grad_states[0]
        arriving = args.gates.new_zeros(states[0].shape) if arriving is None else arriving
        arriving = unit_stride(arriving)
        given = [None if grad is None else grad.contiguous() for grad in grad_final]
        starts = new_grad_initial(args, grad_final)
        of_answers, pulled = [arriving], list[Pulled]()
        if not is_plain(program):
            of_answers, of_readout = _pull_readout(call, answers, arriving)
            pulled.append(of_readout)
        of_fields, partials = call.new_field_gradients(), list[Tensor]()
        for group, of_group in enumerate(of_answers):
            partials.append(
                self._pull_group(
                    call, group, of_group, memory[group], given, starts, kernel_gates, of_fields
                )
            )
        of_series = dict(zip(fields_of(program), of_fields, strict=True))
        for key, x in pulled[0].others.items() if pulled else ():
            of_series[key] = of_series[key] + x if key in of_series else x
        for entries in solvers:
            series = [call.series[key].flatten(2) for key in entries.keys]
            pulled.append(entries.backward(args, series, of_series, given, starts, call.flags))
        for number, into in enumerate(of_gates):
            grads = [of_steps.gates[number] for of_steps in pulled]
            terms = [x for x in (*grads, of_series.get(("gate", number))) if x is not None]
            if terms:
                into.copy_(sum(terms[1:], start=terms[0]))
            elif number not in _written_gates(program):
                into.zero_()
        # All flags are known: the loop has the sums of these heads.
        of_loop = self._loop_backward(call, kernel_gates, arriving, given, starts)
        sums = sum_spans(of_loop, args.samples)
        params = sums[..., sizes.width :]
        for partial in partials:
            params += self._sum_chunks(call, partial)
        for of_steps in pulled:
            kept = of_steps.params.masked_fill(call.flags[:, None, :, None] != 0, 0)
            params += sum_spans(kept, args.samples, steps=True)
        if args.bias is not None:
            of_bias = sum_spans(kernel_gates, args.samples, steps=True, dtype=args.dtype)
            sums[..., : sizes.width] = of_bias
        bias, grad_params = of_heads(program, sums)
        return gradients_like(args, grad_gates, kernel_gates, bias, (), grad_params, starts, wanted)

    def _recall(
        self, call: _Call, states: Sequence[Tensor]
    ) -> tuple[list[Tensor], Sequence[Tensor]]:
        """Return the states before chunks and the answers of each group, stored or computed again,
        and set the call's series."""
        program, args = call.program, call.args
        facts, (_, checkpoints, *stored) = _facts_of(program), states
        place = _memory_place(facts, args)
        if not args.options.save_values or place == "nowhere":
            memories = call.new_memories()
            (again, _), final = new_states(program, args)
            return memories, self._solve(call, again, final, memories)[1]
        rest = iter(stored)
        for entries in entries_of(self.gpu, program):
            call.series |= entries.series([next(rest) for _ in entries.keys])
        answers = [next(rest) for _ in facts.answers]
        memories = [memory.contiguous().view(-1).view(torch.uint8) for memory in rest]
        if place == "checkpoints":
            memories = call.in_checkpoints(checkpoints)
        return memories, answers

    def _pull_group(
        self,
        call: _Call,
        group: int,
        arriving: Tensor,
        memory: Tensor,
        given: Sequence[Tensor | None],
        starts: Sequence[Tensor],
        kernel_gates: Tensor,
        of_fields: list[Tensor],
    ) -> Tensor:
        """Write the gradients of a group's gates and initial states, and add those of fields.
        Return those of parameters, (chunks, H, numbers)."""
        program, args, plan = call.program, call.args, call.plans[group]
        adjoints = torch.empty_like(memory)
        of_arriving = (arriving.stride(0), *arriving.stride()[-3:-1])
        strides = Strides(of_arriving, kernel_gates.stride()[:3])
        first: list[Tensor | None] = [None] * len(plan.component.states)
        if starts:
            first = [*join(plan, starts)]
        last = join_gradients(plan, given, program, args)
        self._run(call, group, "reverse", strides, [arriving, adjoints, *last, *first, call.flags])
        put_apart(plan, first, starts)
        size = (call.chunks, program.step.head.heads, sum(program.param_numbers))
        partial = args.gates.new_zeros(size, dtype=args.dtype)
        fields = call.new_field_gradients() if group else of_fields
        results = [kernel_gates, *fields, partial, call.flags]
        self._run(call, group, "gradients", strides, [arriving, memory, adjoints, *results])
        if group:
            for total, x in zip(of_fields, fields, strict=True):
                total += x
        return partial

    def _sum_chunks(self, call: _Call, partial: Tensor) -> Tensor:
        """Return the sums (*samples, H, numbers) over chunks, but of heads that run again."""
        chunks, rows, samples = len(partial), call.args.gates.shape[0], call.args.samples
        number = torch.arange(chunks, device=partial.device)
        rows_of = number // max(1, chunks // max(1, rows))
        if call.spans is not None:
            rows_of = _rows_of_chunks(call.spans, chunks)
        kept = partial.masked_fill(call.flags[rows_of][..., None] != 0, 0)
        if call.spans is None or not samples:
            return sum_spans(kept, samples)
        # Samples have as many sequences each, but not as many chunks.
        first = call.spans[:: call.args.sequences // samples[0], 3].long()
        counts = first.diff(append=first.new_full((1,), chunks))
        return torch.segment_reduce(kept, "sum", lengths=counts)

    def _loop_backward(
        self,
        call: _Call,
        kernel_gates: Tensor,
        arriving: Tensor,
        given: Sequence[Tensor | None],
        starts: Sequence[Tensor],
    ) -> Tensor:
        """Write the gradients of heads with a flag by the loop. Return those of bias and params,
        (spans, H, numbers)."""
        program, args, sizes = call.program, call.args, call.program.step.head
        loop, inputs = self.loop.launch(program, args, Adjoint(kernel_gates, (), [arriving]))
        numbers = sizes.width + sum(program.param_numbers)
        sums = args.gates.new_zeros((loop.spans, sizes.heads, numbers), dtype=args.dtype)
        if loop.launch is not None:
            # The loop's states: those of a forward pass of heads with a flag.
            (output, checkpoints), final = new_states(program, args)
            self._loop_forward(call, (output, checkpoints), final)
            first: list[Tensor | None] = [*starts] or [None for _ in given]
            inputs += [checkpoints, arriving, *given, kernel_gates, *first, sums]
            self._run_loop(call, loop.launch, inputs)
        return sums

    def _run(
        self,
        call: _Call,
        group: int,
        direction: str,
        strides: Strides | None,
        tensors: Sequence[Tensor | None],
    ) -> None:
        gates = call.tensors[0]
        assert gates is not None
        key = (call.program, group, direction, call.chunks, strides, gates.data_ptr() % 4 == 0)
        make = call.args.signature.cache
        launch = make((_make_launch, self.gpu, *key), _make_launch, self.gpu, *key, call)
        if launch is not None:
            launch.run([*call.inputs(group), *tensors])


def join(plan: Plan, states: Sequence[Tensor]) -> list[Tensor]:
    """Return a group's states (S, H, ...), those of its pieces next to each other; themselves for
    one piece."""
    if len(plan.pieces) == 1:
        return [states[i] for i in plan.component.states]
    return [torch.cat(of_one, dim) for of_one, dim in _apart(plan, states)]


def put_apart(plan: Plan, joined: Sequence[Tensor | None], states: Sequence[Tensor]) -> None:
    """Copy what `join` put together to its pieces."""
    if len(plan.pieces) == 1 or not states:
        return
    for (of_one, dim), x in zip(_apart(plan, states), joined, strict=True):
        assert x is not None
        sizes = [piece.shape[dim] for piece in of_one]
        for piece, values in zip(of_one, x.split(sizes, dim), strict=True):
            piece.copy_(values)


def join_gradients(
    plan: Plan, grads: Sequence[Tensor | None], program: Program, args: Arguments
) -> list[Tensor | None]:
    """Return the gradients of a group's states as `join` does, None where all are absent."""
    numbers = [i for piece in plan.pieces for i in piece.states]
    if len(plan.pieces) == 1 or all(grads[i] is None for i in numbers):
        return [grads[i] for i in plan.component.states]
    sizes = program.step.head.state_sizes
    full = [
        args.gates.new_zeros((args.sequences, *size), dtype=args.dtype) if grad is None else grad
        for grad, size in zip(grads, sizes, strict=True)
    ]
    return [*join(plan, full)]


def _apart(plan: Plan, states: Sequence[Tensor]) -> list[tuple[list[Tensor], int]]:
    """Return the states of the pieces that are one state of a group, with an axis of values, and
    the dimension of this."""
    axes = plan.component.axes
    dim = -2 if axes[0] != plan.component.side else -1
    numbers = zip(*(piece.states for piece in plan.pieces), strict=True)
    others = [piece.other for piece in plan.pieces]
    return [
        (
            [
                states[i] if other else states[i].unsqueeze(dim)
                for i, other in zip(of_one, others, strict=True)
            ],
            dim,
        )
        for of_one in numbers
    ]


@lru_cache(maxsize=1024)
def _written_gates(program: Program) -> frozenset[int]:
    """Return the gates that the recurrence reads, whose gradients kernels write."""
    groups = range(len(groups_of(program)))
    writes = (write for group in groups for write in gates_of(program, group)[1].writes)
    return frozenset(target.number for target, _ in writes if target.kind == "grad_gate")


def _bytes(facts: Facts, args: Arguments) -> tuple[int, ...]:
    return facts.state_bytes[1 if args.gates.dtype == torch.float32 else 0]


def _memory_place(facts: Facts, args: Arguments) -> str:
    """Return where states before chunks are between passes: in the place of "checkpoints" if they
    have room there, or "stored"; "nowhere" if they are computed again."""
    if args.seq is not None:
        return "nowhere"
    if sum(_bytes(facts, args)) <= 4 * facts.state_numbers:
        return "checkpoints"
    return "stored" if args.gates.dtype in STORED_TERMS else "nowhere"


def _read_out(call: _Call, answers: Sequence[Tensor]) -> Tensor:
    """Return the outputs (B, T, H, V) of a readout in PyTorch."""
    args, readout = call.args, form_of(call.program).readout
    size = (*args.gates.shape[:2], *call.program.step.head.output)
    written = evaluate(readout, _readout_inputs(call, answers))
    width = (*size[:-1], size[-1] // len(written))
    outputs = [as_series(y, args).expand(width) for _, y in written]
    return of_sequences(args, torch.cat(outputs, -1))


def _readout_inputs(call: _Call, answers: Sequence[Tensor], others: Series | None = None) -> Series:
    """Return what a readout, or with others its gradient, reads."""
    form, slices = form_of(call.program), slices_of(call.program)
    tensors: Series = {("answer", i): slice_.of(answers) for i, slice_ in enumerate(slices)}
    statements = form.readout if others is None else form.readout_backward
    tensors |= call.series | (others or {})
    return inputs_of(call.program, call.args, statements, tensors)


def _pull_readout(
    call: _Call, answers: Sequence[Tensor], grad_output: Tensor
) -> tuple[list[Tensor], Pulled]:
    """Return the gradients of the answers of each group, and of what else a readout reads."""
    args, form = call.args, form_of(call.program)
    arriving = of_sequences(args, grad_output.to(args.dtype))
    pieces = arriving.chunk(len(form.readout.writes), -1)
    results = zip(form.readout.writes, pieces, strict=True)
    grads = {("grad_output", target.number): x for (target, _), x in results}
    tensors = _readout_inputs(call, answers, grads)
    pulled = pull(call.program, args, form.readout_backward, tensors)
    of_answers = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in answers]
    for number, slice_ in enumerate(slices_of(call.program)):
        grad = pulled.others.pop(("answer", number), None)
        if grad is not None:
            slice_.of(of_answers).add_(grad)
    return of_answers, pulled


def _chunks(args: Arguments) -> int:
    """Return the number of chunks of all sequences, at most."""
    rows, length = args.gates.shape[:2]
    most = -(-length // CHUNK)
    return rows * most if args.seq is None else rows * most + args.sequences


def _spans(args: Arguments) -> Tensor | None:
    """Return row, first step, steps and first chunk of each sequence, int32 (S, 4); None if rows
    are sequences."""
    if args.seq is None:
        return None
    rows, length = args.seq.shape
    device, count = args.seq.device, args.sequences
    seq = args.seq.flatten().long()
    real = seq >= 0
    index = torch.where(real, seq, count)
    position = torch.arange(rows * length, device=device)
    steps = torch.zeros(count + 1, dtype=torch.int64, device=device)
    steps = steps.scatter_add(0, index, torch.ones_like(index))[:count]
    first = torch.full((count + 1,), rows * length, dtype=torch.int64, device=device)
    first = first.scatter_reduce(0, index, position, "amin")[:count]
    chunks = -(-steps // CHUNK)
    base = chunks.cumsum(0) - chunks
    length = max(length, 1)
    row = torch.where(steps > 0, first // length, 0)
    return torch.stack([row, first % length, steps, base], 1).to(torch.int32)


def _rows_of_chunks(spans: Tensor, chunks: int) -> Tensor:
    """Return the row of each chunk."""
    number = torch.arange(chunks, device=spans.device)
    base = spans[:, 3].long().contiguous()
    sequence = torch.searchsorted(base, number, right=True) - 1
    return spans[:, 0].long()[sequence]


def _make_launch(
    gpu: Gpu,
    program: Program,
    group: int,
    direction: str,
    chunks: int,
    strides: Strides | None,
    aligned: bool,
    call: _Call,
) -> Launch | None:
    """Pack the words of a pass of a group on calls of a signature, None if there is no step."""
    args, sizes, device = call.args, program.step.head, call.args.gates.device
    gates = call.tensors[0]
    assert gates is not None
    gate_strides = sizes.by_head(gates).stride()[:3]
    vectors = [at for at, size in zip(sizes.gate_offsets, sizes.gates, strict=True) if size
               and size[0] % 2 == 0]  # fmt: skip
    even = aligned and all(x % 2 == 0 for x in (*gate_strides, *vectors))
    if strides is not None:
        even = even and all(stride % 2 == 0 for stride in strides.gates)
    rows, length = args.gates.shape[:2]
    sequences = rows if args.seq is None else args.sequences
    blocks, splits = sequences * sizes.heads, 1
    if direction != "gradients":
        splits = splits_of(program, group, blocks, gpu.cores(device))
    variant = ChunkVariant(
        direction,
        args.gates.dtype,
        group,
        args.seq is not None or args.reset is not None,
        even,
        args.bias is not None,
        shared_bytes_of(gpu.capability(device)),
        splits,
    )
    interface, addresses = interface_of_chunks(program, group), Addresses()
    flat: Any = Arguments.unflatten(addresses.array(len(call.tensors)), args.flatten()[1])
    inputs: dict[str, Words] = {
        "length": length,
        "heads": sizes.heads,
        "width": sizes.width,
        "reverse": int(args.options.reverse),
        **head_strides_of("gate", gate_strides),
        "gates": flat.gates,
        "bias": flat.bias,
        "params": list(flat.params),
        "reset": flat.reset,
    }
    most = -(-length // CHUNK)
    values: dict[str, Words] = {
        "in": pack_known(interface, "Inputs", inputs, addresses),
        "answer_stride": length * sizes.heads * plan_of(program, group).size_values,
        "chunks": most,
    }
    if strides is not None:
        values |= head_strides_of("answer", strides.output)
        values |= head_strides_of("grad", strides.gates)
    words = pack_known(interface, PASSES[direction], values, addresses)
    blocks *= splits * (most if direction == "gradients" else 1)
    kernel = gpu.kernels(program, variant, gpu.capability(device))["run"]
    if not blocks or not length:
        return None
    return Launch(GpuKernel(gpu, device, kernel, (blocks, 1)), template_of(words))


ENGINE = ChunksEngine(CUDA)
