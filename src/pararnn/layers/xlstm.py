"""The sLSTM layer of the xlstm package and of TiRex, by kernels: their weights and calls."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pararnn.base.tensors import check_tensor
from pararnn.cells import Cell
from pararnn.layers.projection import Weights, check_weight, headwise_gates
from pararnn.layers.recurrent import Clipping, stored_parameter
from pararnn.layers.torch_nn import StackedLayer
from pararnn.zoo import HeadSLSTMCell

GATES = ("fgate", "igate", "zgate", "ogate")
"""The package's projections, in the order of the cell's gates i, f, z, o: its layer computes the
input gate by the weight that it calls fgate, and the forget gate by igate."""


class _Recurrence(StackedLayer):
    """The recurrence of an `SLSTMLayer`, whose input is that of i and f, and behind it that of z
    and o."""

    def _project(self, cell: Cell, x: Tensor, weights: Weights) -> Tensor:
        """Return the gates (B, T, 4, H, K); the weight is (H, 4 K, K)."""
        check_weight(x, weights.projection)
        pairs = zip(x.chunk(2, -1), weights.projection.chunk(2, 1), strict=True)
        return torch.cat([headwise_gates(part, weight, 2) for part, weight in pairs], 2)


class _Weight(nn.Module):
    """A weight with the package's name for it."""

    def __init__(self, *size: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, **factory))

    def forward(self) -> Tensor:
        """Return the weight. Others read it by a call, so that hooks on the module run."""
        return self.weight


class _CellWeights(nn.Module):
    """The recurrent matrices (H, 4 K, K) and the biases (4 D,) of i, f, z and o."""

    def __init__(self, heads: int, channels: int, **factory: Any) -> None:
        super().__init__()
        size = (heads, 4 * channels, channels)
        self._recurrent_kernel_ = nn.Parameter(torch.empty(size, **factory))
        self._bias_ = nn.Parameter(torch.empty(4 * heads * channels, **factory))

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return matrices and biases. Others read them by a call, so that hooks run."""
        return self._recurrent_kernel_, self._bias_

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        """Take the layout of TiRex too, which its matrices show: (H, K, 4 K)."""
        matrices, bias = f"{prefix}_recurrent_kernel_", f"{prefix}_bias_"
        heads, width, channels = self._recurrent_kernel_.shape
        if matrices in state_dict and state_dict[matrices].shape == (heads, channels, width):
            state_dict[matrices] = state_dict[matrices].mT
            if bias in state_dict:
                state_dict[bias] = _swap(state_dict[bias], heads, 4)
        super()._load_from_state_dict(state_dict, prefix, *more)


def _swap(bias: Tensor, first: int, second: int) -> Tensor:
    """Return biases (first, second, K) in the order of (second, first, K), as one vector."""
    return bias.unflatten(0, (first, second, -1)).transpose(0, 1).flatten()


class _Convolution(nn.Module):
    """A causal convolution of each channel."""

    def __init__(self, channels: int, size: int, **factory: Any) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, size, groups=channels, **factory)

    def forward(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the convolution of x (B, T, D) after other steps, and the last steps of both."""
        size = self.conv.kernel_size[0] - 1
        if before is None:
            before = x.new_zeros(x.shape[0], size, x.shape[2])
        steps = torch.cat([before[:, before.shape[1] - size :], x], 1)
        if not x.shape[1]:  # PyTorch convolves no fewer steps than the kernel's
            return x, steps
        return self.conv(steps.mT).mT, steps[:, steps.shape[1] - size :]


class SLSTMLayer(Clipping, nn.Module):
    """sLSTMLayer of the `xlstm` package by kernels: its weights load both ways by `state_dict`, and
    those of TiRex's by `load_state_dict` and `tirex_state_dict`.

    A causal convolution of each channel and SiLU in front of i and f, four projections by head,
    the sLSTM of `HeadSLSTMCell`, and a layer norm of each head's output.

    Args:
        embedding_dim: channels D of inputs and outputs.
        num_heads: H, which divides D.
        conv1d_kernel_size: steps of the convolution; 0 for none.
        dropout: chance of a zero in front of the norm, in training.
        backend: of the solve, as in `pararnn.solve`; the recurrence goes step after step.
        device, dtype: of the parameters.

    Raises ValueError for sizes that do not fit.

    :source: Beck et al. 2024, xLSTM: Extended Long Short-Term Memory, eqs. 8-14 and figure 10;
        results are those of xlstm 2.0.6, backend "vanilla", and of tirex-ts 1.4.2 to the bfloat16
        in which its backend "torch" computes
    """

    recurrent_clip: float | None = None

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int = 4,
        conv1d_kernel_size: int = 4,
        dropout: float = 0.0,
        *,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if embedding_dim < 1 or num_heads < 1 or embedding_dim % num_heads:
            raise ValueError(
                f"embedding_dim must be a multiple of num_heads, got {embedding_dim} and "
                f"{num_heads}"
            )
        if conv1d_kernel_size < 0:
            raise ValueError(
                f"conv1d_kernel_size must be 0, for no convolution, or more, got "
                f"{conv1d_kernel_size}"
            )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding_dim, self.num_heads, self.dropout = embedding_dim, num_heads, dropout
        channels = embedding_dim // num_heads
        self.conv1d: _Convolution | None = None
        if conv1d_kernel_size:
            self.conv1d = _Convolution(embedding_dim, conv1d_kernel_size, **factory)
        for name in GATES:
            self.add_module(name, _Weight(num_heads, channels, channels, **factory))
        self.slstm_cell = _CellWeights(num_heads, channels, **factory)
        self.group_norm = _Weight(embedding_dim, **factory)
        self.recurrence = _Recurrence(
            HeadSLSTMCell,
            2 * embedding_dim,
            embedding_dim,
            num_heads=num_heads,
            solver="sequential",
            backend=backend,
        )
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights again: projections normal, with a standard deviation of sqrt(2 / 5 K),
        biases of f from 3 to 6 inside a head; zero for other biases, the recurrent matrices and the
        norm, which adds 1; the convolution as torch.nn's."""
        for weight in self._projections():
            nn.init.normal_(weight, std=math.sqrt(2 / (5 * weight.shape[2])))
        for parameter in (*self.slstm_cell.parameters(), self.group_norm.weight):
            parameter.zero_()
        bias = self.slstm_cell._bias_.view(4, self.num_heads, -1)
        bias[1] = torch.linspace(3, 6, bias.shape[2], device=bias.device, dtype=bias.dtype)
        if self.conv1d is not None:
            self.conv1d.conv.reset_parameters()

    def recurrent_parameters(self) -> list[Tensor]:
        """Return the recurrent matrices.

        Raises ValueError if a parametrisation or a hook computes them: they cannot be clamped.
        """
        return [stored_parameter(self.slstm_cell, "_recurrent_kernel_")]

    @classmethod
    def from_xlstm(cls, layer: nn.Module, *, backend: str | None = None) -> SLSTMLayer:
        """Return a layer with the sizes and a copy of the weights of an `sLSTMLayer` of the package
        or of TiRex, which has no convolution.

        Raises ValueError for one whose recurrence is another than the sLSTM.
        """
        config: Any = layer.config
        function = getattr(config, "function", "slstm")
        if function != "slstm":
            raise ValueError(f"SLSTMLayer runs the function 'slstm', got {function!r}")
        like = next(layer.parameters())
        made = cls(
            config.embedding_dim,
            config.num_heads,
            getattr(config, "conv1d_kernel_size", 0),
            getattr(config, "dropout", 0.0),
            backend=backend,
            device=like.device,
            dtype=like.dtype,
        )
        made.load_state_dict(layer.state_dict())
        return made.train(layer.training)

    def tirex_state_dict(self) -> dict[str, Tensor]:
        """Return the weights as TiRex has them: matrices (H, K, 4 K), and biases by head.

        Raises ValueError for a layer with a convolution, which TiRex's has not.
        """
        if self.conv1d is not None:
            raise ValueError("TiRex's layers have no convolution: give conv1d_kernel_size=0")
        state: dict[str, Tensor] = self.state_dict()
        matrices, bias = "slstm_cell._recurrent_kernel_", "slstm_cell._bias_"
        changed = {matrices: state[matrices].mT, bias: _swap(state[bias], 4, self.num_heads)}
        return {**state, **changed}

    def forward(
        self,
        x: Tensor,
        conv_state: Tensor | None = None,
        slstm_state: Tensor | None = None,
        return_last_state: bool = False,
    ) -> Any:
        """Run over whole sequences, or pieces of them.

        x: (B, T, D). conv_state: the steps before, (B, conv1d_kernel_size - 1, D). slstm_state:
        h, c, n and m, (4, B, D). None stands for a beginning. Returns the outputs (B, T, D), and
        with return_last_state a dict of both states. Raises ValueError for other sizes.
        """
        check_tensor("x", x)
        if x.ndim != 3 or x.shape[-1] != self.embedding_dim:
            raise ValueError(
                f"SLSTMLayer: Expected x to be (B, T, {self.embedding_dim}), got {tuple(x.shape)}"
            )
        self._check_states(x, conv_state, slstm_state)
        inputs = torch.cat([x, x], -1)
        if self.conv1d is not None:
            convolved, conv_state = self.conv1d(x, conv_state)
            inputs = torch.cat([F.silu(convolved), x], -1)
        y, final = self.recurrence(inputs, self._start(x, slstm_state), weights=self._weights())
        y = F.dropout(y, self.dropout, self.training)
        heads = y.unflatten(-1, (self.num_heads, -1))
        y = F.layer_norm(heads, heads.shape[-1:]).flatten(-2) * (1 + self.group_norm())
        if not return_last_state:
            return y
        h, c, n = final
        states = {"slstm_state": torch.stack([h, c, torch.ones_like(n), n])}
        return y, states if self.conv1d is None else {"conv_state": conv_state, **states}

    def step(
        self, x: Tensor, conv_state: Tensor | None = None, slstm_state: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run one step: x (B, 1, D) and the states of the steps before, as in `forward`. Returns
        the output (B, 1, D) and the new states."""
        result: tuple[Tensor, dict[str, Tensor]] = self(x, conv_state, slstm_state, True)
        return result

    def _check_states(
        self, x: Tensor, conv_state: Tensor | None, slstm_state: Tensor | None
    ) -> None:
        """Raise ValueError for states of other sizes than those of `forward`."""
        rows, channels = x.shape[0], x.shape[2]
        if conv_state is not None and self.conv1d is not None:
            size, got = self.conv1d.conv.kernel_size[0] - 1, tuple(conv_state.shape)
            # The package keeps a step more, which is not read.
            if len(got) != 3 or (got[0], got[2]) != (rows, channels) or got[1] < size:
                raise ValueError(
                    f"SLSTMLayer: conv_state must be the steps before, {(rows, size, channels)}, "
                    f"got {got}"
                )
        if slstm_state is None:
            return
        sizes = [tuple(state.shape) for state in slstm_state]
        if sizes != [(rows, channels)] * 4:
            raise ValueError(
                f"SLSTMLayer: slstm_state must be h, c, n and m, {(4, rows, channels)}, got "
                f"{len(sizes)} of {sizes}"
            )

    def _projections(self) -> list[Tensor]:
        """Return the weights of the gates i, f, z and o, (H, K, K) each."""
        return [self.get_submodule(name)() for name in GATES]

    def _weights(self) -> Weights:
        """Return the weights of the recurrence."""
        projection = torch.cat(self._projections(), 1)
        recurrent, bias = self.slstm_cell()
        matrices = recurrent.unflatten(1, (4, -1)).unbind(1)
        return Weights(projection, bias.view(4, self.embedding_dim), matrices)

    def _start(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, ...]:
        """Return the cell's initial states. It holds c / n, and m + log n: minus infinity at a
        beginning, where n is zero."""
        if state is None:
            zero = x.new_zeros(x.shape[0], self.embedding_dim)
            return zero, zero, torch.full_like(zero, -math.inf)
        h, c, n, m = state
        # 1 in place of 0: gradients of what is not chosen would be NaN.
        remembers, n = n > 0, torch.where(n > 0, n, 1)
        return h, c / n, torch.where(remembers, m + n.log(), -math.inf)

    def extra_repr(self) -> str:
        return f"{self.embedding_dim}, num_heads={self.num_heads}, dropout={self.dropout}"
