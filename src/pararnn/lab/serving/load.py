"""The parts of a model's folder that a server needs."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import AutoTokenizer
from transformers.utils import logging

import pararnn.lm.hf  # noqa: F401  else AutoTokenizer asks whether to run the folder's code
from pararnn.base.errors import PararnnError
from pararnn.lab.serving.batch import ServingError
from pararnn.lm.checkpoint import CheckpointError, load_checkpoint, model_folder, read_config
from pararnn.lm.model import LanguageModel
from pararnn.lm.quantise import quantise_weights


class ChatError(PararnnError, ValueError):
    """Messages cannot be written as a text."""


class ServedModel(NamedTuple):
    """A model with its words: `encode`, `decode` and `text` may run in three threads at once."""

    name: str
    model: LanguageModel
    encoder: Any
    decoder: Any
    namer: Any
    ends: frozenset[int]

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the tokens of a text; `special`: with those that the tokenizer adds to texts."""
        return self.encoder(text, add_special_tokens=special)["input_ids"]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self.decoder.decode(tokens, skip_special_tokens=True)

    def text(self, tokens: Sequence[int]) -> str:
        """Return what `decode` does."""
        return self.namer.decode(tokens, skip_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return a chat as the text whose continuation is the next message.

        Raises ChatError where the tokenizer has no template for chats, or the template refuses it.
        """
        if not self.namer.chat_template:
            raise ChatError(
                f"the tokenizer of {self.name} has no chat template: send the prompt to "
                "/v1/completions, or put a chat_template.jinja into the model's folder"
            )
        try:
            return self.namer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise ChatError(f"the chat template refuses the messages: {error}") from error


def load_served(
    folder: Path | str, device: str = "cpu", name: str | None = None, weights: str | None = None
) -> ServedModel:
    """Load a folder's model, tokenizer and end tokens; `weights` as in `quantise_weights`.

    Raises CheckpointError where the folder holds no model or tokenizer, ServingError where the two
    do not fit, QuantiseError where the weights cannot be quantised.
    """
    name, folder = name or Path(folder).resolve().name, model_folder(folder)
    model = load_checkpoint(folder, device)
    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{folder} has no tokenizer that can be loaded: {reason}") from error
    if len(tokenizer) > model.config.vocab_size:
        raise ServingError(
            f"{folder}: the tokenizer has {len(tokenizer)} tokens, and the model "
            f"{model.config.vocab_size}: give it the tokenizer that it was trained with"
        )
    if weights is not None:
        quantise_weights(model, weights)
    encoder, namer = copy.deepcopy(tokenizer), copy.deepcopy(tokenizer)
    return ServedModel(name, model, encoder, tokenizer, namer, end_tokens(folder, tokenizer))


def end_tokens(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a text: the folder's for generation, or the tokenizer's."""
    file = folder / "generation_config.json"
    try:
        generation = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except ValueError as error:
        raise CheckpointError(f"{file} is no JSON: {error}") from error
    for content in (generation, read_config(folder)):
        if (ends := content.get("eos_token_id")) is not None:
            return frozenset(ends if isinstance(ends, list) else [ends])
    return frozenset(() if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
