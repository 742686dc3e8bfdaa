"""From a cell's step to one frozen Program: traced, derived, its structure, kept on disk."""
