"""Config of a training run, as frozen records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pararnn.base.errors import TrainingError
from pararnn.lab.train.corpus.tokenizer import size_of
from pararnn.lm.config import NOT_NEGATIVE, POSITIVE, LMConfig, Range, check_ranges

CLIPS = ("elementwise", "norm", "none")
PRECISIONS = ("float32", "bfloat16")

OF_OPTIMISER = {
    "learning_rate": Range("positive and finite", lambda x: 0 < x < math.inf),
    "clip_to": POSITIVE,
    "grad_norm": NOT_NEGATIVE,
    **dict.fromkeys(
        ("weight_decay", "z_loss"), Range("0 or positive, and finite", lambda x: 0 <= x < math.inf)
    ),
    **dict.fromkeys(("warmup", "final"), Range("from 0 to 1", lambda x: 0 <= x <= 1)),
    **dict.fromkeys(("beta1", "beta2"), Range("from 0 and below 1", lambda x: 0 <= x < 1)),
}
COUNTS = ("steps", "batch", "device_batch", "save_every", "valid_every", "log_every")
OF_RUN = {
    **dict.fromkeys((*COUNTS, "keep", "valid_rows", "context_parallel"), POSITIVE),
    "verify_every": Range("positive, or 0 for never", lambda x: x >= 0),
    "seed": Range("from 0 to 2^32 - 1", lambda x: 0 <= x < 2**32),
}


@dataclass(frozen=True)
class DataConfig:
    """Data of a run, and how they become rows of tokens.

    train, valid: a file of text (.txt, a document), JSON lines (.jsonl), both packed (.gz, .xz,
    .zst) or not, or Parquet; a folder, with all such files below it that are not hidden; a pattern
    of files; a Hugging Face dataset, "owner/name" or "owner/name/configuration", with ":split" or
    without; or several of these with commas between them. "" for valid holds out the last
    `holdout` of the text. column: the text's field in JSON lines, Parquet and datasets. drop: rows
    of these to leave out, "field=value", with commas between several and dots in nested fields; a
    value that is no text is as JSON writes it. tokens: about how many to learn; no more are read;
    none for all. tokenizer: "bytes", "bpe:N" to train one with N ids on the text, a tokenizer's
    file or folder, or a name on the Hub. sequence_length: tokens of a row. resets: True if states
    start from zero at the borders of documents within a row. stateful: True if rows continue where
    the step before ended, with its last states; for purely recurrent models. cache: the folder of
    tokenised data. suffixes: ends of names, ".md,.py": only such files are read, as text where they
    are of no kind above.
    """

    train: str = ""
    valid: str = ""
    holdout: float = 0.01
    column: str = "text"
    drop: str = ""
    tokens: int | None = None
    tokenizer: str = "bytes"
    sequence_length: int = 2048
    resets: bool = False
    stateful: bool = False
    cache: str = "runs/data"
    suffixes: str = ""


@dataclass(frozen=True)
class OptimiserConfig:
    """AdamW as the paper has it (Appendix C), and values that it does not state.

    Raises ValueError for impossible values.
    """

    learning_rate: float = 3e-3
    """The peak, reached after `warmup` of the steps; a cosine falls from there."""
    weight_decay: float = 1e-3
    """Of matrices, in a step, not scaled by the rate: torch's is value / peak rate."""
    warmup: float = 0.1
    """Fraction of the steps until the peak."""
    final: float = 0.0
    """Fraction of the peak at the end."""
    beta1: float = 0.9
    """DCLM's, as beta2."""
    beta2: float = 0.95
    grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 for never."""
    z_loss: float = 1e-4
    """Weight of the squared log-partition."""
    clip: str = "elementwise"
    """Of recurrent parameters after each step: elementwise, norm (of each vector) or none."""
    clip_to: float | None = None
    """Bound of `clip`; None is the model's `recurrent_clip`."""

    def __post_init__(self) -> None:
        check_ranges(self, OF_OPTIMISER)
        if self.clip not in CLIPS:
            raise ValueError(f"clip must be one of {CLIPS}, got {self.clip!r}")


@dataclass(frozen=True)
class RunConfig:
    """A training run. Raises ValueError for impossible values, and for those that do not fit."""

    name: str
    """Of the recipe."""
    model: LMConfig
    data: DataConfig = field(default_factory=DataConfig)
    optimiser: OptimiserConfig = field(default_factory=OptimiserConfig)
    steps: int = 1000
    """Optimizer steps."""
    batch: int = 16
    """Rows a step over all devices."""
    device_batch: int = 16
    """Rows of a device's forward pass."""
    context_parallel: int = 1
    """Devices that share each row, spans of time, in elementwise recurrent models."""
    precision: str = "bfloat16"
    """bfloat16 computes with weights rounded to it, and stores them in float32; or float32."""
    reshard: bool = True
    """Free blocks that are spread over devices after the forward pass: saves memory."""
    compile: bool = True
    """Blocks one by one, on CUDA."""
    checkpointing: bool = False
    """Compute blocks again in the backward pass."""
    seed: int = 0
    """Of weights and of the order of rows."""
    save_every: int = 1000
    """Steps between checkpoints."""
    keep: int = 2
    """Checkpoints that stay."""
    valid_every: int = 200
    """Steps between validations."""
    valid_rows: int = 64
    """Rows of a validation, at least one for each process."""
    log_every: int = 10
    """Steps between lines of the log."""
    verify_every: int = 1000
    """Steps between checks of the recurrent layers against the numerics contract, 0 for none."""
    report_to: str = "auto"
    """tensorboard, wandb, trackio or none; auto is TensorBoard where it is installed."""
    out: str = "runs/train"
    """The run's folder; a run that finds checkpoints there continues from the last one."""
    init_from: str = ""
    """Folder of weights to start from, of a run, a checkpoint or a model; empty for drawn ones."""

    def __post_init__(self) -> None:
        check_ranges(self, OF_RUN)
        if self.data.sequence_length < 2:
            raise ValueError(
                "data.sequence_length must be at least 2, a token and the one to predict, got "
                f"{self.data.sequence_length}"
            )
        other_mixers = sorted(set(self.model.mixers or ()) - {"rnn"})
        if self.data.stateful and other_mixers:
            raise ValueError(
                f"data.stateful carries the states of the mixer 'rnn', and model.mixers has "
                f"{other_mixers[0]!r}: set data.stateful=false, or train a model whose "
                "mixers are all 'rnn'"
            )
        if self.data.stateful and self.context_parallel > 1:
            raise ValueError(
                "data.stateful continues rows that one device holds, and context_parallel="
                f"{self.context_parallel} spreads them: set one of the two"
            )
        if self.data.sequence_length < self.context_parallel:
            raise ValueError(
                f"data.sequence_length must be {self.context_parallel} at least with "
                f"context_parallel={self.context_parallel}, got {self.data.sequence_length}"
            )
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}, got {self.precision!r}")
        size = size_of(self.data.tokenizer)
        if size is not None and size > self.model.vocab_size:
            raise ValueError(
                f"data.tokenizer={self.data.tokenizer} may have as many ids, and model.vocab_size "
                f"is {self.model.vocab_size}: set model.vocab_size={size}"
            )


def read_config(record: Mapping[str, Any]) -> RunConfig:
    """Return the config that a run's config.json holds.

    Raises TrainingError for keys that this version does not know, and for impossible values.
    """
    try:
        model = dict(record["model"])
        model["mixers"] = tuple(model["mixers"])
        records = {
            "model": LMConfig(**model),
            "data": DataConfig(**record["data"]),
            "optimiser": OptimiserConfig(**record["optimiser"]),
        }
        return RunConfig(**{**record, **records})
    except (KeyError, TypeError) as error:
        raise TrainingError(f"the run's config.json is of another version: {error}") from error
    except ValueError as error:
        raise TrainingError(f"the run's config.json has an impossible value: {error}") from error
