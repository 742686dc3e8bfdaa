"""Mixers that a user defines, for tests: valid ones, and some that a model cannot be made of."""

import torch
from torch import nn

from pararnn.base.parameters import Draw
from pararnn.lm.mixers import Attention, Mixer, RNNMixer, output_draw

NOT_A_MIXER = nn.Linear


class Decay(Mixer):
    """A mean of earlier tokens that forgets, one rate a channel, and a matrix."""

    def __init__(self, config, **factory):
        super().__init__()
        width = config.hidden_size
        self.rate = nn.Parameter(torch.empty(width, **factory))
        self.out_proj = nn.Linear(width, width, bias=False, **factory)

    def forward(self, x, rows, cache=None):
        state = None if cache is None else cache.read()[1]
        state = x.new_zeros(len(x), x.shape[2]) if state is None else state.squeeze(1)
        keep, results = torch.sigmoid(self.rate), []
        for step, token in enumerate(x.unbind(1)):
            if rows.start is not None:
                state = state.masked_fill(rows.start[:, step, None], 0)
            state = torch.lerp(token, state, keep)
            results.append(state)
        if cache is not None:
            cache.keep(None, state.unsqueeze(1))
        return self.out_proj(torch.stack(results, 1))

    def draws(self, layer):
        width = self.out_proj.in_features
        rate = Draw("constant", mean=0.5)
        return {"rate": rate, "out_proj.weight": output_draw(width, layer)}


class Attend(Attention):
    """Attention by another name."""


class Undrawn(Decay):
    def draws(self, layer):
        return {"rate": Draw("constant")}


class Misnamed(Decay):
    def draws(self, layer):
        return {**super().draws(layer), "rates": Draw("constant")}


class Buffered(RNNMixer):
    def __init__(self, config, **factory):
        super().__init__(config, **factory)
        self.register_buffer("window", torch.ones(3, device=factory.get("device")))


class Untyped(Decay):
    layer_type = "sliding"


class Hoard(Decay):
    """Says that it keeps keys, and takes no pages."""

    layer_type = "full_attention"
