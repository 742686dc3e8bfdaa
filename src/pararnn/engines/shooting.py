"""Multiple shooting: segments of time run at once, each from a guess of the states before it.

Newton's method moves the guesses until each segment begins where the one before it ends. Segments
are those of a matrix cell's kernels, or spans of ranks, which differ in how they run and exchange
states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pararnn.base.numerics import FORWARD_TOLERANCE, rounding, underflow
from pararnn.codegen.emit import jumps
from pararnn.engines.arguments import Arguments
from pararnn.program.entries import Entries, sum_to
from pararnn.program.program import Program
from pararnn.solvers.entry_maps import Jacobian, compose, pull_back
from pararnn.solvers.newton import ERROR_SHARE, FIRST_STEP, GAP_ULPS

MAX_SWEEPS = 8
"""Runs of the segments after which a way that needs no guess runs."""
NARROW_GAP_ULPS = 32
"""As GAP_ULPS, in the same units, for gates of 16 bits: outputs are rounded to 2^13 or more."""

States = tuple[Tensor, ...]


class Borders(NamedTuple):
    """What segments but the first begin with, what those before them end with, and the sizes that
    the distance between both is relative to: (B, S - 1, ...) a state, in the order of processing.

    Of gradients, what segments but the last begin with, and those after them end with.
    """

    begins: States
    ends: States
    sizes: States

    def gaps(self) -> States:
        """Return the differences from segments' begins to the ends before them."""
        return tuple(end - begin for begin, end in zip(self.begins, self.ends, strict=True))

    def fit(self, ulps: float) -> list[Tensor]:
        """Return where begins are the ends, or at most `ulps` roundings of a size apart."""
        return [fit(*border, ulps) for border in zip(*self, strict=True)]


class Segments:
    """S segments of a call. Their begins and ends are (B, S, ...) a state, in the order of
    processing."""

    entries: Entries
    ulps: float
    """How far a begin may be from the end before it, in roundings."""
    runs_back = False
    """True for gradients, which run from the last segment to the first: linear in their begins."""
    continues: Tensor | None = None
    """Bool (B, S - 1, 1), borders that rows continue across; None for all."""

    def run(self, begins: States) -> tuple[States, States]:
        """Run all segments; return their ends, and the sizes of `Borders`."""
        raise NotImplementedError

    def maps(self, begins: States) -> Jacobian:
        """Return the derivatives of the ends of the last run, which was from `begins`, by these.

        Two segments need none.
        """
        raise NotImplementedError

    def first_steps(self, begins: States, ends: States) -> tuple[States, States]:
        """Return the states after the first step of all segments but the first one, from its begin
        and from the end before it."""
        raise NotImplementedError

    def borders(self, begins: States, ends: States, sizes: States) -> Borders:
        """Return the borders, of which those that rows do not continue across fit."""
        before, after = slice(-1), slice(1, None)
        if self.runs_back:
            before, after = after, before
        begins, ends = tuple(x[:, after] for x in begins), tuple(x[:, before] for x in ends)
        if self.continues is not None:
            pairs = zip(begins, ends, strict=True)
            ends = tuple(torch.where(self.continues, end, begin) for begin, end in pairs)
        return Borders(begins, ends, sizes)


def gap_ulps(program: Program, args: Arguments) -> int:
    """Return how far segments may be apart; 0 for a step that may jump between such states."""
    if args.signature.cache((jumps, program), jumps, program, args.dtype):
        return 0
    return GAP_ULPS if args.gates.dtype == args.dtype else NARROW_GAP_ULPS


def shoot(
    segments: Segments, begins: States, maps: Jacobian | None = None
) -> tuple[States, int] | None:
    """Run segments until all fit. Return their begins, and how often they ran; None if MAX_SWEEPS
    runs do not suffice.

    maps: those of other begins, if known.
    """
    for sweep in range(1, MAX_SWEEPS + 1):
        borders = segments.borders(begins, *segments.run(begins))
        if all_true(borders.fit(segments.ulps if segments.runs_back else 0)):
            return begins, sweep
        is_new = maps is None
        maps = segments.maps(begins) if maps is None else maps
        gaps = open_gaps(segments, borders, maps)
        if gaps is None:
            return begins, sweep
        if sweep < MAX_SWEEPS:
            if not (is_new or segments.runs_back):
                maps = segments.maps(begins)
            begins = update(segments, begins, borders, gaps, maps)
    return None


def open_gaps(segments: Segments, borders: Borders, maps: Jacobian) -> States | None:
    """Return the gaps between segments, zero where they fit; None where all do.

    A gap fits if it is at rounding level, and so is what the next segment's first step makes of it.
    Small gaps may add up where entries remember: the sum of all, to first order, is within a
    quarter of the dtype's tolerance too. Gaps that fit stay: in entries that remember, a segment
    that begins elsewhere is rounded otherwise, and would end anywhere within some units.

    Gradients are linear, and no step's defect tells of them: their gaps fit within `ulps`.
    """
    entries, ulps = segments.entries, segments.ulps
    pairs = zip(borders.fit(0), borders.gaps(), strict=True)
    gaps = tuple(torch.where(same, 0, gap) for same, gap in pairs)
    fits = borders.fit(ulps)
    if not segments.runs_back:
        moves = _moves(segments, gaps, maps)
        for n, (size, move) in enumerate(zip(borders.sizes, moves, strict=True)):
            far = ERROR_SHARE * FORWARD_TOLERANCE[move.dtype] * size
            near = move.abs() <= far.clamp(min=underflow(move.dtype))
            fits[n] = fits[n] & near.all(1, keepdim=True)
        if all_true(fits):
            from_begin, from_end = segments.first_steps(borders.begins, borders.ends)
            effects = [
                fit(a, b, torch.maximum(size, b.abs()), FIRST_STEP * ulps)
                for a, b, size in zip(from_begin, from_end, borders.sizes, strict=True)
            ]
            if all_true(effects):
                return None
            for i, j in entries.pairs:  # the gap in state j may have made that in state i
                misfits = sum_to(~effects[i], entries.axes[i], entries.axes[j])
                fits[j] = fits[j] & (misfits == 0)
    return tuple(torch.where(mask, 0, gap) for mask, gap in zip(fits, gaps, strict=True))


def update(
    segments: Segments, begins: States, borders: Borders, gaps: States, maps: Jacobian
) -> States:
    """Return better begins. One whose move overflows is the end before it.

    So is one that no other's move reaches, to the bit: segments fit one after the other, whatever
    maps say.
    """
    new = []
    for old, begin, end, gap, move in zip(
        begins, borders.begins, borders.ends, gaps, _moves(segments, gaps, maps), strict=True
    ):
        base = torch.where(gap == 0, begin, end)
        better = torch.where(move.isfinite(), base + (move - gap), end)
        both = [better, old[:, -1:]] if segments.runs_back else [old[:, :1], better]
        new.append(torch.cat(both, 1))
    return tuple(new)


def _moves(segments: Segments, gaps: States, maps: Jacobian) -> list[Tensor]:
    """Return a step of Newton's method for the begins of `Borders`.

    Derivatives that overflow are left out.
    """
    inner = slice(1, None) if segments.runs_back else slice(-1)
    some = {pair: x[:, inner].nan_to_num(0, 0, 0) for pair, x in maps.items()}
    return (pull_back if segments.runs_back else compose)(segments.entries, some, gaps)


def fit(a: Tensor, b: Tensor, size: Tensor, ulps: float) -> Tensor:
    """Return where two states are the same, or at most `ulps` of a finite size apart."""
    limit = ulps * rounding(size, size.dtype)
    same = (a == b) | (a.isnan() & b.isnan())
    return same | (((a - b).abs() <= limit) & limit.isfinite())


def all_true(masks: Sequence[Tensor]) -> bool:
    """Return whether masks hold everywhere; the host waits once."""
    return bool(torch.stack([mask.all() for mask in masks]).all())
