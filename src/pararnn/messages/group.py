"""Ranks that share one sequence: their names, their messages, and where a rank's span begins."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pararnn.base.device import type_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


# The second name is deprecated from PyTorch 2.13 on, which has the first.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


BY_BACKWARD = (
    "sequences that ranks share: messages between ranks have backward passes only. Call "
    "loss.backward(), or take these derivatives of whole sequences"
)
"""What transforms of torch.func are refused with."""


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
        message = value.contiguous()
        messages = message.new_empty((self.size, *message.shape))
        _gather(messages, message.unsqueeze(0), group=self.group)
        return messages.flip(0) if reverse else messages

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of all ranks' values."""
        total = value.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def neighbour(self, back: bool) -> int | None:
        """Return the rank that is next in time, or with `back` the one before; None at the end."""
        neighbour = self.rank + (-1 if back else 1)
        return neighbour if 0 <= neighbour < self.size else None

    def send(self, value: Tensor, back: bool) -> None:
        """Send a value to the next rank in time, or with `back` to the one before, if there is one.

        On a GPU nothing waits for its arrival.
        """
        to, tape = self.neighbour(back), _TAPE.get()
        if to is None or (tape is not None and tape.repeats):
            return
        message = value.detach().clone(memory_format=torch.contiguous_format)
        work = dist.isend(message, group=self.group, group_dst=to)
        assert work is not None
        key = (self.group.group_name, to)
        earlier = _SENDING.pop(key, None)
        if earlier is not None:
            earlier[0].wait()
        if type_of(message.device).accelerator:
            _SENDING[key] = work, message  # in use until it is sent
        else:
            work.wait()

    def receive(self, like: Tensor, back: bool) -> Tensor:
        """Return the value sent by the rank before, or with `back` by the next one; zeros at the
        end.

        The value has the size and dtype of `like`. Repeated calls get it again, see `remember`.
        """
        source, tape = self.neighbour(not back), _TAPE.get()
        if source is None:
            return torch.zeros_like(like, memory_format=torch.contiguous_format)
        if tape is not None and tape.repeats:
            return tape.next().clone()
        value = torch.empty_like(like, memory_format=torch.contiguous_format)
        dist.recv(value, group=self.group, group_src=source)
        if tape is not None:
            tape.messages.append(value.clone())
        return value


_SENDING: dict[tuple[str, int], tuple[Any, Tensor]] = {}
"""Last message to each neighbour of a group, which may be under way."""


class Tape:
    """Messages that a computation has received from neighbours, for its repetition."""

    def __init__(self) -> None:
        self.messages: list[Tensor] = []
        self.repeats = False
        self.position = 0

    def next(self) -> Tensor:
        """Return the next message of a repetition."""
        self.position += 1
        return self.messages[self.position - 1]


_TAPE: ContextVar[Tape | None] = ContextVar("tape", default=None)


def remember(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with a memory: repeated calls get the messages of the first call, and
    send none.

    For activation checkpointing: the backward pass goes from the last rank to the first. A
    repetition that waited for the rank before would let ranks wait twice a block.
    """
    tape = Tape()

    def run(*args: Any) -> Any:
        tape.position = 0
        token = _TAPE.set(tape)
        try:
            return function(*args)
        finally:
            _TAPE.reset(token)
            tape.repeats = True

    return run


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
    """Base of modules that treat a sequence over several ranks in a special way.

    group: the name of the ranks, set by `pararnn.context_parallel`; "" for one process.
    """

    group: str = ""

    def why_no_context(self) -> str | None:
        """Return the reason why the module cannot run on several ranks, or None."""
        return None


def require_step(steps: int) -> None:
    """Raise ValueError for a rank's span without a step."""
    if not steps:
        raise ValueError(
            "each rank needs a step of the sequence at least, got none: spans are those of "
            "pararnn.context_span"
        )


def start_and_total(group: str, steps: int, device: torch.device) -> tuple[int, int]:
    """Return where a rank's span of `steps` begins, and the steps of all ranks."""
    if not group:
        return 0, steps
    counts = step_counts(group, steps, device)
    return sum(counts[: find(group).rank]), sum(counts)


def step_counts(group: str, steps: int, device: torch.device) -> tuple[int, ...]:
    """Return the steps of each rank's span, where this one has `steps`."""
    return tuple(find(group).gather(torch.tensor(steps, device=device)).tolist())


def span_of(steps: int, rank: int, ranks: int) -> slice:
    """Return the span of a rank: equal parts of the steps, one more for the first ones if needed.

    Raises ValueError for fewer steps than ranks.
    """
    if steps < ranks:
        raise ValueError(
            f"a sequence over {ranks} ranks needs a step for each of them, got {steps} steps"
        )
    share, more = divmod(steps, ranks)
    start = rank * share + min(rank, more)
    return slice(start, start + share + (rank < more))
