"""Language models on a GPU: every way to run them says the same."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pararnn.base.device import CUDA
from pararnn.lm import LanguageModel, LMConfig, replay, sample
from pararnn.lm.backbone import Block

KINDS = {
    "gru": {"cell": "gru"},
    "lstm": {"cell": "lstm"},
    "attention": {"mixers": ("attention",) * 3},
    "hybrid": {"mixers": ("rnn", "attention", "rnn")},
}
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.15}
"""On logits of unit variance; bfloat16 rounds the residual stream of every block anew."""
VOCAB = 211


def make(kind, dtype, device="cuda", **options):
    torch.manual_seed(0)
    config = LMConfig(256, 3, VOCAB, num_heads=4, num_attention_heads=4, **KINDS[kind], **options)
    return LanguageModel(config, device=device, dtype=dtype)


def tokens(*size, device="cuda"):
    generator = torch.Generator(device).manual_seed(1)
    return torch.randint(VOCAB, size, device=device, generator=generator)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_all_ways_agree(kind, dtype):
    model, batch, limit = make(kind, dtype), tokens(3, 300), LIMITS[dtype]
    whole = model(batch)
    cache = model.new_cache()
    parts = [model(part, cache) for part in batch.split([100, 1, 70, 129], 1)]
    assert (torch.cat(parts, 1) - whole).abs().max() < limit
    cache = model.new_cache()
    steps = [model(batch[:, t : t + 1], cache) for t in range(40)]
    assert (torch.cat(steps, 1) - whole[:, :40]).abs().max() < limit
    lengths = [300, 171, 2]
    left_rows, mask = torch.zeros_like(batch), torch.zeros_like(batch)
    for row, length in enumerate(lengths):
        left_rows[row, 300 - length :] = batch[row, :length]
        mask[row, 300 - length :] = 1
    padded_logits = model(left_rows, padding_mask=mask)
    one_row = torch.cat([batch[row, :length] for row, length in enumerate(lengths)])[None]
    borders = torch.tensor([0, 300, 471, 473], device="cuda")
    row_of = model(one_row, cu_seq_lens=borders)[0]
    for row, length in enumerate(lengths):
        wanted = whole[row, :length]
        assert (padded_logits[row, 300 - length :] - wanted).abs().max() < limit
        assert (row_of[borders[row] : borders[row + 1]] - wanted).abs().max() < limit


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_and_called_steps_draw_the_same_tokens(kind, dtype, monkeypatch):
    model, prompt, calls = make(kind, dtype), tokens(3, 9), []
    forward = Block.forward

    def count(block, *args):
        calls.append(block)
        return forward(block, *args)

    monkeypatch.setattr(Block, "forward", count)
    monkeypatch.setattr(replay, "takes", lambda *_: False)  # fused steps round otherwise

    def draw():
        calls.clear()
        shared = torch.Generator("cuda").manual_seed(0)
        return [sample(model, prompt, 40, t, shared) for t in (0, 1.0)]

    by_graph, blocks = draw(), len(model.backbone.layers)
    assert len(calls) == 2 * blocks * 3  # the prompt, a step, and its recording
    monkeypatch.setattr(replay, "replayable", lambda *_, **__: False)
    by_calls = draw()
    assert len(calls) == 2 * blocks * 40
    if kind in ("gru", "lstm"):
        assert all(map(torch.equal, by_graph, by_calls))
    else:  # keys in pages are summed up in another order
        assert all(
            torch.equal(x[:, :10], y[:, :10]) for x, y in zip(by_graph, by_calls, strict=True)
        )


def test_keys_without_kernels_are_not_recorded():
    """No kernel reads pages of float64."""
    model, prompt = make("hybrid", torch.float64), tokens(3, 9)
    calls = model(torch.cat([prompt, sample(model, prompt, 12, 0)], 1))
    assert torch.equal(calls[:, 8:-1].argmax(-1), sample(model, prompt, 12, 0))


GPUS = [
    "cuda:0",
    pytest.param(
        "cuda:1",
        marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU"),
    ),
]


@pytest.mark.parametrize("gpu", GPUS)
def test_recordings_are_freed(gpu):
    model, prompt = make("gru", torch.bfloat16, gpu), tokens(2, 9, device=gpu)
    sample(model, prompt, 40)
    torch.cuda.synchronize(gpu)
    old_bytes = torch.cuda.memory_allocated(gpu)
    for _ in range(12):
        sample(model, prompt, 40)
    assert torch.cuda.memory_allocated(gpu) <= old_bytes


@pytest.mark.parametrize("gpu", GPUS)
def test_models_of_any_gpu_are_recorded(gpu, monkeypatch):
    model, prompt = make("lstm", torch.float32).to(gpu), tokens(2, 9, device=gpu)
    first = sample(model, prompt, 40, 0)
    monkeypatch.setattr(replay, "replayable", lambda *_, **__: False)
    assert torch.equal(first, sample(model, prompt, 40, 0))


def test_a_recording_that_fails_leaves_random_numbers_and_older_recordings():
    device, x = torch.device("cuda", 0), torch.ones(3, device="cuda")
    torch.manual_seed(0)
    with CUDA.capture(device) as replay:
        drawn = torch.randn(2, device="cuda")
    replay()
    first = drawn.tolist()

    def fail():
        with CUDA.capture(device):
            torch.randn(2, device="cuda")
            x.sum().item()  # waits for the GPU, which a recording does not permit

    with pytest.raises(RuntimeError, match="captur"):
        fail()
    second = torch.randn(2, device="cuda").tolist()
    replay()
    assert len({*first, *second, *drawn.tolist()}) == 6
    torch.manual_seed(0)
    replay()
    assert drawn.tolist() == first


def test_no_garbage_is_collected_while_recording():
    class Knot:
        """An object that only a collection frees."""

        def __init__(self):
            self.me, self.graph = self, torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.drawn = x * 2

    x, thresholds = torch.ones(3, device="cuda"), gc.get_threshold()
    knot = weakref.ref(Knot())
    try:
        with CUDA.capture(x.device) as replay:
            gc.set_threshold(1)
            y = x + 1
            objects = [[index] for index in range(1000)]
            assert knot() is not None
    finally:
        gc.set_threshold(*thresholds)
    assert gc.isenabled()
    assert len(objects) == 1000
    replay()
    assert y.tolist() == [2, 2, 2]


def test_recordings_leave_cached_memory_where_there_is_enough():
    x = torch.ones(3, device="cuda")
    torch.empty(2**24, device="cuda")  # freed at once
    reserved = torch.cuda.memory_reserved()
    with CUDA.capture(x.device):
        x.add_(1)
    assert torch.cuda.memory_reserved() >= reserved


def test_threads_and_streams_record_at_once():
    model, prompts = make("gru", torch.float32), [tokens(2, n) for n in (5, 9, 13, 17)]
    wanted = [sample(model, prompt, 40, 0) for prompt in prompts]
    torch.cuda.synchronize()

    def draw(number, on_its_own_stream):
        stream = torch.cuda.Stream() if on_its_own_stream else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            got = [sample(model, prompts[number], 40, 0) for _ in range(5)]
        stream.synchronize()
        return all(torch.equal(one, wanted[number]) for one in got)

    for on_its_own_stream in (False, True):
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(draw, range(4), [on_its_own_stream] * 4))


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_growing_caches_do_not_plan_kernels(kind):
    model = make(kind, torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        sample(model, tokens(1, 7), 5, temperature=0)
    names = {event.name for event in profile.events() if "attention" in event.name}
    assert names
    assert not [name for name in names if "cudnn" in name]


@pytest.mark.parametrize("steps", [2048, 16_384])
@pytest.mark.parametrize("kind", ["gru", "lstm", "hybrid"])
@torch.no_grad()
def test_documents_of_a_row_are_independent(kind, steps):
    model = make(kind, torch.bfloat16)
    first, second = tokens(1, steps), tokens(1, steps)
    second[:, steps // 3 : steps // 2] = (second[:, steps // 3 : steps // 2] + 1) % VOCAB
    borders = torch.tensor([0, steps // 3, steps // 2, steps], device="cuda")
    one, other = model(first, cu_seq_lens=borders), model(second, cu_seq_lens=borders)
    assert not torch.equal(one, other)
    for part in (slice(0, steps // 3), slice(steps // 2, steps)):
        assert torch.equal(one[:, part], other[:, part])


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_blocks_give_the_same_loss_and_gradients(kind):
    model, batch = make(kind, torch.float32), tokens(4, 130)
    wanted = model.loss(batch, z_loss=1e-4)
    wanted.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for block in model.backbone.layers:
        block.compile(fullgraph=True)
    got = model.loss(batch, z_loss=1e-4)
    got.backward()
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0)
    for name, p in model.named_parameters():
        scale = grads[name].abs().max()
        assert (p.grad - grads[name]).abs().max() <= 1e-4 * scale, name


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("kind", ["gru", "hybrid"])
@torch.no_grad()
def test_generate_with_a_static_cache(kind, invariant):
    pytest.importorskip("transformers")
    from pararnn.lm.hf import ParaRNNConfig, ParaRNNForCausalLM

    torch.manual_seed(0)
    config = make(kind, torch.float32, batch_invariant=invariant).config
    model = ParaRNNForCausalLM(ParaRNNConfig.of_lm(config)).cuda().eval()
    prompt = tokens(2, 9)
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    plain = model.generate(prompt, **options)
    static = model.generate(prompt, cache_implementation="static", **options)
    assert torch.equal(plain, static)
