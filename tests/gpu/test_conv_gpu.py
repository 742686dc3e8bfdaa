"""The convolution's kernels against float64, and in a compiled block with packed documents."""

import conv_cases
import pytest
import torch
from lm_kinds import borders, documents, plain
from relative import relative_error
from test_lm_conv import test_what_is_not_finite_stays_in_its_document  # noqa: F401

from pararnn.lm import invariant
from pararnn.lm.conv_op import conv_silu, plain_conv_silu, takes

KINDS = {
    "float32": (torch.float32, torch.float32, 1e-5),
    "bfloat16": (torch.bfloat16, torch.bfloat16, 1e-2),
    "float16": (torch.float16, torch.float16, 2e-3),
    "autocast": (torch.bfloat16, torch.float32, 1e-2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", conv_cases.CASES)
def test_kernels_equal_float64(case, kind):
    dtype, parameters, bound = KINDS[kind]
    tensors, grad = conv_cases.inputs(case, dtype, parameters, "cuda")
    references = conv_cases.exact(tensors, grad)
    *floats, since = tensors
    leaves = [x if x is None else x.requires_grad_() for x in floats]
    assert takes(leaves[0], leaves[1])
    y = conv_silu(*leaves, since)
    present = [leaf for leaf in leaves if leaf is not None]
    grads = torch.autograd.grad(y, present, grad)
    for result, reference in zip((y, *grads), references, strict=False):
        assert relative_error(result, reference) < bound
    for result, leaf in zip(grads, present, strict=True):
        assert result.dtype == leaf.dtype


def test_rows_of_a_wider_tensor_are_read_in_place():
    wide = torch.randn(2, 50, 192, device="cuda", dtype=torch.bfloat16)
    u = wide[..., 64:128]
    weight, bias = torch.randn(4, 64, device="cuda"), torch.randn(64, device="cuda")
    result = conv_silu(u, weight, bias, None, None)
    assert torch.equal(result, conv_silu(u.contiguous(), weight, bias, None, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_compiled_model_has_the_gradients_of_plain_convolutions(dtype, monkeypatch):
    lengths = [40, 3, 1, 60]
    row, results = torch.cat(documents(lengths))[None].cuda(), []
    for compute in (True, False):
        monkeypatch.setattr(invariant, "takes", lambda u, weight, answer=compute: answer)
        torch.compiler.reset()
        model = plain("gru", dtype).cuda()
        for block in model.backbone.layers:
            block.compile(fullgraph=True)
        model.loss(row, cu_seq_lens=borders(lengths).cuda()).backward()
        results.append([p.grad for p in model.parameters()])
    bound = 1e-4 if dtype == torch.float32 else 0.1
    for one, other in zip(*results, strict=True):
        assert relative_error(one, other) < bound


def test_second_derivatives():
    tensors, _ = conv_cases.inputs("fewer steps than taps", torch.float32, torch.float32, "cuda")
    leaves = [x.double().requires_grad_() for x in tensors[:4]]
    single = [x.float().detach().requires_grad_() for x in leaves]
    seconds = []
    for compute, present in ((plain_conv_silu, leaves), (conv_silu, single)):
        (first,) = torch.autograd.grad(
            compute(*present, tensors[4]).square().sum(), present[0], create_graph=True
        )
        seconds.append(torch.autograd.grad(first.square().sum(), present))
    for one, other in zip(*seconds, strict=True):
        assert relative_error(other, one) < 1e-4
