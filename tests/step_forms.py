"""What a step may write: every overload of the emitter's ops, and their usual Python forms."""

import functools
import itertools
import operator

import torch
import torch.nn.functional as F

import pararnn
from pararnn import Param
from pararnn.codegen.spelling import SPELLINGS

NUMBERS = {"number": 0.75, "Optional[number]": 0.75, "float": 0.75, "int": 2, "bool": False}
TENSORS = ("traced", "0d", "full")
WHOLE_ALPHA = {"alpha": 3, "rounding_mode": "floor", "approximate": "tanh", "min": 0.4}
OF_MASKS = ("bitwise_and", "bitwise_or", "bitwise_xor")
ABOVE_ONE = ("acosh",)


def _tensor(kind, x):
    if kind == "0d":
        return torch.tensor(0.75)
    return torch.full_like(x, 0.75) if kind == "full" else x


def _form(op, kinds, options):
    """Return a function of two traced tensors that calls an overload on `kinds` of arguments."""

    def call(y, z, c):
        traced, args = itertools.cycle((y, z)), []
        for kind in kinds:
            argument = _tensor(kind, next(traced)) if kind in TENSORS else kind
            if name in OF_MASKS:
                argument = argument > 0.6 if isinstance(argument, torch.Tensor) else True
            if name in ABOVE_ONE:
                argument = 1 + argument
            args.append(argument)
        return op(*args, **options)

    name = op._schema.name.removeprefix("aten::")
    return call


def overloads():
    """Every overload of the table's ops by name, with tensors of all kinds in every place."""
    forms = {}
    for schema_name in SPELLINGS:
        namespace, _, name = schema_name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), name)
        for overload in packet.overloads():
            op = getattr(packet, overload)
            arguments, options = op._schema.arguments, {}
            types = [str(argument.type) for argument in arguments]
            if op._schema.is_mutable or not any("Tensor" in t and "List" not in t for t in types):
                continue
            choices = []
            for argument, type_name in zip(arguments, types, strict=True):
                if argument.name in WHOLE_ALPHA and "Tensor" not in type_name:
                    value = WHOLE_ALPHA[argument.name]
                else:
                    value = NUMBERS.get(type_name)
                if argument.kwarg_only:
                    options[argument.name] = value
                else:
                    choices.append(TENSORS if "Tensor" in type_name else (value,))
            for kinds in itertools.product(*choices):
                # A full constant becomes the same number as a 0-d one: it stands last, once.
                if "traced" in kinds and "full" not in kinds[:-1]:
                    forms[f"{op}{kinds}"] = _form(op, kinds, options)
    return forms


_WITH = {
    "config": lambda y, z, c: c,
    "int": lambda y, z, c: 2,
    "mask": lambda y, z, c: z > 0.1,  # true, as one divides by it
}
"""What Python forms take that overloads do not tell apart."""
_OPERATORS = "add sub mul truediv mod pow eq ne lt le gt ge"
_FUNCTIONS = """
add sub mul div pow maximum minimum fmax fmin atan2 hypot fmod remainder copysign logaddexp xlogy
ldexp clamp_min clamp_max logical_and logical_or logical_xor clamp where lerp addcdiv
"""
_CALLS = {
    "where": lambda f, y, other: f(y > 0.6, y, other),
    "lerp": lambda f, y, other: f(y, 2 * y, other),
    "addcdiv": lambda f, y, other: f(y, 2 * y, other, value=0.5),
    "clamp": lambda f, y, other: f(y, min=other),
}


def python_forms():
    """Operators, functions of torch and methods of tensors, with other tensors and numbers."""
    forms = {}
    for kind, other in _WITH.items():
        for name in _OPERATORS.split():
            f = getattr(operator, name)
            forms[f"{name}(y, {kind})"] = lambda y, z, c, f=f, o=other: f(y, o(y, z, c))
            forms[f"{name}({kind}, y)"] = lambda y, z, c, f=f, o=other: f(o(y, z, c), y)
        for name in _FUNCTIONS.split():
            call = _CALLS.get(name, lambda f, y, other: f(y, other))
            for owner in (torch, torch.Tensor):
                if name != "where" or owner is torch:
                    f = getattr(owner, name)
                    forms[f"{owner.__name__}.{name}({kind})"] = (
                        lambda y, z, c, f=f, o=other, call=call: call(f, y, o(y, z, c))
                    )
        for mode in ("floor", "trunc"):
            forms[f"div(y, {kind}, {mode})"] = lambda y, z, c, o=other, mode=mode: torch.div(
                y, o(y, z, c), rounding_mode=mode
            )
    return forms


_OF_ONE = """
relu relu6 elu selu celu gelu silu mish softplus softsign tanhshrink softshrink hardshrink
leaky_relu hardtanh hardswish hardsigmoid logsigmoid
"""
_OF_TORCH = """
sgn sign floor ceil trunc round frac square logit deg2rad nan_to_num isnan isinf isfinite signbit
logical_not isreal
"""
FUNCTIONAL = {
    **{f"F.{name}": lambda y, z, c, name=name: getattr(F, name)(y) for name in _OF_ONE.split()},
    **{
        f"torch.{name}": lambda y, z, c, name=name: getattr(torch, name)(y)
        for name in _OF_TORCH.split()
    },
    "round(decimals=2)": lambda y, z, c: torch.round(y, decimals=2),
    "round(decimals=-1)": lambda y, z, c: torch.round(100 * y, decimals=-1) / 100,
    "clamp(number, tensor)": lambda y, z, c: torch.clamp(y, torch.tensor(0.4), z),
    "clamp(max=full)": lambda y, z, c: y.clamp(max=torch.full_like(y, 0.6)),
    "clip": lambda y, z, c: y.clip(0.4, c),
    "threshold": lambda y, z, c: F.threshold(y, 0.6, c),
    "prelu": lambda y, z, c: F.prelu(y, y.new_tensor(0.3)),
    "huber": lambda y, z, c: F.huber_loss(y, z, reduction="none", delta=0.1),
    "masked_fill": lambda y, z, c: y.masked_fill(z > 0.6, torch.tensor(0.75)),
    "expanded constant": lambda y, z, c: y * y.new_tensor(0.75).expand(y.shape),
    "entry of a constant": lambda y, z, c: y * torch.tensor([0.25, 0.75])[1],
    "value of a constant": lambda y, z, c: y * torch.tensor([0.25, 0.75]).tolist()[1],
    "entry by entry": lambda y, z, c: sum(w * y**i for i, w in enumerate(torch.tensor([1.0, 2.0]))),
    "mask as number": lambda y, z, c: (y > 0.6).to(y.dtype) - (z > 0.6).type_as(y),
    "signs of a mask": lambda y, z, c: ((y > 0.6).long() * 2 - 1) * z,
    "whole numbers": lambda y, z, c: (10 * y).clamp(0, 9).long() % 3 * z,
    "in place": lambda y, z, c: (y * 1.0).add_(z).mul_(2),
    "the whole of it": lambda y, z, c: y[..., :].view(y.shape) * z,
    "cubed in place": lambda y, z, c: (y * 1.0).abs().pow_(3),
    "no number": lambda y, z, c: (
        y + torch.where(y > 2, 2 * torch.full_like(y, torch.nan), torch.zeros_like(y))
    ),
    "constants meet": lambda y, z, c: torch.tensor(0.1) * torch.tensor(0.3) * y,
    "quotient of constants": lambda y, z, c: torch.addcdiv(y, z, torch.tensor(0.7), value=0.1),
    "logarithm of a constant": lambda y, z, c: torch.xlogy(y, torch.tensor(0.7)),
}
FORMS = {**overloads(), **python_forms(), **FUNCTIONAL}


@functools.cache
def taken():
    """The forms that PyTorch takes, with a gradient."""
    y, z = (torch.linspace(0.3, 0.9, 8, dtype=torch.float64).requires_grad_() for _ in range(2))
    found = {}
    for name, form in FORMS.items():
        try:
            new = as_state(form(y, z, 0.75), y, z)
            torch.autograd.grad(new.sum() + 0 * y.sum(), [y, z], allow_unused=True)
        except (RuntimeError, TypeError):
            continue
        if new.dtype == torch.float64:
            found[name] = form
    assert len(found) > 0.8 * len(FORMS)
    return found


def as_state(value, y, z):
    """A form's value as one of the dtype of states: a mask chooses, whole numbers multiply."""
    if value.dtype == torch.bool:
        return torch.where(value, torch.sin(y), torch.cos(z))
    return value if value.is_floating_point() else value * y


def cells(forms):
    """Three cells whose steps add up all forms: elementwise, of heads, and of matrix states."""
    functions = [*forms.values()]

    def total(y, z, c):
        y, z = 0.6 + 0.3 * torch.tanh(y), 0.6 + 0.3 * torch.tanh(z)
        terms = [as_state(f(y, z, c), y, z) for f in functions]
        weights = [(1 + i / len(terms)) / len(terms) for i in range(len(terms))]
        return torch.tanh(sum(w * term for w, term in zip(weights, terms, strict=True)))

    class Elementwise(pararnn.Cell):
        states, gates, config = ("h",), ("x", "z"), {"c": 0.75}
        params = {"a": Param(), "b": Param()}

        def step(self, state, gate, param):
            return total(param.a * state.h + gate.x, param.b * state.h + gate.z, self.c)

    class Heads(pararnn.Cell):
        states, gates, config = ("h",), ("x", "z"), {"c": 0.75}
        params = {"R": Param("H,K,K"), "b": Param()}

        def step(self, state, gate, param):
            return total(state.h @ param.R + gate.x, param.b * state.h + gate.z, self.c)

    class Matrix(pararnn.Cell):
        states, gates, config = {"h": "V"}, {"x": "V", "z": "V"}, {"c": 0.75}
        params = {"R": Param("H,V,V"), "b": Param("H,V")}

        def step(self, state, gate, param):
            product = (state.h[..., None, :] @ param.R)[..., 0, :]
            return total(product + gate.x, param.b * state.h + gate.z, self.c)

    return Elementwise, Heads, Matrix
