"""The loss over chunks on a GPU, where its pointwise part is compiled."""

import pytest
import torch
import torch.nn.functional as F
from relative import relative_error

from pararnn.lm import causal_lm_loss, loss

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
WIDTH, VOCAB = 256, 5003
OPTIONS = {
    "plain": {},
    "z-loss": {"z_loss": 1e-2},
    "divided": {"z_loss": 1e-4, "num_items": torch.tensor(10_000), "shift": False},
}


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    """1,024 rows a chunk, and a last chunk of another size."""
    monkeypatch.setattr(loss, "CHUNK_LOGITS", {"cpu": 5, "cuda": 1024 * VOCAB})


def reference(hidden, weight, labels, z_loss=0.0, num_items=None, shift=True):
    """In float64, with all logits."""
    if shift:
        hidden, labels = hidden[:, :-1], labels[:, 1:]
    logits, flat = (hidden @ weight.T).flatten(0, -2), labels.flatten()
    count = (flat != -100).sum() if num_items is None else num_items
    squares = logits.logsumexp(1)[flat != -100].square().sum()
    return (F.cross_entropy(logits, flat, reduction="sum") + z_loss * squares) / count


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["float32", "bfloat16", "autocast"],
)
def test_equals_all_logits_in_float64(dtype, options, autocast):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(4, 700, WIDTH, device="cuda", generator=generator)
    weight = torch.randn(VOCAB, WIDTH, device="cuda", generator=generator) / WIDTH**0.5
    labels = torch.randint(VOCAB, (4, 700), device="cuda", generator=generator)
    labels[:, ::7] = -100
    leaf_dtype = torch.float32 if autocast else dtype
    leaves = [leaf.to(leaf_dtype).requires_grad_() for leaf in (hidden, weight)]
    with torch.autocast("cuda", dtype=dtype, enabled=autocast):
        value = causal_lm_loss(*leaves, labels, **options)
    got = value.detach(), *torch.autograd.grad(value * 2.5, leaves)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    right = reference(*exact, labels, **options)
    wanted = right.detach(), *torch.autograd.grad(right * 2.5, exact)
    assert got[0].dtype == torch.float32
    for mine, other in zip(got, wanted, strict=True):
        assert relative_error(mine, other) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_gradients_can_be_differentiated(dtype):
    """By a penalty on them, of several chunks."""
    labels = torch.randint(VOCAB, (3, 600), device="cuda")
    hidden = torch.randn(3, 600, WIDTH, device="cuda").to(dtype)
    weight = (torch.randn(VOCAB, WIDTH, device="cuda") / WIDTH**0.5).to(dtype)

    def of_penalty(function, *leaves):
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        grads = torch.autograd.grad(600 * function(*leaves, labels), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.float().square().sum() for g in grads), leaves)

    ours = of_penalty(causal_lm_loss, hidden, weight)
    theirs = of_penalty(reference, hidden.double(), weight.double())
    for mine, other in zip(ours, theirs, strict=True):
        assert relative_error(mine, other) < 5 * TOLERANCE[dtype]


def test_memory_stays_below_the_logits(monkeypatch):
    monkeypatch.undo()
    tokens, vocab, width = 16_384, 50_432, 256
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocab, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocab, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    old_bytes = torch.cuda.memory_allocated()
    causal_lm_loss(hidden, weight, labels).backward()
    assert torch.cuda.max_memory_allocated() - old_bytes < tokens * vocab * 2 / 2


def test_any_number_of_rows_is_compiled(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    weight = torch.randn(VOCAB, WIDTH, device="cuda", requires_grad=True)
    for rows in range(2, 40, 2):
        hidden = torch.randn(rows, WIDTH, device="cuda", requires_grad=True)
        labels = torch.randint(VOCAB, (rows,), device="cuda")
        options = {"z_loss": rows * 1e-5, "shift": False}
        value = causal_lm_loss(hidden, weight, labels, **options)
        right = reference(hidden.double(), weight.double(), labels, **options)
        assert relative_error(value.detach(), right.detach()) < TOLERANCE[torch.float32]
