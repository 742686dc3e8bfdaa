"""The engine of a call over ranks, which wraps the engine that runs each rank's span."""

from __future__ import annotations

from pararnn.engines import table
from pararnn.engines.arguments import Arguments, Gradients, Solution, TensorSize
from pararnn.engines.engine import BackwardInputs, Engine
from pararnn.program.program import Program
from pararnn.ranks import pipeline, solve
from pararnn.ranks.span import RankSpan


class OverRanks(Engine):
    """Engine of a call whose sequences ranks share, by an engine of one process: pipelined or not,
    see `is_pipelined`."""

    completes = True

    def __init__(self, engine: Engine, pipelines: bool) -> None:
        self.engine, self.info_rows = engine, engine.info_rows
        self.solver, self.backend = engine.solver, engine.backend
        self.way = pipeline if pipelines else solve

    def forward(self, program: Program, args: Arguments) -> Solution:
        """Solve the recurrence over all ranks."""
        return self.way.forward(RankSpan.of(program, self.engine, args))

    def backward(self, program: Program, args: Arguments, inputs: BackwardInputs) -> Gradients:
        """Return this rank's gradients. Those of parameters and initial states are to be summed
        over ranks."""
        span = RankSpan.of(program, self.engine, args).for_backward()
        return self.way.backward(span, inputs)

    def check_backward(self, program: Program, args: Arguments) -> None:
        """Raise EngineError where a span's engine would."""
        self.engine.check_backward(program, args)

    def stored(self, program: Program, args: Arguments) -> list[TensorSize]:
        """Return sizes and dtypes of the states that a pipelined rank has received."""
        if self.way is solve:
            return []
        sizes = args.state_sizes(program)
        return [((args.gates.shape[0], *size), args.dtype) for size in sizes]


def engine_of(program: Program, solver: str, backend: str, args: Arguments) -> Engine | None:
    """Return the engine of a pair for a call, if the table has one for its device."""
    engine = table.find(solver, backend, args.gates.device)
    if engine is None or not args.options.context:
        return engine
    return OverRanks(engine, pipeline.is_pipelined(program, args.options))
