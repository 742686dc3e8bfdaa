"""What every engine takes and gives: the op's arguments, and one record an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import islice
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from pararnn.engines.rule import Merit, Size
from pararnn.engines.signature import Form, signature_of, size_of
from pararnn.engines.split import Split, SplitRequest
from pararnn.numerics import compute_dtype
from pararnn.program.program import Program

ON_FAILURE = ("warn", "raise")
"""What a parallel solve does that has not converged: see `pararnn.solve`."""


class _OwnForm:
    """`Arguments.form`: looked up at the first use, and an attribute of the record from then on.

    functools.cached_property takes a lock for that, and a microsecond, before Python 3.12.
    """

    def __get__(self, record: Arguments, owner: object = None) -> Form:
        form = record.__dict__["form"] = signature_of(*record.flatten())
        return form


@dataclass
class Arguments:
    """One call, checked: what layers, `solve` and `scan` make, and what the op and engines take.

    A field here is an argument of the op: its schema, what autograd sees of it and what compilers
    fake follow from the fields' names, types (KINDS) and defaults. A new one is a line, the last.

    gates (B, T, G, D) or (B, T, G, H, D/H); bias (G, D) or None; fields (B, T, D) each; params (D,)
    each, in their own dtypes; initial (S, D) a state, S sequences, or none at all for zero;
    seq int32 (B, T) or None (row b is sequence b), each sequence one run of steps; reset bool
    (B, T) or None; segments and burn_in: what is asked of (newton, fused), which others leave
    alone; on_failure: one of ON_FAILURE; output_only: whether only the first state's sequence is
    read: those of the others then carry no gradient.

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
    reverse: bool = False
    segments: int | None = None
    burn_in: int | None = None
    on_failure: str = "warn"
    output_only: bool = False

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

    form = _OwnForm()
    """What this call shares with others of its form. Not in compiled regions."""

    @property
    def split(self) -> SplitRequest:
        """What is asked of an engine that cuts time."""
        return SplitRequest(self.segments, self.burn_in)

    @property
    def all_written(self) -> bool:
        """Whether every sequence has a step, so that kernels write all that ends at one."""
        return self.seq is None and self.gates.shape[1] > 0

    def start(self, num_states: int) -> tuple[Tensor, ...]:
        """The initial states, zero if there are none."""
        size = (self.sequences, self.channels)
        return self.initial or tuple(
            self.gates.new_zeros(size, dtype=self.dtype) for _ in range(num_states)
        )

    def completed(self, num_states: int) -> Arguments:
        """These arguments with initial states, and with params in the compute dtype."""
        dtype = self.dtype
        params = tuple(p if p.dtype == dtype else p.to(dtype) for p in self.params)
        return replace(self, initial=self.start(num_states), params=params)

    def values(self) -> list[Any]:
        """What the op is called with; `of_values` makes the record again."""
        return [getattr(self, name) for name in KIND_OF]

    @classmethod
    def of_values(cls, values: Iterable[Any]) -> Arguments:
        """The record of what the op is called with: lists, and None for [] by AOTInductor.

        PyTorch leaves out what comes last and is as by default.
        """
        pairs = zip(values, KIND_OF.values(), strict=False)
        listed: list[Any] = [tuple(v or ()) if kind == _MANY else v for v, kind in pairs]
        return cls(*listed)

    def flatten(self) -> tuple[list[Tensor | None], tuple[Any, ...]]:
        """All tensors in a row, and the rest: plain values, and how many tensors a tuple holds."""
        return _FLATTEN(self)

    @classmethod
    def unflatten(cls, tensors: Sequence[Any], rest: Sequence[Any]) -> Arguments:
        """What `flatten` took apart; anything may stand in the tensors' places."""
        made: Arguments = _UNFLATTEN(cls, iter(tensors), *rest)
        return made

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Arguments:
        """This record with `function` of each tensor."""
        tensors, rest = self.flatten()
        return self.unflatten([None if t is None else function(t) for t in tensors], rest)

    def leaves(self, names: Iterable[str] | None = None) -> list[Tensor]:
        """The tensors that have gradients, in a row; those of `names` only, if given."""
        return _leaves(self, LEAVES if names is None else names)

    def named_true(self) -> list[str]:
        """The LEAVES in whose places something true stands, in their order."""
        return [name for name in LEAVES if any(_listed(getattr(self, name)))]

    def beside(self, grads: Iterable[Any], wanted: Iterable[str]) -> list[Any]:
        """Gradients of the wanted `leaves`, in the order of `flatten`, None for all others."""
        found = iter(grads)
        return [
            None if tensor is None or name not in wanted else next(found)
            for name, kind in KIND_OF.items()
            if kind in _TENSORS
            for tensor in _listed(getattr(self, name))
        ]


KINDS: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    tuple[Tensor, ...]: "Tensor[]",
    int: "SymInt",
    int | None: "int?",
    float: "float",
    float | None: "float?",
    bool: "bool",
    str: "str",
}
"""What the op's schema calls the type of a field."""

_HINTS = get_type_hints(Arguments)
KIND_OF = {field.name: KINDS[_HINTS[field.name]] for field in fields(Arguments)}
"""By field, in order, what the schema calls its type."""

_ONE, _MANY = ("Tensor", "Tensor?"), "Tensor[]"
_TENSORS = (*_ONE, _MANY)

REST = tuple(name for name, kind in KIND_OF.items() if kind not in _ONE)
"""The fields of which `flatten` has the rest."""


# Emitted from the table, as launches are packed: loops over it take four times as long.
_FLATTEN: Callable[[Arguments], tuple[list[Tensor | None], tuple[Any, ...]]] = eval(
    "lambda record: (["
    + ", ".join(
        f"*record.{name}" if kind == _MANY else f"record.{name}"
        for name, kind in KIND_OF.items()
        if kind in _TENSORS
    )
    + "], ("
    + ", ".join(
        f"len(record.{name})" if KIND_OF[name] == _MANY else f"record.{name}" for name in REST
    )
    + "))"
)
_UNFLATTEN: Callable[..., Arguments] = eval(
    f"lambda make, tensors, {', '.join(REST)}: make("
    + ", ".join(
        "next(tensors)"
        if kind in _ONE
        else f"tuple(islice(tensors, {name}))"
        if kind == _MANY
        else name
        for name, kind in KIND_OF.items()
    )
    + ")",
    {"islice": islice, "tuple": tuple, "next": next},
)


def schema() -> str:
    """The record as a part of the op's schema."""

    def default(value: Any) -> str:
        return "" if value is MISSING else f"={json.dumps(value) if value == str(value) else value}"

    return ", ".join(f"{KIND_OF[f.name]} {f.name}{default(f.default)}" for f in fields(Arguments))


def _leaves(record: Arguments | Gradients, names: Iterable[str]) -> list[Tensor]:
    return [t for name in names for t in _listed(getattr(record, name)) if t is not None]


def _listed(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


class Solution(NamedTuple):
    """States (B, T, D) in the gates' dtype and final states (S, D) in the compute dtype, a state
    each, and info: int64 (K, 2), `sweeps` and `mended` of some columns each; see `totals`."""

    states: tuple[Tensor, ...]
    final: tuple[Tensor, ...]
    info: Tensor


def totals(info: Tensor) -> Tensor:
    """What all columns took, int64 (2,): the most sweeps, and how many were `mended`.

    That is of the engine: PyTorch's Newton counts columns that the sequential solver finished,
    kernels the tiles of channels that were unfit: whose segments did not fit after one sweep.
    """
    return torch.stack([info[:, 0].amax(), info[:, 1].sum()])


class Gradients(NamedTuple):
    """Gradients of the arguments of the same names, in their dtypes and shapes; none of initial
    states that are not given. Those that nobody wants need not be right, nor there.

    That of the gates has the layout of `torch.empty_like(gates)`; the others are contiguous.
    """

    gates: Tensor
    bias: Tensor | None
    fields: tuple[Tensor, ...]
    params: tuple[Tensor, ...]
    initial: tuple[Tensor, ...]

    def leaves(self, wanted: Sequence[str]) -> list[Tensor]:
        """Those of the wanted arguments in a row, as in `Arguments.leaves`."""
        return _leaves(self, wanted)


LEAVES = Gradients._fields
"""The arguments that have gradients, in the record's order."""

Forward = Callable[[Program, Arguments], Solution]
Backward = Callable[
    [
        Program,
        Arguments,
        tuple[Tensor, ...],
        tuple[Tensor | None, ...],
        tuple[Tensor | None, ...],
        Sequence[str],
    ],
    Gradients,
]
SplitOf = Callable[[Program, Size, torch.dtype, torch.device, SplitRequest], Split]
Pays = Callable[[Program, Size, torch.dtype, torch.device], Merit]


@dataclass(frozen=True)
class Engine:
    """A way to run one (solver, backend) pair.

    `forward(program, arguments)`; `backward(program, arguments, states, grad_states, grad_final,
    wanted)`, with the names (in LEAVES) of the arguments whose gradients anybody wants, or None for
    an engine that autograd differentiates by itself; `why_not(program)`
    is the reason why this engine cannot take a cell, or None. `build(program, dtype)` makes ready
    what running on gates of `dtype` needs, and raises EngineError where it cannot.
    `completes`: whether it takes arguments as they come; others are given `Arguments.completed`
    ones. `info_rows`: the K of its Solution's info. `split(program, size, dtype, device, asked)`,
    for engines that cut time: how the forward pass on gates of a size (B, T, D) and dtype does.
    `pays(program, size, dtype, device)`: how it ranks where a request leaves it and others open.
    Tensors that `forward` and `backward` return share no memory, neither among themselves nor with
    arguments.
    """

    solver: str
    backend: str
    forward: Forward
    backward: Backward | None
    why_not: Callable[[Program], str | None]
    pays: Pays
    build: Callable[[Program, torch.dtype], object] | None = None
    completes: bool = False
    info_rows: int = 1
    split: SplitOf | None = None
