"""The chunked loss against PyTorch's: values, gradients, dtypes, and sizes of tensors."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from relative import relative_error
from torch import func, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pararnn.lm import LanguageModel, LMConfig, causal_lm_loss, loss

VOCAB = 37
PER_CHUNK = 16
"""Rows of a chunk here: 3 x 21 tokens are three chunks and a last one of 15 rows."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_LOGITS", {"cpu": PER_CHUNK * VOCAB + 5})


def tensors(*shape: int, dtype=torch.float32, width: int = 8, scale: float = 1.0):
    """Hidden, weight, and labels of which every fifth is ignored."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*shape, width, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(VOCAB, width, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCAB, shape, generator=generator)
    labels.view(-1)[::5] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def reference(hidden, weight, labels, shift=True, z_loss=0.0, num_items=None):
    """Compute the same in plain PyTorch, with all logits at once."""
    logits = F.linear(hidden, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if shift:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    logits, labels = logits.reshape(-1, VOCAB), labels.reshape(-1)
    divisor = (labels != -100).sum() if num_items is None else num_items
    squares = logits[labels != -100].logsumexp(-1).square().sum()
    return (F.cross_entropy(logits, labels, reduction="sum") + z_loss * squares) / divisor


def results(function, hidden, weight, labels, factor=1.0, **options):
    value = function(hidden, weight, labels, **options)
    return value.detach(), *torch.autograd.grad(value * factor, (hidden, weight))


def assert_same(args, tolerance=1e-6, **options):
    ours, theirs = results(causal_lm_loss, *args, **options), results(reference, *args, **options)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == other.dtype
        assert mine.shape == other.shape
        assert other.abs().max() > 0
        assert relative_error(mine, other) < tolerance


OPTIONS = {
    "plain": {},
    "own positions": {"shift": False},
    "z-loss": {"z_loss": 0.1},
    "divided": {"num_items": 1000, "z_loss": 0.1},
    "divided by a tensor": {"num_items": torch.tensor(3), "z_loss": 0.1},
    "scaled": {"factor": 2.5, "z_loss": 0.1},
    "a mean's gradients": {"factor": 1e-6, "z_loss": 1e-4},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", [(3, 21), (63,), (1, 16), (40, 2)], ids=str)
def test_equals_cross_entropy(shape, options):
    assert_same(tensors(*shape), **options)


def test_large_logits():
    hidden, weight, labels = tensors(4, 50, scale=40.0)
    ours, plain = (
        results(function, hidden, weight, labels, z_loss=1e-2)
        for function in (causal_lm_loss, reference)
    )
    exact = results(reference, hidden.double(), weight.double(), labels, z_loss=1e-2)
    for mine, other, right in zip(ours, plain, exact, strict=True):
        assert relative_error(mine, right) < max(1e-6, 2 * relative_error(other, right))


@pytest.mark.parametrize(
    ("shape", "logits", "tolerance", "z_loss"),
    [
        ((2, 5), 5, 1e-6, 0.1),  # a chunk of less than the vocabulary
        # Of 8,184 float32 products the machine chooses the order of the sum: 3e-6 off on some.
        ((8, 1024), PER_CHUNK * VOCAB, 1e-5, 1e-4),
    ],
)
def test_chunks_of_any_size_and_number(shape, logits, tolerance, z_loss, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_LOGITS", {"cpu": logits})
    assert_same(tensors(*shape), tolerance, z_loss=z_loss)


def test_gradcheck_in_float64():
    *leaves, labels = tensors(2, 10, dtype=torch.float64, width=3)
    assert torch.autograd.gradcheck(
        lambda *args: causal_lm_loss(*args, labels, z_loss=0.1), leaves, atol=1e-7, rtol=1e-6
    )
    assert causal_lm_loss(*leaves, labels).dtype == torch.float64


def test_labels_are_not_changed_and_of_any_integer_dtype():
    hidden, weight, labels = tensors(2, 30)
    copy = labels.clone()
    value = causal_lm_loss(hidden, weight, labels)
    assert torch.equal(labels, copy)
    assert torch.equal(causal_lm_loss(hidden, weight, labels.to(torch.int16)), value)


def test_a_loss_without_labels_is_nan_or_zero():
    hidden, weight, labels = tensors(2, 30)
    no_labels = torch.full_like(labels, -100)
    assert causal_lm_loss(hidden, weight, no_labels, z_loss=1.0).isnan()
    value, *grads = results(causal_lm_loss, hidden, weight, no_labels, num_items=7, z_loss=1.0)
    assert value == 0
    assert not any(grad.any() for grad in grads)
    for steps in (0, 1):  # a row of one token predicts nothing
        empty = causal_lm_loss(hidden[:, :steps], weight, labels[:, :steps], num_items=7)
        assert empty == 0


def test_ignored_rows_may_hold_anything():
    hidden, weight, labels = tensors(30)
    spoilt = hidden.detach().clone()
    spoilt[labels == -100] = torch.inf
    spoilt.requires_grad_()
    weight = weight.detach()
    grads = []
    for leaf in (hidden, spoilt):
        value = causal_lm_loss(leaf, weight, labels, shift=False, z_loss=0.1)
        grads += torch.autograd.grad(value, leaf)
    assert torch.equal(*grads)
    assert not grads[0][labels == -100].any()


def test_gradients_of_tied_weights_add_up():
    _, weight, labels = tensors(2, 30)
    tokens = labels.clamp(min=0)

    def through_embedding(function):
        return torch.autograd.grad(function(F.embedding(tokens, weight), weight, labels), weight)

    ours, theirs = through_embedding(causal_lm_loss), through_embedding(reference)
    assert relative_error(ours[0], theirs[0]) < 1e-6


@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_inputs_get_no_gradient(frozen):
    *leaves, labels = tensors(2, 30)
    leaves[frozen].requires_grad_(False)
    other = leaves[1 - frozen]
    (grad,) = torch.autograd.grad(causal_lm_loss(*leaves, labels), other)
    (right,) = torch.autograd.grad(reference(*leaves, labels), other)
    assert relative_error(grad, right) < 1e-6


class Recorder(TorchDispatchMode):
    """Recorder of the sizes of floating results, and of the number of products."""

    def __init__(self):
        super().__init__()
        self.sizes, self.products = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if torch.is_tensor(tensor) and tensor.is_floating_point():
                self.sizes.append(tensor.numel())
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default)
        return out


def test_logits_of_one_chunk_at_a_time():
    hidden, weight, labels = tensors(20, 21)
    with Recorder() as recorder:
        causal_lm_loss(hidden, weight, labels, z_loss=0.1).backward()
    assert max(recorder.sizes) == max(hidden.numel(), PER_CHUNK * VOCAB)
    assert hidden.numel() < labels.numel() * VOCAB / 4


def test_only_needed_gradients_are_computed():
    hidden, weight, labels = tensors(2 * PER_CHUNK)
    products = {}
    with Recorder() as recorder, torch.no_grad():
        assert not causal_lm_loss(hidden, weight, labels).requires_grad
    products["no grad"] = recorder.products
    for name, leaves in {
        "neither": (hidden.detach(), weight.detach()),
        "hidden": (hidden, weight.detach()),
        "weight": (hidden.detach(), weight),
        "both": (hidden, weight),
    }.items():
        with Recorder() as recorder:
            causal_lm_loss(*leaves, labels)
        products[name] = recorder.products
    assert products == {"no grad": 2, "neither": 2, "hidden": 4, "weight": 4, "both": 6}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype):
    tolerance = 2 * torch.finfo(dtype).eps
    args = tensors(4, 50, dtype=dtype)
    assert causal_lm_loss(*args).dtype == torch.float32
    assert_same(args, tolerance, z_loss=1e-2)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("function", [partial(causal_lm_loss, z_loss=0.1), loss.token_log_probs])
def test_gradients_can_be_differentiated(function, batch_invariant):
    """By rows, weights and what arrives; of several chunks, and of one input alone."""
    hidden, weight, labels = tensors(2, 12, dtype=torch.float64, width=3)

    def of(hidden, weight):
        return function(hidden, weight, labels, batch_invariant=batch_invariant)

    assert torch.autograd.gradcheck(of, (hidden, weight))
    assert torch.autograd.gradgradcheck(of, (hidden, weight))
    assert torch.autograd.gradgradcheck(lambda weight: of(hidden.detach(), weight), (weight,))
    assert torch.autograd.gradgradcheck(lambda hidden: of(hidden, weight.detach()), (hidden,))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("function", [causal_lm_loss, loss.token_log_probs])
def test_several_gradients_arrive_at_once(function, batch_invariant):
    hidden, weight, labels = tensors(3, 21, dtype=torch.float64)
    outputs = function(hidden, weight, labels, batch_invariant=batch_invariant)
    arriving = torch.randn(4, *outputs.shape, dtype=torch.float64)
    inputs = hidden, weight
    options = {"is_grads_batched": True, "retain_graph": True}
    together = torch.autograd.grad(outputs, inputs, arriving, **options)
    for index, grad in enumerate(arriving):
        alone = torch.autograd.grad(outputs, inputs, grad, retain_graph=True)
        for mine, other in zip(together, alone, strict=True):
            torch.testing.assert_close(mine[index], other)


def plain_log_probs(hidden, weight, labels):
    chances = F.linear(hidden, weight).log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])
    return chances[..., 0].where(labels != -100, 0.0)


def log_prob_squares(log_probs, *args):
    return log_probs(*args).square().sum()


PAIRS = {
    "loss": [partial(f, z_loss=0.1, num_items=3) for f in (causal_lm_loss, reference)],
    "log-probabilities": [
        partial(log_prob_squares, f) for f in (loss.token_log_probs, plain_log_probs)
    ],
}
TRANSFORMS = {
    "grad": lambda f, args: func.grad(f, (0, 1))(*args),
    "hessian": lambda f, args: func.hessian(f, (0, 1))(*args),
    "direction": lambda f, args: func.jvp(f, args, args),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=PAIRS)
def test_transforms_are_those_of_plain_functions(ours, theirs, name):
    *args, labels = tensors(3, 7, dtype=torch.float64)
    args = tuple(arg.detach() for arg in args)
    results = [
        tree_leaves(TRANSFORMS[name](lambda h, w, f=f: f(h, w, labels), args))
        for f in (ours, theirs)
    ]
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=PAIRS)
def test_gradients_of_samples(ours, theirs):
    hidden, weight, labels = tensors(3, 7, dtype=torch.float64)
    of_samples = func.vmap(func.grad(ours, 1), (0, None, 0))(hidden, weight, labels)
    for index, of_sample in enumerate(of_samples):
        expected = torch.autograd.grad(theirs(hidden[index], weight, labels[index]), weight)
        torch.testing.assert_close(of_sample, *expected)


def test_gradients_are_scaled_without_rounding_the_scale():
    args = tensors(64, dtype=torch.bfloat16)
    options = {"shift": False, "num_items": 1}
    _, *whole = results(causal_lm_loss, *args, **options)
    _, *third = results(causal_lm_loss, *args, factor=1 / 3, **options)
    for grad, part in zip(whole, third, strict=True):
        error = (part.double() * 3 - grad.double()).abs() / grad.double().abs().clamp_min(1e-30)
        assert error.max() <= 2**-7  # both are rounded once
        ours, right = part.double().flatten() * 3, grad.double().flatten()
        assert abs(ours @ right / (right @ right) - 1) < 2**-11  # 1/3 in bfloat16 is 2^-9 off


def test_the_gradient_of_a_bfloat16_weight_is_summed_in_float32(monkeypatch):
    rows, width = 4096, 2
    monkeypatch.setattr(loss, "CHUNK_LOGITS", {"cpu": VOCAB})  # a row a chunk
    hidden = torch.ones(rows, width, dtype=torch.bfloat16)
    weight = torch.zeros(VOCAB, width, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(rows, dtype=torch.long)
    (grad,) = torch.autograd.grad(causal_lm_loss(hidden, weight, labels, shift=False), weight)
    right = torch.full((VOCAB, width), 1 / VOCAB)
    right[0] -= 1
    torch.testing.assert_close(grad.float(), right, rtol=2**-7, atol=0)


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(hidden_dtype):
    hidden, weight, labels = tensors(4, 50)
    hidden = hidden.detach().to(hidden_dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = results(causal_lm_loss, hidden, weight, labels, z_loss=1e-2)
    half = (hidden.detach().bfloat16().requires_grad_(), weight.detach().bfloat16())
    theirs = results(reference, half[0], half[1].requires_grad_(), labels, z_loss=1e-2)
    assert [out.dtype for out in ours] == [torch.float32, hidden_dtype, torch.float32]
    for mine, other in zip(ours, theirs, strict=True):
        assert relative_error(mine, other) < 2**-7
    assert not torch.equal(ours[2], ours[2].bfloat16().float())  # a sum in float32, not rounded


def test_autocast_does_not_change_float64():
    args = tensors(2, 20, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = results(causal_lm_loss, *args)
    for mine, other in zip(ours, results(reference, *args), strict=True):
        assert relative_error(mine, other) < 1e-12


@pytest.mark.filterwarnings("ignore")
@pytest.mark.thorough
def test_a_compiled_caller():
    args = tensors(2, 30)

    @torch.compile(backend="aot_eager")
    def step(hidden, weight, labels):
        return causal_lm_loss(hidden * 2, weight, labels, z_loss=0.1) + 1

    def plain(hidden, weight, labels):
        return reference(hidden * 2, weight, labels, z_loss=0.1) + 1

    for mine, other in zip(results(step, *args), results(plain, *args), strict=True):
        assert relative_error(mine, other) < 1e-6


WRONG = {
    "labels must be": {"labels": torch.zeros(2, 3, dtype=torch.long)},
    "hidden must be": {"weight": torch.zeros(VOCAB, 9)},
    "one dtype outside of autocast": {"weight": torch.zeros(VOCAB, 8, dtype=torch.bfloat16)},
    "num_items must be positive": {"num_items": 0},
}


@pytest.mark.parametrize("message", WRONG)
def test_shapes_and_dtypes_that_do_not_fit_raise(message):
    args = dict(zip(("hidden", "weight", "labels"), tensors(2, 30), strict=True))
    with pytest.raises(ValueError, match=message):
        causal_lm_loss(**args | WRONG[message])


@pytest.mark.parametrize("labels", [None, torch.zeros(1, 3, dtype=torch.long)], ids=str)
def test_a_head_with_a_bias_is_refused(labels):
    head = loss.Head(4, 5, bias=True)
    with pytest.raises(ValueError, match="no bias"):
        head(torch.randn(1, 3, 4), labels)


def _derivatives(model, tokens):
    """A direction, a Hessian times a vector and a penalty's gradient, by torch.func and in forward
    mode."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    vector = {name: torch.full_like(p, 0.1) for name, p in weights.items()}
    module = Losses(model)

    def loss(weights):
        return functional_call(module, {f"model.{k}": v for k, v in weights.items()}, (tokens,))

    def penalty(weights):
        return sum(g.square().sum() for g in func.grad(loss)(weights).values())

    with forward_ad.dual_level():
        duals = {k: forward_ad.make_dual(v, vector[k]) for k, v in weights.items()}
        tangent = forward_ad.unpack_dual(loss(duals)).tangent
    return [
        *func.jvp(loss, (weights,), (vector,)),
        tangent,
        func.jvp(func.grad(loss), (weights,), (vector,))[1],
        func.grad(penalty)(weights),
    ]


class Losses(nn.Module):
    """A model whose call is the loss."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model.loss(tokens)


def test_derivatives_of_any_order_through_attention():
    """Are those of PyTorch's operations: its kernels for attention have one gradient."""
    model = LanguageModel(LMConfig(16, 2, 20, num_heads=2, mixers=("rnn", "attention"))).double()
    tokens = torch.randint(20, (2, 7))
    ours = _derivatives(model, tokens)
    with sdpa_kernel(SDPBackend.MATH):
        gradient = torch.autograd.grad(model.loss(tokens), [*model.parameters()], create_graph=True)
        penalty = sum(g.square().sum() for g in gradient)
        of_penalty = torch.autograd.grad(penalty, [*model.parameters()], retain_graph=True)
        vector = [torch.full_like(p, 0.1) for p in model.parameters()]
        product = torch.autograd.grad(gradient, [*model.parameters()], vector)
    slope = sum((g * v).sum() for g, v in zip(gradient, vector, strict=True))
    expected = [model.loss(tokens), slope, slope, *product, *of_penalty]
    for mine, other in zip(tree_leaves(ours), expected, strict=True):
        torch.testing.assert_close(mine, other.detach())
