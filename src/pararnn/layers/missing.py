"""The input of GRU-D: missing values are filled in, next to masks and time gaps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pararnn.base.tensors import check_tensor


class DecayedInputs(nn.Module):
    """What GRU-D reads of C variables: values without gaps, masks, and times since observations.

    A missing value decays from the variable's last observed one to its mean, by
    exp(-max(0, weight * delta + bias)) for a gap delta (Che et al. 2018). weight and bias, (C,),
    are learned, mean is a buffer: (C,) or a number.
    """

    mean: Tensor

    def __init__(
        self,
        input_size: int,
        mean: Tensor | float = 0.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(input_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty_like(self.weight))
        means = torch.as_tensor(mean, device=device, dtype=self.weight.dtype)
        if means.shape not in ((), (input_size,)):
            raise ValueError(
                f"mean must be a number or one for each of {input_size} variables, got "
                f"{tuple(means.shape)}"
            )
        self.register_buffer("mean", means.expand(input_size).clone())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw rates between 0 and 1 in a unit of time: a rate below 0 would get no gradient."""
        nn.init.uniform_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, observed: Tensor, times: Tensor) -> Tensor:
        """Return values, masks and gaps, (B, T, 3 C).

        x: (B, T, C), anything where a value is missing, NaN too. observed: bool (B, T, C). times:
        (B, T), of the samples, which never fall. A gap is the time since the variable's last
        observation in an earlier step, or since the first step if there is none. Raises ValueError
        for other sizes and another dtype of observed.
        """
        for name, value in {"x": x, "observed": observed, "times": times}.items():
            check_tensor(f"{name} of DecayedInputs", value)
        if x.shape != (*times.shape, len(self.mean)) or observed.shape != x.shape or x.ndim != 3:
            raise ValueError(
                f"x and observed must be (B, T, {len(self.mean)}) and times (B, T), got "
                f"{tuple(x.shape)}, {tuple(observed.shape)} and {tuple(times.shape)}"
            )
        if observed.dtype != torch.bool:
            raise ValueError(
                f"observed must be bool, got {observed.dtype}: observed != 0 makes it of a mask"
            )
        steps = torch.arange(x.shape[1], device=x.device)[:, None]
        latest = torch.where(observed, steps, -1).cummax(1).values
        before = F.pad(latest, (0, 0, 1, 0), value=-1)[:, :-1]  # in an earlier step; -1: never
        index = before.clamp_min(0)
        times = times[..., None].expand_as(x)
        delta = (times - times.gather(1, index)).to(x.dtype)
        last = torch.where(before < 0, self.mean, x.gather(1, index))
        decay = torch.exp(-torch.relu(self.weight * delta + self.bias))
        filled = torch.where(observed, x, self.mean + decay * (last - self.mean))
        return torch.cat([filled, observed.to(filled.dtype), delta.to(filled.dtype)], -1)

    def extra_repr(self) -> str:
        """Return the number of variables."""
        return str(len(self.mean))
