"""Shared set-up: one thread a test process, so that parallel test runs do not fight for cores."""

import torch

torch.set_num_threads(1)
