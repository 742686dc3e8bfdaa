"""Schedule: a way to run the passes of some steps by generated kernels of one target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from pararnn.codegen.families import why_no_kernels
from pararnn.engines.arguments import Arguments
from pararnn.engines.engine import Engine
from pararnn.engines.fused.launch import Conversions, Launch, to_kernel_layout
from pararnn.engines.rule import Rank
from pararnn.engines.tuned import Workload
from pararnn.program.program import Program


class Schedule(Engine):
    """Engine of the steps that it takes.

    A `FusedEngine` runs a program by the first of its schedules that takes it. Each is one object
    for all calls, by which launches are cached.
    """

    solver = "sequential"
    """Solver of the kernels, which names their header."""
    family: str
    """Family of the programs that it takes."""

    def takes(self, program: Program) -> bool:
        """Return True for programs that this schedule runs, if anything does."""
        return program.family == self.family

    def sums_samples(self, program: Program) -> bool:
        return True

    def linearises_returned(self, program: Program) -> bool:
        return True

    def why_not(self, program: Program) -> str | None:
        return why_no_kernels(program, self.solver)

    def rank(self, program: Program, workload: Workload) -> tuple[Rank, str]:
        """Rank the loop."""
        return Rank.LOOP, "a compiled loop beats every solver in PyTorch"


class Adjoint(NamedTuple):
    """Tensors of a backward pass on whose layout its launch depends: the gates' gradient, what the
    forward pass has given, and incoming gradients."""

    grad_gates: Tensor
    outputs: Sequence[Tensor]
    incoming: Sequence[Tensor | None]


class Layouts(NamedTuple):
    """Facts on which a launch depends in addition to a call's signature.

    gates: strides of the gates' gradient, None in a forward pass. incoming: strides of incoming
    gradients, None for an absent one. has_starts: True if the steps of a forward pass start from
    given states. facts: what the target adds, see `KernelSchedule.facts`.
    """

    gates: tuple[int, ...] | None
    incoming: tuple[tuple[int, ...] | None, ...]
    has_starts: bool
    facts: tuple[int, ...]

    # No property: the compiler of PyTorch 2.9 does not look into those of a NamedTuple.
    def direction(self) -> str:
        """Return the name of the pass."""
        return "forward" if self.gates is None else "backward"

    def struct(self, name: str) -> str:
        """Return the name of a struct of the pass: ForwardLaunch for Launch."""
        return self.direction().capitalize() + name


@dataclass(frozen=True)
class Pass:
    """Pass on calls of one signature; without a launch there is nothing to compute.

    spans: rows, times what each is divided into: a backward pass sums the weights' gradients over
    the steps of a span.
    """

    launch: Launch | None
    spans: int = 0

    def run(self, tensors: Sequence[Tensor | None]) -> None:
        """Launch the kernel, if there is anything to compute."""
        if self.launch is not None:
            self.launch.run(tensors)


class KernelSchedule(Schedule):
    """Schedule whose passes are planned once for all calls that launch alike."""

    def conversions(self, args: Arguments, backward: bool) -> Conversions:
        """Return the conversions of a call's tensors to kernel layout."""
        raise NotImplementedError

    def facts(
        self,
        program: Program,
        args: Arguments,
        tensors: Sequence[Tensor | None],
        others: Sequence[Tensor | None],
    ) -> tuple[int, ...]:
        """Return what launches on the target depend on in addition, such as a CPU's threads.

        tensors: of the call, in kernel layout. others: of an `Adjoint`, or given states.
        """
        raise NotImplementedError

    def plan(self, program: Program, layouts: Layouts, args: Arguments) -> Any:
        """Plan the `Pass` of calls with these layouts, of which `args`, in kernel layout, is one.

        Raises EngineError for sizes that kernels do not support.
        """
        raise NotImplementedError

    def launch(
        self,
        program: Program,
        args: Arguments,
        adjoint: Adjoint | None = None,
        starts: Sequence[Tensor] = (),
    ) -> tuple[Any, list[Tensor | None]]:
        """Return the cached `Pass` of a call, and the call's tensors in kernel layout.

        starts: states of a forward pass that its steps start from in place of those before them.
        """
        backward = adjoint is not None
        conversions = args.signature.cache((self, backward), self.conversions, args, backward)
        tensors = to_kernel_layout(args, conversions)
        gates: tuple[int, ...] | None = None
        incoming: tuple[tuple[int, ...] | None, ...] = ()
        others: Sequence[Tensor | None] = starts
        if adjoint is not None:
            gates = adjoint.grad_gates.stride()
            incoming = tuple([None if g is None else g.stride() for g in adjoint.incoming])
            others = [adjoint.grad_gates, *adjoint.outputs, *adjoint.incoming]
        facts = self.facts(program, args, tensors, others)
        layouts = Layouts(gates, incoming, bool(starts), facts)
        key = (self, program, layouts)
        return args.signature.cache(key, self._plan, *key[1:], args, tensors), tensors

    def _plan(
        self, program: Program, layouts: Layouts, args: Arguments, tensors: list[Tensor | None]
    ) -> Any:
        return self.plan(program, layouts, Arguments.unflatten(tensors, args.flatten()[1]))
