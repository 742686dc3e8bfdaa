"""pararnn: nonlinear RNNs, trained in parallel over the sequence, exactly."""

from pararnn.cells import (
    CELLS,
    NONLINEARITIES,
    Cell,
    DenseGRUCell,
    ElmanCell,
    GRUCell,
    LEMCell,
    LRCCell,
    LSTMCell,
    Param,
    SLSTMCell,
)
from pararnn.codegen.emit import emitted
from pararnn.codegen.precompile import precompile
from pararnn.codegen.spelling import register_spelling
from pararnn.errors import (
    BackendWarning,
    CellCostWarning,
    CellError,
    ConvergenceError,
    ConvergenceWarning,
    EngineError,
    PararnnError,
    StructureError,
)
from pararnn.layer import ParaGRU, ParaLSTM, ParaRNN, SolveInfo, clip_after_step
from pararnn.program import Program, program_of
from pararnn.solve import solve
from pararnn.structure import BlockDiagonal, Dense, Diagonal, Structure, register_structure
from pararnn.verify import Report, verify

__version__ = "0.1.0"

__all__ = [
    "CELLS",
    "NONLINEARITIES",
    "BackendWarning",
    "BlockDiagonal",
    "Cell",
    "CellCostWarning",
    "CellError",
    "ConvergenceError",
    "ConvergenceWarning",
    "Dense",
    "DenseGRUCell",
    "Diagonal",
    "ElmanCell",
    "EngineError",
    "GRUCell",
    "LEMCell",
    "LRCCell",
    "LSTMCell",
    "ParaGRU",
    "ParaLSTM",
    "ParaRNN",
    "Param",
    "PararnnError",
    "Program",
    "Report",
    "SLSTMCell",
    "SolveInfo",
    "Structure",
    "StructureError",
    "clip_after_step",
    "emitted",
    "precompile",
    "program_of",
    "register_spelling",
    "register_structure",
    "solve",
    "verify",
]
