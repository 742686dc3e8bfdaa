"""A step of the paper's language models: forward and backward in bfloat16, without an optimizer.

Models at initialisation on random tokens; every block compiled by itself, the head and its loss in
chunks. Mamba2 is that of `mamba2.py`. Times by CUDA events, gradients dropped before every step.
Memory: the most that was allocated, parameters and gradients included. MFU: 6 x parameters x
tokens, attention's products over time left out, over what the GPU's bfloat16 can do (H100 and
H200). Puts its rows into results/lm_step.csv; those of other cases stay. The model with matrix
states has a file of its own, with the GRU of the same run.

    python benchmarks/lm_step.py [--only gru-400M] [--lengths 2048] [--out FOLDER] [--smoke]
    python benchmarks/lm_step.py --only gru-400M matrix --lengths 2048 --file lm_step_matrix.csv
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
from typing import Any, NamedTuple

import torch
from lm_command import chosen, device_of, parser_of, record_of
from mamba2 import TINY, Sizes, language_model
from protocol import Clock

from pararnn.lm import LanguageModel, preset
from pararnn.lm.config import LMConfig

ARCHITECTURES = ("gru", "lstm", "mamba2", "transformer")
TOKENS = {"400M": 32_768, "1B": 16_384}
LENGTHS = (2_048, 8_192, 32_768)
PEAK_FLOPS = 989e12
"""Of dense bfloat16 products a second, H100 SXM and H200."""
KEYS = ("device", "model", "B", "T", "packed", "compiled")
"""Columns that identify a case."""


MATRIX_TINY = LMConfig(16, 2, vocab_size=50, mixers=("matrix",) * 2, cell="m2rnn", num_heads=2)


class Case(NamedTuple):
    """A model, and the size of its batch."""

    name: str
    config: LMConfig | Sizes
    batch: int
    length: int
    z_loss: float = 1e-4
    packed: bool = False


def cases() -> list[Case]:
    """Return all that is measured: tokens of a step are the same at every length.

    Packed: documents of 64 to 4,096 tokens in one row, where resets and borders cost something.
    """
    plain = [
        Case(paper.name, paper.model, tokens // length, length, paper.z_loss)
        for scale, tokens in TOKENS.items()
        for paper in (preset(architecture, scale) for architecture in ARCHITECTURES)
        for length in LENGTHS
        if length <= tokens
    ]
    packed_cases = [
        case._replace(packed=True)
        for case in plain
        if case.length == TOKENS["400M"] and case.name.startswith(("gru", "lstm"))
    ]
    return [*plain, *packed_cases, matrix_case()]


def matrix_case() -> Case:
    """Return the 400M GRU with matrix states in place of its vectors, 16 times as many numbers."""
    gru = preset("gru", "400M")
    assert isinstance(gru.model, LMConfig)
    model = dataclasses.replace(
        gru.model,
        mixers=("matrix",) * gru.model.num_hidden_layers,
        cell="m2rnn",
        cell_config={"K": 16},
        num_heads=32,
    )
    return Case("matrix-400M", model, TOKENS["400M"] // LENGTHS[0], LENGTHS[0], gru.z_loss)


def smoke_cases() -> list[Case]:
    gru = LMConfig(16, 2, vocab_size=50)
    attention = LMConfig(16, 2, vocab_size=50, mixers=("attention",) * 2, num_attention_heads=2)
    return [
        Case("gru-tiny", gru, 2, 32),
        Case("transformer-tiny", attention, 2, 32),
        Case("mamba2-tiny", TINY, 2, 32),
        Case("gru-tiny", gru, 1, 200, packed=True),
        Case("matrix-tiny", MATRIX_TINY, 2, 32),
    ]


def borders_of(length: int) -> torch.Tensor:
    """Return the starts of documents of 64 to 4,096 tokens in a row, and the end of the last."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(64, 4097, (length // 64 + 1,), generator=generator)
    ends = lengths.cumsum(0)
    return torch.cat([torch.tensor([0]), ends[ends < length], torch.tensor([length])])


def step_times(
    model: LanguageModel, case: Case, device: torch.device, warmup: int, repeats: int
) -> list[float]:
    """Return the ms of each of `repeats` steps, after some that are not timed."""
    shape = (case.batch, case.length)
    tokens = torch.randint(model.lm_head.out_features, shape, device=device)
    borders = borders_of(case.length).to(device) if case.packed else None

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model.loss(tokens, tokens, z_loss=case.z_loss, cu_seq_lens=borders).backward()

    for _ in range(warmup):
        step()
    clock = Clock(device)
    clock.tick()
    for _ in range(repeats):
        step()
        clock.tick()
    return clock.times()


def fresh(case: Case, device: torch.device) -> LanguageModel:
    """Return a case's model, with what was before it freed, and the highest memory forgotten."""
    torch.manual_seed(0)
    torch.compiler.reset()  # code of another length would be compiled for any length
    if device.type == "cuda":
        gc.collect()  # the model before, which its compiled blocks hold in cycles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return language_model(case.config, device=device, dtype=torch.bfloat16)


def compile_blocks(model: LanguageModel) -> None:
    """Compile every block by itself; those of a kind share their code."""
    for block in model.backbone.layers:
        block.compile(fullgraph=True)


def peak_memory(device: torch.device) -> float | str:
    """GiB, the most that was allocated on a GPU."""
    if device.type == "cpu":
        return ""
    return round(torch.cuda.max_memory_allocated() / 2**30, 2)


def measure(
    case: Case, device: torch.device, use_compiler: bool, warmup: int, repeats: int
) -> dict[str, Any]:
    model = fresh(case, device)
    if use_compiler:
        compile_blocks(model)
    times = step_times(model, case, device, warmup, repeats)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {
        "model": case.name,
        "B": case.batch,
        "T": case.length,
        "packed": case.packed,
        "parameters": parameters,
        "compiled": use_compiler,
        "repeats": repeats,
        **figures(times, parameters, case.batch * case.length),
        "peak_GiB": peak_memory(device),
    }


def figures(times: list[float], parameters: int, tokens: int) -> dict[str, float]:
    """Return the steps' median and minimum in ms, and the median's tokens/s and MFU."""
    median = statistics.median(times)
    flops = 6 * parameters * tokens / median * 1e3
    return {
        "median_ms": round(median, 3),
        "min_ms": round(min(times), 3),
        "tokens_per_s": round(tokens / median * 1e3),
        "mfu_percent": round(100 * flops / PEAK_FLOPS, 2),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", help="of these T only")
    parser.add_argument("--repeats", type=int, default=20, help="steps that are timed")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--file", default="lm_step.csv", help="of the results")
    args = parser.parse_args()
    every = smoke_cases() if args.smoke else cases()
    selection = chosen(
        parser,
        args,
        every,
        lambda case: f"{case.name} at {case.length}",
        lambda case: args.lengths is None or case.length in args.lengths,
    )
    record = record_of(args, args.file, KEYS)
    for case in selection:
        record.add(measure(case, device_of(args), not args.smoke, args.warmup, args.repeats))
    record.end()


if __name__ == "__main__":
    main()
