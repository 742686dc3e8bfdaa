"""Ways to run the recurrences of chunks_gpu.py: by our pairs, and by other libraries' chunks.

Others take the same gates where they compute the same recurrence. What turns a gate into a rate or
a decay is computed before and not timed, but for norms of keys and queries where a kernel has them.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from gpu import compile_pass, launched_times, passes_on, sets_of
from isolated import reason_of
from protocol import LAUNCHES, Call, Row
from torch import Tensor
from triton_tuning import Tuning

import pararnn
from pararnn.cells import Cell
from pararnn.zoo import MATRIX_CELLS
from pararnn.zoo.unit import unit

DTYPE = torch.bfloat16
PAIRS = {"chunks": ("chunks", "fused"), "loop": ("sequential", "fused")}
"""Our ways."""
PACKAGES = {
    "fla": "fla-core",
    "fla, TileLang": "fla-core",
    "flash-qla": "flash-qla",
    "mlstm-kernels": "mlstm-kernels",
    "mamba-ssm": "mamba-ssm",
}
"""Packages by other ways."""
WITH_TILELANG = ("fla, TileLang", "flash-qla")
TUNED = ("fla", "mamba_ssm", "mlstm_kernels")
"""Modules whose kernels have tuners."""
THREADS = 6
"""That compile what a tuner may take."""

Parts = Mapping[str, Tensor]


class ProductOfDecaysCell(Cell):
    """Two corrections a step, of a memory with a decay for each key: a rule that no library has.

    The delta product of two factors with the decays of Kimi delta attention.
    """

    states = {"S": ("K", "V")}
    gates = {"q": "K", "k": "K", "v": "V", "l": "K", "w": "V", "d": "K", "b": "", "c": ""}
    config = {"eps": 1e-6}

    def step(self, state: Any, gate: Any, param: Any) -> Tensor:
        new: Tensor = torch.exp(-F.softplus(gate.d))[..., :, None] * state.S
        for k, v, b in ((gate.k, gate.v, gate.b), (gate.l, gate.w, gate.c)):
            key = unit(k, self.eps)[..., :, None]
            error = v[..., None, :] - (key * new).sum(-2, keepdim=True)
            new = new + torch.sigmoid(b)[..., None, None] * key * error
        return new

    def readout(self, state: Any, gate: Any, param: Any) -> Tensor:
        return (unit(gate.q, self.eps)[..., :, None] * state.S).sum(-2)


CELLS: dict[str, type[Cell]] = {**MATRIX_CELLS, "product-of-decays": ProductOfDecaysCell}


class Case(NamedTuple):
    """A recurrence and its size; K = V = size. peers: other ways than ours."""

    name: str
    cell: str
    peers: tuple[str, ...] = ()
    batch: int = 16
    length: int = 1024
    heads: int = 12
    size: int = 64

    @property
    def ways(self) -> tuple[str, ...]:
        return (*PAIRS, *self.peers)


CASES = (
    Case("gated-delta 64", "gated-delta", ("fla", "fla, TileLang")),
    Case("gated-delta 128", "gated-delta", ("fla", "flash-qla"), 1, 8192, 32, 128),
    Case("kda", "kda", ("fla",)),
    Case("rwkv7", "rwkv7", ("fla",)),
    Case("mlstm", "mlstm", ("mlstm-kernels", "fla")),
    Case("mamba2", "mamba2", ("mamba-ssm", "fla")),
    Case("gated-delta-product", "gated-delta-product", ("fla", "fla, TileLang")),
    Case("titans", "titans", ("fla",)),
    Case("comba", "comba", ("fla",)),
    Case("product-of-decays", "product-of-decays"),
)


class Peer(NamedTuple):
    """A function, its inputs, and what makes its result our cell's output (None: nothing does).

    weights: what it learns besides, of ours.
    """

    function: Callable[..., Any]
    inputs: Sequence[Tensor]
    output: Callable[[Tensor], Tensor] | None = lambda result: result
    weights: Sequence[Tensor] = ()


def fla_gated_delta(parts: Parts) -> Peer:
    function = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    q, k, v, a, b = (parts[name] for name in "qkvab")
    options = {"scale": 1.0, "use_qk_l2norm_in_kernel": True}
    inputs = [q, k, v, F.logsigmoid(a.float()), torch.sigmoid(b)]
    return Peer(partial(function, **options), inputs)


def flash_qla(parts: Parts) -> Peer:
    """Return its function, which has no norms: keys and queries are of length 1 before."""
    function = import_module("flash_qla").chunk_gated_delta_rule
    q, k, v, a, b = (parts[name] for name in "qkvab")
    q, k = (F.normalize(x.float(), dim=-1).to(DTYPE) for x in (q, k))
    inputs = [q, k, v, F.logsigmoid(a.float()), torch.sigmoid(b)]
    return Peer(partial(function, scale=1.0), inputs)


def fla_kda(parts: Parts) -> Peer:
    function = import_module("fla.ops.kda").chunk_kda
    q, k, v, a, b = (parts[name] for name in "qkvab")
    options = {"scale": 1.0, "use_qk_l2norm_in_kernel": True}
    return Peer(partial(function, **options), [q, k, v, F.logsigmoid(a.float()), torch.sigmoid(b)])


def fla_rwkv7(parts: Parts) -> Peer:
    function = import_module("fla.ops.rwkv7").chunk_rwkv7
    r, w, k, v, c, a = (parts[name] for name in "rwkvca")
    c = F.normalize(c.float(), dim=-1).to(DTYPE)
    decay = -math.exp(-0.5) * torch.sigmoid(w.float())
    return Peer(partial(function, scale=1.0), [r, decay, k, v, -c, torch.sigmoid(a) * c])


def mlstm_kernels(parts: Parts) -> Peer:
    """Return its kernels for training, without the output gate; heads come before steps."""
    function = import_module("mlstm_kernels.torch").get_mlstm_kernel("chunkwise--triton_xl_chunk")
    inputs = [parts[name].transpose(1, 2).contiguous() for name in "qkvif"]
    options = {"autocast_kernel_dtype": DTYPE}
    gate = torch.sigmoid(parts["o"])
    return Peer(partial(function, **options), inputs, lambda h: gate * h.transpose(1, 2))


def fla_mlstm(parts: Parts) -> Peer:
    """Return a memory without normaliser, stabiliser and output gate."""
    function = import_module("fla.ops.simple_gla").chunk_simple_gla
    q, k, v, i, f = (parts[name] for name in "qkvif")
    inputs = [q, torch.exp(i).unsqueeze(-1) * k, v, F.logsigmoid(f.float())]
    return Peer(partial(function, scale=k.shape[-1] ** -0.5), inputs, None)


def mamba_ssm(parts: Parts) -> Peer:
    """Return its scan with as many groups as heads: each has keys and queries of its own."""
    function = import_module("mamba2").kernels("ssd_combined").mamba_chunk_scan_combined
    q, k, v, dt = (parts[name] for name in ("C", "B", "x", "dt"))
    rates = -torch.rand(k.shape[2], device=k.device) - 0.5

    def run(x: Tensor, dt: Tensor, rates: Tensor, b: Tensor, c: Tensor) -> Any:
        return function(x, dt, rates, b, c, chunk_size=256, dt_softplus=True)

    return Peer(run, [v, dt, rates, k, q], None)


def fla_mamba2(parts: Parts) -> Peer:
    function = import_module("fla.ops.simple_gla").chunk_simple_gla
    q, k, v, dt = (parts[name] for name in ("C", "B", "x", "dt"))
    size = F.softplus(dt.float())
    inputs = [q, size.to(DTYPE).unsqueeze(-1) * k, v, -size]
    return Peer(partial(function, scale=1.0), inputs, None)


def fla_product(parts: Parts) -> Peer:
    function = import_module("fla.ops.gated_delta_product").chunk_gated_delta_product
    k, v, b = (torch.stack([parts[x], parts[f"{x}2"]], 2).flatten(1, 2) for x in "kvb")
    options = {"num_householder": 2, "scale": 1.0, "use_qk_l2norm_in_kernel": True}
    inputs = [parts["q"], k, v, F.logsigmoid(parts["a"].float()), 2 * torch.sigmoid(b)]
    return Peer(partial(function, **options), inputs)


def fla_titans(parts: Parts) -> Peer:
    function = import_module("fla.ops.momentum_delta_rule").chunk_momentum_delta_rule
    q, k, v, a, e, t = (parts[name] for name in "qkvaet")
    keep, momentum = F.logsigmoid(-a.float()), F.logsigmoid(e.float())

    def run(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, momentum: Tensor, rate: Tensor) -> Any:
        return function(*(q, k, v, keep, momentum), eta=rate, scale=1.0, use_p_times_alpha=False)

    return Peer(run, [q, k, v, keep, momentum, torch.sigmoid(t)])


def fla_comba(parts: Parts) -> Peer:
    """Return Comba's rule: what a key held is read by another vector, here the same numbers."""
    function = import_module("fla.ops.comba").chunk_comba
    q, k, v, a, b = (parts[name] for name in "qkvab")
    options = {"scale": 1.0, "use_qk_l2norm_in_kernel": True}

    def run(q: Tensor, k: Tensor, p: Tensor, v: Tensor, decay: Tensor, rate: Tensor) -> Any:
        return function(q=q, k=k, p=p, v=v, g=decay, beta=rate, **options)

    return Peer(run, [q, k, k.clone(), v, F.logsigmoid(a.float()), torch.sigmoid(b)], None)


PEERS: Mapping[tuple[str, str], Callable[[Parts], Peer]] = {
    ("gated-delta", "fla"): fla_gated_delta,
    ("gated-delta", "flash-qla"): flash_qla,
    ("kda", "fla"): fla_kda,
    ("rwkv7", "fla"): fla_rwkv7,
    ("mlstm", "mlstm-kernels"): mlstm_kernels,
    ("mlstm", "fla"): fla_mlstm,
    ("mamba2", "mamba-ssm"): mamba_ssm,
    ("mamba2", "fla"): fla_mamba2,
    ("gated-delta-product", "fla"): fla_product,
    ("titans", "fla"): fla_titans,
    ("comba", "fla"): fla_comba,
}
"""By cell and way: what makes a peer of the cell's gates."""
CHECKED = "fla.ops.common.chunk_o"
"""Module that refuses a backward pass on Hopper before Triton 3.7.1."""
LIFTED = "gradients may be wrong: fla's check for Triton < 3.7.1 on Hopper is off, for timing only"
DIFFERENT = {
    ("gated-delta", "flash-qla"): "without norms of keys and queries",
    ("mlstm", "fla"): "without normaliser, stabiliser and output gate",
    ("mlstm", "mlstm-kernels"): "without output gate",
    ("titans", "fla"): "batched products of PyTorch, no kernel",
}
"""By cell and way: what a row must say."""


class Settings(NamedTuple):
    """Facts that all ways share: device, ms for a timing, bytes of L2, the folder of TileLang."""

    device: str
    budget: float
    cache: int
    tilelang: str | None


class Lifted:
    """A true answer to a check of a version, which knows whether it was asked for."""

    was_asked = False

    def __bool__(self) -> bool:
        self.was_asked = True
        return True


def make_cell(case: Case, device: str) -> Cell:
    torch.manual_seed(0)
    sizes = {"num_heads": case.heads, "K": case.size}
    return CELLS[case.cell](case.heads * case.size, device=device, dtype=DTYPE, **sizes)


def split(cell: Cell, gates: Tensor) -> dict[str, Tensor]:
    assert cell.head_sizes is not None
    parts = cell.head_sizes.split(gates)
    return {name: part.contiguous() for name, part in zip(cell.gates, parts, strict=True)}


def new_gates(case: Case, cell: Cell, device: str) -> Tensor:
    assert cell.head_sizes is not None
    size = (case.batch, case.length, case.heads, cell.head_sizes.width)
    return torch.randn(size, device=device).to(DTYPE)


def by_pair(cell: Cell, pair: tuple[str, str], gates: Tensor) -> Peer:
    """Return one of our ways."""
    function = partial(pararnn.solve, cell, solver=pair[0], backend=pair[1])
    return Peer(function, [gates], weights=[*cell.parameters()])


def peer_of(case: Case, way: str) -> Callable[[Parts], Peer]:
    return PEERS.get((case.cell, way)) or PEERS[case.cell, way.partition(",")[0]]


def new_peer(case: Case, way: str, device: str) -> Peer:
    cell = make_cell(case, device)
    gates = new_gates(case, cell, device)
    if way in PAIRS:
        return by_pair(cell, PAIRS[way], gates)
    return peer_of(case, way)(split(cell, gates))


def result_of(function: Callable[..., Any], *inputs: Tensor) -> Tensor:
    """Return the outputs (B, T, H, V) of a way, without final states."""
    result = function(*inputs)
    return result if isinstance(result, Tensor) else result[0]


def passes_of(case: Case, way: str, device: str, cache: int) -> dict[str, list[Call]]:
    """Return the calls of both passes, on inputs that exceed the cache."""
    peer = new_peer(case, way, device)
    sets = sets_of(lambda: new_peer(case, way, device).inputs, cache)
    return passes_on(sets, partial(result_of, peer.function), peer.weights)


def difference_of(case: Case, way: str, device: str) -> Row:
    """Return the distance of a peer's output to our loop's over its norm; nothing where it is
    another recurrence."""
    cell = make_cell(case, device)
    gates = new_gates(case, cell, device)
    peer = peer_of(case, way)(split(cell, gates))
    if peer.output is None:
        return {}
    with torch.no_grad():
        reference = result_of(by_pair(cell, PAIRS["loop"], gates).function, gates).float()
        error = peer.output(result_of(peer.function, *peer.inputs)).float() - reference
    return {"difference": f"{float(error.norm() / reference.norm()):.2g}"}


_state: dict[str, Any] = {}
"""The tuning of this process, which runs one way, and the check that it lifts."""


def enter(way: str, settings: Settings) -> None:
    """Set up a process for a way, before it imports others."""
    tilelang = way in WITH_TILELANG
    os.environ |= {"FLA_CACHE_RESULTS": "0", "FLA_FLASH_QLA": "0", "FLA_TILELANG": str(+tilelang)}
    if tilelang:
        if settings.tilelang is None:
            raise LookupError("TileLang is not there: see --tilelang")
        sys.path.append(settings.tilelang)
    _state["tuning"] = Tuning(TUNED, THREADS)
    if PACKAGES.get(way) == "fla-core":
        _state["lifted"] = Lifted()
        vars(import_module(CHECKED))["TRITON_ABOVE_3_7_1"] = _state["lifted"]


def prepare(case: Case, way: str, settings: Settings) -> Iterator[Row]:
    """Compile a way's kernels by a run of both passes, and give memory back; yield its version.

    What fails is a note: `measure` tries again.
    """
    enter(way, settings)
    if way in PACKAGES:
        yield {"version": importlib.metadata.version(PACKAGES[way])}
    for name, (call,) in passes_of(case, way, settings.device, cache=0).items():
        yield from attempt(name, partial(compile_pass, call))
    _state["tuning"].wait()
    if settings.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def measure(case: Case, way: str, settings: Settings) -> Iterator[Row]:
    """Yield the times of both passes by calls, then as graphs, in place of those by calls; and how
    far a peer is from our loop."""
    if not _state:
        enter(way, settings)
    _state["tuning"].begin()
    passes = passes_of(case, way, settings.device, settings.cache)
    for launch in LAUNCHES if settings.device == "cuda" else LAUNCHES[:1]:
        for name, calls in passes.items():
            times = partial(times_of, name, calls, launch, settings)
            yield from attempt(f"{name} by {launch}", times)
    if "lifted" in _state and _state["lifted"].was_asked:
        yield {"note": LIFTED}
    if way in PACKAGES:
        yield from attempt("difference", lambda: difference_of(case, way, settings.device))


def attempt(what: str, call: Callable[[], Row]) -> Iterator[Row]:
    """Yield what a call returns, or a note with the error's text."""
    try:
        yield call()
    except Exception as error:
        yield {"note": f"{what}: {reason_of(error)}"}


def times_of(name: str, calls: Sequence[Call], launch: str, settings: Settings) -> Row:
    """Return the median and the minimum ms of a pass, and the runs."""
    times = launched_times(calls, launch, settings.device, settings.budget)
    by_name = {"ms": times.pop("median_ms"), **times, "launch": launch}
    return {f"{name}_{what}": value for what, value in by_name.items()}
