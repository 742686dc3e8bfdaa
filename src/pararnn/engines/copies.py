"""Copies of a call by `torch.func.vmap`: rows of one call, channels or heads, or a loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pararnn.engines.arguments import Arguments
from pararnn.program.program import Program, program_by_key

Run = Callable[..., Sequence[Any]]
"""Function of a call's arguments; a backward pass takes states and incoming gradients too."""
Mapped = tuple[Sequence[Any], Sequence[int | None]]
"""Tensors, and the dimension of each along which it is mapped, None for one that is not."""


@dataclass(frozen=True)
class Copies:
    """`size` copies of a call, which share what is not mapped.

    args: tensors with their mapped dimensions. dims: the record of these, None for a tensor that
    all copies share.
    """

    program: Program
    args: Arguments
    dims: Any
    size: int

    @classmethod
    def of(
        cls, key: str, values: Any, tensors: Sequence[Any], dims: Sequence[Any], size: int
    ) -> Copies:
        """Make the record of tensors that are ordered as `Arguments.flatten` has them."""
        args, of_dims = (Arguments.unflatten(part, values) for part in (tensors, dims))
        return cls(program_by_key(key), args, of_dims, size)

    @property
    def weights(self) -> int:
        """The number of params that are weights; memories follow."""
        return len(self.program.params)

    @property
    def share_weights(self) -> bool:
        """True if all copies have the same weights."""
        dims = (self.dims.bias, *self.dims.params[: self.weights])
        return all(dim is None for dim in dims)

    @property
    def widen(self) -> bool:
        """True if copies can be channels or heads of one call."""
        same_steps = self.dims.seq is None and self.dims.reset is None
        return self.program.widens and same_steps

    def run(self, run: Run) -> tuple[Any, ...]:
        """Return the outputs of all copies, with a first dimension for them, and the info."""
        if self.share_weights:
            *out, info = run(self._rows())
            return (*(x.unflatten(0, (self.size, -1)) for x in out), info)
        if self.widen:
            *out, info = run(self._wide())
            return (*(self._apart(x, -1) for x in out), info)
        copies = [run(self._copy(index)) for index in range(self.size)]
        *out, infos = zip(*copies, strict=True)
        return (*map(torch.stack, out), torch.stack(infos).amax(0))

    def differentiate(
        self,
        run: Run,
        states: Mapped,
        incoming: Mapped,
        wanted: Sequence[str],
        sums_samples: bool = False,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of all copies by `wanted`, with a first dimension for them.

        sums_samples: whether `run` takes `Options.samples`.
        """
        of_sums = [
            name == "bias" or (name == "params" and index < self.weights)
            for name, index in self.args.places(wanted)
        ]
        both = states, incoming
        if self.share_weights and (sums_samples or not any(of_sums)):
            args = self._rows().with_options(samples=self.size if any(of_sums) else 0)
            out = run(args, *(_map(self._as_rows, *mapped) for mapped in both))
            pairs = zip(out, of_sums, strict=True)
            return tuple(x if sums else x.unflatten(0, (self.size, -1)) for x, sums in pairs)
        if self.widen:
            out = run(self._wide(), *(_map(self._as_channels, *mapped) for mapped in both))
            return self._gradients_apart(out, wanted)
        copies = [
            run(self._copy(i), *(_map(_select(i), *mapped) for mapped in both))
            for i in range(self.size)
        ]
        return tuple(map(torch.stack, zip(*copies, strict=True)))

    def _as_rows(self, tensor: Tensor, dim: int | None) -> Tensor:
        return _move_or_repeat(tensor, dim, self.size, 0).flatten(0, 1)

    def _as_channels(self, tensor: Tensor, dim: int | None) -> Tensor:
        return _move_or_repeat(tensor, dim, self.size, -2).flatten(-2)

    def _as_weights(self, param: Tensor, dim: int | None) -> Tensor:
        axes = param.ndim - (dim is not None)
        if axes < 2:
            return self._as_channels(param, dim)
        copies = _move_or_repeat(param, dim, self.size, -1 - axes)
        return copies if axes == 2 else copies.flatten(0, 1)

    @property
    def _has_heads(self) -> bool:
        return self.args.gates.ndim - (self.dims.gates is not None) > 4

    def _rows(self) -> Arguments:
        """Return copies with the same weights as one call of `size` times the rows."""
        args, dims, weights = self.args, self.dims, self.weights
        seq = args.seq
        if seq is not None:
            first = torch.arange(self.size, device=seq.device, dtype=seq.dtype) * args.sequences
            copies = _move_or_repeat(seq, dims.seq, self.size, 0)
            seq = torch.where(copies < 0, copies, copies + first[:, None, None]).flatten(0, 1)
        return replace(
            args,
            gates=self._as_rows(args.gates, dims.gates),
            fields=_map(self._as_rows, args.fields, dims.fields),
            params=(
                *args.params[:weights],
                *_map(self._as_rows, args.params[weights:], dims.params[weights:]),
            ),
            initial=_map(self._as_rows, args.initial, dims.initial),
            sequences=self.size * args.sequences,
            seq=seq,
            reset=None if args.reset is None else self._as_rows(args.reset, dims.reset),
        )

    def _wide(self) -> Arguments:
        """Return copies as one call of `size` times the channels, or heads."""
        args, dims = self.args, self.dims
        # Copies of gates without heads are heads: a view, which kernels take as it is.
        gates = _move_or_repeat(args.gates, dims.gates, self.size, -3 if self._has_heads else -2)
        return replace(
            args,
            gates=gates.flatten(-3, -2) if self._has_heads else gates,
            bias=None if args.bias is None else self._as_channels(args.bias, dims.bias),
            fields=_map(self._as_channels, args.fields, dims.fields),
            params=_map(self._as_weights, args.params, dims.params),
            initial=_map(self._as_channels, args.initial, dims.initial),
        )

    def _copy(self, index: int) -> Arguments:
        tensors, values = self.args.flatten()
        of_dims = self.dims.flatten()[0]
        return Arguments.unflatten(_map(_select(index), tensors, of_dims), values)

    def _apart(self, tensor: Tensor, at: int) -> Tensor:
        """Return the copies that are next to each other along an axis, counted from the end."""
        return tensor.unflatten(at, (self.size, -1)).movedim(at - 1, 0)

    def _gradients_apart(self, leaves: Sequence[Tensor], wanted: Sequence[str]) -> tuple[Any, ...]:
        """Return the gradients of copies among those of one wide call."""
        out = []
        for leaf, (name, index) in zip(leaves, self.args.places(wanted), strict=True):
            if name == "gates":
                out.append(self._apart(leaf, -2) if self._has_heads else leaf.movedim(-2, 0))
                continue
            if name != "params" or leaf.ndim == 1:
                out.append(self._apart(leaf, -1))
                continue
            copies = leaf.unflatten(0, (self.size, -1))
            is_dense = self.args.params[index].ndim - (self.dims.params[index] is not None) == 2
            out.append(copies.squeeze(1) if is_dense else copies)
        return tuple(out)


def _map(
    function: Callable[[Tensor, int | None], Tensor],
    tensors: Sequence[Any],
    dims: Sequence[int | None],
) -> tuple[Any, ...]:
    """Return the results of a function of tensors and their mapped dimensions, None for None."""
    pairs = zip(tensors, dims, strict=True)
    return tuple([None if tensor is None else function(tensor, dim) for tensor, dim in pairs])


def _select(index: int) -> Callable[[Tensor, int | None], Tensor]:
    """Return the function that selects one copy."""
    return lambda tensor, dim: tensor if dim is None else tensor.select(dim, index)


def _move_or_repeat(tensor: Tensor, dim: int | None, size: int, at: int) -> Tensor:
    """Move a mapped dimension to `at`; repeat a tensor that is not mapped there."""
    if dim is not None:
        return tensor.movedim(dim, at)
    copies = tensor.unsqueeze(at)
    return copies.expand(*(size if i == at % copies.ndim else -1 for i in range(copies.ndim)))
