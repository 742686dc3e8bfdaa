"""A language model on bytes: blocks of a ParaRNN layer and an MLP, each behind an RMSNorm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pararnn.cells import Cell
from pararnn.layers import ParaRNN, States

BYTES = 256
"""The vocabulary: every byte is a token."""


class Block(nn.Module):
    """x + ParaRNN(RMSNorm(x)), then x + MLP(RMSNorm(x)), on (B, T, width)."""

    def __init__(
        self,
        cell_class: type[Cell],
        width: int,
        mlp_width: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.rnn_norm = nn.RMSNorm(width, **factory)
        self.rnn = ParaRNN(cell_class, width, width, **factory, **options)
        self.mlp_norm = nn.RMSNorm(width, **factory)
        self.mlp = nn.Sequential(
            nn.Linear(width, mlp_width, **factory),
            nn.GELU(approximate="tanh"),
            nn.Linear(mlp_width, width, **factory),
        )
        # Every per-step input that a cell names is a time gap or a weight whose neutral value is 1.
        self.fields = dict.fromkeys(cell_class.fields, 1.0)

    def forward(self, x: Tensor, state: States | None) -> tuple[Tensor, States]:
        return self._finish(x, *self.rnn(self.rnn_norm(x), state, fields=self.fields))

    def step(self, x: Tensor, state: States | None) -> tuple[Tensor, States]:
        """One time step: x (B, width)."""
        return self._finish(x, *self.rnn.step(self.rnn_norm(x), state, fields=self.fields))

    def _finish(self, x: Tensor, out: Tensor, state: States) -> tuple[Tensor, States]:
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), state


class ByteLM(nn.Module):
    """A byte-level language model with a recurrence of any cell.

    Args:
        cell_class: the `Cell` subclass; fields that it names are 1 at every step.
        width: channels D of the residual stream and of every layer's states.
        num_layers: blocks.
        num_heads: heads of each layer's input projection; width must be a multiple.
        mlp_ratio: hidden channels of the MLP over width.
        solver, backend: as in `pararnn.solve`.
        device, dtype: of the parameters.
        config: the cell's config.

    Raises CellError for a malformed cell or config, ValueError for impossible sizes and options.
    """

    def __init__(
        self,
        cell_class: type[Cell],
        width: int,
        num_layers: int = 2,
        num_heads: int = 1,
        *,
        mlp_ratio: float = 2.0,
        solver: str = "auto",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **config: Any,
    ) -> None:
        super().__init__()
        mlp_width = round(width * mlp_ratio)
        for name, value in (("num_layers", num_layers), ("width * mlp_ratio", mlp_width)):
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        self.cell_class = cell_class
        self.options: dict[str, Any] = {
            "width": width,
            "num_layers": num_layers,
            "num_heads": num_heads,
            "mlp_ratio": mlp_ratio,
            "solver": solver,
            "backend": backend,
            **config,
        }
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(BYTES, width, **factory)
        rnn_options = {"num_heads": num_heads, "solver": solver, "backend": backend, **config}
        self.blocks = nn.ModuleList(
            Block(cell_class, width, mlp_width, **factory, **rnn_options) for _ in range(num_layers)
        )
        self.norm = nn.RMSNorm(width, **factory)
        self.head = nn.Linear(width, BYTES, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise anew: Gaussians of 1/sqrt(inputs), outputs of an MLP smaller by the depth."""
        nn.init.normal_(self.embedding.weight)
        for block in self._blocks():
            block.rnn.reset_parameters()
            first, last = cast(nn.Linear, block.mlp[0]), cast(nn.Linear, block.mlp[2])
            shrink = 1 / math.sqrt(2 * len(self.blocks))
            for linear, gain in ((first, 1.0), (last, shrink)):
                nn.init.normal_(linear.weight, std=gain / math.sqrt(linear.in_features))
                nn.init.zeros_(linear.bias)
        nn.init.zeros_(self.head.weight)  # the first prediction is uniform: 8 bits per byte

    def forward(
        self, tokens: Tensor, state: Sequence[States] | None = None
    ) -> tuple[Tensor, tuple[States, ...]]:
        """Logits of the next byte after every byte.

        Args:
            tokens: (B, T), any integer dtype, values below 256.
            state: what an earlier call returned, to go on from there; None is the zero state.

        Returns:
            (logits, state): (B, T, 256); the states after the last byte, one entry a block.
        """
        x = self.embedding(tokens.long())
        new = []
        for block, before in zip(self._blocks(), self._per_block(state), strict=True):
            x, after = block(x, before)
            new.append(after)
        return self.head(self.norm(x)), tuple(new)

    def step(
        self, token: Tensor, state: Sequence[States] | None = None
    ) -> tuple[Tensor, tuple[States, ...]]:
        """One time step of `forward`: token (B,), logits (B, 256), states as there."""
        x = self.embedding(token.long())
        new = []
        for block, before in zip(self._blocks(), self._per_block(state), strict=True):
            x, after = block.step(x, before)
            new.append(after)
        return self.head(self.norm(x)), tuple(new)

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        length: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Sample `length` bytes after each prompt: (B, T) with T >= 1 to uint8 (B, length).

        Temperature 0 takes the likeliest byte. `generator` lives on the model's device. Raises
        ValueError for an empty prompt, a negative length or a negative temperature.
        """
        if prompt.ndim != 2 or prompt.shape[1] == 0:
            raise ValueError(f"prompt must be (B, T) with T >= 1, got {tuple(prompt.shape)}")
        if length < 0 or temperature < 0:
            raise ValueError(
                f"length and temperature may not be negative, got {length} and {temperature}"
            )
        logits, state = self(prompt)
        logits = logits[:, -1]
        out = prompt.new_empty(len(prompt), length, dtype=torch.uint8)
        for index in range(length):
            token = _sample(logits, temperature, generator)
            out[:, index] = token
            logits, state = self.step(token, state)
        return out

    def layers(self) -> list[ParaRNN]:
        """The recurrent layers, one a block."""
        return [block.rnn for block in self._blocks()]

    def _blocks(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))

    def _per_block(self, state: Sequence[States] | None) -> Sequence[States | None]:
        if state is None:
            return [None] * len(self.blocks)
        if len(state) != len(self.blocks):
            raise ValueError(
                f"state must hold one entry for each of the {len(self.blocks)} blocks, got "
                f"{len(state)}"
            )
        return state


def bits_per_byte(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in bits: logits (..., 256), targets (...) of any integer dtype."""
    nats = F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten().long())
    return nats / math.log(2)


def set_solver(model: nn.Module, solver: str, backend: str = "auto") -> None:
    """Let every ParaRNN in `model` use another pair; names as in `pararnn.solve`."""
    for part in model.modules():
        if isinstance(part, ParaRNN):
            part.solver, part.backend = solver, backend


def _sample(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    chances = (logits.float() / temperature).softmax(-1)
    return torch.multinomial(chances, 1, generator=generator).squeeze(-1)
