"""Derivatives beyond the gradient by the CUDA kernels, next to PyTorch's loop in float64."""

import pytest
import torch
from table import FUSED, PLAIN, dtype_name
from test_tangents import QUICK, Call, _assert_close, _cell, _derivatives

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=dtype_name)
@pytest.mark.parametrize("name", [*QUICK, "lstm"])
def test_derivatives_by_kernels(name, dtype):
    call = Call(_cell(name), reset=torch.rand(2, 5) < 0.3)
    tensors = [x.to(dtype if i == 0 else torch.float32) for i, x in enumerate(call.tensors)]
    truth = _derivatives(call(PLAIN), [x.double() for x in tensors])
    call.options["reset"] = call.options["reset"].cuda()
    ours = _derivatives(call(FUSED), [x.cuda() for x in tensors])
    _assert_close([x.double().cpu() for x in ours], truth, TOLERANCES[dtype])
