"""Records of a call: its options and arguments, its solution and its gradients."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from pararnn.base.numerics import compute_dtype
from pararnn.cells.matrix import HeadSizes
from pararnn.engines.rule import Size
from pararnn.engines.signature import Signature, signature_of, size_of
from pararnn.engines.split import SplitRequest
from pararnn.program.program import Program

ON_FAILURE = ("warn", "raise")
"""Actions of a parallel solve that has not converged: see `pararnn.solve`."""


class Options(NamedTuple):
    """Options of a call that are no tensors. `solve`, layers, the op and engines share them.

    A new option is one line here, with a default, after the others: the op's schema, cache keys and
    engines' arguments follow from it.

    segments, burn_in: see `SplitRequest`; engines that do not cut time ignore them. on_failure: one
    of ON_FAILURE. output_only: True if only the first state's sequence is read: the sequences of
    the other states then carry no gradient. context: the name of the ranks that share the sequence
    (`pararnn.context_parallel`), "" for one process. no_final: True if final states are not read:
    they may be anything and carry no gradient, and ranks need not exchange them. save_values: True
    if the forward pass gives, behind the states, values that the backward pass reads
    (pre-activations or checkpoints, see `saved_size`); None: if gradients are needed and the engine
    can. samples: above 0, gradients of bias and params have a first dimension for so many groups of
    adjacent rows, and are sums over the rows of each; see `Engine.sums_samples`. one_layout: True
    if kernels may not choose their layout by the number of rows: no row's bits depend on it then.
    forward_only: True if the op gives an empty tensor in place of a matrix cell's checkpoints,
    which only a backward pass reads.
    """

    reverse: bool = False
    segments: int | None = None
    burn_in: int | None = None
    on_failure: str = "warn"
    output_only: bool = False
    context: str = ""
    no_final: bool = False
    save_values: bool | None = None
    samples: int = 0
    one_layout: bool = False
    forward_only: bool = False


DEFAULTS = Options()

TensorSize = tuple[tuple[int, ...], torch.dtype]
"""Size and dtype of a tensor."""


def checked_options(**values: Any) -> Options:
    """Return the options with these values. Raises ValueError for one that is not allowed."""
    options = Options(**values)
    if options.on_failure not in ON_FAILURE:
        raise ValueError(f"on_failure must be one of {ON_FAILURE}, got {options.on_failure!r}")
    return options


class _OwnSignature:
    """`Arguments.signature`: computed at the first use, an attribute of the record from then on.

    functools.cached_property takes a lock for that, and a microsecond, before Python 3.12.
    """

    def __get__(self, record: Arguments, owner: object = None) -> Signature:
        signature = record.__dict__["signature"] = signature_of(*record.flatten())
        return signature


@dataclass
class Arguments:
    """One call, checked: layers, `solve` and `scan` make it, the op and engines read it.

    gates (B, T, G, D) or (B, T, G, H, D/H), of matrix cells (B, T, 1, H, W) or (B, T, 1, H W); bias
    (G, D) or None; fields (B, T, D) each; params in their own dtypes, (D,) or as the cell shapes
    them, see `Program.check_param`; initial (S, D) a state, of matrix cells (S, H, K, V) and the
    like, S sequences, or no tensor for zero; seq int32 (B, T) or None (row b is sequence b), each
    sequence one run of steps; reset bool (B, T) or None.

    Never changed once made. Not frozen: Python would take 3 us longer for each.
    """

    gates: Tensor
    bias: Tensor | None
    fields: tuple[Tensor, ...]
    params: tuple[Tensor, ...]
    initial: tuple[Tensor, ...]
    sequences: int
    seq: Tensor | None = None
    reset: Tensor | None = None
    options: Options = DEFAULTS

    @property
    def channels(self) -> int:
        """D."""
        return self.size[2]

    @property
    def size(self) -> Size:
        """(B, T, D)."""
        return size_of(self.gates)

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return compute_dtype(self.gates.dtype)

    signature = _OwnSignature()
    """All that calls which launch alike share. Not in compiled regions."""

    @property
    def split(self) -> SplitRequest:
        """The requested split of time."""
        return SplitRequest(self.options.segments, self.options.burn_in)

    @property
    def samples(self) -> tuple[int, ...]:
        """The dimensions in front of those of bias and params that their gradients have: one by
        `Options.samples`, or none."""
        count = self.options.samples
        return (count,) if count else ()

    @property
    def channel_params(self) -> list[Tensor]:
        """Params (D,): kernels sum their gradients over steps and rows as they do the bias's."""
        return [param for param in self.params if param.ndim == 1]

    @property
    def all_written(self) -> bool:
        """True if every sequence has a step, so that kernels write all final states."""
        return self.seq is None and self.gates.shape[1] > 0

    def start(self, program: Program) -> tuple[Tensor, ...]:
        """Return the initial states, zero if there are none."""
        return self.initial or tuple(
            [
                self.gates.new_zeros((self.sequences, *size), dtype=self.dtype)
                for size in self.state_sizes(program)
            ]
        )

    def head_sizes(self, program: Program) -> HeadSizes | None:
        """Return the sizes of a matrix cell's tensors in this call, None for other cells."""
        sizes = program.head_sizes
        if sizes is None or not program.memory:
            return sizes
        memories = self.params[len(program.params) :]
        return sizes.of_call(sizes.memory_lengths([tuple(m.shape) for m in memories]))

    def lengths_of_calls(self, program: Program) -> dict[str, int]:
        """Return the lengths of the axes that a call decides."""
        sizes = self.head_sizes(program)
        assert sizes is not None
        return {axis: sizes.lengths[axis] for axis in program.step.axes.of_calls}

    def state_sizes(self, program: Program) -> tuple[tuple[int, ...], ...]:
        """Return the sizes of one sequence's states."""
        sizes = self.head_sizes(program) or program.tensor_sizes(self.channels)
        return sizes.state_sizes

    def complete(self, program: Program) -> Arguments:
        """Return these arguments with initial states, and with params in the compute dtype."""
        dtype = self.dtype
        params = tuple(p if p.dtype == dtype else p.to(dtype) for p in self.params)
        return replace(self, initial=self.start(program), params=params)

    def with_options(self, **values: Any) -> Arguments:
        """Return these arguments with other values of some options."""
        return replace(self, options=self.options._replace(**values))

    def values(self) -> list[Any]:
        """Return the op's arguments; `of_values` makes the record again."""
        tensors = (self.gates, self.bias, self.fields, self.params, self.initial)
        return [*tensors, self.sequences, self.seq, self.reset, *self.options]

    @classmethod
    def of_values(cls, values: Sequence[Any]) -> Arguments:
        """Make the record of the op's arguments: lists, and None for [] by AOTInductor.

        PyTorch omits the last ones where they have their defaults.
        """
        gates, bias, fields, params, initial, sequences, *others = values
        seq, reset = (*others[:2], None, None)[:2]
        fields, params, initial = (tuple(many or ()) for many in (fields, params, initial))
        options = Options(*others[2:])
        return cls(gates, bias, fields, params, initial, sequences, seq, reset, options)

    def flatten(self) -> tuple[list[Tensor | None], tuple[Any, ...]]:
        """Return all tensors in one list, and the plain values that `unflatten` needs with them."""
        return (
            [
                self.gates,
                self.bias,
                *self.fields,
                *self.params,
                *self.initial,
                self.seq,
                self.reset,
            ],
            (len(self.fields), len(self.params), len(self.initial), self.sequences, self.options),
        )

    @classmethod
    def unflatten(cls, tensors: Sequence[Any], values: Sequence[Any]) -> Arguments:
        """Make a record of what `flatten` returned; anything may stand in a tensor's place."""
        fields, params, initial, sequences, options = values
        rest = iter(tensors)
        return cls(
            next(rest),
            next(rest),
            tuple(islice(rest, fields)),
            tuple(islice(rest, params)),
            tuple(islice(rest, initial)),
            sequences,
            next(rest),
            next(rest),
            options,
        )

    def gates_and_fields(self, tensors: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
        """Return the gates and the fields among tensors that are ordered as `flatten` has them."""
        return tensors[0], tensors[2 : 2 + len(self.fields)]

    def map(self, function: Callable[[Tensor], Tensor]) -> Arguments:
        """Return this record with `function` of each tensor."""
        tensors, values = self.flatten()
        return self.unflatten([None if t is None else function(t) for t in tensors], values)

    def leaves(self, names: Iterable[str] | None = None) -> list[Tensor]:
        """Return the tensors that have gradients; of `names` only, if passed, see `Wanted`."""
        return _leaves(self, LEAVES if names is None else names)

    def places(self, names: Iterable[str]) -> list[tuple[str, int]]:
        """Return the argument of each of `leaves(names)`, and its index among several of one."""
        numbered: Any = map(_numbered, LEAVES, [getattr(self, name) for name in LEAVES])
        return _leaves(Gradients(*numbered), names)


SCHEMA_TYPES: dict[Any, str] = {
    int: "SymInt",
    int | None: "int?",
    float: "float",
    float | None: "float?",
    bool: "bool",
    bool | None: "bool?",
    str: "str",
}
"""Names that the op's schema has for the types of options."""


def schema() -> str:
    """Return the record as a part of the op's schema."""
    types = get_type_hints(Options)

    def default(value: Any) -> str:
        return json.dumps(value) if isinstance(value, str) else str(value)

    options = [
        f"{SCHEMA_TYPES[types[name]]} {name}={default(value)}"
        for name, value in DEFAULTS._asdict().items()
    ]
    tensors = "Tensor gates, Tensor? bias, Tensor[] fields, Tensor[] params, Tensor[] initial"
    return ", ".join([tensors, "SymInt sequences, Tensor? seq=None, Tensor? reset=None", *options])


def _leaves(record: Arguments | Gradients, names: Iterable[str]) -> list[Any]:
    found: list[Any] = []
    for name in names:
        argument, _, index = name.partition(".")
        tensors = _as_tuple(getattr(record, argument))
        found += (tensors[int(index)],) if index else tensors
    return [tensor for tensor in found if tensor is not None]


def _numbered(name: str, value: Any) -> tuple[tuple[str, int] | None, ...]:
    return tuple([None if x is None else (name, i) for i, x in enumerate(_as_tuple(value))])


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


class Solution(NamedTuple):
    """States (B, T, D) in the gates' dtype and final states (S, D) in the compute dtype, one of
    each a state, and info: int64 (K, 2), `sweeps` and `mended` of some columns each; see `totals`.
    """

    states: tuple[Tensor, ...]
    final: tuple[Tensor, ...]
    info: Tensor


def totals(info: Tensor) -> Tensor:
    """Return the most sweeps of a column, and how many columns were `mended`, int64 (2,).

    PyTorch's Newton counts columns that the sequential solver finished. Kernels count tiles of
    channels that did not fit after one sweep.
    """
    return torch.stack([info[:, 0].amax(), info[:, 1].sum()])


class Gradients(NamedTuple):
    """Gradients of the arguments of the same names, in their dtypes and shapes; none of initial
    states that are absent. Gradients that are not in `wanted` may be missing or hold anything.

    The gradient of the gates has the layout of `torch.empty_like(gates)`; the others are
    contiguous.
    """

    gates: Tensor
    bias: Tensor | None
    fields: tuple[Tensor, ...]
    params: tuple[Tensor, ...]
    initial: tuple[Tensor, ...]

    @classmethod
    def of(cls, like: Arguments | Gradients, leaves: Iterable[Tensor]) -> Gradients:
        """Make the record of a list, ordered as that of all `leaves` of another."""
        rest = iter(leaves)
        gates, bias = next(rest), None if like.bias is None else next(rest)
        counts = map(len, (like.fields, like.params, like.initial))
        return cls(gates, bias, *[tuple(islice(rest, count)) for count in counts])

    def leaves(self, wanted: Sequence[str]) -> list[Tensor]:
        """Return the gradients of the wanted arguments, ordered as in `Arguments.leaves`."""
        return _leaves(self, wanted)


LEAVES = Gradients._fields
"""Arguments that have gradients, in the record's order."""


class Wanted(NamedTuple):
    """Gradients that a backward pass needs.

    names: the arguments, in the order of LEAVES; `params.1` for one tensor of several of which
    others are not wanted. indices: for each tensor of `Arguments.flatten`, the index of its
    gradient in `Gradients.leaves(names)`; None where autograd needs none.
    """

    names: list[str]
    indices: list[int | None]


def with_arguments(names: Sequence[str]) -> Sequence[str]:
    """Return names with those of the arguments in front of single tensors of them: engines may
    compute the gradients of all, or look at `wants`."""
    return [*dict.fromkeys(name.partition(".")[0] for name in names), *filter(_is_single, names)]


def wants(wanted: Sequence[str], name: str, index: int) -> bool:
    """Return True if the gradient of a tensor is wanted, by names `with_arguments`."""
    singles = any(_is_single(other) and other.startswith(f"{name}.") for other in wanted)
    return f"{name}.{index}" in wanted if singles else name in wanted


def _is_single(name: str) -> bool:
    return "." in name


def wanted_gradients(needs_grad: Sequence[bool], values: Sequence[Any]) -> Wanted:
    """Return the gradients to compute; needs_grad: a flag for each of `Arguments.flatten`."""
    flags = Arguments.unflatten(needs_grad, values)
    names: list[str] = []
    indices: list[int | None] = []
    for name in LEAVES:
        of_tensors = _as_tuple(getattr(flags, name))
        if of_tensors and all(of_tensors):
            names.append(name)
        else:
            names += [f"{name}.{i}" for i, flag in enumerate(of_tensors) if flag]
        count = sum(index is not None for index in indices)
        indices += [count + sum(of_tensors[:i]) if f else None for i, f in enumerate(of_tensors)]
    return Wanted(names, [*indices, None, None])
