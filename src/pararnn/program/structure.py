"""Jacobian structures: how the maps v -> J v of one step are stored, applied and composed.

A structure's representation is one tensor (B, T, ...) whose all-zero value is the zero map. Vectors
are (B, T, N, D): N states of D channels. Paper section 3 (diagonal and N x N blocks of diagonals)
and Appendix D (structures of the user's own).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pararnn.base.errors import StructureError
from pararnn.program.coupling import APART, TOGETHER, Coupling


@dataclass(frozen=True)
class Structure(ABC):
    """A family of linear maps closed under composition and transposition.

    Subclass it, give `name` and the methods, and pass it to `register_structure`.
    `couples_channels` says whether channel d of J v may depend on other channels of v. Where it
    may, a step's Jacobian is found by pulling back `cotangents`, by default one for each of its N D
    rows, and a whole batch row solves independently unless `coupling` says otherwise.
    """

    num_states: int
    name: ClassVar[str]
    couples_channels: ClassVar[bool] = True

    @property
    def coupling(self) -> Coupling:
        """Coupling of channels, which decides the sizes of graphs and the columns of a solve."""
        return TOGETHER if self.couples_channels else APART

    @abstractmethod
    def apply(self, jacobian: Tensor, vector: Tensor) -> Tensor:
        """Return J v for representations (B, T, ...) and vectors (B, T, N, D)."""

    @abstractmethod
    def compose(self, later: Tensor, earlier: Tensor) -> Tensor:
        """Return the representation of J_later J_earlier."""

    @abstractmethod
    def transpose(self, jacobian: Tensor) -> Tensor:
        """Return the representation of J transposed."""

    @abstractmethod
    def to_dense(self, jacobian: Tensor) -> Tensor:
        """Return the matrices (..., N*D, N*D), rows and columns ordered state by state."""

    @abstractmethod
    def from_dense(self, matrix: Tensor) -> Tensor:
        """Return the representation of matrices (..., N*D, N*D) that have this structure."""

    def cut(self, jacobian: Tensor, fresh: Tensor) -> Tensor:
        """Return representations (B, T, ...), zero where a mask (B, T, 1 or a column's D) holds."""
        batch, steps, width = fresh.shape
        ones = [1] * (jacobian.ndim - 3)
        return jacobian.masked_fill(fresh.reshape(batch, steps, *ones, width), 0)

    def cotangents(self, like: Tensor) -> Tensor:
        """Return the K cotangents (K, N, D) to pull back for Jacobians at states `like` (R, D)."""
        size = self.num_states * like.shape[-1]
        return torch.eye(size, dtype=like.dtype, device=like.device).unflatten(
            -1, (self.num_states, -1)
        )

    def from_pulled(self, pulled: Tensor) -> Tensor:
        """Return the representation, from J^T times each of the cotangents, (R, K, N*D)."""
        return self.from_dense(pulled)


@dataclass(frozen=True)
class Diagonal(Structure):
    """One state, channels independent: J is (B, T, 1, D), composing costs D multiplications."""

    name: ClassVar[str] = "diagonal"
    couples_channels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.num_states != 1:
            raise StructureError(
                f"structure 'diagonal' takes one state, the cell has {self.num_states}; "
                "declare 'block_diagonal'"
            )

    def apply(self, jacobian: Tensor, vector: Tensor) -> Tensor:
        return jacobian * vector

    def compose(self, later: Tensor, earlier: Tensor) -> Tensor:
        return later * earlier

    def transpose(self, jacobian: Tensor) -> Tensor:
        return jacobian

    def to_dense(self, jacobian: Tensor) -> Tensor:
        return torch.diag_embed(jacobian.squeeze(-2))

    def from_dense(self, matrix: Tensor) -> Tensor:
        return matrix.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)


@dataclass(frozen=True)
class BlockDiagonal(Structure):
    """N states, channels independent: J is (B, T, N, N, D), [i, j] = d new_i / d old_j."""

    name: ClassVar[str] = "block_diagonal"
    couples_channels: ClassVar[bool] = False

    def apply(self, jacobian: Tensor, vector: Tensor) -> Tensor:
        out = jacobian[..., 0, :] * vector[..., 0:1, :]
        for j in range(1, self.num_states):
            out = torch.addcmul(out, jacobian[..., j, :], vector[..., j : j + 1, :])
        return out

    def compose(self, later: Tensor, earlier: Tensor) -> Tensor:
        out = later[..., :, 0:1, :] * earlier[..., 0:1, :, :]
        for j in range(1, self.num_states):
            out = torch.addcmul(out, later[..., :, j : j + 1, :], earlier[..., j : j + 1, :, :])
        return out

    def transpose(self, jacobian: Tensor) -> Tensor:
        return jacobian.transpose(-3, -2)

    def to_dense(self, jacobian: Tensor) -> Tensor:
        size = self.num_states * jacobian.shape[-1]
        blocks = torch.diag_embed(jacobian).transpose(-3, -2)
        return blocks.reshape(*jacobian.shape[:-3], size, size)

    def from_dense(self, matrix: Tensor) -> Tensor:
        n, size = self.num_states, matrix.shape[-1]
        blocks = matrix.reshape(*matrix.shape[:-2], n, size // n, n, size // n)
        return blocks.diagonal(dim1=-3, dim2=-1)


@dataclass(frozen=True)
class Dense(Structure):
    """Every channel may depend on every other: J is (B, T, N*D, N*D), composing costs (N*D)^3."""

    name: ClassVar[str] = "dense"

    def apply(self, jacobian: Tensor, vector: Tensor) -> Tensor:
        return (jacobian @ vector.flatten(-2).unsqueeze(-1)).reshape(vector.shape)

    def compose(self, later: Tensor, earlier: Tensor) -> Tensor:
        return later @ earlier

    def transpose(self, jacobian: Tensor) -> Tensor:
        return jacobian.mT

    def to_dense(self, jacobian: Tensor) -> Tensor:
        return jacobian

    def from_dense(self, matrix: Tensor) -> Tensor:
        return matrix


STRUCTURES: dict[str, Callable[[int], Structure]] = {
    cls.name: cls for cls in (Diagonal, BlockDiagonal, Dense)
}


def register_structure(factory: Callable[[int], Structure], name: str) -> None:
    """Let cells declare `structure = name`; `factory(num_states)` makes the structure.

    Raises StructureError when the name is taken by another factory or is "sequential".
    """
    if name == "sequential" or STRUCTURES.get(name, factory) is not factory:
        raise StructureError(f"structure name {name!r} is taken; choose another")
    STRUCTURES[name] = factory


def make_structure(name: str, num_states: int) -> Structure:
    """Return the registered structure `name` for `num_states` states; StructureError if unknown."""
    if name not in STRUCTURES:
        raise StructureError(
            f"unknown structure {name!r}; known: {', '.join(sorted(STRUCTURES))}, sequential. "
            "Register your own with pararnn.register_structure"
        )
    return STRUCTURES[name](num_states)
