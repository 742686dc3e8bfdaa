"""Decoding in fused kernels: the code generated of a cell's step, and what has none."""

import ast
import copy
import itertools
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fresh import run_fresh
from lm_kinds import plain
from triton_compiler import NEEDS_TRITON, compiled

import pararnn
from pararnn.base.errors import EngineError
from pararnn.cells.find import find_cell
from pararnn.lm import LanguageModel, LMConfig, fused_step
from pararnn.lm.backbone import Block
from pararnn.lm.cache import SteadyCache
from pararnn.lm.fused_step import has_kernel
from pararnn.lm.pages import LinePlaces, PagedCache
from pararnn.lm.quantise import Weight
from pararnn.lm.step_cell import HEADER, NAMES, source_of, step_lines
from pararnn.program.program import program_of
from pararnn.zoo import CELLS

FUNCTIONS = {
    name: getattr(torch, name) for name in NAMES if hasattr(torch, name) and name != "select"
}
FUNCTIONS |= {
    "constant": lambda x: x,
    "select": torch.where,
    "maximum": lambda a, b: torch.maximum(torch.as_tensor(a), torch.as_tensor(b)),
    "minimum": lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b)),
    "at_least": lambda x, low: x.clamp_min(low),
    "at_most": lambda x, high: x.clamp_max(high),
    "number": lambda x: x.float(),
    "truth": lambda x: x != 0,
    "negated": lambda x: ~x,
}
WITH_KERNELS = {"gru", "lstm", "min-gru", "min-lstm", "lem", "indrnn", "cfc"}


def _cell(name):
    for heads in (2, 1):
        try:
            return find_cell(name, CELLS)(8, num_heads=heads)
        except ValueError:
            continue
    raise AssertionError(name)


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.one_in(3)
def test_generated_lines_are_the_cells_step(name):
    torch.manual_seed(0)
    cell = _cell(name)
    program = program_of(cell)
    if not has_kernel(program):
        assert name not in WITH_KERNELS
        return
    for parameter in cell.parameters():
        torch.nn.init.normal_(parameter)
    states = torch.randn(program.num_states, 8)
    gates = torch.randn(len(program.gates), 8)
    fields = [torch.ones(8) for _ in program.fields]
    params = [getattr(cell, each).detach() for each in program.params]
    values = {f"state_{n}": state for n, state in enumerate(states)}
    values |= {f"gate_{g}": gate for g, gate in enumerate(gates)}
    values |= {f"f_{each}": field for each, field in zip(program.fields, fields, strict=True)}
    values |= {f"p_{each}": param for each, param in zip(program.params, params, strict=True)}
    exec("\n".join(step_lines(program)), FUNCTIONS, values)
    reference = program.graphs[torch.float32].step.module(*states, *gates, *fields, *params)
    for n, new in enumerate(reference):
        torch.testing.assert_close(values[f"new_{n}"], new, rtol=1e-5, atol=1e-6)
    functions = {
        each.name
        for each in ast.walk(ast.parse(source_of(program)))
        if hasattr(each, "decorator_list")
    }
    assert "recurrent_step" in functions
    assert "{" not in source_of(program)


@pytest.mark.parametrize("name", ["tanh", "log1p", "sigmoid"])
def test_functions_have_the_digits_of_small_numbers(name):
    """What `HEADER` defines or names, with PyTorch's functions in place of Triton's."""
    code = [line for line in HEADER.splitlines() if "import" not in line and "jit" not in line]
    shared = {"exp", "exp2", "log", "log2", "sqrt", "abs", "sigmoid", "erf", "sin", "cos"}
    own = {each: getattr(torch, each) for each in shared | {"floor", "ceil", "where"}}
    own |= {"maximum": torch.maximum, "minimum": torch.minimum, "constexpr": float}
    functions = {"tl": SimpleNamespace(**own)}
    exec("\n".join(code), functions)
    sizes = torch.logspace(-30, 1.5, 4000)
    x = torch.cat([sizes, -sizes[sizes < 0.9], torch.tensor([0.0, torch.inf, torch.nan])])
    reference = getattr(torch, name)(x.double()).float()
    torch.testing.assert_close(functions[name](x), reference, rtol=1e-6, atol=0, equal_nan=True)


def test_a_cpu_has_no_fused_step():
    assert not fused_step.takes(plain("gru"), 1)


class Residual(torch.nn.Module):
    """A block without an MLP, in the place of the library's."""

    def __init__(self, mixer):
        super().__init__()
        self.mixer = mixer


def test_blocks_of_others_have_no_kernels():
    blocks = list(plain("gru").backbone.blocks)
    assert fused_step._takes_blocks(blocks, torch.float32, 1, 1e-5)
    other = Residual(blocks[0].mixer)
    assert not fused_step._takes_blocks([*blocks, other], torch.float32, 1, 1e-5)
    assert not fused_step._takes_blocks(blocks, torch.float32, 1, 1e-6)
    blocks[0].__class__ = Parallel
    assert not fused_step._takes_blocks(blocks, torch.float32, 1, 1e-5)


class Scaled(LanguageModel):
    """A model that scales its embedding."""

    def _run(self, tokens, cut, cache):
        return 2 * super()._run(tokens, cut, cache)


class Parallel(Block):
    """A block of another order."""


def with_bias(model):
    model.lm_head.bias = torch.nn.Parameter(torch.ones(48))


def with_largest_norm(model):
    model.embed_tokens.max_norm = 1.0


def with_classes(model):
    model.__class__ = Scaled


@pytest.mark.parametrize("change", [with_bias, with_largest_norm, with_classes])
def test_models_of_others_have_no_kernels(change):
    model = LanguageModel(LMConfig(32, 1, 48, num_heads=2))
    assert fused_step._is_plain(model)
    change(model)
    assert not fused_step._is_plain(model)


@pytest.mark.parametrize("path", ["mlp.up_proj", "mixer.in_proj", "mixer.out_proj"])
def test_products_with_a_bias_have_no_kernels(path):
    (block,) = LanguageModel(LMConfig(32, 1, 48, num_heads=2)).backbone.blocks
    linear = block.get_submodule(path)
    linear.bias = torch.nn.Parameter(torch.zeros(len(linear.weight)))
    assert not fused_step._takes_blocks([block], torch.float32, 8, 1e-5)


OTHER_NORMS = [
    lambda: torch.nn.LayerNorm(32, eps=1e-5),
    lambda: torch.nn.RMSNorm(32),
    lambda: torch.nn.RMSNorm(32, eps=1e-5, elementwise_affine=False),
    lambda: torch.nn.Identity(),
]
"""With a bias, another eps, without a gain, and none at all."""


@pytest.mark.parametrize("make", OTHER_NORMS)
@pytest.mark.parametrize("place", ["mixer_norm", "mlp_norm", "mixer"])
def test_norms_of_others_have_no_kernels(make, place):
    model = LanguageModel(LMConfig(32, 1, 48, num_heads=2))
    (block,) = model.backbone.blocks
    assert fused_step._takes_blocks([block], torch.float32, 8, 1e-5)
    at, name = (block.mixer, "norm") if place == "mixer" else (block, place)
    setattr(at, name, make())
    assert not fused_step._takes_blocks([block], torch.float32, 8, 1e-5)


@pytest.mark.parametrize("make", OTHER_NORMS)
@pytest.mark.parametrize("names", [("q_norm",), ("q_norm", "k_norm")], ids=len)
def test_query_norms_of_others_have_no_kernels(make, names):
    """But for none at all, if keys have none either."""
    model = LanguageModel(LMConfig(32, 1, 48, mixers=("attention",), num_attention_heads=2))
    mixer = model.backbone.blocks[0].mixer
    assert fused_step._takes_attention(mixer, torch.float32, 1e-5)
    for name in names:
        setattr(mixer, name, make())
    is_none = len(names) == 2 and isinstance(mixer.q_norm, torch.nn.Identity)
    assert fused_step._takes_attention(mixer, torch.float32, 1e-5) == is_none


def test_kernels_take_no_min_or_max_of_constants():
    """Triton 3.5, which comes with PyTorch 2.9, has them of tensors alone."""
    for file in ("step_kernels.py", "conv_kernels.py", "rows_kernels.py"):
        source = (Path(fused_step.__file__).parent / file).read_text(encoding="utf-8")
        lines = [
            line for line in source.splitlines() if re.search(r"(?<![\w.])(?:min|max)\(", line)
        ]
        assert not [
            line for line in lines if re.search(r": tl\.constexpr = |\(.*\b[A-Z]+, [A-Z]+\)", line)
        ]


def test_rows_and_tokens_that_have_tiles():
    limits = fused_step.LANE_ROWS, fused_step.LEAST_ROWS, fused_step.MOST_ROWS
    lanes, least, most = limits
    wide = LanguageModel(LMConfig(32, 1, 48, num_heads=2))
    narrow = copy.deepcopy(wide).bfloat16()
    for model, rows, tokens, has_tiles in (
        (wide, 1, 1, True), (wide, lanes, 1, True), (wide, lanes + 1, 1, False),
        (wide, 1, lanes, True), (wide, 2, lanes // 2, True), (wide, 2, lanes, False),
        (narrow, lanes, 1, True), (narrow, least, 1, False), (narrow, least + 1, 1, True),
        (narrow, most, 1, True), (narrow, most + 1, 1, False), (narrow, 1, lanes, True),
        (narrow, least, 2, False), (plain("gru"), 1, 1, True), (plain("gru"), 2, 1, False),
    ):  # fmt: skip
        assert fused_step._takes_rows(model, rows, tokens) == has_tiles, (rows, tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_norms_have_the_same_sums_for_up_to_some_rows(dtype):
    """Lines of a tile decide the order; of products before a norm, and of the cell."""
    for lines, length in ((2048, 2048), (4096, 11264), (768, 768), (64, 192)):
        tiles = {
            fused_step.product_tile(lines, length, 1, rows, dtype, True).lines
            for rows in range(1, fused_step.LANE_ROWS + 1)
        }
        cells = {
            fused_step.cell_tile(lines // 4, lines, 3, rows, dtype.itemsize)
            for rows in range(1, fused_step.LANE_ROWS + 1)
        }
        assert (len(tiles), len(cells)) == (1, 1)


WIDTHS = (64, 512, 640, 768, 1024, 2048, 2560, 4096)
"""Of models of 60M on, and a tiny one."""
SHARED = [99 * 1024, 163 * 1024, fused_step.HOPPER_BYTES]


@pytest.mark.parametrize("shared", SHARED)
def test_tiles_fit_into_shared_memory(shared):
    """Of all products by tensor cores, and of cells with up to 12 gates."""
    for width, itemsize, rows in itertools.product(WIDTHS, (1, 2), range(5, 65)):
        hidden = 256 * -(-8 * width // (3 * 256))
        dtype = (torch.int8, torch.bfloat16)[itemsize - 1]
        for lines, length, matrices in (
            (2 * width, width, 1), (width, width, 1), (hidden, width, 2), (width, hidden, 1),
            (50_432, width, 1),
        ):  # fmt: skip
            tile = fused_step.product_tile(lines, length, matrices, rows, dtype, False, 4, shared)
            assert fused_step.shared_bytes(tile, matrices, rows, itemsize) <= shared
            assert length % (tile.depth * tile.split) == 0 or tile.split == 1
        for gates in range(1, 13):
            tile = fused_step.cell_tile(width // 4, width, gates, rows, 2, 4, shared)
            assert fused_step.shared_bytes(tile, gates, rows, 2) <= shared


def test_tiles_that_do_not_fit_have_fewer_stages_then_columns():
    tile = fused_step.dense_tile(2816, 1024, 2, 64, 2)  # SwiGLU of 400M in 16 bits
    assert fused_step.shared_bytes(tile, 2, 64, 2) == 294_912
    sizes = [(fit.depth, fit.stages) for shared in (294_912, *SHARED[::-1], 90_000, 40_000, 9000)
             for fit in [fused_step.fit(tile, 2, 64, 2, shared)]]  # fmt: skip
    assert sizes == [(128, 6), (128, 4), (128, 3), (128, 2), (64, 3), (32, 3), (16, 1)]


def test_threads_of_lanes_have_whole_vectors():
    for lines, length, itemsize in itertools.product((256, 512, 2048), (64, 128, 512), (1, 2, 4)):
        tile = fused_step.row_tile(lines, length, 1, itemsize)
        vectors = tile.lines * tile.depth * itemsize // fused_step.VECTOR
        assert tile.warps == 1 or vectors >= tile.warps * fused_step.LANES


class Launches:
    """A kernel in whose place launches are written down."""

    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((self.kernel, args, options))


def launches_of(monkeypatch, model, rows, tokens, weights=None):
    """Launches of a step or a pass of a model without memory, its matrices in a dtype of 8 bits."""
    from pararnn.lm import rows_kernels, step_cell, step_kernels

    launches, kernel_of = [], step_cell.kernel_of
    with monkeypatch.context() as patch:
        attention = "attention_of_rows", "attention_of_spans", "merge_at_once"
        of_step = "begin", "product", "row_norm", "attention_inputs"
        for module, names in ((step_kernels, of_step), (rows_kernels, attention)):
            for name in names:
                patch.setattr(module, name, Launches(getattr(module, name), launches))
        patch.setattr(step_cell, "kernel_of", lambda each: Launches(kernel_of(each), launches))
        if weights is not None:
            patch.setattr(fused_step, "matrix_of", lambda weight: Weight(
                torch.empty_like(weight, dtype=weights), weight.new_empty(len(weight), 1).float()
            ))  # fmt: skip
        config, factory = model.config, {"device": "meta"}
        width, taps = config.hidden_size, config.conv_kernel_size
        cache = model.new_cache()
        inputs = torch.empty(rows, width, taps - 1, dtype=model.lm_head.weight.dtype, **factory)
        for layer, block in enumerate(model.backbone.blocks):
            if block.mixer.paged:
                cache.places = LinePlaces(rows, 600, 3, torch.device("meta"))
                pages = torch.empty(rows, block.mixer.heads, 16, width // block.mixer.heads)
                cache.layers[layer] = PagedCache((pages.to(inputs), pages.to(inputs)), cache.places)
                continue
            states = program_of(block.mixer.rnn.cell).num_states
            cache.layers[layer] = SteadyCache(inputs, torch.empty(rows, states, width, **factory))
        text = torch.empty(rows, tokens, dtype=torch.long, **factory)
        if tokens == 1:
            fused_step.step_logits(model, text[:, 0], cache)
        else:
            fused_step.pass_logits(model, text, cache)
    return launches


def model_without_memory(width, dtype, cell="gru"):
    hidden = 256 * -(-8 * width // (3 * 256))
    config = LMConfig(width, 1, 2048, intermediate_size=hidden, num_heads=4, cell=cell)
    return LanguageModel(config, device="meta", dtype=dtype).eval()


@NEEDS_TRITON
@pytest.mark.parametrize(("rows", "norm"), [(1, "rms"), (3, "rms"), (1, "layer")])
def test_steps_of_attention_compile(rows, norm, monkeypatch):
    config = LMConfig(256, 1, 512, num_heads=4, mixers=("attention",), num_attention_heads=2)
    config = replace(config, norm=norm)
    model = LanguageModel(config, device="meta", dtype=torch.bfloat16).eval()
    launches = launches_of(monkeypatch, model, rows, 1)
    norms = 3 if norm == "layer" else 0
    products = 1 + 1 + 2 + 1  # of q, k, v, then out, the MLP's, logits
    spans = 2
    assert len(launches) == 1 + products + 1 + spans + norms
    assert all(compiled(*launch).asm["ptx"] for launch in launches)


@pytest.mark.thorough
@pytest.mark.parametrize("weights", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("width", [1024, 2048])
def test_triton_takes_no_more_shared_memory(width, weights, monkeypatch):
    model = model_without_memory(width, torch.bfloat16, "lstm")
    bytes_of = fused_step.shared_bytes
    for rows in (64,) if weights is None else (9, 64):
        for kernel, args, options in launches_of(monkeypatch, model, rows, 1, weights):
            shared = compiled(kernel, args, options).metadata.shared
            if "DEPTH" not in options:
                assert shared <= 99 * 1024
                continue
            gates = len(program_of(model.backbone.blocks[0].mixer.rnn.cell).gates)
            matrices = 1 + (options.get("EPILOGUE") == "swiglu") if "EPILOGUE" in options else gates
            tile = fused_step.Tile(options["LINES"], options["DEPTH"], options["STAGES"])
            bound = bytes_of(tile, matrices, rows, args[2].dtype.itemsize)
            assert shared <= bound <= fused_step.HOPPER_BYTES, (rows, options)


@NEEDS_TRITON
@pytest.mark.thorough
@pytest.mark.parametrize(("width", "dtype"), [(512, torch.float32), (256, torch.bfloat16)], ids=str)
def test_compilers_choose_no_order_of_sums(width, dtype, monkeypatch):
    """Products and sums are rounded one by one but where kernels say otherwise, and threads add up
    the columns of a line by the same exchanges for any number of rows."""
    model, exchanges = model_without_memory(width, dtype, "lstm"), []
    for rows, tokens in ((1, 1), (1, 4)):
        codes = [
            compiled(*launch).asm["ptx"] for launch in launches_of(monkeypatch, model, rows, tokens)
        ]
        for code in codes:
            assert not re.findall(r"\b(?:add|sub|mul)\.f(?:32|64)\b", code)
        # Of the cell and of the product after SwiGLU, which have no norm's sums before them.
        exchanges.append([
            Counter(re.findall(r"shfl\S+\s+\S+ \S+ (\d+),", code)) for code in (codes[2], codes[5])
        ])  # fmt: skip
    for one, four in zip(*exchanges, strict=True):
        assert one
        expected = Counter({distance: 4 * count for distance, count in one.items()})
        assert not expected - four
        # Squares of 16-bit numbers, whose order rounds nothing, by the halves of a float64.
        assert {*(four - expected).values()} <= (set() if dtype == torch.float32 else {2})


INTERPRETED = """
import sys, torch
from pararnn.lm import LanguageModel, LMConfig, fused_step
from pararnn.lm.drafts import called_pass
from pararnn.lm.replay import make_steady, next_logits
fused_step.PROGRAMS = 1  # of few programs each
dtype, rows, count = getattr(torch, sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
norm = sys.argv[4]
near = 1e-5 if dtype == torch.float32 else 1e-2
torch.manual_seed(0)
config = LMConfig(32, 1, 48, intermediate_size=32, num_heads=2, cell="lstm", norm=norm)
model = LanguageModel(config, dtype=dtype).eval()
tokens, cache = torch.randint(48, (rows, 5 + count)), model.new_cache()
with torch.no_grad():
    next_logits(model, tokens[:, :5], cache)
    make_steady(cache)
    alone = [model.new_cache() for _ in range(rows)]
    for row, other in enumerate(alone):
        next_logits(model, tokens[row : row + 1, :5], other)
        make_steady(other)
    logits, memories = fused_step.pass_logits(model, tokens[:, 5:], cache, False)
    called = called_pass(model, tokens[:, 5:], cache)
    torch.testing.assert_close((logits, memories), called, rtol=near, atol=near)
    for layers in zip(*(other.layers for other in alone), cache.layers):
        *firsts, last = (layer.read() for layer in layers)
        for row, first in enumerate(firsts):  # calls may round the states of several rows
            [a.copy_(b[row : row + 1]) for a, b in zip(first, last)]
    for place in range(count):
        step = fused_step.step_logits(model, tokens[:, 5 + place], cache, False)
        assert torch.equal(step, logits.view(rows, count, -1)[:, place])
        (layer,), (memory, _) = cache.layers, memories
        assert all(torch.equal(a, b[:, place]) for a, b in zip(layer.read(), memory, strict=True))
        for row, other in enumerate(alone):
            one = fused_step.step_logits(model, tokens[row : row + 1, 5 + place], other, False)
            assert torch.equal(one, step[row : row + 1]), (place, row)
"""


@NEEDS_TRITON
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "rows", "count", "norm"),
    [
        ("float32", 2, 2, "rms"),
        ("float16", 2, 2, "rms"),
        ("float16", 1, 7, "rms"),
        ("float16", 3, 2, "rms"),
        ("float32", 2, 2, "layer"),
    ],
)
def test_passes_are_steps_one_after_the_other(dtype, rows, count, norm):
    """By Triton's interpreter; and steps of rows are those of each by itself."""
    arguments = [dtype, str(rows), str(count), norm]
    result = run_fresh(INTERPRETED, *arguments, environment={"TRITON_INTERPRET": "1"})
    assert result.returncode == 0, result.stderr


BETWEEN_CALLS = """
import sys, torch
from dataclasses import replace
from pararnn.lm import LanguageModel, LMConfig, fused_step
from pararnn.lm.backbone import Block
from pararnn.lm.pages import Pages, Pool, rows_cache
from pararnn.lm.replay import make_steady, next_logits
fused_step.PROGRAMS = 1  # of few programs each
dtype, rows, (other, norm) = getattr(torch, sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
near = 1e-5 if dtype == torch.float32 else 2e-2
torch.manual_seed(0)
config = LMConfig(32, 3, 48, intermediate_size=32, num_heads=2, cell="lstm", num_attention_heads=2)
whole = replace(config, mixers=("rnn",) * 3, norm=norm if rows == 2 else "rms")
model = LanguageModel(whole, dtype=dtype)
config = replace(config, norm=norm, cell="gated-delta", cell_config={"K": 4})
for place in range(3) if rows == 2 else (0, 2):
    model.backbone.layers[place] = Block(other, config, dtype=dtype)
model.reset_parameters()
with torch.no_grad():
    for parameter in model.eval().parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    model.embed_tokens.weight += 1  # a mean
    tokens, called = torch.randint(48, (6, rows)), model.new_cache()
    pool = Pool(model, 1 << 16, 4) if other == "attention" else None
    cache = rows_cache(model, rows, pool)
    if pool is not None:
        for row in range(rows):
            cache.places.set(row, Pages(pool), 0)
    for token in tokens:
        if pool is not None:
            cache.places.prepare([1] * rows)
        logits = fused_step.step_logits(model, token, cache, False)
        if pool is not None:
            cache.places.advance([1] * rows)
        expected = next_logits(model, token.unsqueeze(1), called)
        torch.testing.assert_close(logits, expected, rtol=near, atol=near)
        assert not torch.allclose(logits, expected.roll(1, 1), rtol=near, atol=near)
"""


@NEEDS_TRITON
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "rows", "other", "norm"),
    [
        ("float32", 1, "attention", "rms"),
        ("float16", 3, "attention", "rms"),
        ("float32", 2, "matrix", "rms"),
        ("float32", 2, "attention", "rms"),
        ("float32", 1, "attention", "layer"),
        ("float16", 3, "attention", "layer"),
        ("float32", 2, "matrix", "layer"),
        ("float32", 2, "attention", "layer"),
    ],
)
def test_mixers_without_kernels_are_called_between_them(dtype, rows, other, norm):
    """By Triton's interpreter; keys are in pages."""
    arguments = [dtype, str(rows), other, norm]
    result = run_fresh(BETWEEN_CALLS, *arguments, environment={"TRITON_INTERPRET": "1"})
    assert result.returncode == 0, result.stderr


LARGE = """
import torch
from pararnn.lm import LanguageModel, LMConfig, fused_step
from pararnn.lm.replay import make_steady, next_logits
fused_step.PROGRAMS = 1  # of few programs each
torch.manual_seed(0)
config = LMConfig(32, 1, 48, intermediate_size=32, num_heads=2, cell="lstm")
model = LanguageModel(config, dtype=torch.float16).eval()
text, cache = torch.randint(48, (3, 6)), model.new_cache()
with torch.no_grad():
    model.embed_tokens.weight[:, 3] = 3e4
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter *= 6
    assert fused_step.gain_scale_of(model) == 1 / 8
    next_logits(model, text[:, :5], cache)
    make_steady(cache)
    logits = fused_step.step_logits(model, text[:, 5], cache, False)
    expected = next_logits(model, text, model.new_cache())
    torch.testing.assert_close(logits, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())
    model.backbone.norm.weight *= 2
    assert fused_step.gain_scale_of(model) == 1 / 16
"""


@NEEDS_TRITON
@pytest.mark.thorough
def test_large_numbers_of_float16_stay_finite_before_a_norm():
    """By Triton's interpreter: a channel's number times a gain would be infinite."""
    result = run_fresh(LARGE, environment={"TRITON_INTERPRET": "1"})
    assert result.returncode == 0, result.stderr


def test_gains_are_scaled_in_float16_alone():
    model = plain("gru")
    assert fused_step.gain_scale_of(model) == 1
    model.half().reset_parameters()
    assert fused_step.gain_scale_of(model) == 1
    with torch.no_grad():
        model.backbone.norm.weight[3] = -5
        assert fused_step.gain_scale_of(model) == 1 / 8
        for parameter in model.parameters():
            parameter /= 50
    assert fused_step.gain_scale_of(model) == 8
    with torch.inference_mode():  # whose tensors have no versions
        norm = model.backbone.norm
        norm.weight = torch.nn.Parameter(torch.full_like(norm.weight, 4))
        assert fused_step.gain_scale_of(model) == 1 / 4
        norm.weight *= 2
        assert fused_step.gain_scale_of(model) == 1 / 8


class Asinh(pararnn.Cell):
    """A cell with a function that `HEADER` has not."""

    states, gates, params = ("h",), ("x",), {"a": pararnn.Param("D")}

    def step(self, state, gate, param):
        return torch.asinh(gate.x + param.a * state.h)


def test_functions_without_triton_have_no_kernel():
    program = program_of(Asinh(8))
    with pytest.raises(EngineError, match="asinh"):
        step_lines(program)
    assert not has_kernel(program)
