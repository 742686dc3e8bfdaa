"""Attention of a row's last tokens is that of the whole row."""

import pytest
import torch
from relative import relative_error
from torch.nn.functional import scaled_dot_product_attention

from pararnn.base.errors import EngineError
from pararnn.messages.shift import shift
from pararnn.ranks import attention

F64, BF16 = torch.float64, torch.bfloat16
STEPS = 19


@pytest.mark.parametrize(("dtype", "bound"), [(F64, 1e-12), (BF16, 2e-2)], ids=str)
@pytest.mark.parametrize("first", [0, 1, 12, 18])
def test_the_last_tokens_have_the_outputs_and_gradients_of_the_whole_row(first, dtype, bound):
    inputs = torch.randn(3, 2, 2, STEPS, 8, dtype=F64).to(dtype).double().unbind()
    leaves = [x.requires_grad_() for x in inputs]
    arriving = torch.randn_like(leaves[0][:, :, first:])
    reference = scaled_dot_product_attention(*leaves, is_causal=True)[:, :, first:]
    exact = torch.autograd.grad(reference, leaves, arriving)
    cast = [x.detach().to(dtype).requires_grad_() for x in leaves]
    # Of projections: tokens come before heads in memory.
    q = cast[0].transpose(1, 2).contiguous().transpose(1, 2)[:, :, first:]
    out = attention.suffix_attention(q, *cast[1:])
    grads = torch.autograd.grad(out, cast, arriving.to(dtype))
    for result, value in zip((out, *grads), (reference, *exact), strict=True):
        assert result.dtype == dtype
        assert relative_error(result, value) < bound


@pytest.mark.parametrize("queries", [4, 1024])
def test_masks_of_some_queries_at_a_time(monkeypatch, queries):
    monkeypatch.setattr(attention, "QUERIES", queries)
    q, k, v = torch.randn(3, 2, 2, STEPS, 8, dtype=F64).unbind()
    reference = scaled_dot_product_attention(q, k, v, is_causal=True)
    for first in (1, 12, 18):
        out = attention._by_masks(q[:, :, first:], k, v)
        torch.testing.assert_close(out, reference[:, :, first:])


def test_scores_far_apart_give_a_part_no_weight():
    """The keys of a part may weigh nothing: no logarithm's difference overflows."""
    q = torch.full((1, 1, 2, 8), 10.0)
    k = torch.cat([torch.full((1, 1, 3, 8), 10.0), torch.full((1, 1, 2, 8), -10.0)], 2)
    v = torch.randn(1, 1, 5, 8)
    for keys, values in ((k, v), (k.flip(2), v)):
        reference = scaled_dot_product_attention(
            q.double(), keys.double(), values.double(), torch.ones(2, 5).tril(3).bool()
        )
        out = attention.suffix_attention(q, keys, values)
        torch.testing.assert_close(out, reference.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_the_operator_is_one_for_compilers():
    q, k, v = (torch.randn(2, 2, n, 8, requires_grad=True) for n in (5, STEPS, STEPS))
    torch.library.opcheck(attention.attend_suffix, (q, k, v))


def test_derivatives_without_formulas_are_refused():
    q, k, v = (torch.randn(1, 2, length, 4) for length in (3, 5, 5))
    for derive in (
        lambda: torch.func.grad(lambda q: attention.suffix_attention(q, k, v).sum())(q),
        lambda: torch.func.jvp(lambda q: attention.suffix_attention(q, k, v), (q,), (q,)),
        lambda: torch.func.grad(lambda q: shift(q, "", False).sum())(q),
        lambda: torch.func.jvp(lambda q: shift(q, "", False), (q,), (q,)),
    ):
        with pytest.raises(EngineError, match=r"that ranks share.*loss\.backward"):
            derive()
