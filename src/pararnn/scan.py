"""`scan`: the affine recurrence, for users' linear recurrences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pararnn.base.numerics import check_io_dtype, compute_dtype
from pararnn.base.private import constant_in_graphs
from pararnn.base.tensors import ArrayLike, check_tensor
from pararnn.cells.affine import AFFINE, COMPLEX, REAL_DECAY
from pararnn.engines.arguments import Arguments, Options
from pararnn.engines.request import pair_of_call
from pararnn.engines.rule import Size
from pararnn.program.program import Program, make_program, program_by_key
from pararnn.sequences import of_lengths, sequences_of
from pararnn.solve import run


def scan(
    a: Tensor,
    b: Tensor,
    initial: Tensor | None = None,
    *,
    reset: ArrayLike | None = None,
    lengths: ArrayLike | None = None,
    reverse: bool = False,
    return_final: bool = False,
    solver: str = "auto",
    backend: str = "auto",
) -> Any:
    """Return all states of h_l = a_l h_{l-1} + b_l, differentiable in a, b and initial.

    Args:
        a: (B, T, D), or (B, T, N, N, D) for N states a channel, N up to 4: row i, column j. Or
            what broadcasts to that, such as (D,) or (T, 1): its gradient is summed.
        b: (B, T, D), or (B, T, N, D). Real or complex; a complex a needs a complex b.
        initial: h_0, (B, D) or (B, N, D); None is zero.
        reset: bool (B, T); such a step starts from the zero state.
        lengths: int (B,); steps of each row, the rest being padding: states and gradients 0.
        reverse: run from the last step to the first.
        return_final: return the final states too.
        solver, backend: as in `pararnn.solve`.

    Returns:
        h_1 .. h_T, like b; with `return_final`, a tuple of that and the final states, (B, D) or
        (B, N, D), in the precision that they are carried in. In float64, float32, bfloat16 or
        float16; one state may be complex64 or complex128 too. Carried in float32, or float64.

    Raises:
        TypeError, ValueError: dtypes, shapes and devices that do not fit, with what is allowed.
        EngineError: the pair cannot run here.
    """
    _check(a, b, initial)
    kind, gates, entries, start = _parts(a, b, initial)
    batch, steps = b.shape[:2]
    rows = None if lengths is None else of_lengths(lengths, "right", batch, steps, b.device)
    sequences = sequences_of(b, reset, sequences=rows)
    args = Arguments(
        gates=gates,
        bias=None,
        fields=entries,
        params=(),
        initial=start,
        sequences=batch,
        seq=sequences.seq,
        reset=sequences.reset,
        options=Options(reverse=reverse),
    )
    result = run(program_by_key(_program_key(kind)), args, *pair_of_call(solver, backend))
    states = _join(b, result.states, 2)
    return (states, _join(b, result.final, 1)) if return_final else states


def _parts(
    a: Tensor, b: Tensor, initial: Tensor | None
) -> tuple[int, Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the cell's key in AFFINE, its gates, fields and initial states."""
    if b.is_complex():
        start = () if initial is None else (initial.real, initial.imag)
        gates = torch.stack([b.real, b.imag], 2)
        kind, parts = (COMPLEX, (a.real, a.imag)) if a.is_complex() else (REAL_DECAY, (a,))
        return kind, gates, tuple(_full(part, b) for part in parts), start
    if b.ndim == 3:
        return 1, b.unsqueeze(2), (_full(a, b),), () if initial is None else (initial,)
    rows = _full(a, b).unbind(2)  # counted, not b.shape[2]: that may be symbolic in a compiled call
    entries = tuple(entry for row in rows for entry in row.unbind(2))
    return len(rows), b, entries, () if initial is None else initial.unbind(1)


def _full(a: Tensor, b: Tensor) -> Tensor:
    """Expand `a` to full size. A smaller `a` is cast first: it then stays small in memory, and its
    gradient is summed in the compute dtype."""
    size = _size_of_a(b)
    if tuple(a.shape) == size:
        return a
    return a.to(compute_dtype(b.real.dtype)).contiguous().expand(size)


def _join(b: Tensor, parts: tuple[Tensor, ...], dim: int) -> Tensor:
    """Join the real and imaginary fields of a state, or stack several states at `dim`."""
    if b.is_complex():
        return torch.complex(*parts)
    return parts[0] if b.ndim == 3 else torch.stack(parts, dim)


# Compiled regions must not look into the tracing of a program.
@constant_in_graphs
def _program_key(kind: int) -> str:
    return make_program(AFFINE[kind], {}).key


def workload_of_scan(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Program, Size]:
    """Return the program and (B, T, D) of a scan with a b of this shape and dtype, and an a of its
    kind. Raises ValueError and TypeError as `scan` does for such a b."""
    b = torch.empty(shape, dtype=dtype, device="meta")
    _check(b if b.ndim == 3 else b.unsqueeze(2), b, None)
    kind = COMPLEX if b.is_complex() else (1 if b.ndim == 3 else b.shape[2])
    return make_program(AFFINE[kind], {}), (shape[0], shape[1], shape[-1])


def _check(a: Tensor, b: Tensor, initial: Tensor | None) -> None:
    check_tensor("b", b)
    check_io_dtype(b.real.dtype, "b")
    most = max(AFFINE)
    if b.ndim == 4 and not 1 <= b.shape[2] <= most:
        raise ValueError(f"scan takes up to {most} states a channel, got b {tuple(b.shape)}")
    if b.ndim not in (3, 4) or (b.is_complex() and b.ndim == 4):
        sizes = "(B, T, D)" if b.is_complex() else "(B, T, D) or (B, T, N, D)"
        raise ValueError(f"b must be {sizes}, got {b.dtype} {tuple(b.shape)}")
    _check_operand("a", a, b)
    if a.is_complex() and not b.is_complex():
        raise TypeError(f"a is complex: b must be too, got {a.dtype} and {b.dtype}")
    full = _size_of_a(b)
    last = full[max(len(full) - a.ndim, 0) :]
    if len(last) != a.ndim or any(n not in (1, m) for n, m in zip(a.shape, last, strict=True)):
        raise ValueError(
            f"a must be {full} for b {tuple(b.shape)}, or broadcast to it, got {tuple(a.shape)}"
        )
    if initial is None:
        return
    _check_operand("initial", initial, b)
    if initial.is_complex() != b.is_complex():
        raise TypeError(
            "initial and b must both be floating-point or both complex, got "
            f"{initial.dtype} and {b.dtype}"
        )
    size = (b.shape[0], *b.shape[2:])
    if tuple(initial.shape) != size:
        raise ValueError(
            f"initial must be {size} for b {tuple(b.shape)}, got {tuple(initial.shape)}"
        )


def _check_operand(name: str, tensor: Tensor, b: Tensor) -> None:
    check_tensor(name, tensor)
    if not (tensor.is_complex() or tensor.is_floating_point()):
        raise TypeError(f"{name} must be floating-point or complex, got {tensor.dtype}")
    if tensor.device != b.device:
        raise ValueError(f"{name} is on {tensor.device}, b on {b.device}")


def _size_of_a(b: Tensor) -> tuple[int, ...]:
    states = tuple(b.shape[2:-1])
    return (*b.shape[:2], *states, *states, b.shape[-1])
