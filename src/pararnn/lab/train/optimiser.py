"""AdamW as the paper has it: weight decay, the schedule of rates, and clipping."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from pararnn.cells import Cell
from pararnn.lab.train.config import OptimiserConfig
from pararnn.layers import clip_after_step
from pararnn.layers.projection import HeadwiseLinear

MIXES = (nn.Embedding, nn.Linear, HeadwiseLinear, Cell)
"""Modules whose matrices lead from tokens or channels to channels."""


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the matrices of `MIXES`, which decay, and the other parameters, which do not.

    Those act on each channel by itself: norms, biases, convolutions, recurrent weights (D,).
    """
    parameters = [
        (parameter, isinstance(module, MIXES) and parameter.ndim >= 2)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    ]
    matrices = list(dict.fromkeys(parameter for parameter, mixes in parameters if mixes))
    vectors = [parameter for parameter, mixes in parameters if not mixes]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def make_adamw(
    model: nn.Module, config: OptimiserConfig, *, fused: bool = False
) -> torch.optim.AdamW:
    """Return AdamW that clips, and whose matrices shrink by weight_decay * `share` in a step."""
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


def set_rate(
    optimizer: torch.optim.Optimizer, config: OptimiserConfig, step: int, steps: int
) -> float:
    """Set the rate of a step, counted from 0, and return it; see `share`."""
    rate = config.learning_rate * share(step, steps, config.warmup, config.final)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def share(step: int, steps: int, warmup: float, final: float) -> float:
    """Return the share of the peak rate in a step, counted from 0.

    It rises linearly over the first `warmup` of the steps, whose last one has the peak; from there
    a cosine falls to `final`, which it would reach in the step after the last.
    """
    rising = round(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    fallen = min((step - rising) / max(steps - rising, 1), 1.0)
    return final + (1 - final) * (1 + math.cos(math.pi * fallen)) / 2
