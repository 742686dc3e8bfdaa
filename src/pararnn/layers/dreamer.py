"""Layers of DreamerV3: its block GRU, and its recurrent state-space model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pararnn.base.tensors import ArrayLike, States, as_states, check_tensor
from pararnn.cells import Cell
from pararnn.cells.base import call_cell, unwrap
from pararnn.layers.checks import check_count
from pararnn.layers.recurrent import Clipping, clipped_parameters
from pararnn.program.program import program_of
from pararnn.sequences import checked_reset
from pararnn.solve import solve
from pararnn.zoo.dreamer_blocks import block_gru, log_mixture, of_state, rms_silu
from pararnn.zoo.dreamer_gru import DreamerGRUCell
from pararnn.zoo.rssm import RSSMCell

Pair = tuple[Tensor, Tensor]
"""Two tensors: of a step a belief (B, D) and a sample of the stochastic state (B, C N)."""


class RSSMOutput(NamedTuple):
    """Results of all steps: the belief (B, T, D), the sample of the posterior (B, T, C N), and the
    logarithms of the probabilities of posterior and prior, (B, T, C, N)."""

    belief: Tensor
    state: Tensor
    posterior_logits: Tensor
    prior_logits: Tensor

    def divergences(self, free: float = 1.0) -> Pair:
        """Return DreamerV3's losses of each step (B, T), by which the prior learns and by which the
        posterior does: Kullback-Leibler divergences of one from the other, of at least `free` nats.
        """

        def divergence(p: Tensor, q: Tensor) -> Tensor:
            return (p.exp() * (p - q)).sum((-1, -2)).clamp_min(free)

        posterior, prior = self.posterior_logits, self.prior_logits
        return divergence(posterior.detach(), prior), divergence(posterior, prior.detach())


class Imagination(NamedTuple):
    """Steps without observations: beliefs and samples of the prior after each, as in `RSSMOutput`,
    the prior's logits, and the actions (B, T, A) that led there."""

    belief: Tensor
    state: Tensor
    prior_logits: Tensor
    action: Tensor


class NormedLinear(nn.Module):
    """A linear layer with a root mean square norm and SiLU."""

    def __init__(self, input_size: int, width: int, eps: float, **factory: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(input_size, width, **factory)
        self.weight = nn.Parameter(torch.ones(width, **factory))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_silu(self.linear(x), self.weight, self.eps)


class _Blocks(Clipping, nn.Module):
    """Base of layers whose recurrence is a block GRU."""

    cell: Cell
    recurrent_clip: float | None = None

    def __init__(self, belief_size: int, num_blocks: int, solver: str, backend: str) -> None:
        super().__init__()
        check_count("num_blocks", num_blocks)
        if belief_size % num_blocks:
            raise ValueError(
                f"{type(self).__name__}: the state must have a multiple of num_blocks = "
                f"{num_blocks} channels, got {belief_size}"
            )
        self.belief_size, self.num_blocks = belief_size, num_blocks
        self.solver, self.backend = solver, backend

    def recurrent_parameters(self) -> list[Tensor]:
        """Return the matrices of the cell; errors as those of `RecurrentLayer`."""
        return clipped_parameters(unwrap(self.cell))

    def _solve(
        self, gates: Tensor, initial: States | None, reset: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the outputs (B, T, ...) and final states (B, numbers) for gates (B, T, W)."""
        output, final = solve(
            self.cell,
            gates.unsqueeze(2),
            None if initial is None else self._by_axes(initial, gates.shape[0]),
            reset=reset,
            solver=self.solver,
            backend=self.backend,
        )
        head = self.cell.head_sizes
        assert head is not None
        outputs = head.split_output(output.squeeze(2))
        states = final if isinstance(final, tuple) else (final,)
        return outputs, tuple(h.flatten(1) for h in states)

    def _by_axes(self, initial: States, rows: int) -> tuple[Tensor, ...]:
        """Return initial states (B, numbers) with the axes of the cell's. Raises ValueError for
        other sizes."""
        name, sizes = type(self).__name__, self.cell.state_sizes
        states = as_states(f"the initial state of {name}", initial)
        full = [(rows, math.prod(size)) for size in sizes]
        if [h.flatten(1).shape if h.ndim > 1 else h.shape for h in states] != full:
            raise ValueError(
                f"{name}: the initial states must be {tuple(self.cell.states)} of the sizes "
                f"{full}, got {[tuple(h.shape) for h in states]}"
            )
        return tuple(h.reshape(rows, *size) for h, size in zip(states, sizes, strict=True))

    def _check_inputs(
        self, rank: int, inputs: Mapping[str, tuple[Tensor, tuple[int, ...]]]
    ) -> None:
        """Check that inputs by name have `rank` dimensions of the first one's sizes, and behind
        these the sizes given. Raises TypeError for what is no tensor, ValueError otherwise."""
        lead: tuple[Any, ...] = ()
        for name, (x, size) in inputs.items():
            check_tensor(f"{name} of {type(self).__name__}", x)
            shape = tuple(x.shape)
            fits = len(shape) == rank + len(size) and shape[rank:] == size
            if not fits or (lead and shape[:rank] != lead):
                wanted = ", ".join(map(str, (*(lead or "BT"[:rank]), *size)))
                raise ValueError(f"{type(self).__name__}: {name} must be ({wanted}), got {shape}")
            lead = shape[:rank]


class DreamerGRU(_Blocks):
    """The block GRU of DreamerV3 over whole sequences, by one kernel: see `DreamerGRUCell`.

    Args:
        input_sizes: channels of each input, such as those of the stochastic state and the action:
            each has a linear layer with a norm, of `width` channels.
        hidden_size: D, channels of the state, a multiple of num_blocks.
        num_blocks: blocks of channels that the last two layers multiply by matrices of their own.
        width: channels of the dense layers; None is D.
        eps, update_bias: as in the cell.
        solver, backend: as in `pararnn.solve`.
    """

    def __init__(
        self,
        input_sizes: Sequence[int],
        hidden_size: int,
        num_blocks: int = 8,
        width: int | None = None,
        *,
        eps: float = 1e-4,
        update_bias: float = -1.0,
        solver: str = "auto",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, num_blocks, solver, backend)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.input_sizes = tuple(input_sizes)
        width, block = width or hidden_size, hidden_size // num_blocks
        self.inputs = nn.ModuleList(
            NormedLinear(size, width, eps, **factory) for size in self.input_sizes
        )
        self.proj = nn.Linear(len(self.input_sizes) * width, hidden_size, **factory)
        options: dict[str, Any] = {"eps": eps, "update_bias": update_bias, **factory}
        axes: dict[str, Any] = {"G": num_blocks, "K": block, "E": block, "U": width}
        self.cell = DreamerGRUCell(hidden_size, **axes, **options)
        program_of(self.cell)  # now, because tracing cannot happen inside a compiled region

    def forward(
        self, inputs: Sequence[Tensor], h_0: Tensor | None = None, *, reset: ArrayLike | None = None
    ) -> Pair:
        """Return all states (B, T, D), and the last (B, D), for inputs (B, T, size) in order.

        reset: bool (B, T), where an episode begins; such a step starts from the zero state.
        """
        self._check(2, inputs)
        hidden = [layer(x) for layer, x in zip(self.inputs, inputs, strict=True)]
        starts = None if reset is None else checked_reset(inputs[0], reset, 2)
        (h,), (h_n,) = self._solve(self.proj(torch.cat(hidden, -1)), h_0, starts)
        return h.flatten(2), h_n

    def step(
        self, inputs: Sequence[Tensor], h: Tensor | None = None, *, reset: ArrayLike | None = None
    ) -> Tensor:
        """Return the next state (B, D), in float32 (float64), for inputs (B, size)."""
        self._check(1, inputs)
        starts = None if reset is None else checked_reset(inputs[0], reset, 1).unsqueeze(1)
        return self([x.unsqueeze(1) for x in inputs], h, reset=starts)[1]

    def _check(self, rank: int, inputs: Sequence[Tensor]) -> None:
        """Check inputs of `rank` leading dimensions: see `_check_inputs`."""
        if isinstance(inputs, Tensor) or len(inputs) != len(self.input_sizes):
            got = "a tensor" if isinstance(inputs, Tensor) else len(inputs)
            raise ValueError(
                f"DreamerGRU: inputs must be a list of {len(self.input_sizes)}, of "
                f"{self.input_sizes} channels, got {got}"
            )
        sized = zip(inputs, self.input_sizes, strict=True)
        self._check_inputs(rank, {f"input {i}": (x, (n,)) for i, (x, n) in enumerate(sized)})


class RSSM(_Blocks):
    """The recurrent state-space model of DreamerV3, whose posterior is sampled inside the step, so
    that a sequence is one kernel: see `RSSMCell`.

    Args:
        action_size, embed_size: A, channels of an action, and those of an observation's embedding.
        belief_size: D, channels of the deterministic state, a multiple of num_blocks.
        hidden_size: channels of the dense layers.
        num_categoricals, num_classes: C variables of N classes, the stochastic state.
        num_blocks: blocks of the GRU.
        prior_layers: hidden layers of the prior, which runs after the kernel, on all steps at once.
        unimix: fraction of a uniform distribution in posterior and prior.
        eps, update_bias: as in the cell. solver, backend: as in `pararnn.solve`.

    Samples follow from noise, (B, T, C, N), by default that of Gumbel, drawn here: given the same,
    `forward` and `step` draw the same. Gradients go straight through the samples.
    """

    def __init__(
        self,
        action_size: int,
        embed_size: int,
        belief_size: int = 512,
        hidden_size: int = 512,
        num_categoricals: int = 32,
        num_classes: int = 32,
        num_blocks: int = 8,
        prior_layers: int = 2,
        *,
        unimix: float = 0.01,
        eps: float = 1e-4,
        update_bias: float = -1.0,
        solver: str = "auto",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(belief_size, num_blocks, solver, backend)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        if not 0 <= unimix <= 1:
            raise ValueError(f"unimix must be a fraction, from 0 to 1, got {unimix}")
        self.action_size, self.embed_size = action_size, embed_size
        self.classes, self.unimix = (num_categoricals, num_classes), unimix
        block, logits = belief_size // num_blocks, num_categoricals * num_classes
        self.action = NormedLinear(action_size, hidden_size, eps, **factory)
        self.proj = nn.Linear(hidden_size, belief_size, **factory)
        self.embed = nn.Linear(embed_size, hidden_size, **factory)
        sizes = [belief_size, *[hidden_size] * prior_layers]
        layers = [NormedLinear(*pair, eps, **factory) for pair in pairwise(sizes)]
        self.prior = nn.Sequential(*layers, nn.Linear(sizes[-1], logits, **factory))
        options: dict[str, Any] = {"unimix": unimix, "eps": eps, "update_bias": update_bias}
        axes: dict[str, Any] = {"G": num_blocks, "K": block, "E": block, "U": hidden_size}
        axes |= {"C": num_categoricals, "N": num_classes}
        self.cell = RSSMCell(belief_size + 2 * logits, **axes, **options, **factory)
        program_of(self.cell)  # now, because tracing cannot happen inside a compiled region

    def new_noise(self, like: Tensor) -> Tensor:
        """Return noise of Gumbel (..., C, N) for a tensor (..., channels)."""
        u = torch.rand((*like.shape[:-1], *self.classes), device=like.device)
        tiny = torch.finfo(u.dtype).tiny
        return -torch.log(-torch.log(u.clamp(tiny, 1 - 1e-7))).to(like.dtype)

    def prior_logits(self, belief: Tensor) -> Tensor:
        """Return the logarithms of the prior's probabilities (..., C, N) for beliefs (..., D)."""
        logits = self.prior(belief).unflatten(-1, self.classes)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return log_mixture(wide, self.unimix)

    def forward(
        self,
        action: Tensor,
        embedding: Tensor,
        initial: Pair | None = None,
        *,
        reset: ArrayLike | None = None,
        noise: Tensor | None = None,
    ) -> tuple[RSSMOutput, Pair]:
        """Return the results of all steps, and the last belief and sample, in float32 (float64).

        action: (B, T, A), the one before each observation. embedding: (B, T, channels), of the
        observations. initial: the belief and the sample before the first step; None is zero. reset:
        bool (B, T), where an episode begins: belief, sample and action before it count as zero.
        """
        self._check(2, action, embedding, noise)
        starts = None if reset is None else checked_reset(action, reset, 2)
        hidden = self._of_action(action, starts)
        noise = self.new_noise(action) if noise is None else noise
        gates = torch.cat([hidden, self.embed(embedding), noise.flatten(-2)], -1)
        (belief, state, logits), final = self._solve(gates, initial, starts)
        belief, state = belief.flatten(2), state.flatten(2)
        return RSSMOutput(belief, state, logits, self.prior_logits(belief)), (final[0], final[1])

    def step(
        self,
        action: Tensor,
        embedding: Tensor,
        state: Pair | None = None,
        *,
        reset: ArrayLike | None = None,
        noise: Tensor | None = None,
    ) -> Pair:
        """Return the next belief and sample, to act upon: action (B, A), embedding (B, channels),
        noise (B, C, N)."""
        self._check(1, action, embedding, noise)
        starts = None if reset is None else checked_reset(action, reset, 1).unsqueeze(1)
        hidden = self._of_action(action.unsqueeze(1), starts)
        noise = self.new_noise(action) if noise is None else noise
        gates = [hidden, self.embed(embedding.unsqueeze(1)), noise.flatten(-2).unsqueeze(1)]
        belief, sample = self._solve(torch.cat(gates, -1), state, starts)[1]
        return belief, sample

    def predict(
        self, state: Tensor, belief: Tensor, action: Tensor, *, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the prior's logits, a sample of it, and the belief after an action, in plain
        PyTorch: (B, C N), (B, D) and (B, A) to (B, C, N), (B, C N) and (B, D)."""
        cell: Any = unwrap(self.cell)
        state, belief, action = self._as_weights(state, belief, action)
        weights = [value[0] for value in call_cell(cell)]  # which hooks may compute
        param = program_of(cell).step.param_type(*weights)
        h = belief.unflatten(-1, (self.num_blocks, -1))
        sample = torch.nn.functional.linear(state, param.W_z.flatten(0, 1).mT, param.b_z)
        sample = rms_silu(sample, param.w_z, cell.eps)
        hidden = self._of_action(action, None).view(h.shape) + of_state(h, param, cell.eps)
        hidden = hidden + torch.einsum("...u,gue->...ge", sample, param.B_z)
        new = block_gru(h, hidden, param, cell.eps, cell.update_bias).flatten(-2)
        logits = self.prior_logits(new)
        noisy = logits + (self.new_noise(new) if noise is None else noise)
        hard = (noisy >= noisy.amax(-1, keepdim=True)).to(logits.dtype)
        p = torch.exp(logits)
        (sample,) = self._as_weights(hard + (p - p.detach()))
        return logits, sample.flatten(-2), new

    def imagine(
        self,
        start: Pair,
        policy: Callable[[Tensor, Tensor], Tensor],
        length: int,
        *,
        noise: Tensor | None = None,
    ) -> Imagination:
        """Return `length` steps of the prior from a belief and a sample, (B, ...) each, by actions
        (B, A) that a policy chooses given both. noise: (B, length, C, N); with zeros each sample is
        the likeliest class."""
        check_count("length", length)
        (belief, state), steps = self._as_weights(*start), []
        for t in range(length):
            action, now = policy(belief, state), None if noise is None else noise[:, t]
            logits, state, belief = self.predict(state, belief, action, noise=now)
            steps.append((belief, state, logits, action))
        return Imagination(*(torch.stack(series, 1) for series in zip(*steps, strict=True)))

    def _as_weights(self, *tensors: Tensor) -> list[Tensor]:
        """Return tensors in the weights' dtype: final states are float32 next to 16 bits."""
        return [x.to(self.proj.weight.dtype) for x in tensors]

    def _check(self, rank: int, action: Tensor, embedding: Tensor, noise: Tensor | None) -> None:
        """Check inputs of `rank` leading dimensions: see `_check_inputs`."""
        inputs: dict[str, tuple[Tensor, tuple[int, ...]]] = {
            "action": (action, (self.action_size,)),
            "embedding": (embedding, (self.embed_size,)),
        }
        if noise is not None:
            inputs["noise"] = noise, self.classes
        self._check_inputs(rank, inputs)

    def _of_action(self, action: Tensor, reset: Tensor | None) -> Tensor:
        """Return what actions (..., A) add to the blocks' hidden layers, (..., D)."""
        if reset is not None:
            action = action.masked_fill(reset.unsqueeze(-1), 0)
        return self.proj(self.action(action / action.detach().abs().clamp_min(1)))
