"""Repairs of peers from outside, without which Triton 3.6 does not compile their kernels, or not
within minutes. The packages stay as they are.

Imports Triton: a process imports it for a peer that needs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

FLASHRNN = ("lstm_fw", "lstm_bw", "slstm_fw", "slstm_bw")
"""Modules of flashrnn's Triton kernels."""
WIDE = 128
"""Channels of a head from which flashrnn's backward kernel exceeds the shared memory of an H100."""
FITTING = {"num_stages": 1, "num_warps": 8}
"""Options of a launch by which it fits, and of those that do spills least."""
TORCHRL = "torchrl.modules.models._dreamer_v3_block_gru_triton"
"""Module of torchrl's Triton kernels of DreamerV3."""
TORCHRL_KERNELS = ("_block_gru_fwd_kernel", "_block_gru_bwd_kernel")


# Triton reads the annotations of a kernel too: only what it knows may stand there.
@triton.jit
def tanh_in_float32(x: tl.tensor) -> tl.tensor:
    """Return tanh(x) in the dtype of x: tl.exp refuses bfloat16."""
    y = x.to(tl.float32)
    return (2.0 / (1.0 + tl.exp(-2.0 * y)) - 1.0).to(x.dtype)


class Launcher:
    """A kernel whose launches have other options."""

    def __init__(self, kernel: Any, options: dict[str, int]) -> None:
        self.kernel, self.options = kernel, options

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        launch = self.kernel[grid]
        return lambda *args, **options: launch(*args, **{**options, **self.options})


def source_of(kernel: Any) -> Any:
    """Return the function of a kernel within its tuners: it has the source."""
    while not hasattr(kernel, "src"):
        kernel = kernel.fn
    return kernel


def loop_at_run_time(kernel: Any, bounds: str) -> None:
    """Let loops of a kernel whose bounds begin with a text run, in place of being unrolled."""
    function = source_of(kernel)
    text = function.src.replace(f"tl.static_range({bounds}", f"tl.range({bounds}")
    function._unsafe_update_src(text)


def repair_flashrnn(head: int) -> str:
    """Let its kernels compute tanh in float32, and fit for heads; return what a row must say."""
    note = "its tanh computes in float32: tl.exp refuses bfloat16"
    for name in FLASHRNN:
        module = vars(importlib.import_module(f"flashrnn.flashrnn.triton_fused.{name}"))
        module["triton_tanh"] = tanh_in_float32
        if name.endswith("bw"):
            kernel = module["_backward_sequence_kernel"]
            if isinstance(kernel, Launcher):  # an earlier repair, for another head
                kernel = kernel.kernel
            fits = head < WIDE
            module["_backward_sequence_kernel"] = kernel if fits else Launcher(kernel, FITTING)
    if head < WIDE:
        return note
    return f"{note}; backward with one stage and 8 warps: shared memory does not suffice for three"


def repair_torchrl() -> str:
    """Let its kernels loop over blocks and tiles, not unroll them; return what a row must say."""
    module = vars(importlib.import_module(TORCHRL))
    for name in TORCHRL_KERNELS:
        for bounds in ("NUM_BLOCKS", "tl.cdiv("):
            loop_at_run_time(module[name], bounds)
    return "loops over blocks and tiles are not unrolled: Triton refuses, and compiles for minutes"


def repair_spikingjelly() -> str:
    """Let its kernels loop over steps, not unroll them; return what a row must say."""
    module = vars(importlib.import_module("spikingjelly._ops.flexsn.kernel"))
    build = module["_build_kernels"]

    def build_loops(*args: Any, **options: Any) -> dict[str, Any]:
        kernels: dict[str, Any] = build(*args, **options)
        for name, kernel in kernels.items():
            if name.endswith("_kernel") and kernel is not None:
                for bounds in ("0, T", "T-1"):
                    loop_at_run_time(kernel, bounds)
        return kernels

    module["_build_kernels"] = build_loops
    return "its loop over steps is not unrolled: 1,024 steps would compile without end"
