"""Results that compiled blocks of language models store for the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from pararnn.lm import LanguageModel, LMConfig

B, T, D = 2, 32, 64


def kept_and_gradients(config: LMConfig, *, compile: bool = True) -> tuple[float, Sequence[Tensor]]:
    """Numbers that a block keeps of a token, by its channels, weights left out; its gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = LanguageModel(config)
    block = model.backbone.blocks[0]
    rows = model.as_rows(torch.zeros(B, T, dtype=torch.long), None)
    x = torch.randn(B, T, D, requires_grad=True)
    if compile:
        block.compile(fullgraph=True, backend="aot_eager_decomp_partition")
    weights = {weight.untyped_storage().data_ptr() for weight in block.parameters()}
    tensors: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        at = tensor.untyped_storage().data_ptr()
        if at not in weights:
            tensors[at] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = block(x, rows)
    gradients = torch.autograd.grad(output.square().mean() * 1e-9, [x, *block.parameters()])
    numbers = sum(tensor.untyped_storage().nbytes() / 4 for tensor in tensors.values())
    return numbers / (B * T * D), gradients


@pytest.mark.filterwarnings("ignore:.*context_fn")
@pytest.mark.parametrize(("cell", "states"), [("gru", 1), ("lstm", 2)])
@pytest.mark.thorough
def test_compiled_blocks_store_only_products_and_states(cell: str, states: int) -> None:
    """The MLP's two products and what its last one reads; x twice, as the MLP adds to it; results
    of in_proj, gate_proj and out_proj; states and, unless they are made again, gates."""
    config = LMConfig(D, 1, vocab_size=8, num_heads=4, cell=cell)
    _, reference = kept_and_gradients(config, compile=False)
    wide = cast(int, config.intermediate_size) / D
    for again in (False, True):
        numbers, gradients = kept_and_gradients(replace(config, recompute_gates=again))
        least = 3 * wide + 2 + 3 + states
        assert least <= numbers < least + (1.5 if again else 3.5)
        for got, want in zip(gradients, reference, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
