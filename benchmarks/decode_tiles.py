"""Time of a decoding step's products by candidates for their tiles (`pararnn.lm.fused_step.Tile`).

Shapes are those of the 1B GRU. A chain of launches over as many matrices as exceed the cache is
recorded as a CUDA graph, as a step is; us and GB/s are of one launch. "torch" is PyTorch's product
of 16-bit matrices, without what the kernels compute around it. Then whole steps, by the tiles as
they are and by the best of the candidates. All kernels are compiled beforehand, by processes.

    python benchmarks/decode_tiles.py [--rows 1 64] [--weights bfloat16 int8 fp8] [--kinds pair]
        [--candidates 12] [--processes 14] [--seconds 90] [--no-steps]
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from protocol import captured_graph
from torch import Tensor
from torch.nn import functional as F

from pararnn.lm import LanguageModel, LMConfig, fused_step
from pararnn.lm.cache import LMCache
from pararnn.lm.fused_step import NormInput, Step, Tile
from pararnn.lm.mixers import RNNMixer
from pararnn.lm.quantise import DTYPES, Weight

WIDTH, HIDDEN, WORDS, TAPS = 2048, 5632, 50_432, 4
KINDS = {
    "pair": (WIDTH, WIDTH, 2),
    "out": (WIDTH, WIDTH, 1),
    "swiglu": (HIDDEN, WIDTH, 2),
    "down": (WIDTH, HIDDEN, 1),
    "head": (WORDS, WIDTH, 1),
}
"""Lines, columns and matrices of a product, by its name."""
EPILOGUES = {"out": "add", "down": "add", "head": "plain"}
CELL = "cell"
PER_CHAIN = 250_000_000
"""Bytes of a chain's matrices."""
FORMATS = {"bfloat16": torch.bfloat16, **DTYPES}


class Case(NamedTuple):
    """A product: its name, the weights' format, and rows."""

    kind: str
    weights: str
    rows: int

    @property
    def item(self) -> int:
        return FORMATS[self.weights].itemsize


def candidates(case: Case, most: int) -> list[Tile]:
    """Return tiles of a product, the default first."""
    lines, length, _ = KINDS.get(case.kind, (WIDTH, WIDTH // 4, 3))
    all_lines = lines * (2 if case.kind == "pair" else 1)
    at_once = 2 if case.kind == "swiglu" else (3 if case.kind == CELL else 1)
    tiles: list[Tile] = []
    if case.rows == 1:
        base = 512 // case.item
        for per_tile, warps, depth in itertools.product(
            (16, 8, 4, 2), (4, 8, 2, 1), (base, min(length, 2048))
        ):
            size = per_tile * length * case.item * at_once / (32 * warps)  # bytes of a thread
            programs = all_lines / per_tile
            if not 100 <= size <= 800 or programs < 128 or (depth == 2048 and length % 2048):
                continue
            block = per_tile * depth * case.item * at_once / (32 * warps)
            blocks = -(-length // depth)
            under_way = [max(1, min(blocks, int(ahead // block))) for ahead in (384, 192)]
            tiles += [Tile(per_tile, depth, count, 1, warps) for count in dict.fromkeys(under_way)]
    elif case.rows <= fused_step.LANE_ROWS:
        base_tile = default(case)
        squares = case.kind in ("out", "down", CELL)  # whose tiles decide a row's bits
        fewer = (base_tile.lines,) if squares else (16, 8, 4)
        for per_tile, stages, warps, registers in itertools.product(
            fewer, (1, 2, 4), (2, 4, 8), (None, 128, 168)
        ):
            if per_tile >= warps and stages <= -(-length // base_tile.depth):
                tiles.append(Tile(per_tile, base_tile.depth, stages, 1, warps, registers))
    elif case.kind == CELL:
        sizes = itertools.product((16, 32, 64), (64, 128), (4, 8))
        tiles = [Tile(per_tile, depth, 3, 1, warps) for per_tile, depth, warps in sizes]
    else:
        for split, per_tile, depth, warps, stages, registers in itertools.product(
            (1, 2, 4, 8), (32, 64, 128), (64, 128), (4, 8), (4, 6), (None, 128)
        ):
            programs = all_lines / per_tile * split
            tile = Tile(per_tile, depth, stages, split, warps, registers)
            shared = fused_step.shared_bytes(tile, at_once, case.rows, case.item)
            sums = per_tile * at_once * max(16, case.rows) / (32 * warps)
            even = length % (depth * split) == 0 and length // (depth * split) >= 3
            fits = shared <= fused_step.HOPPER_BYTES
            if 100 <= programs <= 540 and fits and even and sums <= 64:
                tiles.append(tile)
    first = default(case)
    random.Random(0).shuffle(tiles)
    return list(dict.fromkeys([first, *tiles]))[:most]


def default(case: Case) -> Tile:
    """Return the tile that the library takes."""
    if case.kind == CELL:
        return fused_step.cell_tile(WIDTH // 4, WIDTH, 3, case.rows, 2)
    lines, length, _ = KINDS[case.kind]
    pairs = 2 if case.kind == "pair" else 1
    return fused_step.product_tile(
        lines * pairs,
        length,
        2 if case.kind == "swiglu" else 1,
        case.rows,
        FORMATS[case.weights],
        case.kind in ("out", "down"),
    )


def matrix(case: Case) -> Weight:
    lines, length, _ = KINDS[case.kind]
    values = torch.randn(lines, length, device="cuda", dtype=torch.bfloat16) / length**0.5
    if case.weights == "bfloat16":
        return Weight(values)
    scale = torch.full((lines, 1), 0.02, device="cuda")
    if case.weights == "int8":
        return Weight(values.mul_(1000).round_().clamp_(-127, 127).to(torch.int8), scale)
    return Weight(values.mul_(50).to(torch.float8_e4m3fn), scale)


def mixers(count: int) -> list[RNNMixer]:
    """Return the mixers of a GRU of the 1B model's width."""
    config = LMConfig(WIDTH, count, 64, cell="gru", num_heads=4, intermediate_size=64)
    model = LanguageModel(config, device="cuda", dtype=torch.bfloat16).eval()
    return [cast(RNNMixer, block.mixer) for block in model.backbone.blocks]


def step_facts(rows: int) -> Step:
    counters = torch.zeros(1 << 12, dtype=torch.int32, device="cuda")
    return Step(rows, 1, 1e-5, 1.0, counters, {"PDL": True, "launch_pdl": True})


class Chain:
    """Launches of one kind of kernel over several matrices."""

    def __init__(self, case: Case, links: int | None = None) -> None:
        self.case = case
        lines, length, matrices = KINDS.get(case.kind, (WIDTH, WIDTH // 4, 3))
        item = 2 if case.kind == CELL else case.item
        self.bytes = lines * length * matrices * item
        self.links = links or max(2, min(32, -(-PER_CHAIN // self.bytes)))
        self.step = step_facts(case.rows)
        rows = self.step.tile_rows()
        new = lambda width: torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)  # noqa: E731
        squares = torch.ones(256 if rows <= fused_step.LANE_ROWS else 32, rows, device="cuda")
        self.x = NormInput(new(length), None if case.kind == "down" else squares)
        self.outs = [new(lines), new(lines)]
        self.gain = torch.ones(lines, device="cuda", dtype=torch.bfloat16)
        if case.kind == CELL:
            self.mixers = mixers(self.links)
            self.states = torch.zeros(case.rows, 1, WIDTH, device="cuda")
            self.x = NormInput(new(WIDTH))
            return
        self.weights = [[matrix(case) for _ in range(matrices)] for _ in range(self.links)]
        inputs = torch.zeros(case.rows, TAPS - 1, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.inputs = inputs.transpose(1, 2)
        taps = torch.ones(TAPS, WIDTH, device="cuda", dtype=torch.bfloat16)
        self.mixer: Any = SimpleNamespace(conv=SimpleNamespace(weight=taps, bias=taps[0]))

    def run(self) -> None:
        """Launch the kernels by the library's tiles."""
        kind = self.case.kind
        for link in range(self.links):
            if kind == CELL:
                fused_step._recurrence(
                    self.step,
                    self.mixers[link],
                    self.x.rows,
                    self.outs[0],
                    self.states,
                    self.states,
                )
                continue
            options: dict[str, Any] = {}
            outs = self.outs[:1]
            if kind == "pair":
                options, outs = {"inputs": (self.inputs,) * 2, "mixer": self.mixer}, self.outs
            if kind in ("out", "down"):
                options, outs = {"residual": self.outs[0], "gain": self.gain}, self.outs
            if kind == "out":
                options["factor"] = self.gain
            if kind == "head":
                outs = [self.outs[0][: self.case.rows]]
            epilogue = EPILOGUES.get(kind, kind)
            fused_step._product(self.step, epilogue, self.x, self.weights[link], outs, **options)

    def torch(self) -> None:
        x = self.x.rows[: self.case.rows]
        for matrices in self.weights:
            for weight in matrices:
                F.linear(x, weight.numbers)


def with_tile(case: Case, tile: Tile, call: Callable[[], Any]) -> Any:
    """Call a function while the library takes a tile."""
    name = "cell_tile" if case.kind == CELL else "product_tile"
    before = getattr(fused_step, name)
    setattr(fused_step, name, lambda *_: tile)
    try:
        return call()
    finally:
        setattr(fused_step, name, before)


def compile_all(jobs: list[tuple[Case, Tile]]) -> None:
    """Compile kernels into Triton's cache on disk, by launching each once."""
    chains: dict[Case, Chain] = {}
    for case, tile in jobs:
        try:
            if case not in chains:
                chains[case] = Chain(case, 1)
            with_tile(case, tile, chains[case].run)
            torch.cuda.synchronize()
        except Exception as error:  # a candidate that does not fit is reported where it is timed
            print("compiling", case, tile, repr(error)[:200], flush=True)


def microseconds(call: Callable[[], Any], links: int) -> float:
    """Return the time of a link by a CUDA graph, the least of some rounds."""
    graph = captured_graph([call])
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(5):
        begin.record()
        for _ in range(6):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 6 * 1e3 / links)
    return min(times)


def sweep(args: argparse.Namespace) -> dict[Case, Tile]:
    """Print a table of all candidates; return the best."""
    cases = [
        Case(kind, weights, rows)
        for rows, weights, kind in itertools.product(args.rows, args.weights, [*KINDS, CELL])
        if (not args.kinds or kind in args.kinds) and (kind != CELL or weights == "bfloat16")
    ]
    jobs = [(case, tile) for case in cases for tile in candidates(case, args.candidates)]
    begun = time.perf_counter()
    # Neighbours share a case, whose memory a process makes once.
    size = -(-len(jobs) // args.processes)
    shares = [jobs[start : start + size] for start in range(0, len(jobs), size)]
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=compile_all, args=(share,)) for share in shares]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(1.0, args.seconds - (time.perf_counter() - begun)))
    for worker in workers:
        if worker.is_alive():
            worker.terminate()
    print(f"compiled {len(jobs)} in {time.perf_counter() - begun:.0f} s", flush=True)
    best = {case: time_case(case, args) for case in cases}
    return {case: tile for case, tile in best.items() if tile is not None}


def time_case(case: Case, args: argparse.Namespace) -> Tile | None:
    """Print the times of a case's candidates; return the best."""
    chain = Chain(case)
    times: dict[Tile, float] = {}
    begun = time.perf_counter()
    for tile in candidates(case, args.candidates):
        if time.perf_counter() - begun > args.seconds / 4:  # what no process has compiled
            print("left out", case, tile)
            continue
        try:
            times[tile] = microseconds(partial(with_tile, case, tile, chain.run), chain.links)
        except Exception as error:  # the next may fit
            print("failed", case, tile, repr(error)[:200])

    def show(name: str, us: float) -> None:
        print(*case, name, f"{us:.2f} us", f"{chain.bytes / us / 1e3:.0f} GB/s", sep="\t")

    if case.weights == "bfloat16" and case.kind != CELL:
        show("torch", microseconds(chain.torch, chain.links))
    ranked = sorted(times, key=lambda tile: times[tile])
    for tile in ranked:
        show(f"{tuple(tile)}{' default' if tile == default(case) else ''}", times[tile])
    print(flush=True)
    return ranked[0] if ranked else None


def step_once(model: LanguageModel, token: Tensor, cache: LMCache) -> None:
    token.copy_(fused_step.step_logits(model, token, cache).argmax(-1))


def tile_of(table: dict[Any, Tile], default: Callable[..., Tile], *key: int) -> Tile:
    return table.get(key[:5]) or default(*key)


def cell_of(table: dict[int, Tile], default: Callable[..., Tile], *key: int) -> Tile:
    return table.get(key[3]) or default(*key)


def steps(args: argparse.Namespace, best: dict[Case, Tile]) -> None:
    """Print the time of whole steps of the 1B GRU."""
    from lm_decode import Case as DecodeCase
    from lm_decode import cache_of
    from lm_verify import model_of

    defaults = fused_step.product_tile, fused_step.cell_tile
    cells = {case.rows: tile for case, tile in best.items() if case.kind == CELL}
    for weights in args.weights:
        table = {
            (
                lines * (2 if kind == "pair" else 1),
                length,
                2 if kind == "swiglu" else 1,
                rows,
                item,
            ): (best[Case(kind, name, rows)])
            for kind, name, rows in best
            if kind != CELL
            for lines, length, _ in [KINDS[kind]]
            for item in [FORMATS[name]]
        }
        model = model_of(weights)
        for rows in args.rows:
            for way in ("default", "best"):
                if way == "best":
                    fused_step.product_tile = partial(tile_of, table, defaults[0])
                    fused_step.cell_tile = partial(cell_of, cells, defaults[1])
                cache = cache_of(model, DecodeCase("gru-1B", model.config, "fused", rows, 2048))
                token = torch.zeros(rows, dtype=torch.long, device="cuda")
                model(token[:, None], cache)  # fills the cache
                us = microseconds(partial(step_once, model, token, cache), 1)
                fused_step.product_tile, fused_step.cell_tile = defaults
                print("step", weights, rows, way, f"{us / 1e3:.4f} ms", sep="\t", flush=True)
        del model, cache
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--weights", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, CELL])
    parser.add_argument("--candidates", type=int, default=12)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=90, help="of compiling")
    parser.add_argument("--no-steps", action="store_true")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    begun = time.perf_counter()
    with torch.no_grad():
        best = sweep(args)
        if not args.no_steps:
            steps(args, best)
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
