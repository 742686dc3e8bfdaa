"""Foundations that every folder uses: devices, errors, numerics, files, PyTorch's private names."""
