"""What a launch hands to a kernel: structs of 64-bit words, one list of fields for both sides.

`Interface.declared` is their C++, `Interface.packed` lays values out in the same order. A field has
no other place: who moves, adds or drops one here does so on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from pararnn.program.program import Program

WORD = 8
"""Bytes of a word: a size, a stride or an address."""


class Counts(NamedTuple):
    """How many of each a program has."""

    states: int
    gates: int
    fields: int
    params: int

    @property
    def weights(self) -> int:
        """Biases, then params."""
        return self.gates + self.params


class Field(NamedTuple):
    """A word of a struct, a row of them, or a struct of the same table.

    `each`: what a row has one word for, a name of `Counts`.
    """

    type: str
    name: str
    note: str = ""
    each: str = ""


Words = int | Sequence[int]
"""The value of a field: a number, or the words of a row or a struct."""
Values = Mapping[str, Words]
"""What stands in a struct, by field."""
Structs = Mapping[str, tuple[Field, ...]]
"""Struct name -> its fields; one comes after those that it holds."""


def _sizes(*names: str) -> tuple[Field, ...]:
    return tuple(Field("int64", name) for name in names)


_GATE_STRIDES = _sizes("row", "time", "gate", "head")
_INPUTS = (
    *_sizes("rows", "length"),
    Field("GateStrides", "gate_strides"),
    Field("int64", "field_row", "a stride", each="fields"),
    Field("int64", "field_time", "a stride", each="fields"),
    Field("const io*", "gates"),
    Field("const weight_io*", "bias", "(gate, channel), or null: none"),
    Field("const int*", "seq", "(row, time), or null: row b is sequence b"),
    Field("const bool*", "reset", "(row, time), or null: none"),
    Field("const scalar*", "fields", each="fields"),
    Field("const weight_io*", "params", "(channel)", each="params"),
    Field("const scalar*", "initial", "(sequence, channel), or null: zero", each="states"),
)
_FORWARD = (
    Field("Inputs", "in"),
    Field("io*", "states", "(row, time, channel)", each="states"),
    Field("scalar*", "final", "(sequence, channel)", each="states"),
)
_BACKWARD = (
    Field("Inputs", "in"),
    Field("int64", "grad_row", "a stride", each="states"),
    Field("int64", "grad_time", "a stride", each="states"),
    Field("const io*", "states", "(row, time, channel)", each="states"),
    Field("const io*", "grad_states", "arriving, or null: none", each="states"),
    Field("const scalar*", "grad_final", "arriving, or null: none", each="states"),
    Field("io*", "grad_gates"),
    Field("scalar*", "grad_fields", "(row, time, channel)", each="fields"),
    Field("scalar*", "grad_initial", "(sequence, channel), or null: not wanted", each="states"),
    Field("scalar*", "partial", "(row and span, weight, channel): sums over time"),
)
_SPLIT = (
    Field("int64", "segments", "how many"),
    Field("int64", "size", "steps of one"),
    Field("int64", "burn_in", "steps of the guess"),
)
_CPP_SHOOTING = (
    *_SPLIT,
    Field("scalar*", "starts", "(row, segment, state, channel)"),
    Field("scalar*", "ends", "(row, segment, state, channel)"),
    Field("scalar*", "sizes", "(row, segment, state, channel)"),
    Field("scalar*", "products", "(row, segment, entry, channel); zero at first"),
    Field("int64*", "info", "sweeps, unfit tiles"),
)
_COUNTERS = (  # zero at first; clusters need none
    Field(
        "Word*", "arrived", "(row, tile): arrivals; above 2^32 those of segments that do not fit"
    ),
    Field("Word*", "ends", "(row, tile, segment, ends_words): flagged numbers"),
    Field("unsigned*", "furthest", "(row, tile, round % 2): bits of a distance"),
)
_CUDA_SHOOTING = (
    *_SPLIT,
    Field("Word*", "board", "(row, tile, segment, board_words): flagged numbers"),
    Field("scalar*", "found", "(row, tile, segment, found_numbers, lane): for who goes on alone"),
    Field("Counters", "counters", "see sync_grid.h"),
)

_STRUCTS: Mapping[str, Structs] = {
    "cpp": {
        "GateStrides": _GATE_STRIDES,
        "Inputs": (
            *_INPUTS,
            Field("int64", "field_channel", "0: one value for all channels", each="fields"),
            *_sizes("heads", "channels", "reverse", "threads"),
            Field("void*", "openmp", "see parallel.h"),
        ),
        "ForwardProblem": _FORWARD,
        "BackwardProblem": (
            *_BACKWARD,
            Field("GateStrides", "grad_gate_strides"),
            Field("scalar*", "grad_weights", "(channel)", each="weights"),
        ),
    },
    "cuda": {
        "GateStrides": _GATE_STRIDES,
        "Inputs": _INPUTS,
        "ForwardProblem": (*_FORWARD, Field("int64*", "info", "(slot, 2): sweeps, unfit tiles")),
        "BackwardProblem": _BACKWARD,  # grad_gates: in the strides of the gates
        "SumProblem": (
            Field("int64", "rows", "times segments"),
            Field("const scalar*", "partial", "(row and segment, weight, channel)"),
            Field("weight_io*", "bias", "(gate, channel), or null"),
            Field("weight_io*", "params", each="params"),
        ),
    },
}
_SHOOTING: Mapping[str, Structs] = {
    "cpp": {"ShootingWords": _CPP_SHOOTING},
    "cuda": {"Counters": _COUNTERS, "Shooting": _CUDA_SHOOTING},
}


@cache
def structs_of(target: str, solver: str) -> Structs:
    """The structs of a target's kernels; ForwardLaunch and BackwardLaunch are what these take."""
    own = _SHOOTING[target] if solver == "newton" else {}
    shooting = tuple(Field(name, "shooting") for name in list(own)[-1:])
    launches = {
        f"{direction}Launch": (Field(f"{direction}Problem", "pass"), *shooting)
        for direction in ("Forward", "Backward")
    }
    return {**_STRUCTS[target], **own, **launches}


class Interface:
    """Structs for a program's counts, as C++ declares them and as a launch packs them."""

    def __init__(self, structs: Structs, counts: Counts) -> None:
        self.structs, self.counts = structs, counts
        self._sizes: dict[str, int] = {}
        self._packers: dict[str, Callable[[Values], list[int]]] = {}
        for name, fields in structs.items():
            self._sizes[name] = sum(max(1, self._words(field)) for field in fields)
            # Emitted as the C++ is: a loop over the fields takes ten times as long.
            self._packers[name] = eval(f"lambda values: [{', '.join(map(self._packed, fields))}]")

    def _words(self, field: Field) -> int:
        """The values of a field. Its place has one word at least: C++ has no empty arrays."""
        if field.type in self.structs:
            return self._sizes[field.type]
        return getattr(self.counts, field.each) if field.each else 1

    def declared(self) -> str:
        """All structs in C++, and that they have no gaps."""
        return "".join(
            "\n".join(
                (
                    f"struct {name} {{",
                    *map(self._declared, fields),
                    "};",
                    f"static_assert(sizeof({name}) == {WORD * self._sizes[name]});",
                    "",
                )
            )
            for name, fields in self.structs.items()
        )

    def _declared(self, field: Field) -> str:
        row = f"[{max(1, self._words(field))}]" if field.each else ""
        return f"  {field.type} {field.name}{row};" + (f"  // {field.note}" if field.note else "")

    def packed(self, struct: str, values: Values) -> list[int]:
        """The words of a struct, from those of its fields by name.

        Raises ValueError for fields that are missing, unknown or of the wrong length.
        """
        try:
            words = self._packers[struct](values)
        except (KeyError, TypeError):
            words = []
        if len(words) != self._sizes[struct] or len(values) != len(self.structs[struct]):
            self._complain(struct, values)
        return words

    def _packed(self, field: Field) -> str:
        if not field.each and field.type not in self.structs:
            return f"values[{field.name!r}]"
        return f"*values[{field.name!r}]" + (", 0" if not self._words(field) else "")

    def _complain(self, struct: str, values: Values) -> None:
        wanted = {field.name: self._words(field) for field in self.structs[struct]}
        got = {name: 1 if isinstance(v, int) else len(v) for name, v in values.items()}
        raise ValueError(f"{struct} takes numbers for {wanted}, got {got}")


@lru_cache(maxsize=4096)
def interface_of(program: Program, target: str, solver: str) -> Interface:
    """What a program's kernels take."""
    parts = (program.states, program.gates, program.fields, program.params)
    return Interface(structs_of(target, solver), Counts(*map(len, parts)))
