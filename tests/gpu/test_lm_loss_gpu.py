"""The loss by liger-kernel beside the chunked one, on a GPU."""

import pytest
import torch

from pararnn.lm import causal_lm_loss
from pararnn.numerics import relative_error

pytest.importorskip("liger_kernel", reason="needs liger-kernel: pip install 'pararnn[lm]'")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
WIDTH, VOCAB = 256, 5003
OPTIONS = {
    "plain": {},
    "z-loss": {"z_loss": 1e-2},
    "divided": {"z_loss": 1e-4, "num_items": torch.tensor(10_000), "shift": False},
}


def _results(backend, dtype, autocast=False, factor=1.0, **options):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(4, 300, WIDTH, device="cuda", generator=generator)
    weight = torch.randn(VOCAB, WIDTH, device="cuda", generator=generator) / WIDTH**0.5
    labels = torch.randint(VOCAB, (4, 300), device="cuda", generator=generator)
    labels[:, ::7] = -100
    kept = torch.float32 if autocast else dtype
    leaves = [leaf.to(kept).requires_grad_() for leaf in (hidden, weight)]
    with torch.autocast("cuda", dtype=dtype, enabled=autocast):
        value = causal_lm_loss(*leaves, labels, backend=backend, **options)
    return value.detach(), *torch.autograd.grad(value * factor, leaves)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["float32", "bfloat16", "autocast"],
)
def test_liger_equals_chunks(dtype, options, autocast):
    ours, theirs = (
        _results(backend, dtype, autocast, 2.5, **options) for backend in ("chunked", "liger")
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        assert relative_error(other, mine) < TOLERANCE[dtype]


def test_auto_takes_liger():
    auto, liger = (_results(backend, torch.bfloat16)[0] for backend in ("auto", "liger"))
    assert torch.equal(auto, liger)
    double = _results("auto", torch.float64)[0]
    assert double.dtype == torch.float64
    with pytest.raises(ValueError, match="other than float64"):
        _results("liger", torch.float64)


def test_memory_stays_below_the_logits():
    tokens, vocab, width = 16_384, 50_432, 256
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocab, (tokens,), device="cuda")
    for backend in ("chunked", "liger"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        causal_lm_loss(hidden, weight, labels, backend=backend).backward()
        assert torch.cuda.max_memory_allocated() - before < tokens * vocab * 4 / 4
        hidden.grad = weight.grad = None
