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


class Affine1(_Blocks):
    """One state a channel: a is diagonal."""

    states = ("h0",)
    gates = ("b0",)
    fields = ("a00",)


class Affine2(_Blocks):
    """Two states a channel: a is 2 x 2 blocks."""

    states = ("h0", "h1")
    gates = ("b0", "b1")
    fields = tuple(f"a{i}{j}" for i in range(2) for j in range(2))


class Affine3(_Blocks):
    """Three states a channel: a is 3 x 3 blocks."""

    states = ("h0", "h1", "h2")
    gates = ("b0", "b1", "b2")
    fields = tuple(f"a{i}{j}" for i in range(3) for j in range(3))


class Affine4(_Blocks):
    """Four states a channel: a is 4 x 4 blocks."""

    states = ("h0", "h1", "h2", "h3")
    gates = ("b0", "b1", "b2", "b3")
    fields = tuple(f"a{i}{j}" for i in range(4) for j in range(4))


class AffineComplex(Cell):
    """One complex state a channel, as its real and imaginary parts."""

    states = ("real", "imag")
    gates = ("b_real", "b_imag")
    fields = ("a_real", "a_imag")

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        """The parts of a h + b."""
        real = gate.b_real + gate.a_real * state.real - gate.a_imag * state.imag
        imag = gate.b_imag + gate.a_real * state.imag + gate.a_imag * state.real
        return real, imag


class AffineRealDecay(Cell):
    """One complex state a channel, as its parts, and a real a."""

    states = ("real", "imag")
    gates = ("b_real", "b_imag")
    fields = ("a",)

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        """The parts of a h + b."""
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
