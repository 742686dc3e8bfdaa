"""The oracle of long sequences: the CPU's kernels in float64, on the same rounded inputs."""

import copy

import torch
from call_results import as_tuple
from relative import relative_error

import pararnn
from pararnn.base.numerics import (
    CHANNEL_FACTOR,
    FORWARD_TOLERANCE,
    MAX_RELATIVE_TOLERANCE,
    SEQUENTIAL_ERRORS,
    compute_dtype,
)
from pararnn.check.claims import QUIET, finite, gap, peak

HOW = {"solver": "sequential", "backend": "fused"}


def run(case, device, dtype, seed=0, loss_scale=1.0, **pair):
    """Outputs and all gradients of a case by name, on a device, with its numbers in `dtype`."""

    def leaf(tensor):
        return tensor.detach().to(device, dtype, copy=True).requires_grad_()

    cell = copy.deepcopy(case.cell).to(device, dtype)
    gates = leaf(case.gates)
    options = {
        k: v.to(device) if torch.is_tensor(v) else v
        for k, v in case.options.items()
        if k != "fields"
    }
    fields = {k: leaf(v) for k, v in case.options.get("fields", {}).items()}
    initial = None if case.initial is None else tuple(leaf(h) for h in case.initial)
    states, final = pararnn.solve(cell, gates, initial, fields=fields, **options, **(pair or HOW))
    states, final = map(as_tuple, (states, final))
    generator = torch.Generator().manual_seed(seed)
    cotangents = []
    for output in (*states, *final):
        own = case.gates.dtype if output.ndim == 3 else compute_dtype(case.gates.dtype)
        noise = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        noise = (loss_scale * noise).to(own)
        cotangents.append(noise.to(device, output.dtype))
    leaves = {"gates": gates, **fields, **dict(cell.named_parameters())}
    leaves |= {f"initial {i}": h for i, h in enumerate(initial or ())}
    grads = torch.autograd.grad((*states, *final), list(leaves.values()), cotangents)
    by_name = {f"state {i}": s for i, s in enumerate(states)}
    by_name |= {f"final {i}": f for i, f in enumerate(final)}
    by_name |= {f"grad {name}": g for name, g in zip(leaves, grads, strict=True)}
    return {name: value.detach().cpu() for name, value in by_name.items()}


def beyond(got, exact, loop, dtype):
    """Return what exceeds the contract's forward error: name, error, the loop's error."""
    wrong = []
    for name, value in got.items():
        error, own = (relative_error(v, exact[name]) for v in (value, loop[name]))
        tolerance = max(FORWARD_TOLERANCE[dtype], FORWARD_TOLERANCE[value.dtype])
        if not error <= tolerance + SEQUENTIAL_ERRORS * own:
            wrong.append((name, error, own))
        elif value.ndim > 2:  # a series: each channel by its own largest value
            distance, noise = (
                peak(gap(v, exact[name], loop[name]), True) for v in (value, loop[name])
            )
            size = peak(finite(exact[name].double().abs()), True)
            limit = CHANNEL_FACTOR * (tolerance * size + SEQUENTIAL_ERRORS * noise)
            excess = distance > torch.minimum(limit, MAX_RELATIVE_TOLERANCE * size)
            if bool((excess & (noise <= QUIET * size)).any()):
                wrong.append((f"{name} by channels", float((distance / size)[excess].max()), own))
    return wrong


def failures(case, device="cuda", loss_scale=1.0, **pair):
    """Return the results of a device's kernels that exceed the contract's forward error."""
    dtype = case.gates.dtype
    got = run(case, device, dtype, loss_scale=loss_scale, **pair)
    exact = run(case, "cpu", torch.float64, loss_scale=loss_scale)
    return beyond(got, exact, run(case, "cpu", dtype, loss_scale=loss_scale), dtype)
