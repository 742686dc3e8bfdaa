"""Chunks of steps of a matrix cell that is affine in its states: by the scan, or step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pararnn.cells.matrix import VALUES
from pararnn.program.affine import AffineForm, Component, Entry, EntryStates, Slot
from pararnn.program.program import Program
from pararnn.program.pullback import evaluate
from pararnn.solvers.chunks import Terms, scan_chunks, slices_of, with_first
from pararnn.solvers.heads import select

States = tuple[Tensor, ...]


@dataclass(frozen=True)
class Tile:
    """Chunks of C steps of all heads, those of one position in time adjacent.

    sizes: how many each position has, of the first sequences. gates: (N, H, C, W). states: (S, H,
    ...) before the first position. zero: bool (N, C), steps that start from zero, or None. real:
    bool (N, C), steps of sequences, behind which chunks are filled up; None: all.
    """

    program: Program
    sizes: Sequence[int]
    gates: Tensor
    params: Sequence[Tensor]
    states: States
    zero: Tensor | None = None
    real: Tensor | None = None


def solve_by_chunks(tile: Tile, form: AffineForm) -> tuple[Tensor, States, Tensor]:
    """Return the outputs (N, H, C, V) and the states after the last position, by the cell's form;
    and whether all that the scan returns is finite, a bool."""
    sizes = tile.program.step.head
    lead = tile.gates.shape[:3]
    tensors: dict[tuple[str, int], Tensor] = {
        ("gate", i): gate for i, gate in enumerate(sizes.split(tile.gates))
    }
    for i, param in enumerate(tile.params):
        tensors["param", i] = param.unsqueeze(1) if param.ndim else param
    new = list(tile.states)
    answers: dict[tuple[int, int], Tensor] = {}
    checks: list[Tensor] = []
    for component in form.components:
        if isinstance(component, EntryStates):
            _solve_entries(component, tile, tensors, new)
    like = tile.gates
    slots = [_tensor(value, like) for _, value in evaluate(form.gates, tensors)]
    for number, component in enumerate(form.components):
        if not isinstance(component, Component):
            continue
        terms = terms_of(component, slots, lead, sizes.lengths, tile)
        state = _stacked(component, new)
        y, z, after = scan_chunks(terms, state, [size * sizes.heads for size in tile.sizes])
        checks += [x.detach().sum() for x in (y, z, after)]
        for i, x in zip(component.states, after.unbind(1), strict=True):
            new[i] = _unstacked(component, x, new[i])
        y, z = y.unflatten(0, lead[:2]), z.unflatten(0, lead[:2])
        for index in range(len(component.query)):
            answer = y[:, :, :, index]
            answers[number, index] = answer.squeeze(-1) if component.other is None else answer
        for index, (i, _) in enumerate(component.look):
            answers[number, len(component.query) + index] = z[:, :, :, index, i]
    for i, answer in enumerate(form.answers):
        tensors["answer", i] = answers[answer.component, answer.index]
    size = (*lead, sizes.lengths[VALUES])
    outputs = [_tensor(y, like).expand(size) for _, y in evaluate(form.readout, tensors)]
    output = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
    is_finite = torch.stack([*checks, like.new_zeros(())]).isfinite().all()
    return output, tuple(new), is_finite


def solve_by_steps(tile: Tile) -> tuple[Tensor, States]:
    """Return the outputs and the states after the last position, by the cell's steps."""
    program, sizes = tile.program, tile.program.step.head
    outputs, states = [], tile.states
    for at in slices_of(tile.sizes):
        current = tuple(s[: at.stop - at.start] for s in states)
        steps = []
        for t in range(tile.gates.shape[2]):
            before = current
            if tile.zero is not None:
                before = tuple(select(tile.zero[at, t], torch.zeros_like(s), s) for s in before)
            begin, of_step = before, tile.gates[at, :, t]
            if tile.real is not None:  # at padding a gradient of 0 times infinity would be NaN
                begin = tuple(select(tile.real[at, t], s, torch.zeros_like(s)) for s in before)
                of_step = select(tile.real[at, t], of_step, of_step.nan_to_num(0, 0, 0))
            gates = sizes.split(of_step)
            after = program.step(begin, gates, tuple(tile.params))
            output = program.step.output_of(after, gates, tuple(tile.params))
            if tile.real is not None:
                pairs = zip(after, before, strict=True)
                after = tuple(select(tile.real[at, t], new, old) for new, old in pairs)
            current = after
            steps.append(output)
        outputs.append(torch.stack(steps, 2))
        states = tuple(map(with_first, states, current))
    return torch.cat(outputs), states


def terms_of(
    component: Component,
    slots: Sequence[Tensor],
    lead: Sequence[int],
    lengths: Mapping[str, int],
    tile: Tile,
) -> Terms:
    """Return the scan's terms of a component, for chunks (N, H, C) = lead.

    Reads are multiplied by their gains, so that a column has one read or none; columns that read
    come first.
    """
    like, n = tile.gates, len(component.states)
    keys = lengths[component.side]
    values = 1 if component.other is None else lengths[component.other]

    def vectors(entry: Entry, length: int) -> Tensor:
        """Return an entry as (N, H, C, length); numbers are repeated."""
        if not isinstance(entry, Slot):
            return like.new_full((), entry).expand(*lead, length)
        value = slots[entry.number]
        return (value if entry.axes else value.unsqueeze(-1)).expand(*lead, length)

    def combined(gains: Sequence[Entry], entries: Sequence[Entry]) -> Tensor:
        """Return the sum of entries times numbers."""
        total = like.new_zeros(())
        for gain, entry in zip(gains, entries, strict=True):
            if gain != 0.0 and entry != 0.0:
                total = total + vectors(gain, 1) * vectors(entry, keys)
        return total.expand(*lead, keys)

    def stack(rows: Sequence[Sequence[Tensor]], width: int, length: int) -> Tensor:
        """Return rows of `width` tensors as (L, C, rows, width, length)."""
        size = (lead[0] * lead[1], lead[2], len(rows), width, length)
        tensors = [x for row in rows for x in row]
        if not tensors:
            return like.new_empty(size)
        return (torch.stack(tensors, 3) if len(tensors) > 1 else tensors[0]).reshape(size)

    def table(rows: Sequence[Sequence[Entry]], width: int, length: int) -> Tensor:
        return stack([[vectors(entry, length) for entry in row] for row in rows], width, length)

    reading = [c for c, gains in enumerate(component.gain) if any(gain != 0.0 for gain in gains)]
    order = [*reading, *(c for c in range(len(component.column)) if c not in reading)]
    by_state = [*zip(*component.read, strict=True)]
    reads = [[combined(component.gain[c], entries) for entries in by_state] for c in reading]
    by_key = any(isinstance(entry, Slot) and entry.axes for row in component.decay for entry in row)
    terms = Terms(
        table(component.decay, n, keys if by_key else 1),
        table([component.column[c] for c in order], n, keys),
        stack(reads, n, keys),
        table([[component.value[c]] for c in order], 1, values).flatten(2, 3),
        table(component.query, n, keys),
        table([[weight] for _, weight in component.look], 1, values).flatten(2, 3),
    )
    if tile.zero is not None:
        keep = _by_chunk((~tile.zero).to(like.dtype), lead)  # times 0, NaN is NaN, as in a step
        terms = terms._replace(decays=terms.decays * keep, reads=terms.reads * keep)
    if tile.real is not None:
        real = _by_chunk(tile.real, lead)
        one = torch.eye(n, dtype=like.dtype, device=like.device).unsqueeze(-1)
        decays, columns = (
            torch.where(real, x, y) for x, y in ((terms.decays, one), (terms.columns, 0.0))
        )
        terms = terms._replace(decays=decays, columns=columns)
    return terms


def _solve_entries(
    component: EntryStates, tile: Tile, tensors: dict[tuple[str, int], Tensor], states: list[Tensor]
) -> None:
    """Solve states whose entries do not meet, step after step: put those before and after each step
    among the tensors, and the last ones among the states."""
    lead = tile.gates.shape[:3]
    entries = {
        ("entry", to.number): _tensor(x, tile.gates).expand(
            *lead, *states[component.states[0]].shape[2:]
        )
        for to, x in evaluate(component.gates, tensors)
    }
    series: dict[tuple[str, int], list[Tensor]] = {
        (kind, i): [] for kind in ("state", "new_state") for i in component.states
    }
    for at in slices_of(tile.sizes):
        now = {i: states[i][: at.stop - at.start] for i in component.states}
        steps: list[dict[tuple[str, int], Tensor]] = []
        for t in range(tile.gates.shape[2]):
            if tile.zero is not None:
                now = {i: select(tile.zero[at, t], torch.zeros_like(x), x) for i, x in now.items()}
            inputs = {key: x[at, :, t] for key, x in entries.items()}
            inputs |= {("state", i): x for i, x in now.items()}
            written = evaluate(component.advance, inputs)
            new = {to.number: _tensor(y, tile.gates).expand_as(now[to.number]) for to, y in written}
            steps.append({key: (now if key[0] == "state" else new)[key[1]] for key in series})
            if tile.real is not None:
                new = {i: select(tile.real[at, t], x, now[i]) for i, x in new.items()}
            now = new
        for key, tensors_of in series.items():
            tensors_of.append(torch.stack([step[key] for step in steps], 2))
        for i, x in now.items():
            states[i] = with_first(states[i], x)
    tensors |= {key: torch.cat(tensors_of) for key, tensors_of in series.items()}


def _stacked(component: Component, states: Sequence[Tensor]) -> Tensor:
    """Return a component's states (S, H, ...) as (S H, n, side, other)."""
    if component.other is None:
        matrices = [states[i].unsqueeze(-1) for i in component.states]
    else:
        is_transposed = component.axes[0] != component.side
        matrices = [states[i].mT if is_transposed else states[i] for i in component.states]
    return torch.stack(matrices, 2).flatten(0, 1)


def _unstacked(component: Component, state: Tensor, like: Tensor) -> Tensor:
    """Return a state (S H, side, other) as it was before `_stacked`."""
    state = state.unflatten(0, like.shape[:2])
    if component.other is None:
        return state.squeeze(-1)
    return state.mT if component.axes[0] != component.side else state


def _by_chunk(mask: Tensor, lead: Sequence[int]) -> Tensor:
    """Return a mask (N, C) for terms of chunks (N, H, C) = lead, (L, C, 1, 1, 1)."""
    return mask.unsqueeze(1).expand(*lead).flatten(0, 1)[..., None, None, None]


def _tensor(value: Tensor | float, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else like.new_tensor(value)
