"""Mamba2 as a peer: the paper's models of it, on mamba-ssm's Triton kernels.

The paper's Mamba2 is transformers' model: blocks of norm, mixer and residual, without an MLP. Here
its parameters, as many of them, stand between our embedding, head and loss, in blocks that are
compiled as ours are and keep as much for the backward pass. Convolution, gate and norms are
PyTorch, which the compiler fuses; the recurrence is mamba-ssm's chunked scan, for one token its
update of the state. Both are Triton, so that nothing of CUDA is built. The input projection is
three matrices, as ours is two: the gradient of one result cut in parts is a slow copy. On a CPU
the recurrence is plain PyTorch.

    MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-deps --no-build-isolation mamba-ssm einops
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pararnn.base.parameters import Draw
from pararnn.lab.tasks.mamba2 import scan
from pararnn.lm import LanguageModel, Mixer
from pararnn.lm.backbone import Backbone
from pararnn.lm.cache import LayerCache
from pararnn.lm.config import LMConfig
from pararnn.lm.mixers import input_draw, output_draw
from pararnn.lm.recompute import PRODUCTS, PRODUCTS_BY_HEADS, save_only
from pararnn.lm.rows import Rows

TAPS = 4
EPS = 1e-5
CHUNK = 256
"""Tokens that the scan takes at once: mamba-ssm's default."""

Sizes = Mapping[str, Any]
"""`preset("mamba2", scale).model`: the arguments of transformers' Mamba2Config."""

TINY: Sizes = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "expand": 2,
    "num_heads": 4,
    "head_dim": 8,
    "n_groups": 1,
    "state_size": 4,
    "tie_word_embeddings": False,
}
"""A model for a CPU."""


def kernels(module: str) -> ModuleType:
    """Return a module of mamba-ssm's Triton kernels.

    The package itself imports an extension in CUDA, which these do not need: it is not executed.
    """
    if "mamba_ssm" not in sys.modules:
        spec = importlib.util.find_spec("mamba_ssm")
        if spec is None:
            raise ModuleNotFoundError(
                "Mamba2 on a GPU needs mamba-ssm: MAMBA_SKIP_CUDA_BUILD=TRUE pip install --no-deps "
                "--no-build-isolation mamba-ssm einops"
            )
        sys.modules["mamba_ssm"] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"mamba_ssm.ops.triton.{module}")


@torch.library.custom_op("pararnn_peers::ssd", mutates_args=())
def ssd(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, bias: Tensor, chunk: int
) -> Tensor:
    """Return the recurrence over whole rows; an operator, so that compiled blocks are one graph."""
    run = kernels("ssd_combined")._mamba_chunk_scan_combined_fwd
    return run(x, dt, a, b, c, chunk, D=skip, dt_bias=bias, dt_softplus=True)[0].contiguous()


@torch.library.custom_op("pararnn_peers::ssd_backward", mutates_args=())
def ssd_backward(
    grad: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    bias: Tensor,
    out: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, a, b, c, skip and bias."""
    run = kernels("ssd_combined")._mamba_chunk_scan_combined_bwd
    args = (grad, x, dt, a, b, c, out, chunk)
    results = run(*args, D=skip, dt_bias=bias, dt_softplus=True)
    grads = (*results[:6], results[7])  # between the two is the gradient of a gate
    like = zip(grads, (x, dt, a, b, c, skip, bias), strict=True)
    return cast(Any, tuple(each.to(of.dtype).contiguous() for each, of in like))


@ssd.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@ssd_backward.register_fake
def _(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    return tuple(of.new_empty(of.shape) for of in args[:7])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.chunk = inputs
    ctx.save_for_backward(*tensors, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *ssd_backward(grad.contiguous(), *ctx.saved_tensors, ctx.chunk), None


ssd.register_autograd(_backward, setup_context=_remember)
SOLVES = (torch.ops.pararnn_peers.ssd.default,)


def recurrence(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, bias: Tensor
) -> Tensor:
    """By heads S_t = exp(dt A) S_(t-1) + dt B x and y = C S + D x, with dt = softplus(dt + bias).

    x (B, T, H, P), dt (B, T, H), a, skip and bias (H,), b and c (B, T, N); y as x.
    """
    if x.is_cuda:
        return ssd(x, dt, a, b.unsqueeze(2), c.unsqueeze(2), skip, bias, CHUNK)
    dt = F.softplus(dt + bias)
    y = scan(x * dt.unsqueeze(-1), dt * a, b.to(dt.dtype), c.to(dt.dtype))
    return (y + x * skip.unsqueeze(-1)).to(x.dtype)


def advance(states: Tensor, x: Tensor, dt: Tensor, a: Tensor, *others: Tensor) -> Tensor:
    """Make a step of `recurrence`: y as x (B, H, P); states (B, H, P, N) change in place."""
    if states.is_cuda:
        return advance_by_kernel(states, x, dt, a, *others)
    b, c, skip, bias = others
    dt = F.softplus(dt + bias)
    new = (dt.unsqueeze(-1) * x).unsqueeze(-1) * b.unsqueeze(1).unsqueeze(1)
    states.mul_((dt * a).exp().unsqueeze(-1).unsqueeze(-1)).add_(new)
    y = (states * c.unsqueeze(1).unsqueeze(1)).sum(-1)
    return (y + x * skip.unsqueeze(-1)).to(x.dtype)


def advance_by_kernel(states: Tensor, x: Tensor, dt: Tensor, a: Tensor, *others: Tensor) -> Tensor:
    """`advance` by mamba-ssm's."""
    b, c, skip, bias = others
    heads, size, count = states.shape[1:]
    # Views without strides tell the kernel that a head's channels share them.
    dt = dt.unsqueeze(-1).expand(-1, -1, size)
    a = a.reshape(heads, 1, 1).expand(-1, size, count)
    skip, bias = (each.unsqueeze(-1).expand(-1, size) for each in (skip, bias))
    run = _update_op if torch.compiler.is_compiling() else _update
    return run(states, x, dt, a, b.unsqueeze(1), c.unsqueeze(1), skip, bias)


def _update(
    states: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    bias: Tensor,
) -> Tensor:
    run = kernels("selective_state_update").selective_state_update
    return run(states, x, dt, a, b, c, skip, dt_bias=bias, dt_softplus=True)


_update_op = torch.library.custom_op("pararnn_peers::update", _update, mutates_args=("states",))
_update_op.register_fake(lambda states, x, *_: x.new_empty(x.shape))


class Mamba2Mixer(Mixer):
    """Mamba2's mixer, one group: z, x, B, C, dt = W u; x, B, C = silu(conv(x, B, C)).

    Then `recurrence`, and V norm(y silu(z)). With a cache it reads one token at a time.
    """

    steady = True
    kept = (*PRODUCTS, *PRODUCTS_BY_HEADS, *SOLVES)

    def __init__(self, sizes: Sizes, **factory: Any) -> None:
        super().__init__()
        width, heads, state = (sizes[key] for key in ("hidden_size", "num_heads", "state_size"))
        if sizes["n_groups"] != 1:
            raise ValueError(f"n_groups must be 1, got {sizes['n_groups']}")
        inner = heads * sizes["head_dim"]
        self.inner, self.heads, self.state = inner, heads, state
        self.gate_proj = nn.Linear(width, inner, bias=False, **factory)
        self.in_proj = nn.Linear(width, inner, bias=False, **factory)
        self.small_proj = nn.Linear(width, 2 * state + heads, bias=False, **factory)
        self.conv_weight = nn.Parameter(torch.empty(TAPS, inner + 2 * state, **factory))
        self.conv_bias = nn.Parameter(torch.empty(inner + 2 * state, **factory))
        wide: dict[str, Any] = {"device": factory.get("device"), "dtype": torch.float32}
        self.dt_bias = nn.Parameter(torch.empty(heads, **wide))
        self.a_log = nn.Parameter(torch.empty(heads, **wide))
        self.skip = nn.Parameter(torch.empty(heads, **wide))
        self.norm = nn.RMSNorm(inner, eps=EPS, **factory)
        self.out_proj = nn.Linear(inner, width, bias=False, **factory)
        self.whole: Tensor | None = None

    def forward(self, x: Tensor, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        if rows.start is not None or rows.real is not None:
            raise ValueError("Mamba2 takes whole rows here: no packed documents, no padding")
        if cache is not None:
            return self._step(x, cache)
        z, u = self.gate_proj(x), self.in_proj(x)
        bc, dt = self.small_proj(x).split([2 * self.state, self.heads], -1)
        weights, biases = (
            each.split([self.inner, 2 * self.state], -1)
            for each in (self.conv_weight, self.conv_bias)
        )
        u = F.silu(convolve(u, weights[0], biases[0]))
        b, c = F.silu(convolve(bc, weights[1], biases[1])).chunk(2, -1)
        y = recurrence(u.unflatten(-1, (self.heads, -1)), dt, self._decay(), b, c, *self._wide())
        return self.out_proj(self.norm(y.flatten(-2) * F.silu(z)))

    def _decay(self) -> Tensor:
        return -self.a_log.float().exp()

    def _wide(self) -> tuple[Tensor, Tensor]:
        return self.skip.float(), self.dt_bias.float()

    def ready_to_decode(self) -> None:
        """Make the three projections views of one matrix: a token is one product."""
        parts = (self.gate_proj, self.in_proj, self.small_proj)
        self.whole = torch.cat([part.weight.detach() for part in parts])
        for part, rows in zip(parts, self.whole.split([len(p.weight) for p in parts]), strict=True):
            part.weight.data = rows
        self.decay = self._decay().detach()

    def _step(self, x: Tensor, cache: LayerCache) -> Tensor:
        if x.shape[1] != 1:
            raise ValueError(f"with a cache Mamba2 reads a token at a time here, got {x.shape[1]}")
        if self.whole is None:
            raise RuntimeError("call ready_to_decode() before the first token")
        inputs, states = cache.read()
        channels, batch = self.inner + 2 * self.state, len(x)
        if inputs is None or states is None:
            shape = (batch, self.heads, self.inner // self.heads, self.state)
            states = torch.zeros(shape, device=x.device)
            inputs = x.new_zeros(batch, TAPS - 1, channels)
        z, u, dt = F.linear(x, self.whole).split([self.inner, channels, self.heads], -1)
        window = torch.cat([inputs, u], 1)
        mix = F.silu((window * self.conv_weight).sum(1) + self.conv_bias)
        u, b, c = mix.split([self.inner, self.state, self.state], -1)
        u = u.unflatten(-1, (self.heads, -1))
        y = advance(states, u, dt.squeeze(1), self.decay, b, c, *self._wide())
        cache.keep(window[:, 1:], states)
        return self.out_proj(self.norm(y.flatten(1).unsqueeze(1) * F.silu(z)))

    def draws(self, layer: int) -> dict[str, Draw]:
        """Matrices as ours; dt from 0.001 to 0.1 and A from 1 to 16, as mamba-ssm has them."""
        width = self.in_proj.in_features
        low, high = math.log(1e-3), math.log(0.1)
        return {
            **{f"{name}_proj.weight": input_draw(width) for name in ("gate", "in", "small")},
            "out_proj.weight": output_draw(self.inner, layer),
            "conv_weight": Draw("uniform", spread=1 / math.sqrt(TAPS)),
            "conv_bias": Draw("constant"),
            "dt_bias": Draw("uniform", mean=(low + high) / 2, spread=(high - low) / 2),
            "a_log": Draw("uniform", mean=math.log(16) / 2, spread=math.log(16) / 2),
            "skip": Draw("constant", mean=1),
            "norm.weight": Draw("constant", mean=1),
        }


def convolve(u: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return a causal convolution of each channel; weight (taps, d), the newest token's last.

    A sum of shifted inputs, as ours: the compiler makes one kernel of it and of what follows.
    """
    y = u * weight[-1] + bias
    for lag in range(1, len(weight)):
        y = y + F.pad(u, (0, 0, lag, 0))[:, : u.shape[1]] * weight[-1 - lag]
    return y


class Mamba2Block(nn.Module):
    """x + mixer(norm(x)) on (B, T, d); it takes the place of `pararnn.lm.backbone.Block`."""

    def __init__(self, sizes: Sizes, **factory: Any) -> None:
        super().__init__()
        self.mixer_norm = nn.RMSNorm(sizes["hidden_size"], eps=EPS, **factory)
        self.mixer = Mamba2Mixer(sizes, **factory)

    def forward(self, x: Tensor, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        if cache is not None:
            return x + self._mix(x, rows, cache)
        return x + save_only(self.mixer.kept, self._mix, x, rows)

    def _mix(self, x: Tensor, rows: Rows, cache: LayerCache | None = None) -> Tensor:
        return self.mixer(self.mixer_norm(x), rows, cache)

    def draws(self, layer: int) -> Iterator[tuple[nn.Module, str, Draw]]:
        yield self.mixer_norm, "weight", Draw("constant", mean=1)
        for name, draw in self.mixer.draws(layer).items():
            owner, _, own = name.rpartition(".")
            yield self.mixer.get_submodule(owner), own, draw


def ends(sizes: Sizes) -> LMConfig:
    """Return the config of what stands around the blocks; its own block is to be replaced."""
    return LMConfig(sizes["hidden_size"], 1, sizes["vocab_size"])


def put_blocks(backbone: Backbone, sizes: Sizes, **factory: Any) -> None:
    """Give a backbone of `ends` Mamba2's blocks, whose parameters are still to be drawn."""
    layers = range(sizes["num_hidden_layers"])
    backbone.layers = nn.ModuleList(Mamba2Block(sizes, **factory) for _ in layers)


def language_model(config: LMConfig | Sizes, **factory: Any) -> LanguageModel:
    """Return a preset's model with fresh weights, Mamba2's too."""
    if isinstance(config, LMConfig):
        return LanguageModel(config, **factory)
    model = LanguageModel(ends(config), **factory)
    put_blocks(model.backbone, config, **factory)
    model.reset_parameters()
    return model


def ready_to_decode(model: nn.Module) -> None:
    """See `Mamba2Mixer.ready_to_decode`, of all of a model's."""
    for part in model.modules():
        if isinstance(part, Mamba2Mixer):
            part.ready_to_decode()
