"""The numerics contract, checked: claims, the oracle that they are held against, `verify`."""
