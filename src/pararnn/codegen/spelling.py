"""Spellings of ATen ops in generated code: one table for all targets.

Generated code is scalar: `real` is a floating-point value, `mask` a truth value. Each target's
functions.h, in a folder of kernels/, defines the names in the spellings (`select`, `exp`, ...).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pararnn.base.cache import clear_kernels

REAL, MASK = "real", "mask"
IDENTITY = {"sum": "0", "max": "-INFINITY", "min": "INFINITY"}
"""Initial value of a reduction on a GPU."""


@dataclass(frozen=True)
class Spelling:
    """Expression of an op in terms of its arguments, and their kinds.

    `text`: a format string of the positional arguments, or a function of the call's arguments that
    returns the expression; tensors are spelled (str), numbers raw. `takes`: kind that every tensor
    argument is converted to. `gives`: kind of the value. `jumps`: True if a small change of an
    argument may change the value by more; ops that give truth values always may.
    """

    text: str | Callable[..., str]
    takes: str = REAL
    gives: str = REAL
    jumps: bool = False


def literal(value: float) -> str:
    """Spell a number as a `real`."""
    value = float(value)
    if math.isnan(value):
        return "constant(NAN)"
    if math.isinf(value):
        return f"constant({'-' if value < 0 else ''}INFINITY)"
    return f"constant({value!r})"


def spell(argument: Any) -> str:
    """Spell a positional argument: a tensor's name unchanged, a number as a literal."""
    return argument if isinstance(argument, str) else literal(argument)


def _sum(sign: str) -> Callable[..., str]:
    def text(a: Any, b: Any, alpha: float = 1) -> str:
        b = spell(b) if alpha == 1 else f"{literal(alpha)} * {spell(b)}"
        return f"{spell(a)} {sign} {b}"

    return text


def _divide(a: Any, b: Any, rounding_mode: str | None = None) -> str:
    a, b = spell(a), spell(b)
    by_mode = {None: "{} / {}", "trunc": "trunc(quotient({}, {}))", "floor": "floor_divide({}, {})"}
    return by_mode[rounding_mode].format(a, b)


# Powers that PyTorch computes without pow().
_POWERS = {
    0.0: "constant(1.0)",
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
    0.5: "sqrt({0})",
    -0.5: "constant(1.0) / sqrt({0})",
    -1.0: "constant(1.0) / {0}",
    -2.0: "constant(1.0) / ({0} * {0})",
}


def _power(base: Any, exponent: Any) -> str:
    if not isinstance(exponent, str) and float(exponent) in _POWERS:
        return _POWERS[float(exponent)].format(spell(base))
    return f"pow({spell(base)}, {spell(exponent)})"


def _round(x: str, decimals: int = 0) -> str:
    if decimals == 0:
        return f"round({x})"
    shift = literal(10.0 ** abs(decimals))
    if decimals > 0:
        return f"round({x} * {shift}) / {shift}"
    return f"round({x} / {shift}) * {shift}"


def _clamp(x: Any, low: Any = None, high: Any = None, **options: Any) -> str:
    x, low, high = spell(x), options.get("min", low), options.get("max", high)
    # A limit's NaN must reach the result.
    limits = (
        (low, "maximum({0}, {1})", "at_least({0}, {1})"),
        (high, "minimum({0}, {1})", "at_most({0}, {1})"),
    )
    for limit, of_tensor, of_number in limits:
        if limit is not None:
            is_number = not isinstance(limit, str) and limit == limit
            text = of_number if is_number else of_tensor
            x = text.format(x, spell(limit))
    return x


def _gelu(x: str, approximate: str = "none") -> str:
    if approximate == "tanh":
        cubic = f"({x} + constant(0.044715) * {x} * {x} * {x})"
        return (
            f"constant(0.5) * {x} * (constant(1.0) + tanh(constant(0.7978845608028654) * {cubic}))"
        )
    return f"constant(0.5) * {x} * (constant(1.0) + erf({x} * constant(0.7071067811865476)))"


def _elu(x: str, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> str:
    negative = f"{literal(alpha * scale)} * expm1({x} * {literal(input_scale)})"
    return f"select({x} < constant(0.0), {negative}, {x} * {literal(scale)})"


ROUNDING = ("sign", "floor", "ceil", "trunc", "round")
_EXPONENTIAL = ("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sigmoid")
_TRIGONOMETRIC = ("sin", "cos", "tan", "asin", "acos", "atan")
_HYPERBOLIC = ("sinh", "cosh", "tanh", "asinh", "acosh", "atanh")
_NAMED = (*_EXPONENTIAL, *_TRIGONOMETRIC, *_HYPERBOLIC, "abs", "sqrt", "erf", "erfc", "relu")
_NAMED_2 = ["maximum", "minimum", "fmax", "fmin", "hypot"]
_ROUNDING_2 = ["atan2", "fmod", "remainder"]
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGIC = {"and": "&", "or": "|", "xor": "^"}

SPELLINGS: dict[str, Spelling] = {
    **{f"aten::{name}": Spelling(f"{name}({{0}})") for name in _NAMED},
    **{f"aten::{name}": Spelling(f"{name}({{0}}, {{1}})") for name in _NAMED_2},
    **{f"aten::{name}": Spelling(f"{name}({{0}})", jumps=True) for name in ROUNDING},
    **{f"aten::{name}": Spelling(f"{name}({{0}}, {{1}})", jumps=True) for name in _ROUNDING_2},
    **{
        f"aten::{name}": Spelling(f"{{0}} {sign} {{1}}", gives=MASK)
        for name, sign in _COMPARISONS.items()
    },
    **{
        f"aten::{prefix}_{name}": Spelling(f"{{0}} {sign} {{1}}", takes=MASK, gives=MASK)
        for name, sign in _LOGIC.items()
        for prefix in ("bitwise", "logical")
    },
    **{f"aten::{name}": Spelling(f"{name}({{0}})", gives=MASK) for name in ("isnan", "isinf")},
    "aten::signbit": Spelling("signbit({0})", gives=MASK),
    "aten::round": Spelling(_round, jumps=True),
    "aten::add": Spelling(_sum("+")),
    "aten::sub": Spelling(_sum("-")),
    "aten::mul": Spelling("{0} * {1}"),
    "aten::div": Spelling(_divide),
    "aten::neg": Spelling("-{0}"),
    "aten::reciprocal": Spelling("constant(1.0) / {0}"),
    "aten::rsqrt": Spelling("constant(1.0) / sqrt({0})"),
    "aten::pow": Spelling(_power),
    "aten::ldexp": Spelling("{0} * exp2({1})"),
    "aten::copysign": Spelling("with_sign({0}, {1})", jumps=True),
    "aten::lerp": Spelling("lerp({0}, {1}, {2})"),
    "aten::clamp": Spelling(_clamp),
    "aten::hardtanh": Spelling(lambda x, low=-1.0, high=1.0: _clamp(x, low, high)),
    "aten::leaky_relu": Spelling(
        lambda x, slope=0.01: f"select({x} > constant(0.0), {x}, {x} * {literal(slope)})"
    ),
    "aten::elu": Spelling(_elu),
    "aten::gelu": Spelling(_gelu),
}
"""Spellings by the schema name of an op, for all its overloads."""


def may_jump(op: str, options: Mapping[str, Any]) -> bool:
    """Return True if an op's value may jump. One without a spelling may."""
    spelling = SPELLINGS.get(op)
    rounds = options.get("rounding_mode") is not None
    return spelling is None or spelling.jumps or spelling.gives == MASK or rounds


def register_spelling(op: str, text: str, *, jumps: bool = False) -> None:
    """Teach the emitter a pointwise op, for all targets.

    `op` is the schema name ("aten::erfinv"), `text` an expression of its arguments {0}, {1}, ... in
    terms of + - * / and the functions of the table, for example "{0} / (constant(1.0) + abs({0}))".
    The op takes and returns floating-point values. `jumps`: its value may jump when an argument
    changes a little, as rounding does; segments of time must then join bit for bit. Caches of
    kernels are cleared, so kernels and failures without this spelling are not reused. Raises
    ValueError for names without a namespace.
    """
    if "::" not in op:
        raise ValueError(f"op must be a schema name such as 'aten::erfinv', got {op!r}")
    SPELLINGS[op] = Spelling(text, jumps=jumps)
    clear_kernels()
