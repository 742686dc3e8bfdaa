"""transformers' Trainer with our optimizer, validation, telemetry and checkpoints."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset
from transformers import Trainer, set_seed
from transformers.integrations.integration_utils import TensorBoardCallback
from transformers.trainer_callback import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerState,
)

from pararnn.device import Gpu, type_of
from pararnn.errors import TrainingError
from pararnn.lm.hf import ParaRNNForCausalLM
from pararnn.lm.loss import IGNORED
from pararnn.train import carry
from pararnn.train.carry import Carry
from pararnn.train.checkpoints import (
    finish,
    last_complete,
    load_state,
    mark_complete,
    reading,
    remove_old,
    save_state,
    sums_of_checkpoint,
    unfinished,
    writing,
)
from pararnn.train.config import RunConfig
from pararnn.train.feed import make_loader, steps_of_epoch
from pararnn.train.log import append_row, read_rows
from pararnn.train.optimiser import make_adamw, make_scheduler
from pararnn.train.plot import plot_rows
from pararnn.train.setup import TrainingData, check_rows, make_arguments, make_model
from pararnn.train.sharding import clip_gradients, launched
from pararnn.train.stopping import Ballot, Stop
from pararnn.train.telemetry import Board, checked, progress, solves, start_lines

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Dense bfloat16 products a second, by a part of the device's name."""

SCHEDULER = "scheduler.pt"
DRAW_EVERY = 30.0
"""Seconds between two pictures of the curves, which take some tenths each."""
TRAINER_STATE = "trainer_state.json"


class RunTrainer(Trainer):
    """Trains a `RunConfig`'s model and writes log.csv and checkpoints into its folder.

    stop: what may ask it to stop. stopped: by which signal it did, 0 for none: its last step is a
    checkpoint then.
    """

    def __init__(self, config: RunConfig, packed: TrainingData, stop: Stop | None = None) -> None:
        world = launched()
        check_rows(config, packed, world)
        set_seed(config.seed)
        arguments = make_arguments(config, world)
        model = make_model(config, arguments.device)
        super().__init__(
            model,
            arguments,
            train_dataset=packed.train,
            eval_dataset=packed.valid,
        )
        for theirs in (ProgressCallback, PrinterCallback):
            self.remove_callback(theirs)
        lines = start_lines(config, packed, model, world)
        self.add_callback(progress(lines, config.batch * config.data.sequence_length))
        self.add_callback(_Intervals())
        self.stop, self.stopped, self.ballot = stop, 0, Ballot(world if stop else 1)
        if self.pop_callback(TensorBoardCallback) is not None:
            self.add_callback(Board(Path(config.out) / "tensorboard"))
        self.run, self.out, self.world = config, Path(config.out), world
        self.flops_of_token = 6 * sum(parameter.numel() for parameter in model.parameters())
        self.first_bad = torch.zeros((), dtype=torch.int64, device=self.args.device)
        self.bytes_per_token = packed.bytes_per_token
        self.since, self.last_step, self.last_check = 0.0, -1, 0
        self.drawn = -math.inf
        self.solved: dict[str, list[Any]] = {}
        layers, parts = config.model.num_hidden_layers, self.args.gradient_accumulation_steps
        self.carry = Carry(layers, parts) if config.data.stateful else None

    @property
    def own_model(self) -> ParaRNNForCausalLM:
        """The model, typed."""
        return cast(ParaRNNForCausalLM, self.model)

    @property
    def epoch_steps(self) -> int:
        """Steps of an epoch."""
        return steps_of_epoch(self.run, len(cast(Any, self.train_dataset)))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """From the step on that the run has reached when the batches are asked for."""
        rows, rank = cast(Any, self.train_dataset), self.args.process_index
        return make_loader(self.run, rows, rank, self.world, lambda: self.state.global_step)

    def get_batch_samples(self, *args: Any) -> tuple[list[Any], Any]:
        """As Trainer has it, on the device without waiting for it."""
        found, count = super().get_batch_samples(*args)
        to = {"device": self.args.device, "non_blocking": True}
        return [{name: part.to(**to) for name, part in each.items()} for each in found], count

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        # To Trainer the whole run is one pass over the data.
        self.state.epoch = self.state.global_step / self.epoch_steps
        self._stop_if_asked()
        every, step = self.run.verify_every, self.state.global_step
        if every and step % every == 0 and step > self.last_check:
            self._check_solves()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _stop_if_asked(self) -> None:
        """Save and stop at the end of the step, where any process was asked to before."""
        if self.stop is None or self.stopped or self.state.global_step == self.state.max_steps:
            return
        self.stop.deferred = True
        self.stopped = self.ballot.cast(self.stop.asked)
        if self.stopped:
            self.control.should_save = self.control.should_training_stop = True

    def go_on(self, checkpoint: Path | None) -> None:
        """Train, from a checkpoint where there is one."""
        if checkpoint is not None:
            with reading(checkpoint, TRAINER_STATE, "the place in the run"):
                TrainerState.load_from_json(str(checkpoint / TRAINER_STATE))
        self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As the paper has it, see `make_adamw`."""
        if self.optimizer is None:
            fused = type_of(self.args.device).accelerator
            model = cast(nn.Module, model or self.model)
            self.optimizer = make_adamw(model, self.run.optimiser, fused=fused)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """See `share`."""
        if self.lr_scheduler is None:
            optimizer = optimizer or self.optimizer
            # The schedule is of the optimizer itself: accelerate's wrapper is none to PyTorch.
            inner = getattr(optimizer, "optimizer", optimizer)
            self.lr_scheduler = make_scheduler(inner, self.run.optimiser, num_training_steps)
        return self.lr_scheduler

    def _wrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """As it is: `shard` has spread it, and accelerate is to put nothing around it."""
        return self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return clip_gradients(list(model.parameters()), self.args.max_grad_norm)

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self.last_step < 0:
            self.since, self.last_step = time.perf_counter(), self.state.global_step
        self.sample = {n: inputs[n][:1] for n in ("input_ids", "position_ids") if n in inputs}
        return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """As Trainer has it; the rows go on where those of the step before ended, see `Carry`."""
        if self.carry is not None:
            if self.carry.at == 0 and self.state.global_step % self.epoch_steps == 0:
                self.carry.forget()
            inputs = {**inputs, "carried": self.carry.take()}
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Remember in which step it stopped being finite, without waiting for the device."""
        norm = grad_norm
        if norm is None:  # nothing is clipped
            norm = clip_gradients(list(model.parameters()), math.inf)
        bad = ~norm.isfinite() & (self.first_bad == 0)
        self.first_bad = self.first_bad.where(~bad, self.state.global_step + 1)
        return norm

    def _stop_unless_finite(self, logs: Mapping[str, Any] = MappingProxyType({})) -> None:
        step = int(self.first_bad)
        numbers = {name: value for name, value in logs.items() if isinstance(value, float)}
        bad = [name for name, value in numbers.items() if not math.isfinite(value)]
        if not (step or bad):
            return
        what = "loss or gradient" if step else bad[0].replace("eval_", "validation's ")
        found = last_complete(self.out)
        goes_on = f"goes on from {found[1]}" if found else "starts anew: no checkpoint is complete"
        raise TrainingError(
            f"the {what} is NaN or infinite in step {step or self.state.global_step}; the same "
            f"command {goes_on}. If it happens there again, look for what is odd in the data, or "
            "lower optimiser.learning_rate or optimiser.grad_norm, which takes a run of its own "
            "(out=...)"
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As Trainer does, with telemetry; and a row of log.csv."""
        counts = self.solved if "defect" in logs else {}
        self._stop_unless_finite(logs)
        if "loss" in logs:
            logs |= self._speed()
            counts = solves(self.own_model)
        if counts:
            logs |= {"sweeps": max(counts["sweeps"]), "mended": sum(counts["mended"])}
        lists = {name: " ".join(map(str, each)) for name, each in counts.items()}
        with writing(self.out, self.out, OSError):  # by TensorBoard, among others
            super().log(logs, start_time)
        if not {"loss", "eval_loss", "defect"}.isdisjoint(logs):
            step = self.state.global_step
            tokens = step * self.run.batch * self.run.data.sequence_length
            row: dict[str, Any] = {"step": step, "tokens": tokens}
            row |= {name.replace("eval_", "valid_"): value for name, value in logs.items()}
            row |= lists
            row.pop("epoch", None)
            if self.is_world_process_zero():
                with writing(self.out / "log.csv", self.out):
                    append_row(self.out / "log.csv", row)

    def _check_solves(self) -> None:
        """Log how well the solvers do on a row of the last batch, the worst rank's."""
        self.last_check = self.state.global_step
        with self._off_the_clock():
            found = checked(self.own_model, self.sample)
            if not found:
                return
            own = torch.tensor(list(found.values()), dtype=torch.float64, device=self.args.device)
            worst = cast(Tensor, self.accelerator.gather(own[None])).amax(0).tolist()
        self.solved = {
            "defect": [f"{part:.3g}" for part in worst[0]],
            "sweeps": [int(count) for count in worst[1]],
            "mended": [int(count) for count in worst[2]],
        }
        asked = self.control.should_log  # logging says that it is done
        # In log.csv it may be infinite: the run goes on, and trainer_state.json is JSON.
        self.log({"defect": min(max(worst[0]), sys.float_info.max)})
        self.control.should_log = asked

    def _speed(self) -> dict[str, float]:
        """Since the row before, without validations and checkpoints in between."""
        now, step = time.perf_counter(), self.state.global_step
        tokens = (step - self.last_step) * self.run.batch * self.run.data.sequence_length
        found = {"tokens_per_second": tokens / (now - self.since)}
        self.since, self.last_step = now, step
        device = type_of(self.args.device)
        if isinstance(device, Gpu):
            found["memory_gib"] = device.peak_memory() / 2**30
            name = device.title(self.args.device)
            peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
            if peak is not None:
                flops = found["tokens_per_second"] * self.flops_of_token
                found["mfu"] = flops / peak / self.world
        return found

    @contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.since += time.perf_counter() - begin

    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Mean cross-entropy of the held-out rows without z-loss, nats a token and bits a byte."""
        with self._off_the_clock(), without_z_loss(self.own_model.config):
            model = self.own_model.eval()
            total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
            for batch in self._valid_batches():
                inputs = self._prepare_inputs(batch)
                # The sum of the losses, and no logits but the last: all would not fit.
                out = model(**inputs, num_items_in_batch=1, logits_to_keep=1, use_cache=False)
                total += torch.stack([out.loss, (inputs["labels"][:, 1:] != IGNORED).sum()])
            nats, count = cast(Tensor, self.accelerator.reduce(total, "sum")).tolist()
        loss = nats / count
        bits = loss / math.log(2) / self.bytes_per_token
        metrics = {"eval_loss": loss, "eval_bits_per_byte": bits}
        self.log(dict(metrics))
        self._draw()
        # Or Trainer validates again at the end of the epoch.
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def _draw(self) -> None:
        """Draw the run's curves so far where matplotlib is installed, if some time has passed."""
        now = time.monotonic()
        if not self.is_world_process_zero() or now - self.drawn < DRAW_EVERY:
            return
        if importlib.util.find_spec("matplotlib") is not None:
            path = self.out / "curves.png"
            with self._off_the_clock(), writing(path, self.out):
                plot_rows(read_rows(self.out / "log.csv"), self.run.name, path)
            self.drawn = now

    def _valid_batches(self) -> DataLoader[Any]:
        """A rank's part of the held-out rows: equally many a rank, none of them twice.

        Batches are of one size: each further one would compile the blocks anew.
        """
        rows = cast(Any, self.eval_dataset)
        count = min(self.run.valid_rows, len(rows)) // self.world * self.world
        own = range(self.args.process_index, count, self.world)
        spread = [index * len(rows) // count for index in own]
        size = max(n for n in range(1, self.run.device_batch + 1) if len(own) % n == 0)
        return DataLoader(Subset(rows, spread), batch_size=size)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Make a checkpoint's folder: weights are saved along with the optimizer, in parts."""
        if not _internal_call:
            raise TypeError("save_model is for checkpoints here; pararnn.train.run.export exports")
        Path(cast(str, output_dir)).mkdir(parents=True, exist_ok=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Each process its part of weights and optimizer."""
        save_state(Path(output_dir), self.own_model, cast(Any, self.optimizer))
        if self.args.should_save:
            state = cast(Any, self.lr_scheduler).state_dict()
            torch.save(state, Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: weights come with the optimizer, once there is one."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        load_state(Path(checkpoint), self.own_model, self.optimizer)
        schedule = cast(Any, self.lr_scheduler)
        with reading(Path(checkpoint), SCHEDULER, "the schedule of rates"):
            schedule.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))
        # The optimizer's rate is by the schedule that it was saved with, which had its own `steps`.
        schedule.last_epoch -= 1
        schedule.step()
        if self.carry is not None:
            own = (self.args.process_index, self.world, self.args.device)
            carry.load(self.carry, Path(checkpoint), *own)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """As Trainer does."""
        if checkpoint is not None:
            with reading(Path(checkpoint), "rng_state*.pth", "the states of random numbers"):
                super()._load_rng_state(checkpoint)

    def _get_output_dir(self, trial: Any) -> str:
        """Where Trainer writes a checkpoint, until it is whole."""
        return str(unfinished(self.out, self.state.global_step).parent)

    def _save_checkpoint(self, *args: Any) -> None:
        """As Trainer does; marked as complete once every rank has written its part."""
        self._stop_unless_finite()
        step = self.state.global_step
        folder = unfinished(self.out, step)
        with self._off_the_clock(), writing(self.out / folder.name, self.out):
            super()._save_checkpoint(*args)
            if self.carry is not None:
                carry.save(self.carry, folder, self.accelerator.gather, self.args.should_save)
            self.accelerator.wait_for_everyone()
            sums = sums_of_checkpoint(folder)
            if self.is_world_process_zero():
                mark_complete(folder, sums)
                finish(self.out, step)
                # Here and not by Trainer, which removes the old before the new is complete.
                remove_old(self.out, self.run.keep)


class _Intervals(TrainerCallback):
    """A run that goes on has its own intervals, not those that its checkpoint was saved with."""

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        state.compute_steps(args, state.max_steps)


@contextmanager
def without_z_loss(config: Any) -> Iterator[None]:
    """Let a model's loss be its cross-entropy alone."""
    kept, config.z_loss = config.z_loss, 0.0
    try:
        yield
    finally:
        config.z_loss = kept
