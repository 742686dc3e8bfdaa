"""Runs of cells that mix channels, held against a loop in float64 on the same numbers."""

import copy

import torch
from table import FUSED, PLAIN, by_head, gate_layouts
from torch.utils._pytree import tree_leaves

import pararnn

KERNELS = {"solver": FUSED[0], "backend": FUSED[1]}
LOOP = {"solver": PLAIN[0], "backend": PLAIN[1]}


def run_case(case, dtype, pair, arriving=None):
    """Return outputs, and gradients of gates, fields, initial states and parameters.

    `pair`: solver and backend. `arriving`: indices of the outputs that get a gradient, all by
    default; no gradients if empty.
    """
    cell = copy.deepcopy(case.cell).to(dtype)
    leaves = [case.gates, *case.options.get("fields", {}).values(), *(case.initial or ())]
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
    count = 1 + len(cell.fields)
    options = dict(case.options)
    if cell.fields:
        options["fields"] = dict(zip(cell.fields, leaves[1:count], strict=True))
    results = pararnn.solve(cell, leaves[0], tuple(leaves[count:]) or None, **options, **pair)
    outputs = tree_leaves(results)
    indices = range(len(outputs)) if arriving is None else arriving
    if not indices:
        return [x.detach() for x in outputs]
    generator = torch.Generator().manual_seed(1)
    noise = [torch.randn(x.shape, generator=generator).to(x.device, x.dtype) for x in outputs]
    leaves += [parameter for parameter in cell.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad([outputs[i] for i in indices], leaves, [noise[i] for i in indices])
    return [x.detach() for x in (*outputs, *grads)]


def check_layouts(case, dtype, pair, **tolerances):
    """Compare kernels on gates in each layout of memory with a pair on those of the case."""
    reference = run_case(case, dtype, pair)
    for name, gates in gate_layouts(by_head(case.gates, 4)).items():
        if name == "expanded":
            continue
        results = run_case(case._replace(gates=gates), dtype, KERNELS)
        for value, other in zip(results, reference, strict=True):
            torch.testing.assert_close(value.reshape(other.shape), other, msg=name, **tolerances)


def check_agreement(case, tolerance=2e-6, **options):
    """Check that kernels agree with the loop, by the largest number of each tensor.

    `options`: see `run_case`.
    """
    results = run_case(case, case.gates.dtype, KERNELS, **options)
    exact = run_case(case, torch.float64, LOOP, **options)
    for value, reference in zip(results, exact, strict=True):
        assert value.shape == reference.shape
        if not value.numel():
            continue
        scale = reference.abs().amax().clamp(min=1e-30)
        error = float(((value - reference).abs() / scale).amax())
        assert error <= tolerance, error
