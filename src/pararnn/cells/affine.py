"""The affine recurrence as cells, so that every engine runs it: h_l = a_l h_{l-1} + b_l."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pararnn.cells.base import Cell


class _Blocks(Cell):
    """N states a channel: a is N x N blocks."""

    def step(self, state: Any, gate: Any, param: Any) -> Tensor | tuple[Tensor, ...]:
        """Each new state is the sum of a row of a times the states, and of b."""
        size = len(state)
        entries = gate[size:]  # fields arrive after the gates
        new = []
        for i in range(size):
            total = gate[i]
            for j in range(size):
                total = total + entries[i * size + j] * state[j]
            new.append(total)
        return tuple(new)


def _blocks(size: int) -> type[Cell]:
    """Return the cell for N = `size`."""
    attributes = {
        "__doc__": f"{size} states a channel: a is {size} x {size} blocks.",
        "__module__": __name__,
        "states": tuple(f"h{i}" for i in range(size)),
        "gates": tuple(f"b{i}" for i in range(size)),
        "fields": tuple(f"a{i}{j}" for i in range(size) for j in range(size)),
    }
    return type(f"Affine{size}", (_Blocks,), attributes)


Affine1, Affine2, Affine3, Affine4 = map(_blocks, range(1, 5))


class AffineComplex(Cell):
    """One complex state a channel, as its real and imaginary parts."""

    states = ("real", "imag")
    gates = ("b_real", "b_imag")
    fields = ("a_real", "a_imag")

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        """Return the parts of a h + b."""
        real = gate.b_real + gate.a_real * state.real - gate.a_imag * state.imag
        imag = gate.b_imag + gate.a_real * state.imag + gate.a_imag * state.real
        return real, imag


class AffineRealDecay(Cell):
    """One complex state a channel, as its parts, and a real a."""

    states = ("real", "imag")
    gates = ("b_real", "b_imag")
    fields = ("a",)

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        """Return the parts of a h + b."""
        return gate.b_real + gate.a * state.real, gate.b_imag + gate.a * state.imag


COMPLEX, REAL_DECAY = 0, -1
AFFINE: dict[int, type[Cell]] = {
    REAL_DECAY: AffineRealDecay,
    COMPLEX: AffineComplex,
    1: Affine1,
    2: Affine2,
    3: Affine3,
    4: Affine4,
}
"""By N, the number of states, or COMPLEX, or REAL_DECAY for a complex b with a real a."""
