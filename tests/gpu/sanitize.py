"""A small case of each kernel and layout for compute-sanitizer: `sanitize.py elementwise`."""

import itertools
import sys
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

import pararnn
from pararnn.engines.fused import elementwise_cuda

SOLVERS = ("sequential", "newton")
SIZES = ((2, 21, 66), (1, 5, 33), (3, 70, 256))


def run_elementwise():
    count = 0
    for name, dtype in (("gru", torch.float32), ("lrc", torch.bfloat16), ("lstm", torch.float64)):
        for rows, length, channels in SIZES:
            # Segments meet in clusters, except for the largest size.
            elementwise_cuda.CLUSTERS = (9, 0) if channels < 256 else (99, 0)
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
                _differentiate(states, final, [leaf, *cell.parameters()])
                count += 1
    return count


def _differentiate(states, final, leaves):
    torch.autograd.grad([o.sum() for o in tree_leaves((states, final))], leaves)


def run_mixing():
    """Run heads that fit into registers and one that does not, and rows that fill no block."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from mixing_cells import HeadGRU, HeadLSTM

    count = 0
    sizes = [(HeadGRU, torch.float32, 5, 40, 2), (HeadLSTM, torch.bfloat16, 3, 66, 2)]
    sizes += [(HeadGRU, torch.float64, 2, 20, 1), (HeadGRU, torch.bfloat16, 2, 256, 1)]
    for cell_class, dtype, rows, channels, heads in sizes:
        cell = cell_class(channels, num_heads=heads, device="cuda", dtype=dtype)
        gates = torch.randn(rows, 11, len(cell.gates), channels, device="cuda").to(dtype)
        reset = torch.rand(rows, 11, device="cuda") < 0.2
        with pararnn.using("sequential", "fused"):
            states, final = pararnn.solve(cell, gates.requires_grad_(), reset=reset)
        _differentiate(states, final, [gates, *cell.parameters()])
        count += 1
    return count


def run_clusters():
    """Run steps that read arrays in memory, with a memory of the sequence, and with matrices that
    blocks share: for rows that fill no cluster."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from memory_cells import make_call
    from test_axes_twice import Covariance, Products

    from pararnn.zoo import WORLD_CELLS, ProjectedLSTMCell

    cells = [(Products(2 * 9, num_heads=2, K=5), torch.float32, {})]
    cells += [(Covariance(2 * 9, num_heads=2, K=5), torch.float64, {})]
    cells += [(ProjectedLSTMCell(256, num_heads=1, K=1024), torch.bfloat16, {})]
    sizes = {"G": 3, "K": 77, "E": 50, "U": 90}
    cells += [(WORLD_CELLS["dreamer-gru"](231, num_heads=1, **sizes), torch.float32, {})]
    call = make_call("several", 3, 1, (70, 33), dtype=torch.float32)
    memory = {key: m.detach().cuda() for key, m in call.memory.items()}
    cells += [(call.cell, torch.float32, memory)]
    for cell, dtype, memory in cells:
        cell.to("cuda", dtype)
        heads = cell.head_sizes
        gates = torch.randn(3, 7, heads.heads, heads.width, device="cuda").to(dtype)
        reset = torch.rand(3, 7, device="cuda") < 0.2
        with pararnn.using("sequential", "fused"):
            states, final = pararnn.solve(
                cell, gates.requires_grad_(), memory=memory or None, reset=reset
            )
        _differentiate(states, final, [gates, *cell.parameters()])
    return len(cells)


PARTS = {"elementwise": run_elementwise, "mixing": run_mixing, "clusters": run_clusters}
count = PARTS[sys.argv[1]]()
torch.cuda.synchronize()
print("ran", count)
