"""`explain`: which solver and backend would run a layer, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pararnn.base.device import type_of
from pararnn.cells import Cell
from pararnn.cells.base import unwrap
from pararnn.engines.arguments import Arguments
from pararnn.engines.fused.layout import heads_of_matrices
from pararnn.engines.request import Request, loop_of, request, resolve, split_of_context
from pararnn.engines.split import Split
from pararnn.engines.table import PAIRS, choose, why_not
from pararnn.engines.tuned import Workload
from pararnn.layers import ParaRNN, RecurrentLayer
from pararnn.layers.rnn import with_rows
from pararnn.program.program import Program, program_of
from pararnn.scan import scan, workload_of_scan
from pararnn.solve import Fields, Memory, by_name, one_gate, prepare
from pararnn.tune.predict import Prediction, steps_for
from pararnn.tune.predict import predict as predict_call


@dataclass(frozen=True)
class Explanation:
    """`explain`'s result; prints as a table.

    `solver` and `backend` would run, for the reason `why`. `others`: for every other pair the
    reason why it cannot run here, None where it can; `costs`: its cost then. size: (B, T, D).
    split: segments of (newton, fused) in the forward pass, requests reduced to what fits; None for
    pairs without segments. form: the normal form of a matrix cell's step that is affine in its
    states (`AffineForm.description`), None for others. prediction: with `predict`, else None.
    """

    cell: str
    size: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device
    solver: str
    backend: str
    why: str
    others: dict[tuple[str, str], str | None]
    split: Split | None = None
    costs: dict[tuple[str, str], str] = field(default_factory=dict)
    form: str | None = None
    prediction: Prediction | None = None

    def __str__(self) -> str:
        head = f"{self.cell}, (B, T, D) = {self.size}, {self.dtype} on {self.device}"
        lines = [head, f"  ({self.solver}, {self.backend}) runs: {self.why}"]
        if self.split is not None:
            segments, steps, burn_in = self.split
            lines.append(f"    segments {segments}, steps of each {steps}, burn-in {burn_in}")
        if self.form is not None:
            lines.append(f"    affine in its states, {self.form}")
        for pair, reason in self.others.items():
            text = reason or f"could run: {self.costs[pair]}"
            lines.append(f"  ({', '.join(pair)}) {text}")
        if self.prediction is not None:
            lines.append(str(self.prediction))
        return "\n".join(lines)


def explain(
    module: ParaRNN | RecurrentLayer | Cell | Callable[..., Any],
    shape: tuple[int, ...] | Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    solver: str | None = None,
    backend: str | None = None,
    mode: str | None = None,
    predict: bool = False,
    fields: Fields | None = None,
    memory: Memory | None = None,
) -> Explanation:
    """Say what would run a layer, `solve` of a cell, or `scan`, on an input of a shape, and why.

    Args:
        module: a layer; or a cell, for `solve`; or `pararnn.scan` itself.
        shape: of the layer's input (or of `solve`'s gates), which gives batch and time. Of b, for
            `scan`. With `predict` the input itself, or `solve`'s gates.
        dtype: of the gates; the parameters' by default. Under autocast it is autocast's. Of b, for
            `scan`; where that is complex, a is taken to be so too.
        device: the parameters' by default; for `scan` PyTorch's.
        solver, backend, mode: as in a call.
        predict: predict from a short run on the input how fast the layer forgets, the updates that
            Newton takes, and the times of the pairs that the request allows: see `Prediction`. It
            builds their kernels. Times are those of both passes, under torch.no_grad() of the
            forward pass. Of a stack the first layer is predicted.
        fields, memory: those of the call, for `predict`.

    Builds the kernels of the pair that runs. Where that pair needs none, it builds the others';
    else it only generates their code. Raises TypeError for another module, ValueError for an
    impossible shape, and with `predict` for fewer than 64 steps, a dtype or a device; EngineError
    where the request cannot run.
    """
    default, heads, first = Request(), 1, None
    if module is not scan:
        check_module(module)
    if predict:
        first, shape = _first_steps(module, shape, fields, memory, (dtype, device))
        dtype, device = first.gates.dtype, first.gates.device
    if module is scan:
        program, size = workload_of_scan(tuple(shape), dtype or torch.get_default_dtype())
        empty = torch.empty(0, dtype=dtype, device=device)
        dtype, device = empty.real.dtype, type_of(empty.device).with_index(empty.device)
    else:
        assert isinstance(module, (ParaRNN, RecurrentLayer, Cell))
        program, size, dtype, device, heads = workload_of(module, shape, dtype, device)
        if not isinstance(module, Cell):
            default = Request(module.solver, module.backend)
    invariant = isinstance(module, RecurrentLayer) and module.batch_invariant
    asked = resolve(request(solver, backend, mode), default)
    asked = loop_of(asked) if invariant else asked
    choice = choose(program, size, dtype, device, *asked, heads).with_split(split_of_context())
    # If kernels of the pair that runs are built, others are not: each takes a second.
    others = {
        p: why_not(program, p, dtype, device, compiles=not choice.engine().builds)
        for p in PAIRS
        if p != choice.pair
    }
    if invariant:
        choice = choice._replace(why="batch_invariant=True takes the kernels of the loop alone")
        others = {p: reason or "batch_invariant=True: bits would depend on the batch"
                  for p, reason in others.items()}  # fmt: skip
    costs = {p: _cost(program, p, size) for p, reason in others.items() if reason is None}
    form = program.affine_form()
    description = None if isinstance(form, str) else form.description
    prediction = None
    if first is not None:
        workload = Workload(program.key, size, dtype, device, heads)
        first = first.with_options(**split_of_context()._asdict())
        prediction = predict_call(workload, first, *asked, torch.is_grad_enabled())
    result = (*choice.pair, choice.why, others, choice.split(), costs, description, prediction)
    return Explanation(program.cell_name, size, dtype, device, *result)


def _first_steps(
    module: Any,
    x: Any,
    fields: Fields | None,
    memory: Memory | None,
    others: tuple[torch.dtype | None, torch.device | str | None],
) -> tuple[Arguments, tuple[int, ...]]:
    """Return the call of a layer, or of `solve`, on the first steps of its input, and the input's
    shape. Raises as `explain`."""
    if not isinstance(x, Tensor) or module is scan:
        what = "of pararnn.scan" if module is scan else f"got {x!r}"
        raise ValueError(
            "predict=True needs a layer and its input, or a cell and its gates, as tensors: it "
            f"runs some steps of them; {what}"
        )
    if any(other is not None for other in others):
        raise ValueError("predict=True takes dtype and device of the input: leave them out")
    is_stack, is_cell = isinstance(module, ParaRNN), isinstance(module, Cell)
    has_rows, time = is_cell or x.ndim > 2, 0
    if has_rows and (not is_stack or module.batch_first):
        time = 1
    if x.ndim < 2:
        raise ValueError(f"x must hold time and channels, got {tuple(x.shape)}")
    steps, length = steps_for(x.shape[time]), x.shape[time]

    def cut(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or tensor.ndim <= time or tensor.shape[time] != length:
            return tensor
        tensor = tensor.narrow(time, 0, steps)
        tensor = tensor if has_rows else tensor.unsqueeze(0)
        return tensor.transpose(0, 1) if has_rows and time == 0 else tensor

    inputs: dict[str, Any] = {
        "fields": {name: cut(field) for name, field in by_name(fields).items()}
    }
    if memory is not None:
        inputs["memory"] = with_rows(memory, has_rows)
    if isinstance(module, Cell):
        cell = unwrap(module)
        only = not (cell.has_readout and cell.keeps_states)
        call = prepare(cell, one_gate(cell, cut(x)), output_only=only, **inputs)
    elif isinstance(module, ParaRNN):
        call = module.first_call(cut(x), **inputs)
    else:
        call = module.arguments(cut(x), **inputs)
    return call, tuple(x.shape)


def check_module(module: Any) -> None:
    """Raise TypeError for what is no layer of this library and no cell."""
    if not isinstance(module, (ParaRNN, RecurrentLayer, Cell)):
        name = module.__name__ if isinstance(module, type) else type(module).__name__
        raise TypeError(
            "explain and autotune take a layer (pararnn.ParaRNN, RecurrentLayer, LSTM, ...) or a "
            f"cell, got {name}: of a model give one of its layers, of a class make one"
        )


def _cost(program: Program, pair: tuple[str, str], size: tuple[int, int, int]) -> str:
    """Return the cost of a pair that can run, in addition to its time."""
    batch, steps, channels = size
    solver, backend = pair
    if backend == "fused":
        return "kernels, compiled in some seconds at the first call unless the cache has them"
    if solver == "chunks":
        return "matrices of pairs of steps within chunks, in memory"
    if solver == "sequential":
        return f"a loop in Python over {steps:,} steps"
    entries = program.num_states**2 * channels * max(1, program.coupling.reach(channels))
    return f"Jacobians of {batch * steps * entries:,} numbers in memory"


def workload_of(
    module: ParaRNN | RecurrentLayer | Cell,
    shape: tuple[int, ...] | Tensor,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> tuple[Program, tuple[int, int, int], torch.dtype, torch.device, int]:
    """Return the program, (B, T, D), dtype, device and heads of `explain`'s arguments.

    Heads are as in `Workload`. Raises as `explain`, but for the module.
    """
    cell = unwrap(module if isinstance(module, Cell) else module.cell)
    batch_first = not isinstance(module, ParaRNN) or module.batch_first
    if isinstance(shape, torch.Tensor):
        raise ValueError("shape must be a tuple of sizes, such as x.shape, got a tensor")
    if len(shape) < 2:
        raise ValueError(f"shape must hold batch and time, or time and channels, got {shape}")
    if len(shape) == 2:
        batch, steps = 1, shape[0]
    else:
        batch, steps = shape[:2] if batch_first else (shape[1], shape[0])
    parameter = next(module.parameters(), torch.empty(0))
    device = torch.device(device) if device is not None else parameter.device
    device = type_of(device).with_index(device)
    size = (batch, steps, cell.hidden_size)
    heads = heads_of_matrices(cell.lifted_params()) or 1
    return program_of(cell), size, dtype or parameter.dtype, device, heads
