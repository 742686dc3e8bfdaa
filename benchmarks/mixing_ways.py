"""Cases of the benchmark of mixing cells, and what runs each: ours and others'."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, ItemsView, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from cpu import pair
from gpu import passes_on, sets_of
from protocol import Call
from torch import Tensor, nn

import pararnn
from pararnn.layers.projection import HeadwiseLinear

CELLS: dict[str, type[pararnn.Cell]] = {
    "lstm": pararnn.HeadLSTMCell,
    "gru": pararnn.HeadGRUCell,
    "slstm": pararnn.HeadSLSTMCell,
    "block-gru": pararnn.BlockGRUCell,
}
COMPARED = ("lstm", "gru", "slstm")
"""The cells that are measured at all sizes."""
LAYERS: dict[str, Callable[..., nn.Module]] = {
    "lstm": pararnn.LSTM,
    "gru": pararnn.GRU,
    "slstm": pararnn.SLSTM,
    "block-gru": pararnn.BlockGRU,
}
PROJECTED_BY_HEADS = ("slstm", "block-gru")
"""Cells whose layer has a projection inside heads, as their papers do."""
CUDNN: dict[str, Callable[..., nn.Module]] = {"lstm": nn.LSTM, "gru": nn.GRU}
FLASHRNN_SIZES = {"lstm": (4, 4, 2), "gru": (3, 4, 1), "slstm": (4, 4, 4)}
"""Gates, biases and states of flashrnn's functions."""
TORCHRL_MODULES = {
    "lstm": ("LSTMModule", ("recurrent_state_h", "recurrent_state_c")),
    "gru": ("GRUModule", ("recurrent_state",)),
}
"""Names of torchrl's modules, and of their states."""
LENGTH, WIDTH = 1024, 768
HEADS = (16, 32, 64, 128, 256, 512, 768)
DENSE = (512, 768)
BATCHES = (1, 16, 64, 256)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
RESETS = 0.01
"""Fraction of steps that start anew, where there are resets."""


class Case(NamedTuple):
    """One size of a cell, and what runs it."""

    way: str
    cell: str
    head: int
    batch: int
    dtype: str = "bfloat16"
    length: int = LENGTH

    @property
    def width(self) -> int:
        return 512 if self.head == 512 or self.cell == "block-gru" else WIDTH

    @property
    def heads(self) -> int:
        return self.width // self.head

    @property
    def name(self) -> str:
        """Name for --only."""
        return f"{self.way}-{self.cell}-{self.head}-B{self.batch}-{self.dtype}"


class Way(NamedTuple):
    """A differentiable function: call(*inputs), the sizes of its inputs, and its weights.

    dtype: of the inputs, where it is not the case's.
    """

    call: Callable[..., Tensor]
    sizes: Sequence[Sequence[int]]
    weights: Sequence[Tensor] = ()
    dtype: torch.dtype | None = None


def all_cases() -> list[Case]:
    """Return the cases in the order of their measurement: what nvcc compiles last."""
    cases = [Case("kernels", *size) for size in itertools.product(COMPARED, HEADS, BATCHES)]
    cases += [Case("kernels", cell, 64, b, "float32") for cell in COMPARED for b in BATCHES]
    cases += [Case("kernels", cell, head, 16, "float32") for cell in COMPARED for head in DENSE]
    for way in ("layer", "projection"):
        cases += [Case(way, cell, head, 16) for cell in COMPARED for head in HEADS]
        cases += [Case(way, cell, 64, b) for cell in COMPARED for b in BATCHES if b != 16]
    for way in ("kernels", "layer", "projection", "torchrl-triton"):  # torchrl's published case
        cases.append(Case(way, "block-gru", 64, 16, length=512))
    for way, dtypes in (
        ("cudnn", ("float16", "bfloat16")),
        ("torchrl-triton", ("bfloat16", "float32")),
    ):
        sizes = itertools.product(CUDNN, DENSE, BATCHES, dtypes)
        cases += [Case(way, *size) for size in sizes]
    cases += [Case("layer-resets", cell, head, 16) for cell in CUDNN for head in DENSE]
    cases += [Case("loop", cell, head, 16) for cell in COMPARED for head in (64, 512)]
    triton = itertools.product(("lstm", "slstm"), (16, 32, 64), BATCHES)
    cases += [Case("flashrnn-triton_fused", *size) for size in triton]
    cases += [
        Case("flashrnn-cuda_fused", cell, head, 16) for cell in COMPARED for head in HEADS[2:]
    ]
    cases += [Case("flashrnn-cuda_fused", "lstm", 64, b) for b in BATCHES if b != 16]
    cases += [Case("flashrnn-cuda", cell, head, 16) for cell in COMPARED for head in (64, *DENSE)]
    return cases


def way_of(case: Case, device: str) -> Way:
    """Return what runs a case. Raises ImportError for a peer that is not installed."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"device": device, "dtype": DTYPES[case.dtype]}
    family = case.way.partition("-")[0]
    return _WAYS[family](case, options)


def _solving(case: Case, options: dict[str, Any], backend: str) -> Way:
    cell = CELLS[case.cell](case.width, num_heads=case.heads, **options)
    size = (case.batch, case.length, len(cell.gates), case.width)
    return Way(pair(cell, "sequential", backend), [size], [*cell.parameters()])


def _layer(case: Case, options: dict[str, Any]) -> Way:
    arguments = {"num_heads": case.heads, "batch_first": True, **options}
    layer = LAYERS[case.cell](case.width, case.width, **arguments)
    kwargs = {"reset": _resets(case, options)} if case.way == "layer-resets" else {}
    return _of_module(case, layer, lambda x: layer(x, **kwargs)[0])


def _projection(case: Case, options: dict[str, Any]) -> Way:
    """Return the layer's projection alone."""
    heads = case.heads if case.cell in PROJECTED_BY_HEADS else 1
    gates = len(CELLS[case.cell].gates)
    module = HeadwiseLinear(case.width, gates, case.width, heads, **options)
    return _of_module(case, module, module)


def _cudnn(case: Case, options: dict[str, Any]) -> Way:
    module = CUDNN[case.cell](case.width, case.width, batch_first=True, **options)
    return _of_module(case, module, lambda x: module(x)[0])


def _of_module(case: Case, module: nn.Module, call: Callable[..., Tensor]) -> Way:
    return Way(call, [(case.batch, case.length, case.width)], [*module.parameters()])


def _resets(case: Case, options: dict[str, Any]) -> Tensor:
    return torch.rand(case.batch, case.length, device=options["device"]) < RESETS


def _flashrnn(case: Case, options: dict[str, Any]) -> Way:
    function = importlib.import_module("flashrnn").flashrnn
    gates, biases, states = FLASHRNN_SIZES[case.cell]
    matrices = torch.randn(gates, case.heads, case.head, case.head, **options) * case.head**-0.5
    bias = torch.zeros(biases, case.heads, case.head, **options)
    initial = torch.zeros(states, case.batch, 1, case.heads, case.head, **options)
    weights = [matrices.requires_grad_(), bias.requires_grad_()]
    kind = {"backend": case.way.removeprefix("flashrnn-"), "dtype": case.dtype}

    def call(gates: Tensor) -> Tensor:
        results, _ = function(gates, *weights, states=initial, function=case.cell, **kind)
        output: Tensor = results[0]
        return output

    return Way(call, [(case.batch, case.length, gates, case.heads, case.head)], weights)


def _torchrl(case: Case, options: dict[str, Any]) -> Way:
    """Return torchrl's module, which has its projection; weights in float32, as it wants them.

    In bfloat16 the block GRU has inputs and outputs of it, other modules only products.
    """
    modules = importlib.import_module("torchrl.modules")
    backend, width = case.way.removeprefix("torchrl-"), case.width
    if case.cell == "block-gru":
        module = modules.DreamerV3BlockGRU(
            width,
            width,
            projection_size=width,
            num_blocks=case.heads,
            recurrent_backend=backend,
            device=options["device"],
        )
        return _of_module(case, module, lambda x: module(x)[0])
    name, states = TORCHRL_MODULES[case.cell]
    module = getattr(modules, name)(
        input_size=width,
        hidden_size=width,
        in_keys=["x", *states],
        out_keys=["y", *(("next", state) for state in states)],
        recurrent_backend=backend,
        recurrent_compute_dtype=options["dtype"],
        default_recurrent_mode=True,
        device=options["device"],
    )
    tensors = importlib.import_module("tensordict").TensorDict
    size, device = (case.batch, case.length), options["device"]
    others = {state: torch.zeros(*size, 1, width, device=device) for state in states}
    others["is_init"] = _resets(case, options).unsqueeze(-1)

    def call(x: Tensor) -> Tensor:
        output: Tensor = module(tensors({"x": x, **others}, size))["y"]
        return output

    return _of_module(case, module, call)._replace(dtype=torch.float32)


_WAYS: dict[str, Callable[[Case, dict[str, Any]], Way]] = {
    "kernels": partial(_solving, backend="fused"),
    "loop": partial(_solving, backend="torch"),
    "layer": _layer,
    "projection": _projection,
    "cudnn": _cudnn,
    "flashrnn": _flashrnn,
    "torchrl": _torchrl,
}
"""Functions that return what runs a case, by the first word of its way."""


def passes(case: Case, device: str, cache: int) -> ItemsView[str, list[Call]]:
    """Return forward without gradients, and forward + backward, on inputs that exceed the cache."""
    way = way_of(case, device)
    dtype = way.dtype or DTYPES[case.dtype]

    def draw() -> list[Tensor]:
        return [torch.randn(size, device=device, dtype=dtype) for size in way.sizes]

    return passes_on(sets_of(draw, cache), way.call, way.weights).items()
