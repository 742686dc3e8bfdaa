"""Given states at resets, and gradients that nobody wants, by the CUDA kernels."""

from test_frozen import *  # noqa: F403
from test_restarts import *  # noqa: F403
