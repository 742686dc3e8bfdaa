"""The demo: train a byte-level language model, then measure and check the engines."""

from __future__ import annotations

import platform
import shlex
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pararnn
from pararnn.base.atomic import write_text
from pararnn.base.extras import require
from pararnn.cells import Cell
from pararnn.cells.find import find_cell
from pararnn.check.verify import Report
from pararnn.lab.records import to_json
from pararnn.lab.tasks import (
    Corpus,
    bigram_bits,
    file_corpus,
    random_windows,
    spread_windows,
    stdlib_corpus,
    unigram_bits,
)
from pararnn.lab.train.budget import Curves, train_within
from pararnn.lab.train.config import DataConfig, OptimiserConfig, RunConfig
from pararnn.lab.train.files import NEW, check_own
from pararnn.lab.train.measure import (
    LOOP,
    Agreement,
    Pair,
    Timing,
    auto_pair,
    compare_to_loop,
    pairs_of,
    solver_set_to,
    time_pair,
)
from pararnn.lab.train.plot import plot_curves
from pararnn.lab.train.recipes import recipe
from pararnn.lm import (
    BYTES,
    LanguageModel,
    LMConfig,
    bits_per_byte,
    sample,
    save_byte_tokenizer,
    save_checkpoint,
)
from pararnn.program.program import program_of
from pararnn.tune.timing import device_name
from pararnn.zoo import CELLS

FILES = (
    "metrics.json",
    "loss.png",
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""Files that a demo writes."""
VALID_BYTES = 64 * 512
"""Bytes of a validation while training, at most."""
# Validating more often than this would take up much of a short budget.
SECONDS_A_VALIDATION = 5
WHOLE_SECONDS = 50
"""Budgets below this evaluate on fewer windows, in proportion."""
AFTER = 0.25
"""Once measuring has taken this share of the budget, it begins nothing new."""
MLP_RATIO = 2
"""Hidden channels of the SwiGLU over width: 256 would be the backbone's least, wide for 32."""


@dataclass(frozen=True)
class DemoConfig:
    """Everything that a demo run depends on.

    device: where to run. text: a file to learn; None is Python's standard library. cell: a name in
    `pararnn.CELLS`, or a class of one's own by its import path, "package.module:Class". seconds,
    steps: the training budget; steps None is no bound; what follows is cut to a share of the
    seconds, see AFTER. out: the folder for results. seed: of initial weights, windows and the
    sample.

    width, num_layers, num_heads, solver, backend: of the model; width None is 128, or 32 for cells
    that mix channels, whose Newton iteration costs width^3. batch, length: of training windows (B,
    T); learning_rate: its peak. valid_windows, valid_length: of the final evaluation. timed_batch,
    timed_length: the second shape to time, besides the training one; timed_repeats: how often.
    verify_batch: windows to verify. sample_bytes: length of the sample.
    """

    device: str = "cpu"
    text: str | None = None
    cell: str = "gru"
    seconds: float = 100.0
    steps: int | None = None
    out: str = "runs/demo"
    seed: int = 0
    width: int | None = None
    num_layers: int = 2
    num_heads: int = 1
    solver: str = "auto"
    backend: str = "auto"
    batch: int = 16
    length: int = 128
    learning_rate: float = 8e-3
    valid_windows: int = 128
    valid_length: int = 512
    timed_batch: int = 1
    timed_length: int = 2048
    timed_repeats: int = 5
    verify_batch: int = 2
    sample_bytes: int = 300


def run_demo(config: DemoConfig) -> dict[str, Any]:
    """Run the demo: prints what it finds and writes the same to `config.out`.

    Writes loss.png, metrics.json, whose content is the result, and the model with its tokenizer
    (see `pararnn.lm.load_checkpoint`; `pararnn generate` takes the folder). Raises MissingExtra
    without transformers, tqdm, matplotlib or safetensors, TextError when the text is missing or
    too short, CellError for an unknown cell, ValueError for impossible sizes, TrainingError where
    one of the files is there and no demo wrote it, and as training does.
    """
    for module in ("tqdm", "matplotlib", "safetensors", "transformers"):
        require(module)  # now, not after a training run
    out = Path(config.out)
    check_own(out, FILES, "metrics.json", "environment")
    out.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(config)
    print(f"text: {corpus.name}, {len(corpus.train):,} bytes, {len(corpus.valid):,} held out")
    baselines = {
        "unigram": unigram_bits(corpus.train, corpus.valid),
        "bigram": bigram_bits(corpus.train, corpus.valid),
    }
    print("baselines: " + ", ".join(f"{k} {v:.3f}" for k, v in baselines.items()), "bits per byte")

    torch.manual_seed(config.seed)
    model = make_model(config)
    size = sum(p.numel() for p in model.parameters())
    environment = describe_environment(torch.device(config.device))
    print(f"model: {config.cell}, {size:,} parameters, on {environment['device']}")
    model, curves = train_demo(config, corpus)
    count = within_budget(config.valid_windows, config)
    bits = {
        part: evaluate(model, spread_windows(data, count, config.valid_length))
        for part, data in (("train", corpus.train), ("validation", corpus.valid))
    }
    print_training(curves, bits, baselines)

    result = measure(model, corpus, config)
    all_pass = all(report.passed for report in result.reports.values())
    if result.timings:
        print_engines(result.timings, result.agreement, config.timed_repeats)
    for pair, report in result.reports.items():
        print(f"pararnn.verify of ({', '.join(pair)}): {report.short}")
        if not report.passed:
            print(report)
    if result.left_out:
        print(f"left out, as --seconds {config.seconds:g} has no time for it:")
        for name in result.left_out:
            print(f"  {name}")

    text = make_sample(model, corpus, config)
    print(f"sample:\n{indent(text)}")
    title = f"{config.cell} on {corpus.name}"
    lines = {"train": curves.train, "validation": curves.valid}
    plot_curves(lines, "bits per byte", title, out / "loss.png", baselines)
    save_checkpoint(model, out)
    save_byte_tokenizer(out)
    metrics = {
        "config": asdict(config),
        "environment": environment,
        "parameters": size,
        "corpus": {
            "name": corpus.name,
            "train_bytes": len(corpus.train),
            "validation_bytes": len(corpus.valid),
        },
        "bits_per_byte": {**baselines, **bits},
        "steps": curves.steps,
        "training_seconds": curves.seconds,
        "train_curve": [list(point) for point in curves.train],
        "validation_curve": [list(point) for point in curves.valid],
        "timings": [asdict(timing) for timing in result.timings],
        "agreement": [asdict(each) for each in result.agreement],
        "left_out": result.left_out,
        "verified": all_pass,
        "sample": text,
    }
    write_text(out / "metrics.json", to_json(metrics))
    print(f"wrote loss.png, metrics.json and the model to {out}; it goes on with a text of yours:")
    print(f"  pararnn generate --model {shlex.quote(str(out))} --prompt 'def '")
    return metrics


@dataclass(frozen=True)
class Measured:
    """Measurements of the engines; `left_out` names what there was no time for."""

    timings: list[Timing]
    agreement: list[Agreement]
    reports: dict[Pair, Report]
    left_out: list[str]


def measure(model: LanguageModel, corpus: Corpus, config: DemoConfig) -> Measured:
    """Verify and time every pair, what "auto" takes first, until the budget is spent."""
    device = torch.device(config.device)
    windows = [
        random_windows(corpus.valid, batch, length, generator_of(config)).to(device)
        for batch, length in timed_shapes(config)
    ]
    usual = auto_pair(model, config.batch, config.length)
    pairs = sorted(pairs_of(model), key=lambda pair: (pair != usual, pair != LOOP))
    result = Measured([], [], {}, [])

    def verify(pair: Pair) -> None:
        with solver_set_to(model, *pair):
            result.reports[pair] = pararnn.verify(model, windows[0][: config.verify_batch, :-1])

    def compare(pair: Pair, batch: Tensor) -> None:
        result.timings.append(time_pair(model, batch, pair, config.timed_repeats))
        result.agreement.append(compare_to_loop(model, batch, pair))

    verifying = [(f"pararnn.verify of ({', '.join(p)})", partial(verify, p)) for p in pairs]
    comparing = [
        (f"the time of ({', '.join(p)}), B {len(w)}, T {w.shape[1] - 1}", partial(compare, p, w))
        for w in windows
        for p in pairs
    ]
    deadline = time.perf_counter() + AFTER * config.seconds
    for name, part in [verifying[0], *comparing, *verifying[1:]]:
        if result.reports and time.perf_counter() >= deadline:
            result.left_out.append(name)
        else:
            part()
    return result


def within_budget(windows: int, config: DemoConfig) -> int:
    """As many windows to evaluate on as the budget is long enough for."""
    return min(windows, max(1, round(windows * config.seconds / WHOLE_SECONDS)))


def lm_config(config: DemoConfig) -> LMConfig:
    """Return the config of the demo's language model; CellError for an unknown cell."""
    cell_class = find_cell(config.cell, CELLS)
    width = default_width(cell_class) if config.width is None else config.width
    return LMConfig(
        vocab_size=BYTES,
        hidden_size=width,
        intermediate_size=MLP_RATIO * width,
        num_hidden_layers=config.num_layers,
        cell=config.cell,
        num_heads=config.num_heads,
        solver=config.solver,
        backend=config.backend,
    )


def make_model(config: DemoConfig) -> LanguageModel:
    """Return the config's model on its device, drawn from torch's global generator."""
    return LanguageModel(lm_config(config), device=config.device)


def run_config(config: DemoConfig) -> RunConfig:
    """Return the run of the `tiny` recipe's kind that trains the config's model."""
    windows = within_budget(VALID_BYTES // config.length, config)
    return replace(
        recipe("tiny"),
        name="demo",
        model=lm_config(config),
        data=DataConfig(sequence_length=config.length + 1),  # bytes, and the one to predict
        optimiser=OptimiserConfig(learning_rate=config.learning_rate, z_loss=0.0),
        steps=config.steps or sys.maxsize,
        batch=config.batch,
        device_batch=config.batch,
        seed=config.seed % 2**32,
        valid_rows=windows,
        verify_every=0,
        report_to="none",
        out=str(Path(config.out) / NEW),
    )


def train_demo(config: DemoConfig, corpus: Corpus) -> tuple[LanguageModel, Curves]:
    """Return the config's model after its training, and the curves."""
    validations = min(10, max(1, int(config.seconds // SECONDS_A_VALIDATION)))
    device = torch.device(config.device)
    return train_within(config.seconds, run_config(config), corpus, device, validations)


@torch.no_grad()
def evaluate(model: LanguageModel, windows: Tensor, batch: int = 32) -> float:
    """Return bits per byte of windows (B, T + 1) on any device, each read from the zero state."""
    device = model.lm_head.weight.device
    total = 0.0
    for rows in windows.split(batch):
        rows = rows.to(device)
        total += len(rows) * bits_per_byte(model(rows[:, :-1]), rows[:, 1:]).item()
    return total / len(windows)


def load_corpus(config: DemoConfig) -> Corpus:
    """Read the config's text; TextError as in `pararnn.lab.tasks`."""
    return stdlib_corpus() if config.text is None else file_corpus(Path(config.text))


def default_width(cell_class: type[Cell]) -> int:
    """128 channels, or 32 where Newton's cost grows with their cube."""
    return 32 if program_of(cell_class(8)).coupling.reach(8) else 128


def timed_shapes(config: DemoConfig) -> list[tuple[int, int]]:
    """(B, T) of the batches on which solvers are timed: the training one and a long one."""
    return [(config.batch, config.length), (config.timed_batch, config.timed_length)]


def generator_of(config: DemoConfig, device: str = "cpu") -> torch.Generator:
    """Return a generator that depends on the config's seed only."""
    return torch.Generator(device).manual_seed(config.seed)


def describe_environment(device: torch.device) -> dict[str, str]:
    """Return the facts, besides the config, that a measurement depends on: device and versions."""
    return {
        "device": device_name(device),
        "threads": str(torch.get_num_threads()),
        "pararnn": pararnn.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def make_sample(model: LanguageModel, corpus: Corpus, config: DemoConfig, prompt: int = 64) -> str:
    """Return the first bytes of the held-out text and the model's continuation, printable."""
    start = corpus.valid[:prompt].unsqueeze(0)
    generator = generator_of(config, config.device)
    more = sample(model, start.to(config.device), config.sample_bytes, 0.8, generator).cpu()
    return printable(torch.cat([start, more], 1)[0])


def printable(data: Tensor) -> str:
    """Bytes as text; what a terminal should not be sent is escaped."""
    text = bytes(data.tolist()).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def indent(text: str) -> str:
    """Return text as a quotation."""
    return "\n".join(f"  | {line}" for line in text.splitlines())


def print_training(curves: Curves, bits: dict[str, float], baselines: dict[str, float]) -> None:
    """Print the losses that training reached, next to the baselines."""
    gain = baselines["bigram"] - bits["validation"]
    print(
        f"trained {curves.steps:,} steps in {curves.seconds:.0f} s: train {bits['train']:.3f}, "
        f"validation {bits['validation']:.3f} bits per byte "
        f"({abs(gain):.3f} {'below' if gain >= 0 else 'above'} the bigram)"
    )


def print_engines(timings: list[Timing], agreement: list[Agreement], repeats: int) -> None:
    """Every engine against the loop: times and differences, shape by shape."""
    print(f"time of a pass in ms, forward / forward + backward, median of {repeats}:")
    loops = {(t.batch, t.length): t for t in timings if (t.solver, t.backend) == LOOP}
    shapes: set[tuple[int, int]] = set()
    for timing, agree in zip(timings, agreement, strict=True):
        shape = (timing.batch, timing.length)
        if shape not in shapes:
            print(f"  B {timing.batch}, T {timing.length}:")
            shapes.add(shape)
        line = f"    {timing.solver + ', ' + timing.backend:18} {milliseconds(timing)}"
        loop = loops.get(shape)
        if timing is not loop:
            line += "   " if loop is None else f"   {speedups(timing, loop)} as fast as the loop; "
            line += (
                f"largest differences: logits {agree.logits:.1e}, gradients "
                f"{agree.gradients:.1e} (relative)"
            )
        print(line + ("   <- auto" if timing.auto else ""))


def speedups(timing: Timing, loop: Timing) -> str:
    """Return the speed-up over the loop, of the forward pass and of both passes."""
    both = loop.forward_backward / timing.forward_backward
    return f"{loop.forward / timing.forward:.2f}x / {both:.2f}x"


def milliseconds(timing: Timing) -> str:
    """Return a timing's two medians as text."""
    return f"{1e3 * timing.forward:7.1f} / {1e3 * timing.forward_backward:7.1f}"
