"""A training step of a recipe: by `pararnn train`'s own path, and by a bare loop beside it.

Both train the same model on random tokens: blocks compiled, FSDP2, gradients clipped, AdamW. The
bare loop calls PyTorch only; the other is `RunTrainer`, a row of the log every 10 steps, without
validations and checkpoints. Times by CUDA events. Memory: the most that was allocated on a GPU.
MFU: 6 x parameters x tokens, attention's products over time left out, over what the GPUs' bfloat16
can do. Adds rows to train_step.csv in a folder; those of other commits and GPUs stay.

    python benchmarks/train_step.py gru-400m --rows 16 [--steps 30] [--paths bare trainer]
    torchrun --standalone --nproc-per-node=2 benchmarks/train_step.py gru-1b --rows 8

Other arguments are overrides of the recipe, as in `pararnn train`.
"""

from __future__ import annotations

import argparse
import csv
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import RESULTS, provenance, write_csv
from torch.utils.data import Dataset
from transformers import TrainerCallback

from pararnn.train.config import RunConfig
from pararnn.train.optimiser import make_adamw, make_scheduler
from pararnn.train.overrides import resolved
from pararnn.train.recipes import recipe
from pararnn.train.setup import bare_model, make_arguments, make_model
from pararnn.train.sharding import clip_gradients, launched, process_group
from pararnn.train.trainer import PEAK_FLOPS, RunTrainer

WARMUP = 8
"""Steps that are not timed, compilation among them."""


class RandomRows(Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens, the same at every look."""

    def __init__(self, count: int, length: int, vocabulary: int) -> None:
        self.count, self.length, self.vocabulary = count, length, vocabulary

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        row = torch.randint(self.vocabulary, (self.length,), generator=generator)
        return {"input_ids": row, "labels": row}


class NoTokenizer:
    """Stands for the tokenizer of random tokens."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def save(self, folder: Path) -> None:
        raise NotImplementedError("random tokens have no tokenizer")


class RandomData(NamedTuple):
    """Random tokens as `RunTrainer` takes data."""

    train: RandomRows
    valid: RandomRows
    tokenizer: NoTokenizer
    bytes_per_token: float = 1.0


class Clock(TrainerCallback):
    """Marks the end of every step; ends the run after so many."""

    def __init__(self, steps: int) -> None:
        self.steps, self.marks = steps, list[Any]()

    def tick(self) -> None:
        if torch.cuda.is_available():
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
            self.marks.append(mark)
        else:
            self.marks.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.tick()
        control.should_training_stop = len(self.marks) == self.steps

    def times(self) -> list[float]:
        """ms from mark to mark, the first WARMUP left out."""
        marks = self.marks[WARMUP - 1 :]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            return [begin.elapsed_time(end) for begin, end in itertools.pairwise(marks)]
        return [(end - begin) * 1e3 for begin, end in itertools.pairwise(marks)]


def by_trainer(config: RunConfig, data: RandomData, clock: Clock) -> None:
    """`pararnn train`'s own path."""
    trainer = RunTrainer(config, data)
    trainer.add_callback(clock)
    trainer.train()


def bare(config: RunConfig, data: RandomData, clock: Clock) -> None:
    """The same in a loop that anyone could write."""
    device = make_arguments(config, launched()).device  # asks for the launcher's process group
    rank = torch.distributed.get_rank()
    model = make_model(config, device)
    model.config.use_cache = False
    optimizer = make_adamw(model, config.optimiser, fused=device.type == "cuda")
    scheduler = make_scheduler(optimizer, config.optimiser, config.steps)
    parameters = list(model.parameters())
    model.train()
    for step in range(clock.steps):
        first = (step * launched() + rank) * config.device_batch
        rows = [data.train[first + row]["input_ids"] for row in range(config.device_batch)]
        tokens = torch.stack(rows).pin_memory() if device.type == "cuda" else torch.stack(rows)
        tokens = tokens.to(device, non_blocking=True)
        model(tokens, labels=tokens).loss.backward()
        clip_gradients(parameters, config.optimiser.grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        clock.tick()


PATHS: dict[str, Callable[[RunConfig, RandomData, Clock], None]] = {
    "bare": bare,
    "trainer": by_trainer,
}


def measure(config: RunConfig, path: str, steps: int) -> dict[str, Any]:
    """A path's row."""
    gc.collect()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    rows = config.batch * (steps + WARMUP + 2)
    length, vocabulary = config.data.sequence_length, config.model.vocab_size
    random = RandomRows(rows, length, vocabulary)
    clock = Clock(steps + WARMUP)
    PATHS[path](config, RandomData(random, random, NoTokenizer(vocabulary)), clock)
    times = clock.times()
    parameters = sum(each.numel() for each in bare_model(config).parameters())
    tokens, mean = config.batch * length, statistics.mean(times)
    name = torch.cuda.get_device_name() if on_gpu else ""
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    mfu = 6 * parameters * tokens / mean * 1e3 / launched() / peak if peak else None
    return {
        "recipe": config.name,
        "path": path,
        "gpus": launched(),
        "rows_a_gpu": config.device_batch,
        "T": length,
        "parameters": parameters,
        "reshard": config.reshard,
        "checkpointing": config.checkpointing,
        "steps": len(times),
        "mean_ms": round(mean, 2),
        "median_ms": round(statistics.median(times), 2),
        "min_ms": round(min(times), 2),
        "tokens_per_s": round(tokens / mean * 1e3),
        "mfu_percent": "" if mfu is None else round(100 * mfu, 2),
        "peak_GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else "",
    }


def add_row(path: Path, row: dict[str, Any]) -> None:
    """Add a row to a table, in place of one of the same case."""
    case = ("recipe", "path", "gpus", "rows_a_gpu", "T", "reshard", "checkpointing", "device")
    rows: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    kept = [old for old in rows if any(str(old[key]) != str(row[key]) for key in case)]
    write_csv(path, [*kept, row])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--rows", type=int, default=16, help="rows that a GPU takes at once")
    parser.add_argument("--steps", type=int, default=30, help="steps that are timed")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_intermixed_args()
    config = resolved(recipe(args.recipe), args.overrides)
    never = 10**9
    with tempfile.TemporaryDirectory() as out, process_group():
        config = replace(
            config,
            device_batch=args.rows,
            batch=args.rows * launched(),
            steps=10_000,
            save_every=never,
            valid_every=never,
            out=out,
        )
        shared = provenance("cuda" if torch.cuda.is_available() else "cpu")
        for path in args.paths:
            row = {**shared, **measure(config, path, args.steps)}
            if torch.distributed.get_rank() == 0:
                print(*row.values(), sep="\t", flush=True)
                add_row(args.out / "train_step.csv", row)


if __name__ == "__main__":
    main()
