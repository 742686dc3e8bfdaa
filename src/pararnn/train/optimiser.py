"""AdamW as the paper has it: what decays and by how much, the schedule, and the clipping."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from pararnn.cells import Cell
from pararnn.layers import clip_after_step
from pararnn.layers.projection import HeadwiseLinear
from pararnn.train.config import OptimiserConfig

MIXES = (nn.Embedding, nn.Linear, HeadwiseLinear, Cell)
"""Modules whose matrices lead from tokens or channels to channels."""


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The matrices of `MIXES`, which decay, and all the rest, which does not.

    The rest acts on each channel by itself: norms, biases, convolutions, recurrent weights (D,).
    """
    found = [
        (parameter, isinstance(part, MIXES) and parameter.ndim >= 2)
        for part in model.modules()
        for parameter in part.parameters(recurse=False)
    ]
    decayed = list(dict.fromkeys(parameter for parameter, mixes in found if mixes))
    kept = [parameter for parameter, mixes in found if not mixes]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]


def make_adamw(
    model: nn.Module, config: OptimiserConfig, *, fused: bool = False
) -> torch.optim.AdamW:
    """AdamW whose matrices shrink by weight_decay * `share` in a step, and that clips after it."""
    # torch multiplies its weight_decay by the rate of the step: by peak * share.
    decay = config.weight_decay / config.learning_rate
    optimizer = torch.optim.AdamW(
        parameter_groups(model, decay),
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        fused=fused,
    )
    if config.clip != "none":
        clip_after_step(optimizer, model, by=config.clip, to=config.clip_to)
    return optimizer


def make_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimiserConfig, steps: int
) -> LambdaLR:
    """The rate of every one of `steps`, see `share`."""
    of_peak = partial(share, steps=steps, warmup=config.warmup, final=config.final)
    return LambdaLR(optimizer, of_peak)


def share(step: int, steps: int, warmup: float, final: float) -> float:
    """The share of the peak rate in a step, counted from 0.

    It rises linearly over the first `warmup` of the steps, whose last one has the peak; from there
    a cosine falls to `final`, which it would reach in the step after the last.
    """
    rising = round(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    rest = min((step - rising) / max(steps - rising, 1), 1.0)
    return final + (1 - final) * (1 + math.cos(math.pi * rest)) / 2
