"""Training all seeds of a model on a task, with early stop; on CUDA a step is one graph."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pararnn.base.atomic import write_whole
from pararnn.base.device import Gpu, type_of
from pararnn.lab.tasks.base import Batch, Task, generator_of
from pararnn.lab.tasks.folded import FoldedModel, accuracies, losses
from pararnn.lm.config import NOT_NEGATIVE, POSITIVE, Range, check_ranges, interval, one_of

PAPER_STEPS = 3000 * 10_000 // 16
"""The paper's cap: 3,000 epochs of 10,000 sequences, 16 at a time."""
TRAIN, VALIDATION, TEST, ORDER = range(4)
"""Parts of seeds, one for each use of random numbers."""
SAVE_SECONDS = 30.0
"""Time from one save of a training to the next."""
WARM_UPS = 3
"""Steps before a graph is captured, which are then undone."""
STOPS: dict[str, Callable[[list[bool]], bool]] = {
    "any": any,
    "all": all,
    "never": lambda perfect: False,
}
"""Conditions that end a training, of the seeds that made no error in a validation."""
RANGES = {
    **dict.fromkeys(("seeds", "rows", "batch", "steps", "every", "validation"), POSITIVE),
    "lr": Range("positive and finite", lambda x: 0 < x < math.inf),
    "weight_decay": NOT_NEGATIVE,
    "seconds": Range("positive, or none", POSITIVE.holds),
    "stop": one_of(*STOPS),
    "start": POSITIVE,
    "grow_at": interval(0, 1),
    "max_norm": POSITIVE,
}


@dataclass(frozen=True)
class TrainConfig:
    """Training of all seeds; the defaults are the paper's, where it says.

    seeds: number of seeds. seed: the first one's number, for weights and the order of sequences.
    data: number of the data, which all seeds share. rows: training sequences; fresh: whether every
    epoch has new ones. steps: most steps, over which the learning rate falls as a cosine; seconds:
    most seconds. every: steps between validations, each on `validation` sequences. stop: training
    ends when a validation finds no error by "any" seed, by "all", or "never". start: positions that
    are trained on at first, none for all; a seed's grow by one with every step in which it answers
    the fraction `grow_at` of the last of them right. max_norm: the norm to which a seed's gradient
    is scaled down where it is larger, none for any. graph: on CUDA, whether a step is one captured
    graph, or kernels that Python launches one by one. compile: whether losses and gradients are
    compiled by Inductor first. Raises ValueError for impossible values.
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
    start: int | None = None
    grow_at: float = 0.9
    max_norm: float | None = None
    graph: bool = True
    compile: bool = False

    def __post_init__(self) -> None:
        at_most = Range(f"at most rows = {self.rows}", lambda batch: batch <= self.rows)
        check_ranges(self, RANGES)
        check_ranges(self, {"batch": at_most})


History = list[tuple[int, list[float], list[float]]]
"""Validations of a training: (step, a loss a seed, an accuracy a seed)."""
Report = Callable[[int, list[float], list[float]], None]


Steps = Generator[None, None, dict[str, Any]]
"""A training that waits after each step, so that several may take turns, and its result."""


def run_steps(steps: Steps) -> dict[str, Any]:
    """Run a training to its end; return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def train(
    model: FoldedModel,
    task: Task,
    config: TrainConfig,
    report: Report | None = None,
    save_path: Path | None = None,
) -> Steps:
    """Train in place, and leave every seed with the weights of its best validation.

    The weights of a seed that diverged before its first validation are NaN. Training ends where all
    have diverged. `report` is called after every validation with the step, the losses and the
    accuracies. save_path: the file that a training is saved to every `SAVE_SECONDS`, and resumes
    from with the same bits. Returns steps; seconds; capped, see `run_task`; diverged, for each seed
    the step of the first validation where its weights were NaN or infinite, or None; horizons, the
    positions that each seed was trained on in the end; and the history.
    """
    stepper = Stepper(model, task, config)
    best = {name: torch.full_like(weight, math.nan) for name, weight in model.weights.items()}
    top = torch.full((len(model),), -1.0, dtype=torch.float64)
    failure_steps: list[int | None] = [None] * len(model)
    history: History = []
    begin = save_time = time.monotonic()
    if save_path is not None and save_path.exists():
        record = torch.load(save_path, weights_only=True)
        stepper.load(record["stepper"])
        _copy_all(record["best"], best)
        top, failure_steps, history = record["top"], record["diverged"], record["history"]
        begin -= record["seconds"]
    end = False
    while not end:
        for _ in range(min(config.every, config.steps - stepper.count)):
            stepper()
            yield
        scores = accuracies(model, task, config.validation, config.data, VALIDATION)
        history.append((stepper.count, stepper.losses.tolist(), scores))
        if report is not None:
            report(*history[-1])
        new = torch.tensor(scores, dtype=torch.float64)
        better = new >= top  # the later of equal ones has learned more; False for NaN
        top = new.where(better, top)
        _copy_seeds(model.weights, best, better)
        finite = model.finite()
        for seed, fine in enumerate(finite):
            if not fine and failure_steps[seed] is None:
                failure_steps[seed] = stepper.count
        perfect = (top == 1).tolist()
        now = time.monotonic()
        late = config.seconds is not None and now - begin >= config.seconds
        end = STOPS[config.stop](perfect) or late or stepper.count == config.steps
        end = end or not any(finite)
        if save_path is not None and not end and now - save_time >= SAVE_SECONDS:
            save_time = now
            values = {"best": best, "top": top, "diverged": failure_steps, "history": history}
            with write_whole(save_path) as path:
                torch.save({"stepper": stepper.state(), **values, "seconds": now - begin}, path)
    _copy_all(best, model.weights)
    return {
        "steps": stepper.count,
        "seconds": round(time.monotonic() - begin, 3),
        "capped": not any(perfect) and stepper.count < PAPER_STEPS,
        "diverged": failure_steps,
        "horizons": stepper.horizons.tolist(),
        "history": history,
    }


@torch.no_grad()
def _copy_all(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Copy tensors by name, in place."""
    for name, value in target.items():
        value.copy_(source[name])


@torch.no_grad()
def _copy_seeds(source: dict[str, Tensor], target: dict[str, Tensor], seeds: Tensor) -> None:
    """Copy the weights of the seeds where `seeds`, bool (S,), is True."""
    indices = seeds.nonzero().flatten().tolist()
    for name, weight in target.items():
        weight[indices] = source[name][indices]


class Stepper:
    """One training step a call: batch, losses, gradients, AdamW, clipping.

    The data stay on the device. All that changes between steps is in tensors, so that a graph of
    one step is one of all. count: steps so far. horizons: the positions that each seed is trained
    on, (S,).
    """

    def __init__(self, model: FoldedModel, task: Task, config: TrainConfig) -> None:
        self.model, self.task, self.config = model, task, config
        weights = list(model.weights.values())
        device = weights[0].device
        self.data = Batch(*(tensor.to(device) for tensor in self._rows(0)))
        self.generators = [generator_of(config.seed + s, ORDER) for s in range(len(model))]
        self.order = torch.zeros(len(model), config.rows, dtype=torch.int64, device=device)
        self.lane = torch.arange(config.batch, device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.losses = torch.zeros(len(model), device=device)
        self.first_horizon = min(config.start or task.length, task.length)
        self.horizons = torch.full((len(model),), self.first_horizon, device=device)
        self.lr = torch.tensor(config.lr, device=device)
        self.optimizer = torch.optim.AdamW(
            weights,
            lr=self.lr,
            betas=(0.9, 0.999),
            weight_decay=config.weight_decay,
            fused=True,
            capturable=type_of(device).accelerator,
        )
        self.epoch_steps = config.rows // config.batch
        self.count = 0
        self.gradients = self._compile_gradients() if config.compile else self._gradients
        self.run: Callable[[], None] = self._step
        record = type_of(device)
        if isinstance(record, Gpu) and config.graph:
            self.run = self._capture(record, device)

    def __call__(self) -> None:
        epoch, step = divmod(self.count, self.epoch_steps)
        if step == 0:
            self._begin_epoch(epoch)
        self.run()
        self.count += 1

    def state(self) -> dict[str, Any]:
        """Return all that later steps depend on; tensors are the stepper's, not copies."""
        moments = [dict(self.optimizer.state[w]) for w in self.model.weights.values()]
        return {
            "weights": self.model.weights,
            "moments": moments,
            "tensors": self._tensors(),
            "generators": [generator.get_state() for generator in self.generators],
            "count": self.count,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned, with the same bits."""
        with torch.no_grad():
            _copy_all(state["weights"], self.model.weights)
        for weight, moments in zip(self.model.weights.values(), state["moments"], strict=True):
            present = self.optimizer.state[weight]
            for name, value in moments.items():
                found = present.get(name)
                present[name] = value.to(weight.device) if found is None else found.copy_(value)
        _copy_all(state["tensors"], self._tensors())
        for generator, value in zip(self.generators, state["generators"], strict=True):
            generator.set_state(value.cpu())
        self.count = state["count"]
        epoch = (self.count - 1) // self.epoch_steps
        if self.config.fresh and epoch > 0:
            self._draw_epoch(epoch)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("order", "step", "losses", "horizons")}

    def _rows(self, epoch: int) -> Batch:
        return self.task.draw(self.config.rows, generator_of(self.config.data, TRAIN, epoch))

    def _begin_epoch(self, epoch: int) -> None:
        orders = [torch.randperm(self.config.rows, generator=g) for g in self.generators]
        self.order.copy_(torch.stack(orders))
        if self.config.fresh and epoch:
            self._draw_epoch(epoch)

    def _draw_epoch(self, epoch: int) -> None:
        for old, new in zip(self.data, self._rows(epoch), strict=True):
            old.copy_(new)

    def _step(self) -> None:
        per_seed, horizons = self.gradients()
        cosine = torch.cos(self.step * (math.pi / self.config.steps))
        self.lr.copy_(self.config.lr / 2 * (1 + cosine))
        self.optimizer.step()
        self.model.clip()
        self.losses.copy_(per_seed)
        self.horizons.copy_(horizons)
        self.step += 1

    def _gradients(self) -> tuple[Tensor, Tensor]:
        """Set the weights' gradients; return losses and the next step's horizons, (S,) each."""
        per_seed, horizons = self._losses(self.model.weights, *self._sources())
        # Not autograd.grad: backward gives gradients their weights' strides, as fused AdamW wants.
        self.optimizer.zero_grad(set_to_none=True)
        per_seed.sum().backward()
        if self.config.max_norm is not None:
            grads = [cast(Tensor, weight.grad) for weight in self.model.weights.values()]
            torch._foreach_copy_(grads, shorten(grads, self.config.max_norm))
        return per_seed.detach(), horizons

    def _sources(self) -> tuple[Tensor, Tensor, Tensor, Batch]:
        """Return all that a step's losses depend on, except the weights."""
        return self.step, self.order, self.horizons, self.data

    def _losses(
        self,
        weights: Mapping[str, Tensor],
        step: Tensor,
        order: Tensor,
        horizons: Tensor,
        data: Batch,
    ) -> tuple[Tensor, Tensor]:
        """Compute a step's losses, and the next step's horizons."""
        first = step % self.epoch_steps * self.config.batch
        rows = order.index_select(1, first + self.lane)
        batch = Batch(*(tensor[rows] for tensor in data))
        outputs = self.model(batch.inputs, weights)
        if self.config.start is not None:
            position = torch.arange(batch.judged.shape[-1], device=step.device)
            ends = horizons.view(-1, 1, 1)
            last = batch.judged & (position == ends - 1)
            batch = batch._replace(judged=batch.judged & (position < ends))
            right = (self.task.right(outputs, batch.targets) & last).sum((1, 2))
            grows = right >= self.config.grow_at * last.sum((1, 2))
            horizons = (horizons + grows).clamp_max(self.task.length)
        return losses(self.task, outputs, batch), horizons

    def _compile_gradients(self) -> Callable[[], tuple[Tensor, Tensor]]:
        """Return `_gradients` as compiled code.

        Dynamo cannot follow a solve under vmap, so that losses and gradients are traced before.
        """
        names = list(self.model.weights)

        def whole(values: list[Tensor], *sources: Any) -> tuple[Tensor, ...]:
            weights = dict(zip(names, (w.detach().requires_grad_() for w in values), strict=True))
            per_seed, horizons = self._losses(weights, *sources)
            gradients = torch.autograd.grad(per_seed.sum(), list(weights.values()))
            if self.config.max_norm is not None:
                gradients = shorten(gradients, self.config.max_norm)
            return per_seed.detach(), horizons, *gradients

        values = [weight.detach() for weight in self.model.weights.values()]
        code = compile_graph(split_products(make_fx(whole)(values, *self._sources())))
        for weight in self.model.weights.values():
            weight.grad = torch.zeros_like(weight)
        grads = [cast(Tensor, weight.grad) for weight in self.model.weights.values()]

        def gradients() -> tuple[Tensor, Tensor]:
            per_seed, horizons, *new = code(values, *self._sources())
            torch._foreach_copy_(grads, new)  # whose strides may differ
            return per_seed, horizons

        return gradients

    def _capture(self, gpu: Gpu, device: torch.device) -> Callable[[], None]:
        """Capture a step as a graph, and undo its effect on weights and optimizer."""
        backup = [weight.detach().clone() for weight in self.model.weights.values()]
        with gpu.side_stream(device):
            for _ in range(WARM_UPS):
                self._step()
        with gpu.capture(device) as replay:
            self._step()
        with torch.no_grad():
            for weight, old in zip(self.model.weights.values(), backup, strict=True):
                weight.copy_(old)
            for state in self.optimizer.state.values():
                for moment in state.values():
                    moment.zero_()
            self.step.zero_()
            self.horizons.fill_(self.first_horizon)
        return replay


def shorten(gradients: Sequence[Tensor], most: float) -> tuple[Tensor, ...]:
    """Return gradients (S, ...) of all weights, scaled where a seed's norm is above `most`."""
    norms = torch.stack([grad.flatten(1).square().sum(1) for grad in gradients]).sum(0).sqrt()
    scales = (most / (norms + 1e-6)).clamp_max(1)
    return tuple(grad * scales.view(-1, *(1,) * (grad.ndim - 1)) for grad in gradients)


SPLIT_FROM, MOST_SLICES = 1024, 32
"""The least length of a sum that `split_products` splits, and the most slices of one."""


def split_products(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Split long sums of batched products: a weight's gradient sums over all tokens of a batch.

    cuBLAS gives each small matrix one block, in which such a sum takes as long as the rest.
    """
    bmm = torch.ops.aten.bmm.default
    for node in graph.graph.find_nodes(op="call_function", target=bmm):
        (_, rows, length), (*_, columns) = (argument.meta["val"].shape for argument in node.args)
        slices = max(n for n in range(1, MOST_SLICES + 1) if length % n == 0)
        if length < max(SPLIT_FROM, 4 * rows, 4 * columns) or slices == 1:
            continue
        with graph.graph.inserting_before(node):
            call = graph.graph.call_function
            first, second = node.args
            first = call(torch.unflatten, (first, 2, (slices, -1)))
            second = call(torch.unflatten, (second, 1, (slices, -1)))
            sums = call(torch.matmul, (call(torch.movedim, (first, 2, 1)), second))
            total = call(torch.sum, (sums, 1))
        node.replace_all_uses_with(total)
        graph.graph.erase_node(node)
    graph.recompile()
    return graph


def compile_graph(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    """Compile a graph of PyTorch's operations for its sizes."""
    return torch.compile(graph, fullgraph=True, dynamic=False)
