"""Triton kernels of a causal depthwise convolution with SiLU; imported where they first run.

A program walks a tile of time step by step, so that each input is read once and what neighbours
share stays in registers. The loops are unrolled by four steps, whose loads are issued one round
before they are used. The sums over time of the parameters' gradients are stored a tile each.
"""

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
    u, halo, step, base_u, base_h, u_t, h_t, inside, HALO: tl.constexpr, TAPS: tl.constexpr
):
    """Load the inputs of a step before the tile: of the halo before the first, else zeros."""
    x = tl.load(u + base_u + step * u_t, mask=inside & (step >= 0), other=0.0).to(tl.float32)
    if HALO:
        index = step + TAPS - 1
        is_halo = inside & (step < 0) & (index >= 0)
        x += tl.load(halo + base_h + index * h_t, mask=is_halo, other=0.0).to(tl.float32)
    return x


@triton.jit
def _weights(weight, bias, channel, inside, channels, TAPS: tl.constexpr):
    """Load the weights of four taps, of those that there are not zeros, and the bias."""
    address = weight + channel
    w0 = tl.load(address, mask=inside, other=0.0).to(tl.float32)
    w1 = tl.load(address + channels, mask=inside & (TAPS > 1), other=0.0).to(tl.float32)
    w2 = tl.load(address + 2 * channels, mask=inside & (TAPS > 2), other=0.0).to(tl.float32)
    w3 = tl.load(address + 3 * channels, mask=inside & (TAPS > 3), other=0.0).to(tl.float32)
    return w0, w1, w2, w3, tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _since(since, index, is_in, SINCE: tl.constexpr):
    """Load the steps since a document's first token; many where there are no documents."""
    if SINCE:
        return tl.load(since + index, mask=is_in, other=0)
    else:
        return 1 << 20


@triton.jit
def _sum(x, x1, x2, x3, w0, w1, w2, w3, bias, s, TAPS: tl.constexpr):
    """Return the convolution at a step, of x and the three inputs before it."""
    y = bias + w0 * x
    if TAPS > 1:
        y += w1 * tl.where(s >= 1, x1, 0.0)
    if TAPS > 2:
        y += w2 * tl.where(s >= 2, x2, 0.0)
    if TAPS > 3:
        y += w3 * tl.where(s >= 3, x3, 0.0)
    return y


@triton.jit
def _forward_step(
    y, offset, is_in, x, x1, x2, x3, w0, w1, w2, w3, bias, since, row, step, inside,
    SINCE: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    s = _since(since, row + step, is_in, SINCE)
    value = _sum(x, x1, x2, x3, w0, w1, w2, w3, bias, s, TAPS)
    tl.store(y + offset, (value * tl.sigmoid(value)).to(y.dtype.element_ty), mask=inside & is_in)


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
    w0, w1, w2, w3, b = _weights(weight, bias, channel, inside, channels, TAPS)
    base_u, base_h = batch * u_b + channel, batch * h_b + channel * h_d
    base_y, row = batch * length * channels + channel, batch * s_b
    x1 = _earlier(u, halo, first - 1, base_u, base_h, u_t, h_t, inside, HALO, TAPS)
    x2 = _earlier(u, halo, first - 2, base_u, base_h, u_t, h_t, inside, HALO, TAPS)
    x3 = _earlier(u, halo, first - 3, base_u, base_h, u_t, h_t, inside, HALO, TAPS)
    source = u + base_u
    n0 = tl.load(source + first * u_t, mask=inside, other=0.0)
    n1 = tl.load(source + (first + 1) * u_t, mask=inside & (first + 1 < length), other=0.0)
    n2 = tl.load(source + (first + 2) * u_t, mask=inside & (first + 2 < length), other=0.0)
    n3 = tl.load(source + (first + 3) * u_t, mask=inside & (first + 3 < length), other=0.0)
    for t in range(first, first + STEPS, 4):
        c0, c1, c2, c3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
        end = min(first + STEPS, length)
        n0 = tl.load(source + (t + 4) * u_t, mask=inside & (t + 4 < end), other=0.0)
        n1 = tl.load(source + (t + 5) * u_t, mask=inside & (t + 5 < end), other=0.0)
        n2 = tl.load(source + (t + 6) * u_t, mask=inside & (t + 6 < end), other=0.0)
        n3 = tl.load(source + (t + 7) * u_t, mask=inside & (t + 7 < end), other=0.0)
        to = base_y + t * channels
        _forward_step(y, to, t < length, c0, x1, x2, x3, w0, w1, w2, w3, b, since, row, t,
                      inside, SINCE, TAPS)  # fmt: skip
        to += channels
        _forward_step(y, to, t + 1 < length, c1, c0, x1, x2, w0, w1, w2, w3, b, since, row, t + 1,
                      inside, SINCE, TAPS)  # fmt: skip
        to += channels
        _forward_step(y, to, t + 2 < length, c2, c1, c0, x1, w0, w1, w2, w3, b, since, row, t + 2,
                      inside, SINCE, TAPS)  # fmt: skip
        to += channels
        _forward_step(y, to, t + 3 < length, c3, c2, c1, c0, w0, w1, w2, w3, b, since, row, t + 3,
                      inside, SINCE, TAPS)  # fmt: skip
        x1, x2, x3 = c3, c2, c1


@triton.jit
def _backward_step(
    g, x, x1, x2, x3, p0, p1, p2, a0, a1, a2, a3, ab, w0, w1, w2, w3, b,
    since, row, step, first, stop, length, inside, du, to, u_t, dh, to_h, h_t,
    SINCE: tl.constexpr, HALO: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Differentiate a step, and store the gradient of the input three steps before.

    p0, p1 and p2 are the gradients so far of the inputs one, two and three steps before.
    """
    s = _since(since, row + step, step < length, SINCE)
    value = _sum(x, x1, x2, x3, w0, w1, w2, w3, b, s, TAPS)
    gate = tl.sigmoid(value)
    d = tl.where(step < length, g * gate * (1.0 + value * (1.0 - gate)), 0.0)
    d_tile = tl.where(step < stop, d, 0.0)
    ab += d_tile
    a0 += d_tile * x
    final = p2
    if TAPS > 1:
        d1 = tl.where(s >= 1, d, 0.0)
        a1 += tl.where(step < stop, d1, 0.0) * tl.where(s >= 1, x1, 0.0)
        p0 += w1 * d1
    if TAPS > 2:
        d2 = tl.where(s >= 2, d, 0.0)
        a2 += tl.where(step < stop, d2, 0.0) * tl.where(s >= 2, x2, 0.0)
        p1 += w2 * d2
    if TAPS > 3:
        d3 = tl.where(s >= 3, d, 0.0)
        a3 += tl.where(step < stop, d3, 0.0) * tl.where(s >= 3, x3, 0.0)
        final += w3 * d3
    source = step - 3
    in_tile = (source >= first) & (source < stop)
    tl.store(du + to + source * u_t, final.to(du.dtype.element_ty), mask=inside & in_tile)
    if HALO:
        index = source + TAPS - 1
        is_halo = (source < 0) & (index >= 0)
        tl.store(dh + to_h + index * h_t, final.to(dh.dtype.element_ty), mask=inside & is_halo)
    return w0 * d, p0, p1, a0, a1, a2, a3, ab


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
    w0, w1, w2, w3, b = _weights(weight, bias, channel, inside, channels, TAPS)
    base_u, base_h = batch * u_b + channel, batch * h_b + channel * h_d
    base_g, row = batch * g_b + channel, batch * s_b
    to, to_h = batch * length * channels + channel, batch * (TAPS - 1) * channels + channel
    x1 = _earlier(u, halo, first - 1, base_u, base_h, u_t, h_t, inside, HALO, TAPS)
    x2 = _earlier(u, halo, first - 2, base_u, base_h, u_t, h_t, inside, HALO, TAPS)
    x3 = _earlier(u, halo, first - 3, base_u, base_h, u_t, h_t, inside, HALO, TAPS)
    zero = tl.zeros((BLOCK,), tl.float32)
    p0, p1, p2, a0, a1, a2, a3, ab = zero, zero, zero, zero, zero, zero, zero, zero
    source, grad_source = u + base_u, grad + base_g
    # Three steps after the tile still read its inputs.
    end = min(first + STEPS + 3, length)
    n0 = tl.load(source + first * u_t, mask=inside, other=0.0)
    n1 = tl.load(source + (first + 1) * u_t, mask=inside & (first + 1 < end), other=0.0)
    n2 = tl.load(source + (first + 2) * u_t, mask=inside & (first + 2 < end), other=0.0)
    n3 = tl.load(source + (first + 3) * u_t, mask=inside & (first + 3 < end), other=0.0)
    m0 = tl.load(grad_source + first * g_t, mask=inside, other=0.0)
    m1 = tl.load(grad_source + (first + 1) * g_t, mask=inside & (first + 1 < end), other=0.0)
    m2 = tl.load(grad_source + (first + 2) * g_t, mask=inside & (first + 2 < end), other=0.0)
    m3 = tl.load(grad_source + (first + 3) * g_t, mask=inside & (first + 3 < end), other=0.0)
    for t in range(first, first + STEPS + 4, 4):
        c0, c1, c2, c3 = n0.to(tl.float32), n1.to(tl.float32), n2.to(tl.float32), n3.to(tl.float32)
        g0, g1, g2, g3 = m0.to(tl.float32), m1.to(tl.float32), m2.to(tl.float32), m3.to(tl.float32)
        n0 = tl.load(source + (t + 4) * u_t, mask=inside & (t + 4 < end), other=0.0)
        n1 = tl.load(source + (t + 5) * u_t, mask=inside & (t + 5 < end), other=0.0)
        n2 = tl.load(source + (t + 6) * u_t, mask=inside & (t + 6 < end), other=0.0)
        n3 = tl.load(source + (t + 7) * u_t, mask=inside & (t + 7 < end), other=0.0)
        m0 = tl.load(grad_source + (t + 4) * g_t, mask=inside & (t + 4 < end), other=0.0)
        m1 = tl.load(grad_source + (t + 5) * g_t, mask=inside & (t + 5 < end), other=0.0)
        m2 = tl.load(grad_source + (t + 6) * g_t, mask=inside & (t + 6 < end), other=0.0)
        m3 = tl.load(grad_source + (t + 7) * g_t, mask=inside & (t + 7 < end), other=0.0)
        p0, p1, p2, a0, a1, a2, a3, ab = _backward_step(
            g0, c0, x1, x2, x3, p0, p1, p2, a0, a1, a2, a3, ab, w0, w1, w2, w3, b,
            since, row, t, first, stop, length, inside, du, to, channels, dh, to_h, channels,
            SINCE, HALO, TAPS)  # fmt: skip
        p0, p1, p2, a0, a1, a2, a3, ab = _backward_step(
            g1, c1, c0, x1, x2, p0, p1, p2, a0, a1, a2, a3, ab, w0, w1, w2, w3, b,
            since, row, t + 1, first, stop, length, inside, du, to, channels, dh, to_h, channels,
            SINCE, HALO, TAPS)  # fmt: skip
        p0, p1, p2, a0, a1, a2, a3, ab = _backward_step(
            g2, c2, c1, c0, x1, p0, p1, p2, a0, a1, a2, a3, ab, w0, w1, w2, w3, b,
            since, row, t + 2, first, stop, length, inside, du, to, channels, dh, to_h, channels,
            SINCE, HALO, TAPS)  # fmt: skip
        p0, p1, p2, a0, a1, a2, a3, ab = _backward_step(
            g3, c3, c2, c1, c0, p0, p1, p2, a0, a1, a2, a3, ab, w0, w1, w2, w3, b,
            since, row, t + 3, first, stop, length, inside, du, to, channels, dh, to_h, channels,
            SINCE, HALO, TAPS)  # fmt: skip
        x1, x2, x3 = c3, c2, c1
    out = partial + tl.program_id(0).to(tl.int64) * (TAPS + 1) * channels + channel
    tl.store(out, a0, mask=inside)
    if TAPS > 1:
        tl.store(out + channels, a1, mask=inside)
    if TAPS > 2:
        tl.store(out + 2 * channels, a2, mask=inside)
    if TAPS > 3:
        tl.store(out + 3 * channels, a3, mask=inside)
    tl.store(out + TAPS * channels, ab, mask=inside)


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
