"""A small trained module that drafts the next tokens from a model's last hidden state.

Cai et al., "Medusa" (ICML 2024), for heads on a frozen model; Ankner et al., "Hydra" (COLM 2024),
for heads that read the tokens drafted before.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pararnn.layers import RecurrentLayer
from pararnn.lm.cache import LMCache, SteadyCache
from pararnn.lm.checkpoint import (
    UNREADABLE,
    CheckpointError,
    check_weights,
    model_folder,
    open_weights,
    shapes_of,
    write_files,
)
from pararnn.lm.drafts import Drafter, Guess, Written
from pararnn.lm.loss import causal_lm_loss
from pararnn.lm.mixers import widen_channels
from pararnn.lm.model import LanguageModel
from pararnn.lm.replay import Replayed, has_hooks, replayable
from pararnn.lm.states import cache_of
from pararnn.zoo import CELLS

CONFIG, WEIGHTS = "draft_head.json", "draft_head.safetensors"
"""Names of a head's files, in the folder of its model."""


class DraftHead(Drafter, nn.Module):
    """A drafter that is trained on a frozen model: a recurrence over the tokens of a draft.

    From h (d,), the head's input from which the model drew the last token x_0, and the embeddings
    e(x) of the model, i = 0, 1, ... up to the number of drafts:
    s_i = GRU([h, norm(e(x_i))], s_{i-1}); x_{i+1} is drawn from the model's logits of h + V s_i.
    The cell is the paper's GRU with zero for s_{-1}. V is zero at first, where x_{i+1} is drawn as
    x_0 was. There is nothing to go back to after a draft: the next one starts from its own h.

    Args:
        hidden_size: of the model, d.
        drafts: tokens of a draft.
        device, dtype: of the parameters, those of the model; the cell's and its biases are float32
            for a 16-bit dtype.

    Raises ValueError for sizes that are not positive.
    """

    is_costly = True

    def __init__(
        self,
        hidden_size: int,
        drafts: int = 4,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if hidden_size < 1 or drafts < 1:
            raise ValueError(
                f"hidden_size and drafts must be positive, got {hidden_size} and {drafts}"
            )
        self.hidden_size, self.drafts = hidden_size, drafts
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.layer = RecurrentLayer(CELLS["gru"], 2 * hidden_size, hidden_size, **factory)
        self.out_proj = nn.Linear(hidden_size, hidden_size, bias=False, **factory)
        nn.init.zeros_(self.out_proj.weight)
        if dtype in (torch.bfloat16, torch.float16):
            widen_channels(self.layer)

    def forward(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        """Compute head's inputs (B, k, d) after each of k tokens.

        hidden: (B, d), from which the first of them was drawn; embeddings: (B, k, d), of them.
        """
        states, _ = self.layer(self._inputs(hidden.unsqueeze(1).expand_as(embeddings), embeddings))
        return hidden.unsqueeze(1) + self.out_proj(states)

    def _inputs(self, hidden: Tensor, embeddings: Tensor) -> Tensor:
        # Embeddings are drawn much smaller than what norms return.
        return torch.cat([hidden, F.rms_norm(embeddings, embeddings.shape[-1:])], -1)

    def loss(self, model: LanguageModel, tokens: Tensor, first: int = 0) -> Tensor:
        """Compute the mean cross-entropy in nats of drafted tokens, on a text that the model reads.

        Windows of `drafts` tokens follow each other from token `first` on, each drafted from the
        model's hidden state before it. The model gets no gradient.

        tokens: (B, T), T >= first + drafts + 2. Raises ValueError for fewer.
        """
        size = self.drafts
        count = (tokens.shape[1] - 2 - first) // size
        if count < 1:
            raise ValueError(
                f"a draft of {size} tokens after token {first} needs rows of "
                f"{first + size + 2} tokens, got {tokens.shape[1]}"
            )
        dtype, head = self.out_proj.weight.dtype, model.lm_head.weight.detach()
        with torch.no_grad():
            hidden = model.hidden(tokens)[:, first : first + count * size : size].flatten(0, 1)
            windows = tokens[:, first + 1 : first + 2 + count * size].unfold(1, size + 1, size)
            windows = windows.flatten(0, 1).long()
            embeddings = model.embed_tokens(windows[:, :-1])
        inputs = self(hidden.to(dtype), embeddings.to(dtype)).to(head.dtype)
        return causal_lm_loss(inputs, head, windows[:, 1:], shift=False)

    def begin(self, model: LanguageModel, prompts: Sequence[Sequence[int]], length: int) -> Guess:
        """Return the function that drafts, see `Drafter.begin`.

        Raises ValueError for a model of another size, dtype or device.
        """
        weight, head = self.out_proj.weight, model.lm_head.weight
        size, dtype = model.config.hidden_size, model.embed_tokens.weight.dtype
        if (self.hidden_size, weight.dtype, weight.device) != (size, dtype, head.device):
            raise ValueError(
                f"the draft head is of hidden_size={self.hidden_size} in {weight.dtype} on "
                f"{weight.device}, and the model of {size} in {dtype} on {head.device}: give the "
                "head that was trained on this model, converted as it is"
            )
        zero = weight.new_zeros(len(prompts), size)
        state = zero.to(torch.promote_types(dtype, torch.float32))
        memory = SteadyCache(zero, state)

        def step(tokens: Tensor, cache: LMCache) -> Tensor:
            (layer,) = cache.layers
            hidden, before = layer.read()
            assert hidden is not None
            output, after = self.layer.step(
                self._inputs(hidden, model.embed_tokens(tokens)), before
            )
            assert torch.is_tensor(after)
            layer.keep(hidden, after)
            logits: Tensor = model.lm_head(hidden + self.out_proj(output))
            return logits

        cache = cache_of([memory], 0)
        is_recorded = replayable(model, length) and not any(map(has_hooks, self.modules()))
        call = Replayed(step, cache) if is_recorded else partial(step, cache=cache)
        last = [0] * len(prompts)

        def guess(written: Written) -> list[list[int]]:
            assert written.hidden is not None, "costly guesses are made where it is known"
            memory.keep(written.hidden, state)
            for row, new in enumerate(written.tokens):
                last[row] = new[-1] if new else last[row]
            columns = [torch.tensor(last, device=weight.device)]
            for ahead in range(self.drafts):
                columns.append(written.draw(call(columns[-1]), ahead))
            drafts: list[list[int]] = torch.stack(columns[1:], 1).tolist()
            return drafts

        return guess


def save_draft_head(head: DraftHead, folder: Path | str) -> None:
    """Write a head into its model's folder, as `CONFIG` and `WEIGHTS`.

    Raises CheckpointError where there is no model, MissingExtra without safetensors.
    """
    folder = model_folder(folder)
    dtype = str(head.out_proj.weight.dtype).removeprefix("torch.")
    content = {"hidden_size": head.hidden_size, "drafts": head.drafts, "dtype": dtype}
    weights = {name: tensor.detach().contiguous() for name, tensor in head.state_dict().items()}
    write_files(folder / CONFIG, content, folder / WEIGHTS, weights)


def load_draft_head(folder: Path | str, device: torch.device | str = "cpu") -> DraftHead:
    """Load the head in a model's folder, or of a training run, on a device.

    Raises CheckpointError where there is none or its files do not fit together, MissingExtra
    without safetensors.
    """
    folder = model_folder(folder)
    try:
        content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        content["dtype"] = getattr(torch, content["dtype"])
        head = DraftHead(**content, device=device)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"there is no draft head in {folder}: train one by `pararnn draft {folder}`"
        ) from error
    except UNREADABLE as error:
        raise CheckpointError(f"{folder / CONFIG} describes no draft head: {error!r}") from error
    with open_weights(folder / WEIGHTS) as file:
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    check_weights(folder, shapes_of(head.state_dict()), shapes_of(weights))
    head.load_state_dict(weights)
    return head.eval()
