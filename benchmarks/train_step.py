"""A training step of recipes: by `pararnn train`'s own path, and by a bare loop.

Both train the same model on random tokens: blocks compiled, FSDP2, gradients clipped, AdamW. The
bare loop calls PyTorch only; the other is `RunTrainer`, a row of the log every 10 steps, without
validations and checkpoints. Times by CUDA events. Memory: the most that was allocated on a GPU.
MFU: 6 x parameters x tokens, attention's products over time left out, over what the GPUs' bfloat16
can do. Puts rows into train_step.csv in a folder; those of other cases and GPUs stay.

The paper's Mamba2, that of `mamba2.py`, goes by the bare loop only: mamba2-2.9b. Recipes with
commas between them are measured one by one in the same processes.

    python benchmarks/train_step.py gru-400m --rows 16 [--steps 30] [--paths bare trainer]
    torchrun --standalone --nproc-per-node=2 benchmarks/train_step.py gru-1b,lstm-1b --rows 8

Other arguments are overrides of the recipes, as in `pararnn train`.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from common import Record, new_parser, provenance
from mamba2 import TINY, Sizes, ends, put_blocks
from protocol import Clock
from torch.utils.data import Dataset

from pararnn.lab.options import configured
from pararnn.lab.train.config import RunConfig
from pararnn.lab.train.optimiser import make_adamw, set_rate
from pararnn.lab.train.recipes import BYTE_VOCAB, recipe
from pararnn.lab.train.setup import bare_model, prepare_model
from pararnn.lab.train.sharding import clip_gradients, local_device, process_count, process_group
from pararnn.lab.train.trainer import PEAK_FLOPS, RunTrainer
from pararnn.lm import preset
from pararnn.lm.hf import ParaRNNForCausalLM

PEER = "mamba2-"
KEYS = ("recipe", "path", "gpus", "rows_a_gpu", "T", "reshard", "checkpointing", "device")
"""Columns that identify a case."""


def config_of(name: str) -> RunConfig:
    """Return a recipe; Mamba2's is the GRU's of its size, around other blocks."""
    if not name.startswith(PEER):
        return recipe(name)
    same = "tiny" if name == f"{PEER}tiny" else name.replace(PEER, "gru-")
    return replace(recipe(same), name=name, model=ends(peer_sizes(name)))


def peer_sizes(name: str) -> Sizes:
    """Return the paper's Mamba2 of a name: mamba2-2.9b; mamba2-tiny is for a CPU."""
    scale = name.removeprefix(PEER).upper()
    if scale == "TINY":
        return {**TINY, "vocab_size": BYTE_VOCAB}
    return cast(Sizes, preset("mamba2", scale).model)


def empty_model(config: RunConfig) -> ParaRNNForCausalLM:
    """Return the config's model on the meta device."""
    model = bare_model(config)
    if config.name.startswith(PEER):
        with torch.device("meta"):
            put_blocks(model.model.backbone, peer_sizes(config.name))
    return model


class RandomRows(Dataset[dict[str, torch.Tensor]]):
    """Rows of random tokens, the same at every read."""

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


class EndOfTiming(Exception):
    """End of the last step to time."""


class TimedTrainer(RunTrainer):
    """`pararnn train`'s loop, with a mark after each step, which ends after `steps`."""

    def __init__(self, config: RunConfig, data: RandomData, clock: Clock, steps: int) -> None:
        super().__init__(config, data, local_device())
        self.clock, self.steps_to_time = clock, steps

    def learn(self, parts: Any) -> Any:
        result = super().learn(parts)
        self.clock.tick()
        if len(self.clock.marks) == self.steps_to_time:
            raise EndOfTiming
        return result


def by_trainer(config: RunConfig, data: RandomData, clock: Clock, steps: int) -> None:
    """Train by `pararnn train`'s own path."""
    if config.name.startswith(PEER):
        raise ValueError(f"`pararnn train` has no {config.name}: give --paths bare")
    with suppress(EndOfTiming):
        TimedTrainer(config, data, clock, steps).run()


def bare(config: RunConfig, data: RandomData, clock: Clock, steps: int) -> None:
    """Train in a loop that anyone could write."""
    device = local_device()
    rank = torch.distributed.get_rank()
    model = prepare_model(empty_model(config), config, device)
    model.config.use_cache = False
    optimizer = make_adamw(model, config.optimiser, fused=device.type == "cuda")
    parameters = list(model.parameters())
    model.train()
    for step in range(steps):
        first = (step * process_count() + rank) * config.device_batch
        rows = [data.train[first + row]["input_ids"] for row in range(config.device_batch)]
        tokens = torch.stack(rows).pin_memory() if device.type == "cuda" else torch.stack(rows)
        tokens = tokens.to(device, non_blocking=True)
        model(tokens, labels=tokens).loss.backward()
        clip_gradients(parameters, config.optimiser.grad_norm)
        set_rate(optimizer, config.optimiser, step, config.steps)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()


Train = Callable[[RunConfig, RandomData, Clock, int], None]
PATHS: dict[str, Train] = {"bare": bare, "trainer": by_trainer}
"""Functions that train for a number of steps, with a mark of the clock after each."""


def measure(config: RunConfig, path: str, warmup: int, steps: int) -> dict[str, Any]:
    torch.compiler.reset()
    gc.collect()  # the model before
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    rows = config.batch * (warmup + steps + 2)
    length, vocabulary = config.data.sequence_length, config.model.vocab_size
    random = RandomRows(rows, length, vocabulary)
    clock, data = Clock(local_device()), RandomData(random, random, NoTokenizer(vocabulary))
    PATHS[path](config, data, clock, warmup + steps)
    times = clock.times()[warmup - 1 :]
    parameters = sum(each.numel() for each in empty_model(config).parameters())
    tokens, mean = config.batch * length, statistics.mean(times)
    name = torch.cuda.get_device_name() if on_gpu else ""
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    mfu = 6 * parameters * tokens / mean * 1e3 / process_count() / peak if peak else None
    return {
        "recipe": config.name,
        "path": path,
        "gpus": process_count(),
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


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("recipes", help="names, with commas between them")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--rows", type=int, default=16, help="rows that a GPU takes at once")
    parser.add_argument(
        "--warmup", type=int, default=8, help="steps that are not timed, at least 1"
    )
    parser.add_argument("--steps", type=int, default=30, help="steps that are timed")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    args = parser.parse_intermixed_args()
    overrides = [f"--{text}" for text in args.overrides]
    configs = [
        configured(config_of(name), overrides, parser.prog) for name in args.recipes.split(",")
    ]
    never = 10**9
    with tempfile.TemporaryDirectory() as out, process_group():
        shared = provenance("cuda" if torch.cuda.is_available() else "cpu")
        record = Record(args.out / "train_step.csv", shared, KEYS)
        for config, path in itertools.product(configs, args.paths):
            config = replace(
                config,
                device_batch=args.rows,
                batch=args.rows * process_count(),
                steps=10_000,
                save_every=never,
                valid_every=never,
                out=out,
            )
            row = measure(config, path, args.warmup, args.steps)
            if torch.distributed.get_rank() == 0:
                record.add(row)


if __name__ == "__main__":
    main()
