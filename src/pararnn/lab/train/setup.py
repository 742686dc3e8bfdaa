"""A run's data as rows of tokens, and its model, ready to train."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset

from pararnn.base.device import type_of
from pararnn.base.errors import PararnnError, TrainingError
from pararnn.lab.train.config import RunConfig
from pararnn.lab.train.sharding import draw_weights, shard, share_time
from pararnn.lm.compiled import compile_repeatably
from pararnn.lm.hf import ParaRNNConfig, ParaRNNForCausalLM
from pararnn.lm.model import draws
from pararnn.ranks.parallel import check_module


class Tokenizer(Protocol):
    """Tokenizer that a run stores next to its model."""

    @property
    def vocabulary(self) -> int:
        """Number of ids: one more than the largest."""

    def save(self, folder: Path) -> None:
        """Write files that `AutoTokenizer.from_pretrained(folder)` reads."""


class TrainingData(Protocol):
    """Data as rows of tokens: items are {"input_ids", "labels"[, "position_ids"]}, all (T,)."""

    @property
    def train(self) -> Dataset[Any]:
        """Rows to learn."""

    @property
    def valid(self) -> Dataset[Any]:
        """Rows that are held out."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer that made the tokens."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the held-out text, in UTF-8, over its tokens."""


def check_rows(config: RunConfig, data: TrainingData, world: int) -> None:
    """Raise TrainingError for batches and data that do not fit the model or the processes."""
    shared = config.context_parallel
    if world % shared:
        raise TrainingError(
            f"context_parallel={shared} needs a multiple of {shared} processes, got {world}"
        )
    world //= shared
    at_once = config.device_batch * world
    if config.batch % at_once:
        several = f" / context_parallel = {config.device_batch} x {world * shared} / {shared}"
        raise TrainingError(
            f"batch must be a multiple of device_batch x processes"
            f"{several if shared > 1 else f' = {config.device_batch} x {world}'}, got "
            f"{config.batch}"
        )
    if config.valid_rows < world:
        raise TrainingError(
            f"valid_rows must be at least {world}, a row for each of the processes"
            f"{' that do not share rows' if shared > 1 else ''}, got {config.valid_rows}"
        )
    if data.tokenizer.vocabulary > config.model.vocab_size:
        raise TrainingError(
            f"the tokenizer has {data.tokenizer.vocabulary} ids, and model.vocab_size is "
            f"{config.model.vocab_size}: set model.vocab_size to that or more"
        )
    for name, least in (("train", config.batch), ("valid", world)):
        rows = len(getattr(data, name))
        if rows < least:
            raise TrainingError(
                f"the {name} data has {rows} rows of {config.data.sequence_length} tokens, at "
                f"least {least} are needed: give more text or a shorter data.sequence_length"
            )


def bare_model(config: RunConfig) -> ParaRNNForCausalLM:
    """Return the config's model on the meta device. TrainingError if there is no such model."""
    try:
        with torch.device("meta"):
            hf = ParaRNNConfig.of_lm(config.model, z_loss=config.optimiser.z_loss)
            model = ParaRNNForCausalLM(hf)
        if config.context_parallel > 1:
            check_module(model)
    except PararnnError:
        raise
    except ValueError as error:
        raise TrainingError(f"there is no such model: {error}") from error
    check_draws(model)
    return model


def check_draws(model: ParaRNNForCausalLM) -> None:
    """Check that the draws of a model's mixers leave nothing in it without a value.

    A model is made without memory, and its weights are drawn where they are spread. Raises
    TrainingError for the first parameter without a draw, and for a buffer, which has none.
    """
    core = model.model
    ready = set()
    for module, name, _ in draws(core.embed_tokens, core.backbone, model.lm_head):
        if not hasattr(module, name):
            raise TrainingError(
                f"`draws` of a mixer names {name!r}, and its {type(module).__name__} has none"
            )
        ready.add(id(getattr(module, name)))
    for name, parameter in model.named_parameters():
        if id(parameter) not in ready:
            raise TrainingError(
                f"{name} has no initial value: the `draws` of its mixer must name every parameter"
            )
    for name, _ in model.named_buffers():
        raise TrainingError(
            f"{name} is a buffer, which a model that is made for training leaves without a value: "
            "compute it in `forward`, or make it a parameter"
        )


def make_model(config: RunConfig, device: torch.device) -> ParaRNNForCausalLM:
    """Return the config's model, spread over processes, with weights drawn by its seed."""
    return prepare_model(bare_model(config), config, device)


def prepare_model(
    model: ParaRNNForCausalLM, config: RunConfig, device: torch.device
) -> ParaRNNForCausalLM:
    """Return a model on the meta device, made ready to train as the config says."""
    dtype = torch.bfloat16 if config.precision == "bfloat16" else None
    shard(model, device, dtype=dtype, reshard=config.reshard)
    draw_weights(model, device, config.seed)
    share_time(model, device, config.context_parallel)
    if config.checkpointing:  # transformers has renamed it
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    if config.compile and type_of(device).accelerator:
        # Code of other runs in this process would count against the limit of a block's variants.
        torch.compiler.reset()
        for block in model.model.backbone.blocks:
            # Not block.compile(): what FSDP2 does before and after a block is not to be compiled.
            block.forward = compile_repeatably(block.forward, fullgraph=True)
    return model
