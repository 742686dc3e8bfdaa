"""Text from a model in a folder, written to stdout token by token."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from pararnn.lm.draws import scaled
from pararnn.lm.hf.load import load_folder
from pararnn.lm.text import CONTEXT, Decoder, Stops


class Writer(BaseStreamer):
    """Writes a prompt and the tokens after it to stdout, up to the first of some strings."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self.decode = partial(tokenizer.decode, skip_special_tokens=True)
        self.stops = Stops(stop)
        self.decoder: Decoder | None = None

    def put(self, value: Tensor) -> None:
        """Write the text of a prompt (1, T), then of tokens (1,)."""
        tokens = value.flatten().tolist()
        if self.decoder is None:
            self.decoder = Decoder(self.decode, tokens[-CONTEXT:])
            _write(self.decode(tokens))
        else:
            _write("".join([self.stops.add(self.decoder.add(token)) for token in tokens]))

    def end(self) -> None:
        """Write the waiting text, and end the line."""
        assert self.decoder is not None
        _write(self.stops.add(self.decoder.end()) + self.stops.end() + "\n")

    def is_done(self, tokens: Tensor, scores: Any, **options: Any) -> Tensor:
        """Return, as a stopping criterion does, whether a string was found, (B,)."""
        return torch.full((len(tokens),), self.stops.is_found, device=tokens.device)


class Temperature(LogitsProcessor):
    """Divides by a temperature that may be tiny: transformers' own quotients overflow to NaN."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scaled(scores, self.temperature)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def stream_text(
    folder: Path | str,
    prompt: str | Sequence[str],
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    samples: int = 1,
    stop: Sequence[str] = (),
    prefill_chunk: int | None = None,
    device: str = "cpu",
    dtype: str = "auto",
) -> None:
    """Write prompts and a model's continuations to stdout, up to the end of a text.

    If there are several texts, each has a line with its numbers before it.

    Args:
        folder: of `save_pretrained` of a causal language model, ours or another's, and of its
            tokenizer, or of the demo.
        prompt: one or several.
        temperature: 0 takes the likeliest token.
        top_k: number of likeliest tokens to draw from; None is all.
        top_p: draw from the likeliest tokens that together have this chance.
        seed: of the first sample of each prompt; the others have the next numbers.
        samples: number of texts of each prompt.
        stop: strings; a text ends before the first of them.
        prefill_chunk: number of the prompt's tokens that are read at once; None is all.
        dtype: of the weights; "auto" is the folder's.

    Raises CheckpointError where the folder holds no such model, CellError for a cell that cannot be
    imported, ValueError for an empty prompt.
    """
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model, tokenizer = load_folder(folder, dtype)
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    rows = [tokenizer(text, return_tensors="pt") for text in prompts]
    if any(row["input_ids"].shape[1] == 0 for row in rows):
        raise ValueError("the prompt has no tokens: give some text to continue")
    draw: dict[str, Any] = {"do_sample": temperature > 0, "prefill_chunk_size": prefill_chunk}
    if temperature > 0:
        draw |= {"temperature": 1.0, "top_k": top_k or 0, "top_p": top_p}
        draw["logits_processor"] = LogitsProcessorList([Temperature(temperature)])
    # Other tools save the end token only with the tokenizer.
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    draw |= {} if ends is None else {"eos_token_id": ends, "pad_token_id": pad}
    model.to(device).eval()
    for number, row in enumerate(rows, 1):
        for sample in range(samples):
            if len(rows) * samples > 1:
                print(f"==> prompt {number}, sample {sample + 1} <==", flush=True)
            torch.manual_seed((seed + sample) % 2**63)
            writer = Writer(tokenizer, stop)
            model.generate(
                **row.to(device),
                max_new_tokens=max_new_tokens,
                streamer=writer,
                stopping_criteria=StoppingCriteriaList([writer.is_done]),
                **draw,
            )
