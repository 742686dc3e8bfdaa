"""`context_parallel`: a module whose sequences are spread over ranks by time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from pararnn.messages.group import OnRanks, register, span_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

OTHERS = (nn.RNNBase, nn.MultiheadAttention, nn.modules.conv._ConvNd)
"""Modules of PyTorch that read other steps, and would see only those of their rank."""


def context_parallel(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Run a module's sequences over the ranks of a mesh, each of which gets a span of time.

    Call it in each process, once weights are the same everywhere; it changes the module and returns
    it. Then every rank calls the module with its span of the input (`context_span`), forward and
    backward alike, with arguments of the same kinds. Outputs are of the span. The gradient of a
    parameter or initial state is the sum of all ranks' gradients.

    Args:
        module: layers (`ParaRNN`, `RecurrentLayer`), language models of such, or a module that
            holds these and treats each step alone otherwise.
        mesh: a DeviceMesh of one dimension, such as `mesh["context"]`; a single rank is a module
            on one process.

    Raises ValueError for another mesh, and for modules that cannot run on several ranks, with the
    reason: cells that only autograd differentiates, mixers that read other tokens by themselves,
    and PyTorch's own layers that read other steps.
    """
    name = register(mesh)
    if name:
        check_module(module)
    for submodule in module.modules():
        if isinstance(submodule, OnRanks):
            submodule.group = name
    return module


def check_module(module: nn.Module) -> None:
    """Raise ValueError, with the reason, for a module that cannot run on several ranks."""
    for path, submodule in module.named_modules():
        reason = None
        if isinstance(submodule, OnRanks):
            reason = submodule.why_no_context()
        elif isinstance(submodule, OTHERS):
            reason = f"torch.nn.{type(submodule).__name__} reads other steps, of its rank only"
        if reason is not None:
            raise ValueError(f"{path or 'the module'} cannot run on several ranks: {reason}")


def context_span(length: int, mesh: DeviceMesh) -> slice:
    """Return this rank's span of `length` steps: equal parts, one step more for the first ranks.

    Raises ValueError for fewer steps than ranks.
    """
    return span_of(length, mesh.get_local_rank(), mesh.size())
