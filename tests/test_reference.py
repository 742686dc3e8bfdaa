"""What the oracle's errors are relative to, against a loop over the steps."""

from dataclasses import replace

import pytest
import torch
from mixing_cells import Elman, HeadGRU
from table import make_case

from pararnn import DenseGRUCell
from pararnn.cells.products import OUTER, product, recorded_product
from pararnn.check.oracle import Oracle
from pararnn.check.reference import OtherRounding, reverse, run_loop, running


def _by_steps(values, cut):
    out = values.clone()
    for t in reversed(range(values.shape[1] - 1)):
        mask = cut[:, t + 1].reshape(len(cut), *[1] * (values.ndim - 3), -1)
        out[:, t] = torch.maximum(out[:, t], out[:, t + 1].masked_fill(mask, 0))
    return out


@pytest.mark.parametrize("length", [0, 1, 2, 3, 8, 13])
@pytest.mark.parametrize("channels", [1, 4], ids=["all channels", "each channel"])
@pytest.mark.parametrize("inner", [(), (3,)], ids=["(B, T, D)", "(B, T, N, D)"])
@pytest.mark.parametrize("part", [0.0, 0.3, 1.0])
def test_running_ends_with_a_sequence(part, inner, channels, length):
    torch.manual_seed(0)
    values, cut = torch.rand(2, length, *inner, 4), torch.rand(2, length, channels) < part
    assert torch.equal(running(values, cut), _by_steps(values, cut))
    if not part:
        assert torch.equal(running(values, None), _by_steps(values, cut))


@pytest.mark.parametrize("kind", ["matrix", "heads", "op", "outer"])
def test_other_roundings_of_a_product_are_those_of_its_terms(kind):
    """A result that is small by chance rounds by its terms, in the gradients' products too."""
    torch.manual_seed(0)
    x, matrix = torch.randn(3, 8), torch.randn(2, 4, 4)
    run, *operands = {
        "matrix": (torch.matmul, x, torch.randn(8, 8)),
        "heads": (product, x, matrix),
        "op": (recorded_product, x, matrix),
        "outer": (lambda x, y: OUTER(x, y, matrix), x, torch.randn(3, 8)),
    }[kind]
    terms = run(*(operand.abs() for operand in operands))
    truth = run(*operands)
    with OtherRounding(torch.float32, 0):
        shaken = run(*operands)
    noise = (shaken - truth).abs() / (torch.finfo(torch.float32).eps * terms)
    assert noise.mean() > 0.5
    assert noise.max() < 2.6  # with the rounding of sums, and the noise of a copy
    with OtherRounding(torch.float64, 0):
        assert torch.equal(run(*operands), truth)


@pytest.mark.parametrize("cell_class", [HeadGRU, Elman, DenseGRUCell])
def test_the_size_of_a_matrixs_gradient_is_the_sum_of_its_terms_over_rows(cell_class):
    """Rows that cancel to a gradient of zero leave the rounding of each."""
    case = make_case(cell_class, torch.float64, 2, "initial", batch=1, channels=6)
    one = Oracle.of(case.cell, case.gates, case.initial).trial

    def rows(scales):
        scale = torch.tensor(scales, dtype=torch.float64)

        def repeat(tensor, by):
            return tensor.detach() * by.view(-1, *[1] * (tensor.ndim - 1))

        args = one.args.map(lambda t: repeat(t, scale.abs()).requires_grad_())
        trial = replace(one, args=args, cotangents=tuple(repeat(c, scale) for c in one.cotangents))
        return reverse(trial, run_loop(trial), sizes=True)

    alone, both = rows([1.0]), rows([1.0, -1.0])
    for name, parameter in case.cell.named_parameters():
        assert both.grads[name].abs().max() < 1e-12
        if parameter.ndim > 1:
            torch.testing.assert_close(both.amounts[name], 2 * alone.amounts[name])
            assert (alone.amounts[name] >= alone.grads[name].abs() * (1 - 1e-9)).all()
