"""Ranks that share one sequence: by name, what they gather, and where a rank's span begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# The second name is deprecated from PyTorch 2.13 on, which has the first.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Ranks(NamedTuple):
    """Processes in the order of time: this one's number, their count, and their group."""

    rank: int
    size: int
    group: dist.ProcessGroup

    def position(self, reverse: bool) -> int:
        """Return this rank's position in the order of processing."""
        return self.size - 1 - self.rank if reverse else self.rank

    def gather(self, value: Tensor, reverse: bool = False) -> Tensor:
        """Return the values (...) of all ranks, (ranks, ...), in the order of processing."""
        own = value.contiguous()
        every = own.new_empty((self.size, *own.shape))
        _gather(every, own.unsqueeze(0), group=self.group)
        return every.flip(0) if reverse else every

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of all ranks' values."""
        total = value.clone()
        dist.all_reduce(total, group=self.group)
        return total


_RANKS: dict[str, Ranks] = {}
"""Ranks by name. Operators take no groups, so that modules hold a name."""


def register(mesh: DeviceMesh) -> str:
    """Register the ranks of a mesh of one dimension, and return their name; "" for a single rank.

    Raises ValueError for a mesh of more dimensions.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh must have one dimension, the ranks that share a sequence, got {mesh.ndim}: take "
            "one of them by its name, such as mesh['context']"
        )
    if mesh.size() == 1:
        return ""
    group = mesh.get_group()
    name = group.group_name
    _RANKS[name] = Ranks(dist.get_rank(group), dist.get_world_size(group), group)
    return name


def find(name: str) -> Ranks:
    """Return the ranks of a name. Raises RuntimeError in a process that has not made them."""
    if name not in _RANKS:
        raise RuntimeError(
            f"this process knows no ranks {name!r}: call pararnn.context_parallel(module, mesh) in "
            "each process that runs the module"
        )
    return _RANKS[name]


class OnRanks:
    """Base of modules that a sequence over several ranks concerns.

    context: the name of the ranks, set by `pararnn.context_parallel`; "" for one process.
    """

    context: str = ""

    def why_no_context(self) -> str | None:
        """Return the reason why the module cannot run on several ranks, or None."""
        return None


def start_and_total(context: str, steps: int, device: torch.device) -> tuple[int, int]:
    """Return where a rank's span of `steps` begins, and the steps of all ranks."""
    if not context:
        return 0, steps
    ranks = find(context)
    counts = ranks.gather(torch.tensor(steps, device=device)).tolist()
    return sum(counts[: ranks.rank]), sum(counts)


def span_of(steps: int, rank: int, ranks: int) -> slice:
    """Return the span of a rank: equal parts of the steps, one more for the first ones if needed.

    Raises ValueError for fewer steps than ranks.
    """
    if steps < ranks:
        raise ValueError(
            f"a sequence over {ranks} ranks needs a step for each of them, got {steps} steps"
        )
    part, more = divmod(steps, ranks)
    start = rank * part + min(rank, more)
    return slice(start, start + part + (rank < more))
