"""`batch_invariant`: a token's logits have the same bits, however they are computed."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from emulated import gpu, install
from hypothesis import given, settings
from invariance import CASES, DTYPES, KINDS, Schedule, differs, model_of, schedules
from lm_kinds import borders, pad_rows, plain, tokens
from relative import relative_error
from table import needs_compiler
from torch import Tensor
from torch.autograd import forward_ad

import pararnn
from pararnn.base.errors import EngineError
from pararnn.engines.fused import mixing_cuda
from pararnn.lm import LanguageModel, LMConfig, quantise_weights, sample
from pararnn.lm.invariant import BY_ROWS, PLAIN, RowsRecurrentLayer
from pararnn.lm.mixers import MixerError
from pararnn.lm.quantise import DTYPES as FORMATS
from pararnn.lm.quantise import is_quantised
from pararnn.lm.rows_op import (
    rows_attention,
    rows_conv,
    rows_gated,
    rows_log_prob,
    rows_norm,
    rows_product,
    rows_rotate,
)
from pararnn.program.program import program_of
from pararnn.solve import prepare
from pararnn.solve import run as solved
from pararnn.zoo import MATRIX_CELLS

LONGEST = 23
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 40, "num_heads": 2}


@pytest.mark.parametrize("name", ["linear", "layer_norm"])
def test_layers_have_the_biases_of_pytorchs(name):
    """Mixers of users' own may ask for them."""
    sizes = (8, 8) if name == "linear" else (8,)
    rows, plain_layer = (getattr(layers, name)(*sizes) for layers in (BY_ROWS, PLAIN))
    torch.nn.init.normal_(plain_layer.bias)
    rows.load_state_dict(plain_layer.state_dict())
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(rows(x), plain_layer(x))


class ReadsOut(pararnn.Cell):
    states = ("h",)
    gates = ("a",)

    def step(self, state, gate, param):
        return torch.tanh(gate.a + state.h)

    def readout(self, state, gate, param):
        return torch.sigmoid(gate.a) * state.h


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
@settings(max_examples=4)
@given(schedules(LONGEST))
def test_schedules_do_not_change_a_bit(kind: str, dtype: torch.dtype, schedule) -> None:
    assert not differs(model_of(kind, dtype), schedule, LONGEST)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
@settings(max_examples=1000)
@given(schedules(LONGEST))
def test_a_thousand_schedules(kind: str, dtype: torch.dtype, schedule) -> None:
    assert not differs(model_of(kind, dtype), schedule, LONGEST)


def test_schedules_change_bits_without_the_option() -> None:
    """Else the tests above would say nothing."""
    fixed = [([LONGEST, 9, 2], [3, 4], way) for way in Schedule.WAYS]
    model = model_of("gru", torch.float32, False)
    assert any(differs(model, schedule, LONGEST) for schedule in fixed)


@pytest.mark.parametrize(("weights", "dtype"), list(zip(FORMATS, DTYPES, strict=True)), ids=str)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_weights_in_8_bits(weights: str, dtype: torch.dtype) -> None:
    pytest.importorskip("torchao")
    model = copy.deepcopy(model_of("gru", dtype))
    quantise_weights(model, weights)
    assert not any(differs(model, ([LONGEST, 9, 2], [3, 4], way), LONGEST) for way in Schedule.WAYS)
    prompt = tokens(3, 5)
    drawn, of_draws = sample(model, prompt, 9, return_log_probs=True)
    whole = torch.cat([prompt, drawn], 1)
    with torch.no_grad():
        assert torch.equal(model.log_probs(whole)[:, 5:], of_draws)
        exact = LanguageModel(model.config, dtype=torch.float64)
        state = model.state_dict()
        values = {
            name: value.dequantize() if is_quantised(value) else value
            for name, value in state.items()
        }
        exact.load_state_dict(values)
        limit = 1e-5 if dtype == torch.float32 else 3e-2
        assert relative_error(model(whole), exact(whole)) < limit


@pytest.mark.parametrize(("kind", "dtype"), CASES, ids=str)
def test_training_and_sampling_say_the_same(kind: str, dtype: torch.dtype) -> None:
    model, prompt = model_of(kind, dtype), tokens(3, 5)
    drawn, of_draws = sample(model, prompt, 9, generator=torch.Generator().manual_seed(1),
                             return_log_probs=True)  # fmt: skip
    whole = torch.cat([prompt, drawn], 1)
    chances = model.log_probs(whole)
    assert chances.requires_grad
    assert torch.equal(chances[:, 5:], of_draws)
    row = model.log_probs(whole.view(1, -1), cu_seq_lens=borders([14] * 3))
    assert torch.equal(row.view(3, 14), chances)
    by_logits = model.lm_head.log_prob(model(whole)[:, :-1].flatten(0, 1), whole[:, 1:].flatten())
    assert torch.equal(by_logits, chances[:, 1:].flatten())
    assert not chances[:, 0].any()
    padded, mask = pad_rows([whole[0, :9], whole[1]], "left")
    of_padded = model.log_probs(padded, padding_mask=mask)
    assert torch.equal(of_padded[0, 5:], chances[0, :9])
    assert torch.equal(of_padded[1], chances[1])
    assert not of_padded[0, :5].any()


def test_log_probabilities_without_the_option() -> None:
    model, prompt = model_of("gru", torch.float32, False), tokens(3, 5)
    generator = torch.Generator().manual_seed(1)
    drawn, chances = sample(model, prompt, 9, 0.5, generator, return_log_probs=True)
    whole = torch.cat([prompt, drawn], 1)
    logits = model(whole)[:, :-1].double().log_softmax(-1)
    wanted = logits.gather(-1, whole[:, 1:, None]).squeeze(-1)
    for ours in (chances, model.log_probs(whole)[:, 5:]):
        torch.testing.assert_close(ours.double(), wanted[:, 4:], rtol=0, atol=1e-5)
    none, no_chances = sample(model, prompt, 0, return_log_probs=True)
    assert none.shape == no_chances.shape == (3, 0)
    assert torch.equal(sample(model, prompt, 9, 0.5, generator.manual_seed(1)), drawn)


def test_gradients_are_those_of_the_plain_model() -> None:
    batch, mask = pad_rows([tokens(9), tokens(LONGEST)], "left")
    for kind in KINDS:
        grads = []
        for invariant in (True, False):
            model = model_of(kind, torch.float32, invariant)
            for loss in (model.loss(batch, padding_mask=mask, z_loss=1e-3),
                         model.log_probs(batch, padding_mask=mask).square().mean()):  # fmt: skip
                model.zero_grad()
                loss.backward()
                grads.append([p.grad.clone() for p in model.parameters()])
        for ours, theirs in ((grads[0], grads[2]), (grads[1], grads[3])):
            for a, b in zip(ours, theirs, strict=True):
                assert (a - b).abs().max() <= 1e-4 * b.abs().max()


def test_gradients_repeat() -> None:
    model, batch = model_of("gru", torch.bfloat16), tokens(3, 17)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model.loss(batch).backward()
        return [p.grad.clone() for p in model.parameters()]

    assert all(map(torch.equal, gradients(), gradients()))


def rows(count: int, *size: int, dtype: torch.dtype) -> Tensor:
    """Numbers of every size, with a column of large ones."""
    x = torch.randn(count, *size, dtype=torch.float64)
    x[..., 0] *= 1e3
    return (x * 10.0 ** torch.randint(-9, 1, (count, *[1] * len(size)))).to(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_a_row_alone_and_among_others(dtype: torch.dtype) -> None:
    count = 133
    x, gate = rows(count, 2, 37, dtype=dtype), torch.randn(count, 2, 37).to(dtype)
    weight, gain = torch.randn(2, 71, 37).to(dtype), torch.randn(37).to(dtype)
    taps, steps = torch.randn(4, 37).to(dtype), torch.randint(9, (1, count))
    target, halo = torch.randint(37, (count,)), torch.randn(1, 3, 37).to(dtype)
    in_8_bits, scale = (20 * torch.randn(2, 71, 37)).round().clamp(-127, 127), torch.rand(2, 71)

    def of_8_bits(kind: torch.dtype, span: slice) -> Tensor:
        return rows_product(x[span], in_8_bits.to(kind), scale).transpose(0, 1)

    functions = {
        "product": lambda s: rows_product(x[s], weight).transpose(0, 1),
        **{name: partial(of_8_bits, kind) for name, kind in FORMATS.items()},
        "rms": lambda s: rows_norm(x[s], None, gain, 1e-5, False),
        "gated rms": lambda s: rows_norm(x[s], gate[s], gain, 1e-5, False),
        "layer norm": lambda s: rows_norm(x[s], None, gain, 1e-5, True),
        "silu": lambda s: rows_gated(x[s], None),
        "gated": lambda s: rows_gated(x[s], gate[s]),
        "log prob": lambda s: rows_log_prob(gate[s, 0], target[s]),
    }
    for name, function in functions.items():
        whole = function(slice(None))
        for first, end in ((0, 1), (5, 6), (132, 133), (3, 67), (64, 133)):
            assert torch.equal(function(slice(first, end)), whole[first:end]), name
        torch.set_num_threads(3)
        assert torch.equal(function(slice(None)), whole), name
        torch.set_num_threads(1)
    u = gate[None, :, 0]
    whole = rows_conv(u, taps, gain, halo, steps)
    for cut in (1, 2, 50):
        before = torch.cat([halo, u[:, :cut]], 1)[:, -3:]
        after = rows_conv(u[:, cut:], taps, gain, before, steps[:, cut:])
        assert torch.equal(torch.cat([rows_conv(u[:, :cut], taps, gain, halo, steps[:, :cut]),
                                      after], 1), whole)  # fmt: skip


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_functions_are_pytorchs(dtype: torch.dtype) -> None:
    x, gate = rows(70, 33, dtype=dtype), torch.randn(70, 33).to(dtype)
    weight, target = torch.randn(50, 33).to(dtype), torch.randint(33, (70,))
    target[3] = -100
    gain, bias, taps = (torch.randn(n).to(dtype) for n in (33, 33, 132))
    wide = [t.double() for t in (x, gate, weight, gain)]
    f = torch.nn.functional
    value = wide[0] * f.silu(wide[1])
    u, kernel = x.view(2, 35, 33), taps.view(4, 33)
    since = torch.randint(6, (2, 35))
    halo = torch.randn(2, 3, 33).to(dtype)
    chances = f.log_softmax(wide[1], -1).gather(1, target.clamp_min(0)[:, None])[:, 0]
    linear = BY_ROWS.linear(33, 50, bias=False, dtype=dtype).requires_grad_(False)
    linear.weight.copy_(weight)
    pairs = [
        (linear(x), f.linear(wide[0], wide[2])),
        (rows_norm(x, gate, gain, 1e-9, False), f.rms_norm(value, (33,), wide[3], 1e-9)),
        (rows_norm(x, None, gain, 1e-9, True), f.layer_norm(wide[0], (33,), wide[3], None, 1e-9)),
        (rows_gated(x, gate), f.silu(wide[0]) * wide[1]),
        (rows_log_prob(gate, target), chances.where(target >= 0, 0)),
        (rows_conv(u, kernel, bias, halo, since),
         PLAIN.convolve(u.double(), kernel.double(), bias.double(), halo.double(), since)),
    ]  # fmt: skip
    q, k, v = (torch.randn(2, 3, n, 20).to(dtype) for n in (6, 9, 9))
    last = torch.arange(3, 9).expand(2, 6)
    index, low = torch.arange(9), torch.tensor([[0], [2]]).expand(2, 6)
    sees = ((index >= low[..., None]) & (index <= last[..., None]))[:, None]
    exact = f.scaled_dot_product_attention(q.double(), k.double(), v.double(), sees)
    pairs.append((rows_attention(q, k, v, low, last), exact.transpose(1, 2)))
    limit = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float64: 1e-13}[dtype]
    for index, (ours, theirs) in enumerate(pairs):
        error = (ours.double() - theirs).abs()
        scale = theirs.abs().amax(-1, keepdim=True) if theirs.ndim > 1 else theirs.abs() + 1
        assert (error <= limit * scale).all(), index


def test_gradients_of_the_operators() -> None:
    x, gate = (torch.randn(3, 2, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weight = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    gain = torch.randn(6, dtype=torch.float64, requires_grad=True)
    taps = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([1, 4, -100])
    check = torch.autograd.gradcheck
    assert check(rows_product, (x, weight))
    assert check(lambda x, weight: rows_product(x[:, :1], weight[:1]), (x, weight))
    in_8_bits, scale = torch.randint(-127, 128, (2, 5, 6), dtype=torch.int8), torch.rand(2, 5)
    assert check(lambda x: rows_product(x, in_8_bits, scale), (x,))
    assert check(lambda *args: rows_norm(*args, 1e-5, False), (x, gate, gain))
    assert check(lambda x, gain: rows_norm(x, None, gain, 1e-5, True), (x, gain))
    assert check(rows_gated, (x, gate))
    assert check(lambda x: rows_gated(x, None), (x,))
    assert check(lambda x: rows_log_prob(x[:, 0], target), (x,))
    assert check(BY_ROWS.scaled_sum, (x, gate, gain))
    assert check(lambda *args: rows_conv(*args, None, None), (x, taps, gain))
    q, k, v = (torch.randn(1, 2, n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 5, 5))
    seen = torch.tensor([[0, 0, 4]]), torch.tensor([[2, 3, 4]])
    assert check(lambda *args: rows_attention(*args, *seen), (q, k, v))
    cos, sin = torch.randn(2, 1, 1, 3, 4, dtype=torch.float64).unbind()
    assert check(lambda q: rows_rotate(q, cos, sin), (q,))


@pytest.mark.parametrize("kind", ["hybrid", "layer norm"])
def test_gradients_of_samples_at_once(kind: str) -> None:
    """Of several kinds of sums over rows, in a backward pass over a batch of gradients."""
    model, text = plain(kind, batch_invariant=True), tokens(2, 9)
    weights = [*model.parameters()]
    losses = model(text).log_softmax(-1)[..., 0].sum(1)
    at_once = torch.autograd.grad(losses, weights, torch.eye(2), True, is_grads_batched=True)
    for row in range(2):
        alone = torch.autograd.grad(losses[row], weights, retain_graph=True)
        for several, one in zip(at_once, alone, strict=True):
            torch.testing.assert_close(several[row], one)


def test_derivatives_without_formulas_are_refused() -> None:
    model, text = plain("hybrid", batch_invariant=True), tokens(2, 9)
    weights = {name: x.detach() for name, x in model.named_parameters()}
    head = {"lm_head.weight": weights["lm_head.weight"]}

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, weights, (row[None],))
        return torch.nn.functional.cross_entropy(logits[0, :-1], row[1:])

    def jvp(some: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.jvp(lambda some: loss({**weights, **some}, row), (some,), (some,))[1]

    losses = torch.func.vmap(loss, (None, 0))
    grads = torch.func.vmap(torch.func.grad(loss), (None, 0))
    for derive in (torch.func.grad(loss), jvp):
        for some in (weights, head):
            with pytest.raises(EngineError, match=r"batch_invariant=True.*loss\.backward"):
                derive(some, text[0])
    with pytest.raises(EngineError, match=r"batch_invariant=True.*in a loop"):
        grads(weights, text)
    with pytest.raises(EngineError, match="batch_invariant=True"):
        torch.func.jvp(lambda some: losses(some, text), (weights,), (weights,))
    with forward_ad.dual_level():
        assert loss(weights, text[0]).isfinite()  # nothing has a tangent
        duals = {name: forward_ad.make_dual(x, x) for name, x in weights.items()}
        with pytest.raises(EngineError, match="batch_invariant=True"):
            loss(duals, text[0])
    expected = torch.stack([loss(weights, row) for row in text])
    torch.testing.assert_close(losses(weights, text), expected)


@pytest.mark.thorough
def test_compiled_blocks_have_the_bits_of_eager_ones() -> None:
    eager, batch = model_of("gru", torch.bfloat16), tokens(2, 12)
    model = LanguageModel(eager.config, dtype=torch.bfloat16)
    model.load_state_dict(eager.state_dict())
    for block in model.backbone.layers:
        block.compile(fullgraph=True, backend="aot_eager")
    assert torch.equal(model.log_probs(batch), eager.log_probs(batch))


def test_what_bits_would_depend_on_is_refused() -> None:
    sizes = {**SIZES, "vocab_size": 48, "batch_invariant": True}
    for solver, backend in (("newton", "auto"), ("chunks", "auto"), ("auto", "torch")):
        with pytest.raises(EngineError, match="leave solver and backend at 'auto'"):
            LMConfig(**sizes, solver=solver, backend=backend)
    with pytest.raises(MixerError, match="take 'rnn', 'matrix' or 'attention'"):
        LanguageModel(LMConfig(**sizes, mixers=("rnn", "user_mixers:Decay")))
    with pytest.raises(ValueError, match="takes no layer with recompute_gates"):
        LanguageModel(LMConfig(**sizes, recompute_gates=True))
    with pytest.raises(ValueError, match="a cell with a readout"):
        LanguageModel(LMConfig(**sizes, cell="test_lm_invariant:ReadsOut"))
    model = LanguageModel(LMConfig(**sizes))
    with pararnn.using(solver="newton"), pytest.raises(EngineError, match="loop alone"):
        model(tokens(1, 5))
    with pararnn.using(backend="torch"), pytest.raises(EngineError, match="loop alone"):
        model(tokens(1, 1), model.new_cache())


@pytest.mark.parametrize("kind", ["gru", "hybrid"])
def test_models_are_copied_and_pickled(kind: str) -> None:
    model, batch = model_of(kind, torch.float32), tokens(2, 9)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin.log_probs(batch), model.log_probs(batch))


def test_explain_names_the_option() -> None:
    layer = model_of("gru", torch.float32).recurrent_layers()[0]
    explanation = pararnn.explain(layer, (2, 100_000, 24))
    assert (explanation.solver, explanation.backend) == ("sequential", "fused")
    assert "batch_invariant=True takes the kernels of the loop alone" in str(explanation)
    assert "bits would depend on the batch" in explanation.others["newton", "fused"]


def test_transformers_models_take_the_option() -> None:
    pytest.importorskip("transformers")
    from lm_kinds import hugging

    sizes = {**SIZES, "batch_invariant": True}
    theirs, batch = hugging("gru", **sizes), tokens(5, 12)
    assert theirs.config.batch_invariant
    with torch.no_grad():
        logits = theirs(batch).logits
        assert torch.equal(theirs(batch[3:4]).logits, logits[3:4])
        assert torch.equal(plain("gru", **sizes)(batch), logits)


@torch.no_grad()
def test_static_caches_of_transformers_have_the_same_bits() -> None:
    """Attention reads no free place of a cache behind the tokens."""
    transformers = pytest.importorskip("transformers")
    from lm_kinds import hugging

    model = hugging("attention", **SIZES, batch_invariant=True)
    batch, mask = pad_rows([tokens(5, seed=3), tokens(2, seed=4)], "left")
    for rows, options in ((tokens(2, 5), {}), (batch, {"attention_mask": mask})):
        cache = transformers.StaticCache(config=model.config, max_cache_len=9)
        with_cache, without = (
            model(rows, **options, **more).logits[options.get("attention_mask", rows) > 0]
            for more in ({"past_key_values": cache}, {"use_cache": False})
        )
        assert torch.equal(with_cache, without)
        options |= {"max_new_tokens": 8, "do_sample": False}
        static = model.generate(rows, cache_implementation="static", **options)
        assert torch.equal(static, model.generate(rows, **options))


@torch.no_grad()
def test_masks_by_keys_with_holes_are_refused() -> None:
    pytest.importorskip("transformers")
    from lm_kinds import hugging

    model, plain_model = (hugging("attention", **SIZES, batch_invariant=x) for x in (True, False))
    batch = tokens(2, 6)
    window = torch.ones(6, 6, dtype=torch.bool).tril().triu(-2)[None, None]
    heads = torch.cat([window, window.triu(-1)], 1)
    holes = window.tril().triu(-9).clone()
    holes[..., 4, 3] = False
    expected = plain_model(batch, attention_mask=window).logits
    torch.testing.assert_close(model(batch, attention_mask=window).logits, expected)
    for mask in (heads, holes):
        plain_model(batch, attention_mask=mask)
        with pytest.raises(ValueError, match="a query sees one piece of the keys"):
            model(batch, attention_mask=mask)


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", ["gru", "lstm", "head-gru", "head-lstm", "layer-norm-lstm"])
def test_cuda_kernels_of_layers(cell: str, dtype: torch.dtype, monkeypatch) -> None:
    """Compiled for a CPU. In training too, where kernels would save pre-activations; on so few
    cores the number of rows would choose blocks of 8 rows."""
    cores, width = (4, 128) if "norm" in cell else (1, 40)
    install(gpu(cores=cores), monkeypatch)
    monkeypatch.setattr(mixing_cuda, "FEW_WARPS", 0)
    layer = RowsRecurrentLayer(pararnn.CELLS[cell], width, width, num_heads=2, dtype=dtype)
    x = torch.randn(9, 7, width).to(dtype)
    trained, _ = layer(x)
    with torch.no_grad():
        whole, _ = layer(x)
        one, state = layer(x[4:5, :3])
        rest, _ = layer(x[4:5, 3:], state)
        step, _ = layer.step(x[:2, 0])
        packed, _ = layer(x[2:4].reshape(1, 14, width), cu_seqlens=torch.tensor([0, 7, 14]))
    assert torch.equal(trained.detach(), whole)
    assert torch.equal(torch.cat([one, rest], 1)[0], whole[4])
    assert torch.equal(step, whole[:2, 0])
    assert torch.equal(packed.view(2, 7, width), whole[2:4])


@pytest.mark.thorough
@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", ["m2rnn", "gated-delta", "kda"])
def test_cuda_kernels_of_matrix_cells(cell: str, dtype: torch.dtype, monkeypatch) -> None:
    """Compiled for a CPU: steps are beyond a checkpoint, and cuts before and after it."""
    install(gpu(), monkeypatch)
    made = MATRIX_CELLS[cell](12, num_heads=2, K=4)
    x = torch.randn(5, 37, 2, made.head_sizes.width).to(dtype)

    def run(gates: Tensor, initial: Tensor | None = None, **options) -> tuple[Tensor, Tensor]:
        args = prepare(made, gates.unsqueeze(2), initial, **options).with_options(one_layout=True)
        outputs, final, _, _ = solved(program_of(made), args, "sequential", "fused")
        return outputs[0], final[0]

    leaf = x.clone().requires_grad_()
    trained, last = run(leaf)
    whole, _ = run(x)
    assert torch.equal(trained.detach(), whole)
    loop, last_of_loop = pararnn.solve(made, leaf, solver="sequential", backend="torch")
    grads = [
        torch.autograd.grad(output.float().sum() + states.sum(), leaf)[0]
        for output, states in ((trained, last), (loop, last_of_loop))
    ]
    assert relative_error(grads[0], grads[1]) < (2e-2 if dtype == torch.bfloat16 else 1e-4)
    state, parts = None, []
    for chunk in x[2:3].split([1, 17, 19], 1):
        part, state = run(chunk, state)
        parts.append(part)
    assert torch.equal(torch.cat(parts, 1)[0], whole[2])
    packed, _ = run(x[1:3].reshape(1, 74, 2, -1), cu_seqlens=torch.tensor([0, 37, 74]))
    assert torch.equal(packed.view(2, 37, *whole.shape[2:]), whole[1:3])


@needs_compiler
@pytest.mark.thorough  # compiling with -O3
@pytest.mark.usefixtures("as_shipped")
@torch.no_grad()
def test_small_heads_have_the_same_bits_in_any_batch_with_the_users_flags():
    """Compilers choose for each number of rows whether a product and a sum are rounded once."""
    layer = LanguageModel(
        LMConfig(
            16, 1, vocab_size=16, num_heads=2, cell="head-elman", batch_invariant=True,
            intermediate_size=16,
        )
    ).backbone.layers[0].mixer.rnn  # fmt: skip
    x = torch.randn(8, 9, 16)
    whole = layer(x)[0]
    for rows in (1, 2, 5):
        assert torch.equal(torch.cat([layer(some)[0] for some in x.split(rows)]), whole)
