"""Calls whose gradients of single samples are held against a loop over samples, on any device."""

from typing import Any, NamedTuple

import torch
from chunk_cases import CELLS as CHUNK_CELLS
from chunk_cases import CHUNKS
from mixing_cells import ResetAfter
from table import FUSED, NEWTON_FUSED, PLAIN
from test_clusters import CELLS as CLUSTER_CELLS
from test_tangents import Call
from torch.func import functional_call, grad, vmap

import pararnn
from pararnn import zoo

SCALE = 1e-9
"""Of losses: gradients as small as those of a mean over many tokens."""


class Case(NamedTuple):
    """A cell, the pair that runs it, the steps of its rows, and the segments of these."""

    cell: Any
    pair: tuple[str, str] = FUSED
    steps: int = 5
    segments: int | None = None


CASES = {
    "elementwise": Case(lambda: zoo.CELLS["lem"](5)),
    "fields": Case(lambda: zoo.CELLS["lrc"](5)),
    "newton": Case(lambda: zoo.CELLS["gru"](5), NEWTON_FUSED, 48, 3),
    "mixing": Case(lambda: ResetAfter(12, num_heads=2)),
    "one head": Case(lambda: zoo.CELLS["dense-gru"](9)),
    "matrix": Case(lambda: zoo.MATRIX_CELLS["m2rnn"](8, num_heads=2)),
    "segments of time": Case(
        lambda: zoo.MATRIX_CELLS["mamba2"](8, num_heads=2), NEWTON_FUSED, 260, 2
    ),
    "memory": Case(lambda: zoo.MEMORY_CELLS["attention-lstm"](8, num_heads=2)),
    "heads of vectors": Case(lambda: zoo.CELLS["layer-norm-lstm"](8)),
    "clusters": Case(CLUSTER_CELLS["projected"]),
    "chunks": Case(
        lambda: CHUNK_CELLS["WithParams"](32, num_heads=2, K=16), tuple(CHUNKS.values()), 37
    ),
}
"""By what runs them."""


def samples_of(
    case: Case, count: int, batch: int, device="cpu", dtype=torch.float64, **options: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the gradients of `count` samples of `batch` sequences by `vmap` of `grad`, and those
    of PyTorch's loop over steps and samples in float64."""
    call = Call(case.cell().double(), case.steps, batch, **options)
    own = 1 + len(call.cell.states) + len(call.cell.fields) + len(call.cell.memory)
    carried = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = [
        (x + torch.rand(count, *x.shape) / 4 if i < own else x).to(carried if i else dtype)
        for i, x in enumerate(call.tensors)
    ]
    every = tuple(range(len(tensors)))

    def loss_by(pair):
        function = call(pair)
        return lambda *tensors: SCALE * sum(x.double().sin().sum() for x in function(*tensors))

    rounded = [x.double() for x in tensors]
    loop = [
        grad(loss_by(PLAIN), every)(*(x[i] for x in rounded[:own]), *rounded[own:])
        for i in range(count)
    ]
    call.cell.to(device)
    call.options = {k: x.to(device) if torch.is_tensor(x) else x for k, x in options.items()}
    dims = tuple(0 if i < own else None for i in every)
    with pararnn.using(segments=case.segments):
        ours = vmap(grad(loss_by(case.pair), every), dims)(*(x.to(device) for x in tensors))
    return [x.double().cpu() for x in ours], [torch.stack(x) for x in zip(*loop, strict=True)]


def worst(ours: list[torch.Tensor], loop: list[torch.Tensor]) -> float:
    """Return the largest error of a tensor, relative to its largest gradient."""
    assert [x.shape for x in ours] == [x.shape for x in loop]
    errors = [
        (x - y).abs().max() / y.abs().max().clamp_min(1e-30)
        for x, y in zip(ours, loop, strict=True)
        if y.numel()
    ]
    return float(torch.stack(errors).max())


LAYERS = {
    "LSTM": (pararnn.LSTM, {"batch_first": True, "bidirectional": True}),
    "ParaLSTM": (pararnn.ParaLSTM, {}),
    "layer norm": (
        lambda *sizes, **options: pararnn.ParaRNN(zoo.CELLS["layer-norm-lstm"], *sizes, **options),
        {},
    ),
}
"""Layers, whose gradients have those of biases among them."""


def samples_of_layer(name: str, pair: tuple[str, str], device="cpu"):
    """Return the gradients of the weights of a layer for 3 samples of 2 sequences."""
    torch.manual_seed(0)
    cls, options = LAYERS[name]
    layer = cls(4, 8, dtype=torch.float64, **options).to(device)
    x = torch.randn(3, 2, 6, 4, dtype=torch.float64).to(device)
    weights = {key: weight.detach() for key, weight in layer.named_parameters()}

    def loss(weights, x):
        return SCALE * functional_call(layer, weights, (x,))[0].sin().sum()

    solver, backend = pair
    with pararnn.using(solver=solver, backend=backend):
        if pair == PLAIN:
            loop = [grad(loss)(weights, row) for row in x]
            return [torch.stack([row[key] for row in loop]).cpu() for key in weights]
        samples = vmap(grad(loss), (None, 0))(weights, x)
    return [samples[key].cpu() for key in weights]
