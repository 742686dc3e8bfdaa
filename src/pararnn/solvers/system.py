"""One problem in forward time: recurrence, inputs and edges, in the compute dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pararnn.program.coupling import expand_entry
from pararnn.program.derive import linearise
from pararnn.program.program import Program
from pararnn.solvers.boundaries import Boundaries


@dataclass(frozen=True)
class System:
    """h_l = f(prev_l, x_l) for l = 0 .. T-1, with prev_l = h_{l-1} except at fresh steps.

    inputs: gates (biases added) and fields, each (B, T, D). params: (D,) or as the cell shapes
    them. initial: the states before step 0, (B, N, D). fresh (B, T, 1 or D): steps that start from
    `start` (B, T, N, D) instead of h_{l-1}. padding (B, T, 1 or D): steps whose state is zero; they
    are fresh too, so that nothing passes them.
    by_hand: linearise by the class's own Jacobian, if it has one. boundaries: those of the
    sequences in the rows; None if row b is sequence b, and of some columns or steps only.
    """

    program: Program
    inputs: tuple[Tensor, ...]
    params: tuple[Tensor, ...]
    initial: Tensor
    fresh: Tensor | None = None
    start: Tensor | None = None
    padding: Tensor | None = None
    by_hand: bool = False
    boundaries: Boundaries | None = None

    @property
    def length(self) -> int:
        """T, the number of steps."""
        return self.inputs[0].shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self.initial.dtype

    def blank(self, values: Tensor) -> Tensor:
        """Zero values (B, T, D) or (B, T, N, D) at padding, which may hold anything."""
        if self.padding is None:
            return values
        return values.masked_fill(
            self.padding.unsqueeze(2) if values.ndim == 4 else self.padding, 0
        )

    def previous(self, states: Tensor) -> Tensor:
        """Return prev_l for all l, (B, T, N, D), of the states (B, T, N, D)."""
        earlier = torch.cat([self.initial.unsqueeze(1), states], 1)[:, : self.length]
        if self.fresh is None or self.start is None:
            return earlier
        return torch.where(self.fresh.unsqueeze(2), self.start, earlier)

    def sizes(self, states: Tensor) -> Tensor:
        """Return the largest finite |state| so far of each channel's sequence, (B, T, N, D).

        It has the units of the states, and tolerances on them are relative to it. The maximum
        restarts at a fresh step, with the state that it starts from.
        """
        both = torch.maximum(
            states.abs().nan_to_num(0, 0), self.previous(states).abs().nan_to_num(0, 0)
        )
        return running_max(both, None if self.fresh is None else self.fresh.unsqueeze(2))

    def advance(self, previous: Tensor) -> Tensor:
        """Return f(prev_l, x_l) for all l, (B, T, N, D)."""
        return self._stack(self._run("step", previous), previous)

    def linearise(self, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Return f(prev_l, x_l) and d h_l / d h_{l-1}, zero at edges, for all l."""
        structure = self.program.structure
        assert structure is not None
        graphs = self.program.graphs[self.dtype]
        tensors = self._tensors(previous)
        new, jacobian = linearise(self.program.step, structure, graphs, tensors, self.by_hand)
        at_steps = len(self._sizes) - 1  # one dimension of rows, or batch and time
        jacobian = jacobian.reshape(*previous.shape[:2], *jacobian.shape[at_steps:])
        if self.fresh is not None:
            jacobian = structure.cut(jacobian, self.fresh)
        return self._stack(new, previous), jacobian

    def pull_back(
        self, previous: Tensor, cotangent: Tensor, with_params: bool = True
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return gradients of prev (B, T, N, D), of the inputs (B, T, D) and, if wanted, of the
        params, summed."""
        cotangent = self.blank(cotangent)
        grads = self._run("vjp", previous, cotangent)
        states, size = self.program.num_states, self.inputs[0].shape
        rows = states + len(self.inputs)
        coupling = self.program.coupling

        def at_steps(grad: object) -> Tensor:
            return self.blank(expand_entry(grad, cotangent, self._sizes).reshape(size))

        def sum_of(grad: object, param: Tensor) -> Tensor:
            full = expand_entry(grad, cotangent, coupling.param_sizes(param, size))
            return coupling.total(full, self.padding)

        per_step = [at_steps(g) for g in grads[:rows]]
        params = tuple(map(sum_of, grads[rows:], self.params)) if with_params else ()
        return torch.stack(per_step[:states], 2), tuple(per_step[states:]), params

    def one_step(self, step: int) -> System:
        """Return the system of one step, without the state before it."""
        return self._select(lambda x: x[:, step : step + 1])

    def columns(self, mask: Tensor) -> System:
        """Return the system of the columns of `mask`: see `Coupling.take`."""
        coupling = self.program.coupling
        params, initial = coupling.take_params(self.params, mask), coupling.take(self.initial, mask)
        system = replace(self, params=params, initial=initial)
        return system._select(lambda x: coupling.take(x, mask))

    def _select(self, select: Callable[[Tensor], Tensor]) -> System:
        """Return the system with `select` applied to each of its series (B, T, ...)."""
        fresh, start, padding = (
            None if x is None else select(x) for x in (self.fresh, self.start, self.padding)
        )
        inputs = tuple(map(select, self.inputs))
        system = replace(self, inputs=inputs, fresh=fresh, start=start, padding=padding)
        return replace(system, boundaries=None)

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Sizes of states and inputs for the program's graphs."""
        return self.program.coupling.sizes(self.inputs[0].shape)

    def _tensors(self, previous: Tensor) -> list[Tensor]:
        """Return the flat arguments of the program's graphs."""
        rows = self._sizes
        states = [s.reshape(rows) for s in previous.unbind(2)]
        return [*states, *(x.reshape(rows) for x in self.inputs), *self.params]

    def _run(self, which: str, previous: Tensor, *cotangent: Tensor) -> tuple[object, ...]:
        graph = getattr(self.program.graphs[self.dtype], which)
        rows = self._sizes
        cotangents = [c.reshape(rows) for t in cotangent for c in t.unbind(2)]
        return graph(*self._tensors(previous), *cotangents)

    def _stack(self, new: Sequence[object], like: Tensor) -> Tensor:
        size, rows = self.inputs[0].shape, self._sizes
        return self.blank(torch.stack([expand_entry(s, like, rows).reshape(size) for s in new], 2))


def running_max(x: Tensor, restarts: Tensor | None = None) -> Tensor:
    """Return the running maximum along time of x (B, T, N, D), which restarts where `restarts`
    (B, T, 1, 1 or D) is set.

    It recurses on pairs of steps. On a GPU `cummax` runs step by step with one thread a channel, at
    2 us a step over a solve.
    """
    steps, half = x.shape[1], x.shape[1] // 2
    if steps < 2:
        return x
    first, second, rest = x[:, : 2 * half : 2], x[:, 1::2], x[:, 2::2]
    pairs = torch.maximum(first, second)
    if restarts is None:
        pair_ends = running_max(pairs)
        rest = torch.maximum(rest, pair_ends[:, : rest.shape[1]])
    else:
        second_mask, first_mask = restarts[:, 1::2], restarts[:, : 2 * half : 2]
        pair_ends = running_max(torch.where(second_mask, second, pairs), first_mask | second_mask)
        further = torch.maximum(rest, pair_ends[:, : rest.shape[1]])
        rest = torch.where(restarts[:, 2::2], rest, further)
    firsts = torch.cat([x[:, :1], rest], 1)
    whole = torch.stack([firsts[:, :half], pair_ends], 2).flatten(1, 2)
    return torch.cat([whole, firsts[:, half:]], 1)
