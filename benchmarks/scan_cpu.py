"""`pararnn.scan` on a CPU, on the recurrences of an LRU and of a minGRU, and other ways.

"LRU": a complex decay for each channel, the same at all steps; "minGRU": a real decay of each step.
The peers are the loop that a user would write, the library's own scan in PyTorch's operations, and,
where decays do not change, a convolution by FFT, as state-space models have it. Forward, and
forward + backward of decays and inputs, float32 or complex64. Rounds of all cases follow each
other, so that other work on the machine does not meet one case alone: the median of their medians
and the least of their minima. Writes results/scan_cpu.csv.

    OMP_NUM_THREADS=1 python benchmarks/scan_cpu.py [--budget 1.0] [--rounds 3]
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from common import new_parser, provenance, write_csv
from cpu import INPUTS, measure
from torch import Tensor

import pararnn

BATCH, CHANNELS = 8, 64
LENGTHS = (512, 2048, 16384)
LOOP, FFT, IN_PYTORCH = "loop in Python", "convolution by FFT", "scan in PyTorch"
LONGEST = {LOOP: 2048, IN_PYTORCH: 2048}
"""Ways that are not tried on longer sequences, where a call takes seconds."""
Way = Callable[[Tensor, Tensor], Tensor]


def loop(decay: Tensor, entering: Tensor) -> Tensor:
    """Return the states, one step after the other."""
    state, states = torch.zeros_like(entering[:, 0]), []
    decays = decay.expand(entering.shape).unbind(1)
    for factor, new in zip(decays, entering.unbind(1), strict=True):
        state = factor * state + new
        states.append(state)
    return torch.stack(states, 1)


def convolution(decay: Tensor, entering: Tensor) -> Tensor:
    """Return the states as a convolution with the powers of a decay that never changes."""
    length = entering.shape[1]
    powers = decay ** torch.arange(length).unsqueeze(1)
    spectra = (torch.fft.fft(each, 2 * length, dim=-2) for each in (powers, entering))
    kernel, inputs = spectra
    return torch.fft.ifft(kernel * inputs, dim=-2)[:, :length]


WAYS: dict[str, Way] = {
    LOOP: loop,
    IN_PYTORCH: partial(pararnn.scan, solver="newton", backend="torch"),
    FFT: convolution,
    "pararnn.scan": pararnn.scan,
}


def random_inputs(what: str, length: int) -> tuple[Tensor, Tensor]:
    if what == "LRU":
        size, angle = torch.empty(CHANNELS).uniform_(0.9, 0.999), torch.rand(CHANNELS) * torch.pi
        entering = torch.randn(BATCH, length, CHANNELS, dtype=torch.complex64)
        return torch.polar(size, angle), entering
    return torch.rand(BATCH, length, CHANNELS), torch.randn(BATCH, length, CHANNELS)


def ways_of(what: str, length: int) -> list[str]:
    """Return what can do a recurrence of this length."""
    fits = [way for way in WAYS if length <= LONGEST.get(way, length)]
    return fits if what == "LRU" else [way for way in fits if way != FFT]


Case = tuple[str, int, str]
"""A recurrence, a length and a way."""


def cases(lengths: Sequence[int]) -> list[Case]:
    whole = itertools.product(("LRU", "minGRU"), lengths)
    return [(what, length, way) for what, length in whole for way in ways_of(what, length)]


def once(case: Case, budget: float) -> dict[str, float]:
    what, length, way = case
    torch.manual_seed(0)
    inputs = [random_inputs(what, length) for _ in range(INPUTS)]
    for tensor in itertools.chain.from_iterable(inputs):
        tensor.requires_grad_()
    print(*case, sep="\t", flush=True)
    return measure(WAYS[way], inputs, (), budget)


def pool(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the medians of the medians and the least of the minima."""
    return {
        key: round((min if "min" in key else statistics.median)(each[key] for each in rounds), 3)
        for key in rounds[0]
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds for one timing")
    parser.add_argument("--rounds", type=int, default=3, help="of all cases, one after the other")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    args = parser.parse_args()
    about = {**provenance(), "threads": torch.get_num_threads(), "rounds": args.rounds}
    every = cases(args.lengths)
    rounds = [[once(case, args.budget) for case in every] for _ in range(args.rounds)]
    rows = [
        {**about, "what": what, "way": way, "B": BATCH, "T": length, "D": CHANNELS, **pool(own)}
        for (what, length, way), own in zip(every, zip(*rounds, strict=True), strict=True)
    ]
    write_csv(args.out / "scan_cpu.csv", rows)


if __name__ == "__main__":
    main()
