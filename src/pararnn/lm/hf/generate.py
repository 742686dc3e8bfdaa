"""Text from a model in a folder, written to stdout token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TextStreamer
from transformers.utils import logging

from pararnn.lm.hf.load import load_folder


def stream_text(
    folder: Path | str,
    prompt: str,
    *,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    device: str = "cpu",
    dtype: str = "auto",
) -> None:
    """Write the prompt and a model's continuation to stdout, up to the end of a text.

    Args:
        folder: of `save_pretrained` of a causal language model, ours or another's, and of its
            tokenizer, or of the demo.
        temperature: 0 takes the likeliest token.
        top_k: number of likeliest tokens to draw from; None is all.
        top_p: draw from the likeliest tokens that together have this chance.
        dtype: of the weights; "auto" is the folder's.

    Raises CheckpointError where the folder holds no such model, CellError for a cell that cannot be
    imported, ValueError for an empty prompt.
    """
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model, tokenizer = load_folder(folder, dtype)
    inputs = tokenizer(prompt, return_tensors="pt")
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError("the prompt has no tokens: give some text to continue")
    draw: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        draw |= {"temperature": temperature, "top_k": top_k or 0, "top_p": top_p}
    # Other tools save the end token only with the tokenizer.
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    draw |= {} if ends is None else {"eos_token_id": ends, "pad_token_id": pad}
    torch.manual_seed(seed)
    streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    model.to(device).eval().generate(
        **inputs.to(device), max_new_tokens=max_new_tokens, streamer=streamer, **draw
    )
