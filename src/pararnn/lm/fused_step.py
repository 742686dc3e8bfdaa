"""A decoding step in five kernels a recurrent layer, in place of a dozen.

`pararnn.lm.replay` records it in place of the model's call. Weights are read once, as they are, in
16 or 8 bits; what PyTorch rounds between two kernels stays in float32 here. A pass over drafted
tokens is a step whose rows are the tokens, of which the cell's kernel runs one after the other.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pararnn.base.device import Gpu, type_of
from pararnn.base.errors import EngineError
from pararnn.cells.base import unwrap
from pararnn.codegen.mixing_cuda import shared_bytes_of
from pararnn.lm.backbone import Backbone, Block, SwiGLU
from pararnn.lm.cache import LMCache
from pararnn.lm.conv_op import DTYPES, HAS_TRITON, MOST_TAPS
from pararnn.lm.loss import Head
from pararnn.lm.mixers import Attention, Mixer, RNNMixer
from pararnn.lm.model import LanguageModel
from pararnn.lm.pages import PagedCache
from pararnn.lm.quantise import Weight, is_quantised, is_readable, matrix_of
from pararnn.lm.rows import Rows
from pararnn.lm.states import Memory
from pararnn.program.program import Program, program_of

MOST_ROWS = 64
"""Largest number of rows of a step."""
LANE_ROWS = 8
"""Most rows that are multiplied by lanes, each as one by itself; more are by tensor cores."""
LEAST_ROWS = 16
"""Least number of rows that tensor cores multiply."""
PROGRAMS = 256
"""Least number of programs of a product, about two a multiprocessor."""
LANES = 32
"""Threads of a warp."""
ALIGNED = 16
"""What Triton tests whether sizes are multiples of."""
LANE_REGISTERS = 168
"""Registers of a thread that multiplies several rows: three programs of four warps run at once."""
VECTOR = 16
"""Bytes that a thread loads at once."""
DEEP = 128
"""Columns of a block where tensor cores multiply by few lines, which several programs share."""
AHEAD = 256
"""Bytes of weights that a thread of one row's product loads before it waits, in registers."""
LEAST_CAPABILITY = 9, 0
"""Least compute capability with a fused step, Hopper's: kernels start before the last has ended."""
HOPPER_BYTES = shared_bytes_of(LEAST_CAPABILITY)
"""Shared memory of a program on Hopper."""


class Tile(NamedTuple):
    """Sizes of a product: lines of a tile, columns of a block, programs that share a tile, warps of
    a program, and blocks under way: one row's first are loaded while the step before runs.

    registers: most that a thread has, which leaves room for the next kernel's programs.
    """

    lines: int
    depth: int
    stages: int = 1
    split: int = 1
    warps: int = 4
    registers: int | None = None


def row_tile(lines: int, length: int, matrices: int, itemsize: int) -> Tile:
    """Choose the tile of a product of one row with one or more matrices (N, K) of a dtype."""
    lines_per_tile = max(1, min(16, _floor_power(lines // PROGRAMS)))
    depth = min(_power(length), LANES * VECTOR // itemsize)
    block = matrices * max(1, lines_per_tile // 4) * VECTOR  # bytes of a thread
    stages = max(1, min(-(-length // depth), AHEAD // block))
    return with_full_warps(Tile(lines_per_tile, depth, stages), itemsize)


def with_full_warps(tile: Tile, itemsize: int) -> Tile:
    """Return a tile for lanes with as many warps, up to its own, as have a vector for each thread.

    Vectors that threads share would be brought together by barriers.
    """
    vectors = tile.lines * tile.depth * itemsize // VECTOR
    return tile._replace(warps=max(1, min(tile.warps, vectors // LANES)))


def lane_tile(
    lines: int, length: int, matrices: int, rows: int, dtype: torch.dtype, has_sums: bool
) -> Tile:
    """Choose the tile of a product of up to `LANE_ROWS` rows, see `product_tile`.

    Sums for a norm are by tiles: then it has as many lines for any number of rows.
    """
    tile = row_tile(lines, length, matrices, dtype.itemsize)
    if dtype == torch.int8 and lines >= 16 * PROGRAMS:  # small programs hide conversions
        blocks = -(-length // tile.depth)
        tile = tile._replace(lines=8 // matrices, stages=min(3, blocks), warps=2)
    if rows == 1:
        return tile
    # Rows take registers: a thread has 32 numbers of a block, and half as many bytes under way.
    few = tile.lines if has_sums else min(tile.lines, 2 * dtype.itemsize * tile.warps // matrices)
    block = matrices * max(1, few // tile.warps) * VECTOR
    stages = max(1, min(-(-length // tile.depth), AHEAD // 2 // block))
    return tile._replace(lines=few, stages=stages, registers=LANE_REGISTERS)


def product_tile(
    lines: int,
    length: int,
    matrices: int,
    rows: int,
    dtype: torch.dtype,
    has_sums: bool = False,
    lanes: int = LANE_ROWS,
    shared: int = HOPPER_BYTES,
) -> Tile:
    """Choose the tile of a product of rows with one or two matrices (N, K) of a dtype.

    has_sums: whether it adds up squares for a norm. lanes: most rows that lanes multiply. shared:
    bytes of shared memory that a program may have.
    """
    if rows <= lanes:
        return lane_tile(lines, length, matrices, rows, dtype, has_sums)
    tile = dense_tile(lines, length, matrices, rows, dtype.itemsize)
    return fit(tile, matrices, rows, dtype.itemsize, shared)


def dense_tile(lines: int, length: int, matrices: int, rows: int, itemsize: int) -> Tile:
    """Choose the tile of a product by tensor cores where shared memory is no limit."""
    depth, split = 128 if rows <= LEAST_ROWS else 64, 1
    while (
        -(-lines // 64) * split <= PROGRAMS // 2 and split < 8 and not length % (2 * depth * split)
    ):
        split *= 2
    if rows > LEAST_ROWS and split > 2 and not length % (2 * DEEP):
        if itemsize > 1:
            return Tile(32 * matrices, DEEP, 6, 2, warps=8, registers=128)
        if matrices == 1 and not length % (4 * DEEP):
            return Tile(32, DEEP, 6, 4)
    return Tile(64, depth, 4, split)


def shared_bytes(tile: Tile, matrices: int, rows: int, itemsize: int) -> int:
    """Return the most shared memory that a product by tensor cores takes: blocks of its matrices,
    and of the rows in 16 bits, for each stage."""
    row_bytes = 2 * max(LEAST_ROWS, _power(rows))
    return tile.stages * tile.depth * (matrices * tile.lines * itemsize + row_bytes)


def fit(tile: Tile, matrices: int, rows: int, itemsize: int, shared: int) -> Tile:
    """Return a tile for tensor cores that takes at most so much shared memory: of fewer stages, or
    if it had one alone, of blocks of fewer columns."""
    stages = shared // shared_bytes(tile._replace(stages=1), matrices, rows, itemsize)
    if stages < 2 and tile.depth > LEAST_ROWS:
        return fit(tile._replace(depth=tile.depth // 2), matrices, rows, itemsize, shared)
    return tile._replace(stages=max(1, min(tile.stages, stages)))


def cell_tile(
    size: int,
    channels: int,
    gates: int,
    rows: int,
    itemsize: int,
    lanes: int = LANE_ROWS,
    shared: int = HOPPER_BYTES,
) -> Tile:
    """Choose how to compute the step of a cell of channels in heads of a size."""
    if rows > lanes:
        depth = max(16, min(_power(size), 128 if rows <= LEAST_ROWS else 64))
        return fit(Tile(16, depth, 4), gates, rows, itemsize, shared)
    tile = row_tile(channels, size, gates, itemsize)
    return with_full_warps(tile._replace(lines=min(_power(size), tile.lines)), itemsize)


Start = Callable[[Any, tuple[int, ...]], Callable[..., Any]]
"""Function of a Triton kernel and a grid to one that takes what the kernel is launched with."""


def launching(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Return a kernel's launch."""
    launch: Callable[..., Any] = kernel[grid]
    return launch


def compiling(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Return a function that compiles a kernel for a launch, and does not launch it."""
    return partial(kernel.warmup, grid=grid)


class Step(NamedTuple):
    """Facts that all kernels of a step share: rows, of which `tokens` follow one another, the
    norms' eps, the power of two by which gains are multiplied, counters of programs, options of a
    launch, most rows that lanes multiply, shared memory of a program, whether rows are in float32,
    and what a launch does (`Start`)."""

    rows: int
    tokens: int
    eps: float
    gain_scale: float
    counters: Tensor
    launch: dict[str, Any]
    lanes: int = LANE_ROWS
    shared: int = HOPPER_BYTES
    is_wide: bool = False
    start: Start = launching

    def groups(self) -> tuple[int, int]:
        """Return how many groups of rows kernels write one after the other, and the rows of one.

        Squares of float32 are rounded as they are added, in an order that a row by itself has.
        """
        if self.rows > self.lanes:
            return 1, max(LEAST_ROWS, _power(self.rows))
        return (self.rows, 1) if self.is_wide else (1, _power(self.rows))

    def tile_rows(self) -> int:
        """Return the number of rows in memory."""
        groups, width = self.groups()
        return groups * width

    def options(self) -> dict[str, Any]:
        """Constants of all kernels: groups of rows and their width, and those of a launch."""
        groups, width = self.groups()
        # A product and a sum in one instruction are where a kernel says so: the compiler's choice
        # of two products would be another for other rows, and with it a row's bits.
        return {"GROUPS": groups, "WIDTH": width, "enable_fp_fusion": False, **self.launch}

    def tile_options(self, tile: Tile, length: int, itemsize: int) -> dict[str, Any]:
        """Constants and options of a kernel that multiplies by matrices (N, length) by tiles."""
        sizes = {"LINES": tile.lines, "TOKENS": self.tokens, "DEPTH": tile.depth}
        sizes |= {"VECTOR": min(tile.depth, VECTOR // itemsize), "BLOCKS": -(-length // tile.depth)}
        sizes |= {"STAGES": tile.stages, "WARPS": tile.warps}
        sizes |= {"LANES": self.rows if self.rows <= self.lanes else 0}
        sizes |= {"EVEN": length % (tile.depth * tile.split) == 0}
        launch = {"num_warps": tile.warps, "maxnreg": tile.registers, "num_stages": tile.stages}
        return {**sizes, **launch, **self.options()}

    def empty(self, width: int, like: Tensor) -> Tensor:
        """Return memory of rows of a width."""
        return like.new_empty(self.tile_rows(), width)

    def sums(self, tiles: int, like: Tensor) -> Tensor:
        """Return memory of sums of squares, (tiles, rows)."""
        return like.new_empty(tiles, self.tile_rows(), dtype=torch.float32)


class NormInput(NamedTuple):
    """Rows times a norm's gain, and sums (tiles, rows) of the rows' squares, if there is a norm."""

    rows: Tensor
    squares: Tensor | None = None


def takes(model: LanguageModel, rows: int, tokens: int = 1) -> bool:
    """Return whether there are kernels for a step of so many rows, or a pass over tokens of each.

    The GPU must have a compute capability of 9 or more and Triton. Mixers of a pass must be the
    paper's recurrent block, with an elementwise cell without a readout. Those of a step may be
    others whose memory stays where it is, or is keys in pages (`Mixer.steady`, `Mixer.paged`):
    `Attention` has kernels too, and others are called, between the kernels of the rest. Norms are
    RMS norms or LayerNorms with a gain, without a bias.

    Up to `LANE_ROWS` rows, or rows times tokens, may be float32 or 16-bit, with weights in 8 bits
    too; of several, sizes are multiples of `ALIGNED`, and weights are float32 in float32. Steps of
    more rows, up to `MOST_ROWS`, are 16-bit; with weights in 16 bits they have more than
    `LEAST_ROWS`, as PyTorch's products are faster for fewer.
    """
    head = model.lm_head.weight
    record = type_of(head.device)
    return (
        _takes_rows(model, rows, tokens)
        and not model.config.batch_invariant  # it rounds otherwise than calls
        and isinstance(record, Gpu)
        and HAS_TRITON
        and record.capability(head.device) >= LEAST_CAPABILITY
        and head.dtype in DTYPES
        and is_readable(head)
        and _is_plain(model)
        and _takes_norm(model.backbone.norm, model.config.norm_eps)
        and _takes_blocks(model.backbone.blocks, head.dtype, tokens, model.config.norm_eps)
    )


def _is_plain(model: LanguageModel) -> bool:
    """Return whether nothing but its blocks differs from what kernels compute."""
    modules = model, model.backbone, model.embed_tokens, model.lm_head
    return (
        tuple(map(type, modules)) == (LanguageModel, Backbone, nn.Embedding, Head)
        and model.embed_tokens.max_norm is None
        and model.lm_head.bias is None
    )


def _takes_rows(model: LanguageModel, rows: int, tokens: int) -> bool:
    """Return whether there are tiles for so many rows and tokens of a model's dtypes."""
    is_wide = model.lm_head.weight.dtype == torch.float32
    has_8_bits = any(map(is_quantised, model.parameters()))
    if rows * tokens == 1:
        return True
    if rows * tokens <= LANE_ROWS:
        # Rows of other sizes are loaded otherwise than the first, and their sums have other bits.
        config, heads = model.config, model.config.num_heads
        sizes = config.hidden_size // heads, cast(int, config.intermediate_size)
        return not (is_wide and has_8_bits) and not any(size % ALIGNED for size in sizes)
    least = 0 if has_8_bits else LEAST_ROWS
    return tokens == 1 and least < rows <= MOST_ROWS and not is_wide


def _takes_blocks(blocks: Sequence[Block], dtype: torch.dtype, tokens: int, eps: float) -> bool:
    """Return whether there are kernels for blocks, but for mixers that a step calls."""
    if not all(type(block) is Block and type(block.mlp) is SwiGLU for block in blocks):
        return False  # blocks of users' own
    linears = (linear for block in blocks for linear in block.mlp.children())
    norms = (norm for block in blocks for norm in (block.mixer_norm, block.mlp_norm))
    others = [block.mixer for block in blocks if not _takes_mixer(block.mixer, dtype, eps)]
    return (
        all(tokens == 1 and (mixer.steady or mixer.paged) for mixer in others)
        and all(_takes_norm(norm, eps) for norm in norms)
        and all(_takes_linear(linear, dtype) for linear in linears)
    )


def _takes_norm(norm: nn.Module, eps: float) -> bool:
    """Return whether a norm has kernels: with a gain, without a bias, and with the model's eps."""
    if type(norm) not in (nn.RMSNorm, nn.LayerNorm):
        return False
    has_gain = norm.weight is not None and getattr(norm, "bias", None) is None
    return has_gain and bool(norm.eps == eps)


def _takes_linear(linear: nn.Module, dtype: torch.dtype) -> bool:
    return (
        type(linear) is nn.Linear
        and linear.bias is None
        and linear.weight.dtype == dtype
        and is_readable(linear.weight)
    )


def _takes_mixer(mixer: Mixer, dtype: torch.dtype, eps: float) -> bool:
    if type(mixer) is not RNNMixer or mixer.rnn.reverse or mixer.group:
        return False
    if type(mixer.norm) is not nn.RMSNorm or not _takes_norm(mixer.norm, eps):
        return False
    linears = [mixer.in_proj, mixer.gate_proj, mixer.out_proj]
    if not all(_takes_linear(linear, dtype) for linear in linears):
        return False
    if mixer.conv is not None and len(mixer.conv.weight) > MOST_TAPS:
        return False
    return has_kernel(program_of(mixer.rnn.cell))


def _takes_attention(mixer: Mixer, dtype: torch.dtype, eps: float) -> bool:
    """Return whether attention to keys in pages has kernels."""
    if type(mixer) is not Attention or mixer.group:
        return False
    norms = (mixer.q_norm, mixer.k_norm)
    linears = (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.out_proj)
    return (
        type(mixer.q_norm) is type(mixer.k_norm)
        and all(type(norm) is nn.Identity or _takes_norm(norm, eps) for norm in norms)
        and all(_takes_linear(linear, dtype) for linear in linears)
    )


@lru_cache(maxsize=64)
def has_kernel(program: Program) -> bool:
    """Return whether a cell's step has a kernel."""
    if program.couples_channels or program.step.has_readout:
        return False
    from pararnn.lm.step_cell import step_lines

    try:
        step_lines(program)
    except EngineError:
        return False
    return True


def fused_logits(model: LanguageModel, token: Tensor, cache: LMCache) -> Tensor:
    """Compute logits (B, V) of the token after tokens (B,), and write into the cache's tensors.

    The cache's layers hold tensors of an earlier call, which stay at their addresses.
    """
    logits: Tensor = _on_gpu(step_logits, model, token, cache)
    cache.length += 1
    return logits


def fused_pass(model: LanguageModel, tokens: Tensor, cache: LMCache) -> tuple[Tensor, list[Memory]]:
    """Read tokens (B, T) after those of a cache, which stays as it is.

    Returns logits (B T, V), and after each token what the layers remember and, as the last of these
    memories, the head's inputs. Those of up to `LANE_ROWS` tokens have the bits of `fused_logits`.
    """
    result: tuple[Tensor, list[Memory]] = _on_gpu(pass_logits, model, tokens, cache)
    return result


def _on_gpu(
    function: Callable[..., Any], model: LanguageModel, tokens: Tensor, cache: LMCache
) -> Any:
    """Call a function of a model on its GPU; the first time, compile its kernels at once."""
    device = tokens.device
    record = type_of(device)
    assert isinstance(record, Gpu)
    seen, call = _CALLS.setdefault(model, set()), (function, device, tokens.shape)
    if call not in seen:
        record.call(device, compile_at_once, function, model, tokens, cache)
        seen.add(call)
    return record.call(device, function, model, tokens, cache)


_CALLS: WeakKeyDictionary[LanguageModel, set[object]] = WeakKeyDictionary()
"""Functions, devices and sizes of tokens whose kernels have been compiled, by model."""


class GainScale(NamedTuple):
    """Gains, their versions, and the power of two that brings the largest to 1."""

    gains: Sequence[Tensor]
    versions: list[int]
    scale: float

    def holds(self, gains: Sequence[Tensor]) -> bool:
        """Return whether these gains are the same ones, unchanged."""
        same = len(gains) == len(self.gains) and all(map(operator.is_, gains, self.gains))
        return same and [x._version for x in gains] == self.versions


def gain_scale_of(model: LanguageModel) -> float:
    """Return the power of two that brings the largest gain of RMS norms to 1, for float16, else 1.

    Rows times gains would overflow, or lose digits, where their norm does not. The host waits for
    the gains, after each change of them.
    """
    if model.lm_head.weight.dtype != torch.float16:
        return 1.0
    gains = [norm.weight for norm in model.backbone.modules() if isinstance(norm, nn.RMSNorm)]
    known = _GAIN_SCALES.get(model)
    if known is not None and known.holds(gains):
        return known.scale
    largest = float(torch.stack([x.detach().abs().max() for x in gains]).max()) if gains else 1
    exponent = math.ceil(math.log2(largest)) if 0 < largest < math.inf else 0
    scale = 0.5**exponent
    if not any(x.is_inference() for x in gains):  # those have no versions
        _GAIN_SCALES[model] = GainScale(gains, [x._version for x in gains], scale)
    return scale


_GAIN_SCALES: WeakKeyDictionary[LanguageModel, GainScale] = WeakKeyDictionary()
"""What the gains of models are multiplied by."""


def compile_at_once(
    function: Callable[..., Any], model: LanguageModel, tokens: Tensor, cache: LMCache
) -> None:
    """Compile the kernels of `step_logits` or `pass_logits` by threads, all at the same time."""
    from triton import AsyncCompileMode

    with ThreadPoolExecutor() as threads, AsyncCompileMode(threads):
        function(model, tokens, cache, start=compiling)


def step_logits(
    model: LanguageModel,
    token: Tensor,
    cache: LMCache,
    starts_early: bool = True,
    start: Start = launching,
) -> Tensor:
    """Launch the kernels of `fused_logits`.

    starts_early: whether a kernel may start before the one before has ended.
    """
    memories = [layer.read() for layer in cache.layers]
    return _run(model, token.unsqueeze(1), memories, memories, starts_early, start, cache)[0]


def pass_logits(
    model: LanguageModel,
    tokens: Tensor,
    cache: LMCache,
    starts_early: bool = True,
    start: Start = launching,
) -> tuple[Tensor, list[Memory]]:
    """Launch the kernels of `fused_pass`, see `step_logits`."""
    batch, length = tokens.shape
    before = [layer.read() for layer in cache.layers]
    buffers: list[Memory] = []
    for inputs, states in before:
        assert states is not None
        windows = None
        if inputs is not None:
            windows = inputs.new_empty(batch, inputs.shape[2] + length, inputs.shape[1])
        buffers.append((windows, states.new_empty(batch, length, *states.shape[1:])))
    logits, x = _run(model, tokens, before, buffers, starts_early, start)
    after: list[Memory] = [
        (
            None if windows is None else windows.unfold(1, windows.shape[1] - length, 1)[:, 1:],
            states,
        )
        for windows, states in buffers
    ]
    hidden = model.backbone.norm(x[: len(logits)].view(batch, length, -1))
    return logits, [*after, (None, hidden)]


def _run(
    model: LanguageModel,
    tokens: Tensor,
    before: Sequence[Memory],
    after: Sequence[Memory],
    starts_early: bool,
    start: Start,
    cache: LMCache | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch all kernels for tokens (B, T); return logits (B T, V) and the last norm's input.

    before: what the layers remember. after: where they write it; the same for one token a row.
    cache: of a step, for mixers without kernels.
    """
    rows, length = tokens.numel(), tokens.shape[1]
    launch = {"PDL": True, "launch_pdl": True} if starts_early else {"PDL": False}
    # Converting 8 bits once for each row takes longer than tensor cores from about here on.
    has_8_bits = matrix_of(model.backbone.blocks[0].mlp.up_proj.weight).scale is not None
    lanes = LANE_ROWS // 2 if has_8_bits and length == 1 else LANE_ROWS
    counters = tokens.new_zeros(1 if rows <= lanes else 1 << 12, dtype=torch.int32)
    record = type_of(tokens.device)
    shared = HOPPER_BYTES  # of Triton's interpreter
    if isinstance(record, Gpu):
        shared = shared_bytes_of(record.capability(tokens.device))
    is_wide = model.embed_tokens.weight.dtype == torch.float32
    eps = model.config.norm_eps
    gain_scale = gain_scale_of(model)
    step = Step(rows, length, eps, gain_scale, counters, launch, lanes, shared, is_wide, start)
    blocks = model.backbone.blocks
    norms = [*(block.mixer_norm for block in blocks), model.backbone.norm]
    x, norm_input = _begin(step, model.embed_tokens.weight, tokens.contiguous(), norms[0])
    called: Rows | None = None
    for index, (block, norm) in enumerate(zip(blocks, norms[1:], strict=True)):
        if _takes_mixer(block.mixer, x.dtype, eps):
            memory = before[index], after[index]
            mlp_input: NormInput | None = _mix(step, block, x, norm_input, *memory)
        else:
            assert cache is not None
            layer = cache.layers[index]
            if called is None and start is not compiling:  # a call writes keys and counts tokens
                called = model.backbone.with_rotary(model.as_rows(tokens, cache), x.dtype)
            if isinstance(layer, PagedCache) and _takes_attention(block.mixer, x.dtype, eps):
                mlp_input = _attend(step, block, x, norm_input, called, layer)
            else:
                mlp_input = None
                if called is not None:
                    vectors = x[:rows].unsqueeze(1)
                    vectors.copy_(block.mix(vectors, called, layer))
        norm_input = _add_mlp(step, block, x, mlp_input, norm)
    head = matrix_of(model.lm_head.weight)
    logits = x.new_empty(rows, len(head.numbers))
    norm_input = _normed(step, model.backbone.norm, x, norm_input)
    _product(step, "plain", norm_input, [head], [logits])
    return logits, x


def _gain(norm: nn.Module) -> Tensor:
    return cast(Tensor, norm.weight)


def _normed(step: Step, norm: nn.Module, x: Tensor, norm_input: NormInput | None) -> NormInput:
    """Return what a product reads after a norm of x (R, d).

    norm_input: an RMS norm's, of the kernel that wrote x; None if a call did. A LayerNorm's mean is
    subtracted before the product, whose sums would lose digits of what is left.
    """
    from pararnn.lm import step_kernels

    if type(norm) is nn.RMSNorm and norm_input is not None:
        return norm_input
    width, result = x.shape[1], torch.empty_like(x)
    step.start(step_kernels.row_norm, (step.rows,))(
        *(x, _gain(norm), result, width, step.eps),
        BLOCK=_power(width),
        NORM=_NORMS[type(norm)],
        enable_fp_fusion=False,
        **step.launch,
    )
    return NormInput(result)


def _begin(step: Step, table: Tensor, token: Tensor, norm: nn.Module) -> tuple[Tensor, NormInput]:
    """Return the tokens' vectors, and the same after the first norm."""
    from pararnn.lm import step_kernels

    width = table.shape[1]
    lines = min(_power(width), 256 if step.rows <= step.lanes else 32)
    tiles = -(-width // lines)
    x, times_gain = step.empty(width, table), step.empty(width, table)
    squares = step.sums(tiles, table)
    step.start(step_kernels.begin, (tiles,))(
        *(token, table, _gain(norm), x, times_gain, squares, step.rows, width, step.gain_scale),
        LINES=lines,
        **step.options(),
    )
    return x, NormInput(times_gain, squares)


def _mix(
    step: Step, block: Block, x: Tensor, norm_input: NormInput, before: Memory, after: Memory
) -> NormInput:
    """Add a block's mixer to x (R, d), in place; return the input of the norm after it."""
    mixer, norm_input = cast(RNNMixer, block.mixer), _normed(step, block.mixer_norm, x, norm_input)
    inputs, states = zip(before, after, strict=True)
    u, z = torch.empty_like(x), torch.empty_like(x)
    weights = [matrix_of(mixer.in_proj.weight), matrix_of(mixer.gate_proj.weight)]
    _product(step, "pair", norm_input, weights, [u, z], inputs=inputs, mixer=mixer)
    y = _recurrence(step, mixer, u, z, *cast(tuple[Tensor, Tensor], states))
    return _add(step, y, mixer.out_proj, x, block.mlp_norm, factor=block.residual_scale)


def _attend(
    step: Step,
    block: Block,
    x: Tensor,
    norm_input: NormInput,
    rows: Rows | None,
    layer: PagedCache,
) -> NormInput:
    """Do what `_mix` does for attention to keys in pages, but for products only if there are rows.

    What is not computed then has no kernels that a step compiles.
    """
    from pararnn.lm import rows_kernels, step_kernels

    norm_input = _normed(step, block.mixer_norm, x, norm_input)
    mixer, (count, width) = cast(Attention, block.mixer), (step.rows, x.shape[1])
    q, k, v = projected = [x.new_empty(count, width) for _ in range(3)]
    linears = mixer.q_proj, mixer.k_proj, mixer.v_proj
    weights = [matrix_of(linear.weight) for linear in linears]
    _product(step, "plain", norm_input, weights, projected)
    y = step.empty(width, x)
    if rows is not None:
        assert rows.rotary is not None
        cos, sin = (angles.flatten(1) for angles in rows.rotary)
        places, query, size = layer.places, torch.empty_like(q), width // mixer.heads
        keys, values, last = layer.key_pages, layer.value_pages, rows.positions.expand(count, -1)
        gains = [_or(getattr(norm, "weight", None), x) for norm in (mixer.q_norm, mixer.k_norm)]
        strides = places.table.stride(0), last.stride(0), cos.stride(0) if len(cos) > 1 else 0
        step.start(step_kernels.attention_inputs, (count, mixer.heads))(
            *(q, k, v, *gains, cos, sin, query, keys, values, places.table, last),
            *(width, size, step.eps, *strides, *keys.stride()[:3], *values.stride()[:3]),
            PAGE=keys.shape[2],
            SIZE=_power(size),
            BLOCK=_power(width),
            NORM=_NORMS[type(mixer.q_norm)],
            enable_fp_fusion=False,
            **step.launch,
        )
        heads = query.view(count, mixer.heads, 1, size)
        tensors, out = (heads, keys, values, None, last, places.table), y[:count]
        out = out.view(count, 1, mixer.heads, size)
        rows_kernels.attention(*tensors, by_rows=False, out=out, launch=step.launch)
    y_input, scale = NormInput(y), block.residual_scale
    return _add(step, y_input, mixer.out_proj, x, block.mlp_norm, factor=scale)


_NORMS = {nn.Identity: "none", nn.RMSNorm: "rms", nn.LayerNorm: "layer"}
"""Norms, and their names in kernels."""


def _add_mlp(
    step: Step, block: Block, x: Tensor, norm_input: NormInput | None, norm: nn.Module
) -> NormInput:
    """Add a block's MLP to x (R, d), in place; return the input of the norm that follows."""
    mlp, norm_input = block.mlp, _normed(step, block.mlp_norm, x, norm_input)
    hidden = step.empty(mlp.gate_proj.out_features, x)
    weights = [matrix_of(mlp.gate_proj.weight), matrix_of(mlp.up_proj.weight)]
    _product(step, "swiglu", norm_input, weights, [hidden])
    return _add(step, NormInput(hidden), mlp.down_proj, x, norm)


def _add(
    step: Step,
    y: NormInput,
    linear: nn.Linear,
    x: Tensor,
    norm: nn.Module,
    factor: Tensor | None = None,
) -> NormInput:
    """Add a product to the factor times x, in place; return the input of the next norm."""
    times_gain = torch.empty_like(x)
    squares = _product(
        step,
        "add",
        y,
        [matrix_of(linear.weight)],
        [x, times_gain],
        residual=x,
        factor=factor,
        gain=_gain(norm),
    )
    return NormInput(times_gain, squares)


def _power(least: int) -> int:
    """Return the least power of two that is no smaller."""
    return 1 << max(least - 1, 0).bit_length()


def _floor_power(most: int) -> int:
    """Return the largest power of two that is no larger, and at least 1."""
    return 1 << max(most, 1).bit_length() - 1


def _or(tensor: Tensor | None, placeholder: Tensor) -> Tensor:
    """Return a tensor, or another one that the kernel does not read."""
    return placeholder if tensor is None else tensor


def _product(
    step: Step,
    epilogue: str,
    x: NormInput,
    weights: list[Weight],
    outs: list[Tensor],
    residual: Tensor | None = None,
    factor: Tensor | None = None,
    gain: Tensor | None = None,
    inputs: tuple[Tensor | None, Tensor | None] = (None, None),
    mixer: RNNMixer | None = None,
) -> Tensor:
    """Launch `step_kernels.product`, which explains `epilogue`; return the sums of squares.

    inputs: of a convolution, and where those of several tokens go.
    """
    from pararnn.lm import step_kernels

    rows = x.rows
    lines, length = weights[0].numbers.shape
    matrices = 2 if epilogue == "swiglu" else 1
    pairs = 1 if epilogue == "swiglu" else len(weights)
    dtype = weights[0].numbers.dtype
    has_sums = epilogue == "add"
    sizes = lines * pairs, length, matrices, step.rows
    tile = product_tile(*sizes, dtype, has_sums, step.lanes, step.shared)
    tiles = -(-lines // tile.lines)
    squares = step.sums(tiles if has_sums else 1, rows)
    size = tiles * max(pairs, matrices) * tile.lines * step.tile_rows() * tile.split
    partial = rows.new_empty(size if tile.split > 1 else 1, dtype=torch.float32)
    conv = None if mixer is None else mixer.conv
    taps, bias = (rows, rows) if conv is None else (conv.weight, conv.bias)
    scales = [_or(weight.scale, squares) for weight in weights]
    tensors = [rows, _or(x.squares, squares)]
    for several in ([weight.numbers for weight in weights], scales, outs):
        tensors += (several + several[-1:] * 2)[:3]  # the kernel reads those that there are
    tensors += [_or(residual, rows), _or(factor, rows), _or(gain, rows), squares]
    tensors += [*(_or(memory, rows) for memory in inputs), taps, bias, partial, step.counters]
    square_tiles = 0 if x.squares is None else len(x.squares)
    strides = (0, 0, 0) if inputs[0] is None else inputs[0].stride()
    step.start(step_kernels.product, (tiles * pairs, tile.split))(
        *tensors,
        *(step.rows, length, lines, square_tiles, *strides, step.eps, step.gain_scale),
        EPILOGUE=epilogue,
        SPLIT=tile.split,
        SQUARE_TILES=0 if x.squares is None else _power(square_tiles),
        FACTOR=factor is not None,
        SCALES=weights[0].scale is not None,
        TAPS=1 if conv is None else len(conv.weight),
        **step.tile_options(tile, length, dtype.itemsize),
    )
    return squares


def _recurrence(
    step: Step, mixer: RNNMixer, x: Tensor, z: Tensor, states: Tensor, new_states: Tensor
) -> NormInput:
    """Launch the cell's kernel: gates, step, and the output times z as the norm needs it."""
    from pararnn.lm.step_cell import kernel_of

    cell, layer = unwrap(mixer.rnn.cell), mixer.rnn
    program = program_of(cell)
    channels = x.shape[1]
    size = channels // layer.num_heads
    matrix, gain = layer.proj.weight, mixer.norm.weight
    sizes = size, channels, len(program.gates), step.rows
    tile = cell_tile(*sizes, matrix.itemsize, step.lanes, step.shared)
    count = layer.num_heads * -(-size // tile.lines)
    times_gain, squares = torch.empty_like(x), step.sums(count, x)
    params = [getattr(cell, name) for name in program.params]
    step.start(kernel_of(program), (count,))(
        *(
            x,
            z,
            matrix,
            _or(layer.bias, x),
            states,
            new_states,
            gain,
            times_gain,
            squares,
            *params,
        ),
        *(step.rows, channels, size, size, step.gain_scale),
        BIAS=layer.bias is not None,
        **step.tile_options(tile, size, matrix.itemsize),
    )
    return NormInput(times_gain, squares)
