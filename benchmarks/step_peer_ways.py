"""Cases of step_peers.py: recurrences of many kinds, and what runs each, ours and others'.

Peers have our weights. Where their convention allows it, their outputs and the gradients of inputs
are compared with ours; a note says where only times are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from attention_cpu import LoopOfCells, layer_of
from chunk_ways import mlstm_kernels
from mixing_ways import DTYPES
from protocol import LAUNCHES
from torch import Tensor, nn
from world_models import Core, LoopGRU, LoopRSSM

import pararnn
from pararnn import Cell, Param
from pararnn.zoo import MATRIX_CELLS, LIFCell
from pararnn.zoo.joint_norm import joint_norm
from pararnn.zoo.lif import Spike

OURS = "pararnn"
GATES = ("i", "f", "g", "o")
INPUT, HIDDEN, PROJECTION = 256, 1024, 256
"""Channels of the LSTM with a projection."""
M2RNN_KEYS, MLSTM_KEYS = 64, 64
MEMORY, KEYS = 128, 128
"""Length of the memory that the attention LSTM reads, and channels of its keys."""
ACTIONS, CLASSES = 6, 32
"""Of the RSSM: channels of an action; variables, and classes of one."""
CALLS, GRAPHS = LAUNCHES[:1], LAUNCHES[1:]
DENSE = "one dense head, without norms: only times are compared"
SAMPLES = "draws its own samples: only times are compared"

Tensors = Sequence[Tensor]
Results = Tensor | Tensors


class HeadNormLSTM(Cell):
    """`LayerNormLSTMCell` with heads: norms of a head's four gates together, and of its memory."""

    states = {"h": "V", "c": "V"}
    gates = dict.fromkeys(GATES, "V")
    params = {
        **{f"R_{name}": Param("H,V,V") for name in GATES},
        **{f"w_{name}": Param("H,V", mean=1.0, std=0.0, recurrent=False) for name in GATES},
        **{f"b_{name}": Param("H,V", std=0.0, recurrent=False) for name in GATES},
        "w_c": Param("H,V", mean=1.0, std=0.0, recurrent=False),
        "b_c": Param("H,V", std=0.0, recurrent=False),
    }
    config = {"eps": 1e-5}

    def step(self, state: Any, gate: Any, param: Any) -> tuple[Tensor, Tensor]:
        h = state.h[..., None, :]
        matrices, weights, biases = param[:4], param[4:8], param[8:12]
        norms = joint_norm([(h @ R.mT).squeeze(-2) for R in matrices], self.eps)
        u = [x + v * w + b for x, v, w, b in zip(gate, norms, weights, biases, strict=True)]
        i, f, o = (torch.sigmoid(u[n]) for n in (0, 1, 3))
        c = f * state.c + i * torch.tanh(u[2])
        c = F.layer_norm(c, c.shape[-1:], eps=self.eps) * param.w_c + param.b_c
        return o * torch.tanh(c), c


class Case(NamedTuple):
    """One size of a recurrence; kind: the entry of `KINDS` that runs it."""

    name: str
    kind: str
    width: int
    heads: int = 1
    length: int = 1024
    batch: int = 16
    dtype: str = "bfloat16"


class Way(NamedTuple):
    """A differentiable function of a case's inputs, and its weights.

    inputs: what makes its inputs of the case's, before it is timed. output: what makes our first
    output of its; None where nothing does. launches: the ways to start it that are tried.
    """

    call: Callable[..., Results]
    weights: Tensors
    inputs: Callable[[Tensors], Tensors] = tuple
    output: Callable[[Tensor], Tensor] | None = lambda result: result
    version: str = ""
    note: str = ""
    launches: Sequence[str] = LAUNCHES


Make = Callable[[Case, str], Way]
Sizes = Callable[[Case], list[tuple[int, ...]]]


class Kind(NamedTuple):
    """Sizes of a case's inputs, the channels of its output, and what makes its ways, by name."""

    sizes: Sizes
    channels: Callable[[Case], int]
    ways: Mapping[str, Make]


def options_of(case: Case, device: str) -> dict[str, Any]:
    """Return a case's device and dtype, after a seed: all processes draw the same weights."""
    torch.manual_seed(0)
    return {"device": device, "dtype": DTYPES[case.dtype]}


def first(result: Results) -> Tensor:
    """Return the first of several results."""
    return result if isinstance(result, Tensor) else result[0]


def weights_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters()]


def cast(dtype: torch.dtype, inputs: Tensors) -> list[Tensor]:
    return [x.to(dtype) for x in inputs]


def of_layer(layer: nn.Module) -> Way:
    return Way(lambda x: layer(x)[0], weights_of(layer))


def solving(cell: Cell, initial: Tensors | None = None) -> Way:
    """Return the way that solves a cell on gates."""

    def call(gates: Tensor) -> Tensor:
        return first(pararnn.solve(cell, gates, None if initial is None else tuple(initial))[0])

    return Way(call, weights_of(cell))


# LSTMs of torch.nn


def projected_lstm(case: Case, device: str) -> pararnn.LSTM:
    options = {"batch_first": True, "proj_size": PROJECTION, **options_of(case, device)}
    return pararnn.LSTM(INPUT, HIDDEN, **options)


def head_lstm(case: Case, device: str) -> pararnn.LSTM:
    options = {"num_heads": case.heads, "batch_first": True, **options_of(case, device)}
    return pararnn.LSTM(case.width, case.width, **options)


def norm_lstm(case: Case, device: str) -> pararnn.ParaRNN:
    options = {"num_heads": case.heads, **options_of(case, device)}
    return pararnn.ParaRNN(HeadNormLSTM, case.width, case.width, **options)


def ours_of(layer: Callable[[Case, str], nn.Module]) -> Make:
    """Return what makes the way of one of our layers."""
    return lambda case, device: of_layer(layer(case, device))


def cudnn(case: Case, device: str, dtype: str, projected: bool) -> Way:
    """Return torch.nn.LSTM, with our weights where it has a projection and so one head."""
    options: dict[str, Any] = {"batch_first": True, **options_of(case, device)}
    if projected:
        layer = nn.LSTM(INPUT, HIDDEN, proj_size=PROJECTION, **options)
        layer.load_state_dict(projected_lstm(case, device).state_dict())
    else:
        layer = nn.LSTM(case.width, case.width, **options)
    layer = layer.to(DTYPES[dtype])
    layer.flatten_parameters()
    way = of_layer(layer)._replace(
        inputs=partial(cast, DTYPES[dtype]), version=str(torch.backends.cudnn.version() or "")
    )
    return way if projected else way._replace(output=None, note=DENSE)


def cudnn_ways(projected: bool) -> dict[str, Make]:
    return {
        "cuDNN, float16": partial(cudnn, dtype="float16", projected=projected),
        "cuDNN": partial(cudnn, dtype="bfloat16", projected=projected),
    }


def without_norms(make: Make) -> Make:
    """Return what makes our LSTM with heads, whose results are other ones."""
    return lambda case, device: make(case, device)._replace(output=None, note="without norms")


def by_gate(case: Case, device: str) -> Way:
    """Return our LSTM with heads on the gates of the cell with norms, which lie head by head."""

    def gate_by_gate(inputs: Tensors) -> list[Tensor]:
        return [x.unflatten(3, (len(GATES), -1)).transpose(2, 3).flatten(3) for x in inputs]

    return solving(head_cell("lstm", case, device))._replace(inputs=gate_by_gate)


# Heads next to flashrnn

HEAD_CELLS: dict[str, type[Cell]] = {"lstm": pararnn.HeadLSTMCell, "slstm": pararnn.HeadSLSTMCell}
FLASHRNN_STATES = {"lstm": 2, "slstm": 4}
FLASHRNN = ("triton_fused", "cuda_fused", "cuda", "vanilla")
"""flashrnn's backends; those with cuda in their name need nvcc, and minutes a size."""


def head_cell(function: str, case: Case, device: str) -> Cell:
    return HEAD_CELLS[function](case.width, num_heads=case.heads, **options_of(case, device))


def of_heads(case: Case, device: str, function: str) -> Way:
    """Return ours, whose sLSTM begins with an empty normaliser, as flashrnn's does."""
    cell = head_cell(function, case, device)
    if function == "lstm":
        return solving(cell)
    zero = torch.zeros(case.batch, case.width, device=device)
    return solving(cell, (zero, zero, torch.full_like(zero, -torch.inf)))


def flashrnn(case: Case, device: str, function: str, backend: str) -> Way:
    """Return flashrnn's function on our gates and matrices, whose order is its own too."""
    call = importlib.import_module("flashrnn").flashrnn
    head, dtype, note = case.width // case.heads, DTYPES[case.dtype], ""
    if backend == "triton_fused":
        note = importlib.import_module("peer_repairs").repair_flashrnn(head)
    matrices = torch.stack([*head_cell(function, case, device).parameters()]).detach()
    bias = matrices.new_zeros(len(GATES), case.heads, head)
    size = (FLASHRNN_STATES[function], case.batch, 1, case.heads, head)
    initial = torch.zeros(size, device=device, dtype=dtype)
    weights = [matrices.requires_grad_(), bias.requires_grad_()]
    how = {"function": function, "backend": backend, "dtype": case.dtype}

    def states(gates: Tensor) -> Tensor:
        results: Tensor = call(gates, *weights, states=initial, **how)[0]
        return results[0]

    return Way(
        states,
        weights,
        inputs=lambda inputs: [x.unflatten(-1, (case.heads, head)) for x in inputs],
        output=lambda h: h.flatten(2),
        version=version("flashrnn"),
        note=note,
        launches=CALLS if backend == "vanilla" else LAUNCHES,
    )


def head_ways(function: str) -> dict[str, Make]:
    peers: dict[str, Make] = {
        f"flashrnn, {backend}": partial(flashrnn, function=function, backend=backend)
        for backend in FLASHRNN
    }
    return {OURS: partial(of_heads, function=function), **peers}


# Matrix cells


def matrix_cell(name: str, keys: int, case: Case, device: str) -> Cell:
    options = {"num_heads": case.heads, "K": keys, **options_of(case, device)}
    return MATRIX_CELLS[name](case.width, **options)


def of_matrix(case: Case, device: str, name: str, keys: int) -> Way:
    return solving(matrix_cell(name, keys, case, device))


def of_mlstm_kernels(case: Case, device: str) -> Way:
    """Return its kernels for training, without the output gate; heads come before steps."""
    sizes = matrix_cell("mlstm", MLSTM_KEYS, case, device).head_sizes
    assert sizes is not None

    def inputs(gates: Tensors) -> list[Tensor]:
        parts = dict(zip("qkvifo", sizes.split(gates[0]), strict=True))
        return [*mlstm_kernels(parts).inputs]

    like = torch.zeros(1, 1, case.heads, sizes.width, dtype=DTYPES[case.dtype])
    function = mlstm_kernels(dict(zip("qkvifo", sizes.split(like), strict=True))).function
    note = "without output gate: only times are compared"
    return Way(function, [], inputs, None, version("mlstm-kernels"), note)


# DreamerV3


def dreamer_gru(case: Case, device: str) -> pararnn.DreamerGRU:
    options = options_of(case, device)
    return pararnn.DreamerGRU((case.width,), case.width, case.heads, **options)


def of_dreamer_gru(case: Case, device: str) -> Way:
    layer = dreamer_gru(case, device)
    return Way(lambda x: layer([x])[0], weights_of(layer))


@torch.no_grad()
def copy_to_torchrl(ours: pararnn.DreamerGRU, cell: Any) -> None:
    """Give torchrl's cell our weights; its hidden layer reads the block, the input, the state."""

    def put(target: Tensor, value: Tensor) -> None:
        target.copy_(value.reshape(target.shape))

    p: Any = ours.cell
    layer: Any = ours.inputs[0]
    put(cell.input_linear.weight, layer.linear.weight)
    put(cell.input_linear.bias, layer.linear.bias)
    put(cell.input_norm.weight, layer.weight)
    put(cell.hidden_linear.weight, p.W_h[0].flatten(0, 1).mT)
    put(cell.hidden_linear.bias, p.b_h)
    put(cell.hidden_norm.weight, p.w_h)
    of_input = ours.proj.weight.unflatten(0, (ours.num_blocks, -1)).mT
    put(cell.dynamic_linears[0].weight, torch.cat([p.B[0], of_input, p.B_h[0]], 1))
    put(cell.dynamic_linears[0].bias, ours.proj.bias)
    put(cell.dynamic_norms[0].weight, p.w)
    put(cell.gates.weight, torch.cat([getattr(p, f"R_{name}")[0].mT for name in "rcu"], -1))
    put(cell.gates.bias, torch.stack([getattr(p, f"b_{name}")[0] for name in "rcu"], 1))


def torchrl_gru(case: Case, device: str, backend: str) -> Way:
    """Return torchrl's module, whose weights stay in float32."""
    modules = importlib.import_module("torchrl.modules")
    ours = dreamer_gru(case, device)
    sizes = {"projection_size": case.width, "num_blocks": case.heads}
    module = modules.DreamerV3BlockGRU(
        case.width, case.width, **sizes, recurrent_backend=backend, device=device
    )
    copy_to_torchrl(ours, module.cell)
    note = ""
    if backend == "triton":
        note = importlib.import_module("peer_repairs").repair_torchrl()
    return of_layer(module)._replace(version=version("torchrl"), note=note)


@torch.no_grad()
def copy_to_core(ours: pararnn.DreamerGRU, core: Core) -> None:
    """Give the loop's step our weights; its hidden layer reads the block, the state, the input."""
    p: Any = ours.cell
    of_state, of_input = core.layers
    of_input.load_state_dict(ours.inputs[0].state_dict())
    of_state.linear.weight.copy_(p.W_h[0].flatten(0, 1).mT)  # type: ignore[union-attr, operator]
    of_state.linear.bias.copy_(p.b_h[0])  # type: ignore[union-attr, operator]
    of_state.weight.copy_(p.w_h[0])  # type: ignore[operator]
    by_input = ours.proj.weight.unflatten(0, (ours.num_blocks, -1)).mT
    core.hidden.copy_(torch.cat([p.B[0], p.B_h[0], by_input], 1))
    core.bias.copy_(ours.proj.bias)
    core.weight.copy_(p.w.flatten())
    core.gates.copy_(torch.cat([getattr(p, f"R_{name}")[0].mT for name in "rcu"], -1))
    biases = torch.cat([getattr(p, f"b_{name}")[0] for name in "rcu"], -1)
    core.gate_bias.copy_(biases.unsqueeze(1))


def gru_loop(case: Case, device: str) -> Way:
    """Return a loop over a compiled step."""
    loop = LoopGRU(case.width, (case.width,))
    loop.to(device=device, dtype=DTYPES[case.dtype])
    copy_to_core(dreamer_gru(case, device), loop.core)
    loop.core.compile(dynamic=False)
    return of_layer(loop)


def of_rssm(case: Case, device: str) -> Way:
    rssm = pararnn.RSSM(
        *(ACTIONS, case.width, case.width, case.width, CLASSES, CLASSES, case.heads),
        **options_of(case, device),
    )
    return Way(lambda *inputs: rssm(*inputs)[0], weights_of(rssm))


def rssm_loop(case: Case, device: str, compiled: bool) -> Way:
    loop = LoopRSSM(case.width, CLASSES).to(**options_of(case, device))
    if compiled:
        vars(loop)["step"] = torch.compile(loop.step, dynamic=False)
    launches = LAUNCHES if compiled else CALLS
    return Way(loop, weights_of(loop), output=None, note=SAMPLES, launches=launches)


def torchrl_rssm(case: Case, device: str, compiled: bool) -> Way:
    """Return torchrl's rollout of prior and posterior; it samples the prior at each step too."""
    modules = importlib.import_module("torchrl.modules")
    tensordict = importlib.import_module("tensordict")
    wrapped = importlib.import_module("tensordict.nn").TensorDictModule
    options_of(case, device)
    shared: dict[str, Any] = {
        "hidden_dim": case.width,
        "rnn_hidden_dim": case.width,
        "unimix": 0.01,
    }
    shared |= {"num_categoricals": CLASSES, "num_classes": CLASSES, "device": device}
    prior = modules.RSSMPriorV3(
        action_shape=torch.Size([ACTIONS]),
        action_dim=ACTIONS,
        recurrent_model="block_gru",
        num_blocks=case.heads,
        **shared,
    )
    posterior = modules.RSSMPosteriorV3(obs_embed_dim=case.width, use_rms_norm=True, **shared)
    rollout = modules.RSSMRolloutV3(
        wrapped(
            prior,
            in_keys=["state", "belief", "action"],
            out_keys=[("next", "prior_logits"), ("next", "state"), ("next", "belief")],
        ),
        wrapped(
            posterior,
            in_keys=[("next", "belief"), ("next", "encoded_latents")],
            out_keys=[("next", "posterior_logits"), ("next", "state")],
        ),
    )
    if compiled:
        rollout.compile_rollout("step")
    size = (case.batch, case.length)
    state = torch.zeros(*size, CLASSES * CLASSES, device=device)
    belief = torch.zeros(*size, case.width, device=device)
    begins = torch.zeros(*size, 1, dtype=torch.bool, device=device)

    def call(action: Tensor, embedding: Tensor) -> list[Tensor]:
        values = {"state": state, "belief": belief, "action": action, "is_init": begins}
        data = tensordict.TensorDict(
            {**values, "next": tensordict.TensorDict({"encoded_latents": embedding}, size)}, size
        )
        names = ("belief", "state", "posterior_logits", "prior_logits")
        following = rollout(data)["next"]
        return [following[name] for name in names]

    note = f"{SAMPLES}; samples the prior too"
    return Way(call, weights_of(rollout), tuple, None, version("torchrl"), note)


# Attention inside the step


def attention_loop(case: Case, device: str) -> tuple[LoopOfCells, pararnn.ParaRNN, Tensor]:
    """Return the loop, our layer with its weights, and the mask of the memory."""
    options = options_of(case, device)
    loop = LoopOfCells(case.width, KEYS)
    layer = layer_of(loop).to(**options)
    return loop.to(**options), layer, torch.zeros(case.batch, MEMORY, **options)


def of_attention(case: Case, device: str) -> Way:
    _, layer, mask = attention_loop(case, device)

    def call(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        output: Tensor = layer(x, memory={"keys": keys, "values": values, "mask": mask})[0]
        return output

    return Way(call, [p for name, p in layer.named_parameters() if name[-1] != "P"])


def cells_of_torch(case: Case, device: str, launches: Sequence[str]) -> Way:
    loop, _, mask = attention_loop(case, device)

    def call(x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        output: Tensor = loop(x, {"keys": keys, "values": values, "mask": mask})
        return output

    return Way(call, weights_of(loop), launches=launches)


# Elementwise cells next to spikingjelly's FlexSN


def lif_step(x: Tensor, s: Tensor, u: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    """Return the step of `LIFCell` with its default config: the output, then the states."""
    u = 0.9 * u + i - s
    spikes: Tensor = Spike.apply(u - 1, 10.0)
    return spikes, spikes, u, 0.8 * i + x


def gru_step(
    z: Tensor, r: Tensor, c: Tensor, h: Tensor, a_z: Tensor, a_r: Tensor, a_c: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the step of `GRUCell`: the output, then the state."""
    z, r = torch.sigmoid(z + a_z * h), torch.sigmoid(r + a_r * h)
    h = (1 - z) * h + z * torch.tanh(c + a_c * (r * h))
    return h, h


def flexsn(case: Case, device: str, step: Callable[..., Any], states: int, cell: Any) -> Way:
    """Return FlexSN of a step, time first; it takes weights of each row, (B, D)."""
    neuron = importlib.import_module("spikingjelly.activation_based.neuron").FlexSN
    weights = cell(case, device).parameters()
    static = [nn.Parameter(p.detach().expand(case.batch, -1).contiguous()) for p in weights]
    module = neuron(step, states, static_inputs=tuple(static)).to(device)

    def call(*inputs: Tensor) -> Tensor:
        module.reset()
        return first(module(*inputs))

    def inputs(gates: Tensors) -> list[Tensor]:
        return [x.transpose(0, 1).contiguous() for x in gates[0].unbind(2)]

    notes = ["weights of each row"] if static else []
    if device == "cuda":
        notes.append(importlib.import_module("peer_repairs").repair_spikingjelly())
    release = version("spikingjelly")
    return Way(call, static, inputs, lambda y: y.transpose(0, 1), release, "; ".join(notes))


# Tables


def gates_of(make: Callable[[Case, str], Cell]) -> Sizes:
    """Return what sizes a cell's gates: (B, T, G, D), or (B, T, H, numbers of a head)."""

    def sizes(case: Case) -> list[tuple[int, ...]]:
        cell = make(case, "cpu")
        row = (len(cell.gates), case.width)
        if cell.head_sizes is not None:
            row = (case.heads, cell.head_sizes.width)
        return [(case.batch, case.length, *row)]

    return sizes


def series(*channels: Callable[[Case], int]) -> Sizes:
    """Return what sizes inputs (B, T, channels)."""
    return lambda case: [(case.batch, case.length, count(case)) for count in channels]


def width(case: Case) -> int:
    return case.width


def sizes_with_memory(case: Case) -> list[tuple[int, ...]]:
    memory = [(case.batch, MEMORY, KEYS), (case.batch, MEMORY, case.width)]
    return [(case.batch, case.length, case.width), *memory]


def norm_cell(case: Case, device: str) -> Cell:
    return HeadNormLSTM(case.width, num_heads=case.heads, **options_of(case, device))


def heads(function: str) -> Kind:
    return Kind(gates_of(partial(head_cell, function)), width, head_ways(function))


def by_flexsn(cell_class: type[Cell], step: Callable[..., Any], states: int) -> Kind:
    def cell(case: Case, device: str) -> Cell:
        return cell_class(case.width, **options_of(case, device))

    peer = partial(flexsn, step=step, states=states, cell=cell)
    ours = {OURS: lambda case, device: solving(cell(case, device))}
    return Kind(gates_of(cell), width, {**ours, "spikingjelly, FlexSN": peer})


def matrix(name: str, keys: int, **peers: Make) -> Kind:
    ways = {OURS: partial(of_matrix, name=name, keys=keys)}
    return Kind(gates_of(partial(matrix_cell, name, keys)), width, {**ways, **peers})


KINDS: dict[str, Kind] = {
    "projected-lstm": Kind(
        series(lambda case: INPUT),
        lambda case: PROJECTION,
        {OURS: ours_of(projected_lstm), **cudnn_ways(projected=True)},
    ),
    "norm-lstm": Kind(
        series(width),
        width,
        {
            OURS: ours_of(norm_lstm),
            "pararnn, no norms": without_norms(ours_of(head_lstm)),
            **cudnn_ways(projected=False),
        },
    ),
    "norm-lstm-cell": Kind(
        gates_of(norm_cell),
        width,
        {
            OURS: lambda case, device: solving(norm_cell(case, device)),
            "pararnn, no norms": without_norms(by_gate),
        },
    ),
    "lstm": heads("lstm"),
    "slstm": heads("slstm"),
    "m2rnn": matrix("m2rnn", M2RNN_KEYS),
    "mlstm": matrix("mlstm", MLSTM_KEYS, **{"mlstm-kernels": of_mlstm_kernels}),
    "dreamer-gru": Kind(
        series(width),
        width,
        {
            OURS: of_dreamer_gru,
            "torchrl, triton": partial(torchrl_gru, backend="triton"),
            "torchrl, scan": partial(torchrl_gru, backend="scan"),
            "loop, compiled step": gru_loop,
        },
    ),
    "rssm": Kind(
        series(lambda case: ACTIONS, width),
        lambda case: case.width + 3 * CLASSES**2,
        {
            OURS: of_rssm,
            "torchrl": partial(torchrl_rssm, compiled=False),
            "torchrl, compiled step": partial(torchrl_rssm, compiled=True),
            "loop": partial(rssm_loop, compiled=False),
            "loop, compiled step": partial(rssm_loop, compiled=True),
        },
    ),
    "attention-lstm": Kind(
        sizes_with_memory,
        width,
        {
            OURS: of_attention,
            "loop of nn.LSTMCell": partial(cells_of_torch, launches=CALLS),
            "loop of nn.LSTMCell, CUDA graph": partial(cells_of_torch, launches=GRAPHS),
        },
    ),
    "lif": by_flexsn(LIFCell, lif_step, 3),
    "gru": by_flexsn(pararnn.GRUCell, gru_step, 1),
}
CASES = (
    Case("lstm 1024 to 256", "projected-lstm", HIDDEN),
    Case("norm-lstm 12 x 64", "norm-lstm", 768, 12),
    Case("norm-lstm-cell 12 x 64", "norm-lstm-cell", 768, 12),
    *(Case(f"lstm {768 // k} x {k}", "lstm", 768, 768 // k) for k in (16, 32, 64)),
    *(Case(f"m2rnn 12 x 64 x 16, T = {t}", "m2rnn", 12 * 16, 12, t) for t in (1024, 2048)),
    *(Case(f"slstm 4 x {k}", "slstm", 4 * k, 4) for k in (64, 128)),
    Case("dreamer-gru 512", "dreamer-gru", 512, 8, 512, dtype="float32"),
    Case("dreamer-gru 512, bfloat16", "dreamer-gru", 512, 8, 512),
    Case("rssm 512", "rssm", 512, 8, 64, dtype="float32"),
    Case("rssm 512, bfloat16", "rssm", 512, 8, 64),
    Case("attention-lstm 256", "attention-lstm", 256, length=256),
    Case("lif 4096", "lif", 4096),
    Case("lif 4096, float32", "lif", 4096, dtype="float32"),
    Case("gru 4096", "gru", 4096),
    Case("mlstm 12 x 64 x 64", "mlstm", 768, 12),
)


def make_way(case: Case, name: str, device: str) -> Way:
    """Return what runs a case. Raises ImportError for a peer that is not installed."""
    return KINDS[case.kind].ways[name](case, device)


def draw(case: Case, device: str) -> list[Tensor]:
    sizes = KINDS[case.kind].sizes(case)
    return [torch.randn(size, device=device).to(DTYPES[case.dtype]) for size in sizes]


def numbers_of(case: Case) -> tuple[int, int]:
    """Return the numbers of a case's inputs, and those of its outputs."""
    kind = KINDS[case.kind]
    inputs = sum(torch.Size(size).numel() for size in kind.sizes(case))
    return inputs, case.batch * case.length * kind.channels(case)
