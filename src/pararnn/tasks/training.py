"""Training all seeds of a model on a task, with early stop; on CUDA a step is one graph."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pararnn.tasks.base import Batch, Task, generator_of, need
from pararnn.tasks.folded import FoldedModel, accuracies, losses

PAPER_STEPS = 3000 * 10_000 // 16
"""The paper's cap: 3,000 epochs of 10,000 sequences, 16 at a time."""
TRAIN, VALIDATION, TEST, ORDER = range(4)
"""What random numbers are for."""
WARM_UPS = 3
"""Steps before a graph is captured, which are then undone."""


@dataclass(frozen=True)
class TrainConfig:
    """How seeds are trained; the defaults are the paper's, where it says.

    seeds: how many; seed: the first one's number, of weights and of the order of sequences. data:
    the number of the data, which all seeds share. rows: training sequences; fresh: new ones every
    epoch. steps: at most so many, over which the learning rate falls as a cosine; seconds: at most
    so long. every: steps between validations, each on `validation` sequences. stop: training ends
    when a validation finds no error by "any" seed, by "all", or "never". graph: on CUDA, whether a
    step is one captured graph, or kernels that Python launches one by one.
    """

    seeds: int = 3
    seed: int = 0
    data: int = 0
    rows: int = 10_000
    fresh: bool = False
    batch: int = 16
    steps: int = PAPER_STEPS
    seconds: float | None = None
    lr: float = 5e-4
    weight_decay: float = 1e-6
    every: int = 1250
    validation: int = 1000
    stop: str = "any"
    graph: bool = True

    def __post_init__(self) -> None:
        for name in ("seeds", "rows", "batch", "steps", "every", "validation"):
            need(getattr(self, name) > 0, f"{name} must be positive, got {getattr(self, name)}")
        need(0 < self.lr < math.inf, f"lr must be positive and finite, got {self.lr}")
        need(self.weight_decay >= 0, f"weight_decay must be 0 or positive, got {self.weight_decay}")
        need(
            self.seconds is None or self.seconds > 0,
            f"seconds must be positive, or none, got {self.seconds}",
        )
        need(self.batch <= self.rows, f"batch must be at most rows = {self.rows}, got {self.batch}")
        need(self.stop in STOPS, f"stop must be one of {', '.join(STOPS)}, got {self.stop!r}")


STOPS: dict[str, Callable[[list[bool]], bool]] = {
    "any": any,
    "all": all,
    "never": lambda solved: False,
}


@dataclass(frozen=True)
class Trained:
    """What a training took: steps and seconds; capped, whether it ended before a seed was right
    throughout and before the paper's last step; diverged, the step of the first validation where a
    seed's weights were NaN or infinite, None where they never were; the validations, (step, a loss
    a seed, an accuracy a seed) each."""

    steps: int
    seconds: float
    capped: bool
    diverged: list[int | None]
    history: list[tuple[int, list[float], list[float]]]


Report = Callable[[int, list[float], list[float]], None]


def train(
    model: FoldedModel, task: Task, config: TrainConfig, report: Report | None = None
) -> Trained:
    """Train in place, and leave every seed with the weights of its best validation.

    The weights of a seed that diverged before its first validation are NaN. Training ends where all
    have diverged.

    `report` is called after every validation with the step, the losses and the accuracies.
    """
    stepper = Stepper(model, task, config)
    best = {name: torch.full_like(weight, math.nan) for name, weight in model.weights.items()}
    top = [-1.0] * len(model)
    diverged: list[int | None] = [None] * len(model)
    history: list[tuple[int, list[float], list[float]]] = []
    begin = time.monotonic()
    done = 0
    while True:
        for _ in range(min(config.every, config.steps - done)):
            stepper()
            done += 1
        found = accuracies(model, task, config.validation, config.data, VALIDATION)
        history.append((done, stepper.losses.tolist(), found))
        if report is not None:
            report(*history[-1])
        better = [new > old for new, old in zip(found, top, strict=True)]  # NaN is not
        top = [max(old, new) for new, old in zip(found, top, strict=True)]
        fine = model.finite()
        diverged = [
            done if before is None and not yes else before
            for before, yes in zip(diverged, fine, strict=True)
        ]
        _keep(best, model.weights, better)
        right = [accuracy == 1 for accuracy in top]
        late = config.seconds is not None and time.monotonic() - begin >= config.seconds
        if STOPS[config.stop](right) or late or done == config.steps or not any(fine):
            break
    _keep(model.weights, best, [True] * len(model))
    capped = not any(right) and done < PAPER_STEPS
    return Trained(done, time.monotonic() - begin, capped, diverged, history)


@torch.no_grad()
def _keep(kept: dict[str, Tensor], new: dict[str, Tensor], which: list[bool]) -> None:
    """Copy the weights of some seeds."""
    chosen = [index for index, yes in enumerate(which) if yes]
    for name, weight in kept.items():
        weight[chosen] = new[name][chosen]


class Stepper:
    """One step at a call: batch, losses, gradients, AdamW, clipping; the data stay on the device.

    All that changes from step to step is in tensors, so that a graph of one step is one of all.
    """

    def __init__(self, model: FoldedModel, task: Task, config: TrainConfig) -> None:
        self.model, self.task, self.config = model, task, config
        weights = list(model.weights.values())
        device = weights[0].device
        self.data = Batch(*(part.to(device) for part in self._rows(0)))
        self.orders = [generator_of(config.seed + s, ORDER) for s in range(len(model))]
        self.order = torch.zeros(len(model), config.rows, dtype=torch.int64, device=device)
        self.lane = torch.arange(config.batch, device=device)
        self.done = torch.zeros((), dtype=torch.int64, device=device)
        self.losses = torch.zeros(len(model), device=device)
        self.lr = torch.tensor(config.lr, device=device)
        self.optimizer = torch.optim.AdamW(
            weights,
            lr=self.lr,
            betas=(0.9, 0.999),
            weight_decay=config.weight_decay,
            fused=True,
            capturable=device.type == "cuda",
        )
        self.epoch_steps = config.rows // config.batch
        self.count = 0
        self.run: Callable[[], None] = self._step
        if device.type == "cuda" and config.graph:
            with torch.cuda.device(device):
                self.run = self._captured()

    def __call__(self) -> None:
        epoch, place = divmod(self.count, self.epoch_steps)
        if place == 0:
            self._new_epoch(epoch)
        self.run()
        self.count += 1

    def _rows(self, epoch: int) -> Batch:
        seed = (self.config.data, TRAIN, epoch)
        return self.task.draw(self.config.rows, generator_of(*seed))

    def _new_epoch(self, epoch: int) -> None:
        orders = [torch.randperm(self.config.rows, generator=each) for each in self.orders]
        self.order.copy_(torch.stack(orders))
        if self.config.fresh and epoch:
            for part, new in zip(self.data, self._rows(epoch), strict=True):
                part.copy_(new)

    def _step(self) -> None:
        place = self.done % self.epoch_steps * self.config.batch
        taken = self.order.index_select(1, place + self.lane)
        batch = Batch(*(part[taken] for part in self.data))
        each = losses(self.task, self.model(batch.inputs), batch)
        # Not autograd.grad: backward gives gradients their weights' strides, as fused AdamW wants.
        self.optimizer.zero_grad(set_to_none=True)
        each.sum().backward()
        fallen = torch.cos(self.done * (math.pi / self.config.steps))
        self.lr.copy_(self.config.lr / 2 * (1 + fallen))
        self.optimizer.step()
        self.model.clip()
        self.losses.copy_(each.detach())
        self.done += 1

    def _captured(self) -> Callable[[], None]:
        """A step as a graph; what capturing it did to weights and optimizer is undone."""
        before = [weight.detach().clone() for weight in self.model.weights.values()]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        with torch.no_grad():
            for weight, old in zip(self.model.weights.values(), before, strict=True):
                weight.copy_(old)
            for state in self.optimizer.state.values():
                for part in state.values():
                    part.zero_()
            self.done.zero_()
        return graph.replay
