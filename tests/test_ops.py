"""Every op of the emitter's table against PyTorch: values, gradients, special values."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from call_results import as_tuple
from table import needs_compiler

import pararnn
from pararnn.codegen.spelling import SPELLINGS
from pararnn.program.derive import expand_entry

IDENTIFIER = str.maketrans({"-": "minus_", ".": "_"})
_TORCH = """
abs neg sign sgn floor ceil trunc round frac exp exp2 expm1 log log2 log10 log1p sqrt
rsqrt reciprocal square sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh
sigmoid erf erfc relu logit deg2rad nan_to_num
"""
_FUNCTIONAL = """
softplus gelu silu mish elu selu celu leaky_relu hardtanh hardswish relu6 softsign
logsigmoid tanhshrink softshrink hardshrink
"""
_TORCH_2 = """
add sub mul div pow maximum minimum fmax fmin atan2 hypot fmod remainder copysign
logaddexp logaddexp2 xlogy ldexp
"""
UNARY = {
    **{name: getattr(torch, name) for name in _TORCH.split()},
    **{name: getattr(F, name) for name in _FUNCTIONAL.split()},
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu_alpha": lambda x: F.elu(x, alpha=0.7),
    "softplus_beta": lambda x: F.softplus(x, beta=2.0, threshold=5.0),
    **{
        f"pow_{str(p).translate(IDENTIFIER)}": lambda x, p=p: x**p
        for p in (0, 1, 2, 3, 4, 0.5, -0.5, -1, -2, 1.7)
    },
    "pow_base": lambda x: 2.5**x,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp_min": lambda x: x.clamp(min=0.25),
    "clamp_max": lambda x: x.clamp(max=0.25),
    "rsub": lambda x: torch.rsub(x, 2.0),
    "times_mask": lambda x: x * (x > 0.3),
    "mask_to_number": lambda x: (x > 0.3).to(x.dtype) - x,
    "whole_number": lambda x: x - torch.round(x.clamp(-99, 99)).to(torch.int64),
    "masked_fill": lambda x: x.masked_fill(x < 0, 0.3),
    "logic": lambda x: torch.where((x > 0) & ~(x > 0.5) | (x < -1), x, 2 * x),
    "xor": lambda x: torch.where((x > 0) ^ (x > 1), x, 3 * x),
    "logical": lambda x: torch.where(torch.logical_xor(x > 0, torch.logical_not(x > 1)), x, 3 * x),
    "of_number": lambda x: torch.where(torch.logical_and(x, x > -1), x, 3 * x),
    "is_special": lambda x: torch.where(torch.isnan(x) | torch.isinf(x), torch.ones_like(x), x),
    "signbit": lambda x: torch.where(torch.signbit(x), -2 * x, x),
    "compare": lambda x: torch.where((x <= 0.5) & (x >= -0.5) & (x != 0.25), x, x + 1),
    "threshold": lambda x: F.threshold(x, 0.1, 0.2),
    "infinite_constant": lambda x: torch.where(x > 0.5, float("inf"), x),
}
BINARY = {
    **{name: getattr(torch, name) for name in _TORCH_2.split()},
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp_tensor": lambda x, y: torch.lerp(x, y, x),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=2.0),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=2.0),
    "add_alpha": lambda x, y: torch.add(x, y, alpha=3),
    "div_floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div_trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "clamp_tensor": lambda x, y: torch.clamp(x, y, y + 1),
    "clamp_at_least": lambda x, y: torch.clamp(x, min=y),
    "where": lambda x, y: torch.where(x < y, x * y, x),
    "equal": lambda x, y: torch.where((x == y) | (x != y), x, y),
    "masks_equal": lambda x, y: torch.where((x > 0) == (y > 0), x, y),
    "mask_of_masks": lambda x, y: torch.where(torch.where(x > y, x > 0, y > 0), x, y),
    "huber": lambda x, y: F.huber_loss(x, y, reduction="none"),
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
}
OWN_SPELLINGS = set(SPELLINGS)  # before tests register others
if torch.__version__ < "2.11":  # its gradient of ldexp cannot be traced
    del BINARY["ldexp"]
    OWN_SPELLINGS.remove("aten::ldexp")
OPS = {**UNARY, **BINARY}
GROUP = 8  # states of a kernel, at most
GROUPS = [tuple(OPS)[i : i + GROUP] for i in range(0, len(OPS), GROUP)]

SPECIAL = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, -1.0, 0.5, -0.5, 0.25, 2.0]
SPECIAL += [
    s * x for x in (1.5, 2.5, 9.1, 20.0, 50.0, 87.5, 88.5, 89.0, 104.0, 1e4) for s in (1, -1)
]
SPECIAL += [s * x for x in (1e-3, 1e-8, 1e-30, 1e30) for s in (1, -1)]


# Values for which PyTorch's own vectorised kernels are wrong (torch 2.13).
WRONG_IN_TORCH = {
    "sinh": lambda x, y: x.abs() == 89,  # overflows before float32 does
    "cosh": lambda x, y: x.abs() == 89,
    "gelu": lambda x, y: x.isinf(),  # NaN for infinity
    **{
        name: lambda x, y: (x / y).abs() > 1e6  # NaN for far quotients
        for name in ("fmod", "remainder", "div_floor")
    },
}


@cache
def _cell(names):
    """Return a cell class, traced once for both dtypes. Its step reads no strings, so its trace can
    be cached on disk."""
    functions = tuple(OPS[name] for name in names)
    both = tuple(name in BINARY for name in names)

    class Ops(pararnn.Cell):
        states = tuple(f"h_{n}" for n in names)
        gates = tuple(f"{side}_{n}" for n in names for side in "xy")

        def step(self, state, gate, param):
            new = []
            for function, two, x, y in zip(functions, both, gate[::2], gate[1::2], strict=True):
                new.append(function(x, y) if two else function(x) + 0 * y)
            return tuple(new)

    return Ops


def _values(dtype):
    """Pairs (x, y): every special value with every other one, and random ones."""
    generator = torch.Generator().manual_seed(0)
    special = torch.tensor(SPECIAL, dtype=torch.float64)
    pairs = torch.cartesian_prod(special, special)
    normal = torch.randn(200, 2, generator=generator, dtype=torch.float64)
    return torch.cat([pairs, normal, 10 * normal, 0.01 * normal, normal.round(decimals=1)]).to(
        dtype
    )


def _assert_same(got, wanted, title, values, name):
    """Assert that NaN and infinity agree, and other values to some units in the last place."""
    wrong = got.isnan() != wanted.isnan()
    wrong |= got.isinf() != wanted.isinf()
    wrong |= got.isinf() & (got != wanted)
    finite = got.isfinite() & wanted.isfinite()
    # Derivatives are sums of numbers above 1 that may cancel.
    limit = 64 * torch.finfo(got.dtype).eps * (wanted.abs() + 1)
    wrong |= finite & ((got - wanted).abs() > limit)
    if name in WRONG_IN_TORCH:
        wrong &= ~WRONG_IN_TORCH[name](*values.T)
    if wrong.any():
        i = wrong.nonzero()[0, 0]
        pytest.fail(f"{title} at {values[i].tolist()}: {got[i].item()}, torch: {wanted[i].item()}")


def check_ops(names, dtype, device="cpu"):
    """Compare the compiled step and gradient with the traced graphs run by PyTorch on the CPU."""
    values = _values(dtype)
    cell = _cell(names)(len(values), dtype=dtype, device=device)
    gates = values.T.repeat(len(names), 1).to(device).requires_grad_()
    states, _ = pararnn.solve(cell, gates[None, None], solver="sequential", backend="fused")
    states = [s[0, 0] for s in as_tuple(states)]
    (grads,) = torch.autograd.grad(sum(s.sum() for s in states), gates)
    states, grads, gates = [s.detach().cpu() for s in states], grads.cpu(), gates.detach().cpu()
    graphs = pararnn.program_of(cell).graphs[dtype]
    flat = [torch.zeros(len(values), dtype=dtype)] * len(names) + list(gates)
    wanted = graphs.step(*flat)
    wanted_grads = graphs.vjp(*flat, *[torch.ones_like(flat[0])] * len(names))[len(names) :]
    for i, name in enumerate(names):
        _assert_same(states[i], wanted[i], name, values, name)
        for side in (0, 1) if name in BINARY else (0,):
            grad = expand_entry(wanted_grads[2 * i + side], flat[0], flat[0].shape)
            title = f"d {name} / d {'xy'[side]}"
            _assert_same(grads[2 * i + side], grad, title, values, name)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: f"{names[0]}-to-{names[-1]}")
@pytest.mark.one_in(7)
def test_ops_agree_with_torch(names, dtype):
    check_ops(names, dtype)


GRIDS = {
    "exp": torch.linspace(-110, 95, 20001),
    "expm1": torch.linspace(-20, 95, 20001),
    "sigmoid": torch.linspace(-110, 95, 20001),
    "tanh": torch.linspace(-25, 25, 20001),
    "log": torch.logspace(-44, 38, 20001),
    "log1p": torch.linspace(-0.999, 10, 20001),
}


@needs_compiler
@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.one_in(3)
def test_written_out_functions_are_accurate(dtype):
    """Within 4 units in the last place, down to arguments and results next to zero."""
    names = tuple(GRIDS)
    tiny = torch.logspace(-37, 0, 2001, dtype=torch.float64)
    grid = [torch.cat([GRIDS[name].double(), tiny, -tiny / 2]).to(dtype) for name in names]
    gates = torch.stack([side for x in grid for side in (x, torch.zeros_like(x))])
    states, _ = pararnn.solve(_cell(names)(gates.shape[1], dtype=dtype), gates[None, None])
    for name, x, got in zip(names, grid, states, strict=True):
        got, exact = got[0, 0].double(), OPS[name](x.double())
        large = (exact.abs() > torch.finfo(dtype).max) & (name != "log")
        small = exact.abs() < 1e10 * torch.finfo(dtype).tiny
        usual = exact.isfinite() & ~large & ~small
        error = ((got - exact) / exact)[usual].abs().max() / torch.finfo(dtype).eps
        assert error < 4, f"{name}: {error} epsilons"
        assert (got - exact)[small].abs().lt(1e-27).all(), name
        assert got[large].isinf().all() if dtype == torch.float32 else not large.any(), name
        assert torch.equal(got.isnan(), exact.isnan())


def test_every_spelling_is_covered():
    ops = set()
    for names in GROUPS:
        graphs = pararnn.program_of(_cell(names)(1)).graphs[torch.float32]
        for graph in (graphs.step, graphs.vjp):
            nodes = graph.module.graph.nodes
            ops |= {n.target._schema.name for n in nodes if n.op == "call_function"}
    assert ops >= OWN_SPELLINGS
