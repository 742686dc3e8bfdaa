"""Several seeds of a model as one: stacked weights, and one kernel for all seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from pararnn.lab.tasks.base import Batch, Task, generator_of
from pararnn.lab.tasks.models import ModelConfig, TaskModel
from pararnn.layers import RecurrentLayer

TOKENS_AT_ONCE = 100_000
"""Tokens of a seed in one batch of an evaluation."""


class FoldedModel:
    """Models of one shape as one: `weights` are copies of theirs, stacked to (S, ...) by name.

    The first model is moved to the device, and its structure is used; the others stay as they are.
    """

    def __init__(self, models: Sequence[TaskModel], device: torch.device | str) -> None:
        weights, self.buffers = stack_module_state(list(models))
        self.base = models[0].to(device)
        self.weights: dict[str, Tensor] = {
            name: weight.detach().to(device).requires_grad_() for name, weight in weights.items()
        }
        self.buffers = {name: buffer.to(device) for name, buffer in self.buffers.items()}
        self.bounds = _bounds(self.base)

    def __len__(self) -> int:
        return len(next(iter(self.weights.values())))

    def __call__(
        self, inputs: Tensor, weights: Mapping[str, Tensor] | None = None, *, shared: bool = False
    ) -> Tensor:
        """Compute outputs (S, B, T, classes) of inputs (S, B, T); `shared`: (B, T) for all.

        weights: those to compute with, by default the model's own.
        """

        def one(state: dict[str, Tensor], rows: Tensor) -> Tensor:
            return functional_call(self.base, state, (rows,))

        state = {**(weights or self.weights), **self.buffers}
        # The backward pass of attention's CUDA kernels is wrong for the layouts that vmap makes.
        with sdpa_kernel(SDPBackend.MATH) if torch.is_grad_enabled() else nullcontext():
            if len(self) == 1:  # as kernels of matrix cells have no seeds
                single = {name: value.squeeze(0) for name, value in state.items()}
                return one(single, inputs if shared else inputs.squeeze(0)).unsqueeze(0)
            return vmap(one, (0, None if shared else 0))(state, inputs)

    @torch.no_grad()
    def finite(self) -> list[bool]:
        """Return for each seed whether all its weights are finite; one that diverged stays so."""
        finite = [weight.isfinite().flatten(1).all(1) for weight in self.weights.values()]
        return torch.stack(finite).all(0).tolist()

    @torch.no_grad()
    def clip(self) -> None:
        """Clamp recurrent weights to their bounds, as `pararnn.clip_after_step` does."""
        for name, bound in self.bounds.items():
            self.weights[name].clamp_(-bound, bound)


def _bounds(model: TaskModel) -> dict[str, float]:
    """Return the bounds of recurrent weights, by the weights' names in the model."""
    bounds = {
        id(weight): layer.recurrent_clip
        for layer in model.modules()
        if isinstance(layer, RecurrentLayer) and layer.recurrent_clip is not None
        for weight in layer.recurrent_parameters()
    }
    return {name: bounds[id(w)] for name, w in model.named_parameters() if id(w) in bounds}


def make_folded(
    task: Task, config: ModelConfig, seeds: Sequence[int], device: torch.device | str
) -> FoldedModel:
    """Build a model a seed and fold them; PyTorch's global generator stays as it is."""
    models = []
    for seed in seeds:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            models.append(TaskModel(task, config))
    return FoldedModel(models, device)


def losses(task: Task, outputs: Tensor, batch: Batch) -> Tensor:
    """Compute the mean loss at judged positions, (S,), of outputs (S, B, T, classes)."""
    if task.regression:
        errors = (outputs.squeeze(-1) - batch.targets).square()
    else:
        flat = F.cross_entropy(outputs.flatten(0, 2), batch.targets.flatten(), reduction="none")
        errors = flat.view(batch.targets.shape)
    weight = batch.judged.to(errors.dtype)
    return (errors * weight).sum((1, 2)) / weight.sum((1, 2)).clamp_min(1)


@torch.no_grad()
def accuracies(model: FoldedModel, task: Task, rows: int, *seed: int) -> list[float]:
    """Return each seed's fraction of right answers at judged positions, on `rows` sequences.

    It is NaN for a seed with an output there that is NaN or infinite, and where no position is
    judged.
    """
    device = next(iter(model.weights.values())).device
    right = torch.zeros(len(model), dtype=torch.int64, device=device)
    finite = torch.ones(len(model), dtype=torch.bool, device=device)
    count = torch.zeros((), dtype=torch.int64, device=device)
    size = max(1, TOKENS_AT_ONCE // task.length)
    for start in range(0, rows, size):
        batch = task.draw(min(size, rows - start), generator_of(*seed, start))
        inputs, targets, mask = (tensor.to(device) for tensor in batch)
        outputs = model(inputs, shared=True)
        right += (task.right(outputs, targets) & mask).sum((1, 2))
        finite &= (outputs.isfinite().all(-1) | ~mask).all(2).all(1)
        count += mask.sum()
    return (right.double() / count).where(finite, math.nan).tolist()
