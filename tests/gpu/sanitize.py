"""A small case of each kernel and layout, for compute-sanitizer."""

import itertools

import torch

import pararnn
from pararnn.engines.fused import plan as plan_cuda

SOLVERS = ("sequential", "newton")
SIZES = ((2, 21, 66), (1, 5, 33), (3, 70, 256))


def main():
    count = 0
    for name, dtype in (("gru", torch.float32), ("lrc", torch.bfloat16), ("lstm", torch.float64)):
        for rows, length, channels in SIZES:
            # Segments meet in clusters, except for the largest size.
            plan_cuda.CLUSTERS = (9, 0) if channels < 256 else (99, 0)
            cell = pararnn.CELLS[name](channels, device="cuda", dtype=dtype)
            gates = torch.randn(rows, length, len(cell.gates), channels, device="cuda").to(dtype)
            gates[:, :, 0, :2] -= 10  # forget slowly: mended
            fields = {f: torch.rand(rows, length, device="cuda") for f in cell.fields}
            reset = torch.rand(rows, length, device="cuda") < 0.1
            variants = ({}, {"reset": reset}, {"reverse": True})
            for solver, options in itertools.product(SOLVERS, variants):
                leaf = gates.clone().requires_grad_()
                with pararnn.using(solver, "fused", segments=3, burn_in=4):
                    states, final = pararnn.solve(cell, leaf, fields=fields, **options)
                outputs = [
                    t
                    for pair in (states, final)
                    for t in (pair if isinstance(pair, tuple) else (pair,))
                ]
                torch.autograd.grad([o.sum() for o in outputs], [leaf, *cell.parameters()])
                count += 1
    torch.cuda.synchronize()
    print("ran", count)


main()
