"""Causal attention of tokens that ranks share: queries of a rank, keys of all before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pararnn.base import private
from pararnn.base.device import Gpu, type_of
from pararnn.base.function import guarded
from pararnn.messages.group import BY_BACKWARD
from pararnn.messages.whole import whole_time
from pararnn.messages.zigzag import chunk_lengths, zigzag, zigzag_chunks

QUERIES = 1024
"""Queries of which a mask is made at once."""
HALVES = (torch.bfloat16, torch.float16)

Share = tuple[int, tuple[int, ...]]
"""This rank's number, and each rank's steps."""


def keys_of_earlier_ranks(k: Tensor, v: Tensor, share: Share, group: str) -> tuple[Tensor, Tensor]:
    """Return keys and values (B, H, S, D/H) up to the end of this rank's span."""
    rank, counts = share
    both = whole_time(torch.cat([k, v], 1), list(counts), group)
    k, v = both[:, :, : sum(counts[: rank + 1])].chunk(2, 1)
    return k, v


def attend_on_ranks(q: Tensor, k: Tensor, v: Tensor, share: Share, group: str) -> Tensor:
    """Return the causal attention of this rank's queries, which ranks compute for each other.

    Causal queries of later ranks see more keys. Zig-zag sharding balances the load.
    """
    rank, counts = share[0], list(share[1])
    k, v = whole_time(torch.cat([k, v], 1), counts, group).chunk(2, 1)
    lengths, chunks = chunk_lengths(counts), zigzag_chunks(rank, len(counts))
    queries = zigzag(q, counts, group, False).split([lengths[c] for c in chunks], 2)
    ends = [sum(lengths[: chunk + 1]) for chunk in chunks]
    outputs = [
        suffix_attention(chunk, k[:, :, :end], v[:, :, :end])
        for chunk, end in zip(queries, ends, strict=True)
        if chunk.shape[2]
    ]
    return zigzag(torch.cat(outputs, 2), counts, group, True)


def suffix_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the causal attention of the last T of S tokens, q (B, H, T, D/H).

    PyTorch's function aligns the causal mask at the first key, not the last. On the CPU, and where
    cuDNN's kernels run, attention to earlier keys and to the last T keys is computed separately and
    merged by log-sum-exp. On other GPUs a flash kernel for 16-bit values aligns the mask at the
    last key. Elsewhere the mask is built, for some queries at a time.
    """
    steps, keys, size = q.shape[2], k.shape[2], q.shape[3]
    if steps == keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    half, gpu = q.dtype in HALVES and size % 8 == 0, type_of(q.device).accelerator
    several = min(steps, keys - steps) > 1  # cuDNN has no kernels for a single query or key
    if not gpu or (half and several and size <= 128 and _has_cudnn(q.device)):
        out: Tensor = attend_suffix(q, k, v)[0]
        return out
    if half and size <= 256:
        flash: Tensor = private.flash_attention(q, k, v, 0.0, True)[0]
        return flash
    return _by_masks(q, k, v)


def _by_masks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    steps, keys, outputs = q.shape[2], k.shape[2], []
    for start in range(0, steps, QUERIES):
        queries = q[:, :, start : start + QUERIES]
        end = keys - steps + start + queries.shape[2]
        visible = torch.ones(queries.shape[2], end, dtype=torch.bool, device=q.device)
        visible = visible.tril(end - queries.shape[2])
        visible_keys = k[:, :, :end], v[:, :, :end]
        outputs.append(F.scaled_dot_product_attention(queries, *visible_keys, attn_mask=visible))
    return torch.cat(outputs, 2)


@private.constant_in_graphs
def _has_cudnn(device: torch.device) -> bool:
    """Return whether cuDNN's kernels run, which are the fastest from Hopper on."""
    device_type = type_of(device)
    if torch.version.cuda is None or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    return isinstance(device_type, Gpu) and device_type.capability(device) >= (9, 0)


class _Kernels(NamedTuple):
    """Kernels of attention, `causal` from the first key on.

    forward(q, k, v, causal): outputs and logarithms (B, H, T) of the sums of exponentials.
    backward(grad, q, k, v, out, logs, causal): gradients of q, k and v.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, logs = private.cpu_attention(q, k, v, 0.0, causal)
    return out, logs


def _cpu_backward(*tensors_and_causal: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, causal = tensors_and_causal
    dq, dk, dv = private.cpu_attention_backward(*tensors, 0.0, causal)
    return dq, dk, dv


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out, logs, *_ = private.cudnn_attention(q, k, v, None, True, 0.0, causal)
    return out, logs.reshape(out.shape[:3])


def _cudnn_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.empty((), dtype=torch.long, device=q.device)  # of dropout, which there is none of
    sizes = (None, None, None, q.shape[2], k.shape[2])
    dq, dk, dv = private.cudnn_attention_backward(
        grad, q, k, v, out, logs.unsqueeze(-1), seed, seed, *sizes, 0.0, causal
    )
    return dq, dk, dv


_CPU = _Kernels(_cpu_forward, _cpu_backward)
_CUDNN = _Kernels(_cudnn_forward, _cudnn_backward)


def _kernels(x: Tensor) -> _Kernels:
    return _CUDNN if type_of(x.device).accelerator else _CPU


def _split_keys(q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, Tensor, bool], ...]:
    """Return keys, values and causality: of the earlier tokens, and of the last T tokens."""
    start = k.shape[2] - q.shape[2]
    earlier, last = (k[:, :, :start], v[:, :, :start]), (k[:, :, start:], v[:, :, start:])
    return (*earlier, False), (*last, True)


@guarded(BY_BACKWARD)
@torch.library.custom_op("pararnn::attend_suffix", mutates_args=())
def attend_suffix(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the causal attention of the last T of S tokens, and the logarithms (B, H, T).

    Both softmax outputs are merged, weighted by log-sum-exp, which adds one rounding.
    """
    forward, (before, among) = _kernels(q).forward, _split_keys(q, k, v)
    (earlier, earlier_logs), (last, last_logs) = forward(q, *before), forward(q, *among)
    weight = torch.sigmoid(last_logs - earlier_logs).unsqueeze(-1)
    out = torch.lerp(earlier.to(weight.dtype), last.to(weight.dtype), weight).to(q.dtype)
    logs = torch.logaddexp(last_logs, earlier_logs)
    return _by_token(out), logs.contiguous()


def _by_token(out: Tensor) -> Tensor:
    """Return outputs (B, H, T, D/H) in the memory order of (B, T, H, D/H)."""
    return out.transpose(1, 2).contiguous().transpose(1, 2)


@attend_suffix.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    return _by_token(torch.empty_like(q)), q.new_empty(q.shape[:3], dtype=dtype)


@torch.library.custom_op("pararnn::attend_suffix_backward", mutates_args=())
def attend_suffix_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of queries, keys and values.

    Weights are exp(score - logs) with the logarithms of all keys. So the kernel of each half of the
    keys computes its share of the gradient from `logs` and `out`.
    """
    backward = _kernels(q).backward
    (earlier_q, *earlier), (last_q, *last) = (
        backward(grad, q, keys, values, out, logs, causal)
        for keys, values, causal in _split_keys(q, k, v)
    )
    dk, dv = (torch.cat(pair, 2) for pair in zip(earlier, last, strict=True))
    return (earlier_q + last_q).contiguous(), dk.contiguous(), dv.contiguous()


@attend_suffix_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = attend_suffix_backward(_by_token(grad), *ctx.saved_tensors)
    return dq, dk, dv


attend_suffix.register_autograd(_differentiate, setup_context=_save)
