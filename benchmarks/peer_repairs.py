"""Repairs of peers from outside, without which Triton 3.6 does not compile their kernels.

Imports Triton: a process imports it for a peer that needs it.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

import triton
import triton.language as tl

FLASHRNN = ("lstm_fw", "lstm_bw", "slstm_fw", "slstm_bw")
"""Modules of flashrnn's Triton kernels."""
TORCHRL = ("torchrl.modules.models._dreamer_v3_block_gru_triton",)
"""Modules of torchrl's Triton kernels of DreamerV3."""


@triton.jit
def tanh_in_float32(x: Any) -> Any:
    """Return tanh(x) in the dtype of x: tl.exp refuses bfloat16."""
    y = x.to(tl.float32)
    return (2.0 / (1.0 + tl.exp(-2.0 * y)) - 1.0).to(x.dtype)


@triton.constexpr_function
def constant_cdiv(a: int, b: int) -> int:
    """Return the quotient of two constants, rounded up: a constant, which tl.cdiv does not give."""
    return -(-a // b)


def repair_flashrnn() -> str:
    """Let its kernels compute tanh in float32; return what a row must say."""
    for name in FLASHRNN:
        module = importlib.import_module(f"flashrnn.flashrnn.triton_fused.{name}")
        vars(module)["triton_tanh"] = tanh_in_float32
    return "its tanh computes in float32: tl.exp refuses bfloat16"


def repair_torchrl() -> str:
    """Let bounds of its kernels' unrolled loops be constants; return what a row must say."""
    language = types.ModuleType(tl.__name__)
    vars(language).update(vars(tl), cdiv=constant_cdiv)
    for name in TORCHRL:
        vars(importlib.import_module(name))["tl"] = language
    return "its tl.cdiv is a function of constants: static_range refuses it"
