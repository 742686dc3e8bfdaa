"""States at resets, and unwanted gradients, with the CUDA kernels."""

from test_frozen import *  # noqa: F403
from test_restarts import *  # noqa: F403
