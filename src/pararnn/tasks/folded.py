"""Several seeds of a model as one: stacked weights, and one kernel for what all of them do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from pararnn.layers import RecurrentLayer
from pararnn.tasks.base import Batch, Task, generator_of
from pararnn.tasks.models import ModelConfig, TaskModel

TOKENS_AT_ONCE = 100_000
"""How many tokens of a seed an evaluation takes at once."""


class FoldedModel:
    """Models of one shape as one: `weights` are theirs, stacked to (S, ...) by name.

    The models themselves are left as they are, but for the first, whose structure is used.
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

    def __call__(self, inputs: Tensor, *, shared: bool = False) -> Tensor:
        """Outputs (S, B, T, classes) of inputs (S, B, T); `shared` ones, (B, T), are all seeds'."""

        def one(state: dict[str, Tensor], rows: Tensor) -> Tensor:
            return functional_call(self.base, state, (rows,))

        state = {**self.weights, **self.buffers}
        # Attention's own kernels have a backward pass on CUDA that vmap's layouts are wrong for.
        plain = sdpa_kernel(SDPBackend.MATH) if torch.is_grad_enabled() else nullcontext()
        with plain:
            return vmap(one, (0, None if shared else 0))(state, inputs)

    @torch.no_grad()
    def finite(self) -> list[bool]:
        """Whether all weights of a seed are finite: one that has diverged never comes back."""
        weights = self.weights.values()
        each = [weight.isfinite().flatten(1).all(1) for weight in weights]
        return torch.stack(each).all(0).tolist()

    @torch.no_grad()
    def clip(self) -> None:
        """Clamp recurrent weights to their bounds, as `pararnn.clip_after_step` does."""
        for name, bound in self.bounds.items():
            self.weights[name].clamp_(-bound, bound)


def _bounds(model: TaskModel) -> dict[str, float]:
    """The bounds of recurrent weights, by the weights' names in the model."""
    bounds = {
        id(weight): layer.recurrent_clip
        for layer in model.modules()
        if isinstance(layer, RecurrentLayer) and layer.recurrent_clip is not None
        for weight in layer.recurrent_parameters()
    }
    named = model.named_parameters()
    return {name: bounds[id(weight)] for name, weight in named if id(weight) in bounds}


def make_folded(
    task: Task, config: ModelConfig, seeds: Sequence[int], device: torch.device | str
) -> FoldedModel:
    """A model a seed, folded; PyTorch's own random numbers stay as they are."""
    models = []
    for seed in seeds:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            models.append(TaskModel(task, config))
    return FoldedModel(models, device)


def losses(task: Task, outputs: Tensor, batch: Batch) -> Tensor:
    """The mean loss at judged positions, (S,), of outputs (S, B, T, classes)."""
    if task.regression:
        each = (outputs.squeeze(-1) - batch.targets).square()
    else:
        flat = F.cross_entropy(outputs.flatten(0, 2), batch.targets.flatten(), reduction="none")
        each = flat.view(batch.targets.shape)
    weight = batch.judged.to(each.dtype)
    return (each * weight).sum((1, 2)) / weight.sum((1, 2)).clamp_min(1)


@torch.no_grad()
def accuracies(model: FoldedModel, task: Task, rows: int, *seed: int) -> list[float]:
    """The share of judged positions that each seed's model answers rightly, on `rows` sequences.

    It is NaN for a seed that has an output there that is NaN or infinite, and where no position is
    judged.
    """
    device = next(iter(model.weights.values())).device
    right = torch.zeros(len(model), dtype=torch.int64, device=device)
    bad = torch.zeros(len(model), dtype=torch.bool, device=device)
    judged = torch.zeros((), dtype=torch.int64, device=device)
    size = max(1, TOKENS_AT_ONCE // task.length)
    for start in range(0, rows, size):
        drawn = task.draw(min(size, rows - start), generator_of(*seed, start))
        batch = Batch(*(part.to(device) for part in drawn))
        outputs = model(batch.inputs, shared=True)
        right += (task.right(outputs, batch.targets) & batch.judged).sum((1, 2))
        bad |= (~outputs.isfinite().all(-1) & batch.judged).any(2).any(1)
        judged += batch.judged.sum()
    return (right.double() / judged).where(~bad, math.nan).tolist()
