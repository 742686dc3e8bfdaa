"""Packed, padded, chunked and reversed sequences, by the CUDA kernels."""

from test_layer_sequences import *  # noqa: F403
