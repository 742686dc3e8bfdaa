"""The mixer of matrix states, against its equations written out."""

import pytest
import torch
import torch.nn.functional as F
from matrix_cells import Call, loop

from pararnn.base.errors import CellError
from pararnn.lm import LanguageModel, LMConfig
from pararnn.lm.mixers import make_mixer
from pararnn.lm.rows import Rows

WIDTH, HEADS, KEYS = 12, 3, 5
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 1, "vocab_size": 32, "num_heads": HEADS}


def _mixer(cell, taps=3):
    torch.manual_seed(0)
    config = LMConfig(
        **SIZES, mixers=("matrix",), cell=cell, cell_config={"K": KEYS}, conv_kernel_size=taps
    )
    mixer = make_mixer("matrix", config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.normal_(std=0.4)
    return mixer


def _by_hand(mixer, cell, x):
    """Gates k, q, v of silu(conv(W x)) and f of W' x, head by head; the loop; gate and norm."""
    u = x @ mixer.in_proj.weight.T
    if mixer.conv is None:
        u = F.silu(u)
    else:
        taps = len(mixer.conv.weight)
        weight = mixer.conv.weight.flip(0).T.unsqueeze(1)
        history = F.pad(u.transpose(1, 2), (taps - 1, 0))
        u = F.silu(F.conv1d(history, weight, mixer.conv.bias, groups=u.shape[-1])).transpose(1, 2)
    u = u.unflatten(-1, (HEADS, -1))
    names = list(type(mixer.rnn.cell).gates)
    axes = [mixer.rnn.cell.head_axes.gates[name] for name in names]
    gates, place, number = [], 0, 0
    for own in axes:
        length = {"K": KEYS, "V": WIDTH // HEADS}[own[0]] if own else 1
        if own:
            gates.append(u[..., place : place + length])
            place += length
        else:
            numbers = (x @ mixer.number_proj.weight.T).unflatten(-1, (HEADS, -1))
            gates.append(numbers[..., number : number + 1])
            number += 1
    gates = torch.cat(gates, -1) + mixer.rnn.bias.unflatten(-1, (HEADS, -1))
    initial = tuple(
        torch.zeros(len(x), *size, dtype=x.dtype) for size in mixer.rnn.cell.state_sizes
    )
    output, _ = loop(cell, Call(mixer.rnn.cell, gates, initial))
    h = output.flatten(2) * F.silu(x @ mixer.gate_proj.weight.T)
    return F.rms_norm(h, (WIDTH,), mixer.norm.weight, 1e-5) @ mixer.out_proj.weight.T


@pytest.mark.parametrize(("cell", "taps"), [("m2rnn", 3), ("m2rnn", 1), ("rwkv7", 2), ("mlstm", 4)])
@pytest.mark.one_in(3)
def test_the_mixer_is_its_equations(cell, taps):
    """With numbers among the gates at the end, between vectors and nowhere."""
    mixer, x = _mixer(cell, taps), torch.randn(2, 9, WIDTH, dtype=torch.float64)
    leaves = [p.requires_grad_() for p in mixer.parameters()]
    results = []
    for output in (mixer(x, Rows(torch.arange(9))), _by_hand(mixer, cell, x)):
        torch.manual_seed(1)
        results.append([output, *torch.autograd.grad(output, leaves, torch.randn_like(output))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_models_are_drawn_and_every_parameter_learns():
    config = LMConfig(**SIZES | {"num_hidden_layers": 2}, mixers=("matrix", "rnn"), cell="m2rnn")
    model = LanguageModel(config)
    model.loss(torch.randint(32, (4, 33))).backward()
    names = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert names == []


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cell": "gru"}, ValueError, "cell='gru': take one of m2rnn, gated-delta"),
        ({"cell": "none"}, CellError, "m2rnn"),
        ({"cell": "m2rnn", "recompute_gates": True}, ValueError, "leave it False"),
    ],
)
def test_what_it_has_no_use_for_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        LanguageModel(LMConfig(**SIZES, mixers=("matrix",), **options))
