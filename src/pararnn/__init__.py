"""pararnn: nonlinear RNNs, trained in parallel over the sequence, exactly."""

import pararnn.base.intact  # noqa: F401  first: where files are mixed, others fail obscurely
from pararnn.base.cache import clear_caches
from pararnn.base.errors import (
    BackendWarning,
    CellCostWarning,
    CellError,
    ConvergenceError,
    ConvergenceWarning,
    EngineError,
    PararnnError,
    StructureError,
)
from pararnn.base.version import __version__ as __version__
from pararnn.cells import NONLINEARITIES, Cell, Param
from pararnn.cells.windows import windows
from pararnn.check.verify import Report, verify
from pararnn.codegen.precompile import precompile
from pararnn.codegen.source import emitted
from pararnn.codegen.spelling import register_spelling
from pararnn.engines.request import MODES, using
from pararnn.layers import (
    GRU,
    LSTM,
    RNN,
    RSSM,
    SLSTM,
    BlockGRU,
    DecayedInputs,
    DreamerGRU,
    LayerNormGRU,
    LayerNormLSTM,
    ParaGRU,
    ParaLSTM,
    ParaRNN,
    RecurrentLayer,
    RNNCell,
    SLSTMLayer,
    SolveInfo,
    clip_after_step,
    load_paper_weights,
    paper_weights,
)
from pararnn.program.program import Program, program_of
from pararnn.program.structure import BlockDiagonal, Dense, Diagonal, Structure, register_structure
from pararnn.ranks.parallel import context_parallel, context_span
from pararnn.scan import scan
from pararnn.solve import solve
from pararnn.tune.adapt import Adaptation, adapt
from pararnn.tune.autotune import Tuning, autotune
from pararnn.tune.explain import Explanation, explain
from pararnn.zoo import (
    CELLS,
    BlockGRUCell,
    DenseGRUCell,
    ElmanCell,
    GRUCell,
    HeadElmanCell,
    HeadGRUCell,
    HeadGRUResetFirstCell,
    HeadLSTMCell,
    HeadSLSTMCell,
    LEMCell,
    LRCCell,
    LSTMCell,
    SLSTMCell,
)

__all__ = [
    "CELLS",
    "GRU",
    "LSTM",
    "MODES",
    "NONLINEARITIES",
    "RNN",
    "RSSM",
    "SLSTM",
    "Adaptation",
    "BackendWarning",
    "BlockDiagonal",
    "BlockGRU",
    "BlockGRUCell",
    "Cell",
    "CellCostWarning",
    "CellError",
    "ConvergenceError",
    "ConvergenceWarning",
    "DecayedInputs",
    "Dense",
    "DenseGRUCell",
    "Diagonal",
    "DreamerGRU",
    "ElmanCell",
    "EngineError",
    "Explanation",
    "GRUCell",
    "HeadElmanCell",
    "HeadGRUCell",
    "HeadGRUResetFirstCell",
    "HeadLSTMCell",
    "HeadSLSTMCell",
    "LEMCell",
    "LRCCell",
    "LSTMCell",
    "LayerNormGRU",
    "LayerNormLSTM",
    "ParaGRU",
    "ParaLSTM",
    "ParaRNN",
    "Param",
    "PararnnError",
    "Program",
    "RNNCell",
    "RecurrentLayer",
    "Report",
    "SLSTMCell",
    "SLSTMLayer",
    "SolveInfo",
    "Structure",
    "StructureError",
    "Tuning",
    "adapt",
    "autotune",
    "clear_caches",
    "clip_after_step",
    "context_parallel",
    "context_span",
    "emitted",
    "explain",
    "load_paper_weights",
    "paper_weights",
    "precompile",
    "program_of",
    "register_spelling",
    "register_structure",
    "scan",
    "solve",
    "using",
    "verify",
    "windows",
]
