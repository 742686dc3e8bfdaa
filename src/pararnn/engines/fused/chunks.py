"""(chunks, fused) on a GPU: steps that are affine in their states, by chunks on tensor cores.

Heads in which a number is not finite run again by the loop's kernels, on the device: NaN is then
where the loop has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pararnn.base.errors import EngineError
from pararnn.base.private import constant_in_graphs
from pararnn.codegen.chunks import (
    CHUNK,
    CHUNKS,
    ChunkVariant,
    component_of,
    gate_offsets,
    interface_of_chunks,
    is_plain,
    param_numbers,
    plan_of,
    splits_of,
    state_bytes,
    terms_of,
    why_no_chunks,
)
from pararnn.codegen.cuda import Make, check_buildable, kernels_of, source_of
from pararnn.codegen.families import interface_of
from pararnn.codegen.interface import Words
from pararnn.codegen.mixing_cuda import shared_bytes_of
from pararnn.codegen.targets import CUDA, Gpu
from pararnn.engines.arguments import Arguments, Gradients, Solution, TensorSize
from pararnn.engines.engine import Engine, Incoming
from pararnn.engines.fused.launch import (
    Addresses,
    Conversions,
    Template,
    conversions_for,
    template_of,
    to_kernel_layout,
)
from pararnn.engines.fused.launch import Launch as LoopLaunch
from pararnn.engines.fused.layout import (
    gradients_like,
    new_grad_initial,
    new_states,
    unit_stride,
)
from pararnn.engines.fused.matrix import of_param, shape_of
from pararnn.engines.fused.matrix_cuda import MatrixCuda
from pararnn.engines.fused.schedule import Adjoint
from pararnn.engines.rule import Rank, Size
from pararnn.program.affine import AffineForm, Component
from pararnn.program.program import Program, program_by_key
from pararnn.program.pullback import evaluate


class Strides(NamedTuple):
    """Strides (B, T, H) on which a backward pass depends in addition to a call's signature: those
    of the answers' gradient, and of the gates' own."""

    output: tuple[int, ...]
    gates: tuple[int, ...]


class ChunkLaunch(NamedTuple):
    """A pass on calls of one signature. blocks: of its grid."""

    conversions: Conversions
    template: Template
    kernel: Any
    blocks: int


class ChunksEngine(Engine):
    """Kernels over chunks on a type of GPU."""

    solver, backend = "chunks", "fused"
    completes = True
    builds = True

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.loop = gpu, MatrixCuda(gpu)

    def can_save_values(self, program: Program, dtype: torch.dtype) -> bool:
        """Return True: states before chunks are written only where a backward pass reads them."""
        return True

    def stored(self, program: Program, args: Arguments) -> list[TensorSize]:
        """Return the size of answers that a readout reads; states before chunks are where those of
        checkpoints are."""
        kept = _kept_answers(program.key) if args.options.save_values else None
        return [] if kept is None else [(_answers_size(program, args, kept), args.dtype)]

    def linearises_returned(self, program: Program) -> bool:
        """Return False: states before chunks are not rounded."""
        return False

    def why_not(self, program: Program) -> str | None:
        """Return the reason why there are no kernels over chunks for a cell, or None."""
        return _why_not(program.key)

    def rank(
        self, program: Program, size: Size, dtype: torch.dtype, device: torch.device
    ) -> tuple[Rank, str]:
        """Rank by request only."""
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
        make: Make = kernels_of if compiles else lambda *kernel: source_of(*kernel[:2])
        for solver in (CHUNKS, self.loop.solver):
            check_buildable(program, dtype, capability, solver, make)

    def forward(self, program: Program, args: Arguments) -> Solution:
        """Solve the recurrence."""
        spans, flags = _spans(args), _new_flags(program, args)
        memory = args.options.save_values and _fits(program, args)
        (output, states), final, answers = self._solve(program, args, spans, flags, memory)
        if args.gates.numel():
            self._loop_forward(program, args, (output, None), final, flags)
        info = args.gates.new_zeros((1, 2), dtype=torch.int64)
        stored = (answers,) if self.stored(program, args) else ()
        return Solution((output, states, *stored), final, info)

    def _solve(
        self,
        program: Program,
        args: Arguments,
        spans: Tensor | None,
        flags: Tensor,
        memory: Tensor | bool | None,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """Return the output and the memory of checkpoints, final states, and the answers that the
        output is computed of. memory: where states before chunks are written, True: in place of
        checkpoints."""
        outputs, final = new_states(program, args)
        answers = outputs[0]
        kept = _kept_answers(program.key)
        if kept is not None:
            answers = args.gates.new_empty(_answers_size(program, args, kept), dtype=args.dtype)
        if spans is not None:
            answers.zero_()  # also where there is no sequence
        if not isinstance(memory, Tensor):
            memory = outputs[1] if memory else None
        tensors, launch = self._launch(program, args, "forward", spans)
        self._run(args, launch, [*tensors, spans, answers, memory, *final, flags])
        if answers is not outputs[0]:
            outputs[0].copy_(_read_out(program, args, answers))
        return outputs, final, answers

    def _loop_forward(
        self,
        program: Program,
        args: Arguments,
        outputs: Sequence[Tensor | None],
        final: Sequence[Tensor],
        flags: Tensor,
    ) -> None:
        """Run heads with a flag again."""
        loop, tensors = self.loop.launch(program, args)
        self._run_loop(program, loop.launch, [*tensors, *outputs, *final], flags)

    @staticmethod
    def _run_loop(
        program: Program, launch: LoopLaunch, tensors: list[Tensor | None], flags: Tensor
    ) -> None:
        """Launch the loop on heads with a flag."""
        tensors += [temporary.new(tensors) for temporary in launch.temporaries]
        words = launch.template.fill(tensors)
        interface = interface_of(program, "cuda", MatrixCuda.solver)
        words[interface.words("Inputs") - 1] = flags.data_ptr()
        launch.kernel(words)

    def backward(
        self,
        program: Program,
        args: Arguments,
        states: tuple[Tensor, ...],
        grad_states: Incoming,
        grad_final: Incoming,
        wanted: Sequence[str],
    ) -> Gradients:
        """Return the gradients by two kernels: the adjoint of the states, then the gates'."""
        sizes, spans, flags = program.head_sizes, _spans(args), _new_flags(program, args)
        assert sizes is not None
        memory, chunks = states[1].contiguous(), _chunks(args, spans)
        plain = is_plain(_form_of(program))
        answers = states[2] if len(states) > 2 else None
        new = args.gates.new_empty
        if not args.options.save_values or not _fits(program, args):
            memory = new(
                chunks * sizes.heads * _state_bytes(program, args.gates.dtype), dtype=torch.uint8
            )
            answers = self._solve(program, args, spans, flags, memory)[2]
        grad_gates = torch.empty_like(args.gates)
        if args.seq is not None:
            grad_gates.zero_()
        kernel_gates = sizes.by_head(unit_stride(grad_gates))
        for number in _unread_gates(program):
            sizes.split(kernel_gates)[number].zero_()
        arriving = grad_states[0]
        arriving = args.gates.new_zeros(states[0].shape) if arriving is None else arriving
        arriving = grad_answers = unit_stride(arriving)
        of_readout: _ReadoutGradients | None = None
        if not plain:
            assert answers is not None
            of_readout = _pull_readout(program, args, answers, arriving)
            grad_answers = of_readout.answers
        strides = Strides(grad_answers.stride()[-4:-1], kernel_gates.stride()[:3])
        grad_initial = new_grad_initial(args, grad_final)
        given = [None if grad is None else grad.contiguous() for grad in grad_final]
        starts = grad_initial or (None,) * len(given)
        adjoints = new(
            chunks * sizes.heads * _state_bytes(program, args.gates.dtype), dtype=torch.uint8
        )
        numbers = param_numbers(program)
        partial = args.gates.new_zeros((chunks, sizes.heads, sum(numbers)), dtype=args.dtype)
        tensors, launch = self._launch(program, args, "reverse", spans, strides)
        self._run(args, launch, [*tensors, spans, grad_answers, adjoints, *given, *starts, flags])
        tensors, launch = self._launch(program, args, "gradients", spans, strides)
        results = [kernel_gates, partial, flags]
        given_states = [grad_answers, memory, adjoints]
        self._run(args, launch, [*tensors, spans, *given_states, *results])
        if of_readout is not None:
            for into, grad in zip(sizes.split(kernel_gates), of_readout.gates, strict=True):
                if grad is not None:
                    into.add_(grad)
        loop, inputs = self.loop.launch(program, args, Adjoint(kernel_gates, (), [arriving]))
        rows = args.gates.shape[0]
        of_loop = args.gates.new_zeros(
            (loop.spans, sizes.heads, sizes.width + sum(numbers)), dtype=args.dtype
        )
        if args.gates.numel():
            # The loop's states: those of a forward pass of heads with a flag.
            (output, checkpoints), final = new_states(program, args)
            self._loop_forward(program, args, (output, checkpoints), final, flags)
            inputs += [checkpoints, arriving, *given, kernel_gates, *starts, of_loop]
            self._run_loop(program, loop.launch, inputs, flags)
        bias = None
        if args.bias is not None:
            bias = kernel_gates.sum((0, 1), dtype=args.dtype).reshape(1, -1)
        grad_params = []
        if numbers:
            rows_of = torch.arange(chunks, device=flags.device) // max(1, chunks // max(1, rows))
            if spans is not None:
                rows_of = _rows_of_chunks(spans, chunks)
            partial = partial.masked_fill(flags[rows_of][..., None] != 0, 0)
            total = partial.sum(0) + of_loop.sum(0)[:, sizes.width :]
            if of_readout is not None:
                rows_of_readout = of_readout.params.masked_fill(flags[:, None, :, None] != 0, 0)
                total += rows_of_readout.sum((0, 1))
            grad_params = [
                of_param(grad, sizes.param(shape_of(program, name)))
                for name, grad in zip(program.params, total.split(numbers, -1), strict=True)
            ]
        return gradients_like(
            args, grad_gates, kernel_gates, bias, (), grad_params, grad_initial, wanted
        )

    def _run(self, args: Arguments, launch: ChunkLaunch, tensors: Sequence[Tensor | None]) -> None:
        if launch.blocks:
            device = args.gates.device
            words = launch.template.fill(tensors)
            self.gpu.call(device, launch.kernel, (launch.blocks, 1), words, self.gpu.stream(device))

    def _launch(
        self,
        program: Program,
        args: Arguments,
        direction: str,
        spans: Tensor | None,
        strides: Strides | None = None,
    ) -> tuple[list[Tensor | None], ChunkLaunch]:
        """Return a call's tensors in kernel layout, and the cached launch of a pass."""
        chunks = _chunks(args, spans)
        aligned = args.gates.data_ptr() % 4 == 0
        key = (_make_launch, self.gpu, program, direction, chunks, strides, aligned)
        launch = args.signature.cache(key, *key, args)
        return to_kernel_layout(args, launch.conversions), launch


# Compiled regions must not look into the derivation of a form.
@constant_in_graphs
def _why_not(key: str) -> str | None:
    """Return the reason why there are no kernels over chunks for a program, or None."""
    program = program_by_key(key)
    form = program.affine_form()
    if isinstance(form, str):
        return f"its step is not affine in its states: {form}"
    return why_no_chunks(program, form)


@constant_in_graphs
def _kept_answers(key: str) -> tuple[int, int] | None:
    """Return how many answers a program's readout reads, and how many values each has; None if an
    answer is its output."""
    program = program_by_key(key)
    form = _form_of(program)
    plan = plan_of(program, component_of(form))
    return None if is_plain(form) else (len(plan.component.query), plan.size_values)


def _form_of(program: Program) -> AffineForm:
    form = program.affine_form()
    assert isinstance(form, AffineForm)
    return form


def _unread_gates(program: Program) -> list[int]:
    """Return the gates whose gradients the kernels do not write: the recurrence does not read
    them."""
    written = {target for target, _ in _form_of(program).gates_backward.writes}
    numbers = {target.number for target in written if target.kind == "grad_gate"}
    return [number for number in range(len(program.gates)) if number not in numbers]


def _state_bytes(program: Program, dtype: torch.dtype) -> int:
    return state_bytes(program, component_of(_form_of(program)), terms_of(dtype))


def _answers_size(program: Program, args: Arguments, kept: tuple[int, int]) -> tuple[int, ...]:
    """Return the size of the answers that a readout reads, (queries, B, T, H, values)."""
    sizes, (queries, values) = program.head_sizes, kept
    assert sizes is not None
    rows, length = args.gates.shape[:2]
    return queries, rows, length, sizes.heads, values


def _readout_inputs(
    program: Program, args: Arguments, answers: Tensor
) -> dict[tuple[str, int], Tensor]:
    """Return what a readout reads, by kind and number, in the compute dtype."""
    sizes, form = program.head_sizes, _form_of(program)
    assert sizes is not None
    component = form.components[component_of(form)]
    assert isinstance(component, Component)
    gates = sizes.by_head(args.gates).to(args.dtype)
    if args.bias is not None:
        gates = gates + args.bias.to(args.dtype).view(sizes.heads, sizes.width)
    tensors = {("gate", i): gate for i, gate in enumerate(sizes.split(gates))}
    tensors |= {("param", i): param.to(args.dtype) for i, param in enumerate(args.params)}
    for i, answer in enumerate(form.answers):
        x = answers[answer.index]
        tensors["answer", i] = x.squeeze(-1) if component.other is None else x
    return tensors


def _of_sequences(args: Arguments, x: Tensor) -> Tensor:
    """Return (B, T, ...) with zero at steps of no sequence."""
    if args.seq is None:
        return x
    real = (args.seq >= 0).reshape(*args.seq.shape, *[1] * (x.ndim - 2))
    return torch.where(real, x, x.new_zeros(()))


def _read_out(program: Program, args: Arguments, answers: Tensor) -> Tensor:
    """Return the outputs (B, T, H, V) of a readout in PyTorch."""
    sizes = program.head_sizes
    assert sizes is not None
    size = (*args.gates.shape[:2], *sizes.output)
    written = evaluate(_form_of(program).readout, _readout_inputs(program, args, answers))
    width = (*size[:-1], size[-1] // len(written))
    outputs = [torch.as_tensor(y, device=answers.device).expand(width) for _, y in written]
    return _of_sequences(args, torch.cat(outputs, -1))


class _ReadoutGradients(NamedTuple):
    """Gradients of what a readout reads: answers, contiguous; of gates, None without one; params
    (B, T, H, numbers)."""

    answers: Tensor
    gates: list[Tensor | None]
    params: Tensor


def _pull_readout(
    program: Program, args: Arguments, answers: Tensor, grad_output: Tensor
) -> _ReadoutGradients:
    """Return the gradients of a readout in PyTorch."""
    sizes, form = program.head_sizes, _form_of(program)
    assert sizes is not None
    tensors = _readout_inputs(program, args, answers)
    arriving = _of_sequences(args, grad_output.to(args.dtype))
    pieces = arriving.chunk(len(form.readout.writes), -1)
    results = zip(form.readout.writes, pieces, strict=True)
    tensors |= {("grad_output", target.number): x for (target, _), x in results}
    lead = (*args.gates.shape[:2], sizes.heads)
    gates: list[Tensor | None] = [None] * len(sizes.gates)
    grad_answers = torch.zeros_like(answers, memory_format=torch.contiguous_format)
    params = answers.new_zeros((*lead, sum(param_numbers(program))))
    of_params = params.split(param_numbers(program), -1)
    for target, value in evaluate(form.readout_backward, tensors):
        x = _of_sequences(args, torch.as_tensor(value, device=answers.device))
        if target.kind == "grad_gate":
            gates[target.number] = x
        elif target.kind == "grad_param":
            size = [sizes.lengths[axis] for axis in target.axes]
            of_params[target.number].copy_(x.expand(*lead, *size).reshape(*lead, -1))
        else:
            into = grad_answers[form.answers[target.number].index]
            into.copy_(x.reshape(*x.shape, *[1] * (into.ndim - x.ndim)))
    return _ReadoutGradients(grad_answers, gates, params)


def _new_flags(program: Program, args: Arguments) -> Tensor:
    sizes = program.head_sizes
    assert sizes is not None
    return args.gates.new_zeros((args.gates.shape[0], sizes.heads), dtype=torch.int32)


def _chunks(args: Arguments, spans: Tensor | None) -> int:
    """Return the number of chunks of all sequences, at most."""
    rows, length = args.gates.shape[:2]
    most = -(-length // CHUNK)
    return rows * most if spans is None else rows * most + args.sequences


def _fits(program: Program, args: Arguments) -> bool:
    """Return True if states before chunks, as operands, take the place of checkpoints."""
    sizes = program.head_sizes
    assert sizes is not None
    numbers = sum(math.prod(size) for size in sizes.states)
    return args.seq is None and _state_bytes(program, args.gates.dtype) <= 4 * numbers


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
    direction: str,
    chunks: int,
    strides: Strides | None,
    aligned: bool,
    args: Arguments,
) -> ChunkLaunch:
    """Pack the words of a pass on calls of a signature."""
    sizes, form, device = program.head_sizes, _form_of(program), args.gates.device
    assert sizes is not None
    dtype = args.signature.dtype
    conversions = conversions_for(args, unit_stride, dtype, dtype)
    tensors = to_kernel_layout(args, conversions)
    gates = tensors[0]
    assert gates is not None
    by_head = sizes.by_head(gates)
    gate_strides = by_head.stride()[:3]
    even = aligned and all(stride % 2 == 0 for stride in gate_strides)
    pairs = zip(gate_offsets(program), sizes.gates, strict=True)
    even = even and all(at % 2 == 0 for at, size in pairs if size and size[0] % 2 == 0)
    if strides is not None:
        even = even and all(stride % 2 == 0 for stride in strides.gates)
    component = component_of(form)
    rows, length = args.gates.shape[:2]
    events = args.seq is not None or args.reset is not None
    sequences = rows if args.seq is None else args.sequences
    blocks = sequences * sizes.heads
    splits = 1
    if direction != "gradients":
        splits = splits_of(program, component, blocks, gpu.cores(device))
    variant = ChunkVariant(
        direction,
        args.gates.dtype,
        component,
        events,
        even,
        is_plain(form),
        args.bias is not None,
        shared_bytes_of(gpu.capability(device)),
        terms_of(args.gates.dtype),
        splits,
    )
    interface, addresses = interface_of_chunks(program, component), Addresses()
    states = interface.counts.states
    flat: Any = Arguments.unflatten(addresses.array(len(tensors)), args.flatten()[1])
    inputs: dict[str, Words] = {
        "length": length,
        "heads": sizes.heads,
        "width": sizes.width,
        "reverse": int(args.options.reverse),
        **dict(zip(("gate_row", "gate_time", "gate_head"), gate_strides, strict=True)),
        "gates": flat.gates,
        "bias": flat.bias,
        "params": list(flat.params),
        "spans": addresses.next(),
        "reset": flat.reset,
        "initial": list(flat.initial) or [0] * states,
    }
    words: dict[str, Words] = {"in": interface.pack("Inputs", inputs)}
    answer_stride = rows * length * sizes.heads * plan_of(program, component).size_values
    if direction == "forward":
        words |= {
            "answers": addresses.next(),
            "answer_stride": answer_stride,
            "memory": addresses.next(),
            "final": addresses.array(states),
            "flags": addresses.next(),
        }
        struct = "ForwardLaunch"
    else:
        assert strides is not None
        names = ("answer_row", "answer_time", "answer_head")
        words |= {"grad_answers": addresses.next(), "answer_stride": answer_stride}
        words |= dict(zip(names, strides.output, strict=True))
        if direction == "reverse":
            words |= {
                "memory": addresses.next(),
                "grad_final": addresses.array(states),
                "grad_initial": addresses.array(states),
                "flags": addresses.next(),
            }
            struct = "ReverseLaunch"
        else:
            names = ("grad_row", "grad_time", "grad_head")
            most = -(-length // CHUNK)
            words |= {
                "chunks": most,
                "states": addresses.next(),
                "adjoints": addresses.next(),
                **dict(zip(names, strides.gates, strict=True)),
                "grad_gates": addresses.next(),
                "partial": addresses.next(),
                "flags": addresses.next(),
            }
            struct = "GradientLaunch"
            blocks *= most
    blocks *= splits
    kernel = gpu.kernels(program, variant, gpu.capability(device))["run"]
    template = template_of(interface.pack(struct, words))
    return ChunkLaunch(conversions, template, kernel, blocks if length else 0)


ENGINE = ChunksEngine(CUDA)
