"""One layer in one direction: projection, bias and cell."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from pararnn.cells import Cell
from pararnn.program import program_of
from pararnn.projection import HeadwiseLinear
from pararnn.solve import solve_with_info


class DirectionalLayer(nn.Module):
    """One layer in one direction: projection, gate biases (G, D) and cell."""

    bias: nn.Parameter | None

    def __init__(
        self,
        proj: HeadwiseLinear,
        cell: Cell,
        bias: bool,
        *,
        reverse: bool = False,
        recompute_gates: bool = False,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.proj, self.reverse, self.recompute_gates = proj, reverse, recompute_gates
        size = (len(cell.gates), cell.hidden_size)
        self.bias = nn.Parameter(torch.zeros(size, **factory)) if bias else None
        self.cell = cell
        program_of(cell)  # now, because tracing cannot happen inside a compiled region

    def forward(
        self, x: Tensor, initial: tuple[Tensor, ...] | None, **options: Any
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """States, final states and the solver's counts; options are those of `solve_with_info`."""
        options["reverse"] = self.reverse
        if not (self.recompute_gates and torch.is_grad_enabled()):
            return self._solve(x, initial, options)
        contexts = partial(create_selective_checkpoint_contexts, _keep_states)
        return checkpoint(
            self._solve, x, initial, options, use_reentrant=False, context_fn=contexts
        )

    def _solve(
        self, x: Tensor, initial: tuple[Tensor, ...] | None, options: dict[str, Any]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        return solve_with_info(self.cell, self.proj(x), initial, bias=self.bias, **options)

    def recurrent_parameters(self) -> list[Tensor]:
        """What clipping concerns; ValueError where a parametrisation computes one."""
        cell = self.cell
        for name, param in type(cell).params.items():
            if param.recurrent and param.trainable and is_parametrized(cell, name):
                raise ValueError(
                    f"{name} of {program_of(cell).cell_name} is computed by a parametrisation: "
                    "clamping it would change nothing; set recurrent_clip=None on the layer or let "
                    "the parametrisation bound it"
                )
        return list(cell.recurrent_parameters())

    def reset_parameters(self) -> None:
        """Initialise anew (paper, Appendix C): see `HeadwiseLinear` and `Param`; zero biases."""
        self.proj.reset_parameters()
        self.cell.reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def _keep_states(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What is kept for the backward pass where gates are recomputed: the states."""
    if op is torch.ops.pararnn.forward.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
