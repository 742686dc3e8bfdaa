"""Solvers in PyTorch: the loops, one file each, and the system in forward time that they solve."""
