"""The demo: the recipe `tiny` on real text next to counts of bytes, and its engines' times."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pararnn
from pararnn.base.atomic import write_text
from pararnn.base.device import default_device
from pararnn.engines.table import choose, pairs_for
from pararnn.lab.folders import make_folder
from pararnn.lab.progress import say
from pararnn.lab.records import to_json
from pararnn.lab.tasks import bigram_bits, file_corpus, spread_windows, stdlib_corpus, unigram_bits
from pararnn.lab.tasks.text import Corpus
from pararnn.lab.train.config import DataConfig, RunConfig
from pararnn.lab.train.log import LOG, read_rows
from pararnn.lab.train.recipes import recipe
from pararnn.lm import LanguageModel, bits_per_byte, load_checkpoint, sample, set_solver
from pararnn.program.program import program_of
from pararnn.tune.timing import device_name, median_seconds

FOLDER = "runs/demo"
SHAPES = ((16, 128), (1, 2048))
"""(B, T) of the passes that are timed: as in training, and one long row."""
PROMPT, SAMPLE = 64, 300
"""Bytes of the held-out text that a sample continues, and of the sample."""
LOOP = ("sequential", "torch")


def demo_config() -> RunConfig:
    """Return the run of the demo: the recipe `tiny`, of which `data.train` is left open."""
    tiny = recipe("tiny")
    data, optimiser = DataConfig(sequence_length=129), replace(tiny.optimiser, z_loss=0.0)
    return replace(
        tiny, name="demo", data=data, optimiser=optimiser, steps=1000, valid_every=100, out=FOLDER
    )


def with_text(config: RunConfig) -> tuple[RunConfig, Corpus]:
    """Return the run with its text as two files, and the text, of which a tenth is held out.

    It is the file in `data.train`, or the source of Python's standard library. Raises TextError
    for a text that is missing or too short.
    """
    source = config.data.train
    corpus = file_corpus(Path(source)) if source else stdlib_corpus()
    folder = Path(config.data.cache) / "demo"
    make_folder(folder, "set data.cache to another folder")
    paths = [folder / f"{name}.txt" for name in ("train", "valid")]
    for path, tokens in zip(paths, (corpus.train, corpus.valid), strict=True):
        path.write_bytes(tokens.numpy().tobytes())
    train, valid = map(str, paths)
    return replace(config, data=replace(config.data, train=train, valid=valid)), corpus


def run_demo(config: RunConfig) -> dict[str, Any]:
    """Train, print what the README shows, and return it; it is in demo.json of the run's folder.

    Errors as `run_training` and `with_text`.
    """
    from pararnn.lab.train.run import run_training  # seconds, which errors need not wait for

    config, corpus = with_text(config)
    say(f"text: {corpus.name}, {len(corpus.train):,} bytes, {len(corpus.valid):,} held out")
    folder = run_training(config)
    model = load_checkpoint(folder, default_device()).eval()
    rows = read_rows(Path(config.out) / LOG)
    training = [row["loss"] for row in rows if "loss" in row]
    validation = [row["valid_bits_per_byte"] for row in rows if "valid_bits_per_byte" in row]
    bits = {
        "unigram": unigram_bits(corpus.train, corpus.valid),
        "bigram": bigram_bits(corpus.train, corpus.valid),
        "train": training[-1] / math.log(2),
        "validation": validation[-1],
    }
    print("bits per byte: " + ", ".join(f"{name} {value:.3f}" for name, value in bits.items()))
    engines = list(time_engines(model, corpus.valid))
    text = _continue(model, corpus.valid)
    print(f"sample:\n  | {text.replace(chr(10), chr(10) + '  | ')}")
    result = {
        "cell": config.model.cell,
        "steps": config.steps,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "device": device_name(model.lm_head.weight.device),
        "bits_per_byte": bits,
        "engines": engines,
        "verified": all(engine["verified"] for engine in engines),
    }
    write_text(Path(config.out) / "demo.json", to_json(result))
    print(f"the model is in {folder}: pararnn generate --model {folder} --prompt 'def '")
    return result


def time_engines(model: LanguageModel, text: Tensor, repeats: int = 5) -> Iterator[dict[str, Any]]:
    """Yield each engine's times of a pass, in ms, and whether it obeys the contract; print them.

    A pass is a loss of windows of `text`, forward, and with the gradients of all parameters.
    """
    layer, weight = model.recurrent_layers()[0], model.lm_head.weight
    program, device = program_of(layer.cell), weight.device
    for batch, steps in SHAPES:
        windows = spread_windows(text, batch, steps).to(device)
        size = (batch, steps, layer.hidden_size)
        auto = choose(program, size, weight.dtype, device, "auto", "auto").pair
        print(f"ms of a pass, B {batch}, T {steps}, forward / forward + backward:")
        for pair in pairs_for(program, weight.dtype, device):
            with _solved_by(model, pair):
                with torch.no_grad():
                    forward = 1e3 * median_seconds(partial(_loss, model, windows), device, repeats)
                both = 1e3 * median_seconds(partial(_gradients, model, windows), device, repeats)
                report = pararnn.verify(model, windows[:2, :128])
            checked = "within the contract" if report.passed else str(report)
            mark = "   <- auto" if pair == auto else ""
            print(f"  {', '.join(pair):18} {forward:8.1f} / {both:8.1f}   {checked}{mark}")
            names = ("solver", "backend", "batch", "length", "forward_ms", "both_ms", "verified")
            values = (*pair, batch, steps, forward, both, report.passed)
            yield dict(zip(names, values, strict=True))


def _loss(model: LanguageModel, windows: Tensor) -> Tensor:
    return bits_per_byte(model(windows[:, :-1]), windows[:, 1:])


def _gradients(model: LanguageModel, windows: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(_loss(model, windows), list(model.parameters()))


@contextmanager
def _solved_by(model: LanguageModel, pair: tuple[str, str]) -> Iterator[None]:
    """Run a block with every layer on a pair."""
    set_solver(model, *pair)
    try:
        yield
    finally:
        set_solver(model, model.config.solver, model.config.backend)


def _continue(model: LanguageModel, text: Tensor) -> str:
    """Return the first bytes of a text and the model's continuation, printable."""
    start = text[:PROMPT].unsqueeze(0)
    device = model.lm_head.weight.device
    generator = torch.Generator(device).manual_seed(0)
    more = sample(model, start.to(device), SAMPLE, 0.8, generator).cpu()
    data = bytes(value for value in torch.cat([start, more], 1)[0].tolist() if value < 256)
    written = data.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in written)
