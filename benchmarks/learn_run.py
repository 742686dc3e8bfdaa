"""A model that is trained again and again in place: one compilation for all its rates and seeds.

float32 weights, AdamW's moments and gradients' clipping; a copy of the weights in bfloat16
computes, as FSDP2's mixed precision has it in `pararnn train`. Optimizer, schedule, clipping, loss,
order of rows and compiled blocks are the library's. On a GPU a step's loss and gradients are one
CUDA graph, so that no mixer waits for Python to launch its kernels.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from learn_models import Make, body_size, model_flops
from protocol import captured_graph, wait
from torch import Tensor, nn

from pararnn.lab.train.config import OptimiserConfig
from pararnn.lab.train.corpus.packing import Part
from pararnn.lab.train.optimiser import make_adamw, set_rate
from pararnn.lab.train.order import RowSampler
from pararnn.lab.train.sharding import clip_gradients
from pararnn.lm.compiled import compile_repeatably
from pararnn.lm.loss import IGNORED

Row = dict[str, Any]
PROBE = 15
"""Step after which a training's seconds are known."""


class Shape(NamedTuple):
    """A step's rows, and the tokens of a row."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.rows * self.length


class Corpus(NamedTuple):
    """Tokens to learn and held-out ones, on the device, and the latter's bytes of text.

    valid has the end of a document in front, so that each of its tokens is predicted. key: a hash
    of the held-out tokens and of the first file of learned ones: packages of Debian change, and a
    corpus made later may differ.
    """

    name: str
    train: Tensor
    valid: Tensor
    valid_bytes: int
    key: str = ""


class Job(NamedTuple):
    """A training of a mixer of a size at a rate: `steps` steps, `marks` validations."""

    mixer: str
    size: str
    rate: float
    seed: int
    steps: int
    marks: int


class NoTimeError(RuntimeError):
    """A training would not end in time."""


def read_corpus(folder: Path, device: torch.device) -> Corpus:
    """Read a folder that learn_data.py or learn_packs.py wrote, with all packs that are there."""
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    kind, narrow = meta["dtype"], np.int16 if meta["vocabulary"] <= 1 << 15 else np.int32

    learned = [np.fromfile(path, kind) for path in sorted(folder.glob("train*.bin"))]
    held_out = np.fromfile(folder / "valid.bin", kind)
    key = hashlib.sha256(held_out.data)
    key.update(learned[0].data)
    train, valid = (
        torch.from_numpy(numbers.astype(narrow)).to(device)
        for numbers in (np.concatenate(learned), held_out)
    )
    valid = torch.cat([valid.new_tensor([meta["end"]]), valid])
    size = Part(**meta["valid"]).bytes
    return Corpus(folder.name, train, valid, size, key.hexdigest()[:8])


def batches(
    corpus: Corpus, shape: Shape, seed: int, steps: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches without end, as `pararnn train` orders them: the numbers of rows, and their tokens.

    They are of the first tokens of the corpus, as many as `steps` steps read, and depend on these,
    shape and seed only: all mixers read the same, whatever else of the corpus is there.
    """
    length = shape.length
    count = len(corpus.train) if steps is None else min(len(corpus.train), steps * shape.tokens)
    rows = corpus.train[: count // length * length].view(-1, length)
    if len(rows) < shape.rows:
        raise ValueError(f"{corpus.name} has {len(rows)} rows, a step takes {shape.rows}")
    order = RowSampler(len(rows), seed)
    for epoch in itertools.count():
        order.set_epoch(epoch)
        numbers = torch.tensor(list(order))
        # On the device at once: a copy a step would make the host wait for every step.
        there = numbers.to(rows.device)
        for start in range(0, len(rows) - shape.rows + 1, shape.rows):
            own = slice(start, start + shape.rows)
            yield numbers[own], rows[there[own]].long()


def held_out(corpus: Corpus, shape: Shape) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of tokens and labels, one shape: rows overlap by a token, so each is predicted once.

    A row has `length` - 1 predictions; what fills the last batch has none.
    """
    step = shape.length - 1
    count = -(-(len(corpus.valid) - 1) // step)
    whole = -(-count // shape.rows) * shape.rows
    text = corpus.valid.new_full((whole * step + 1,), IGNORED)
    text[: len(corpus.valid)] = corpus.valid
    labels = text.unfold(0, shape.length, step).long()
    for part in labels.split(shape.rows):
        yield part.clamp(min=0), part


class Trainee:
    """A mixer's model on a device, compiled on CUDA."""

    def __init__(self, make: Make, device: torch.device, shape: Shape) -> None:
        self.device, self.shape = device, shape
        self.master = make(device=device, dtype=torch.float32)
        self.model = make(device=device, dtype=torch.bfloat16)
        self.weights: list[Tensor] = list(self.master.parameters())
        self.copies: list[Tensor] = list(self.model.parameters())
        for weight in self.weights:
            weight.grad = torch.zeros_like(weight)
        self.config, self.steps = OptimiserConfig(), 0
        self.norm = torch.zeros((), device=device)
        self.gradients: Callable[[Tensor], tuple[Tensor, list[Tensor]]] = self._gradients
        if device.type == "cuda":
            for block in cast(list[Any], self.model.backbone.blocks):
                # One compilation serves all: blocks of a kind have the same code.
                block.forward = compile_repeatably(block.forward, fullgraph=True)

    @property
    def parameters(self) -> dict[str, int]:
        """Besides embedding and head, and of the whole; operations for a token of training."""
        return {
            "parameters": body_size(self.master),
            "parameters_all": sum(each.numel() for each in self.weights),
            "flops": model_flops(self.master),
        }

    def compile(self, corpus: Corpus) -> None:
        """Run a block of each kind once, forward and backward, and without gradients.

        Processes that share a GPU compile at once, and have no room for all blocks of all models.
        """
        backbone = self.model.backbone
        layers, kinds = backbone.layers, dict[Any, nn.Module]()
        for layer in list(layers):
            recurrent = getattr(layer.mixer, "rnn", None)
            cell = None if recurrent is None else type(recurrent.cell)
            kinds.setdefault((type(layer), type(layer.mixer), cell), layer)
        backbone.layers = nn.ModuleList(kinds.values())
        _, tokens = next(batches(corpus, self.shape, 0))
        self._gradients(tokens)
        with torch.no_grad():
            self._loss(tokens, tokens)
        self.model.zero_grad()
        backbone.layers = layers

    def start(self, rate: float, seed: int, steps: int) -> Any:
        """Draw new weights; return an optimizer."""
        torch.manual_seed(seed)
        self.master.reset_parameters()
        self._hand_over()
        self.config, self.steps = OptimiserConfig(learning_rate=rate), steps
        optimizer = make_adamw(self.master, self.config, fused=self.device.type == "cuda")
        if self.device.type == "cuda":
            self._capture()
        return optimizer

    def end(self) -> None:
        """Free the graph of a training, which holds all that its backward pass reads."""
        self.gradients = self._gradients
        self.model.zero_grad()

    def step(self, tokens: Tensor, optimizer: Any, number: int) -> Tensor:
        """Make a step, counted from 0, on tokens (B, T); return its loss without waiting for it."""
        set_rate(optimizer, self.config, number, self.steps)
        loss, grads = self.gradients(tokens)
        torch._foreach_copy_([cast(Tensor, weight.grad) for weight in self.weights], grads)
        self.norm = clip_gradients(self.weights, self.config.grad_norm)
        optimizer.step()
        self._hand_over()
        return loss

    @torch.no_grad()
    def nats(self, corpus: Corpus) -> float:
        """Return the sum of the held-out tokens' cross-entropy."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for tokens, labels in held_out(corpus, self.shape):
            total += self._loss(tokens, labels, num_items=1)
        return float(total)

    def speed(self, corpus: Corpus, steps: int) -> tuple[float, float]:
        """Return tokens/s of training, after two untimed steps, and seconds of a validation."""
        optimizer = self.start(1e-4, 0, steps + 2)
        source = batches(corpus, self.shape, 0)
        begin = 0.0
        for number in range(steps + 2):
            if number == 2:
                wait(self.device)
                begin = time.perf_counter()
            self.step(next(source)[1], optimizer, number)
        wait(self.device)
        middle = time.perf_counter()
        self.nats(corpus)
        self.end()
        return steps * self.shape.tokens / (middle - begin), time.perf_counter() - middle

    def train(self, job: Job, corpus: Corpus, until: float = math.inf) -> Iterator[Row]:
        """Train, and yield a row for each of the job's validations; `end` is the caller's.

        seconds: of the training alone. order: a hash of all rows so far, in their order. most_nats:
        the largest loss of a step since the last row, most_norm that of the gradients' norms. A
        loss that is not finite ends the training, with that row. Raises NoTimeError when the first
        steps tell that it would not end by the time `until`.
        """
        optimizer = self.start(job.rate, job.seed, job.steps)
        source = batches(corpus, self.shape, job.seed, job.steps)
        marks = [round(mark * job.steps / job.marks) for mark in range(1, job.marks + 1)]
        order, seconds, previous = hashlib.sha256(), 0.0, 0
        for mark in marks:
            wait(self.device)
            begin = time.perf_counter()
            losses, norms = [], []
            for step in range(previous, mark):
                own, tokens = next(source)
                order.update(own.numpy().tobytes())
                losses.append(self.step(tokens, optimizer, step))
                norms.append(self.norm)
                if step == PROBE and until < math.inf:
                    wait(self.device)
                    taken = time.perf_counter() - begin
                    needed, left = taken * job.steps / (step + 1), until - time.time()
                    if needed > left:
                        raise NoTimeError(f"it needs {needed:.0f} s, and {left:.0f} s are left")
            wait(self.device)
            seconds, previous = seconds + time.perf_counter() - begin, mark
            nats, tokens_read = self.nats(corpus), mark * self.shape.tokens
            every = torch.stack(losses)
            yield {
                **job._asdict(),
                "corpus": corpus.name,
                "corpus_key": corpus.key,
                **self.parameters,
                "B": self.shape.rows,
                "T": self.shape.length,
                "step": mark,
                "tokens": tokens_read,
                "epochs": round(tokens_read / len(corpus.train), 3),
                "order": order.hexdigest()[:12],
                "train_nats": round(float(every.mean()), 4),
                "most_nats": round(float(every.max()), 4),
                "most_norm": round(float(torch.stack(norms).max()), 4),
                "valid_nats": round(nats / (len(corpus.valid) - 1), 5),
                "bits_per_byte": round(nats / math.log(2) / corpus.valid_bytes, 5),
                "seconds": round(seconds, 3),
                "tokens_per_s": round(tokens_read / seconds),
                "failure": "" if math.isfinite(nats) else "the loss is not finite",
            }
            if not math.isfinite(nats):
                return

    def _gradients(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Compute the loss of tokens (B, T) and the gradients of the copies of the weights."""
        self.model.zero_grad()
        loss = self._loss(tokens, tokens, z_loss=self.config.z_loss)
        loss.backward()
        return loss.detach(), [cast(Tensor, copy.grad) for copy in self.copies]

    def _capture(self) -> None:
        """Let `gradients` replay a graph, whose results stay where they are."""
        self.end()
        tokens = torch.zeros(self.shape, dtype=torch.int64, device=self.device)
        loss, grads = tokens, list[Tensor]()

        def call() -> None:
            nonlocal loss, grads
            loss, grads = self._gradients(tokens)

        graph = captured_graph([call])

        def replay(new: Tensor) -> tuple[Tensor, list[Tensor]]:
            tokens.copy_(new)
            graph.replay()
            return loss.clone(), grads

        self.gradients = replay

    def _loss(self, tokens: Tensor, labels: Tensor, **options: Any) -> Tensor:
        return self.model.lm_head(self.model.hidden(tokens), labels, **options)

    @torch.no_grad()
    def _hand_over(self) -> None:
        torch._foreach_copy_(self.copies, self.weights)
