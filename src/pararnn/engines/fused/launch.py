"""Launches: kernels with arguments packed once a signature; each call fills in its addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pararnn.codegen.interface import Counts, Interface, Values, Words
from pararnn.engines.arguments import Arguments
from pararnn.engines.fused.layout import contiguous_as, narrow_field

Conversion = Callable[[Tensor], Tensor]
"""Function that returns a tensor in kernel layout: the same tensor if it is in it already."""

Conversions = list[tuple[int, Conversion]]
"""Tensors of a call that need a cast or a copy before launch, by index in `Arguments.flatten`."""


def to_kernel_layout(args: Arguments, conversions: Conversions) -> list[Tensor | None]:
    """Return the tensors of a call in kernel layout, ordered as in `Arguments.flatten`."""
    tensors = args.flatten()[0]
    for index, convert in conversions:
        tensor = tensors[index]
        assert tensor is not None
        tensors[index] = convert(tensor)
    return tensors


def conversions_for(
    args: Arguments, gates: Conversion, weights: torch.dtype, matrices: torch.dtype
) -> Conversions:
    """Return the conversions of calls with this signature: bias and params (D,) to `weights`, other
    params to `matrices`, states and fields to the compute dtype."""
    dtypes = (weights, matrices, args.dtype)
    of_weight, of_matrix, of_state = (partial(contiguous_as, dtype=dtype) for dtype in dtypes)
    by_field: Any = {
        "gates": gates,
        "bias": of_weight,
        "fields": (partial(narrow_field, dtype=args.dtype),) * len(args.fields),
        "params": tuple(of_weight if p.ndim == 1 else of_matrix for p in args.params),
        "initial": (of_state,) * len(args.initial),
        "seq": Tensor.contiguous,
        "reset": Tensor.contiguous,
    }
    converts: Any = replace(args, **by_field).flatten()[0]
    pairs = enumerate(zip(args.flatten()[0], converts, strict=True))
    return [(i, convert) for i, (t, convert) in pairs if t is not None and convert(t) is not t]


class Address(int):
    """Address of one of a launch's tensors, plus an offset in bytes; filled in at each call."""

    tensor: int

    def __new__(cls, tensor: int, offset: int = 0) -> Address:
        address = super().__new__(cls, offset)
        address.tensor = tensor
        return address


class Addresses:
    """Addresses of the tensors of a launch, numbered in the order in which it gets them."""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> Address:
        """Return the address of the next tensor."""
        self.count += 1
        return Address(self.count - 1)

    def array(self, count: int) -> list[int]:
        """Return the addresses of the next `count` tensors."""
        return [self.next() for _ in range(count)]


class Template(NamedTuple):
    """Kernel arguments without addresses, and (index of the argument, tensor) for each of these.
    It holds no tensor."""

    arguments: list[int]
    addresses: list[tuple[int, int]]

    def fill(self, tensors: Iterable[Tensor | None]) -> list[int]:
        """Return the arguments for these tensors; None has address 0."""
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        arguments = self.arguments.copy()
        for index, tensor in self.addresses:
            arguments[index] += pointers[tensor]
        return arguments


def template_of(arguments: Sequence[int]) -> Template:
    """Return the template of kernel arguments among which are `Address`es."""
    addresses = [(i, x.tensor) for i, x in enumerate(arguments) if isinstance(x, Address)]
    return Template([int(x) for x in arguments], addresses)


class Allocation(Protocol):
    """Tensor that a kernel needs for itself."""

    def new(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Allocate it for a launch on tensors."""


class Temporary(NamedTuple):
    """Memory of a size; zero at first if `zeros`, else of any values."""

    size: tuple[int, ...]
    dtype: torch.dtype
    zeros: bool = False

    def new(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Allocate it for a launch on tensors, on the device of the first one."""
        like = tensors[0]
        assert like is not None
        return (like.new_zeros if self.zeros else like.new_empty)(self.size, dtype=self.dtype)


class Launch(NamedTuple):
    """Kernel, a function of its arguments; their template; and its temporaries, whose addresses
    come after those of the other tensors."""

    kernel: Callable[[list[int]], Any]
    template: Template
    temporaries: tuple[Allocation, ...] = ()

    def run(self, tensors: Sequence[Tensor | None]) -> None:
        """Launch the kernel on tensors."""
        if self.temporaries:
            tensors = [*tensors, *[temporary.new(tensors) for temporary in self.temporaries]]
        self.kernel(self.template.fill(tensors))


def input_values(addresses: Addresses, counts: Counts, args: Arguments) -> dict[str, Words]:
    """Return the arguments with which those of every kernel begin, of a call in kernel layout: see
    codegen/families.py."""
    tensors, values = args.flatten()
    of_call: Any = Arguments.unflatten(addresses.array(len(tensors)), values)
    return {
        "gates": of_call.gates,
        "bias": of_call.bias,
        "fields": list(of_call.fields),
        "params": list(of_call.params),
        "initial": list(of_call.initial) or [0] * counts.states,
        "seq": of_call.seq,
        "reset": of_call.reset,
        "field_row": [field.stride(0) for field in args.fields],
        "field_time": [field.stride(1) for field in args.fields],
    }


def pack_known(
    interface: Interface, struct: str, values: Values, addresses: Addresses | None = None
) -> list[int]:
    """Pack a struct of those values that it has fields for. With addresses, fields without a value
    are those of the next tensors, in order."""
    words: dict[str, Words] = {}
    for field in interface.structs[struct]:
        if addresses is None or field.name in values:
            words[field.name] = values[field.name]
        else:
            words[field.name] = addresses.array(interface.length(field))
    return interface.pack(struct, words)
