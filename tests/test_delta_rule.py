"""Delta rules in the argument order of other libraries: their values, and their bits at any cut."""

from __future__ import annotations

import pytest
import torch
from relative import relative_error
from torch import Tensor

from pararnn.lm import gated_delta_rule, kda

RULES = {"gated delta": gated_delta_rule, "kda": kda}
DTYPES = [torch.float32, torch.bfloat16]


def inputs(rule: str, dtype: torch.dtype, batch: int = 3, steps: int = 21) -> list[Tensor]:
    """Return q, k, v, and in float32 as others take them log-decays and rates."""
    heads, keys, values = 2, 4, 6
    q, k = (torch.randn(batch, steps, heads, keys).to(dtype) for _ in range(2))
    v = torch.randn(batch, steps, heads, values).to(dtype)
    of_decay = (keys,) if rule == "kda" else ()
    g = torch.nn.functional.logsigmoid(torch.randn(batch, steps, heads, *of_decay) + 2)
    return [q, k, v, g, torch.rand(batch, steps, heads)]


def by_loop(q, k, v, g, beta, state, scale: float, normed: bool) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta, state = (x.double() for x in (q, k, v, g, beta, state))
    if normed:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    g = g if g.ndim == 4 else g.unsqueeze(-1)
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp().unsqueeze(-1)
        missing = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        write = beta[:, t, :, None] * missing
        state = state + k[:, t].unsqueeze(-1) * write.unsqueeze(-2)
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_values_and_gradients_are_those_of_a_loop(rule: str, dtype: torch.dtype) -> None:
    for normed, scale in ((True, None), (False, 0.3)):
        tensors = inputs(rule, dtype)
        tensors[1] = tensors[1] / 3  # keys that are not normed may not expand the state
        state = torch.randn(3, 2, 4, 6)
        leaves = [x.requires_grad_() for x in (*tensors, state)]
        output, final = RULES[rule](*leaves[:5], scale, state, True, normed)
        wanted = by_loop(*leaves, 4**-0.5 if scale is None else scale, normed)
        assert output.dtype == dtype
        assert final.dtype == torch.float32
        limit = 1e-2 if dtype == torch.bfloat16 else 1e-5
        assert relative_error(output, wanted[0]) < limit
        assert relative_error(final, wanted[1]) < 1e-5
        weights = torch.randn(output.shape)
        ours = torch.autograd.grad((output * weights).sum() + final.sum(), leaves)
        theirs = torch.autograd.grad((wanted[0] * weights).sum() + wanted[1].sum(), leaves)
        for a, b in zip(ours, theirs, strict=True):
            assert relative_error(a, b) < 2 * limit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_cuts_batches_and_packing_change_no_bit(rule: str, dtype: torch.dtype) -> None:
    tensors = inputs(rule, dtype)
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    whole, final = RULES[rule](*tensors, **options)
    for cuts in ([1] * 21, [20, 1], [3, 9, 9]):
        state, parts = None, []
        for chunk in zip(*(x.split(cuts, 1) for x in tensors), strict=True):
            part, state = RULES[rule](*chunk, initial_state=state, **options)
            parts.append(part)
        assert torch.equal(torch.cat(parts, 1), whole)
        assert torch.equal(state, final)
    one, _ = RULES[rule](*(x[1:2] for x in tensors), **options)
    assert torch.equal(one, whole[1:2])
    packed, packed_final = RULES[rule](
        *(x.reshape(1, 63, *x.shape[2:]) for x in tensors),
        **options,
        cu_seqlens=torch.tensor([0, 21, 42, 63]),
    )
    assert torch.equal(packed.view_as(whole), whole)
    assert torch.equal(packed_final, final)


def test_sizes_that_do_not_fit_are_named() -> None:
    q, k, v, g, beta = inputs("kda", torch.float32)
    with pytest.raises(ValueError, match=r"g must be \(3, 21, 2\), got \(3, 21, 2, 4\)"):
        gated_delta_rule(q, k, v, g, beta)
    with pytest.raises(ValueError, match="v must be"):
        kda(q, k, v[:, :20], g, beta)
    output, final = kda(q, k, v, g, beta)
    assert final is None
    assert output.shape == v.shape
