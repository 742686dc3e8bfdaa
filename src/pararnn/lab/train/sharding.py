"""Models over processes by FSDP2: float32 weights are sharded, blocks gathered as they run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from pararnn.base.device import collectives, process_device
from pararnn.base.parameters import draw
from pararnn.base.private import foreach_multiply, foreach_norm
from pararnn.lm.hf import ParaRNNForCausalLM
from pararnn.lm.model import draws
from pararnn.ranks.parallel import context_parallel

TIMEOUT = timedelta(minutes=30)
"""Time after which a collective that not all processes join fails."""


def process_count() -> int:
    """Return the number of processes that torchrun or accelerate has launched."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_device() -> torch.device:
    """Return the device of this process, and make it the current one."""
    return process_device(int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def process_group() -> Iterator[None]:
    """Open the process group that FSDP2 needs, if there is none.

    That of a launcher's processes stays open until they end: it cannot be opened twice.
    """
    if dist.is_initialized():
        yield
    elif process_count() > 1:
        local_device()  # whose collectives are NCCL's
        dist.init_process_group(collectives(), timeout=TIMEOUT)
        yield
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(collectives(), store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def gather(value: Tensor) -> Tensor:
    """Return the values (n, ...) of all ranks in their order, (ranks * n, ...)."""
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value.contiguous())
    return torch.cat(values)


class Grid(NamedTuple):
    """Position of this process: of its rows among `data` groups of ranks, and of its span among the
    `spans` neighbouring ranks of a group."""

    data_rank: int
    data: int
    span_rank: int
    spans: int


def grid_of(spans: int) -> Grid:
    """Return the grid of all processes, `spans` of which share each row."""
    rank, world = dist.get_rank(), dist.get_world_size()
    return Grid(rank // spans, world // spans, rank % spans, spans)


def share_time(model: ParaRNNForCausalLM, device: torch.device, spans: int) -> None:
    """Let groups of `spans` neighbouring ranks share each row of tokens."""
    if spans > 1:
        size, names = (dist.get_world_size() // spans, spans), ("data", "context")
        context_parallel(model, init_device_mesh(device.type, size, mesh_dim_names=names)[names[1]])


def shard(
    model: ParaRNNForCausalLM, device: torch.device, *, dtype: torch.dtype | None, reshard: bool
) -> None:
    """Spread a model on the meta device over all processes; its weights are still to be drawn.

    Blocks, embedding and head are gathered one by one, in `dtype` where there is one; gradients are
    averaged in float32. reshard: True if blocks are freed after the forward pass, and gathered
    again for the backward pass; never on one device, where little would be saved.
    """
    world = dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,))
    reshard = reshard and world > 1
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    ends = [model.model.embed_tokens, model.lm_head]
    if model.lm_head.weight is model.model.embed_tokens.weight:
        ends = []  # one parameter may not be of two groups: both stay in the root
    for module in (*model.model.backbone.blocks, *ends):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)


@torch.no_grad()
def draw_weights(model: ParaRNNForCausalLM, device: torch.device, seed: int) -> None:
    """Draw all weights again: the same on any number of devices of a type.

    Each is drawn whole and then sharded, so that one whole parameter is in memory at a time.
    """
    torch.manual_seed(seed)
    core = model.model
    for module, name, init in draws(core.embed_tokens, core.backbone, model.lm_head):
        parameter = cast(Tensor, getattr(module, name))
        if isinstance(parameter, DTensor):
            whole = draw(torch.empty(parameter.shape, dtype=parameter.dtype, device=device), init)
            set_whole(parameter, whole)
        else:
            draw(parameter, init)


@torch.no_grad()
def set_whole(parameter: Tensor, whole: Tensor) -> None:
    """Set a parameter, which may be spread over processes, to a tensor that all of them have."""
    whole = whole.to(parameter.device, parameter.dtype)
    if isinstance(parameter, DTensor):
        mesh, places = parameter.device_mesh, parameter.placements
        # Nothing has to be sent.
        whole = distribute_tensor(whole, mesh, places, src_data_rank=None)
    parameter.copy_(whole)


@torch.no_grad()
def clip_gradients(parameters: Sequence[Tensor], largest: float) -> Tensor:
    """Scale gradients so that their norm is at most `largest`; return the norm before that.

    As torch.nn.utils.clip_grad_norm_, over the parts of all processes; it works on the local parts,
    in four calls instead of several per parameter.
    """
    mesh: DeviceMesh | None = None
    grads = []
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor):
            mesh, grad = grad.device_mesh, grad.to_local()
        if grad is not None:
            grads.append(grad)
    squares = torch.stack(foreach_norm(grads)).float().square().sum()
    if mesh is not None and mesh.size() > 1:
        dist.all_reduce(squares, group=mesh.get_group())
    norm = squares.sqrt()
    foreach_multiply(grads, (largest / (norm + 1e-6)).clamp(max=1.0))
    return norm
