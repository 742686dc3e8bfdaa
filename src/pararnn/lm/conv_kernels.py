"""Triton kernels of a causal depthwise convolution with SiLU; imported where they first run.

A program walks a tile of time step by step, so that each input is read once and what neighbours
share stays in registers. The loops are unrolled by four steps, whose loads are issued one round
before they are used. The sums over time of the parameters' gradients are stored a tile each.
"""

# ruff: noqa: RUF005 (Triton's tuples grow by sums alone)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pararnn.base.device import Gpu, type_of

CHANNELS = 256
"""Channels of a program, of 64 threads."""
TILES = (64, 16, 4)
"""Steps of a tile, the largest first: a smaller one where there would be too few programs."""
ENOUGH = 1024
"""Programs that occupy a GPU."""


@triton.jit
def _earlier(
    u, halo, first, base_u, base_h, u_t, h_t, inside, HALO: tl.constexpr, TAPS: tl.constexpr
):
    """Load the inputs of the three steps before the tile, oldest first, a tuple: of the halo before
    the first step, else zeros."""
    values = ()  # type: tuple
    for lag in tl.static_range(3):
        step = first - 3 + lag
        x = tl.load(u + base_u + step * u_t, mask=inside & (step >= 0), other=0.0).to(tl.float32)
        if HALO:
            index = step + TAPS - 1
            is_halo = inside & (step < 0) & (index >= 0)
            x += tl.load(halo + base_h + index * h_t, mask=is_halo, other=0.0).to(tl.float32)
        values = values + (x,)
    return values


@triton.jit
def _weights(weight, bias, channel, inside, channels, TAPS: tl.constexpr):
    """Load the weights of the taps, a tuple, and the bias."""
    weights = ()  # type: tuple
    for tap in tl.static_range(TAPS):
        value = tl.load(weight + tap * channels + channel, mask=inside, other=0.0)
        weights = weights + (value.to(tl.float32),)
    return weights, tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _since(since, index, is_in, SINCE: tl.constexpr):
    """Load the steps since a document's first token; many where there are no documents."""
    if SINCE:
        return tl.load(since + index, mask=is_in, other=0)
    else:
        return 1 << 20


@triton.jit
def _four(source, t, end, stride, inside):
    """Load four steps from t on, a tuple."""
    values = ()
    for i in tl.static_range(4):
        mask = inside & (t + i < end)
        values = values + (tl.load(source + (t + i) * stride, mask=mask, other=0.0),)
    return values


@triton.jit
def _after(past, values):
    """Return the three inputs before four steps, and those of these, in float32."""
    inputs = past
    for i in tl.static_range(4):
        inputs = inputs + (values[i].to(tl.float32),)
    return inputs


@triton.jit
def _sum(inputs, i: tl.constexpr, weights, bias, s, TAPS: tl.constexpr):
    """Return the convolution at the step i of four, see `_after`."""
    y = bias + weights[0] * inputs[i + 3]
    for tap in tl.static_range(1, TAPS):
        y += weights[tap] * tl.where(s >= tap, inputs[i + 3 - tap], 0.0)
    return y


@triton.jit
def conv_silu_forward(
    u, weight, bias, halo, since, y, length, channels, tiles,
    u_b, u_t, h_b, h_t, h_d, s_b,
    STEPS: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr,
    HALO: tl.constexpr, SINCE: tl.constexpr,
):  # fmt: skip
    """Compute silu(conv(u)) of a tile of time and a block of channels."""
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles).to(tl.int64) * STEPS
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    weights, b = _weights(weight, bias, channel, inside, channels, TAPS)
    base_u, base_h = batch * u_b + channel, batch * h_b + channel * h_d
    base_y, row = batch * length * channels + channel, batch * s_b
    past = _earlier(u, halo, first, base_u, base_h, u_t, h_t, inside, HALO, TAPS)
    source, end = u + base_u, min(first + STEPS, length)
    values = _four(source, first, end, u_t, inside)
    for t in range(first, first + STEPS, 4):
        inputs = _after(past, values)
        values = _four(source, t + 4, end, u_t, inside)
        for i in tl.static_range(4):
            is_in = t + i < length
            s = _since(since, row + t + i, is_in, SINCE)
            value = _sum(inputs, i, weights, b, s, TAPS)
            result = (value * tl.sigmoid(value)).to(y.dtype.element_ty)
            tl.store(y + base_y + (t + i) * channels, result, mask=inside & is_in)
        past = (inputs[4], inputs[5], inputs[6])


@triton.jit
def _backward_step(
    g, inputs, i: tl.constexpr, open_sums, totals, weights, b,
    since, row, step, first, stop, length, inside, du, to, u_t, dh, to_h, h_t,
    SINCE: tl.constexpr, HALO: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Differentiate a step, and store the gradient of the input three steps before.

    open_sums: the gradients so far of the inputs three, two and one steps before. totals: those of
    the taps, and of the bias.
    """
    s = _since(since, row + step, step < length, SINCE)
    value = _sum(inputs, i, weights, b, s, TAPS)
    gate = tl.sigmoid(value)
    d = tl.where(step < length, g * gate * (1.0 + value * (1.0 - gate)), 0.0)
    sums = open_sums + (weights[0] * d,)
    gradients = (totals[0] + tl.where(step < stop, d, 0.0) * inputs[i + 3],)  # type: tuple
    for tap in tl.static_range(1, TAPS):
        d_tap, x = tl.where(s >= tap, d, 0.0), tl.where(s >= tap, inputs[i + 3 - tap], 0.0)
        gradients = gradients + (totals[tap] + tl.where(step < stop, d_tap, 0.0) * x,)
        more = ()  # type: tuple
        for lag in tl.static_range(4):
            more = more + (sums[lag] + weights[tap] * d_tap if lag == 3 - tap else sums[lag],)
        sums = more
    gradients = gradients + (totals[TAPS] + tl.where(step < stop, d, 0.0),)
    source = step - 3
    in_tile = (source >= first) & (source < stop)
    tl.store(du + to + source * u_t, sums[0].to(du.dtype.element_ty), mask=inside & in_tile)
    if HALO:
        index = source + TAPS - 1
        is_halo = (source < 0) & (index >= 0)
        tl.store(dh + to_h + index * h_t, sums[0].to(dh.dtype.element_ty), mask=inside & is_halo)
    return (sums[1], sums[2], sums[3]), gradients


@triton.jit
def conv_silu_backward(
    grad, u, weight, bias, halo, since, du, dh, partial, length, channels, tiles,
    g_b, g_t, u_b, u_t, h_b, h_t, h_d, s_b,
    STEPS: tl.constexpr, BLOCK: tl.constexpr, TAPS: tl.constexpr,
    HALO: tl.constexpr, SINCE: tl.constexpr,
):  # fmt: skip
    """Differentiate a tile, and the later steps that read its inputs."""
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    first = (tl.program_id(0) % tiles).to(tl.int64) * STEPS
    stop = min(first + STEPS, length)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    weights, b = _weights(weight, bias, channel, inside, channels, TAPS)
    base_u, base_h = batch * u_b + channel, batch * h_b + channel * h_d
    row = batch * s_b
    to, to_h = batch * length * channels + channel, batch * (TAPS - 1) * channels + channel
    past = _earlier(u, halo, first, base_u, base_h, u_t, h_t, inside, HALO, TAPS)
    zero = tl.zeros((BLOCK,), tl.float32)
    open_sums = (zero, zero, zero)
    totals = (zero,)  # type: tuple
    for _ in tl.static_range(TAPS):
        totals = totals + (zero,)
    source, grad_source = u + base_u, grad + batch * g_b + channel
    # Three steps after the tile still read its inputs.
    end = min(first + STEPS + 3, length)
    values = _four(source, first, end, u_t, inside)
    grads = _four(grad_source, first, end, g_t, inside)
    for t in range(first, first + STEPS + 4, 4):
        inputs, g = _after(past, values), _after((), grads)
        values = _four(source, t + 4, end, u_t, inside)
        grads = _four(grad_source, t + 4, end, g_t, inside)
        for i in tl.static_range(4):
            open_sums, totals = _backward_step(
                g[i], inputs, i, open_sums, totals, weights, b,
                since, row, t + i, first, stop, length, inside, du, to, channels, dh, to_h,
                channels, SINCE, HALO, TAPS,
            )  # fmt: skip
        past = (inputs[4], inputs[5], inputs[6])
    out = partial + tl.program_id(0).to(tl.int64) * (TAPS + 1) * channels + channel
    for tap in tl.static_range(TAPS + 1):
        tl.store(out + tap * channels, totals[tap], mask=inside)


def _launch(kernel: Any, u: Tensor, taps: int, halo: Tensor | None, since: Tensor | None) -> Any:
    """Return a function that launches for u (B, T, D): its arguments are the kernel's pointers, and
    the strides of those before u."""
    batch, length, channels = u.shape
    blocks = triton.cdiv(channels, CHANNELS)
    counts = {steps: batch * triton.cdiv(length, steps) for steps in TILES}
    steps = next((steps for steps in TILES if counts[steps] * blocks >= ENOUGH), TILES[-1])
    halo_strides = (0, 0, 0) if halo is None else halo.stride()
    since_stride = 0 if since is None else since.stride(0)
    options = {"STEPS": steps, "BLOCK": CHANNELS, "TAPS": taps, "num_warps": CHANNELS // 128}
    options |= {"HALO": halo is not None, "SINCE": since is not None}

    def launch(*pointers: Any, strides: tuple[int, ...] = ()) -> None:
        sizes = (length, channels, counts[steps] // batch)
        strides_of_all = (*strides, u.stride(0), u.stride(1), *halo_strides, since_stride)
        kernel[(counts[steps], blocks)](*pointers, *sizes, *strides_of_all, **options)

    return launch, counts[steps]


def forward(
    u: Tensor, weight: Tensor, bias: Tensor, halo: Tensor | None, since: Tensor | None
) -> Tensor:
    """Compute silu(conv(u)) on a GPU, see `pararnn.lm.conv_op`."""
    u = _rows(u)
    y = u.new_empty(u.shape, dtype=torch.promote_types(u.dtype, weight.dtype))
    if y.numel():
        since = _steps_since(since, u)
        launch, _ = _launch(conv_silu_forward, u, len(weight), halo, since)
        on_device(u)(launch, u, weight, bias, _or(halo, u), _or(since, u), y)
    return y


def backward(
    grad: Tensor, u: Tensor, weight: Tensor, bias: Tensor, halo: Tensor | None, since: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of u, the weight, the bias and the halo (empty without one)."""
    u, grad, since = _rows(u), _rows(grad), _steps_since(since, u)
    du = torch.empty_like(u, memory_format=torch.contiguous_format)
    dh = u.new_empty(0 if halo is None else halo.shape)
    launch, count = _launch(conv_silu_backward, u, len(weight), halo, since)
    partial = u.new_empty((count, len(weight) + 1, u.shape[2]), dtype=torch.float32)
    if u.numel():
        strides = (grad.stride(0), grad.stride(1))
        pointers = (grad, u, weight, bias, _or(halo, u), _or(since, u), du, dh, partial)
        on_device(u)(launch, *pointers, strides=strides)
    else:
        dh.zero_()
    # Two sums, as an operator's results may not share their memory.
    return du, partial[:, :-1].sum(0).to(weight.dtype), partial[:, -1].sum(0).to(bias.dtype), dh


def _rows(x: Tensor) -> Tensor:
    """Return a tensor (B, T, D) whose channels are next to each other."""
    return x if x.stride(2) == 1 else x.contiguous()


def _steps_since(since: Tensor | None, u: Tensor) -> Tensor | None:
    """Return the steps since documents' first tokens, (B, T) with T next to each other."""
    if since is None:
        return None
    since = since.expand(u.shape[:2])
    return since if since.stride(1) == 1 else since.contiguous()


def _or(tensor: Tensor | None, placeholder: Tensor) -> Tensor:
    """Return a tensor, or another one that the kernel does not read."""
    return placeholder if tensor is None else tensor


def on_device(u: Tensor) -> Any:
    """Return a call with the tensor's GPU as the current one."""
    record = type_of(u.device)
    if isinstance(record, Gpu):
        return lambda function, *args, **options: record.call(u.device, function, *args, **options)
    return lambda function, *args, **options: function(*args, **options)  # Triton's interpreter
