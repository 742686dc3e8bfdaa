"""What tests' other processes start with: imports, and traces and kernels of small models."""

import gc

import pytest  # noqa: F401
import torch
import torch.distributed.fsdp
import torch.distributed.tensor
import transformers  # noqa: F401
from lm_kinds import hugging, tokens

import pararnn.lab.train.run
import pararnn.lab.train.trainer  # noqa: F401

torch.set_num_threads(1)
# Traces make many objects that live for a while: more seldom looks at them find as much.
gc.set_threshold(20_000, 10, 10)
if torch.version.cuda is None:  # otherwise tracing starts threads that forks lack
    with torch.no_grad():
        for kind in ("gru", "lstm"):
            hugging(kind)(tokens(2, 12))
gc.freeze()
