"""The training loop: feed, loss, clip, step, log, validate, save."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.utils.data import DataLoader, Subset

from pararnn.base.device import Gpu, type_of
from pararnn.base.errors import DivergenceError
from pararnn.lab.train.checkpoints import all_of, last_complete, save_checkpoint, tensors_in
from pararnn.lab.train.config import RunConfig
from pararnn.lab.train.feed import label_count, local_span, make_loader, steps_of_epoch
from pararnn.lab.train.initial import load_initial
from pararnn.lab.train.log import LOG, append_row
from pararnn.lab.train.optimiser import make_adamw, set_rate
from pararnn.lab.train.randomness import random_state, seed_all, set_random_state
from pararnn.lab.train.reports import Reports, tracker_of
from pararnn.lab.train.setup import TrainingData, make_model
from pararnn.lab.train.sharding import clip_gradients, gather, grid_of
from pararnn.lab.train.states import RowStates, batch_of, rows_of
from pararnn.lab.train.stopping import stopping
from pararnn.lab.train.telemetry import check_solves, solves, start_lines

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16 operations a second, by a word of the device's name."""


class RunTrainer:
    """Trains a `RunConfig`'s model and writes a log and checkpoints into its folder.

    Needs a process group that takes tensors of the CPU too. step: steps made so far.
    """

    def __init__(self, config: RunConfig, data: TrainingData, device: torch.device) -> None:
        self.config, self.data, self.device = config, data, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.tracker = tracker_of(config.report_to)  # now, before a folder is made
        seed_all(config.seed)
        self.model = make_model(config, device)
        self.model.config.use_cache = False
        self.parameters = list(self.model.parameters())
        on_gpu = type_of(device).accelerator
        self.optimizer = make_adamw(self.model, config.optimiser, fused=on_gpu)
        self.grid = grid_of(config.context_parallel)
        self.micro_batches = config.batch // (config.device_batch * self.grid.data)
        layers = config.model.num_hidden_layers
        self.states = RowStates(layers, self.micro_batches) if config.data.stateful else None
        self.out, self.step, self.logged_step = Path(config.out), 0, 0
        self.loss_sum = torch.zeros((), device=self.device)
        self.first_bad = torch.zeros((), dtype=torch.int64, device=self.device)

    def run(self, checkpoint: Path | None = None) -> int:
        """Train to the last step, from a checkpoint if there is one; or to a signal.

        Return the number of the signal that ended training, after a checkpoint; 0 for none.
        """
        if checkpoint is not None:
            self.load(checkpoint)
        elif self.config.init_from:
            load_initial(self.config, self.model)
        config, rows = self.config, self.data.train
        lines = start_lines(config, self.data, self.model, self.world)
        loader = make_loader(config, rows, self.grid.data_rank, self.grid.data, self.step)
        batches = iter(loader)
        self.timed_step, self.since = self.step, time.perf_counter()
        stop = 0
        with (
            stopping() as signals,
            closing(Reports(self.tracker, config, self.step, lines)) as self.reports,
        ):
            self.model.train()
            while self.step < config.steps and not stop:
                norm, rate = self.learn([next(batches) for _ in range(self.micro_batches)])
                self.step += 1
                stop = self.agree(max(signals, default=0))
                self.reports.advance(self.step)
                if config.verify_every and self.step % config.verify_every == 0:
                    self.verify()
                last = self.step >= config.steps
                if self.step % config.log_every == 0 or last:
                    self.log_training(norm, rate)
                if self.step % config.valid_every == 0 or last:
                    self.validate()
                if self.step % config.save_every == 0 or last or stop:
                    self.save()
        return stop

    def learn(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, float]:
        """Make an optimizer step on this rank's micro-batches; return gradient norm and rate."""
        to: dict[str, Any] = {"device": self.device, "non_blocking": True}
        spans = [local_span(rows, self.grid.span_rank, self.grid.spans) for rows in micro_batches]
        inputs = [{name: value.to(**to) for name, value in rows.items()} for rows in spans]
        count = torch.stack([label_count(rows) for rows in inputs]).sum()
        dist.all_reduce(count)
        for rows in inputs:
            loss = self.loss(rows, count)
            loss.backward()
            self.loss_sum += loss.detach()
        self.sample: dict[str, Tensor] = {
            name: value[:1] for name, value in rows.items() if not name.endswith("labels")
        }
        norm = clip_gradients(self.parameters, self.config.optimiser.grad_norm or math.inf)
        # Stored on the device, without waiting for it.
        bad = ~norm.isfinite() & (self.first_bad == 0)
        self.first_bad = self.first_bad.where(~bad, self.step + 1)
        rate = set_rate(self.optimizer, self.config.optimiser, self.step, self.config.steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm, rate

    def loss(self, inputs: Mapping[str, Tensor], count: Tensor) -> Tensor:
        """Return the sum of the losses over `count`, the labels of all ranks' batch, times ranks.

        FSDP2 averages gradients over ranks, so that the gradient is that of the mean.
        """
        more: dict[str, Any] = {}
        if self.states is not None:
            if self.states.position == 0 and self.step % self.epoch_steps == 0:
                self.states.forget()
            more["carried"] = self.states.take()
        out = self.model(**inputs, **more, num_items_in_batch=count)
        return out.loss * self.world

    @property
    def epoch_steps(self) -> int:
        """Steps of an epoch."""
        return steps_of_epoch(self.config, len(self.data.train))  # type: ignore[arg-type]

    def agree(self, signal: int) -> int:
        """Return the signal that any rank has had, 0 for none: all stop after the same step."""
        agreed = torch.tensor(signal)  # on the CPU: no GPU is waited for
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return int(agreed)

    def log_training(self, norm: Tensor, rate: float) -> None:
        """Log the mean loss since the last row, the last step's gradient norm and rate, speed."""
        logs = {
            "loss": float(self.unlogged_loss()) / (self.step - self.logged_step),
            "grad_norm": float(norm),
            "learning_rate": rate,
        }
        self.loss_sum.zero_()
        self.check_finite(logs)
        logs |= self.speed(self.step - self.timed_step)
        self.logged_step = self.timed_step = self.step
        self.log(logs, solves(self.model))

    def unlogged_loss(self) -> Tensor:
        """Return the sum of the steps' mean losses since the last row; every rank must call."""
        total = self.loss_sum.clone()
        dist.all_reduce(total)
        return total / self.world

    def speed(self, steps: int) -> dict[str, float]:
        """Return the speed of this many steps, without validations and checkpoints; and memory."""
        now = time.perf_counter()
        tokens = steps * self.config.batch * self.config.data.sequence_length
        figures = {"tokens_per_second": tokens / (now - self.since)}
        self.since = now
        device = type_of(self.device)
        if isinstance(device, Gpu):
            figures["memory_gib"] = device.peak_memory() / 2**30
            name = device.name_of(self.device)
            peak = next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in name), None)
            if peak is not None:
                flops = 6 * sum(parameter.numel() for parameter in self.parameters)
                figures["mfu"] = figures["tokens_per_second"] * flops / peak / self.world
        return figures

    def log(self, logs: dict[str, float], counts: Mapping[str, Sequence[Any]]) -> None:
        """Report figures, and write them into the log. counts: a number for each layer."""
        self.check_finite(logs)
        if counts:
            logs |= {"sweeps": max(counts["sweeps"]), "mended": sum(counts["mended"])}
        if self.rank:
            return
        self.reports.log(self.step, logs)
        tokens = self.step * self.config.batch * self.config.data.sequence_length
        append_row(self.out / LOG, {"step": self.step, "tokens": tokens, **logs, **counts})

    def check_finite(self, logs: Mapping[str, float] | None = None) -> None:
        """Raise DivergenceError if the loss, the gradient or a figure is NaN or infinite."""
        step = int(self.first_bad)
        bad = [name for name, value in (logs or {}).items() if not math.isfinite(value)]
        if not (step or bad):
            return
        what = "loss or gradient" if step else bad[0].replace("valid_", "validation's ")
        last = last_complete(self.out)
        resumes = f"resumes from {last[1]}" if last else "starts again: no checkpoint is complete"
        raise DivergenceError(
            f"the {what} is NaN or infinite in step {step or self.step}; the same "
            f"command {resumes}. If it happens there again, look for what is odd in the data, or "
            "lower optimiser.learning_rate or optimiser.grad_norm, which needs another folder "
            "(out=...)",
            step or self.step,
        )

    def verify(self) -> None:
        """Log how well the solvers do on a row of the last batch, the worst rank's figures."""
        with self.off_the_clock():
            figures = check_solves(self.model, self.sample)
            if not figures:
                return
            row = torch.tensor(list(figures.values()), dtype=torch.float64, device=self.device)
            worst = gather(row[None]).amax(0).tolist()
            counts: dict[str, list[Any]] = {
                "defect": [float(f"{value:.3g}") for value in worst[0]],
                "sweeps": [int(count) for count in worst[1]],
                "mended": [int(count) for count in worst[2]],
            }
            # An infinite one is null in the log, and the run continues.
            self.log({"defect": min(max(worst[0]), sys.float_info.max)}, counts)

    @torch.no_grad()
    def validate(self) -> None:
        """Log the mean cross-entropy of held-out rows without z-loss, in nats and bits."""
        with self.off_the_clock(), without_z_loss(self.model.config):
            self.model.eval()
            total = torch.zeros(2, dtype=torch.float64, device=self.device)
            for batch in self.valid_batches():
                span = local_span(batch, self.grid.span_rank, self.grid.spans)
                inputs = {name: value.to(self.device) for name, value in span.items()}
                # The sum of the losses, and no logits but the last: all would not fit.
                out = self.model(**inputs, num_items_in_batch=1, logits_to_keep=1, use_cache=False)
                total += torch.stack([out.loss, label_count(inputs)])
            dist.all_reduce(total)
            self.model.train()
            nats, count = total.tolist()
            bits = nats / count / math.log(2) / self.data.bytes_per_token
            self.log({"valid_loss": nats / count, "valid_bits_per_byte": bits}, {})

    def valid_batches(self) -> DataLoader[Any]:
        """Return a rank's held-out rows: equally many on each rank, and none twice, except on ranks
        that share rows.

        Batches are of one size: each further size would compile the blocks again.
        """
        rows, size = self.data.valid, len(self.data.valid)  # type: ignore[arg-type]
        count = min(self.config.valid_rows, size) // self.grid.data * self.grid.data
        local_rows = range(self.grid.data_rank, count, self.grid.data)
        indices = [index * size // count for index in local_rows]
        batch = max(n for n in range(1, self.config.device_batch + 1) if len(local_rows) % n == 0)
        return DataLoader(Subset(rows, indices), batch_size=batch, generator=torch.Generator())

    def state(self) -> dict[str, Any]:
        """Return all that a run resumes from; every rank must call."""
        weights, moments = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments, "step": self.step}
        state["random"] = all_of(random_state(self.device))
        state["unlogged"] = {
            "loss": self.unlogged_loss(),
            "step": torch.tensor(self.logged_step, device=self.device),
        }
        if self.states is not None:
            tensors = self.states.tensors().items()
            count = self.micro_batches
            state["carry"] = {name: batch_of(gather(x), count) for name, x in tensors}
        return state

    def save(self) -> None:
        """Write a checkpoint, which any number of ranks can read."""
        self.check_finite()
        with self.off_the_clock():
            save_checkpoint(self.out, self.step, self.state(), self.config.keep)

    def load(self, checkpoint: Path) -> None:
        """Resume from a checkpoint."""
        state = self.state()
        state["unlogged"] = tensors_in(checkpoint, "unlogged", self.device)
        if self.states is not None:
            state["carry"] = tensors_in(checkpoint, "carry", self.device)
        load(state, checkpoint_id=checkpoint)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]
        unlogged = state["unlogged"]  # none in a checkpoint of an earlier version
        self.logged_step = int(unlogged.get("step", self.step))
        if unlogged and self.rank == 0:
            self.loss_sum += unlogged["loss"] * self.world
        if self.rank < len(state["random"]):  # others stay as they were seeded
            set_random_state(state["random"][self.rank], self.device)
        if self.states is not None:
            rows = {
                name: rows_of(value, self.micro_batches, self.rank, self.world)
                for name, value in state["carry"].items()
            }
            self.states.restore(rows)

    @contextmanager
    def off_the_clock(self) -> Iterator[None]:
        """Leave the time of a block out of the speed."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.since += time.perf_counter() - begin


@contextmanager
def without_z_loss(config: Any) -> Iterator[None]:
    """Let a model's loss be its cross-entropy without z-loss."""
    weight, config.z_loss = config.z_loss, 0.0
    try:
        yield
    finally:
        config.z_loss = weight
