"""Time of a token when the paper's language models decode, in bfloat16.

Ways: "eager", PyTorch calling kernels one by one; "graph", a step of compiled blocks as a CUDA
graph; "searched", the same after the compiler's search for good kernels; "recorded", a graph of the
step as it is called, not compiled; "fused", a graph of the step in few kernels
(`pararnn.lm.fused_step`). `pararnn.lm.sample` and `pararnn serve` replay the last where there is
one, and else the one before; both have attention's keys in pages, the others in one piece.
"generate", transformers' generate with a static cache, which compiles the step itself: the time of
64 more tokens. Weights: as they are, bfloat16, or in 8 bits (`quantise_weights`). Context:
tokens that attention's cache holds; recurrent layers hold one state, whatever came before. The
weights are read once a token: `weights_ms` is the time of that at the GPU's copy bandwidth,
measured here. `cache_MB` is what is remembered of the tokens before, all rows together; `peak_GiB`
the most that was allocated, weights included. Puts its rows into results/lm_decode.csv; those of
other cases stay.

    python benchmarks/lm_decode.py [--only gru-1B] [--ways eager graph] [--weights bfloat16 int8]
        [--learned 15M] [--out FOLDER] [--smoke]

--learned: models of a size that benchmarks/learn.py compares, as `sample` decodes with them; their
rows are in results/learn_decode.csv.
"""

from __future__ import annotations

import gc
import itertools
import statistics
from functools import partial
from typing import Any, NamedTuple, cast

import lm_step
import torch
from learn_models import SIZES, TINY, Make, models
from lm_command import chosen, device_of, parser_of, record_of
from lm_step import ARCHITECTURES, peak_memory
from mamba2 import Sizes, language_model, ready_to_decode
from protocol import Call, call_times, captured_graph, wait, wall_ms
from torch import Tensor

from pararnn.lm import LanguageModel, preset
from pararnn.lm.cache import LayerCache, LMCache, PlainCache, SteadyCache
from pararnn.lm.config import LMConfig
from pararnn.lm.fused_step import fused_logits, takes
from pararnn.lm.mixers import Attention
from pararnn.lm.pages import PagedCache
from pararnn.lm.quantise import DTYPES as FORMATS
from pararnn.lm.quantise import is_quantised, quantise_weights
from pararnn.lm.replay import make_steady

MORE = 64
SEARCH = {"graph": False, "searched": True}
WAYS = ("eager", *SEARCH)
RECORDED, FUSED = "recorded", "fused"
PLAIN = "bfloat16"
CONTEXTS = (2_048, 32_768, 131_072)
"""Of the Transformer; others hold the same at any."""
ROOM = 4096
"""Tokens of a row that steps may add to the keys in pages."""
KEYS = ("device", "model", "way", "B", "context", "weights")
"""Columns that identify a case."""


class Case(NamedTuple):
    """Model and way to decode."""

    name: str
    config: LMConfig | Sizes | Make
    way: str
    batch: int
    context: int
    weights: str = PLAIN


class FixedCache(SteadyCache):
    """A cache as CUDA graphs need it, with keys too: they are random, and as many at every step."""

    def __init__(self, mixer: Any, batch: int, context: int) -> None:
        super().__init__()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        if isinstance(mixer, Attention):
            weight = mixer.k_proj.weight
            size = (batch, mixer.heads, context, len(weight) // mixer.heads)
            kind: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
            self.keys, self.values = torch.randn(size, **kind), torch.randn(size, **kind)

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        self.keys[:, :, -1:], self.values[:, :, -1:] = keys, values
        return self.keys, self.values


def cache_bytes(layer: LayerCache, context: int) -> float:
    """Return the bytes of a layer's cache, without the room for more tokens."""
    names = ("inputs", "states", "keys", "values", "key_pages", "value_pages")
    tensors = [getattr(layer, name, None) for name in names]
    size = sum(x.numel() * x.element_size() for x in tensors if x is not None)
    if not isinstance(layer, PagedCache):
        return size
    return size * context / (layer.places.table.shape[1] * layer.key_pages.shape[2])


def cases() -> list[Case]:
    every = []
    for name in ARCHITECTURES:
        config = preset(name, "1B").model
        contexts = CONTEXTS if name == "transformer" else CONTEXTS[:1]
        for way, batch, context in itertools.product(WAYS, (1, 64), contexts):
            if batch * context <= 2**18:  # more keys and values do not fit next to the weights
                every.append(Case(f"{name}-1B", config, way, batch, context))
        if name in ("gru", "lstm"):
            every += [Case(f"{name}-1B", config, FUSED, 1, 2048)]
        if name == "transformer":
            sizes = ((1, 2048), (1, 32_768), (1, 131_072), (16, 8192))
            every += [Case(f"{name}-1B", config, RECORDED, *size) for size in sizes]
            every += [Case(f"{name}-1B", config, FUSED, *size) for size in sizes[:-1]]
        if name == "gru":
            every += [Case(f"{name}-1B", config, "generate", batch, 2048) for batch in (1, 64)]
            every += [Case(f"{name}-1B", config, RECORDED, batch, 2048) for batch in (1, 16, 64)]
            every += [Case(f"{name}-1B", config, FUSED, batch, 2048) for batch in (8, 64)]
    config = preset("gru", "1B").model
    return every + [
        Case("gru-1B", config, FUSED, batch, 2048, weights)
        for weights in FORMATS
        for batch in (1, 16, 64)
    ]


def smoke_cases() -> list[Case]:
    configs = {case.name: case.config for case in lm_step.smoke_cases()}
    eager = [Case(name, config, "eager", 2, 8) for name, config in configs.items()]
    return [*eager, Case("gru-tiny", configs["gru-tiny"], "generate", 1, 8)]


LEARNED = (
    *("transformer", "gru", "lstm", "min-gru", "head-lstm", "gated-delta", "mamba2"),
    *("hybrid-gru", "hybrid-lstm", "hybrid-min-gru", "hybrid-head-lstm", "hybrid-gated-delta"),
    *("hybrid-gated-delta-beside-gru", "hybrid-gated-delta-beside-min-gru", "hybrid-mamba2"),
)
"""Models of learn.py that are measured."""
CALLED = ("mamba2", "hybrid-mamba2")
"""Those of them without fused steps, in their authors' stack."""


def learned_cases(size: str, smoke: bool) -> list[Case]:
    """Return models that learn.py compares, each as `sample` decodes with it."""
    makers = models(TINY if smoke else SIZES[size], "cpu" if smoke else "cuda")
    return [
        Case(f"{name}-{size}", makers[name], way, batch, 2048)
        for name in LEARNED
        for way in (["eager"] if smoke else [RECORDED, *([] if name in CALLED else [FUSED])])
        for batch in (1, 64)
    ]


def model_of(case: Case, device: torch.device) -> LanguageModel:
    """Return a case's model with fresh weights, in bfloat16."""
    kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    if callable(case.config):
        return case.config(**kind)
    return language_model(case.config, **kind)


def cache_of(model: LanguageModel, case: Case) -> LMCache:
    """Return the cache of a case's tokens so far."""
    cache = LMCache(0)
    mixers = (cast(Any, block).mixer for block in model.backbone.layers)
    fixed = [FixedCache(mixer, case.batch, case.context) for mixer in mixers]
    cache.layers, cache.length = list(fixed), case.context
    if case.way in (RECORDED, FUSED) and any(layer.keys is not None for layer in fixed):
        for index, layer in enumerate(fixed):
            if layer.keys is not None:
                plain = cache.layers[index] = PlainCache()
                plain.keys, plain.values = layer.keys, layer.values
        make_steady(cache, ROOM)
    return cache


def step_of(model: LanguageModel, case: Case, cache: LMCache) -> Call:
    """Return a step that reads the token that the last one wrote."""
    device = model.lm_head.weight.device
    token = torch.zeros(case.batch, 1, dtype=torch.long, device=device)

    @torch.no_grad()
    def step() -> None:
        cache.length = case.context
        token.copy_(model(token, cache)[:, -1].argmax(-1, keepdim=True))

    return step


def fused_step_of(model: LanguageModel, case: Case, cache: LMCache) -> Call:
    """Return a step of fused kernels that reads the token that the last one wrote."""
    assert takes(model, case.batch)
    token = torch.zeros(case.batch, dtype=torch.long, device=model.lm_head.weight.device)

    @torch.no_grad()
    def step() -> None:
        token.copy_(fused_logits(model, token, cache).argmax(-1))

    return step


def generate_times(model: LanguageModel, case: Case, rounds: int) -> list[float]:
    """Return the ms of a token by transformers' generate, of each round."""
    from pararnn.lm.hf import ParaRNNConfig, ParaRNNForCausalLM

    device = model.lm_head.weight.device
    with torch.device("meta"):
        counterpart = ParaRNNForCausalLM(ParaRNNConfig.of_lm(cast(LMConfig, case.config)))
    state = {
        name if name.startswith("lm_head") else f"model.{name}": value
        for name, value in model.state_dict().items()
    }
    counterpart.load_state_dict(state, assign=True)
    prompt = torch.zeros(case.batch, 8, dtype=torch.long, device=device)

    def ms(tokens: int) -> float:
        options: dict[str, Any] = {"min_new_tokens": tokens, "max_new_tokens": tokens}
        options |= {"do_sample": False, "attention_mask": torch.ones_like(prompt)}
        options |= {"cache_implementation": "static", "max_cache_len": 8 + 3 * MORE}
        wait(device)
        return wall_ms(partial(counterpart.generate, prompt, **options), device)

    for _ in range(2):
        ms(2 * MORE)
    return [(ms(2 * MORE) - ms(MORE)) / MORE for _ in range(rounds)]


def bytes_of(weight: Tensor) -> int:
    """Return the bytes of a weight, in 8 bits with its factors."""
    if not is_quantised(weight):
        return weight.numel() * weight.element_size()
    tensor = cast(Any, weight)
    return sum(part.numel() * part.element_size() for part in (tensor.qdata, tensor.scale))


def measure(case: Case, model: LanguageModel, rounds: int) -> dict[str, Any]:
    device = model.lm_head.weight.device
    cache_mb: float | str = ""
    if device.type == "cuda":
        gc.collect()  # the caches before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if case.way == "generate":
        times = generate_times(model, case, rounds)
    else:
        cache = cache_of(model, case)
        step = step_of(model, case, cache)
        if case.way == FUSED:
            step()  # fills the cache
            step = captured_graph([fused_step_of(model, case, cache)]).replay
        if case.way == RECORDED:
            step = captured_graph([step]).replay
        if case.way in SEARCH:
            # Products with one row are kernels of the compiler's, which a search makes faster.
            search = {"coordinate_descent_tuning": SEARCH[case.way]}
            for block in model.backbone.layers:
                block.compile(fullgraph=True, options=search)
            step = captured_graph([step]).replay
        times = call_times(step, device, 10 if case.way == "eager" else 100, rounds)
        sizes = [cache_bytes(layer, case.context) for layer in cache.layers]
        cache_mb = round(sum(sizes) / 1e6, 3)
    read = sum(
        bytes_of(value) for name, value in model.named_parameters() if not name.startswith("embed")
    )
    return {
        "model": case.name,
        "way": case.way,
        "B": case.batch,
        "context": case.context,
        "weights": case.weights,
        "median_ms": round(statistics.median(times), 4),
        "min_ms": round(min(times), 4),
        "weights_GB": round(read / 1e9, 3),
        "cache_MB": cache_mb,
        "peak_GiB": peak_memory(device),
    }


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes read and written a second by a copy."""
    size = 2**30 if device.type == "cuda" else 2**20
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = call_times(lambda: target.copy_(source), device, 10, 5)
    return 2 * size / min(times) * 1e3


def main() -> None:
    parser = parser_of(__doc__)
    ways = (*WAYS, RECORDED, FUSED, "generate")
    parser.add_argument("--ways", nargs="+", choices=ways, help="these alone")
    parser.add_argument("--weights", nargs="+", choices=(PLAIN, *FORMATS), help="these alone")
    parser.add_argument("--learned", choices=SIZES, help="a size of benchmarks/learn.py's models")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    device = device_of(args)
    every = smoke_cases() if args.smoke else cases()
    if args.learned:
        every = learned_cases(args.learned, args.smoke)
    selection = chosen(
        parser,
        args,
        every,
        lambda case: f"{case.name} {case.way}",
        lambda case: (
            (not args.ways or case.way in args.ways)
            and (not args.weights or case.weights in args.weights)
        ),
    )
    record = record_of(args, "learn_decode.csv" if args.learned else "lm_decode.csv", KEYS)
    bandwidth = copy_bandwidth(device)
    print(f"copies {bandwidth / 1e12:.2f} TB/s", flush=True)
    for (_, weights), group in itertools.groupby(selection, lambda case: (case.name, case.weights)):
        same = list(group)
        torch.manual_seed(0)
        model = model_of(same[0], device).eval()
        ready_to_decode(model)
        if weights != PLAIN:
            quantise_weights(model, weights)
        for case in same:
            torch.compiler.reset()
            for block in model.backbone.layers:
                block._compiled_call_impl = None
            row = measure(case, model, args.rounds)
            row["weights_ms"] = round(row["weights_GB"] * 1e9 / bandwidth * 1e3, 4)
            record.add(row)
    record.end()


if __name__ == "__main__":
    main()
