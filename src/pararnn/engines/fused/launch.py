"""The words of launches: made once for calls of one form, which differ in addresses only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.codegen.interface import Counts, Words
from pararnn.engines.arguments import Arguments
from pararnn.engines.fused.layout import narrow, plain

Conversion = Callable[[Tensor], Tensor]
"""Makes a tensor one that kernels can take; gives back itself if it is one."""


Conversions = list[tuple[int, Conversion]]
"""What is to be done to which tensors of a call, by their numbers in `Arguments.flatten`."""


def to_kernel_layout(args: Arguments, takings: Conversions) -> list[Tensor | None]:
    """The tensors of a call, in the order of `Arguments.flatten`, as kernels take them."""
    tensors = args.flatten()[0]
    for which, take in takings:
        tensor = tensors[which]
        assert tensor is not None
        tensors[which] = take(tensor)
    return tensors


def conversions_for(args: Arguments, gates: Conversion, weights: torch.dtype) -> Conversions:
    """How kernels take the tensors of a call of this form: the weights in a dtype, the rest in the
    compute dtype."""
    wide = args.dtype
    of_weights, of_states = (partial(plain, dtype=dtype) for dtype in (weights, wide))
    takings: list[Conversion] = [
        gates,
        of_weights,
        *[partial(narrow, dtype=wide)] * len(args.fields),
        *[of_weights] * len(args.params),
        *[of_states] * len(args.initial),
        Tensor.contiguous,
        Tensor.contiguous,
    ]
    each = zip(args.flatten()[0], takings, strict=True)
    return [(i, take) for i, (t, take) in enumerate(each) if t is not None and take(t) is not t]


def first_taken(args: Arguments, tensors: Sequence[Tensor | None]) -> tuple[Tensor, list[Tensor]]:
    """The gates and the fields among what `taken` gives."""
    gates, _, *others = tensors
    assert gates is not None
    return gates, [field for field in others[: len(args.fields)] if field is not None]


class Place(int):
    """Stands in words for the address of one of a launch's tensors, so many bytes into it."""

    tensor: int

    def __new__(cls, tensor: int, offset: int = 0) -> Place:
        place = super().__new__(cls, offset)
        place.tensor = tensor
        return place


class Addresses:
    """Numbers the tensors of a launch, in the order in which it is given them."""

    def __init__(self) -> None:
        self.count = 0

    def one(self) -> Place:
        """The next tensor."""
        self.count += 1
        return Place(self.count - 1)

    def row(self, count: int) -> list[int]:
        """The next `count` tensors."""
        return [self.one() for _ in range(count)]


class Template(NamedTuple):
    """Words with their addresses left open: (where, which tensor) for each. It holds no tensor."""

    words: list[int]
    places: list[tuple[int, int]]

    def filled(self, tensors: Iterable[Tensor | None]) -> list[int]:
        """The words of a launch on these tensors; None has address 0."""
        at = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        words = self.words.copy()
        for where, which in self.places:
            words[where] += at[which]
        return words


def template_of(words: Sequence[int]) -> Template:
    """The frame of words in which a Place stands for each address."""
    places = [(i, word.tensor) for i, word in enumerate(words) if isinstance(word, Place)]
    return Template([int(word) for word in words], places)


def input_values(
    place: Addresses, counts: Counts, args: Arguments, fields: Sequence[Tensor]
) -> dict[str, Words]:
    """The tensors that kernels of all targets begin with, by name: see codegen/interface.py.

    They are numbered as `taken` gives them; `fields` are those of them.
    """
    return {
        "gates": place.one(),
        "bias": place.one(),
        "fields": place.row(counts.fields),
        "params": place.row(counts.params),
        "initial": place.row(counts.states) if args.initial else [0] * counts.states,
        "seq": place.one(),
        "reset": place.one(),
        "field_row": [field.stride(0) for field in fields],
        "field_time": [field.stride(1) for field in fields],
    }


def adjoint_values(
    place: Addresses, strides: Sequence[Sequence[int]], fields: int
) -> dict[str, Words]:
    """What backward kernels of all targets read and write, by name: see codegen/interface.py.

    `strides`: (B, T) of the gradients that arrive, a state each.
    """
    states = len(strides)
    return {
        "grad_row": [stride[0] for stride in strides],
        "grad_time": [stride[1] for stride in strides],
        "states": place.row(states),
        "grad_states": place.row(states),
        "grad_final": place.row(states),
        "grad_gates": place.one(),
        "grad_fields": place.row(fields),
        "grad_initial": place.row(states),
        "partial": place.one(),
    }
