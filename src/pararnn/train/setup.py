"""What a run is made of: its data as the Trainer takes it, its model, transformers' arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import Dataset
from transformers import TrainingArguments

from pararnn.device import has_gpu, type_of
from pararnn.errors import PararnnError, TrainingError
from pararnn.lm.compiled import compile_repeatably
from pararnn.lm.hf import ParaRNNConfig, ParaRNNForCausalLM
from pararnn.train.config import RunConfig
from pararnn.train.sharding import draw_weights, shard
from pararnn.train.telemetry import reporting


class Tokenizer(Protocol):
    """What a run keeps beside its model. vocabulary: one more than the largest id."""

    @property
    def vocabulary(self) -> int:
        """One more than the largest id."""

    def save(self, folder: Path) -> None:
        """Write what `AutoTokenizer.from_pretrained(folder)` reads."""


class TrainingData(Protocol):
    """Data as rows of tokens: items are {"input_ids", "labels"[, "position_ids"]}, all (T,)."""

    @property
    def train(self) -> Dataset[Any]:
        """What is learned."""

    @property
    def valid(self) -> Dataset[Any]:
        """What is held out."""

    @property
    def tokenizer(self) -> Tokenizer:
        """What made the tokens."""

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the held-out text, in UTF-8, over its tokens."""


def check_rows(config: RunConfig, packed: TrainingData, world: int) -> None:
    """TrainingError for batches and data that do not fit each other, the model or the processes."""
    at_once = config.device_batch * world
    if config.batch % at_once:
        raise TrainingError(
            f"batch must be a multiple of device_batch x processes = {config.device_batch} x "
            f"{world}, got {config.batch}"
        )
    if packed.tokenizer.vocabulary > config.model.vocab_size:
        raise TrainingError(
            f"the tokenizer has {packed.tokenizer.vocabulary} ids, and model.vocab_size is "
            f"{config.model.vocab_size}: set model.vocab_size to that or more"
        )
    for name, least in (("train", config.batch), ("valid", world)):
        rows = len(getattr(packed, name))
        if rows < least:
            raise TrainingError(
                f"the {name} data has {rows} rows of {config.data.sequence_length} tokens, at "
                f"least {least} are needed: give more text or a shorter data.sequence_length"
            )


def bare_model(config: RunConfig) -> ParaRNNForCausalLM:
    """The config's model on the meta device: no weights yet. TrainingError where it cannot be."""
    try:
        with torch.device("meta"):
            hf = ParaRNNConfig.of_lm(config.model, z_loss=config.optimiser.z_loss)
            return ParaRNNForCausalLM(hf)
    except PararnnError:
        raise
    except ValueError as error:
        raise TrainingError(f"there is no such model: {error}") from error


def make_model(config: RunConfig, device: torch.device) -> ParaRNNForCausalLM:
    """The config's model, spread over processes, its weights drawn by the config's seed."""
    return spread(bare_model(config), config, device)


def spread(
    model: ParaRNNForCausalLM, config: RunConfig, device: torch.device
) -> ParaRNNForCausalLM:
    """A model on the meta device, made ready to train as the config says."""
    dtype = torch.bfloat16 if config.precision == "bfloat16" else None
    shard(model, device, dtype=dtype, reshard=config.reshard)
    draw_weights(model, device, config.seed)
    if config.checkpointing:  # Trainer's own argument has changed its name
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    if config.compile and type_of(device).accelerator:
        # Code of other runs in this process would count against the limit of a block's variants.
        torch.compiler.reset()
        for block in model.model.backbone.blocks:
            # Not block.compile(): what FSDP2 does before and after a block is not to be compiled.
            block.forward = compile_repeatably(block.forward, fullgraph=True)
    return model


def make_arguments(config: RunConfig, world: int) -> TrainingArguments:
    """The config in transformers' words."""
    arguments = TrainingArguments(
        output_dir=config.out,
        max_steps=config.steps,
        per_device_train_batch_size=config.device_batch,
        gradient_accumulation_steps=config.batch // (config.device_batch * world),
        ignore_data_skip=True,  # the batches begin where the run goes on
        average_tokens_across_devices=True,
        remove_unused_columns=False,
        max_grad_norm=config.optimiser.grad_norm,
        use_cpu=not has_gpu(),
        use_cache=False,
        seed=config.seed,
        logging_steps=config.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=config.valid_every,
        save_strategy="steps",
        save_steps=config.save_every,
        report_to=reporting(config.report_to),
    )
    # One process is one device: with more, Trainer would take nn.DataParallel and larger batches.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments
