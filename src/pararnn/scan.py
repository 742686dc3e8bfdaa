"""`scan`: the affine recurrence on its own, for linear recurrences of the user's."""

from __future__ import annotations

import torch
from torch import Tensor

from pararnn.cells.affine import AFFINE, COMPLEX
from pararnn.engines.base import Arguments
from pararnn.engines.request import left_open
from pararnn.numerics import check_io_dtype
from pararnn.program import make_program, program_by_key
from pararnn.solve import run


def scan(
    a: Tensor,
    b: Tensor,
    initial: Tensor | None = None,
    *,
    reverse: bool = False,
    solver: str = "auto",
    backend: str = "auto",
) -> Tensor:
    """All states of h_l = a_l h_{l-1} + b_l, differentiable in a, b and initial.

    Args:
        a: (B, T, D), or (B, T, N, N, D) for N states a channel, N up to 4: row i, column j.
        b: (B, T, D), or (B, T, N, D).
        initial: h_0, (B, D) or (B, N, D); None is zero.
        reverse: run from the last step to the first.
        solver, backend: as in `pararnn.solve`.

    Returns:
        h_1 .. h_T, like b. In float64, float32, bfloat16 or float16; one state may be complex64 or
        complex128 too. Carried in float32, or float64.

    Raises:
        TypeError, ValueError: dtypes, shapes and devices that do not fit, with what is allowed.
        EngineError: the pair cannot run here.
    """
    _check(a, b, initial)
    pair = left_open(solver, backend)
    start: tuple[Tensor, ...] = ()
    if b.is_complex():
        if initial is not None:
            start = (initial.real, initial.imag)
        parts = (a.real, a.imag)
        gates = torch.stack([b.real, b.imag], 2)
        real, imag = _states(COMPLEX, gates, parts, start, reverse, pair)
        return torch.complex(real, imag)
    if b.ndim == 3:
        start = () if initial is None else (initial,)
        return _states(1, b.unsqueeze(2), (a,), start, reverse, pair)[0]
    if initial is not None:
        start = initial.unbind(1)
    entries = tuple(entry for row in a.unbind(2) for entry in row.unbind(2))
    return torch.stack(_states(b.shape[2], b, entries, start, reverse, pair), 2)


def _states(
    kind: int,
    gates: Tensor,
    entries: tuple[Tensor, ...],
    start: tuple[Tensor, ...],
    reverse: bool,
    pair: tuple[str, str],
) -> tuple[Tensor, ...]:
    args = Arguments(gates, None, entries, (), start, gates.shape[0], reverse=reverse)
    return run(program_by_key(_program_key(kind)), args, *pair).states


def _program_key(kind: int) -> str:
    return make_program(AFFINE[kind], {}).key


# Compiled regions must not look into the tracing of a program: see pararnn.engines.table.
_program_key._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _check(a: Tensor, b: Tensor, initial: Tensor | None) -> None:
    check_io_dtype(b.real.dtype, "b")
    most = max(AFFINE)
    if b.ndim == 4 and not 1 <= b.shape[2] <= most:
        raise ValueError(f"scan takes up to {most} states a channel, got b {tuple(b.shape)}")
    if b.ndim not in (3, 4) or (b.is_complex() and b.ndim == 4):
        allowed = "(B, T, D)" if b.is_complex() else "(B, T, D) or (B, T, N, D)"
        raise ValueError(f"b must be {allowed}, got {b.dtype} {tuple(b.shape)}")
    batch, steps, channels = b.shape[0], b.shape[1], b.shape[-1]
    states = tuple(b.shape[2:-1])
    sizes = {"a": (batch, steps, *states * 2, channels), "initial": (batch, *states, channels)}
    for name, tensor in (("a", a), ("initial", initial)):
        if tensor is None:
            continue
        if tuple(tensor.shape) != sizes[name]:
            raise ValueError(
                f"{name} must be {sizes[name]} for b {tuple(b.shape)}, got {tuple(tensor.shape)}"
            )
        if tensor.is_complex() != b.is_complex() or not (
            tensor.is_complex() or tensor.is_floating_point()
        ):
            raise TypeError(
                f"{name} and b must both be floating-point or both complex, got {tensor.dtype} and "
                f"{b.dtype}"
            )
        if tensor.device != b.device:
            raise ValueError(f"{name} is on {tensor.device}, b on {b.device}")
