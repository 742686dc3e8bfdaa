"""The tests of habits with CUDA kernels, by another `device` fixture."""

from test_habits import *  # noqa: F403
from test_habits_oracle import *  # noqa: F403
from test_habits_wrappers import *  # noqa: F403
